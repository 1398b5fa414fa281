"""A bound on norms at the server."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.aggregation import gather, mean, median, modular_sum, norm_bounding
from tests.aggregation.robust.problems import applied
from tests.refusals import refused

RNG = np.random.default_rng(0)
M = 9
UPDATES = {"a": RNG.normal(size=(M, 2, 3)).astype(np.float32), "b": RNG.normal(size=(M, 4)).astype(np.float32)}
WEIGHTS = np.array([1, 2, 0, 3, 1, 1, 5, 2, 1], np.float32)


def flat(tree, rows=True):
    return np.concatenate([np.reshape(tree[name], (*((M,) if rows else ()), -1)) for name in "ab"], axis=-1)


@pytest.mark.default_rows("median")
@pytest.mark.parametrize(("rule", "numpy"), [(mean(), None), (median(), np.median)])
def test_shortened_messages(rule, numpy):
    """Catches a message longer than the bound, a shorter one that is stretched, and a share of the absent."""
    x, there = flat(UPDATES).astype(np.float64), WEIGHTS > 0
    norms = np.linalg.norm(x, axis=1)
    limit = float(np.median(norms))
    short = x * np.minimum(1, limit / norms)[:, None]
    got, metrics = applied(norm_bounding(rule, limit), UPDATES, WEIGHTS)
    expected = np.average(short, axis=0, weights=WEIGHTS) if numpy is None else np.median(short[there], axis=0)
    np.testing.assert_allclose(flat(got, rows=False), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["shortened_share"], (norms[there] > limit * (1 + 1e-6)).mean(), rtol=1e-6)


def test_attackers_are_bound():
    """One of nine messages reaches 2^60, and then 2^99. Catches a bound that only honest clients keep."""
    x = flat(UPDATES)
    rule, before = norm_bounding(mean(weighting="uniform"), 1.0), None
    for far in (0.0, 2.0**60, 2.0**99):
        x[0] = far
        got = applied(rule, x)[0]
        assert before is None or np.linalg.norm(got - before) <= 1 / M + 1e-6
        before = got if before is None else before
    with refused("aggregator", value="a modular sum"):
        norm_bounding(modular_sum(3.0), 1.0)
    assert norm_bounding(mean(), 1.0).facts.sensitivity is None


def test_bounds_of_half_precision():
    """300 numbers of bfloat16. Catches a factor of 16 bits, which lengthens a whole message by up to a 500th."""
    x = np.asarray(jnp.asarray(10 * RNG.normal(size=(M, 300)), jnp.bfloat16))
    shown = gather(lambda key, updates, weights, ids: updates)
    got = applied(norm_bounding(shown, 1.0), x)[0]
    assert got.dtype == x.dtype
    np.testing.assert_allclose(np.linalg.norm(got.astype(np.float64), axis=1), 1, atol=5e-4)
