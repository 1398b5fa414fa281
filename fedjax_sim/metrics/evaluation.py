"""Evaluation of a model: on a central test set, and client by client on held-out clients."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.types import ClientData, Population, PyTree

__all__ = ["QUANTILES", "evaluation", "per_client", "pooled"]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BATCH = 256  # examples, or clients' rows, evaluated at once


def _sums(loss_fn: Callable, params: PyTree, data: ClientData) -> dict[str, tuple]:
    """(weighted total, weight) of every per-example metric over the valid rows."""

    def masked(x):
        return jnp.where(data.mask.reshape(data.mask.shape + (1,) * (x.ndim - 1)), x, jnp.zeros_like(x))

    out = loss_fn(params, jax.tree.map(masked, data.examples), None)
    out = dict(out) if isinstance(out, dict) else {"loss": out}
    weights = jnp.where(data.mask, out.pop("weight", 1.0), 0.0)
    return {name: (jnp.where(data.mask, x * weights, 0.0).sum(), weights.sum()) for name, x in out.items()}


def pooled(loss_fn: Callable, params: PyTree, examples: PyTree) -> dict[str, jax.Array]:
    """Means of the per-example metrics over a set of examples, leaves [n, ...]; traceable.

    The mean over all examples of all clients is the example-weighted mean of the clients' means
    (tests/metrics/test_evaluation.py::test_pooled_is_the_weighted_mean_of_clients).

    References: McMahan et al. 2017, section 1, F(w) = sum_i (n_i / n) F_i(w).
    """
    rows = jax.tree.leaves(examples)[0].shape[0]
    if not rows:
        raise ValueError("test: expected at least one example, got 0. Leave the test set out instead.")
    size = min(rows, BATCH)
    padding = -rows % size

    def batches(x):
        x = jnp.concatenate([x, jnp.zeros((padding, *x.shape[1:]), x.dtype)]) if padding else jnp.asarray(x)
        return x.reshape(-1, size, *x.shape[1:])

    data = ClientData(jax.tree.map(batches, examples), batches(jnp.ones(rows, bool)))
    sums = jax.lax.map(lambda batch: _sums(loss_fn, params, batch), data)
    return {name: total.sum() / weight.sum() for name, (total, weight) in sums.items()}


def per_client(loss_fn: Callable, params: PyTree, population: Population) -> dict[str, tuple]:
    """Per metric, ([N] weighted totals, [N] weights) of every client; traceable."""
    rows = jax.eval_shape(population.client, jnp.int32(0)).mask.shape[0]
    lanes = max(1, min(population.size, BATCH // rows))
    blocks = -(-population.size // lanes)
    ids = jnp.minimum(jnp.arange(blocks * lanes, dtype=jnp.int32), population.size - 1).reshape(blocks, lanes)
    one = jax.vmap(lambda id: _sums(loss_fn, params, population.client(id)))
    return jax.tree.map(lambda x: x.reshape(-1)[: population.size], jax.lax.map(one, ids))


def evaluation(loss_fn: Callable, *, test: PyTree | None = None, held_out: Population | None = None) -> Callable:
    """params -> a record of `test_*` metrics on a central test set and `held_out_*` metrics over held-out clients.

    Args:
      loss_fn: (params, examples, key) -> per-example values; called with key None.
      test: examples, leaves [n, ...].
      held_out: a population; its metrics are pooled over examples, and their spread over clients is given as
        `held_out_<metric>_quantiles` at 5, 25, 50, 75 and 95 %; clients without examples are left out.

    Guarantees: equals a float64 loop over clients (tests/metrics/test_evaluation.py::test_matches_a_loop_over_clients).
    """

    @jax.jit
    def measure(params, test, held_out):
        central = {} if test is None else pooled(loss_fn, params, test)
        return central, {} if held_out is None else per_client(loss_fn, params, held_out)

    def evaluate(params: PyTree) -> dict:
        central, clients = jax.device_get(measure(params, test, held_out))
        record = {f"test_{name}": np.float32(value) for name, value in central.items()}
        for name, (totals, weights) in clients.items():
            totals, weights = np.asarray(totals, np.float64), np.asarray(weights, np.float64)
            record[f"held_out_{name}"] = np.float32(totals.sum() / weights.sum() if weights.sum() else np.nan)
            present = weights > 0
            if present.any():
                with np.errstate(invalid="ignore"):  # a diverged model: the quantiles are then nan, and say so
                    spread = np.quantile(totals[present] / weights[present], QUANTILES)
                record[f"held_out_{name}_quantiles"] = np.float32(spread)
        return record

    return evaluate
