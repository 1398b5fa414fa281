"""Linear aggregators: exact weighted sums of updates, divided by a number.

All of them sum with `engine.exact_sums`, so an aggregate has the same bits for any order, chunk, padding and device
count. An update counts if its weight is positive. Its leaves are floats, or integers of at most 16 bits: float32 would
round others, which are refused (tests/aggregation/test_linear.py::test_integers_that_would_be_rounded_are_refused).
With N clients, weights w_i, W = sum of w_i over the population, pi_i the probability that client i reports, and S the
reporting cohort, the aggregate is

    mean                sum_S w_i u_i / sum_S w_i       a ratio estimator: biased unless the weights are equal
    fixed_mean(D)       sum_S u_i / D                   D is data-independent: bounded sensitivity
    total               sum_S u_i
    horvitz_thompson    sum_S w_i u_i / (pi_i W)        unbiased for sum_i w_i u_i / W
    keep_old            sum_S w_i u_i / W               absent clients keep the old model
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import tree, validate
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.types import Aggregator, AggregatorFacts, Array
from fedjax_sim.validate import FromData, Positive

__all__ = [
    "fixed_mean",
    "horvitz_thompson",
    "keep_old",
    "li_scheme_one",
    "li_scheme_two",
    "mean",
    "total",
]

MAX_CONSTANT = 1 << 20  # most probabilities that a compiled program holds as a constant
WEIGHTINGS = ("examples", "uniform")


def _check_weighting(weighting: str) -> None:
    validate.one_of("weighting", weighting, WEIGHTINGS, hint="'examples' uses the weight that a client reports.")


def _message_weights(weighting: str, weights: Array) -> Array:
    return weights if weighting == "examples" else (weights > 0).astype(weights.dtype)


def _weighted_sum(weigh: Callable, finish: Callable, sensitivity: float | None, **facts) -> Aggregator:
    """sum_i weigh(ids, weights)_i u_i, exactly, then finish(sum, sum of those weights)."""

    def init(update_spec, num_slots):
        for path, x in jax.tree_util.tree_leaves_with_path(update_spec):
            if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize > 2:
                hint = "Sums are float32 and would round them: send floats, or declare the integers' range (quantize)."
                rule = "floats, or integers of at most 16 bits"
                validate.fail(f"update{jax.tree_util.keystr(path)}", rule, str(x.dtype), hint, TypeError)
        return exact_sums.zeros((update_spec, jax.ShapeDtypeStruct((), jnp.float32)))

    def accumulate(key, cohort, carry, received):
        weights = weigh(received.ids, received.weights)

        def product(x):  # in float32 at least: in bfloat16 a weight would differ from the one that is divided by
            flat = x.reshape(x.shape[0], -1)  # XLA:CPU likes one axis
            flat = flat.astype(tree.at_least_float32(x.dtype, weights.dtype))
            return (flat * weights.astype(flat.dtype)[:, None]).reshape(x.shape)

        return exact_sums.add(carry, (jax.tree.map(product, received.updates), weights))

    def finalize(key, cohort, carry):
        updates, weight = exact_sums.total(carry)
        return finish(updates, weight), {"total_weight": weight}

    return Aggregator(init, accumulate, finalize, AggregatorFacts(sensitivity=sensitivity, homogeneous=True, **facts))


def _divided(denominator: float) -> Callable:
    return lambda updates, weight: jax.tree.map(lambda x: x * (1 / denominator), updates)


def mean(*, weighting: str = "examples") -> Aggregator:
    """The mean of the reporting clients' updates, by examples or uniform.

    Args:
      weighting: "examples" (the weight each client reports) or "uniform" (every client counts once).

    Guarantees: equals a float64 mean as if each addend w_i u_i were off by at most 2^-23 of the largest at its
    coordinate (tests/aggregation/test_linear.py::test_matches_a_float64_oracle); weights may be scaled by a power of
    two without changing a bit (::test_weights_may_be_scaled); nothing received gives zero, not NaN
    (::test_empty_cohort_is_zero). By examples with partial participation it is a ratio estimator, biased for the
    population's mean (::test_ratio_estimator_is_biased_and_horvitz_thompson_is_not). Sensitivity is unbounded: the
    divisor depends on data.

    References: McMahan et al. 2017, algorithm 1; Cochran 1977, chapter 6.
    """
    _check_weighting(weighting)

    def finish(updates, weight):
        def divided(x):
            by = weight.astype(x.dtype)
            return x * jnp.where(by > 0, 1 / jnp.where(by > 0, by, 1), 0)

        return jax.tree.map(divided, updates)

    by_examples = weighting == "examples"
    return _weighted_sum(lambda ids, weights: _message_weights(weighting, weights), finish, None, weighted=by_examples)


@validate.named_arguments
def fixed_mean(denominator: Positive, *, weighting: str = "uniform") -> Aggregator:
    """The sum of the updates divided by a number fixed beforehand, such as the expected cohort size.

    Args:
      denominator: positive.
      weighting: "uniform" or "examples".

    Guarantees: with uniform weights one client's update moves the aggregate by at most its norm / denominator
    (tests/laws/test_aggregators.py::test_declared_sensitivity_holds).

    References: McMahan et al. 2018 (DP-FedAvg), section 2.2, estimator f_f.
    """
    _check_weighting(weighting)
    bounded = weighting == "uniform"
    return _weighted_sum(
        lambda ids, weights: _message_weights(weighting, weights),
        _divided(denominator),
        1 / denominator if bounded else None,
        weighted=not bounded,
    )


def total(*, weighting: str = "uniform") -> Aggregator:
    """The sum of the updates.

    Args:
      weighting: "uniform" or "examples", as in `fixed_mean`.

    Guarantees: within the error of `engine.exact_sums`
    (tests/aggregation/test_linear.py::test_matches_a_float64_oracle).
    """
    return fixed_mean(1.0, weighting=weighting)


@validate.named_arguments
def horvitz_thompson(
    design: Annotated[Any, FromData("design")], total_weight: Annotated[Positive, FromData("total_weight")]
) -> Aggregator:
    """The unbiased estimate of the population's weighted mean update: an update's weight is w_i / (pi_i W).

    Args:
      design: the sampler's `SamplingDesign`, whose inclusion probabilities are used.
      total_weight: W, the sum of the weights of all N clients.

    Raises: TypeError for what is no design; ValueError for one with replacement, of an unknown scheme, or with clients
      of probability 0.

    Guarantees: unbiased over the design (tests/aggregation/test_linear.py::
    test_ratio_estimator_is_biased_and_horvitz_thompson_is_not).

    References: Horvitz and Thompson 1952; Cochran 1977, section 9A.7.
    """
    if not hasattr(design, "inclusion_probabilities"):
        validate.fail("design", "a SamplingDesign", design, "A sampler carries it: sampler.design.", TypeError)
    if design.replacement:
        validate.fail("design", "a design without replacement", design.scheme, "Use li_scheme_one with `weighted`.")
    probabilities = np.asarray(design.inclusion_probabilities(), np.float64)
    if not (probabilities > 0).all():
        lowest = float(probabilities.min())
        validate.fail("design", "inclusion probabilities > 0", lowest, "Those clients never report.")
    if probabilities.ndim == 0:
        return fixed_mean(float(probabilities * total_weight), weighting="examples").stating(design=design)
    validate.integer("inclusion probabilities", probabilities.size, 1, MAX_CONSTANT, hint="They become a constant.")
    factors = np.float32(1 / (probabilities * total_weight))
    return _weighted_sum(
        lambda ids, weights: weights * jnp.asarray(factors)[ids], lambda updates, _: updates, None, design=design
    )


def keep_old(total_weight: Annotated[float, FromData("total_weight")]) -> Aggregator:
    """Absent clients keep the old model: sum_S (w_i / W) u_i.

    Args:
      total_weight: W, the sum of the weights of all N clients.

    Guarantees: the mean when everybody reports, and smaller by the absent clients' share otherwise
    (tests/aggregation/test_linear.py::test_keep_old_shrinks_by_the_absent_share).

    References: McMahan et al. 2017, the update w <- sum_k (n_k/n) w_k as written for all K clients.
    """
    return fixed_mean(total_weight, weighting="examples")


def li_scheme_one() -> Aggregator:
    """The unweighted mean, for cohorts drawn with replacement in proportion to the data (`sampling.weighted`).

    Guarantees: unbiased under that sampler (tests/aggregation/test_linear.py::test_li_schemes_are_unbiased).

    References: Li et al. 2020 (On the convergence of FedAvg on non-IID data), section 3.3, scheme I.
    """
    return mean(weighting="uniform")


def li_scheme_two(
    design: Annotated[Any, FromData("design")], total_weight: Annotated[float, FromData("total_weight")]
) -> Aggregator:
    """(N/m) sum_S p_i u_i for uniform cohorts without replacement: Horvitz-Thompson at pi = m/N.

    This is the form with updates. The paper averages models with weights that do not sum to one, which also rescales
    the old model: compose `client.send_model` with `server.replacement` for that form.

    Args:
      design, total_weight: as in `horvitz_thompson`.

    Guarantees: unbiased (tests/aggregation/test_linear.py::test_li_schemes_are_unbiased).

    References: Li et al. 2020, section 3.3, scheme II.
    """
    return horvitz_thompson(design, total_weight)
