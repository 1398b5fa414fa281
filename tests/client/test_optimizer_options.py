"""Clips and decay of the optimisers that a config names, beside NumPy and optax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim.client import optimizers, plain_sgd_rate
from tests.refusals import refused

START = {"a": np.array([1.0, -2.0], np.float32), "b": np.array([[3.0]], np.float32)}
GRADIENTS = [
    {"a": np.array([4.0, -0.25], np.float32) * scale, "b": np.array([[0.5]], np.float32) * scale}
    for scale in (1.0, -2.0, 0.1)
]
NAMES = ("sgd", "adam", "adamw", "adagrad", "rmsprop")


def trained(optimizer, gradients=GRADIENTS):
    params = jax.tree.map(jnp.asarray, START)
    state = optimizer.init(params)
    for step, gradient in enumerate(gradients):
        extra = {"round": jnp.int32(step)} if isinstance(optimizer, optimizers.OverRounds) else {}
        updates, state = optimizer.update(gradient, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


def clipped(gradient, value, norm):
    """The clipped gradient, by value first, as one vector."""
    vector = np.concatenate([gradient["a"], gradient["b"][0]]).astype(np.float64)
    vector = np.clip(vector, -value, value)
    return vector * min(1.0, norm / np.linalg.norm(vector))


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_equals_numpy(nesterov):
    """Fault: decay that is clipped, or not in the momentum; clips in another order, or a norm for each leaf."""
    value, norm, decay, momentum, rate = 1.5, 1.2, 0.1, 0.5, 0.3
    w, v = np.array([1.0, -2.0, 3.0]), np.zeros(3)
    for gradient in GRADIENTS:
        g = clipped(gradient, value, norm) + decay * w
        v = g + momentum * v
        w = w - rate * (g + momentum * v if nesterov else v)
    made = optimizers.sgd(
        learning_rate=rate,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=decay,
        clip_value=value,
        clip_norm=norm,
    )
    np.testing.assert_allclose(trained(made), w, rtol=2e-6)


@pytest.mark.parametrize("schedule", [{}, {"schedule": "linear", "decay_steps": 4, "schedule_over": "rounds"}])
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_clips_its_gradients(name, schedule):
    """Fault: an optimiser without the options, or one that clips its steps in the place of its gradients."""
    make = getattr(optimizers, name)
    vectors = [clipped(gradient, 1.5, 1.2).astype(np.float32) for gradient in GRADIENTS]
    expected = trained(make(**schedule), [{"a": vector[:2], "b": vector[2:, None]} for vector in vectors])
    got = trained(make(clip_value=1.5, clip_norm=1.2, **schedule))
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert name != "sgd" or not np.allclose(got, trained(make(**schedule)), rtol=1e-3)


def test_options_that_are_off_cost_nothing():
    """Fault: a chain of nothing, which has another state, or operations for a clip that is not there."""
    for made, plain in ((optimizers.sgd(learning_rate=0.1), optax.sgd(0.1)), (optimizers.adam(), optax.adam(0.001))):
        params = jax.tree.map(jnp.asarray, START)
        assert jax.tree.structure(made.init(params)) == jax.tree.structure(plain.init(params))
        programs = [str(jax.make_jaxpr(one.update)(params, one.init(params), params)) for one in (made, plain)]
        assert programs[0] == programs[1]
    assert plain_sgd_rate("scaffold", optimizers.sgd(learning_rate=0.1)) == 0.1


@pytest.mark.parametrize("option", [{"clip_norm": 1e9}, {"clip_value": 1e9}, {"weight_decay": 1e-9}])
def test_clips_and_decay_are_not_plain_sgd(option):
    """Fault: a closed form that is taken for an optimiser that does more."""
    with refused("optimizer", rule="plain SGD"):
        plain_sgd_rate("scaffold", optimizers.sgd(learning_rate=0.1, **option))


@pytest.mark.parametrize("option", ["clip_norm", "clip_value"])
def test_wrong_clips(option):
    """Fault: a clip to nothing, which trains no client, and one that is no number."""
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with refused(option):
            optimizers.adam(**{option: value})
    with refused("weight_decay"):
        optimizers.sgd(weight_decay=-1e-3)
