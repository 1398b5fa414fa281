"""Clipping: bias against noise, by part, in closed form and in the simulator's own rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, population, sampling, transform
from fedjax_sim.engine import Plan
from fedjax_sim.theory.clipping import best_clip_norm, clipped_mean_error, largest_personal_factor

UPDATES = (np.random.default_rng(0).normal(size=(8, 3)) + 1) * np.exp(np.arange(8) / 3)[:, None]


def test_interior_optimum():
    """Noise dominates at large C, bias at small C, the best lies between. Catches z C / sqrt(m), and a bound taken."""
    options = {"noise_multiplier": 0.5, "cohort_size": 4}
    best = best_clip_norm(UPDATES, **options)
    norms = np.linalg.norm(UPDATES, axis=1)
    assert 0.05 * norms.max() < best < 0.95 * norms.max()
    at = {C: clipped_mean_error(UPDATES, clip_norm=C, **options) for C in (1e-3, best, 100 * norms.max())}
    low, inside, high = at.values()
    assert low.bias > 0.99 * low.total and high.noise > 0.99 * high.total and high.bias == 0
    assert high.noise == pytest.approx(3 * (0.5 * 100 * norms.max() / 4) ** 2)
    for factor in (0.99, 1.01):
        assert inside.total <= clipped_mean_error(UPDATES, clip_norm=best * factor, **options).total
    assert best_clip_norm([1.0, 1.0, 1.0, 10.0], noise_multiplier=1.0, cohort_size=4) == pytest.approx(5, rel=1e-4)


@pytest.mark.parametrize("noise_multiplier", [1e3, 1e6, 1e9])
def test_much_noise(noise_multiplier):
    """Below the least norm the error is a parabola in C, whose minimum is known. Catches a grid with a floor."""
    options = {"noise_multiplier": noise_multiplier, "cohort_size": 4}
    directions = UPDATES / np.linalg.norm(UPDATES, axis=1, keepdims=True)
    mean, sampled = directions.mean(0), 1 / 4 * (8 - 4) / (8 - 1)
    away = sampled * ((directions - mean) ** 2).sum(1).mean() + 3 * noise_multiplier**2 / 16
    wanted = UPDATES.mean(0) @ mean / (mean @ mean + away)
    assert wanted < 0.1 * np.linalg.norm(UPDATES, axis=1).min()
    assert best_clip_norm(UPDATES, **options) == pytest.approx(wanted, rel=1e-6, abs=0)
    with pytest.raises(ValueError, match="better than none"):
        best_clip_norm([-1.0, 1.0], **options | {"cohort_size": 2})


def test_all_clients_without_noise():
    """Catches sampling variance where all take part, and a mean of clipped rows that is not the mean."""
    norms = np.linalg.norm(UPDATES, axis=1, keepdims=True)
    low = norms.min() / 2
    found = clipped_mean_error(UPDATES, clip_norm=low, noise_multiplier=0.0, cohort_size=8)
    assert found.sampling == found.noise == 0
    assert found.bias == pytest.approx((((low * UPDATES / norms).mean(0) - UPDATES.mean(0)) ** 2).sum())


@pytest.mark.slow
def test_simulated_release():
    """20,000 rounds of the simulator: accepted within 4 standard errors (6e-5), another total 5 % off is refused."""
    data = population.quadratic_population(np.repeat(np.eye(3)[None], 8, 0), UPDATES)
    sampler, options = sampling.uniform(8, 4), {"clip_norm": 2.0, "noise_multiplier": 1.0}
    algorithm = algorithms.fedavg(  # one step of size 1 from 0 ends at the center: the update is a_i
        population.quadratic_loss, sampler, optax.sgd(1.0), num_steps=1, aggregator=aggregation.fixed_mean(4.0),
        transform=transform.gaussian_mechanism(**options), plan=Plan(4, 4), mesh=None,
    )  # fmt: skip

    def release(key, data):
        state = algorithm.init(key, {"w": jnp.zeros(3)}, data)
        return algorithm.params(algorithm.step(key, state, data)[0])["w"]

    keys = jax.random.split(jax.random.key(4), 20_000)
    found = np.asarray(jax.jit(jax.vmap(release, (0, None)))(keys, data), np.float64)
    errors = ((found - UPDATES.mean(0)) ** 2).sum(1)
    expected = clipped_mean_error(UPDATES, cohort_size=4, **options)
    band = 4 * errors.std(ddof=1) / np.sqrt(len(errors))
    assert abs(errors.mean() - expected.total) < band < 0.025 * expected.total
    spread = ((found - found.mean(0)) ** 2).sum(1)  # sampling and noise alone, without the bias
    band = 4 * spread.std(ddof=1) / np.sqrt(len(spread))
    assert abs(spread.mean() - expected.sampling - expected.noise) < band < 0.05 * (expected.sampling + expected.noise)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"cohort_size": 9}, "cohort"),
    ],
)
def test_wrong_input(options, message):
    """Catches numbers that look right out of input that is wrong."""
    with pytest.raises((ValueError, TypeError), match=message):
        clipped_mean_error(UPDATES, **{"clip_norm": 1.0, "noise_multiplier": 1.0, "cohort_size": 4, **options})


def test_personal_factors():
    """A worked case, and what the factor means. Catches sqrt(N) for N, noise on the sum, a factor above 1."""
    norms = np.array([0.5, 1.0, 2.0, 4.0])
    options = {"noise_std": 0.5, "epsilon": 1.0, "delta": 1e-5}
    factor = largest_personal_factor(norms, **options)
    assert factor == pytest.approx(0.103203, abs=5e-7)
    # The mechanism's condition holds with equality, for the sensitivity of the mean.
    sensitivity = factor * norms.max() / len(norms)
    assert options["noise_std"] == pytest.approx(sensitivity * np.sqrt(2 * np.log(1.25 / 1e-5)))
    assert largest_personal_factor(norms, **options | {"noise_std": 50.0}) == 1.0
    assert largest_personal_factor([0.0, 0.0], **options) == 1.0
    clip = transform.personal_clip(factor)
    for update in norms[:, None] * np.array([[0.6, -0.8]]):
        kept = clip.on_client(jax.random.key(0), jnp.asarray(update, jnp.float32), (), ())[0]
        np.testing.assert_allclose(kept, factor * update, rtol=1e-6)
    for wrong in ({"norms": [-1.0]}, {"norms": []}, {"norms": [np.nan]}, {"epsilon": 1.5}, {"delta": 0.0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
            largest_personal_factor(**{"norms": norms} | options | wrong)
