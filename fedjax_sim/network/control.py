"""Devices that train in the idle time of a control loop: integer microseconds, for a ceiling of floats is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.network.devices import MOST_TICKS, Profile, of_profiles
from fedjax_sim.types import Array, Availability, Devices, Load, Spent
from fedjax_sim.validate import NonNegative, PopulationSize, Positive

__all__ = ["ControlCycle", "control_cycle", "most_feasible_work", "smallest_deadline"]


class ControlCycle(NamedTuple):
    """One period of a control loop, in integer microseconds; made by `ControlCycle.checked`.

    In each period T_c the device samples, actuates and serves its operating system; what is left even when the jitter
    is largest is for training: b_min = T_c - (sense + act + system + jitter).

    Guarantees: known examples (tests/network/test_control.py::test_anchor), and no window where nothing is left
    (::test_devices_without_a_window).

    >>> cycle = ControlCycle.checked(50, sense=20, act=10, system=5, jitter=3)
    >>> cycle.window, cycle.cycles(250), cycle.compute_time(250)
    (12, 21, 1050)
    """

    period: int  # T_c
    sense: int
    act: int
    system: int
    jitter: int  # the largest

    @classmethod
    def checked(cls, period: int, *, sense: int = 0, act: int = 0, system: int = 0, jitter: int = 0) -> ControlCycle:
        """A cycle from a user's numbers.

        Raises: ValueError, TypeError for what is not an integer number of microseconds in [0, 2^30], or period 0.
        """
        validate.integer("period", period, 1, MOST_TICKS)
        for name, time in (("sense", sense), ("act", act), ("system", system), ("jitter", jitter)):
            validate.integer(name, time, 0, MOST_TICKS, hint="Whole microseconds.")
        return cls(period, sense, act, system, jitter)

    @property
    def window(self) -> int:
        """b_min, at least 0: microseconds of training in a period. Without any the device cannot take part."""
        return max(0, self.period - (self.sense + self.act + self.system + self.jitter))

    def cycles(self, work: int) -> int | None:
        """Periods that `work` microseconds of training take: ceil(W / b_min); None for a device without a window.

        Guarantees: exact (tests/network/test_control.py::test_ceilings_are_exact).
        """
        validate.integer("work", work, 0, 1 << 60, hint="Whole microseconds.")
        return -(-work // self.window) if self.window else None

    def compute_time(self, work: int) -> int | None:
        """Microseconds from the start of the training to its end: ceil(W / b_min) T_c; None without a window."""
        cycles = self.cycles(work)
        return None if cycles is None else cycles * self.period

    def feasible(self, work: int, deadline: int, latency: int = 0) -> bool:
        """Whether the training and a message of `latency` microseconds end by the deadline."""
        time = self.compute_time(work)
        return time is not None and time + latency <= deadline

    def most_work(self, deadline: int, latency: int = 0) -> int:
        """The most microseconds of training that are feasible; 0 where none is.

        Guarantees: feasible, and one microsecond more is not (tests/network/test_control.py::test_limits_are_sharp).
        """
        return max(0, (deadline - latency) // self.period) * self.window


def smallest_deadline(cycles: Sequence[ControlCycle], work: Sequence[int], latency: int = 0) -> int | None:
    """The least deadline that all these devices meet, with their work, in microseconds.

    Args:
      cycles: one a device; those without a window are left out, for they take no part.
      work: microseconds of training, one a device.
      latency: the largest of a message.

    Returns: None if no device can take part.

    Guarantees: feasible for all, and one microsecond less is not
    (tests/network/test_control.py::test_limits_are_sharp).

    >>> smallest_deadline([ControlCycle.checked(50, act=38), ControlCycle.checked(50, act=50)], [250, 1], latency=80)
    1130
    """
    times = [time for cycle, own in zip(cycles, work, strict=True) if (time := cycle.compute_time(own)) is not None]
    return max(times) + latency if times else None


def most_feasible_work(cycles: Sequence[ControlCycle], deadline: int, latency: int = 0) -> int:
    """The most microseconds of training that each device which can take part completes by the deadline.

    Guarantees: tests/network/test_control.py::test_limits_are_sharp.

    >>> most_feasible_work([ControlCycle.checked(50, act=38), ControlCycle.checked(50, act=50)], 1129, latency=80)
    240
    """
    return min((cycle.most_work(deadline, latency) for cycle in cycles if cycle.window), default=0)


@validate.named_arguments
def control_cycle(
    population_size: PopulationSize,
    *,
    period: Sequence[int],
    flops_per_microsecond: Sequence[int],
    sense: Sequence[int] = (0,),
    act: Sequence[int] = (0,),
    system: Sequence[int] = (0,),
    jitter: Sequence[int] = (0,),
    latency: int = 0,
    bandwidth_down: Positive = 1e6,
    bandwidth_up: Positive = 1e6,
    joules_per_flop: NonNegative = 0.0,
    joules_per_byte: NonNegative = 0.0,
) -> Devices:
    """Cyber-physical devices, which train in the slack of their control loop; time in microseconds.

    A device with W microseconds of training takes ceil(W / b_min) T_c (`ControlCycle`). One without a window is never
    available.

    Args: each list has one number a kind of device, or one for all; client i is of kind i % kinds.
      population_size: N.
      period: T_c, whole microseconds, as are all times here.
      flops_per_microsecond: of training inside of the window; W = ceil(flops / speed), exactly, of both as float32
        holds them: to the last one up to 2^24.
      sense, act, system, jitter: of sampling, actuation, the operating system, and the largest jitter.
      latency: of each message, either way.
      bandwidth_down, bandwidth_up: bytes/s, beside the control loop.
      joules_per_flop, joules_per_byte: energy.

    Returns: `Devices` of 10^6 ticks per second; a phase of more than 715 s counts as that.

    Raises: ValueError, TypeError for values out of range, and if no kind has a window.

    Guarantees: the times of `ControlCycle`, exactly, by client (tests/network/test_control.py::test_devices_are_exact);
    devices without a window are never there (::test_devices_without_a_window).

    >>> made = control_cycle(4, period=[50], act=[38], flops_per_microsecond=[4], latency=40)
    >>> made.spend(None, jnp.arange(1), Load(jnp.float32(1000), jnp.float32(0), jnp.float32(0))).total.tolist()
    [1130]
    """
    lists: dict = {"period": period, "sense": sense, "act": act, "system": system, "jitter": jitter}
    lists |= {"flops_per_microsecond": flops_per_microsecond}
    for name, values in lists.items():
        validate.sequence(name, values)
    kinds = max(map(len, lists.values()))
    for name, values in lists.items():
        if len(values) not in (1, kinds):
            validate.fail(name, f"one number, or {kinds}, one a kind of device", list(values))
        for i, value in enumerate(values):
            validate.integer(f"{name}[{i}]", value, int(name in ("period", "flops_per_microsecond")), MOST_TICKS)
        lists[name] = [values[i % len(values)] for i in range(kinds)]
    validate.integer("latency", latency, 0, MOST_TICKS)
    speeds = np.asarray(lists.pop("flops_per_microsecond"), np.float32)
    cycles = [ControlCycle(*(lists[name][i] for name in ControlCycle._fields)) for i in range(kinds)]
    windows = np.array([cycle.window for cycle in cycles], np.int32)
    periods = np.asarray(lists["period"], np.int32)
    if not windows.any():
        validate.fail("period", "a window for training in one kind of device at least", list(period))
    alike = Profile(1.0, bandwidth_down, bandwidth_up, 0.0, joules_per_flop, joules_per_byte, 0.0, 0.0)

    def profile(ids: Array) -> Profile:
        return Profile(*(jnp.full(ids.shape, value, jnp.float32) for value in alike))

    links = of_profiles(population_size, profile, ticks_per_second=1_000_000)

    def spend(key: Array, ids: Array, load: Load) -> Spent:
        kind, spent = ids % kinds, links.spend(key, ids, load)
        window, own = jnp.asarray(windows)[kind], jnp.asarray(periods)[kind]
        work = _quotient(load.flops, jnp.asarray(speeds)[kind])
        turns = -(-work // jnp.maximum(window, 1))
        ends = (window > 0) & (turns <= MOST_TICKS // own)
        compute = jnp.where(ends, jnp.where(ends, turns, 0) * own, MOST_TICKS)
        down, up = (jnp.minimum(time + latency, MOST_TICKS) for time in (spent.down, spent.up))
        return spent._replace(down=down, compute=compute, up=up)

    def at(ids: Array, seconds: Array) -> Array:
        return jnp.asarray(windows)[ids % kinds] > 0

    there = Availability(at, lambda ids: (windows[np.asarray(ids) % kinds] > 0).astype(np.float64))
    return links._replace(spend=spend, availability=None if windows.all() else there)


def _quotient(x: Array, y: Array) -> Array:
    """ceil(x / y) as int32, at most `MOST_TICKS`, of floats x >= 0 and y > 0: exact, however XLA divides.

    A remainder of floats is exact, and what is left is so many times y: counted in thousands first, for a quotient of
    2^22 and more is not known to a quarter.
    """
    small = x / (1024 * y) < 2.0**20
    thousands, rest = _times(jnp.where(small, x, 0), 1024 * y)
    ones, rest = _times(rest, y)
    return jnp.where(small, jnp.minimum(1024 * thousands + ones + (rest > 0).astype(jnp.int32), MOST_TICKS), MOST_TICKS)


def _times(x: Array, y: Array) -> tuple[Array, Array]:
    """(how often y fits into x, less than 2^22 times, int32; what is left)."""
    rest = jax.lax.rem(x, y)
    return jnp.round(x / y - rest / y).astype(jnp.int32), rest
