"""k-means: clients send sums and counts of their rows by the nearest centroid, and the server moves the centroids."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Unpack

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.algorithms.analytics.statistic import RowOptions, columns_of, features_of, started, statistic, summaries
from fedjax_sim.types import Algorithm, Array, Mean, ParamsKind, PyTree, Sampler, ServerUpdate
from fedjax_sim.types.shares import exceeds
from fedjax_sim.validate import Finite, FromData, Integer, NonNegativeInt, ShareBelowOne, named_arguments


@named_arguments
def kmeans(
    sampler: Sampler,
    *,
    num_clusters: Annotated[int, Integer(1, 100_000)] = 10,
    low: Finite = 0.0,
    high: Finite = 1.0,
    start_seed: NonNegativeInt = 0,
    least_share: ShareBelowOne = 0.0,
    input_shape: Annotated[Sequence[int] | None, FromData("input_shape")] = None,
    **options: Unpack[RowOptions],
) -> Algorithm:
    """Makes federated k-means: Lloyd's algorithm from the clients' sums and counts.

    In a round each client receives the k centroids, and sends for each centroid c_j the sum s_j and the number n_j of
    its rows that are nearest to c_j. The server moves c_j to sum s_j / sum n_j.

    Args:
      sampler: draws the cohorts.
      num_clusters: k.
      low, high: the box in which the centroids of the start are drawn, uniformly in each coordinate. It is public
        knowledge, and no row of a client is read for it.
      start_seed: of that draw.
      least_share: a cluster with no larger share of the cohort's rows stays where it is. Beside noise, take a share
        well above that of the noise: an almost empty cluster would move by a ratio of two noises.
      feature_names, label_names, units: what the columns of x and the labels are called, and the own units of columns
        that were standardised; a config takes them from the data. Unless it scales the features, they are in their own
        units, and so is the box. Otherwise the box is in those of x, and the answer of a run is converted back.
      input_shape: of a row's features, needed to draw centroids; None if `init` is given them. A config takes it from
        the data.
      rows: "all" rows of a client, or "one" of them, drawn anew in each round.
      transform: of the messages. A clip of the whole message shortens sums and counts alike, so that it changes the
        weight of a client and not its mean. One row x has a message of norm sqrt(1 + |x|^2).
      aggregator: any multiple of the sum over clients, such as `fixed_mean(m)`; their mean by default.
      nonfinite, plan, mesh: as in `federated`.

    The unit of privacy is a client with all its rows. With noise in the transform, a run states its epsilon.

    Returns: an Algorithm whose `params` are {"centroids": [k, d] float32}. `init` takes such centroids, or () to draw
      them. Its info has `local_loss`, the mean squared distance of the cohort's rows to the centroids before the round.
      Evaluations have it as `loss`.

    Raises: ValueError for a box without volume, and for centroids of another shape; TypeError for rows without vectors.

    Guarantees: with all clients and without noise a round is Lloyd's step on the pooled rows
    (tests/algorithms/analytics/test_kmeans.py::test_everybody_together_is_lloyd), and the objective never rises
    (::test_the_objective_never_rises); an empty cluster stays (::test_empty_clusters_stay).

    References: Lloyd 1982 (Least squares quantization in PCM); Blum, Dwork, McSherry and Nissim 2005 (section 5, from
    noisy sums and counts).

    >>> from fedjax_sim import population, sampling
    >>> data = population.mean_estimation(num_clients=4)
    >>> algorithm = kmeans(sampling.full(4), num_clusters=2, input_shape=(1,))
    >>> algorithm.params(algorithm.init(jax.random.key(0), (), data.train))["centroids"].shape
    (2, 1)
    """
    draw = drawn_in_a_box(num_clusters, low, high, start_seed, input_shape)
    rows = options.pop("rows", "all")
    columns = columns_of(options)

    def summarise(key, broadcast, examples, mask):
        x = features_of(examples, broadcast["centroids"].shape[1])
        distances = squared_distances_to_centers(x, broadcast["centroids"])
        is_nearest = jnp.argmin(distances, 1)[:, None] == jnp.arange(num_clusters)[None]
        members = (is_nearest & mask[:, None]).astype(jnp.float32)
        message = {"counts": members.sum(0), "sums": members.T @ x}
        loss = Mean(jnp.where(mask, distances.min(1), 0).sum(), mask.sum(dtype=jnp.float32))
        return message, {"local_loss": loss}

    def start(params):
        return started(params, {"centroids": (num_clusters, None)}, lambda: {"centroids": draw()})

    def moved(key, aggregate, state):
        counts = aggregate["counts"].astype(jnp.float32)
        moves = (counts > 0) & exceeds(counts, least_share * jnp.maximum(counts, 0).sum())
        means = aggregate["sums"].astype(jnp.float32) / jnp.where(moves, counts, 1)[:, None]
        return {"centroids": jnp.where(moves[:, None], means, state["centroids"])}

    def takes(params):
        num_features = (params["centroids"] if jax.tree.leaves(params) else draw()).shape[1]
        return {
            "counts": jax.ShapeDtypeStruct((num_clusters,), jnp.float32),
            "sums": jax.ShapeDtypeStruct((num_clusters, num_features), jnp.float32),
        }

    def loss_fn(params: PyTree, examples: PyTree, key: Array | None) -> dict[str, Array]:
        return {"loss": squared_distances_to_centers(features_of(examples), params["centroids"]).min(1)}

    server = ServerUpdate(
        start, lambda state: state, moved, lambda state: state, takes=takes, params_kind=ParamsKind.ANSWER
    )

    def answer(params):
        return columns.named() | {"centroids": columns.own(params["centroids"])} | columns.in_words()

    work = summaries(summarise, rows=rows)
    return statistic(sampler, work, server, loss_fn, options, answer=answer, scale=columns)


def squared_distances_to_centers(x: Array, centers: Array) -> Array:
    """Computes the squared Euclidean distance of each row to each center, [n, k] from [n, d] and [k, d].

    Differences are squared, because |x|^2 - 2 x c + |c|^2 would cancel far from the origin.
    """
    return jnp.square(x[:, None, :] - centers[None]).sum(-1)


def drawn_in_a_box(
    count: int, low: float, high: float, seed: int, input_shape: Sequence[int] | None
) -> Callable[[], Array]:
    """Returns a function () -> [count, d] float32 that draws points uniformly in [low, high]^d.

    Args:
      count: number of points.
      low, high: the box's ends in each coordinate, low < high.
      seed: of the draw.
      input_shape: of a row's features, whose product is d. None: the returned function raises a ValueError.
    """
    if not high > low:
        validate.fail("high", f"more than low = {low:g}", high, "It is the box in which centroids are drawn.")

    def draw() -> Array:
        if input_shape is None:
            hint = "Or pass the estimate to start from as params."
            validate.fail("input_shape", "the shape of a row's features, to draw a start", None, hint)
        num_features = math.prod(input_shape)
        return jax.random.uniform(jax.random.key(seed), (count, num_features), jnp.float32, minval=low, maxval=high)

    return draw
