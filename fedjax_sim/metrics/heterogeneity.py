"""This module measures how much clients' gradients differ at one model, for any population and loss.

Notation: g_i = grad f_i(w), shares p_i, and grad F = sum p_i g_i. Two passes over the clients are made, first for grad
F and then for the squares. So a small variance is no difference of large numbers, and no array [N, d] is held.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

from fedjax_sim import tree, validate
from fedjax_sim.metrics.clients import check_weight, chosen, mean_over_clients, risk, sum_over_clients, weight_of
from fedjax_sim.types import Array, ClientData, Population, PyTree

MAX_DIMENSION = 4096  # the largest d of matrices [d, d]


class GradientHeterogeneity(NamedTuple):
    """Measures of how alike the clients' gradients are at one model."""

    gradient: PyTree  # grad F(w)
    gradient_norm: float  # |grad F|
    dissimilarity: float  # (1/N) sum |g_i - grad F|^2, unweighted: the FedProx code's "gradient difference"
    variance: float  # sum p_i |g_i - grad F|^2: sigma^2 of client sampling
    mean_square: float  # sum p_i |g_i|^2 = variance + gradient_norm^2
    num_clients: int  # number of clients that have examples
    weighed_square: float  # sum |p_i g_i|^2

    @property
    def b_dissimilarity(self) -> float:
        """B(w) = sqrt(sum p_i |g_i|^2 / |grad F|^2) >= 1 (Li et al. 2020, FedProx, definition 3)."""
        return math.sqrt(1 + self.noise_to_signal)

    @property
    def diversity(self) -> float:
        """sum_i |p_i g_i|^2 / |sum p_i g_i|^2 (Yin et al. 2018, definition 1).

        It is at least 1/N, which it is if all gradients are equal.
        """
        if self.gradient_norm > 0:
            return self.weighed_square / self.gradient_norm**2
        return math.inf if self.variance > 0 else 1 / self.num_clients

    @property
    def noise_to_signal(self) -> float:
        """sigma^2 / |grad F|^2: with a cohort of this size, drawn with replacement, the noise equals the signal."""
        if self.gradient_norm > 0:
            return self.variance / self.gradient_norm**2
        return math.inf if self.variance > 0 else 0.0


def _square(x: PyTree) -> Array:
    """Computes the squared norm over all leaves."""
    return jnp.asarray(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(x)))


@partial(jax.jit, static_argnums=0)
def _statistics(
    loss_fn: Callable, params: PyTree, population: Population, ids: Array, uniform: bool
) -> tuple[PyTree, Array, dict[str, Array]]:
    """Computes grad F, |grad F|^2 and sums over clients, in two passes.

    Args:
      loss_fn: as in `gradient_heterogeneity`; static.
      params: the model, w.
      population: any.
      ids: [n] int32 clients.
      uniform: whether w_i is 1 for each client with examples; otherwise w_i is the number of its examples, or their
        total weight.

    Returns: grad F = sum w_i g_i / sum w_i, like params; |grad F|^2 []; and the sums [] over clients with w_i > 0

        n         sum 1                            weighed   sum w_i |g_i - grad F|^2
        weight    sum w_i                          square    sum w_i |g_i|^2
        away      sum |g_i - grad F|^2             own       sum w_i^2 |g_i|^2
    """

    def gradient_of(data):
        weight = weight_of(loss_fn, params, data, uniform)
        return weight, jax.grad(lambda point: risk(loss_fn, point, data)[0])(params)

    gradient, _ = mean_over_clients(gradient_of, params, population, ids)

    def squares(data):
        weight, client_gradient = gradient_of(data)
        # Gradients of clients without examples may be NaN, so they are replaced, not only weighted by 0.
        squared_deviation = jnp.where(weight > 0, _square(tree.subtract(client_gradient, gradient)), 0)
        square = jnp.where(weight > 0, _square(client_gradient), 0)
        has_examples = (weight > 0).astype(weight.dtype)
        sums = {
            "n": has_examples,
            "weight": weight,
            "away": squared_deviation,
            "weighed": weight * squared_deviation,
            "square": weight * square,
        }
        return sums | {"own": weight**2 * square}

    sums = sum_over_clients(squares, params, population, ids)
    return gradient, _square(gradient), sums


def gradient_heterogeneity(
    loss_fn: Callable, params: PyTree, population: Population, *, weighting: str = "examples", ids: Any = None
) -> GradientHeterogeneity:
    """Measures dissimilarity, variance and diversity of the clients' full-batch gradients at one model.

    Args:
      loss_fn: (params, examples, key) -> losses [n], or a dict with "loss"; called with key None.
      params: the model, w.
      population: any; it is visited twice, a few clients at a time.
      weighting: "examples" or "uniform", which gives the shares p_i.
      ids: the clients to visit; None = all.

    Returns: `GradientHeterogeneity`, whose fields are Python floats except the gradient.

    Guarantees: The measures equal a float64 loop over clients
    (tests/metrics/test_heterogeneity.py::test_gradients_of_a_loop). The dissimilarity is that of the FedProx authors'
    code (::test_dissimilarity_is_the_fedprox_codes). 10^5 clients are possible (::test_many_clients).

    References: Li et al. 2020 (FedProx), definition 3 and section 5.3.3; Yin et al. 2018, definition 1.

    >>> from fedjax_sim.population import quadratic_loss, quadratic_population
    >>> population = quadratic_population([1.0, 1.0], [0.0, 4.0])
    >>> measured = gradient_heterogeneity(quadratic_loss, {"w": jnp.ones(1)}, population)
    >>> measured.dissimilarity, measured.gradient_norm, round(measured.diversity, 6)
    (4.0, 1.0, 2.5)
    """
    ids = chosen(population, ids, weighting)
    gradient, square, sums = _statistics(loss_fn, params, population, ids, weighting == "uniform")
    check_weight(sums["weight"])
    square = float(square)
    sums = {name: float(value) for name, value in sums.items()}
    return GradientHeterogeneity(
        gradient=gradient,
        gradient_norm=math.sqrt(square),
        dissimilarity=sums["away"] / sums["n"],
        variance=sums["weighed"] / sums["weight"],
        mean_square=sums["square"] / sums["weight"],
        num_clients=int(sums["n"]),
        weighed_square=sums["own"] / sums["weight"] ** 2,
    )


class GradientMoments(NamedTuple):
    """Gradient, Hessian and covariances of gradients at one model, as `theory.budget_from_moments` takes them."""

    gradient: np.ndarray  # [d] grad F
    hessian: np.ndarray  # [d, d] of F
    client_covariance: np.ndarray  # [d, d] sum p_i (g_i - grad F)(g_i - grad F)^T
    example_covariance: np.ndarray  # [d, d] sum p_i times the covariance of example gradients within client i


@partial(jax.jit, static_argnums=0)
def _moments(
    loss_fn: Callable, params: PyTree, population: Population, ids: Array, uniform: bool
) -> tuple[Array, Array, Array, Array, Array]:
    """Computes the moments of `GradientMoments`, in two passes.

    With p_i = w_i / sum w_i, example j of client i has the gradient g_ij and the share p_ij of the client's weight:

        client covariance    sum_i p_i (g_i - grad F)(g_i - grad F)^T
        example covariance   sum_i p_i sum_j p_ij (g_ij - g_i)(g_ij - g_i)^T

    Args:
      loss_fn: as in `gradient_moments`; static.
      params: the model, w, with d numbers in all.
      population: any.
      ids: [n] int32 clients.
      uniform: as in `_statistics`.

    Returns: the total weight sum w_i [], grad F [d], the Hessian of F [d, d], and both covariances [d, d]. Coordinates
      are in the order of `ravel_pytree`.
    """
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    # One client's result is a matrix [d, d], which bounds how many clients are computed at once.
    like = jax.ShapeDtypeStruct((flat.size, flat.size), flat.dtype)

    def gradient_of(flat_params, data):
        return jax.grad(lambda point: risk(loss_fn, unravel(point), data)[0])(flat_params)

    def mean_of_client(data):
        def row(unit):
            """Computes a row of the Hessian: H e = grad <grad f, e>."""
            return jax.grad(lambda point: jnp.vdot(gradient_of(point, data), unit))(flat)

        moments = gradient_of(flat, data), jax.lax.map(row, jnp.eye(flat.size, dtype=flat.dtype))
        return weight_of(loss_fn, params, data, uniform), moments

    (gradient, hessian), weight = mean_over_clients(mean_of_client, like, population, ids)

    def covariances_of_client(data):
        client_gradient = gradient_of(flat, data)
        weights = jax.vmap(lambda example, is_real: risk(loss_fn, params, single_example(example, is_real))[1])(
            data.examples, data.mask
        )
        example_gradients = jax.vmap(lambda example, is_real: gradient_of(flat, single_example(example, is_real)))(
            data.examples, data.mask
        )
        deviations = jnp.where(weights[:, None] > 0, example_gradients - client_gradient[None, :], 0)
        # The smallest float avoids 0 / 0 for a client whose examples all have weight 0.
        total = jnp.maximum(weights.sum(), jnp.finfo(weights.dtype).tiny)
        offset = client_gradient - gradient
        values = jnp.outer(offset, offset), (deviations * (weights / total)[:, None]).T @ deviations
        return weight_of(loss_fn, params, data, uniform), values

    # A client with a single example, so that `risk` gives the example's own loss and weight.
    def single_example(example, is_real):
        return ClientData(jax.tree.map(lambda leaf: leaf[None], example), is_real[None])

    return weight, gradient, hessian, *mean_over_clients(covariances_of_client, like, population, ids)[0]


def gradient_moments(
    loss_fn: Callable, params: PyTree, population: Population, *, weighting: str = "examples", ids: Any = None
) -> GradientMoments:
    """Measures gradient, Hessian, and covariances of gradients over clients and over a client's examples.

    Args:
      loss_fn, params, population, weighting, ids: as in `gradient_heterogeneity`. The model has at most d = 4,096
        parameters.

    Returns: `GradientMoments`, with coordinates in the order of `jax.flatten_util.ravel_pytree`.
    `theory.budget_from_moments` takes the moments of weighting="uniform", where clients have equal shares.

    Guarantees: The moments equal a float64 loop over clients and examples
    (tests/metrics/test_heterogeneity.py::test_moments_of_a_loop).

    >>> from fedjax_sim.population import quadratic_loss, quadratic_population
    >>> population = quadratic_population([1.0, 3.0], [0.0, 4.0])
    >>> moments = gradient_moments(quadratic_loss, {"w": jnp.ones(1)}, population)
    >>> print(moments.hessian, moments.client_covariance)
    [[2.]] [[25.]]
    """
    validate.integer("dimension", tree.num_values(params), 1, MAX_DIMENSION, hint="A Hessian has d^2 numbers.")
    ids = chosen(population, ids, weighting)
    weight, *out = _moments(loss_fn, params, population, ids, weighting == "uniform")
    check_weight(weight)
    gradient, hessian, clients, examples = (np.asarray(x, np.float64) for x in out)
    # Rounding makes the computed Hessian slightly asymmetric.
    return GradientMoments(gradient, (hessian + hessian.T) / 2, clients, examples)
