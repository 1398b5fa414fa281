"""The sampling design: the distribution of cohorts, which theory and the accountant read, as numbers on the host."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from fedjax_sim import validate

# scheme: (one client may fill several slots, the number of invited clients is a constant, rounds are independent)
_SCHEMES = {
    "uniform_without_replacement": (False, True, True),
    "with_replacement": (True, True, True),
    "weighted_with_replacement": (True, True, True),
    "poisson": (False, False, True),
    "truncated_poisson": (False, False, True),
    "full": (False, True, True),
    "cyclic": (False, True, False),
    "shuffled_cyclic": (False, True, False),
}
UNKNOWN = {"unknown": (True, False, False), "unknown_without_replacement": (False, False, False)}
_SCHEMES |= UNKNOWN
RESPONSES = ("random", "client", "others")


def mean_of_minimum(num_trials: int, rate: float, limit: int) -> float:
    """Computes E[min(K, limit)] for K ~ Binomial(num_trials, rate).

    Args:
      num_trials: an integer of at least 1.
      rate: in [0, 1].
      limit: an integer of at least 1.

    Guarantees: the frequencies of limited cohorts
    (tests/sampling/test_design.py::test_inclusion_probabilities_are_the_frequencies).

    >>> round(mean_of_minimum(2, 0.5, 1), 12)
    0.75
    """
    from scipy import stats

    # E[K 1{K <= limit}] = n q P(K' <= limit - 1), where K' ~ Binomial(n - 1, q).
    chance_below = stats.binom.cdf(limit - 1, num_trials - 1, rate) if num_trials > 1 else float(limit >= 1)
    return float(num_trials * rate * chance_below + limit * stats.binom.sf(limit, num_trials, rate))


def responding(design: Any, response: str) -> Any:
    """Returns the design with `response`, unless its own response is further on the list "random", "client", "others".

    A design that is no `SamplingDesign` is returned as it is: no formula computes with it.

    Args:
      design: a design.
      response: as in `SamplingDesign`.

    >>> design = SamplingDesign(scheme="full", population_size=2, cohort_size=2, num_slots=2)
    >>> responding(responding(design, "others"), "client").response
    'others'
    """
    if not isinstance(design, SamplingDesign):
        return design
    return dataclasses.replace(design, response=max(design.response, response, key=RESPONSES.index))


def one_for_one(design: SamplingDesign) -> bool:
    """Whether replacing a client's data changes at most one of a limited number of places.

    This holds if the same number of clients is drawn in every round, independently.
    """
    return design.scheme in ("uniform_without_replacement", "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingDesign:
    """The distribution of a cohort, for Horvitz-Thompson estimates, variance formulas and privacy accountants.

    Args:
      scheme: the name of the distribution. A sampler whose cohorts depend on what it observes, such as clients' losses,
        has "unknown", or "unknown_without_replacement" if it never invites a client twice in a round. Variance
        formulas, inclusion probabilities and privacy accountants refuse both.
      population_size: N.
      cohort_size: the expected number of slots drawn in a round, before truncation and dropout.
      num_slots: m, the static number of slots; a truncated Poisson cohort never exceeds it.
      rate: q of a Poisson scheme; None = cohort_size / N.
      draw_probabilities: [N] float64, the distribution of a draw of `weighted_with_replacement`; None = uniform.
      response_rates: probabilities in (0, 1] that an invited client reports, one for each wrapper that drops reports;
        they are independent of each other. None for a rate that a sweep varies, which is unknown here.
      max_reports: the largest number of reports that count in a round; None = no limit beyond the slots.
      reports_limited_after: how many of `response_rates` apply before that limit; the next rate is that of the limit.
      client_rates: [N] probabilities in (0, 1] that a client reports if it is invited, beside `response_rates`; None =
        all clients are alike.
      response: what decides who reports, beside these rates.
        - "random": nothing else.
        - "client": properties of the client, such as its device, its amount of data or its availability. No formula
          knows the chance.
        - "others": other clients as well. For example, a slow client delays the next round, at which other clients are
          available, or two clients compete for a place. No accountant bounds what a client then moves.

    Raises: ValueError or TypeError for a value out of range.

    Guarantees:
      - `inclusion_probabilities` is the frequency with which a client reports
        (tests/sampling/test_design.py::test_inclusion_probabilities_are_the_frequencies)
      - an unknown scheme promises the least, and formulas and accountants refuse it
        (::test_an_unknown_scheme_fails_closed)

    >>> SamplingDesign(scheme="poisson", population_size=100, cohort_size=10, num_slots=100).rate
    0.1
    """

    scheme: str
    population_size: int
    cohort_size: float
    num_slots: int
    rate: float | None = None
    draw_probabilities: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)
    response_rates: tuple[float | None, ...] = ()
    max_reports: int | None = None
    reports_limited_after: int | None = None
    client_rates: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)
    response: str = "random"

    def __post_init__(self) -> None:
        validate.one_of("scheme", self.scheme, _SCHEMES)
        validate.one_of("response", self.response, RESPONSES)
        validate.integer("population_size", self.population_size)
        validate.integer("num_slots", self.num_slots)
        validate.positive("cohort_size", self.cohort_size, wide=True)
        if self.rate is None:
            object.__setattr__(self, "rate", self.cohort_size / self.population_size)
        validate.in_range("rate", self.rate, 0, math.inf if self.replacement else 1, open_low=True)
        for response_rate in self.response_rates:
            if response_rate is not None:
                validate.in_range("response_rates", response_rate, 0, 1, open_low=True)
        if self.max_reports is not None or self.reports_limited_after is not None:
            validate.integer("max_reports", self.max_reports, 1, self.num_slots)
            validate.integer("reports_limited_after", self.reports_limited_after, 0, len(self.response_rates) - 1)
        is_weighted = self.scheme == "weighted_with_replacement"
        chances = self.draw_probabilities
        if is_weighted != (chances is not None) or (
            chances is not None and np.shape(chances) != (self.population_size,)
        ):
            rule = f"an array of shape ({self.population_size},)" if is_weighted else "None"
            validate.fail("draw_probabilities", rule, chances, "Only a weighted scheme has them.")
        if self.client_rates is not None and np.shape(self.client_rates) != (self.population_size,):
            validate.fail("client_rates", f"an array of shape ({self.population_size},)", self.client_rates)

    @property
    def known(self) -> bool:
        """Whether the scheme is a known distribution of cohorts."""
        return self.scheme not in UNKNOWN

    @property
    def replacement(self) -> bool:
        """Whether a client may fill several slots of a cohort."""
        return _SCHEMES[self.scheme][0]

    @property
    def fixed_size(self) -> bool:
        """Whether the number of invited slots is the same in every round."""
        return _SCHEMES[self.scheme][1] and self.cohort_size == self.num_slots

    @property
    def equal_chances(self) -> bool:
        """Whether all clients are drawn with the same probability, as far as is known."""
        # Probabilities are multiples of 2^-32 / N, each within one such unit of its weight, so equal weights may
        # differ.
        chances = self.draw_probabilities
        return self.known and (chances is None or bool(np.ptp(chances) * self.population_size <= 2.0**-30))

    @property
    def independent_rounds(self) -> bool:
        """Whether the cohorts of two rounds are independent."""
        return _SCHEMES[self.scheme][2]

    @property
    def response_rate(self) -> float | None:
        """The probability that the report of an invited client counts; None if a sweep varies it, or clients differ."""
        is_common = self.client_rates is None and self.response == "random" and None not in self.response_rates
        return self._known_response_rate if is_common else None

    @property
    def _known_response_rate(self) -> float:
        """The product of the response rates that no sweep varies."""
        return math.prod((rate for rate in self.response_rates if rate is not None), start=1.0)

    @property
    def overflow_probability(self) -> float:
        """The probability P(K > num_slots) for K ~ Binomial(N, rate) of a truncated Poisson cohort.

        It is 0 for other known schemes.
        """
        self._check_scheme()
        if self.scheme != "truncated_poisson":
            return 0.0
        from scipy import stats

        return float(stats.binom.sf(self.num_slots, self.population_size, self.rate))

    def inclusion_probabilities(self) -> float | np.ndarray:
        """Computes the first-order inclusion probabilities pi_i.

        pi_i is the probability that client i reports at least once in a round. For cyclic schemes, it is the long-run
        fraction of rounds in which the client reports.

        Returns: a float if all clients are alike, else [N] float64.

        Raises: ValueError for an unknown scheme, if a sweep varies the response rate, and if a client's response
          depends on more than the stated rates (`response`).

        >>> design = SamplingDesign(scheme="with_replacement", population_size=2, cohort_size=2, num_slots=2)
        >>> design.inclusion_probabilities()
        0.75
        """
        self._check_response()
        rate = self._known_response_rate
        return self._invited() * (rate if self.client_rates is None else rate * self.client_rates)

    def check_known(self) -> None:
        """Checks that a design has the numbers that a formula with one rate for all clients needs.

        Raises: ValueError as `inclusion_probabilities` does, and for response rates that differ between clients.
        """
        self._check_response()
        if self.client_rates is not None:
            hint = "This formula takes one rate for all: with unequal ones there are inclusion probabilities only."
            validate.fail("design.client_rates", "None", "rates that differ between clients", hint)

    def _check_response(self) -> None:
        """Refuses an unknown scheme, and response rates that are not known."""
        self._check_scheme()
        if self.response != "random":
            hint = "Whether a client responds depends on its device, its data or the time: no formula has its chance."
            validate.fail("design.response", "'random'", self.response, hint)
        if None in self.response_rates:
            validate.fail("response_rate", "a number", None, "A sweep varies it: read the design outside the sweep.")

    def _check_scheme(self) -> None:
        """Refuses an unknown scheme."""
        if not self.known:
            hint = (
                "Who takes part follows from what was observed, such as losses, or, in asynchronous algorithms, from "
                "who arrives first: no formula holds. Draw cohorts by uniform or poisson, say."
            )
            validate.fail("design.scheme", "a known distribution of cohorts", self.scheme, hint)

    def _invited(self) -> float | np.ndarray:
        """The probability that a client is invited at least once in a round."""
        if self.replacement:
            draw_chance = 1 / self.population_size if self.draw_probabilities is None else self.draw_probabilities
            # 1 - (1 - p)^m. In a population of one, log1p(-1) is -inf, and the inclusion probability is 1.
            with np.errstate(divide="ignore"):
                inclusion = -np.expm1(self.num_slots * np.log1p(-np.asarray(draw_chance, np.float64)))
            return inclusion if inclusion.ndim else float(inclusion)
        assert self.rate is not None, "it has a default"
        if self.scheme == "truncated_poisson":
            return mean_of_minimum(self.population_size, self.rate, self.num_slots) / self.population_size
        return float(self.rate)
