"""Mime and MimeLite: local steps that mimic a centralised optimiser, whose statistics stay fixed during a round."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, engine, server, tree, validate
from fedjax_sim.algorithms.server.mime_optimizer import base_optimizer
from fedjax_sim.prng import stream
from fedjax_sim.round.costs import traffic, unusable, words_of, work_of
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
from fedjax_sim.types import Algorithm, Array, Count, PyTree, Sampler, ServerUpdate, Star, UpdateTransform, Work
from fedjax_sim.validate import LossFn, Positive, ShareBelowOne

__all__ = ["mime", "mime_lite"]


class MimeOptions(client.LocalOptions, MessageOptions, total=False):
    """Those of other algorithms around a server without `downlink`: a round has two broadcasts."""


@validate.named_arguments
def mime_lite(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    rule: str = "momentum",
    momentum: ShareBelowOne | None = None,
    second_decay: float | None = None,
    adaptivity: float | None = None,
    server_learning_rate: Positive = 1.0,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Local steps use the server's momentum or moments unchanged; the server updates those by clients' full gradients.

    Each client sends its update and the gradient of all its examples at the server's model: one pass, two vectors.

    Args:
      optimizer: the clients', plain SGD such as `optax.sgd(0.1)`: the rate of the local steps.
      rule: "sgd", "momentum", "rmsprop" or "adam": the optimiser that is mimicked, see
        `algorithms.server.mime_optimizer`.
      momentum, second_decay, adaptivity: of the rule, which refuses those that it has not; None = 0.9, 0.99 and 1e-3.
      server_learning_rate: factor of the mean update; 1 is the paper's.
      num_steps, num_epochs, batch_size, shuffle: as in `client.work`.
      weighting: "uniform" is the paper's.
      downlink: of model and statistics, as for `federated`; none with "rmsprop" and "adam".

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
    rule = aggregation.by_part({"params": aggregation.mean(), "gradient": aggregation.mean()})
    return federated(sampler, local, rule, step, **round_options)


@validate.named_arguments
def mime(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    rule: str = "momentum",
    momentum: ShareBelowOne | None = None,
    second_decay: float | None = None,
    adaptivity: float | None = None,
    server_learning_rate: Positive = 1.0,
    **options: Unpack[MimeOptions],
) -> Algorithm:
    """MimeLite whose local gradients are corrected by the cohort's mean gradient, which a first pass collects.

    A round passes over its cohort twice. First every client sends c_i, the gradient of all its examples at the server's
    model x; c is their mean. Then local steps follow U(g_i(y) - g_i(x) + c, s). Clients keep nothing. Bytes of both
    passes are counted; the info also holds `gradient_norm`, that of c.

    Args:
      optimizer, rule, ..., weighting: as in `mime_lite`.
      transform: what each of a client's two messages goes through, separately; without memory at the clients, and
        without noise, which no accountant covers here.

    `dropped_clients` is the larger count of the two passes: at least so many messages could not be used. Where only a
    client's local steps overflow its gradient stays in c, which the other clients have used already. Without a usable
    gradient in the first pass the round is skipped. Where rounds take simulated time both passes do, without a wait
    between them; who is cut off during either takes part in neither, and what it had begun to send counts as wasted.

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
    made = federated(sampler, local, aggregation.mean(), _controlled(inner), **round_options)
    second: Star = made.parts
    gradients = client.full_gradient(loss_fn, weighting="examples" if work.weighs_examples() else "uniform")
    first = second._replace(client=gradients, server=server.replacement())

    def init(key, params, population):
        asked = initial_state(first, params, population)
        state = made.init(key, params, population)
        both = {"memory": (asked.memory, state.memory), "transform": (asked.transform, state.transform)}
        state = state._replace(server=state.server.server, **both)
        if sampler.tell is None:
            return state
        works = work_of(first, params, population), work_of(second, params, population)
        return state._replace(sampler=sampler.tell(sampler.init(), _work_of_both(*works)))

    def ask(key, cohort, state, population):
        """The first pass; and the state in which the second one starts."""
        (asked_memory, memory), (asked_transform, transform) = state.memory, state.transform
        asking = state._replace(memory=asked_memory, transform=asked_transform, server=inner.params(state.server))
        asked = collect(first, key, cohort, asking, population)
        found = aggregate(first, key, cohort, asked, asking)
        usable, control, norm, asked_transform = engine.steady(_mean_gradient)(found, asked.num_arrived, asking)
        start = _ControlState(state.server, control)
        return asked, asked_transform, usable, norm, state._replace(memory=memory, transform=transform, server=start)

    def observe(key, state, population):
        """What both passes sent, by name; the weights are those of the second."""
        cohort, _ = invite(second, key, state)
        *_, start = ask(stream(key, "gradients"), cohort, state, population)
        asking = state._replace(memory=state.memory[0], transform=state.transform[0], server=inner.params(state.server))
        asked = seen(first, stream(key, "gradients"), cohort, asking, population)
        answered = seen(second, key, cohort, start, population)
        sent = {"gradient": asked.broadcast, "update": answered.broadcast}
        return answered._replace(broadcast=sent, messages={"gradient": asked.messages, "update": answered.messages})

    def step(key, state, population):
        cohort, sampler_state = invite(second, key, state)
        asked, asked_transform, usable, norm, start = ask(stream(key, "gradients"), cohort, state, population)
        _, asked_memory = remember(cohort, asked, usable)
        state = start._replace(sampler=sampler_state)
        answered = collect(second, key, cohort, state, population)
        state, info = close(second, key, cohort, answered, state, usable=usable)
        memory, transforms = (asked_memory, state.memory), (asked_transform, state.transform)
        state = state._replace(memory=memory, transform=transforms, server=state.server.server)
        begun = cohort if cohort.timing.begun is None else cohort.timed(sent=cohort.timing.begun)
        sent, lost = traffic(begun, asked.up, asked.down), unusable(first, cohort, asked.dropped, asked.num_dropped)
        return state, _both(info, sent, lost, norm, usable)

    parts = second._replace(complete=False)  # without the first pass
    return Algorithm(init, step, lambda state: inner.params(state.server), parts, observe, metrics=made.metrics)


def _check_transform(transform: UpdateTransform | None) -> None:
    if transform is None:
        return
    validate.part("transform", transform, UpdateTransform)
    hint = "A client sends two messages."
    if transform.facts.noise is not None:
        validate.fail("transform", "one without noise for mime", transform.facts.noise.mechanism, hint)
    if jax.tree.leaves(transform.init_client(jax.ShapeDtypeStruct((8, 8), jnp.float32))):
        validate.fail("transform", "one without memory at the clients", "one with memory", hint)


class _ControlState(NamedTuple):
    """State of the second pass's server."""

    server: PyTree  # of the server with the optimiser's statistics
    control: PyTree  # c: the cohort's mean gradient at the model


def _controlled(inner: ServerUpdate) -> ServerUpdate:
    """The second pass's server: it broadcasts c with model and statistics, and then updates the statistics by c."""

    def apply(key, aggregate, state):
        both = {"params": aggregate, "gradient": state.control}
        return state._replace(server=inner.apply(key, both, state.server))

    def wire(broadcast):  # the clients received the model in the first pass
        return plain_wire({name: x for name, x in broadcast.items() if name != "params"})

    return ServerUpdate(
        init=lambda params: _ControlState(inner.init(params), tree.zeros_like(params)),
        broadcast=lambda state: inner.broadcast(state.server) | {"control": state.control},
        apply=apply,
        params=lambda state: inner.params(state.server),
        wire=wire,
    )


def _work_of_both(first: Work, second: Work) -> Work:
    """What both passes cost a client, as samplers are told it."""
    both = {name: getattr(first, name) + getattr(second, name) for name in ("bytes_up", "bytes_down")}
    return second._replace(**both, before=first)


def _mean_gradient(found: Aggregated, num_arrived: Array, state: FederatedState) -> tuple[Array, PyTree, Array, PyTree]:
    """(Whether the first pass has a usable one, c or zero, its norm, the next state of the pass's transform.)"""
    control = jax.tree.map(lambda g, x: g.astype(x.dtype), found.update, state.server)
    usable = (num_arrived > 0) & tree.all_finite(control)
    control = tree.where(usable, control, tree.zeros_like(control))
    return usable, control, optax.tree.norm(control), tree.where(usable, found.transform, state.transform)


def _both(info: dict, sent: dict, lost: dict, norm: Array, usable: Array) -> dict:
    """Info of the round: that of the second pass, with the bytes of both, and unusable messages of the worse one."""
    info = tree.joined_metrics({"client": info, "mime": {"gradient_norm": norm}})
    info["clients_reported"] = jnp.where(usable, info["clients_reported"], 0)
    for name in ("uplink_bytes", "downlink_bytes", "uplink_coded_bytes", "wasted_bytes"):
        if name in sent or name in info:
            info[name] = _sum(sent.get(name, sent["uplink_bytes"]), info.get(name, info["uplink_bytes"]))
    more = lost["dropped_clients"] > info["dropped_clients"]
    return info | {name: jnp.where(more, lost[name], info[name]) for name in lost}


def _sum(a: Count, b: Count) -> Count:
    """The bytes of both messages, as one 64-bit integer in two words."""
    (more, first), (high, second) = words_of(a), words_of(b)
    low = first + second
    return Count(jnp.int32(1), jnp.stack([more + high + (low < first).astype(jnp.uint32), low]))
