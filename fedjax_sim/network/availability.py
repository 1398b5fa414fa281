"""This module says when clients can take part, by conditions that are pure functions of a client's id and the time."""

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


@validate.named_arguments
def source(name: str, seed: NonNegativeInt, **options: float) -> Array:
    """Returns the key of a condition's draws. Another name, seed or option gives another key.

    Args:
      name: of the condition.
      seed: >= 0.
      options: of the condition, as far as its draws depend on them.
    """
    return stream(jax.random.key(seed), f"availability {name} {sorted(options.items())}")


def slot_of(key: Array, ids: Array, seconds: Array, slot_seconds: int) -> tuple[Array, Array]:
    """Finds the slot of time that each client is in, and the second at which the slot began.

    Each client's slots begin at a moment of its own, so that clients do not come and go all at once.

    Args:
      key: of the condition.
      ids: [c] integers.
      seconds: [] or [c] int32.
      slot_seconds: the length of a slot.

    Returns: ([c] int32 numbers of slots, [c] int32 seconds at which the slots began). The first slot of a client began
    at a second of 0 or less.

    Guarantees: A client has one draw in a slot, and slots begin at all moments
    (tests/network/test_availability.py::test_a_slot_is_one_draw, ::test_slots_begin_at_all_moments).
    """
    seconds = jnp.broadcast_to(jnp.asarray(seconds, jnp.int32), ids.shape)
    offset = (unit_draws(stream(key, "offset"), ids) * slot_seconds).astype(jnp.int32)
    offset = jnp.minimum(offset, slot_seconds - 1)
    # `seconds + offset` might exceed int32, so the offset is added to the remainder only.
    seconds_into_slot = seconds % slot_seconds + offset
    return seconds // slot_seconds + (seconds_into_slot >= slot_seconds).astype(
        jnp.int32
    ), seconds - seconds_into_slot % slot_seconds


def always() -> Availability:
    """Clients are always available.

    Guarantees: The long-run share is 1 (tests/network/test_availability.py::test_rates_are_the_long_run_shares).

    >>> always().at(jnp.arange(2), 0).tolist()
    [True, True]
    """
    return Availability(lambda ids, seconds: jnp.ones(ids.shape, bool), lambda ids: np.ones(np.shape(ids)))


@validate.named_arguments
def bernoulli(
    rate: Distribution | float, *, slot_seconds: Annotated[int, Integer(1, 1073741824)] = 3600, seed: int = 0
) -> Availability:
    """In each slot of time, a client is available with a probability of its own, independently of other slots.

    Args:
      rate: the probability, in (0, 1]: a number for all clients, or a distribution over clients.
      slot_seconds: length of a slot, at most 2^30. Each client's slots begin at a moment of its own.
      seed: of the draws.

    Returns: `Availability`.

    Guarantees: Clients have the stated rates, independently between clients and slots
    (tests/network/test_availability.py::test_rates_are_the_long_run_shares, ::test_slots_are_independent).

    >>> bernoulli(0.25).rate(np.arange(2)).tolist()
    [0.25, 0.25]
    """
    rate = as_distribution("rate", rate)
    if not (0 < rate.least and rate.most <= 1):
        rate_text = rate.least if rate.least == rate.most else f"{rate.least:g} to {rate.most:g}"
        validate.fail("rate", "probabilities in (0, 1]", rate_text)
    rate_key = source("rate", seed)
    key = source("bernoulli", seed, slot_seconds=slot_seconds)

    def at(ids, seconds):
        slot, _ = slot_of(key, ids, seconds, slot_seconds)
        return unit_draws(key, ids, slot) < rate.draw(rate_key, ids)

    return Availability(at, lambda ids: np.asarray(rate.draw(rate_key, jnp.asarray(ids)), np.float64))


def _local_time(key: Array, ids: Array, seconds: Array, num_zones: int, day_seconds: int) -> Array:
    """Returns the seconds of each client's own day, [c] int32.

    Its time zone is one of `num_zones`, which are equally likely.
    """
    zone = (unit_draws(key, ids) * num_zones).astype(jnp.int32)
    # Each remainder is below the length of a day, so nothing exceeds int32.
    return (seconds % day_seconds + zone * (day_seconds // num_zones)) % day_seconds


def _check_day(num_zones: int, day_seconds: int) -> None:
    """Checks the length of a day, and that time zones divide it evenly."""
    validate.integer("day_seconds", day_seconds, 2, 1 << 30)
    validate.integer("num_zones", num_zones, 1, min(day_seconds, 1 << 20))
    if day_seconds % num_zones:
        validate.fail("num_zones", f"a divisor of the day's {day_seconds} seconds", num_zones)


@validate.named_arguments
def daily_window(
    share: PositiveShare, *, num_zones: int = 24, day_seconds: int = 86_400, seed: int = 0
) -> Availability:
    """Clients are available for the same part of each of their days, such as at night. Their time zones differ.

    Args:
      share: of the day, in (0, 1], rounded to whole seconds.
      num_zones: the number of time zones, which are equally likely and evenly spaced: a divisor of `day_seconds`.
      day_seconds: length of a day.
      seed: of the draws.

    Returns: `Availability`.

    Guarantees: Every client is available for the stated share of every day
    (tests/network/test_availability.py::test_rates_are_the_long_run_shares, ::test_windows_are_contiguous).

    >>> daily_window(0.25).rate(np.arange(1)).tolist()
    [0.25]
    """
    _check_day(num_zones, day_seconds)
    window_seconds = max(round(validate.as_written(share) * day_seconds), 1)
    zones = source("zone", seed)

    def at(ids, seconds):
        return _local_time(zones, ids, seconds, num_zones, day_seconds) < window_seconds

    return Availability(at, lambda ids: np.full(np.shape(ids), window_seconds / day_seconds))


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
    """In each slot, the probability that a client is available follows a sine over its own day.

    At the time t of its day the probability is mean + amplitude sin(2 pi t / day).

    Args:
      mean, amplitude: mean in (0, 1), and amplitude at most min(mean, 1 - mean).
      num_zones, day_seconds, seed: as in `daily_window`.
      slot_seconds: length of a slot; a divisor of the day, at most half of it. The probability is that at the slot's
        beginning. Each client's slots begin at a moment of its own.

    Returns: `Availability`.

    Guarantees: The mean is the long-run share of every client
    (tests/network/test_availability.py::test_rates_are_the_long_run_shares), and the probability follows the sine
    (::test_the_day_is_a_sine).

    >>> diurnal(0.3, 0.2).rate(np.arange(1)).tolist()
    [0.3]
    """
    # Decimals are compared as they are written: in binary, an amplitude of 0.1 would exceed 1 - 0.9.
    mean_as_written = validate.as_written(mean)
    validate.in_range("amplitude", amplitude, 0, float(min(mean_as_written, 1 - mean_as_written)))
    _check_day(num_zones, day_seconds)
    validate.integer("slot_seconds", slot_seconds, 1, day_seconds // 2)
    if day_seconds % slot_seconds:
        validate.fail("slot_seconds", f"a divisor of the day's {day_seconds} seconds", slot_seconds)
    key = source("diurnal", seed, slot_seconds=slot_seconds)
    zones = source("zone", seed)

    def at(ids, seconds):
        slot, slot_begin = slot_of(key, ids, seconds, slot_seconds)
        local = _local_time(zones, ids, slot_begin, num_zones, day_seconds).astype(jnp.float32)
        probability = mean + amplitude * jnp.sin(local * (2 * math.pi / day_seconds))
        return unit_draws(key, ids, slot) < probability

    return Availability(at, lambda ids: np.full(np.shape(ids), float(mean)))


def both(first: Availability, second: Availability) -> Availability:
    """Clients are available when two conditions hold.

    The long-run share is unknown, because both conditions may hold at the same hours. So everything that needs the
    share refuses this condition. Two conditions with the same name, options and seed are identical: give one of them
    another seed.

    Args:
      first, second: conditions.

    Guarantees: A client is available exactly if both conditions hold
    (tests/network/test_availability.py::test_both_conditions).

    >>> both(always(), always()).at(jnp.arange(2), 0).tolist()
    [True, True]
    """
    for name, value in (("first", first), ("second", second)):
        validate.part(name, value, Availability)
    # Both conditions are asked at the same time for the same clients.
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
    """Phones train while they charge, every night, and are on Wi-Fi, which is random in each slot of time.

    Args:
      charging_share: the share of the day for charging: a `daily_window`.
      wifi: the probability of Wi-Fi: `bernoulli`, independent of the hour.
      num_zones, day_seconds, slot_seconds, seed: as in these two conditions.

    Returns: `Availability`.

    Guarantees: The long-run share is the product of the two shares
    (tests/network/test_availability.py::test_rates_are_the_long_run_shares).

    References: Bonawitz et al. 2019, section 2.2 (idle, charging, unmetered network); Kairouz et al. 2021, table 1.

    >>> charging_and_wifi(0.25, 0.5).rate(np.arange(1)).tolist()
    [0.125]
    """
    night = daily_window(charging_share, num_zones=num_zones, day_seconds=day_seconds, seed=seed)
    online = bernoulli(wifi, slot_seconds=slot_seconds, seed=seed)
    night_rate = night.rate
    online_rate = online.rate
    assert night_rate is not None and online_rate is not None, "both conditions have a long-run share"
    # Wi-Fi does not depend on the hour, so here the long-run share is known, unlike in `both`.
    return both(night, online)._replace(rate=lambda ids: night_rate(ids) * online_rate(ids))
