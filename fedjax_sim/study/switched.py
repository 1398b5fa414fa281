"""This module combines many rules and many attacks into one program, in which an index selects a rule and an attack.

A grid of rules, attacks and numbers of attackers is then one compiled program whose points differ in three numbers.
Compiled separately, the combinations would take longer than all their rounds.

Only the selected rule is computed, as a branch of `jax.lax.switch`. Points must therefore run one after the other:
under a vmap every rule and every attack would be computed for each point.
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


def rule_of_index(rules: Sequence[Aggregator], index: Array) -> Aggregator:
    """Returns an aggregator that behaves as rules[index].

    Args:
      rules: aggregators that see all messages of a round at once.
      index: [] int32, may be traced.
    """

    def rule(key, round, cohort):
        def branch(i: int) -> Callable:
            own_rule = rules[i].rule
            assert own_rule is not None, "it sees all messages at once"

            def call(round, cohort):
                # The combined state has an entry for each rule; a branch reads and writes its own entry.
                update, _, *state = own_rule(key, round._replace(state=round.state[i]), cohort)
                return update, tuple(state[0] if state and i == j else old for j, old in enumerate(round.state))

            return call

        update, state = jax.lax.switch(index, [*map(branch, range(len(rules)))], round, cohort)
        # Branches must return the same structure, and each rule has its own info: none is reported.
        return update, {}, state

    def start(update_spec):
        return tuple(() if member.start is None else member.start(update_spec) for member in rules)

    combined = by_rule(rule, weighted=any(member.facts.weighted for member in rules), start=start)
    # Whatever index comes, a cohort must be large enough for every rule.
    for member in rules:
        combined = with_cohort_check(combined, member)
    return combined


def attack_of_index(attacks: Sequence[Attack], index: Array) -> adversary.Omniscient:
    """Returns an attack that behaves as attacks[index].

    Its type is that of attackers who see all messages, because the other kinds of attackers see less. Weights are not
    forged.

    Args:
      attacks: attacks of any kind.
      index: [] int32, may be traced.
    """

    def send(key, cohort, bad, aggregate):
        branches = [
            # A default argument binds this attack; a closure would see the last attack of the loop.
            lambda cohort, bad, attack=attack: _sent_messages(attack, key, cohort, bad, aggregate)
            for attack in attacks
        ]
        return jax.lax.switch(index, branches, cohort, bad)

    return adversary.Omniscient(send)


def _sent_messages(attack, key: Array, cohort: SideBySide, bad: Array, aggregate: Callable) -> Messages:
    """Returns the round's messages, with those of the attackers replaced as the attack says.

    Args:
      attack: of any kind.
      key: the attack's random key.
      cohort: the m messages, as honest clients would send them.
      bad: [m] bool, which of them come from attackers.
      aggregate: messages -> what the server would aggregate; for attackers who see all messages.
    """
    if isinstance(attack, adversary.Omniscient):
        return attack.send(key, cohort, bad, aggregate)
    if isinstance(attack, adversary.Together):
        return with_message(cohort.messages, bad, attack.send(key, honest_moments(cohort, bad)))
    # An attacker who acts alone gets the same key here as from `adversary.corrupted`, so results agree.
    key_words = engine.client_keys(key, cohort.ids)
    keys = jax.random.wrap_key_data(key_words, impl=jax.random.key_impl(key))

    def attack_slot(slot, messages):
        update, _ = attack.send(keys[slot], one_message(cohort.messages, slot), cohort.weights[slot])
        return with_message(messages, bad & (jnp.arange(bad.size) == slot), update)

    return jax.lax.fori_loop(0, bad.size, attack_slot, cohort.messages)


def first_clients(number: Array) -> Attackers:
    """Makes the clients with the lowest ids attackers.

    Args:
      number: [] how many; it may be traced.
    """
    return lambda key, ids: ids < number


def drawn_clients(key: Array, size: int, number: Array) -> Attackers:
    """Makes randomly drawn clients attackers, the same ones in every round.

    Attackers are nested: with one key, the attackers for a larger number include those for a smaller number.

    Args:
      key: decides the order in which clients become attackers.
      size: the size of the population.
      number: [] how many attack; it may be traced.
    """
    # rank[i] is the place of client i in a random order.
    rank = jnp.argsort(jax.random.permutation(stream(key, "attackers"), size))
    return lambda _, ids: rank[ids] < number
