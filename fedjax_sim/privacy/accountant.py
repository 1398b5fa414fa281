"""This module computes the epsilon that a mechanism spends over rounds, and lists what that epsilon depends on.

Every accountant gives an upper bound. With "best", the tightest accountant that knows the mechanism is used, and the
result names it:

    analytic Gaussian   exact if nothing is sampled (Balle and Wang 2018); otherwise a bound, as if nothing were sampled
    PLD                 Gaussian noise on Poisson samples, truncated or not
    RDP                 fixed-size samples and integer noise; also deltas that are too small for float64 transforms,
                        and privacy losses that are small against the grid
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.privacy import renyi
from fedjax_sim.privacy.loss import FLOOR, GRIDS, PrivacyLoss, poisson_loss, truncated_loss
from fedjax_sim.privacy.mechanism import INTEGERS, PURE, Mechanism
from fedjax_sim.privacy.words import ADJACENCY_WORDS, assumptions, describe_rate
from fedjax_sim.text.bounds import shown_up
from fedjax_sim.validate import OpenShare

ACCOUNTANTS = ("best", "pld", "rdp")
MAX_ROUNDS = 10**8
# Below this ratio of noise to movement, PLDs would need too many grid points, and there is next to no privacy.
_LEAST_NOISE = 0.02
# Spacing of the loss grid -> the epsilon from which a finer grid changes nothing that is visible in the result.
_FINE_ENOUGH = {1e-2: 200.0, 1e-3: 20.0, 1e-4: 0.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacySpent:
    """An epsilon, rounded up to five significant digits, together with everything that it depends on.

    Args:
      epsilon: >= 0; infinite if there is no guarantee.
      delta: in (0, 1).
      rounds: the number of rounds that are accounted for.
      noise_multiplier: standard deviation over clip norm, of the last mechanism; 1 / message_epsilon where it has none.
      adjacency: how neighbouring data sets differ, as in `Mechanism`.
      unit: what is protected, as a phrase: "client", "record" or a level of a hierarchy.
      sampler: the law of the cohort, as a phrase.
      accountant: the accountant that gave epsilon.
      numerics: the precision of the computation, as a phrase.
      assumptions: sentences; epsilon holds only if all of them do.
    """

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
    message_epsilon: float | None = None  # of a mechanism without a delta, whose noise has no multiplier of a clip norm

    def __str__(self) -> str:
        noise = f"noise multiplier {shown_up(self.noise_multiplier, 5)}"
        if self.message_epsilon is not None:
            noise = f"epsilon of a message {shown_up(self.message_epsilon, 5)}"
        return (
            f"epsilon {shown_up(self.epsilon, 5)} at delta {shown_up(self.delta, 6)} after {self.rounds:,} rounds "
            f"of one run with a secret seed, for each {self.unit} "
            f"({ADJACENCY_WORDS[self.adjacency]}; {self.sampler}; {noise}; "
            f"{self.accountant})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values. An infinite epsilon is written as "inf", as in every log."""
        fields = dataclasses.asdict(self) | {"assumptions": list(self.assumptions)}
        if self.message_epsilon is None:
            del fields["message_epsilon"]
        return fields | {"epsilon": "inf" if math.isinf(self.epsilon) else self.epsilon}


def account(mechanism: Mechanism, rounds: int, delta: float, *, accountant: str = "best") -> PrivacySpent:
    """Computes the epsilon that a number of rounds of one mechanism spends.

    Args:
      mechanism: a `Mechanism`, from `mechanism_of`, from `mechanism_from`, or written by hand.
      rounds: T in [0, 10^8].
      delta: in (0, 1). It should lie below 1 / N for the guarantee to mean anything.
      accountant: "pld", "rdp", or "best": the tightest accountant that knows the mechanism.

    Returns: `PrivacySpent`.

    Raises: ValueError, TypeError for values out of range, and for an accountant that does not know the mechanism.

    Guarantees: Epsilon is monotone in every argument
    (tests/privacy/test_accountant.py::test_monotone_in_every_argument). With a named accountant, epsilon equals
    dp-accounting's (::test_equals_dp_accounting_by_hand). With "best", epsilon equals the analytic Gaussian if
    nothing is sampled (::test_analytic_gaussian_without_sampling), and is never above it if something is. So it may
    lie below dp-accounting's for a sample of nearly all clients (::test_sampling_never_costs). For a Poisson sample
    that is cut to its slots and add_or_remove_one, that bound assumes two clip norms, because a client that is added
    takes another client's slot (::test_what_sampling_costs_where_slots_are_few). PLD is never above RDP
    (::test_pld_is_never_above_rdp). Epsilon is rounded up (::test_epsilon_is_rounded_up). Accountants for Poisson
    samples are refused for fixed-size cohorts (::test_poisson_accountants_refuse_fixed_size_cohorts).

    References: McMahan, Ramage, Talwar and Zhang 2018; Koskela, Jalko and Honkela 2020; Mironov 2017; Balle and Wang
    2018.

    >>> mechanism = Mechanism(noise_multiplier=1.0, scheme="full", population_size=100, cohort_size=100, num_slots=100)
    >>> print(account(mechanism, 1, 1e-5).epsilon)
    4.3772
    """
    return compose([(mechanism, rounds)], delta, accountant=accountant)


@validate.named_arguments
def compose(segments: Sequence[tuple[Mechanism, int]], delta: OpenShare, *, accountant: str = "best") -> PrivacySpent:
    """Computes the epsilon that several mechanisms spend together, if they run one after the other.

    If one mechanism has no PLD and another has no RDP bound, each accountant gets half of delta, and the two
    epsilons are added.

    Args:
      segments: pairs (mechanism, rounds), in the order in which they run.
      delta: in (0, 1).
      accountant: as in `account`.

    Returns: `PrivacySpent`. Noise multiplier, adjacency and unit are those of the last segment.

    Raises: ValueError for mechanisms with different units or adjacencies, because no epsilon holds for both.

    Guarantees: Two segments with the same mechanism give the epsilon of one segment with the sum of their rounds
    (tests/privacy/test_accountant.py::test_segments_compose).
    """
    validate.one_of("accountant", accountant, ACCOUNTANTS)
    if not segments:
        validate.fail("segments", "at least one mechanism", segments)
    for mechanism, rounds in segments:
        validate.integer("rounds", rounds, 0, MAX_ROUNDS)
        for field in ("unit", "protected", "adjacency"):
            expected = getattr(segments[0][0], field)
            value = getattr(mechanism, field)
            if value != expected:
                validate.fail(f"mechanism.{field}", f"{expected!r}, as of the rounds before", value,
                              "No one epsilon holds for both: state them apart.")  # fmt: skip
    # Equal mechanisms are merged, so that a run that was stopped and resumed is composed as one.
    merged: dict[Mechanism, int] = {}
    for mechanism, rounds in segments:
        merged[mechanism] = merged.get(mechanism, 0) + mechanism.releases(rounds)
    # Integer noise is drawn from a table, which is off the noise's law by a little in each release.
    noise_error = sum(count * _table_error(mechanism) for mechanism, count in merged.items())
    epsilon, accountant_name, numerics = _epsilon_with_error(
        tuple(sorted(merged.items(), key=repr)), delta, noise_error, accountant
    )
    last_mechanism = segments[-1][0]
    adjacency = last_mechanism.adjacency
    assert adjacency is not None, "a Mechanism chooses one if none is given"
    return PrivacySpent(
        epsilon=round_up(epsilon),
        delta=delta,
        rounds=sum(rounds for _, rounds in segments),
        noise_multiplier=last_mechanism.noise_multiplier,
        adjacency=adjacency,
        unit=last_mechanism.protected,
        sampler=describe_rate(last_mechanism)
        if len(merged) == 1
        else f"{len(merged)} mechanisms, the last: {describe_rate(last_mechanism)}",
        accountant=accountant_name,
        numerics=numerics,
        assumptions=tuple(
            dict.fromkeys(sentence for mechanism in merged for sentence in assumptions(mechanism, delta))
        ),
        message_epsilon=1 / last_mechanism.noise_multiplier if last_mechanism.kind in PURE else None,
    )


def round_up(number: float, digits: int = 5) -> float:
    """Rounds `number` up to `digits` significant digits, up to errors of float64.

    >>> round_up(1.999963), round_up(0.0), round_up(math.inf)
    (2.0, 0.0, inf)
    """
    if number == 0 or math.isinf(number):
        return number
    decimals = digits - 1 - math.floor(math.log10(number))
    # The factor 1 + 1e-8 covers the error of the logarithm and of the division, so the result is never too small.
    scaled = number * (1 + 1e-8) * 10.0**decimals if decimals >= 0 else number * (1 + 1e-8) / 10.0**-decimals
    whole = math.ceil(scaled)
    return float(f"{whole}e{-decimals}")


def _table_error(mechanism: Mechanism) -> float:
    """Computes the total variation distance between a release's integer noise from tables and its exact law."""
    return mechanism.detail("table_error", 0.0) * mechanism.detail("dimension", 1) * mechanism.num_slots


def _epsilon_with_error(parts: tuple, delta: float, error: float, accountant: str) -> tuple[float, str, str]:
    """Computes epsilon for noise that is off its law by `error` in total variation.

    The error takes (1 + e^epsilon) error from delta. So epsilon solves

        epsilon = e(delta - (1 + exp(epsilon)) error)

    where e(delta) is the epsilon without an error (`_epsilon`).

    Args:
      parts: pairs (mechanism, number of its releases), each mechanism once.
      delta: in (0, 1).
      error: >= 0, total variation distance of all releases together from their exact law.
      accountant: "best", "pld" or "rdp".

    Returns: (epsilon, name of the accountant, numerics), the last two as phrases. Epsilon is infinite if the error
      takes all of delta.
    """
    epsilon, name, numerics = _epsilon(parts, delta, accountant)
    # The share of delta that the error takes depends on epsilon itself, so epsilon is a fixed point. The iterates rise
    # from below; they stop once epsilon no longer grows.
    for _ in range(50 if error else 0):
        if math.isinf(epsilon) or not ((1 + math.exp(epsilon)) * error < delta):
            return math.inf, name, numerics
        larger_epsilon, name, numerics = _epsilon(parts, delta - (1 + math.exp(epsilon)) * error, accountant)
        if larger_epsilon <= epsilon * (1 + 1e-9):
            break
        epsilon = larger_epsilon
    return epsilon, name, numerics


@functools.lru_cache(maxsize=256)
def _epsilon(parts: tuple[tuple[Mechanism, int], ...], delta: float, accountant: str) -> tuple[float, str, str]:
    """Computes epsilon without an error of the noise, by the named accountant or by the tightest one.

    Args:
      parts: pairs (mechanism, number of its releases). Parts without releases cost nothing.
      delta: in (0, 1).
      accountant: "pld", "rdp", or "best": the least of all bounds that are known for these mechanisms.

    Returns: (epsilon, name of the accountant, numerics), the last two as phrases. Epsilon is not rounded yet.

    Raises: ValueError for a named accountant that does not know one of the mechanisms.
    """
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
    all_gaussian = all(mechanism.kind not in (*INTEGERS, *PURE) for mechanism, _ in parts)
    if all_gaussian and all(mechanism.law == "always" for mechanism, _ in parts):
        return _unsampled(parts, delta), "analytic Gaussian", "exact up to float64"
    # "best": several upper bounds are computed, and the least of them is returned.
    bounds = [_by_loss(parts, delta)] if all(_has_loss(mechanism) for mechanism, _ in parts) else []
    # Renyi curves take longer, so they are computed only where losses are missing, infinite or too coarse.
    if not bounds or math.isinf(bounds[0][0]) or _too_small(parts, bounds[0][0]):
        bounds += [_by_curve(parts, delta)] if all(renyi.known(mechanism) for mechanism, _ in parts) else []
    if not bounds:
        bounds.append(_by_both(parts, delta))
    # Epsilons without a delta add up.
    if all(mechanism.kind in PURE for mechanism, _ in parts):
        total = sum(count / mechanism.noise_multiplier for mechanism, count in parts)
        bounds.append((total, "basic composition", "exact up to float64"))
    # Sampling never costs privacy, so the unsampled mechanism bounds the sampled one.
    if all_gaussian:
        bounds.append(
            (_unsampled(parts, delta), "analytic Gaussian, as if nothing were sampled", "exact up to float64")
        )
    return min(bounds, key=lambda bound: bound[0])


def _by_both(parts: tuple, delta: float) -> tuple[float, str, str]:
    """Adds two epsilons, each at half of delta: PLD for the mechanisms that have a PLD, RDP for the others."""
    by_loss = _by_loss(tuple(part for part in parts if _has_loss(part[0])), delta / 2)
    by_curve = _by_curve(tuple(part for part in parts if not _has_loss(part[0])), delta / 2)
    return by_loss[0] + by_curve[0], "PLD and RDP, each at half of delta", by_loss[2] + "; " + by_curve[2]


def _unsampled(parts: tuple, delta: float) -> float:
    """Computes epsilon of Gaussian mechanisms as if every release saw every unit.

    The result is exact if every release does.
    """
    from dp_accounting import get_epsilon_gaussian

    # Gaussian mechanisms compose to one Gaussian mechanism: the squares of movement over noise add up.
    squared_shift = sum(
        count * (mechanism.moves_unsampled / mechanism.noise_multiplier) ** 2 for mechanism, count in parts
    )
    return float(get_epsilon_gaussian(1 / math.sqrt(squared_shift), delta))


def _has_loss(mechanism: Mechanism) -> bool:
    """Tells whether a privacy loss distribution of this mechanism is known."""
    return mechanism.kind not in (*INTEGERS, *PURE) and mechanism.law != "without_replacement"


def _too_small(parts: tuple, epsilon: float) -> bool:
    """Tells whether privacy losses are so small that rounding them to their grid changes epsilon visibly."""
    # The same choice of grid as in `_by_loss`.
    grid = next(grid for grid in GRIDS if epsilon > _FINE_ENOUGH[grid] or grid == GRIDS[-1])
    typical_losses = (mechanism.drawn_from[1] * mechanism.moves / mechanism.noise_multiplier for mechanism, _ in parts)
    return min(typical_losses) < 10 * grid


def _check_pld(mechanism: Mechanism) -> None:
    """Refuses accountant="pld" for a mechanism without a privacy loss distribution."""
    if mechanism.law == "without_replacement":
        hint = (
            "The PLD is that of Poisson samples. It does not hold for cohorts of fixed size, whose epsilon may be ten "
            "times larger."
        )
        validate.fail("accountant", "'rdp' for fixed-size cohorts without replacement", "pld", hint)
    if not _has_loss(mechanism):
        validate.fail("accountant", f"'rdp' for {mechanism.kind} noise", "pld", "Its privacy loss is not known.")


def _by_curve(parts: tuple, delta: float) -> tuple[float, str, str]:
    """Computes (epsilon, "RDP", numerics) from the sum of the Renyi curves."""
    num_orders = renyi.all_orders().size
    total = sum((count * renyi.curve(mechanism) for mechanism, count in parts), np.zeros(num_orders))
    epsilon, order = renyi.epsilon(total, delta)
    return epsilon, "RDP", f"Renyi divergence at order {order:g} of {num_orders}"


def _by_loss(parts: tuple, delta: float) -> tuple[float, str, str]:
    """Computes epsilon from composed loss distributions, on the coarsest sufficient grid.

    Args:
      parts: pairs (mechanism, number of its releases), all with a privacy loss distribution (`_has_loss`).
      delta: in (0, 1). `FLOOR` for each sampled release is taken from it.

    Returns: (epsilon, "PLD", numerics). Epsilon is infinite for noise below `_LEAST_NOISE`, and if the releases take
      all of delta.
    """
    if min(_scale(*part) for part in parts) < _LEAST_NOISE:
        return math.inf, "PLD", f"below a noise multiplier of {_LEAST_NOISE:g} taken as no privacy"
    # Float64 transforms lose about 1e-17 of delta in each round, so a part of delta is reserved for them.
    reserved_delta = FLOOR * sum(count for mechanism, count in parts if mechanism.law != "always")
    finest_allowed = max(_finest(_scale(*part)) for part in parts)
    epsilon = math.inf
    grid = GRIDS[0]
    # Grids are tried from coarse to fine, because a finer grid takes longer.
    for grid in GRIDS:
        if grid < finest_allowed:
            break
        epsilon = _composed(parts, grid).epsilon(delta - reserved_delta) if reserved_delta < delta else math.inf
        if epsilon > _FINE_ENOUGH[grid]:
            break
    text = f"losses on a grid of {grid:g}, rounded up; {reserved_delta:.0e} of delta kept for float64"
    return epsilon, "PLD", text


def _scale(mechanism: Mechanism, count: int) -> float:
    """Computes noise over movement: of one release, or of all `count` releases together if nothing is sampled."""
    z = mechanism.noise_multiplier / mechanism.moves
    return z / math.sqrt(count) if mechanism.law == "always" else z


def _finest(z: float) -> float:
    """Returns the finest allowed grid.

    A finer grid would have too many losses, which reach up to about 10/z + 1/(2 z^2).
    """
    return 1e-4 if z >= 0.2 else 1e-3 if z >= 0.05 else 1e-2


def _composed(parts: tuple, grid: float) -> PrivacyLoss:
    """Computes the privacy loss distribution of all parts, one after the other."""
    losses = [_losses_of(mechanism, grid, count) for mechanism, count in parts]
    return functools.reduce(PrivacyLoss.with_other, losses)


def _losses_of(mechanism: Mechanism, grid: float, count: int) -> PrivacyLoss:
    """Computes the privacy loss distribution of `count` releases of one mechanism."""
    z = mechanism.noise_multiplier
    replace = mechanism.moves == 2
    # All releases together are one Gaussian mechanism, so there is nothing to repeat.
    if mechanism.law == "always":
        return poisson_loss(1.0, _scale(mechanism, count), False, grid)
    if mechanism.law == "poisson":
        return poisson_loss(mechanism.drawn_from[1], z, replace, grid).repeated(count)
    return truncated_loss(*mechanism.drawn_from, multiplier=z, replace=replace, grid=grid).repeated(count)
