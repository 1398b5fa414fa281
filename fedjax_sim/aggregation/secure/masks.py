"""Masks of secure aggregation: the graph of neighbours, the clients' secrets, and the server's unmasking.

Secrets are elements of the prime field of `ring.PRIME` elements. Client u has two secrets: b_u, the seed of its own
mask, and the exponent s_u. Two clients u and v agree on g^(s_u s_v), the seed of a mask that one of them adds and the
other subtracts. The field is far too small for security: only the structure of the protocol is simulated, in compiled
arrays.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, prng
from fedjax_sim.aggregation.secure import shamir
from fedjax_sim.aggregation.secure.ring import PRIME, Element, Ring, power
from fedjax_sim.types import AnyArray, Array, PyTree, Round

GENERATOR = 7  # of the field's multiplicative group


class Stages(NamedTuple):
    """The clients that complete each step of the protocol, [m] bool; each set is within the set before."""

    shared: AnyArray  # they sent public keys, and shares of both secrets
    uploaded: AnyArray  # they sent the masked message
    answered: AnyArray  # they sent the shares that the server asked for


class Circle(NamedTuple):
    """Slots on a circle: each slot gives shares to the slots at fixed distances from it around the circle.

    A complete graph is a circle with all distances. Slots at places past `size` are not on the circle.
    """

    order: AnyArray  # [m] int32, the slot at each place
    place: AnyArray  # [m] int32, the place of each slot
    # [h] int, how far the holders of a slot's shares are from it. The distance 0 is the slot itself, and occurs only in
    # the complete graph.
    distances: np.ndarray
    size: Array | int  # how many places are on the circle

    @property
    def too_small(self) -> Array | bool:
        """Whether the circle has fewer other slots than a slot shares with."""
        return self.size < len(self.distances) + (0 not in self.distances)

    def others(self, slots: AnyArray | int, distance: AnyArray | int) -> AnyArray:
        """Returns the slots at a distance from the given slots, which must be on the circle."""
        return self.order[(self.place[slots] + distance) % jnp.maximum(self.size, 1)]

    def holders(self, flags: AnyArray) -> Array:
        """Counts the holders of each slot's shares that have a flag.

        Args:
          flags: [m] bool, False for slots that are not on the circle.

        Returns: [m] int32.
        """
        reach = int(self.distances.max(initial=0))
        size = jnp.maximum(self.size, 1)
        if 0 in self.distances:
            # The complete graph: every slot holds shares of every slot, of itself too.
            return jnp.full(self.order.shape[0], flags.sum(dtype=jnp.int32))
        # A slot's holders are a window of the circle, so their flags are a difference of cumulative sums.
        cumulative = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(flags[self.order], dtype=jnp.int32)])

        def flags_before(place):
            """The flags before a place, counted over whole turns where the place is past the end of the circle."""
            return cumulative[place % size] + place // size * cumulative[-1]

        # The slot itself is in the window, and is not among its holders.
        return flags_before(self.place + reach + 1) - flags_before(self.place - reach) - flags


def circle(key: Array, num_slots: int, neighbours: int | None, round: Round | None = None) -> Circle:
    """Makes the complete graph, or a random circle on which each slot has `neighbours` / 2 neighbours on each side.

    Args:
      key: of the round.
      num_slots: m.
      neighbours: even; None = the complete graph.
      round: the circle is drawn by client ids, so the order of the cohort does not matter, and slots that invite nobody
        are not on the circle. None: all slots are on the circle, which is drawn by the numbers of the slots.

    Guarantees: holders counted by sums over windows are those of the graph
    (tests/aggregation/secure/test_masks.py::test_holders_are_counted), with empty slots and without
    (::test_empty_slots_are_not_on_the_circle).

    References: Bell, Bonawitz, Gascon, Lepoint and Raykova 2020, section 3 (a Harary graph on a random order).
    """
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    if neighbours is None:
        return Circle(slots, slots, np.arange(num_slots), num_slots)
    random_words = engine.client_keys(prng.stream(key, "graph"), slots if round is None else round.cohort.ids)
    is_empty = jnp.zeros(num_slots, bool) if round is None else ~round.cohort.invited
    # Sorting random words gives a random order; empty slots are sorted behind the others.
    order = jax.lax.sort((is_empty, *random_words.T, slots), num_keys=1 + random_words.shape[1])[-1]
    place = jnp.zeros(num_slots, jnp.int32).at[order].set(slots, unique_indices=True)
    distances_ahead = np.arange(1, neighbours // 2 + 1)
    distances = np.concatenate([distances_ahead, -distances_ahead])
    return Circle(order, place, distances, num_slots - is_empty.sum(dtype=jnp.int32))


def secrets(key: Array, num_slots: int) -> tuple[Array, Array]:
    """Draws both secrets of each slot: (b [m], s [m]), uint32, with b in [0, p) and s in [1, p - 1)."""
    random_words = jax.random.bits(prng.stream(key, "secrets"), (2, num_slots), jnp.uint32)
    (mask_seeds,) = Ring(31, prime=True).of(jax.lax.bitcast_convert_type(random_words[0] >> 1, jnp.int32))
    return mask_seeds, random_words[1] % jnp.uint32(PRIME - 2) + 1


def _mask(ring: Ring, seed: Array, kind: int, shapes: list[tuple[int, ...]]) -> list[Element]:
    """Draws the pseudorandom elements of a seed, for leaves of these shapes.

    Kind 0 is for a client's own mask and kind 1 for the mask of a pair, so equal seeds give different masks.
    """
    key_words = jnp.stack([jnp.uint32(kind), seed])
    elements = ring.draw(jax.random.wrap_key_data(key_words, impl="threefry2x32"), (sum(map(math.prod, shapes)),))
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    parts = [jnp.split(x, ends)[: len(shapes)] for x in elements]
    return [tuple(x.reshape(shape) for x in part) for shape, part in zip(shapes, zip(*parts, strict=True), strict=True)]


def _signed(ring: Ring, element: Element, sign: Array) -> Element:
    """Returns the element times a sign of 1, -1 or 0."""
    negative = ring.negative(element)
    return tuple(jnp.where(sign > 0, x, jnp.where(sign < 0, y, 0)) for x, y in zip(element, negative, strict=True))


def masked(ring: Ring, key: Array, graph: Circle, messages: PyTree, *, shared: AnyArray, slots: Array) -> PyTree:
    """Adds to each message the mask of its own slot, and the masks of all its pairs that shared secrets.

    Args:
      ring: of the messages.
      key: of the round.
      graph: who shares with whom.
      messages: leaves [c, ...] int32.
      shared: [m] bool, the slots that shared secrets.
      slots: [c] int32, below m, the slots of the messages.

    Returns: the structure of messages, leaves [c, words, ...] uint32.

    Guarantees:
      - over all slots that shared secrets, the masks of pairs add up to 0 modulo q
        (tests/aggregation/secure/test_masks.py::test_masks_of_pairs_cancel)
      - a masked message is uniform whatever the message (::test_masked_messages_are_uniform)
    """
    leaves, structure = jax.tree.flatten(messages)
    shapes = [x.shape[1:] for x in leaves]
    mask_seeds, exponents = secrets(key, shared.shape[0])
    public_keys = power(jnp.uint32(GENERATOR), exponents)

    def masked_message(slot, *message_leaves):
        own_mask = _mask(ring, mask_seeds[slot], 0, shapes)
        with_own_mask = [ring.add(ring.of(x), y) for x, y in zip(message_leaves, own_mask, strict=True)]

        def add_mask_of_pair(i, total):
            other = graph.others(slot, jnp.asarray(graph.distances, jnp.int32)[i])
            # Of each pair the lower slot adds the mask and the higher slot subtracts it; the sign of a slot with itself
            # is 0.
            sign = jnp.where(shared[other], jnp.sign(other - slot), 0)
            mask = _mask(ring, power(public_keys[other], exponents[slot]), 1, shapes)
            return [ring.add(x, _signed(ring, y, sign)) for x, y in zip(total, mask, strict=True)]

        return [jnp.stack(x) for x in jax.lax.fori_loop(0, len(graph.distances), add_mask_of_pair, with_own_mask)]

    return structure.unflatten(jax.vmap(masked_message)(slots, *leaves))


def unmasked(
    ring: Ring,
    key: Array,
    graph: Circle,
    stages: Stages,
    sums: PyTree,
    *,
    threshold: int,
) -> PyTree:
    """Removes the masks from the sum of masked messages, with the shares that answering clients open.

    The server opens b_u of clients that uploaded, and s_u of clients that shared secrets and did not upload; it never
    opens both secrets of a client. It recomputes masks from the opened secrets and subtracts them.

    Args:
      ring: of the messages.
      key: of the round.
      graph: who shares with whom.
      stages: the clients that completed each step.
      sums: leaves [words, ...] uint32, the sum of the messages of `masked` of clients that uploaded.
      threshold: the shares that open a secret.

    Returns: the structure and shapes of `sums`.

    Guarantees:
      - the plain sum, whoever dropped out at any step, if `threshold` holders of each secret answer
        (tests/aggregation/secure/test_secagg.py::test_every_dropout_at_every_step)
      - without these shares the sum stays masked (::test_too_few_shares_leave_the_sum_masked)
    """
    shared, uploaded, answered = stages
    slots = jnp.arange(shared.shape[0], dtype=jnp.int32)
    num_holders = len(graph.distances)
    leaves, structure = jax.tree.flatten(sums)
    shapes = [x.shape[1:] for x in leaves]
    holders = graph.others(slots[:, None], jnp.asarray(graph.distances, jnp.int32)[None])
    both_secrets = secrets(key, slots.shape[0])
    opened_secrets = []
    for secret, is_asked_for in zip(both_secrets, (uploaded, shared & ~uploaded), strict=True):
        shares_key = prng.stream(key, f"shares{len(opened_secrets)}")
        shares = shamir.shares(shares_key, secret, threshold, num_holders)
        opened_secrets.append(shamir.reconstructed(shares, is_asked_for[:, None] & answered[holders], threshold))
    mask_seeds, exponents = opened_secrets
    public_keys = power(jnp.uint32(GENERATOR), both_secrets[1])

    def add_signed(total, mask, sign):
        return [ring.add(x, _signed(ring, y, sign)) for x, y in zip(total, mask, strict=True)]

    def remove_masks_of_slot(slot, total):
        def remove_own_mask(total):
            return add_signed(total, _mask(ring, mask_seeds[slot], 0, shapes), jnp.int32(-1))

        def remove_masks_of_pairs(total):
            def remove_mask_of_pair(i, total):
                other = holders[slot, i]
                # The survivor `other` put this mask into the sum with the opposite sign.
                sign = jnp.where(uploaded[other], jnp.sign(other - slot), 0)
                return add_signed(total, _mask(ring, power(public_keys[other], exponents[slot]), 1, shapes), sign)

            return jax.lax.fori_loop(0, num_holders, remove_mask_of_pair, total)

        # 0: the slot's masks are not in the sum. 1: its message and own mask are. 2: it left after it shared, and its
        # neighbours' messages have masks that it should have cancelled.
        case = jnp.where(uploaded[slot], 1, jnp.where(shared[slot], 2, 0))
        return jax.lax.switch(case, (lambda total: total, remove_own_mask, remove_masks_of_pairs), total)

    masked_total = [tuple(x) for x in leaves]
    total = jax.lax.fori_loop(0, shared.shape[0], remove_masks_of_slot, masked_total)
    return structure.unflatten([jnp.stack(x) for x in total])


def is_aborted(graph: Circle, stages: Stages, threshold: int, least: int) -> Array:
    """Decides whether the round is aborted, [] bool.

    A round is aborted if the server cannot open a secret that it needs, if fewer than `least` messages were uploaded,
    or if the circle is too small.

    Args:
      graph: who shares with whom.
      stages: the clients that completed each step.
      threshold: the shares that open a secret.
      least: the least number of messages in a sum.

    Guarantees: as an exhaustive count of who holds what (tests/aggregation/secure/test_secagg.py::test_aborts).
    """
    neighbour_uploaded = graph.holders(stages.uploaded) > 0
    # Of a client that left after it shared, the key is needed only if a message in the sum has a mask of the pair.
    is_needed = stages.uploaded | (stages.shared & neighbour_uploaded)
    stays_closed = is_needed & (graph.holders(stages.answered) < threshold)
    return stays_closed.any() | (stages.uploaded.sum(dtype=jnp.int32) < least) | graph.too_small
