"""Wrappers that end a round of simulated time before everybody has reported."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.network import within_budget
from fedjax_sim.sampling.design import SamplingDesign, one_for_one, responding
from fedjax_sim.sampling.time.battery import EXHAUSTED
from fedjax_sim.sampling.time.clock import INTERRUPTED
from fedjax_sim.sampling.time.cut import changed, cut_cohort, first_pass, spend, timed
from fedjax_sim.sampling.time.lost_reports import NEVER, losing, regained
from fedjax_sim.sampling.time.round_cost import Price
from fedjax_sim.types import Array, Cohort, Devices, Metric, Sampler
from fedjax_sim.validate import Positive

__all__ = ["with_deadline", "with_over_selection", "with_radio_budget"]

LATE = Metric("late", "clients too late for the deadline", "count")
SHORTENED = Metric("shortened", "clients that sent part of their work", "count")
NOT_NEEDED = Metric("not_needed", "clients slower than the first that were needed", "count")
NO_RADIO = Metric("no_radio", "clients without a place on the radio channel", "count")
MOST_AIRTIME = 10**9  # ticks


@validate.named_arguments
def with_deadline(sampler: Sampler, seconds: Positive, *, late: Literal["dropped", "partial"] = "dropped") -> Sampler:
    """A round ends after so many seconds at the latest.

    Args:
      sampler: one with a clock, `with_clock(...)`, and without another deadline.
      seconds: from the invitation to the end, at least one tick; rounded down to whole ones.
      late: "dropped": who has not arrived by then stops, and does not report; a message that was on its way counts as
        sent, and its bytes as wasted. "partial": a client does as many local steps as let its message arrive in time
        (`Cohort.work`), and is dropped only if not even one does; goes inside of `with_over_selection`.

    Returns: a sampler of the same cohorts. Who responds depends on the client: formulas and Horvitz-Thompson refuse the
    design. Accountants of client-level privacy take it, for no client decides about another.

    Raises: ValueError, TypeError for a sampler without a clock or with a deadline, or values out of range; for
    "partial" with clients that cannot stop early, `round.collect` does.

    Guarantees: who arrives in time reports, and no round is longer
    (tests/sampling/time/test_deadlines.py::test_deadline); partial work is the most that arrives in time
    (::test_partial_work_is_the_most_that_fits); control variates, error feedback and secure sums see the cohort alone
    (::test_time_acts_through_the_cohort_alone); without late clients both are the sampler without a deadline
    (::test_a_generous_deadline).

    References: Bonawitz et al. 2019, section 2.2; Nishio and Yonetani 2019 (FedCS), section 3.
    """
    devices = timed(sampler, "with_deadline")
    if LATE in sampler.metrics:
        validate.fail("sampler", "one without a deadline", "one with a deadline", "Keep the shorter of the two.")
    ticks = min(math.floor(validate.as_written(seconds) * devices.ticks_per_second), NEVER)
    if ticks < 1:
        validate.fail("seconds", f"at least one tick, {1 / devices.ticks_per_second:g} s", seconds)
    if late == "partial" and EXHAUSTED in sampler.metrics:
        hint = "How long a battery lasts follows from how much work is done: put with_battery around with_deadline."
        validate.fail("sampler", "one without batteries, for partial work", "with_battery", hint)
    if late == "partial" and getattr(sampler.design, "max_reports", None) is not None:
        hint = "Who is among the first follows from how much everybody does: put with_deadline inside."
        validate.fail("sampler", "one without a limit of reports, for partial work", sampler.design.max_reports, hint)

    def ended(key, cohort, price):
        if late == "dropped":
            return cut_cohort(devices, key, cohort, price, jnp.int32(ticks), LATE.name)
        shorter = _shortened(devices, key, cohort, price, ticks)
        shorter = shorter.timed(shortened=shorter.work < price.num_steps(cohort))
        return cut_cohort(devices, key, shorter, price, jnp.int32(ticks), LATE.name)

    metrics = (LATE, SHORTENED) if late == "partial" else (LATE,)
    return changed(sampler, ended, responding(sampler.design, "client"), metrics)


def _shortened(devices: Devices, key: Array, cohort: Cohort, price: Price, ticks: int) -> Cohort:
    """The cohort, doing no more than arrives in time. Who was to leave after its message then arrives before."""
    shorter = cohort._replace(work=_steps_in_time(devices, key, cohort, price, ticks))
    spent, ends = spend(devices, key, shorter, price), cohort.timing.spent.total
    left = ends < spend(devices, key, cohort, price).total  # nothing else cuts a round short inside of this
    shorter = shorter.timed(spent=spent)
    if INTERRUPTED.name not in cohort.timing.lost:
        return shorter
    back = regained(shorter, INTERRUPTED.name, left)
    again = back.reported & left
    begun = None if cohort.timing.begun is None else cohort.timing.begun | again
    back = back.timed(sent=cohort.timing.sent | again, begun=begun)
    early = left & (ends < jnp.minimum(spent.total, ticks))
    return cut_cohort(devices, key, back, price, jnp.where(early, ends, NEVER), INTERRUPTED.name)


def _steps_in_time(devices: Devices, key: Array, cohort: Cohort, price: Price, ticks: int) -> Array:
    """[m] int32, the most local steps, of those planned and at least 1, with which the message arrives in time."""

    def halved(_, bounds):
        low, high = bounds  # low arrives, or is 1; more than high do not, or are not planned
        middle = low + (high - low + 1) // 2
        fits = spend(devices, key, cohort._replace(work=middle), price).total <= ticks
        return jnp.where(fits, middle, low), jnp.where(fits, high, jnp.maximum(middle - 1, low))

    planned = price.num_steps(cohort)
    return jax.lax.fori_loop(0, validate.MOST_STEPS.bit_length(), halved, (jnp.ones_like(planned), planned))[0]


def with_over_selection(sampler: Sampler, num_reports: int) -> Sampler:
    """More clients are invited than needed: the round ends when the first `num_reports` messages have arrived.

    The others stop; what they had on its way counts as sent and wasted. Equal arrivals count in the order of ids. If
    fewer report, the round ends when the last one is done.

    Args:
      sampler: one with a clock, of different clients, without another limit of reports.
      num_reports: in [1, num_slots].

    Returns: a sampler of the same cohorts. Faster clients report more often: formulas and Horvitz-Thompson refuse the
    design. Accountants take that of a fixed number of clients, with replace-one neighbours: who is late for want of
    speed gives its place to one other.

    Raises: ValueError, TypeError for values out of range or a sampler of another kind.

    Guarantees: the first by arrival (tests/sampling/time/test_deadlines.py::test_over_selection_takes_the_first); where
    all devices are alike but for random times, every client is among them equally often (::test_random_arrivals).

    References: Bonawitz et al. 2019, sections 2.2 and 9 (130 % of the clients needed).
    """
    devices = timed(sampler, "with_over_selection")
    validate.integer("num_reports", num_reports, 1, sampler.num_slots)
    design = _limited(sampler.design, num_reports)

    def ended(key, cohort, price):
        arrival = jnp.where(cohort.reported, cohort.timing.spent.total, NEVER)
        slots = jnp.arange(arrival.size, dtype=jnp.int32)
        times, _, order = jax.lax.sort((arrival, cohort.ids, slots), num_keys=2)
        among = jnp.zeros_like(cohort.reported).at[order[:num_reports]].set(True)
        stopped = cut_cohort(devices, key, cohort, price, times[num_reports - 1], NOT_NEEDED.name)
        return losing(stopped, NOT_NEEDED.name, stopped.reported & ~among, times[num_reports - 1])

    return changed(sampler, ended, design, (NOT_NEEDED,))


@validate.named_arguments
def with_radio_budget(
    sampler: Sampler,
    *,
    budget_bytes: float | None = None,
    airtime_seconds: float | None = None,
    order: Literal["arrival", "id"] = "arrival",
) -> Sampler:
    """The messages of a round share a radio channel: clients send in order until the next one does not fit.

    Who has no place trains for nothing and sends nothing.

    Args:
      sampler: one with a clock, of different clients, without another limit of reports.
      budget_bytes, airtime_seconds: of all messages of a round, exactly one of the two, above 0. Of two passes a place
        in `budget_bytes` is for both messages, whether or not the second is sent; airtime is what is used. A message of
        more than 2^24 bytes counts to 1 part in 2^24, as float32 holds it.
      order: "arrival": by the moment at which a message would be ready; "id": by the clients' ids. Ties go by ids.

    Returns: a sampler of the same cohorts; formulas and Horvitz-Thompson refuse the design, and so do accountants, for
    a client with a long message can push out several others.

    Raises: ValueError, TypeError for values out of range or a sampler of another kind.

    Guarantees: the longest beginning of the order that fits (tests/sampling/time/test_deadlines.py::test_radio_budget).

    References: Nishio and Yonetani 2019 (FedCS), section 3, on resource blocks of a cell.
    """
    devices = timed(sampler, "with_radio_budget")
    if (budget_bytes is None) == (airtime_seconds is None):
        validate.fail("budget_bytes, airtime_seconds", "exactly one of the two", (budget_bytes, airtime_seconds))
    name, budget = ("budget_bytes", budget_bytes) if airtime_seconds is None else ("airtime_seconds", airtime_seconds)
    validate.positive(name, budget)
    airtime = (
        0 if airtime_seconds is None else math.floor(validate.as_written(airtime_seconds) * devices.ticks_per_second)
    )
    if airtime > MOST_AIRTIME:
        validate.fail("airtime_seconds", f"at most {MOST_AIRTIME / devices.ticks_per_second:g}", airtime_seconds)
    longest = None if budget_bytes is None else _longest(budget_bytes, sampler.num_slots)
    design = responding(_limited(sampler.design, sampler.num_slots), "others")

    def ended(key, cohort, price):
        spent = cohort.timing.spent
        ready = spent.down + spent.compute
        cost, most = spent.up, airtime
        if price.more is not None and price.more.airtime is not None:
            cost = price.more.airtime
        if price.before is not None:  # the first of two messages is sent in the middle of a round
            before = first_pass(devices, key, cohort, price)
            cost = jnp.maximum(cost, jnp.clip(spent.total - before.down - before.compute, 0, before.up))
        if budget_bytes is not None:  # messages of one size: so many
            most = (price.all_bytes_up(cohort) <= longest).sum(dtype=jnp.int32)
            cost = jnp.ones_like(cohort.ids)
        if price.more is not None and price.more.sends is not None:
            cost = jnp.where(price.more.sends, cost, 0)
        sent = cohort.reported if cohort.timing.sent is None else cohort.timing.sent  # also those cut off on their way
        wanted = sent if cohort.timing.begun is None else cohort.timing.begun
        place = within_budget(cohort.ids, cost, wanted, most, ready if order == "arrival" else None)
        place |= cost == 0  # who sends nothing needs none
        without = wanted & ~place
        stopped = cut_cohort(devices, key, cohort, price, jnp.where(without, ready, NEVER), NO_RADIO.name)
        stopped = stopped.timed(sent=sent & place, begun=None if stopped.timing.begun is None else wanted & place)
        return losing(stopped, NO_RADIO.name, without, ready)

    return changed(sampler, ended, design, (NO_RADIO,))


def _longest(budget: float, number: int) -> np.ndarray:
    """[number] float32, the most bytes of a message of which 1, 2, ... fit; exact, which a quotient is not."""
    counts = np.arange(1, number + 1)  # a float32 times a count below 2^29 is a float64
    sizes = (budget / counts).astype(np.float32)
    return np.where(sizes.astype(np.float64) * counts > budget, np.nextafter(sizes, np.float32(0)), sizes)


def _limited(design: SamplingDesign, num_reports: int) -> SamplingDesign:
    """The design of which at most so many reports count; whose depends on the clients."""
    if not isinstance(design, SamplingDesign) or design.replacement:
        rule = "a sampler of different clients"
        validate.fail("sampler", rule, getattr(design, "scheme", design), "Use uniform, poisson or full.")
    if design.max_reports is not None:
        hint = "Who is among the first is decided once: leave one of the two limits out."
        validate.fail("sampler", "one without another limit of reports", design.max_reports, hint)
    design = dataclasses.replace(
        design,
        response_rates=(*design.response_rates, None),
        max_reports=num_reports,
        reports_limited_after=len(design.response_rates),
    )
    return responding(design, "client" if one_for_one(design) else "others")
