"""How much clients' gradients differ at one model: dissimilarity, variance, diversity, for any population and loss.

With g_i = grad f_i(w), shares p_i and grad F = sum p_i g_i. Two passes over the clients, first for grad F, then for the
squares: so a small variance is no difference of large numbers, and nothing of size [N, d] is held.
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

__all__ = ["GradientHeterogeneity", "GradientMoments", "gradient_heterogeneity", "gradient_moments"]

MAX_DIMENSION = 4096  # of matrices [d, d]


class GradientHeterogeneity(NamedTuple):
    """How alike the clients' gradients are at one model."""

    gradient: PyTree  # grad F(w)
    gradient_norm: float  # |grad F|
    dissimilarity: float  # (1/N) sum |g_i - grad F|^2, unweighted: the FedProx code's "gradient difference"
    variance: float  # sum p_i |g_i - grad F|^2: sigma^2 of client sampling
    mean_square: float  # sum p_i |g_i|^2 = variance + gradient_norm^2
    num_clients: int  # with examples
    weighed_square: float  # sum |p_i g_i|^2

    @property
    def b_dissimilarity(self) -> float:
        """B(w) = sqrt(sum p_i |g_i|^2 / |grad F|^2) >= 1 (Li et al. 2020, FedProx, definition 3)."""
        return math.sqrt(1 + self.noise_to_signal)

    @property
    def diversity(self) -> float:
        """sum_i |p_i g_i|^2 / |sum p_i g_i|^2, at least 1/N (all equal): Yin et al. 2018, definition 1."""
        if self.gradient_norm > 0:
            return self.weighed_square / self.gradient_norm**2
        return math.inf if self.variance > 0 else 1 / self.num_clients

    @property
    def noise_to_signal(self) -> float:
        """sigma^2 / |grad F|^2: for a cohort of this size, drawn with replacement, the noise equals the signal."""
        if self.gradient_norm > 0:
            return self.variance / self.gradient_norm**2
        return math.inf if self.variance > 0 else 0.0


def _square(x: PyTree) -> Array:
    return sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(x))


@partial(jax.jit, static_argnums=0)
def _statistics(loss_fn, params, population, ids, uniform):
    def slope(data):
        weight = weight_of(loss_fn, params, data, uniform)
        return weight, jax.grad(lambda p: risk(loss_fn, p, data)[0])(params)

    gradient, _ = mean_over_clients(slope, params, population, ids)

    def squares(data):
        weight, own = slope(data)
        away = jnp.where(weight > 0, _square(tree.subtract(own, gradient)), 0)
        square = jnp.where(weight > 0, _square(own), 0)
        there = (weight > 0).astype(weight.dtype)
        sums = {"n": there, "weight": weight, "away": away, "weighed": weight * away, "square": weight * square}
        return sums | {"own": weight**2 * square}

    sums = sum_over_clients(squares, params, population, ids)
    return gradient, _square(gradient), sums


def gradient_heterogeneity(
    loss_fn: Callable, params: PyTree, population: Population, *, weighting: str = "examples", ids: Any = None
) -> GradientHeterogeneity:
    """Dissimilarity, variance and diversity of the clients' full-batch gradients at one model.

    Args:
      loss_fn: (params, examples, key) -> losses [n], or a dict with "loss"; called with key None.
      population: any; visited a few clients at a time, twice.
      weighting: "examples" or "uniform": the shares p_i.
      ids: clients to look at; default: all.

    Returns: `GradientHeterogeneity`, of Python floats but for the gradient.

    Guarantees: equal to a float64 loop over clients (tests/metrics/test_heterogeneity.py::test_gradients_of_a_loop);
    the FedProx authors' definition (::test_dissimilarity_is_the_fedprox_codes); 10^5 clients (::test_many_clients).

    References: Li et al. 2020 (FedProx), definition 3 and section 5.3.3; Yin et al. 2018, definition 1.

    >>> from fedjax_sim.population import quadratic_loss, quadratic_population
    >>> population = quadratic_population([1.0, 1.0], [0.0, 4.0])
    >>> found = gradient_heterogeneity(quadratic_loss, {"w": jnp.ones(1)}, population)
    >>> found.dissimilarity, found.gradient_norm, round(found.diversity, 6)
    (4.0, 1.0, 2.5)
    """
    ids = chosen(population, ids, weighting)
    gradient, square, sums = _statistics(loss_fn, params, population, ids, weighting == "uniform")
    check_weight(sums["weight"])
    square, sums = float(square), {name: float(value) for name, value in sums.items()}
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
    """Gradient, Hessian and gradients' covariances at one model, as `theory.budget_from_moments` reads them."""

    gradient: np.ndarray  # [d] grad F
    hessian: np.ndarray  # [d, d] of F
    client_covariance: np.ndarray  # [d, d] sum p_i (g_i - grad F)(g_i - grad F)^T
    example_covariance: np.ndarray  # [d, d] sum p_i Cov(one example's gradient within client i)


@partial(jax.jit, static_argnums=0)
def _moments(loss_fn, params, population, ids, uniform):
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    like = jax.ShapeDtypeStruct((flat.size, flat.size), flat.dtype)

    def slope(w, data):
        return jax.grad(lambda v: risk(loss_fn, unravel(v), data)[0])(w)

    def first(data):
        def row(unit):  # H e = grad <grad f, e>
            return jax.grad(lambda w: jnp.vdot(slope(w, data), unit))(flat)

        own = slope(flat, data), jax.lax.map(row, jnp.eye(flat.size, dtype=flat.dtype))
        return weight_of(loss_fn, params, data, uniform), own

    (gradient, hessian), weight = mean_over_clients(first, like, population, ids)

    def second(data):
        own = slope(flat, data)
        weights = jax.vmap(lambda x, there: risk(loss_fn, params, one(x, there))[1])(data.examples, data.mask)
        each = jax.vmap(lambda x, there: slope(flat, one(x, there)))(data.examples, data.mask)
        inside = jnp.where(weights[:, None] > 0, each - own[None, :], 0)
        total = jnp.maximum(weights.sum(), jnp.finfo(weights.dtype).tiny)
        away = own - gradient
        values = jnp.outer(away, away), (inside * (weights / total)[:, None]).T @ inside
        return weight_of(loss_fn, params, data, uniform), values

    def one(x, there):
        return ClientData(jax.tree.map(lambda leaf: leaf[None], x), there[None])

    return weight, gradient, hessian, *mean_over_clients(second, like, population, ids)[0]


def gradient_moments(
    loss_fn: Callable, params: PyTree, population: Population, *, weighting: str = "examples", ids: Any = None
) -> GradientMoments:
    """Gradient, Hessian, and the covariances of gradients over clients and over a client's examples.

    Args: as for `gradient_heterogeneity`; d at most 4,096, in the order of `jax.flatten_util.ravel_pytree`.
      `theory.budget_from_moments` takes those of weighting="uniform": of clients with equal shares.

    Guarantees: equal to a float64 loop over clients and examples
    (tests/metrics/test_heterogeneity.py::test_moments_of_a_loop).

    >>> from fedjax_sim.population import quadratic_loss, quadratic_population
    >>> population = quadratic_population([1.0, 3.0], [0.0, 4.0])
    >>> found = gradient_moments(quadratic_loss, {"w": jnp.ones(1)}, population)
    >>> print(found.hessian, found.client_covariance)
    [[2.]] [[25.]]
    """
    validate.integer("dimension", tree.num_values(params), 1, MAX_DIMENSION, hint="A Hessian has d^2 numbers.")
    ids = chosen(population, ids, weighting)
    weight, *out = _moments(loss_fn, params, population, ids, weighting == "uniform")
    check_weight(weight)
    gradient, hessian, clients, examples = (np.asarray(x, np.float64) for x in out)
    return GradientMoments(gradient, (hessian + hessian.T) / 2, clients, examples)
