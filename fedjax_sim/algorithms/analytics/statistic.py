"""What all federated statistics share: clients that summarise their rows, and the federation around them.

A client sends sums over its rows, such as counts. The aggregate is the mean of these messages over the cohort, or
another multiple of their sum, and the server turns it into an estimate. Every client reports with weight 1, also a
client without rows, whose sums are zero. So no weight tells how many rows a client has.

The estimate takes the place of a model's parameters. `Algorithm.init` takes the estimate to start from, or `()` for
the statistic's own start. `Evaluated.loss_fn` judges the estimate by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import aggregation, validate
from fedjax_sim.prng import counter_bits, stream
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import MessageOptions
from fedjax_sim.types import (
    Aggregator,
    Algorithm,
    Array,
    ClientData,
    ClientFacts,
    ClientUpdate,
    Evaluated,
    Mean,
    Metric,
    PyTree,
    Report,
    Sampler,
    ServerUpdate,
    Units,
    learned_from,
)
from fedjax_sim.validate import Default, FromData

SENT_ROWS = Metric("rows", "rows in a client's message", pooled="mean", by="clients_reported")


class StatisticOptions(MessageOptions, total=False):
    """The aggregator and transform of the messages, and how a round is computed.

    There is no `downlink`: what clients receive is a question, such as a threshold, and must arrive as it is.
    """

    aggregator: Annotated[Aggregator | None, Default(None)]  # None: the mean of all messages
    # What the rows are about, as answers tell it; a config takes it from the data. An algorithm that takes `units`
    # answers about the data: a config then reads features in their own units, unless it scales them itself.
    feature_names: Annotated[Sequence[str] | None, FromData("feature_names"), Default(None)]
    label_names: Annotated[Sequence[str] | None, FromData("label_names"), Default(None)]
    units: Annotated[Units | None, FromData("units"), Default(None)]


class RowOptions(StatisticOptions, total=False):
    """The options of statistics over rows: those of all statistics, and which of its rows a client sends."""

    rows: Annotated[Literal["all", "one"], Default("all")]  # "one": a row drawn anew in each round


class Columns(NamedTuple):
    """What the columns and labels of rows are called, and the own units of columns that were standardised."""

    feature_names: Sequence[str] | None
    label_names: Sequence[str] | None
    units: Units | None

    def name(self, column: int | None) -> str:
        """Returns the name of a column of x, or of the number y without a column."""
        if column is None:
            return "y"
        return f"column {column} of x" if self.feature_names is None else self.feature_names[column]

    def named(self) -> dict[str, np.ndarray]:
        """Returns {"columns": the names of the columns of x} for an answer; {} without names."""
        return {} if self.feature_names is None else {"columns": np.array(self.feature_names)}

    def in_words(self) -> dict[str, np.ndarray]:
        """Returns {"units": what was done} for an answer whose columns were standardised; else {}."""
        if self.units is None:
            return {}
        return {"units": np.array("the data's own: features were standardised, and the answer is converted back")}

    def own(self, values: np.ndarray) -> np.ndarray:
        """Returns points [..., d] of standardised features in the features' own units."""
        if self.units is None:
            return values
        return values * np.array(self.units.factors) + np.array(self.units.offsets)

    def own_variances(self, values: np.ndarray) -> np.ndarray:
        """Returns variances [..., d] of standardised features in the features' own units, squared."""
        return values if self.units is None else values * np.array(self.units.factors) ** 2

    def check_own(self) -> None:
        """Refuses standardised features, for a statistic whose interval or bins are in the features' own units."""
        if self.units is not None:
            hint = "Its interval is in these units: standardise = false, or leave it out."
            validate.fail("data", "features in their own units", "standardised ones", hint)


def columns_of(options: StatisticOptions) -> Columns:
    """Takes what the rows are about out of the options of a statistic."""
    return Columns(
        feature_names=options.pop("feature_names", None),
        label_names=options.pop("label_names", None),
        units=options.pop("units", None),
    )


def statistic(
    sampler: Sampler,
    client: ClientUpdate,
    server: ServerUpdate,
    loss_fn: Callable,
    options: Mapping[str, Any],
    *,
    asks_anew: bool = False,
    answer: Callable = dict,
    scale: Columns | None = None,
) -> Algorithm:
    """Makes the federation of a statistic.

    Args:
      sampler: draws the cohorts.
      client: of `summaries`.
      server: makes the estimate; its state cannot go on from another estimate (`moved` is None), so that no edge of a
        hierarchy averages estimates.
      loss_fn: (estimate, examples, key) -> per-row values with "loss", by which evaluations judge the estimate.
      options: of `StatisticOptions`.
      asks_anew: the places of a message mean something else in each round, such as counts below another threshold. A
        transform that remembers at the client, such as error feedback, is then refused.
      answer: (estimate as NumPy arrays) -> {name: array}, which the summary of a run shows; by default the estimate.
      scale: the columns, if the statistic reads x. A population whose features are on record as standardised is then
        refused, unless the columns state the own units of the features. None: it reads no x.

    Raises: ValueError for an aggregator that bounds attackers' harm, since its result is no multiple of a sum, for a
    sampler that is not known to draw all clients alike, and for a transform with a memory of other questions.

    Guarantees: every statistic refuses such samplers
    (tests/algorithms/analytics/test_statistic.py::test_clients_are_drawn_alike). What clients differ in otherwise, such
    as availability or response rates, is not corrected: the statistic is that of the rows which arrive.
    """
    round_options = dict(options)
    aggregator = round_options.pop("aggregator", None)
    rule = aggregation.mean(weighting="uniform") if aggregator is None else aggregator
    if rule.facts.withstands is not None:
        hint = "A median of counts is no count: take mean, fixed_mean, modular_sum or a secure sum."
        validate.fail("aggregator", "a mean or a sum, for a statistic", "a rule against attackers", hint)
    transform = options.get("transform")
    if not getattr(sampler.design, "equal_chances", False):
        hint = "Rows of clients that are drawn more often would count more: take sampling.uniform or poisson."
        scheme = getattr(sampler.design, "scheme", None)
        validate.fail("sampler", "one that is known to draw all clients alike", scheme, hint)
    if asks_anew and transform is not None:
        memory = jax.eval_shape(transform.init_client, server.expects(()))
        if jax.tree.leaves(memory):
            hint = "A round asks for other sums than the one before: what was left over does not belong there."
            validate.fail("transform", "one without a memory at the client", "one that remembers", hint)
    algorithm = federated(sampler, client, rule, server, **round_options)
    return algorithm._replace(
        init=algorithm.init if scale is None else _of_own_units(algorithm.init, scale),
        evaluated=Evaluated(loss_fn=loss_fn, answer=answer),
    )


def _of_own_units(init: Callable, columns: Columns) -> Callable:
    """Returns the initialisation that refuses standardised features whose own units are not known."""

    def checked(key: Array, params: PyTree, population: Any) -> PyTree:
        is_scaled = any(record.is_scale for record in learned_from(population) or ())
        if is_scaled and columns.units is None:
            hint = "Read them with standardise=False, or pass units=data.units, if the statistic converts its answer."
            validate.fail("population", "features in their own units, for an answer in them", "standardised", hint)
        return init(key, params, population)

    return checked


def summaries(summarise: Callable, *, rows: Literal["all", "one"] = "all") -> ClientUpdate:
    """Makes the local work of a statistic.

    Args:
      summarise: (key, broadcast, examples, mask [n]) -> (message, metrics): sums over the rows where the mask is True,
        as a pytree of float32, and a dict of `Mean`.
      rows: "all" rows of the client, or "one" of them, drawn anew in each round.

    Returns: a ClientUpdate that always reports with weight 1. It trains nothing, so it takes no local steps.
    """

    def apply(key: Array, broadcast: PyTree, state: PyTree, data: ClientData) -> tuple[Report, PyTree]:
        mask = random_row_mask(stream(key, "row"), data.mask) if rows == "one" else data.mask
        message, metrics = summarise(stream(key, "summary"), broadcast, data.examples, mask)
        num_rows = Mean(mask.sum(dtype=jnp.float32), jnp.float32(1))
        return Report(message, jnp.float32(1), metrics | {"rows": num_rows}), state

    return ClientUpdate(lambda broadcast: (), apply, ClientFacts(uniform_weights=True, metrics=(SENT_ROWS,)))


def random_row_mask(key: Array, mask: Array) -> Array:
    """Draws one of the rows where `mask` is True, and returns the mask of this row alone, [n] bool.

    The draw does not depend on the number of padded rows. Without rows, nothing is drawn.
    """
    places = jnp.arange(mask.shape[0], dtype=jnp.uint32)
    # The last bit makes a row's number positive, so that it is larger than the 0 of padding.
    numbers = jnp.where(mask, counter_bits(key, places) | jnp.uint32(1), jnp.uint32(0))
    return mask & (places == jnp.argmax(numbers).astype(jnp.uint32))


def started(params: PyTree, shapes: Mapping[str, tuple[int | None, ...]], default: Callable) -> dict[str, Array]:
    """Returns the estimate that a statistic starts from.

    Args:
      params: an estimate, or a pytree without arrays, such as (), for the default.
      shapes: of the estimate's arrays by name; None stands for any length.
      default: () -> the estimate of the statistic's own start, with these names.

    Raises: ValueError for an estimate with other names or shapes.
    """
    if not jax.tree.leaves(params):
        return default()
    names = sorted(shapes)
    if not isinstance(params, Mapping) or sorted(params) != names:
        found = sorted(params) if isinstance(params, Mapping) else type(params).__name__
        validate.fail("params", f"a dict of {', '.join(names)}, or () for the statistic's own start", found)
    for name, shape in shapes.items():
        given = jnp.shape(params[name])
        if len(given) != len(shape) or any(x not in (None, y) for x, y in zip(shape, given, strict=True)):
            rule = "an array [" + ", ".join("d" if x is None else str(x) for x in shape) + "]"
            validate.fail(f"params[{name!r}]", rule, f"shape {given}")
    return {name: jnp.asarray(params[name]) for name in shapes}


def features_of(examples: PyTree, width: int | None = None) -> Array:
    """Returns the features of rows as vectors, [n, d] float32.

    Args:
      examples: with an array `x` [n, ...].
      width: d, which is checked; None: any.

    Raises: TypeError for rows without an array `x` of floating-point numbers, such as tokens, graphs or quadratics;
    ValueError for vectors of another length.
    """
    x = examples.get("x") if isinstance(examples, Mapping) else None
    if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jnp.floating):
        hint = "Tokens, graphs and quadratics have no such vectors."
        validate.fail("data", "rows with features x of floating-point numbers", _described(x), hint, TypeError)
    vectors = x.reshape(x.shape[0], -1).astype(jnp.float32)
    if width not in (None, vectors.shape[1]):
        validate.fail("data", f"rows of {width} features, as the estimate has them", vectors.shape[1])
    return vectors


def row_values(examples: PyTree, column: int | None) -> Array:
    """Returns one number of each row, [n] float32: a column of the features, or without a column the target y.

    A number that is NaN is in no bin, and below no threshold. `nan_among` makes the message NaN, so that the client
    counts as one whose message is not finite.

    Args:
      examples: {"x": [n, ...], "y": [n] or [n, 1]}, of which one is read.
      column: of x, in [0, d); None for y.

    Raises: ValueError for a column that the rows do not have; TypeError for rows without such numbers.
    """
    if column is not None:
        x = features_of(examples)
        validate.integer("column", column, 0, x.shape[1] - 1, hint=f"Rows have {x.shape[1]} columns.")
        return x[:, column]
    y = examples.get("y") if isinstance(examples, Mapping) else None
    if not isinstance(y, jax.Array) or y.size != y.shape[0]:
        validate.fail("data", "rows with one number y each", _described(y), "Name a column of x.", TypeError)
    return y.reshape(-1).astype(jnp.float32)


def nan_among(numbers: Array, mask: Array) -> Array:
    """Returns NaN if a number is NaN where `mask` is True, else 0, [] float32: to be added to a message."""
    return jnp.where((jnp.isnan(numbers) & mask).any(), jnp.nan, 0.0).astype(jnp.float32)


def labels_of(examples: PyTree, mask: Array) -> tuple[Array, Array]:
    """Returns all labels of rows and which of them count, ([v] int32, [v] bool).

    A row may have several labels, as a text has tokens. Labels below 0 are padding.

    Raises: TypeError for rows without integer labels y.
    """
    y = examples.get("y") if isinstance(examples, Mapping) else None
    if not isinstance(y, jax.Array) or not jnp.issubdtype(y.dtype, jnp.integer):
        hint = "Numbers have no categories: state low, high and num_bins."
        validate.fail("data", "rows with integer labels y", _described(y), hint, TypeError)
    labels = y.reshape(y.shape[0], -1)
    counts = mask[:, None] & (labels >= 0)
    return labels.reshape(-1).astype(jnp.int32), counts.reshape(-1)


def _described(values: Any) -> str:
    """Says in an error what was found in the place of an array."""
    return f"{values.dtype} of shape {values.shape}" if isinstance(values, jax.Array) else type(values).__name__
