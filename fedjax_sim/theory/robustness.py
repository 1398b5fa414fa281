"""This module predicts how many attackers a cohort has, how many a robust rule withstands, and its cost.

N clients, of which F are attackers, form cohorts of m that are drawn without replacement. f is the number of attackers
in a cohort.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.theory.cohorts import check_design, report_counts
from fedjax_sim.validate import Integer, NonNegativeInt, Number, OpenShare, PositiveInt

# Schemes whose rounds are independent, and whose cohorts given their size are uniform subsets.
INDEPENDENT = ("uniform_without_replacement", "full", "poisson", "truncated_poisson")


def _check_counts(population_size: int, num_attackers: int, cohort_size: int) -> None:
    """Checks N, F and m."""
    validate.integer("population_size", population_size)
    validate.integer("num_attackers", num_attackers, 0, population_size)
    validate.integer("cohort_size", cohort_size, 1, population_size)


def attackers_met(population_size: int, num_attackers: int, cohort_size: int) -> np.ndarray:
    """Computes the distribution of the number of attackers in a cohort, which is hypergeometric.

    Cohorts are drawn without replacement.

    Args:
      population_size: N.
      num_attackers: F, in [0, N].
      cohort_size: m, in [1, N].

    Returns: [m + 1] float64, P(f = 0), ..., P(f = m).

    Guarantees: Cohorts of `sampling.uniform` follow it
    (tests/theory/test_robustness.py::test_attackers_that_cohorts_meet).

    >>> print(attackers_met(10, 2, 5).round(4))
    [0.2222 0.5556 0.2222 0.     0.     0.    ]
    """
    from scipy import stats

    _check_counts(population_size, num_attackers, cohort_size)
    return stats.hypergeom.pmf(np.arange(cohort_size + 1), population_size, num_attackers, cohort_size)


@validate.named_arguments
def chance_of_more_attackers(
    population_size: int,
    num_attackers: int,
    cohort_size: int,
    num_byzantine: NonNegativeInt,
    *,
    num_rounds: PositiveInt = 1,
) -> float:
    """Computes the probability that in at least one of T rounds a cohort has more than f attackers.

    Args:
      population_size, num_attackers, cohort_size: as in `attackers_met`.
      num_byzantine: f, the number of attackers that the rule withstands.
      num_rounds: T, with independent cohorts.

    Guarantees: The chance is the tail of the law `attackers_met`, in one round and over T rounds
    (tests/theory/test_robustness.py::test_attackers_that_cohorts_meet).

    References: Wang, Farhadkhani, Guerraoui, Pinot and Stephan 2023 (on subsampling and Byzantine clients).

    >>> round(chance_of_more_attackers(1000, 100, 100, 15), 4)
    0.032
    >>> round(chance_of_more_attackers(1000, 100, 100, 15, num_rounds=100), 4)
    0.9612
    """
    from scipy import stats

    _check_counts(population_size, num_attackers, cohort_size)
    probability_per_round = float(stats.hypergeom(population_size, num_attackers, cohort_size).sf(num_byzantine))
    return _in_some_round(probability_per_round, num_rounds)


def _in_some_round(probability_per_round: float, num_rounds: int) -> float:
    """Computes the probability that an event happens in at least one of T independent rounds."""
    # 1 - (1 - p)^T, without loss of digits for small p.
    return -math.expm1(num_rounds * math.log1p(-probability_per_round)) if probability_per_round < 1 else 1.0


@validate.named_arguments
def most_attackers(
    population_size: int, num_attackers: int, cohort_size: int, *, num_rounds: int = 1, chance: OpenShare = 1e-3
) -> int:
    """Finds the least f such that in T rounds more attackers than f occur with at most the probability `chance`.

    A rule should withstand f attackers.

    Args:
      population_size, num_attackers, cohort_size, num_rounds: as in `chance_of_more_attackers`.
      chance: in (0, 1).

    Guarantees: `chance_of_more_attackers` is at most `chance` at f, and above it at f - 1
    (tests/theory/test_robustness.py::test_attackers_that_cohorts_meet).

    >>> most_attackers(1000, 100, 100, num_rounds=100)
    24
    """
    for f in range(cohort_size + 1):
        if chance_of_more_attackers(population_size, num_attackers, cohort_size, f, num_rounds=num_rounds) <= chance:
            return f
    return cohort_size


@validate.named_arguments
def chance_beyond(
    design: SamplingDesign,
    num_attackers: int,
    withstands: Callable[[np.ndarray], np.ndarray],
    *,
    num_rounds: PositiveInt = 1,
) -> float:
    """Computes the probability that in at least one of T rounds more attackers report than the rule withstands.

    Unlike `chance_of_more_attackers`, this function takes cohorts with a random size, as under Poisson sampling or
    dropout.

    Args:
      design: of the sampler; independent cohorts without replacement, with all clients alike.
      num_attackers: F, in [0, N].
      withstands: numbers of messages [k] -> numbers of attackers [k], or one number for all, as
        `AggregatorFacts.withstands`.
      num_rounds: T.

    Raises: ValueError for a design whose cohorts depend on each other, or in which clients differ or are drawn twice.

    Guarantees: Cohorts of the samplers, with dropout too, have this probability
    (tests/theory/test_robustness.py::test_rules_that_are_beaten).

    >>> sizes = {"population_size": 1000, "cohort_size": 100, "num_slots": 100}
    >>> design = SamplingDesign(scheme="uniform_without_replacement", **sizes)
    >>> round(chance_beyond(design, 100, lambda number: 15), 4)
    0.032
    """
    from scipy import stats

    check_design(design)
    hint = "Count the metric `attackers_beyond` of a run instead."
    if design.scheme not in INDEPENDENT:
        validate.fail("design.scheme", " or ".join(INDEPENDENT), design.scheme, hint)
    if design.client_rates is not None or design.response != "random":
        validate.fail("design", "one in which all clients are as likely to report", design.response, hint)
    validate.integer("num_attackers", num_attackers, 0, design.population_size)
    # Given the number of messages, attackers among them are hypergeometric.
    counts, probabilities = report_counts(design)
    most_withstood = np.asarray(withstands(counts))
    probability_per_round = float(
        probabilities @ stats.hypergeom(design.population_size, num_attackers, counts).sf(most_withstood)
    )
    return _in_some_round(probability_per_round, num_rounds)


class Breakdown(NamedTuple):
    """f of each rule: the most attackers among m messages that the rule can be set for.

    One more attacker may move the result anywhere.
    """

    mean: int
    median: int
    trimmed_mean: int
    mean_around_median: int
    geometric_median: int
    minimum_diameter: int
    krum: int
    bulyan: int


@validate.named_arguments
def breakdown_points(cohort_size: Annotated[int, Integer(3)]) -> Breakdown:
    """Computes the breakdown points of robust rules, in messages.

    A rule that is set for fewer than `most_attackers` will meet more.

    Args:
      cohort_size: m, 3 or more.

    Returns: `Breakdown`.

    Guarantees: A rule of `aggregation` takes this f in such a cohort, and no larger f
    (tests/theory/test_robustness.py::test_rules_take_as_many_attackers).

    References: Blanchard et al. 2017 (Krum: 2 f + 2 < m); El Mhamdi et al. 2018 (Bulyan: 4 f + 3 <= m); Lopuhaa and
    Rousseeuw 1991 (medians: 2 f < m).

    >>> breakdown_points(20).krum, breakdown_points(20).bulyan, breakdown_points(20).median
    (8, 4, 9)
    """
    minority = (cohort_size - 1) // 2
    return Breakdown(0, *[minority] * 5, krum=(cohort_size - 3) // 2, bulyan=(cohort_size - 3) // 4)


class Robustness(NamedTuple):
    """Bounds kappa of (f, kappa)-robustness, for each rule.

    A rule is (f, kappa)-robust if |rule(u) - mean of S|^2 <= kappa mean over S of |u_i - mean of S|^2 for every set S
    of m - f messages, whatever the other f messages are.
    """

    least: float  # no rule has a smaller kappa
    trimmed_mean: float
    krum: float  # of `aggregation.krum(f)`, which takes one message; infinite unless 2 f + 2 < m
    geometric_median: float
    median: float

    def mixed(self, cohort_size: int, num_byzantine: int) -> Robustness:
        """Computes the bounds of the same rules behind nearest-neighbour mixing: 8 f / (m - f) (1 + kappa).

        Args:
          cohort_size: m.
          num_byzantine: f, with 2 f < m.
        """
        _check_minority(cohort_size, num_byzantine)
        factor = 8 * num_byzantine / (cohort_size - num_byzantine)
        return Robustness(self.least, *(factor * (1 + kappa) for kappa in self[1:]))


def _check_minority(cohort_size: int, num_byzantine: int) -> None:
    """Checks that attackers are a minority: 2 f < m."""
    validate.integer("cohort_size", cohort_size)
    validate.integer("num_byzantine", num_byzantine, 0, (cohort_size - 1) // 2, hint="2 f < m.")


def robustness_coefficients(cohort_size: int, num_byzantine: int) -> Robustness:
    """Computes bounds on how far f of m messages pull a rule from the mean of the others, in units of their variance.

    Args:
      cohort_size: m.
      num_byzantine: f, with 2 f < m.

    Returns: `Robustness`.

    Guarantees: No draw of attackers exceeds the bounds
    (tests/theory/test_robustness.py::test_coefficients_bound_attackers). Krum's bound is the least that its proof gives
    (::test_the_bound_of_krum).

    References: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan 2023 (fixing by mixing), table 1, theorem 1.
    Their Krum counts m - f neighbours, the message itself among them, and has 6 (m - f) / (m - 2 f); the bound here is
    that of m - f - 2 other messages.

    >>> robustness_coefficients(10, 2).least
    0.3333333333333333
    """
    _check_minority(cohort_size, num_byzantine)
    ratio = num_byzantine / (cohort_size - 2 * num_byzantine)
    krum = _krum_coefficient(cohort_size, num_byzantine)
    return Robustness(
        least=ratio,
        trimmed_mean=6 * ratio * (1 + ratio),
        krum=krum,
        geometric_median=4 * (1 + ratio) ** 2,
        median=4 * (1 + ratio) ** 2,
    )


def _krum_coefficient(m: int, f: int) -> float:
    """Computes Krum's bound, if the score is the sum of squared distances from the m - f - 2 nearest other messages.

    Let S hold s = m - f messages with mean x and variance v, and let u be Krum's choice. At least q = m - 2 f - 1
    messages of S are u itself or among its neighbours. For each such message w and any a > 0,

        |u - x|^2 <= (1 + a) |u - w|^2 + (1 + 1 / a) |w - x|^2.

    Average this over the q messages. The first squares sum to at most u's score. No message of S has a lower score. The
    mean score of S is at most (s - 2) / (s - 1) of the sums of all squared distances in S, which are 2 s v on average.
    The second squares sum to at most s v. The best a gives

        |u - x|^2 <= (sqrt(2 s (s - 2) / (s - 1)) + sqrt(s))^2 v / q.

    Args:
      m: the number of messages.
      f: the number of Byzantine messages among them, >= 0.

    Returns: the factor of v; infinite if m <= 2 f + 2.
    """
    if 2 * f + 2 >= m:
        return math.inf
    s = m - f
    q = m - 2 * f - 1
    score = 2 * s * (s - 2) / (s - 1)  # over v
    return (math.sqrt(score) + math.sqrt(s)) ** 2 / q


def median_efficiency(number: int | None = None) -> float:
    """Computes the variance of the median of normal numbers over that of their mean.

    It is the price of robustness without attackers.

    Args:
      number: the number of messages, odd, up to 10,001; None = the limit pi / 2.

    Guarantees: Draws have this ratio (tests/theory/test_robustness.py::test_efficiencies).

    >>> round(median_efficiency(), 4), round(median_efficiency(101), 3)
    (1.5708, 1.564)
    """
    from scipy import integrate, stats

    if number is None:
        return math.pi / 2
    validate.integer("number", number, 1, 10_001)
    if number % 2 == 0:
        validate.fail("number", "an odd number of messages", number, "The median of an even one is a mean of two.")
    half = number // 2
    log_count = math.lgamma(number + 1) - 2 * math.lgamma(half + 1)

    def density(x):
        """Computes the density of the middle order statistic, in logarithms because the factorials overflow."""
        return math.exp(log_count + half * (stats.norm.logcdf(x) + stats.norm.logsf(x)) + stats.norm.logpdf(x))

    # Twelve standard deviations of the median, beyond which the density vanishes in float64.
    half_width = 12 / math.sqrt(number) if number > 1 else 12
    return (
        number
        * integrate.quad(lambda x: x * x * density(x), -half_width, half_width, epsabs=0, epsrel=1e-10, limit=400)[0]
    )


@validate.named_arguments
def trimmed_mean_efficiency(share: Annotated[float, Number(0, 0.5, open_high=True)]) -> float:
    """Computes the variance of a trimmed mean of many normal numbers over that of their mean.

    Args:
      share: beta in [0, 1/2), the share that is trimmed at each side.

    Guarantees: Draws have this ratio (tests/theory/test_robustness.py::test_efficiencies).

    References: Huber 1981, section 3.3 (the asymptotic variance of L-estimators).

    >>> round(trimmed_mean_efficiency(0.1), 4), trimmed_mean_efficiency(0)
    (1.0604, 1.0)
    """
    from scipy import stats

    if share == 0:
        return 1.0
    cutoff = float(stats.norm.isf(share))
    # The asymptotic variance is that of a number which is clipped at the cutoff, over (1 - 2 beta)^2.
    kept_variance = 1 - 2 * share - 2 * cutoff * float(stats.norm.pdf(cutoff))
    return (kept_variance + 2 * share * cutoff * cutoff) / (1 - 2 * share) ** 2
