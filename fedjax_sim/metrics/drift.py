"""Client drift of any model and loss: the bias that K local steps give to the gradient that the server receives.

From w each client takes K full-batch steps of eta to w_i. With g_i = grad f_i(w), H_i its Hessian there and
M_i = I - (I - eta H_i)^K,

    bias = sum p_i grad f_i(w_i) - grad F(w)
         = - sum p_i M_i grad F  -  sum p_i M_i (g_i - grad F)  +  remainder
           curvature                heterogeneity                  Hessians that change along the steps

The first part is there for identical clients too. The second is minus the covariance over clients of local work and
gradient, to first order -eta K Cov_i(H_i, g_i). The third vanishes on quadratics, where `theory.quadratic_drift` is the
closed form. Hessian-vector products are computed as gradients of <grad f, v>, which also works for layers that have no
forward mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.metrics.clients import check_weight, chosen, mean_over_clients, risk, weight_of
from fedjax_sim.types import Array, ClientData, Population, PyTree

__all__ = ["Drift", "drift", "drift_bias", "drift_leading_term"]


class Drift(NamedTuple):
    """The effect of K local steps from one model; every field is a pytree like the params.

    bias = end_point_gradient - gradient = curvature + heterogeneity + remainder.
    """

    gradient: PyTree  # grad F(w)
    end_point_gradient: PyTree  # sum p_i grad f_i(w_i): at the end of local work
    pseudo_gradient: PyTree  # (w - w_next) / eta = sum p_i sum_k grad f_i(w_i^k): what the server receives
    bias: PyTree
    curvature: PyTree
    heterogeneity: PyTree
    remainder: PyTree
    leading_term: PyTree  # -eta K sum p_i H_i g_i: the bias to first order in eta


def _axpy(scale: Any, x: PyTree, y: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: scale * a + b, x, y)


def _scaled(scale: Any, x: PyTree) -> PyTree:
    return jax.tree.map(lambda a: scale * a, x)


def _dot(x: PyTree, y: PyTree) -> Array:
    return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))


def _product(loss_fn: Callable, params: PyTree, data: ClientData, vector: PyTree) -> PyTree:
    """H v = grad <grad f, v>."""
    slope = jax.grad(lambda p: risk(loss_fn, p, data)[0])
    return jax.grad(lambda p: _dot(slope(p), vector))(params)


@partial(jax.jit, static_argnums=(0, 7))
def _drift(loss_fn, params, population, ids, num_steps, step_size, uniform, parts):
    def slope(p, data):
        return jax.grad(lambda q: risk(loss_fn, q, data)[0])(p)

    def walk(data):
        """Of one client: g_i, grad f_i(w_i) - g_i, and the sum of the gradients of its K steps."""
        first = slope(params, data)

        def step(_, carry):
            p, total = carry
            gradient = slope(p, data)
            return _axpy(-step_size, gradient, p), _axpy(1.0, gradient, total)

        end, total = jax.lax.fori_loop(0, num_steps, step, (params, tree.zeros_like(params)))
        moved = tree.subtract(slope(end, data), first)
        return weight_of(loss_fn, params, data, uniform), (first, moved, total)

    (gradient, bias, pseudo), weight = mean_over_clients(walk, params, population, ids)
    if not parts:
        return weight, gradient, bias, pseudo

    def split(data):
        """Of one client: M_i grad F, M_i (g_i - grad F), and H_i g_i."""
        first = slope(params, data)

        def moved(vector):
            def step(_, v):
                return _axpy(-step_size, _product(loss_fn, params, data, v), v)

            return tree.subtract(vector, jax.lax.fori_loop(0, num_steps, step, vector))

        leading = _product(loss_fn, params, data, first)
        values = moved(gradient), moved(tree.subtract(first, gradient)), leading
        return weight_of(loss_fn, params, data, uniform), values

    return weight, gradient, bias, pseudo, *mean_over_clients(split, params, population, ids)[0]


def _checked(step_size: Any, num_steps: Any) -> tuple[Array, Array]:
    validate.in_range("step_size", step_size, 0)
    validate.integer("num_steps", num_steps, 0)
    return jnp.float32(step_size), jnp.int32(num_steps)


def drift(
    loss_fn: Callable,
    params: PyTree,
    population: Population,
    *,
    step_size: float,
    num_steps: int,
    weighting: str = "examples",
    ids: Any = None,
) -> Drift:
    """The drift of a population's clients from `params`, and its parts.

    Args:
      loss_fn: (params, examples, key) -> losses [n], or a dict with "loss"; called with key None.
      params: the broadcast model, w. population: any; visited a few clients at a time.
      step_size: eta >= 0. num_steps: K >= 0 full-batch gradient steps.
      weighting: "examples" (p_i in proportion to n_i) or "uniform", over clients that have examples.
      ids: clients to look at; default: all.

    Returns: a `Drift`. It costs about 4 K gradients of each client.

    Guarantees: equal to the closed form on quadratics, part by part (tests/metrics/test_drift.py::test_closed_form);
    parts sum to the bias and the remainder is of second order (::test_logistic_remainders); any layer, recurrent ones
    too (::test_layers_without_forward_mode); the pseudo-gradient is the round's (::test_pseudo_gradient_is_the_rounds).

    References: Karimireddy et al. 2020 (SCAFFOLD), section 3.

    >>> from fedjax_sim.population import quadratic_loss, quadratic_population
    >>> population = quadratic_population([1.0, 1.0], [0.0, 4.0])
    >>> found = drift(quadratic_loss, {"w": jnp.ones(1)}, population, step_size=0.1, num_steps=1)
    >>> round(float(found.bias["w"][0]), 4), round(float(found.curvature["w"][0]), 4)
    (0.1, 0.1)
    """
    step_size, num_steps = _checked(step_size, num_steps)
    ids = chosen(population, ids, weighting)
    out = _drift(loss_fn, params, population, ids, num_steps, step_size, weighting == "uniform", True)
    weight, gradient, bias, pseudo, curvature, heterogeneity, leading = out
    check_weight(weight)
    curvature, heterogeneity = _scaled(-1.0, curvature), _scaled(-1.0, heterogeneity)
    return Drift(
        gradient=gradient,
        end_point_gradient=_axpy(1.0, bias, gradient),
        pseudo_gradient=pseudo,
        bias=bias,
        curvature=curvature,
        heterogeneity=heterogeneity,
        remainder=tree.subtract(bias, _axpy(1.0, curvature, heterogeneity)),
        leading_term=_scaled(-step_size * num_steps.astype(jnp.float32), leading),
    )


def drift_bias(
    loss_fn: Callable,
    params: PyTree,
    population: Population,
    *,
    step_size: float,
    num_steps: int,
    weighting: str = "examples",
    ids: Any = None,
) -> PyTree:
    """sum p_i grad f_i(w_i) - grad F(w) after K local steps: `drift`'s bias alone, at a quarter of its cost.

    Guarantees: zero without steps (tests/metrics/test_drift.py::test_no_steps_no_drift).
    """
    step_size, num_steps = _checked(step_size, num_steps)
    ids = chosen(population, ids, weighting)
    out = _drift(loss_fn, params, population, ids, num_steps, step_size, weighting == "uniform", False)
    check_weight(out[0])
    return out[2]


@partial(jax.jit, static_argnums=0)
def _leading(loss_fn, params, population, ids, uniform):
    def each(data):
        first = jax.grad(lambda p: risk(loss_fn, p, data)[0])(params)
        return weight_of(loss_fn, params, data, uniform), _product(loss_fn, params, data, first)

    return mean_over_clients(each, params, population, ids)


def drift_leading_term(
    loss_fn: Callable,
    params: PyTree,
    population: Population,
    *,
    step_size: float,
    num_steps: int = 1,
    weighting: str = "examples",
    ids: Any = None,
) -> PyTree:
    """-eta K sum p_i H_i g_i, the drift bias to first order in eta: one Hessian-vector product a client.

    Exact for one step on quadratics; otherwise the error falls with eta^2.

    Guarantees: tests/metrics/test_drift.py::test_logistic_remainders, test_closed_form.
    """
    step_size, num_steps = _checked(step_size, num_steps)
    ids = chosen(population, ids, weighting)
    first, weight = _leading(loss_fn, params, population, ids, weighting == "uniform")
    check_weight(weight)
    return _scaled(-step_size * num_steps.astype(jnp.float32), first)
