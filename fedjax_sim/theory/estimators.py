"""This module computes mean and variance of an aggregate under a sampler and an aggregator.

Results are exact if a closed form exists or cohorts are few, and to first order otherwise. Every linear aggregate of
the simulator is A / B with A = sum_i c_i n_i u_i, if client i reports c_i times. B is a constant, or B = sum_i c_i n_i
for the mean. Given the block of clients and the number K of reports, the cohort is a uniform subset (`cohorts`). So
over a block of M clients, with x = sum n_i u_i / M,

    Var A     = (pi - pi_2) sum |n_i u_i - x|^2 + Var(K) |x|^2,                 pi = E K/M, pi_2 = E K(K-1)/(M(M-1))
    Var A/B   ~ g sum |z_i|^2 / (sum n_i)^2 + P(K > 0) P(K = 0) |R|^2           R = sum n_i u_i / sum n_i
    E A/B - R ~ -g sum n_i z_i / (sum n_i)^2 - P(K = 0) R                       z_i = n_i (u_i - R)

with g = E [M (M - K) / (K (M - 1)); K > 0]. The last two are exact for equal weights; otherwise they are Cochran's
first order in 1/K.

With replacement, c_i = r_i m_i, where the m_i are multinomial and r_i is a single response of the client. Let q be the
response rate, a_i = n_i u_i and b = sum p a. Then Var A = q m sum p |a - b|^2 + q (1-q) m ((m-1) sum p^2 |a|^2 +
|b|^2). The ratio's first order leaves out the empty cohort there. With few slots and much dropout, use method="exact".

Sums are taken about the mean, so that an offset that all values share costs no digits.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.theory.cohorts import MAX_COHORTS, blocks, enumerate_cohorts, num_cohorts, report_counts
from fedjax_sim.theory.moments import Moments, checked_values
from fedjax_sim.validate import Positive

# Name of an estimator -> (the aggregator whose formula it uses, its default weighting).
_ESTIMATORS = {
    "mean": ("mean", "examples"),
    "li_scheme_one": ("mean", "uniform"),
    "fixed_mean": ("fixed_mean", "uniform"),
    "keep_old": ("keep_old", "examples"),
    "horvitz_thompson": ("horvitz_thompson", "examples"),
    "li_scheme_two": ("horvitz_thompson", "examples"),
    "hansen_hurwitz": ("hansen_hurwitz", "examples"),
}
_FEW = 1 << 12  # up to so many cohorts are enumerated with method="auto"


class DesignVariance(NamedTuple):
    """The mean of one round's aggregate and its variance around the mean. An empty cohort gives an aggregate of zero.

    >>> DesignVariance(np.array([1.0]), np.array([0.5]), 2.0, True).mean_squared_error
    2.25
    """

    mean: np.ndarray  # [d] of the aggregate
    target: np.ndarray  # [d] mean over the population under the weighting
    variance: float  # trace of the aggregate's covariance
    exact: bool  # False for a first-order formula

    @property
    def bias(self) -> np.ndarray:
        """[d] mean - target."""
        return self.mean - self.target

    @property
    def mean_squared_error(self) -> float:
        """E |aggregate - target|^2."""
        return self.variance + float(self.bias @ self.bias)


@validate.named_arguments
def design_variance(
    design: SamplingDesign,
    values: Any,
    weights: Any = None,
    *,
    estimator: str = "mean",
    weighting: str | None = None,
    denominator: Positive | None = None,
    method: Literal["auto", "exact", "leading order"] = "auto",
) -> DesignVariance:
    """Computes mean, bias and variance of one round's aggregate under a sampling design and an aggregator.

    Args:
      design: `sampler.design`, including its dropout and over-invitation.
      values: u, [N] or [N, d], the update that each client would send. Or `Moments` of the updates, taken with the
        weights that the aggregator uses; the design must then treat all clients alike, in no order.
      weights: n, [N] >= 0, the weights that clients report (numbers of examples); None = 1. A client with weight 0 does
        not count.
      estimator: an aggregator: "mean", "fixed_mean", "keep_old", "horvitz_thompson", "li_scheme_one" or "li_scheme_two"
        (keep_old and horvitz_thompson with W = sum n_i); or "hansen_hurwitz", the sum over slots of n_i u_i / (m p_i
        W), for designs with replacement.
      weighting: "examples" or "uniform", for mean and fixed_mean; None = the aggregator's default.
      denominator: the divisor of fixed_mean; None for every other estimator.
      method: "exact": a closed form, or every cohort one by one. "leading order": first order in 1/K for ratios.
        "auto": exact if there is a closed form or at most 4,096 cohorts.

    Returns: `DesignVariance`. For cyclic designs it describes a round at a random moment; rounds are then not
    independent.

    Raises: ValueError for weights, estimators and designs that do not fit together, and for more than 2^21 cohorts to
    enumerate. TypeError if `design` is no design.

    Guarantees: Closed forms equal the enumeration of all cohorts
    (tests/theory/test_design_variance.py::test_closed_forms_equal_enumeration). Both equal the moments of real samplers
    and aggregators (::test_real_rounds_have_the_predicted_moments). The relative error of first order is O(1/m)
    (::test_leading_order_improves_with_the_cohort). Sums suffice instead of values (::test_moments_suffice).

    References: Cochran 1977, chapters 2, 6 (ratio) and 9A (Hansen-Hurwitz, Horvitz-Thompson); Li et al. 2020.

    >>> pair = SamplingDesign(scheme="uniform_without_replacement", population_size=2, cohort_size=1, num_slots=1)
    >>> law = design_variance(pair, [0.0, 1.0], [1, 9])
    >>> float(law.mean[0]), float(law.target[0]), law.variance
    (0.5, 0.9, 0.25)
    >>> design_variance(pair, [0.0, 1.0], [1, 9], estimator="horvitz_thompson").mean.round(12).tolist()
    [0.9]
    """
    validate.one_of("estimator", estimator, _ESTIMATORS)
    aggregator, default_weighting = _ESTIMATORS[estimator]
    if weighting is not None and estimator not in ("mean", "fixed_mean"):
        validate.fail("weighting", f"None with {estimator}", weighting, "Only mean and fixed_mean have a choice.")
    weighting = default_weighting if weighting is None else weighting
    validate.one_of("weighting", weighting, ("examples", "uniform"))
    if (aggregator == "fixed_mean") != (denominator is not None):
        validate.fail("denominator", "a number for fixed_mean, else None", denominator)
    counts = None if not isinstance(design, SamplingDesign) or design.replacement else report_counts(design)
    # This call also raises if `design` is no design.
    num_enumerated = num_cohorts(design)

    if isinstance(values, Moments):
        return _from_moments(design, values.checked(), weights, estimator, denominator, counts, method)
    updates, reported_weights = checked_values(values, weights)
    if len(updates) != design.population_size:
        validate.fail("values", f"one row for each of the {design.population_size} clients", updates.shape)
    example_weights = reported_weights
    if weighting == "uniform":
        reported_weights = (reported_weights > 0).astype(np.float64)
    # Sums about the mean: an offset that all updates share would otherwise cost digits.
    origin = Moments.of(updates, reported_weights).ratio()
    weighted_moments = Moments.of(updates, reported_weights, origin=origin)
    weights_in_sum = reported_weights
    target = origin + weighted_moments.ratio()
    # Li et al.'s scheme I draws clients by their examples and averages them alike, so its target is weighted.
    if estimator == "li_scheme_one":
        target = origin + Moments.of(updates, example_weights, origin=origin).ratio()
    factor = _factor(aggregator, design, weighted_moments.weight, denominator)
    if aggregator == "hansen_hurwitz":
        weights_in_sum = reported_weights / _draw_probabilities(design, reported_weights)
    replacement_moments = (
        [Moments.of(updates, weights_in_sum, multiplier, origin) for multiplier in _draw_moments(design)]
        if design.replacement
        else None
    )
    closed_form = _closed_form(
        design,
        weighted_moments if replacement_moments is None else replacement_moments,
        updates,
        weights_in_sum,
        factor,
        counts,
        target,
        origin,
    )
    if closed_form.exact or method == "leading order" or (method == "auto" and num_enumerated > _FEW):
        return closed_form
    return _enumerated(design, updates.astype(np.float64), weights_in_sum, factor, target)


def _from_moments(design, moments, weights, estimator, denominator, counts, method) -> DesignVariance:
    """Computes the result from sums over clients, which suffice if the design treats all clients alike."""
    if weights is not None or moments.count != design.population_size or np.ndim(moments.weighted_sum) != 1:
        rule = f"Moments of the {design.population_size} clients, taken with their weights, and weights=None"
        validate.fail("values", rule, (moments.count, weights))
    # These estimators weigh clients by their own probabilities, which sums over clients do not contain.
    needs_values = estimator in ("hansen_hurwitz", "li_scheme_one")
    if design.scheme in ("cyclic", "weighted_with_replacement") or needs_values:
        validate.fail("values", "an array", "Moments", "This design does not treat all clients alike.")
    factor = _factor(_ESTIMATORS[estimator][0], design, moments.weight, denominator)
    num_clients = design.population_size
    sums = [moments.scaled(1 / num_clients), moments.scaled(1 / num_clients**2)] if design.replacement else moments
    closed_form = _closed_form(
        design, sums, None, None, factor, counts, moments.ratio(), np.zeros(len(moments.weighted_sum))
    )
    if method == "exact" and not closed_form.exact:
        validate.fail("method", "'auto' or 'leading order'", method, "Moments cannot be enumerated, arrays can.")
    return closed_form


def _factor(aggregator: str, design: SamplingDesign, weight: float, denominator: float | None) -> float | None:
    """Computes the factor of sum c_i n_i u_i in the aggregate; None if the sum is divided by sum c_i n_i."""
    if aggregator == "mean":
        return None
    if aggregator == "fixed_mean":
        return 1 / denominator
    if aggregator == "keep_old":
        return 1 / weight
    # Hansen-Hurwitz counts slots, and Horvitz-Thompson counts clients that are drawn at most once.
    if (aggregator == "hansen_hurwitz") != design.replacement:
        rule = "a design with replacement" if aggregator == "hansen_hurwitz" else "a design without replacement"
        validate.fail("design", f"{rule} for {aggregator}", design.scheme)
    if aggregator == "hansen_hurwitz":
        return 1 / (design.num_slots * design.response_rate * weight)
    return 1 / (design.inclusion_probabilities() * weight)


def _draw_probabilities(design: SamplingDesign, weights: np.ndarray) -> np.ndarray:
    """Returns the probabilities of one draw, [N]; 1 for a client with neither probability nor weight.

    The result is a divisor, so it must not be 0.
    """
    if design.draw_probabilities is None:
        return np.full(len(weights), 1 / len(weights))
    if (weights[design.draw_probabilities == 0] > 0).any():
        validate.fail("design", "a chance for every client with a weight", "0", "Without one they are never drawn.")
    return np.where(design.draw_probabilities > 0, design.draw_probabilities, 1.0)


def _draw_moments(design: SamplingDesign) -> tuple[np.ndarray, np.ndarray]:
    """Returns the draw probabilities p, [N], and p^2 of a design with replacement."""
    num_clients = design.population_size
    draw_probabilities = (
        np.full(num_clients, 1 / num_clients) if design.draw_probabilities is None else design.draw_probabilities
    )
    return draw_probabilities, np.square(draw_probabilities)


def _closed_form(design, sums, rows, weights, factor, counts, target, origin) -> DesignVariance:
    """Computes the closed form, or the first order for ratios with unequal weights.

    Args:
      sums: `Moments` of all clients about `origin`; with replacement a pair, with multipliers p and p^2.
      rows: [N, d] updates, which only cyclic designs need.
      factor: as from `_factor`.
      counts: as from `report_counts`; None with replacement.
    """
    if design.replacement:
        return _with_replacement(design, *sums, factor, target, origin)
    starts, block_size = blocks(design)
    block_moments = sums if len(starts) == 1 and block_size == design.population_size else None
    if block_moments is None:
        block_moments = _windows(rows, weights, starts, block_size, origin)
    else:
        block_moments = Moments(*(np.asarray(field)[None] for field in block_moments))
    report_numbers, probabilities = counts
    if factor is None:
        means, variances, exact = _ratio(block_moments, block_size, report_numbers, probabilities, origin)
    else:
        inclusion = float(probabilities @ report_numbers) / block_size
        pair_inclusion = float(probabilities @ (report_numbers * (report_numbers - 1.0))) / (
            block_size * max(block_size - 1, 1)
        )
        spread, block_sum = block_moments.spread(origin, block_size)
        count_variance = float(probabilities @ np.square(report_numbers / block_size - inclusion))
        variances = factor**2 * ((inclusion - pair_inclusion) * spread + count_variance * np.square(block_sum).sum(-1))
        means = factor * inclusion * block_sum
        exact = True
    mean = means.mean(0)
    # The window of a cyclic order is random too: the law of total variance.
    variance_between = np.square(means - mean).sum(-1) if len(means) > 1 else 0.0
    return DesignVariance(mean, target, float(np.mean(np.maximum(variances, 0) + variance_between)), exact)


def _ratio(
    sums: Moments, size: int, report_numbers: np.ndarray, probabilities: np.ndarray, origin: np.ndarray
) -> tuple:
    """Computes (means [b, d], variances [b], exact) of the mean over K reports, for each block of clients.

    The formulas are those in the module's docstring.
    """
    has_reports = report_numbers > 0
    nonempty_probability = float(probabilities[has_reports].sum())
    empty_probability = float(probabilities[~has_reports].sum())
    g = probabilities[has_reports] @ (
        size * (size - report_numbers[has_reports]) / (report_numbers[has_reports] * max(size - 1.0, 1.0))
    )
    # A window whose clients have no weight gives an aggregate of 0, and not 0 / 0.
    squared_weight = np.square(np.where(np.asarray(sums.weight) > 0, sums.weight, 1.0))
    square, cross = sums.residual()
    has_weight = np.asarray(sums.weight)[..., None] > 0
    ratio = np.where(has_weight, origin + sums.ratio(), 0)
    means = nonempty_probability * ratio - g * cross / squared_weight[:, None]
    variances = g * square / squared_weight + nonempty_probability * empty_probability * np.square(ratio).sum(-1)
    return means, variances, bool(g == 0) or sums.equal_weights()


def _windows(rows: np.ndarray, weights: np.ndarray, starts: np.ndarray, block_size: int, origin: np.ndarray) -> Moments:
    """Computes moments of each window of a cyclic order, as differences of running sums."""
    rows = rows.astype(np.float64) - origin
    squared_weights = np.square(weights)[:, None]
    squared_norms = np.square(rows).sum(1, keepdims=True)
    terms = np.concatenate(
        [
            weights[:, None],
            squared_weights,
            squared_weights * squared_norms,
            weights[:, None] * rows,
            squared_weights * rows,
        ],
        axis=1,
    )
    # The first clients are repeated at the end, because the last windows wrap around.
    running = np.cumsum(np.concatenate([np.zeros_like(terms[:1]), terms, terms[:block_size]]), axis=0)
    window_sums = running[starts + block_size] - running[starts]
    dimension = rows.shape[1]
    return Moments(
        np.full(len(starts), block_size),
        window_sums[:, 0],
        window_sums[:, 1],
        window_sums[:, 3 : 3 + dimension],
        window_sums[:, 3 + dimension :],
        window_sums[:, 2],
    )


def _with_replacement(design, once: Moments, twice: Moments, factor, target, origin) -> DesignVariance:
    """Evaluates the formulas with replacement. `once` and `twice` are moments with multipliers p and p^2."""
    slots = design.num_slots
    q = design.response_rate
    slot_rate = q * slots
    pair_rate = q * (1 - q) * slots * (slots - 1)
    if factor is not None:
        # With a fixed factor the sum over slots is linear, so its variance is exact.
        spread, weighted_sum = once.spread(origin, 1)
        # An infinite size subtracts no mean: sum p^2 |a|^2.
        squared_sum = twice.spread(origin, math.inf)[0]
        variance = factor**2 * (
            slot_rate * spread + pair_rate * squared_sum + q * (1 - q) * slots * weighted_sum @ weighted_sum
        )
        return DesignVariance(factor * slot_rate * weighted_sum, target, max(float(variance), 0.0), True)
    ratio = once.ratio()
    square, cross = once.residual()
    square_two = twice.square - 2 * ratio @ twice.squared_weighted_sum + twice.squared_weight * ratio @ ratio
    cross_two = twice.squared_weighted_sum - twice.squared_weight * ratio
    # A ratio: first order about its expected divisor, the expected number of slots times the mean weight.
    squared = (slot_rate * once.weight) ** 2
    mean = origin + ratio - (slot_rate * cross + pair_rate * cross_two) / squared
    # The p sum to one, so this is the variance of the weights.
    weights_are_equal = abs(once.squared_weight - once.weight**2) <= 1e-12 * once.weight**2
    variance = (slot_rate * square + pair_rate * max(float(square_two), 0.0)) / squared
    return DesignVariance(mean, target, float(variance), bool(weights_are_equal and q == 1))


def _enumerated(design, rows, weights, factor, target) -> DesignVariance:
    """Computes exact moments, summed over every cohort."""
    mean = np.zeros(rows.shape[1])
    square = 0.0
    for probabilities, counts in enumerate_cohorts(design, limit=MAX_COHORTS):
        aggregates = counts @ (weights[:, None] * rows)
        if factor is None:
            divisor = counts @ weights
            aggregates = np.divide(
                aggregates, divisor[:, None], out=np.zeros_like(aggregates), where=divisor[:, None] > 0
            )
        else:
            aggregates = factor * aggregates
        # Moments about the target, so that their difference loses no digits.
        aggregates -= target
        mean += probabilities @ aggregates
        square += float(probabilities @ np.square(aggregates).sum(1))
    return DesignVariance(target + mean, target, max(square - float(mean @ mean), 0.0), True)
