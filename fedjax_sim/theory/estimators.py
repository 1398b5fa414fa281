"""What the variance of an aggregate is under a sampler and an aggregator: exact where closed or few, else first order.

Every linear aggregate of the simulator is A / B with A = sum_i c_i n_i u_i and B a constant, or B = sum_i c_i n_i for
the mean, where client i reports c_i times. Given the block in turn and the number K of reports, the cohort is a uniform
subset (`cohorts`), so over a block of M clients, with x = sum n_i u_i / M,

    Var A     = (pi - pi_2) sum |n_i u_i - x|^2 + Var(K) |x|^2,                 pi = E K/M, pi_2 = E K(K-1)/(M(M-1))
    Var A/B   ~ g sum |z_i|^2 / (sum n_i)^2 + P(K > 0) P(K = 0) |R|^2           R = sum n_i u_i / sum n_i
    E A/B - R ~ -g sum n_i z_i / (sum n_i)^2 - P(K = 0) R                       z_i = n_i (u_i - R)

with g = E [M (M - K) / (K (M - 1)); K > 0]. The last two are exact for equal weights; else they are Cochran's first
order in 1/K. With replacement, c_i = r_i m_i for m_i multinomial and r_i one response a client:
Var A = q m sum p |a - b|^2 + q (1-q) m ((m-1) sum p^2 |a|^2 + |b|^2) for a_i = n_i u_i, b = sum p a, response rate q.
Sums are taken about the mean, so that an offset that all values share costs no digits.
There the ratio's first order leaves out the empty cohort: with few slots and much dropout ask for method="exact".
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

__all__ = ["DesignVariance", "design_variance"]

_ESTIMATORS = {  # name: (the aggregator it stands for, its own weighting)
    "mean": ("mean", "examples"),
    "li_scheme_one": ("mean", "uniform"),
    "fixed_mean": ("fixed_mean", "uniform"),
    "keep_old": ("keep_old", "examples"),
    "horvitz_thompson": ("horvitz_thompson", "examples"),
    "li_scheme_two": ("horvitz_thompson", "examples"),
    "hansen_hurwitz": ("hansen_hurwitz", "examples"),
}
_FEW = 1 << 12  # cohorts that are enumerated without being asked


class DesignVariance(NamedTuple):
    """What one round's aggregate is on average and how far it strays; an empty cohort gives zero.

    >>> DesignVariance(np.array([1.0]), np.array([0.5]), 2.0, True).mean_squared_error
    2.25
    """

    mean: np.ndarray  # [d] of the aggregate
    target: np.ndarray  # [d] the population's mean under the weighting
    variance: float  # trace of the aggregate's covariance
    exact: bool  # not a first-order formula

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
    """Mean, bias and variance of one round's aggregate under this sampler and this aggregator.

    Args:
      design: `sampler.design`, with its dropout and over-invitation.
      values: u, [N] or [N, d], the update that each client would send; or `Moments` of them with the weights that the
        aggregator uses (where the design treats clients alike and in no order).
      weights: n, [N] >= 0, what clients report (examples); None = 1. A client of weight 0 does not count.
      estimator: an aggregator: "mean", "fixed_mean", "keep_old", "horvitz_thompson", "li_scheme_one", "li_scheme_two"
        (keep_old and horvitz_thompson with W = sum n_i); or "hansen_hurwitz", sum over slots n_i u_i / (m p_i W) for
        designs with replacement.
      weighting: "examples" or "uniform" for mean and fixed_mean; None = the aggregator's default.
      denominator: of fixed_mean.
      method: "exact" (a closed form, or every cohort one by one), "leading order" (first order in 1/K for ratios), or
        "auto" (exact where closed or at most 4,096 cohorts).

    Returns: a `DesignVariance`. Cyclic designs: of a round at a random moment; its rounds are not independent.

    Raises: ValueError for weights, estimators and designs that do not fit, and more than 2^21 cohorts to enumerate;
      TypeError for what is no design.

    Guarantees: closed forms equal the enumeration of all cohorts
    (tests/theory/test_design_variance.py::test_closed_forms_equal_enumeration), both equal what real samplers and
    aggregators do (::test_real_rounds_have_the_predicted_moments), first order errs by O(1/m) relatively
    (::test_leading_order_improves_with_the_cohort), and sums suffice (::test_moments_suffice).

    References: Cochran 1977, chapters 2, 6 (ratio) and 9A (Hansen-Hurwitz, Horvitz-Thompson); Li et al. 2020.

    >>> pair = SamplingDesign(scheme="uniform_without_replacement", population_size=2, cohort_size=1, num_slots=1)
    >>> law = design_variance(pair, [0.0, 1.0], [1, 9])
    >>> float(law.mean[0]), float(law.target[0]), law.variance
    (0.5, 0.9, 0.25)
    >>> design_variance(pair, [0.0, 1.0], [1, 9], estimator="horvitz_thompson").mean.round(12).tolist()
    [0.9]
    """
    validate.one_of("estimator", estimator, _ESTIMATORS)
    kind, own = _ESTIMATORS[estimator]
    if weighting is not None and estimator not in ("mean", "fixed_mean"):
        validate.fail("weighting", f"None with {estimator}", weighting, "Only mean and fixed_mean have a choice.")
    weighting = own if weighting is None else weighting
    validate.one_of("weighting", weighting, ("examples", "uniform"))
    if (kind == "fixed_mean") != (denominator is not None):
        validate.fail("denominator", "a number for fixed_mean, else None", denominator)
    counts = None if not isinstance(design, SamplingDesign) or design.replacement else report_counts(design)
    number = num_cohorts(design)  # complains of what is no design

    if isinstance(values, Moments):
        return _from_moments(design, values.checked(), weights, estimator, denominator, counts, method)
    rows, reported = checked_values(values, weights)
    if len(rows) != design.population_size:
        validate.fail("values", f"one row for each of the {design.population_size} clients", rows.shape)
    by_examples = reported
    if weighting == "uniform":
        reported = (reported > 0).astype(np.float64)
    origin = Moments.of(rows, reported).ratio()
    total, used = Moments.of(rows, reported, origin=origin), reported
    target = origin + total.ratio()
    if estimator == "li_scheme_one":  # it draws by examples, and averages alike
        target = origin + Moments.of(rows, by_examples, origin=origin).ratio()
    factor = _factor(kind, design, total.weight, denominator)
    if kind == "hansen_hurwitz":
        used = reported / _drawn(design, reported)
    sums = [Moments.of(rows, used, share, origin) for share in _shares(design)] if design.replacement else None
    found = _closed(design, total if sums is None else sums, rows, used, factor, counts, target, origin)
    if found.exact or method == "leading order" or (method == "auto" and number > _FEW):
        return found
    return _enumerated(design, rows.astype(np.float64), used, factor, target)


def _from_moments(design, moments, weights, estimator, denominator, counts, method) -> DesignVariance:
    if weights is not None or moments.count != design.population_size or np.ndim(moments.weighted_sum) != 1:
        rule = f"Moments of the {design.population_size} clients, taken with their weights, and weights=None"
        validate.fail("values", rule, (moments.count, weights))
    unequal = estimator in ("hansen_hurwitz", "li_scheme_one")
    if design.scheme in ("cyclic", "weighted_with_replacement") or unequal:
        validate.fail("values", "an array", "Moments", "This design does not treat all clients alike.")
    factor = _factor(_ESTIMATORS[estimator][0], design, moments.weight, denominator)
    size = design.population_size
    sums = [moments.scaled(1 / size), moments.scaled(1 / size**2)] if design.replacement else moments
    found = _closed(design, sums, None, None, factor, counts, moments.ratio(), np.zeros(len(moments.weighted_sum)))
    if method == "exact" and not found.exact:
        validate.fail("method", "'auto' or 'leading order'", method, "Moments cannot be enumerated, arrays can.")
    return found


def _factor(kind: str, design: SamplingDesign, weight: float, denominator: float | None) -> float | None:
    """What multiplies sum c_i n_i u_i; None = it is divided by sum c_i n_i."""
    if kind == "mean":
        return None
    if kind == "fixed_mean":
        return 1 / denominator
    if kind == "keep_old":
        return 1 / weight
    if (kind == "hansen_hurwitz") != design.replacement:
        rule = "a design with replacement" if kind == "hansen_hurwitz" else "a design without replacement"
        validate.fail("design", f"{rule} for {kind}", design.scheme)
    if kind == "hansen_hurwitz":
        return 1 / (design.num_slots * design.response_rate * weight)
    return 1 / (design.inclusion_probabilities() * weight)


def _drawn(design: SamplingDesign, weights: np.ndarray) -> np.ndarray:
    """[N] the law of one draw; 1 where a client has neither chance nor weight."""
    if design.draw_probabilities is None:
        return np.full(len(weights), 1 / len(weights))
    if (weights[design.draw_probabilities == 0] > 0).any():
        validate.fail("design", "a chance for every client with a weight", "0", "Without one they are never drawn.")
    return np.where(design.draw_probabilities > 0, design.draw_probabilities, 1.0)


def _shares(design: SamplingDesign) -> tuple[np.ndarray, np.ndarray]:
    """[N] p and p^2 of a design with replacement."""
    size = design.population_size
    drawn = np.full(size, 1 / size) if design.draw_probabilities is None else design.draw_probabilities
    return drawn, np.square(drawn)


def _closed(design, sums, rows, weights, factor, counts, target, origin) -> DesignVariance:
    if design.replacement:
        return _with_replacement(design, *sums, factor, target, origin)
    starts, members = blocks(design)
    in_blocks = sums if len(starts) == 1 and members == design.population_size else None
    if in_blocks is None:
        in_blocks = _windows(rows, weights, starts, members, origin)
    else:
        in_blocks = Moments(*(np.asarray(field)[None] for field in in_blocks))
    size, (number, chance) = members, counts
    if factor is None:
        means, variances, exact = _ratio(in_blocks, size, number, chance, origin)
    else:
        once = float(chance @ number) / size
        twice = float(chance @ (number * (number - 1.0))) / (size * max(size - 1, 1))
        spread, whole = in_blocks.spread(origin, size)
        of_number = float(chance @ np.square(number / size - once))
        variances = factor**2 * ((once - twice) * spread + of_number * np.square(whole).sum(-1))
        means, exact = factor * once * whole, True
    mean = means.mean(0)
    between = np.square(means - mean).sum(-1) if len(means) > 1 else 0.0
    return DesignVariance(mean, target, float(np.mean(np.maximum(variances, 0) + between)), exact)


def _ratio(sums: Moments, size: int, number: np.ndarray, chance: np.ndarray, origin: np.ndarray) -> tuple:
    some = number > 0
    present, absent = float(chance[some].sum()), float(chance[~some].sum())
    spread = chance[some] @ (size * (size - number[some]) / (number[some] * max(size - 1.0, 1.0)))
    squared = np.square(np.where(np.asarray(sums.weight) > 0, sums.weight, 1.0))
    (square, cross), there = sums.residual(), np.asarray(sums.weight)[..., None] > 0
    ratio = np.where(there, origin + sums.ratio(), 0)
    means = present * ratio - spread * cross / squared[:, None]
    variances = spread * square / squared + present * absent * np.square(ratio).sum(-1)
    return means, variances, bool(spread == 0) or sums.equal_weights()


def _windows(rows: np.ndarray, weights: np.ndarray, starts: np.ndarray, members: int, origin: np.ndarray) -> Moments:
    """Moments of each window of a cyclic order, by running sums."""
    rows = rows.astype(np.float64) - origin
    twice, square = np.square(weights)[:, None], np.square(rows).sum(1, keepdims=True)
    terms = np.concatenate([weights[:, None], twice, twice * square, weights[:, None] * rows, twice * rows], axis=1)
    running = np.cumsum(np.concatenate([np.zeros_like(terms[:1]), terms, terms[:members]]), axis=0)
    sums, d = running[starts + members] - running[starts], rows.shape[1]
    return Moments(
        np.full(len(starts), members), sums[:, 0], sums[:, 1], sums[:, 3 : 3 + d], sums[:, 3 + d :], sums[:, 2]
    )


def _with_replacement(design, once: Moments, twice: Moments, factor, target, origin) -> DesignVariance:
    """`once` and `twice` are sums with p and with p^2."""
    slots, q = design.num_slots, design.response_rate
    single, double = q * slots, q * (1 - q) * slots * (slots - 1)
    if factor is not None:
        spread, whole = once.spread(origin, 1)
        own = twice.spread(origin, math.inf)[0]  # sum p^2 |a|^2
        variance = factor**2 * (single * spread + double * own + q * (1 - q) * slots * whole @ whole)
        return DesignVariance(factor * single * whole, target, max(float(variance), 0.0), True)
    ratio, (square, cross) = once.ratio(), once.residual()
    square_two = twice.square - 2 * ratio @ twice.squared_weighted_sum + twice.squared_weight * ratio @ ratio
    cross_two = twice.squared_weighted_sum - twice.squared_weight * ratio
    squared = (single * once.weight) ** 2
    mean = origin + ratio - (single * cross + double * cross_two) / squared
    equal = abs(once.squared_weight - once.weight**2) <= 1e-12 * once.weight**2  # the p sum to one
    variance = (single * square + double * max(float(square_two), 0.0)) / squared
    return DesignVariance(mean, target, float(variance), bool(equal and q == 1))


def _enumerated(design, rows, weights, factor, target) -> DesignVariance:
    mean, square = np.zeros(rows.shape[1]), 0.0
    for chances, counts in enumerate_cohorts(design, limit=MAX_COHORTS):
        found = counts @ (weights[:, None] * rows)
        if factor is None:
            divisor = counts @ weights
            found = np.divide(found, divisor[:, None], out=np.zeros_like(found), where=divisor[:, None] > 0)
        else:
            found = factor * found
        found -= target
        mean += chances @ found
        square += float(chances @ np.square(found).sum(1))
    return DesignVariance(target + mean, target, max(square - float(mean @ mean), 0.0), True)
