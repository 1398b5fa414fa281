"""Distances of distributions against worked examples and scipy; gradients' spread against float64 loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import metrics, models, population
from fedjax_sim.metrics.distributions import (
    earth_mover_distance,
    jensen_shannon_divergence,
    kullback_leibler_divergence,
    l1_distance,
    label_counts,
    label_heterogeneity,
    optimum_gap,
    total_variation,
)
from fedjax_sim.metrics.heterogeneity import gradient_heterogeneity, gradient_moments
from fedjax_sim.types import ClientData

FIRST, SECOND = [0.2, 0.5, 0.3], [0.5, 0.3, 0.2]


def test_worked_example():
    """Numbers by hand, to 1e-12; L1 is the "EMD" of Zhao et al. 2018. Catches TV without its half, W1 without
    positions, KL with its arguments swapped."""
    positions = [0, 1, 2]
    assert np.dot(FIRST, positions) == pytest.approx(1.1) and np.dot(SECOND, positions) == pytest.approx(0.7)
    assert optimum_gap(FIRST, SECOND, positions) == pytest.approx(0.4, abs=1e-12)
    assert total_variation(FIRST, SECOND) == pytest.approx(0.3, abs=1e-12)
    assert earth_mover_distance(FIRST, SECOND, positions) == pytest.approx(0.4, abs=1e-12)
    assert l1_distance(FIRST, SECOND) == pytest.approx(0.6, abs=1e-12)
    assert kullback_leibler_divergence(FIRST, SECOND) == pytest.approx(0.193794, abs=5e-7)
    assert kullback_leibler_divergence(SECOND, FIRST) == pytest.approx(0.223805, abs=5e-7)
    assert jensen_shannon_divergence(FIRST, SECOND) == pytest.approx(0.0508746, abs=5e-8)


def test_gap_is_not_the_distance():
    """Catches W1 computed as a difference of means."""
    first, second, positions = [0.5, 0, 0.5], [0, 1, 0], [0, 1, 2]
    assert optimum_gap(first, second, positions) == 0
    assert earth_mover_distance(first, second, positions) == 1 and total_variation(first, second) == 1


def test_distances_are_distances():
    """Symmetric, zero for equals, TV in [0, 1], JS at most ln 2, KL infinite off the support; rows at once."""
    rng = np.random.default_rng(0)
    first, second = rng.dirichlet(np.ones(4), 50), rng.dirichlet(np.ones(4), 50)
    for distance in (total_variation, l1_distance, jensen_shannon_divergence):
        np.testing.assert_allclose(distance(first, second), distance(second, first))
        np.testing.assert_allclose(distance(first, first), 0, atol=1e-15)
        assert distance(first, second)[7] == distance(first[7], second[7])
    assert (total_variation(first, second) <= 1).all()
    assert jensen_shannon_divergence([1, 0], [0, 1]) == pytest.approx(np.log(2))
    assert kullback_leibler_divergence([1, 0], [0, 1]) == np.inf
    gaps = optimum_gap(first, second, [0, 1, 5, 7])
    assert (earth_mover_distance(first, second, [0, 1, 5, 7]) >= gaps - 1e-12).all()


def test_earth_mover_distance_is_scipys():
    """On random supports in any order. Catches positions that are not sorted together with the masses."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        positions, first, second = rng.normal(size=6), rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
        expected = stats.wasserstein_distance(positions, positions, first, second)
        assert earth_mover_distance(first, second, positions) == pytest.approx(expected, abs=1e-12)


LABELS = [np.array([0, 0, 2]), np.array([1]), np.array([2, 2, 2, 1, 0])]


def test_label_counts():
    """Catches padding that counts as label 0, and a label that JAX clamps."""
    clients = population.from_clients([{"y": y, "x": np.zeros((len(y), 2))} for y in LABELS])
    expected = [np.bincount(y, minlength=4) for y in LABELS]
    np.testing.assert_array_equal(label_counts(clients, num_labels=4), expected)
    with pytest.raises(ValueError, match="num_labels"):
        label_counts(clients, num_labels=2)
    with pytest.raises(ValueError, match="label"):
        label_counts(clients, num_labels=3, label="z")


def test_label_heterogeneity():
    """Catches an unweighted mean over clients, and clients without examples that make NaN."""
    same = label_heterogeneity([[2, 2], [5, 5], [0, 0]], positions=[0, 1])
    assert same["total_variation"] == same["jensen_shannon"] == same["earth_mover_distance"] == 0
    assert same["labels_per_client"] == pytest.approx(2)
    apart = label_heterogeneity([[4, 0], [0, 4]], positions=[0, 3])
    assert apart["kullback_leibler"] == pytest.approx(np.log(2)) and apart["labels_per_client"] == pytest.approx(1)
    assert apart["total_variation"] == 0.5 and apart["earth_mover_distance"] == 1.5
    unequal = label_heterogeneity([[3, 0], [0, 1]])
    assert unequal["total_variation"] == pytest.approx(0.75 * 0.25 + 0.25 * 0.75)


# ---- gradients

SIZES = (3, 9, 5, 7)


def logistic():
    rng = np.random.default_rng(7)
    clients = [
        {"x": rng.normal(id - 2, 1, (n, 4)).astype(np.float32), "y": rng.integers(0, 3, n).astype(np.int32)}
        for id, n in enumerate(SIZES)
    ]
    model = models.logistic(input_shape=(4,), num_outputs=3)
    params = model.init(jax.random.key(0))[0]
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(1), x.shape), params)
    return models.supervised(model, models.default_loss("classification")), params, clients


def flat(x):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(x)]).astype(np.float64)


def by_loop(loss, params, clients):
    """[N, d] full-batch gradients, and [n_i, d] gradients of examples for each client."""
    one = jax.jit(jax.grad(lambda p, x, y: loss(p, {"x": x[None], "y": y[None]}, None)["loss"].sum()))
    examples = [np.stack([flat(one(params, x, y)) for x, y in zip(c["x"], c["y"], strict=True)]) for c in clients]
    return np.stack([g.mean(0) for g in examples]), examples


@pytest.mark.full
def test_gradients_of_a_loop():
    """Both weightings, a chosen part of the clients, an empty client. Catches shares mixed up with 1/N.

    Nobody with examples is an error, not NaN.
    """
    loss, params, clients = logistic()
    own, _ = by_loop(loss, params, clients)
    empty = jax.tree.map(lambda x: x[:0], clients[0])
    data = population.from_clients([*clients, empty])
    for weighting, weights in (("examples", np.array(SIZES)), ("uniform", np.ones(4))):
        shares = weights / weights.sum()
        found = gradient_heterogeneity(loss, params, data, weighting=weighting)
        mean = shares @ own
        away = ((own - mean) ** 2).sum(1)
        np.testing.assert_allclose(flat(found.gradient), mean, atol=1e-6)
        assert found.dissimilarity == pytest.approx(away.mean(), rel=1e-5) and found.num_clients == 4
        assert found.variance == pytest.approx(shares @ away, rel=1e-5)
        assert found.mean_square == pytest.approx(shares @ (own**2).sum(1), rel=1e-5)
        assert found.b_dissimilarity == pytest.approx(np.sqrt(found.mean_square) / np.linalg.norm(mean), rel=1e-5)
        assert found.noise_to_signal == pytest.approx(shares @ away / (mean @ mean), rel=1e-4)
        yin = ((shares[:, None] * own) ** 2).sum() / (mean @ mean)
        assert found.diversity == pytest.approx(yin, rel=1e-5)
    work = {"step_size": 0.1, "num_steps": 1}
    for lonely in (
        lambda **ids: gradient_heterogeneity(loss, params, data, **ids),
        lambda **ids: gradient_moments(loss, params, data, **ids),
        lambda **ids: metrics.drift(loss, params, data, **work, **ids),
        lambda **ids: metrics.drift_bias(loss, params, data, **work, **ids),
        lambda **ids: metrics.drift_leading_term(loss, params, data, **work, **ids),
    ):
        with pytest.raises(ValueError, match="a client with examples"):
            lonely(ids=[4])
    part = gradient_heterogeneity(loss, params, data, ids=[1, 3])
    mean = np.array([9, 7]) / 16 @ own[[1, 3]]
    assert part.dissimilarity == pytest.approx(((own[[1, 3]] - mean) ** 2).sum(1).mean(), rel=1e-5)


def test_dissimilarity_is_the_fedprox_codes():
    """Their trainer: the mean gradient by samples, squared differences averaged over clients alike.

    Catches an average by samples in both places (`variance`).
    """
    loss, params, clients = logistic()
    own, _ = by_loop(loss, params, clients)
    total, samples = np.zeros(own.shape[1]), 0
    for gradient, num in zip(own, SIZES, strict=True):
        total += gradient * num
        samples += num
    difference = 0.0
    for gradient in own:
        difference += np.sum(np.square(total / samples - gradient))
    difference /= len(own)
    found = gradient_heterogeneity(loss, params, population.from_clients(clients))
    assert found.dissimilarity == pytest.approx(difference, rel=1e-5)
    assert abs(found.variance / difference - 1) > 0.02


def test_identical_clients():
    """Equal gradients: variance 0, B = 1, diversity 1/N. Catches a variance that is a difference of large numbers."""
    data = population.quadratic_population(np.ones(8), np.full(8, 1000.25))
    found = gradient_heterogeneity(population.quadratic_loss, {"w": jnp.ones(1)}, data)
    assert found.variance < 1e-5 and found.b_dissimilarity == pytest.approx(1, abs=1e-6)
    assert found.diversity == pytest.approx(1 / 8, abs=1e-6)
    near = population.quadratic_population(np.ones(2), np.array([1000 - 2.0**-6, 1000 + 2.0**-6]))
    found = gradient_heterogeneity(population.quadratic_loss, {"w": jnp.zeros(1)}, near)
    assert found.noise_to_signal == pytest.approx(2.0**-12 / 1e6, rel=1e-6, abs=0) and found.b_dissimilarity >= 1
    opposite = population.quadratic_population(np.ones(2), np.array([-1.0, 1.0]))
    still = gradient_heterogeneity(population.quadratic_loss, {"w": jnp.zeros(1)}, opposite)
    assert still.b_dissimilarity == np.inf and still.dissimilarity == 1


@pytest.mark.full  # by default tests/metrics/test_drift.py has digits of so many clients' sums
def test_many_clients():
    """10^5 generated clients with a_i = id / N: variance 1/12. Catches sums that lose digits, and [N, d] memory."""

    def generate(_, id):
        center = jnp.full((1, 4), id.astype(jnp.float32) / 100_000)
        return ClientData({"hessian": jnp.eye(4)[None], "center": center}, jnp.ones(1, bool))

    data = population.generated(100_000, generate)
    found = gradient_heterogeneity(population.quadratic_loss, {"w": jnp.zeros(4)}, data)
    assert found.variance == pytest.approx(4 / 12, rel=1e-5) and found.num_clients == 100_000


def test_moments_of_a_loop():
    """Hessian by differences of float64 gradients, both covariances by a loop. Catches weights n_i lost in either."""
    loss, params, clients = logistic()
    own, examples = by_loop(loss, params, clients)
    shares = np.array(SIZES) / sum(SIZES)
    found = gradient_moments(loss, params, population.from_clients(clients))
    mean = shares @ own
    np.testing.assert_allclose(found.gradient, mean, atol=1e-6)
    np.testing.assert_allclose(found.client_covariance, (own - mean).T @ ((own - mean) * shares[:, None]), atol=1e-5)
    inside = sum(p * np.cov(g.T, ddof=0) for p, g in zip(shares, examples, strict=True))
    np.testing.assert_allclose(found.example_covariance, inside, atol=1e-5)
    slope = gradient_heterogeneity(loss, params, population.from_clients(clients)).gradient
    moved = jax.tree.map(lambda w, g: w + 0.01 * g, params, slope)
    back = jax.tree.map(lambda w, g: w - 0.01 * g, params, slope)
    ahead, behind = (
        flat(gradient_heterogeneity(loss, p, population.from_clients(clients)).gradient) for p in (moved, back)
    )
    np.testing.assert_allclose(found.hessian @ mean, (ahead - behind) / 0.02, atol=1e-3 * np.abs(ahead).max() + 1e-4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: total_variation([0.5, 0.6], [0.5, 0.5]), "sum to 1"),
        (lambda: total_variation([0.5, 0.5], [1.0]), "one support"),
        (lambda: total_variation([1.5, -0.5], [0.5, 0.5]), "first"),
        (lambda: earth_mover_distance(FIRST, SECOND, [0, 1]), "positions"),
        (lambda: optimum_gap(FIRST, SECOND, [0, 1, np.nan]), "positions"),
        (lambda: label_heterogeneity([[0, 0]]), "counts"),
        (lambda: label_heterogeneity([[1, -1]]), "counts"),
        (
            lambda: metrics.gradient_moments(population.quadratic_loss, {"w": jnp.zeros(5000)}, None),
            "dimension",
        ),
    ],
)
def test_wrong_input(build, message):
    """Catches numbers that look right out of input that is wrong."""
    with pytest.raises((ValueError, TypeError), match=message):
        build()
