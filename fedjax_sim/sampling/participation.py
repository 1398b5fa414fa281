"""Wrappers that decide which of the invited clients report: dropout, unequal response rates, over-invitation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.prng import client_key, stream
from fedjax_sim.sampling.design import SamplingDesign, mean_of_minimum, responding
from fedjax_sim.sampling.time.cut import untimed
from fedjax_sim.sampling.time.lost_reports import losing
from fedjax_sim.types import Array, Metric, Sampler

__all__ = ["client_bits", "with_dropout", "with_over_invitation", "with_response_rates"]


DROPPED = Metric("dropped", "invited clients that did not report", "count")
SILENT = Metric("silent", "invited clients that did not respond", "count")
DISCARDED = Metric("discarded", "reports that came too late", "count")


def client_bits(key: Array, ids: Array) -> Array:
    """[m] uint32 random bits of the clients `ids` [m], which depend on a client's id and not on its slot.

    Guarantees: tests/sampling/test_participation.py::test_dropout_keeps_the_cohort_and_ignores_slots.
    """
    return jax.vmap(lambda id: jax.random.bits(client_key(key, id), (), jnp.uint32))(ids)


def with_dropout(sampler: Sampler, rate: float) -> Sampler:
    """Each invited client fails to report with probability `rate`, independently; `metrics["dropped"]` counts them.

    Args:
      sampler: any sampler without a clock, `with_clock` goes around this; wrapping twice drops twice, independently.
      rate: in [0, 1); may be traced, so that a sweep can vary it.

    Returns: a sampler of the same cohorts, some of whose reports are missing.

    Raises: ValueError, TypeError for a rate out of range, and for a sampler with a clock, whose rounds end by who
    reports.

    Guarantees: m(1 - rate) reports are expected, clients independent
    (tests/sampling/test_participation.py::test_dropout_rate_and_independence); ids and invitations are untouched, and
    who drops out depends on the client, not on its slot (test_dropout_keeps_the_cohort_and_ignores_slots); a higher
    rate drops a superset (test_dropouts_nest).

    References: Bonawitz et al. 2019, section 4.

    >>> from fedjax_sim.sampling.uniform import uniform
    >>> with_dropout(uniform(100, 10), 0.2).design.response_rate
    0.8
    """
    untimed(sampler, "with_dropout")
    validate.in_range("rate", rate, 0, 1, open_high=True, hint="It is a client's probability not to report.")
    name = f"dropout {len(sampler.design.response_rates)}"  # a second wrapper has a stream of its own
    traced = isinstance(rate, jax.core.Tracer)
    # The largest product is 2^32 - 1: a float32 rate below 1 is at most 1 - 2^-24.
    threshold = (rate * 2.0**32).astype(jnp.uint32) if traced else np.uint32(min(int(rate * 2.0**32), 2**32 - 1))

    def thinned(key, cohort):
        there = client_bits(stream(key, name), cohort.ids) >= threshold
        sent = None if cohort.timing.sent is None else cohort.timing.sent & there
        return losing(cohort.timed(sent=sent), "dropped", cohort.reported & ~there)

    rates = (*sampler.design.response_rates, None if traced else 1 - float(rate))
    design = dataclasses.replace(sampler.design, response_rates=rates)
    # a second wrapper adds to the first one's number
    counted = () if sampler.design.response_rates else (DROPPED,)
    return sampler.then(thinned, design, counted)


def with_response_rates(sampler: Sampler, rates: Sequence[float]) -> Sampler:
    """An invited client reports with a probability of its own, independently: client i with `rates[i % len(rates)]`.

    `aggregation.horvitz_thompson` then gives more weight to who seldom responds; a plain mean is biased towards the
    others.

    Args:
      sampler: any sampler without a clock whose response rates are alike so far.
      rates: in (0, 1]: one number a client, or a shorter list that repeats.

    Returns: a sampler of the same cohorts, some of whose reports are missing; `metrics["silent"]` counts them. Its
    design knows the rates, and so do its inclusion probabilities; variance formulas, which take one rate for all,
    refuse it.

    Raises: ValueError, TypeError for rates out of range, more of them than clients, or a sampler with a clock.

    Guarantees: each client's rate, and Horvitz-Thompson unbiased under it where the mean is not
    (tests/sampling/test_participation.py::test_response_rates_of_clients).

    >>> from fedjax_sim.sampling.uniform import uniform
    >>> with_response_rates(uniform(4, 2), [1.0, 0.5]).design.inclusion_probabilities().tolist()
    [0.5, 0.25, 0.5, 0.25]
    """
    untimed(sampler, "with_response_rates")
    design, size = sampler.design, sampler.design.population_size
    if not isinstance(design, SamplingDesign) or design.client_rates is not None:
        validate.fail("sampler", "a sampler whose clients respond alike", type(design).__name__, "Multiply the rates.")
    validate.sequence("rates", rates)
    for i, rate in enumerate(rates):
        validate.in_range(f"rates[{i}]", rate, 0, 1, open_low=True)
    if len(rates) > size:
        validate.fail("rates", f"at most {size} numbers, one a client", len(rates))
    given = np.asarray(rates, np.float64)
    threshold = np.minimum(np.floor((1 - given) * 2.0**32), 2**32 - 1).astype(np.uint32)

    def thinned(key, cohort):
        there = client_bits(stream(key, "response"), cohort.ids) >= jnp.asarray(threshold)[cohort.ids % len(given)]
        sent = None if cohort.timing.sent is None else cohort.timing.sent & there
        return losing(cohort.timed(sent=sent), "silent", cohort.reported & ~there)

    everyone = np.resize(given, size)
    everyone.flags.writeable = False
    return sampler.then(thinned, dataclasses.replace(design, client_rates=everyone), (SILENT,))


def with_over_invitation(sampler: Sampler, num_reports: int) -> Sampler:
    """More clients are invited than needed: only the first `num_reports` reports count, in random order of arrival.

    `metrics["discarded"]` counts those that came too late. They were sent (`Timing.sent`): their bytes count in
    `uplink_bytes`, and separately in `wasted_bytes`.

    Args:
      sampler: one with a fixed number of different clients, e.g. `with_dropout(uniform(N, 130), 0.2)`.
      num_reports: in [1, num_slots].

    Returns: a sampler of the same cohorts with at most `num_reports` reports.

    Raises: ValueError, TypeError for values out of range or a sampler of another kind.

    Guarantees: min(reports, num_reports) count, a uniform choice of those who report, whatever their slots
    (tests/sampling/test_participation.py::test_over_invitation_keeps_a_uniform_choice); every message that was sent is
    counted (::test_late_messages_are_counted).

    References: Bonawitz et al. 2019, section 2.2.

    >>> from fedjax_sim.sampling.uniform import uniform
    >>> with_over_invitation(uniform(100, 13), 10).design.inclusion_probabilities()
    0.1
    """
    untimed(sampler, "with_over_invitation")
    design = sampler.design
    if design.replacement or not design.fixed_size or design.max_reports is not None:
        rule = "a sampler with a fixed number of different clients, not yet over-invited"
        validate.fail("sampler", rule, design.scheme, "Use uniform, full, or cyclic in order.")
    validate.integer("num_reports", num_reports, 1, sampler.num_slots)

    def limited(key, cohort):
        late = (~cohort.reported).astype(jnp.uint32)
        slots = jnp.arange(sampler.num_slots, dtype=jnp.int32)
        order = jax.lax.sort((late, client_bits(stream(key, "arrival"), cohort.ids), slots), num_keys=2)[2]
        reported = cohort.reported & jnp.zeros_like(cohort.reported).at[order[:num_reports]].set(True)
        return losing(cohort.timed(sent=cohort.reported), "discarded", cohort.reported & ~reported)

    arrives = design.response_rate
    kept = (
        None
        if arrives is None
        else mean_of_minimum(design.num_slots, arrives, num_reports) / (design.num_slots * arrives)
    )
    design = dataclasses.replace(
        design,
        response_rates=(*design.response_rates, kept),
        max_reports=num_reports,
        reports_limited_after=len(design.response_rates),
    )
    if design.client_rates is not None:
        design = responding(design, "client")  # how often others take its place follows from everybody's rate
    return sampler.then(limited, design, (DISCARDED,))
