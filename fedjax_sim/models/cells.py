"""Recurrent layers whose weight gradients are one matrix product after the backward scan, instead of one a step.

The backward scan computes the gates' gradients [L, n, gates] only. What does not depend on later steps is computed
before it, for all steps at once. `jax.grad` of any order works; `jax.jvp` (forward mode) does not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.models.layers import Params, dense
from fedjax_sim.types import Array

__all__ = ["gru_layer", "init_gru", "init_lstm", "lstm_layer"]


def _gates(key: Array, num_inputs: int, hidden: int, num_gates: int) -> Array:
    """Kernels of all gates side by side, each Glorot-uniform for its own numbers of inputs and outputs."""
    limit = (6 / (num_inputs + hidden)) ** 0.5
    return jax.random.uniform(key, (num_inputs, num_gates * hidden), minval=-limit, maxval=limit)


def _over_time(scanned, params: Params, x: Array, *weights: Array) -> Array:
    """The states [n, L, hidden] for x [n, L, num_inputs]: the inputs' part of all gates at once, then the scan."""
    return jnp.swapaxes(scanned(*weights, jnp.swapaxes(dense(params, x), 0, 1)), 0, 1)


def _before(states: Array) -> Array:
    """The state that each step [L, ...] started from."""
    return jnp.concatenate([jnp.zeros_like(states[:1]), states[:-1]])


def _weights(before: Array, g: Array) -> Array:
    """Sum over steps and examples of the outer products of states [L, n, hidden] and gradients [L, n, gates]."""
    return before.reshape(-1, before.shape[2]).T @ g.reshape(-1, g.shape[2])


def init_gru(key: Array, num_inputs: int, hidden: int) -> Params:
    """Gates in the order reset, update, candidate; 3 hidden (num_inputs + hidden + 1) + hidden parameters."""
    inputs, recurrent = jax.random.split(key)
    return {
        "kernel": _gates(inputs, num_inputs, hidden, 3),
        "recurrent": _gates(recurrent, hidden, hidden, 3),
        "bias": jnp.zeros(3 * hidden),
        "recurrent_bias": jnp.zeros(hidden),  # of the candidate, inside the reset gate
    }


def gru_layer(params: Params, x: Array) -> Array:
    """Gated recurrent unit over x [n, L, num_inputs], from a zero state; returns the states [n, L, hidden].

    h' = (1 - z) tanh(W_c x + b_c + r (U_c h + d_c)) + z h, with one fused matmul a step; W x is taken before the scan.

    Guarantees: equals flax.linen.GRUCell in value and gradient
    (tests/models/test_layers.py::test_recurrent_layers_equal_linen).

    References: Cho et al. 2014; the reset gate after the matmul as in cuDNN.
    """
    return _over_time(_gru, params, x, params["recurrent"], params["recurrent_bias"])


def _gru_forward(recurrent: Array, bias: Array, gates: Array) -> tuple[Array, tuple]:
    def step(h: Array, gates: Array) -> tuple[Array, tuple]:
        reset, update, candidate = jnp.split(gates, 3, axis=1)
        reset_h, update_h, candidate_h = jnp.split(h @ recurrent, 3, axis=1)
        reset, update = jax.nn.sigmoid(reset + reset_h), jax.nn.sigmoid(update + update_h)
        inner = candidate_h + bias.reshape(1, -1)
        candidate = jnp.tanh(candidate + reset * inner)
        h = (1 - update) * candidate + update * h
        return h, (h, reset, update, candidate, inner)

    start = jnp.zeros_like(gates, shape=(gates.shape[1], recurrent.shape[0]))
    states, *rest = jax.lax.scan(step, start, gates)[1]
    return states, (recurrent, states, *rest)


@jax.custom_vjp
def _gru(recurrent: Array, bias: Array, gates: Array) -> Array:
    return _gru_forward(recurrent, bias, gates)[0]


def _gru_backward(saved: tuple, g: Array) -> tuple[Array, Array, Array]:
    recurrent, states, reset, update, candidate, inner = saved
    before = _before(states)
    by_candidate = (1 - update) * (1 - candidate * candidate)  # d h' / d gate, gate by gate
    by_update = (before - candidate) * update * (1 - update)
    by_reset = inner * reset * (1 - reset)

    def step(later: Array, now: tuple) -> tuple[Array, tuple]:
        g, by_candidate, by_update, by_reset, reset, update = now
        g = g + later
        candidate = g * by_candidate
        by_h = jnp.concatenate([candidate * by_reset, g * by_update, candidate * reset], axis=1)
        return g * update + by_h @ recurrent.T, (by_h, candidate)

    now = (g, by_candidate, by_update, by_reset, reset, update)
    _, (by_h, by_candidate) = jax.lax.scan(step, jnp.zeros_like(g[0]), now, reverse=True)
    gates, inner = jnp.split(by_h, [2 * recurrent.shape[0]], axis=2)
    return _weights(before, by_h), inner.sum((0, 1)), jnp.concatenate([gates, by_candidate], axis=2)


_gru.defvjp(_gru_forward, _gru_backward)


def init_lstm(key: Array, num_inputs: int, hidden: int) -> Params:
    """Gates in the order input, forget, cell, output; 4 hidden (num_inputs + hidden + 1) parameters; forget bias 1."""
    inputs, recurrent = jax.random.split(key)
    return {
        "kernel": _gates(inputs, num_inputs, hidden, 4),
        "recurrent": _gates(recurrent, hidden, hidden, 4),
        "bias": jnp.zeros(4 * hidden).at[hidden : 2 * hidden].set(1.0),
    }


def lstm_layer(params: Params, x: Array) -> Array:
    """Long short-term memory over x [n, L, num_inputs], from a zero state; returns the states [n, L, hidden].

    Guarantees: equals flax.linen.OptimizedLSTMCell in value and gradient
    (tests/models/test_layers.py::test_recurrent_layers_equal_linen).

    References: Hochreiter and Schmidhuber 1997; forget bias 1: Jozefowicz et al. 2015.
    """
    return _over_time(_lstm, params, x, params["recurrent"])


def _lstm_forward(recurrent: Array, gates: Array) -> tuple[Array, tuple]:
    def step(carry: tuple[Array, Array], gates: Array) -> tuple[tuple[Array, Array], tuple]:
        h, c = carry
        i, f, g, o = jnp.split(gates + h @ recurrent, 4, axis=1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        c = f * c + i * g
        h = o * jnp.tanh(c)
        return (h, c), (h, c, i, f, g, o)

    start = jnp.zeros_like(gates, shape=(gates.shape[1], recurrent.shape[0]))
    states, *rest = jax.lax.scan(step, (start, start), gates)[1]
    return states, (recurrent, states, *rest)


@jax.custom_vjp
def _lstm(recurrent: Array, gates: Array) -> Array:
    return _lstm_forward(recurrent, gates)[0]


def _lstm_backward(saved: tuple, grad: Array) -> tuple[Array, Array]:
    recurrent, states, cells, i, f, g, o = saved
    out = jnp.tanh(cells)
    by_output, by_cell = out * o * (1 - o), o * (1 - out * out)  # d h / d output gate, d h / d c
    by_gates = jnp.concatenate([g * i * (1 - i), _before(cells) * f * (1 - f), i * (1 - g * g)], axis=2)  # d c / d gate

    def step(later: tuple[Array, Array], now: tuple) -> tuple[tuple[Array, Array], Array]:
        grad, by_output, by_cell, by_gates, f = now
        grad = grad + later[0]
        cell = grad * by_cell + later[1]
        by_h = jnp.concatenate([jnp.tile(cell, (1, 3)) * by_gates, grad * by_output], axis=1)
        return (by_h @ recurrent.T, cell * f), by_h

    start = jnp.zeros_like(grad[0])
    _, by_h = jax.lax.scan(step, (start, start), (grad, by_output, by_cell, by_gates, f), reverse=True)
    return _weights(_before(states), by_h), by_h


_lstm.defvjp(_lstm_forward, _lstm_backward)
