"""Generators against the laws they are documented to follow. Error rates are stated beside each bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim.population.datasets.synthetic import linear_teacher, logistic_teacher, mean_estimation, synthetic

client_of = jax.jit(lambda population, id: population.client(id))


def rows(population, id):
    data = client_of(population, np.int32(id))
    return {name: np.asarray(leaf)[np.asarray(data.mask)] for name, leaf in data.examples.items()}


def joined(data, i):
    """All of client i's examples, training part and test part."""
    train, test = rows(data.train, i), rows(data.held_out, i)
    return {name: np.concatenate([train[name], test[name]]) for name in train}


@pytest.fixture(scope="module")
def heterogeneous():
    return synthetic(alpha=1.0, beta=1.0, num_clients=200, max_examples=3000, seed=5)


@pytest.fixture(scope="module")
def clients(heterogeneous):
    return [joined(heterogeneous, i) for i in range(200)]


def test_synthetic_follows_the_published_recipe(clients):
    # Faults: covariance j^-0.6 or j^-2.4, no centres, sizes without the +50, Lognormal(4, 2) with variance for sigma.
    sizes = np.array([len(client["y"]) for client in clients])
    assert sizes.min() >= 50 and sizes.max() <= 3000
    # The median of 50 + floor(e^{4 + 2 z}) is 104; of 200 clients it leaves [74, 170] with p < 1e-4 (binomial).
    assert 74 <= np.median(sizes) <= 170
    # P(size < 58 or > 50 + e^6) = 0.327 for sigma 2 (0.05 for 1, 0.62 for 4); 5 standard errors are 0.166: p < 1e-6.
    outer = ((sizes < 58) | (sizes > 50 + np.exp(6))).mean()
    assert abs(outer - 0.327) < 0.166
    within = np.concatenate([client["x"] - client["x"].mean(axis=0) for client in clients])
    freedom = len(within) - 200
    variance = (within**2).sum(axis=0) / freedom * np.arange(1, 61) ** 1.2
    # Chi-square with > 4e4 degrees: relative standard error < 0.75 %; 6 of them over 60 features: p < 2e-7.
    assert freedom > 35_000 and np.abs(variance - 1).max() < 6 * np.sqrt(2 / freedom)
    centers = np.array([client["x"].mean(axis=0) for client in clients])
    # v_ij ~ N(B_i, 1): spread inside a client is 1 (chi-square, 200 x 59 degrees: 6 standard errors = 8 %).
    assert abs(np.var(centers, axis=1, ddof=1).mean() - 1) < 0.1
    # B_i ~ N(0, beta): variance beta^2 + 1/60; 200 draws: chi-square bounds at p = 1e-6 each.
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], 199) / 199
    assert low < np.var(centers.mean(axis=1), ddof=1) / (1 + 1 / 60) < high


def test_synthetic_labels_are_a_linear_model_of_the_client(clients):
    # Fault: labels from another client's model, or shuffled against x. A least-squares one-vs-all fit must beat the
    # majority by far on a client with many examples of several labels.
    from sklearn.linear_model import LogisticRegression

    for client in clients:
        counts = np.bincount(client["y"], minlength=10)
        if len(client["y"]) > 1000 and counts.max() < 0.7 * len(client["y"]):
            x, y = client["x"][:1000], client["y"][:1000]
            model = LogisticRegression(C=1e3, max_iter=3000, tol=1e-3).fit(x, y)
            assert model.score(x, y) > 0.93
            return
    pytest.fail("no client with enough labels")


def test_synthetic_beta_and_iid():
    # Faults: `iid` that keeps per-client centres; beta taken as a variance (0.25 would give B a spread of 0.5).
    iid = synthetic(num_clients=50, max_examples=400, iid=True, seed=1)
    centers = np.array([joined(iid, i)["x"].mean(axis=0) for i in range(50)])
    assert np.abs(centers).max() < 6 / np.sqrt(50)  # |mean| of >= 50 draws of variance <= 1: p < 3000 * 2e-9
    spread = synthetic(alpha=0.0, beta=4.0, num_clients=200, max_examples=50, seed=2)
    means = np.array([joined(spread, i)["x"].mean() for i in range(200)])
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], 199) / 199  # [0.58, 1.56]: variance 4 instead of 16 is refused
    assert low < np.var(means, ddof=1) / (16 + 1 / 60) < high


def test_synthetic_split_and_seed(heterogeneous):
    # Faults: a test row lost or shared; a row too many, since 0.8 * 50 is above 40 in floats; a seed that is ignored.
    assert len(rows(synthetic(num_clients=1, max_examples=50, test_fraction=0.8).train, 0)["y"]) == 10
    total = sum(len(rows(heterogeneous.held_out, i)["y"]) for i in range(200))
    assert total == len(heterogeneous.test["y"])
    for i in range(5):
        train, test = len(rows(heterogeneous.train, i)["y"]), len(rows(heterogeneous.held_out, i)["y"])
        assert train == int(0.9 * (train + test))
    again, other = (synthetic(num_clients=2, max_examples=60, seed=s).test["x"] for s in (1, 2))
    np.testing.assert_array_equal(again, synthetic(num_clients=2, max_examples=60, seed=1).test["x"])
    assert again.shape != other.shape or not np.allclose(again, other)


def test_a_billion_clients_cost_nothing():
    # Fault: anything of size N built, or ids folded into 16 bits.
    data = linear_teacher(num_clients=1_000_000_000, dimension=4, examples_per_client=3)
    client = jax.jit(jax.vmap(data.train.client))
    found = client(jnp.array([0, 999_999_999, 65_536, 0], jnp.int32))
    x = np.asarray(found.examples["x"])
    assert data.train.size == 1_000_000_000 and found.mask.all()
    np.testing.assert_array_equal(x[0], x[3])
    assert len({row.tobytes() for row in x}) == 3
    alone = client_of(data.train, np.int32(999_999_999)).examples["x"]
    np.testing.assert_array_equal(alone, x[1])


def test_teacher_is_the_answer():
    # Faults: shifts that do not cancel, noise of another size, shift of another size, held-out clients that are
    # training clients, a test set of another teacher.
    d, n, size = 5, 40, 2001
    data = linear_teacher(
        num_clients=size, dimension=d, examples_per_client=n, noise=0.5, heterogeneity=2.0, held_out_clients=3, seed=7
    )
    found = jax.jit(jax.vmap(data.train.client))(jnp.arange(size)).examples
    x, y = np.asarray(found["x"], np.float64), np.asarray(found["y"], np.float64)[..., 0]
    local = np.array([np.linalg.lstsq(a, b, rcond=None)[0] for a, b in zip(x, y, strict=True)])
    teacher = np.asarray(data.train.parameters["teacher"], np.float64)
    residual = y - np.einsum("nij,nj->ni", x, local)
    low, high = (stats.chi2.ppf(q, size * (n - d)) / (size * (n - d)) for q in (1e-7, 1 - 1e-7))
    assert low < (residual**2).sum() / (size * (n - d)) / 0.25 < high  # noise variance, 2e-7
    # Shifts cancel exactly, so local fits average to the teacher within noise alone: 0.5 / sqrt(34 * 2001) each.
    assert np.abs(local.mean(axis=0) - teacher).max() < 6 * 0.5 / np.sqrt((n - d - 1) * size)
    shift = ((local - teacher) ** 2).sum(axis=1)
    noise = d * 0.25 / (n - d - 1)
    error = 6 * 4 * np.sqrt(2 / (d * 1000))  # 1000 independent pairs of chi-square(d) shifts
    assert abs(shift.mean() - 4.0 - noise) < error
    np.testing.assert_allclose(local[-1], teacher, atol=1.0)  # the odd last client has no shift
    fit = np.linalg.lstsq(data.test["x"], data.test["y"][:, 0], rcond=None)[0]
    np.testing.assert_allclose(fit, teacher, atol=6 * 0.5 / np.sqrt(900))
    assert data.held_out.size == 3
    assert not np.allclose(rows(data.held_out, 0)["x"], x[0])


def test_logistic_labels_follow_the_law():
    # Faults: a sign, a missing flip, labels drawn with the features' key. z-test on pooled scores: 6 sigma, p < 2e-9.
    data = logistic_teacher(num_clients=500, dimension=4, examples_per_client=100, noise=0.1, heterogeneity=0.0, seed=3)
    found = jax.jit(jax.vmap(data.train.client))(jnp.arange(500)).examples
    x, y = np.asarray(found["x"]).reshape(-1, 4), np.asarray(found["y"]).reshape(-1)
    teacher = np.asarray(data.train.parameters["teacher"])

    def score(noise):
        chance = noise + (1 - 2 * noise) / (1 + np.exp(-(x @ teacher)))
        pull = (y - chance) * np.sign(x @ teacher)
        return pull.sum() / np.sqrt((chance * (1 - chance)).sum())

    assert abs(score(0.1)) < 6 and abs(score(0.05)) > 6 and abs(score(0.15)) > 6
    assert set(np.unique(data.test["y"])) == {0, 1} and data.test["y"].dtype == np.int32


@pytest.mark.parametrize("values", ["gaussian", "two_point"])
def test_mean_estimation_is_exact(values):
    # Faults: a mean known in expectation only (its error would be 2 / sqrt(N) = 0.06), dependence on the batch.
    data = mean_estimation(num_clients=1000, dimension=3, mean=5.0, spread=2.0, values=values, seed=2)
    found = np.asarray(jax.jit(jax.vmap(data.train.client))(jnp.arange(1000)).examples["y"], np.float64)[:, 0]
    np.testing.assert_allclose(found.mean(axis=0), 5.0, atol=1e-6)
    np.testing.assert_array_equal(data.test["y"], [[5.0, 5.0, 5.0]])
    if values == "two_point":
        np.testing.assert_allclose(found.var(axis=0), 4.0, atol=1e-5)
    low, high = stats.chi2.ppf([1e-7, 1 - 1e-7], 1500) / 1500  # 500 independent pairs x 3 coordinates
    assert low < found.var() / 4 < high
    odd = mean_estimation(num_clients=3, mean=1.0, seed=2)
    np.testing.assert_allclose(np.mean([rows(odd.train, i)["y"] for i in range(3)]), 1.0, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: synthetic(alpha=-1.0), "alpha"),
        (lambda: synthetic(beta=float("nan")), "beta"),
        (lambda: synthetic(num_clients=True), "num_clients"),
        (lambda: synthetic(iid=1), "iid"),
        (lambda: linear_teacher(num_clients=2**31), "num_clients"),
        (lambda: linear_teacher(noise=-0.1), "noise"),
        (lambda: linear_teacher(heterogeneity=float("inf")), "heterogeneity"),
        (lambda: logistic_teacher(noise=0.5), "noise"),
        (lambda: mean_estimation(values="gausian"), "Did you mean 'gaussian'"),
        (lambda: mean_estimation(mean=float("inf")), "mean"),
    ],
)
def test_wrong_input(build, message):
    # Fault: options out of range that produce data all the same.
    with pytest.raises((ValueError, TypeError), match=message):
        build()
