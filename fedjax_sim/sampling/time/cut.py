"""What simulated time does to a cohort: what its clients spend, who stops when, and the clock that follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.network.devices import MOST_TICKS, spent_by
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.sampling.time.lost_reports import NEVER, losing
from fedjax_sim.sampling.time.round_cost import More, Price
from fedjax_sim.sampling.visits import DISTINCT
from fedjax_sim.types import Array, Clock, Cohort, Devices, Load, Metric, PyTree, Sampler, Spent

__all__ = [
    "LONGEST",
    "Timed",
    "changed",
    "cut_cohort",
    "first_pass",
    "joules_of",
    "lasting",
    "price_in",
    "priced_by_part",
    "repriced",
    "spend",
    "stated",
    "ticks_done",
    "timed",
    "unlimited",
    "untimed",
    "window",
]

LONGEST = 2**31 - 2**21  # ticks until the last client is done


class Timed(NamedTuple):
    """The state of a sampler with a clock; wrappers find it in theirs by its type."""

    sampler: PyTree
    clock: Clock
    price: Price


def timed(sampler: Sampler, name: str) -> Devices:
    """The devices of a sampler with a clock.

    Raises: TypeError for what is no sampler, ValueError for one without a clock, which `name` needs.
    """
    _final(sampler, name)
    if sampler.devices is None:
        hint = "Put with_clock(sampler, devices) inside; in a config, write [sampler.with_clock] before it."
        validate.fail("sampler", f"one with a clock, for {name}", "one whose rounds take no time", hint)
    return sampler.devices


def _final(sampler: Sampler, name: str) -> None:
    """Refuses what `name` would change after it was counted."""
    validate.part("sampler", sampler, Sampler)
    if DISTINCT in sampler.metrics:
        hint = f"Put with_distinct_clients around {name}."
        validate.fail("sampler", f"one that does not count clients yet, for {name}", "with_distinct_clients", hint)


def untimed(sampler: Sampler, name: str) -> None:
    """Refuses a sampler with a clock, whose times would not follow from what `name` changes.

    Raises: TypeError for what is no sampler, ValueError for one with a clock.
    """
    _final(sampler, name)
    if sampler.devices is not None:
        hint = f"Put {name} inside of with_clock; in a config, before it."
        validate.fail("sampler", f"one without a clock, for {name}", "one with a clock", hint)


def unlimited(sampler: Sampler, name: str, hint: str) -> None:
    """Refuses a sampler in which the first few reports count, since `name` changes who is among them.

    Raises: ValueError.
    """
    most = getattr(sampler.design, "max_reports", None)
    if most is not None:
        validate.fail("sampler", f"one without a limit of reports, for {name}", most, hint)


def changed(
    sampler: Sampler, change: Callable, design: SamplingDesign | None = None, metrics: tuple[Metric, ...] = ()
) -> Sampler:
    """`sampler.then` for changes that a clock sees: where a cohort is done sooner, the clock is put back by as much.

    Args:
      sampler: with a clock.
      change: (key, Cohort, `Price`) -> Cohort; the key is the one that the cohort was drawn with.
      design, metrics: as in `Sampler.then`.

    Guarantees: tests/sampling/time/test_clock.py::test_the_clock_is_exact.
    """
    per_second = sampler.devices.ticks_per_second

    def sample(key, state):
        before = _found(state).clock
        cohort, after = sampler.sample(key, state)
        clocked = _found(after)
        shorter = change(key, cohort, clocked.price)
        clock = clocked.clock.moved(window(shorter) - window(cohort), per_second).since(before)
        return stated(shorter, before, clock, per_second), _timed(after, clock=clock)

    design = sampler.design if design is None else design
    return sampler._replace(sample=sample, design=design, metrics=(*sampler.metrics, *metrics))


def spend(devices: Devices, key: Array, cohort: Cohort, price: Price) -> Spent:
    """What the clients of a cohort spend if nobody stops them; zeros where nobody is invited.

    Args:
      key: that the cohort was drawn with.

    Raises: ValueError for federations whose rounds inside were not priced for this cohort.
    """
    if price.inside is not None and price.more is None:
        hint = "Call fedjax_sim.round.invite, not the sampler: the round's key decides who takes part inside."
        validate.fail("price.more", "what the rounds inside of this cohort take", None, hint)
    spent = _spent(devices, key, cohort.ids, price.loads(cohort))
    if price.more is not None:
        spent = Spent(*_together(spent[:3], price.more), spent.joules + sum(price.more.joules))
    return jax.tree.map(lambda x: jnp.where(cohort.invited, x, 0), spent)


def first_pass(devices: Devices, key: Array, cohort: Cohort, price: Price) -> Spent:
    """What clients spend until the first of their two messages has arrived, if nobody stops them."""
    return _spent(devices, key, cohort.ids, price.loads(cohort)[:1])


def _spent(devices: Devices, key: Array, ids: Array, loads: tuple[Load, ...]) -> Spent:
    """What all passes of a round take, each with messages of its own; a phase is that of all of them together."""
    first, *rest = (spent_by(devices, key, ids, load) for load in loads)
    for one in rest:
        first = Spent(*_added(first[:3], one[:3]), first.joules + one.joules)
    return first


def _added(ticks: tuple, others: tuple) -> tuple:
    return tuple(jnp.minimum(x + y, MOST_TICKS) for x, y in zip(ticks, others, strict=True))


def _together(ticks: tuple, more: More) -> tuple:
    """The ticks of the three phases with those that come on top; the last phase ends when no other is waited for."""
    down, compute, up = _added(ticks, more.ticks)
    return down, compute, jnp.clip(more.least - down - compute, up, MOST_TICKS)


def price_in(state: PyTree) -> Price:
    """What a round costs, in the state of a sampler with a clock, whatever wraps it."""
    return _found(state).price


def repriced(state: PyTree, price: Price) -> PyTree:
    """The state of a sampler with a clock, whatever wraps it, at another price."""
    return _timed(state, price=price)


def cut_cohort(devices: Devices, key: Array, cohort: Cohort, price: Price, at: Array, name: str) -> Cohort:
    """The cohort whose clients stop at a moment: who is not done by then does not report, and is lost to `name`.

    That goes for who was to be lost at a later moment, too. A message that is on its way then counts as sent, in full;
    so does the first of two (`Timing.begun`). Of each of the three parts of a round, energy is spent in proportion to
    its time.

    Args:
      key: that the cohort was drawn with.
      at: [] or [m] int32, ticks after the invitation.
      name: of the metric that counts them.

    Guarantees: tests/sampling/time/test_clock.py::test_energy_of_what_was_done; both messages of two passes are begun
    when they are (tests/sampling/time/test_deadlines.py::test_the_first_of_two_messages_was_sent); in whatever order
    cuts are made, the first moment counts
    (tests/sampling/time/test_lost_reports.py::test_every_client_is_counted_once).
    """
    spent = cohort.timing.spent
    late = cohort.invited & (spent.total > at)
    done = ticks_done(spent, at)
    part = joules_of(done, *_planned(devices, key, cohort, price))
    sent = cohort.reported if cohort.timing.sent is None else cohort.timing.sent
    begun, up = cohort.timing.begun, 0
    if price.before is not None:
        before = first_pass(devices, key, cohort, price)
        begun, up = sent if begun is None else begun, before.up
        begun &= ~late | (at > before.down + before.compute)
    sent &= ~late | (done[2] > up)
    done_by = Spent(*done, jnp.where(late, part, spent.joules))
    return losing(cohort.timed(sent=sent, begun=begun, spent=done_by), name, late, at)


def ticks_done(spent: Spent, at: Array) -> tuple[Array, Array, Array]:
    """The ticks of download, local work and message that are over at a moment, [c] each."""
    done, left = [], jnp.maximum(at, 0)
    for ticks in spent[:3]:
        done.append(jnp.minimum(ticks, left))
        left = left - done[-1]
    return tuple(done)


def joules_of(done: tuple, ticks: tuple, joules: tuple) -> Array:
    """[c] the energy of what was done, in proportion to the time of each part.

    Args:
      ticks, joules: of each part as a whole.
    """
    shares = [jnp.where(whole > 0, x / jnp.maximum(whole, 1), 1) for x, whole in zip(done, ticks, strict=True)]
    return sum(energy * share for energy, share in zip(joules, shares, strict=True))


def lasting(devices: Devices, key: Array, cohort: Cohort, price: Price, joules: Array) -> Array:
    """[m] int32 ticks after the invitation when clients have spent so many joules, [m]; `NEVER` for who needs no more.

    Args:
      key: that the cohort was drawn with.

    Raises: ValueError where a slot's energy is not that of its client alone (`Price.more`).

    Guarantees: tests/sampling/time/test_battery.py::test_who_runs_out.
    """
    if price.more is not None:
        hint = "Leave with_battery out: what a slot spends is also the energy of partners, or of devices inside."
        validate.fail("sampler", "one without batteries, for clients who spend others' energy", "with_battery", hint)
    at, going = jnp.zeros_like(cohort.ids), jnp.ones_like(cohort.invited)
    for ticks, energy in zip(*_planned(devices, key, cohort, price), strict=True):
        enough = energy <= joules
        share = jnp.where(enough, 1.0, joules / jnp.where(enough, 1.0, energy))
        done = jnp.where(enough, ticks, jnp.minimum((share * ticks.astype(jnp.float32)).astype(jnp.int32), ticks))
        at, going, joules = at + jnp.where(going, done, 0), going & enough, jnp.maximum(joules - energy, 0)
    return jnp.where(going, NEVER, at)


def _planned(devices: Devices, key: Array, cohort: Cohort, price: Price) -> tuple[tuple, tuple]:
    """The ticks and the joules of download, local work and message, [m] each, if nobody stops them."""
    ticks, joules = priced_by_part(devices, key, cohort.ids, price.loads(cohort))
    if price.more is None:
        return ticks, joules
    return _together(ticks, price.more), tuple(x + y for x, y in zip(joules, price.more.joules, strict=True))


def priced_by_part(devices: Devices, key: Array, ids: Array, loads: tuple[Load, ...]) -> tuple[tuple, tuple]:
    """The ticks and the joules of download, local work and message, [c] each; what a round costs without either, such
    as latency, belongs to download and message alike.

    Args:
      ids: [c] int32. loads: of [c], one for each pass.
    """
    parts = ((1, 0, 0, 1), (1, 0, 1, 0), (1, 0, 0, 0))  # everything, nothing, the download, the local work

    def of_each(load):
        return Load(*(jnp.concatenate([x * one for one in ones]) for x, ones in zip(load, parts, strict=True)))

    spent = _spent(devices, key, jnp.tile(ids, 4), tuple(map(of_each, loads)))
    spent = jax.tree.map(lambda x: x.reshape(4, -1), spent)
    everything, nothing, down, compute = spent.joules
    down, compute = down - nothing / 2, compute - nothing
    return tuple(x[0] for x in spent[:3]), (down, compute, everything - down - compute)


def window(cohort: Cohort) -> Array:
    """[] int32 ticks until the last client is done."""
    return jnp.minimum(cohort.timing.spent.total.max(initial=0), LONGEST)


def stated(cohort: Cohort, before: Clock, after: Clock, per_second: int) -> Cohort:
    """The cohort with the times of its round in its metrics."""

    def seconds(whole, ticks):
        return whole.astype(jnp.float32) + ticks.astype(jnp.float32) / per_second

    length = seconds((after.seconds - before.seconds) & jnp.int32(2**31 - 1), after.ticks - before.ticks)
    had = window(cohort).astype(jnp.float32) * cohort.invited.sum(dtype=jnp.float32) / per_second
    times = {"round_seconds": length, "simulated_seconds": after.read(per_second), "client_seconds": had}
    return cohort._replace(metrics=cohort.metrics | times)


def _is_timed(x: PyTree) -> bool:
    return isinstance(x, Timed)


def _timed(state: PyTree, **changes: PyTree) -> PyTree:
    """The state of a sampler with a clock, with other fields of its `Timed`."""
    return jax.tree.map(lambda x: x._replace(**changes) if _is_timed(x) else x, state, is_leaf=_is_timed)


def _found(state: PyTree) -> Timed:
    return next(x for x in jax.tree.leaves(state, is_leaf=_is_timed) if _is_timed(x))
