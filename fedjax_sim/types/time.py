"""Simulated time: what a round asks of clients, what they spend on it, and the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

__all__ = ["Clock", "Load", "Spent", "TimeInside", "Timing", "Work"]


class Work(NamedTuple):
    """What a round asks of one client; known on the host before the first round."""

    bytes_up: int  # of its message
    bytes_down: int  # of the broadcast
    steps: int | Callable | None  # local steps, or (examples) -> local steps; None = the client does not state them
    flops: float  # floating-point operations of its local work on all rows, a loop of unknown length counted once
    step_flops: float = 0.0  # of each further turn of that loop: a local step
    rows: int | None = None  # those rows, where a client's flops grow with its examples; None = they are minibatches
    examples: Callable | None = None  # () -> [N] number of examples of each client; None = not known
    before: Work | None = None  # of a pass before this one, whose flops are not in these; its bytes are
    inside: Callable | None = None  # (flops_scale, bytes_scale) -> leaves [N, ...], `TimeInside.asked` of each client;
    # None = clients are no federations
    by_invited: Any = None  # NumPy [m + 1, 2] bytes up and down if 0, 1, ... m clients are invited; None = alike


class TimeInside(NamedTuple):
    """How long a client's own rounds take, where it is a federation."""

    asked: (
        Callable  # (params_spec, Population of its clients, flops_scale, bytes_scale) -> what its rounds ask of these
    )
    spent: Callable  # (key of its work, what was asked) -> ([] int32 ticks, [] float32 joules) of all of its rounds
    ticks_per_second: int


class Load(NamedTuple):
    """What a round asks of clients, as their devices price it; each number [] or [c] float32."""

    flops: Array  # of the local work that they do
    bytes_down: Array  # of the broadcast
    bytes_up: Array  # of a message


class Spent(NamedTuple):
    """What clients spend on one round, each [c] and at least 0; times in whole ticks of `Devices.ticks_per_second`,
    rounded up. Functions of one's own are held to shapes and dtypes, not to this."""

    down: Array  # int32, until the broadcast is there
    compute: Array  # int32, local work
    up: Array  # int32, until the message is at the server
    joules: Array  # float32, of all three

    @property
    def total(self) -> Array:
        """[c] int32 ticks from the invitation to the arrival."""
        return self.down + self.compute + self.up


class Timing(NamedTuple):
    """What the clients of a cohort send, spend and lose on the way, where its sampler states that."""

    sent: Array | None = None  # [m] bool; sent a message, in time or too late; None = those who reported
    begun: Array | None = None  # [m] bool; sent the first of two messages (`Work.before`), `sent` is of the second
    spent: Spent | None = None  # by each slot until its message arrived, it left or the round closed, zeros where
    # nobody is invited; None = time is not simulated
    lost: dict[str, Array] = {}  # [m] int32: when a client's report was lost, in ticks after the invitation, to each
    # cause that `Cohort.metrics` counts (2^31 - 1: it was not; one less: whenever the round ends); the first one counts
    shortened: Array | None = None  # [m] bool; does less work than planned, to be in time; `Cohort.metrics` counts who
    # reports


class Clock(NamedTuple):
    """Simulated time since the start of a run, exact for 68 years."""

    seconds: Array  # [] int32, whole seconds; past the 68 years their lower 31 bits, with the sign bit set
    ticks: Array  # [] int32 in [0, ticks per second)

    def moved(self, ticks: Array, per_second: int) -> Clock:
        """The clock so many int32 ticks later, or earlier for a negative number. Past 68 years it wraps: see `since`.

        >>> [int(x) for x in Clock(jnp.int32(5), jnp.int32(999)).moved(jnp.int32(2), 1000)]
        [6, 1]
        """
        rest = self.ticks + ticks % per_second
        return Clock(self.seconds + ticks // per_second + rest // per_second, rest % per_second)

    def since(self, start: Clock) -> Clock:
        """This clock, which was moved from `start` by less than 2^31 seconds: past the 68 years if that was.

        >>> late = Clock(jnp.int32(-1), jnp.int32(0))  # the last second before it wraps
        >>> int(late.moved(jnp.int32(10), 1).seconds), int(late.moved(jnp.int32(10), 1).since(late).seconds)
        (9, -2147483639)
        """
        return self._replace(seconds=self.seconds | (start.seconds & jnp.int32(-(2**31))))

    def read(self, per_second: int) -> Array:
        """float32 seconds since the start of a run, shape as `seconds`; infinity past the 68 years.

        Guarantees: tests/sampling/time/test_clock.py::test_a_long_life_of_the_clock.
        """
        passed = self.seconds.astype(jnp.float32) + self.ticks.astype(jnp.float32) / per_second
        return jnp.where(self.seconds < 0, jnp.inf, passed)
