"""Quantiles by bisection: in each round clients count their rows below a threshold, and an interval is halved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.algorithms.analytics.statistic import (
    RowOptions,
    columns_of,
    nan_among,
    row_values,
    started,
    statistic,
    summaries,
)
from fedjax_sim.types import Algorithm, Array, ParamsKind, PyTree, Sampler, ServerUpdate
from fedjax_sim.validate import Finite, NonNegativeInt, named_arguments

ROUNDING = 2.0**-21  # share of the rows by which a sum may be rounded


@named_arguments
def quantiles(
    sampler: Sampler,
    *,
    probabilities: Sequence[float] = (0.25, 0.5, 0.75),
    low: Finite = 0.0,
    high: Finite = 1.0,
    column: NonNegativeInt | None = None,
    **options: Unpack[RowOptions],
) -> Algorithm:
    """Makes federated quantiles, each found by bisection of the interval (low, high].

    The quantile of probability p is the smallest value v with F(v) >= p, where F(v) is the share of rows that are at
    most v. In a round each client receives the middle t of the interval left, and sends the sum of 1[x <= t] - p
    over its rows x, a number for each p, and how many rows these are. If the aggregate is at least 0, then F(t) >= p,
    and the lower half is left. An interval stays in a round whose clients have no rows.

    Args:
      sampler: draws the cohorts.
      probabilities: each p in (0, 1).
      low, high: an interval that is known to hold the quantiles, in the data's own units. It is public knowledge. The
        answer of a run says of each quantile whether it may lie beyond an end.
      column: of x, whose numbers are meant; None for the number y.
      rows: "all" rows of a client, or "one" of them, drawn anew in each round. A client with n rows has a message of at
        most norm n sqrt(q + 1) for q probabilities.
      feature_names, label_names, units: as in `kmeans`.
      transform, aggregator: as in `kmeans`. A transform that remembers at the client is refused, since each round asks
        for another threshold.
      nonfinite, plan, mesh: as in `federated`.

    The unit of privacy is a client with all its rows. With noise in the transform, a run states its epsilon.

    Error: after T rounds with all clients and without noise, a quantile in (low, high] is within the last interval,
    whose length is (high - low) / 2^T, and at most half of this from the estimate, up to rounding to float32. It is
    the quantile of a probability within 2^-21 of the stated one, since a share of rows is compared with a float32.

    If each of m clients sends one row in each round, drawn at random from the population, then with probability at
    least 1 - 2 T exp(-2 m e^2) the last interval (a, b] has F(a) < p + e and F(b) > p - e (Hoeffding). So the estimate
    is wrong by at most a rank of e and half an interval. Gaussian noise of standard deviation s on the mean adds
    2 T exp(-e^2 / (2 s^2)), where e is split between the two.

    Returns: an Algorithm whose `params` are {"low", "high", "quantiles"}, each [q] float32: the intervals that are left
      and their middles. `init` takes such intervals too. Evaluations have as `loss` the pinball loss, summed over the
      probabilities, which the quantiles minimise.

    Raises: ValueError for probabilities outside of (0, 1) and an interval without length.

    Guarantees: with all clients, the intervals hold NumPy's quantiles of the pooled rows
    (tests/algorithms/analytics/test_quantiles.py::test_everybody_together_brackets_numpy); with small cohorts, the
    error in rank is within the stated bound at the stated rate (::test_small_cohorts_keep_the_bound).

    References: Smith 2011 (Privacy-preserving statistical estimation, section 4); Koenker and Bassett 1978 (the loss).
    """
    validate.sequence("probabilities", probabilities)
    for i, probability in enumerate(probabilities):
        validate.in_range(f"probabilities[{i}]", probability, 0, 1, open_low=True, open_high=True)
    if not high > low:
        validate.fail("high", f"more than low = {low:g}", high, "The interval holds the quantiles.")
    wanted = np.asarray(probabilities, np.float32)
    shape = wanted.shape
    rows = options.pop("rows", "all")
    columns = columns_of(options)
    if column is not None:
        columns.check_own()

    def summarise(key, broadcast, examples, mask):
        numbers = row_values(examples, column)
        is_below = (numbers[:, None] <= broadcast[None]) & mask[:, None]
        num_rows = mask.sum(dtype=jnp.float32)
        excess = is_below.sum(0, dtype=jnp.float32) - wanted * num_rows + nan_among(numbers, mask)
        return {"excess": excess, "rows": num_rows}, {}

    def default():
        ends = jnp.full(shape, low, jnp.float32), jnp.full(shape, high, jnp.float32)
        return {"low": ends[0], "high": ends[1], "quantiles": _middle(*ends)}

    def halved(key, aggregate, state):
        threshold = _middle(state["low"], state["high"])
        # The threshold is at or above the quantile. As a float32, the probability 0.3 lies above 3 of 10 rows.
        is_above = aggregate["excess"] >= -ROUNDING * aggregate["rows"]
        has_rows = aggregate["rows"] > 0
        return {
            "low": jnp.where(has_rows & ~is_above, threshold, state["low"]),
            "high": jnp.where(has_rows & is_above, threshold, state["high"]),
        }

    def start(params):
        given = started(params, {"low": shape, "high": shape, "quantiles": shape}, default)
        return {"low": given["low"], "high": given["high"]}

    def loss_fn(params: PyTree, examples: PyTree, key: Array | None) -> dict[str, Array]:
        above = row_values(examples, column)[:, None] - params["quantiles"][None]
        return {"loss": jnp.maximum(wanted[None] * above, (wanted[None] - 1) * above).sum(1)}

    server = ServerUpdate(
        start,
        lambda state: _middle(state["low"], state["high"]),
        halved,
        lambda state: state | {"quantiles": _middle(state["low"], state["high"])},
        takes=lambda params: {
            "excess": jax.ShapeDtypeStruct(shape, jnp.float32),
            "rows": jax.ShapeDtypeStruct((), jnp.float32),
        },
        params_kind=ParamsKind.ANSWER,
    )

    def answer(params):
        found = {"of": np.array(columns.name(column)), "probabilities": wanted}
        found |= {name: params[name] for name in ("quantiles", "low", "high")}
        beyond = []
        for probability, below, above in zip(probabilities, params["low"], params["high"], strict=True):
            if below == np.float32(low):
                beyond.append(f"{probability:g}: may lie below {low:g}, the end of the interval")
            if above == np.float32(high):
                beyond.append(f"{probability:g}: may lie above {high:g}, the end of the interval")
        return found | ({"beyond": np.array(beyond)} if beyond else {})

    work = summaries(summarise, rows=rows)
    scale = None if column is None else columns
    return statistic(sampler, work, server, loss_fn, options, asks_anew=True, answer=answer, scale=scale)


def _middle(low: Array, high: Array) -> Array:
    """Returns the middle of an interval, which does not overflow where the sum of its ends would."""
    return low + (high - low) / 2
