"""This module gives means and covariances of the random weights c_i that an aggregator gives the clients of a cohort.

A round moves the model by server_rate * sum_i c_i u_i over all N clients, with c_i = 0 for absent clients. The mean and
covariance of the model depend on c through the first two moments only.

    fixed       c_i = p_i Z_i / E Z_i             `horvitz_thompson`, Li's schemes; unbiased
    realised    c_i = p_i Z_i / sum_j p_j Z_j     `mean`: a ratio, unbiased only for equal shares
    a number    c_i = N p_i Z_i / D               `fixed_mean(D)`; with weights by examples, D is per mean client

Z_i is the number of times that client i reports. If all clients report alike, `fixed` is the number D = N E Z = E K.
"""

from __future__ import annotations

import dataclasses
import numbers

import numpy as np

from fedjax_sim import validate
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.theory.cohorts import (
    check_design,
    enumerate_cohorts,
    known_response_rate,
    num_cohorts,
    report_counts,
)

DENOMINATORS = ("fixed", "realised")
ENUMERATED = 1 << 16  # up to so many cohorts are enumerated one by one


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """Moments of the weights c: E c = mean, and Cov(c) = diag(diagonal) + sum_r scales_r modes_r modes_r^T.

    The diagonal has a field of its own, which saves N unit modes.
    """

    mean: np.ndarray  # [N]
    diagonal: np.ndarray  # [N]
    modes: np.ndarray  # [r, N]
    scales: np.ndarray  # [r]
    exact: bool  # False: the moments of the ratio are to leading order in 1/m

    @property
    def second(self) -> np.ndarray:
        """[N] E c_i^2."""
        return self.mean**2 + self.diagonal + self.scales @ self.modes**2

    def spread(self, values: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Computes the sum over i and j of Cov(c)_ij values_i others_j^T.

        Args:
          values: [N, A] flattened rows.
          others: [N, B] flattened rows.

        Returns: [A, B].
        """
        from_diagonal = (values * self.diagonal[:, None]).T @ others
        return from_diagonal + ((self.modes @ values) * self.scales[:, None]).T @ (self.modes @ others)


def _covariance(mean: np.ndarray, second: np.ndarray, pair: float, exact: bool = True) -> Coefficients:
    """Computes moments with E c_i^2 = second_i and E c_i c_j = pair mean_i mean_j for i != j.

    They are Cov(c) = diag(second - pair mean^2) + (pair - 1) mean mean^T.
    """
    return Coefficients(
        mean=mean, diagonal=second - pair * mean**2, modes=mean[None], scales=np.array([pair - 1.0]), exact=exact
    )


def _fixed(design: SamplingDesign, shares: np.ndarray) -> Coefficients:
    """Computes exact moments of c_i = p_i Z_i / E Z_i, whose denominator does not depend on the cohort.

        E c_i = p_i,    E c_i^2 = p_i^2 E Z_i^2 / (E Z_i)^2,    E c_i c_j = p_i p_j E Z_i Z_j / (E Z_i E Z_j)

    With replacement, in m slots with draw probabilities d_i and the response rate q, the two ratios are

        (1 / (m d_i) + (m - 1) / m) / q    and    (m - 1) / m

    Without replacement, with pi = E K / N, they are

        1 / pi    and    E K (K - 1) / (N (N - 1)) / pi^2

    Args:
      design: of N clients, all of which respond at one rate; not cyclic in order.
      shares: [N] p_i >= 0. They need not sum to 1.

    Raises: ValueError for a client with a share that is never drawn.
    """
    num_clients = len(shares)
    if design.replacement:
        draw_probabilities = (
            np.full(num_clients, 1 / num_clients) if design.draw_probabilities is None else design.draw_probabilities
        )
        if not (np.asarray(draw_probabilities)[shares > 0] > 0).all():
            validate.fail("draw_probabilities", "numbers > 0 where the share is", 0.0, "They are never drawn.")
        slots = design.num_slots  # m
        response_rate = known_response_rate(design)  # q
        # E Z_i^2 / (E Z_i)^2 of multinomial counts. A client drops out of all of its slots, which divides this ratio by
        # the response rate, and leaves that of a pair of clients as it is.
        relative_second_moment = (
            1 / (slots * np.where(draw_probabilities > 0, draw_probabilities, 1)) + (slots - 1) / slots
        )
        return _covariance(shares, shares**2 * relative_second_moment / response_rate, (slots - 1) / slots)
    counts, probabilities = report_counts(design)
    inclusion_probability = probabilities @ counts / num_clients
    pair_moment = probabilities @ (counts * (counts - 1.0)) / max(num_clients * (num_clients - 1), 1)
    return _covariance(shares, shares**2 / inclusion_probability, float(pair_moment / inclusion_probability**2))


def _equal(design: SamplingDesign, size: int) -> Coefficients:
    """Computes moments of the plain mean over K > 0 reports. If nobody reports, all weights are zero."""
    counts, probabilities = report_counts(design)
    has_reports = counts > 0
    counts = counts[has_reports]
    probabilities = probabilities[has_reports]
    mean = np.full(size, probabilities.sum() / size)
    second = np.full(size, probabilities @ (1 / counts) / size)
    pair_moment = probabilities @ (1 - 1 / counts) / max(size * (size - 1), 1)
    return _covariance(mean, second, pair_moment / mean[0] ** 2)


def _enumerated(design: SamplingDesign, shares: np.ndarray) -> Coefficients:
    """Computes exact moments of the ratio c_i = p_i Z_i / sum_j p_j Z_j, summed over all cohorts."""
    mean = np.zeros(len(shares))
    second = np.zeros((len(shares), len(shares)))
    for probabilities, counts in enumerate_cohorts(design):
        weights = counts * shares
        total = weights.sum(1, keepdims=True)
        weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
        mean += probabilities @ weights
        second += (weights * probabilities[:, None]).T @ weights
    scales, vectors = np.linalg.eigh(second - np.outer(mean, mean))
    return Coefficients(mean, np.zeros(len(shares)), vectors.T, scales, exact=True)


def _linearised(design: SamplingDesign, shares: np.ndarray) -> Coefficients:
    """Computes moments of the ratio c = x / sum x to leading order, for designs with too many cohorts to enumerate.

    Let x_i = p_i Z_i over its expected sum, so that sum E x = 1, and s = E x. Then

        Cov c = (I - s 1^T) Cov x (I - 1 s^T),    E c = s - (I - s 1^T) Cov x 1

    With Cov x = diag v + k s s^T, these are diag v - s v^T - v s^T + s s^T sum v, and s - v + s sum v, whatever k is.
    The expansion is taken given the number K of reports, if all clients are alike. Then

        v = s^2 E[N (N - K) / (K (N - 1)); K > 0].

    c = 0 if nobody reports, so E c and Cov c also have terms with the probability of K = 0.

    Args:
      design: of N clients, with too many cohorts to enumerate.
      shares: [N] p_i >= 0.

    Returns: `Coefficients` with exact=False.

    Raises: ValueError for so many empty cohorts, or so few reports, that the expansion makes no sense.
    """
    draw_probabilities = design.draw_probabilities if design.draw_probabilities is not None else np.ones(len(shares))
    s = shares * draw_probabilities / (shares @ draw_probabilities)
    num_clients = len(shares)
    if design.replacement:
        v = _fixed(design, s).diagonal
        # A lower bound on the probability of an empty cohort: a client that drops out does so in all of its slots.
        empty_probability = (1 - known_response_rate(design)) ** design.num_slots
        if not (empty_probability <= 0.01):
            validate.fail(
                "design", "an empty cohort in at most 1 % of rounds", empty_probability, "No leading order is known."
            )
        empty_probability = 0.0
    else:
        counts, probabilities = report_counts(design)
        has_reports = counts > 0
        v = s**2 * (
            probabilities[has_reports]
            @ (num_clients * (num_clients - counts[has_reports]) / (counts[has_reports] * max(num_clients - 1.0, 1.0)))
        )
        empty_probability = float(probabilities[~has_reports].sum())
    mean = (1 - empty_probability) * s - v + s * v.sum()
    if not (mean >= 0).all():
        validate.fail("design", "more reports", design, "To leading order some of these shares never count.")
    # The modes s - v, s and v: -s v^T - v s^T = (s - v) (s - v)^T - s s^T - v v^T.
    scales = np.array([1.0, v.sum() - 1.0 + empty_probability * (1 - empty_probability), -1.0])
    return Coefficients(mean=mean, diagonal=v, modes=np.stack([s - v, s, v]), scales=scales, exact=False)


def cohort_coefficients(
    design: SamplingDesign | None, shares: np.ndarray, *, denominator: str | float = "fixed"
) -> Coefficients:
    """Computes the moments of the clients' weights c_i under a sampling design.

    Args:
      design: a sampler's `SamplingDesign`; None = all clients in every round.
      shares: [N] p_i.
      denominator: "fixed", "realised", or a number D > 0, as in the module's docstring.

    Returns: `Coefficients`. With "realised" and unequal shares they are exact for up to 65,536 cohorts, and to leading
    order for more.

    Raises: TypeError if `design` is no design. ValueError for a design with an unknown scheme or for another N, for
    rounds that depend on each other, and for so few reports that the leading order makes no sense.

    Guarantees: The moments equal those over all cohorts
    (tests/theory/test_floor.py::test_coefficients_are_the_moments_of_cohorts). To leading order they are near them
    (::test_the_ratio_to_leading_order, ::test_the_ratio_with_empty_cohorts).

    >>> design = SamplingDesign(scheme="uniform_without_replacement", population_size=4, cohort_size=2, num_slots=2)
    >>> print(cohort_coefficients(design, np.full(4, 0.25)).second)
    [0.125 0.125 0.125 0.125]
    """
    is_number = isinstance(denominator, numbers.Real)
    if is_number:
        validate.positive("denominator", denominator)
    else:
        validate.one_of("denominator", denominator, DENOMINATORS, hint="Or the number D of fixed_mean(D).")
    if design is None:
        shares = shares * len(shares) / denominator if is_number else shares
        return Coefficients(shares, np.zeros(len(shares)), np.zeros((0, len(shares))), np.zeros(0), exact=True)
    check_design(design)
    if design.population_size != len(shares):
        validate.fail("design.population_size", f"the {len(shares)} clients of the problem", design.population_size)
    if not design.independent_rounds:
        validate.fail("design.scheme", "rounds that are independent", design.scheme, "No closed form for cycles.")
    if is_number:
        draw_probability = 1 / len(shares) if design.draw_probabilities is None else design.draw_probabilities
        # E Z, the expected number of times that each client reports.
        expected_reports = design.num_slots * known_response_rate(design) * draw_probability
        expected_reports = expected_reports if design.replacement else design.inclusion_probabilities()
        # c_i = N p_i Z_i / D is the fixed case with shares N p_i E Z_i / D.
        return _fixed(design, len(shares) / denominator * shares * expected_reports)
    if denominator == "fixed":
        return _fixed(design, shares)
    shares_are_equal = np.ptp(shares) <= 1e-12 * shares.max()
    if shares_are_equal and not design.replacement:
        return _equal(design, len(shares))
    if shares_are_equal and design.scheme == "with_replacement" and design.response_rate == 1:
        # The divisor is m in every round, so the ratio has a fixed denominator.
        return _fixed(design, shares)
    if num_cohorts(design) <= ENUMERATED:
        return _enumerated(design, shares)
    return _linearised(design, shares)
