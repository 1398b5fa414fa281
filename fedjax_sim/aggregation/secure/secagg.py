"""`secure_sum` simulates secure aggregation: the server learns the sum of the uploaded messages, or nothing."""

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

STEP_NAMES = ("advertise", "share", "upload", "unmask")


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
    """The server computes a modular sum of masked messages, and learns nothing else about them (secure aggregation).

    Each client adds to its message a mask of its own, and for each neighbour a mask that the neighbour subtracts. It
    gives its neighbours shares of its two secrets. After the uploads, the server asks for shares of one secret of each
    client: of a client that uploaded, the seed of its own mask; of a client that left before, its key. With `threshold`
    shares of each, the server removes all masks from the sum.

    If fewer than `threshold` shares of a needed secret are sent, or fewer than `min_messages` messages are uploaded,
    the round is aborted. It is skipped, and the server learns only that too few clients finished. Metrics of the
    clients, such as `local_loss`, are not masked.

    Clients may leave at every step. A client of the cohort that does not report leaves before it advertises keys, and a
    client whose message is not finite leaves before it uploads. A client that leaves before the upload counts as a
    client that did not report: it keeps its state, and is in no metric. Whether a client leaves is drawn by its id, so
    a client that is in the cohort twice leaves from both slots.

    Args:
      aggregator: a `modular_sum`. Masks have its modulus.
      threshold: t, the shares that open a secret; fewer than t colluding holders learn nothing. On the complete graph t
        is in [1, m], and a client also holds a share of its own secrets. On a circle t is at most `neighbours`, and
        2 t > neighbours: with a smaller t, clients that leave could cut the circle into parts, and the server would
        read the sum of each part.
      neighbours: k, even: each client shares with k neighbours on a random circle (Bell et al.). Slots that invite
        nobody are not on the circle, and a round that invites k clients or fewer is aborted. None: each client shares
        with all clients of the cohort (Bonawitz et al.).
      dropout: the probability in [0, 1] that a client leaves before a step: a number for all four steps (advertise
        keys, share secrets, upload, unmask), or four numbers.
      min_messages: the least number of messages in a sum; None = the threshold. Noise that clients add in parts must be
        split among at most this many clients (`cohort_size` of its mechanism).
      masks: True: draw every mask in the round, add it, and remove it with the opened secrets; for m clients with h
        holders each these are m (h + 1) d random words. False: masks are not drawn, since they cancel. Who leaves, what
        is opened, and the sum are the same.
      signed: True: the server may lie, and is caught by signatures and one more exchange. `real_secure_sum` runs them;
        here they add the bytes that clients send, and require a threshold of more than half of a secret's holders.
        False: the server is honest but curious.

    Returns: an Aggregator with the metrics `aborted_rounds` and `secure_dropouts`; the latter counts the clients that
    reported and left before they uploaded. `observe` shows masked messages, leaves [m, words, ...] uint32.

    `uplink_bytes` counts an element of the ring for each number, keys and shares. `downlink_bytes` counts the model,
    and the keys and shares of the other invited clients. A client that leaves on the way is counted as if it sent and
    received everything; the bytes sent in each step are the `protocol_bytes` of `real_secure_sum`.

    Raises: ValueError for an aggregator that is no `modular_sum`, an odd number of neighbours, and a threshold above
      the number of holders; for a threshold of at most half of the holders on a circle and, when the round is built,
      with `signed`.

    Guarantees:
      - the sum is, bit for bit, the plain modular sum of the clients that uploaded, for every set of survivors and
        every dropout at every step, with masks drawn or not; below the threshold the round aborts, and gives no number
        (tests/aggregation/secure/test_secagg.py)
      - the order of the cohort does not matter (::test_order_is_irrelevant), nor do empty slots on a circle
        (::test_empty_slots_change_nothing)
      - a client that leaves counts as a client that did not report (::test_who_leaves_did_not_report), and an aborted
        round changes nothing (::test_an_aborted_round_changes_nothing)
      - the server asks for at most one secret of a client (::test_never_both_secrets)
      - masked messages are uniform on the ring, and whoever leaves, the server can remove the masks from one sum only
        (tests/aggregation/secure/test_masks.py::test_the_server_can_open_one_sum_only)

    References: Bonawitz et al. 2017, section 4 and figure 4; Bell, Bonawitz, Gascon, Lepoint and Raykova 2020.

    >>> from fedjax_sim.aggregation import modular_sum
    >>> masked_sum = secure_sum(modular_sum(10.0, modulus_bits=20), 6, dropout=0.1)
    >>> masked_sum.facts.modulus, masked_sum.facts.sensitivity, masked_sum.facts.least
    (1048576, 0.1, 6)
    """
    cumulative, least = _checked(
        aggregator,
        threshold,
        neighbours=neighbours,
        dropout=dropout,
        min_messages=min_messages,
        masks=masks,
        signed=signed,
    )
    ring = ring_of(aggregator)

    def stays(key, round):
        return leaves_before(key, round.cohort.ids, cumulative) > 2  # not before the end of the upload, `STEP_NAMES[2]`

    def init(update_spec, num_slots):
        _check_slots(num_slots, threshold, neighbours, signed)
        carry = secure_sum_start(aggregator, update_spec, num_slots, threshold=threshold, min_messages=least)
        return {"sum": carry, "uploaded": jnp.zeros(num_slots, jnp.int32)}

    def accumulate(key, round, carry, received):
        num_slots = carry["uploaded"].shape[0]
        does_upload = _uploads(key, received, cumulative)
        # Clients that do not upload are written to a slot past the end, which is dropped.
        uploaded_slots = jnp.where(does_upload, received.slots, num_slots)
        uploaded = carry["uploaded"].at[uploaded_slots].add(1, mode="drop")
        if not masks:
            received = received._replace(weights=jnp.where(does_upload, received.weights, 0))
            return {"sum": aggregator.accumulate(key, round, carry["sum"], received), "uploaded": uploaded}
        sent = masked_messages(key, round, received)
        lanes = jax.tree.map(lambda old, x: old + lane_sums(ring, does_upload, x), carry["sum"].lanes, sent)
        total = ModularSum(lanes, carry["sum"].messages + does_upload.sum(dtype=jnp.int32))
        return {"sum": total, "uploaded": uploaded}

    def masked_messages(key, round, received):
        num_slots = round.cohort.ids.shape[0]
        graph = circle(key, num_slots, neighbours, round)
        reported = round.cohort.reported
        shared = stages_of(key, round.cohort.ids, reported, reported, cumulative).shared
        slots = jnp.minimum(received.slots, num_slots - 1)  # slots of padding are past the end; they never upload
        return masked(ring, key, graph, received.updates, shared=shared, slots=slots)

    def finalize(key, round, carry):
        uploaded = carry["uploaded"] > 0
        total = carry["sum"]
        graph = circle(key, uploaded.shape[0], neighbours, round)
        stages = stages_of(key, round.cohort.ids, round.cohort.reported, uploaded, cumulative)
        if masks:
            lanes = _unmasked_lanes(ring, key, graph, stages, total.lanes, threshold=threshold)
            total = total._replace(lanes=lanes)
        has_left = round.cohort.reported & (leaves_before(key, round.cohort.ids, cumulative) < 3)
        aborted = is_aborted(graph, stages, threshold, least)
        update, metrics = aggregator.finalize(key, round, total)
        return released_unless_aborted(aborted, update, metrics, has_left)

    def view(key, round, received):
        does_upload = _uploads(key, received, cumulative)
        sent = jax.tree.map(lambda x: tree.where(does_upload, x, 0), masked_messages(key, round, received))
        return sent, jnp.where(does_upload, received.weights, 0)

    def cost_of(values, num_invited):
        # A circle that is too small aborts the round, which costs no less before that.
        num_clients = num_invited if neighbours is None else max(num_invited, neighbours + 1)
        return secure_sum_cost(num_clients, values, ring.bits, neighbours=neighbours, signed=signed)

    def wire(update_spec, wire, num_invited):
        values = num_values(update_spec)
        cost = cost_of(values, num_invited)
        return Wire(values, values * ring.bits, cost.client_up_bits - values * ring.bits)

    def wire_down(update_spec, wire, num_invited):
        return wire.with_side(cost_of(num_values(update_spec), num_invited).client_down_bits)

    stays_or_none = stays if cumulative[2] > 0 else None  # None if no client leaves before the upload
    secure = aggregator._replace(init=init, accumulate=accumulate, finalize=finalize, stays=stays_or_none, view=view)
    return secure.stating(
        metrics=aggregator.facts.metrics + SECURE_SUM_METRICS, least=least, wire=wire, wire_down=wire_down
    )


def stages_of(key: Array, ids: Array, reported: Array, uploaded: Array, cumulative: np.ndarray) -> Stages:
    """Decides which clients complete each step of a round, by each client's own draw.

    Args:
      key: of the round.
      ids: [m] int32 client ids.
      reported: [m] bool.
      uploaded: [m] bool.
      cumulative: [4], as `left_by` returns it.

    Guarantees: clients leave before each step with its probability
    (tests/aggregation/secure/test_secagg.py::test_clients_leave_with_the_stated_probability).
    """
    left_before = leaves_before(key, ids, cumulative)
    return Stages(reported & (left_before > 1), uploaded, uploaded & (left_before > 3))


def leaves_before(key: Array, ids: Array, cumulative: np.ndarray) -> Array:
    """Draws the step before whose end each client leaves.

    Args:
      key: of the round.
      ids: [c] int32 client ids.
      cumulative: [4], as `left_by` returns it.

    Returns: [c] int32, an index of `STEP_NAMES`; 4 = the client stays to the end.
    """
    uniform = luck(key, ids, "secure_dropout")
    return (uniform[:, None] >= jnp.asarray(cumulative, jnp.float32)[None]).sum(1, dtype=jnp.int32)


def _uploads(key: Array, received: Received, cumulative: np.ndarray) -> Array:
    """Returns the clients whose message is uploaded, [c] bool."""
    return (received.weights > 0) & (leaves_before(key, received.ids, cumulative) > 2)


def _unmasked_lanes(ring: Ring, key: Array, graph: Circle, stages: Stages, lanes: PyTree, *, threshold: int) -> PyTree:
    """Returns the lanes of `modular_sum` without masks, from sums of the lanes of masked messages.

    Args:
      ring, key, graph, stages, threshold: as in `unmasked`.
      lanes: leaves [lanes, ...], the sums over the clients that uploaded.
    """
    sums = jax.tree.map(partial(words, ring), lanes)
    total = unmasked(ring, key, graph, stages, sums, threshold=threshold)
    return jax.tree.map(lambda x: jnp.stack(ring.lanes(tuple(x))), total)


def _checked(
    aggregator: Aggregator,
    threshold: int,
    *,
    neighbours: int | None,
    dropout: float | Sequence[float],
    min_messages: int | None,
    masks: bool,
    signed: bool,
) -> tuple[np.ndarray, int]:
    """Checks the options of `secure_sum`.

    Args: as for `secure_sum`.

    Returns: (`left_by(dropout)`, the least number of messages in a sum).
    """
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
    """Checks the options that depend on the size of the cohort."""
    if neighbours is not None and neighbours >= num_slots:
        hint = "neighbours=None makes all of them share with each other."
        validate.fail("neighbours", f"fewer than the {num_slots} slots of the cohort", neighbours, hint)
    if signed and neighbours is None:
        check_majority(threshold, num_slots)


def left_by(dropout: float | Sequence[float]) -> np.ndarray:
    """Computes the probability that a client has left before the end of each step, [4] float64.

    Args:
      dropout: the probability of leaving before a step, for all steps, or four probabilities.

    Raises: ValueError or TypeError for an argument that is neither a probability nor four of them, one for each of
      `STEP_NAMES`.

    >>> left_by([0.0, 0.5, 0.5, 0.0]).tolist()
    [0.0, 0.5, 0.75, 0.75]
    """
    step_probabilities = list(dropout) if isinstance(dropout, Sequence | np.ndarray) else [dropout] * len(STEP_NAMES)
    if len(step_probabilities) != len(STEP_NAMES):
        validate.fail("dropout", f"a probability, or one for each of {', '.join(STEP_NAMES)}", dropout)
    for i, probability in enumerate(step_probabilities):
        validate.in_range(f"dropout[{i}]", probability, 0, 1)
    return 1 - np.cumprod([1 - probability for probability in step_probabilities])
