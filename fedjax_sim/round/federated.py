"""`federated` makes an algorithm of the parts of a federation: each round is invite, collect and close."""

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
from fedjax_sim.validate import Checked, FromData


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
    plan: Annotated[engine.Plan | None, FromData("plan"), Checked(engine.check_plan)] = None,
    mesh: Annotated[Mesh | Literal["all"] | None, FromData("mesh"), Checked(engine.check_mesh)] = "all",
) -> Algorithm:
    """Makes an algorithm for federated learning around one server.

    In each round the sampler draws a cohort, its clients train from the server's broadcast, the aggregator combines
    their messages, and the server takes a step with the aggregate.

    Args:
      sampler: draws the cohorts.
      client: the local work of one client.
      aggregator: combines the messages of a cohort.
      server: takes a step with the aggregate, and holds the model.
      transform: what each update passes through, such as clipping or compression; None sends updates as they are.
      downlink: what the broadcast passes through, by `server.downlink`; None sends the model as it is.
      nonfinite: what happens with an unusable message. A message is unusable if its update, weight, metrics or client
        state are NaN, infinite or overflowing, or if its weight would vanish in a sum. "drop": the round goes on as if
        that client had not reported, and counts it in `dropped_clients`. "error": the same, and `run` stops and names
        the clients. "error" is refused together with noise, because it would reveal what the noise hides.
      plan: how many clients are vmapped and summed at once; by default fitted to their work and messages.
      mesh: devices that share the cohort; "all" visible devices by default, None for one device.

    With noise in shares on the messages (place "distributed"), a round is skipped if fewer messages arrive than the
    number of shares assumed. The round then releases only that a message was missing, which voids a run's epsilon.

    Returns: an Algorithm. Its info holds
      `clients_invited`, `clients_reported`, `dropped_clients`: numbers of clients;
      `skipped_rounds`: 1 where nothing usable arrived, and the model is then unchanged; else 0;
      `uplink_bytes`, `downlink_bytes`: all bytes that were sent;
      `uplink_coded_bytes`: where an entropy code would make messages smaller;
      `wasted_bytes`: under over-invitation, the part of `uplink_bytes` that came too late to count;
      `update_norm`: the L2 norm of the model's change;
      the pooled metrics of clients, sampler, transform and aggregator, prefixed by the part's name where two parts use
      the same name; and the sums of the clients' `counts`.

    Raises: ValueError
      for a modular sum of floats, or of integers that could wrap;
      for integers with an aggregator whose result is not in their unit;
      for noise with an aggregator of unbounded sensitivity;
      for clients drawn with unequal probabilities, with an aggregator that weights them too;
      for "error" together with noise (tests/running/test_privacy_ledger.py::test_stopping_is_no_secret);
      and for what `server.downlink` refuses. `init` refuses updates whose shapes or dtypes the server does not take
      (tests/laws/test_foreign_updates.py).

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
    star = Star(
        sampler=sampler,
        client=client,
        aggregator=aggregator,
        server=server,
        transform=transform,
        execution=execution,
        complete=True,
    )

    def init(key, params, population):
        state = initial_state(star, params, population)
        spec = message_spec(star, jax.eval_shape(server.broadcast, state.server), population)
        if not looks_like_the_model(spec, server, tree.spec(params)):
            # The aggregator may turn such updates into what the server takes. Tracing a round lets `check_aggregate`
            # decide on the aggregator's result before the first round runs.
            jax.eval_shape(step, key, state, population)
        return state

    def step(key, state, population):
        cohort, sampler_state = invite(star, key, state)
        gathered = collect(star, key, cohort, state, population)
        return close(star, key, cohort, gathered, state._replace(sampler=sampler_state))

    def observe(key, state, population):
        cohort, _ = invite(star, key, state)
        return seen(star, key, cohort, state, population)

    metrics = metrics_of(star)
    kind = star.params_kind

    def params(state):
        return server.params(state.server)

    return Algorithm(init, step, params, parts=star, observe=observe, metrics=metrics, params_kind=kind)
