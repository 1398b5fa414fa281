"""Sums over the clients of a population, a few at a time: nothing of size [N, d] is ever held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import tree, validate
from fedjax_sim.metrics.evaluation import clients_at_once, metric_sums
from fedjax_sim.types import Array, ClientData, Population, PyTree

__all__ = ["WEIGHTINGS", "check_weight", "chosen", "mean_over_clients", "risk", "sum_over_clients", "weight_of"]

WEIGHTINGS = ("examples", "uniform")
ROWS = 1024  # examples under one vmap, at most
VALUES = 1 << 22  # numbers in their gradients, at most


def risk(loss_fn: Callable, params: PyTree, data: ClientData) -> tuple[Array, Array]:
    """(f_i(params), its weight): a client's mean loss over its own examples, and their number or total weight."""
    total, weight = metric_sums(loss_fn, params, data)["loss"]
    return total / jnp.where(weight > 0, weight, 1), weight


def weight_of(loss_fn: Callable, params: PyTree, data: ClientData, uniform: Array) -> Array:
    """A client's weight in a mean: its examples, or, where `uniform`, 1 if it has any."""
    weight = jax.lax.stop_gradient(risk(loss_fn, params, data)[1])
    return jnp.where(uniform, (weight > 0).astype(weight.dtype), weight)


def chosen(population: Population, ids: Any, weighting: str) -> Array:
    """[n] int32 ids, checked; None stands for all clients. Checks `weighting` too."""
    validate.one_of("weighting", weighting, WEIGHTINGS, hint="'examples' counts a client by its examples.")
    if ids is None:
        return jnp.arange(population.size, dtype=jnp.int32)
    ids = np.asarray(ids)
    fits = ids.ndim == 1 and ids.size and ids.dtype.kind in "iu"
    if not fits or not ((ids >= 0) & (ids < population.size)).all():
        validate.fail("ids", f"integers in [0, {population.size})", ids)
    return jnp.asarray(ids, jnp.int32)


def sum_over_clients(each: Callable, like: PyTree, population: Population, ids: Array) -> PyTree:
    """sum_i each(client i's data), as [..., leaves]; traceable.

    Args:
      each: ClientData -> pytree of arrays; padding has weight zero, so it must return weighted values.
      like: a pytree as large as what one client computes, which bounds the number of clients at once.
    """
    lanes = min(clients_at_once(population, ids.size, ROWS), max(1, VALUES // max(1, tree.num_values(like))))
    padding = -ids.size % lanes
    blocks = jnp.concatenate([ids, jnp.zeros(padding, jnp.int32)]).reshape(-1, lanes)
    real = (jnp.arange(ids.size + padding) < ids.size).reshape(-1, lanes)

    def one(id, there):
        data = population.client(id)
        return each(data._replace(mask=data.mask & there))

    def total(there):
        return jax.tree.map(lambda x: x.sum(0), jax.vmap(one)(*there))

    def block(carry, batch):
        totals, lost = carry
        addends = jax.tree.map(jnp.subtract, total(batch), lost)  # Kahan: 10^5 addends would lose digits
        new = jax.tree.map(jnp.add, totals, addends)
        return (new, jax.tree.map(lambda n, t, x: (n - t) - x, new, totals, addends)), None

    zeros = tree.zeros_like(jax.eval_shape(total, (blocks[0], real[0])))
    return jax.lax.scan(block, (zeros, zeros), (blocks, real))[0][0]


def mean_over_clients(each: Callable, like: PyTree, population: Population, ids: Array) -> tuple[PyTree, Array]:
    """(sum_i w_i x_i / sum_i w_i, sum_i w_i), where `each`(client i's data) returns (w_i, x_i)."""

    def weighted(data):
        weight, values = each(data)
        return weight, jax.tree.map(lambda x: jnp.where(weight > 0, weight * x, 0), values)

    weight, sums = sum_over_clients(weighted, like, population, ids)
    return jax.tree.map(lambda x: x / weight, sums), weight


def check_weight(weight: Array) -> None:
    """Raises ValueError for a total weight of zero: nobody has examples. Traced weights are not checked."""
    if not isinstance(weight, jax.core.Tracer) and not float(weight) > 0:
        validate.fail("population", "a client with examples", 0)
