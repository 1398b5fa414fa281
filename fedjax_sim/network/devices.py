"""What clients run on: speed, links and energy of each, as pure functions of its id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.network.distributions import Distribution, as_distribution, lognormal, unit_draws
from fedjax_sim.prng import stream
from fedjax_sim.types import Array, Availability, Clock, Devices, Load, Metric, Spent
from fedjax_sim.validate import NonNegativeInt, Number, PopulationSize

__all__ = [
    "MOST_TICKS",
    "SATURATED",
    "Profile",
    "absent_after",
    "check_devices",
    "heterogeneous",
    "num_saturated",
    "of_profiles",
    "spent_by",
    "there_at",
    "whole_ticks",
]

MOST_TICKS = 715_827_840  # of one phase, so that three add up in int32; a float32 number
FINEST = 1_000_000  # ticks a second
SATURATED = Metric("saturated_clients", "clients too slow for the clock to count", "count")


class Profile(NamedTuple):
    """The hardware of clients, each [c] float32; energies add up.

    Guarantees: what it makes a client spend is by hand (tests/network/test_devices.py::test_what_is_spent).
    """

    speed: Array  # flops/s of training, > 0
    bandwidth_down: Array  # bytes/s, > 0
    bandwidth_up: Array
    latency: Array  # seconds, of each message, either way
    joules_per_flop: Array
    joules_per_byte: Array  # either way
    compute_watts: Array  # while it computes
    radio_watts: Array  # while it sends or receives


def check_devices(devices: Devices, population_size: int, whose: str = "population's", of: str = "clients") -> None:
    """Raises ValueError, TypeError for devices of another population, which is `whose`, or with ticks out of range."""
    validate.part("devices", devices, Devices)
    if devices.population_size != population_size:
        validate.fail("devices", f"those of the {whose} {population_size} {of}", devices.population_size)
    validate.integer("devices.ticks_per_second", devices.ticks_per_second, 1, FINEST)


def whole_ticks(seconds: Array, ticks_per_second: int) -> Array:
    """Durations as int32 ticks, rounded up; `MOST_TICKS` for longer ones, infinity and NaN.

    A duration that exceeds whole ticks by less than a part in two million is that many: float32 quotients are not
    exact, and XLA may divide by a product.

    Guarantees: tests/network/test_devices.py::test_whole_ticks.

    >>> whole_ticks(jnp.array([0.0, 0.0101, jnp.inf, jnp.nan]), 1000).tolist()
    [0, 11, 715827840, 715827840]
    """
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
    """Devices from a function of ids: what `heterogeneous` and `measured` are made with.

    A broadcast takes latency + bytes / bandwidth, training flops / speed, a message latency + bytes / bandwidth.

    Args:
      population_size: N.
      profile: (ids [c]) -> `Profile`.
      jitter: sigma of a lognormal factor of median 1 on a client's times in a round: one draw for its training, one for
        its link, by the round's key and the client's id.
      availability: when clients are there; None = always.
      ticks_per_second: the unit of time; a phase longer than `MOST_TICKS` (8 days of milliseconds) counts as that, and
        Info counts its client in `saturated_clients`: 1 a second lets a phase last 22 years.

    Guarantees: times and energies of a client follow from its id, its load and the round's key, whatever its slot
    (tests/network/test_devices.py::test_what_is_spent); jitter has its law and is fresh in each round (::test_jitter);
    energy grows with the work (::test_energy_grows_with_the_work).
    """
    if availability is not None:
        validate.part("availability", availability, Availability)
    validate.integer("ticks_per_second", ticks_per_second, 1, FINEST)
    factor = lognormal(1.0, jitter)

    def spend(key: Array, ids: Array, load: Load) -> Spent:
        has = profile(ids)
        compute = load.flops / has.speed
        down, up = (
            has.latency + size / rate
            for size, rate in ((load.bytes_down, has.bandwidth_down), (load.bytes_up, has.bandwidth_up))
        )
        if jitter:
            key = stream(key, "jitter")
            training, link = (factor.quantile(unit_draws(key, ids, which)) for which in (jnp.int32(0), jnp.int32(1)))
            compute, down, up = compute * training, down * link, up * link
        ticks = [whole_ticks(x, ticks_per_second) for x in (down, compute, up)]
        down, compute, up = (jnp.minimum(x, MOST_TICKS / ticks_per_second) for x in (down, compute, up))
        joules = load.flops * has.joules_per_flop + (load.bytes_down + load.bytes_up) * has.joules_per_byte
        joules = joules + compute * has.compute_watts + (down + up) * has.radio_watts
        return Spent(*ticks, joules.astype(jnp.float32))

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
    """Clients whose hardware is drawn, each number by itself, from distributions over clients.

    Args: each number is a distribution over clients, or one number for all.
      population_size: N.
      speed: flops/s of training, which is a small part of what a data sheet promises.
      bandwidth_down, bandwidth_up: bytes/s.
      latency: seconds of each message, either way; None = 0.
      joules_per_flop, joules_per_byte: energy by the work; None = 0.
      compute_watts, radio_watts: energy by the time that it takes; None = 0.
      jitter, availability, ticks_per_second: as in `of_profiles`.
      seed: of the draws.

    Returns: `Devices`; nothing is kept for N clients.

    Raises: ValueError, TypeError for values out of range, and for speeds or bandwidths that may be 0.

    Guarantees: as `of_profiles`; numbers of one client are independent
    (tests/network/test_devices.py::test_numbers_of_a_client_are_independent).

    References: Lai et al. 2022 (FedScale), section 3.2: speeds and bandwidths of phones spread over an order of
    magnitude and more.

    >>> made = heterogeneous(10, speed=1e9, bandwidth_down=1e6, bandwidth_up=1e5)
    >>> made.spend(jax.random.key(0), jnp.arange(1), Load(2e9, 1e6, 1e6))[:3]  # milliseconds
    (Array([1000], dtype=int32), Array([2000], dtype=int32), Array([10000], dtype=int32))
    """
    given: dict = {"speed": speed, "bandwidth_down": bandwidth_down, "bandwidth_up": bandwidth_up, "latency": latency}
    given |= {"joules_per_flop": joules_per_flop, "joules_per_byte": joules_per_byte}
    given |= {"compute_watts": compute_watts, "radio_watts": radio_watts}
    laws = {name: as_distribution(name, 0.0 if law is None else law) for name, law in given.items()}
    for name, law in laws.items():
        if name in ("speed", "bandwidth_down", "bandwidth_up") and not law.least > 0:
            validate.fail(name, "a distribution above 0", law.least, "Nothing would ever arrive.")

    keys = {name: stream(stream(jax.random.key(seed), "devices"), name) for name in laws}

    def profile(ids: Array) -> Profile:
        return Profile(**{name: law.draw(keys[name], ids) for name, law in laws.items()})

    options = {"jitter": jitter, "availability": availability, "ticks_per_second": ticks_per_second}
    return of_profiles(population_size, profile, **options)


def there_at(devices: Devices, ids: Array, seconds: Array) -> Array:
    """[c] bool: who can take part at this time.

    Raises: TypeError for a rule of the user's own that tells another shape or dtype
    (tests/network/test_devices.py::test_functions_of_ones_own).
    """
    rule = devices.availability
    if rule is None:
        return jnp.ones(ids.shape, bool)
    found = rule.at(ids, seconds)
    _expect("devices.availability.at(ids, seconds)", found, ids.shape, bool)
    return found


def absent_after(devices: Devices, ids: Array, began: Clock, spent: Spent, checks: int) -> Array:
    """When clients at work are first seen to be gone: [c] int32 ticks after they began; 2^31 - 1 for who stays.

    Presence is looked up after the download, so often, evenly spaced, during the local work, and on arrival. Who is not
    there on arrival is gone a tick before it.

    Args:
      began: of [c] or [].
      checks: at least 1.

    Guarantees: tests/sampling/time/test_clock.py::test_who_leaves; of asynchronous servers
    tests/algorithms/asynchronous/test_arrivals.py::test_events_are_those_of_a_loop.
    """
    down, compute, up, _ = spent
    parts = [compute // checks * i + compute % checks * i // checks for i in range(checks + 1)]
    moments = jnp.stack([*(down + part for part in parts), down + compute + up])  # [checks + 2, c]
    began = Clock(*(jnp.broadcast_to(x, moments.shape) for x in began))
    seconds = began.moved(moments, devices.ticks_per_second).since(began).seconds
    everyone = jnp.broadcast_to(ids, moments.shape)
    here = there_at(devices, everyone.ravel(), seconds.ravel()).reshape(moments.shape)
    leaves = jnp.where(here, jnp.int32(2**31 - 1), moments).min(0)
    return jnp.where(here.all(0), leaves, jnp.minimum(leaves, spent.total - 1))


def spent_by(devices: Devices, key: Array, ids: Array, load: Load) -> Spent:
    """[c] what clients spend on a round's work and messages.

    Raises: as `there_at`.
    """
    found = devices.spend(stream(key, "devices"), ids, load)
    validate.part("devices.spend(key, ids, load)", found, Spent)
    for name, x in found._asdict().items():
        kind = jnp.floating if name == "joules" else jnp.int32
        _expect(f"devices.spend(key, ids, load).{name}", x, ids.shape, kind)
    return found._replace(joules=found.joules.astype(jnp.float32))  # of another width where JAX counts in 64 bits


def num_saturated(spent: Spent, at_work: Array) -> Array:
    """[] int32: how many of the clients at work have a phase that takes longer than can be counted, or as long.

    Guarantees: tests/laws/test_time.py::test_who_is_too_slow_for_the_clock_is_counted.

    >>> spent = Spent(*jnp.array([[1, 2], [5, MOST_TICKS], [1, 1]]), joules=jnp.zeros(2))
    >>> int(num_saturated(spent, jnp.array([True, True])))
    1
    """
    longest = jnp.maximum(jnp.maximum(spent.down, spent.compute), spent.up)
    return (at_work & (longest >= MOST_TICKS)).sum(dtype=jnp.int32)


def _expect(name: str, found: Array, shape: tuple, kind: type) -> None:
    dtype = jnp.result_type(found)
    if jnp.shape(found) != shape or not jnp.issubdtype(dtype, kind):
        rule = "floats" if kind is jnp.floating else jnp.dtype(kind)
        validate.fail(
            name, f"{rule} of shape {shape}, one for each id", f"{dtype} of shape {jnp.shape(found)}", error=TypeError
        )
