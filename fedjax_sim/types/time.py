"""Simulated time: the work that a round asks of clients, the time and energy that they spend, and the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array


class Work(NamedTuple):
    """The work that a round asks of one client; known on the host before the first round."""

    bytes_up: int  # of its message
    bytes_down: int  # of the broadcast
    steps: int | Callable | None  # local steps, or (examples) -> local steps; None = the client does not state them
    flops: float  # floating-point operations of its local work on all rows, with one turn of a loop of unknown length
    step_flops: float = 0.0  # operations of each further turn of that loop, which is a local step
    rows: int | None = None  # number of rows, where a client's flops grow with its examples; None = minibatches
    examples: Callable | None = None  # () -> [N] number of examples of each client; None = not known
    before: Work | None = None  # of an earlier pass of the same round; this work has its bytes, but not its flops
    # (flops_scale, bytes_scale) -> leaves [N, ...], `TimeInside.asked` of each client; None = clients are no
    # federations
    inside: Callable | None = None
    # NumPy [m + 1, 2], bytes up and down if 0, 1, ... m clients are invited; None = the number does not matter
    by_invited: Any = None


class TimeInside(NamedTuple):
    """The duration of a client's own rounds, where the client is a federation."""

    # (params_spec, Population of its clients, flops_scale, bytes_scale) -> the work that its rounds ask of its clients
    asked: Callable
    # (key of its local work, the result of `asked`) -> ([] int32 ticks, [] float32 joules) of all of its rounds
    spent: Callable
    ticks_per_second: int


class Load(NamedTuple):
    """The work of a round in the numbers that devices price; each number [] or [c] float32."""

    flops: Array  # of the clients' local work, as much as they do of it
    bytes_down: Array  # of the broadcast
    bytes_up: Array  # of a message


class Spent(NamedTuple):
    """The time and energy that clients spend on one round, each [c] and at least 0.

    Times are in whole ticks of `Devices.ticks_per_second`, rounded up. For a `Devices.spend` of the user's own only
    shapes and dtypes are checked.
    """

    down: Array  # int32, until the broadcast is at the client
    compute: Array  # int32, local work
    up: Array  # int32, until the message is at the server
    joules: Array  # float32, of all three

    @property
    def total(self) -> Array:
        """[c] int32 ticks from the invitation to the arrival."""
        return self.down + self.compute + self.up


class Timing(NamedTuple):
    """The messages, times and losses of a cohort's clients, as far as its sampler states them."""

    # [m] bool; the client sent a message, in time or too late; None = the clients who reported
    sent: Array | None = None
    # [m] bool, where a round has two messages (`Work.before`): the client sent the first. `sent` is of the second
    begun: Array | None = None
    # What each slot spent until its message arrived, it left or the round closed; zeros where nobody is invited; None =
    # time is not simulated
    spent: Spent | None = None
    # For each cause that `Cohort.metrics` counts: [m] int32, when a client's report was lost to it, in ticks after the
    # invitation. 2^31 - 1 = it was not lost; 2^31 - 2 = lost whenever the round ends. The earliest cause counts
    lost: dict[str, Array] = {}
    # [m] bool; the client does less work than planned, to be in time. `Cohort.metrics` counts those of them who report
    shortened: Array | None = None


class Clock(NamedTuple):
    """Simulated time since the start of a run, exact for 68 years."""

    # [] int32, whole seconds. Past 68 years (2^31 seconds) the sign bit is set beside their lower 31 bits
    seconds: Array
    ticks: Array  # [] int32 in [0, ticks per second)

    def moved(self, ticks: Array, per_second: int) -> Clock:
        """Moves the clock forward by a number of ticks.

        Past 68 years the result wraps, and `since` corrects it.

        Args:
          ticks: [] int32; a negative number moves the clock back.
          per_second: the number of ticks in a second.

        >>> [int(x) for x in Clock(jnp.int32(5), jnp.int32(999)).moved(jnp.int32(2), 1000)]
        [6, 1]
        """
        # The ticks are reduced before the addition, so that the sum cannot overflow.
        ticks_in_second = self.ticks + ticks % per_second
        seconds = self.seconds + ticks // per_second + ticks_in_second // per_second
        return Clock(seconds, ticks_in_second % per_second)

    def since(self, start: Clock) -> Clock:
        """Corrects a clock that wrapped: it lies past 68 years if the clock that it was moved from did.

        Args:
          start: the clock before it was moved by less than 2^31 seconds.

        >>> late = Clock(jnp.int32(-1), jnp.int32(0))  # the last second before it wraps
        >>> int(late.moved(jnp.int32(10), 1).seconds), int(late.moved(jnp.int32(10), 1).since(late).seconds)
        (9, -2147483639)
        """
        return self._replace(seconds=self.seconds | (start.seconds & jnp.int32(-(2**31))))

    def read(self, per_second: int) -> Array:
        """The seconds since the start of a run, float32, shaped as `seconds`; infinity past 68 years.

        Args:
          per_second: the number of ticks in a second.

        Guarantees: a run whose rounds take 68 years reads a finite time in the first round and infinity after it
        (tests/sampling/time/test_clock.py::test_a_long_life_of_the_clock).
        """
        seconds = self.seconds.astype(jnp.float32) + self.ticks.astype(jnp.float32) / per_second
        return jnp.where(self.seconds < 0, jnp.inf, seconds)
