"""Under x64 nothing is traced that JAX only warns of today: a FutureWarning is an error."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import client, engine, server
from fedjax_sim.algorithms import federated
from fedjax_sim.client.clipping import clipped_sum
from fedjax_sim.types import ClientData, Received
from tests.laws import cases, problems as p, test_unequal

pytestmark = [pytest.mark.filterwarnings("error::FutureWarning"), pytest.mark.optimised(False)]


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


def test_transforms():
    """Catches 64-bit indices or values scattered into 32-bit arrays, at any place where a part draws or chooses."""
    for make in cases.CASES["transform"].values():
        member = make()

        def both_ends(key, update, member=member):
            state = member.init(update)
            message, _, measured = member.on_client(key, update, state, member.init_client(update))
            return member.on_server(key, None, message, state, measured, 0.1)

        jax.eval_shape(both_ends, jax.random.key(0), jax.ShapeDtypeStruct((300,), jnp.float64))


@pytest.mark.full
def test_samplers_and_aggregators():
    """Catches the same where clients are drawn, and where messages are summed, sorted or kept."""
    key = jax.random.key(0)
    for make in cases.CASES["sampling"].values():
        sampler = make()
        jax.eval_shape(sampler.sample, key, sampler.init())
    for make in cases.CASES["aggregation"].values():
        rule = make()
        received = Received(jnp.ones((2, 3), jnp.float32), jnp.ones(2, jnp.float32), *jnp.zeros((2, 2), jnp.int32))
        carry = rule.init(jax.ShapeDtypeStruct((3,), jnp.float32), p.SLOTS)
        add, end, round = rule.accumulate, rule.finalize, cases.round_for(rule)
        jax.eval_shape(lambda carry, add=add, round=round, received=received: add(key, round, carry, received), carry)
        jax.eval_shape(lambda carry, end=end, round=round: end(key, round, carry), carry)


@pytest.mark.default_rows("fedasync")
@pytest.mark.parametrize("name", cases.CASES["algorithms"])
def test_rounds(name):
    """Catches the same in clients, servers and what they remember."""
    made, key, data = cases.CASES["algorithms"][name](), jax.random.key(0), p.ragged()
    jax.eval_shape(made.step, key, jax.eval_shape(lambda: made.init(key, jnp.array(p.START), data)), data)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("gradients", ["vmap", "auto"])
def test_clipped_records(gradients):
    """Catches a 64-bit gradient that is longer than the clip, or cut without need; it is float32's in the sum."""
    params = jnp.array([[1.0], [-2.0], [3.0]])
    x, loss_fn = jnp.array([[1e-3, 2e-3, 0.0], [3.0, 4.0, 0.0], [1e30, 0.0, 1e30]]), lambda w, x, key: (x @ w)[..., 0]
    clipped = jax.jit(lambda *given: clipped_sum(loss_fn, *given, clip_norm=0.5, gradients=gradients))
    assert params.dtype == x.dtype == jnp.float64
    for i, expected in enumerate((5e-6**0.5, 0.5, 0.5)):
        data = ClientData(x, jnp.arange(3) == i)
        found, _ = clipped(params, data, jax.random.key(0))
        length = np.linalg.norm(np.asarray(found, np.float64))
        assert found.dtype == jnp.float32 and length < 0.5 and length == pytest.approx(expected, rel=2e-5)


def test_a_packed_round():
    """Catches int64 slots scattered into an int32 packing."""
    work = client.local_sgd(p.mlp_loss, optax.sgd(0.1), client.work(num_epochs=2, batch_size=16))
    sampler = p.given(test_unequal.SLOTS, num_clients=test_unequal.SLOTS)
    rule, step = cases.CASES["aggregation"]["mean"](), server.optimizer(optax.sgd(1.0))
    made = federated(sampler, work, rule, step, plan=engine.Plan(4, 4), mesh=engine.device_mesh(2))
    data = test_unequal.data()
    assert len(data.capacities) > 1
    key = jax.random.key(0)
    jax.eval_shape(made.step, key, jax.eval_shape(lambda: made.init(key, p.mlp_params(), data)), data)
