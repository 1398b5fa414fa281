"""Clients that join and leave."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import sampling

N = 9


def test_who_is_a_member():
    """Catches a client who is asked a round too early or late, and an inner sampler whose rounds are not counted."""
    joins, leaves = [1, 2, 4], [3, 9, 5]
    inner = sampling.cyclic(N, 5)
    sampler = sampling.with_membership(sampling.with_dropout(inner, 0.3), joins, leaves)
    state, other, sample = sampler.init(), inner.init(), jax.jit(sampler.sample)
    for round in range(1, 10):
        cohort, state = sample(jax.random.key(round), state)
        plain, other = inner.sample(jax.random.key(round), other)
        there = [joins[id % 3] <= round < leaves[id % 3] for id in plain.ids.tolist()]
        assert cohort.ids.tolist() == plain.ids.tolist() and cohort.invited.tolist() == there
        assert not (cohort.reported & ~cohort.invited).any() and int(cohort.metrics["absent"]) == 5 - sum(there)


@pytest.mark.full
def test_places_are_filled_evenly():
    """40,000 cohorts of 2 of 6 candidates from 9 clients, of whom 6 are members: chi-square above 1e-6; a place stays
    empty only where fewer members are candidates. Catches places for the first ids."""
    sampler = sampling.with_membership(sampling.uniform(N, 6), [1, 1, 50], num_invited=2)
    keys = jax.random.split(jax.random.key(1), 40_000)
    cohort = jax.device_get(jax.jit(jax.vmap(lambda key: sampler.sample(key, sampler.init())[0]))(keys))
    counts = np.bincount(cohort.ids[cohort.invited], minlength=N)
    members = np.arange(N) % 3 < 2
    assert (counts[~members] == 0).all() and (cohort.invited.sum(1) + cohort.metrics["unfilled"] == 2).all()
    assert cohort.invited.all()  # of 6 candidates at most 3 are no members
    assert stats.chisquare(counts[members] * (5 / 6) / (1 - 2 / 6)).pvalue > 1e-6


def test_wrong_input():
    """Catches rounds out of range and lists that do not fit."""
    full = sampling.full(N)
    for wrong, told in (
        (lambda: sampling.with_membership(full, []), "joins"),
        (lambda: sampling.with_membership(full, [0]), r"joins\[0\]"),
        (lambda: sampling.with_membership(full, [3], [3]), r"leaves\[0\]"),
        (lambda: sampling.with_membership(full, [2**31 - 1], [2**31]), r"joins\[0\]: expected .* 2147483646\]"),
        (lambda: sampling.with_membership(full, [1, 2], [3]), "leaves: expected 2 numbers"),
        (lambda: sampling.with_membership(full, [1] * 10), "at most 9"),
        (lambda: sampling.with_membership(full, [1], num_invited=10), "num_invited"),
        (lambda: sampling.with_membership(sampling.with_over_invitation(full, 3), [1], num_invited=2), "limit"),
    ):
        with pytest.raises(ValueError, match=told):
            wrong()
    assert jnp.issubdtype(sampling.with_membership(full, [1]).init().round.dtype, jnp.int32)
