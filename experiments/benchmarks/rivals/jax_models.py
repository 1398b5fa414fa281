"""The models as a user of JAX writes them: matrix products, XLA's own convolutions and pools, a scan over time."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def _dense(params, x):
    return x @ params["kernel"] + params["bias"]


def _convolution(params, x):
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, params["kernel"], (1, 1), "VALID", dimension_numbers=names) + params["bias"]


def _max_pool(x):
    return jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, window_dimensions=(1, 2, 2, 1), window_strides=(1, 2, 2, 1), padding="VALID"
    )


def _mlp(params, x):
    for name in sorted(params)[:-1]:  # hidden_0, ..., output
        x = jax.nn.relu(_dense(params[name], x))
    return _dense(params["output"], x)


def _cnn_12k(params, x):
    for name in ("conv_0", "conv_1"):
        x = _max_pool(jax.nn.relu(_convolution(params[name], x)))
    return _dense(params["output"], x.reshape(x.shape[0], -1))


def _small_cnn(params, x):
    x = jax.nn.relu(_convolution(params["conv_0"], x))
    x = _max_pool(jax.nn.relu(_convolution(params["conv_1"], x)))
    return _dense(params["output"], jax.nn.relu(_dense(params["hidden"], x.reshape(x.shape[0], -1))))


def _lstm(params, x):
    layer = params["layer_0"]
    gates = _dense(layer, params["embedding"]["table"][x]).swapaxes(0, 1)  # [L, b, 4 hidden]

    def step(carry, gates):
        h, c = carry
        i, f, g, o = jnp.split(gates + h @ layer["recurrent"], 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((x.shape[0], layer["recurrent"].shape[0]))
    _, states = jax.lax.scan(step, (zero, zero), gates)
    return _dense(params["output"], states.swapaxes(0, 1))


def of(kind: str) -> Callable:
    """(params, x [b, ...]) -> logits of that kind."""
    return {"mlp": _mlp, "cnn_12k": _cnn_12k, "small_cnn": _small_cnn, "lstm": _lstm}[kind]


def loss_of(kind: str) -> Callable:
    """(params, x, y) -> mean cross entropy."""

    def loss(params, x, y):
        scores = jax.nn.log_softmax(of(kind)(params, x))
        return -jnp.take_along_axis(scores, y[..., None], axis=-1).mean()

    return loss
