"""Checks that mechanisms with noise make of their options, of the cohort, and of the aggregator."""

from __future__ import annotations

from jax.core import Tracer

from fedjax_sim import validate


def check_multiplier(noise_multiplier: float, *, open_low: bool = False) -> None:
    """Checks that a noise multiplier is in [0, 10^6], or positive if `open_low` is True.

    Raises: TypeError for a value that is no number; ValueError for a number out of this range.
    """
    validate.in_range("noise_multiplier", noise_multiplier, 0, 1e6, open_low=open_low, hint="It is std / clip norm.")


def check_cohort(cohort, cohort_size: int) -> None:
    """Checks that a cohort has at least as many slots as the messages that the shares of noise assume.

    Raises: ValueError for a cohort with fewer slots. None for the cohort is not checked.

    Guarantees: a cohort of 10 slots is refused for 16 shares of noise, and accepted for 10
    (tests/transform/test_gaussian.py::test_shares_add_up).
    """
    if cohort is not None and cohort.ids.shape[0] < cohort_size:
        hint = "The sampler never invites so many: their shares would not add up to the noise."
        validate.fail("cohort_size", f"at most the {cohort.ids.shape[0]} slots of the sampler", cohort_size, hint)


def check_sensitivity(sensitivity: float | None) -> None:
    """Checks that an aggregator bounds what one client moves.

    Raises: ValueError for a sensitivity of None.

    Guarantees: the Gaussian mechanism, with a fixed and with an adaptive clip norm, refuses an aggregate without a
    sensitivity (tests/transform/test_gaussian.py::test_noise_needs_a_sensitivity).
    """
    if sensitivity is None:
        hint = "Divide by a number fixed beforehand: aggregation.fixed_mean(m), with uniform weights."
        validate.fail("aggregator.sensitivity", "a bound on what one client moves", sensitivity, hint)


def check_mean(sensitivity: float) -> None:
    """Checks that an aggregator is a mean over the cohort, whose sensitivity is below 1.

    Raises: ValueError for others. A traced sensitivity is not checked.
    """
    if not isinstance(sensitivity, Tracer) and not (sensitivity < 1):
        hint = "The number of clients is read from the divisor: use aggregation.fixed_mean(m), m > 1."
        validate.fail("aggregator.sensitivity", "that of a mean over the cohort, below 1", sensitivity, hint)
