"""What clients do with a model that an asynchronous server sends them, until their message arrives or they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from fedjax_sim.algorithms.asynchronous.clock_ticks import NEVER_ARRIVES, advanced, later
from fedjax_sim.network import Hazard
from fedjax_sim.network.devices import absent_after, num_saturated, spent_by
from fedjax_sim.sampling.time.cut import joules_of, priced_by_part, ticks_done
from fedjax_sim.sampling.time.hazard import leaves_at
from fedjax_sim.types import Array, Clock, Devices, Load, Spent

__all__ = ["LOOKING", "Begun", "Traffic", "Trip", "trips"]

LOOKING = 64  # clients drawn for each who is to be sent work after an arrival, where they may not be there
LOOKING_AGAIN = 4  # the same for each empty place
CHECKS = 8  # of a client's presence during its local work, as `with_clock` makes by default
STAYS = 2**31 - 1  # ticks


class Traffic(NamedTuple):
    """How clients come and go; all static."""

    devices: Devices
    concurrency: int  # C places
    block: int  # M arrivals that a step takes at most
    buffer_size: int  # K arrivals make a version of the model: M, or 1
    max_staleness: int
    refill: str  # "other" or "same"
    hazard: Hazard | None = None

    @property
    def loses(self) -> bool:
        """Whether a client may leave before its message has arrived."""
        return self.devices.availability is not None or self.hazard is not None

    @property
    def waits(self) -> bool:
        """Whether a client that arrived is sent the next version, which is made at the step's end."""
        return self.refill == "same" and self.buffer_size > 1

    @property
    def num_models(self) -> int:
        """Versions that are kept, version v at v mod this. Where a step makes a version for each arrival, it may write
        as many places as a step has arrivals, also those of versions that it does not make."""
        return self.max_staleness + 1 + (self.block if self.buffer_size == 1 else 0)

    @property
    def num_refills(self) -> int:
        """Empty places that are filled at the end of a step, at most: all of them where clients may leave."""
        return self.concurrency if self.loses else self.block

    @property
    def num_candidates(self) -> int:
        """Clients drawn in a step, of which those who are there are sent work."""
        away = self.devices.availability is not None
        drawn = (LOOKING if away else 1) * self.block + (LOOKING_AGAIN if away else 1) * self.num_refills
        return min(drawn, self.devices.population_size - self.concurrency)


class Begun(NamedTuple):
    """The work that clients were sent, summed over them."""

    sent: Array  # [] int32 models
    joules: Array  # [] float32 of all that they do, until their message has arrived or they leave
    saturated: Array  # [] int32 clients too slow for the clock
    wasted: Array | None  # [] int32 messages on their way when their client leaves; None = nobody leaves


class Trip(NamedTuple):
    """What clients do with a model that they are sent, each [c]; its moments follow from when it begins."""

    ids: Array
    load: Load
    spent: Spent
    present: Array  # bool: who is sent one
    hazard: Array | None  # int32 ticks after the beginning until a hazard makes it leave, `STAYS` for who does not

    def ends(self, traffic: Traffic, clock: Clock, start: Array) -> tuple[Array, Array | None]:
        """([c] uint32 ticks from now until the message is there, at least one after the beginning; `NEVER_ARRIVES`
        without any, and until the client leaves, `NEVER_ARRIVES` for who stays; None where nobody leaves.)

        Args:
          clock: now. start: [c] uint32 ticks from now until it begins; `NEVER_ARRIVES` = it does not.
        """
        began = self.present & (start != NEVER_ARRIVES)
        arrive = jnp.where(began, later(start, jnp.maximum(self.spent.total.astype(jnp.uint32), 1)), NEVER_ARRIVES)
        if not traffic.loses:
            return arrive, None
        after = self.after(traffic, clock, start)
        leaves = jnp.where(began & (after != STAYS), later(start, after.astype(jnp.uint32)), NEVER_ARRIVES)
        return jnp.where(leaves == NEVER_ARRIVES, arrive, NEVER_ARRIVES), leaves

    def after(self, traffic: Traffic, clock: Clock, start: Array) -> Array:
        """[c] int32 ticks after the beginning until the client leaves; `STAYS` if its message arrives before."""
        after = jnp.full_like(self.ids, STAYS) if self.hazard is None else self.hazard
        if traffic.devices.availability is not None:
            began = advanced(clock, jnp.where(start == NEVER_ARRIVES, 0, start), traffic.devices.ticks_per_second)
            after = jnp.minimum(after, absent_after(traffic.devices, self.ids, began, self.spent, CHECKS))
        return jnp.maximum(after, 0)

    def begun(self, traffic: Traffic, key: Array, clock: Clock, start: Array) -> Begun:
        """Of those that begin; arguments as for `ends` and `trips`."""
        began = self.present & (start != NEVER_ARRIVES)
        joules, wasted = self.spent.joules, None
        if traffic.loses:
            after = self.after(traffic, clock, start)
            done, lost = ticks_done(self.spent, after), after != STAYS
            part = joules_of(done, *priced_by_part(traffic.devices, key, self.ids, (self.load,)))
            joules = jnp.where(lost, part, joules)
            wasted = (began & lost & (done[2] > 0)).sum(dtype=jnp.int32)
        joules = jnp.where(began, joules, 0).astype(jnp.float32).sum()
        return Begun(began.sum(dtype=jnp.int32), joules, num_saturated(self.spent, began), wasted)


def trips(key: Array, traffic: Traffic, load: Callable, ids: Array, present: Array) -> Trip:
    """What clients `ids` do with a model, if they are `present` [c] bool.

    Args:
      key: of the step. load: as in `take_off`.
    """
    asked = load(ids)
    spent = spent_by(traffic.devices, key, ids, asked)
    hazard = None if traffic.hazard is None else leaves_at(traffic.hazard, traffic.devices, key, ids, spent)
    return Trip(ids, asked, spent, present, hazard)
