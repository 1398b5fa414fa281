"""Sums of integers in which clients count by their examples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, population, sampling, transform
from fedjax_sim.aggregation import additive_shares, by_examples, modular_sum, real_secure_sum, secure_sum
from fedjax_sim.types import Cohort, Received, Round, Wire

M, D = 9, 4
RNG = np.random.default_rng(0)
MESSAGES = RNG.integers(-200, 200, (M, D)).astype(np.int32)
WEIGHTS = np.array([1, 50, 7, 0, 3, 900, 2, 2, 1], np.float32)
KEY = jax.random.key(3)
PLAIN = modular_sum(1.0, modulus_bits=40)
HIDDEN = {
    "modular": lambda rule: rule,
    "secure": lambda rule: secure_sum(rule, 3, dropout=0.05, min_messages=3),
    "masked": lambda rule: secure_sum(rule, 3, dropout=0.05, min_messages=3, masks=True),
    "real": lambda rule: real_secure_sum(rule, 3, dropout=0.05, min_messages=3),
    "servers": lambda rule: additive_shares(rule, 2, dropout=0.2, masks=True),
}


def applied(made, messages=MESSAGES, weights=WEIGHTS, ids=None):
    """(the aggregate, the metrics) of messages that arrive in two chunks."""
    number = len(weights)
    slots, there = jnp.arange(number), jnp.asarray(weights > 0)
    ids = slots if ids is None else jnp.asarray(ids)
    round = Round(Cohort(ids, there, there))

    @jax.jit
    def run(messages, weights):
        carry = made.init(jax.ShapeDtypeStruct((messages.shape[1],), jnp.int32), number)
        for part in (slice(0, number // 2), slice(number // 2, None)):
            carry = made.accumulate(KEY, round, carry, Received(messages[part], weights[part], ids[part], slots[part]))
        return made.finalize(KEY, round, carry)

    sent = np.where(weights[:, None] > 0, messages, 0)
    return jax.device_get(run(jnp.asarray(sent), jnp.asarray(weights)))


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", [*HIDDEN])
def test_the_weighted_mean_of_those_who_stay(name):
    """In NumPy; weights above the largest count as that, and are counted.

    Catches weights that masks or shares leave out, weights of those who left, and a divisor of messages.
    """
    made = by_examples(HIDDEN[name](PLAIN), max_weight=60)
    found, metrics = applied(made)
    here = WEIGHTS > 0
    if made.stays is not None:
        there = jnp.asarray(here)
        here &= np.asarray(made.stays(KEY, Round(Cohort(jnp.arange(M), there, there))))
        assert 3 <= here.sum() < (WEIGHTS > 0).sum()  # some left, and the sum opened
    weights = np.minimum(WEIGHTS, 60) * here
    np.testing.assert_allclose(found, weights @ MESSAGES / weights.sum(), rtol=1e-6)
    assert metrics["capped_weights"] == 1 and metrics["total_weight"] == here.sum()


def test_a_weight_is_as_many_messages():
    """Bit for bit. Catches products that are rounded before they are summed."""
    few, counts = MESSAGES[:3], [1, 50, 7]
    found, _ = applied(by_examples(PLAIN, 60), few, np.array(counts, np.float32))
    alike, _ = applied(by_examples(PLAIN, 60), np.repeat(few, counts, axis=0), np.ones(sum(counts), np.float32))
    np.testing.assert_array_equal(found, alike)


def squared_distance(params, examples, key):
    return (params["w"][0] - examples["y"]) ** 2 / 2


def recipe(aggregator, bits=8):
    change = transform.quantize(bits, range=1.0, integers=True)
    work = {"num_steps": 1, "weighting": "examples", "transform": change, "aggregator": aggregator, "mesh": None}
    return algorithms.fedavg(squared_distance, sampling.full(3), optax.sgd(0.5), **work)


@pytest.mark.full
def test_a_round_by_examples():
    """Clients with 1, 50 and 7 rows at 0.2, 0.4 and 0.6. Catches clients that count alike: 0.2 where 0.21 is meant."""
    sizes, centres = np.array([1, 50, 7]), np.array([0.2, 0.4, 0.6])
    people = population.stored({"y": np.repeat(centres, sizes).astype(np.float32)}, [0, 1, 51, 58])
    made = recipe(by_examples(secure_sum(modular_sum(1.0, modulus_bits=40), 2), 50), bits=12)
    state = made.init(KEY, {"w": jnp.zeros(1)}, people)
    state, _ = jax.jit(made.step)(KEY, state, people)
    np.testing.assert_allclose(made.params(state)["w"], 0.5 * sizes @ centres / sizes.sum(), atol=1e-3)


def test_bytes():
    """One number more than without weights, in a hidden sum. Catches a weight that travels for nothing."""
    spec = jax.ShapeDtypeStruct((100,), jnp.int32)
    hidden = secure_sum(PLAIN, 6)
    for way, more in (("wire", PLAIN.facts.modulus.bit_length() - 1), ("wire_down", 0)):
        plain, weighed = (getattr(x.facts, way)(spec, Wire(100, 3200), 10) for x in (hidden, by_examples(hidden, 9)))
        assert weighed.bits - plain.bits == more


def test_what_is_refused():
    """Catches sums and products that wrap, noise without a bound, and weights that are multiplied twice."""
    for match, call in {
        "aggregator: expected a modular sum, or one that hides": lambda: by_examples(aggregation.mean(), 5),
        "got 'one by examples already'": lambda: by_examples(by_examples(PLAIN, 5), 5),
        "max_weight: expected an integer": lambda: by_examples(PLAIN, 0),
        "aggregator: expected a modular_sum itself": lambda: applied(secure_sum(by_examples(PLAIN, 5), 2)),
        "or sums would wrap": lambda: recipe(by_examples(modular_sum(1.0, modulus_bits=16), 1000)),
        "aggregator.max_weight: expected products of 32 bits": lambda: recipe(
            by_examples(modular_sum(1.0, modulus_bits=64), 2**30)
        ),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
