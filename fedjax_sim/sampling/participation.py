"""Wrappers that decide which invited clients report: dropout, unequal response rates, over-invitation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fedjax_sim import validate
from fedjax_sim.prng import client_key, stream
from fedjax_sim.sampling.design import SamplingDesign, mean_of_minimum, responding
from fedjax_sim.sampling.time.cut import untimed
from fedjax_sim.sampling.time.lost_reports import losing
from fedjax_sim.types import Array, Metric, Sampler

DROPPED = Metric("dropped", "invited clients that did not report", "count")
SILENT = Metric("silent", "invited clients that did not respond", "count")
DISCARDED = Metric("discarded", "reports that came too late", "count")


def client_bits(key: Array, ids: Array) -> Array:
    """Draws random bits for each client, [m] uint32, which depend on a client's id and not on its slot.

    Args:
      key: random key.
      ids: [m] int32.

    Guarantees: with the same key, dropout loses the same clients in every sampler, whatever their slots
    (tests/sampling/test_participation.py::test_dropout_keeps_the_cohort_and_ignores_slots).
    """
    return jax.vmap(lambda id: jax.random.bits(client_key(key, id), (), jnp.uint32))(ids)


def with_dropout(sampler: Sampler, rate: float) -> Sampler:
    """Each invited client fails to report with probability `rate`, independently.

    Args:
      sampler: any sampler without a clock; `with_clock` goes around this wrapper. Two such wrappers drop independently.
      rate: in [0, 1); may be traced, so that a sweep can vary it.

    Returns: a sampler of the same cohorts, in which some reports are missing; `metrics["dropped"]` counts them.

    Raises: ValueError or TypeError for a rate out of range, and for a sampler with a clock, since who reports
      decides when its rounds end.

    Guarantees:
      - m(1 - rate) reports are expected, and clients are independent
        (tests/sampling/test_participation.py::test_dropout_rate_and_independence)
      - ids and invitations are unchanged, and dropout depends on the client and not on its slot
        (test_dropout_keeps_the_cohort_and_ignores_slots)
      - a higher rate drops a superset (test_dropouts_nest)

    References: Bonawitz et al. 2019, section 4.

    >>> from fedjax_sim.sampling.uniform import uniform
    >>> with_dropout(uniform(100, 10), 0.2).design.response_rate
    0.8
    """
    untimed(sampler, "with_dropout")
    validate.in_range("rate", rate, 0, 1, open_high=True, hint="It is a client's probability not to report.")
    stream_name = f"dropout {len(sampler.design.response_rates)}"  # a second wrapper has a stream of its own
    # A traced rate below 1 is at most 1 - 2^-24 as a float32, so its product cannot reach 2^32, which would wrap
    # around.
    is_traced, scaled_rate = isinstance(rate, Tracer), rate * 2.0**32
    threshold = jnp.uint32(scaled_rate) if is_traced else np.uint32(min(int(scaled_rate), 2**32 - 1))

    def drop(key, cohort):
        responds = client_bits(stream(key, stream_name), cohort.ids) >= threshold
        sent = None if cohort.timing.sent is None else cohort.timing.sent & responds
        return losing(cohort.timed(sent=sent), "dropped", cohort.reported & ~responds)

    rates = (*sampler.design.response_rates, None if is_traced else 1 - float(rate))
    design = dataclasses.replace(sampler.design, response_rates=rates)
    # A second wrapper adds to the metric of the first, which states it.
    metrics = () if sampler.design.response_rates else (DROPPED,)
    return sampler.then(drop, design, metrics)


def with_response_rates(sampler: Sampler, rates: Sequence[float]) -> Sampler:
    """Each invited client reports with a probability of its own, independently: client i with `rates[i % len(rates)]`.

    A plain mean is then biased towards clients who often respond. `aggregation.horvitz_thompson` corrects for the
    rates.

    Args:
      sampler: any sampler without a clock, whose clients have equal response rates so far.
      rates: in (0, 1]: one number for each client, or a shorter list that repeats.

    Returns: a sampler of the same cohorts, in which some reports are missing; `metrics["silent"]` counts them. Its
    design has the rates, and so do its inclusion probabilities. Variance formulas, which take one rate for all clients,
    refuse the design.

    Raises: ValueError or TypeError for rates out of range, for more rates than clients, and for a sampler with a clock.

    Guarantees: each client reports at its own rate; under it Horvitz-Thompson is unbiased and the mean is not
    (tests/sampling/test_participation.py::test_response_rates_of_clients).

    >>> from fedjax_sim.sampling.uniform import uniform
    >>> with_response_rates(uniform(4, 2), [1.0, 0.5]).design.inclusion_probabilities().tolist()
    [0.5, 0.25, 0.5, 0.25]
    """
    untimed(sampler, "with_response_rates")
    design = sampler.design
    size = sampler.design.population_size
    if not isinstance(design, SamplingDesign) or design.client_rates is not None:
        validate.fail("sampler", "a sampler whose clients respond alike", type(design).__name__, "Multiply the rates.")
    validate.sequence("rates", rates)
    for i, rate in enumerate(rates):
        validate.in_range(f"rates[{i}]", rate, 0, 1, open_low=True)
    if len(rates) > size:
        validate.fail("rates", f"at most {size} numbers, one a client", len(rates))
    rate_list = np.asarray(rates, np.float64)
    thresholds = np.minimum(np.floor((1 - rate_list) * 2.0**32), 2**32 - 1).astype(np.uint32)

    def drop(key, cohort):
        threshold = jnp.asarray(thresholds)[cohort.ids % len(rate_list)]
        responds = client_bits(stream(key, "response"), cohort.ids) >= threshold
        sent = None if cohort.timing.sent is None else cohort.timing.sent & responds
        return losing(cohort.timed(sent=sent), "silent", cohort.reported & ~responds)

    client_rates = np.resize(rate_list, size)
    client_rates.flags.writeable = False
    return sampler.then(drop, dataclasses.replace(design, client_rates=client_rates), (SILENT,))


def with_over_invitation(sampler: Sampler, num_reports: int) -> Sampler:
    """Only the first `num_reports` reports of a round count, in a random order of arrival (over-invitation).

    Later reports are sent for nothing (`Timing.sent`): their bytes count in `uplink_bytes`, and separately in
    `wasted_bytes`.

    Args:
      sampler: a sampler with a fixed number of different clients, such as `with_dropout(uniform(N, 130), 0.2)`.
      num_reports: in [1, num_slots].

    Returns: a sampler of the same cohorts with at most `num_reports` reports; `metrics["discarded"]` counts the reports
    that arrive too late.

    Raises: ValueError or TypeError for values out of range, and for a sampler of another kind.

    Guarantees:
      - min(reports, num_reports) count, a uniform choice among the clients that report, whatever their slots
        (tests/sampling/test_participation.py::test_over_invitation_keeps_a_uniform_choice)
      - every message that was sent is counted (::test_late_messages_are_counted)

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

    def discard_late(key, cohort):
        is_missing = (~cohort.reported).astype(jnp.uint32)
        slots = jnp.arange(sampler.num_slots, dtype=jnp.int32)
        # The order of arrival: random among the clients that report, and then the others.
        order = jax.lax.sort((is_missing, client_bits(stream(key, "arrival"), cohort.ids), slots), num_keys=2)[2]
        reported = cohort.reported & jnp.zeros_like(cohort.reported).at[order[:num_reports]].set(True)
        return losing(cohort.timed(sent=cohort.reported), "discarded", cohort.reported & ~reported)

    # The chance that a report is among the first: E min(reports, num_reports) / E reports.
    response_rate = design.response_rate
    if response_rate is None:
        chance_to_count = None
    else:
        expected_counted = mean_of_minimum(design.num_slots, response_rate, num_reports)
        chance_to_count = expected_counted / (design.num_slots * response_rate)
    design = dataclasses.replace(
        design,
        response_rates=(*design.response_rates, chance_to_count),
        max_reports=num_reports,
        reports_limited_after=len(design.response_rates),
    )
    if design.client_rates is not None:
        # How often other clients take a client's place follows from the rates of all clients.
        design = responding(design, "client")
    return sampler.then(discard_late, design, (DISCARDED,))
