"""Mixing matrices: what they are, what they keep, and how fast they contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import InvalidType, engine, network, theory
from tests.refusals import refused

KEY = jax.random.key(5)
RAGGED = network.erdos_renyi(16, 0.25, seed=3)
ONE_WAY = network.from_edges(6, [(i, (i + 1) % 6) for i in range(6)] + [(0, 3), (0, 4), (2, 5)], directed=True)
TAKEN = {
    "laplacian": lambda: network.laplacian(RAGGED),
    "metropolis": lambda: network.metropolis(RAGGED),
    "lazy": lambda: network.lazy(network.metropolis(RAGGED)),
    "exponential": lambda: network.neighbour_mean(network.exponential(16)),
    "star": lambda: network.metropolis(network.star(40)),
}


def test_matrices():
    """Each against its formula, entry by entry. Catches degrees of the wrong end, and facts that do not hold."""
    adjacency = RAGGED.adjacency().toarray()
    degrees = adjacency.sum(1)
    laplacian = np.diag(degrees) - adjacency
    least, most = np.linalg.eigvalsh(laplacian)[[1, -1]]
    larger = np.maximum.outer(degrees, degrees)
    metropolis = adjacency / (1 + larger)
    metropolis += np.diag(1 - metropolis.sum(1))
    taken = (adjacency + np.eye(16)) / (1 + degrees)[:, None]
    arrows = ONE_WAY.adjacency().toarray()
    pushed = (arrows + np.eye(6)) / (1 + arrows.sum(0))[None]
    for mixing, expected, facts in (
        (network.laplacian(RAGGED), np.eye(16) - 2 / (least + most) * laplacian, (True, True, True, True)),
        (network.laplacian(RAGGED, step=0.07), np.eye(16) - 0.07 * laplacian, (True, True, True, True)),
        (network.metropolis(RAGGED), metropolis, (True, True, True, True)),
        (network.lazy(network.metropolis(RAGGED)), (np.eye(16) + metropolis) / 2, (True, True, True, True)),
        (network.neighbour_mean(RAGGED), taken, (True, False, False, True)),
        (network.push(ONE_WAY), pushed, (False, True, False, True)),
        (network.lazy(network.push(ONE_WAY)), (np.eye(6) + pushed) / 2, (False, True, False, True)),
    ):
        np.testing.assert_allclose(network.matrix_of(mixing).toarray(), expected, atol=1e-7)
        assert (mixing.keeps_constants, mixing.keeps_average, mixing.symmetric, mixing.static) == facts
    regular = network.neighbour_mean(network.exponential(16))
    assert regular.keeps_average and not regular.symmetric
    assert network.neighbour_mean(network.torus(16)).symmetric


PUSHED = (lambda: network.push(ONE_WAY), lambda: network.lazy(network.push(ONE_WAY)))


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("make", [*TAKEN.values(), *PUSHED])
def test_mixing_is_a_product_with_the_matrix(make):
    """Catches padding that counts, a neighbour's weight beside another's model, leaves of several axes or bfloat16."""
    mixing, rng = make(), np.random.default_rng(0)
    size = mixing.graph.population_size
    x = {"a": rng.normal(size=(size, 2, 3)).astype(np.float32), "b": jnp.array(rng.normal(size=size), jnp.bfloat16)}
    links = mixing.links(KEY, jnp.int32(0), mixing.tables)
    found = jax.jit(lambda links, x: engine.reproducible(network.mixed)(links, x))(links, x)
    matrix = network.matrix_of(mixing).toarray()
    np.testing.assert_allclose(found["a"], np.einsum("ij,jab->iab", matrix, x["a"]), atol=5e-7)
    assert found["b"].dtype == jnp.bfloat16
    exact = matrix @ np.float64(x["b"])  # sums are wide, and rounded once
    np.testing.assert_allclose(np.float64(found["b"]), exact, rtol=2.0**-8, atol=1e-6)
    with refused("values", value="int32", kind=InvalidType):
        network.mixed(links, jnp.arange(size))
    wide = np.asarray(x["b"], np.float64)
    np.testing.assert_allclose(np.asarray(found["b"], np.float64), matrix @ wide, atol=0.1)


def test_the_average_stays():
    """A thousand rounds over nodes far from zero: the mean to 1e-6, and nodes that agree keep every bit.

    Catches own weights that are rounded apart from the others: thirds that add up to 1 + 3e-8 drift by 3e-5."""
    x = np.random.default_rng(1).normal(100, 1, size=(16, 5)).astype(np.float32)
    for mixing in (network.metropolis(network.ring(16)), network.laplacian(RAGGED)):
        links = mixing.links(KEY, jnp.int32(0), mixing.tables)
        many = jax.jit(lambda x, links=links: jax.lax.fori_loop(0, 1000, lambda i, x: network.mixed(links, x), x))
        found = np.asarray(many(jnp.array(x)), np.float64)
        np.testing.assert_allclose(found.mean(0), x.astype(np.float64).mean(0), rtol=1e-6)
        same = jnp.full((16, 5), 1 / 3, jnp.float32)
        assert np.asarray(many(same)).tobytes() == np.asarray(same).tobytes()


SIXTEEN = ("complete", "hypercube", "torus", "star", "ring", "path")


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", SIXTEEN)
def test_it_contracts_at_the_slem(name):
    """The measured decay of 16 nodes equals rho* of the best constant, and that of Metropolis its own, within 1 %.

    L3, T26. Catches a rate read off lambda_2 alone: a star would then contract by 0.88 at most and not by 15/17."""
    graph = getattr(network, name)(16)
    least, most = network.laplacian_extremes(graph)
    rates = [theory.best_contraction(least, most), network.spectrum(network.matrix_of(network.metropolis(graph))).slem]
    start = np.random.default_rng(2).normal(size=(16, 8))
    for mixing, rate in zip((network.laplacian(graph), network.metropolis(graph)), rates, strict=True):
        np.testing.assert_allclose(network.spectrum(network.matrix_of(mixing)).slem, rate, atol=1e-6)
        links = mixing.links(KEY, jnp.int32(0), mixing.tables)
        x, lengths = jnp.array(start - start.mean(0), jnp.float32), []
        step = jax.jit(network.mixed)
        for _ in range(1 if rate < 1e-6 else min(200, int(np.log(1e-3) / np.log(rate)) + 2)):
            x = step(links, x)
            lengths.append(float(jnp.linalg.norm(x - x.mean(0)[None])))
        if rate < 1e-6:
            assert lengths[0] < 1e-5
        else:
            half = len(lengths) // 2
            measured = (lengths[-1] / lengths[half]) ** (1 / (len(lengths) - 1 - half))
            np.testing.assert_allclose(measured, rate, rtol=0.01)


def test_pushing_corrects_what_taking_biases():
    """On a directed graph the mean over neighbours ends at the left eigenvector's average, push-sum at everybody's."""
    values = np.random.default_rng(3).normal(size=6)
    taken, pushed = network.neighbour_mean(ONE_WAY), network.push(ONE_WAY)
    assert not taken.keeps_average
    x = {"sum": jnp.array(values, jnp.float32), "weight": jnp.ones(6)}
    ends = []
    for mixing in (taken, pushed):
        links = mixing.links(KEY, jnp.int32(0), mixing.tables)
        many = jax.jit(lambda x, links=links: jax.lax.fori_loop(0, 300, lambda i, x: network.mixed(links, x), x))
        ends.append(many(x))
    weights = theory.agreed_weights(network.matrix_of(taken).toarray())
    np.testing.assert_allclose(ends[0]["sum"], np.full(6, weights @ values), atol=1e-5)
    np.testing.assert_allclose(ends[1]["sum"] / ends[1]["weight"], np.full(6, values.mean()), atol=1e-5)
    assert abs(weights @ values - values.mean()) > 0.05 and np.ptp(np.asarray(ends[1]["weight"])) > 0.5


def test_steps_out_of_range():
    """Catches a constant with which nodes drift apart."""
    most = network.laplacian_extremes(RAGGED)[1]
    assert network.spectrum(network.matrix_of(network.laplacian(RAGGED, step=1.99 / most))).slem < 1
    for step in (0.0, 2 / most, 5.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="step: expected a"):
            network.laplacian(RAGGED, step=step)


def test_a_graph_that_falls_apart():
    """It has no best step, and the error says so; with a step it mixes part by part."""
    parts = network.from_edges(5, [(0, 1), (1, 2), (3, 4)])
    with refused("graph", value="one that falls apart"):
        network.laplacian(parts)
    given = network.laplacian(parts, step=0.3)
    assert network.mixed(given.links(None, 0, given.tables), jnp.arange(5.0))[3:].tolist() == pytest.approx([3.3, 3.7])


def test_what_is_refused():
    """Catches a matrix that a directed graph does not have, and rows that no memory holds."""
    for make in (network.laplacian, network.metropolis):
        with pytest.raises(ValueError, match="graph: expected an undirected graph"):
            make(ONE_WAY)
    with refused("mixing", rule="same weights"):
        network.lazy(network.random_matching(RAGGED))
    with pytest.raises(MemoryError, match="A node has 19,999 neighbours"):
        network.metropolis(network.star(20_000))
    with pytest.raises(TypeError, match="graph: expected a Graph"):
        network.metropolis(16)
