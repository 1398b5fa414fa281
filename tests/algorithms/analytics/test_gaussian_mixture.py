"""Federated EM against EM in NumPy on the pooled rows."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import aggregation, algorithms, privacy, sampling, transform
from tests.algorithms.analytics import problem as p
from tests.refusals import refused

START = {
    "weights": np.array([0.5, 0.3, 0.2], np.float32),
    "means": np.array([[0.0, 0.0], [3.0, 1.0], [1.0, 3.0]], np.float32),
    "variances": np.array([[1.0, 2.0], [2.0, 1.0], [1.0, 1.0]], np.float32),
}


def em(params, num_rounds):
    """Estimates, and negative log-likelihoods before each step, in float64."""
    x, _ = p.pooled()
    weights, means, variances = (np.array(params[name], np.float64) for name in ("weights", "means", "variances"))
    estimates, losses = [], []
    for _ in range(num_rounds):
        densities = stats.norm.pdf(x[:, None], means[None], np.sqrt(variances)[None]).prod(-1) * weights
        losses.append(-np.log(densities.sum(1)).mean())
        shares = densities / densities.sum(1, keepdims=True)
        counts = shares.sum(0)
        means = np.einsum("ij,id->jd", shares, x) / counts[:, None]
        variances = np.einsum("ij,ijd->jd", shares, (x[:, None] - means[None]) ** 2) / counts[:, None]
        weights = counts / len(x)
        estimates.append({"weights": weights, "means": means, "variances": variances})
    return estimates, losses


def test_everybody_together_is_em():
    """Catches variances around the old means, responsibilities of padding, and weights that do not sum to 1."""
    estimates, infos = p.rounds(algorithms.gaussian_mixture(p.EVERYBODY, num_components=3), 5, params=START)
    expected, losses = em(START, 5)
    for estimate, wanted in zip(estimates, expected, strict=True):
        for name in wanted:
            np.testing.assert_allclose(estimate[name], wanted[name], rtol=2e-4)
    np.testing.assert_allclose([info["local_loss"] for info in infos], losses, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_the_likelihood_never_falls(seed):
    """Catches a step that is no maximum, from starts that are drawn."""
    made = algorithms.gaussian_mixture(
        p.EVERYBODY, num_components=4, low=-2.0, high=6.0, start_seed=seed, input_shape=(2,), least_variance=1e-3
    )
    estimates, infos = p.rounds(made, 10)
    losses = np.array([info["local_loss"] for info in infos])
    assert (estimates[-1]["variances"] > 1e-3).all()
    assert (np.diff(losses) <= 1e-5).all() and losses[-1] < losses[0] - 0.1


def test_equal_components_are_refused():
    """Two components that differ in their weights alone; the same means with other variances do move apart."""
    made = algorithms.gaussian_mixture(p.EVERYBODY, num_components=3)
    means = START["means"][[0, 1, 1]]
    with refused("params", value="two equal ones", rule="differ"):
        p.rounds(made, 1, params=START | {"means": means, "variances": np.ones((3, 2), np.float32)})
    p.rounds(made, 1, params=START | {"means": means})


def test_the_loss_is_the_likelihood():
    """Of the estimate, by rows. Catches a normalisation that is left out."""
    loss_fn = algorithms.gaussian_mixture(p.EVERYBODY, num_components=3).evaluated.loss_fn
    x, _ = p.pooled()
    losses = np.asarray(jax.jit(lambda params, x: loss_fn(params, {"x": x}, None)["loss"])(START, x))
    assert losses.mean() == pytest.approx(em(START, 1)[1][0], rel=1e-5)


@pytest.mark.full
def test_noise_keeps_it_a_mixture():
    """Noise far above the counts: weights are shares and variances positive, in every round."""
    sampler = sampling.uniform(p.NUM_CLIENTS, 20)
    noise = transform.discrete_gaussian_mechanism(5.0, 3.0, 20)
    made = algorithms.gaussian_mixture(
        sampler, num_components=3, transform=noise, aggregator=aggregation.modular_sum(20.0), least_share=0.05
    )
    estimates, _ = p.rounds(made, 4, params=START)
    for estimate in estimates:
        assert (estimate["weights"] >= 0).all() and estimate["weights"].sum() == pytest.approx(1, rel=1e-5)
        assert (estimate["variances"] > 0).all() and np.isfinite(estimate["means"]).all()
    assert privacy.account(privacy.mechanism_of(made, dimension=15), 4, 1e-3).epsilon > 0
