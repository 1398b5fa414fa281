"""Simulated time of clients that are federations: the duration of the rounds inside of a client.

A round inside lasts as long as its slowest device, and a client's rounds follow one another. Rounds are pure functions
of the client's key: a clock above draws the same cohorts inside, and prices exactly those that will train.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.network.devices import MOST_TICKS, check_devices
from fedjax_sim.population.groups.grouped import Group
from fedjax_sim.prng import fold_in, stream
from fedjax_sim.round.compatibility import check_alone, check_time_inside
from fedjax_sim.round.costs import work_of
from fedjax_sim.sampling.time.cut import spend, unlimited
from fedjax_sim.sampling.time.round_cost import More, Price, price_of
from fedjax_sim.types import Array, Cohort, Devices, Population, PyTree, Star, TimeInside


class _Asked(NamedTuple):
    """The work that the rounds inside of one client ask of its own clients, by their places in the group."""

    ids: Array  # [size] int32, the client's id in the whole population at each place; -1 where the place is empty
    price: Price  # of one round to each place


def time_inside(star: Star, rounds: int, devices: Devices) -> TimeInside:
    """Describes how long the rounds of a federation inside take on the devices of its clients.

    Args:
      star: the federation that each client above is.
      rounds: how many rounds it makes in one round of the level above.
      devices: of all clients of the population that groups are made of, by their ids in that population.

    Raises: ValueError, TypeError for a sampler with a state or a limit of reports, for devices with an availability,
    for clients that others help, and for clients that are federations and do not state their own devices.

    Guarantees: the seconds, joules and utilisation of rounds of edges of unequal size equal NumPy's up to rounding
    (tests/round/test_inner_time.py::test_rounds_inside_by_hand).
    """
    validate.part("devices", devices, Devices)
    if devices.availability is not None:
        hint = "Take heterogeneous(...), say, ([algorithm.edge_devices] in a config); "
        hint += "with_dropout in the edge's sampler loses reports."
        validate.fail("devices", "devices that are always there, inside of a hierarchy", "an availability", hint)
    if jax.tree.leaves(jax.eval_shape(star.sampler.init)):
        hint = "Who is drawn inside must follow from the round's key alone: take uniform, poisson or full."
        validate.fail("sampler", "one without a state, inside of rounds that take time", "one with a state", hint)
    unlimited(star.sampler, "devices", "Arrivals follow from the devices: leave the limit out inside of a hierarchy.")
    check_alone(star.client)
    check_time_inside(star.client, devices)

    def asked(params: PyTree, group: Population, flops_scale: float, bytes_scale: float) -> _Asked:
        if not isinstance(group, Group):
            hint = "Devices belong to clients: population.grouped makes groups that know them."
            rule = "groups that know their clients' own ids (`own_ids`)"
            validate.fail("population", rule, type(group).__name__, hint, TypeError)
        check_devices(devices, group.population.size, "whole population's", "clients inside")
        price = price_of(work_of(star, tree.spec(params), group), flops_scale, bytes_scale)
        return _Asked(group.own_ids(jnp.arange(group.size, dtype=jnp.int32)), price)

    def spent(key: Array, asked: _Asked) -> tuple[Array, Array]:
        def spend_of_member(key, places, load):
            # Devices belong to ids of the whole population; in empty places nobody is invited, and id 0 stands in.
            return devices.spend(key, jnp.maximum(asked.ids[places], 0), load)

        member_devices = devices._replace(population_size=asked.ids.size, spend=spend_of_member)

        def round(total, t):
            # The same key as `as_client_update` gives to its rounds: the cohort drawn here is the one that will train.
            round_key = fold_in(stream(key, "inside"), t)
            cohort, _ = star.sampler.sample(stream(round_key, "sampling"), star.sampler.init())
            cohort = cohort._replace(invited=cohort.invited & (asked.ids[cohort.ids] >= 0))
            price = asked.price
            if star.client.time_inside is not None:
                price = with_rounds_inside(star.client.time_inside, round_key, cohort, price)
            spent_by_members = spend(member_devices, stream(round_key, "sampling"), cohort, price)
            # Both times are at most MOST_TICKS, so that their sum fits in int32.
            round_ticks = jnp.minimum(spent_by_members.total.max(initial=0), MOST_TICKS)
            ticks, joules = total
            return (jnp.minimum(ticks + round_ticks, MOST_TICKS), joules + spent_by_members.joules.sum()), None

        nothing = jnp.int32(0), jnp.float32(0)
        return jax.lax.scan(round, nothing, jnp.arange(rounds))[0]

    return TimeInside(asked, spent, devices.ticks_per_second)


def with_rounds_inside(inside: TimeInside, key: Array, cohort: Cohort, price: Price) -> Price:
    """Adds to the price of a cohort of federations the time and energy of the rounds inside of each of them.

    Args:
      inside: how long the rounds of a client take.
      key: of the round.
      cohort: of federations.
      price: of the cohort, without the rounds inside.
    """
    key_data = engine.client_keys(stream(key, "client"), cohort.ids)  # the keys that `collect` gives to these clients
    keys = jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(key))
    ticks, joules = jax.vmap(inside.spent)(keys, jax.tree.map(lambda x: x[cohort.ids], price.inside))
    # The phases are broadcast, local work, message: rounds inside of a federation are its local work.
    return price._replace(more=More((0, ticks, 0), (0.0, joules, 0.0)))
