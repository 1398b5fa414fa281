"""Closed forms of graphs and of where nodes stop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, network, population, theory
from tests.refusals import refused

CLOSED = [(name, size) for name in ("complete", "hypercube", "path", "ring", "star") for size in (2, 4, 16, 64)]


@pytest.mark.parametrize("name, size", [*CLOSED, ("torus", 4), ("torus", 16), ("torus", 64)])
def test_closed_forms(name, size):
    """All eigenvalues to 1e-8, L2's lambda_2 among them. Catches a formula for another length, a small torus."""
    graph = getattr(network, name)(size)
    values = np.linalg.eigvalsh(network.laplacian_matrix(graph).toarray())
    np.testing.assert_allclose(theory.laplacian_spectrum(name, size), values, atol=1e-8)
    np.testing.assert_allclose(network.laplacian_extremes(graph), values[[1, -1]], atol=1e-8)
    side = np.sqrt(size)
    connectivity = {
        "complete": size, "hypercube": 2, "path": 2 - 2 * np.cos(np.pi / size), "star": 1 if size > 2 else 2,
        "ring": 2 - 2 * np.cos(2 * np.pi / size), "torus": 2 - 2 * np.cos(2 * np.pi / side),
    }  # fmt: skip
    if size > 4:
        np.testing.assert_allclose(network.algebraic_connectivity(graph), connectivity[name], atol=1e-8)


@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_exponential_spectrum(size):
    """Catches a hop too many, or one that wraps onto the node itself."""
    if size == 1:
        assert theory.exponential_spectrum(1).tolist() == [1.0]
        return
    matrix = network.matrix_of(network.neighbour_mean(network.exponential(size))).toarray()
    values = np.sort(np.abs(np.linalg.eigvals(matrix)))[::-1]
    np.testing.assert_allclose(theory.exponential_spectrum(size), values, atol=1e-6)


def test_random_regular_spectrum():
    """Closed walks of the infinite tree: the mean of x^2 is k, of x^4 k (2 k - 1); and a graph's own to 4 %.

    Catches a density of another degree, and quantiles at the wrong ends."""
    for degree in (3, 8):
        values = theory.regular_spectrum(20_001, degree)
        assert values[0] == degree and (np.diff(values) <= 0).all()
        np.testing.assert_allclose([np.mean(values[1:] ** 2), np.mean(values[1:] ** 4)],
                                   [degree, degree * (2 * degree - 1)], rtol=1e-3)  # fmt: skip
    own = np.linalg.eigvalsh(network.k_regular(1000, 8, seed=2).adjacency().toarray())
    law = theory.regular_spectrum(1000, 8)
    np.testing.assert_allclose((((1 + own) / 9) ** 6).mean(), (((1 + law) / 9) ** 6).mean(), rtol=0.04)


def test_tori_by_rows():
    """Catches sides that are swapped, and a square where another shape was asked for."""
    values = np.linalg.eigvalsh(network.laplacian_matrix(network.torus(24, rows=3)).toarray())
    np.testing.assert_allclose(theory.laplacian_spectrum("torus", 24, rows=3), values, atol=1e-8)
    for wrong in ({"rows": 5}, {"rows": 24}):
        with pytest.raises(ValueError, match="rows: expected"):
            theory.laplacian_spectrum("torus", 24, **wrong)


def test_order_of_graphs():
    """L3: complete < hypercube = torus < star < ring < path, of sixteen nodes under their best constants."""
    rates = {
        name: theory.best_contraction(*theory.laplacian_spectrum(name, 16)[[1, -1]])
        for name in ("complete", "hypercube", "torus", "star", "ring", "path")
    }
    found = list(rates.values())
    assert found == sorted(found) and found[0] == 0 and rates["star"] == pytest.approx(15 / 17)
    assert rates["hypercube"] == pytest.approx(rates["torus"]) and len({round(x, 9) for x in found}) == 5


def test_metropolis_is_not_laplacian():
    """T26: the gaps of a ring of 16. Catches one rate for all matrices of a graph."""
    ring = network.ring(16)
    gaps = [network.spectrum(network.matrix_of(make(ring))).gap for make in (network.laplacian, network.metropolis)]
    np.testing.assert_allclose(gaps, [0.0733, 0.0507], atol=5e-5)


def test_mixing_rounds():
    """The smallest number, by search from zero. Catches an off-by-one."""
    values = 1 - theory.laplacian_spectrum("ring", 12) / 4.1
    for factor in (0.5, 0.1, 1e-4, 1.0):
        count = next(
            t for t in range(999) if theory.consensus_error(values, t) <= factor * theory.consensus_error(values, 0)
        )
        assert theory.mixing_rounds(values, factor) == count
    with pytest.raises(ValueError, match="eigenvalues: expected a second one"):
        theory.mixing_rounds([1.0, 1.0], 0.5)


def noisy(params, examples, key):
    """h (w - c)^2 / 2 with a gradient that has a normal error of deviation 0.5."""
    noise = 0.5 * jax.random.normal(key, params["w"].shape)
    return (params["w"] - examples["center"][0]) ** 2 / 2 * examples["hessian"][0, 0, 0] + noise * params["w"]


SIZE, RATE = 12, 0.6
CENTERS = np.random.default_rng(6).normal(size=SIZE)


def floor_of(mixing, rate=RATE):
    values, vectors = np.linalg.eigh(network.matrix_of(mixing).toarray())
    return theory.dpsgd_floor(values, vectors, CENTERS, learning_rate=rate, curvature=1.0, noise=0.5)


@pytest.mark.full
@pytest.mark.parametrize("name", ["ring", pytest.param("complete", marks=pytest.mark.full)])
def test_floor_of_noisy_quadratics(name):
    """The mean squared distance of nodes from the optimum over 4,000 runs of 150 rounds, within 5 standard errors,
    which are under 1 %. Catches a floor of the mean alone, and one of another form of the step."""
    mixing = network.metropolis(getattr(network, name)(SIZE))
    clients = population.quadratic_population(np.ones(SIZE), CENTERS)
    made = algorithms.dpsgd(noisy, mixing, optax.sgd(RATE), num_steps=1, mesh=None)
    state = made.init(jax.random.key(0), {"w": jnp.full(1, CENTERS.mean())}, clients)

    @jax.jit
    def runs(keys, state):
        def one(key):
            return jax.lax.fori_loop(
                0, 150, lambda t, state: made.step(jax.random.fold_in(key, t), state, clients)[0], state
            )

        last = jax.vmap(one)(keys)
        return jax.vmap(lambda state: made.evaluated.personal(state, jnp.arange(SIZE))["w"][:, 0])(last)

    models = np.asarray(runs(jax.random.split(jax.random.key(1), 4000), state), np.float64)
    squares = ((models - CENTERS.mean()) ** 2).mean(1)
    floor = floor_of(mixing)
    assert squares.std() / np.sqrt(4000) < 0.01 * floor.total
    assert abs(squares.mean() - floor.total) < 5 * squares.std() / np.sqrt(4000)
    shift = models.mean(0) - CENTERS.mean()  # what no noise does; the rest is noise
    np.testing.assert_allclose((shift**2).mean(), floor.heterogeneity, rtol=0.05)
    scatter = ((models - models.mean(0)) ** 2).mean(1)
    error = abs(scatter.mean() - floor.mean - floor.disagreement)
    assert error < 5 * scatter.std() / np.sqrt(4000) < 0.05 * scatter.mean()
    of_mean = ((models.mean(1) - CENTERS.mean()) ** 2).mean()
    assert abs(of_mean / floor.mean - 1) < 5 * np.sqrt(2 / 4000)  # a chi-square's
    assert floor.total > 1.3 * floor.mean


def test_floor_falls_with_the_gap():
    """L3. Catches a floor that no graph changes, or a mean that it does."""
    floors = [floor_of(network.metropolis(getattr(network, name)(SIZE))) for name in ("path", "ring", "complete")]
    totals = [floor.total for floor in floors]
    assert totals == sorted(totals, reverse=True) and totals[0] > 1.2 * totals[-1]
    assert len({round(floor.mean, 9) for floor in floors}) == 1
    with refused("learning_rate", rule="every mode shrinks"):
        floor_of(network.metropolis(network.ring(SIZE)), rate=2.1)


def test_floor_of_two_islands():
    """Nodes 0, 1 and 2, 3 never meet: without noise each pair stops at its own mean, 2 from the optimum, whatever basis
    the eigenvalue 1 is given. Catches a shift that is left out with one of two vectors of that eigenvalue."""
    matrix, centers = np.kron(np.eye(2), np.full((2, 2), 0.5)), np.array([0.0, 0.0, 4.0, 4.0])
    values, vectors = np.linalg.eigh(matrix)
    mean, difference = np.full(4, 0.5), np.array([0.5, 0.5, -0.5, -0.5])
    other = vectors.copy()
    other[:, np.isclose(values, 1)] = np.stack([mean, difference], 1)
    for basis in (vectors, other):
        floor = theory.dpsgd_floor(values, basis, centers, learning_rate=0.1, curvature=1.0, noise=0.0)
        np.testing.assert_allclose(floor.total, 4.0)
    point = theory.dgd_fixed_point(matrix, np.ones(4), centers, 0.1)
    np.testing.assert_allclose(((point - 2) ** 2).mean(), 4.0)


def test_where_nothing_stops():
    """Outside of what theory describes there is no number. Catches a fixed point that no run reaches, one center
    for all, half a round, what isolated nodes would agree on, and a law of degrees that no graph has."""
    half = np.full((2, 2), 0.5)
    with refused("learning_rate", rule="recursion"):
        theory.dgd_fixed_point(half, [1.0, 1.0], [0.0, 1.0], 1.01)
    theory.dgd_fixed_point(half, [1.0, 1.0], [0.0, 1.0], 0.99)
    for centers in ([1.0], [1.0, np.nan]):
        with pytest.raises(ValueError, match="centers: expected"):
            theory.dgd_fixed_point(half, [1.0, 1.0], centers, 0.1)
    for rounds in (1.5, -1, [0, -2]):
        with pytest.raises(ValueError, match="rounds: expected integers >= 0"):
            theory.consensus_error([1.0, 0.5], rounds)
    assert theory.consensus_error([1.0, 0.5], 1, spread=3.0) == 9 * theory.consensus_error([1.0, 0.5], 1)
    for spread in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="spread: expected"):
            theory.consensus_error([1.0, 0.5], 1, spread=spread)
    for matrix in (np.eye(3), [[0.0, 1.0], [1.0, 0.0]]):
        with refused("matrix", rule="nodes agree"):
            theory.agreed_weights(matrix)
    with pytest.raises(ValueError, match="degree: expected an integer in"):
        theory.regular_spectrum(8, 8)
    options = {"learning_rate": 0.1, "curvature": 1.0, "noise": 0.0}
    with refused("eigenvalues, vectors", rule="constant vector"):
        theory.dpsgd_floor([0.9, 0.1], np.array([[1.0, 1.0], [1.0, -1.0]]) / np.sqrt(2), [0.0, 1.0], **options)
    for centers in ([1.0], [0.0, np.inf]):
        with pytest.raises(ValueError, match="centers: expected"):
            theory.dpsgd_floor([0.0, 1.0], np.array([[1.0, 1.0], [-1.0, 1.0]]) / np.sqrt(2), centers, **options)
