"""What mechanisms that add noise ask of their options, of the cohort, and of the aggregator."""

from __future__ import annotations

import jax

from fedjax_sim import validate

__all__ = ["check_cohort", "check_mean", "check_multiplier", "check_sensitivity"]


def check_multiplier(noise_multiplier: float, *, open_low: bool = False) -> None:
    """Raises ValueError, TypeError for a noise multiplier out of range."""
    validate.in_range("noise_multiplier", noise_multiplier, 0, 1e6, open_low=open_low, hint="It is std / clip norm.")


def check_cohort(cohort, cohort_size: int) -> None:
    """Raises ValueError if a cohort has fewer slots than the number of messages that the shares of noise assume.

    Guarantees: tests/transform/test_gaussian.py::test_shares_add_up.
    """
    if cohort is not None and cohort.ids.shape[0] < cohort_size:
        hint = "The sampler never invites so many: their shares would not add up to the noise."
        validate.fail("cohort_size", f"at most the {cohort.ids.shape[0]} slots of the sampler", cohort_size, hint)


def check_sensitivity(sensitivity: float | None) -> None:
    """Raises ValueError for an aggregator that one client may move without bound.

    Guarantees: tests/transform/test_gaussian.py::test_noise_needs_a_sensitivity.
    """
    if sensitivity is None:
        hint = "Divide by a number fixed beforehand: aggregation.fixed_mean(m), with uniform weights."
        validate.fail("aggregator.sensitivity", "a bound on what one client moves", sensitivity, hint)


def check_mean(sensitivity: float) -> None:
    """Raises ValueError for an aggregator that is no mean over the cohort; a traced sensitivity is not checked."""
    if not isinstance(sensitivity, jax.core.Tracer) and not (sensitivity < 1):
        hint = "The number of clients is read from the divisor: use aggregation.fixed_mean(m), m > 1."
        validate.fail("aggregator.sensitivity", "that of a mean over the cohort, below 1", sensitivity, hint)
