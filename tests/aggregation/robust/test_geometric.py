"""Robust rules around a centre."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.aggregation import centered_clipping, geometric_median
from fedjax_sim.types import Round
from tests.aggregation.robust.problems import adversaries, applied

RNG = np.random.default_rng(0)
M, D = 13, 6
UPDATES = {"a": RNG.normal(size=(M, 2, 2)).astype(np.float32) + 1, "b": RNG.normal(size=(M, 2)).astype(np.float32)}
WEIGHTS = RNG.integers(0, 5, M).astype(np.float32)


def flat(tree, rows=True):
    leading = (M,) if rows else ()
    return np.concatenate([np.reshape(tree[name], (*leading, -1)) for name in "ab"], axis=-1)


def _round(state):
    return Round(None, None, state)


def weighted_median(x, weights):
    """At each coordinate the middle of the values, each as often as its weight."""
    return np.median(np.repeat(x, weights.astype(int), axis=0), axis=0)


def weiszfeld(x, weights, num_steps, smoothing=1e-6):
    point = weighted_median(x, weights)
    for step in range(num_steps):
        apart = np.linalg.norm(x - point, axis=1)
        least = smoothing if step else np.median(apart[weights > 0])
        shares = weights / np.maximum(apart, least)
        point = shares @ x / shares.sum()
    return point


@pytest.mark.full
def test_geometric_median():
    """Catches weights that are not those of the messages, a leaf with a median of its own, and too few steps."""
    x = flat(UPDATES).astype(np.float64)
    for trusted, weights in ((True, WEIGHTS), (False, (WEIGHTS > 0).astype(float))):
        for num_steps in (1, 5):
            got, _ = applied(geometric_median(num_steps, tolerance=0, trust_weights=trusted), UPDATES, WEIGHTS)
            np.testing.assert_allclose(flat(got, rows=False), weiszfeld(x, weights, num_steps), rtol=1e-5, atol=1e-6)
    got, _ = applied(geometric_median(200, tolerance=0), UPDATES)
    best = flat(got, rows=False).astype(np.float64)
    cost = lambda z: np.linalg.norm(x - z, axis=1).sum()  # noqa: E731
    for step in RNG.normal(size=(200, D)) * 1e-2:
        assert cost(best) < cost(best + step)


@pytest.mark.full
def test_free_riders_do_not_hold_it():
    """Two of eleven send zeros, beside dense messages and beside sparse ones, whose coordinate median is 0 as well:
    within 2 % of the minimum. Catches weights of 10^6 where the steps begin."""
    rng = np.random.default_rng(4)
    dense = 0.3 * 200**-0.5 + rng.normal(size=(9, 200)) * 200**-0.5
    sparse = np.zeros((9, 200))
    for row in sparse:
        row[rng.choice(200, 20, replace=False)] = 1
    for honest in (dense, sparse):
        x = np.concatenate([np.zeros((2, 200)), honest])
        best = weiszfeld(x + 1e-6 * rng.normal(size=x.shape), np.ones(11), 5000, 1e-9)
        got = applied(geometric_median(), x.astype(np.float32))[0]
        assert np.linalg.norm(got - best) < 0.02 * np.linalg.norm(best)


ATTACKS = {
    "zeros": lambda mean, spread: 0 * mean,
    "flipped": lambda mean, spread: -mean,
    "far": lambda mean, spread: np.full_like(mean, 2.0**60),
    "near": lambda mean, spread: mean + spread,
}


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("attack", ATTACKS)
def test_it_does_not_matter_where_messages_are(attack):
    """Five of eleven attack, and honest messages are 100 standard deviations from zero: the squared distance from their
    mean, in units of their variance, is the minimum's to 5 %, and not the 937 of 8 steps from zero."""
    rng, rule = np.random.default_rng(6), geometric_median()
    for dimension in (10, 200):
        honest = 100 + rng.normal(size=(6, dimension))
        mean = honest.mean(0)
        x = np.concatenate([honest, np.tile(ATTACKS[attack](mean, honest.std(0)), (5, 1))])
        best, got = weiszfeld(x, np.ones(11), 20_000, 1e-9), applied(rule, x.astype(np.float32))[0]
        variance = ((honest - mean) ** 2).sum(1).mean()
        exact, found = (((point - mean) ** 2).sum() / variance for point in (best, got))
        assert abs(found - exact) < 0.05 * exact < 0.2


@pytest.mark.default_rows("True")
@pytest.mark.parametrize("trusted", [False, True])
def test_centered_clipping(trusted):
    """Three rounds in NumPy. Catches a state that is not kept, and differences from another point."""
    v, state = np.zeros(D), {name: np.zeros(x.shape[1:], np.float32) for name, x in UPDATES.items()}
    weights = WEIGHTS if trusted else (WEIGHTS > 0).astype(float)
    rule = centered_clipping(0.7, 2, trust_weights=trusted)
    for _ in range(3):
        update, _, state = applied(rule, UPDATES, WEIGHTS, round=_round(jax.tree.map(jnp.asarray, state)))
        for _ in range(2):
            away = flat(UPDATES) - v
            factors = np.minimum(1, 0.7 / np.linalg.norm(away, axis=1))
            v = v + (weights * factors) @ away / weights.sum()
        np.testing.assert_allclose(flat(update, rows=False), v, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(flat(state, rows=False), v, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_attackers_move_it_little():
    """Six of thirteen messages are the attackers', up to 2^99. Catches a result that follows them."""
    rng = np.random.default_rng(3)
    median, clipped = geometric_median(40), centered_clipping(1.0)
    start = _round(jnp.zeros(D))
    for _ in range(40):
        honest = rng.normal(size=(7, D)).astype(np.float32)
        x = np.concatenate([honest, adversaries(rng, honest, 6).astype(np.float32)])
        found, centre = applied(median, x)[0], honest.mean(0)
        radius = np.linalg.norm(honest - centre, axis=1).max()
        assert np.linalg.norm(found - centre) <= 2 * 7 / (7 - 6) * radius  # Lopuhaa and Rousseeuw 1991, theorem 2.2
        moved = applied(clipped, x, round=start)[0]
        alone = np.minimum(1, 1 / np.linalg.norm(honest, axis=1)) @ honest / 13
        assert np.linalg.norm(moved - alone) <= 6 / 13 * 1.0001
