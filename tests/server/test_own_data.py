"""Servers that train on examples of their own, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import client, server
from fedjax_sim.types import ClientData, ClientUpdate
from tests.refusals import refused

KEY, INNER = jax.random.key(0), server.optimizer(optax.sgd(0.5, momentum=0.9))
X, Y = np.array([1.0, 2.0, -1.0], np.float32), np.array([0.5, 1.0, 3.0], np.float32)
DATA = ClientData({"x": jnp.append(X, jnp.nan), "y": jnp.append(Y, jnp.nan)}, jnp.arange(4) < 3)


def loss(params, examples, key):
    """A line whose slope is the clients' and whose offset the server's."""
    return (params["slope"] * examples["x"] + params["offset"] - examples["y"]) ** 2 / 2


def work(steps=2, rate=0.1):
    return client.local_sgd(loss, optax.sgd(rate), client.work(num_steps=steps))


def steps(slope, offset, number=2, rate=0.1):
    for _ in range(number):
        away = slope * X + offset - Y
        slope, offset = slope - rate * (away * X).mean(), offset - rate * away.mean()
    return slope, offset


def test_steps_on_own_data():
    """Two rounds. Faults: steps before the aggregate; a momentum that is begun anew, or moved by the server's steps."""
    made = server.with_own_data(INNER, work(), DATA)
    state = made.init({"slope": jnp.float32(0), "offset": jnp.float32(1)})
    found, speed = (0.0, 1.0), np.zeros(2)
    for aggregate in ([1.0, 0.0], [0.0, -1.0]):
        named = {"slope": jnp.float32(aggregate[0]), "offset": jnp.float32(aggregate[1])}
        state = jax.jit(made.apply)(KEY, named, state)
        speed = 0.9 * speed + np.array(aggregate)
        found = steps(found[0] + 0.5 * speed[0], found[1] + 0.5 * speed[1])
    params = made.params(state)
    np.testing.assert_allclose([params["slope"], params["offset"]], found, rtol=1e-5)
    moved = made.params(made.moved(state, {"slope": jnp.float32(7), "offset": jnp.float32(8)}))
    assert (float(moved["slope"]), float(moved["offset"])) == (7, 8)


def test_without_examples():
    """Fault: a server without examples whose model becomes NaN, or loses a bit."""
    made = server.with_own_data(INNER, work(), DATA._replace(mask=jnp.zeros(4, bool)))
    start = {"slope": jnp.float32(-0.0), "offset": jnp.float32(1)}
    aggregate = {"slope": jnp.float32(-0.0), "offset": jnp.float32(3)}
    found, expected = (x.params(x.apply(KEY, aggregate, x.init(start))) for x in (made, INNER))
    assert all(np.asarray(found[k]).tobytes() == np.asarray(expected[k]).tobytes() for k in start)


@pytest.mark.parametrize("whole", [True, False])
def test_own_part(whole):
    """Faults: a part that is sent, clients' updates on the server's part, steps that move the wrong part."""
    made = server.with_own_part(INNER, work(), DATA, ["offset"], whole=whole)
    start = {"slope": jnp.float32(0), "offset": jnp.float32(1)}
    state = made.init(start)
    assert made.broadcast(state) == {"slope": 0} and set(made.expects(start)) == {"slope"}
    slope, offset, speed = 0.0, 1.0, 0.0
    for aggregate in (1.0, -3.0):
        state = jax.jit(made.apply)(KEY, {"slope": jnp.float32(aggregate)}, state)
        speed = 0.9 * speed + aggregate
        slope += 0.5 * speed
        ends = steps(slope, offset)
        slope, offset = (ends[0] if whole else slope), ends[1]
    params = made.params(state)
    np.testing.assert_allclose([params["slope"], params["offset"]], [slope, offset], rtol=1e-5)
    with pytest.raises(ValueError, match="predicate: expected paths among"):
        server.with_own_part(INNER, work(), DATA, ["head"]).init(start)


def test_what_is_refused():
    """Faults: noise that nobody accounts for, a state that is forgotten, examples that make every model NaN, a rate
    that asks for a round."""
    private = client.private_sgd(loss, 1.0, 1.0, 0.1, num_steps=1, batch_size=2, num_examples=4)
    with pytest.raises(ValueError, match="work: expected local work without noise"):
        server.with_own_data(INNER, private, DATA)
    with pytest.raises(ValueError, match="data: expected finite examples"):
        server.with_own_data(INNER, work(), DATA._replace(mask=jnp.ones(4, bool)))
    with pytest.raises(ValueError, match="server: expected one that can go on"):
        server.with_own_data(INNER._replace(moved=None), work(), DATA)
    falling = client.over_rounds(optax.sgd, optax.linear_schedule(0.1, 0.0, 4))
    with refused("work", rule="does not fall over rounds"):
        server.with_own_data(INNER, client.local_sgd(loss, falling, client.work(num_steps=2)), DATA)
    keeps = ClientUpdate(lambda params: jnp.zeros(1), work().apply)
    made = server.with_own_data(INNER, keeps, DATA)
    start = {"slope": jnp.float32(0), "offset": jnp.float32(1)}
    with refused("work", rule="without a state"):
        made.apply(KEY, start, made.init(start))
