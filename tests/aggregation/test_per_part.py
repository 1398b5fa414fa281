"""A separate aggregator for each part of a message."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fedjax_sim import InvalidType, adversary
from fedjax_sim.aggregation import by_part, extrapolated, fixed_mean, gather, mean, median, total
from fedjax_sim.types import Received, Round
from tests.laws import laws
from tests.refusals import refused

KEY = jax.random.key(0)


@pytest.mark.optimised
def test_each_part_is_alone():
    """Catches parts that are swapped, or weighed by one another's rule."""
    rules = {"a": mean(), "b": fixed_mean(7.0, weighting="examples")}
    updates = {"a": jax.random.normal(KEY, (3, 2)), "b": {"w": jnp.arange(3.0)}}
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), updates)
    received = Received(updates, jnp.array([1.0, 0.0, 5.0]), jnp.arange(3), jnp.arange(3))
    both = by_part(rules)

    def result(rule, spec, received):
        return rule.finalize(KEY, None, rule.accumulate(KEY, None, rule.init(spec, 3), received))

    @jax.jit
    def together_and_alone(received):
        each = {name: received._replace(updates=received.updates[name]) for name in rules}
        return result(both, spec, received), {name: result(rules[name], spec[name], each[name]) for name in rules}

    (aggregate, metrics), alone = together_and_alone(received)
    for name, (expected, known) in alone.items():
        laws.check_equal_bits(expected, aggregate[name], name)
        assert metrics[f"{name}_total_weight"] == known["total_weight"]
    assert both.facts.sensitivity is None
    assert by_part({"a": fixed_mean(4.0), "b": fixed_mean(2.0)}).facts.sensitivity == 0.5


def test_wrong_input():
    """Catches a part of a message that no aggregator takes."""
    with refused("parts['a']", value="function", rule="Aggregator", hint="factory", kind=InvalidType):
        by_part({"a": total})
    with pytest.raises(TypeError, match="parts: expected a dict of aggregators"):
        by_part({})
    stated = [total().stating(**fact) for fact in ({"modulus": 8}, {"least": 2}, {"wire": print}, {"wire_down": print})]
    for part in (*stated, total()._replace(view=print), total()._replace(stays=print)):
        with refused("parts['a']", value="a modular or secure sum", hint="whole updates"):
            by_part({"a": part})
    with refused("update", value=["a", "b"], rule="a dict of a"):
        by_part({"a": total()}).init({"a": jnp.zeros(1), "b": jnp.zeros(1)}, 2)


@pytest.mark.full
def test_attackers_attack_every_part():
    """Attackers drawn anew in a round send ones, others zeros: both parts have the same mean, nested parts too, and
    another one in another round. Catches attackers of each part's own stream."""
    who = adversary.share_of_clients(0.5, each_round=True)
    part = adversary.corrupted(mean(weighting="uniform"), adversary.large_value(1.0), who)
    held = adversary.corrupted(median(), adversary.inner_product(1.0), who)
    made = by_part({"a": part, "b": by_part({"c": part, "d": held})})
    m, found = 64, set()
    updates = {"a": jnp.zeros((m, 2)), "b": {"c": jnp.zeros((m, 1)), "d": jnp.zeros((m, 1))}}
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), updates)
    received = Received(updates, jnp.ones(m), jnp.arange(m), jnp.arange(m))
    round = Round(None)

    @jax.jit
    def run(key):
        return made.finalize(key, round, made.accumulate(key, round, made.init(spec, m), received))

    for seed in range(3):
        update, metrics = run(jax.random.key(seed))
        assert update["a"][0] == update["b"]["c"][0] == metrics["a_attackers_met"] / m
        assert metrics["a_attackers_met"] == metrics["b_d_attackers_met"]
        found.add(float(update["a"][0]))
    assert len(found) > 1


def test_parts_draw_from_their_own_streams():
    """Catches one key for all parts, which draw the same numbers from it."""
    drawn = gather(lambda key, updates, weights, ids: updates[0] + jax.random.normal(key, (3,)))
    both = by_part({"a": drawn, "b": drawn})
    carry = both.init({name: jnp.zeros(3) for name in "ab"}, 2)
    found, _ = both.finalize(KEY, None, carry)
    assert (found["a"] != found["b"]).all()


def test_metrics_are_stated():
    """Catches numbers in a round's Info of which logs and pages no longer know what they are."""
    both = by_part({"a": extrapolated(), "b": mean()})
    spec = {name: jax.ShapeDtypeStruct((2,), jnp.float32) for name in "ab"}
    _, found = both.finalize(KEY, None, both.init(spec, 3))
    (stated,) = both.facts.metrics
    assert stated.name == "a_extrapolation" and stated.name in found and stated.pooled == "mean"
