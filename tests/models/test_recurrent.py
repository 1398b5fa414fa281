"""gru and lstm as whole models; their cells are compared with linen in test_layers.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.models import gru, lstm, next_token_cross_entropy, supervised

KEY = jax.random.key(0)


def dimension(model):
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, KEY)[0]))


def test_parameter_counts():
    """Catches doubled biases and a layer that reads the wrong width."""
    assert dimension(lstm(num_outputs=90, hidden=256, num_layers=2)) == 820_522
    v, e, h = 7, 3, 5
    head = v * e + h * v + v
    assert dimension(lstm(num_outputs=v, embedding=e, hidden=h)) == head + 4 * h * (e + h + 1)
    assert dimension(gru(num_outputs=v, embedding=e, hidden=h, num_layers=2)) == head + 3 * h * (e + 3 * h + 2) + 2 * h


@pytest.mark.full  # by default tests/models/test_layers.py compares a scan with linen's
@pytest.mark.parametrize("build", [gru, lstm])
def test_logits_depend_on_the_past_only(build):
    """Catches a reversed or misaligned scan (a model that sees the token it predicts), and sequences that mix."""
    model = build(num_outputs=5, hidden=4, num_layers=2)
    params, state = jax.jit(model.init)(KEY)
    x = jax.random.randint(KEY, (2, 6), 0, 5)
    apply = jax.jit(lambda x: model.apply(params, state, x, None, False)[0])
    before, after = apply(x), apply(x.at[0, 3].set((x[0, 3] + 1) % 5))
    np.testing.assert_array_equal(before[0, :3], after[0, :3])
    np.testing.assert_array_equal(before[1], after[1])
    assert (jnp.abs(before - after)[0, 3:].max(axis=-1) > 1e-6).all()


@pytest.mark.full  # by default padding has its laws in tests/models/test_losses.py and test_layers.py
@pytest.mark.parametrize("build", [gru, lstm])
def test_padded_sequences_train_without_nan(build):
    """Catches NaN gradients from padding, and padding at the end that changes the gradient."""
    model = build(num_outputs=5, hidden=4)
    params, _ = jax.jit(model.init)(KEY)
    loss_fn = supervised(model, next_token_cross_entropy)
    x = jnp.array([[1, 2, 3, -1], [-1, -1, -1, -1]])
    y = jnp.array([[2, 3, -1, -1], [-1, -1, -1, -1]])
    g = jax.jit(jax.grad(lambda p, e: loss_fn(p, e, KEY)["loss"].sum()))
    padded, short = g(params, {"x": x, "y": y}), g(params, {"x": x[:1, :2], "y": y[:1, :2]})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), padded, short)


def test_error_texts():
    """Catches bad options at build time and inputs that are no token sequences."""
    with pytest.raises(TypeError, match="hidden: expected an integer"):
        gru(num_outputs=5, hidden=4.0)
    with pytest.raises(ValueError, match="num_layers: expected an integer"):
        lstm(num_outputs=5, num_layers=0)
    model = gru(num_outputs=5)
    with pytest.raises(ValueError, match=r"x: expected tokens \[n, length\]"):
        model.apply(model.init(KEY)[0], (), jnp.zeros(3, int), None, False)
