"""Quadratic clients: loss, copies, random problems. Their closed forms: tests/theory/test_convergence.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.population.datasets.quadratic import quadratic_loss, quadratic_population, quadratics


def random_problem(num_clients=4, dimension=3):
    rng = np.random.default_rng(1)
    factors = rng.normal(size=(num_clients, dimension, dimension))
    hessians = factors @ np.swapaxes(factors, 1, 2) / dimension + 0.3 * np.eye(dimension)
    return hessians, rng.normal(size=(num_clients, dimension)), rng.dirichlet(np.ones(num_clients))


client_of = jax.jit(lambda population, id: population.client(id))


def rows(population, id):
    data = client_of(population, np.int32(id))
    return {name: np.asarray(leaf)[np.asarray(data.mask)] for name, leaf in data.examples.items()}


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
        (lambda: quadratic_population([[[1, 2], [0, 1]]], [[0, 0]]), "symmetric"),
        (lambda: quadratic_population([-1.0, 2.0], [0, 1]), "negative eigenvalue"),
        (lambda: quadratic_population([1.0, np.nan], [0, 1]), "finite"),
        (lambda: quadratic_population([1.0, 2.0], [0]), "shapes"),
        (lambda: quadratic_population([1.0], [0.0], counts=[0]), "counts"),
        (lambda: quadratics(smallest_curvature=3.0, largest_curvature=2.0), "largest_curvature"),
    ],
)
def test_wrong_input(build, message):
    # Fault: numbers that look right out of input that is wrong.
    with pytest.raises((ValueError, TypeError), match=message):
        build()
