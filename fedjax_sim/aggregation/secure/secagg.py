"""Secure aggregation: the server gets the sum of the messages of those who stay, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import tree, validate
from fedjax_sim.aggregation.secure.common import (
    SECURE_SUM_METRICS,
    check_majority,
    check_secure_sum_options,
    check_survivors_connected,
    lane_sums,
    luck,
    released_unless_aborted,
    secure_sum_start,
    words,
)
from fedjax_sim.aggregation.secure.cost import secure_sum_cost
from fedjax_sim.aggregation.secure.masks import Circle, Stages, circle, is_aborted, masked, unmasked
from fedjax_sim.aggregation.secure.modular import ModularSum, ring_of
from fedjax_sim.aggregation.secure.ring import Ring
from fedjax_sim.tree import num_values
from fedjax_sim.types import Aggregator, Array, PyTree, Received, Wire

__all__ = ["STEPS", "leaves_before", "left_by", "secure_sum", "stages_of"]

STEPS = ("advertise", "share", "upload", "unmask")


def secure_sum(
    aggregator: Aggregator,
    threshold: int,
    *,
    neighbours: int | None = None,
    dropout: float | Sequence[float] = 0.0,
    min_messages: int | None = None,
    masks: bool = False,
    signed: bool = False,
) -> Aggregator:
    """A modular sum by masked messages, of which the server learns nothing else, with clients that leave at every step.

    Each client adds to its message a mask of its own and one for each neighbour, which that one subtracts. It gives its
    neighbours shares of its secrets. Of each client that uploaded, the server is sent shares of its own mask's seed; of
    each that left before, shares of its key; with `threshold` of them it can take all masks off the sum. With fewer, or
    with fewer than `min_messages` messages, the round is aborted: it is skipped, and of its messages all that anyone
    learns is that too few were left. The clients' metrics, such as `local_loss`, bear no masks.

    Clients of the cohort that do not report, and those whose message is not finite, leave before they advertise keys,
    and before they upload. To a round, who leaves before the upload is a client who did not report: it keeps its state,
    and is in no metric. Each client leaves by a draw of its own; one that is in the cohort twice leaves with both.

    Args:
      aggregator: a `modular_sum`. Its modulus is that of the masks.
      threshold: t, the shares that open a secret; in [1, m] on the complete graph, where a client holds a share of its
        own secrets too. On a circle 2 t > neighbours, t <= neighbours: with fewer, clients that leave could cut the
        circle into parts, and the server would read the sum of each. Fewer than t colluding holders learn nothing.
      neighbours: k, even, of each client on a random circle (Bell et al.); None: all clients of the cohort (Bonawitz et
        al.). Slots that invite nobody are not on it; a round that invites k clients or fewer is aborted.
      dropout: the probability in [0, 1] that a client leaves before a step, for all four steps (advertise keys, share
        secrets, upload, unmask), or one for each.
      min_messages: the least number of messages in a sum; by default the threshold. A distributed noise must be shared
        among no more than these (`cohort_size` of its mechanism).
      masks: draw every mask in the round, add it, and take it off again by what the shares open; for m clients with h
        holders each that is m (h + 1) d random words. False: masks cancel, so they are not drawn; who leaves, what is
        opened, and the sum, are the same integers.
      signed: the server may lie, and is caught by signatures and one more exchange (`real_secure_sum` does it): here
        the bytes that clients send for it, and a threshold of more than half of a secret's holders. False: it is honest
        but curious.

    Returns: an Aggregator with the metrics `aborted_rounds` and `secure_dropouts`, the clients of those who reported
    that left before they uploaded. `observe` shows masked messages, leaves [m, words, ...] uint32. `uplink_bytes`
    are those of a ring's element a number, keys and shares, and `downlink_bytes` those of the model, and of the keys
    and shares of the others who are invited. Who leaves on the way is billed for all of them; those of each step as
    they were sent are the `protocol_bytes` of `real_secure_sum`.

    Raises: ValueError for an aggregator that is no `modular_sum`, an odd number of neighbours, a threshold past the
    number of holders, or not above half of them on a circle and, when the round is built, with `signed`.

    Guarantees: bit for bit the plain modular sum of those who uploaded, for every set of survivors and every dropout at
    every step, with masks drawn or not; an abort below the threshold, and no number
    (tests/aggregation/secure/test_secagg.py); the cohort's order does not matter (::test_order_is_irrelevant), nor do
    empty slots on a circle (::test_empty_slots_change_nothing); who leaves is one who did not report
    (::test_who_leaves_did_not_report), and an aborted round changes nothing (::test_an_aborted_round_changes_nothing);
    the server asks for one secret of a client at most (::test_never_both_secrets); masked messages are uniform on the
    ring, and whoever leaves, what the server can take masks off is one sum (tests/aggregation/secure/test_masks.py::
    test_the_server_can_open_one_sum_only).

    References: Bonawitz et al. 2017, section 4 and figure 4; Bell, Bonawitz, Gascon, Lepoint and Raykova 2020.

    >>> from fedjax_sim.aggregation import modular_sum
    >>> made = secure_sum(modular_sum(10.0, modulus_bits=20), 6, dropout=0.1)
    >>> made.facts.modulus, made.facts.sensitivity, made.facts.least
    (1048576, 0.1, 6)
    """
    cumulative, least = _checked(aggregator, threshold, neighbours, dropout, min_messages, masks, signed)
    ring = ring_of(aggregator)

    def stays(key, round):
        return leaves_before(key, round.cohort.ids, cumulative) > 2

    def init(update_spec, num_slots):
        _check_slots(num_slots, threshold, neighbours, signed)
        carry = secure_sum_start(aggregator, update_spec, num_slots, threshold=threshold, min_messages=least)
        return {"sum": carry, "uploaded": jnp.zeros(num_slots, jnp.int32)}

    def accumulate(key, round, carry, received):
        num_slots = carry["uploaded"].shape[0]
        here = _uploads(key, received, cumulative)
        came = carry["uploaded"].at[jnp.where(here, received.slots, num_slots)].add(1, mode="drop")
        if not masks:
            received = received._replace(weights=jnp.where(here, received.weights, 0))
            return {"sum": aggregator.accumulate(key, round, carry["sum"], received), "uploaded": came}
        sent = masked_messages(key, round, received)
        lanes = jax.tree.map(lambda old, x: old + lane_sums(ring, here, x), carry["sum"].lanes, sent)
        return {"sum": ModularSum(lanes, carry["sum"].messages + here.sum(dtype=jnp.int32)), "uploaded": came}

    def masked_messages(key, round, received):
        num_slots = round.cohort.ids.shape[0]
        graph = circle(key, num_slots, neighbours, round)
        shared = stages_of(key, round.cohort.ids, round.cohort.reported, round.cohort.reported, cumulative).shared
        return masked(ring, key, graph, shared, jnp.minimum(received.slots, num_slots - 1), received.updates)

    def finalize(key, round, carry):
        uploaded, total = carry["uploaded"] > 0, carry["sum"]
        graph = circle(key, uploaded.shape[0], neighbours, round)
        stages = stages_of(key, round.cohort.ids, round.cohort.reported, uploaded, cumulative)
        if masks:
            total = total._replace(lanes=_opened(ring, key, graph, stages, threshold, total.lanes))
        left = round.cohort.reported & (leaves_before(key, round.cohort.ids, cumulative) < 3)
        aborted = is_aborted(graph, stages, threshold, least)
        return released_unless_aborted(aborted, *aggregator.finalize(key, round, total), left)

    def view(key, round, received):
        here = _uploads(key, received, cumulative)
        sent = jax.tree.map(lambda x: tree.where(here, x, 0), masked_messages(key, round, received))
        return sent, jnp.where(here, received.weights, 0)

    def cost_of(values, num_invited):  # a smaller circle aborts the round, and costs no less before that
        num_clients = num_invited if neighbours is None else max(num_invited, neighbours + 1)
        return secure_sum_cost(num_clients, values, ring.bits, neighbours=neighbours, signed=signed)

    def wire(update_spec, wire, num_invited):
        values = num_values(update_spec)
        cost = cost_of(values, num_invited)
        return Wire(values, values * ring.bits, cost.client_up_bits - values * ring.bits)

    def wire_down(update_spec, wire, num_invited):
        return wire.with_side(cost_of(num_values(update_spec), num_invited).client_down_bits)

    leaves = stays if cumulative[2] > 0 else None
    made = aggregator._replace(init=init, accumulate=accumulate, finalize=finalize, stays=leaves, view=view)
    return made.stating(
        metrics=aggregator.facts.metrics + SECURE_SUM_METRICS, least=least, wire=wire, wire_down=wire_down
    )


def stages_of(key: Array, ids: Array, reported: Array, uploaded: Array, cumulative: np.ndarray) -> Stages:
    """`Stages` of a round, by each client's own draw.

    Guarantees: each step is left with its probability
    (tests/aggregation/secure/test_secagg.py::test_clients_leave_with_the_stated_probability).
    """
    left = leaves_before(key, ids, cumulative)
    return Stages(reported & (left > 1), uploaded, uploaded & (left > 3))


def leaves_before(key: Array, ids: Array, cumulative: np.ndarray) -> Array:
    """[c] int32: the step before whose end a client leaves, an index of `STEPS`; 4 = it stays."""
    drawn = luck(key, ids, "secure_dropout")
    return (drawn[:, None] >= jnp.asarray(cumulative, jnp.float32)[None]).sum(1, dtype=jnp.int32)


def _uploads(key: Array, received: Received, cumulative: np.ndarray) -> Array:
    """[c] bool: whose message comes."""
    return (received.weights > 0) & (leaves_before(key, received.ids, cumulative) > 2)


def _opened(ring: Ring, key: Array, graph: Circle, stages: Stages, threshold: int, lanes: PyTree) -> PyTree:
    """Lanes of `modular_sum` without masks, from sums of the lanes of masked messages."""
    found = unmasked(ring, key, graph, stages, threshold, jax.tree.map(partial(words, ring), lanes))
    return jax.tree.map(lambda x: jnp.stack(ring.lanes(tuple(x))), found)


def _checked(aggregator, threshold, neighbours, dropout, min_messages, masks, signed) -> tuple[np.ndarray, int]:
    """(the probability that a client has left before each step's end [4], the least number of messages)."""
    check_secure_sum_options(aggregator, min_messages, masks, "Masks cancel in a ring of integers only.")
    validate.integer("threshold", threshold)
    validate.truth("signed", signed)
    if neighbours is not None:
        validate.integer("neighbours", neighbours, 2)
        if neighbours % 2:
            validate.fail("neighbours", "an even number, half to each side", neighbours)
        if threshold > neighbours:
            validate.fail("threshold", f"at most the {neighbours} neighbours who hold shares", threshold)
        check_survivors_connected(threshold, neighbours)
    return left_by(dropout), threshold if min_messages is None else min_messages


def _check_slots(num_slots: int, threshold: int, neighbours: int | None, signed: bool) -> None:
    if neighbours is not None and neighbours >= num_slots:
        hint = "neighbours=None makes all of them share with each other."
        validate.fail("neighbours", f"fewer than the {num_slots} slots of the cohort", neighbours, hint)
    if signed and neighbours is None:
        check_majority(threshold, num_slots)


def left_by(dropout: float | Sequence[float]) -> np.ndarray:
    """[4] float64: the probability that a client has left before each step's end.

    Raises: ValueError, TypeError for what is neither a probability nor one for each of `STEPS`.
    """
    each = [dropout] * len(STEPS) if np.ndim(dropout) == 0 else list(dropout)
    if len(each) != len(STEPS):
        validate.fail("dropout", f"a probability, or one for each of {', '.join(STEPS)}", dropout)
    for i, probability in enumerate(each):
        validate.in_range(f"dropout[{i}]", probability, 0, 1)
    return 1 - np.cumprod([1 - x for x in each])
