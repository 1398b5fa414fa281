"""A mixture of Gaussians by EM: clients send moments of their rows by component, and the server takes the M-step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Unpack

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.algorithms.analytics.kmeans import drawn_in_a_box
from fedjax_sim.algorithms.analytics.statistic import RowOptions, columns_of, features_of, started, statistic, summaries
from fedjax_sim.types import Algorithm, Array, Mean, ParamsKind, PyTree, Sampler, ServerUpdate
from fedjax_sim.types.shares import exceeds
from fedjax_sim.validate import Finite, FromData, Integer, NonNegativeInt, Positive, ShareBelowOne, named_arguments


@named_arguments
def gaussian_mixture(
    sampler: Sampler,
    *,
    num_components: Annotated[int, Integer(1, 100_000)] = 10,
    low: Finite = 0.0,
    high: Finite = 1.0,
    start_seed: NonNegativeInt = 0,
    least_share: ShareBelowOne = 0.0,
    least_variance: Positive = 1e-6,
    input_shape: Annotated[Sequence[int] | None, FromData("input_shape")] = None,
    **options: Unpack[RowOptions],
) -> Algorithm:
    """Makes federated EM for a mixture of k Gaussians with diagonal covariances.

    In a round each client computes the responsibilities r_ij of the broadcast components for its rows x_i (E-step). It
    sends the sums over its rows of r_ij, r_ij (x_i - m_j) and r_ij (x_i - m_j)^2, where m_j is the mean of component j.
    The server computes weights, means and variances from the totals (M-step).

    Args:
      sampler: draws the cohorts.
      num_components: k.
      low, high, start_seed, input_shape: of the drawn means of the start, as in `kmeans`. The start's weights are
        equal, and its variances ((high - low) / k)^2.
      least_share: a component with no larger share of the cohort's rows keeps its mean and variance; beside noise, as
        in `kmeans`.
      least_variance: no variance becomes smaller. Without a bound the likelihood of a mixture is unbounded.
      rows, transform, aggregator, feature_names, label_names, units: as in `kmeans`.
      nonfinite, plan, mesh: as in `federated`.

    The unit of privacy is a client with all its rows. With noise in the transform, a run states its epsilon.

    Returns: an Algorithm whose `params` are {"weights": [k], "means": [k, d], "variances": [k, d]} float32. `init`
      takes such an estimate, or () to draw one. Its info has `local_loss`, the mean negative log-likelihood of the
      cohort's rows before the round, in nats; evaluations have it as `loss`.

    Raises: ValueError for a box without volume, for an estimate of another shape, and for one with two components of
      the same mean and variance, which would stay equal; TypeError for rows without vectors.

    Guarantees: with all clients and without noise a round is a step of EM on the pooled rows
    (tests/algorithms/analytics/test_gaussian_mixture.py::test_everybody_together_is_em), and the likelihood never falls
    as long as no variance is at its bound (::test_the_likelihood_never_falls).

    References: Dempster, Laird and Rubin 1977 (EM); Park, Foulds, Choudhary and Welling 2017 (from noisy moments).
    """
    draw = drawn_in_a_box(num_components, low, high, start_seed, input_shape)
    rows = options.pop("rows", "all")
    columns = columns_of(options)

    def summarise(key, broadcast, examples, mask):
        x = features_of(examples, broadcast["means"].shape[1])
        joint = _log_joint(broadcast, x)
        responsibilities = jnp.where(mask[:, None], jax.nn.softmax(joint, 1), 0)
        shifted = x[:, None, :] - broadcast["means"][None]
        weighted = responsibilities[:, :, None] * shifted
        message = {
            "counts": responsibilities.sum(0),
            "sums": weighted.sum(0),
            "squares": (weighted * shifted).sum(0),
        }
        losses = jnp.where(mask, -jax.nn.logsumexp(joint, axis=1), 0)
        return message, {"local_loss": Mean(losses.sum(), mask.sum(dtype=jnp.float32))}

    def default():
        means = draw()
        variance = ((high - low) / num_components) ** 2
        return {
            "weights": jnp.full(num_components, 1 / num_components, jnp.float32),
            "means": means,
            "variances": jnp.full(means.shape, max(variance, least_variance), jnp.float32),
        }

    def start(params):
        square = (num_components, None)
        estimate = started(params, {"weights": (num_components,), "means": square, "variances": square}, default)
        if tree.has_equal_rows((estimate["means"], estimate["variances"])):
            hint = "Whatever their weights, they would stay equal: move the mean of one."
            validate.fail("params", "components that differ in mean or variance", "two equal ones", hint)
        return estimate

    def maximised(key, aggregate, state):
        counts, sums, squares = (aggregate[name].astype(jnp.float32) for name in ("counts", "sums", "squares"))
        counts = jnp.maximum(counts, 0)
        moves = (counts > 0) & exceeds(counts, least_share * counts.sum())
        divisors = jnp.where(moves, counts, 1)[:, None]
        shifts = sums / divisors
        variances = jnp.maximum(squares / divisors - jnp.square(shifts), least_variance)
        has_rows = counts.sum() > 0
        return {
            "weights": jnp.where(has_rows, counts / jnp.where(has_rows, counts.sum(), 1), state["weights"]),
            "means": state["means"] + jnp.where(moves[:, None], shifts, 0),
            "variances": jnp.where(moves[:, None], variances, state["variances"]),
        }

    def takes(params):
        means = params["means"] if jax.tree.leaves(params) else draw()
        moment = jax.ShapeDtypeStruct(means.shape, jnp.float32)
        return {"counts": jax.ShapeDtypeStruct((num_components,), jnp.float32), "sums": moment, "squares": moment}

    def loss_fn(params: PyTree, examples: PyTree, key: Array | None) -> dict[str, Array]:
        return {"loss": -jax.nn.logsumexp(_log_joint(params, features_of(examples)), axis=1)}

    server = ServerUpdate(
        start, lambda state: state, maximised, lambda state: state, takes=takes, params_kind=ParamsKind.ANSWER
    )

    def answer(params):
        own = {"means": columns.own(params["means"]), "variances": columns.own_variances(params["variances"])}
        return columns.named() | {"weights": params["weights"]} | own | columns.in_words()

    work = summaries(summarise, rows=rows)
    return statistic(sampler, work, server, loss_fn, options, answer=answer, scale=columns)


def _log_joint(params: dict[str, Array], x: Array) -> Array:
    """Computes log(weight_j N(x_i; m_j, v_j)) of each row and component, [n, k]."""
    shifted = x[:, None, :] - params["means"][None]
    squares = jnp.square(shifted) / params["variances"][None] + jnp.log(2 * math.pi * params["variances"])[None]
    # A component without weight has responsibility 0.
    log_weights = jnp.log(jnp.maximum(params["weights"], 1e-30))
    return log_weights[None] - squares.sum(-1) / 2
