"""Push-sum over directed graphs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, network, population
from tests.algorithms.gossip import problems as g
from tests.refusals import refused

ONE_WAY = network.from_edges(g.N, [(i, (i + 1) % g.N) for i in range(g.N)] + [(0, 3), (0, 4), (2, 5)], directed=True)


def push_sum(mixing, rate=g.RATE, **options):
    options = {"num_steps": 1, "mesh": None} | options
    return algorithms.push_sum(population.quadratic_loss, mixing, optax.sgd(rate), **options)


@pytest.mark.default_rows("True")
@pytest.mark.parametrize("fails", [False, True])
def test_numpy(fails):
    """Sums, weights and models, also where links fail and nodes are down. Catches a step from x in place of x / w, a
    weight that trains, and a share that is lost with its link."""
    mixing = network.push(ONE_WAY)
    if fails:
        mixing = network.with_node_failures(network.with_link_failures(mixing, 0.3), 0.2)
    made = push_sum(mixing)
    state, infos = g.run(made, 6)
    matrices, up = g.weights(mixing, 6)
    x, w = np.zeros(g.N), np.ones(g.N)
    for matrix, there in zip(matrices, up, strict=True):
        x, w = matrix @ (x - np.where(there, g.RATE * g.gradient(x / w), 0)), matrix @ w
    np.testing.assert_allclose(state.star.clients["weight"], w, rtol=1e-5)
    np.testing.assert_allclose(g.models(made, state), x / w, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(made.params(state)["w"][0], x.sum() / w.sum(), rtol=1e-5)
    np.testing.assert_allclose(w.sum(), g.N)
    sent = int((matrices[-1] > 0).sum() - g.N)
    assert infos[-1]["edges"] == sent and infos[-1]["uplink_bytes"].total() == sent * 8


@pytest.mark.full
@pytest.mark.parametrize("mixing", [network.push(ONE_WAY), network.epidemic(network.exponential(g.N))])
def test_the_average_of_a_directed_graph(mixing):
    """With a rate that falls to 0 over the rounds nodes agree on the optimum of the mean objective. Catches an average
    in which nodes that are heard more count more: that of the left eigenvector is 0.1 away."""
    made = [push_sum(mixing, rate=rate) for rate in (0.05, 0.01, 0.002)]
    data = g.clients()
    state = made[0].init(g.KEY, g.START, data)
    for one in made:

        def step(t, state, one=one):
            return one.step(jax.random.fold_in(g.KEY, state.star.round), state, data)[0]

        state = jax.jit(lambda state, step=step: jax.lax.fori_loop(0, 800, step, state))(state)
    np.testing.assert_allclose(g.models(made[0], state), np.full(g.N, g.OPTIMUM), atol=0.03)


@pytest.mark.full
def test_undirected_mixing_is_dpsgd():
    """With weights that stay 1: bit for bit, "adapt_then_combine". Catches a division that rounds."""
    made = push_sum(g.RING)
    other = algorithms.dpsgd(
        population.quadratic_loss, g.RING, optax.sgd(g.RATE), num_steps=1, form="adapt_then_combine", mesh=None
    )
    one, two = g.run(made, 4)[0], g.run(other, 4)[0]
    assert (g.models(made, one) == g.models(other, two)).all() and (np.asarray(one.star.clients["weight"]) == 1).all()


def test_what_is_refused():
    """Catches rows that add up to 1 where columns must."""
    with refused("mixing", rule="average"):
        push_sum(network.neighbour_mean(ONE_WAY))
    with refused("mixing", rule="reached"):
        push_sum(network.push(network.from_edges(g.N, [(i, i + 1) for i in range(g.N - 1)], directed=True)))
    assert jnp.isfinite(push_sum(network.push(ONE_WAY)).init(g.KEY, g.START, g.clients()).star.clients["weight"]).all()


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_weights_that_vanish(dtype):
    """Node i sends to the next one and to 0, whose weights in the end are 2^-i. A round in which one of 200 would be
    past float32, or a model past float16, is skipped, and says so. Catches a model that is not finite, as 0 / 0 was."""
    size = 200
    back = [(i, 0) for i in range(1, size)] + [(i, i + 1) for i in range(size - 1)]
    made = push_sum(network.push(network.from_edges(size, back, directed=True)))
    data = population.quadratic_population(np.ones(size), np.ones(size))
    start = jax.tree.map(lambda x: x.astype(dtype), g.START)
    state, step, skipped = made.init(g.KEY, start, data), jax.jit(made.step), 0
    for t in range(400):
        state, info = step(jax.random.fold_in(g.KEY, t), state, data)
        skipped += int(info["skipped_rounds"])
    assert 0 < skipped < 400 and info["skipped_rounds"] == 1
    assert jnp.isfinite(made.evaluated.personal(state, jnp.arange(size))["w"]).all()


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_models_keep_their_average(dtype):
    """300 rounds of shares of 1/3 and 1/5, with links that fail: sums, weights and their ratio stay, to 1e-5.

    Catches sums in the model's own precision, shares that are rounded to it (columns then add up to 1.002), and models
    that come back in another dtype."""
    made = push_sum(network.with_link_failures(network.push(ONE_WAY), 0.3), rate=1e-9)
    data, start = g.clients(), {"w": jnp.full(1, 9.0, dtype)}
    state, step = made.init(g.KEY, start, data), jax.jit(made.step)
    sums = state.star.clients["sum"]["w"]
    assert sums.dtype == jnp.float32
    own = {"sum": {"w": sums + jnp.arange(g.N)[:, None]}, "weight": jnp.ones(g.N)}
    state = state._replace(star=state.star._replace(clients=own))
    for t in range(300):
        state, info = step(jax.random.fold_in(g.KEY, t), state, data)
    end = jax.device_get(state.star.clients)
    assert (made.params(state)["w"].dtype, made.evaluated.personal(state, g.IDS)["w"].dtype) == (dtype, dtype)
    np.testing.assert_allclose(end["sum"]["w"].sum(), (9 + np.arange(g.N)).sum(), rtol=1e-5)
    np.testing.assert_allclose(end["sum"]["w"][:, 0] / end["weight"], 9 + np.arange(g.N).mean(), rtol=1e-5)
    assert info["uplink_bytes"].total() == int(info["edges"]) * 8
