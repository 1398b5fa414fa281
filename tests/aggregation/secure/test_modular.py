"""Sums of integers modulo a power of two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import InvalidType, aggregation, transform
from fedjax_sim.types import Received
from tests.laws import problems as p
from tests.refusals import refused

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)


def aggregate(aggregator, messages, weights):
    """The aggregate of one chunk with all messages."""
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), messages)
    count = len(weights)

    @jax.jit
    def run(messages, weights):
        received = Received(messages, weights, jnp.arange(count), jnp.arange(count))
        return aggregator.finalize(KEY, None, aggregator.accumulate(KEY, None, aggregator.init(spec, count), received))

    return run(jax.tree.map(jnp.asarray, messages), jnp.asarray(weights, jnp.float32))


@pytest.mark.default_rows("9", "33", "64")
@pytest.mark.parametrize("bits", [2, 9, 20, 31, 32, 33, 50, 64])
def test_sums_are_exact(bits):
    """Against Python's integers modulo 2^bits, messages over the whole of int32, so that partial sums wrap many times.

    Catches a lift that forgets the sign, a sum in float32, and absent or heavy messages counted by their weight.
    """
    messages = RNG.integers(-(2**31), 2**31, (30, 8))
    weights = np.where(np.arange(30) % 3 == 0, 0, 1 + np.arange(30) * 100)
    half = 2 ** (bits - 1)
    true = [(int(x) + half) % 2**bits - half for x in messages[weights > 0].sum(0)]
    found, metrics = aggregate(
        aggregation.modular_sum(1.0, modulus_bits=bits),
        {"a": np.int32(messages), "b": np.int32(messages[:, 0])},
        weights,
    )
    assert found["a"].dtype == jnp.float32 and float(metrics["total_weight"]) == 20
    for got, x in zip([*np.asarray(found["a"]).tolist(), float(found["b"])], [*true, true[0]], strict=True):
        assert got == np.float32(x) if bits <= 32 else abs(got - x) <= abs(x) * 2.0**-22


def test_sums_in_a_prime_field_are_exact():
    """Against Python's integers modulo 2^31 - 1, lifted; and means over those who are there."""
    messages = RNG.integers(-(2**30), 2**30, (30, 8))
    weights = np.arange(30) % 3
    q = 2**31 - 1
    true = np.float32([(int(x) + q // 2) % q - q // 2 for x in messages[weights > 0].sum(0)])
    found, _ = aggregate(aggregation.modular_sum(1.0, prime=True), np.int32(messages), weights)
    assert found.tolist() == true.tolist()
    found, _ = aggregate(aggregation.modular_sum(None, prime=True), np.int32(messages), weights)
    np.testing.assert_allclose(found, true / 20, rtol=1e-6)
    assert aggregation.modular_sum(None).facts.sensitivity is None


def test_small_sums_survive_wrapping():
    """Partial sums leave the range of 8 bits, the sum does not. Catches sums that saturate."""
    messages = np.int32([[100], [100], [-120], [100], [-100], [-50]])
    found, _ = aggregate(aggregation.modular_sum(10.0, modulus_bits=8), messages, np.ones(6))
    np.testing.assert_allclose(found, [3.0], rtol=1e-6)


def test_nothing_received_is_zero():
    """Catches a lift of zero to something else."""
    found, metrics = aggregate(aggregation.modular_sum(4.0), np.int32([[7], [9]]), np.zeros(2))
    assert found.tolist() == [0] and float(metrics["total_weight"]) == 0


def test_floats_are_refused():
    """Catches floats whose bits are summed, in the aggregator and by `federated`."""
    for dtype in (jnp.float32, jnp.uint32, jnp.int8):
        with refused("update", rule="int32", hint="discrete_gaussian_mechanism", kind=InvalidType):
            aggregation.modular_sum(1.0).init(jax.ShapeDtypeStruct((3,), dtype), 4)
    with refused("transform", rule="modular"):
        p.Federation(aggregator=aggregation.modular_sum(1.0), transform=transform.clip(1.0))


def test_facts():
    """Catches a modulus off by a bit, and a sensitivity of the sum for the mean."""
    aggregator = aggregation.modular_sum(denominator=8.0, modulus_bits=20)
    assert (aggregator.facts.modulus, aggregator.facts.sensitivity) == (2**20, 0.125)
    assert aggregation.modular_sum(1.0).facts.modulus == 2**32


@pytest.mark.parametrize("bits", [1, 65, 16.0, True])
def test_wrong_options_are_refused(bits):
    """Catches rings that two words do not hold, and two moduli at once."""
    with pytest.raises((ValueError, TypeError), match="modulus_bits: expected"):
        aggregation.modular_sum(1.0, modulus_bits=bits)
    with pytest.raises(ValueError, match="denominator: expected"):
        aggregation.modular_sum(0.0)
    with refused("modulus_bits", rule="prime=True"):
        aggregation.modular_sum(1.0, modulus_bits=31, prime=True)
    with pytest.raises(TypeError, match="prime: expected True or False"):
        aggregation.modular_sum(1.0, prime=1)


def test_parts_of_messages_are_refused():
    """Catches a ring that `federated` no longer sees, and so never checks."""
    with refused("parts['a']", value="a modular or secure sum"):
        aggregation.by_part({"a": aggregation.modular_sum(10.0)})
