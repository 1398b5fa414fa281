"""Federated histograms against NumPy on the pooled rows, and their noise against what it states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import aggregation, algorithms, population, privacy, sampling, transform
from fedjax_sim.types import ClientData
from tests.algorithms.analytics import problem as p
from tests.refusals import refused


def test_everybody_together_is_numpy():
    """Bins of numbers. Catches padding that counts, and numbers outside that fall away."""
    x, _ = p.pooled()
    (first, _, last), _ = p.rounds(algorithms.histogram(p.EVERYBODY, low=0.0, high=4.0, num_bins=8, column=1), 3)
    clipped = np.clip(x[:, 1], 0, np.nextafter(np.float32(4), np.float32(0)))
    expected = np.histogram(clipped, np.linspace(0, 4, 9))[0] / p.NUM_CLIENTS
    np.testing.assert_allclose(first["counts"], expected, rtol=1e-6)
    np.testing.assert_allclose(last["counts"], expected, rtol=1e-6)  # a mean over rounds, not their sum


@pytest.mark.full
def test_everybodys_categories_are_numpys():
    """Catches padding that counts as a category."""
    (found,), _ = p.rounds(algorithms.histogram(p.EVERYBODY, num_categories=4), 1)
    np.testing.assert_allclose(found["counts"], np.bincount(p.pooled()[1], minlength=4) / p.NUM_CLIENTS, rtol=1e-6)


@pytest.mark.full
def test_numbers_at_edges():
    """A number at the lower end of each bin, as the answer shows it. Catches 0.53 that counts from 0.52 to 0.53."""
    lower_ends = np.linspace(0, 1, 101)[:-1].astype(np.float32)

    def read(numbers, id):
        return ClientData({"x": numbers[id][None, None], "y": jnp.zeros(1)}, jnp.ones(1, bool))

    data = population.generated(100, read, jnp.asarray(lower_ends))
    made = algorithms.histogram(sampling.full(100), low=0.0, high=1.0, num_bins=100, column=0)
    (found,), _ = p.rounds(made, 1, data=data)
    np.testing.assert_allclose(found["counts"], 1 / 100, rtol=1e-6)


@pytest.mark.full
def test_counts_by_region():
    """Catches regions and bins that are swapped, and rows of an unknown region that count in another one."""
    regions = np.arange(p.NUM_CLIENTS)[:, None] % 3 + np.zeros((1, p.ROWS))  # three regions, of which two are known
    x = p.X.copy()
    x[..., 1] = regions
    made = algorithms.histogram(p.EVERYBODY, num_categories=4, region_column=1, num_regions=2)
    (estimate,), _ = p.rounds(made, 1, data=p.people(x=x))
    expected = np.zeros((2, 4))
    for region, y in zip(regions[p.MASK], p.Y[p.MASK], strict=True):
        if region < 2:
            expected[int(region), y] += 1 / p.NUM_CLIENTS
    np.testing.assert_allclose(estimate["counts"], expected, rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("mechanism", ["discrete_gaussian_mechanism", "skellam_mechanism", "distributed_gaussian"])
def test_noise_and_epsilon(mechanism):
    """The variance of the counts is that of the noise, and the accountant reads it. 6,000 numbers: the variance is
    within 12 % with probability 1 - 1e-9 (chi-square, 6.5 standard errors of sqrt(2 / 6000))."""
    noise = getattr(transform, mechanism)(1.0, 4.0, p.NUM_CLIENTS)
    rule = aggregation.modular_sum(float(p.NUM_CLIENTS))
    if mechanism == "distributed_gaussian":
        rule = aggregation.fixed_mean(float(p.NUM_CLIENTS), weighting="uniform")
    made = algorithms.histogram(p.EVERYBODY, num_categories=4, transform=noise, aggregator=rule, rows="one")
    counts = p.repeated(made, 1, 1500, data=p.people(y=np.zeros_like(p.Y)))["counts"]
    np.testing.assert_allclose(counts.mean(0)[1:], 0, atol=6 * 4 / p.NUM_CLIENTS / 1500**0.5)
    assert counts.std(0)[1:].mean() == pytest.approx(4 / p.NUM_CLIENTS, rel=0.06)
    found = privacy.mechanism_of(made, dimension=4)
    # Replaced clients move a sum of norms at most 1 by 2, beside noise of standard deviation 4.
    sizes = dict.fromkeys(("population_size", "cohort_size", "num_slots"), p.NUM_CLIENTS)
    gaussian = privacy.Mechanism(noise_multiplier=4.0, scheme="full", adjacency="replace_one", **sizes)
    stated = privacy.account(gaussian, 1, 1e-4)
    assert found.adjacency == "replace_one"
    # No accountant is below the Gaussian's, and Renyi's, which integers need, is little above.
    assert 0.999 * stated.epsilon <= privacy.account(found, 1, 1e-4).epsilon < 1.2 * stated.epsilon


def test_the_loss_is_the_cross_entropy():
    """Of the shares. Catches noise below zero that makes a share negative."""
    loss_fn = algorithms.histogram(p.EVERYBODY, num_categories=4).evaluated.loss_fn
    examples = {"x": np.zeros((3, 2), np.float32), "y": np.array([0, 1, 2])}
    values = loss_fn({"counts": np.array([3.0, 1.0, -2.0, 0.0], np.float32)}, jax.tree.map(jnp.array, examples), None)
    np.testing.assert_allclose(values["loss"], -np.log([0.75, 0.25, 1e-6]), rtol=1e-5)


@pytest.mark.parametrize(
    "options, words",
    [
        ({}, "num_bins: expected a number of bins, where categories"),
        ({"low": 0.0, "high": 1.0}, "low, high, num_bins: expected all three"),
        ({"low": 1.0, "high": 1.0, "num_bins": 3}, "high: expected more than low"),
        ({"num_categories": 3, "column": 0}, "num_bins: expected a number of bins"),
        ({"num_categories": 3, "num_regions": 2}, "region_column: expected a column beside"),
        ({"num_categories": 3, "num_bins": 0}, "num_bins: expected an integer"),
    ],
)
def test_what_is_refused(options, words):
    """Before anything compiles."""
    with pytest.raises(ValueError, match=words):
        algorithms.histogram(sampling.full(3), **options)


def test_columns_that_are_not_there():
    """Catches JAX's gathers, which would read another column."""
    made = algorithms.histogram(p.EVERYBODY, low=0.0, high=1.0, num_bins=2, column=2)
    with refused("column", value=2, rule="[0, 1]", hint="2 columns"):
        p.rounds(made, 1)
