"""Pre-aggregation in front of a robust rule."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import adversary
from fedjax_sim.aggregation import (
    adaptive_clipping,
    bucketing,
    geometric_median,
    krum,
    mean,
    median,
    nearest_neighbour_mixing,
    trimmed_mean,
)
from fedjax_sim.engine.all_messages.all_messages import by_rule
from fedjax_sim.engine.all_messages.messages import columnwise
from tests.aggregation.robust.problems import applied
from tests.refusals import refused

RNG = np.random.default_rng(0)
M, D = 11, 5
X = RNG.normal(size=(M, D)).astype(np.float32)
WEIGHTS = np.array([3, 1, 0, 7, 2, 2, 5, 1, 4, 0, 6], np.float32)


def shows(weighted=False):
    def rule(key, round, cohort):
        there = cohort.weights > 0
        found = columnwise(cohort.messages, lambda x, w: jnp.where(w[:, None] > 0, x, -jnp.inf).max(0), cohort.weights)
        least = columnwise(cohort.messages, lambda x, w: jnp.where(w[:, None] > 0, x, jnp.inf).min(0), cohort.weights)
        total = columnwise(cohort.messages, lambda x, w: (x * w[:, None]).sum(0), cohort.weights)
        return {"max": found, "min": least, "total": total}, {"number": cohort.number, "there": there.sum()}

    return by_rule(rule, weighted=weighted)


@pytest.mark.full
def test_bucketing():
    """Each message in one bucket: their weighted sum is that of the messages; another key, other buckets.

    Catches a message in two buckets or none, absent ones in a bucket, and means that weigh messages otherwise.
    """
    for size in (1, 2, 3, 20):
        for weighted in (False, True):
            got, metrics = applied(bucketing(shows(weighted), size), X, WEIGHTS)
            share = WEIGHTS if weighted else (WEIGHTS > 0).astype(float)
            np.testing.assert_allclose(got["total"], share @ X.astype(np.float64), rtol=1e-4, atol=1e-5)
            assert metrics["number"] == metrics["there"] == -(-9 // size)
    equal = applied(bucketing(shows(), 1), X, WEIGHTS)[0]
    np.testing.assert_array_equal(equal["max"], X[WEIGHTS > 0].max(0))
    pairs = applied(bucketing(shows(), 2), X, WEIGHTS)[0]
    some = X[WEIGHTS > 0].astype(np.float64)
    halves = [(some[i] + some[j]) / 2 for i in range(9) for j in range(i)] + list(some)
    for j in range(D):
        assert np.isclose(pairs["max"][j], [x[j] for x in halves], rtol=1e-5).any()


@pytest.mark.full
def test_nearest_neighbour_mixing():
    """Catches a message that is not its own neighbour, and neighbours that did not arrive."""
    for f in (0, 2, 4):
        there = WEIGHTS > 0
        some = X[there].astype(np.float64)
        apart = ((some[:, None] - some[None]) ** 2).sum(-1)
        mixtures = np.array([some[np.argsort(row, kind="stable")[: len(some) - f]].mean(0) for row in apart])
        got, _ = applied(nearest_neighbour_mixing(median(), f), X, WEIGHTS)
        np.testing.assert_allclose(got, np.median(mixtures, axis=0), rtol=1e-5, atol=1e-6)
        got, _ = applied(nearest_neighbour_mixing(krum(1, 2), f), X, there)
        assert np.isfinite(got).all()
        few = np.arange(M) < 2 * f  # a message then has no m - f neighbours, and the mixtures were zero
        assert f == 0 or np.isnan(applied(nearest_neighbour_mixing(median(), f), X, few)[0]).all()


def test_adaptive_clipping():
    """Catches a count of all slots, and a limit that is one of the shortened."""
    for f in (0, 3):
        there = WEIGHTS > 0
        some = X[there].astype(np.float64)
        norms, n = np.linalg.norm(some, axis=1), int(there.sum())
        limit = np.sort(norms)[::-1][2 * f * (n - f) // n]
        short = some * np.minimum(1, limit / norms)[:, None]
        got, _ = applied(adaptive_clipping(median(), f), X, WEIGHTS)
        np.testing.assert_allclose(got, np.median(short, axis=0), rtol=1e-5, atol=1e-6)


def test_adaptive_clipping_of_a_large_cohort():
    """100,000 messages, 20,000 of attackers. Catches 2 f (m - f), which is past 32 bits: nothing was shortened."""
    m, f = 100_000, 20_000
    longest = by_rule(lambda key, round, cohort: (columnwise(cohort.messages, lambda x: x.max(0)), {}), weighted=False)
    x = np.where(np.arange(m) < f, 1e6, np.linspace(0, 1, m))[:, None].astype(np.float32)
    got = applied(adaptive_clipping(longest, f), x)[0]
    assert got == np.sort(x[:, 0])[::-1][2 * f * (m - f) // m] < 1


@pytest.mark.full
def test_wrappers_wrap():
    """Catches rules that lose their place in a wrapper, and streams that are taken for rules."""
    rule = bucketing(nearest_neighbour_mixing(adaptive_clipping(trimmed_mean(1), 1), 1), 2)
    assert np.isfinite(applied(rule, X)[0]).all()
    assert np.isfinite(applied(bucketing(geometric_median(), 2), X)[0]).all()
    assert np.isfinite(applied(bucketing(krum(1), 2), X)[0]).all()
    with refused("aggregator", rule="all messages"):
        bucketing(mean(), 2)
    with refused("num_byzantine", value=6, rule="[0, 5]"):
        applied(nearest_neighbour_mixing(median(), 6), X)


def test_wrappers_refuse_what_their_rule_refuses():
    """Catches a federation of which every round is skipped: Krum withstands 1 of the 6 messages that it sees, not 2."""
    corrupted = adversary.corrupted(krum(5), adversary.mimic(), adversary.clients([1]))
    for made, most in ((bucketing(krum(2), 2), 1), (adaptive_clipping(krum(5), 1), 4), (corrupted, 4)):
        with refused("num_byzantine", rule=f"[0, {most}]"):
            applied(made, X)
