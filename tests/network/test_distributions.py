"""Laws of a number over clients: draws by id, their distribution, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import network
from fedjax_sim.network.distributions import unit_draws

KEY, IDS = jax.random.key(0), jnp.arange(100_000)
LAWS = {
    "lognormal": (network.lognormal(3.0, 1.5), stats.lognorm(1.5, scale=3.0)),
    "pareto": (network.pareto(2.0, 1.5), stats.pareto(1.5, scale=2.0)),
    "uniform": (network.uniform(2.0, 5.0), stats.uniform(2.0, 3.0)),
}


def p_value(draws, law):
    return stats.kstest(np.asarray(draws, np.float64), law.cdf).pvalue


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", LAWS)
def test_draws_have_the_law(name):
    """Kolmogorov-Smirnov at 10^5 clients: a right law fails once in 10^4 seeds; one 2 % off in scale always does."""
    made, law = LAWS[name]
    draws = np.asarray(jax.jit(made.draw)(KEY, IDS), np.float64)
    assert p_value(draws, law) > 1e-4 > p_value(draws * 1.02, law)
    assert made.least <= draws.min() and draws.max() <= made.most * (1 + 1e-6)
    ends = np.asarray(jax.jit(made.quantile)(np.float32([2.0**-24, 1 - 2.0**-24])))
    assert made.least <= ends[0] * (1 + 1e-6) and ends[1] <= made.most * (1 + 1e-6)


def test_tiers_have_their_shares():
    """Chi-square at 10^5 clients, wrong once in 10^4 seeds. Catches shares of the wrong values, given in any order."""
    made = network.tiers([0.2, 0.5, 0.3], [5.0, 1.0, 2.0])
    values, counts = np.unique(made.draw(KEY, IDS), return_counts=True)
    assert values.tolist() == [1, 2, 5]
    assert stats.chisquare(counts, 1e5 * np.array([0.5, 0.3, 0.2])).pvalue > 1e-4
    assert stats.chisquare(counts, 1e5 * np.array([0.5, 0.2, 0.3])).pvalue < 1e-9
    assert (np.diff(made.quantile(jnp.linspace(0.01, 0.99, 50))) >= 0).all()
    assert network.tiers([1.0], [4.0]).draw(KEY, IDS[:3]).tolist() == [4, 4, 4]


def test_a_draw_belongs_to_the_client():
    """Catches numbers by slot: the same client in another cohort has another speed."""
    made = network.lognormal(1.0, 1.0)
    some = jnp.array([70_000, 3, 99_999, 3])
    np.testing.assert_array_equal(made.draw(KEY, some), made.draw(KEY, IDS)[some])
    np.testing.assert_array_equal(made.draw(KEY, some), jax.jit(made.draw)(KEY, some))
    assert (made.draw(jax.random.key(1), some) != made.draw(KEY, some)).all()


def test_unit_draws_are_uniform():
    """Uniform, and uncorrelated between neighbouring ids, slots and keys: 5 sigma, wrong once in 10^6 seeds each."""
    flat = np.asarray(unit_draws(KEY, IDS), np.float64)
    assert stats.kstest(flat, "uniform").pvalue > 1e-4 and 0 < flat.min() < flat.max() < 1
    slots = jnp.arange(300)
    grid = np.asarray(jax.vmap(lambda slot: unit_draws(KEY, IDS[:1000], slot))(slots), np.float64)
    assert stats.kstest(grid.ravel(), "uniform").pvalue > 1e-4

    def correlation(a, b):
        return abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) * np.sqrt(a.size)

    assert correlation(flat[1:], flat[:-1]) < 5 and correlation(grid[1:], grid[:-1]) < 5
    assert correlation(grid[:, 1:], grid[:, :-1]) < 5 and correlation(grid[1:, 1:], grid[:-1, :-1]) < 5
    assert correlation(flat, np.asarray(unit_draws(jax.random.key(1), IDS))) < 5
    each = unit_draws(KEY, IDS[:5], jnp.array([7, 7, 1, 0, 7]))  # a slot for each client
    assert each[0] == grid[7, 0] and each[2] == grid[1, 2]


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: network.lognormal(0.0, 1.0), "median: expected a finite number > 0"),
        (lambda: network.lognormal(1.0, float("nan")), "sigma: expected a number in"),
        (lambda: network.lognormal(1e30, 8.0), "sigma: expected draws between"),
        (lambda: network.pareto(1.0, 0.01), "shape: expected draws between"),
        (lambda: network.uniform(2.0, 1.0), "high: expected a finite number >= 2"),
        (lambda: network.constant(float("inf")), "value: expected a finite number >= 0"),
        (lambda: network.tiers([0.5, 0.4], [1.0, 2.0]), "shares: expected numbers with sum 1"),
        (lambda: network.tiers([0.5, 0.5], [1.0]), "values: expected 2 numbers"),
        (lambda: network.tiers([1.5, -0.5], [1.0, 2.0]), r"shares\[1\]: expected a finite number > 0"),
    ],
)
def test_wrong_input(call, told):
    """Catches a law that draws zero, infinity or NaN."""
    with pytest.raises(ValueError, match=told):
        call()
