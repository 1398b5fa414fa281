"""`by_part` aggregates each entry of an update with an aggregator of its own."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.prng import stream
from fedjax_sim.types import Aggregator, AggregatorFacts

# Facts about the whole message, which the aggregator of one entry cannot state.
WHOLE_FACTS = ("modulus", "least", "wire", "wire_down")


def by_part(parts: Mapping[str, Aggregator]) -> Aggregator:
    """Aggregates updates that are dicts: each entry is aggregated by an aggregator of its own.

    Args:
      parts: an aggregator for every key of the update, such as {"params": mean(), "control": keep_old(W)}.

    Returns: an Aggregator. The name of each metric is prefixed by its key, as in "params_total_weight". The sensitivity
    is the largest of the parts', since an update's motion is split between them.

    Raises: TypeError for an argument that is not a dict of aggregators; ValueError for modular and secure sums, and for
      parts whose designs differ.

    Guarantees:
      - each part's aggregate is that of its aggregator alone, bit for bit
        (tests/aggregation/test_per_part.py::test_each_part_is_alone)
      - each part has a random stream of its own (::test_parts_draw_from_their_own_streams)
      - a client who attacks in a round attacks every part (::test_attackers_attack_every_part)
      - what the parts state of their metrics is kept (::test_metrics_are_stated)
      - weights made for different samplers are refused (tests/laws/test_facts.py::test_weights_belong_to_the_sampler)

    >>> from fedjax_sim import aggregation
    >>> by_part({"model": aggregation.fixed_mean(4.0), "count": aggregation.total()}).facts.sensitivity
    1.0
    """
    if not isinstance(parts, Mapping) or not parts:
        validate.fail("parts", "a dict of aggregators", parts, error=TypeError)
    for name, rule in parts.items():
        validate.part(f"parts[{name!r}]", rule, Aggregator)
        whole_facts = (getattr(rule.facts, fact) for fact in WHOLE_FACTS)
        if any(fact is not None for fact in (*whole_facts, rule.view, rule.stays)):
            refused = "a modular or secure sum"
            validate.fail(f"parts[{name!r}]", "a sum of numbers that all give", refused, "Use it for whole updates.")
    designs = {name: rule.facts.design for name, rule in parts.items() if rule.facts.weighted}
    design = next(iter(designs.values()), None)
    for name, other_design in designs.items():
        if other_design != design:
            hint = "One sampler draws for all parts: make every part that takes weights for its design, or none."
            validate.fail(f"parts[{name!r}].design", f"that of the other parts, {design}", other_design, hint)

    stateful = any(rule.start is not None for rule in parts.values())

    def init(update_spec, num_slots):
        if not isinstance(update_spec, dict) or update_spec.keys() != parts.keys():
            received = sorted(update_spec) if isinstance(update_spec, dict) else type(update_spec).__name__
            validate.fail("update", f"a dict of {', '.join(sorted(parts))}", received)
        return {name: rule.init(update_spec[name], num_slots) for name, rule in parts.items()}

    def round_of_part(key, round, name):
        """The round as a part sees it: with the part's state, and the key that says who attacks."""
        # The key of the whole round is kept before the parts get keys of their own: attackers are drawn from it, so the
        # same clients attack every part.
        if round is None:
            return None
        round = round if round.key is not None else round._replace(key=key)
        return round._replace(state=round.state[name]) if stateful else round

    def accumulate(key, round, carry, received):
        def accumulate_part(name, rule):
            entry = received._replace(updates=received.updates[name])
            return rule.accumulate(stream(key, name), round_of_part(key, round, name), carry[name], entry)

        return {name: accumulate_part(name, rule) for name, rule in parts.items()}

    def start(update_spec):
        return {name: () if rule.start is None else rule.start(update_spec[name]) for name, rule in parts.items()}

    def finalize(key, round, carry):
        # Of each part: (aggregate, metrics), followed by the next state if the part has one.
        results = {
            name: rule.finalize(stream(key, name), round_of_part(key, round, name), carry[name])
            for name, rule in parts.items()
        }
        metrics = {f"{name}_{metric}": x for name, result in results.items() for metric, x in result[1].items()}
        states = {name: result[2] if len(result) > 2 else () for name, result in results.items()}
        aggregate = {name: result[0] for name, result in results.items()}
        return aggregate, metrics, *([states] if stateful else [])

    sensitivities = [rule.facts.sensitivity for rule in parts.values() if rule.facts.sensitivity is not None]
    weighted = {rule.facts.weighted for rule in parts.values()}
    attacker_masks = [rule.facts.attackers for rule in parts.values() if rule.facts.attackers is not None]
    attackers = lambda key, ids: functools.reduce(operator.or_, (who(key, ids) for who in attacker_masks))  # noqa: E731
    # The whole withstands as many attackers as its weakest part.
    limits = [rule.facts.withstands for rule in parts.values() if rule.facts.withstands is not None]
    least = lambda number: functools.reduce(jnp.minimum, (limit(number) for limit in limits))  # noqa: E731
    stated = {name: rule.facts.metrics for name, rule in parts.items()}
    facts = AggregatorFacts(
        sensitivity=max(sensitivities) if len(sensitivities) == len(parts) else None,
        weighted=True in weighted,
        partly_weighted=len(weighted) == 2,
        homogeneous=all(rule.facts.homogeneous for rule in parts.values()),
        design=design,
        metrics=tuple(metric._replace(name=f"{name}_{metric.name}") for name in stated for metric in stated[name]),
        attackers=attackers if attacker_masks else None,
        withstands=least if len(limits) == len(parts) else None,
    )
    return Aggregator(init, accumulate, finalize, facts, start=start if stateful else None)
