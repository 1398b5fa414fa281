"""A separate aggregator for each part of an update."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.prng import stream
from fedjax_sim.types import Aggregator, AggregatorFacts

__all__ = ["by_part"]

WHOLE = ("modulus", "least", "wire", "wire_down")  # facts that a part alone cannot state


def by_part(parts: Mapping[str, Aggregator]) -> Aggregator:
    """For updates that are dicts: each entry has its own aggregator.

    Args:
      parts: an aggregator for every key of the update, such as {"params": mean(), "control": keep_old(W)}.

    Returns: an Aggregator whose metrics are prefixed by the key, and whose sensitivity is the largest of the parts',
    since an update's motion is split between them.

    Raises: TypeError for what is not a dict of aggregators, ValueError for modular and secure sums and for designs that
    differ.

    Guarantees: each part's aggregate is that of its aggregator alone, bit for bit
    (tests/aggregation/test_per_part.py::test_each_part_is_alone), with a random stream of its own
    (::test_parts_draw_from_their_own_streams); who attacks in a round attacks every part
    (::test_attackers_attack_every_part); what parts state of their metrics is kept (::test_metrics_are_stated); weights
    made for different samplers are refused (tests/laws/test_facts.py::test_weights_belong_to_the_sampler).

    >>> from fedjax_sim import aggregation
    >>> by_part({"model": aggregation.fixed_mean(4.0), "count": aggregation.total()}).facts.sensitivity
    1.0
    """
    if not isinstance(parts, Mapping) or not parts:
        validate.fail("parts", "a dict of aggregators", parts, error=TypeError)
    for name, rule in parts.items():
        validate.part(f"parts[{name!r}]", rule, Aggregator)
        own_facts = (getattr(rule.facts, fact) for fact in WHOLE)
        if any(own is not None for own in (*own_facts, rule.view, rule.stays)):
            found = "a modular or secure sum"
            validate.fail(f"parts[{name!r}]", "a sum of numbers that all give", found, "Use it for whole updates.")
    designs = {name: rule.facts.design for name, rule in parts.items() if rule.facts.weighted}
    design = next(iter(designs.values()), None)
    for name, other in designs.items():
        if other != design:
            hint = "One sampler draws for all parts: make every part that takes weights for its design, or none."
            validate.fail(f"parts[{name!r}].design", f"that of the other parts, {design}", other, hint)

    stateful = any(rule.start is not None for rule in parts.values())

    def init(update_spec, num_slots):
        if not isinstance(update_spec, dict) or update_spec.keys() != parts.keys():
            got = sorted(update_spec) if isinstance(update_spec, dict) else type(update_spec).__name__
            validate.fail("update", f"a dict of {', '.join(sorted(parts))}", got)
        return {name: rule.init(update_spec[name], num_slots) for name, rule in parts.items()}

    def own(key, round, name):
        """The part's view of the round: its own state, and the key that says who attacks."""
        round = round if round is None or round.key is not None else round._replace(key=key)
        return round._replace(state=round.state[name]) if stateful else round

    def accumulate(key, round, carry, received):
        def one(name, rule):
            mine = received._replace(updates=received.updates[name])
            return rule.accumulate(stream(key, name), own(key, round, name), carry[name], mine)

        return {name: one(name, rule) for name, rule in parts.items()}

    def start(update_spec):
        return {name: () if rule.start is None else rule.start(update_spec[name]) for name, rule in parts.items()}

    def finalize(key, round, carry):
        done = {
            name: rule.finalize(stream(key, name), own(key, round, name), carry[name]) for name, rule in parts.items()
        }
        metrics = {f"{name}_{metric}": x for name, found in done.items() for metric, x in found[1].items()}
        states = {name: found[2] if len(found) > 2 else () for name, found in done.items()}
        return {name: found[0] for name, found in done.items()}, metrics, *([states] if stateful else [])

    bounds = [rule.facts.sensitivity for rule in parts.values()]
    weighted = {rule.facts.weighted for rule in parts.values()}
    who = [rule.facts.attackers for rule in parts.values() if rule.facts.attackers is not None]
    attackers = lambda key, ids: functools.reduce(operator.or_, (one(key, ids) for one in who))  # noqa: E731
    limits = [rule.facts.withstands for rule in parts.values()]
    least = lambda number: functools.reduce(jnp.minimum, (limit(number) for limit in limits))  # noqa: E731
    stated = {name: rule.facts.metrics for name, rule in parts.items()}
    facts = AggregatorFacts(
        sensitivity=None if None in bounds else max(bounds),
        weighted=True in weighted,
        partly_weighted=len(weighted) == 2,
        homogeneous=all(rule.facts.homogeneous for rule in parts.values()),
        design=design,
        metrics=tuple(metric._replace(name=f"{name}_{metric.name}") for name in stated for metric in stated[name]),
        attackers=attackers if who else None,
        withstands=None if None in limits else least,
    )
    return Aggregator(init, accumulate, finalize, facts, start=start if stateful else None)
