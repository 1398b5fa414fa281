"""This module has recurrent layers that compute weight gradients fast: as one matrix product after the backward scan.

Automatic differentiation would compute one product in each step. Here the backward scan computes the gradients of the
gates [L, n, gates] only. Factors that do not depend on later steps are computed before the scan, for all steps at once.
`jax.grad` of any order works, `jax.jvp` (forward mode) does not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.models.layers import Params, dense
from fedjax_sim.types import Array


def _gates(key: Array, num_inputs: int, hidden: int, num_gates: int) -> Array:
    """Draws the kernels of all gates side by side, each Glorot-uniform for its own numbers of inputs and outputs."""
    limit = (6 / (num_inputs + hidden)) ** 0.5
    return jax.random.uniform(key, (num_inputs, num_gates * hidden), minval=-limit, maxval=limit)


def _over_time(scanned, params: Params, x: Array, *weights: Array) -> Array:
    """Computes the states [n, L, hidden] for inputs x [n, L, num_inputs].

    The inputs' part of all gates is one matmul for all steps, before the scan.
    """
    gates = jnp.swapaxes(dense(params, x), 0, 1)  # time first, as the scan needs it
    return jnp.swapaxes(scanned(*weights, gates), 0, 1)


def _before(states: Array) -> Array:
    """Returns the state before each step [L, ...], from the states after each step. The first one is zero."""
    return jnp.concatenate([jnp.zeros_like(states[:1]), states[:-1]])


def _weights(before: Array, g: Array) -> Array:
    """Sums the outer products of states [L, n, hidden] and gradients [L, n, gates] over steps and examples."""
    return before.reshape(-1, before.shape[2]).T @ g.reshape(-1, g.shape[2])


def init_gru(key: Array, num_inputs: int, hidden: int) -> Params:
    """Draws the parameters of `gru_layer`, 3 hidden (num_inputs + hidden + 1) + hidden numbers in all.

    Gates are in the order reset, update, candidate.
    """
    input_key, recurrent_key = jax.random.split(key)
    return {
        "kernel": _gates(input_key, num_inputs, hidden, 3),
        "recurrent": _gates(recurrent_key, hidden, hidden, 3),
        "bias": jnp.zeros(3 * hidden),
        "recurrent_bias": jnp.zeros(hidden),  # of the candidate, inside the reset gate
    }


def gru_layer(params: Params, x: Array) -> Array:
    """Runs a gated recurrent unit over x [n, L, num_inputs], from a zero state. Returns the states [n, L, hidden].

    A step computes h' = (1 - z) tanh(x W_c + b_c + r (h U_c + d_c)) + z h. Here r is the reset gate and z the update
    gate, both sigmoids of linear functions of x and h. A step has one matmul for all gates. The products with x are
    computed before the scan.

    Guarantees: equals flax.linen.GRUCell in value and gradient
    (tests/models/test_layers.py::test_recurrent_layers_equal_linen).

    References: Cho et al. 2014; the reset gate after the matmul as in cuDNN.
    """
    return _over_time(_gru, params, x, params["recurrent"], params["recurrent_bias"])


def _gru_forward(recurrent: Array, bias: Array, gates: Array) -> tuple[Array, tuple]:
    """Returns the states, and the values that the backward pass reads.

    Let a = x W + b be the inputs' part of the gates, with the parts a_r, a_z and a_c. From the state h a step computes

        r = sigmoid(a_r + h U_r)                reset gate
        z = sigmoid(a_z + h U_z)                update gate
        c = tanh(a_c + r (h U_c + d_c))         candidate; h U_c + d_c is called `inner`
        h' = (1 - z) c + z h

    Args:
      recurrent: U, [hidden, 3 hidden], in the order reset, update, candidate.
      bias: d_c, [hidden].
      gates: a, [L, n, 3 hidden], in the same order, time first.

    Returns: the states h' after each step, [L, n, hidden], from h = 0; and (U, h', r, z, c, inner), of which all but U
      are [L, n, hidden].
    """

    def step(h: Array, gates: Array) -> tuple[Array, tuple]:
        reset, update, candidate = jnp.split(gates, 3, axis=1)
        reset_h, update_h, candidate_h = jnp.split(h @ recurrent, 3, axis=1)
        reset = jax.nn.sigmoid(reset + reset_h)
        update = jax.nn.sigmoid(update + update_h)
        inner = candidate_h + bias.reshape(1, -1)  # h U_c + d_c
        candidate = jnp.tanh(candidate + reset * inner)
        h = (1 - update) * candidate + update * h
        return h, (h, reset, update, candidate, inner)

    start = jnp.zeros_like(gates, shape=(gates.shape[1], recurrent.shape[0]))
    states, *rest = jax.lax.scan(step, start, gates)[1]
    return states, (recurrent, states, *rest)


@jax.custom_vjp
def _gru(recurrent: Array, bias: Array, gates: Array) -> Array:
    """Returns the states [L, n, hidden], from the inputs' part of the gates [L, n, 3 hidden]."""
    return _gru_forward(recurrent, bias, gates)[0]


def _gru_backward(saved: tuple, g: Array) -> tuple[Array, Array, Array]:
    """Returns the gradients of `_gru`'s arguments.

    With the letters of `_gru_forward`, where h is the state before a step, and e the gradient by the state after it:

        e = g + what the next step passes back
        s = e (1 - z) (1 - c^2)                                             by the argument of the candidate's tanh
        q = [s inner r (1 - r),  e (h - c) z (1 - z),  s r]                 by h U + [0, 0, d_c]
        e z + q U^T                                                         what the step passes back, by h

    Args:
      saved: (U, h', r, z, c, inner), as `_gru_forward` returns them.
      g: the gradient by the states h', [L, n, hidden], without what later steps pass back.

    Returns: the gradients by U [hidden, 3 hidden], the sum of h^T q over steps; by d_c [hidden], the sum of s r over
      steps and examples; and by the gates a [L, n, 3 hidden], which is q with s in its last third.
    """
    recurrent, states, reset, update, candidate, inner = saved
    before = _before(states)
    # Local derivatives, for all steps at once: of h' with respect to the arguments of the candidate's tanh and of the
    # update gate's sigmoid, and of the candidate's argument with respect to that of the reset gate's sigmoid.
    by_candidate = (1 - update) * (1 - candidate * candidate)
    by_update = (before - candidate) * update * (1 - update)
    by_reset = inner * reset * (1 - reset)

    # Backwards in time. The carry is the gradient that the state receives from later steps.
    def step(later_gradient: Array, step_values: tuple) -> tuple[Array, tuple]:
        g, by_candidate, by_update, by_reset, reset, update = step_values
        g = g + later_gradient
        candidate_gradient = g * by_candidate
        # The gradient with respect to h @ recurrent. Its third part is that of h U_c, which the reset gate multiplies.
        product_gradient = jnp.concatenate(
            [candidate_gradient * by_reset, g * by_update, candidate_gradient * reset], axis=1
        )
        return g * update + product_gradient @ recurrent.T, (product_gradient, candidate_gradient)

    step_values = (g, by_candidate, by_update, by_reset, reset, update)
    _, (product_gradients, candidate_gradients) = jax.lax.scan(step, jnp.zeros_like(g[0]), step_values, reverse=True)
    reset_and_update_gradients, inner_gradients = jnp.split(product_gradients, [2 * recurrent.shape[0]], axis=2)
    return (
        _weights(before, product_gradients),
        inner_gradients.sum((0, 1)),
        jnp.concatenate([reset_and_update_gradients, candidate_gradients], axis=2),
    )


_gru.defvjp(_gru_forward, _gru_backward)


def init_lstm(key: Array, num_inputs: int, hidden: int) -> Params:
    """Draws the parameters of `lstm_layer`, 4 hidden (num_inputs + hidden + 1) numbers in all.

    Gates are in the order input, forget, cell, output. The bias of the forget gate is 1, and the others are 0.
    """
    input_key, recurrent_key = jax.random.split(key)
    return {
        "kernel": _gates(input_key, num_inputs, hidden, 4),
        "recurrent": _gates(recurrent_key, hidden, hidden, 4),
        "bias": jnp.zeros(4 * hidden).at[hidden : 2 * hidden].set(1.0),
    }


def lstm_layer(params: Params, x: Array) -> Array:
    """Runs a long short-term memory over x [n, L, num_inputs], from a zero state. Returns the states [n, L, hidden].

    Guarantees: equals flax.linen.OptimizedLSTMCell in value and gradient
    (tests/models/test_layers.py::test_recurrent_layers_equal_linen).

    References: Hochreiter and Schmidhuber 1997; forget bias 1: Jozefowicz et al. 2015.
    """
    return _over_time(_lstm, params, x, params["recurrent"])


def _lstm_forward(recurrent: Array, gates: Array) -> tuple[Array, tuple]:
    """Returns the states, and the values that the backward pass reads.

    From the state h and the cell c a step computes [i, f, g, o] = [sigmoid, sigmoid, tanh, sigmoid](gates + h U), then
    c' = f c + i g and h' = o tanh(c').

    Args:
      recurrent: U, [hidden, 4 hidden], in the order input, forget, cell, output.
      gates: the inputs' part x W + b of the gates, [L, n, 4 hidden], in the same order, time first.

    Returns: the states h' after each step, [L, n, hidden], from h = c = 0; and (U, h', c', i, f, g, o), of which all
      but U are [L, n, hidden].
    """

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
    """Returns the states [L, n, hidden], from the inputs' part of the gates [L, n, 4 hidden]."""
    return _lstm_forward(recurrent, gates)[0]


def _lstm_backward(saved: tuple, grad: Array) -> tuple[Array, Array]:
    """Returns the gradients of `_lstm`'s arguments.

    With the letters of `_lstm_forward`, the gradient e by the state h' after a step, and k by the cell c' after it:

        e = grad + what the next step passes back to h'
        k = e o (1 - tanh(c')^2) + what the next step passes back to c'
        q = [k g i (1 - i),  k c f (1 - f),  k i (1 - g^2),  e tanh(c') o (1 - o)]      by gates + h U
        q U^T and k f                                                                   what is passed back, to h and c

    Args:
      saved: (U, h', c', i, f, g, o), as `_lstm_forward` returns them.
      grad: the gradient by the states h', [L, n, hidden], without what later steps pass back.

    Returns: the gradients by U [hidden, 4 hidden], the sum of h^T q over steps; and by the gates [L, n, 4 hidden], q.
    """
    recurrent, states, cells, i, f, g, o = saved
    tanh_cells = jnp.tanh(cells)
    # Local derivatives, for all steps at once: of h with respect to the output gate and to the cell c, and of c with
    # respect to the input, forget and cell gates.
    by_output = tanh_cells * o * (1 - o)
    by_cell = o * (1 - tanh_cells * tanh_cells)
    by_gates = jnp.concatenate([g * i * (1 - i), _before(cells) * f * (1 - f), i * (1 - g * g)], axis=2)

    # Backwards in time. The carry is the gradients that state and cell receive from later steps.
    def step(later_gradients: tuple[Array, Array], step_values: tuple) -> tuple[tuple[Array, Array], Array]:
        grad, by_output, by_cell, by_gates, f = step_values
        grad = grad + later_gradients[0]
        cell_gradient = grad * by_cell + later_gradients[1]
        gate_gradients = jnp.concatenate([jnp.tile(cell_gradient, (1, 3)) * by_gates, grad * by_output], axis=1)
        return (gate_gradients @ recurrent.T, cell_gradient * f), gate_gradients

    start = jnp.zeros_like(grad[0])
    step_values = (grad, by_output, by_cell, by_gates, f)
    _, gate_gradients = jax.lax.scan(step, (start, start), step_values, reverse=True)
    return _weights(_before(states), gate_gradients), gate_gradients


_lstm.defvjp(_lstm_forward, _lstm_backward)
