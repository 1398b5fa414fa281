"""Whose messages fit into the budget of a round."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_sim import network


def by_loop(ids, cost, wanted, budget, priority):
    left, fits = budget, np.zeros(len(ids), bool)
    for slot in sorted(range(len(ids)), key=lambda i: (priority[i], ids[i])):
        if wanted[slot]:
            if cost[slot] > left:
                break
            left, fits[slot] = left - int(cost[slot]), True
    return fits


def test_against_a_loop():
    """Catches a client that is skipped for a smaller one behind it, empty slots that cost, order by slot."""
    rng, within = np.random.default_rng(0), jax.jit(network.within_budget, static_argnums=3)
    for _ in range(40):
        ids, cost = rng.permutation(20)[:9].astype(np.int32), rng.integers(0, 30, 9).astype(np.int32)
        wanted, priority = rng.random(9) < 0.7, rng.integers(0, 3, 9).astype(np.int32)
        before = np.zeros(9, bool)
        for budget in (0, 40, 100, 1000):
            found = within(ids, cost, wanted, budget, priority)
            np.testing.assert_array_equal(found, by_loop(ids, cost, wanted, budget, priority))
            assert (np.asarray(found) | ~before).all()
            before = np.asarray(found)
        np.testing.assert_array_equal(within(ids, cost, wanted, 60), by_loop(ids, cost, wanted, 60, np.zeros(9)))
        assert (np.asarray(within(ids, cost, wanted, 1000, priority)) == wanted).all()


def test_large_costs():
    """Catches a sum past 2^31 that wraps and fits again."""
    cost, within = np.full(64, 2**31 - 1, np.int32), jax.jit(network.within_budget, static_argnums=3)
    everyone = np.ones(64, bool)
    assert not within(np.arange(64), cost, everyone, 10**9).any()
    many = np.full(64, 2**26, np.int32)
    assert within(np.arange(64), many, everyone, 10**9).sum() == 14
    with pytest.raises(ValueError, match="budget: expected an integer in"):
        network.within_budget(np.arange(64), many, everyone, 10**9 + 1)
