"""Histograms: clients count their rows by category or by bin, also within regions that the rows name."""

from __future__ import annotations

from typing import Annotated, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.algorithms.analytics.statistic import (
    RowOptions,
    columns_of,
    features_of,
    labels_of,
    nan_among,
    random_row_mask,
    row_values,
    statistic,
    summaries,
)
from fedjax_sim.prng import stream
from fedjax_sim.types import Algorithm, Array, ParamsKind, PyTree, Sampler, ServerUpdate
from fedjax_sim.validate import Finite, FromData, Integer, NonNegativeInt, PositiveInt, named_arguments

SMALLEST_SHARE = 1e-6  # of a bin, in the loss: a bin that nobody fills has no infinite loss


@named_arguments
def histogram(
    sampler: Sampler,
    *,
    low: Finite | None = None,
    high: Finite | None = None,
    num_bins: PositiveInt | None = None,
    column: NonNegativeInt | None = None,
    region_column: NonNegativeInt | None = None,
    num_regions: Annotated[int, Integer(1, 1_000_000)] = 1,
    num_categories: Annotated[PositiveInt | None, FromData("num_categories")] = None,
    **options: Unpack[RowOptions],
) -> Algorithm:
    """Makes a federated histogram: how many rows of a client fall into each bin, on average.

    Without `num_bins`, the bins are the categories of the labels y. With `num_bins`, they are B bins of equal width on
    [low, high) for a column of x, or for the number y. A number outside counts in the bin at its end.

    Args:
      sampler: draws the cohorts.
      low, high, num_bins: the bins of numbers, in the data's own units. All three are None if categories are counted.
      column: of x, whose numbers are counted; None for y.
      region_column: of x, which holds the region of a row as an integer in [0, num_regions); None for no regions. Rows
        of other regions are not counted.
      num_regions: R.
      num_categories: B, the number of categories of y; not read for bins of numbers, so it may be None there. A config
        takes it from the data.
      rows: "all" rows of a client, or "one" of them, drawn anew in each round, and one of its labels. Its message has
        norm 1, so that a clip norm of 1 loses nothing.
      feature_names, label_names, units: as in `kmeans`.
      transform, aggregator: as in `kmeans`. With a mean over the cohort, the estimate is in rows for each client.
      nonfinite, plan, mesh: as in `federated`.

    The unit of privacy is a client with all its rows. With noise in the transform, a run states its epsilon.

    Returns: an Algorithm whose `params` are {"counts": [B] float32}, or [R, B] with regions: the mean of the aggregates
      of all rounds so far. With noise, counts may be negative. Evaluations have as `loss` the negative logarithm of the
      share that the row's bin has of all counts, at least 1e-6.

    Raises: ValueError for bins without a width or regions without a column; TypeError for rows without such numbers.

    Guarantees: with all clients and without noise the counts are those of the pooled rows
    (tests/algorithms/analytics/test_histogram.py::test_everybody_together_is_numpy), with regions too
    (::test_counts_by_region); a number at an edge counts above it (::test_numbers_at_edges); distributed noise has
    its stated variance in the counts and its stated epsilon (::test_noise_and_epsilon).

    References: Dwork, McSherry, Nissim and Smith 2006 (section 3, histograms).
    """
    bins = (low, high, num_bins)
    if None in bins and bins != (None, None, None):
        validate.fail("low, high, num_bins", "all three for bins of numbers, or none for categories", bins)
    if low is None or high is None or num_bins is None:
        if num_categories is None or column is not None:
            hint = "Numbers need low, high and num_bins."
            validate.fail("num_bins", "a number of bins, where categories of y are not counted", num_bins, hint)
        num_cells = num_categories
        edges = None
    else:
        if not high > low:
            validate.fail("high", f"more than low = {low:g}", high)
        num_cells = num_bins
        edges = np.linspace(low, high, num_bins + 1)
    if (region_column is None) != (num_regions == 1):
        hint = "It holds the region of a row, and there are several."
        validate.fail("region_column", "a column beside num_regions > 1, and none without", region_column, hint)
    shape = (num_cells,) if region_column is None else (num_regions, num_cells)
    rows = options.pop("rows", "all")
    columns = columns_of(options)
    reads_features = column is not None or region_column is not None
    if reads_features:
        columns.check_own()

    inner_edges = None if edges is None else edges[1:-1].astype(np.float32)

    def places(examples: PyTree, mask: Array) -> tuple[Array, Array]:
        """Returns the place of each value in the flat table of counts, and whether it counts, both [v]."""
        if inner_edges is None:
            cells, counted = labels_of(examples, mask)
        else:
            numbers = row_values(examples, column)
            cells, counted = jnp.searchsorted(inner_edges, numbers, side="right").astype(jnp.int32), mask
        counted &= cells < num_cells
        if region_column is not None:
            regions = _regions(features_of(examples), region_column)
            regions = jnp.repeat(regions, cells.size // regions.size)
            counted &= (regions >= 0) & (regions < num_regions)
            cells += regions * num_cells
        return jnp.where(counted, cells, 0), counted

    def summarise(key, broadcast, examples, mask):
        cells, counted = places(examples, mask)
        spoiled = 0.0 if num_bins is None else nan_among(row_values(examples, column), mask)
        if rows == "one":  # a row may have several labels
            counted = random_row_mask(stream(key, "label"), counted)
        counts = jnp.zeros(num_cells * num_regions, jnp.float32).at[cells].add(counted.astype(jnp.float32))
        return {"counts": counts.reshape(shape) + spoiled}, {}

    def start(params):
        if jax.tree.leaves(params):
            validate.fail("params", "(), for counts start from none", type(params).__name__)
        return {"counts": jnp.zeros(shape, jnp.float32), "rounds": jnp.zeros((), jnp.float32)}

    def averaged(key, aggregate, state):
        rounds = state["rounds"] + 1
        change = (aggregate["counts"].astype(jnp.float32) - state["counts"]) / rounds
        return {"counts": state["counts"] + change, "rounds": rounds}

    def loss_fn(params: PyTree, examples: PyTree, key: Array | None) -> dict[str, Array]:
        num_rows = jax.tree.leaves(examples)[0].shape[0]
        cells, counted = places(examples, jnp.ones(num_rows, bool))
        counts = jnp.maximum(params["counts"].reshape(-1), 0)
        shares = counts / jnp.maximum(counts.sum(), 1e-30)
        losses = jnp.where(counted, -jnp.log(jnp.maximum(shares[cells], SMALLEST_SHARE)), 0).reshape(num_rows, -1)
        weights = counted.reshape(num_rows, -1).sum(1).astype(jnp.float32)
        return {"loss": losses.sum(1) / jnp.maximum(weights, 1), "weight": weights}

    server = ServerUpdate(
        start,
        lambda state: (),
        averaged,
        lambda state: {"counts": state["counts"]},
        takes=lambda params: {"counts": jax.ShapeDtypeStruct(shape, jnp.float32)},
        params_kind=ParamsKind.ANSWER,
    )

    def answer(params):
        if num_bins is None:
            names = columns.label_names
            counted = "rows by category of y"
            bins = {} if names is None else {"categories": np.array(names)}
        else:
            counted = f"rows by {columns.name(column)}; numbers outside of [{low:g}, {high:g}) in the bins at the ends"
            bins = {"edges": edges}
        if region_column is not None:
            counted += f"; by {columns.name(region_column)}, 0 to {num_regions - 1}"
        counted += ". With a mean as the aggregator, rows for each client"
        return {"counted": np.array(counted), **bins, "counts": params["counts"]}

    scale = columns if reads_features else None
    return statistic(sampler, summaries(summarise, rows=rows), server, loss_fn, options, answer=answer, scale=scale)


def _regions(x: Array, column: int) -> Array:
    """Returns the region of each row, [n] int32; -1 for a number that is no region."""
    validate.integer("region_column", column, 0, x.shape[1] - 1, hint=f"Rows have {x.shape[1]} columns.")
    numbers = x[:, column]
    return jnp.where((numbers >= 0) & (numbers < 2**24), jnp.round(numbers), -1).astype(jnp.int32)
