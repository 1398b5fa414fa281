"""The random weights c_i that an aggregator gives the clients of a cohort: their means and covariances.

A round moves the model by server_rate * sum_i c_i u_i over all N clients, with c_i = 0 for absent clients. The first
two moments of c are all that the mean and covariance of the model depend on.

    fixed       c_i = p_i Z_i / E Z_i             `horvitz_thompson`, Li's schemes; unbiased
    realised    c_i = p_i Z_i / sum_j p_j Z_j     `mean`: a ratio, unbiased only for equal shares
    a number    c_i = N p_i Z_i / D               `fixed_mean(D)`: of clients alike, or by examples, D per mean client

Z_i is how often client i reports. Where all report alike, `fixed` is the number N E Z = E K.
"""

from __future__ import annotations

import dataclasses
import numbers

import numpy as np

from fedjax_sim import validate
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.theory.cohorts import check_design, enumerate_cohorts, num_cohorts, report_counts

__all__ = ["DENOMINATORS", "Coefficients", "cohort_coefficients"]

DENOMINATORS = ("fixed", "realised")
ENUMERATED = 1 << 16  # cohorts that are listed one by one


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """Moments of c: Cov(c) = sum_r scales_r modes_r modes_r^T, with `diag(diagonal)` instead of N unit modes."""

    mean: np.ndarray  # [N]
    diagonal: np.ndarray  # [N]
    modes: np.ndarray  # [r, N]
    scales: np.ndarray  # [r]
    exact: bool  # False: the ratio's leading order in 1/m

    @property
    def second(self) -> np.ndarray:
        """[N] E c_i^2."""
        return self.mean**2 + self.diagonal + self.scales @ self.modes**2

    def spread(self, values: np.ndarray, others: np.ndarray) -> np.ndarray:
        """sum_ij Cov(c)_ij values_i others_j^T of flattened rows: [A, B] from [N, A] and [N, B]."""
        pairs = (values * self.diagonal[:, None]).T @ others
        return pairs + ((self.modes @ values) * self.scales[:, None]).T @ (self.modes @ others)


def _covariance(mean: np.ndarray, second: np.ndarray, pair: float, exact: bool = True) -> Coefficients:
    """E c_i^2 = second_i and E c_i c_j = pair mean_i mean_j."""
    return Coefficients(mean, second - pair * mean**2, mean[None], np.array([pair - 1.0]), exact)


def _fixed(design: SamplingDesign, shares: np.ndarray) -> Coefficients:
    size = len(shares)
    if design.replacement:
        drawn = np.full(size, 1 / size) if design.draw_probabilities is None else design.draw_probabilities
        if not (np.asarray(drawn)[shares > 0] > 0).all():
            validate.fail("draw_probabilities", "numbers > 0 where the share is", 0.0, "They are never drawn.")
        slots, rate = design.num_slots, design.response_rate
        each = 1 / (slots * np.where(drawn > 0, drawn, 1)) + (slots - 1) / slots
        return _covariance(shares, shares**2 * each / rate, (slots - 1) / slots)
    counts, chances = report_counts(design)
    included = chances @ counts / size
    pairs = chances @ (counts * (counts - 1.0)) / max(size * (size - 1), 1)
    return _covariance(shares, shares**2 / included, pairs / included**2)


def _equal(design: SamplingDesign, size: int) -> Coefficients:
    """The plain mean over K > 0 reports; without reports the model stays."""
    counts, chances = report_counts(design)
    some = counts > 0
    counts, chances = counts[some], chances[some]
    mean = np.full(size, chances.sum() / size)
    second = np.full(size, chances @ (1 / counts) / size)
    pairs = chances @ (1 - 1 / counts) / max(size * (size - 1), 1)
    return _covariance(mean, second, pairs / mean[0] ** 2)


def _enumerated(design: SamplingDesign, shares: np.ndarray) -> Coefficients:
    mean, second = np.zeros(len(shares)), np.zeros((len(shares), len(shares)))
    for chances, counts in enumerate_cohorts(design):
        weights = counts * shares
        total = weights.sum(1, keepdims=True)
        weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
        mean += chances @ weights
        second += (weights * chances[:, None]).T @ weights
    scales, vectors = np.linalg.eigh(second - np.outer(mean, mean))
    return Coefficients(mean, np.zeros(len(shares)), vectors.T, scales, True)


def _linearised(design: SamplingDesign, shares: np.ndarray) -> Coefficients:
    """c = x / sum x for s = E x / sum E x: Cov c = (I - s 1^T) Cov x (I - 1 s^T), E c = s - (I - s 1^T) Cov x 1.

    To first order, given the number of reports where all clients are alike; c = 0 where there are none.
    """
    drawn = design.draw_probabilities if design.draw_probabilities is not None else np.ones(len(shares))
    s, size = shares * drawn / (shares @ drawn), len(shares)
    if design.replacement:
        v, absent = _fixed(design, s).diagonal, (1 - design.response_rate) ** design.num_slots  # at least
        if not (absent <= 0.01):
            validate.fail("design", "an empty cohort in at most 1 % of rounds", absent, "No leading order is known.")
        absent = 0.0
    else:
        counts, chances = report_counts(design)
        some = counts > 0
        v = s**2 * (chances[some] @ (size * (size - counts[some]) / (counts[some] * max(size - 1.0, 1.0))))
        absent = float(chances[~some].sum())
    mean = (1 - absent) * s - v + s * v.sum()
    if not (mean >= 0).all():
        validate.fail("design", "more reports", design, "To leading order some of these shares never count.")
    # (I - s 1^T) (diag v + k s s^T) (I - 1 s^T) = diag v - s v^T - v s^T + s s^T sum v, whatever k
    scales = np.array([1.0, v.sum() - 1.0 + absent * (1 - absent), -1.0])
    return Coefficients(mean, v, np.stack([s - v, s, v]), scales, False)


def cohort_coefficients(
    design: SamplingDesign | None, shares: np.ndarray, *, denominator: str | float = "fixed"
) -> Coefficients:
    """The moments of the clients' weights c_i under a design.

    Args:
      design: a sampler's `SamplingDesign`; None = all clients in every round.
      shares: [N] p_i.
      denominator: "fixed", "realised", or a number D > 0: see the module.

    Returns: `Coefficients`; `realised` with unequal shares is exact up to 65,536 cohorts, beyond them to leading order.

    Raises: TypeError for what is no design; ValueError for one of an unknown scheme, for another N, for rounds that
      depend on each other, and for so few reports that the leading order makes no sense.

    Guarantees: the moments over all cohorts (tests/theory/test_floor.py::test_coefficients_are_the_moments_of_cohorts),
    and near them to leading order (::test_the_ratio_to_leading_order, test_the_ratio_with_empty_cohorts).

    >>> design = SamplingDesign(scheme="uniform_without_replacement", population_size=4, cohort_size=2, num_slots=2)
    >>> print(cohort_coefficients(design, np.full(4, 0.25)).second)
    [0.125 0.125 0.125 0.125]
    """
    number = isinstance(denominator, numbers.Real)
    if number:
        validate.positive("denominator", denominator)
    else:
        validate.one_of("denominator", denominator, DENOMINATORS, hint="Or the number D of fixed_mean(D).")
    if design is None:
        shares = shares * len(shares) / denominator if number else shares
        return Coefficients(shares, np.zeros(len(shares)), np.zeros((0, len(shares))), np.zeros(0), True)
    check_design(design)
    if design.population_size != len(shares):
        validate.fail("design.population_size", f"the {len(shares)} clients of the problem", design.population_size)
    if not design.independent_rounds:
        validate.fail("design.scheme", "rounds that are independent", design.scheme, "No closed form for cycles.")
    if number:
        drawn = 1 / len(shares) if design.draw_probabilities is None else design.draw_probabilities
        once = design.num_slots * design.response_rate * drawn  # E Z
        once = once if design.replacement else design.inclusion_probabilities()
        return _fixed(design, len(shares) / denominator * shares * once)
    if denominator == "fixed":
        return _fixed(design, shares)
    equal = np.ptp(shares) <= 1e-12 * shares.max()
    if equal and not design.replacement:
        return _equal(design, len(shares))
    if equal and design.scheme == "with_replacement" and design.response_rate == 1:
        return _fixed(design, shares)  # the divisor is m in every round
    if num_cohorts(design) <= ENUMERATED:
        return _enumerated(design, shares)
    return _linearised(design, shares)
