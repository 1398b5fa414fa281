"""This module evaluates a model: on a central test set, client by client, and on the training clients."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim import tree, validate
from fedjax_sim.engine import constants
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.engine.jaxpr import Program
from fedjax_sim.metrics.fairness import highest_decile, lowest_decile
from fedjax_sim.metrics.score_metrics import ScoreMetric
from fedjax_sim.types import Array, ClientData, ParamsKind, Population, PyTree, RowsOfTable, Scores

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
MOST_LISTED = 1000  # clients of a population whose results are returned one by one
BATCH = 256  # the most examples, or rows of clients, that are evaluated at once
ADAPT_SEED = 0  # of the keys of `Evaluated.adapt`
TRAIN_BATCH = 1024  # the most rows of training clients at once; only sums are kept


def metric_sums(loss_fn: Callable, params: PyTree, data: ClientData) -> dict[str, tuple]:
    """Sums each per-example metric over one client's valid rows: {metric: (weighted total, total weight)}.

    Rows are weighted by the loss function's "weight", if it returns one; otherwise all rows have weight 1. A metric
    that not every row has is weighted by its own weight, for example "auc" by "auc_weight"
    (tests/models/test_links.py::test_auc_of_graphs_that_have_one). The loss function is called with key None, which
    asks for its evaluation mode. Sums are at least float32 (tests/metrics/test_evaluation.py::test_metrics_of_16_bits).

    Args:
      loss_fn: (params, examples, key) -> losses [n], or a dict of per-example metrics with "loss".
      params: the model.
      data: one client's examples and mask.
    """
    return _sums(_of_rows(loss_fn, params, data)[0])


def _sums(of_rows: dict[str, tuple]) -> dict[str, tuple]:
    """Returns the sums of values and weights [n] by metric."""
    return {name: (values.sum(), weights.sum()) for name, (values, weights) in of_rows.items()}


def _of_rows(
    loss_fn: Callable, params: PyTree, data: ClientData
) -> tuple[dict[str, tuple[Array, Array]], Scores | None]:
    """Computes each per-example metric v at each row j, weighted: w_j v_j and w_j.

    Args:
      loss_fn, params: as in `metric_sums`.
      data: one client's examples, leaves [n, ...], and its mask [n].

    Returns: metric -> (w_j v_j [n], w_j [n]), float32 or wider. The weight w_j is the metric's own "<metric>_weight",
      or the loss function's "weight", or 1. Both are 0 for padding. And the rows' scores; None without any.
    """
    validate.loss_function(loss_fn)

    def masked(values):
        return jnp.where(data.mask.reshape(data.mask.shape + (1,) * (values.ndim - 1)), values, jnp.zeros_like(values))

    # Padding may hold anything; zeros keep NaN and infinity out of the loss function.
    metrics = loss_fn(params, jax.tree.map(masked, data.examples), None)
    metrics = dict(metrics) if isinstance(metrics, dict) else {"loss": metrics}
    scores = [metrics.pop(name) for name, value in [*metrics.items()] if isinstance(value, Scores)]
    # A 16-bit sum stops growing once the addends fall below its resolution.
    metrics = tree.widened(jax.tree.map(jnp.asarray, metrics))
    # Two kinds of weights: of one metric, and of all metrics that have none of their own.
    own_weights = {name: metrics.pop(f"{name}_weight") for name in [*metrics] if f"{name}_weight" in metrics}
    shared_weight = metrics.pop("weight", 1.0)
    weights = {name: jnp.where(data.mask, own_weights.get(name, shared_weight), 0.0) for name in metrics}
    of_rows = {
        name: (jnp.where(data.mask, values * weights[name], 0.0), weights[name]) for name, values in metrics.items()
    }
    return of_rows, scores[0] if scores else None


def _sums_and_metrics(
    loss_fn: Callable, params: PyTree, data: ClientData, metrics: Sequence[ScoreMetric]
) -> dict[str, tuple]:
    """As `metric_sums`, with metrics of all of the client's scores, (value, 1), or (0, 0) where one is not defined."""
    of_rows, scores = _of_rows(loss_fn, params, data)
    return _sums(of_rows) | _of_client(metrics, scores, data.mask, of_rows)


def _of_client(
    metrics: Sequence[ScoreMetric], scores: Scores | None, mask: Array, others: dict[str, tuple]
) -> dict[str, tuple]:
    """Computes metrics of one client's scores: {metric: (value, 1)}, or (0, 0) where it is not defined.

    A model's scores that are not finite make a metric NaN, which counts: (NaN, 1).

    Args:
      metrics: what is computed.
      scores: of n rows; None if the loss function keeps none.
      mask: [n] which rows are real.
      others: metrics of the loss function by name.
    """

    def of_metric(metric: ScoreMetric, scores: Scores) -> tuple[Array, Array]:
        value = metric.compute(scores.outputs, scores.targets, mask)
        is_finite = jnp.isfinite(scores.outputs) | ~mask.reshape(-1, *[1] * (scores.outputs.ndim - 1))
        is_defined = ~jnp.isnan(value) | ~is_finite.all()
        return jnp.where(is_defined, value, 0), is_defined.astype(value.dtype)

    return {metric.name: of_metric(metric, _checked_scores(scores, metric, others)) for metric in metrics}


def _checked_scores(scores: Scores | None, metric: ScoreMetric, others: dict[str, tuple]) -> Scores:
    """Returns the scores, after checking that there are some, and that no other metric has this one's name."""
    if scores is None:
        hint = "Use models.supervised(..., keeps_scores=True), or return a types.Scores beside the loss."
        validate.fail("loss_fn", f"scores, for the metric {metric.name!r}", sorted(others), hint)
    if metric.name in others:
        validate.fail("metrics", "names that no metric of the loss has", metric.name)
    return scores


def clients_at_once(population: Population, count: int, most_rows: int) -> int:
    """Finds the most of `count` clients, at least one, that have at most `most_rows` rows together.

    Clients may have no rows at all.
    """
    rows = jax.eval_shape(population.client, jnp.int32(0)).mask.shape[0]
    return max(1, min(count, most_rows // max(1, rows)))


def pooled(loss_fn: Callable, params: PyTree, examples: PyTree) -> dict[str, jax.Array]:
    """Computes means of the per-example metrics over a set of examples, leaves [n, ...]; traceable.

    The mean over all examples of all clients is the example-weighted mean of the clients' means
    (tests/metrics/test_evaluation.py::test_pooled_is_the_weighted_mean_of_clients).

    Args:
      loss_fn, params: as in `metric_sums`.
      examples: a pytree of at least one example.

    References: McMahan et al. 2017, section 1, F(w) = sum_i (n_i / n) F_i(w).
    """
    return _pooled(loss_fn, params, examples, keeps_rows=False)[0]


def _pooled(
    loss_fn: Callable, params: PyTree, examples: PyTree, keeps_rows: bool, metrics: Sequence[ScoreMetric] = ()
) -> tuple[dict, dict, Scores | None]:
    """Computes means as `pooled`, (sum_j w_j v_j) / (sum_j w_j), in batches of at most `BATCH` rows; traceable.

    Args:
      loss_fn, params: as in `metric_sums`.
      examples: leaves [n, ...], with n >= 1.
      keeps_rows: whether the rows' own values are returned too. They take memory for n rows.
      metrics: of the scores and labels of all rows together, which take memory for n rows too.

    Returns: metric -> mean [], or the value of one of `metrics`; with `keeps_rows`, metric -> (w_j v_j [n], w_j [n]),
      else {}; and, with `metrics`, the scores of all n rows, else None.

    Raises: ValueError for n = 0.
    """
    rows = jax.tree.leaves(examples)[0].shape[0]
    if not rows:
        validate.fail("test", "at least one example", 0, "Leave the test set out instead.")
    size = min(rows, BATCH)
    # Rows of the last batch that are padding are masked out, so that all batches have one shape.
    padding = -rows % size

    def batches(x):
        x = jnp.concatenate([x, jnp.zeros((padding, *x.shape[1:]), x.dtype)]) if padding else jnp.asarray(x)
        return x.reshape(-1, size, *x.shape[1:])

    data = ClientData(jax.tree.map(batches, examples), batches(jnp.ones(rows, bool)))

    def of_batch(batch):
        of_rows, scores = _of_rows(loss_fn, params, batch)
        for metric in metrics:
            _checked_scores(scores, metric, of_rows)
        return jax.tree.map(jnp.sum, of_rows), of_rows if keeps_rows else {}, scores if metrics else None

    sums, of_rows, scores = jax.lax.map(of_batch, data)
    means = {name: total.sum() / weight.sum() for name, (total, weight) in sums.items()}
    of_rows = jax.tree.map(lambda x: x.reshape(-1)[:rows], of_rows)
    # A metric that is no mean needs the scores of all batches at once.
    scores = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:rows], scores)
    means |= {metric.name: metric.compute(scores.outputs, scores.targets, None) for metric in metrics}
    return means, of_rows, scores


def per_client(
    loss_fn: Callable, params: PyTree, population: Population, *, metrics: Sequence[ScoreMetric] = ()
) -> dict[str, tuple]:
    """Sums each metric over every client's rows: [N] weighted totals and [N] weights; traceable.

    Args:
      loss_fn, params: as in `metric_sums`.
      population: any.
      metrics: of all scores and labels of a client. A client's total is the metric, and its weight 1; both are 0 where
        the metric is not defined, such as `roc_auc` at a client whose rows are of one class.
    """

    def of_client(id):
        return _sums_and_metrics(loss_fn, params, population.client(id), metrics)

    return _by_blocks(jax.vmap(of_client), population)


def per_owner(
    loss_fn: Callable,
    models_of: Callable,
    population: Population,
    *,
    adapt: Callable | None = None,
    owners: Population | None = None,
    key: Array | None = None,
    metrics: Sequence[ScoreMetric] = (),
) -> dict[str, tuple[Array, Array]]:
    """As `per_client`, but each client has a model of its own; traceable.

    Args:
      loss_fn: as in `metric_sums`.
      models_of: ids [n] -> the clients' models, leaves [n, ...].
      population: the clients' rows on which the models are judged.
      adapt: `Evaluated.adapt`, called with a client's rows in `owners`, and with `key` folded with the client's id.
        None: models are judged as they are.
      owners: the same clients with the rows that they train on; None without `adapt`.
      key: of `adapt`.
      metrics: as in `per_client`.
    """

    def sums_of_client(params, id):
        if adapt is not None:
            assert owners is not None and key is not None, "a client adapts by its rows in `owners`, with a key"
            params = adapt(jax.random.fold_in(key, id), params, owners.client(id))
        return _sums_and_metrics(loss_fn, params, population.client(id), metrics)

    return _by_blocks(lambda ids: jax.vmap(sums_of_client)(models_of(ids), ids), population)


class _Shared(NamedTuple):
    """Which of the test rows each client has."""

    rows: np.ndarray  # [total] numbers of test rows, one client after the other
    client: np.ndarray  # [total] whose they are
    num_clients: int

    def sums(self, of_rows: dict[str, tuple]) -> dict[str, tuple]:
        """Returns totals and weights [N] by metric, as `per_client`, from values and weights of the test rows."""

        def sums_of(values):
            return np.bincount(self.client, np.asarray(values, np.float64)[self.rows], self.num_clients)

        return {name: (sums_of(values), sums_of(weights)) for name, (values, weights) in of_rows.items()}

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of each client's test rows, [N, most] int32, and which of them are real, [N, most]."""
        counts = np.bincount(self.client, minlength=self.num_clients)
        mask = np.arange(max(1, counts.max(initial=0)))[None] < counts[:, None]
        rows = np.zeros(mask.shape, np.int32)
        rows[mask] = self.rows
        return rows, mask


def _of_places(metrics: Sequence[ScoreMetric], scores: Scores, places: tuple[Array, Array]) -> dict[str, tuple]:
    """Computes each client's metrics of its scores, as `per_client`, from the scores of the test rows.

    Args:
      metrics: what is computed.
      scores: of the test rows.
      places: as `_Shared.places` returns them.
    """

    def of_client(rows_and_mask):
        rows, mask = rows_and_mask
        return _of_client(metrics, jax.tree.map(lambda x: x[rows], scores), mask, {})

    return jax.lax.map(of_client, places, batch_size=max(1, BATCH // places[0].shape[1]))


def _shared_with(test: PyTree | None, population: Population | None) -> _Shared | None:
    """Returns which of the test rows the clients of a population have; None if they have others, or it is not known.

    Rows are compared by their values, so a copy counts.

    Args:
      test: the test rows, leaves [n, ...]; None if there is no test set.
      population: clients; None if there are none. Only a `RowsOfTable` is recognised, if its table, or its clients'
        rows one after the other, are the test rows.
    """
    if test is None or not isinstance(population, RowsOfTable):
        return None
    table, rows, offsets = jax.device_get(population.rows_of_table())
    client = np.repeat(np.arange(population.size), np.diff(offsets))
    if _equal(test, table):
        return _Shared(np.asarray(rows), client, population.size)
    # The test set may be the clients' rows, one client after the other.
    num_rows = {len(x) for x in jax.tree.leaves(test)}
    if num_rows == {len(rows)} and _equal(test, jax.tree.map(lambda x: x[rows], table)):
        return _Shared(np.arange(len(rows)), client, population.size)
    return None


def _equal(a: PyTree, b: PyTree) -> bool:
    """Returns whether two pytrees of arrays on the host have the same structure, dtypes in JAX, shapes and values."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
    alike = (
        x.shape == y.shape and jax.dtypes.canonicalize_dtype(x.dtype) == jax.dtypes.canonicalize_dtype(y.dtype)
        for x, y in pairs
    )
    return all(alike) and all(np.array_equal(x, y) for x, y in pairs)


def owner_models(
    params: PyTree,
    state: PyTree,
    ids: Array,
    *,
    personal: Callable | None = None,
    adapt: Callable | None = None,
    owners: Population | None = None,
) -> PyTree:
    """Returns the models that clients use, leaves [n, ...], as `evaluation` judges them.

    Args:
      params, state: of the algorithm.
      ids: [n] int32.
      personal, adapt, owners: as in `evaluation`.

    Raises: ValueError for `adapt` without `owners`.

    Guarantees: their metrics are `evaluation`'s (tests/metrics/test_owners.py::test_owner_models_are_those_judged).
    """
    if personal is not None:
        models = personal(state, ids)
    else:
        models = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(ids), *x.shape)), params)
    if adapt is None:
        return models
    if owners is None:
        validate.fail("owners", "the clients' training rows, for adapt", None, "Give the population of the run.")

    def adapted(model, id):
        return adapt(jax.random.fold_in(jax.random.key(ADAPT_SEED), id), model, owners.client(id))

    return jax.vmap(adapted)(models, ids)


def _success(metrics: dict[str, Array]) -> np.float32:
    """Computes the share of triggered rows that the model takes for the attacker's target."""
    if "accuracy" not in metrics:
        hint = "Attack success is the accuracy on triggered rows that are labelled as the target."
        validate.fail("loss_fn", 'a metric "accuracy"', sorted(metrics), hint)
    return np.float32(metrics["accuracy"])


def _over_clients(
    groups: dict[str, dict[str, tuple]], perplexity: bool, counted: Sequence[str]
) -> tuple[dict, dict, dict]:
    """Computes means, spreads and the results of each client, for each group of clients, on the host.

    With the totals s_i and the weights w_i of the clients, the mean is sum_i s_i / sum_i w_i. The result of client i is
    s_i / w_i, for w_i > 0.

    Args:
      groups: group, such as "held_out" -> metric -> (s [N], w [N]).
      perplexity: whether exp of the loss is a metric too: exp of the mean, and exp of each client's loss.
      counted: metrics that not every client has, and whose weight is 1 at each that has one. The number of these
        clients is "<group>_<metric>_clients".

    Returns: three dicts. The means over a group's examples, "<group>_<metric>" -> float32, NaN without any weight. The
      spread over its clients, "<group>_<metric>_<kind>" -> float32, [5] for the kind "quantiles" and [] for deciles; a
      group without examples has none. And for each group of at most `MOST_LISTED` clients, "<group>_<metric>" -> [N]
      float32, masked for clients without examples.
    """
    values = {}
    spreads = {}
    by_client: dict[str, dict[str, np.ma.MaskedArray]] = {}
    for group, metrics in groups.items():
        for name, (totals, weights) in metrics.items():
            totals = np.asarray(totals, np.float64)
            weights = np.asarray(weights, np.float64)
            mean = totals.sum() / weights.sum() if weights.sum() else np.nan
            values[f"{group}_{name}"] = np.float32(mean)
            if name in counted:
                values[f"{group}_{name}_clients"] = int(weights.sum())
            has_examples = weights > 0
            of_clients = {name: totals[has_examples] / weights[has_examples]}
            if perplexity and name == "loss":
                values[f"{group}_perplexity"] = np.float32(_exponential(mean))
                of_clients["perplexity"] = _exponential(of_clients["loss"])
            if has_examples.any():
                for shown, of_each in of_clients.items():
                    spreads |= {f"{group}_{shown}_{kind}": x for kind, x in _spread(of_each).items()}
            if len(totals) <= MOST_LISTED:
                for shown, of_each in of_clients.items():
                    results = np.ma.array(np.empty(len(totals), np.float32), mask=True)
                    results[has_examples] = of_each.astype(np.float32)
                    by_client.setdefault(group, {})[f"{group}_{shown}"] = results
    return values, spreads, by_client


def _exponential(loss: ArrayLike) -> np.ndarray:
    """Computes exp(loss) in float32; infinity for the loss of a diverged model."""
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(np.asarray(loss, np.float64)), np.float32)


def _spread(of_clients: np.ndarray) -> dict[str, np.ndarray | np.float32]:
    """Returns the spread of a metric [N] over clients; NaN for the losses of a diverged model, which are not finite."""
    with np.errstate(invalid="ignore"):
        return {
            "quantiles": np.quantile(of_clients, QUANTILES).astype(np.float32),
            "lowest_decile": np.float32(lowest_decile(of_clients)),
            "highest_decile": np.float32(highest_decile(of_clients)),
        }


def _of(chosen: np.ndarray, sums: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns totals and weights [N] of the chosen clients; all others have neither."""
    totals, weights = sums
    return np.where(chosen, totals, 0), np.where(chosen, weights, 0)


def _by_blocks(block: Callable, population: Population) -> PyTree:
    """Evaluates all clients a few at a time: leaves [N], from `block`, which gives leaves [n] for n ids."""
    block_size = clients_at_once(population, population.size, BATCH)
    num_blocks = -(-population.size // block_size)
    # The last block is filled up with copies of the last client, whose results are cut off.
    ids = jnp.minimum(jnp.arange(num_blocks * block_size, dtype=jnp.int32), population.size - 1).reshape(
        num_blocks, block_size
    )
    return jax.tree.map(lambda leaf: leaf.reshape(-1)[: population.size], jax.lax.map(block, ids))


def objective(loss_fn: Callable, params: PyTree, population: Population, ids: Array | None = None) -> dict[str, Array]:
    """Computes means of the per-example metrics over all examples of all clients; traceable.

    The mean of the loss is the global objective: the example-weighted mean of the clients' own objectives. Clients are
    visited a few at a time, and only exact sums are kept. So memory does not grow with the population.

    Args:
      loss_fn, params: as in `metric_sums`.
      population: any.
      ids: [n] int32 clients; None = all.

    Guarantees: The means equal a float64 loop over clients, whatever their number, to float32
    (tests/metrics/test_evaluation.py::test_the_objective_is_that_of_a_loop_over_clients), also for losses that are not
    finite (::test_losses_that_are_not_finite). Memory does not grow (::test_memory_of_the_objective_is_flat).

    References: McMahan et al. 2017, section 1, F(w) = sum_i (n_i / n) F_i(w).
    """
    count = population.size if ids is None else len(ids)
    block_size = clients_at_once(population, count, TRAIN_BATCH)

    def sums_of_place(place):
        id = jnp.minimum(place, count - 1)
        data = population.client(id if ids is None else ids[id])
        return metric_sums(loss_fn, params, data._replace(mask=data.mask & (place < count)))

    def block(block_index, carry):
        sums, infinite = carry
        block_sums = jax.vmap(sums_of_place)(block_index * block_size + jnp.arange(block_size, dtype=jnp.int32))
        # Exact sums take finite numbers only, so infinite and NaN losses are added up beside them.
        finite = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), block_sums)
        infinite = jax.tree.map(lambda total, x, y: total + (x - y).sum(), infinite, block_sums, finite)
        return exact_sums.add(sums, finite), infinite

    spec = jax.eval_shape(sums_of_place, jnp.int32(0))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spec)
    sums, infinite = jax.lax.fori_loop(0, -(-count // block_size), block, (exact_sums.zeros(spec), zeros))
    sums = jax.tree.map(jnp.add, exact_sums.total(sums), infinite)
    return {name: total / weight for name, (total, weight) in sums.items()}


class _DataSets(NamedTuple):
    """What an evaluation judges models on. None where there is no such data set.

    The compiled program has these as arguments: as closures they would be constants of the program.
    """

    test: PyTree | None  # leaves [n, ...]
    held_out: Population | None
    train: Population | None
    ids: Array | None  # [n] int32, the clients of `train` that are visited; None = all
    local_test: Population | None
    owners: Population | None  # the clients of `local_test` with the rows that they train on
    triggered: PyTree | None  # leaves [n, ...]
    places: dict[str, tuple[np.ndarray, np.ndarray]]  # of groups whose rows are test rows: `_Shared.places`


@dataclasses.dataclass(frozen=True)  # type checkers do not take a tuple for a function
class Evaluation:
    """A function params -> record of metrics, or (params, state) -> record, as `evaluation` builds it.

    Guarantees: the results by client are those whose means and quantiles the record has
    (tests/metrics/test_evaluation.py::test_results_by_client_are_those_of_the_record).
    """

    # (params) or (params, state) -> (record, group -> metric -> [N] float32, masked for clients without examples).
    # The groups are "held_out", "local_test", "owner", "personal", "newcomer"; each has at most `MOST_LISTED` clients.
    with_clients: Callable
    # (params, state), arrays or specs -> the traced loss of examples without a key, of which all results are made. None
    # where nothing is judged.
    program: Callable | None = None
    # (params), specs with places -> the lowered program of an evaluation's measures, which a call with params of such
    # shapes and places runs. None for evaluations of (params, state).
    lower: Callable | None = None

    def __call__(self, *arguments: PyTree) -> dict:
        """Returns the record alone."""
        return self.with_clients(*arguments)[0]


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
    has_trained: Callable | None = None,
    adapt: Callable | None = None,
    owners: Population | None = None,
    triggered: PyTree | None = None,
    perplexity: bool = False,
    params_kind: ParamsKind = ParamsKind.UNSTATED,
    metrics: Sequence[ScoreMetric] = (),
) -> Evaluation:
    """Builds a function params -> record of metrics, on any of several data sets.

    The record has `test_*` on a central test set, `held_out_*` over held-out clients, and `train_*` over the training
    clients. With personal models the function is (params, state) -> record, which also has `personal_*`. Its
    `with_clients` also returns the results of each client.

    With `local_test`, `owner_*` judge the model that each client would use: its own one where there are own models,
    trained or not, else the shared one. They are pooled over all clients and their rows alike, so differences of
    `owner_*` between algorithms are paired.

    Args:
      loss_fn: (params, examples, key) -> per-example values; called with key None.
      test: examples, leaves [n, ...]. None, as for the following arguments: this is not evaluated.
      held_out: a population of held-out clients. Its metrics are pooled over examples. Their spread over clients is
        given as `held_out_<metric>_quantiles` at 5, 25, 50, 75 and 95 %, and as `held_out_<metric>_lowest_decile` and
        `..._highest_decile`, means over a tenth of the clients; clients without examples are left out.
      train: the population of the run, or None. `train_loss` is the global training objective (see `objective`). An
        evaluation costs one pass over all of its examples.
      train_clients: the size in [1, N] of a sample of clients that stands for all of them: uniform without replacement,
        drawn once. The record then has the size as `train_sample_clients`, and `train_*` are the means over the sample.
        If a metric of the loss would take one of these names, it gets the prefix `metric_`, and the other entry
        `sample_` or `spread_`.
      seed: of that sample.
      local_test: the clients of the run with rows that they keep from training (`FederatedData.local_test`), or None.
        The global model is evaluated on these rows as `local_test_*`, pooled and by its spread over clients.
      personal: `Evaluated.personal`, or None. Each client's own model is then evaluated on its own rows, as
        `personal_*`, by `personal_clients` clients.
      has_trained: `Evaluated.has_trained`, or None. `personal_*` are then over the clients whose models have been
        trained, and `newcomer_*` over the others, if there are any.
      adapt: `Evaluated.adapt`, which each client does to its model before it is judged: to its own model, or to the
        shared one of an algorithm without personal models. The results are `personal_*` too.
      owners: the clients of the run with the rows that they train on, for `adapt`; else None.
      triggered: examples with a backdoor's trigger, labelled as the attacker wants (`FederatedData.triggered`), or
        None. Their accuracy is `attack_success`, the share of them that the model takes for the target.
      perplexity: whether the record has `test_perplexity`, `held_out_perplexity` and so on: exp(F) of each mean loss F
        in nats per token, and in the quantiles exp(F_i) of each client's mean loss. It is for a loss that weighs by
        tokens, such as `models.next_token_cross_entropy`. Every target token counts, also an end and an unknown word,
        and padding does not.
      params_kind: `Algorithm.params_kind`. Params that are no model by themselves, such as FedProto's start or the
        first of IFCA's models, are not judged: the record has `personal_*`, `newcomer_*` and `owner_*` alone.
      metrics: metrics of all scores and labels, such as `[metrics.roc_auc(), metrics.f1_macro()]`; the loss function
        must keep scores (`models.supervised(..., keeps_scores=True)`). `test_<metric>` is of all test rows together.
        Of clients each has a value of its own rows: `held_out_<metric>` and the like are means in which each client
        counts once, with the spread of these values. A client for whose rows the metric is not defined has none, and
        `held_out_<metric>_clients` is the number of those that have one. Rows count alike, also if the loss weighs
        them. `train_*` and `attack_success` have none. The
        scores of all test rows are in memory at once.

    Raises: ValueError for `train_clients` without `train`, for `personal` or `adapt` without `local_test`, and for
    `adapt` without `owners`. TypeError for a `params_kind` that is none.

    Guarantees: The metrics equal a float64 loop over clients
    (tests/metrics/test_evaluation.py::test_matches_a_loop_over_clients,
    ::test_the_objective_is_that_of_a_loop_over_clients). A personal model is evaluated on its owner's rows
    (tests/population/test_own_test_rows.py::test_personal_models_are_judged_by_their_owners_rows). `owner_*` are pooled
    as NumPy pools all clients' rows (tests/metrics/test_owners.py::test_owners_are_judged_alike). Attack success is
    NumPy's share (tests/population/poisoned/test_backdoors.py::test_attack_success_against_numpy). Perplexities count
    each token once, and no padding (tests/metrics/test_evaluation.py::test_perplexity_is_that_of_all_tokens). A row
    that is in the test set and at held-out clients is measured once, with the same results
    (tests/metrics/test_evaluation.py::test_equal_rows_are_measured_once). `metrics` are those of all rows in one piece,
    and of each client's rows (tests/metrics/test_score_evaluation.py::test_metrics_of_all_rows_and_of_each_client).
    Without them no program changes (::test_without_metrics_no_program_changes).
    """
    ids = None
    if train_clients is not None:
        if train is None:
            validate.fail("train_clients", "the clients to choose from", None, "Give train, the run's population.")
        validate.integer("train_clients", train_clients, 1, train.size)
        ids = jnp.array(sorted(random.Random(seed).sample(range(train.size), train_clients)), jnp.int32)

    validate.loss_function(loss_fn)

    if (personal is not None or adapt is not None) and local_test is None:
        hint = "Give local_test: rows that clients keep from training (population.with_local_test)."
        validate.fail("personal", "rows to judge personal models by", None, hint)
    if adapt is not None and owners is None:
        validate.fail("owners", "the clients' training rows, for adapt", None, "Give the population of the run.")

    if not isinstance(params_kind, ParamsKind):
        names = "types.ParamsKind." + ", ".join(kind.name for kind in ParamsKind)
        validate.fail("params_kind", f"one of {names}", params_kind, "An Algorithm and its server state it.", TypeError)
    for metric in metrics:
        validate.part("metrics", metric, ScoreMetric)
    names = [metric.name for metric in metrics]
    if len(set(names)) < len(names):
        validate.fail("metrics", "each metric once", names)
    # The clients on whose own rows params are judged.
    judges = local_test
    if not params_kind.is_judged:
        test = held_out = train = ids = judges = triggered = None
    # Rows that are test rows and a client's are measured once.
    shared = {"held_out": _shared_with(test, held_out), "local_test": _shared_with(test, judges)}
    shared = {group: rows for group, rows in shared.items() if rows is not None}

    data_sets = _DataSets(
        test=test,
        held_out=held_out,
        train=train,
        ids=ids,
        local_test=local_test,
        owners=owners,
        triggered=triggered,
        places={group: rows.places() for group, rows in shared.items()} if metrics else {},
    )

    @constants.jit
    def measure(params, state, data_sets):
        test, held_out, train, ids, local_test, owners, triggered, places = data_sets
        on_test, of_rows, scores = {}, {}, None
        if test is not None:
            on_test, of_rows, scores = _pooled(loss_fn, params, test, bool(shared), metrics)
        on_triggered = {} if triggered is None else pooled(loss_fn, params, triggered)
        on_train = {} if train is None else objective(loss_fn, params, train, ids)
        clients = {
            **{
                group: {}
                if clients is None or group in shared
                else per_client(loss_fn, params, clients, metrics=metrics)
                for group, clients in (("held_out", held_out), ("local_test", None if judges is None else local_test))
            },
            "personal": own_models(params, state, local_test, owners),
        }
        if scores is not None:
            clients |= {group: _of_places(metrics, scores, of_group) for group, of_group in places.items()}
        trained = None
        if has_trained is not None and local_test is not None:
            trained = _by_blocks(partial(has_trained, state), local_test)
        return on_test, of_rows, clients, on_train, on_triggered, trained

    def own_models(params, state, local_test, owners):
        """Sums of each client's metrics, at its own model; {} where clients have none."""
        if personal is None and adapt is None:
            return {}

        def models_of(ids):
            return owner_models(params, state, ids, personal=personal)

        key = jax.random.key(ADAPT_SEED)
        return per_owner(loss_fn, models_of, local_test, adapt=adapt, owners=owners, key=key, metrics=metrics)

    populations = [clients for clients in (held_out, local_test, train) if clients is not None]

    def program(params: PyTree, state: PyTree) -> Program | None:
        if test is None and not populations:
            return None
        if not params_kind.is_judged and personal is None and adapt is None:
            return None
        if not params_kind.is_judged and personal is not None:
            own = jax.eval_shape(personal, state, jax.ShapeDtypeStruct((1,), jnp.int32))
            params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), own)
        if test is None:
            examples = jax.eval_shape(populations[0].client, jnp.int32(0)).examples
        else:
            examples = jax.tree.map(lambda x: x[:1], test)

        def values(params, examples):
            found = loss_fn(params, examples, None)
            # Scores that are kept say nothing new of what measures the model: a resumed run may ask for other metrics.
            is_dict = isinstance(found, dict)
            return {name: x for name, x in found.items() if not isinstance(x, Scores)} if is_dict else found

        return jax.make_jaxpr(values)(params, examples)

    def evaluated(params: PyTree, state: PyTree) -> tuple[dict, dict]:
        on_device = measure(params, state, data_sets)
        on_test, of_rows, clients, on_train, on_triggered, trained = jax.device_get(on_device)
        clients |= {group: rows.sums(of_rows) | clients[group] for group, rows in shared.items()}
        if perplexity and any("perplexity" in means for means in (on_test, on_train, *clients.values())):
            validate.fail("perplexity", "False where the loss has a metric of this name", perplexity)
        values = {}
        for group, means in (("test", on_test), ("train", on_train)):
            values |= {f"{group}_{name}": np.float32(value) for name, value in means.items()}
            if perplexity and means:
                values[f"{group}_perplexity"] = np.float32(_exponential(means["loss"]))
        if triggered is not None:
            values["attack_success"] = _success(on_triggered)
        sample_size = {} if ids is None else {"train_sample_clients": train_clients}
        own_metrics = clients["personal"]
        clients["owner"] = own_metrics or clients["local_test"]
        if own_metrics:
            if trained is not None:
                clients["personal"] = {name: _of(trained, sums) for name, sums in own_metrics.items()}
            weights = next(weights for name, (_, weights) in clients["personal"].items() if name not in names)
            values["personal_clients"] = int((weights > 0).sum())
        if own_metrics and trained is not None:
            newcomers = {name: _of(~trained, sums) for name, sums in own_metrics.items()}
            if any(weights.any() for _, weights in newcomers.values()):
                clients["newcomer"] = newcomers
        over_clients, spreads, by_client = _over_clients(clients, perplexity, names)
        values |= over_clients
        return tree.joined_metrics({"metric": values, "sample": sample_size, "spread": spreads}), by_client

    if personal is None and has_trained is None:

        def lower(params: PyTree) -> jax.stages.Lowered:
            return measure.lower(params, (), data_sets)

        return Evaluation(lambda params: evaluated(params, ()), program, lower)
    return Evaluation(lambda params, state: evaluated(params, state), program)
