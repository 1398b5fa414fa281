"""Mime and MimeLite: local steps mimic a centralised optimiser whose statistics stay fixed during a round."""

from __future__ import annotations

from typing import Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, engine, server, tree, validate
from fedjax_sim.algorithms.server.mime_optimizer import base_optimizer
from fedjax_sim.prng import stream
from fedjax_sim.round.costs import traffic, unusable, work_of
from fedjax_sim.round.counts import word_pair_sum, words_of
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import MessageOptions, RecipeOptions
from fedjax_sim.round.round import (
    Aggregated,
    FederatedState,
    aggregate,
    close,
    collect,
    initial_state,
    invite,
    remember,
    seen,
)
from fedjax_sim.transform.chain import plain_wire
from fedjax_sim.types import Algorithm, Array, Count, PyTree, Sampler, ServerUpdate, UpdateTransform, Work
from fedjax_sim.validate import LossFn, Positive, ShareBelowOne


class MimeOptions(client.LocalOptions, MessageOptions, total=False):
    """The options of `client.work` and `federated`, but no `downlink`: a round has two broadcasts."""


@validate.named_arguments
def mime_lite(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    rule: Literal["sgd", "momentum", "rmsprop", "adam"] = "momentum",
    momentum: ShareBelowOne | None = None,
    second_decay: float | None = None,
    adaptivity: float | None = None,
    server_learning_rate: Positive = 1.0,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes MimeLite: local steps use the server's momentum or moments and leave them unchanged.

    Each client sends its update and the gradient of all its examples at the server's model: one pass, two vectors. The
    server updates its moments by the mean of these gradients.

    Args:
      loss_fn, sampler: as in `fedavg`.
      optimizer: the clients' optimizer, plain SGD such as `optax.sgd(0.1)`, whose rate is that of the local steps.
      rule: "sgd", "momentum", "rmsprop" or "adam": the optimiser that is mimicked, see
        `algorithms.server.mime_optimizer`.
      momentum, second_decay, adaptivity: of the rule, which refuses numbers that it does not use; None = 0.9, 0.99 and
        1e-3.
      server_learning_rate: factor of the mean update; 1 is the paper's.
      num_steps, num_epochs, batch_size, shuffle: as in `client.work`.
      weighting: "uniform" is the paper's.
      downlink: of model and statistics, as for `federated`; refused with "rmsprop" and "adam".
      transform, nonfinite, plan, mesh: as in `federated`.

    Guarantees: matches a NumPy transcription of the paper (tests/oracles/test_mime.py::test_matches_the_paper); with
    "sgd" it is FedAvg (::test_sgd_without_correction_is_fedavg), and so has FedAvg's biased fixed point.

    References: Karimireddy et al. 2021 (Mime), algorithm 1.
    """
    if options.get("downlink") is not None and rule in ("rmsprop", "adam"):
        hint = "Second moments are broadcast with the model, and a compressor may make them negative."
        validate.fail("downlink", f"none for {rule}", "a compressor", hint)
    base = base_optimizer(rule, momentum=momentum, second_decay=second_decay, adaptivity=adaptivity)
    work, round_options = client.local_work(options)
    local = client.mime(loss_fn, client.plain_sgd_rate("mime_lite", optimizer), base.direction, work, lite=True)
    step = server.statistics(server.optimizer(optax.sgd(server_learning_rate)), base.start, base.track)
    aggregator = aggregation.by_part({"params": aggregation.mean(), "gradient": aggregation.mean()})
    return federated(sampler, local, aggregator, step, **round_options)


@validate.named_arguments
def mime(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    rule: Literal["sgd", "momentum", "rmsprop", "adam"] = "momentum",
    momentum: ShareBelowOne | None = None,
    second_decay: float | None = None,
    adaptivity: float | None = None,
    server_learning_rate: Positive = 1.0,
    **options: Unpack[MimeOptions],
) -> Algorithm:
    """Makes Mime: local steps mimic a centralised optimiser, and a first pass collects gradients that correct them.

    A round passes over its cohort twice. First every client sends c_i, the gradient of all its examples at the server's
    model x; c is their mean. Then local steps follow U(g_i(y) - g_i(x) + c, s). Here g_i is the gradient on a
    minibatch, U the step of the optimiser, and s its statistics, which the server alone updates. Clients keep no state.
    Bytes of both passes are counted; the info also holds `gradient_norm`, the norm of c.

    Args:
      loss_fn, sampler, optimizer, rule, momentum, second_decay, adaptivity, server_learning_rate, weighting: as in
        `mime_lite`.
      transform: what each of a client's two messages passes through, separately; without memory at the clients, and
        without noise, which no accountant covers here.
      num_steps, num_epochs, batch_size, shuffle: as in `client.work`.
      nonfinite, plan, mesh: as in `federated`.

    `dropped_clients` is the larger count of the two passes: at least so many messages could not be used. Where only a
    client's local steps overflow, its gradient stays in c, which the other clients have used already. Without a usable
    gradient in the first pass the round is skipped. Where rounds take simulated time, both passes take time, without a
    wait between them. A client that is cut off during either pass takes part in neither, and the bytes that it had
    begun to send count as wasted.

    Raises: ValueError, TypeError for options out of range, and for a transform with noise or memory at the clients.

    Guarantees: matches a NumPy transcription of the paper (tests/oracles/test_mime.py::test_matches_the_paper); with
    any number of full-batch steps and full participation it converges to the optimum of heterogeneous quadratics, where
    FedAvg and MimeLite do not; with partial participation c lacks the absent clients' gradients, which leaves an error
    floor (::test_error_floor_with_a_few). The same bits for any device count and order of the cohort
    (::test_same_bits); a round whose first pass has no usable message is skipped (::test_no_usable_gradient). Gradients
    that were sent in vain are counted (tests/sampling/time/test_deadlines.py::test_gradients_that_nobody_waits_for).

    References: Karimireddy et al. 2021 (Mime), algorithm 1.
    """
    _check_transform(options.get("transform"))
    base = base_optimizer(rule, momentum=momentum, second_decay=second_decay, adaptivity=adaptivity)
    work, round_options = client.local_work(options)
    local = client.mime(loss_fn, client.plain_sgd_rate("mime", optimizer), base.direction, work)
    inner = server.statistics(server.optimizer(optax.sgd(server_learning_rate)), base.start, base.track)
    second_pass = federated(sampler, local, aggregation.mean(), _controlled(inner), **round_options)
    second = second_pass.parts
    assert second is not None, "`federated` states its parts"
    gradients = client.full_gradient(loss_fn, weighting="examples" if work.weighs_examples() else "uniform")
    # The first pass differs in its client and its server: clients send gradients, and their mean is kept as it is.
    first = second._replace(client=gradients, server=server.replacement())

    # Between rounds the fields `memory` and `transform` of the state are pairs, (of the first pass, of the second), and
    # `server` is the state of `inner`.
    def init(key, params, population):
        first_state = initial_state(first, params, population)
        state = second_pass.init(key, params, population)
        pairs = {
            "memory": (first_state.memory, state.memory),
            "transform": (first_state.transform, state.transform),
        }
        state = state._replace(server=state.server.server, **pairs)
        if sampler.tell is None:
            return state
        # A sampler with a clock is told the work of both passes, and computes their times from it.
        works = work_of(first, params, population), work_of(second, params, population)
        return state._replace(sampler=sampler.tell(sampler.init(), _work_of_both(*works)))

    def state_of_first_pass(state):
        return state._replace(memory=state.memory[0], transform=state.transform[0], server=inner.params(state.server))

    def collect_gradients(key, cohort, state, population):
        """Makes the first pass.

        Returns: (`Gathered` of it, the next state of its transform, whether there is a usable gradient, the norm of c,
        the state in which the second pass starts).
        """
        first_state = state_of_first_pass(state)
        gathered = collect(first, key, cohort, first_state, population)
        aggregated = aggregate(first, key, cohort, gathered, first_state)
        usable, control, norm, next_transform = engine.reproducible(_mean_gradient)(
            aggregated, gathered.num_arrived, first_state
        )
        second_state = state._replace(
            memory=state.memory[1], transform=state.transform[1], server=_ControlState(state.server, control)
        )
        return gathered, next_transform, usable, norm, second_state

    def observe(key, state, population):
        """Returns what both passes sent, by name; the weights are those of the second pass."""
        cohort, _ = invite(second, key, state)
        *_, second_state = collect_gradients(stream(key, "gradients"), cohort, state, population)
        seen_first = seen(first, stream(key, "gradients"), cohort, state_of_first_pass(state), population)
        seen_second = seen(second, key, cohort, second_state, population)
        broadcasts = {"gradient": seen_first.broadcast, "update": seen_second.broadcast}
        messages = {"gradient": seen_first.messages, "update": seen_second.messages}
        return seen_second._replace(broadcast=broadcasts, messages=messages)

    def step(key, state, population):
        cohort, sampler_state = invite(second, key, state)
        gathered_first, first_transform, usable, norm, second_state = collect_gradients(
            stream(key, "gradients"), cohort, state, population
        )
        _, first_memory = remember(cohort, gathered_first, usable)
        second_state = second_state._replace(sampler=sampler_state)
        gathered_second = collect(second, key, cohort, second_state, population)
        closed, info = close(second, key, cohort, gathered_second, second_state, usable=usable)
        next_state = closed._replace(
            memory=(first_memory, closed.memory),
            transform=(first_transform, closed.transform),
            server=closed.server.server,
        )
        # A client that is cut off in the second pass has sent its gradient, and its bytes count.
        first_cohort = cohort if cohort.timing.begun is None else cohort.timed(sent=cohort.timing.begun)
        first_traffic = traffic(first_cohort, gathered_first.up, gathered_first.down)
        first_unusable = unusable(first, cohort, gathered_first.dropped, gathered_first.num_dropped)
        return next_state, _info_of_both(info, first_traffic, first_unusable, norm, usable)

    # The parts are those of the second pass. They are not the whole algorithm, since the first pass is missing.
    parts = second._replace(complete=False)
    kind = inner.params_kind
    return Algorithm(
        init,
        step,
        lambda state: inner.params(state.server),
        parts,
        observe,
        metrics=second_pass.metrics,
        params_kind=kind,
    )


def _check_transform(transform: UpdateTransform | None) -> None:
    """Raises an error for a transform that two messages of a client cannot pass through."""
    if transform is None:
        return
    validate.part("transform", transform, UpdateTransform)
    hint = "A client sends two messages."
    if transform.facts.noise is not None:
        validate.fail("transform", "one without noise for mime", transform.facts.noise.mechanism, hint)
    if jax.tree.leaves(transform.init_client(jax.ShapeDtypeStruct((8, 8), jnp.float32))):
        validate.fail("transform", "one without memory at the clients", "one with memory", hint)


class _ControlState(NamedTuple):
    """The state of the second pass's server."""

    server: PyTree  # the state of the server with the optimiser's statistics
    control: PyTree  # c: the cohort's mean gradient at the model


def _controlled(inner: ServerUpdate) -> ServerUpdate:
    """Makes the second pass's server: it broadcasts c with model and statistics, and updates the statistics by c.

    Args:
      inner: `server.statistics`, which takes {"params": the mean update, "gradient": c} and broadcasts {"params",
        "statistics"}.

    Returns: a ServerUpdate that takes the mean update alone. Its state (`_ControlState`) holds c, leaves as the model,
    which the first pass sets. The model is not counted as sent.
    """

    def apply(key, aggregate, state):
        update_and_gradient = {"params": aggregate, "gradient": state.control}
        return state._replace(server=inner.apply(key, update_and_gradient, state.server))

    def wire(broadcast):
        # The clients received the model in the first pass.
        return plain_wire({name: x for name, x in broadcast.items() if name != "params"})

    return ServerUpdate(
        init=lambda params: _ControlState(inner.init(params), tree.zeros_like(params)),
        broadcast=lambda state: inner.broadcast(state.server) | {"control": state.control},
        apply=apply,
        params=lambda state: inner.params(state.server),
        wire=wire,
        params_kind=inner.params_kind,
    )


def _work_of_both(first: Work, second: Work) -> Work:
    """The cost of both passes to a client, for samplers and clocks."""
    total_bytes = {name: getattr(first, name) + getattr(second, name) for name in ("bytes_up", "bytes_down")}
    return second._replace(**total_bytes, before=first)


def _mean_gradient(
    aggregated: Aggregated, num_arrived: Array, state: FederatedState
) -> tuple[Array, PyTree, Array, PyTree]:
    """Returns (whether the first pass has a usable gradient, c or zero, c's norm, the next state of its transform)."""
    control = jax.tree.map(lambda g, x: g.astype(x.dtype), aggregated.update, state.server)
    usable = (num_arrived > 0) & engine.all_finite(control)
    control = tree.where(usable, control, tree.zeros_like(control))
    return (
        usable,
        control,
        optax.tree.norm(tree.widened(control)),
        tree.where(usable, aggregated.transform, state.transform),
    )


def _info_of_both(info: dict, first_traffic: dict, first_unusable: dict, norm: Array, usable: Array) -> dict:
    """Joins the info of both passes: it is that of the second pass, with the bytes of both.

    Of the two counts of unusable messages the larger one is taken, with the clients that it names.

    Args:
      info: of the second pass.
      first_traffic, first_unusable: numbers of the first pass.
      norm: [] of c.
      usable: [] bool, whether the first pass has a usable gradient.
    """
    info = tree.joined_metrics({"client": info, "mime": {"gradient_norm": norm}})
    info["clients_reported"] = jnp.where(usable, info["clients_reported"], 0)
    for name in ("uplink_bytes", "downlink_bytes", "uplink_coded_bytes", "wasted_bytes"):
        if name in first_traffic or name in info:
            # A pass without coded bytes sends its plain bytes, under an entropy code too.
            first_bytes = first_traffic.get(name, first_traffic["uplink_bytes"])
            info[name] = _sum(first_bytes, info.get(name, info["uplink_bytes"]))
    first_is_larger = first_unusable["dropped_clients"] > info["dropped_clients"]
    larger = {name: jnp.where(first_is_larger, first_unusable[name], info[name]) for name in first_unusable}
    return info | larger


def _sum(a: Count, b: Count) -> Count:
    """The sum of two counts, as one 64-bit integer in two words."""
    return Count(jnp.int32(1), word_pair_sum(words_of(a), words_of(b)))
