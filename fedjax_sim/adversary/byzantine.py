"""Byzantine clients: `corrupted(aggregator, attack, who)` is an aggregator some of whose clients are attackers.

There are three kinds of attacks, by what attackers know. `Alone`: an attacker sees its own honest message. `Together`:
all attackers send one message, made from the mean and the standard deviation of the honest messages. `Omniscient`:
attackers see every honest message. The first two kinds need no buffer of messages. `attacks` and `omniscient` have the
published attacks.

The messages of attackers pass the same check as those of honest clients: a message counts as lost if it is not finite,
or if a number of it, or this number times the message's weight, reaches 2^100. So attackers gain nothing by NaN, and
robustness is about finite messages.
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

KEPT_FACTS = ("weighted", "partly_weighted", "homogeneous", "withstands", "wire", "wire_down", "keyless")
LARGEST = 2.0**100  # the bound that `round.message` sets for honest messages
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
    """Makes an aggregator some of whose clients are attackers, who send other messages than their own.

    Args:
      aggregator: any aggregator, pre-aggregation included. Attackers that do not report send nothing.
      attack: what attackers send instead of their messages. Their weights are their own, unless the attack forges them.
      who: (key, ids [c]) -> [c] bool, which clients attack, such as `clients` or `share_of_clients`.

    Returns: an Aggregator. It states no sensitivity, since attackers keep no bound. `federated` refuses transforms that
    send integers with it, since attackers do not know their unit. Its metrics are those of `aggregator`, and

      - `attackers_met`: messages from attackers that arrived; `attackers_share`: of all messages that arrived
      - `attackers_lost`: messages from attackers that are not finite or too large, which count as absent
      - `attackers_beyond`: 1 if the other messages from attackers are more than the aggregator withstands, else 0
      - `messages_chosen` and `attackers_chosen`, if the rule chooses messages (Krum, the first half of Bulyan, the
        minimum diameter)

    Raises: ValueError for an aggregator that hides single messages (a modular sum), and for an aggregator with
      attackers inside; when the round is built, for a `who` that does not return a bool for each id, for messages of
      another shape, and as the aggregator does.

    Guarantees:
      - equals NumPy's messages under every rule (tests/adversary/test_byzantine.py::test_attackers_are_replaced)
      - the bits are the same on two devices (::test_same_bits_on_two_devices)
      - lost messages count as absent (::test_lost_messages), and a round of lost messages alone is skipped
        (::test_a_round_of_lost_messages_is_skipped)
      - chosen messages are counted (::test_chosen_attackers)
      - integers are refused (::test_integers_are_refused)
    """
    validate.part("aggregator", aggregator, Aggregator)
    validate.one_of("attack", type(attack), (Alone, Together, Omniscient))
    validate.function("who", who, "key, ids")
    if aggregator.facts.modulus is not None:
        validate.fail("aggregator", "a sum of numbers", "a modular sum", "Nobody sees single messages of that one.")
    if aggregator.facts.attackers is not None:
        hint = "The other attackers would count as honest: write one attack, whose `send` does both."
        validate.fail("aggregator", "one without attackers inside", "a corrupted one", hint)
    metrics = (*aggregator.facts.metrics, *METRICS, *CHOSEN[: 2 * aggregator.facts.chooses])
    attacker_mask = partial(_attacker_mask, who)
    if aggregator.facts.chooses and aggregator.rule is None:
        hint = "A rule sees all messages at once. An aggregator of your own without one states chooses=False."
        validate.fail("aggregator", "one with a `rule`, for it states that it chooses messages", "one without", hint)
    if aggregator.facts.chooses:
        aggregator = _counting_chosen(aggregator, attacker_mask)
    start_of_aggregator = start = aggregator.start
    if isinstance(attack, Together) and attack.start is not None:
        # The state is then a pair: that of the aggregator, and what the attackers remember.
        aggregator = _with_first_state(aggregator)
        start_of_attackers = attack.start
        start = lambda spec: (  # noqa: E731
            () if start_of_aggregator is None else start_of_aggregator(spec),
            start_of_attackers(spec),
        )
    if isinstance(attack, Alone):
        under_attack = _alone(aggregator, attack, attacker_mask)
    elif isinstance(attack, Together) and aggregator.rule is None:
        under_attack = _together(aggregator, attack, attacker_mask)
    else:
        under_attack = _side_by_side(aggregator, attack, attacker_mask)
    under_attack = under_attack._replace(start=start, rule=None)
    return under_attack.stating(sensitivity=None, homogeneous=False, metrics=metrics, attackers=who, chooses=False)


def _with_first_state(aggregator: Aggregator) -> Aggregator:
    """The aggregator for rounds whose state is a pair: its own state, and the attackers' memory."""

    def with_own_state(call: Callable | None) -> Callable | None:
        return call and (lambda key, round, *args: call(key, round._replace(state=round.state[0]), *args))

    calls = {name: with_own_state(getattr(aggregator, name)) for name in ("accumulate", "finalize", "rule")}
    return aggregator._replace(**calls)


def _sent_together(attack: Together, key: Array, honest: Honest, round: Round) -> tuple[PyTree, Callable]:
    """Returns (the message of all attackers, a function that adds their next memory to the aggregator's next state)."""
    if attack.start is None:
        return attack.send(key, honest), lambda state: state
    message, memory = attack.send(key, honest, round.state[1])
    return message, lambda state: [(state[0] if state else (), memory)]


def _counting_chosen(aggregator: Aggregator, who: Callable) -> Aggregator:
    """The aggregator with the number of messages that its rule chooses, and of attackers among them, as metrics.

    Args:
      aggregator: one whose rule chooses messages (`AggregatorFacts.chooses`).
      who: (key, round, ids [m]) -> [m] bool, which clients attack.
    """
    choosing_rule = aggregator.rule
    assert choosing_rule is not None, "`corrupted` refuses an aggregator that chooses messages without a rule"

    def rule(key, round, cohort):
        update, metrics, *state = choosing_rule(key, round, cohort)
        if "chosen" not in metrics:
            hint = "Return {'chosen': mask} of the messages that it takes, or state chooses=False."
            validate.fail("aggregator", "a rule that returns which messages it chose", sorted(metrics), hint)
        chosen = metrics["chosen"]
        is_attacker = who(key, round, cohort.ids) & cohort.arrived
        masks = {"messages_chosen": chosen, "attackers_chosen": chosen & is_attacker}
        counts = {name: mask.sum(dtype=jnp.int32) for name, mask in masks.items()}
        return update, {name: x for name, x in metrics.items() if name != "chosen"} | counts, *state

    facts = {name: getattr(aggregator.facts, name) for name in KEPT_FACTS}
    return with_cohort_check(by_rule(rule, start=aggregator.start, **facts), aggregator)


def _with_attacker_metrics(
    aggregator: Aggregator, update: PyTree, attackers: Array, lost: Array, arrived: Array
) -> tuple[PyTree, dict[str, Array]]:
    """Returns (the aggregate, the metrics of attackers).

    If every message was lost, the aggregate is NaN, which skips the round.

    Args:
      aggregator: the rule under attack; its facts say how many attackers it withstands.
      update: its aggregate.
      attackers: [] int32 messages from attackers.
      lost: [] int32, how many of these messages were lost.
      arrived: [] int32 messages, of all clients.
    """
    or_nan = lambda x: jnp.where(arrived > lost, x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.inexact) else x  # noqa: E731
    share = attackers.astype(jnp.float32) / jnp.maximum(arrived, 1).astype(jnp.float32)
    limit = 0 if aggregator.facts.withstands is None else aggregator.facts.withstands(arrived - lost)
    beyond = (attackers - lost > limit).astype(jnp.int32)
    metrics = {"attackers_met": attackers, "attackers_lost": lost, "attackers_share": share, "attackers_beyond": beyond}
    return jax.tree.map(or_nan, update), metrics


def _attacker_mask(who: Callable, key: Array, round: Round | None, ids: Array) -> Array:
    """Returns the clients that attack, [c] bool, by the key of the whole round.

    Results of another shape or dtype are refused: they would be broadcast, or combined bit by bit.
    """
    mask = jnp.asarray(who(key if round is None or round.key is None else round.key, ids))
    if mask.shape != ids.shape or mask.dtype != bool:
        validate.fail("who", f"a function that returns bool{list(ids.shape)}", f"{mask.dtype}{list(mask.shape)}")
    return mask


def _check_shapes(sent: PyTree, expected: PyTree) -> None:
    """Checks that an attack sends messages of the expected shapes."""
    shapes, expected_shapes = (jax.tree.map(jnp.shape, x) for x in (sent, expected))
    if shapes != expected_shapes:
        validate.fail("attack.send", f"a message of shapes {expected_shapes}", shapes)


def _is_sound(updates: PyTree, weights: Array) -> Array:
    """Tells which messages are finite and within the bound for honest messages, [c] bool."""
    peaks = [jax.vmap(engine.largest_magnitude)(x).astype(jnp.float32) for x in jax.tree.leaves(updates)]
    is_within = [(peak < LARGEST) & (peak * weights < LARGEST) for peak in peaks]  # False for NaN
    return jnp.stack(is_within).all(0) & (weights > 0) & (weights < LARGEST)


def _or_zeros(mask: Array, updates: PyTree) -> PyTree:
    """The updates where the mask is True, and zeros elsewhere."""
    return tree.where(mask, updates, tree.zeros_like(updates))


def _alone(aggregator: Aggregator, attack: Alone, who: Callable) -> Aggregator:
    """Makes the aggregator under an attack by attackers that each see their own message, replaced as it arrives.

    Args:
      aggregator: any aggregator of messages of floats.
      attack: its `send` is (key, message, weight) -> (message, weight) of one attacker.
      who: (key, round, ids [c]) -> [c] bool, which clients attack.

    Returns: an Aggregator whose carry is (that of `aggregator`, three [] int32 counts of messages).
    """

    def init(update_spec, num_slots):
        zero = jnp.zeros((), jnp.int32)
        return aggregator.init(update_spec, num_slots), {"met": zero, "lost": zero, "arrived": zero}

    def accumulate(key, round, carry, received):
        inner, counts = carry
        is_attacker = who(key, round, received.ids) & (received.weights > 0)
        keys = jax.random.wrap_key_data(
            engine.client_keys(stream(key, "attack"), received.ids), impl=jax.random.key_impl(key)
        )
        updates, weights = jax.vmap(attack.send)(keys, received.updates, received.weights)
        _check_shapes(updates, received.updates)
        sent = jax.tree.map(lambda x, y: x.astype(y.dtype), updates, received.updates)
        is_lost = is_attacker & ~_is_sound(sent, weights)
        sent = _or_zeros(~is_lost, sent)
        weights = jnp.where(is_lost, 0, weights)
        updates = tree.where(is_attacker, sent, received.updates)
        weights = jnp.where(is_attacker, weights, received.weights)
        inner = aggregator.accumulate(key, round, inner, received._replace(updates=updates, weights=weights))
        masks = {"met": is_attacker, "lost": is_lost, "arrived": received.weights > 0}
        return inner, {name: counts[name] + mask.sum(dtype=jnp.int32) for name, mask in masks.items()}

    def finalize(key, round, carry):
        inner, counts = carry
        update, metrics, *state = aggregator.finalize(key, round, inner)
        update, attacker_metrics = _with_attacker_metrics(
            aggregator, update, counts["met"], counts["lost"], counts["arrived"]
        )
        return update, metrics | attacker_metrics, *state

    return aggregator._replace(init=init, accumulate=accumulate, finalize=finalize)


def _together(aggregator: Aggregator, attack: Together, who: Callable) -> Aggregator:
    """The aggregator of a stream of messages under an attack by attackers that send one message together.

    Honest messages are accumulated as they arrive, and sums of them and of their squares give their moments. The
    attackers' message is accumulated at the end, once for each attacker.

    Args:
      aggregator: one without a `rule`, which keeps no messages.
      attack: its `send` makes one message of all attackers from the `Honest` moments.
      who: (key, round, ids [c]) -> [c] bool, which clients attack.

    Returns: an Aggregator. Its carry holds that of `aggregator` over honest messages; the exact sums of honest
    messages, of their squares and of their number; and of the attackers the weights [m] and the ids [m], by slot, with
    weight 0 in all other slots.
    """

    def init(update_spec, num_slots):
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, tree.at_least_float32(x.dtype)), update_spec)
        moments = exact_sums.zeros((wide, wide, jax.ShapeDtypeStruct((), jnp.float32)))
        slots = {"weights": jnp.zeros(num_slots, jnp.float32), "ids": jnp.zeros(num_slots, jnp.int32)}
        # Empty arrays that carry the dtypes of messages to `finalize`.
        dtypes = jax.tree.map(lambda x: jnp.zeros(0, x.dtype), update_spec)
        inner = aggregator.init(update_spec, num_slots)
        return {"inner": inner, "moments": moments, "attackers": slots, "dtypes": dtypes}

    def accumulate(key, round, carry, received):
        is_attacker = who(key, round, received.ids) & (received.weights > 0)
        updates = _or_zeros(~is_attacker, received.updates)
        weights = jnp.where(is_attacker, 0, received.weights)
        inner = aggregator.accumulate(key, round, carry["inner"], received._replace(updates=updates, weights=weights))
        wide = jax.tree.map(lambda x: x.astype(tree.at_least_float32(x.dtype)), updates)
        squares = jax.tree.map(lambda x: x * x, wide)
        moments = exact_sums.add(carry["moments"], (wide, squares, (weights > 0).astype(jnp.float32)))
        of_attackers = {
            "weights": jnp.where(is_attacker, received.weights, 0),
            "ids": jnp.where(is_attacker, received.ids, 0),
        }
        slots = {
            name: x.at[received.slots].set(of_attackers[name], mode="drop") for name, x in carry["attackers"].items()
        }
        return {**carry, "inner": inner, "moments": moments, "attackers": slots}

    def finalize(key, round, carry):
        weights = carry["attackers"]["weights"]
        ids = carry["attackers"]["ids"]
        total, squares, num_honest = exact_sums.total(carry["moments"])
        num_attackers = (weights > 0).sum(dtype=jnp.int32)
        honest = _moments(total, squares, num_honest, num_attackers)
        message, with_memory = _sent_together(attack, stream(key, "attack"), honest, round)
        _check_shapes(message, total)
        order = jnp.argsort(weights == 0, stable=True).astype(jnp.int32)  # the slots of attackers first
        sent = jax.tree.map(lambda x: x[None], tree.cast_like(message, carry["dtypes"]))

        def accumulate_attacker(i, state):
            inner, num_lost = state
            slot = order[i]
            is_sound = _is_sound(sent, weights[slot][None])
            weight = jnp.where(is_sound, weights[slot], 0)
            received = Received(_or_zeros(is_sound, sent), weight, ids[slot][None], slot[None])
            return aggregator.accumulate(key, round, inner, received), num_lost + (~is_sound[0]).astype(jnp.int32)

        start = (carry["inner"], jnp.zeros((), jnp.int32))
        inner, num_lost = jax.lax.fori_loop(0, num_attackers, accumulate_attacker, start)
        update, metrics, *state = aggregator.finalize(key, round, inner)
        update, attacker_metrics = _with_attacker_metrics(
            aggregator, update, num_attackers, num_lost, num_attackers + num_honest.astype(jnp.int32)
        )
        return update, metrics | attacker_metrics, *with_memory(state)

    return aggregator._replace(init=init, accumulate=accumulate, finalize=finalize)


def _moments(total: PyTree, squares: PyTree, number: Array, attackers: Array) -> Honest:
    """The moments of honest messages, from sums of messages and of their squares."""

    def mean(x):
        return x / jnp.maximum(number, 1).astype(x.dtype)

    def std(x, square):
        centred = square - x * mean(x)  # the sum of squares about the mean, which rounding may make negative
        return jnp.sqrt(jnp.maximum(centred / jnp.maximum(number - 1, 1).astype(x.dtype), 0))

    return Honest(jax.tree.map(mean, total), jax.tree.map(std, total, squares), number, attackers.astype(jnp.float32))


def _side_by_side(aggregator: Aggregator, attack: Together | Omniscient, who: Callable) -> Aggregator:
    """Makes the aggregator under an attack that needs all messages: they are held, and changed before the rule.

    Args:
      aggregator: any aggregator; one without a `rule` takes the changed messages one after the other.
      attack: one message of all attackers, or all their messages from all honest messages.
      who: (key, round, ids [m]) -> [m] bool, which clients attack.

    Returns: an Aggregator that holds all m messages.
    """
    aggregate_rule = aggregator.rule or partial(_streamed, aggregator)

    def rule(key, round, cohort):
        is_attacker = who(key, round, cohort.ids) & cohort.arrived
        attack_key = stream(key, "attack")
        with_memory = lambda state: state  # noqa: E731
        if isinstance(attack, Together):
            honest = honest_moments(cohort, is_attacker)
            message, with_memory = _sent_together(attack, attack_key, honest, round)
            changed = with_message(cohort.messages, is_attacker, message)
        else:
            # An omniscient attacker may compute what the server would make of any messages.
            aggregate = lambda messages: aggregate_rule(key, round, cohort._replace(messages=messages))[0]  # noqa: E731
            changed = attack.send(attack_key, cohort, is_attacker, aggregate)
        peak = peaks(changed)
        num_arrived = cohort.number
        is_lost = is_attacker & ~((peak < LARGEST) & (peak * cohort.weights < LARGEST))
        cohort = _without(cohort._replace(messages=changed), is_lost)
        update, metrics, *state = aggregate_rule(key, round, cohort)
        num_attackers = is_attacker.sum(dtype=jnp.int32)
        num_lost = is_lost.sum(dtype=jnp.int32)
        update, attacker_metrics = _with_attacker_metrics(aggregator, update, num_attackers, num_lost, num_arrived)
        return update, metrics | attacker_metrics, *with_memory(state)

    facts = {name: getattr(aggregator.facts, name) for name in KEPT_FACTS}
    return with_cohort_check(by_rule(rule, start=aggregator.start, **facts), aggregator)


def _without(cohort: SideBySide, lost: Array) -> SideBySide:
    """Returns the cohort as if the lost messages had not arrived: zeros, sorted behind the others."""
    zeros = jax.tree.map(jnp.zeros_like, one_message(cohort.messages, jnp.int32(0)))
    messages = with_message(cohort.messages, lost, zeros)
    has_arrived = cohort.arrived & ~lost
    order = jnp.argsort(~has_arrived, stable=True)
    messages = dataclasses.replace(messages, order=messages.order[order])
    weights = jnp.where(has_arrived, cohort.weights, 0)[order]
    ids = jnp.where(has_arrived, cohort.ids, -1)[order]
    return SideBySide(messages, weights, ids, has_arrived.sum(dtype=jnp.int32))


def _streamed(aggregator: Aggregator, key: Array, round: Round, cohort: SideBySide):
    """The result of an aggregator that takes a stream of messages, for the messages of a cohort."""
    first_message = one_message(cohort.messages, jnp.int32(0))
    carry = aggregator.init(tree.spec(first_message), cohort.messages.number)

    def accumulate_message(rank, carry):
        message = jax.tree.map(lambda x: x[None], one_message(cohort.messages, rank))
        received = Received(message, cohort.weights[rank][None], cohort.ids[rank][None], rank[None])
        return aggregator.accumulate(key, round, carry, received)

    return aggregator.finalize(key, round, jax.lax.fori_loop(0, cohort.number, accumulate_message, carry))
