"""The work of clients in flight: times and energy, from a model's sending until the message arrives or they leave."""

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

LOOKING = 64  # candidates drawn for each client to be sent work after an arrival, where clients may be away
LOOKING_AGAIN = 4  # the same for each empty place
CHECKS = 8  # moments at which a client's presence is looked up in its local work, as `with_clock` does by default
STAYS = 2**31 - 1  # ticks; stands for a client that does not leave


class Traffic(NamedTuple):
    """A `Traffic` says how clients come and go; all of it is static."""

    devices: Devices
    concurrency: int  # C places
    block: int  # M arrivals that a step takes at most
    buffer_size: int  # K arrivals make a version of the model: M, or 1
    max_staleness: int  # versions; a client whose model is older is stopped
    refill: str  # who is sent work after an arrival: "other" clients or the "same" client
    hazard: Hazard | None = None  # when clients leave while they train; None = they stay

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
        """The number V of versions that are kept; version v is at v mod V.

        A step that makes a version for each arrival has room for as many versions as it may have arrivals. If fewer
        arrive, it writes to that room all the same, where no version is.
        """
        return self.max_staleness + 1 + (self.block if self.buffer_size == 1 else 0)

    @property
    def num_refills(self) -> int:
        """The largest number of empty places filled at the end of a step: all places where clients may leave."""
        return self.concurrency if self.loses else self.block

    @property
    def num_candidates(self) -> int:
        """The number of clients drawn in a step; those of them who are there may be sent work."""
        may_be_away = self.devices.availability is not None
        for_arrivals = (LOOKING if may_be_away else 1) * self.block
        for_empty_places = (LOOKING_AGAIN if may_be_away else 1) * self.num_refills
        return min(for_arrivals + for_empty_places, self.devices.population_size - self.concurrency)


class Begun(NamedTuple):
    """The work that clients were sent, summed over them."""

    sent: Array  # [] int32 models that were sent
    joules: Array  # [] float32 of the clients' work, until their message has arrived or they leave
    saturated: Array  # [] int32 clients who are too slow for the clock
    wasted: Array | None  # [] int32 messages that were on their way when their client left; None = nobody leaves


class Trip(NamedTuple):
    """The work of clients on a model that they may be sent, each [c]; its times are relative to its beginning."""

    ids: Array
    load: Load
    spent: Spent
    present: Array  # bool: the client is sent a model
    # int32 ticks after the beginning until a hazard makes the client leave, `STAYS` if it does not; None = no hazard
    hazard: Array | None

    def ends(self, traffic: Traffic, clock: Clock, start: Array) -> tuple[Array, Array | None]:
        """The times at which messages arrive, and at which clients leave whose message never arrives.

        Args:
          traffic: how clients come and go.
          clock: the time now.
          start: [c] uint32 ticks from now until the work begins; `NEVER_ARRIVES` = it does not begin.

        Returns: two arrays [c] of uint32 ticks from now. The first is until the message arrives, at least one tick
        after the beginning; `NEVER_ARRIVES` without a message. The second is until the client leaves; `NEVER_ARRIVES`
        for a client that stays. It is None where nobody leaves.
        """
        begins = self.present & (start != NEVER_ARRIVES)
        duration = jnp.maximum(self.spent.total.astype(jnp.uint32), 1)
        arrive = jnp.where(begins, later(start, duration), NEVER_ARRIVES)
        if not traffic.loses:
            return arrive, None
        after = self.after(traffic, clock, start)
        leaves = jnp.where(begins & (after != STAYS), later(start, after.astype(jnp.uint32)), NEVER_ARRIVES)
        # A client that leaves has no message that arrives.
        return jnp.where(leaves == NEVER_ARRIVES, arrive, NEVER_ARRIVES), leaves

    def after(self, traffic: Traffic, clock: Clock, start: Array) -> Array:
        """The ticks after the beginning until the client leaves, [c] int32; `STAYS` if its message arrives before.

        Args: as for `ends`.
        """
        after = jnp.full_like(self.ids, STAYS) if self.hazard is None else self.hazard
        if traffic.devices.availability is not None:
            start_or_now = jnp.where(start == NEVER_ARRIVES, 0, start)
            start_clock = advanced(clock, start_or_now, traffic.devices.ticks_per_second)
            after = jnp.minimum(after, absent_after(traffic.devices, self.ids, start_clock, self.spent, CHECKS))
        return jnp.maximum(after, 0)

    def begun(self, traffic: Traffic, key: Array, clock: Clock, start: Array) -> Begun:
        """Sums the work of the clients that begin.

        Args: as for `ends` and `trips`.
        """
        begins = self.present & (start != NEVER_ARRIVES)
        joules = self.spent.joules
        wasted = None
        if traffic.loses:
            after = self.after(traffic, clock, start)
            phases_done = ticks_done(self.spent, after)
            leaves = after != STAYS
            joules_until_leaving = joules_of(phases_done, *priced_by_part(traffic.devices, key, self.ids, (self.load,)))
            joules = jnp.where(leaves, joules_until_leaving, joules)
            # The third phase is the message: it was on its way if any of its ticks were done.
            wasted = (begins & leaves & (phases_done[2] > 0)).sum(dtype=jnp.int32)
        joules = jnp.where(begins, joules, 0).astype(jnp.float32).sum()
        return Begun(begins.sum(dtype=jnp.int32), joules, num_saturated(self.spent, begins), wasted)


def trips(key: Array, traffic: Traffic, load: Callable, ids: Array, present: Array) -> Trip:
    """Makes the trips of clients: their work on a model, with its times and its energy.

    Args:
      key: of the step.
      traffic: how clients come and go.
      load: as in `take_off`.
      ids: [c] int32.
      present: [c] bool, the clients that are sent a model.
    """
    client_load = load(ids)
    spent = spent_by(traffic.devices, key, ids, client_load)
    hazard = None if traffic.hazard is None else leaves_at(traffic.hazard, traffic.devices, key, ids, spent)
    return Trip(ids, client_load, spent, present, hazard)
