"""Simulated time of nodes that wait for all other nodes, or for their neighbours alone, after each round."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.network import Links, load_of
from fedjax_sim.network.devices import SATURATED, check_devices, num_saturated, spent_by
from fedjax_sim.types import Array, Clock, Devices, Load, Metric, PyTree, Work

BARRIERS = ("global", "local")
TIME_METRICS = (
    Metric("simulated_seconds", "seconds of simulated time until the last node was done", "seconds", "last"),
    Metric("first_seconds", "the same of the first node that is up", "seconds", "last"),
    SATURATED,
)


class NodeTiming(NamedTuple):
    """The nodes' devices, and the nodes for which each node waits."""

    devices: Devices | None  # None = time is not simulated
    barrier: str  # "global": a node waits for all nodes; "local": for its neighbours

    @classmethod
    def checked(cls, devices: Devices | None, barrier: str, population_size: int) -> NodeTiming:
        """Makes the timing, after a check of its options.

        Args:
          devices: of the nodes; None: time is not simulated.
          barrier: "global" or "local"; without devices "global" alone.
          population_size: number of nodes, which the devices must have too.

        Raises: ValueError, TypeError for devices of another population, for devices that are not always there, and for
        a word that is no barrier.
        """
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
    """The load of a round on each node: its local work, and a message to and from each neighbour.

    Args:
      work: of one node.
      num_examples: [N].
      links: of the round.
      num_bytes: of one message.

    Returns: `Load` of [N].
    """
    is_used = links.weights != 0
    num_sent = jnp.zeros(links.up.shape, jnp.int32).at[links.neighbours].add(is_used.astype(jnp.int32))
    num_received = is_used.sum(1, dtype=jnp.int32)
    bytes_down, bytes_up = (x.astype(jnp.float32) * jnp.float32(num_bytes) for x in (num_received, num_sent))
    return load_of(work, num_examples)._replace(bytes_down=bytes_down, bytes_up=bytes_up)


def clocks_after_round(timing: NodeTiming, key: Array, clock: Clock, links: Links, load: Load) -> tuple[Clock, Array]:
    """Moves the nodes' clocks on by a round.

    The end of round k + 1 at node i is t_i(k + 1) = max of t_j(k) over the nodes j for which node i waits, plus the
    duration of its own round. With a local barrier a node waits for itself and for the nodes from which it receives a
    message in this round. With a global barrier it waits for all nodes. Nodes that are down do nothing, and their
    clocks stand still. So a global round does not wait for a node that is down in it; it begins after the last round in
    which that node was up.

    Args:
      timing: devices and barrier.
      key: of the round.
      clock: of [N].
      links: of the round.
      load: of [N].

    Returns: (the clocks, [] int32 the number of nodes that are too slow for a clock (`num_saturated`)).

    Guarantees: the clocks are those of max-plus arithmetic in Python integers, and a delay spreads one hop in each
    round (tests/algorithms/gossip/test_node_clocks.py::test_a_delay_spreads_one_hop_a_round); under a global barrier a
    round lasts as long as its slowest node (::test_a_global_barrier); time changes no number of a run
    (::test_time_changes_no_number).
    """
    devices = timing.devices
    assert devices is not None, "clocks move only where time is simulated"
    ids = jnp.arange(links.up.shape[0], dtype=jnp.int32)
    spent = spent_by(devices, key, ids, load)
    # As uint32, a clock past 68 years, whose sign bit is set, is later than all others.
    node_seconds = clock.seconds.astype(jnp.uint32)
    # The latest clock is that of the most seconds, and among equal seconds that of the most ticks.
    if timing.barrier == "global":
        seconds = node_seconds.max()
        ticks = jnp.where(node_seconds == seconds, clock.ticks, -1).max()
        start = Clock(jnp.broadcast_to(seconds.astype(jnp.int32), ids.shape), jnp.broadcast_to(ticks, ids.shape))
    else:
        senders = jnp.where(links.weights != 0, links.neighbours, ids[:, None])
        waits_for = jnp.concatenate([ids[:, None], senders], 1)
        seconds = node_seconds[waits_for].max(1)
        ticks = jnp.where(node_seconds[waits_for] == seconds[:, None], clock.ticks[waits_for], -1).max(1)
        start = Clock(seconds.astype(jnp.int32), ticks)
    end = start.moved(spent.total, devices.ticks_per_second).since(start)
    after = Clock(*(jnp.where(links.up, x, y) for x, y in zip(end, clock, strict=True)))
    return after, num_saturated(spent, links.up)


def times(timing: NodeTiming, clock: PyTree, up: Array) -> dict[str, Array]:
    """The info of a round's time: the seconds at which the last of all nodes and the first node that is up were done.

    Args:
      timing: devices and barrier.
      clock: of [N], after the round.
      up: [N] bool; where nobody is up, all nodes count.
    """
    if timing.devices is None:
        return {}
    seconds = clock.read(timing.devices.ticks_per_second)
    first = jnp.where(up | ~up.any(), seconds, jnp.inf).min()
    return {"simulated_seconds": seconds.max(), "first_seconds": first}
