"""This module holds the claims that an audit tests: privacy profiles, in closed form or from the accountant."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.privacy.scores import epsilon_at, gaussian_profile, subsampled_profile
from fedjax_sim.text.bounds import shown_up
from fedjax_sim.validate import Positive, PositiveInt, PositiveShare

# The epsilons at which the profile of a claim is evaluated: dense up to 10, coarse up to 60.
GRID = np.concatenate([np.linspace(0, 10, 2001), np.linspace(10, 60, 501)[1:]])


@dataclasses.dataclass(frozen=True)
class Claim:
    """A `Claim` is a privacy claim: the privacy profile delta(epsilon) that a mechanism promises for one unit.

    Args:
      profile: (epsilons [k] float64) -> deltas [k], which are not below the truth.
      text: the name of the claim in a report.
      scores: the law of the scores under the claim: "gaussian", or "mixture" of two Gaussians for releases with the
        canary. None: another law. Then only tests that assume no law are used, and nothing is ever confirmed.
    """

    profile: Callable
    text: str
    scores: str | None = None

    def __post_init__(self) -> None:
        validate.one_of("scores", self.scores, (None, "gaussian", "mixture"))

    def epsilon(self, delta: float) -> float:
        """Computes the promised epsilon at `delta`. It is infinite if the profile never falls to `delta`."""
        return epsilon_at(self.profile, delta)

    @property
    def advantage(self) -> float:
        """The most that the true positive rate minus the false positive rate of any test may be: delta at epsilon 0.

        For one Gaussian release the advantage is 2 Phi(1 / 2z) - 1. It bounds membership inference by an adversary who
        sees only the released values, and by nobody who sees more.

        Guarantees: The best score reaches the advantage and never exceeds it
        (tests/adversary/test_membership.py::test_noise_bounds_the_advantage).

        References: Humphries et al. 2023, section 4; Dong, Roth and Su 2022, section 2.

        >>> [round(gaussian_claim(z).advantage, 4) for z in (0.5, 1.0, 2.0, 4.0)]
        [0.6827, 0.3829, 0.1974, 0.0995]
        """
        return float(np.asarray(self.profile(np.zeros(1)), np.float64)[0])

    @functools.cached_property
    def _deltas(self) -> np.ndarray:
        """delta at each epsilon of `GRID`."""
        return np.asarray(self.profile(GRID), np.float64)

    def power(self, false_alarms: np.ndarray) -> np.ndarray:
        """Bounds the power of a test with these false alarm rates; rounded up by the grid of epsilons.

        Args:
          false_alarms: [...] rates in [0, 1].

        Returns: [...] in [0, 1].
        """
        false_alarm_rates = np.asarray(false_alarms, np.float64)[..., None]
        # (epsilon, delta)-DP bounds the power twice: through the event "alarm", and through its complement. The
        # bounds hold for every epsilon of the grid, so the least is taken.
        by_alarms = np.exp(GRID) * false_alarm_rates + self._deltas
        by_silences = 1 - np.exp(-GRID) * (1 - self._deltas - false_alarm_rates)
        return np.clip(np.minimum(by_alarms, by_silences).min(-1), 0, 1)


@validate.named_arguments
def gaussian_claim(
    noise_multiplier: Positive, *, sampling_rate: PositiveShare = 1.0, num_rounds: PositiveInt = 1
) -> Claim:
    """Makes the exact claim of the Gaussian mechanism.

    It covers one round with Poisson sampling, or several rounds with every unit.

    Args:
      noise_multiplier: z > 0, standard deviation of the noise over the distance that one unit moves the sum.
      sampling_rate: q in (0, 1].
      num_rounds: T; more than one round only at q = 1. For other rates use `accounted_claim`.

    Returns: `Claim`.

    Raises: ValueError for more than one round at a sampling rate below 1.

    Guarantees: The profile equals the integral of the two densities
    (tests/privacy/test_audit.py::test_claims_are_exact).

    References: Balle and Wang 2018, theorem 8; Dong, Roth and Su 2022, corollary 3.3 and section 4.

    >>> round(gaussian_claim(1.0).epsilon(1e-5), 4)
    4.3772
    """
    if num_rounds > 1 and sampling_rate < 1:
        hint = "No closed form is known: accounted_claim(mechanism, num_rounds)."
        validate.fail("num_rounds", "1 with a sampling rate below 1", num_rounds, hint)
    # T Gaussian releases are one Gaussian release with mu = sqrt(T) / z.
    mu = math.sqrt(num_rounds) / noise_multiplier
    if sampling_rate == 1:
        profile = functools.partial(gaussian_profile, mu=mu)
    else:
        profile = functools.partial(subsampled_profile, rate=sampling_rate, mu=mu)
    text = f"Gaussian noise {shown_up(noise_multiplier, 6)} times what one unit moves, {num_rounds} round(s)"
    if sampling_rate == 1:
        return Claim(profile, text, "gaussian")
    return Claim(profile, f"{text}, each unit sampled with probability {sampling_rate:g}", "mixture")


@validate.named_arguments
def accounted_claim(mechanism: Any, num_rounds: PositiveInt) -> Claim:
    """Makes the accountant's claim for rounds of a mechanism for which `gaussian_claim` has no closed form.

    Args:
      mechanism: a `Mechanism` that has a privacy loss distribution, as from `mechanism_of`.
      num_rounds: T >= 1.

    Returns: `Claim`.

    Raises: ValueError for a mechanism without a privacy loss distribution, such as one with cohorts of a fixed size.

    Guarantees: Where a closed form exists, the claim equals it up to the grid of losses and is never below it
    (tests/privacy/test_audit.py::test_accounted_claims).
    """
    import dp_accounting as dp

    relations = dp.NeighboringRelation
    accountant = dp.pld.PLDAccountant(
        relations.REPLACE_ONE if mechanism.moves == 2 else relations.ADD_OR_REMOVE_ONE, 1e-3
    )
    event = mechanism.event(num_rounds)
    if event is None or not accountant.supports(event):
        hint = "Build a Claim from a bound of your own."
        validate.fail("mechanism", "one with a privacy loss distribution", mechanism.law, hint)
    accountant.compose(event)

    def profile(epsilons):
        return np.array([accountant.get_delta(float(epsilon)) for epsilon in epsilons])

    # Scores are a mixture of two Gaussians only for a single sampled release that moves by one clip norm.
    law = "gaussian" if mechanism.law == "always" else "mixture" if num_rounds * mechanism.moves == 1 else None
    return Claim(profile, f"the accountant's, for {num_rounds} round(s) of {mechanism.law} cohorts", law)
