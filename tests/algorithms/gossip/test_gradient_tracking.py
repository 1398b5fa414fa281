"""Gradient tracking reaches the optimum where DGD stops beside it."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import algorithms, network, population, theory
from tests.algorithms.gossip import problems as g
from tests.refusals import refused

LAZY = network.lazy(g.RING)


def tracking(mixing=LAZY, rate=g.RATE, **options):
    return algorithms.gradient_tracking(population.quadratic_loss, mixing, learning_rate=rate, mesh=None, **options)


def numpy_tracking(matrices, up, rate):
    x, y, old = np.zeros((3, g.N))
    for matrix, there in zip(matrices, up, strict=True):
        new = np.where(there, g.gradient(x), old)
        direction = matrix @ y + new - old
        x, y, old = np.where(there, [matrix @ x - rate * direction, direction, new], [x, y, old])
    return x, y, old


@pytest.mark.full
def test_tracking_is_exact_where_dgd_stops():
    """L6: DGD within 1e-5 of the closed form of where it stops, at two rates, the distance from the optimum in
    proportion to the rate; tracking at the optimum to 1e-5. Catches a gradient of the wrong round in the difference."""
    matrix, away = network.matrix_of(LAZY).toarray(), []
    for rate in (0.02, 0.01):
        made = algorithms.dgd(population.quadratic_loss, LAZY, learning_rate=rate, mesh=None)
        state, _ = g.run(made, int(30 / rate))
        expected = theory.dgd_fixed_point(matrix, g.CURVATURES, g.CENTERS, rate)
        np.testing.assert_allclose(g.models(made, state), expected, atol=1e-5)
        away.append(np.abs(expected - g.OPTIMUM).max())
    assert away[0] > 0.1 and 1.6 < away[0] / away[1] < 2
    made = tracking()
    state, infos = g.run(made, 1000)
    np.testing.assert_allclose(g.models(made, state), np.full(g.N, g.OPTIMUM), atol=1e-5)
    assert infos[-1]["consensus_distance"] < 1e-5


def test_numpy():
    """Five rounds, model, direction and gradient. Catches one that is mixed twice, or not at all; messages of half."""
    made = tracking()
    state, infos = g.run(made, 5)
    expected = numpy_tracking([network.matrix_of(LAZY).toarray()] * 5, np.ones((5, g.N), bool), g.RATE)
    for name, wanted in zip(("model", "direction", "gradient"), expected, strict=True):
        np.testing.assert_allclose(state.star.clients[name]["w"][:, 0], wanted, rtol=1e-4, atol=1e-5)
    assert infos[0]["uplink_bytes"].total() == 2 * g.N * 2 * 4


@pytest.mark.full
def test_tracking_under_failures():
    """NumPy's models with nodes and links that fail, and the mean direction stays the mean of the last gradients; it
    still ends at the optimum. Catches a node that is down and whose gradient counts as new."""
    mixing = network.with_node_failures(network.with_link_failures(LAZY, 0.2), 0.3)
    made = tracking(mixing)
    state, _ = g.run(made, 40)
    own = state.star.clients
    x, y, old = numpy_tracking(*g.weights(mixing, 40), g.RATE)
    for name, wanted in (("model", x), ("direction", y), ("gradient", old)):
        np.testing.assert_allclose(own[name]["w"][:, 0], wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jnp.mean(own["direction"]["w"]), jnp.mean(own["gradient"]["w"]), atol=1e-5)
    state, _ = g.run(made, 2500)
    np.testing.assert_allclose(g.models(made, state), np.full(g.N, g.OPTIMUM), atol=1e-4)


def test_what_is_refused():
    """Catches a directed graph, for which the mean direction would be another one."""
    with pytest.raises(ValueError, match="mixing: expected one that keeps"):
        tracking(network.push(network.exponential(g.N)))
    with refused("learning_rate", rule="> 0"):
        tracking(rate=0.0)
