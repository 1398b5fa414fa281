"""What a round asks of each client: operations by its steps, its examples and its share of the work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import client, engine, network
from fedjax_sim.types import ClientData, Work
from tests.refusals import refused

SIZES = np.array([0, 1, 4, 5, 8, 21])


@pytest.mark.parametrize("options", [{"num_steps": 7}, {"num_epochs": 3, "batch_size": 4}, {"num_epochs": 2}])
@pytest.mark.parametrize("share", [None, np.float32([1, 0.5, 0.01, 0.34, 1, 0.7]), np.int32([1, 2, 3, 99, 5, 6])])
def test_steps_are_those_of_the_client(options, share):
    """Catches a share that is rounded otherwise than local training rounds it, and steps of another client."""
    work = client.work(**options)
    load = network.load_of(Work(1, 1, work.all_steps(), flops=11.0, step_flops=10.0), SIZES, share)
    per_epoch = jnp.maximum(-(-SIZES // (work.batch_size or 10**9)), 1)
    steps = work.own_steps(per_epoch, None if share is None else jnp.asarray(share))
    np.testing.assert_array_equal(load.flops, np.where(SIZES > 0, 1 + 10.0 * np.asarray(steps), 0))


def _loss(params, examples, key):
    return jnp.tanh(examples @ params["a"]) @ params["b"]


PARAMS = {"a": jnp.ones((20, 30)), "b": jnp.ones(30)}


def test_operations_are_those_of_the_program():
    """Against the operations of programs whose steps are written one after the other, counted by XLA.

    Catches steps that are all counted as one, or padding that a client does not have.
    """

    def program(num_steps, rows, batch_size):
        local = client.local_sgd(_loss, optax.sgd(0.1), client.work(num_steps=num_steps, batch_size=batch_size))
        return lambda x: local.apply(jax.random.key(0), PARAMS, (), ClientData(x, jnp.ones(rows, bool)))[0].update

    def by_xla(*shape):
        with engine.compiling_for("tpu"):  # for accelerators steps are written out; of a loop XLA counts one turn
            return jax.jit(program(*shape)).lower(jnp.ones((shape[1], 20))).cost_analysis()["flops"]

    def by_hand(*shape):
        return engine.flops(jax.make_jaxpr(program(*shape))(jnp.ones((shape[1], 20))))

    for steps in (1, 2, 6):
        assert abs(by_hand(steps, 40, 10) / by_xla(steps, 40, 10) - 1) < 0.25  # XLA counts the order of examples too
    step = by_hand(2, 40, 10) - by_hand(1, 40, 10)
    told = Work(1, 1, lambda examples: 6, by_hand(1, 40, 10), step)
    np.testing.assert_allclose(network.load_of(told, np.array([40])).flops, by_hand(6, 40, 10), rtol=1e-6)
    full = Work(1, 1, 2, by_hand(1, 40, None), by_hand(2, 40, None) - by_hand(1, 40, None), rows=40)
    np.testing.assert_allclose(
        network.load_of(full, np.array([10])).flops, by_hand(2, 10, None), rtol=0.05
    )  # the optimiser's part does not shrink


def test_wrong_input():
    """Catches partial work that is priced as all of it."""
    with refused("share", value="partial work", rule="do not state their steps"):
        network.load_of(Work(1, 1, None, 1.0), SIZES, np.ones(6, np.float32))
