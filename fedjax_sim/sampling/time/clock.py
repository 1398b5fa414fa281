"""`with_clock` gives synchronous rounds a simulated duration."""

from __future__ import annotations

import math
from typing import Annotated

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.network.devices import SATURATED, absent_after, check_devices, there_at
from fedjax_sim.sampling.design import responding
from fedjax_sim.sampling.inner import inner_observe
from fedjax_sim.sampling.membership import UNFILLED, first_invited, of_first
from fedjax_sim.sampling.time.cut import (
    LONGEST,
    Timed,
    cut_cohort,
    spend,
    spent_by_slots,
    stated,
    unlimited,
    untimed,
    window,
)
from fedjax_sim.sampling.time.lost_reports import recounted
from fedjax_sim.sampling.time.round_cost import price_of
from fedjax_sim.types import Array, Clock, Cohort, Devices, Metric, Sampler
from fedjax_sim.validate import Integer

TIMES = (
    Metric("round_seconds", "mean simulated time of a round", "seconds", "mean"),
    Metric("simulated_seconds", "simulated time", "seconds", "last"),
    Metric("client_seconds", "simulated time that invited clients had, together", "seconds"),
    Metric("utilisation", "share of it that they were busy", "share", "mean", by="client_seconds"),
    Metric("joules", "energy spent by clients", "joules"),
    Metric("wasted_joules", "of it for nothing", "joules"),
    SATURATED,
)
UNAVAILABLE = Metric("unavailable", "clients drawn who were not there", "count")
INTERRUPTED = Metric("interrupted", "clients who left before their message had arrived", "count")
SCALES = (
    Metric("flops_scale", "operations that take time, times those computed", "count", pooled="last"),
    Metric("bytes_scale", "bytes that take time, times those sent", "count", pooled="last"),
)
MOST_SCALE = 1e12


@validate.named_arguments
def with_clock(
    sampler: Sampler,
    devices: Devices,
    *,
    num_invited: int | None = None,
    overhead_seconds: float = 0.0,
    idle_seconds: float = 60.0,
    checks: Annotated[int, Integer(1, 64)] = 8,
    flops_scale: float = 1.0,
    bytes_scale: float = 1.0,
) -> Sampler:
    """Each round takes simulated time: the server waits for every invited client.

    An invited client receives the model, trains and sends its message, in the time that its device takes. A round lasts
    as long as its slowest client. Wrappers around this one end rounds sooner: `with_deadline`, `with_over_selection`,
    `with_radio_budget`.

    Availability: time changes no number of a run, unless clients are not always available (`Devices.availability`). A
    client that is not available when a round begins is not invited. A client that becomes unavailable before its
    message has arrived does not report. To invite m available clients, draw more clients, and invite the first m that
    are available: `with_clock(uniform(N, 20 * m), devices, num_invited=m)`. As a rule, draw 2m over the least share of
    clients that is available at any time.

    Hierarchies: clients that are federations (`algorithms.as_client_update`) have rounds inside instead of training.
    Here their devices are the links to the level above. Their joules are those of everything inside.

    Scales: a small model can stand for a larger one. Times, energy and radio budgets are then those of `flops_scale`
    times its operations and `bytes_scale` times its bytes, each way. What the model learns, and the bytes of the log,
    are those of the small model; Info has both scales, and the report states them.

    Args:
      sampler: any sampler without a clock. Wrappers that change clients' work or lose reports at any time, such as
        `with_stragglers` and `with_dropout`, go inside. A client that drops out spends all its time and energy, and the
        server waits for it.
      devices: of all N clients; in a config `[devices]`.
      num_invited: how many of the available clients drawn are invited, the first in the order of the slots (which is
        random for `uniform`); None = all of them.
      overhead_seconds: of the server in each round, at least 0 and at most 2^30 ticks; with ticks of a whole second,
        below 2^21 ticks.
      idle_seconds: how long the server waits if it can invite nobody, positive and at most as long as an overhead.
      checks: how often availability is looked up during the local work, evenly spaced, in [1, 64]. It is also looked up
        after the download, and on arrival.
      flops_scale: in (0, 1e12]; 1 = the model as it is.
      bytes_scale: in (0, 1e12]; 1 = the model as it is.

    Returns: a sampler of the same cohorts, without clients that are not available, and with `Timing.spent`. With
    availability, a client's speed decides when the next round begins, and so which clients are available then: formulas
    and accountants refuse that design. Info gets

      - `round_seconds`, and `simulated_seconds` since the start of the run
      - `joules` of all clients, and `wasted_joules` of clients that did not report
      - `client_seconds`, the time of all invited clients until the last is done, and `utilisation`, the share of it in
        which they receive, train or send
      - `saturated_clients`, whose download, work or message took longer than the clock counts, and was counted as that
        long
      - `unavailable` and `interrupted`, clients that were not available, or left; `unfilled`, places that nobody filled

    Raises: ValueError or TypeError for a sampler with a clock or a limit of reports, for devices of another population,
      and for values out of range.

    Guarantees:
      - a run that waits for every client has the bits of a run without a clock
        (tests/sampling/time/test_clock.py::test_time_changes_no_number)
      - times are exact integers (::test_the_clock_is_exact)
      - available clients are invited, each with the same chance (::test_who_is_there,
        ::test_inclusion_given_availability), and a client that leaves does not report (::test_who_leaves)
      - a client that is lost is counted once
        (tests/sampling/time/test_lost_reports.py::test_every_client_is_counted_once)

    References: Bonawitz et al. 2019, section 2; Lai et al. 2022 (FedScale), section 4.

    >>> import jax
    >>> from fedjax_sim.network import constant, heterogeneous
    >>> from fedjax_sim.sampling.uniform import uniform
    >>> from fedjax_sim.types import Work
    >>> alike = heterogeneous(
    ...     9, speed=constant(1e9), bandwidth_down=constant(1e6), bandwidth_up=constant(1e6), latency=constant(0.25)
    ... )
    >>> clocked = with_clock(uniform(9, 3), alike, overhead_seconds=1.0)
    >>> state = clocked.tell(clocked.init(), Work(bytes_up=1_000_000, bytes_down=1_000_000, steps=None, flops=0.0))
    >>> cohort, state = jax.jit(clocked.sample)(jax.random.key(0), state)  # a second and a latency each way
    >>> float(cohort.metrics["round_seconds"]), cohort.timing.spent.total.tolist()
    (3.5, [2500, 2500, 2500])
    """
    untimed(sampler, "with_clock")
    unlimited(sampler, "with_clock", "Arrivals follow from the devices: put with_over_selection around with_clock.")
    check_devices(devices, sampler.design.population_size, "sampler's")
    # `Clock.since` needs the clock to move by less than 2^31 seconds in a round, overhead included.
    max_seconds = min(2**30 / devices.ticks_per_second, 2**31 - 1 - LONGEST / devices.ticks_per_second)
    validate.in_range("overhead_seconds", overhead_seconds, 0, max_seconds)
    validate.in_range("idle_seconds", idle_seconds, 0, max_seconds, open_low=True)
    scales = {"flops_scale": flops_scale, "bytes_scale": bytes_scale}
    for name, scale in scales.items():
        validate.in_range(name, scale, 0, MOST_SCALE, open_low=True)
    is_scaled = any(scale != 1 for scale in scales.values())
    slots = sampler.num_slots if num_invited is None else num_invited
    validate.integer("num_invited", slots, 1, sampler.num_slots, hint="Draw more clients than are invited.")
    per_second = devices.ticks_per_second
    availability = devices.availability
    overhead_ticks, idle_ticks = (
        math.ceil(validate.as_written(x) * per_second) for x in (overhead_seconds, idle_seconds)
    )

    def init():
        zero = jnp.zeros((), jnp.int32)
        return Timed(sampler.init(), Clock(zero, zero), price_of(None))

    def tell(state, work):
        inner = state.sampler if sampler.tell is None else sampler.tell(state.sampler, work)
        return state._replace(sampler=inner, price=price_of(work, **scales))

    def sample(key, state):
        # The sampler gets the key itself, so that cohorts are those of a run without a clock. Devices draw from streams
        # of their own of this key: `spend` and `cut_cohort` need the same one, to see the same jitter.
        cohort, inner = sampler.sample(key, state.sampler)
        if availability is not None:
            cohort = _only_available(cohort, there_at(devices, cohort.ids, state.clock.seconds))
        if num_invited is not None:
            cohort = first_invited(cohort, num_invited)
        cohort = cohort.timed(spent=spend(devices, key, cohort, state.price))
        if availability is not None:
            leave_ticks = absent_after(devices, cohort.ids, state.clock, spent_by_slots(cohort), checks)
            cohort = cut_cohort(devices, key, cohort, state.price, leave_ticks, name=INTERRUPTED.name)
        ticks = jnp.where(cohort.invited.any(), window(cohort), idle_ticks)
        clock = state.clock.moved(ticks, per_second).moved(overhead_ticks, per_second).since(state.clock)
        if is_scaled:
            cohort = cohort._replace(metrics=cohort.metrics | {name: jnp.float32(x) for name, x in scales.items()})
        return stated(cohort, state.clock, clock, per_second), Timed(inner, clock, state.price)

    design = sampler.design if num_invited is None else of_first(sampler.design, num_invited)
    metrics = TIMES if availability is None else (*TIMES, UNAVAILABLE, INTERRUPTED)
    metrics = metrics if num_invited is None else (*metrics, UNFILLED)
    metrics = (*metrics, *SCALES) if is_scaled else metrics
    return sampler._replace(
        init=init,
        sample=sample,
        num_slots=slots,
        design=design if availability is None else responding(design, "others"),
        tell=tell,
        observe=inner_observe(sampler),
        metrics=(*sampler.metrics, *metrics),
        devices=devices,
    )


def _only_available(cohort: Cohort, is_available: Array) -> Cohort:
    """The cohort in which clients that are not available, by a mask [m], are not invited."""
    num_unavailable = (cohort.invited & ~is_available).sum(dtype=jnp.int32)
    sent = None if cohort.timing.sent is None else cohort.timing.sent & is_available
    invited = cohort.invited & is_available
    reported = cohort.reported & is_available
    cohort = cohort._replace(
        invited=invited, reported=reported, metrics=cohort.metrics | {"unavailable": num_unavailable}
    )
    return recounted(cohort.timed(sent=sent))
