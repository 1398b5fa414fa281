"""Layers against flax.linen with the same weights."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.models import cells, layers

KEY = jax.random.key(0)


def noise(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def same(a, b, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def test_dense_equals_linen():
    """Catches a transposed kernel and a missing bias."""
    params = {"kernel": noise(0, 4, 3), "bias": noise(1, 3)}
    x = noise(2, 5, 2, 4)
    same(layers.dense(params, x), nn.Dense(3).apply({"params": params}, x))


CONVOLUTIONS = [("SAME", 1, 3), ("VALID", 2, 3), ("SAME", 1, 2), ("SAME", 3, 5)]


@pytest.mark.full  # by default test_convolution.py compares with NumPy, and test_feedforward.py compares methods
@pytest.mark.parametrize(("padding", "stride", "size"), CONVOLUTIONS)
def test_convolution_equals_linen(padding, stride, size):
    """Catches a flipped kernel, rows and columns exchanged, lopsided padding of even kernels, strides off by one."""
    params = {"kernel": noise(0, size, size, 2, 3), "bias": noise(1, 3)}
    x = noise(2, 2, 7, 6, 2)
    oracle = nn.Conv(3, (size, size), strides=stride, padding=padding)

    def values(apply):
        def scalar(params, x):
            out = apply(params, x)
            return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

        return jax.jit(jax.value_and_grad(scalar, (0, 1), has_aux=True))(params, x)

    expected = values(lambda params, x: oracle.apply({"params": params}, x))
    for method in layers.CONVOLUTION_METHODS:
        got = values(lambda p, x, m=method: layers.convolution(p, x, stride=stride, padding=padding, method=m))
        same(got, expected, 2e-5)


def test_im2col_lowers_to_no_convolution():
    """Catches a fallback to XLA's convolution."""
    params = layers.init_convolution(KEY, 3, 2, 4)
    gradient = jax.jit(jax.grad(lambda p, x: layers.convolution(p, x, method="im2col").sum()))
    text = gradient.lower(params, noise(0, 2, 6, 6, 2)).as_text()
    assert "convolution" not in text and "dot_general" in text


def test_max_pool_equals_linen():
    """Catches pooling over the wrong axes and a border that is padded instead of cut."""
    x = noise(0, 2, 7, 5, 3)
    for size in (2, 3):
        own, theirs = (
            jax.jit(lambda x, pooled=pooled: (pooled(x), jax.grad(lambda x: pooled(x).sum())(x)))(x)
            for pooled in (partial(layers.max_pool, size=size), lambda x, s=size: nn.max_pool(x, (s, s), (s, s)))
        )
        same(own, theirs)


def linen_gates(params, names, biased):
    """The weights of a fused layer as those of a linen cell with one dense layer a gate."""
    hidden = params["recurrent"].shape[0]
    out = {}
    for i, name in enumerate(names):
        gate = slice(i * hidden, (i + 1) * hidden)
        bias = {"bias": params["bias"][gate]}
        out[f"i{name}"] = {"kernel": params["kernel"][:, gate]} | (bias if biased == "i" else {})
        out[f"h{name}"] = {"kernel": params["recurrent"][:, gate]} | (bias if biased == "h" else {})
    return out


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent_layers_equal_linen(kind):
    """Catches exchanged gates, a reset gate before the matmul, biases on the wrong side, a scan over the wrong axis."""
    num_inputs, hidden = 3, 4
    initialize = cells.init_gru if kind == "gru" else cells.init_lstm
    params = jax.tree.map(
        lambda a: a + 0.3 * np.cos(np.arange(a.size)).reshape(a.shape),
        jax.jit(lambda k: initialize(k, num_inputs, hidden))(KEY),
    )
    x = noise(1, 2, 5, num_inputs)

    def as_linen(params):
        if kind == "lstm":
            return linen_gates(params, "ifgo", "h")
        weights = linen_gates(params, "rzn", "i")
        weights["hn"]["bias"] = params["recurrent_bias"]
        return weights

    cell, layer = {
        "gru": (nn.GRUCell(hidden), cells.gru_layer),
        "lstm": (nn.OptimizedLSTMCell(hidden), cells.lstm_layer),
    }[kind]
    oracle = nn.RNN(cell)

    def values(apply, x):
        out = apply(x)
        return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

    def of_linen(params, x):
        return values(lambda x: oracle.apply({"params": {"cell": as_linen(params)}}, x), x)

    def of_layer(params, x):
        return values(lambda x: layer(params, x), x)

    got, expected = (jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(params, x) for f in (of_layer, of_linen))
    same(got, expected)


def test_embedding_padding_and_unknown_tokens():
    """Catches -1 read as the last row, unknown tokens clamped to a known one, and padding that trains a row."""
    table = np.asarray(noise(0, 4, 3))
    embed = jax.jit(lambda table, tokens: layers.embedding({"table": table}, tokens))
    out = np.asarray(embed(table, np.array([[2, -1, 0], [3, 4, -2]])))
    np.testing.assert_array_equal(out[0], [table[2], np.zeros(3), table[0]])
    np.testing.assert_array_equal(out[1, 0], table[3])
    assert np.isnan(out[1, 1:]).all()
    g = jax.jit(jax.grad(lambda t: embed(t, jnp.array([[2, -1, 2]])).sum()))(table)
    np.testing.assert_array_equal(g, np.outer([0, 0, 2, 0], np.ones(3)))


def test_initial_scale():
    """Catches He and Glorot exchanged and a fan taken from the wrong axis (standard deviations 4 % apart or more)."""
    size = 200

    @jax.jit
    def kernels(key):
        dense = [layers.init_dense(key, size, size // 2, relu=relu)["kernel"] for relu in (True, False)]
        return *dense, layers.init_convolution(key, 5, 16, 32)["kernel"]

    he, glorot, conv = map(np.asarray, kernels(KEY))
    np.testing.assert_allclose(he.std(), np.sqrt(2 / 200), rtol=0.03)  # 20,000 draws: 6 standard errors
    np.testing.assert_allclose(glorot.std(), np.sqrt(2 / 300), rtol=0.03)
    np.testing.assert_allclose(conv.std(), np.sqrt(2 / (25 * 16)), rtol=0.04)
    np.testing.assert_array_equal(cells.init_lstm(KEY, 2, 3)["bias"], [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, x: layers.convolution(p, x, padding="same"), "padding: expected one of 'SAME', 'VALID'"),
        (lambda p, x: layers.convolution(p, x, method="fast"), "method: expected one of"),
        (lambda p, x: layers.convolution(p, x, stride=0), "stride: expected an integer"),
        (lambda p, x: layers.convolution(p, x[..., 0]), r"x: expected images \[n, height, width, 1\]"),
        (lambda p, x: layers.convolution(p, x, padding="VALID"), "images of at least 3x3"),
        (lambda p, x: layers.max_pool(x, size=3), "images of at least 3x3"),
        (lambda p, x: layers.embedding({"table": x[0, 0]}, x), "tokens: expected integers"),
    ],
)
def test_error_texts(call, message):
    """Catches shapes that would give an empty or broadcast result."""
    with pytest.raises((ValueError, TypeError), match=message):
        call({"kernel": jnp.zeros((3, 3, 1, 1)), "bias": jnp.zeros(1)}, jnp.zeros((1, 2, 2, 1)))


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", ["convolution", "im2col", "gru", "lstm"])
def test_second_derivatives(name):
    """Catches a hand-written gradient that is not itself differentiable (meta-learning, gradient penalties)."""
    x = noise(1, 1, 3, 3, 2) if name in ("convolution", "im2col") else noise(1, 1, 3, 2)
    params, layer = {
        "convolution": (layers.init_convolution(KEY, 2, 2, 2), layers.convolution),
        "im2col": (layers.init_convolution(KEY, 2, 2, 2), partial(layers.convolution, method="im2col")),
        "gru": (cells.init_gru(KEY, 2, 2), cells.gru_layer),
        "lstm": (cells.init_lstm(KEY, 2, 2), cells.lstm_layer),
    }[name]
    direction = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), params)

    @jax.jit
    def along(step):
        moved = jax.tree.map(lambda a, b: a + step * b, params, direction)
        g = jax.grad(lambda p: (layer(p, x) ** 2).sum())(moved)
        return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(g), jax.tree.leaves(direction), strict=True))

    numerical = (along(0.01) - along(-0.01)) / 0.02
    np.testing.assert_allclose(jax.jit(jax.grad(along))(0.0), numerical, rtol=2e-3)
