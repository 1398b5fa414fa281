"""The effect of simulated time on a cohort: what clients spend, when they stop, and the clock after the round."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.network.devices import MOST_TICKS, spent_by
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.sampling.time.lost_reports import NEVER, losing
from fedjax_sim.sampling.time.round_cost import More, Price
from fedjax_sim.sampling.visits import DISTINCT
from fedjax_sim.types import Array, Clock, Cohort, Devices, Load, Metric, PyTree, Sampler, Spent

LONGEST = 2**31 - 2**21  # the largest number of ticks until the last client is done
Phases: TypeAlias = tuple[Array, Array, Array]  # of download, local work and message


class Timed(NamedTuple):
    """The state of a sampler with a clock. Wrappers find it inside of their own state by its type."""

    sampler: PyTree  # the state of the sampler without a clock
    clock: Clock
    price: Price


def devices_with_clock(sampler: Sampler, name: str) -> Devices:
    """Returns the devices of a sampler with a clock, for a wrapper that needs a clock.

    Args:
      sampler: the sampler to wrap.
      name: of the wrapper, for errors.

    Raises: TypeError for an argument that is no sampler; ValueError for a sampler without a clock, and for a sampler
    that counts distinct clients (`with_distinct_clients`), which belongs around the wrapper.

    Guarantees: a sampler without a clock is refused (tests/sampling/time/test_clock.py::test_wrong_input).
    """
    _refuse_counted(sampler, name)
    if sampler.devices is None:
        hint = "Put with_clock(sampler, devices) inside; in a config, write [sampler.with_clock] before it."
        validate.fail("sampler", f"one with a clock, for {name}", "one whose rounds take no time", hint)
    return sampler.devices


def _refuse_counted(sampler: Sampler, name: str) -> None:
    """Refuses a sampler that counts distinct clients, whose reports `name` would change after they are counted."""
    validate.part("sampler", sampler, Sampler)
    if DISTINCT in sampler.metrics:
        hint = f"Put with_distinct_clients around {name}."
        validate.fail("sampler", f"one that does not count clients yet, for {name}", "with_distinct_clients", hint)


def untimed(sampler: Sampler, name: str) -> None:
    """Checks that a sampler has no clock, since times would not follow from what a wrapper changes around the clock.

    Args:
      sampler: the sampler to wrap.
      name: of the wrapper, for errors.

    Raises: TypeError for an argument that is no sampler; ValueError for a sampler with a clock.
    """
    _refuse_counted(sampler, name)
    if sampler.devices is not None:
        hint = f"Put {name} inside of with_clock; in a config, before it."
        validate.fail("sampler", f"one without a clock, for {name}", "one with a clock", hint)


def unlimited(sampler: Sampler, name: str, hint: str) -> None:
    """Checks that a sampler has no limit of reports, since a wrapper would change which reports are the first.

    Args:
      sampler: the sampler to wrap.
      name: of the wrapper, for errors.
      hint: what to do instead, for errors.

    Raises: ValueError for a sampler with a limit of reports.
    """
    max_reports = getattr(sampler.design, "max_reports", None)
    if max_reports is not None:
        validate.fail("sampler", f"one without a limit of reports, for {name}", max_reports, hint)


def changed(
    sampler: Sampler, change: Callable, design: SamplingDesign | None = None, metrics: tuple[Metric, ...] = ()
) -> Sampler:
    """Applies a change to each cohort of a sampler with a clock, like `Sampler.then`.

    If the changed cohort is done sooner, the clock is put back by the difference.

    Args:
      sampler: a sampler with a clock.
      change: (key, Cohort, `Price`) -> Cohort; the key is the one that the cohort was drawn with.
      design: of the changed cohorts, as in `Sampler.then`; None = that of the sampler.
      metrics: that the change states, as in `Sampler.then`.

    Guarantees: over 5,000 rounds that a deadline ends early, the clock equals the sum in Python's integers
    (tests/sampling/time/test_clock.py::test_the_clock_is_exact).
    """
    assert sampler.devices is not None, "a sampler with a clock has devices"
    per_second = sampler.devices.ticks_per_second

    def sample(key, state):
        clock_before = _timed_state(state).clock
        cohort, state = sampler.sample(key, state)
        timed_state = _timed_state(state)
        changed_cohort = change(key, cohort, timed_state.price)
        difference = window(changed_cohort) - window(cohort)
        clock = timed_state.clock.moved(difference, per_second).since(clock_before)
        return stated(changed_cohort, clock_before, clock, per_second), _with_timed(state, clock=clock)

    design = sampler.design if design is None else design
    return sampler._replace(sample=sample, design=design, metrics=(*sampler.metrics, *metrics))


def spend(devices: Devices, key: Array, cohort: Cohort, price: Price) -> Spent:
    """Computes what the clients of a cohort spend if nothing stops them.

    Args:
      devices: what the clients run on.
      key: the key that the cohort was drawn with.
      cohort: the cohort.
      price: the cost of a round.

    Returns: a `Spent`, [m] each; zeros for slots that are not invited.

    Raises: ValueError for federations whose rounds inside were not priced for this cohort.
    """
    if price.inside is not None and price.more is None:
        hint = "Call fedjax_sim.round.invite, not the sampler: the round's key decides who takes part inside."
        validate.fail("price.more", "what the rounds inside of this cohort take", None, hint)
    spent = _spent(devices, key, cohort.ids, price.loads(cohort))
    if price.more is not None:
        spent = Spent(*_with_more(spent[:3], price.more), spent.joules + sum(price.more.joules))
    return jax.tree.map(lambda x: jnp.where(cohort.invited, x, 0), spent)


def spent_by_slots(cohort: Cohort) -> Spent:
    """Returns what the slots of a cohort spend, which a sampler with a clock states."""
    if cohort.timing.spent is None:
        hint = "Make its clock by with_clock, and keep `Cohort.timing` when you change its cohorts."
        validate.fail("sampler", "cohorts that state their times, for it has devices", "cohorts without", hint)
    return cohort.timing.spent


def sent_by_slots(cohort: Cohort) -> Array:
    """Returns which slots send a message, in time or too late, [m] bool."""
    return cohort.reported if cohort.timing.sent is None else cohort.timing.sent


def first_pass(devices: Devices, key: Array, cohort: Cohort, price: Price) -> Spent:
    """Computes what clients spend until the first of their two messages has arrived, if nothing stops them."""
    return _spent(devices, key, cohort.ids, price.loads(cohort)[:1])


def _spent(devices: Devices, key: Array, ids: Array, loads: tuple[Load, ...]) -> Spent:
    """Computes what all passes of a round take: each phase (download, local work, message) is summed over passes."""
    total, *other_passes = (spent_by(devices, key, ids, load) for load in loads)
    for spent in other_passes:
        total = Spent(*_added(total[:3], spent[:3]), total.joules + spent.joules)
    return total


def _added(ticks: Phases, others: tuple) -> Phases:
    """The sums of ticks, phase by phase, at most `MOST_TICKS` each."""
    down, compute, up = (jnp.minimum(x + y, MOST_TICKS) for x, y in zip(ticks, others, strict=True))
    return down, compute, up


def _with_more(ticks: Phases, more: More) -> Phases:
    """The ticks of the three phases with those of `more`; the last phase ends when the slot waits for no other."""
    down, compute, up = _added(ticks, more.ticks)
    return down, compute, jnp.clip(more.least - down - compute, up, MOST_TICKS)


def price_in(state: PyTree) -> Price:
    """Returns the cost of a round from the state of a sampler with a clock, whatever wraps the sampler."""
    return _timed_state(state).price


def repriced(state: PyTree, price: Price) -> PyTree:
    """Returns the state of a sampler with a clock, whatever wraps the sampler, with another cost of a round."""
    return _with_timed(state, price=price)


def cut_cohort(devices: Devices, key: Array, cohort: Cohort, price: Price, at: Array, *, name: str) -> Cohort:
    """Stops the clients of a cohort at a moment: a client that is not done by then does not report, and is lost.

    A client that would be lost to another cause at a later moment is stopped too, and is counted under this cause.

    A message that is on its way at the moment counts as sent, in full (`Timing.sent`). If a round has two messages,
    `Timing.begun` says the same of the first one, and `Timing.sent` of the last one.

    A round has three phases: download, local work and message. The energy of a phase that is cut short is spent in
    proportion to the time that has passed.

    Args:
      devices: what the clients run on.
      key: the key that the cohort was drawn with.
      cohort: the cohort.
      price: the cost of a round.
      at: [] or [m] int32, the moment in ticks after the invitation.
      name: of the cause, and of the metric that counts the clients which are lost to it.

    Returns: the cohort with the reports that arrived by the moment, and with times and energy up to it.

    Guarantees:
      - energy is that of what was done (tests/sampling/time/test_clock.py::test_energy_of_what_was_done)
      - of two messages, each counts as begun at its own moment
        (tests/sampling/time/test_deadlines.py::test_the_first_of_two_messages_was_sent)
      - in whatever order cuts are made, the first moment counts
        (tests/sampling/time/test_lost_reports.py::test_every_client_is_counted_once)
    """
    spent = spent_by_slots(cohort)
    is_late = cohort.invited & (spent.total > at)
    ticks = ticks_done(spent, at)
    joules = joules_of(ticks, *_planned(devices, key, cohort, price))
    sent = sent_by_slots(cohort)
    begun = cohort.timing.begun
    first_message_ticks = 0
    if price.before is not None:
        first = first_pass(devices, key, cohort, price)
        begun = sent if begun is None else begun
        first_message_ticks = first.up
        begun &= ~is_late | (at > first.down + first.compute)
    # The message phase holds the messages of both passes, so the last message begins after the first one.
    sent &= ~is_late | (ticks[2] > first_message_ticks)
    spent_until = Spent(*ticks, jnp.where(is_late, joules, spent.joules))
    return losing(cohort.timed(sent=sent, begun=begun, spent=spent_until), name, is_late, at)


def ticks_done(spent: Spent, at: Array) -> Phases:
    """Computes the ticks of download, local work and message that have passed at a moment, [c] each."""
    passed = []
    remaining = jnp.maximum(at, 0)
    for ticks in spent[:3]:
        passed.append(jnp.minimum(ticks, remaining))
        remaining = remaining - passed[-1]
    return tuple(passed)


def joules_of(done: tuple, ticks: tuple, joules: tuple) -> Array:
    """Computes the energy spent so far, in proportion to the time of each phase: [c] float32.

    Args:
      done: the ticks of download, local work and message that have passed, [c] each.
      ticks: the ticks of each phase as a whole.
      joules: the energy of each phase as a whole.
    """
    # A phase that takes no time is spent as a whole.
    shares = [jnp.where(whole > 0, x / jnp.maximum(whole, 1), 1) for x, whole in zip(done, ticks, strict=True)]
    return jnp.asarray(sum(energy * share for energy, share in zip(joules, shares, strict=True)))


def lasting(devices: Devices, key: Array, cohort: Cohort, price: Price, joules: Array) -> Array:
    """Computes when clients have spent a given energy.

    Args:
      devices: what the clients run on.
      key: the key that the cohort was drawn with.
      cohort: the cohort.
      price: the cost of a round.
      joules: [m] the energy of each client.

    Returns: [m] int32 ticks after the invitation; `NEVER` for clients whose round needs no more than their energy.

    Raises: ValueError if a slot's energy is not that of its client alone (`Price.more`).

    Guarantees: with a battery, exactly the clients with enough energy report, and the others end within a tick of
    NumPy's result (tests/sampling/time/test_battery.py::test_who_runs_out).
    """
    if price.more is not None:
        hint = "Leave with_battery out: what a slot spends is also the energy of partners, or of devices inside."
        validate.fail("sampler", "one without batteries, for clients who spend others' energy", "with_battery", hint)
    end_ticks = jnp.zeros_like(cohort.ids)
    is_going = jnp.ones_like(cohort.invited)
    remaining = joules
    for ticks, energy in zip(*_planned(devices, key, cohort, price), strict=True):
        is_enough = energy <= remaining
        share = jnp.where(is_enough, 1.0, remaining / jnp.where(is_enough, 1.0, energy))
        partial_ticks = jnp.minimum((share * ticks.astype(jnp.float32)).astype(jnp.int32), ticks)
        phase_ticks = jnp.where(is_enough, ticks, partial_ticks)
        end_ticks = end_ticks + jnp.where(is_going, phase_ticks, 0)
        is_going = is_going & is_enough
        remaining = jnp.maximum(remaining - energy, 0)
    return jnp.where(is_going, NEVER, end_ticks)


def _planned(devices: Devices, key: Array, cohort: Cohort, price: Price) -> tuple[tuple, tuple]:
    """Returns (ticks, joules) of download, local work and message, [m] each, if nothing stops the clients."""
    ticks, joules = priced_by_part(devices, key, cohort.ids, price.loads(cohort))
    if price.more is None:
        return ticks, joules
    return _with_more(ticks, price.more), tuple(x + y for x, y in zip(joules, price.more.joules, strict=True))


def priced_by_part(devices: Devices, key: Array, ids: Array, loads: tuple[Load, ...]) -> tuple[tuple, tuple]:
    """Computes the ticks and the joules of download, local work and message.

    The energy of a round without bytes and work, such as that of latency, is split between download and message.

    Args:
      devices: what the clients run on.
      key: the key that the cohort was drawn with.
      ids: [c] int32.
      loads: numbers [c], a load for each pass.

    Returns: (ticks, joules), each a triple of [c].
    """
    # Devices state only the energy of a whole round. So four rounds are priced: with everything, with nothing, with the
    # download alone and with the local work alone. Rows are the fields of `Load`: flops, bytes down, bytes up.
    factors = ((1, 0, 0, 1), (1, 0, 1, 0), (1, 0, 0, 0))

    def four_rounds(load):
        return Load(*(jnp.concatenate([x * factor for factor in row]) for x, row in zip(load, factors, strict=True)))

    spent = _spent(devices, key, jnp.tile(ids, 4), tuple(map(four_rounds, loads)))
    spent = jax.tree.map(lambda x: x.reshape(4, -1), spent)
    everything, nothing, only_down, only_compute = spent.joules
    down = only_down - nothing / 2
    compute = only_compute - nothing
    return tuple(x[0] for x in spent[:3]), (down, compute, everything - down - compute)


def window(cohort: Cohort) -> Array:
    """Returns the ticks until the last client of a cohort is done, [] int32."""
    return jnp.minimum(spent_by_slots(cohort).total.max(initial=0), LONGEST)


def stated(cohort: Cohort, before: Clock, after: Clock, per_second: int) -> Cohort:
    """Adds `round_seconds`, `simulated_seconds` and `client_seconds` to the metrics of a cohort.

    `client_seconds` is the time until the last client is done, times the number of invited clients.

    Args:
      cohort: the cohort.
      before: the clock before the round.
      after: the clock after the round.
      per_second: ticks per second.
    """

    def in_seconds(whole_seconds, ticks):
        return whole_seconds.astype(jnp.float32) + ticks.astype(jnp.float32) / per_second

    # The mask is for clocks past 68 years, whose sign bit is set.
    whole_seconds = (after.seconds - before.seconds) & jnp.int32(2**31 - 1)
    round_seconds = in_seconds(whole_seconds, after.ticks - before.ticks)
    client_seconds = window(cohort).astype(jnp.float32) * cohort.invited.sum(dtype=jnp.float32) / per_second
    times = {
        "round_seconds": round_seconds,
        "simulated_seconds": after.read(per_second),
        "client_seconds": client_seconds,
    }
    return cohort._replace(metrics=cohort.metrics | times)


def _is_timed(x: PyTree) -> bool:
    return isinstance(x, Timed)


def _with_timed(state: PyTree, **changes: PyTree) -> PyTree:
    """The state of a sampler with a clock, with changed fields of its `Timed`."""
    return jax.tree.map(lambda x: x._replace(**changes) if _is_timed(x) else x, state, is_leaf=_is_timed)


def _timed_state(state: PyTree) -> Timed:
    """The `Timed` inside of the state of a sampler with a clock."""
    timed_state = next((x for x in jax.tree.leaves(state, is_leaf=_is_timed) if _is_timed(x)), None)
    if timed_state is None:
        hint = "Leave out the devices of a sampler of your own, and put with_clock(sampler, devices) around it."
        validate.fail("sampler", "one whose state has a clock, for it has devices", "one without", hint)
    return timed_state
