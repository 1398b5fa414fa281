"""Group fairness against loops of NumPy over groups."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import metrics
from fedjax_sim.validate import InvalidArgument


def rows(n=500):
    """Returns (logits, labels, groups, mask): three of four groups have rows, and a third of the rows is padding."""
    rng = np.random.default_rng(0)
    groups = rng.choice([0, 1, 3], n, p=[0.6, 0.3, 0.1])
    labels = (rng.random(n) < 0.3 + 0.1 * groups).astype(int)
    logits = (rng.normal(size=n) + labels + 0.4 * groups - 1).astype(np.float32)
    mask = rng.random(n) < 2 / 3
    # Padding may hold anything.
    return np.where(mask, logits, np.nan), np.where(mask, labels, 9), np.where(mask, groups, -1), mask


def spread(shares):
    return max(shares) - min(shares)


def test_against_numpy():
    logits, labels, groups, mask = rows()
    taken = logits > 0
    present = (0, 1, 3)
    of = {(g, y): taken[mask & (groups == g) & (labels == y)].mean() for g in present for y in (0, 1)}
    expected = {
        metrics.accuracy_by_group: [
            (taken == labels)[mask & (groups == g)].mean() if g in present else np.nan for g in range(4)
        ],
        metrics.demographic_parity_difference: spread([taken[mask & (groups == g)].mean() for g in present]),
        metrics.equal_opportunity_difference: spread([of[g, 1] for g in present]),
        metrics.equalized_odds_difference: max(spread([of[g, y] for g in present]) for y in (0, 1)),
    }
    arrays = tuple(map(jnp.asarray, (logits, labels, groups)))
    for compute, value in expected.items():
        compute = partial(compute, num_groups=4)
        np.testing.assert_allclose(jax.jit(compute)(*arrays, mask=jnp.asarray(mask)), value, rtol=0, atol=1e-6)
        two = jnp.stack([jnp.zeros_like(arrays[0]), arrays[0]], axis=1)
        np.testing.assert_allclose(compute(two, *arrays[1:], mask=jnp.asarray(mask)), value, rtol=0, atol=1e-6)
        # A real row that is wrong is not left out in silence.
        for place, wrong in ((0, jnp.nan), (1, 2), (2, 4)):
            real = list(x[mask] for x in arrays)
            real[place] = real[place].at[0].set(wrong)
            assert jnp.isnan(compute(*real)).all()


def test_what_is_not_defined_is_nan():
    logits, labels, groups = jnp.array([1.0, -1.0]), jnp.array([1, 1]), jnp.array([0, 1])
    assert metrics.equal_opportunity_difference(logits, labels, groups, num_groups=2) == 1
    assert jnp.isnan(metrics.equalized_odds_difference(logits, labels, groups, num_groups=2))  # no row of label 0
    none = jnp.zeros(2, bool)
    assert jnp.isnan(metrics.demographic_parity_difference(logits, labels, groups, num_groups=2, mask=none))


def test_wrong_arrays_are_refused():
    three, labels = jnp.zeros((4, 3)), jnp.zeros(4, int)
    assert metrics.accuracy_by_group(three, labels, labels, num_groups=1).tolist() == [1.0]
    for argument, call in {
        "outputs": lambda: metrics.demographic_parity_difference(three, labels, labels, num_groups=2),
        "groups": lambda: metrics.accuracy_by_group(three, labels, labels[:2], num_groups=2),
        "num_groups": lambda: metrics.accuracy_by_group(three, labels, labels, num_groups=0),
    }.items():
        with pytest.raises(InvalidArgument) as refused:
            call()
        assert refused.value.argument == argument
