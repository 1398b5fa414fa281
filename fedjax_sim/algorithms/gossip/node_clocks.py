"""Simulated time of nodes that wait for all others, or for their neighbours alone."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.network import Links, load_of
from fedjax_sim.network.devices import SATURATED, check_devices, num_saturated, spent_by
from fedjax_sim.types import Array, Clock, Devices, Load, Metric, PyTree, Work

__all__ = ["BARRIERS", "TIME_METRICS", "NodeTiming", "asked_of", "clocks_after_round", "start_of", "times"]

BARRIERS = ("global", "local")
TIME_METRICS = (
    Metric("simulated_seconds", "seconds of simulated time until the last node was done", "seconds", "last"),
    Metric("first_seconds", "the same of the first node that is up", "seconds", "last"),
    SATURATED,
)


class NodeTiming(NamedTuple):
    """What nodes run on, and whom they wait for."""

    devices: Devices | None  # None = time is not simulated
    barrier: str

    @classmethod
    def checked(cls, devices: Devices | None, barrier: str, population_size: int) -> NodeTiming:
        """Raises ValueError, TypeError for devices of another population, and for another barrier."""
        validate.one_of("barrier", barrier, BARRIERS)
        if devices is None and barrier != "global":
            validate.fail("barrier", "'global' without devices", barrier, "Nobody waits where time is not simulated.")
        if devices is not None:
            check_devices(devices, population_size, "graph's", "nodes")
            if devices.availability is not None:
                hint = "Nodes that are away: network.with_node_failures."
                validate.fail("devices", "devices that are always there", "ones with an availability", hint)
        return cls(devices, barrier)


def start_of(timing: NodeTiming, population_size: int) -> PyTree:
    """The clocks of all nodes at the start, `Clock` of [N]; () where time is not simulated."""
    return () if timing.devices is None else Clock(*jnp.zeros((2, population_size), jnp.int32))


def asked_of(work: Work, num_examples: Array, links: Links, num_bytes: int) -> Load:
    """What a round asks of each node: its local work, and a message to and from each neighbour.

    Args:
      work: of one node. num_examples: [N]. num_bytes: of one message.

    Returns: `Load` of [N].
    """
    sent = links.weights != 0
    given = jnp.zeros(links.up.shape, jnp.int32).at[links.neighbours].add(sent.astype(jnp.int32))
    heard = sent.sum(1, dtype=jnp.int32)
    down, up = (x.astype(jnp.float32) * jnp.float32(num_bytes) for x in (heard, given))
    return load_of(work, num_examples)._replace(bytes_down=down, bytes_up=up)


def clocks_after_round(timing: NodeTiming, key: Array, clock: Clock, links: Links, load: Load) -> tuple[Clock, Array]:
    """The clocks after a round: t_i(k + 1) = max of t_j(k) over those whom node i waits for, plus its own duration.

    With a local barrier a node waits for itself and for those that it hears in this round, with a global one for
    everybody who was at work in an earlier one. Nodes that are down do nothing, and their clocks stand still: a global
    round does not wait for what they miss, and still begins after the last one that they were in.

    Args:
      key: of the round. clock: of [N]. load: of [N].

    Returns: the clocks, and how many nodes are too slow for them (`num_saturated`).

    Guarantees: max-plus in Python integers; a delay spreads one hop a round
    (tests/algorithms/gossip/test_node_clocks.py::test_a_delay_spreads_one_hop_a_round); under a global barrier a round
    lasts as long as its slowest node (::test_a_global_barrier); time changes no number of a run
    (::test_time_changes_no_number).
    """
    devices = timing.devices
    ids = jnp.arange(links.up.shape[0], dtype=jnp.int32)
    spent, passed = spent_by(devices, key, ids, load), clock.seconds.astype(jnp.uint32)  # past 68 years: later
    if timing.barrier == "global":
        seconds = passed.max()
        ticks = jnp.where(passed == seconds, clock.ticks, -1).max()
        waited = Clock(jnp.broadcast_to(seconds.astype(jnp.int32), ids.shape), jnp.broadcast_to(ticks, ids.shape))
    else:
        heard = jnp.where(links.weights != 0, links.neighbours, ids[:, None])
        heard = jnp.concatenate([ids[:, None], heard], 1)
        seconds = passed[heard].max(1)
        ticks = jnp.where(passed[heard] == seconds[:, None], clock.ticks[heard], -1).max(1)
        waited = Clock(seconds.astype(jnp.int32), ticks)
    new = waited.moved(spent.total, devices.ticks_per_second).since(waited)
    after = Clock(*(jnp.where(links.up, x, y) for x, y in zip(new, clock, strict=True)))
    return after, num_saturated(spent, links.up)


def times(timing: NodeTiming, clock: PyTree, up: Array) -> dict[str, Array]:
    """Info of a round: seconds until the first node of those that are up, and the last of all, were done."""
    if timing.devices is None:
        return {}
    seconds = clock.read(timing.devices.ticks_per_second)
    first = jnp.where(up | ~up.any(), seconds, jnp.inf).min()
    return {"simulated_seconds": seconds.max(), "first_seconds": first}
