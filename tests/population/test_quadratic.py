"""Quadratic clients: closed forms against hand-computed numbers and against simulated rounds in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.population.quadratic import (
    fedavg_contraction,
    fedavg_fixed_point,
    fedprox_contraction,
    fedprox_fixed_point,
    proximal_solution,
    quadratic_loss,
    quadratic_optimum,
    quadratic_population,
    quadratics,
)

CURVATURES, CENTERS = [1.0, 10.0], [0.0, 1.0]


def random_problem(num_clients=4, dimension=3):
    rng = np.random.default_rng(1)
    factors = rng.normal(size=(num_clients, dimension, dimension))
    hessians = factors @ np.swapaxes(factors, 1, 2) / dimension + 0.3 * np.eye(dimension)
    return hessians, rng.normal(size=(num_clients, dimension)), rng.dirichlet(np.ones(num_clients))


def rows(population, id):
    data = population.client(jnp.int32(id))
    return {name: np.asarray(leaf)[np.asarray(data.mask)] for name, leaf in data.examples.items()}


def test_optimum_is_not_the_average_of_centers():
    # Fault: averaging centers (0.5) instead of weighting them by curvature.
    np.testing.assert_allclose(quadratic_optimum(CURVATURES, CENTERS), [10 / 11], rtol=1e-14)


def test_weights_change_the_objective():
    # Fault: equal client weights where examples count (B3): 0.5 instead of 0.9.
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
    # Fault: limits exchanged: one step rests at the optimum, many at the average of the centers (Q3).
    def at(num_steps, step_size=0.05):
        return fedavg_fixed_point(CURVATURES, CENTERS, num_steps=num_steps, step_size=step_size)[0]

    assert at(1) == pytest.approx(10 / 11, abs=1e-12)
    assert at(10_000) == pytest.approx(0.5, abs=1e-12)
    scalar = (1 - 0.5**5) / ((1 - 0.95**5) + (1 - 0.5**5))
    assert at(5) == pytest.approx(scalar, abs=1e-12)


def test_contraction_numbers():
    # Fault: contraction of the averaged Hessian; eta * lambda_max > 2 must show divergence (C7).
    by_hand = (0.95**5 + 0.5**5) / 2
    assert fedavg_contraction(CURVATURES, CENTERS, num_steps=5, step_size=0.05) == pytest.approx(by_hand, abs=1e-12)
    assert fedavg_contraction(CURVATURES, CENTERS, num_steps=5, step_size=0.25) > 1
    assert fedavg_contraction(CURVATURES, CENTERS, num_steps=5, step_size=0.19) < 1


def test_fedprox_sweep():
    # Fault: lambda on the wrong side (D7).
    points = {0.0: 0.5, 0.1: 0.521327, 1.0: 0.645161, 10.0: 0.846154, 100.0: 0.901786, 1e9: 0.909091}
    for weight, expected in points.items():
        found = fedprox_fixed_point(CURVATURES, CENTERS, proximal_weight=weight)[0]
        assert found == pytest.approx(expected, abs=1e-6)
    contractions = {0.0: 0, 0.1: 0.0504, 1.0: 0.2955, 10.0: 0.7045, 100.0: 0.9496}
    for weight, expected in contractions.items():
        found = fedprox_contraction(CURVATURES, CENTERS, proximal_weight=weight)
        assert found == pytest.approx(expected, abs=1e-4)


def test_proximal_solution():
    # Fault: the anchor's or the linear term's sign (D6); and gradient steps must reach it.
    hessian, linear, anchor = np.array([[3.0, 1], [1, 2]]), np.array([1.0, -1]), np.array([0.5, 0.5])
    for weight, expected in {0: (0.6, -0.8), 1: (0.454545, -0.318182), 10: (0.438710, 0.296774)}.items():
        found = proximal_solution(hessian, linear, anchor, proximal_weight=weight)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        w = anchor
        for _ in range(500):
            w = w - 0.05 * (hessian @ w - linear + weight * (w - anchor))
        np.testing.assert_allclose(w, found, atol=1e-6)


def test_loss_gradient():
    # Fault: a missing 1/2, or a Hessian that is applied on one side only.
    hessians, centers, _ = random_problem()
    w = np.array([0.3, -1.0, 2.0], np.float32)
    examples = {"hessian": jnp.asarray(hessians, jnp.float32), "center": jnp.asarray(centers, jnp.float32)}
    gradient = jax.grad(lambda params: quadratic_loss(params, examples, None)["loss"].sum())({"w": jnp.asarray(w)})["w"]
    np.testing.assert_allclose(gradient, np.einsum("nij,nj->i", hessians, w - centers), rtol=2e-6, atol=1e-6)


def test_counts_are_weights():
    # Fault: padding rows counted, or copies of another client's quadratic.
    population = quadratic_population([1.0, 2.0, 3.0], [0.0, 1.0, 2.0], counts=[1, 9, 4])
    assert population.size == 3
    for id, count in enumerate((1, 9, 4)):
        found = rows(population, id)
        assert found["hessian"].shape == (count, 1, 1)
        assert (found["hessian"] == id + 1).all() and (found["center"] == id).all()


def test_random_quadratics():
    # Fault: curvatures outside the interval; heterogeneity that is still there at 0; a seed that is ignored.
    options = {"num_clients": 5, "dimension": 3, "smallest_curvature": 1.0, "largest_curvature": 4.0}
    data = quadratics(**options, max_examples=3, heterogeneity=0.0, seed=3)
    eigenvalues = np.linalg.eigvalsh(data.test["hessian"])
    assert eigenvalues.min() >= 0.999 and eigenvalues.max() <= 4.001
    assert np.ptp(data.test["center"], axis=0).max() == 0
    counts = [len(rows(data.train, id)["center"]) for id in range(5)]
    assert sum(counts) == len(data.test["center"]) and set(counts) <= {1, 2, 3}
    other = quadratics(**options, seed=4)
    assert not np.allclose(other.test["hessian"][:5], quadratics(**options, seed=3).test["hessian"][:5])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: quadratic_optimum([[[1, 2], [0, 1]]], [[0, 0]]), "symmetric"),
        (lambda: quadratic_optimum([-1.0, 2.0], [0, 1]), "negative eigenvalue"),
        (lambda: quadratic_optimum([0.0, 0.0], [0, 1]), "unique solution"),
        (lambda: quadratic_optimum([1.0, np.nan], [0, 1]), "finite"),
        (lambda: quadratic_optimum([1.0, 2.0], [0, 1], [0.5, 0.6]), "sum to 1"),
        (lambda: quadratic_optimum([1.0, 2.0], [0]), "shapes"),
        (lambda: fedavg_fixed_point([1.0], [0.0], num_steps=0, step_size=0.1), "num_steps"),
        (lambda: fedavg_fixed_point([1.0], [0.0], num_steps=1, step_size=float("nan")), "step_size"),
        (lambda: fedprox_fixed_point([1.0], [0.0], proximal_weight=-1.0), "proximal_weight"),
        (lambda: fedprox_fixed_point([1.0, 0.0], [0.0, 1.0], proximal_weight=0.0), "singular"),
        (lambda: quadratic_population([1.0], [0.0], counts=[0]), "counts"),
        (lambda: quadratics(smallest_curvature=3.0, largest_curvature=2.0), "largest_curvature"),
    ],
)
def test_wrong_input(build, message):
    # Fault: numbers that look right out of input that is wrong.
    with pytest.raises((ValueError, TypeError), match=message):
        build()
