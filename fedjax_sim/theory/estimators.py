"""This module computes mean and variance of an aggregate under a sampler and an aggregator.

Results are exact if a closed form exists or cohorts are few, and to first order otherwise. The symbols:

    u_i, n_i    the update and the weight of client i
    c_i         the number of times that client i reports in a round
    A           = sum c_i n_i u_i
    B           = sum c_i n_i
    f           the factor of a linear aggregate
    K           the number of reports, and M the number of clients in the block from which they come
    R           = sum n_i u_i / sum n_i, over the block
    z_i         = n_i (u_i - R)

Every linear aggregate of the simulator is f A, with a constant f; the mean is A / B. Given the block of clients and K,
the cohort is a uniform subset (`cohorts`). So over a block of M clients, with x = sum n_i u_i / M,

    E A       = pi sum n_i u_i                                                  pi = E K/M, pi_2 = E K(K-1)/(M(M-1))
    Var A     = (pi - pi_2) sum |n_i u_i - x|^2 + Var(K) |x|^2
    Var A/B   ~ g sum |z_i|^2 / (sum n_i)^2 + P(K > 0) P(K = 0) |R|^2
    E A/B - R ~ -g sum n_i z_i / (sum n_i)^2 - P(K = 0) R

with g = E [M (M - K) / (K (M - 1)); K > 0]. The last two are exact for equal weights; otherwise they are Cochran's
first order in 1/K.

With replacement, c_i = r_i m_i. The m_i are multinomial, with m slots and probabilities p_i, and r_i is a single
response of the client, with the rate q. Let a_i = n_i u_i and b = sum p_i a_i, and now

    R = sum p_i n_i u_i / sum p_i n_i.

Then

    E A       = q m b
    Var A     = q m sum p_i |a_i - b|^2 + q (1-q) m ((m-1) sum p_i^2 |a_i|^2 + |b|^2)
    Var A/B   ~ (q m sum p_i |z_i|^2 + q (1-q) m (m-1) sum p_i^2 |z_i|^2) / (q m sum p_i n_i)^2
    E A/B - R ~ -(q m sum p_i n_i z_i + q (1-q) m (m-1) sum p_i^2 n_i z_i) / (q m sum p_i n_i)^2

This first order leaves out the empty cohort. With few slots and much dropout, use method="exact".

Sums are taken about the mean, so that an offset that all values share costs no digits: the code subtracts `origin` from
every u_i, and adds it to the results.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.theory.cohorts import (
    MAX_COHORTS,
    blocks,
    enumerate_cohorts,
    known_response_rate,
    num_cohorts,
    report_counts,
)
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


class _Aggregate(NamedTuple):
    """An aggregate of one round whose moments are to be computed: f A, or A / B if there is no factor f."""

    design: SamplingDesign
    factor: float | None  # f; None for the ratio A / B
    target: np.ndarray  # [d] the mean over the population that the aggregate estimates
    origin: np.ndarray  # [d] is subtracted from each u_i before sums are taken
    # ([k] values of K, [k] their probabilities); None with replacement
    report_law: tuple[np.ndarray, np.ndarray] | None


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
    report_law = None if not isinstance(design, SamplingDesign) or design.replacement else report_counts(design)
    # This call also raises if `design` is no design.
    num_enumerated = num_cohorts(design)

    if isinstance(values, Moments):
        moments = values.checked()
        _check_moments(design, moments, weights, estimator)
        aggregate = _Aggregate(
            design=design,
            factor=_factor(aggregator, design, moments.weight, denominator),
            target=moments.ratio(),
            origin=np.zeros(len(moments.weighted_sum)),
            report_law=report_law,
        )
        return _from_moments(aggregate, moments, method)
    updates, reported_weights = checked_values(values, weights)
    if len(updates) != design.population_size:
        validate.fail("values", f"one row for each of the {design.population_size} clients", updates.shape)
    example_weights = reported_weights
    if weighting == "uniform":
        reported_weights = (reported_weights > 0).astype(np.float64)
    # Sums about the mean: an offset that all updates share would otherwise cost digits.
    origin = Moments.of(updates, reported_weights).ratio()
    weighted_moments = Moments.of(updates, reported_weights, origin=origin)
    target = origin + weighted_moments.ratio()
    # Li et al.'s scheme I draws clients by their examples and averages them alike, so its target is weighted.
    if estimator == "li_scheme_one":
        target = origin + Moments.of(updates, example_weights, origin=origin).ratio()
    factor = _factor(aggregator, design, weighted_moments.weight, denominator)
    # n_i of A and B. Hansen and Hurwitz divide each update by the client's draw probability.
    weights_in_sum = reported_weights
    if aggregator == "hansen_hurwitz":
        weights_in_sum = reported_weights / _draw_probabilities(design, reported_weights)
    aggregate = _Aggregate(design=design, factor=factor, target=target, origin=origin, report_law=report_law)
    if design.replacement:
        p, p_squared = _draw_moments(design)
        moments_by_p = Moments.of(updates, weights_in_sum, p, origin)
        moments_by_p_squared = Moments.of(updates, weights_in_sum, p_squared, origin)
        closed_form = _with_replacement(aggregate, moments_by_p, moments_by_p_squared)
    else:
        block_moments = _moments_of_blocks(aggregate, weighted_moments, updates, weights_in_sum)
        closed_form = _without_replacement(aggregate, block_moments)
    if closed_form.exact or method == "leading order" or (method == "auto" and num_enumerated > _FEW):
        return closed_form
    return _enumerated(aggregate, updates.astype(np.float64), weights_in_sum)


def _check_moments(design: SamplingDesign, moments: Moments, weights: Any, estimator: str) -> None:
    """Refuses sums over clients where they do not suffice: the design must treat all clients alike.

    Args:
      design: of N clients.
      moments: the user's sums over all N clients.
      weights: must be None, because the sums contain the weights.
      estimator: a name of `_ESTIMATORS`.
    """
    if weights is not None or moments.count != design.population_size or np.ndim(moments.weighted_sum) != 1:
        rule = f"Moments of the {design.population_size} clients, taken with their weights, and weights=None"
        validate.fail("values", rule, (moments.count, weights))
    # These estimators weigh clients by their own probabilities, which sums over clients do not contain.
    needs_values = estimator in ("hansen_hurwitz", "li_scheme_one")
    if design.scheme in ("cyclic", "weighted_with_replacement") or needs_values:
        validate.fail("values", "an array", "Moments", "This design does not treat all clients alike.")


def _from_moments(aggregate: _Aggregate, moments: Moments, method: str) -> DesignVariance:
    """Computes the result from sums over clients, which suffice if the design treats all clients alike.

    With replacement all draw probabilities are p_i = 1 / N, so the sums with the multipliers p_i and p_i^2 are the
    plain sums over N and N^2.

    Args:
      aggregate: with an origin of zeros, because sums cannot be taken about another origin afterwards.
      moments: sums over all N clients.
      method: as in `design_variance`; "exact" is refused where only a first order is known.
    """
    num_clients = aggregate.design.population_size
    if aggregate.design.replacement:
        moments_by_p = moments.scaled(1 / num_clients)
        moments_by_p_squared = moments.scaled(1 / num_clients**2)
        closed_form = _with_replacement(aggregate, moments_by_p, moments_by_p_squared)
    else:
        closed_form = _without_replacement(aggregate, _as_one_block(moments))
    if method == "exact" and not closed_form.exact:
        validate.fail("method", "'auto' or 'leading order'", method, "Moments cannot be enumerated, arrays can.")
    return closed_form


def _factor(aggregator: str, design: SamplingDesign, weight: float, denominator: float | None) -> float | None:
    """Computes the factor f of A in the aggregate; None for the ratio A / B.

        fixed_mean          1 / denominator
        keep_old            1 / W
        horvitz_thompson    1 / (pi W), where pi is the inclusion probability of every client
        hansen_hurwitz      1 / (m q W), for m slots that respond at the rate q; the n_i are then divided by p_i

    Args:
      aggregator: "mean" or one of these names.
      design: a design with replacement for hansen_hurwitz, and one without for horvitz_thompson.
      weight: W = sum n_i over all clients.
      denominator: above 0, in the unit of the weights n_i; None except for fixed_mean.

    Raises: ValueError for a design of the other kind.
    """
    if aggregator == "mean":
        return None
    if aggregator == "fixed_mean":
        assert denominator is not None, "design_variance refuses None"
        return 1 / denominator
    if aggregator == "keep_old":
        return 1 / weight
    # Hansen-Hurwitz counts slots, and Horvitz-Thompson counts clients that are drawn at most once.
    if (aggregator == "hansen_hurwitz") != design.replacement:
        rule = "a design with replacement" if aggregator == "hansen_hurwitz" else "a design without replacement"
        validate.fail("design", f"{rule} for {aggregator}", design.scheme)
    if aggregator == "hansen_hurwitz":
        return 1 / (design.num_slots * known_response_rate(design) * weight)
    # One number: without replacement, a design that `check_design` accepts treats all clients alike.
    return 1 / (float(design.inclusion_probabilities()) * weight)


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
    """Returns the draw probabilities p_i, [N], and p_i^2, [N], of a design with replacement."""
    num_clients = design.population_size
    p = np.full(num_clients, 1 / num_clients) if design.draw_probabilities is None else design.draw_probabilities
    return p, np.square(p)


def _moments_of_blocks(aggregate: _Aggregate, moments: Moments, updates: np.ndarray, weights: np.ndarray) -> Moments:
    """Computes the sums over each block of clients that a design without replacement draws from.

    Args:
      aggregate: its design gives the blocks, and its origin is subtracted from the updates.
      moments: sums over all N clients about the origin. They are the result if there is one block of all clients.
      updates: [N, d] u_i, which only cyclic designs need.
      weights: [N] n_i.

    Returns: `Moments` whose fields have a leading axis of b blocks: [b] or [b, d].
    """
    starts, block_size = blocks(aggregate.design)
    if len(starts) == 1 and block_size == aggregate.design.population_size:
        return _as_one_block(moments)
    return _windows(updates, weights, starts, block_size, aggregate.origin)


def _as_one_block(moments: Moments) -> Moments:
    """Returns sums over all clients with a leading axis of one block: fields [1] and [1, d]."""
    return Moments(*(np.asarray(field)[None] for field in moments))


def _without_replacement(aggregate: _Aggregate, sums: Moments) -> DesignVariance:
    """Computes the closed form of f A, or the first order of A / B, for a design without replacement.

    A block is drawn uniformly, and then the cohort within it. With the mean E_j and the variance V_j given the block j,
    the mean is the average of the E_j. The variance is the average of V_j + |E_j - mean|^2 (law of total variance).

    Args:
      aggregate: `report_law` is the law of K within a block.
      sums: sums over the M clients of each block about the origin; fields [b] and [b, d].
    """
    if aggregate.factor is None:
        means, variances, exact = _ratio(aggregate, sums)
    else:
        means, variances = _linear(aggregate, sums)
        exact = True
    mean = means.mean(0)
    # Rounding may make a variance of zero slightly negative.
    variances_within = np.maximum(variances, 0)
    variance_between = np.square(means - mean).sum(-1) if len(means) > 1 else 0.0
    variance = float(np.mean(variances_within + variance_between))
    return DesignVariance(mean=mean, target=aggregate.target, variance=variance, exact=exact)


def _linear(aggregate: _Aggregate, sums: Moments) -> tuple[np.ndarray, np.ndarray]:
    """Computes mean and variance of f A within each block, without replacement.

        E f A   = f pi sum n_i u_i
        Var f A = f^2 ((pi - pi_2) sum |n_i u_i - x|^2 + Var(K / M) |sum n_i u_i|^2)

    Here Var(K / M) |sum n_i u_i|^2 is Var(K) |x|^2 of the module's docstring.

    Args:
      aggregate: with a factor f.
      sums: sums over the M clients of each block about the origin; fields [b] and [b, d].

    Returns: (means [b, d], variances [b], traces of the covariances).
    """
    f = aggregate.factor
    assert f is not None and aggregate.report_law is not None, "a factor, without replacement"
    K, probabilities = aggregate.report_law  # [k] each
    M = blocks(aggregate.design)[1]
    pi = float(probabilities @ K) / M
    pi_2 = float(probabilities @ (K * (K - 1.0))) / (M * max(M - 1, 1))
    share_variance = float(probabilities @ np.square(K / M - pi))  # Var(K / M)
    spread, block_sum = sums.spread(aggregate.origin, M)
    variances = f**2 * ((pi - pi_2) * spread + share_variance * np.square(block_sum).sum(-1))
    return f * pi * block_sum, variances


def _ratio(aggregate: _Aggregate, sums: Moments) -> tuple[np.ndarray, np.ndarray, bool]:
    """Computes mean and variance of A / B within each block to first order in 1/K, without replacement.

        E A/B   ~ P(K > 0) R - g sum n_i z_i / (sum n_i)^2
        Var A/B ~ g sum |z_i|^2 / (sum n_i)^2 + P(K > 0) P(K = 0) |R|^2
        g = E [M (M - K) / (K (M - 1)); K > 0]

    An empty cohort gives an aggregate of 0.

    Args:
      aggregate: without a factor.
      sums: sums over the M clients of each block about the origin; fields [b] and [b, d].

    Returns: (means [b, d], variances [b], traces of the covariances, whether the results are exact). They are exact if
      all weights of a block are equal, or if K is M or 0 in every round.
    """
    assert aggregate.report_law is not None, "without replacement"
    K, probabilities = aggregate.report_law  # [k] each
    M = blocks(aggregate.design)[1]
    has_reports = K > 0
    nonempty_probability = float(probabilities[has_reports].sum())
    empty_probability = float(probabilities[~has_reports].sum())
    K_above_zero = K[has_reports]
    g = probabilities[has_reports] @ (M * (M - K_above_zero) / (K_above_zero * max(M - 1.0, 1.0)))
    # A window whose clients have no weight gives an aggregate of 0, and not 0 / 0.
    has_weight = np.asarray(sums.weight) > 0
    squared_weight = np.square(np.where(has_weight, sums.weight, 1.0))  # (sum n_i)^2
    square, cross = sums.residual()  # sum |z_i|^2 and sum n_i z_i, which no origin changes
    R = np.where(has_weight[..., None], aggregate.origin + sums.ratio(), 0)
    means = nonempty_probability * R - g * cross / squared_weight[:, None]
    variances = g * square / squared_weight + nonempty_probability * empty_probability * np.square(R).sum(-1)
    return means, variances, bool(g == 0) or sums.equal_weights()


def _windows(rows: np.ndarray, weights: np.ndarray, starts: np.ndarray, block_size: int, origin: np.ndarray) -> Moments:
    """Computes sums over each window of a cyclic order, as differences of running sums.

    Args:
      rows: [N, d] u_i of any real dtype, in the order of the cycle.
      weights: [N] n_i.
      starts: [b] int, the index of each window's first client.
      block_size: M, the clients of a window. A window that reaches beyond client N - 1 goes on with client 0.
      origin: [d], subtracted from each row.

    Returns: `Moments` with fields [b] or [b, d].
    """
    rows = rows.astype(np.float64) - origin
    squared_weights = np.square(weights)[:, None]
    squared_norms = np.square(rows).sum(1, keepdims=True)
    # [N, 3 + 2 d]: each client's term of each sum.
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
        count=np.full(len(starts), block_size),
        weight=window_sums[:, 0],
        squared_weight=window_sums[:, 1],
        weighted_sum=window_sums[:, 3 : 3 + dimension],
        squared_weighted_sum=window_sums[:, 3 + dimension :],
        square=window_sums[:, 2],
    )


def _with_replacement(aggregate: _Aggregate, by_p: Moments, by_p_squared: Moments) -> DesignVariance:
    """Computes the closed form of f A, or the first order of A / B, for a design with replacement.

    The formulas are those of the module's docstring. With q m and q (1-q) m (m-1) for the factors of the sums with p_i
    and with p_i^2,

        E f A   = f q m b
        Var f A = f^2 (q m sum p_i |a_i - b|^2 + q (1-q) m (m-1) sum p_i^2 |a_i|^2 + q (1-q) m |b|^2)
        E A/B   ~ R - (q m sum p_i n_i z_i + q (1-q) m (m-1) sum p_i^2 n_i z_i) / (q m sum p_i n_i)^2
        Var A/B ~ (q m sum p_i |z_i|^2 + q (1-q) m (m-1) sum p_i^2 |z_i|^2) / (q m sum p_i n_i)^2

    Args:
      aggregate: its design has m slots and the response rate q.
      by_p: sums over all clients about the origin, each term times p_i; scalars and [d].
      by_p_squared: the same sums, each term times p_i^2.

    Returns: `DesignVariance`; exact for f A, and for A / B if all weights are equal and q = 1.
    """
    f = aggregate.factor
    m = aggregate.design.num_slots
    q = known_response_rate(aggregate.design)
    factor_of_p = q * m
    factor_of_p_squared = q * (1 - q) * m * (m - 1)
    if f is not None:
        # The p_i sum to one, so with size 1 the spread is sum p_i |a_i - b|^2.
        spread, b = by_p.spread(aggregate.origin, 1)
        # An infinite size subtracts no mean: sum p_i^2 |a_i|^2.
        squared_sum = by_p_squared.spread(aggregate.origin, math.inf)[0]
        variance = f**2 * (factor_of_p * spread + factor_of_p_squared * squared_sum + q * (1 - q) * m * b @ b)
        return DesignVariance(
            mean=f * factor_of_p * b, target=aggregate.target, variance=max(float(variance), 0.0), exact=True
        )
    R = by_p.ratio()  # minus the origin
    square, cross = by_p.residual()  # sum p_i |z_i|^2 and sum p_i n_i z_i
    # sum p_i^2 |z_i|^2 and sum p_i^2 n_i z_i; `residual` would take the R of other weights.
    square_by_p_squared = (
        by_p_squared.square - 2 * R @ by_p_squared.squared_weighted_sum + by_p_squared.squared_weight * R @ R
    )
    cross_by_p_squared = by_p_squared.squared_weighted_sum - by_p_squared.squared_weight * R
    squared_divisor = (factor_of_p * by_p.weight) ** 2  # (E B)^2
    mean = aggregate.origin + R - (factor_of_p * cross + factor_of_p_squared * cross_by_p_squared) / squared_divisor
    variance = (factor_of_p * square + factor_of_p_squared * max(float(square_by_p_squared), 0.0)) / squared_divisor
    # The p_i sum to one, so the difference is the variance of the weights.
    weights_are_equal = abs(by_p.squared_weight - by_p.weight**2) <= 1e-12 * by_p.weight**2
    return DesignVariance(
        mean=mean, target=aggregate.target, variance=float(variance), exact=bool(weights_are_equal and q == 1)
    )


def _enumerated(aggregate: _Aggregate, rows: np.ndarray, weights: np.ndarray) -> DesignVariance:
    """Computes exact moments: sums over every cohort, each with its probability.

    Args:
      aggregate: its design has at most `MAX_COHORTS` cohorts.
      rows: [N, d] float64 u_i, the origin included.
      weights: [N] n_i.
    """
    mean = np.zeros(rows.shape[1])
    square = 0.0
    for probabilities, counts in enumerate_cohorts(aggregate.design, limit=MAX_COHORTS):
        # counts: [s, N] c_i of s cohorts; A: [s, d].
        A = counts @ (weights[:, None] * rows)
        if aggregate.factor is None:
            B = (counts @ weights)[:, None]
            aggregates = np.divide(A, B, out=np.zeros_like(A), where=B > 0)
        else:
            aggregates = aggregate.factor * A
        # Moments about the target, so that their difference loses no digits.
        aggregates -= aggregate.target
        mean += probabilities @ aggregates
        square += float(probabilities @ np.square(aggregates).sum(1))
    variance = max(square - float(mean @ mean), 0.0)
    return DesignVariance(mean=aggregate.target + mean, target=aggregate.target, variance=variance, exact=True)
