"""This module simulates devices that train in the idle time of a control loop, in whole microseconds.

Times are integers, because the ceiling of a quotient of floats may be off by one.
"""

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


class ControlCycle(NamedTuple):
    """A `ControlCycle` is one period of a control loop, in integer microseconds; `ControlCycle.checked` makes it.

    In each period T_c the device samples, actuates and serves its operating system. The time that is left even with the
    largest jitter is for training: b_min = T_c - (sense + act + system + jitter).

    Guarantees: Windows, cycles and times of an example follow by hand (tests/network/test_control.py::test_anchor), and
    there is no window if no time is left (::test_devices_without_a_window).

    >>> cycle = ControlCycle.checked(50, sense=20, act=10, system=5, jitter=3)
    >>> cycle.window, cycle.cycles(250), cycle.compute_time(250)
    (12, 21, 1050)
    """

    period: int  # T_c
    sense: int
    act: int
    system: int
    jitter: int  # the largest jitter

    @classmethod
    def checked(cls, period: int, *, sense: int = 0, act: int = 0, system: int = 0, jitter: int = 0) -> ControlCycle:
        """Makes a cycle from a user's numbers, in microseconds.

        Raises: ValueError, TypeError for a time that is no integer in [0, 2^30], and for period 0.
        """
        validate.integer("period", period, 1, MOST_TICKS)
        for name, time in (("sense", sense), ("act", act), ("system", system), ("jitter", jitter)):
            validate.integer(name, time, 0, MOST_TICKS, hint="Whole microseconds.")
        return cls(period, sense, act, system, jitter)

    @property
    def window(self) -> int:
        """b_min >= 0, the microseconds of training in a period. A device without a window cannot take part."""
        return max(0, self.period - (self.sense + self.act + self.system + self.jitter))

    def cycles(self, work: int) -> int | None:
        """Computes the number of periods that `work` microseconds of training take, ceil(W / b_min).

        None stands for a device without a window.

        Guarantees: The number is exact (tests/network/test_control.py::test_ceilings_are_exact).
        """
        validate.integer("work", work, 0, 1 << 60, hint="Whole microseconds.")
        return -(-work // self.window) if self.window else None

    def compute_time(self, work: int) -> int | None:
        """Computes the microseconds from the start of the training to its end, ceil(W / b_min) T_c.

        None stands for a device without a window.
        """
        cycles = self.cycles(work)
        return None if cycles is None else cycles * self.period

    def feasible(self, work: int, deadline: int, latency: int = 0) -> bool:
        """Tells whether the training and a message of `latency` microseconds end by the deadline, in microseconds."""
        time = self.compute_time(work)
        return time is not None and time + latency <= deadline

    def most_work(self, deadline: int, latency: int = 0) -> int:
        """Computes the most microseconds of training that are feasible by the deadline; 0 if none are.

        Guarantees: The work is feasible, and one microsecond more is not
        (tests/network/test_control.py::test_limits_are_sharp).
        """
        return max(0, (deadline - latency) // self.period) * self.window


def smallest_deadline(cycles: Sequence[ControlCycle], work: Sequence[int], latency: int = 0) -> int | None:
    """Finds the least deadline in microseconds that all these devices meet, with their work.

    Args:
      cycles: one for each device. Devices without a window are left out, because they take no part.
      work: microseconds of training, one number for each device.
      latency: the largest latency of a message, in microseconds.

    Returns: None if no device can take part.

    Guarantees: The deadline is feasible for all, and one microsecond less is not
    (tests/network/test_control.py::test_limits_are_sharp).

    >>> smallest_deadline([ControlCycle.checked(50, act=38), ControlCycle.checked(50, act=50)], [250, 1], latency=80)
    1130
    """
    times = [
        time
        for cycle, device_work in zip(cycles, work, strict=True)
        if (time := cycle.compute_time(device_work)) is not None
    ]
    return max(times) + latency if times else None


def most_feasible_work(cycles: Sequence[ControlCycle], deadline: int, latency: int = 0) -> int:
    """Finds the most microseconds of training that each device with a window completes by the deadline.

    Args:
      cycles, latency: as in `smallest_deadline`.
      deadline: in microseconds.

    Guarantees: The work is feasible, and one microsecond more is not
    (tests/network/test_control.py::test_limits_are_sharp).

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
    """Makes devices that train in the idle time of their control loop. Times are in microseconds.

    A device with W microseconds of training takes ceil(W / b_min) T_c (`ControlCycle`). A device without a window is
    never available.

    Each list has one number for each kind of device, or one number for all. Client i is of kind i % number of kinds.

    Args:
      population_size: N.
      period: T_c, in whole microseconds, as all times here.
      flops_per_microsecond: speed of training inside of the window. W = ceil(flops / speed), exactly, of both numbers
        as float32 holds them, which is to the last operation up to 2^24.
      sense, act, system, jitter: times of sampling, of actuation, of the operating system, and the largest jitter.
      latency: of each message, in either direction.
      bandwidth_down, bandwidth_up: bytes/s, beside the control loop.
      joules_per_flop, joules_per_byte: energy.

    Returns: `Devices` with 10^6 ticks per second. A phase of more than 715 s counts as 715 s.

    Raises: ValueError, TypeError for values out of range, and if no kind has a window.

    Guarantees: Times are those of `ControlCycle`, exactly, by client
    (tests/network/test_control.py::test_devices_are_exact). Devices without a window are never available
    (::test_devices_without_a_window).

    >>> devices = control_cycle(4, period=[50], act=[38], flops_per_microsecond=[4], latency=40)
    >>> load = Load(jnp.float32(1000), jnp.float32(0), jnp.float32(0))
    >>> jax.jit(devices.spend)(None, jnp.arange(1), load).total.tolist()
    [1130]
    """
    lists: dict = {"period": period, "sense": sense, "act": act, "system": system, "jitter": jitter}
    lists |= {"flops_per_microsecond": flops_per_microsecond}
    for name, values in lists.items():
        validate.sequence(name, values)
    num_kinds = max(map(len, lists.values()))
    for name, values in lists.items():
        if len(values) not in (1, num_kinds):
            validate.fail(name, f"one number, or {num_kinds}, one a kind of device", list(values))
        for kind_index, value in enumerate(values):
            validate.integer(
                f"{name}[{kind_index}]", value, int(name in ("period", "flops_per_microsecond")), MOST_TICKS
            )
        lists[name] = [values[kind_index % len(values)] for kind_index in range(num_kinds)]
    validate.integer("latency", latency, 0, MOST_TICKS)
    speeds = np.asarray(lists.pop("flops_per_microsecond"), np.float32)
    cycles = [
        ControlCycle(*(lists[name][kind_index] for name in ControlCycle._fields)) for kind_index in range(num_kinds)
    ]
    # One entry for each kind; a client looks up the entry of its kind.
    windows = np.array([cycle.window for cycle in cycles], np.int32)
    periods = np.asarray(lists["period"], np.int32)
    if not windows.any():
        validate.fail("period", "a window for training in one kind of device at least", list(period))
    common_profile = {
        "speed": 1.0,
        "bandwidth_down": bandwidth_down,
        "bandwidth_up": bandwidth_up,
        "latency": 0.0,
        "joules_per_flop": joules_per_flop,
        "joules_per_byte": joules_per_byte,
        "compute_watts": 0.0,
        "radio_watts": 0.0,
    }

    def profile(ids: Array) -> Profile:
        return Profile(**{name: jnp.full(ids.shape, value, jnp.float32) for name, value in common_profile.items()})

    links = of_profiles(population_size, profile, ticks_per_second=1_000_000)

    def spend(key: Array, ids: Array, load: Load) -> Spent:
        kind = ids % num_kinds
        spent = links.spend(key, ids, load)
        window = jnp.asarray(windows)[kind]
        period_ticks = jnp.asarray(periods)[kind]
        work = _quotient(load.flops, jnp.asarray(speeds)[kind])
        num_periods = -(-work // jnp.maximum(window, 1))
        # The product of periods and their length is formed only where it stays within int32.
        is_countable = (window > 0) & (num_periods <= MOST_TICKS // period_ticks)
        compute = jnp.where(is_countable, jnp.where(is_countable, num_periods, 0) * period_ticks, MOST_TICKS)
        down, up = (jnp.minimum(time + latency, MOST_TICKS) for time in (spent.down, spent.up))
        return spent._replace(down=down, compute=compute, up=up)

    def at(ids: Array, seconds: Array) -> Array:
        return jnp.asarray(windows)[ids % num_kinds] > 0

    availability = Availability(at, lambda ids: (windows[np.asarray(ids) % num_kinds] > 0).astype(np.float64))
    return links._replace(spend=spend, availability=None if windows.all() else availability)


def _quotient(x: Array, y: Array) -> Array:
    """Computes ceil(x / y) as int32, at most `MOST_TICKS`, of floats x >= 0 and y > 0, exactly.

    The result does not depend on how XLA divides.

    The remainder of two floats is exact, and x minus the remainder is a multiple of y. A quotient of 2^22 or more is
    not known to a quarter, so the multiples of 1024 y are counted first.
    """
    is_countable = x / (1024 * y) < 2.0**20
    thousands, remainder = _divided(jnp.where(is_countable, x, 0), 1024 * y)
    ones, remainder = _divided(remainder, y)
    return jnp.where(
        is_countable, jnp.minimum(1024 * thousands + ones + (remainder > 0).astype(jnp.int32), MOST_TICKS), MOST_TICKS
    )


def _divided(x: Array, y: Array) -> tuple[Array, Array]:
    """Divides with remainder: (the number of times that y fits into x, below 2^22, as int32; the remainder)."""
    remainder = jax.lax.rem(x, y)
    # x / y - remainder / y is a whole number up to rounding, whatever the error of each division.
    return jnp.round(x / y - remainder / y).astype(jnp.int32), remainder
