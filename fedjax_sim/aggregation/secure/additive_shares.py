"""Sums by multi-party computation: additive shares of each message, for servers that do not all collude."""

from __future__ import annotations

from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import prng, tree, validate
from fedjax_sim.aggregation.secure.common import (
    SECURE_SUM_METRICS,
    check_secure_sum_options,
    lane_sums,
    luck,
    released_unless_aborted,
    secure_sum_start,
)
from fedjax_sim.aggregation.secure.modular import ModularSum, ring_of
from fedjax_sim.aggregation.secure.ring import Element, Ring
from fedjax_sim.tree import num_values
from fedjax_sim.types import Aggregator, Array, PyTree, Wire

__all__ = ["additive_shares", "shares_of"]

MOST_SERVERS = 64


def additive_shares(
    aggregator: Aggregator,
    num_servers: int,
    *,
    dropout: float = 0.0,
    min_messages: int | None = None,
    honest_server: int = 0,
    masks: bool = False,
) -> Aggregator:
    """A modular sum by several servers, each of which sees one uniform share of every message.

    A client sends S - 1 servers uniform elements of the ring, and the last one its message minus these. Every server
    adds what it got, and the sum of their sums is the sum of the messages. Any S - 1 servers that collude learn the sum
    alone, whatever they can compute. All servers must answer: none may drop out.

    Args:
      aggregator: a `modular_sum`. Its modulus is that of the shares.
      num_servers: S, in [2, 64].
      dropout: the probability in [0, 1] that not all servers get a client's shares; all leave that client out, who
        counts as one who did not report; one that is in the cohort twice is left out with both.
      min_messages: fewer messages than this abort the round: it is skipped. None: 1 with a dropout; without, none
        needed, for every message that arrives is in the sum.
      honest_server: in [0, S): `observe` shows the shares of all servers but this one.
      masks: draw the shares in the round and add them apart, S m d random elements. False: they cancel, so they are not
        drawn; the sum is the same integers.

    Returns: an Aggregator with the metrics `aborted_rounds` and `secure_dropouts`, the clients left out of those who
    reported. `observe` shows leaves [m, S - 1, words, ...] uint32. A message costs S elements of the ring a number.

    Raises: ValueError for an aggregator that is no `modular_sum`, and for servers out of range.

    Guarantees: bit for bit the plain modular sum of those whose shares arrive, for every ring and S, shares drawn or
    not (tests/aggregation/secure/test_additive_shares.py::test_the_sum_is_exact); what S - 1 servers see is uniform
    (::test_views_are_uniform) and tells nothing of the message (::test_views_do_not_know_the_message).

    References: Bogdanov, Laur and Willemson 2008 (Sharemind), section 3; Corrigan-Gibbs and Boneh 2017 (Prio), section
    3, without its proofs.

    >>> from fedjax_sim.aggregation import modular_sum
    >>> made = additive_shares(modular_sum(10.0, modulus_bits=20), 3)
    >>> made.facts.wire(jax.ShapeDtypeStruct((100,), jnp.int32), None, 10).bits
    6000
    """
    least = _checked(aggregator, num_servers, dropout, min_messages, honest_server, masks)
    ring = ring_of(aggregator)

    def init(update_spec, num_slots):
        carry = secure_sum_start(aggregator, update_spec, num_slots, min_messages=least)
        if not masks:
            return carry
        return carry._replace(lanes=jax.tree.map(lambda x: jnp.zeros((num_servers, *x.shape), x.dtype), carry.lanes))

    def stays(key, round):
        return ~_lost(key, round.cohort.ids, dropout)

    def accumulate(key, round, carry, received):
        here = (received.weights > 0) & ~_lost(key, received.ids, dropout)
        if not masks:
            received = received._replace(weights=jnp.where(here, received.weights, 0))
            return aggregator.accumulate(key, round, carry, received)
        shares = shares_of(ring, key, num_servers, received.slots, received.updates)
        each = jax.vmap(partial(lane_sums, ring, here), in_axes=1)  # server
        lanes = jax.tree.map(lambda old, x: old + each(x), carry.lanes, shares)
        return ModularSum(lanes, carry.messages + here.sum(dtype=jnp.int32))

    def finalize(key, round, total):
        if masks:
            total = total._replace(lanes=jax.tree.map(partial(_together, ring), total.lanes))
        aborted = total.messages < (least or 0)
        left = round.cohort.reported & _lost(key, round.cohort.ids, dropout)
        return released_unless_aborted(aborted, *aggregator.finalize(key, round, total), left)

    def view(key, round, received):
        here = (received.weights > 0) & ~_lost(key, received.ids, dropout)
        seen = np.delete(np.arange(num_servers), honest_server)
        shares = shares_of(ring, key, num_servers, received.slots, received.updates)
        return jax.tree.map(lambda x: tree.where(here, x[:, seen], 0), shares), jnp.where(here, received.weights, 0)

    def wire(update_spec, wire, num_slots):
        values = num_values(update_spec)
        return Wire(values, num_servers * values * ring.bits)

    leaves = stays if dropout > 0 else None
    made = aggregator._replace(init=init, accumulate=accumulate, finalize=finalize, stays=leaves, view=view)
    return made.stating(metrics=aggregator.facts.metrics + SECURE_SUM_METRICS, least=least, wire=wire)


def _lost(key: Array, ids: Array, dropout: float) -> Array:
    """[c] bool: whose shares do not reach all servers."""
    return luck(key, ids, "share_dropout") < dropout


def _together(ring: Ring, lanes: Array) -> Array:
    """[lanes, ...] of the sum of the servers' sums, [S, lanes, ...]."""
    return jnp.stack(ring.lanes(reduce(ring.add, [ring.gathered(tuple(x)) for x in lanes])))


def shares_of(ring: Ring, key: Array, num_servers: int, slots: Array, messages: PyTree) -> PyTree:
    """The shares of messages: S uniform elements of the ring that add up to each number.

    Args:
      slots: [c] int32; a slot's shares depend on the key, the slot and its message.
      messages: leaves [c, ...] int32.

    Returns: the structure of messages, leaves [c, S, words, ...] uint32.

    Guarantees: tests/aggregation/secure/test_additive_shares.py::test_shares_add_up.
    """
    leaves, structure = jax.tree.flatten(messages)
    key = prng.stream(key, "additive_shares")

    def one(slot, *numbers):
        own = jax.random.fold_in(key, slot)
        return [_shares(ring, jax.random.fold_in(own, i), num_servers, x) for i, x in enumerate(numbers)]

    return structure.unflatten(jax.vmap(one)(slots, *leaves))


def _shares(ring: Ring, key: Array, num_servers: int, number: Array) -> Array:
    """[S, words, ...]: the last is the number minus the others."""
    drawn: list[Element] = [ring.draw(jax.random.fold_in(key, i), number.shape) for i in range(num_servers - 1)]
    last = reduce(ring.add, map(ring.negative, drawn), ring.of(number))
    return jnp.stack([jnp.stack(x) for x in (*drawn, last)])


def _checked(aggregator, num_servers, dropout, min_messages, honest_server, masks) -> int | None:
    """The least number of messages of a sum."""
    check_secure_sum_options(aggregator, min_messages, masks, "Shares are uniform in a ring of integers only.")
    validate.integer("num_servers", num_servers, 2, MOST_SERVERS)
    validate.integer("honest_server", honest_server, 0, num_servers - 1)
    validate.in_range("dropout", dropout, 0, 1)
    return 1 if min_messages is None and dropout > 0 else min_messages
