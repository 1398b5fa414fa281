"""The two-state chain of availability, against its transition matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import network

IDS = jnp.arange(4000)
ON, OFF, SLOT = 600.0, 1800.0, 120  # leaves 1 in 5, comes 1 in 15


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("start", [0, 2**31 - 10 * SLOT])
def test_the_law_is_the_chains(start):
    """Frequencies of pairs of states 1, 2 and 5 slots apart against powers of the matrix, 5 standard errors.

    Catches a chain that restarts at each query, forgets too early, or has the two means exchanged.
    """
    condition = network.markov(ON, OFF, slot_seconds=SLOT)
    at = jax.jit(condition.at)
    states = np.stack([at(IDS, jnp.int32(start + i * SLOT)) for i in range(10)])
    matrix = np.array([[1 - SLOT / OFF, SLOT / OFF], [SLOT / ON, 1 - SLOT / ON]])
    share = condition.rate(np.arange(1))[0]
    assert share == pytest.approx(ON / (ON + OFF))
    for i in range(10):
        assert abs(states[i].mean() - share) < 5 * np.sqrt(share * (1 - share) / 4000)
    for gap in (1, 2, 5):
        powers = np.linalg.matrix_power(matrix, gap)
        for before in (0, 1):
            rows = states[0] == before
            after = states[gap][rows].mean()
            expected = powers[before, 1]
            assert abs(after - expected) < 5 * np.sqrt(expected * (1 - expected) / rows.sum())
    assert (states[5] != np.stack([condition.at(IDS[:1], jnp.int32(start + 5 * SLOT + 119))])[0]).any()


def test_queries_agree():
    """The same answer whatever is asked beside it. Catches a look back that depends on the batch."""
    condition = network.markov(ON, OFF, slot_seconds=SLOT)
    at, times = jax.jit(condition.at), np.int32([0, 119, 120, 5000, 10**9, 2**31 - 1])
    whole = np.stack([at(IDS[:50], time) for time in times])
    for i, time in enumerate(times):
        for client in (0, 7):
            assert bool(at(IDS[client : client + 1], time)[0]) == whole[i, client]
    each = at(IDS[:6], times)
    np.testing.assert_array_equal(each, whole[np.arange(6), np.arange(6)])
    other = jax.jit(network.markov(ON, OFF, slot_seconds=SLOT, seed=1).at)(IDS[:50], times[3])
    assert (np.asarray(other) != whole[3]).any()


def test_a_chain_without_memory():
    """leaves + comes = 1: every slot decides by itself. Catches a logarithm of zero."""
    condition = network.markov(240.0, 240.0, slot_seconds=120)
    at = jax.jit(condition.at)
    states = np.stack([at(IDS, np.int32(i * 120)) for i in range(4)])
    assert abs((states[1] == states[0]).mean() - 0.5) < 5 * 0.5 / np.sqrt(4000)


@pytest.mark.parametrize(
    "options, told",
    [
        ((100.0, 1000.0), "mean_on_seconds: expected a finite number >= 600"),
        ((700.0, 700.0), r"slot_seconds: expected slot / mean_on \+ slot / mean_off <= 1"),
        ((1e6, 1e6), "slot_seconds: expected slots that are long enough"),
        ((float("nan"), 1000.0), "mean_on_seconds: expected a finite number"),
    ],
)
def test_wrong_input(options, told):
    """Catches a chain that its slots cannot follow."""
    with pytest.raises(ValueError, match=told):
        network.markov(*options)
