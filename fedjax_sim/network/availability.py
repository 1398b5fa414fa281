"""When clients can take part: conditions as pure functions of a client's id and the time."""

from __future__ import annotations

import math
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.network.distributions import Distribution, as_distribution, unit_draws
from fedjax_sim.prng import stream
from fedjax_sim.types import Array, Availability
from fedjax_sim.validate import Integer, NonNegativeInt, OpenShare, PositiveShare

__all__ = ["always", "bernoulli", "both", "charging_and_wifi", "daily_window", "diurnal", "slot_of", "source"]


@validate.named_arguments
def source(name: str, seed: NonNegativeInt, **options: float) -> Array:
    """The key of a condition's draws: another name, seed or option is another draw."""
    return stream(jax.random.key(seed), f"availability {name} {sorted(options.items())}")


def slot_of(key: Array, ids: Array, seconds: Array, slot_seconds: int) -> tuple[Array, Array]:
    """The slot of time that each client is in, and when it began.

    Each client's slots begin at a moment of its own, so that clients do not come and go all at once.

    Args:
      key: of the condition.
      ids: [c] integers.
      seconds: [] or [c] int32.

    Returns: ([c] int32 numbers of slots, [c] int32 seconds at which they began: at 0 or less for the first).

    Guarantees: tests/network/test_availability.py::test_a_slot_is_one_draw, ::test_slots_begin_at_all_moments.
    """
    seconds = jnp.broadcast_to(jnp.asarray(seconds, jnp.int32), ids.shape)
    offset = (unit_draws(stream(key, "offset"), ids) * slot_seconds).astype(jnp.int32)
    offset = jnp.minimum(offset, slot_seconds - 1)
    into = seconds % slot_seconds + offset  # below 2^31, unlike seconds + offset
    return seconds // slot_seconds + (into >= slot_seconds).astype(jnp.int32), seconds - into % slot_seconds


def always() -> Availability:
    """Clients are always there.

    Guarantees: tests/network/test_availability.py::test_rates_are_the_long_run_shares.

    >>> always().at(jnp.arange(2), 0).tolist()
    [True, True]
    """
    return Availability(lambda ids, seconds: jnp.ones(ids.shape, bool), lambda ids: np.ones(np.shape(ids)))


@validate.named_arguments
def bernoulli(
    rate: Distribution | float, *, slot_seconds: Annotated[int, Integer(1, 1073741824)] = 3600, seed: int = 0
) -> Availability:
    """In each slot of time a client is there with a probability of its own, independently.

    Args:
      rate: the probability, in (0, 1]: a number for all clients, or a distribution over them.
      slot_seconds: length of a slot, at most 2^30; each client's slots begin at a moment of its own.
      seed: of the draws.

    Guarantees: the stated rates, independent between clients and slots
    (tests/network/test_availability.py::test_rates_are_the_long_run_shares, ::test_slots_are_independent).

    >>> bernoulli(0.25).rate(np.arange(2)).tolist()
    [0.25, 0.25]
    """
    rate = as_distribution("rate", rate)
    if not (0 < rate.least and rate.most <= 1):
        shown = rate.least if rate.least == rate.most else f"{rate.least:g} to {rate.most:g}"
        validate.fail("rate", "probabilities in (0, 1]", shown)
    own, key = source("rate", seed), source("bernoulli", seed, slot_seconds=slot_seconds)

    def at(ids, seconds):
        slot, _ = slot_of(key, ids, seconds, slot_seconds)
        return unit_draws(key, ids, slot) < rate.draw(own, ids)

    return Availability(at, lambda ids: np.asarray(rate.draw(own, jnp.asarray(ids)), np.float64))


def _local_time(key: Array, ids: Array, seconds: Array, num_zones: int, day_seconds: int) -> Array:
    """[c] int32 seconds of each client's own day; its time zone is one of `num_zones`, all equally likely."""
    zone = (unit_draws(key, ids) * num_zones).astype(jnp.int32)
    return (seconds % day_seconds + zone * (day_seconds // num_zones)) % day_seconds


def _check_day(num_zones: int, day_seconds: int) -> None:
    validate.integer("day_seconds", day_seconds, 2, 1 << 30)
    validate.integer("num_zones", num_zones, 1, min(day_seconds, 1 << 20))
    if day_seconds % num_zones:
        validate.fail("num_zones", f"a divisor of the day's {day_seconds} seconds", num_zones)


@validate.named_arguments
def daily_window(
    share: PositiveShare, *, num_zones: int = 24, day_seconds: int = 86_400, seed: int = 0
) -> Availability:
    """Clients are there for the same part of each of their days, such as at night; their time zones differ.

    Args:
      share: of the day, in (0, 1], rounded to whole seconds.
      num_zones: time zones, equally likely and evenly spaced: a divisor of `day_seconds`.
      day_seconds: length of a day.
      seed: of the draws.

    Guarantees: the stated share of every day of every client
    (tests/network/test_availability.py::test_rates_are_the_long_run_shares, ::test_windows_are_contiguous).

    >>> daily_window(0.25).rate(np.arange(1)).tolist()
    [0.25]
    """
    _check_day(num_zones, day_seconds)
    length = max(round(share * day_seconds), 1)
    zones = source("zone", seed)

    def at(ids, seconds):
        return _local_time(zones, ids, seconds, num_zones, day_seconds) < length

    return Availability(at, lambda ids: np.full(np.shape(ids), length / day_seconds))


@validate.named_arguments
def diurnal(
    mean: OpenShare,
    amplitude: float,
    *,
    num_zones: int = 24,
    slot_seconds: int = 3600,
    day_seconds: int = 86_400,
    seed: int = 0,
) -> Availability:
    """In each slot a client is there with probability mean + amplitude sin(2 pi t / day), t the time of its own day.

    Args:
      mean, amplitude: mean in (0, 1), amplitude at most min(mean, 1 - mean).
      num_zones, day_seconds, seed: as in `daily_window`.
      slot_seconds: the probability is that at the slot's beginning; a divisor of the day, at most half of it. Each
        client's slots begin at a moment of its own.

    Guarantees: the mean is the long-run share of every client
    (tests/network/test_availability.py::test_rates_are_the_long_run_shares), and the probability follows the sine
    (::test_the_day_is_a_sine).

    >>> diurnal(0.3, 0.2).rate(np.arange(1)).tolist()
    [0.3]
    """
    mean_as_written = validate.as_written(mean)  # or the 0.1 beside 0.9 would be too large
    validate.in_range("amplitude", amplitude, 0, float(min(mean_as_written, 1 - mean_as_written)))
    _check_day(num_zones, day_seconds)
    validate.integer("slot_seconds", slot_seconds, 1, day_seconds // 2)
    if day_seconds % slot_seconds:
        validate.fail("slot_seconds", f"a divisor of the day's {day_seconds} seconds", slot_seconds)
    key, zones = source("diurnal", seed, slot_seconds=slot_seconds), source("zone", seed)

    def at(ids, seconds):
        slot, began = slot_of(key, ids, seconds, slot_seconds)
        local = _local_time(zones, ids, began, num_zones, day_seconds).astype(jnp.float32)
        chance = mean + amplitude * jnp.sin(local * (2 * math.pi / day_seconds))
        return unit_draws(key, ids, slot) < chance

    return Availability(at, lambda ids: np.full(np.shape(ids), float(mean)))


def both(first: Availability, second: Availability) -> Availability:
    """Clients are there when two conditions hold.

    The long-run share is unknown, for the two may hold at the same hours: what needs it refuses this one. Two
    conditions of the same name, options and seed are one and the same: give one of them another seed.

    Guarantees: tests/network/test_availability.py::test_both_conditions.

    >>> both(always(), always()).at(jnp.arange(2), 0).tolist()
    [True, True]
    """
    for name, value in (("first", first), ("second", second)):
        validate.part(name, value, Availability)
    return Availability(lambda ids, seconds: first.at(ids, seconds) & second.at(ids, seconds))


def charging_and_wifi(
    charging_share: float = 0.35,
    wifi: Distribution | float = 0.8,
    *,
    num_zones: int = 24,
    slot_seconds: int = 3600,
    day_seconds: int = 86_400,
    seed: int = 0,
) -> Availability:
    """Phones that train while they charge, every night, and are on Wi-Fi, by chance in each slot of time.

    Args:
      charging_share: of the day: a `daily_window`.
      wifi: probability of Wi-Fi: `bernoulli`, independent of the hour.
      num_zones, day_seconds, slot_seconds, seed: as for those two.

    Guarantees: the long-run share is the product of the two
    (tests/network/test_availability.py::test_rates_are_the_long_run_shares).

    References: Bonawitz et al. 2019, section 2.2 (idle, charging, unmetered network); Kairouz et al. 2021, table 1.

    >>> charging_and_wifi(0.25, 0.5).rate(np.arange(1)).tolist()
    [0.125]
    """
    night = daily_window(charging_share, num_zones=num_zones, day_seconds=day_seconds, seed=seed)
    online = bernoulli(wifi, slot_seconds=slot_seconds, seed=seed)
    return both(night, online)._replace(rate=lambda ids: night.rate(ids) * online.rate(ids))
