"""Many rules and many attacks as one program: an index says which of them works, and only that one is computed.

A grid of rules, attacks and numbers of attackers is then one compiled program, whose points differ in three numbers;
compiled one by one, the compositions would take longer than all their rounds. Points must run one after the other:
under a vmap every rule and every attack would be computed for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fedjax_sim import adversary, engine
from fedjax_sim.adversary.kinds import honest_moments
from fedjax_sim.engine.all_messages.all_messages import SideBySide, by_rule, with_cohort_check
from fedjax_sim.engine.all_messages.messages import Messages, one_message, with_message
from fedjax_sim.prng import stream
from fedjax_sim.types import Aggregator, Array, Attackers

Attack = adversary.Alone | adversary.Together | adversary.Omniscient

__all__ = ["attack_of_index", "drawn_clients", "first_clients", "rule_of_index"]


def rule_of_index(rules: Sequence[Aggregator], index: Array) -> Aggregator:
    """The aggregator rules[index]; all of them see a round's messages at once.

    Args:
      index: [] int32, may be traced.
    """

    def rule(key, round, cohort):
        def one(i: int) -> Callable:
            def call(round, cohort):
                update, _, *state = rules[i].rule(key, round._replace(state=round.state[i]), cohort)
                return update, tuple(state[0] if state and i == j else old for j, old in enumerate(round.state))

            return call

        update, state = jax.lax.switch(index, [*map(one, range(len(rules)))], round, cohort)
        return update, {}, state

    def start(update_spec):
        return tuple(() if one.start is None else one.start(update_spec) for one in rules)

    made = by_rule(rule, weighted=any(one.facts.weighted for one in rules), start=start)
    for one in rules:
        made = with_cohort_check(made, one)
    return made


def attack_of_index(attacks: Sequence[Attack], index: Array) -> adversary.Omniscient:
    """The attack attacks[index], as one of attackers who see all messages; weights are not forged."""

    def send(key, cohort, bad, aggregate):
        calls = [lambda cohort, bad, attack=one: _sent(attack, key, cohort, bad, aggregate) for one in attacks]
        return jax.lax.switch(index, calls, cohort, bad)

    return adversary.Omniscient(send)


def _sent(attack, key: Array, cohort: SideBySide, bad: Array, aggregate: Callable) -> Messages:
    if isinstance(attack, adversary.Omniscient):
        return attack.send(key, cohort, bad, aggregate)
    if isinstance(attack, adversary.Together):
        return with_message(cohort.messages, bad, attack.send(key, honest_moments(cohort, bad)))
    words = engine.client_keys(key, cohort.ids)  # as `adversary.corrupted` has them
    keys = jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))

    def one(rank, messages):
        update, _ = attack.send(keys[rank], one_message(cohort.messages, rank), cohort.weights[rank])
        return with_message(messages, bad & (jnp.arange(bad.size) == rank), update)

    return jax.lax.fori_loop(0, bad.size, one, cohort.messages)


def first_clients(number: Array) -> Attackers:
    """Attackers: the clients of the lowest ids."""
    return lambda key, ids: ids < number


def drawn_clients(key: Array, size: int, number: Array) -> Attackers:
    """Attackers: so many of a population's clients, drawn once by the key; more of them are these and others."""
    rank = jnp.argsort(jax.random.permutation(stream(key, "attackers"), size))
    return lambda _, ids: rank[ids] < number
