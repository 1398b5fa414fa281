"""Evaluation of a model: on a central test set, client by client on held-out data, and on the training clients."""

from __future__ import annotations

import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import tree, validate
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.types import Array, ClientData, Population, PyTree

__all__ = [
    "QUANTILES",
    "clients_at_once",
    "evaluation",
    "metric_sums",
    "objective",
    "per_client",
    "per_owner",
    "pooled",
]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BATCH = 256  # examples, or clients' rows, evaluated at once
TRAIN_BATCH = 1024  # rows of clients at once, of which only sums are kept


def metric_sums(loss_fn: Callable, params: PyTree, data: ClientData) -> dict[str, tuple]:
    """{metric: (weighted total, total weight)} of one client's valid rows, by the name of each per-example metric.

    Sums are float32 at least (tests/metrics/test_evaluation.py::test_metrics_of_16_bits). Rows are weighted by the loss
    function's "weight" if it returns one, otherwise alike; a metric that not every row
    has by its own, "auc" by "auc_weight" (tests/models/test_links.py::test_auc_of_graphs_that_have_one). The loss
    function is called with key None, which asks for its evaluation mode.
    """
    validate.loss_function(loss_fn)

    def masked(x):
        return jnp.where(data.mask.reshape(data.mask.shape + (1,) * (x.ndim - 1)), x, jnp.zeros_like(x))

    out = loss_fn(params, jax.tree.map(masked, data.examples), None)
    out = out if isinstance(out, dict) else {"loss": out}
    out = tree.widened(jax.tree.map(jnp.asarray, dict(out)))  # a sum of 16 bits stops growing
    own = {name: out.pop(f"{name}_weight") for name in [*out] if f"{name}_weight" in out}
    shared = out.pop("weight", 1.0)
    weights = {name: jnp.where(data.mask, own.get(name, shared), 0.0) for name in out}
    return {name: (jnp.where(data.mask, x * weights[name], 0.0).sum(), weights[name].sum()) for name, x in out.items()}


def clients_at_once(population: Population, count: int, most_rows: int) -> int:
    """How many of `count` clients, one at least, have at most so many rows together; clients may have none."""
    rows = jax.eval_shape(population.client, jnp.int32(0)).mask.shape[0]
    return max(1, min(count, most_rows // max(1, rows)))


def pooled(loss_fn: Callable, params: PyTree, examples: PyTree) -> dict[str, jax.Array]:
    """Means of the per-example metrics over a set of examples, leaves [n, ...]; traceable.

    The mean over all examples of all clients is the example-weighted mean of the clients' means
    (tests/metrics/test_evaluation.py::test_pooled_is_the_weighted_mean_of_clients).

    References: McMahan et al. 2017, section 1, F(w) = sum_i (n_i / n) F_i(w).
    """
    rows = jax.tree.leaves(examples)[0].shape[0]
    if not rows:
        validate.fail("test", "at least one example", 0, "Leave the test set out instead.")
    size = min(rows, BATCH)
    padding = -rows % size

    def batches(x):
        x = jnp.concatenate([x, jnp.zeros((padding, *x.shape[1:]), x.dtype)]) if padding else jnp.asarray(x)
        return x.reshape(-1, size, *x.shape[1:])

    data = ClientData(jax.tree.map(batches, examples), batches(jnp.ones(rows, bool)))
    sums = jax.lax.map(lambda batch: metric_sums(loss_fn, params, batch), data)
    return {name: total.sum() / weight.sum() for name, (total, weight) in sums.items()}


def per_client(loss_fn: Callable, params: PyTree, population: Population) -> dict[str, tuple]:
    """Per metric, ([N] weighted totals, [N] weights) of every client; traceable."""
    return _by_blocks(jax.vmap(lambda id: metric_sums(loss_fn, params, population.client(id))), population)


def per_owner(
    loss_fn: Callable, personal: Callable, state: PyTree, population: Population
) -> dict[str, tuple[Array, Array]]:
    """As `per_client`, but each client's own model is judged, of `Evaluated.personal`; traceable."""
    one = jax.vmap(lambda params, id: metric_sums(loss_fn, params, population.client(id)))
    return _by_blocks(lambda ids: one(personal(state, ids), ids), population)


def _success(metrics: dict[str, Array]) -> np.float32:
    if "accuracy" not in metrics:
        hint = "Attack success is the accuracy on triggered rows that are labelled as the target."
        validate.fail("loss_fn", 'a metric "accuracy"', sorted(metrics), hint)
    return np.float32(metrics["accuracy"])


def _by_blocks(block: Callable, population: Population) -> PyTree:
    """Leaves [N] of what `block` gives as leaves [n] for n ids, a few clients at a time."""
    lanes = clients_at_once(population, population.size, BATCH)
    blocks = -(-population.size // lanes)
    ids = jnp.minimum(jnp.arange(blocks * lanes, dtype=jnp.int32), population.size - 1).reshape(blocks, lanes)
    return jax.tree.map(lambda x: x.reshape(-1)[: population.size], jax.lax.map(block, ids))


def objective(loss_fn: Callable, params: PyTree, population: Population, ids: Array | None = None) -> dict[str, Array]:
    """Means of the per-example metrics over all examples of all clients, or of those in `ids` [n] int32; traceable.

    The mean of the loss is the global objective, the example-weighted mean of the clients' own. Clients are visited a
    few at a time and only exact sums are kept: memory does not grow with the population.

    Guarantees: equals a float64 loop over clients, whatever their number, to float32
    (tests/metrics/test_evaluation.py::test_the_objective_is_that_of_a_loop_over_clients), with losses that are not
    finite too (::test_losses_that_are_not_finite), in memory that does not grow
    (::test_memory_of_the_objective_is_flat).

    References: McMahan et al. 2017, section 1, F(w) = sum_i (n_i / n) F_i(w).
    """
    count = population.size if ids is None else len(ids)
    lanes = clients_at_once(population, count, TRAIN_BATCH)

    def one(place):
        id = jnp.minimum(place, count - 1)
        data = population.client(id if ids is None else ids[id])
        return metric_sums(loss_fn, params, data._replace(mask=data.mask & (place < count)))

    def block(i, carry):
        sums, infinite = carry
        found = jax.vmap(one)(i * lanes + jnp.arange(lanes, dtype=jnp.int32))
        finite = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), found)
        infinite = jax.tree.map(lambda total, x, y: total + (x - y).sum(), infinite, found, finite)
        return exact_sums.add(sums, finite), infinite

    spec = jax.eval_shape(one, jnp.int32(0))
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spec)
    sums, infinite = jax.lax.fori_loop(0, -(-count // lanes), block, (exact_sums.zeros(spec), nothing))
    sums = jax.tree.map(jnp.add, exact_sums.total(sums), infinite)  # exact sums know finite numbers and NaN only
    return {name: total / weight for name, (total, weight) in sums.items()}


def evaluation(
    loss_fn: Callable,
    *,
    test: PyTree | None = None,
    held_out: Population | None = None,
    train: Population | None = None,
    train_clients: int | None = None,
    seed: int = 0,
    local_test: Population | None = None,
    personal: Callable | None = None,
    triggered: PyTree | None = None,
) -> Callable:
    """params -> a record of metrics: `test_*` on a central test set, `held_out_*` over held-out clients, and `train_*`
    over the clients that are trained on; with personal models, (params, state) -> the same and `personal_*`.

    Args:
      loss_fn: (params, examples, key) -> per-example values; called with key None.
      test: examples, leaves [n, ...].
      held_out: a population; its metrics are pooled over examples, and their spread over clients is given as
        `held_out_<metric>_quantiles` at 5, 25, 50, 75 and 95 %; clients without examples are left out.
      train: the population of the run: `train_loss` is the global training objective (see `objective`). An evaluation
        costs one pass over all of its examples.
      train_clients: a sample of so many clients, in [1, N], in place of all: uniform without replacement, drawn once.
        The record then has their number, `train_sample_clients`, and `train_*` are the sample's means. Where a metric
        of the loss would take one of these names, it gets the prefix `metric_`, and the other `sample_` or `spread_`.
      seed: of that sample.
      local_test: the clients of the run with rows that they keep from training (`FederatedData.local_test`): the global
        model is judged on them as `local_test_*`, pooled and by quantiles over clients.
      personal: `Evaluated.personal`; each client's own model is then judged on its own rows, as `personal_*`.
      triggered: examples with a backdoor's trigger, labelled as the attacker wants (`FederatedData.triggered`): their
        accuracy is `attack_success`, the share of them that the model takes for the target.

    Guarantees: equals a float64 loop over clients (tests/metrics/test_evaluation.py::test_matches_a_loop_over_clients,
    ::test_the_objective_is_that_of_a_loop_over_clients); a personal model meets its owner's rows
    (tests/population/test_own_test_rows.py::test_personal_models_are_judged_by_their_owners_rows); attack success is
    NumPy's share (tests/population/poisoned/test_backdoors.py::test_attack_success_against_numpy).
    """
    ids = None
    if train_clients is not None:
        if train is None:
            validate.fail("train_clients", "the clients to choose from", None, "Give train, the run's population.")
        validate.integer("train_clients", train_clients, 1, train.size)
        ids = jnp.array(sorted(random.Random(seed).sample(range(train.size), train_clients)), jnp.int32)

    validate.loss_function(loss_fn)

    if personal is not None and local_test is None:
        hint = "Give local_test: rows that clients keep from training (population.with_local_test)."
        validate.fail("personal", "rows to judge personal models by", None, hint)

    @jax.jit
    def measure(params, state, test, held_out, train, ids, local_test, triggered):
        central = {} if test is None else pooled(loss_fn, params, test)
        fooled = {} if triggered is None else pooled(loss_fn, params, triggered)
        trained = {} if train is None else objective(loss_fn, params, train, ids)
        clients = {
            "held_out": {} if held_out is None else per_client(loss_fn, params, held_out),
            "local_test": {} if local_test is None else per_client(loss_fn, params, local_test),
            "personal": {} if personal is None else per_owner(loss_fn, personal, state, local_test),
        }
        return central, clients, trained, fooled

    def evaluated(params: PyTree, state: PyTree) -> dict:
        found = measure(params, state, test, held_out, train, ids, local_test, triggered)
        central, clients, trained, fooled = jax.device_get(found)
        values = {f"test_{name}": np.float32(value) for name, value in central.items()}
        values |= {f"train_{name}": np.float32(value) for name, value in trained.items()}
        if triggered is not None:
            values["attack_success"] = _success(fooled)
        sample, quantiles = {} if ids is None else {"train_sample_clients": train_clients}, {}
        for who, metrics in clients.items():
            for name, (totals, weights) in metrics.items():
                totals, weights = np.asarray(totals, np.float64), np.asarray(weights, np.float64)
                values[f"{who}_{name}"] = np.float32(totals.sum() / weights.sum() if weights.sum() else np.nan)
                present = weights > 0
                if present.any():
                    with np.errstate(invalid="ignore"):  # a diverged model: the quantiles are then nan, and say so
                        spread = np.quantile(totals[present] / weights[present], QUANTILES)
                    quantiles[f"{who}_{name}_quantiles"] = np.float32(spread)
        return tree.joined_metrics({"metric": values, "sample": sample, "spread": quantiles})

    if personal is None:
        return lambda params: evaluated(params, ())
    return lambda params, state: evaluated(params, state)
