"""This module measures client drift: the bias that K local steps give to the aggregated gradient.

From w, each client takes K full-batch steps of eta to w_i. Let g_i = grad f_i(w), H_i its Hessian at w, and M_i = I -
(I - eta H_i)^K. Then

    bias = sum p_i grad f_i(w_i) - grad F(w)
         = - sum p_i M_i grad F  -  sum p_i M_i (g_i - grad F)  +  remainder
           curvature                heterogeneity                  Hessians that change along the steps

The curvature part arises for identical clients too. The heterogeneity part is minus the covariance over clients of
local work and gradient, -eta K Cov_i(H_i, g_i) to first order. The remainder vanishes on quadratics, for which
`theory.quadratic_drift` is the closed form.

Hessian-vector products are computed as gradients of <grad f, v>. This also works for layers that have no forward mode.
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


class Drift(NamedTuple):
    """The effect of K local steps from one model. Every field is a pytree like the params.

    bias = end_point_gradient - gradient = curvature + heterogeneity + remainder.
    """

    gradient: PyTree  # grad F(w)
    end_point_gradient: PyTree  # sum p_i grad f_i(w_i), at the end of local work
    pseudo_gradient: PyTree  # (w - w_next) / eta = sum p_i sum_k grad f_i(w_i^k), which the server receives
    bias: PyTree
    curvature: PyTree
    heterogeneity: PyTree
    remainder: PyTree
    leading_term: PyTree  # -eta K sum p_i H_i g_i: the bias to first order in eta


def _axpy(scale: Any, x: PyTree, y: PyTree) -> PyTree:
    """Computes scale x + y, leaf by leaf."""
    return jax.tree.map(lambda a, b: scale * a + b, x, y)


def _scaled(scale: Any, x: PyTree) -> PyTree:
    """Computes scale x, leaf by leaf."""
    return jax.tree.map(lambda a: scale * a, x)


def _dot(x: PyTree, y: PyTree) -> Array:
    """Computes the inner product over all leaves."""
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return jnp.asarray(sum(jnp.vdot(a, b) for a, b in pairs))


def _product(loss_fn: Callable, params: PyTree, data: ClientData, vector: PyTree) -> PyTree:
    """Computes the Hessian-vector product H v = grad <grad f, v> of one client."""
    gradient_at = jax.grad(lambda point: risk(loss_fn, point, data)[0])
    return jax.grad(lambda point: _dot(gradient_at(point), vector))(params)


class _LocalWork(NamedTuple):
    """Who works, how much, and with which weight. The compiled program has these as arguments."""

    population: Population
    ids: Array  # [n] int32, the clients that are visited
    num_steps: Array  # K, [] int32
    step_size: Array  # eta, [] float32
    uniform: Array | bool  # whether clients with examples have equal shares p_i, in place of shares by examples


@partial(jax.jit, static_argnums=(0, 3))
def _drift(loss_fn: Callable, params: PyTree, work: _LocalWork, parts: bool) -> tuple:
    """Computes weight, gradient, bias and pseudo-gradient, and with `parts` the terms of the bias.

    All but the weight are weighted means over clients, with g_i = grad f_i(w) and M_i = I - (I - eta H_i)^K:

        gradient         sum p_i g_i = grad F
        bias             sum p_i (grad f_i(w_i) - g_i)
        pseudo-gradient  sum p_i sum_k grad f_i(w_i^k), over the K steps
        parts            sum p_i M_i grad F,  sum p_i M_i (g_i - grad F),  sum p_i H_i g_i

    The parts need a second pass over the clients, because they depend on grad F.

    Args:
      loss_fn: as in `drift`; static.
      params: w, the broadcast model.
      work: of the clients.
      parts: whether the terms of the bias are computed; static.

    Returns: (total weight [], gradient, bias, pseudo-gradient), with `parts` also the three terms above. All but the
      weight are pytrees like params. The first two terms have the opposite sign of `Drift.curvature` and
      `Drift.heterogeneity`. If no client has examples, the weight is 0 and the means are NaN, which the callers refuse.
    """
    population, ids, num_steps, step_size, uniform = work

    def gradient_at(point, data):
        """Computes grad f_i at the point."""
        return jax.grad(lambda query: risk(loss_fn, query, data)[0])(point)

    def steps_of_client(data):
        """Computes for one client g_i, grad f_i(w_i) - g_i, and the sum of the gradients of its K steps."""
        client_gradient = gradient_at(params, data)

        def step(_, carry):
            point, gradient_sum = carry
            gradient = gradient_at(point, data)
            return _axpy(-step_size, gradient, point), _axpy(1.0, gradient, gradient_sum)

        # The sum of the gradients is (w - w_i) / eta, but is defined for eta = 0 too.
        end_point, gradient_sum = jax.lax.fori_loop(0, num_steps, step, (params, tree.zeros_like(params)))
        gradient_change = tree.subtract(gradient_at(end_point, data), client_gradient)
        return weight_of(loss_fn, params, data, uniform), (client_gradient, gradient_change, gradient_sum)

    (gradient, bias, pseudo_gradient), weight = mean_over_clients(steps_of_client, params, population, ids)
    # The parts depend on grad F, so they need a second pass, which `drift_bias` saves.
    if not parts:
        return weight, gradient, bias, pseudo_gradient

    def parts_of_client(data):
        """Computes for one client M_i grad F, M_i (g_i - grad F), and H_i g_i."""
        client_gradient = gradient_at(params, data)

        def progress_times(vector):
            """Computes M_i vector = vector - (I - eta H_i)^K vector, by K Hessian-vector products."""

            def step(_, product):
                return _axpy(-step_size, _product(loss_fn, params, data, product), product)

            return tree.subtract(vector, jax.lax.fori_loop(0, num_steps, step, vector))

        leading = _product(loss_fn, params, data, client_gradient)
        values = progress_times(gradient), progress_times(tree.subtract(client_gradient, gradient)), leading
        return weight_of(loss_fn, params, data, uniform), values

    return weight, gradient, bias, pseudo_gradient, *mean_over_clients(parts_of_client, params, population, ids)[0]


def _checked(step_size: Any, num_steps: Any) -> tuple[Array, Array]:
    """Checks both numbers, and returns them as JAX scalars, so that other values need no new compilation."""
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
    """Measures the drift of a population's clients from `params`, and its parts.

    Args:
      loss_fn: (params, examples, key) -> losses [n], or a dict with "loss"; called with key None.
      params: the broadcast model, w.
      population: any; it is visited a few clients at a time.
      step_size: eta >= 0.
      num_steps: K >= 0 full-batch gradient steps.
      weighting: "examples" (p_i in proportion to n_i) or "uniform", over the clients that have examples.
      ids: the clients to visit; None = all.

    Returns: `Drift`. It costs about 4 K gradients of each client.

    Guarantees: The drift equals the closed form on quadratics, part by part
    (tests/metrics/test_drift.py::test_closed_form). Parts sum to the bias, and the remainder is of second order
    (::test_logistic_remainders). Any layer is supported, recurrent ones too (::test_layers_without_forward_mode). The
    pseudo-gradient is that of a round (::test_pseudo_gradient_is_the_rounds).

    References: Karimireddy et al. 2020 (SCAFFOLD), section 3.

    >>> from fedjax_sim.population import quadratic_loss, quadratic_population
    >>> population = quadratic_population([1.0, 1.0], [0.0, 4.0])
    >>> measured = drift(quadratic_loss, {"w": jnp.ones(1)}, population, step_size=0.1, num_steps=1)
    >>> round(float(measured.bias["w"][0]), 4), round(float(measured.curvature["w"][0]), 4)
    (0.1, 0.1)
    """
    eta, K = _checked(step_size, num_steps)
    ids = chosen(population, ids, weighting)
    work = _LocalWork(population, ids, K, eta, weighting == "uniform")
    out = _drift(loss_fn, params, work, True)
    weight, gradient, bias, pseudo, curvature, heterogeneity, leading = out
    check_weight(weight)
    # The passes return M_i grad F and M_i (g_i - grad F); the parts of the bias have the opposite sign.
    curvature = _scaled(-1.0, curvature)
    heterogeneity = _scaled(-1.0, heterogeneity)
    return Drift(
        gradient=gradient,
        end_point_gradient=_axpy(1.0, bias, gradient),
        pseudo_gradient=pseudo,
        bias=bias,
        curvature=curvature,
        heterogeneity=heterogeneity,
        remainder=tree.subtract(bias, _axpy(1.0, curvature, heterogeneity)),
        leading_term=_scaled(-eta * K.astype(jnp.float32), leading),
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
    """Computes the bias of `drift` alone, at a quarter of its cost.

    The bias is sum p_i grad f_i(w_i) - grad F(w) after K local steps.

    Args:
      loss_fn, params, population, step_size, num_steps, weighting, ids: as in `drift`.

    Returns: a pytree like `params`.

    Guarantees: The bias is zero without steps (tests/metrics/test_drift.py::test_no_steps_no_drift).
    """
    eta, K = _checked(step_size, num_steps)
    ids = chosen(population, ids, weighting)
    work = _LocalWork(population, ids, K, eta, weighting == "uniform")
    out = _drift(loss_fn, params, work, False)
    check_weight(out[0])
    return out[2]


@partial(jax.jit, static_argnums=0)
def _leading(loss_fn, params, population, ids, uniform):
    """Computes (sum p_i H_i g_i, total weight)."""

    def product_of_client(data):
        client_gradient = jax.grad(lambda point: risk(loss_fn, point, data)[0])(params)
        return weight_of(loss_fn, params, data, uniform), _product(loss_fn, params, data, client_gradient)

    return mean_over_clients(product_of_client, params, population, ids)


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
    """Computes the drift bias to first order in eta, -eta K sum p_i H_i g_i.

    This takes one Hessian-vector product for each client.

    It is exact for one step on quadratics. Otherwise the error falls with eta^2.

    Args:
      loss_fn, params, population, step_size, num_steps, weighting, ids: as in `drift`.

    Returns: a pytree like `params`.

    Guarantees: The error falls with eta^2, and vanishes on quadratics for one step
    (tests/metrics/test_drift.py::test_logistic_remainders, ::test_closed_form).
    """
    eta, K = _checked(step_size, num_steps)
    ids = chosen(population, ids, weighting)
    mean_product, weight = _leading(loss_fn, params, population, ids, weighting == "uniform")
    check_weight(weight)
    return _scaled(-eta * K.astype(jnp.float32), mean_product)
