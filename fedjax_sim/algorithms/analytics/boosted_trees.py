"""Gradient-boosted trees: clients send histograms of gradients, and the server grows one level of a tree a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.algorithms.analytics.forest import Growth, scores_of
from fedjax_sim.algorithms.analytics.statistic import (
    RowOptions,
    columns_of,
    features_of,
    row_values,
    statistic,
    summaries,
)
from fedjax_sim.models import sigmoid_cross_entropy, squared_error
from fedjax_sim.types import Algorithm, Array, Mean, ParamsKind, PyTree, Sampler, ServerUpdate
from fedjax_sim.validate import (
    Finite,
    FromData,
    Integer,
    NonNegative,
    Positive,
    PositiveInt,
    PositiveShare,
    ShareBelowOne,
    named_arguments,
)

MOST_NUMBERS = 1 << 22  # of a message, and of the values of a forest


@named_arguments
def boosted_trees(
    sampler: Sampler,
    *,
    input_shape: Annotated[Sequence[int], FromData("input_shape")],
    objective: Literal["logistic", "squared"] = "logistic",
    num_trees: Annotated[int, Integer(1, 100_000)] = 20,
    max_depth: Annotated[int, Integer(1, 16)] = 3,
    learning_rate: PositiveShare = 0.3,
    low: Finite | None = None,
    high: Finite | None = None,
    num_bins: Annotated[int, Integer(2, 65_536)] = 16,
    edges: Sequence[Sequence[float]] | None = None,
    penalty: NonNegative = 0.01,
    least_share: ShareBelowOne = 0.01,
    least_gain: NonNegative = 0.0,
    residual_bound: Positive | None = None,
    num_categories: Annotated[PositiveInt | None, FromData("num_categories")] = None,
    **options: Unpack[RowOptions],
) -> Algorithm:
    """Makes federated gradient-boosted trees for rows that all have the same features, from sums over bins.

    A forest of T trees has the score F(x), the sum of the trees' values at x. With the loss l(F, y) of a row, its
    gradient is g = dl/dF and its hessian h = d^2 l / dF^2, at the score of the trees before the one that grows. A round
    grows one level of one tree. Each client receives the forest, and sends for each node of the level, feature and bin
    the sums of g and h over its rows there. With the sums G and H of a node, and those of two sides L and R, the server
    splits the node where the gain G_L^2 / (H_L + lambda) + G_R^2 / (H_R + lambda) - G^2 / (H + lambda) is largest. A
    leaf has the value -G / (H + lambda) times the learning rate.

    A tree takes at most D rounds, and fewer if no node is left to split; T D rounds complete the forest. A round whose
    clients have no rows in the level's nodes, or a sum of their hessians that noise makes negative, changes nothing and
    takes one round more. Rounds after the last tree change nothing. After each round the forest is a model: a tree that
    still grows has the values of its nodes so far. Scores start from 0, so numbers y should be centred.

    Args:
      sampler: draws the cohorts, all clients alike.
      input_shape: of a row's features, d numbers in all; a config takes it from the data.
      objective: "logistic" for labels y of 0 and 1, l = log(1 + exp(-(2 y - 1) F)); "squared" for numbers y,
        l = (F - y)^2 / 2. Classes beyond two are not supported.
      num_trees: T.
      max_depth: D, levels of splits. Messages have places for 2^(D - 1) nodes, of which earlier levels use fewer.
      learning_rate: in (0, 1].
      low, high, num_bins: B bins of equal width on [low, high), the same for each feature. A number outside counts in
        the bin at its end. It is public knowledge, and no row of a client is read for it. None beside `edges`.
      edges: [d, B - 1], bins of each feature's own in the place of low and high: the rising lower bounds of all bins
        but the first, such as quantiles that `quantiles` found. None beside low and high.
      penalty: lambda in units of H_0, the hessian of the first round's cohort: its rows, or a quarter of them for
        "logistic". With n rows, lambda = 1 of other libraries is 1 / n, or 4 / n.
      least_share: a node is not split, and no side of a split is made, with a hessian below this share of H_0. Beside
        noise, take a share well above that of the noise: a hessian near 0 would divide noise.
      least_gain: a node is split if the gain is more than this share of H_0.
      residual_bound: b > 0 for "squared": |g| is at most b (the gradient of Huber's loss). None for no bound.
      num_categories: of y; a config takes it from the data. More than two are refused; None is not checked.
      feature_names, label_names, units: as in `kmeans`. The bins are in the units of x.
      rows: "all" rows of a client, or "one" of them, drawn anew in each round.
      transform: of the messages. A row is in one bin of each feature, so its message has norm sqrt(d (g^2 + h^2)):
        at most sqrt(d) for "logistic", and sqrt(d (b^2 + 1)) for "squared" with a bound. With `rows = "one"`, such a
        clip norm loses nothing. A clip of the whole message shortens g and h alike, so that it changes the weight of a
        client and not the values that it votes for. A transform that remembers at the client is refused.
      aggregator: any multiple of the sum over clients, such as `fixed_mean(m)`; their mean by default.
      nonfinite, plan, mesh: as in `federated`. A client counts as one whose message is not finite if a row has a
        feature that is NaN, or a label other than 0 and 1 beside "logistic".

    The unit of privacy is a client with all its rows. With noise in the transform, a run states its epsilon, in which
    every round counts. Noise in places of a message that a level does not use is drawn, and not read.

    Returns: an Algorithm whose `params` are {"features" [T, 2^D - 1] int32, "thresholds" [T, 2^D - 1] float32,
      "values" [T, 2^(D + 1) - 1] float32}. Rows of node i go to node 2 i + 1 if their feature is below the threshold,
      else to 2 i + 2; a feature of -1 marks a leaf. `init` takes () alone. Its info has `local_loss`, the mean loss of
      the cohort's rows at the trees that are complete. Evaluations have `loss`, the cross-entropy or (F - y)^2, and for
      "logistic" `accuracy`.

    Raises: ValueError for bins without a width or edges that do not rise, more than two classes, a bound beside
      "logistic", a sampler that may draw some clients more often, a transform with a memory, and messages or
      forests of more than 2^22 numbers; TypeError for rows without vectors, and labels that are no integers beside
      "logistic".

    Guarantees: with all clients and without noise the forest is that of the pooled rows, round by round
    (tests/algorithms/analytics/test_boosted_trees.py::test_everybody_together_is_boosting); the squared loss on the
    training rows never rises from a round to the next (::test_the_squared_loss_never_rises); one split that separates
    the labels is found (::test_a_stump_is_exact); a clip norm as stated loses nothing (::test_a_row_has_its_norm); with
    noise every split has enough hessian on both sides, and values are finite (::test_noise_divides_by_nothing).

    References: Friedman 2001 (gradient boosting); Chen and Guestrin 2016 (XGBoost, equations 6 and 7); Maddock,
    Cormode, Wang, Maple and Jha 2022 (federated boosted trees with differential privacy, from histograms).

    >>> from fedjax_sim import population, sampling
    >>> data = population.breast_cancer(num_clients=4)
    >>> about = {"input_shape": data.input_shape, "units": data.units}
    >>> algorithm = boosted_trees(sampling.full(4), num_trees=5, low=-3.0, high=3.0, **about)
    >>> algorithm.params(algorithm.init(jax.random.key(0), (), data.train))["values"].shape
    (5, 15)
    """
    is_logistic = objective == "logistic"
    if num_categories is not None and num_categories > 2:
        hint = "'logistic' is for two classes, 'squared' for numbers; trees for several classes are not supported."
        validate.fail("objective", "data of two classes or of numbers", f"{num_categories} classes", hint)
    if is_logistic and residual_bound is not None:
        validate.fail("residual_bound", "None beside 'logistic', whose gradients are at most 1", residual_bound)
    num_features = math.prod(input_shape)
    bounds = _edges(low, high, num_bins, edges, num_features)
    growth = Growth(
        num_trees=num_trees,
        max_depth=max_depth,
        learning_rate=learning_rate,
        penalty=penalty,
        least_share=least_share,
        least_gain=least_gain,
        edges=bounds,
    )
    _check_size("max_depth", "messages", 2 * math.prod(growth.shape), "Take fewer bins, or trees of fewer levels.")
    _check_size("num_trees", "a forest", num_trees * (2 << max_depth), "Take fewer trees, or fewer levels.")
    histogram = jax.ShapeDtypeStruct(growth.shape, jnp.float32)
    message_spec = {"gradients": histogram, "hessians": histogram}
    rows = options.pop("rows", "all")
    columns = columns_of(options)

    def derivatives(scores: Array, examples: PyTree) -> tuple[Array, Array]:
        """Computes g and h of each row, [n]; NaN for a label that is none."""
        y = _targets(examples, is_logistic)
        if not is_logistic:
            residuals = scores - y
            bounded = residuals if residual_bound is None else jnp.clip(residuals, -residual_bound, residual_bound)
            return bounded, jnp.ones_like(scores)
        chances = jax.nn.sigmoid(scores)
        is_label = (y == 0) | (y == 1)
        return jnp.where(is_label, chances - y, jnp.nan), chances * (1 - chances)

    def losses_of(scores: Array, examples: PyTree) -> dict[str, Array]:
        return (sigmoid_cross_entropy if is_logistic else squared_error)(scores, _targets(examples, is_logistic))

    def summarise(key, broadcast, examples, mask):
        x = features_of(examples, num_features)
        scores = scores_of(growth.finished(broadcast), x)
        gradients, hessians = growth.histograms(broadcast, x, mask, derivatives(scores, examples))
        losses = jnp.where(mask, losses_of(scores, examples)["loss"], 0)
        metrics = {"local_loss": Mean(losses.sum(), mask.sum(dtype=jnp.float32))}
        return {"gradients": gradients, "hessians": hessians}, metrics

    def start(params):
        if jax.tree.leaves(params):
            validate.fail("params", "(), for a forest starts without trees", type(params).__name__)
        return growth.planted()

    def grown(key, aggregate, state):
        gradients, hessians = (aggregate[name].astype(jnp.float32) for name in ("gradients", "hessians"))
        return growth.grown(gradients, hessians, state)

    def forest(state):
        return {name: state[name] for name in ("features", "thresholds", "values")}

    def loss_fn(params: PyTree, examples: PyTree, key: Array | None) -> dict[str, Array]:
        return losses_of(scores_of(params, features_of(examples, num_features)), examples)

    def broadcast(state):
        return {name: x for name, x in state.items() if name != "first_hessian"}

    kind = ParamsKind.MODEL
    server = ServerUpdate(start, broadcast, grown, forest, takes=lambda params: message_spec, params_kind=kind)

    def answer(params):
        thresholds = np.array(params["thresholds"])
        if columns.units is not None:
            feature = np.maximum(params["features"], 0)
            own = thresholds * np.array(columns.units.factors)[feature] + np.array(columns.units.offsets)[feature]
            thresholds = np.where(params["features"] >= 0, own, thresholds)
        return columns.named() | dict(params) | {"thresholds": thresholds} | columns.in_words()

    work = summaries(summarise, rows=rows)
    return statistic(sampler, work, server, loss_fn, options, asks_anew=True, answer=answer, scale=columns)


def _edges(
    low: float | None, high: float | None, num_bins: int, edges: Sequence[Sequence[float]] | None, num_features: int
) -> np.ndarray:
    """Returns the lower bounds of all bins but the first, [d, B - 1] float32; refuses bins that are none.

    With `low` and `high` the bounds of every feature are low + b (high - low) / B for b = 1, ..., B - 1.

    Args:
      low, high: the range of all features, low < high; both None beside `edges`.
      num_bins: B, at least 2.
      edges: for each of the d features B - 1 rising numbers; None beside `low` and `high`.
      num_features: d.

    Raises: ValueError for both kinds of bins or for none, for lists of other lengths, and for bounds that do not rise
      in float32.
    """
    if (edges is None) != (None not in (low, high)) or (low is None) != (high is None):
        hint = "They are the bins of all features; edges are those of each."
        validate.fail("low, high", "both, or edges in their place", (low, high), hint)
    shape = (num_features, num_bins - 1)
    if edges is None:
        assert low is not None and high is not None, "without edges both are given, as checked above"
        if not high > low:
            validate.fail("high", f"more than low = {low:g}", high)
        bounds = np.broadcast_to(np.linspace(low, high, num_bins + 1)[1:-1], shape).astype(np.float32)
    else:
        validate.sequence("edges", edges)
        if {np.size(bounds) for bounds in edges} != {num_bins - 1} or len(edges) != num_features:
            sizes = f"{len(edges)} lists of {sorted({np.size(bounds) for bounds in edges})}"
            hint = f"{num_bins} bins have {num_bins - 1} edges between them."
            validate.fail("edges", f"{num_features} lists of {num_bins - 1} numbers, one for each feature", sizes, hint)
        bounds = np.asarray(edges, np.float32).reshape(shape)
    is_rising = np.isfinite(bounds).all(1) & (np.diff(bounds, axis=1) > 0).all(1)
    if not is_rising.all():
        feature = int(np.argmin(is_rising))
        name = "num_bins" if edges is None else f"edges[{feature}]"
        validate.fail(name, "bins whose edges are finite and rise, in float32", bounds[feature].tolist())
    return bounds


def _check_size(name: str, what: str, size: int, hint: str) -> None:
    """Raises ValueError for arrays that are too large."""
    if size > MOST_NUMBERS:
        validate.fail(name, f"{what} of at most {MOST_NUMBERS:,} numbers", size, hint)


def _targets(examples: PyTree, are_labels: bool) -> Array:
    """Returns the target of each row, [n] float32.

    Args:
      examples: of one client, with "y", [n] or [n, 1].
      are_labels: whether y must be integers, as for "logistic". Whether they are 0 and 1 is not checked here.

    Raises: TypeError for rows without one number y each, and for labels that are no integers.
    """
    y = row_values(examples, None)
    if are_labels and jnp.issubdtype(examples["y"].dtype, jnp.inexact):
        hint = "Take objective = 'squared' for numbers, or cast the labels: y.astype('int32')."
        validate.fail("data", "integer labels y of 0 and 1, for 'logistic'", str(examples["y"].dtype), hint, TypeError)
    return y
