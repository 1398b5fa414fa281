"""CHOCO: compressed differences."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, network, population, transform
from fedjax_sim.transform.chain import wire_of
from tests.algorithms.gossip import problems as g
from tests.laws.cases import rows
from tests.refusals import refused

WIDTH = 6
CENTERS = np.random.default_rng(2).normal(size=(g.N, WIDTH)).astype(np.float32).astype(np.float64)
START = {"w": jnp.zeros(WIDTH)}


def clients():
    return population.quadratic_population(np.broadcast_to(np.eye(WIDTH), (g.N, WIDTH, WIDTH)), CENTERS)


def choco(compressor=None, mixing=g.RING, rate=0.1, **options):
    options = {"num_steps": 1, "mesh": None, "transform": compressor} | options
    return algorithms.choco(population.quadratic_loss, mixing, optax.sgd(rate), **options)


def own(made, state):
    return np.asarray(made.evaluated.personal(state, g.IDS)["w"], np.float64)


def kept(x, count):
    """Top-k by magnitude, a row each."""
    places = np.argsort(-np.abs(x), axis=1)[:, :count]
    return np.take_along_axis(x, places, 1), places


def test_numpy():
    """Models and public copies with top-2, after 6 rounds, and its bytes. Catches a public copy that is added before
    the difference is taken, and a consensus step of the model's own values."""
    made = choco(transform.top_k(count=2), consensus_step=0.4)
    state, infos = g.run(made, 6, clients(), START)
    matrix = network.matrix_of(g.RING).toarray()
    x, public = np.zeros((2, g.N, WIDTH))
    for _ in range(6):
        x = x - 0.1 * (x - CENTERS)
        values, places = kept(x - public, 2)
        public = public.copy()
        np.put_along_axis(public, places, np.take_along_axis(public, places, 1) + values, 1)
        x = x + 0.4 * (matrix @ public - public)
    np.testing.assert_allclose(own(made, state), x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.star.clients["public"]["w"], public, rtol=1e-4, atol=1e-5)
    bits = wire_of(transform.top_k(count=2), START).bits  # 64 and the places
    assert 64 < bits < 96 and infos[0]["uplink_bytes"].total() == 2 * g.N * -(-bits // 8)


@pytest.mark.full
def test_without_a_compressor():
    """With step 1 it is D-PSGD. Catches a copy that neighbours do not have."""
    made = choco(consensus_step=1.0)
    other = algorithms.dpsgd(
        population.quadratic_loss, g.RING, optax.sgd(0.1), num_steps=1, form="adapt_then_combine", mesh=None
    )
    one, infos = g.run(made, 5, clients(), START)
    two, _ = g.run(other, 5, clients(), START)
    np.testing.assert_allclose(own(made, one), own(other, two), rtol=1e-5, atol=1e-6)
    assert infos[0]["uplink_bytes"].total() == 2 * g.N * WIDTH * 4


@pytest.mark.full
@pytest.mark.parametrize("name", rows(["top_k", "quantize", "random_k"], ["top_k"]))
def test_compressed_nodes_agree(name):
    """After training apart, without further steps: on the average that they had, to a thousandth of their distance.
    Catches a compressor whose error adds up, and one direction of an edge that is weighed otherwise."""
    compressor = {
        "top_k": lambda: transform.top_k(count=1),
        "quantize": lambda: transform.quantize(3),
        "random_k": lambda: transform.random_k(0.5, scaled=False),
    }[name]()
    apart, together = (choco(compressor, consensus_step=0.2, rate=rate) for rate in (0.3, 1e-12))
    state, infos = g.run(apart, 6, clients(), START)
    before, step = own(apart, state), jax.jit(together.step)
    for t in range(800):
        state, info = step(jax.random.fold_in(g.KEY, 100 + t), state, clients())
    after = own(together, state)
    np.testing.assert_allclose(after.mean(0), before.mean(0), atol=1e-5)
    assert np.ptp(after, axis=0).max() < 1e-3 * np.ptp(before, axis=0).max()
    assert info["consensus_distance"] < 1e-3 * infos[-1]["consensus_distance"]


def test_a_compressor_that_expands():
    """Catches scaled random-k, under which copies grow to 1e21 without a word."""
    with refused("transform", rule="|Q(x) - x|^2"):
        g.run(choco(transform.random_k(0.5)), 1, clients(), START)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: choco(transform.local_gaussian(1.0, 1.0)), "transform: expected one without noise, got 'gaussian'"),
        (lambda: choco(transform.quantize(4, range=1.0, integers=True)), "transform: expected one that sends floats"),
        (lambda: choco(transform.error_feedback(transform.top_k(count=1))), "transform: expected one without memory"),
        (lambda: choco(mixing=network.with_link_failures(g.RING, 0.1)), "mixing: expected the same weights"),
        (lambda: choco(mixing=network.push(network.ring(g.N))), "mixing: expected one that keeps"),
        (lambda: choco(consensus_step=0.0), "consensus_step: expected a number"),
        (lambda: choco(consensus_step=1.5), "consensus_step: expected a number"),
    ],
)
def test_what_is_refused(call, words):
    """Catches noise that would have an epsilon, and neighbours whose copies part."""
    with pytest.raises(ValueError, match=words):
        call()
