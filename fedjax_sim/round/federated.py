"""Federated learning around one server, as one compiled program: a round is invite, collect, close."""

from __future__ import annotations

from typing import Annotated, Literal

import jax
from jax.sharding import Mesh

from fedjax_sim import engine, tree, validate
from fedjax_sim.round.compatibility import check_parts, looks_like_the_model
from fedjax_sim.round.costs import message_spec, metrics_of
from fedjax_sim.round.round import close, collect, initial_state, invite, seen
from fedjax_sim.server import downlink as with_downlink
from fedjax_sim.transform import identity
from fedjax_sim.types import (
    Aggregator,
    Algorithm,
    ClientUpdate,
    Execution,
    Sampler,
    ServerUpdate,
    Star,
    UpdateTransform,
)
from fedjax_sim.validate import FromData

__all__ = ["federated"]


@validate.named_arguments
def federated(
    sampler: Sampler,
    client: ClientUpdate,
    aggregator: Aggregator,
    server: ServerUpdate,
    transform: UpdateTransform | None = None,
    *,
    downlink: UpdateTransform | None = None,
    nonfinite: Annotated[Literal["drop", "error"], FromData("nonfinite")] = "drop",
    plan: Annotated[engine.Plan | None, FromData("plan")] = None,
    mesh: Annotated[Mesh | str | None, FromData("mesh")] = "all",
) -> Algorithm:
    """Federated learning around one server, from its parts.

    Args:
      sampler, client, aggregator, server, transform: the parts; without a transform updates are sent as they are.
      downlink: what the broadcast goes through, by `server.downlink`; None sends the model as it is.
      nonfinite: what a NaN, infinite or overflowing update, weight, metric or client state, or a weight that vanishes
        in a sum, does. "drop": the round goes on as if that client had not reported, and counts it in
        `dropped_clients`. "error": the same, and `run` stops, naming the clients; refused together with noise, because
        it would reveal what the noise hides.
      plan: how many clients are vmapped and summed at once; by default fitted to their work and messages.
      mesh: devices that share the cohort; "all" visible ones by default, None for one.

    With noise in shares on the messages (place "distributed"), a round is skipped if fewer messages arrive than the
    number of shares assumed: the round then releases only that a message was missing, which voids a run's epsilon.

    Returns: an Algorithm. Its info holds `clients_invited`, `clients_reported`, `dropped_clients`, `skipped_rounds`
    (1 where nothing usable arrived: the model is then unchanged), `uplink_bytes`, `downlink_bytes`, `update_norm`, and
    the pooled metrics of clients, sampler, transform and aggregator, prefixed by the part's name where two parts use
    the same name; the sums of the clients' `counts`; `uplink_coded_bytes` where an entropy code would make messages
    smaller; `wasted_bytes` under over-invitation: the part of `uplink_bytes` that came too late to count.

    Raises: ValueError for a modular sum of floats or of integers that could wrap; for integers with an aggregator whose
    result is not in their unit; for noise with one of unbounded sensitivity; for clients drawn with unequal
    probabilities and one that weights them too; for "error" together with noise
    (tests/running/test_privacy_ledger.py::test_stopping_is_no_secret); and for what `server.downlink` refuses. `init`
    refuses updates of other shapes or dtypes than the server takes (tests/laws/test_foreign_updates.py).

    Guarantees: the same bits for any number of devices and order of the cohort (tests/laws/test_devices.py), and for
    any padding if the aggregator does not count rows (tests/laws/test_invariance.py); a non-finite client equals an
    absent one bit for bit (tests/laws/test_nonfinite.py); traced once per shape (tests/test_compilation.py); `downlink`
    equals a server wrapped by hand (tests/server/test_downlink.py::test_federated_wraps_its_server); parts that do not
    fit are refused by their facts (`round.compatibility`); every byte that was sent is counted
    (tests/sampling/test_participation.py::test_late_messages_are_counted).
    """
    transform = identity() if transform is None else transform
    validate.part("sampler", sampler, Sampler)
    validate.part("client", client, ClientUpdate)
    validate.part("aggregator", aggregator, Aggregator)
    validate.part("server", server, ServerUpdate)
    validate.part("transform", transform, UpdateTransform)
    if downlink is not None:
        server = with_downlink(server, downlink)
    if nonfinite == "error" and (transform.facts.noise, client.facts.noise) != (None, None):
        hint = "A run that stops, and names clients, reveals what the noise hides."
        validate.fail("nonfinite", "'drop' beside noise", nonfinite, hint)
    check_parts(sampler, client, transform, aggregator, server)
    execution = Execution(plan=plan, mesh=mesh, nonfinite=nonfinite)
    star = Star(sampler, client, aggregator, server, transform, execution, complete=True)

    def init(key, params, population):
        state = initial_state(star, params, population)
        spec = message_spec(star, jax.eval_shape(server.broadcast, state.server), population)
        if not looks_like_the_model(spec, server, tree.spec(params)):
            jax.eval_shape(step, key, state, population)  # `check_aggregate` decides on what the aggregator returns
        return state

    def step(key, state, population):
        cohort, sampler_state = invite(star, key, state)
        gathered = collect(star, key, cohort, state, population)
        return close(star, key, cohort, gathered, state._replace(sampler=sampler_state))

    def observe(key, state, population):
        return seen(star, key, invite(star, key, state)[0], state, population)

    found = metrics_of(star)
    return Algorithm(init, step, lambda state: server.params(state.server), star, observe, metrics=found)
