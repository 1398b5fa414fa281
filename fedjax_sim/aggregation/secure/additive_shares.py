"""`additive_shares` sums messages by multi-party computation, with several servers that do not all collude."""

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
    """Several servers compute a modular sum, and each server sees only a uniform share of every message.

    A client sends uniform elements of the ring to S - 1 servers, and its message minus these elements to the last
    server. Every server adds its shares, and the sum of the servers' sums is the sum of the messages. Any S - 1 servers
    that collude learn only the sum, whatever they can compute. All servers must answer: no server may drop out.

    Args:
      aggregator: a `modular_sum`. The shares have its modulus.
      num_servers: S, in [2, 64].
      dropout: the probability in [0, 1] that some server does not receive a client's shares. All servers then leave the
        client out, and it counts as a client that did not report. Of a client that is in the cohort twice, both
        messages are left out.
      min_messages: a round with fewer messages is aborted, which skips it. None: 1 if `dropout` is positive; without
        dropout no number is required, since every message that arrives is in the sum.
      honest_server: in [0, S): `observe` shows the shares of all servers but this one.
      masks: True: the round draws the shares and adds them separately, S m d random elements. False: shares are not
        drawn, since they cancel; the sum is the same integers.

    Returns: an Aggregator with the metrics `aborted_rounds` and `secure_dropouts`; the latter counts the clients that
    reported and were left out. `observe` shows leaves [m, S - 1, words, ...] uint32. A message costs S elements of the
    ring for each of its numbers.

    Raises: ValueError for an aggregator that is no `modular_sum`, and for a number of servers out of range.

    Guarantees:
      - bit for bit the plain modular sum of the clients whose shares arrive, for every ring and S, shares drawn or not
        (tests/aggregation/secure/test_additive_shares.py::test_the_sum_is_exact)
      - what S - 1 servers see is uniform (::test_views_are_uniform), and does not depend on the message
        (::test_views_do_not_know_the_message)

    References: Bogdanov, Laur and Willemson 2008 (Sharemind), section 3; Corrigan-Gibbs and Boneh 2017 (Prio), section
    3, without its proofs.

    >>> from fedjax_sim.aggregation import modular_sum
    >>> three_servers = additive_shares(modular_sum(10.0, modulus_bits=20), 3)
    >>> three_servers.facts.wire(jax.ShapeDtypeStruct((100,), jnp.int32), None, 10).bits
    6000
    """
    least = _checked(
        aggregator,
        num_servers,
        dropout=dropout,
        min_messages=min_messages,
        honest_server=honest_server,
        masks=masks,
    )
    ring = ring_of(aggregator)

    def init(update_spec, num_slots):
        carry = secure_sum_start(aggregator, update_spec, num_slots, min_messages=least)
        if not masks:
            return carry
        lanes_of_servers = jax.tree.map(lambda x: jnp.zeros((num_servers, *x.shape), x.dtype), carry.lanes)
        return carry._replace(lanes=lanes_of_servers)

    def stays(key, round):
        return ~_lost(key, round.cohort.ids, dropout)

    def accumulate(key, round, carry, received):
        is_in_sum = (received.weights > 0) & ~_lost(key, received.ids, dropout)
        if not masks:
            received = received._replace(weights=jnp.where(is_in_sum, received.weights, 0))
            return aggregator.accumulate(key, round, carry, received)
        shares = shares_of(ring, key, num_servers, received.slots, received.updates)
        sums_of_servers = jax.vmap(partial(lane_sums, ring, is_in_sum), in_axes=1)  # over the axis of servers
        lanes = jax.tree.map(lambda old, x: old + sums_of_servers(x), carry.lanes, shares)
        return ModularSum(lanes, carry.messages + is_in_sum.sum(dtype=jnp.int32))

    def finalize(key, round, total):
        if masks:
            total = total._replace(lanes=jax.tree.map(partial(_sum_over_servers, ring), total.lanes))
        is_aborted = total.messages < (least or 0)
        has_dropped_out = round.cohort.reported & _lost(key, round.cohort.ids, dropout)
        update, metrics = aggregator.finalize(key, round, total)
        return released_unless_aborted(is_aborted, update, metrics, has_dropped_out)

    def view(key, round, received):
        is_in_sum = (received.weights > 0) & ~_lost(key, received.ids, dropout)
        colluding_servers = np.delete(np.arange(num_servers), honest_server)
        shares = shares_of(ring, key, num_servers, received.slots, received.updates)
        shown = jax.tree.map(lambda x: tree.where(is_in_sum, x[:, colluding_servers], 0), shares)
        return shown, jnp.where(is_in_sum, received.weights, 0)

    def wire(update_spec, wire, num_slots):
        values = num_values(update_spec)
        return Wire(values, num_servers * values * ring.bits)

    stays_or_none = stays if dropout > 0 else None
    hidden = aggregator._replace(init=init, accumulate=accumulate, finalize=finalize, stays=stays_or_none, view=view)
    return hidden.stating(metrics=aggregator.facts.metrics + SECURE_SUM_METRICS, least=least, wire=wire)


def _lost(key: Array, ids: Array, dropout: float) -> Array:
    """Returns the clients whose shares do not reach all servers, [c] bool."""
    return luck(key, ids, "share_dropout") < dropout


def _sum_over_servers(ring: Ring, lanes: Array) -> Array:
    """[lanes, ...] of the sum of the servers' sums, whose lanes are [S, lanes, ...]."""
    sums_of_servers = [ring.gathered(tuple(x)) for x in lanes]
    return jnp.stack(ring.lanes(reduce(ring.add, sums_of_servers)))


def shares_of(ring: Ring, key: Array, num_servers: int, slots: Array, messages: PyTree) -> PyTree:
    """Splits messages into shares: S uniform elements of the ring that add up to each number.

    Args:
      ring: of the shares.
      key: of the round.
      num_servers: S.
      slots: [c] int32; a slot's shares depend on the key, the slot and its message.
      messages: leaves [c, ...] int32.

    Returns: the structure of messages, leaves [c, S, words, ...] uint32.

    Guarantees: the shares of a number are elements of the ring, and their sum is the number modulo the ring's modulus
    (tests/aggregation/secure/test_additive_shares.py::test_shares_add_up).
    """
    leaves, structure = jax.tree.flatten(messages)
    key = prng.stream(key, "additive_shares")

    def shares_of_slot(slot, *message_leaves):
        slot_key = prng.fold_in(key, slot)
        return [_shares(ring, prng.fold_in(slot_key, i), num_servers, x) for i, x in enumerate(message_leaves)]

    return structure.unflatten(jax.vmap(shares_of_slot)(slots, *leaves))


def _shares(ring: Ring, key: Array, num_servers: int, number: Array) -> Array:
    """Returns S - 1 uniform elements, and the number minus these, [S, words, ...]."""
    uniform: list[Element] = [ring.draw(prng.fold_in(key, i), number.shape) for i in range(num_servers - 1)]
    last = reduce(ring.add, map(ring.negative, uniform), ring.of(number))
    return jnp.stack([jnp.stack(x) for x in (*uniform, last)])


def _checked(
    aggregator: Aggregator,
    num_servers: int,
    *,
    dropout: float,
    min_messages: int | None,
    honest_server: int,
    masks: bool,
) -> int | None:
    """Checks the options of `additive_shares`.

    Args: as for `additive_shares`.

    Returns: the least number of messages of a sum; None if no number is required.
    """
    check_secure_sum_options(aggregator, min_messages, masks, "Shares are uniform in a ring of integers only.")
    validate.integer("num_servers", num_servers, 2, MOST_SERVERS)
    validate.integer("honest_server", honest_server, 0, num_servers - 1)
    validate.in_range("dropout", dropout, 0, 1)
    return 1 if min_messages is None and dropout > 0 else min_messages
