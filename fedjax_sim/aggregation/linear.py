"""Linear aggregators compute an exact weighted sum of the updates and divide it by a number.

They sum with `engine.exact_sums`, so an aggregate has the same bits for every order of the cohort, chunk size, padding
and number of devices. An update counts if its weight is positive. The leaves of an update are floats, or integers of at
most 16 bits. Wider integers are refused, since float32 would round them
(tests/aggregation/test_linear.py::test_integers_that_would_be_rounded_are_refused).

With N clients, weights w_i, W = the sum of w_i over the population, pi_i = the probability that client i reports, and
S = the reporting cohort, the aggregate is

    mean                sum_S w_i u_i / sum_S w_i       a ratio estimator: biased unless the weights are equal
    fixed_mean(D)       sum_S u_i / D                   D does not depend on data: bounded sensitivity
    total               sum_S u_i
    horvitz_thompson    sum_S w_i u_i / (pi_i W)        unbiased for sum_i w_i u_i / W
    keep_old            sum_S w_i u_i / W               absent clients keep the old model
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import tree, validate
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.types import Aggregator, AggregatorFacts, Array
from fedjax_sim.validate import FromData, Positive

MAX_CONSTANT = 1 << 20  # the largest number of probabilities that a compiled program holds as a constant
WEIGHTINGS = ("examples", "uniform")


@runtime_checkable
class Design(Protocol):
    """What `horvitz_thompson` reads of a `SamplingDesign`."""

    scheme: str

    @property
    def replacement(self) -> bool:
        """Whether a client may be drawn more than once in a round."""
        ...

    def inclusion_probabilities(self) -> float | np.ndarray:
        """The probabilities that clients report."""
        ...


def _check_weighting(weighting: str) -> None:
    validate.one_of("weighting", weighting, WEIGHTINGS, hint="'examples' uses the weight that a client reports.")


def _message_weights(weighting: str, weights: Array) -> Array:
    """Returns the weights of messages, [c]: as reported, or 1 for every message that arrived."""
    return weights if weighting == "examples" else (weights > 0).astype(weights.dtype)


def _weighted_sum(weigh: Callable, finish: Callable, sensitivity: float | None, **facts) -> Aggregator:
    """Makes an aggregator that returns finish(sum_i a_i u_i, sum_i a_i) of exact sums.

    Args:
      weigh: (ids [c], reported weights [c]) -> the weights a [c].
      finish: (weighted sum of the updates, sum of the weights) -> aggregate.
      sensitivity: as `AggregatorFacts` has it; None = unbounded.
      facts: further facts.
    """

    def init(update_spec, num_slots):
        for path, leaf in jax.tree_util.tree_leaves_with_path(update_spec):
            if jnp.issubdtype(leaf.dtype, jnp.integer) and leaf.dtype.itemsize > 2:
                hint = "Sums are float32 and would round them: send floats, or declare the integers' range (quantize)."
                rule = "floats, or integers of at most 16 bits"
                validate.fail(f"update{jax.tree_util.keystr(path)}", rule, str(leaf.dtype), hint, TypeError)
        return exact_sums.zeros((update_spec, jax.ShapeDtypeStruct((), jnp.float32)))

    def accumulate(key, cohort, carry, received):
        weights = weigh(received.ids, received.weights)

        # Products are float32 at least. In bfloat16 a weight would be rounded here, and so differ from the weight in
        # the sum by which the aggregate is divided.
        def product(x):
            flat = x.reshape(x.shape[0], -1)  # XLA:CPU multiplies rows of one axis faster
            flat = flat.astype(tree.at_least_float32(x.dtype, weights.dtype))
            return (flat * weights.astype(flat.dtype)[:, None]).reshape(x.shape)

        return exact_sums.add(carry, (jax.tree.map(product, received.updates), weights))

    def finalize(key, cohort, carry):
        updates, total_weight = exact_sums.total(carry)
        return finish(updates, total_weight), {"total_weight": total_weight}

    return Aggregator(init, accumulate, finalize, AggregatorFacts(sensitivity=sensitivity, homogeneous=True, **facts))


def _divided(denominator: float) -> Callable:
    """A `finish` that divides the sum by a constant, whatever the weights."""
    return lambda updates, total_weight: jax.tree.map(lambda x: x * (1 / denominator), updates)


def mean(*, weighting: str = "examples") -> Aggregator:
    """The aggregate is the mean of the reporting clients' updates: sum_S w_i u_i / sum_S w_i.

    Weighted by examples and with partial participation, the mean is a ratio estimator, biased for the population's
    mean.

    Args:
      weighting: "examples" (the weight that each client reports) or "uniform" (every client counts once).

    Returns: an Aggregator; the metric `total_weight` is sum_S w_i. Sensitivity is unbounded, since the divisor depends
    on data.

    Raises: ValueError for a weighting that is neither of the two.

    Guarantees:
      - equals a float64 mean in which each addend w_i u_i is off by at most 2^-23 of the largest addend at its
        coordinate (tests/aggregation/test_linear.py::test_matches_a_float64_oracle)
      - weights may be scaled by a power of two without changing a bit (::test_weights_may_be_scaled)
      - a round without messages gives zero, not NaN (::test_empty_cohort_is_zero)
      - with weighting by examples the mean is biased (::test_ratio_estimator_is_biased_and_horvitz_thompson_is_not)

    References: McMahan et al. 2017, algorithm 1; Cochran 1977, chapter 6.
    """
    _check_weighting(weighting)

    def finish(updates, total_weight):
        @functools.cache
        def reciprocal(dtype):
            divisor = total_weight.astype(dtype)
            # The inner `where` keeps the unused branch finite, so a round without messages gives zero.
            return jnp.where(divisor > 0, 1 / jnp.where(divisor > 0, divisor, 1), 0)

        return jax.tree.map(lambda x: x * reciprocal(x.dtype), updates)

    by_examples = weighting == "examples"
    return _weighted_sum(lambda ids, weights: _message_weights(weighting, weights), finish, None, weighted=by_examples)


@validate.named_arguments
def fixed_mean(denominator: Positive, *, weighting: str = "uniform") -> Aggregator:
    """The aggregate is the sum of the updates, divided by a number fixed beforehand: sum_S w_i u_i / D.

    Args:
      denominator: D, positive, such as the expected cohort size.
      weighting: "uniform" (w_i = 1) or "examples" (the weight that each client reports).

    Returns: an Aggregator; its sensitivity is 1 / D with uniform weights, and unbounded by examples.

    Raises: ValueError for a denominator that is not positive, and for another weighting.

    Guarantees: with uniform weights one client's update moves the aggregate by at most its norm / denominator
    (tests/laws/test_aggregators.py::test_declared_sensitivity_holds).

    References: McMahan et al. 2018 (DP-FedAvg), section 2.2, estimator f_f.
    """
    _check_weighting(weighting)
    is_bounded = weighting == "uniform"  # by examples, one client's weight moves the sum without bound
    return _weighted_sum(
        lambda ids, weights: _message_weights(weighting, weights),
        _divided(denominator),
        1 / denominator if is_bounded else None,
        weighted=not is_bounded,
    )


def total(*, weighting: str = "uniform") -> Aggregator:
    """The aggregate is the sum of the updates: sum_S w_i u_i.

    Args:
      weighting: "uniform" or "examples", as in `fixed_mean`.

    Returns: an Aggregator; its sensitivity is 1 with uniform weights, and unbounded by examples.

    Guarantees: the sum is within the error of `engine.exact_sums`
    (tests/aggregation/test_linear.py::test_matches_a_float64_oracle).
    """
    return fixed_mean(1.0, weighting=weighting)


@validate.named_arguments
def horvitz_thompson(
    design: Annotated[Any, FromData("design")], total_weight: Annotated[Positive, FromData("total_weight")]
) -> Aggregator:
    """The aggregate is the Horvitz-Thompson estimate of the population's weighted mean update.

    The aggregate is sum_S w_i u_i / (pi_i W), where pi_i is the probability that client i reports. Clients who report
    rarely count for more when they do, so the estimate is unbiased for sum_i w_i u_i / W.

    Args:
      design: the sampler's `SamplingDesign`, whose inclusion probabilities are the pi_i.
      total_weight: W, the sum of the weights of all N clients.

    Returns: an Aggregator whose fact `design` is the given design, so that it is refused with another sampler.

    Raises: TypeError for an argument that is no design; ValueError for a design with replacement, of an unknown scheme,
      or with clients of probability 0.

    Guarantees: the estimate is unbiased over the design
    (tests/aggregation/test_linear.py::test_ratio_estimator_is_biased_and_horvitz_thompson_is_not).

    References: Horvitz and Thompson 1952; Cochran 1977, section 9A.7.
    """
    if not isinstance(design, Design):
        validate.fail("design", "a SamplingDesign", design, "A sampler carries it: sampler.design.", TypeError)
    if design.replacement:
        validate.fail("design", "a design without replacement", design.scheme, "Use li_scheme_one with `weighted`.")
    probabilities = np.asarray(design.inclusion_probabilities(), np.float64)
    if not (probabilities > 0).all():
        lowest = float(probabilities.min())
        validate.fail("design", "inclusion probabilities > 0", lowest, "Those clients never report.")
    if probabilities.ndim == 0:  # all clients have the same probability
        return fixed_mean(float(probabilities * total_weight), weighting="examples").stating(design=design)
    validate.integer("inclusion probabilities", probabilities.size, 1, MAX_CONSTANT, hint="They become a constant.")
    factors = np.float32(1 / (probabilities * total_weight))  # [N] 1 / (pi_i W), computed in float64
    return _weighted_sum(
        lambda ids, weights: weights * jnp.asarray(factors)[ids], lambda updates, _: updates, None, design=design
    )


def keep_old(total_weight: Annotated[float, FromData("total_weight")]) -> Aggregator:
    """The aggregate is sum_S (w_i / W) u_i, as if absent clients reported the old model, an update of zero.

    Args:
      total_weight: W, the sum of the weights of all N clients.

    Returns: an Aggregator of unbounded sensitivity.

    Guarantees: the mean when everybody reports, and smaller by the absent clients' share otherwise
    (tests/aggregation/test_linear.py::test_keep_old_shrinks_by_the_absent_share).

    References: McMahan et al. 2017, the update w <- sum_k (n_k/n) w_k as written for all K clients.
    """
    return fixed_mean(total_weight, weighting="examples")


def li_scheme_one() -> Aggregator:
    """The aggregate is the unweighted mean, which is unbiased where clients are drawn in proportion to their data.

    It is for cohorts drawn with replacement with the probabilities p_i = w_i / W (`sampling.weighted`).

    Guarantees: the aggregate is unbiased under that sampler
    (tests/aggregation/test_linear.py::test_li_schemes_are_unbiased).

    References: Li et al. 2020 (On the convergence of FedAvg on non-IID data), section 3.3, scheme I.
    """
    return mean(weighting="uniform")


def li_scheme_two(
    design: Annotated[Any, FromData("design")], total_weight: Annotated[float, FromData("total_weight")]
) -> Aggregator:
    """The aggregate is (N/m) sum_S p_i u_i, with p_i = w_i / W, for uniform cohorts without replacement.

    This is the Horvitz-Thompson estimate at pi_i = m/N, in its form with updates. The paper averages models, with
    weights that do not sum to 1, which also rescales the old model. For that form compose `client.send_model` with
    `server.replacement`.

    Args:
      design: the sampler's `SamplingDesign`, as in `horvitz_thompson`.
      total_weight: W, the sum of the weights of all N clients.

    Returns: the Aggregator of `horvitz_thompson`.

    Raises: as `horvitz_thompson` does.

    Guarantees: the mean of the aggregate over all cohorts is sum_i p_i u_i over all N clients, if every message arrives
    (tests/aggregation/test_linear.py::test_li_schemes_are_unbiased).

    References: Li et al. 2020, section 3.3, scheme II.
    """
    return horvitz_thompson(design, total_weight)
