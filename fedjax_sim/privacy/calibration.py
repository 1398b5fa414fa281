"""This module finds the noise that a privacy budget (epsilon, delta) needs, and compares three places for the noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.privacy.accountant import PrivacySpent, account, round_up
from fedjax_sim.privacy.mechanism import Mechanism
from fedjax_sim.text.bounds import shown_up
from fedjax_sim.validate import OpenShare, Positive, PositiveInt

# Names of samplers -> the `scheme` of their sampling design, where the two differ.
SCHEMES = {
    "uniform": "uniform_without_replacement",
    "fixed": "uniform_without_replacement",
}
# Noise multipliers outside of this range are not searched.
MIN_MULTIPLIER = 1e-2
MAX_MULTIPLIER = 1e6


class Calibrated(NamedTuple):
    """A noise multiplier and what it spends, which is never more than the budget."""

    noise_multiplier: float
    spent: PrivacySpent
    mechanism: Mechanism


@validate.named_arguments
def written_down(
    *,
    population_size: PositiveInt,
    cohort_size: float,
    noise_multiplier: float = 1.0,
    scheme: str = "poisson",
    num_slots: int | None = None,
    place: str = "central",
    adjacency: str | None = None,
    clip_norm: float = 1.0,
    noise_cohort_size: int | None = None,
) -> Mechanism:
    """Builds a Gaussian mechanism from plain options, without an algorithm.

    Args:
      population_size: N, the number of clients.
      cohort_size: m in (0, N], the (expected) number of clients in a round.
      noise_multiplier: standard deviation of the noise over the clip norm.
      scheme: "poisson", "truncated_poisson" (with `num_slots`), "uniform" or "fixed" for cohorts of exactly m clients,
        or "full".
      num_slots: the most clients that a truncated Poisson cohort has; None for every other scheme.
      place, adjacency, clip_norm: as in `Mechanism`.
      noise_cohort_size: M, for accounting of cohorts of this size, whose noise is simulated with the smaller cohorts
        of a run. None: they are as large as the run's.

    Returns: `Mechanism`.

    Raises: ValueError, TypeError for values out of range, and for a mechanism that cannot be accounted for.

    >>> written_down(population_size=1000, cohort_size=10).rate
    0.01
    """
    # Options use names of samplers, mechanisms use schemes of designs.
    scheme = SCHEMES.get(scheme, scheme)
    validate.in_range("cohort_size", cohort_size, 0, population_size, open_low=True,
                      hint="A cohort has at most the population's clients.")  # fmt: skip
    if scheme == "truncated_poisson":
        validate.integer("num_slots", num_slots, 1, population_size, hint="Of a truncated Poisson cohort.")
    elif num_slots is not None:
        validate.fail("num_slots", "None but for truncated_poisson", num_slots)
    details: dict[str, Any] = {}
    if noise_cohort_size is not None:
        validate.integer("noise_cohort_size", noise_cohort_size, 1, population_size)
        details = {"noise_cohort_size": noise_cohort_size, "simulated_cohort_size": float(cohort_size)}
        cohort_size = noise_cohort_size
        # The slots are those of the small cohort that is simulated; the large cohort has no limit.
        if scheme == "truncated_poisson":
            scheme = "poisson"
            num_slots = None
    if scheme == "full":
        cohort_size = population_size
    # A cohort of fixed size fills exactly its slots.
    if scheme == "uniform_without_replacement":
        validate.integer("cohort_size", cohort_size, 1, population_size)
        num_slots = int(cohort_size)
    return Mechanism(
        noise_multiplier=noise_multiplier,
        scheme=scheme,
        population_size=population_size,
        cohort_size=cohort_size,
        num_slots=population_size if num_slots is None else num_slots,
        place=place,
        adjacency=adjacency,
        clip_norm=clip_norm,
        details=details,
    )


@validate.named_arguments
def calibrate(
    epsilon: Positive,
    delta: OpenShare,
    rounds: PositiveInt,
    mechanism: Mechanism | None = None,
    *,
    accountant: str = "best",
    **options: Any,
) -> Calibrated:
    """Finds the least noise multiplier, in five digits, that spends at most (epsilon, delta) in a number of rounds.

    Args:
      epsilon: > 0.
      delta: in (0, 1).
      rounds: T >= 1.
      mechanism: the mechanism whose noise is sought; its own noise multiplier is not read. None: give the options of
        `written_down` instead, such as population_size, cohort_size and scheme.
      accountant: as in `account`.
      options: of `written_down`; not read beside a `mechanism`.

    Returns: `Calibrated`.

    Raises: ValueError for a budget that even a multiplier of 10^6 exceeds, and whatever `account` raises.

    Guarantees: The noise multiplier is accounted for again and never exceeds the budget; one unit less in the fifth
    digit would (tests/privacy/test_calibration.py::test_never_overshoots_and_wastes_nothing). The numbers of the
    literature are met (::test_known_multipliers, ::test_analytic_gaussian_not_the_textbook_formula). A smaller
    epsilon, a smaller delta or more rounds need more noise (::test_monotone).

    References: Balle and Wang 2018.

    >>> calibrate(1.0, 1e-5, 1, population_size=100, cohort_size=100, scheme="full").noise_multiplier
    3.7307
    """
    mechanism = written_down(**options) if mechanism is None else mechanism

    def spent(multiplier: float) -> PrivacySpent:
        return account(mechanism.with_multiplier(multiplier), rounds, delta, accountant=accountant)

    multiplier = least_multiplier(lambda multiplier: spent(multiplier).epsilon, epsilon)
    return Calibrated(multiplier, spent(multiplier), mechanism.with_multiplier(multiplier))


def least_multiplier(epsilon_of: Callable[[float], float], epsilon: float) -> float:
    """Finds the least noise multiplier, in five digits, with `epsilon_of(multiplier) <= epsilon`.

    Args:
      epsilon_of: a noise multiplier -> what it spends, which must decrease.
      epsilon: > 0, the budget.

    Raises: ValueError for a budget that even a multiplier of 10^6 exceeds.
    """
    from scipy import optimize

    seen: dict[float, float] = {}

    def gap(log_multiplier: float) -> float:
        """Computes log of (epsilon spent / budget); positive if the noise is too small."""
        spent_epsilon = seen.get(log_multiplier)
        if spent_epsilon is None:
            spent_epsilon = seen[log_multiplier] = epsilon_of(math.exp(log_multiplier))
        # Epsilon may be 0 or infinite, whose logarithms are not finite.
        return math.log(min(max(spent_epsilon, 1e-9), 1e9) / epsilon)

    low = high = 0.0
    # The root is bracketed first: noise is raised until it suffices, then lowered until it does not.
    while gap(high) > 0:
        if high >= math.log(MAX_MULTIPLIER):
            validate.fail(
                "epsilon", f"a budget that a noise multiplier of {MAX_MULTIPLIER:g} meets", epsilon, "It is too small."
            )
        low = high
        high = min(high + 1.0, math.log(MAX_MULTIPLIER))
    while gap(low) <= 0:
        if low <= math.log(MIN_MULTIPLIER):
            return MIN_MULTIPLIER
        low, high = max(low - 0.7, math.log(MIN_MULTIPLIER)), low
    # A root in float64 only approximates the answer. The fifth digit is settled by accounting again, digit by digit.
    root, _ = optimize.brentq(gap, low, high, xtol=2e-6, rtol=np.float64(1e-9), full_output=True)
    digit = 10.0 ** (math.floor(math.log10(math.exp(root))) - 4)
    multiplier = round_up(math.exp(root) * (1 - 4e-8))
    while epsilon_of(multiplier) > epsilon:
        multiplier = round_up(multiplier + digit * (1 - 1e-3))
    while (
        multiplier > MIN_MULTIPLIER
        and epsilon_of(smaller_multiplier := round_up(multiplier - digit * (1 + 1e-3))) <= epsilon
    ):
        multiplier = smaller_multiplier
    return multiplier


class ComparisonRow(NamedTuple):
    """A `ComparisonRow` is a row of `compare`: where noise is added, who must be trusted, how much noise that takes."""

    place: str
    trust: str  # who must be trusted
    adjacency: str
    accountant: str
    noise_multiplier: float  # standard deviation over the clip norm: of the sum, or of one message
    message_std: float  # standard deviation on each coordinate of a message, before messages are summed
    mean_std: float  # standard deviation on each coordinate of the mean over the cohort
    epsilon: float


def compare(
    epsilon: float, delta: float, rounds: int, *, population_size: int, cohort_size: int, clip_norm: float = 1.0
) -> list[ComparisonRow]:
    """Compares central, distributed and local noise at the same (epsilon, delta), for cohorts of m among N clients.

    Let z be the noise multiplier and C the clip norm. Each coordinate of the mean then has the standard deviation z
    C / m for central noise and for shares that add up. For noise on each message it is z C / sqrt(m). So variances fall
    as 1/m^2 and as 1/m.

    Local noise must hide one message among all possible messages (two clip norms), and sampling does not amplify it.
    Central noise is given for two samplers: a fixed-size cohort, and a Poisson sample, whose accountant is tighter
    and whose neighbours differ by one clip norm. Shares of noise need a fixed number of messages.

    Args:
      epsilon, delta, rounds: the budget, as in `calibrate`.
      population_size, cohort_size: N and m, in clients.
      clip_norm: C.

    Returns: one `ComparisonRow` for each of central (Poisson), central (fixed-size), distributed and local noise.

    Guarantees: The standard deviations follow these formulas, with a ratio of m at equal multipliers
    (tests/privacy/test_calibration.py::test_comparison).

    References: Kairouz et al. 2021, section 4.4.
    """
    sizes = {"population_size": population_size, "cohort_size": cohort_size, "clip_norm": clip_norm}
    validate.integer("cohort_size", cohort_size, 1, population_size)
    m = cohort_size
    # The three places of the noise, with two samplers for central noise.
    rows = []
    for place, scheme, trust in (
        ("central", "poisson", "the server, and secret Poisson sampling"),
        ("central", "uniform", "the server, and secret sampling of m clients"),
        ("distributed", "uniform", "secure aggregation, m messages that all arrive, secret sampling"),
        ("local", "poisson", "nobody"),
    ):
        calibrated = calibrate(epsilon, delta, rounds, place=place, scheme=scheme, **sizes)
        z = calibrated.noise_multiplier
        spent = calibrated.spent
        on_message = {"central": 0.0, "distributed": z * clip_norm / math.sqrt(m), "local": z * clip_norm}[place]
        mean = z * clip_norm / (math.sqrt(m) if place == "local" else m)
        name = f"{place}, {'Poisson' if scheme == 'poisson' else 'fixed-size'}" if place == "central" else place
        rows.append(
            ComparisonRow(
                place=name,
                trust=trust,
                adjacency=spent.adjacency,
                accountant=spent.accountant,
                noise_multiplier=z,
                message_std=on_message,
                mean_std=mean,
                epsilon=spent.epsilon,
            )
        )
    return rows


def comparison_table(rows: list[ComparisonRow]) -> str:
    """Formats the rows of `compare` as a text table.

    Args:
      rows: with that of central noise as the first one.
    """
    head = (
        "noise",
        "noise multiplier",
        "std on a message",
        "std on the mean",
        "times central",
        "neighbours",
        "accountant",
    )
    # The first row is central noise with Poisson sampling, the reference of the column "times central".
    central_std = rows[0].mean_std
    body = [
        (row.place, shown_up(row.noise_multiplier, 5), shown_up(row.message_std), shown_up(row.mean_std),
         f"{row.mean_std / central_std:.4g}", row.adjacency.replace("_", " "), row.accountant)
        for row in rows
    ]  # fmt: skip
    # Columns are as wide as their widest cell.
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
             for line in (head, *body)]  # fmt: skip
    return "\n".join([*lines, "", *(f"{row.place}: trust in {row.trust}." for row in rows)])
