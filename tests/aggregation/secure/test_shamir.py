"""Shamir's shares: enough of them open a secret, fewer say nothing."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.aggregation.secure.ring import PRIME
from fedjax_sim.aggregation.secure.shamir import reconstructed, shares


@pytest.mark.full
def test_any_threshold_of_shares_opens():
    """All subsets of 5 holders, all thresholds, edge secrets. Catches Lagrange weights of other holders' points."""
    secrets = jnp.array([0, 1, PRIME - 1, 123_456_789], jnp.uint32)
    for threshold in range(1, 6):
        held = shares(jax.random.key(threshold), secrets, threshold, 5)
        for size in range(threshold, 6):
            for subset in itertools.combinations(range(5), size):
                there = jnp.zeros((4, 5), bool).at[:, list(subset)].set(True)
                assert reconstructed(held, there, threshold).tolist() == secrets.tolist()


def test_shares_are_values_of_a_polynomial():
    """Differences of order `threshold` vanish, and those of lower order do not. Catches a degree that is too low, with
    which fewer shares open the secret."""
    held = np.asarray(shares(jax.random.key(0), jnp.array([5], jnp.uint32), 4, 9)).astype(object)[0]
    held = np.concatenate([[5], held])
    for order in range(1, 6):
        held = np.diff(held) % PRIME
        assert (held == 0).all() == (order >= 4)


def test_too_few_shares_open_nothing():
    """Catches a number that is made of what is missing."""
    there = np.array([[True, True, False, False], [True, False, True, True]])

    @jax.jit
    def both(secrets, there):
        return reconstructed(shares(jax.random.key(0), secrets, 3, 4), there, 3)

    assert both(np.array([9, 9], np.uint32), there).tolist() == [0, 9]


def test_fewer_shares_are_uniform():
    """Chi-square of the pairs of two of three shares under threshold 3, one false alarm in 10^5, for two secrets.
    Catches coefficients that are not uniform, or used twice."""
    made = jax.jit(lambda key, secrets: shares(key, secrets, 3, 3))
    for secret in (0, 1_000_000_007):
        held = np.asarray(made(jax.random.key(secret), np.full(20_000, secret, np.uint32))).astype(np.int64)
        cells = held[:, 0] * 4 // PRIME * 4 + held[:, 2] * 4 // PRIME
        counts = np.bincount(cells, minlength=16)
        assert ((counts - 1250) ** 2 / 1250).sum() < 55
