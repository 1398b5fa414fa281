"""This module sums over the clients of a population, a few clients at a time. No array [N, d] is ever held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fedjax_sim import tree, validate
from fedjax_sim.metrics.evaluation import clients_at_once, metric_sums
from fedjax_sim.types import Array, ClientData, Population, PyTree

WEIGHTINGS = ("examples", "uniform")
MAX_VMAPPED_EXAMPLES = 1024  # the most examples under one vmap
VALUES = 1 << 22  # the most array elements in the results of the clients under one vmap


def risk(loss_fn: Callable, params: PyTree, data: ClientData) -> tuple[Array, Array]:
    """Computes a client's mean loss over its own examples, and the weight of that mean.

    Args:
      loss_fn: (params, examples, key) -> losses [n], or a dict with "loss".
      params: the model.
      data: one client's examples and mask.

    Returns: (f_i(params), number or total weight of the examples), two scalars. f_i is 0 for a client without examples.
    """
    total, weight = metric_sums(loss_fn, params, data)["loss"]
    return total / jnp.where(weight > 0, weight, 1), weight


def weight_of(loss_fn: Callable, params: PyTree, data: ClientData, uniform: Array | bool) -> Array:
    """Returns a client's weight in a mean: the number or total weight of its examples.

    If `uniform`, the weight is 1 for a client with examples.

    Args:
      loss_fn, params, data: as in `risk`.
      uniform: [] bool; it may be traced.
    """
    # A weight may depend on the parameters through the loss function; derivatives of it are not wanted.
    weight = jax.lax.stop_gradient(risk(loss_fn, params, data)[1])
    return jnp.where(uniform, (weight > 0).astype(weight.dtype), weight)


def chosen(population: Population, ids: Any, weighting: str) -> Array:
    """Checks the ids of the clients to visit, and returns them as [n] int32.

    Args:
      population: any.
      ids: integers in [0, N); None = all clients.
      weighting: "examples" or "uniform"; checked here too.
    """
    validate.one_of("weighting", weighting, WEIGHTINGS, hint="'examples' counts a client by its examples.")
    if ids is None:
        return jnp.arange(population.size, dtype=jnp.int32)
    ids = np.asarray(ids)
    is_vector = ids.ndim == 1 and ids.size and ids.dtype.kind in "iu"
    if not is_vector or not ((ids >= 0) & (ids < population.size)).all():
        validate.fail("ids", f"integers in [0, {population.size})", ids)
    return jnp.asarray(ids, jnp.int32)


def sum_over_clients(each: Callable, like: PyTree, population: Population, ids: Array) -> PyTree:
    """Computes the sum over clients of `each`(client i's data), with leaves [...]; traceable.

    Args:
      each: ClientData -> pytree of arrays. Padding has weight zero, so `each` must return weighted values.
      like: a pytree as large as the result for one client, which bounds the number of clients at once.
      population: any.
      ids: [n] int32 clients.
    """
    lanes = min(
        clients_at_once(population, ids.size, MAX_VMAPPED_EXAMPLES), max(1, VALUES // max(1, tree.num_values(like)))
    )
    # The last block is filled up with client 0, whose copies are masked out below.
    padding = -ids.size % lanes
    blocks = jnp.concatenate([ids, jnp.zeros(padding, jnp.int32)]).reshape(-1, lanes)
    is_real = (jnp.arange(ids.size + padding) < ids.size).reshape(-1, lanes)

    def of_client(id, is_present):
        data = population.client(id)
        return each(data._replace(mask=data.mask & is_present))

    def sum_of_block(batch):
        return jax.tree.map(lambda leaf: leaf.sum(0), jax.vmap(of_client)(*batch))

    def block(carry, batch):
        totals, compensation = carry
        # Kahan's compensated summation, because a float32 sum of 10^5 addends would lose digits.
        addends = jax.tree.map(jnp.subtract, sum_of_block(batch), compensation)
        new_totals = jax.tree.map(jnp.add, totals, addends)
        # What rounding has added to the totals; the next block subtracts it.
        new_compensation = jax.tree.map(
            lambda new_total, total, addend: (new_total - total) - addend, new_totals, totals, addends
        )
        return (new_totals, new_compensation), None

    zeros = tree.zeros_like(jax.eval_shape(sum_of_block, (blocks[0], is_real[0])))
    return jax.lax.scan(block, (zeros, zeros), (blocks, is_real))[0][0]


def mean_over_clients(each: Callable, like: PyTree, population: Population, ids: Array) -> tuple[PyTree, Array]:
    """Computes the weighted mean over clients and the total weight; traceable.

    Args:
      each: ClientData -> (w_i, x_i); x_i is ignored if w_i is 0.
      like, population, ids: as in `sum_over_clients`.
    """

    def weighted(data):
        weight, values = each(data)
        # Values of clients without examples may be NaN, so they are replaced and not only multiplied by 0.
        return weight, jax.tree.map(lambda x: jnp.where(weight > 0, weight * x, 0), values)

    weight, sums = sum_over_clients(weighted, like, population, ids)
    return jax.tree.map(lambda x: x / weight, sums), weight


def check_weight(weight: Array) -> None:
    """Raises ValueError for a total weight of zero, which means that no client has examples.

    Traced weights have no value yet and are not checked.
    """
    if not isinstance(weight, Tracer) and not float(weight) > 0:
        validate.fail("population", "a client with examples", 0)
