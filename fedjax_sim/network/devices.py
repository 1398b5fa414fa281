"""This module simulates the hardware of clients: speed, bandwidth and energy of each, as pure functions of its id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_sim import validate
from fedjax_sim.network.distributions import Distribution, as_distribution, lognormal, unit_draws
from fedjax_sim.prng import stream
from fedjax_sim.types import Array, Availability, Clock, Devices, Load, Metric, Spent
from fedjax_sim.validate import NonNegativeInt, Number, PopulationSize

MOST_TICKS = 715_827_840  # the longest phase: three phases add up within int32, and float32 holds the number exactly
FINEST = 1_000_000  # the most ticks per second
SATURATED = Metric("saturated_clients", "clients too slow for the clock to count", "count")


class Profile(NamedTuple):
    """The hardware of clients, each field [c] float32; energies add up.

    Guarantees: The time and energy that a client spends follow by hand
    (tests/network/test_devices.py::test_what_is_spent).
    """

    speed: Array  # flops/s of training, > 0
    bandwidth_down: Array  # bytes/s, > 0
    bandwidth_up: Array
    latency: Array  # seconds of each message that has bytes, in either direction
    joules_per_flop: Array
    joules_per_byte: Array  # in either direction
    compute_watts: Array  # power while the client computes
    radio_watts: Array  # power while the client sends or receives


def check_devices(devices: Devices, population_size: int, whose: str = "population's", of: str = "clients") -> None:
    """Raises ValueError, TypeError for devices of a population of another size, or with ticks out of range.

    Args:
      devices: the devices to check.
      population_size: the expected number of clients.
      whose, of: words for the error: "those of the {whose} {population_size} {of}".
    """
    validate.part("devices", devices, Devices)
    if devices.population_size != population_size:
        validate.fail("devices", f"those of the {whose} {population_size} {of}", devices.population_size)
    validate.integer("devices.ticks_per_second", devices.ticks_per_second, 1, FINEST)


def whole_ticks(seconds: Array, ticks_per_second: int) -> Array:
    """Converts durations into int32 ticks, rounded up.

    Longer durations than `MOST_TICKS`, infinity and NaN give `MOST_TICKS`.

    A duration that exceeds whole ticks by less than one part in two million is rounded down. Float32 quotients are not
    exact, and XLA may replace a division by a product.

    Args:
      seconds: [...] float32.
      ticks_per_second: the unit of time.

    Returns: [...] int32 ticks, in [0, MOST_TICKS] for seconds >= 0.

    Guarantees: A quotient of bytes and bandwidth that is a whole number of ticks gives that number, whether it is
    computed by a division or by a product (tests/network/test_devices.py::test_whole_ticks).

    >>> whole_ticks(jnp.array([0.0, 0.0101, jnp.inf, jnp.nan]), 1000).tolist()
    [0, 11, 715827840, 715827840]
    """
    # The factor rounds a quotient down that exceeds whole ticks by a rounding error only.
    ticks = jnp.ceil(seconds * ticks_per_second * jnp.float32(1 - 2.0**-21))
    return jnp.where(ticks < MOST_TICKS, ticks, float(MOST_TICKS)).astype(jnp.int32)


@validate.named_arguments
def of_profiles(
    population_size: PopulationSize,
    profile: Callable,
    *,
    jitter: Annotated[float, Number(0, 4)] = 0.0,
    availability: Availability | None = None,
    ticks_per_second: int = 1000,
) -> Devices:
    """Makes devices from a function that gives the hardware of each client id.

    A broadcast takes latency + bytes / bandwidth, training takes flops / speed, and a message takes latency + bytes /
    bandwidth. What has no bytes is not sent and takes no latency. `heterogeneous` and `measured` are made with this
    function.

    Args:
      population_size: N.
      profile: (ids [c]) -> `Profile`.
      jitter: sigma of a lognormal factor with median 1 on a client's times in a round. There is one draw for its
        training and one for its link, by the round's key and the client's id.
      availability: when clients are available; None = always.
      ticks_per_second: the unit of time. A phase longer than `MOST_TICKS` (8 days in milliseconds) counts as
        `MOST_TICKS`, and Info counts its client in `saturated_clients`. With 1 tick per second, a phase may last 22
        years.

    Returns: `Devices`.

    Guarantees: Times and energies of a client follow from its id, its load and the round's key, whatever its slot
    (tests/network/test_devices.py::test_what_is_spent). Jitter has its law and is fresh in each round (::test_jitter).
    Energy grows with the work (::test_energy_grows_with_the_work).
    """
    if availability is not None:
        validate.part("availability", availability, Availability)
    validate.integer("ticks_per_second", ticks_per_second, 1, FINEST)
    factor = lognormal(1.0, jitter)

    def spend(key: Array, ids: Array, load: Load) -> Spent:
        hardware = profile(ids)
        compute = load.flops / hardware.speed
        down, up = (
            jnp.where(size > 0, hardware.latency, 0.0) + size / rate
            for size, rate in ((load.bytes_down, hardware.bandwidth_down), (load.bytes_up, hardware.bandwidth_up))
        )
        # Two draws for each client: training and link vary independently.
        if jitter:
            key = stream(key, "jitter")
            training_factor, link_factor = (
                factor.quantile(unit_draws(key, ids, which)) for which in (jnp.int32(0), jnp.int32(1))
            )
            compute = compute * training_factor
            down = down * link_factor
            up = up * link_factor
        ticks = [whole_ticks(seconds, ticks_per_second) for seconds in (down, compute, up)]
        # Energy is counted over the same times as the clock, which has a longest phase.
        down, compute, up = (jnp.minimum(seconds, MOST_TICKS / ticks_per_second) for seconds in (down, compute, up))
        joules = load.flops * hardware.joules_per_flop + (load.bytes_down + load.bytes_up) * hardware.joules_per_byte
        joules = joules + compute * hardware.compute_watts + (down + up) * hardware.radio_watts
        return Spent(down=ticks[0], compute=ticks[1], up=ticks[2], joules=joules.astype(jnp.float32))

    return Devices(population_size, spend, availability, ticks_per_second)


@validate.named_arguments
def heterogeneous(
    population_size: PopulationSize,
    *,
    speed: Distribution | float,
    bandwidth_down: Distribution | float,
    bandwidth_up: Distribution | float,
    latency: Distribution | float | None = None,
    joules_per_flop: Distribution | float | None = None,
    joules_per_byte: Distribution | float | None = None,
    compute_watts: Distribution | float | None = None,
    radio_watts: Distribution | float | None = None,
    jitter: float = 0.0,
    availability: Availability | None = None,
    ticks_per_second: int = 1000,
    seed: NonNegativeInt = 0,
) -> Devices:
    """Makes clients whose hardware is drawn from distributions over clients, each number independently.

    Each of the numbers below is a distribution over clients, or one number for all.

    Args:
      population_size: N.
      speed: flops/s of training, which is a small part of the speed in a data sheet.
      bandwidth_down, bandwidth_up: bytes/s.
      latency: seconds of each message, in either direction; None = 0.
      joules_per_flop, joules_per_byte: energy by the amount of work; None = 0.
      compute_watts, radio_watts: energy by the time that the work takes; None = 0.
      jitter, availability, ticks_per_second: as in `of_profiles`.
      seed: of the draws.

    Returns: `Devices`. Nothing is stored for N clients.

    Raises: ValueError, TypeError for values out of range, and for speeds or bandwidths that may be 0.

    Guarantees: The numbers of a client are independent
    (tests/network/test_devices.py::test_numbers_of_a_client_are_independent). The guarantees of `of_profiles` hold,
    since it makes the devices.

    References: Lai et al. 2022 (FedScale), section 3.2: speeds and bandwidths of phones spread over an order of
    magnitude and more.

    >>> devices = heterogeneous(10, speed=1e9, bandwidth_down=1e6, bandwidth_up=1e5)
    >>> devices.spend(jax.random.key(0), jnp.arange(1), Load(2e9, 1e6, 1e6))[:3]  # milliseconds
    (Array([1000], dtype=int32), Array([2000], dtype=int32), Array([10000], dtype=int32))
    """
    options_by_name: dict = {
        "speed": speed,
        "bandwidth_down": bandwidth_down,
        "bandwidth_up": bandwidth_up,
        "latency": latency,
    }
    options_by_name |= {"joules_per_flop": joules_per_flop, "joules_per_byte": joules_per_byte}
    options_by_name |= {"compute_watts": compute_watts, "radio_watts": radio_watts}
    laws = {name: as_distribution(name, 0.0 if law is None else law) for name, law in options_by_name.items()}
    for name, law in laws.items():
        if name in ("speed", "bandwidth_down", "bandwidth_up") and not law.least > 0:
            validate.fail(name, "a distribution above 0", law.least, "Nothing would ever arrive.")

    # A key for each number, so that the numbers of a client are independent.
    keys = {name: stream(stream(jax.random.key(seed), "devices"), name) for name in laws}

    def profile(ids: Array) -> Profile:
        return Profile(**{name: law.draw(keys[name], ids) for name, law in laws.items()})

    shared_options = {"jitter": jitter, "availability": availability, "ticks_per_second": ticks_per_second}
    return of_profiles(population_size, profile, **shared_options)


def there_at(devices: Devices, ids: Array, seconds: Array) -> Array:
    """Tells whether each client is available at a time, [c] bool.

    Args:
      devices: with or without a rule of availability.
      ids: [c] int32.
      seconds: [] or [c] int32.

    Raises: TypeError for a user's own rule that returns another shape or dtype
    (tests/network/test_devices.py::test_functions_of_ones_own).
    """
    rule = devices.availability
    if rule is None:
        return jnp.ones(ids.shape, bool)
    is_available = rule.at(ids, seconds)
    _expect("devices.availability.at(ids, seconds)", is_available, ids.shape, bool)
    return is_available


def absent_after(devices: Devices, ids: Array, began: Clock, spent: Spent, checks: int) -> Array:
    """Finds when clients at work are first seen to be absent: [c] int32 ticks after they began.

    The result is 2^31 - 1 for a client that stays.

    Availability is checked after the download, `checks` times at even distances during the local work, and on arrival.
    A client that is absent on arrival left one tick before.

    Args:
      devices: whose availability is checked.
      ids: [c] int32.
      began: the time at which the clients began, of [c] or [].
      spent: the ticks of their phases.
      checks: at least 1.

    Guarantees: Clients leave as the clock says (tests/sampling/time/test_clock.py::test_who_leaves,
    tests/algorithms/asynchronous/test_arrivals.py::test_events_are_those_of_a_loop).
    """
    down, compute, up, _ = spent
    # compute * index // checks, without a product that exceeds int32.
    work_ticks = [compute // checks * index + compute % checks * index // checks for index in range(checks + 1)]
    check_ticks = jnp.stack([*(down + part for part in work_ticks), down + compute + up])  # [checks + 2, c]
    began = Clock(*(jnp.broadcast_to(field, check_ticks.shape) for field in began))
    seconds = began.moved(check_ticks, devices.ticks_per_second).since(began).seconds
    everyone = jnp.broadcast_to(ids, check_ticks.shape)
    is_available = there_at(devices, everyone.ravel(), seconds.ravel()).reshape(check_ticks.shape)
    absence_ticks = jnp.where(is_available, jnp.int32(2**31 - 1), check_ticks).min(0)
    return jnp.where(is_available.all(0), absence_ticks, jnp.minimum(absence_ticks, spent.total - 1))


def spent_by(devices: Devices, key: Array, ids: Array, load: Load) -> Spent:
    """Computes the time and energy that clients spend on a round's work and messages, each [c].

    Args:
      devices, ids: as in `there_at`.
      key: of the round.
      load: the work of each client.

    Raises: TypeError for a user's own `spend` that returns no `Spent`, or arrays of another shape or dtype.
    """
    spent = devices.spend(stream(key, "devices"), ids, load)
    validate.part("devices.spend(key, ids, load)", spent, Spent)
    for name, values in spent._asdict().items():
        kind = jnp.floating if name == "joules" else jnp.int32
        _expect(f"devices.spend(key, ids, load).{name}", values, ids.shape, kind)
    # Joules have another width if JAX runs with 64 bits.
    return spent._replace(joules=spent.joules.astype(jnp.float32))


def num_saturated(spent: Spent, at_work: Array) -> Array:
    """Counts the clients at work with a phase that is too long for the clock, [] int32.

    Such a phase takes at least the longest duration that the clock can count.

    Args:
      spent: each field [c].
      at_work: [c] bool.

    Guarantees: Clients that are too slow for the clock are counted
    (tests/laws/test_time.py::test_who_is_too_slow_for_the_clock_is_counted).

    >>> spent = Spent(*jnp.array([[1, 2], [5, MOST_TICKS], [1, 1]]), joules=jnp.zeros(2))
    >>> int(num_saturated(spent, jnp.array([True, True])))
    1
    """
    longest = jnp.maximum(jnp.maximum(spent.down, spent.compute), spent.up)
    return (at_work & (longest >= MOST_TICKS)).sum(dtype=jnp.int32)


def _expect(name: str, array: Array, shape: tuple, kind: DTypeLike) -> None:
    """Raises TypeError unless an array, which a user's function has returned, has this shape and dtype."""
    dtype = jnp.result_type(array)
    if jnp.shape(array) != shape or not jnp.issubdtype(dtype, kind):
        rule = "floats" if kind is jnp.floating else jnp.dtype(kind)
        validate.fail(
            name, f"{rule} of shape {shape}, one for each id", f"{dtype} of shape {jnp.shape(array)}", error=TypeError
        )
