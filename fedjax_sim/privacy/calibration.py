"""From a budget (epsilon, delta) to the noise, and what the same budget costs with noise in three places."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from scipy import optimize

from fedjax_sim import validate
from fedjax_sim.privacy.accountant import PrivacySpent, account, round_up
from fedjax_sim.privacy.mechanism import Mechanism
from fedjax_sim.validate import OpenShare, Positive, PositiveInt

__all__ = ["SCHEMES", "Calibrated", "Row", "calibrate", "compare", "comparison_table", "written_down"]

SCHEMES = {  # names of samplers, and the schemes they have
    "uniform": "uniform_without_replacement",
    "fixed": "uniform_without_replacement",
}
LEAST, MOST = 1e-2, 1e6  # multipliers that are searched


class Calibrated(NamedTuple):
    """A noise multiplier, and what it spends: never more than the budget."""

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
    """A Gaussian mechanism from plain options.

    Args:
      population_size, cohort_size: N and the (expected) number m of clients in a round.
      scheme: "poisson", "truncated_poisson" (with `num_slots`), "uniform" for cohorts of exactly m, or "full".
      num_slots: of a truncated Poisson cohort.
      noise_cohort_size: account for cohorts of this size, whose noise is simulated.

    Raises: ValueError, TypeError for values out of range, and for what cannot be accounted for.

    >>> written_down(population_size=1000, cohort_size=10).rate
    0.01
    """
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
        if scheme == "truncated_poisson":  # the slots are those of the small cohort
            scheme, num_slots = "poisson", None
    if scheme == "full":
        cohort_size = population_size
    if scheme == "uniform_without_replacement":
        validate.integer("cohort_size", cohort_size, 1, population_size)
        num_slots = cohort_size
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
    """The least noise multiplier, in five digits, that spends no more than (epsilon, delta) in so many rounds.

    Args:
      epsilon: > 0.
      delta: in (0, 1).
      rounds: T >= 1.
      mechanism: whose noise is sought; or plain options, as in `written_down`: population_size, cohort_size, scheme.
      accountant: as in `account`.

    Raises: ValueError for a budget that a multiplier of 10^6 exceeds, and what `account` refuses.

    Guarantees: the noise multiplier is accounted for again, and never overshoots; one unit less in the fifth digit
    would (tests/privacy/test_calibration.py::test_never_overshoots_and_wastes_nothing); the numbers of the literature
    (::test_known_multipliers, ::test_analytic_gaussian_not_the_textbook_formula); a smaller epsilon or delta, or more
    rounds, ask for more (::test_monotone).

    References: Balle and Wang 2018.

    >>> calibrate(1.0, 1e-5, 1, population_size=100, cohort_size=100, scheme="full").noise_multiplier
    3.7307
    """
    mechanism = written_down(**options) if mechanism is None else mechanism

    def spent(multiplier: float) -> PrivacySpent:
        return account(mechanism.with_multiplier(multiplier), rounds, delta, accountant=accountant)

    found = _least(lambda multiplier: spent(multiplier).epsilon, epsilon)
    return Calibrated(found, spent(found), mechanism.with_multiplier(found))


def _least(epsilon_of: Callable[[float], float], epsilon: float) -> float:
    seen: dict[float, float] = {}

    def gap(log_multiplier: float) -> float:
        value = seen.get(log_multiplier)
        if value is None:
            value = seen[log_multiplier] = epsilon_of(math.exp(log_multiplier))
        return math.log(min(max(value, 1e-9), 1e9) / epsilon)

    low = high = 0.0
    while gap(high) > 0:
        if high >= math.log(MOST):
            validate.fail("epsilon", f"a budget that a noise multiplier of {MOST:g} meets", epsilon, "It is too small.")
        low, high = high, min(high + 1.0, math.log(MOST))
    while gap(low) <= 0:
        if low <= math.log(LEAST):
            return LEAST
        low, high = max(low - 0.7, math.log(LEAST)), low
    root = optimize.brentq(gap, low, high, xtol=2e-6, rtol=1e-9)
    digit = 10.0 ** (math.floor(math.log10(math.exp(root))) - 4)
    multiplier = round_up(math.exp(root) * (1 - 4e-8))
    while epsilon_of(multiplier) > epsilon:
        multiplier = round_up(multiplier + digit * (1 - 1e-3))
    while multiplier > LEAST and epsilon_of(less := round_up(multiplier - digit * (1 + 1e-3))) <= epsilon:
        multiplier = less
    return multiplier


class Row(NamedTuple):
    """One row of `compare`: where the noise is added, who must be trusted, and how much noise that takes."""

    place: str
    trust: str  # in whom
    adjacency: str
    accountant: str
    noise_multiplier: float  # standard deviation over the clip norm: of the sum, or of one message
    message_std: float  # on each message before it is summed
    mean_std: float  # on each coordinate of the mean over the cohort
    epsilon: float


def compare(
    epsilon: float, delta: float, rounds: int, *, population_size: int, cohort_size: int, clip_norm: float = 1.0
) -> list[Row]:
    """Central, distributed and local noise at the same (epsilon, delta), for cohorts of m in a population of N.

    With noise multiplier z and clip norm C, the standard deviation on each coordinate of the mean is z C / m for
    central noise and for shares that add up, and z C / sqrt(m) for noise on each message (variances in 1/m^2 and 1/m).
    Local noise has to hide one message among all possible ones (two clip norms), and sampling does not amplify it.
    Central noise is given for a Poisson sample too, whose accountant is tighter and whose neighbours differ by one clip
    norm; shares of noise need a fixed number of messages.

    Guarantees: these formulas, with a ratio of m at equal multipliers
    (tests/privacy/test_calibration.py::test_comparison).

    References: Kairouz et al. 2021, section 4.4.
    """
    sizes = {"population_size": population_size, "cohort_size": cohort_size, "clip_norm": clip_norm}
    validate.integer("cohort_size", cohort_size, 1, population_size)
    m, rows = cohort_size, []
    for place, scheme, trust in (
        ("central", "poisson", "the server, and secret Poisson sampling"),
        ("central", "uniform", "the server, and secret sampling of m clients"),
        ("distributed", "uniform", "secure aggregation, m messages that all arrive, secret sampling"),
        ("local", "poisson", "nobody"),
    ):
        found = calibrate(epsilon, delta, rounds, place=place, scheme=scheme, **sizes)
        z, spent = found.noise_multiplier, found.spent
        on_message = {"central": 0.0, "distributed": z * clip_norm / math.sqrt(m), "local": z * clip_norm}[place]
        mean = z * clip_norm / (math.sqrt(m) if place == "local" else m)
        name = f"{place}, {'Poisson' if scheme == 'poisson' else 'fixed-size'}" if place == "central" else place
        rows.append(Row(name, trust, spent.adjacency, spent.accountant, z, on_message, mean, spent.epsilon))
    return rows


def comparison_table(rows: list[Row]) -> str:
    """The rows of `compare` as a text table."""
    head = (
        "noise",
        "noise multiplier",
        "std on a message",
        "std on the mean",
        "times central",
        "neighbours",
        "accountant",
    )
    first = rows[0].mean_std
    body = [
        (r.place, f"{r.noise_multiplier:.5g}", f"{r.message_std:.4g}", f"{r.mean_std:.4g}", f"{r.mean_std / first:.4g}",
         r.adjacency.replace("_", " "), r.accountant)
        for r in rows
    ]  # fmt: skip
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
             for line in (head, *body)]  # fmt: skip
    return "\n".join([*lines, "", *(f"{r.place}: trust in {r.trust}." for r in rows)])
