"""Plain SGD is recognised by what an optimizer computes, not by its name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim.client import over_rounds, plain_sgd_rate
from fedjax_sim.client.optimizers import sgd
from tests.refusals import refused


def is_matrix(params):
    return jax.tree.map(lambda x: jnp.ndim(x) >= 2, params)


@pytest.mark.parametrize(
    "optimizer, rate",
    [
        (optax.sgd(0.1), 0.1),
        (sgd(learning_rate=0.3), 0.3),
        (optax.chain(optax.scale(2.0), optax.sgd(0.25)), 0.5),
        (optax.scale(-0.7), 0.7),
    ],
)
def test_plain_sgd_is_recognised_by_its_program(optimizer, rate):
    """Fault: a rate in float32, which is another number than the user's."""
    assert plain_sgd_rate("scaffold", optimizer) == rate


@pytest.mark.parametrize(
    "optimizer, found",
    [
        (optax.sgd(0.1, momentum=0.9), "one with a state"),
        (optax.adam(0.1), "one with a state"),
        (optax.sgd(optax.linear_schedule(0.1, 0.0, 9)), "one with a state"),
        (optax.chain(optax.clip(1e30), optax.sgd(0.1)), "one that does more than scale gradients"),
        (optax.chain(optax.add_decayed_weights(1e-9), optax.sgd(0.1)), "one that does more than scale gradients"),
        (optax.stateless(lambda updates, params: jax.tree.map(jnp.square, updates)), "one that does more"),
        (optax.stateless(lambda updates, params: jax.tree.map(jnp.multiply, updates, params)), "one that does more"),
        (optax.chain(optax.centralize(), optax.sgd(0.1)), "one that does more"),
        (optax.set_to_zero(), "one that does more"),
        (optax.chain(optax.sgd(0.1), optax.masked(optax.set_to_zero(), is_matrix)), "one that does more"),
        (
            optax.multi_transform({"a": optax.sgd(0.1), "b": optax.sgd(0.2)}, {"w": "a", "v": "b"}),
            "one that needs more",
        ),
        (
            optax.stateless(lambda updates, params: jax.tree.map(lambda x: -0.1 * (x.ndim + 1) * x, updates)),
            "one with several",
        ),
        (optax.polyak_sgd(), "one that needs more than gradients"),
        (over_rounds(optax.sgd, optax.linear_schedule(1.0, 0.0, 4)), "a rate that falls over rounds"),
    ],
)
def test_all_others_are_refused_by_name(optimizer, found):
    """Fault: a clip or a decay that is so small that trials do not show it."""
    with refused("optimizer", rule="plain SGD for scaffold") as raised:
        plain_sgd_rate("scaffold", optimizer)
    assert raised.value.value.startswith(found)
    with refused("learning_rate", rule="> 0"):
        plain_sgd_rate("scaffold", optax.sgd(-0.1))


def test_a_rate_may_be_traced():
    """Fault: a sweep over the rate that needs a Python number."""
    rates = jax.vmap(lambda rate: plain_sgd_rate("scaffold", optax.sgd(rate)))(jnp.array([0.1, 0.2]))
    np.testing.assert_array_equal(rates, np.float32([0.1, 0.2]))
