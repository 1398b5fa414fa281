"""The epsilon of a mechanism over rounds, with all that it depends on.

Accountants, each an upper bound; the tightest that knows the mechanism is used, and named in the result:

    analytic Gaussian   where nothing is sampled: exact (Balle and Wang 2018); elsewhere a bound, as if nothing were
    PLD                 Gaussian noise on Poisson samples, truncated or not
    RDP                 fixed-size samples and integer noise; deltas that are too small for float64 transforms, and
                        losses that are for the grid
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import dp_accounting as dp

from fedjax_sim import validate
from fedjax_sim.privacy import renyi
from fedjax_sim.privacy.loss import FLOOR, GRIDS, PrivacyLoss, poisson_loss, truncated_loss
from fedjax_sim.privacy.mechanism import INTEGERS, Mechanism
from fedjax_sim.privacy.words import ADJACENCY_WORDS, assumptions, describe_rate
from fedjax_sim.validate import OpenShare

__all__ = ["ACCOUNTANTS", "PrivacySpent", "account", "compose", "round_up"]

ACCOUNTANTS = ("best", "pld", "rdp")
MAX_ROUNDS = 10**8
_LEAST_NOISE = 0.02
_FINE_ENOUGH = {1e-2: 200.0, 1e-3: 20.0, 1e-4: 0.0}  # of grids: the epsilon from which a finer one changes nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacySpent:
    """An epsilon, rounded up to five digits, and all that it depends on."""

    epsilon: float
    delta: float
    rounds: int
    noise_multiplier: float
    adjacency: str
    unit: str
    sampler: str
    accountant: str
    numerics: str
    assumptions: tuple[str, ...]

    def __str__(self) -> str:
        shown = "infinite" if math.isinf(self.epsilon) else f"{self.epsilon:.5g}"
        return (
            f"epsilon {shown} at delta {self.delta:g} after {self.rounds:,} rounds of one run with a secret "
            f"seed, for each {self.unit} "
            f"({ADJACENCY_WORDS[self.adjacency]}; {self.sampler}; noise multiplier {self.noise_multiplier:.5g}; "
            f"{self.accountant})"
        )

    def as_dict(self) -> dict[str, Any]:
        """As JSON; an infinite epsilon is "inf", as in every log."""
        fields = dataclasses.asdict(self) | {"assumptions": list(self.assumptions)}
        return fields | {"epsilon": "inf" if math.isinf(self.epsilon) else self.epsilon}


def account(mechanism: Mechanism, rounds: int, delta: float, *, accountant: str = "best") -> PrivacySpent:
    """The epsilon that so many rounds of a mechanism have spent.

    Args:
      mechanism: from `mechanism_of`, `mechanism_from`, or a `Mechanism` written down.
      rounds: T in [0, 10^8].
      delta: in (0, 1), and below 1 / N to mean anything.
      accountant: "pld", "rdp", or "best": the tightest that knows the mechanism.

    Raises: ValueError, TypeError for values out of range, and for an accountant that does not know the mechanism.

    Guarantees: monotone in every argument (tests/privacy/test_accountant.py::test_monotone_in_every_argument). With a
    named accountant, equal to dp-accounting's (::test_equals_dp_accounting_by_hand). With "best", equal to the analytic
    Gaussian where nothing is sampled (::test_analytic_gaussian_without_sampling) and never above it where something is,
    so that it may be below dp-accounting's for a sample of nearly all (::test_sampling_never_costs). For a Poisson
    sample that is cut to its slots and add_or_remove_one, that bound is for two clip norms, as a client that is added
    takes another one's slot (::test_what_sampling_costs_where_slots_are_few). PLD is never above RDP
    (::test_pld_is_never_above_rdp); epsilon is rounded up (::test_epsilon_is_rounded_up); a Poisson accountant is
    refused for fixed-size cohorts (::test_poisson_accountants_refuse_fixed_size_cohorts).

    References: McMahan, Ramage, Talwar and Zhang 2018; Koskela, Jalko and Honkela 2020; Mironov 2017; Balle and Wang
    2018.

    >>> made = Mechanism(noise_multiplier=1.0, scheme="full", population_size=100, cohort_size=100, num_slots=100)
    >>> print(account(made, 1, 1e-5).epsilon)
    4.3772
    """
    return compose([(mechanism, rounds)], delta, accountant=accountant)


@validate.named_arguments
def compose(
    segments: Sequence[tuple[Mechanism, int]], delta: OpenShare, *, accountant: Literal["best", "pld", "rdp"] = "best"
) -> PrivacySpent:
    """The epsilon that several mechanisms have spent together, one after the other, each for its rounds.

    Where one has no PLD and another no RDP bound, each kind gets half of delta and the two epsilons are added.

    Raises: ValueError for mechanisms with different units or adjacencies: no epsilon holds for both.

    Guarantees: two segments of one mechanism are one (tests/privacy/test_accountant.py::test_segments_compose).
    """
    if not segments:
        validate.fail("segments", "at least one mechanism", segments)
    for mechanism, rounds in segments:
        validate.integer("rounds", rounds, 0, MAX_ROUNDS)
        for name in ("unit", "protected", "adjacency"):
            first, here = getattr(segments[0][0], name), getattr(mechanism, name)
            if here != first:
                validate.fail(f"mechanism.{name}", f"{first!r}, as of the rounds before", here,
                              "No one epsilon holds for both: state them apart.")  # fmt: skip
    merged: dict[Mechanism, int] = {}
    for mechanism, rounds in segments:
        merged[mechanism] = merged.get(mechanism, 0) + mechanism.releases(rounds)
    error = sum(count * _table_error(mechanism) for mechanism, count in merged.items())
    found, name, numerics = _within(tuple(sorted(merged.items(), key=repr)), delta, error, accountant)
    last = segments[-1][0]
    return PrivacySpent(
        epsilon=round_up(found),
        delta=delta,
        rounds=sum(rounds for _, rounds in segments),
        noise_multiplier=last.noise_multiplier,
        adjacency=last.adjacency,
        unit=last.protected,
        sampler=describe_rate(last)
        if len(merged) == 1
        else f"{len(merged)} mechanisms, the last: {describe_rate(last)}",
        accountant=name,
        numerics=numerics,
        assumptions=tuple(dict.fromkeys(x for mechanism in merged for x in assumptions(mechanism, delta))),
    )


def round_up(number: float, digits: int = 5) -> float:
    """The least number with so many significant digits that is not below `number`, up to errors of float64.

    >>> round_up(1.999963), round_up(0.0), round_up(math.inf)
    (2.0, 0.0, inf)
    """
    if number == 0 or math.isinf(number):
        return number
    unit = digits - 1 - math.floor(math.log10(number))
    scaled = number * (1 + 1e-8) * 10.0**unit if unit >= 0 else number * (1 + 1e-8) / 10.0**-unit
    whole = math.ceil(scaled)
    return float(f"{whole}e{-unit}")


def _table_error(mechanism: Mechanism) -> float:
    """Total variation between a round's integer noise and its law."""
    return mechanism.detail("table_error", 0.0) * mechanism.detail("dimension", 1) * mechanism.num_slots


def _within(parts: tuple, delta: float, error: float, accountant: str) -> tuple[float, str, str]:
    """Epsilon at what is left of delta if noise is off its law by `error` in all, which costs (1 + e^epsilon) error."""
    found, name, numerics = _epsilon(parts, delta, accountant)
    for _ in range(50 if error else 0):
        if math.isinf(found) or not ((1 + math.exp(found)) * error < delta):
            return math.inf, name, numerics
        more, name, numerics = _epsilon(parts, delta - (1 + math.exp(found)) * error, accountant)
        if more <= found * (1 + 1e-9):
            break
        found = more
    return found, name, numerics


@functools.lru_cache(maxsize=256)
def _epsilon(parts: tuple[tuple[Mechanism, int], ...], delta: float, accountant: str) -> tuple[float, str, str]:
    """(epsilon, accountant, numerics), not rounded."""
    parts = tuple((mechanism, count) for mechanism, count in parts if count)
    if not parts:
        return 0.0, "nothing released", "exact"
    if any(mechanism.noise_multiplier == 0 for mechanism, _ in parts):
        return math.inf, "no noise", "exact"
    if accountant == "pld":
        for mechanism, _ in parts:
            _check_pld(mechanism)
        return _by_loss(parts, delta)
    if accountant == "rdp":
        for mechanism, _ in parts:
            if not renyi.known(mechanism):
                validate.fail("accountant", "'pld'", "rdp", f"No Renyi bound is known for {describe_rate(mechanism)}.")
        return _by_curve(parts, delta)
    gaussian = all(mechanism.kind not in INTEGERS for mechanism, _ in parts)
    if gaussian and all(mechanism.law == "always" for mechanism, _ in parts):
        return _unsampled(parts, delta), "analytic Gaussian", "exact up to float64"
    bounds = [_by_loss(parts, delta)] if all(_has_loss(mechanism) for mechanism, _ in parts) else []
    if not bounds or math.isinf(bounds[0][0]) or _too_small(parts, bounds[0][0]):
        bounds += [_by_curve(parts, delta)] if all(renyi.known(mechanism) for mechanism, _ in parts) else []
    if not bounds:
        bounds.append(_by_both(parts, delta))
    if gaussian:  # sampling never costs privacy
        bounds.append(
            (_unsampled(parts, delta), "analytic Gaussian, as if nothing were sampled", "exact up to float64")
        )
    return min(bounds, key=lambda found: found[0])


def _by_both(parts: tuple, delta: float) -> tuple[float, str, str]:
    """Two epsilons added, each at half of delta: by PLD for the mechanisms that have one, by RDP for the others."""
    first = _by_loss(tuple(part for part in parts if _has_loss(part[0])), delta / 2)
    rest = _by_curve(tuple(part for part in parts if not _has_loss(part[0])), delta / 2)
    return first[0] + rest[0], "PLD and RDP, each at half of delta", first[2] + "; " + rest[2]


def _unsampled(parts: tuple, delta: float) -> float:
    """Epsilon of Gaussian mechanisms as if every release saw every unit; exact where it does."""
    shift = sum(count * (mechanism.moves_unsampled / mechanism.noise_multiplier) ** 2 for mechanism, count in parts)
    return float(dp.get_epsilon_gaussian(1 / math.sqrt(shift), delta))


def _has_loss(mechanism: Mechanism) -> bool:
    return mechanism.kind not in INTEGERS and mechanism.law != "without_replacement"


def _too_small(parts: tuple, found: float) -> bool:
    """Whether losses are so small that rounding them to their grid shows in epsilon."""
    grid = next(grid for grid in GRIDS if found > _FINE_ENOUGH[grid] or grid == GRIDS[-1])
    rates = (mechanism.drawn_from[1] * mechanism.moves / mechanism.noise_multiplier for mechanism, _ in parts)
    return min(rates) < 10 * grid


def _check_pld(mechanism: Mechanism) -> None:
    if mechanism.law == "without_replacement":
        hint = (
            "The PLD is that of Poisson samples. It does not hold for cohorts of fixed size, whose epsilon may be ten "
            "times larger."
        )
        validate.fail("accountant", "'rdp' for fixed-size cohorts without replacement", "pld", hint)
    if not _has_loss(mechanism):
        validate.fail("accountant", f"'rdp' for {mechanism.kind} noise", "pld", "Its privacy loss is not known.")


def _by_curve(parts: tuple, delta: float) -> tuple[float, str, str]:
    found, order = renyi.epsilon(sum(count * renyi.curve(mechanism) for mechanism, count in parts), delta)
    return found, "RDP", f"Renyi divergence at order {order:g} of {renyi.ORDERS.size}"


def _by_loss(parts: tuple, delta: float) -> tuple[float, str, str]:
    if min(_scale(*part) for part in parts) < _LEAST_NOISE:
        return math.inf, "PLD", f"below a noise multiplier of {_LEAST_NOISE:g} taken as no privacy"
    kept = FLOOR * sum(count for mechanism, count in parts if mechanism.law != "always")
    coarsest = max(_finest(_scale(*part)) for part in parts)
    found, grid = math.inf, GRIDS[0]
    for grid in GRIDS:
        if grid < coarsest:
            break
        found = _composed(parts, grid).epsilon(delta - kept) if kept < delta else math.inf
        if found > _FINE_ENOUGH[grid]:
            break
    text = f"losses on a grid of {grid:g}, rounded up; {kept:.0e} of delta kept for float64"
    return found, "PLD", text


def _scale(mechanism: Mechanism, count: int) -> float:
    """The noise's standard deviation over what a unit moves: of one release, or of all where nothing is sampled."""
    z = mechanism.noise_multiplier / mechanism.moves
    return z / math.sqrt(count) if mechanism.law == "always" else z


def _finest(z: float) -> float:
    """The grid below which one release's losses, up to about 10/z + 1/(2 z^2), would be too many."""
    return 1e-4 if z >= 0.2 else 1e-3 if z >= 0.05 else 1e-2


def _composed(parts: tuple, grid: float) -> PrivacyLoss:
    losses = [_one_round(mechanism, grid, count) for mechanism, count in parts]
    return functools.reduce(PrivacyLoss.with_other, losses)


def _one_round(mechanism: Mechanism, grid: float, count: int) -> PrivacyLoss:
    z, replace = mechanism.noise_multiplier, mechanism.moves == 2
    if mechanism.law == "always":  # as one Gaussian
        return poisson_loss(1.0, _scale(mechanism, count), False, grid)
    if mechanism.law == "poisson":
        return poisson_loss(mechanism.drawn_from[1], z, replace, grid).repeated(count)
    return truncated_loss(*mechanism.drawn_from, z, replace, grid).repeated(count)
