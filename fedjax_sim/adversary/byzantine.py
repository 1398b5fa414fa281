"""Clients that send anything: `corrupted(aggregator, attack, who)` is the aggregator when some clients are attackers.

An attack is one of three records, by what attackers know. `Alone`: an attacker sees its own honest message. `Together`:
all attackers send one message, made from mean and standard deviation of the honest ones. `Omniscient`: attackers see
every honest message. The first two need no buffer; `attacks` and `omniscient` have the published ones.

What an attack makes goes through the same check as what clients send: a message that is not finite, or reaches 2^100
times its weight, counts as lost. So attackers gain nothing by NaN, and robustness is about finite messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.adversary.kinds import Alone, Honest, Omniscient, Together, honest_moments
from fedjax_sim.engine.all_messages.all_messages import SideBySide, by_rule, with_cohort_check
from fedjax_sim.engine.all_messages.messages import one_message, peaks, with_message
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.prng import stream
from fedjax_sim.types import Aggregator, Array, Attackers, Metric, PyTree, Received, Round

__all__ = ["corrupted"]

KEPT = ("weighted", "partly_weighted", "homogeneous", "withstands", "wire", "wire_down", "keyless")
LARGEST = 2.0**100  # as in `round.message`
METRICS = (
    Metric("attackers_met", "messages from attackers", "count"),
    Metric("attackers_lost", "of them lost for not being finite", "count"),
    Metric("attackers_share", "share of the messages that are attackers'", "share", "mean"),
    Metric("attackers_beyond", "rounds with more attackers than the rule withstands", "count"),
)
CHOSEN = (
    Metric("messages_chosen", "messages that the rule chose", "count"),
    Metric("attackers_chosen", "of them attackers'", "count"),
)


def corrupted(aggregator: Aggregator, attack: Alone | Together | Omniscient, who: Attackers) -> Aggregator:
    """An aggregator some of whose clients are attackers.

    Args:
      aggregator: any, pre-aggregation included; those attackers that do not report send nothing.
      attack: what attackers send instead of their messages; their weights are their own, unless the attack forges them.
      who: (key, ids [c]) -> [c] bool; `clients`, `share_of_clients`.

    Returns: an Aggregator. Its metrics are the given one's, `attackers_met` (messages from attackers that arrived),
    `attackers_share` (of all that arrived), `attackers_lost` (of these, what was not finite or too large, and counts as
    absent), and `attackers_beyond`: 1 where more were left than the aggregator withstands of so many messages. Where
    the rule chooses messages (Krum's, Bulyan's first half, the minimum diameter) also `messages_chosen`, and
    `attackers_chosen` among them.

    Raises: ValueError for an aggregator that hides single messages (a modular sum), and for one with attackers inside;
    when the round is built, for a `who` that does not say yes or no for each id, for messages of another shape, and as
    the aggregator does.

    Guarantees: NumPy's messages under every rule (tests/adversary/test_byzantine.py::test_attackers_are_replaced);
    the same bits on two devices (::test_same_bits_on_two_devices); lost messages count as absent
    (::test_lost_messages), and a round of them alone is skipped (::test_a_round_of_lost_messages_is_skipped); what is
    chosen is counted (::test_chosen_attackers). Sensitivity is not stated: attackers keep no bound. Nor do they know of
    units: `federated` refuses transforms that send integers (::test_integers_are_refused).
    """
    validate.part("aggregator", aggregator, Aggregator)
    validate.one_of("attack", type(attack), (Alone, Together, Omniscient))
    validate.function("who", who, "key, ids")
    if aggregator.facts.modulus is not None:
        validate.fail("aggregator", "a sum of numbers", "a modular sum", "Nobody sees single messages of that one.")
    if aggregator.facts.attackers is not None:
        hint = "The other attackers would count as honest: write one attack, whose `send` does both."
        validate.fail("aggregator", "one without attackers inside", "a corrupted one", hint)
    attackers, metrics = who, (*aggregator.facts.metrics, *METRICS, *CHOSEN[: 2 * aggregator.facts.chooses])
    who = partial(_chosen, who)
    if aggregator.facts.chooses:
        aggregator = _counting(aggregator, who)
    own = start = aggregator.start
    if isinstance(attack, Together) and attack.start is not None:
        aggregator = _beside_memory(aggregator)
        start = lambda spec: (() if own is None else own(spec), attack.start(spec))  # noqa: E731
    if isinstance(attack, Alone):
        made = _alone(aggregator, attack, who)
    elif isinstance(attack, Together) and aggregator.rule is None:
        made = _together(aggregator, attack, who)
    else:
        made = _side_by_side(aggregator, attack, who)
    made = made._replace(start=start, rule=None)
    return made.stating(sensitivity=None, homogeneous=False, metrics=metrics, attackers=attackers, chooses=False)


def _beside_memory(aggregator: Aggregator) -> Aggregator:
    """An aggregator whose state is the first of two, the second being the attackers' memory."""

    def own(call: Callable | None) -> Callable | None:
        return call and (lambda key, round, *args: call(key, round._replace(state=round.state[0]), *args))

    parts = {name: own(getattr(aggregator, name)) for name in ("accumulate", "finalize", "rule")}
    return aggregator._replace(**parts)


def _acted(attack: Together, key: Array, honest: Honest, round: Round) -> tuple[PyTree, Callable]:
    """What attackers send together, and a function of the aggregator's next state that puts their memory beside it."""
    if attack.start is None:
        return attack.send(key, honest), lambda state: state
    message, memory = attack.send(key, honest, round.state[1])
    return message, lambda state: [(state[0] if state else (), memory)]


def _counting(aggregator: Aggregator, who: Callable) -> Aggregator:
    """A rule that says how many of the messages that it chose are attackers'."""

    def rule(key, round, cohort):
        update, metrics, *state = aggregator.rule(key, round, cohort)
        chosen, bad = metrics["chosen"], who(key, round, cohort.ids) & cohort.arrived
        counts = {"messages_chosen": chosen, "attackers_chosen": chosen & bad}
        counts = {name: mask.sum(dtype=jnp.int32) for name, mask in counts.items()}
        return update, {name: x for name, x in metrics.items() if name != "chosen"} | counts, *state

    facts = {name: getattr(aggregator.facts, name) for name in KEPT}
    return with_cohort_check(by_rule(rule, start=aggregator.start, **facts), aggregator)


def _met(
    aggregator: Aggregator, update: PyTree, attackers: Array, lost: Array, arrived: Array
) -> tuple[PyTree, dict[str, Array]]:
    """(The aggregate, or NaN where every message was lost: such a round is skipped; the metrics of these numbers.)"""
    nan = lambda x: jnp.where(arrived > lost, x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.inexact) else x  # noqa: E731
    share = engine.divide(attackers.astype(jnp.float32), jnp.maximum(arrived, 1).astype(jnp.float32))
    most = 0 if aggregator.facts.withstands is None else aggregator.facts.withstands(arrived - lost)
    beyond = (attackers - lost > most).astype(jnp.int32)
    metrics = {"attackers_met": attackers, "attackers_lost": lost, "attackers_share": share, "attackers_beyond": beyond}
    return jax.tree.map(nan, update), metrics


def _chosen(who: Callable, key: Array, round: Round | None, ids: Array) -> Array:
    """[c] bool: what `who` says of the round's key; anything else would be broadcast, or taken bit by bit."""
    bad = jnp.asarray(who(key if round is None or round.key is None else round.key, ids))
    if bad.shape != ids.shape or bad.dtype != bool:
        validate.fail("who", f"a function that returns bool{list(ids.shape)}", f"{bad.dtype}{list(bad.shape)}")
    return bad


def _check_sent(sent: PyTree, wanted: PyTree) -> None:
    shapes, expected = (jax.tree.map(jnp.shape, x) for x in (sent, wanted))
    if shapes != expected:
        validate.fail("attack.send", f"a message of shapes {expected}", shapes)


def _sound(updates: PyTree, weights: Array) -> Array:
    """[c] bool: messages that are finite and within the bound that honest messages keep."""
    peaks = [jax.vmap(engine.largest)(jnp.abs(x).astype(jnp.float32)) for x in jax.tree.leaves(updates) if x.size]
    within = [(peak < LARGEST) & (peak * weights < LARGEST) for peak in peaks]
    return jnp.stack(within).all(0) & (weights > 0) & (weights < LARGEST)


def _kept(mask: Array, updates: PyTree) -> PyTree:
    return tree.where(mask, updates, tree.zeros_like(updates))


def _alone(aggregator: Aggregator, attack: Alone, who: Callable) -> Aggregator:
    def init(update_spec, num_slots):
        zero = jnp.zeros((), jnp.int32)
        return aggregator.init(update_spec, num_slots), {"met": zero, "lost": zero, "arrived": zero}

    def accumulate(key, round, carry, received):
        inner, counts = carry
        bad = who(key, round, received.ids) & (received.weights > 0)
        keys = jax.random.wrap_key_data(
            engine.client_keys(stream(key, "attack"), received.ids), impl=jax.random.key_impl(key)
        )
        updates, weights = jax.vmap(attack.send)(keys, received.updates, received.weights)
        _check_sent(updates, received.updates)
        sent = jax.tree.map(lambda x, y: x.astype(y.dtype), updates, received.updates)
        lost = bad & ~_sound(sent, weights)
        sent, weights = _kept(~lost, sent), jnp.where(lost, 0, weights)
        updates = tree.where(bad, sent, received.updates)
        weights = jnp.where(bad, weights, received.weights)
        inner = aggregator.accumulate(key, round, inner, received._replace(updates=updates, weights=weights))
        found = {"met": bad, "lost": lost, "arrived": received.weights > 0}
        return inner, {name: counts[name] + mask.sum(dtype=jnp.int32) for name, mask in found.items()}

    def finalize(key, round, carry):
        inner, counts = carry
        update, metrics, *state = aggregator.finalize(key, round, inner)
        update, found = _met(aggregator, update, counts["met"], counts["lost"], counts["arrived"])
        return update, metrics | found, *state

    return aggregator._replace(init=init, accumulate=accumulate, finalize=finalize)


def _together(aggregator: Aggregator, attack: Together, who: Callable) -> Aggregator:
    """For sums: honest messages are added as they come, and so are their squares; the attackers' one at the end."""

    def init(update_spec, num_slots):
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, tree.at_least_float32(x.dtype)), update_spec)
        moments = exact_sums.zeros((wide, wide, jax.ShapeDtypeStruct((), jnp.float32)))
        slots = {"weights": jnp.zeros(num_slots, jnp.float32), "ids": jnp.zeros(num_slots, jnp.int32)}
        dtypes = jax.tree.map(lambda x: jnp.zeros(0, x.dtype), update_spec)  # of what attackers can send
        inner = aggregator.init(update_spec, num_slots)
        return {"inner": inner, "moments": moments, "attackers": slots, "dtypes": dtypes}

    def accumulate(key, round, carry, received):
        bad = who(key, round, received.ids) & (received.weights > 0)
        updates, weights = _kept(~bad, received.updates), jnp.where(bad, 0, received.weights)
        inner = aggregator.accumulate(key, round, carry["inner"], received._replace(updates=updates, weights=weights))
        wide = jax.tree.map(lambda x: x.astype(tree.at_least_float32(x.dtype)), updates)
        squares = engine.rounded_here(jax.tree.map(lambda x: x * x, wide), engine.hidden_zero(weights))
        moments = exact_sums.add(carry["moments"], (wide, squares, (weights > 0).astype(jnp.float32)))
        own = {"weights": jnp.where(bad, received.weights, 0), "ids": jnp.where(bad, received.ids, 0)}
        slots = {name: x.at[received.slots].set(own[name], mode="drop") for name, x in carry["attackers"].items()}
        return {**carry, "inner": inner, "moments": moments, "attackers": slots}

    def finalize(key, round, carry):
        weights, ids = carry["attackers"]["weights"], carry["attackers"]["ids"]
        total, squares, number = exact_sums.total(carry["moments"])
        attackers = (weights > 0).sum(dtype=jnp.int32)
        honest = _moments(total, squares, number, attackers)
        message, beside = _acted(attack, stream(key, "attack"), honest, round)
        _check_sent(message, total)
        order = jnp.argsort(weights == 0, stable=True).astype(jnp.int32)  # attackers first
        sent = jax.tree.map(lambda x: x[None], tree.cast(message, carry["dtypes"]))

        def one(i, state):
            inner, lost = state
            slot = order[i]
            sound = _sound(sent, weights[slot][None])
            weight = jnp.where(sound, weights[slot], 0)
            received = Received(_kept(sound, sent), weight, ids[slot][None], slot[None])
            return aggregator.accumulate(key, round, inner, received), lost + (~sound[0]).astype(jnp.int32)

        inner, lost = jax.lax.fori_loop(0, attackers, one, (carry["inner"], jnp.zeros((), jnp.int32)))
        update, metrics, *state = aggregator.finalize(key, round, inner)
        update, found = _met(aggregator, update, attackers, lost, attackers + number.astype(jnp.int32))
        return update, metrics | found, *beside(state)

    return aggregator._replace(init=init, accumulate=accumulate, finalize=finalize)


def _moments(total: PyTree, squares: PyTree, number: Array, attackers: Array) -> Honest:
    """From sums of messages and of their squares."""

    def mean(x):
        return engine.divide(x, jnp.maximum(number, 1).astype(x.dtype))

    def std(x, square):
        rest = square - x * mean(x)
        return jnp.sqrt(jnp.maximum(engine.divide(rest, jnp.maximum(number - 1, 1).astype(x.dtype)), 0))

    return Honest(jax.tree.map(mean, total), jax.tree.map(std, total, squares), number, attackers.astype(jnp.float32))


def _side_by_side(aggregator: Aggregator, attack: Together | Omniscient, who: Callable) -> Aggregator:
    """Messages are held, and changed before the aggregator sees them."""
    judge = aggregator.rule or partial(_streamed, aggregator)

    def rule(key, round, cohort):
        bad, attack_key = who(key, round, cohort.ids) & cohort.arrived, stream(key, "attack")
        beside = lambda state: state  # noqa: E731
        if isinstance(attack, Together):
            message, beside = _acted(attack, attack_key, honest_moments(cohort, bad), round)
            changed = with_message(cohort.messages, bad, message)
        else:
            aggregate = lambda messages: judge(key, round, cohort._replace(messages=messages))[0]  # noqa: E731
            changed = attack.send(attack_key, cohort, bad, aggregate)
        peak, arrived = peaks(changed), cohort.number
        lost = bad & ~((peak < LARGEST) & (peak * cohort.weights < LARGEST))
        cohort = _without(cohort._replace(messages=changed), lost)
        update, metrics, *state = judge(key, round, cohort)
        update, found = _met(aggregator, update, bad.sum(dtype=jnp.int32), lost.sum(dtype=jnp.int32), arrived)
        return update, metrics | found, *beside(state)

    facts = {name: getattr(aggregator.facts, name) for name in KEPT}
    return with_cohort_check(by_rule(rule, start=aggregator.start, **facts), aggregator)


def _without(cohort: SideBySide, lost: Array) -> SideBySide:
    """As if some messages had not arrived."""
    zeros = jax.tree.map(jnp.zeros_like, one_message(cohort.messages, jnp.int32(0)))
    messages = with_message(cohort.messages, lost, zeros)
    there = cohort.arrived & ~lost
    order = jnp.argsort(~there, stable=True)
    messages = dataclasses.replace(messages, order=messages.order[order])
    weights, ids = jnp.where(there, cohort.weights, 0)[order], jnp.where(there, cohort.ids, -1)[order]
    return SideBySide(messages, weights, ids, there.sum(dtype=jnp.int32))


def _streamed(aggregator: Aggregator, key: Array, round: Round, cohort: SideBySide):
    """What an aggregator that takes a stream of messages makes of those of a cohort."""
    first = one_message(cohort.messages, jnp.int32(0))
    carry = aggregator.init(tree.spec(first), cohort.messages.number)

    def one(rank, carry):
        message = jax.tree.map(lambda x: x[None], one_message(cohort.messages, rank))
        received = Received(message, cohort.weights[rank][None], cohort.ids[rank][None], rank[None])
        return aggregator.accumulate(key, round, carry, received)

    return aggregator.finalize(key, round, jax.lax.fori_loop(0, cohort.number, one, carry))
