"""What robust rules share: translations, and the values that ByzFL's own tests have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.aggregation import (
    bucketing,
    bulyan,
    centered_clipping,
    geometric_median,
    krum,
    mean,
    mean_around_median,
    median,
    minimum_diameter,
    nearest_neighbour_mixing,
    trimmed_mean,
)
from tests.aggregation.robust.problems import applied
from tests.aggregation.robust.test_coordinate import _messages
from tests.aggregation.robust.test_geometric import _round
from tests.laws import cases

RNG = np.random.default_rng(0)
MOVED = {
    "median": median(),
    "trimmed mean": trimmed_mean(2),
    "mean around median": mean_around_median(2),
    "krum": krum(2),
    "multi-krum": krum(2, 3),
    "bulyan": bulyan(1),
    "minimum diameter": minimum_diameter(2),
    "bucketing": bucketing(median(), 2),
    "nearest-neighbour mixing": nearest_neighbour_mixing(trimmed_mean(2), 2),
    "geometric median": geometric_median(),
}


DEFAULT = ("median", "krum", "nearest-neighbour mixing")


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", cases.rows(MOVED, DEFAULT))
def test_translations(name):
    """Moved messages, moved result: integers, so that distances and sums of both are exact.

    Catches distances from a point that does not move with the messages, and absolute tolerances.
    """
    rule, x = MOVED[name], RNG.integers(-50, 50, (9, 6)).astype(np.float32)
    way = RNG.integers(-200, 200, 6).astype(np.float32)
    run = jax.jit(lambda x: _messages(_keyed(rule), x))
    before, after = np.asarray(run(jnp.asarray(x))), np.asarray(run(jnp.asarray(x + way)))
    np.testing.assert_allclose(after, before + way, atol=1e-3 if name == "geometric median" else 1e-4)
    assert np.abs(before - x.mean(0)).max() > 0.1


def _keyed(rule):
    """With a key of its own, for rules that draw."""
    key = jax.random.key(0)
    return rule._replace(finalize=lambda _, round, carry: rule.finalize(key, round, carry))


@pytest.mark.full
def test_values_of_byzfl():
    """Of (1, 2, 3), (4, 5, 6), (7, 8, 9), f = 1, as in ByzFL's documentation and tests; neighbours are sqrt(27) apart.

    Its Krum with f = 1 adds up the m - f = 2 smallest distances, the own one of 0 among them: one neighbour, which the
    paper's count has at f = 0. Its Meamed takes the first of two values at equal distances, where here both count half:
    (4 + (1 + 7) / 2) / 2, and not (4 + 1) / 2. Its geometric median stops after three steps from
    zero at (3.79, 4.79, 5.79); the minimum, for points on a line, is the middle one.
    """
    x = np.arange(1, 10, dtype=np.float32).reshape(3, 3)
    values = {
        mean(): [4, 5, 6],
        median(): [4, 5, 6],
        trimmed_mean(1): [4, 5, 6],
        mean_around_median(1): [4, 5, 6],
        krum(0): [1, 2, 3],
        minimum_diameter(1): [2.5, 3.5, 4.5],
        centered_clipping(100.0): [4, 5, 6],
        geometric_median(60, smoothing=0.1): [4, 5, 6],
    }
    for rule, value in values.items():
        got = applied(rule, x, round=_round(jnp.zeros(3)))[0]
        np.testing.assert_allclose(got, value, rtol=1e-6)
