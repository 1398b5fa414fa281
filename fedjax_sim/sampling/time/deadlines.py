"""Wrappers that end a round of simulated time before all clients have reported."""

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
from fedjax_sim.sampling.time.cut import (
    changed,
    cut_cohort,
    devices_with_clock,
    first_pass,
    sent_by_slots,
    spend,
    spent_by_slots,
)
from fedjax_sim.sampling.time.lost_reports import NEVER, losing, regained
from fedjax_sim.sampling.time.round_cost import Price
from fedjax_sim.types import Array, Cohort, Devices, Metric, Sampler
from fedjax_sim.validate import Positive

LATE = Metric("late", "clients too late for the deadline", "count")
SHORTENED = Metric("shortened", "clients that sent part of their work", "count")
NOT_NEEDED = Metric("not_needed", "clients slower than the first that were needed", "count")
NO_RADIO = Metric("no_radio", "clients without a place on the radio channel", "count")
MOST_AIRTIME = 10**9  # ticks


@validate.named_arguments
def with_deadline(sampler: Sampler, seconds: Positive, *, late: Literal["dropped", "partial"] = "dropped") -> Sampler:
    """A round ends after the given number of seconds at the latest.

    Args:
      sampler: a sampler with a clock, `with_clock(...)`, and without another deadline.
      seconds: from the invitation to the end, at least one tick; rounded down to whole ticks.
      late: what happens to clients that are too slow. "dropped": a client whose message has not arrived by the deadline
        stops, and does not report. A message on its way counts as sent, and its bytes as wasted. "partial": a client
        does the largest number of local steps with which its message arrives in time (`Cohort.work`). It is dropped
        only if the message of a single step would be late. "partial" goes inside of `with_over_selection`.

    Returns: a sampler of the same cohorts; `metrics["late"]` counts dropped clients, and `metrics["shortened"]` clients
    that report with partial work. Whether a client reports depends on the client, so formulas and Horvitz-Thompson
    refuse the design. Accountants of client-level privacy accept it, since no client affects another.

    Raises: ValueError or TypeError for a sampler without a clock or with a deadline, and for values out of range. For
      "partial" with clients that cannot stop early, `round.collect` raises.

    Guarantees:
      - clients whose message arrives in time report, and no round is longer
        (tests/sampling/time/test_deadlines.py::test_deadline)
      - partial work is the most that arrives in time (::test_partial_work_is_the_most_that_fits)
      - control variates, error feedback and secure sums are affected through the cohort only
        (::test_time_acts_through_the_cohort_alone)
      - without late clients, both forms are the sampler without a deadline (::test_a_generous_deadline)

    References: Bonawitz et al. 2019, section 2.2; Nishio and Yonetani 2019 (FedCS), section 3.
    """
    devices = devices_with_clock(sampler, "with_deadline")
    if LATE in sampler.metrics:
        validate.fail("sampler", "one without a deadline", "one with a deadline", "Keep the shorter of the two.")
    deadline_ticks = min(math.floor(validate.as_written(seconds) * devices.ticks_per_second), NEVER)
    if deadline_ticks < 1:
        validate.fail("seconds", f"at least one tick, {1 / devices.ticks_per_second:g} s", seconds)
    if late == "partial" and EXHAUSTED in sampler.metrics:
        hint = "How long a battery lasts follows from how much work is done: put with_battery around with_deadline."
        validate.fail("sampler", "one without batteries, for partial work", "with_battery", hint)
    if late == "partial" and getattr(sampler.design, "max_reports", None) is not None:
        hint = "Who is among the first follows from how much everybody does: put with_deadline inside."
        validate.fail("sampler", "one without a limit of reports, for partial work", sampler.design.max_reports, hint)

    def end_round(key, cohort, price):
        if late == "dropped":
            return cut_cohort(devices, key, cohort, price, jnp.int32(deadline_ticks), name=LATE.name)
        shorter = _with_partial_work(devices, key, cohort, price, deadline_ticks)
        shorter = shorter.timed(shortened=shorter.work < price.num_steps(cohort))
        return cut_cohort(devices, key, shorter, price, jnp.int32(deadline_ticks), name=LATE.name)

    metrics = (LATE, SHORTENED) if late == "partial" else (LATE,)
    return changed(sampler, end_round, responding(sampler.design, "client"), metrics)


def _with_partial_work(devices: Devices, key: Array, cohort: Cohort, price: Price, deadline_ticks: int) -> Cohort:
    """Returns the cohort in which each client does no more work than arrives in time.

    A client that was to leave before its message arrived may now finish its shorter work before it leaves. Such a
    client reports again.

    Args:
      devices: what the clients run on.
      key: the key that the cohort was drawn with.
      cohort: m slots, with the times of their whole work, or until they leave (`Timing.spent`).
      price: the cost of a round.
      deadline_ticks: ticks after the invitation, at least 1.

    Returns: the cohort with `work`, [m] int32 local steps, at least 1, and with the times of this work. Who is late all
    the same is not cut here.
    """
    shorter = cohort._replace(work=_steps_in_time(devices, key, cohort, price, deadline_ticks))
    spent = spend(devices, key, shorter, price)
    end_ticks = spent_by_slots(cohort).total
    # Only leaving can cut a round short inside of this wrapper, so a client that ends early has left.
    has_left = end_ticks < spend(devices, key, cohort, price).total
    shorter = shorter.timed(spent=spent)
    if INTERRUPTED.name not in cohort.timing.lost:
        return shorter
    # All clients that left report again, as if they stayed; then clients that leave before the shorter work is done and
    # before the deadline are cut at the moment at which they leave.
    restored = regained(shorter, INTERRUPTED.name, has_left)
    reports_again = restored.reported & has_left
    begun = None if cohort.timing.begun is None else cohort.timing.begun | reports_again
    restored = restored.timed(sent=sent_by_slots(cohort) | reports_again, begun=begun)
    leaves_early = has_left & (end_ticks < jnp.minimum(spent.total, deadline_ticks))
    leave_ticks = jnp.where(leaves_early, end_ticks, NEVER)
    return cut_cohort(devices, key, restored, price, leave_ticks, name=INTERRUPTED.name)


def _steps_in_time(devices: Devices, key: Array, cohort: Cohort, price: Price, deadline_ticks: int) -> Array:
    """[m] int32: the most local steps with which the message arrives in time, at least 1 and at most those planned."""

    def bisect(_, bounds):
        # The message of `low` steps arrives in time, or low is 1. More than `high` steps are late, or are not planned.
        low, high = bounds
        middle = low + (high - low + 1) // 2
        fits = spend(devices, key, cohort._replace(work=middle), price).total <= deadline_ticks
        return jnp.where(fits, middle, low), jnp.where(fits, high, jnp.maximum(middle - 1, low))

    planned_steps = price.num_steps(cohort)
    bounds = (jnp.ones_like(planned_steps), planned_steps)
    return jax.lax.fori_loop(0, validate.MOST_STEPS.bit_length(), bisect, bounds)[0]


def with_over_selection(sampler: Sampler, num_reports: int) -> Sampler:
    """A round ends when the first `num_reports` messages have arrived (over-selection).

    More clients are invited than needed. When the round ends, the other clients stop; a message on its way counts as
    sent, and its bytes as wasted. Messages that arrive at the same moment count in the order of client ids. If fewer
    clients report, the round ends when the last client is done.

    Args:
      sampler: a sampler with a clock, of different clients, without another limit of reports.
      num_reports: in [1, num_slots].

    Returns: a sampler of the same cohorts; `metrics["not_needed"]` counts clients that were too slow. Faster clients
    report more often, so formulas and Horvitz-Thompson refuse the design. Accountants accept the design of a fixed
    number of clients, with replace-one neighbours: a client that is late gives its place to one other client.

    Raises: ValueError or TypeError for values out of range, and for a sampler of another kind.

    Guarantees:
      - the first messages by arrival count
        (tests/sampling/time/test_deadlines.py::test_over_selection_takes_the_first)
      - if all devices are alike up to random times, every client is among the first equally often
        (::test_random_arrivals)

    References: Bonawitz et al. 2019, sections 2.2 and 9 (130 % of the clients needed).
    """
    devices = devices_with_clock(sampler, "with_over_selection")
    validate.integer("num_reports", num_reports, 1, sampler.num_slots)
    design = _limited(sampler.design, num_reports)

    def end_round(key, cohort, price):
        arrival_ticks = jnp.where(cohort.reported, spent_by_slots(cohort).total, NEVER)
        slots = jnp.arange(arrival_ticks.size, dtype=jnp.int32)
        sorted_ticks, _, order = jax.lax.sort((arrival_ticks, cohort.ids, slots), num_keys=2)
        is_among_first = jnp.zeros_like(cohort.reported).at[order[:num_reports]].set(True)
        end_ticks = sorted_ticks[num_reports - 1]
        stopped = cut_cohort(devices, key, cohort, price, end_ticks, name=NOT_NEEDED.name)
        # A message that arrives at the last moment, and is not among the first, does not count either.
        return losing(stopped, NOT_NEEDED.name, stopped.reported & ~is_among_first, end_ticks)

    return changed(sampler, end_round, design, (NOT_NEEDED,))


@validate.named_arguments
def with_radio_budget(
    sampler: Sampler,
    *,
    budget_bytes: float | None = None,
    airtime_seconds: float | None = None,
    order: Literal["arrival", "id"] = "arrival",
) -> Sampler:
    """The messages of a round share a radio channel: clients send in order, until the next message does not fit.

    A client without a place on the channel trains for nothing, and sends nothing.

    Args:
      sampler: a sampler with a clock, of different clients, without another limit of reports.
      budget_bytes: the bytes of all messages of a round, positive; None = `airtime_seconds` is given. Of two passes, a
        place is for both messages, whether or not the second message is sent. A message of more than 2^24 bytes counts
        to 1 part in 2^24, as float32 holds it.
      airtime_seconds: the time of all messages of a round on the channel, positive; None = `budget_bytes` is given. Of
        two passes, only the airtime that is used counts.
      order: "arrival": by the moment at which a message would be ready; "id": by client ids. Ties are in the order of
        ids.

    Returns: a sampler of the same cohorts; `metrics["no_radio"]` counts clients without a place. Formulas and
    Horvitz-Thompson refuse the design, and so do accountants, since a client with a long message can displace several
    others.

    Raises: ValueError or TypeError for values out of range, and for a sampler of another kind.

    Guarantees: the messages that are sent are the longest prefix of the order that fits
    (tests/sampling/time/test_deadlines.py::test_radio_budget).

    References: Nishio and Yonetani 2019 (FedCS), section 3, on resource blocks of a cell.
    """
    devices = devices_with_clock(sampler, "with_radio_budget")
    if (budget_bytes is None) == (airtime_seconds is None):
        validate.fail("budget_bytes, airtime_seconds", "exactly one of the two", (budget_bytes, airtime_seconds))
    name, budget = ("budget_bytes", budget_bytes) if airtime_seconds is None else ("airtime_seconds", airtime_seconds)
    validate.positive(name, budget)
    if airtime_seconds is None:
        airtime_ticks = 0
    else:
        airtime_ticks = math.floor(validate.as_written(airtime_seconds) * devices.ticks_per_second)
    if airtime_ticks > MOST_AIRTIME:
        validate.fail("airtime_seconds", f"at most {MOST_AIRTIME / devices.ticks_per_second:g}", airtime_seconds)
    largest_sizes = None if budget_bytes is None else _largest_sizes(budget_bytes, sampler.num_slots)
    design = responding(_limited(sampler.design, sampler.num_slots), "others")

    def share_channel(key, cohort, price):
        spent = spent_by_slots(cohort)
        ready_ticks = spent.down + spent.compute
        cost = spent.up
        limit = airtime_ticks
        if price.more is not None and price.more.airtime is not None:
            cost = price.more.airtime
        if price.before is not None:
            # The first of two messages is sent in the middle of a round; a client that stops uses only its part of it.
            first = first_pass(devices, key, cohort, price)
            cost = jnp.maximum(cost, jnp.clip(spent.total - first.down - first.compute, 0, first.up))
        if budget_bytes is not None:
            # All messages have the same size, so the budget is a number of messages, and each costs 1.
            limit = (price.all_bytes_up(cohort) <= largest_sizes).sum(dtype=jnp.int32)
            cost = jnp.ones_like(cohort.ids)
        if price.more is not None and price.more.sends is not None:
            cost = jnp.where(price.more.sends, cost, 0)
        # Messages that are cut off on their way use the channel too.
        sent = sent_by_slots(cohort)
        wants_place = sent if cohort.timing.begun is None else cohort.timing.begun
        has_place = within_budget(cohort.ids, cost, wants_place, limit, ready_ticks if order == "arrival" else None)
        has_place |= cost == 0  # a client that sends nothing needs no place
        has_no_place = wants_place & ~has_place
        end_ticks = jnp.where(has_no_place, ready_ticks, NEVER)
        stopped = cut_cohort(devices, key, cohort, price, end_ticks, name=NO_RADIO.name)
        begun = None if stopped.timing.begun is None else wants_place & has_place
        stopped = stopped.timed(sent=sent & has_place, begun=begun)
        return losing(stopped, NO_RADIO.name, has_no_place, ready_ticks)

    return changed(sampler, share_channel, design, (NO_RADIO,))


def _largest_sizes(budget: float, number: int) -> np.ndarray:
    """Computes the largest size of a message of which 1, 2, ... messages fit a budget, [number] float32.

    A quotient of floats may be rounded up, past the budget. The product is exact: a float32 times a count below 2^29 is
    a float64.
    """
    counts = np.arange(1, number + 1)
    sizes = (budget / counts).astype(np.float32)
    return np.where(sizes.astype(np.float64) * counts > budget, np.nextafter(sizes, np.float32(0)), sizes)


def _limited(design: SamplingDesign, num_reports: int) -> SamplingDesign:
    """Returns the design of cohorts of which at most `num_reports` reports count, chosen by properties of the clients.

    Args:
      design: of cohorts of different clients, without a limit of reports.
      num_reports: at least 1.

    Raises: ValueError for another design.
    """
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
