"""Closed forms on quadratics against hand-computed numbers, step-by-step recursions, and rounds of the simulator."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, population, sampling
from fedjax_sim.engine import Plan
from fedjax_sim.theory.convergence import (
    fedavg_contraction,
    fedavg_fixed_point,
    fednova_fixed_point,
    fedprox_contraction,
    fedprox_fixed_point,
    proximal_curvature,
    proximal_solution,
)
from fedjax_sim.theory.drift import quadratic_drift
from fedjax_sim.theory.quadratic import (
    effective_shares,
    local_noise,
    local_progress,
    quadratic_optimum,
    quadratic_problem,
)
from fedjax_sim.theory.sgd import (
    decaying_step_limit,
    excess_loss,
    expected_squared_distance,
    rounds_until,
    sgd_contraction,
    sgd_floor,
    stationary_covariance,
)

CURVATURES, CENTERS = [1.0, 10.0], [0.0, 1.0]


def random_problem(num_clients=4, dimension=3):
    rng = np.random.default_rng(1)
    factors = rng.normal(size=(num_clients, dimension, dimension))
    hessians = factors @ np.swapaxes(factors, 1, 2) / dimension + 0.3 * np.eye(dimension)
    return hessians, rng.normal(size=(num_clients, dimension)), rng.dirichlet(np.ones(num_clients))


def test_optimum_is_not_the_average_of_centers():
    # Fault: averaging centers (0.5) instead of weighting them by curvature.
    np.testing.assert_allclose(quadratic_optimum(CURVATURES, CENTERS), [10 / 11], rtol=1e-14)


def test_weights_change_the_objective():
    # Fault: equal client weights where examples count (Li et al. 2020, FedAvg on non-IID data): 0.5 instead of 0.9.
    np.testing.assert_allclose(quadratic_optimum([1, 1], [0, 1], [0.1, 0.9]), [0.9], rtol=1e-14)
    np.testing.assert_allclose(quadratic_optimum([1, 1], [0, 1]), [0.5], rtol=1e-14)


def test_optimum_is_stationary():
    # Fault: a transposed or unweighted system, invisible for d = 1.
    hessians, centers, shares = random_problem()
    optimum = quadratic_optimum(hessians, centers, shares)
    gradient = np.einsum("n,nij,nj->i", shares, hessians, optimum - centers)
    np.testing.assert_allclose(gradient, 0, atol=1e-12)


def test_fixed_points_are_where_simulated_rounds_end():
    # Fault: off by one in K, or the power of the average instead of the average of powers.
    hessians, centers, shares = random_problem()
    for num_steps in (1, 2, 7):
        server = np.zeros(3)
        for _ in range(4000):
            local = np.repeat(server[None], len(shares), axis=0)
            for _ in range(num_steps):
                local = local - 0.1 * np.einsum("nij,nj->ni", hessians, local - centers)
            server = shares @ local
        closed = fedavg_fixed_point(hessians, centers, shares, num_steps=num_steps, step_size=0.1)
        np.testing.assert_allclose(closed, server, atol=1e-10)
    server = np.zeros(3)
    for _ in range(4000):
        solved = [
            proximal_solution(h, h @ a, server, proximal_weight=0.7) for h, a in zip(hessians, centers, strict=True)
        ]
        server = shares @ np.array(solved)
    np.testing.assert_allclose(fedprox_fixed_point(hessians, centers, shares, proximal_weight=0.7), server, atol=1e-10)


def test_fixed_point_numbers():
    # Fault: limits exchanged: one step converges to the optimum, many to the average of the centers.
    def at(num_steps, step_size=0.05):
        return fedavg_fixed_point(CURVATURES, CENTERS, num_steps=num_steps, step_size=step_size)[0]

    assert at(1) == pytest.approx(10 / 11, abs=1e-12)
    assert at(10_000) == pytest.approx(0.5, abs=1e-12)
    scalar = (1 - 0.5**5) / ((1 - 0.95**5) + (1 - 0.5**5))
    assert at(5) == pytest.approx(scalar, abs=1e-12)


def test_contraction_numbers():
    # Fault: contraction of the averaged Hessian; eta * lambda_max > 2 must show divergence.
    by_hand = (0.95**5 + 0.5**5) / 2
    assert fedavg_contraction(CURVATURES, CENTERS, num_steps=5, step_size=0.05) == pytest.approx(by_hand, abs=1e-12)
    assert fedavg_contraction(CURVATURES, CENTERS, num_steps=5, step_size=0.25) > 1
    assert fedavg_contraction(CURVATURES, CENTERS, num_steps=5, step_size=0.19) < 1


def test_fedprox_sweep():
    # Fault: lambda on the wrong side.
    points = {0.0: 0.5, 0.1: 0.521327, 1.0: 0.645161, 10.0: 0.846154, 100.0: 0.901786, 1e9: 0.909091}
    for weight, expected in points.items():
        found = fedprox_fixed_point(CURVATURES, CENTERS, proximal_weight=weight)[0]
        assert found == pytest.approx(expected, abs=1e-6)
    contractions = {0.0: 0, 0.1: 0.0504, 1.0: 0.2955, 10.0: 0.7045, 100.0: 0.9496}
    for weight, expected in contractions.items():
        found = fedprox_contraction(CURVATURES, CENTERS, proximal_weight=weight)
        assert found == pytest.approx(expected, abs=1e-4)


def test_proximal_solution():
    # Fault: the anchor's or the linear term's sign; and gradient steps must reach it.
    hessian, linear, anchor = np.array([[3.0, 1], [1, 2]]), np.array([1.0, -1]), np.array([0.5, 0.5])
    for weight, expected in {0: (0.6, -0.8), 1: (0.454545, -0.318182), 10: (0.438710, 0.296774)}.items():
        found = proximal_solution(hessian, linear, anchor, proximal_weight=weight)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        w = anchor
        for _ in range(500):
            w = w - 0.05 * (hessian @ w - linear + weight * (w - anchor))
        np.testing.assert_allclose(w, found, atol=1e-6)


def test_curvature_shifts_by_the_coefficient():
    # Fault: lambda / 2 added to the Hessian.
    hessian = random_problem()[0][0]
    low, high = proximal_curvature(hessian, proximal_weight=0.7)
    np.testing.assert_allclose([low, high], np.linalg.eigvalsh(hessian)[[0, -1]] + 0.7, atol=1e-12)


def test_inexact_fedprox():
    # Fault: the anchor left out of the local steps; K -> infinity must be the exact solve, lambda = 0 FedAvg.
    hessians, centers, shares = random_problem()
    work = {"num_steps": 3, "step_size": 0.1}
    server = np.zeros(3)
    for _ in range(3000):
        local = np.repeat(server[None], 4, axis=0)
        for _ in range(3):
            local = local - 0.1 * (np.einsum("nij,nj->ni", hessians, local - centers) + 0.7 * (local - server))
        server = shares @ local
    found = fedprox_fixed_point(hessians, centers, shares, proximal_weight=0.7, **work)
    np.testing.assert_allclose(found, server, atol=1e-10)
    limit = fedprox_fixed_point(hessians, centers, shares, proximal_weight=0.7, num_steps=4000, step_size=0.1)
    np.testing.assert_allclose(limit, fedprox_fixed_point(hessians, centers, shares, proximal_weight=0.7), atol=1e-9)
    plain = fedprox_fixed_point(hessians, centers, shares, proximal_weight=0.0, **work)
    np.testing.assert_allclose(plain, fedavg_fixed_point(hessians, centers, shares, **work), atol=1e-12)
    rates = fedprox_contraction(hessians, centers, shares, proximal_weight=0.0, **work)
    assert rates == pytest.approx(fedavg_contraction(hessians, centers, shares, **work), abs=1e-12)


def test_unequal_steps_shift_the_fixed_point():
    """Wang et al. 2020 (FedNova), theorem 1. Catches equal steps (0.5), and weights that count examples once."""
    work = {"num_steps": [1, 10], "shares": [0.5, 0.5]}
    for rate, expected in ((0.1, 0.866901), (0.01, 0.905319), (1e-6, 10 / 11)):
        assert fedavg_fixed_point([1, 1], [0, 1], step_size=rate, **work)[0] == pytest.approx(expected, abs=2e-6)
    limit = quadratic_optimum([1, 1], [0, 1], effective_shares([0.5, 0.5], [1, 10]))
    assert limit[0] == pytest.approx(10 / 11, abs=1e-14)
    assert fednova_fixed_point([1, 1], [0, 1], step_size=1e-6, **work)[0] == pytest.approx(0.5, abs=1e-5)
    assert fednova_fixed_point([1, 1], [0, 1], step_size=0.1, **work)[0] == pytest.approx(0.394424, abs=1e-6)
    np.testing.assert_allclose(effective_shares([10 / 110, 100 / 110], [10, 100]), [0.0099, 0.9901], atol=1e-5)
    equal = fedavg_fixed_point(CURVATURES, CENTERS, num_steps=[5, 5], step_size=0.05)
    np.testing.assert_allclose(equal, fedavg_fixed_point(CURVATURES, CENTERS, num_steps=5, step_size=0.05))


def test_noise_of_local_steps():
    """The sum over steps equals the recursion P' = A P A + eta^2 S. Catches A^k for A^2k, and one step too many."""
    hessians = random_problem()[0]
    rng = np.random.default_rng(2)
    noises = np.einsum("nij,nkj->nik", *[rng.normal(size=(4, 3, 3))] * 2)
    for proximal_weight in (0.0, 0.5):
        steps_matrix = np.eye(3) - 0.1 * (hessians + proximal_weight * np.eye(3))
        expected = np.zeros((4, 3, 3))
        for num_steps in range(1, 5):
            expected = steps_matrix @ expected @ steps_matrix + 0.01 * noises
            found = local_noise(hessians, noises, num_steps, 0.1, proximal_weight)
            np.testing.assert_allclose(found, expected, atol=1e-12)
    still = local_noise(np.zeros((1, 1, 1)), 2.0, 7, 0.1)  # no curvature: a random walk
    assert still[0, 0, 0] == pytest.approx(7 * 0.02)
    for rate in (1e-15, 1e-17):  # tiny steps: catches 1 - (1 - x)^K
        assert local_progress(np.ones((1, 1, 1)), 3, rate)[0, 0, 0] == pytest.approx(3 * rate, rel=1e-12, abs=0)
        assert local_noise(np.ones((1, 1, 1)), 2.0, 3, rate)[0, 0, 0] == pytest.approx(6 * rate**2, rel=1e-12, abs=0)
    for rate in (0.3, 0.8, 1.0, 2.0, 2.5):
        assert local_progress(np.ones((1, 1, 1)), 3, rate)[0, 0, 0] == pytest.approx(1 - (1 - rate) ** 3, rel=1e-12)


def test_stationary_covariance():
    """The equation itself, SGD's formula as its scalar case, and SGD's rate. Catches p_i for p_i^2."""
    hessians, _, shares = random_problem()
    found = stationary_covariance(hessians, 0.3, shares, step_size=0.1, num_steps=3)
    kept = np.einsum("n,nij->ij", shares, np.eye(3) - local_progress(hessians, 3, 0.1))
    added = np.einsum("n,nij->ij", shares**2, local_noise(hessians, 0.3, 3, 0.1))
    np.testing.assert_allclose(found, kept @ found @ kept + added, atol=1e-12)
    assert stationary_covariance(2.0, 3.0, step_size=0.3)[0, 0] == pytest.approx(sgd_floor(2.0, 3.0, step_size=0.3))
    eigen = stationary_covariance(np.diag([1.0, 4.0]), 1.0, step_size=0.2)
    np.testing.assert_allclose(np.diag(eigen), sgd_floor([1.0, 4.0], 1.0, step_size=0.2))
    assert sgd_contraction(2.0, step_size=0.3) == pytest.approx(0.4)
    assert excess_loss(2.0, [[0.3]], [0.1]) == pytest.approx(0.31)
    for clients in (1, 4):  # equal clients: the floor is divided by their number
        scaled = stationary_covariance(np.ones(clients), 1.0, step_size=0.5)[0, 0]
        assert scaled == pytest.approx(1 / (3 * clients))


def noisy(params, examples, key):
    """A quadratic whose every gradient carries fresh standard normal noise, in each coordinate."""
    loss = population.quadratic_loss(params, examples)["loss"]
    noise = 0.0 if key is None else params["w"] @ jax.random.normal(key, params["w"].shape)
    return loss + noise


@pytest.mark.slow
def test_simulated_sgd_has_the_floor():
    """SGD's floor with local steps, in the real simulator: 1,024 seeds, independent time averages; both clients' noise.

    Accepted within 4 standard errors (false alarm 6e-5 a comparison); they are below 0.6 %, so 5 % off is refused.
    """
    hessians, centers = np.array([0.5, 2.0]), np.array([0.0, 1.0])
    data = population.quadratic_population(hessians, centers)
    for num_steps in (1, 4):
        algorithm = algorithms.fedavg(
            noisy, sampling.full(2), optax.sgd(0.2), num_steps=num_steps, plan=Plan(2, 2), mesh=None
        )
        start = fedavg_fixed_point(hessians, centers, num_steps=num_steps, step_size=0.2)

        def path(key, data, algorithm=algorithm, start=start):
            state = algorithm.init(key, {"w": jnp.asarray(start, jnp.float32)}, data)

            def body(state, key):
                state, _ = algorithm.step(key, state, data)
                return state, algorithm.params(state)["w"][0]

            return jax.lax.scan(body, state, jax.random.split(key, 460))[1][60:]

        away = np.asarray(jax.jit(jax.vmap(path, (0, None)))(jax.random.split(jax.random.key(3), 1024), data), float)
        each = ((away - start[0]) ** 2).mean(1)
        expected = stationary_covariance(hessians, 1.0, step_size=0.2, num_steps=num_steps)[0, 0]
        error = each.std(ddof=1) / np.sqrt(len(each))
        assert abs(each.mean() - expected) < 4 * error
        assert abs(each.mean() - 1.05 * expected) > 4 * error < abs(each.mean() - expected / 1.05)


def test_decaying_steps():
    """No floor under 1/t, only a rate. Catches eta for eta^2; and a constant step must reach its floor."""
    times = np.arange(1, 200_001)
    path = expected_squared_distance(2.0, 3.0, 0.75 / times, start=0.1)
    limit = decaying_step_limit(2.0, 3.0, step_constant=0.75)
    assert path[-1] * times[-1] == pytest.approx(limit, rel=1e-3)
    best = decaying_step_limit(2.0, 3.0, step_constant=0.5)
    assert best == pytest.approx(3.0 / 4.0) and best < limit
    constant = expected_squared_distance([1.0, 2.0], 3.0, np.full(2000, 0.1), start=[5.0, 0.0])
    np.testing.assert_allclose(constant[-1], sgd_floor([1.0, 2.0], 3.0, step_size=0.1), rtol=1e-12)


def test_rounds_until():
    """Exact at the edges. Catches a round too many where the logarithm is rounded."""
    assert rounds_until(0.5, 8.0, 1.0) == 3 and rounds_until(0.5, 8.0, 0.999) == 4
    assert rounds_until(0.1, 1.0, 1e-3) in (3, 4) and rounds_until(0.3, 1.0, 2.0) == 0
    assert rounds_until(0.0, 5.0, 1e-9) == 1
    assert rounds_until(0.5, 1e300, 1e-300) == 1994  # 600 log2(10) = 1993.2
    for contraction in (0.3, 0.9, 0.999):
        rounds = rounds_until(contraction, 7.0, 0.01)
        assert 7 * contraction**rounds <= 0.01 < 7 * contraction ** (rounds - 1)


# ---- drift


def test_drift_is_its_definition():
    """Steps one by one (Karimireddy et al. 2020), Hessians that do not commute; both gradients; sum of parts."""
    hessians, centers, shares = random_problem(dimension=2)
    assert np.abs(hessians[0] @ hessians[1] - hessians[1] @ hessians[0]).max() > 0.1
    point = np.array([0.7, -1.2])
    for each in ([3, 3, 3, 3], [1, 4, 2, 7]):
        local, met = np.repeat(point[None], 4, axis=0), np.zeros(2)
        for id in range(4):
            w = point.copy()
            for _ in range(each[id]):
                gradient = hessians[id] @ (w - centers[id])
                met = met + shares[id] * gradient
                w = w - 0.1 * gradient
            local[id] = w
        gradients = np.einsum("nij,nj->ni", hessians, local - centers)
        drift = quadratic_drift(hessians, centers, shares, point=point, num_steps=each, step_size=0.1)
        first = shares @ np.einsum("nij,nj->ni", hessians, point - centers)
        np.testing.assert_allclose(drift.end_point_gradient, shares @ gradients, atol=1e-10)
        np.testing.assert_allclose(drift.bias, shares @ gradients - first, atol=1e-10)
        np.testing.assert_allclose(drift.pseudo_gradient, met, atol=1e-10)
        np.testing.assert_allclose(drift.pseudo_gradient, (point - shares @ local) / 0.1, atol=1e-10)
        np.testing.assert_allclose(drift.curvature + drift.heterogeneity, drift.bias, atol=1e-12)
        assert np.abs(drift.pseudo_gradient - drift.end_point_gradient).max() > 0.1


def test_scalar_drift():
    """To 1e-12. Catches K off by one, and weights that are left out."""
    for num_steps, expected in ((1, 0.31), (5, 1.269481)):
        drift = quadratic_drift([1, 1, 1], [0, 2, 7], [0.2, 0.3, 0.5], point=1.0, num_steps=num_steps, step_size=0.1)
        assert drift.bias[0] == pytest.approx((0.9**num_steps - 1) * (1 - 4.1), abs=1e-12)
        assert drift.bias[0] == pytest.approx(expected, abs=1e-12)


def test_leading_term():
    """Exact at K = 1; else the remainder is O(eta^2). And the first order of the heterogeneity part."""
    problem = random_problem()
    point = np.array([0.3, 1.0, -0.5])
    one = quadratic_drift(*problem, point=point, num_steps=1, step_size=0.1)
    np.testing.assert_allclose(one.bias, one.leading_term, atol=1e-12)
    hessians, centers, shares = problem
    gradients = np.einsum("nij,nj->ni", hessians, point - centers)
    moved = np.einsum("nij,nj->ni", hessians, gradients)
    covariance = shares @ moved - np.einsum("n,nij->ij", shares, hessians) @ (shares @ gradients)
    np.testing.assert_allclose(one.heterogeneity, -0.1 * covariance, atol=1e-12)
    rest = [
        np.linalg.norm(drift.bias - drift.leading_term)
        for drift in (quadratic_drift(*problem, point=point, num_steps=4, step_size=eta) for eta in (2e-4, 1e-4))
    ]
    assert rest[0] / rest[1] == pytest.approx(4, abs=0.3)


def test_drift_counter_cases():
    """Without steps no drift; identical clients drift, and equal Hessians reach the optimum: not what texts claim."""
    hessians, centers, shares = random_problem()
    for options in ({"num_steps": 0, "step_size": 0.1}, {"num_steps": 3, "step_size": 0.0}):
        drift = quadratic_drift(hessians, centers, shares, point=np.ones(3), **options)
        assert not drift.bias.any()
    work = {"num_steps": 5, "step_size": 0.1}
    same = quadratic_drift(hessians[[0] * 4], centers[[0] * 4], shares, point=np.ones(3), **work)
    assert np.abs(same.bias).max() > 0.1
    np.testing.assert_allclose(same.heterogeneity, 0, atol=1e-12)
    mean = shares @ centers
    equal = quadratic_drift(np.repeat(np.eye(3)[None], 4, 0), centers, shares, point=mean, **work)
    np.testing.assert_allclose(equal.bias, 0, atol=1e-12)
    away = quadratic_drift(np.repeat(np.eye(3)[None], 4, 0), centers, shares, point=mean + 1, **work)
    np.testing.assert_allclose(away.bias / away.gradient, 0.9**5 - 1, atol=1e-12)  # parallel to the gradient
    optimum = quadratic_optimum(hessians, centers, shares)
    biased = quadratic_drift(hessians, centers, shares, point=optimum, **work)
    np.testing.assert_allclose(biased.curvature, 0, atol=1e-12)
    assert np.abs(biased.heterogeneity).max() > 1e-3
    fixed = fedavg_fixed_point(hessians, centers, shares, **work)
    np.testing.assert_allclose(
        quadratic_drift(hessians, centers, shares, point=fixed, **work).pseudo_gradient, 0, atol=1e-10
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: quadratic_optimum([[[1, 2], [0, 1]]], [[0, 0]]), "symmetric"),
        (lambda: quadratic_optimum([-1.0, 2.0], [0, 1]), "negative eigenvalue"),
        (lambda: quadratic_optimum([0.0, 0.0], [0, 1]), "unique solution"),
        (lambda: quadratic_optimum([1.0, np.nan], [0, 1]), "finite"),
        (lambda: quadratic_optimum([1.0, 2.0], [0, 1], [0.5, 0.6]), "sum to 1"),
        (lambda: quadratic_optimum([1.0, 2.0], [0, 1], [np.nan, 0.6]), "sum to 1"),
        (lambda: quadratic_optimum([1.0, 2.0], [0]), "shapes"),
        (lambda: quadratic_problem(np.ones((2, 2)), [0, 1]), "shapes"),
        (lambda: fedavg_fixed_point([1.0], [0.0], num_steps=0, step_size=0.1), "num_steps"),
        (lambda: fedavg_fixed_point([1.0], [0.0], num_steps=True, step_size=0.1), "num_steps"),
        (lambda: fedavg_fixed_point([1.0], [0.0], num_steps=[1, 2], step_size=0.1), "num_steps"),
        (lambda: fedavg_fixed_point([1.0], [0.0], num_steps=1, step_size=float("nan")), "step_size"),
        (lambda: fedprox_fixed_point([1.0], [0.0], proximal_weight=-1.0), "proximal_weight"),
        (lambda: fedprox_fixed_point([1.0, 0.0], [0.0, 1.0], proximal_weight=0.0), "singular"),
        (lambda: fedprox_fixed_point([1.0], [0.0], proximal_weight=1.0, num_steps=3), "both, or neither"),
        (lambda: sgd_floor(1.0, 1.0, step_size=2.0), "Diverges"),
        (lambda: sgd_floor(1.0, -1.0, step_size=0.5), "noise_variance"),
        (lambda: stationary_covariance([30.0, 30.0], 1.0, step_size=0.1), "contracts"),
        (lambda: stationary_covariance([1.0], -1.0, step_size=0.1), "noise"),
        (lambda: decaying_step_limit(1.0, 1.0, step_constant=0.5), "step_constant"),
        (lambda: expected_squared_distance(1.0, 1.0, [0.1, np.inf]), "step_sizes"),
        (lambda: rounds_until(1.0, 1.0, 0.1), "contraction"),
        (lambda: sgd_contraction([1.0, 2.0], step_size=0.1), "hessian"),
        (lambda: expected_squared_distance(np.nan, 1.0, [0.1]), "curvature"),
        (lambda: expected_squared_distance(1.0, -1.0, [0.1]), "noise_variance"),
        (lambda: expected_squared_distance(1.0, 1.0, [0.1], start=-1.0), "start"),
        (lambda: excess_loss([[1.0]], [[1.0]], np.nan), "bias"),
        (lambda: excess_loss(np.eye(2), np.eye(2), [1.0, 2.0, 3.0]), "bias"),
        (lambda: proximal_curvature([[0.0, 1.0], [-1.0, 0.0]], proximal_weight=1.0), "symmetric"),
        (lambda: rounds_until(0.5, 1.0, 0.0), "target"),
        (lambda: quadratic_drift([1.0], [0.0], point=[1.0, 2.0], num_steps=1, step_size=0.1), "point"),
    ],
)
def test_wrong_input(build, message):
    # Fault: numbers that look right out of input that is wrong.
    with pytest.raises((ValueError, TypeError), match=message):
        build()
