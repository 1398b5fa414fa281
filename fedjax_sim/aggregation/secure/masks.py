"""Masks of secure aggregation: who shares with whom, secrets and their agreement, and the server's unmasking.

Secrets live in the prime field of `ring.PRIME` elements. Client u's secrets are b_u, the seed of its own mask, and the
exponent s_u; two clients agree on g^(s_u s_v), the seed of the mask that one adds and the other subtracts. The field is
far too small for security: it is the structure of the protocol that is simulated, in jit-compiled arrays.
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
from fedjax_sim.types import Array, PyTree, Round

__all__ = ["Circle", "Stages", "circle", "is_aborted", "masked", "secrets", "unmasked"]

GENERATOR = 7  # of the field's multiplicative group


class Stages(NamedTuple):
    """Who is left after the steps of the protocol; each within the one before. [m] bool."""

    shared: Array  # keys and shares of both secrets
    uploaded: Array  # the masked message
    answered: Array  # the shares that the server asks for


class Circle(NamedTuple):
    """Slots on a circle; each shares with those at these distances from it. Slots past `size` share with nobody."""

    order: Array  # [m] int32, the slot at each place
    place: Array  # [m] int32, of each slot
    distances: np.ndarray  # [h] of the holders of its shares; 0, which is itself, among all of a complete graph
    size: Array | int  # how many of the places are on the circle

    @property
    def too_small(self) -> Array | bool:
        """Whether a slot has fewer others on the circle than it shares with."""
        return self.size < len(self.distances) + (0 not in self.distances)

    def others(self, slots: Array, distance: Array) -> Array:
        """The slots at a distance from these, for slots on the circle."""
        return self.order[(self.place[slots] + distance) % jnp.maximum(self.size, 1)]

    def holders(self, flags: Array) -> Array:
        """[m] int32: how many holders of a slot's shares have the flag [m], which only slots on the circle have."""
        reach, size = int(self.distances.max(initial=0)), jnp.maximum(self.size, 1)
        if 0 in self.distances:
            return jnp.full(self.order.shape[0], flags.sum(dtype=jnp.int32))
        upto = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(flags[self.order], dtype=jnp.int32)])

        def before(place):
            """Flags before a place, in turns around the circle."""
            return upto[place % size] + place // size * upto[-1]

        return before(self.place + reach + 1) - before(self.place - reach) - flags


def circle(key: Array, num_slots: int, neighbours: int | None, round: Round | None = None) -> Circle:
    """The complete graph, or a random circle on which each slot has `neighbours` / 2 neighbours to each side.

    Args:
      round: its clients' order does not matter, and slots that invite nobody are not on the circle; by default all
        slots are, by their own numbers.

    Guarantees: holders counted by sums over windows are those of the graph
    (tests/aggregation/secure/test_masks.py::test_holders_are_counted), empty slots or not
    (::test_empty_slots_are_not_on_the_circle).

    References: Bell, Bonawitz, Gascon, Lepoint and Raykova 2020, section 3 (a Harary graph on a random order).
    """
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    if neighbours is None:
        return Circle(slots, slots, np.arange(num_slots), num_slots)
    luck = engine.client_keys(prng.stream(key, "graph"), slots if round is None else round.cohort.ids)
    empty = jnp.zeros(num_slots, bool) if round is None else ~round.cohort.invited
    order = jax.lax.sort((empty, *luck.T, slots), num_keys=1 + luck.shape[1])[-1]
    place = jnp.zeros(num_slots, jnp.int32).at[order].set(slots, unique_indices=True)
    side = np.arange(1, neighbours // 2 + 1)
    return Circle(order, place, np.concatenate([side, -side]), num_slots - empty.sum(dtype=jnp.int32))


def secrets(key: Array, num_slots: int) -> tuple[Array, Array]:
    """(b [m], s [m]): uint32, in [0, p) and in [1, p - 1)."""
    drawn = jax.random.bits(prng.stream(key, "secrets"), (2, num_slots), jnp.uint32)
    (own,) = Ring(31, prime=True).of(jax.lax.bitcast_convert_type(drawn[0] >> 1, jnp.int32))
    return own, drawn[1] % jnp.uint32(PRIME - 2) + 1


def _mask(ring: Ring, seed: Array, kind: int, shapes: list[tuple[int, ...]]) -> list[Element]:
    """The pseudorandom elements of a seed; own masks and pairs' are of different kinds."""
    words = jnp.stack([jnp.uint32(kind), seed])
    drawn = ring.draw(jax.random.wrap_key_data(words, impl="threefry2x32"), (sum(map(math.prod, shapes)),))
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    parts = [jnp.split(x, ends)[: len(shapes)] for x in drawn]
    return [tuple(x.reshape(shape) for x in part) for shape, part in zip(shapes, zip(*parts, strict=True), strict=True)]


def _signed(ring: Ring, element: Element, sign: Array) -> Element:
    """The element, its negative, or 0."""
    negative = ring.negative(element)
    return tuple(jnp.where(sign > 0, x, jnp.where(sign < 0, y, 0)) for x, y in zip(element, negative, strict=True))


def masked(ring: Ring, key: Array, graph: Circle, shared: Array, slots: Array, messages: PyTree) -> PyTree:
    """Messages of these slots under the masks of the slots themselves and of all pairs that shared secrets.

    Args:
      shared: [m] bool, who shared secrets.
      slots: [c] int32, below m.
      messages: leaves [c, ...] int32.

    Returns: the structure of messages, leaves [c, words, ...] uint32.

    Guarantees: over all who shared, pairs' masks add up to 0 modulo q
    (tests/aggregation/secure/test_masks.py::test_masks_of_pairs_cancel); a masked message is uniform whatever the
    message (::test_masked_messages_are_uniform).
    """
    leaves, structure = jax.tree.flatten(messages)
    shapes = [x.shape[1:] for x in leaves]
    own, exponents = secrets(key, shared.shape[0])
    publics = power(jnp.uint32(GENERATOR), exponents)

    def one(slot, *numbers):
        start = [ring.add(ring.of(x), y) for x, y in zip(numbers, _mask(ring, own[slot], 0, shapes), strict=True)]

        def pair(i, found):
            other = graph.others(slot, jnp.asarray(graph.distances, jnp.int32)[i])
            sign = jnp.where(shared[other], jnp.sign(other - slot), 0)
            mask = _mask(ring, power(publics[other], exponents[slot]), 1, shapes)
            return [ring.add(x, _signed(ring, y, sign)) for x, y in zip(found, mask, strict=True)]

        return [jnp.stack(x) for x in jax.lax.fori_loop(0, len(graph.distances), pair, start)]

    return structure.unflatten(jax.vmap(one)(slots, *leaves))


def unmasked(
    ring: Ring,
    key: Array,
    graph: Circle,
    stages: Stages,
    threshold: int,
    sums: PyTree,
) -> PyTree:
    """The sum of the messages, from the sum of the masked ones and the shares that those who answer open.

    The server opens b_u of those who uploaded, s_u of those who shared and did not upload, and never both: their masks
    are worked out again from what was opened, and taken off.

    Args:
      sums: leaves [words, ...] uint32, of `masked`.

    Returns: as `sums`.

    Guarantees: the plain sum, for all who dropped out at any stage, if `threshold` holders of each secret answer
    (tests/aggregation/secure/test_secagg.py::test_every_dropout_at_every_step); without the shares the sum stays masked
    (::test_too_few_shares_leave_the_sum_masked).
    """
    shared, uploaded, answered = stages
    slots, count = jnp.arange(shared.shape[0], dtype=jnp.int32), len(graph.distances)
    leaves, structure = jax.tree.flatten(sums)
    shapes = [x.shape[1:] for x in leaves]
    holders = graph.others(slots[:, None], jnp.asarray(graph.distances, jnp.int32)[None])
    own_secrets, opened = secrets(key, slots.shape[0]), []
    for secret, asked in zip(own_secrets, (uploaded, shared & ~uploaded), strict=True):
        held = shamir.shares(prng.stream(key, f"shares{len(opened)}"), secret, threshold, count)
        opened.append(shamir.opened(held, asked[:, None] & answered[holders], threshold))
    publics = power(jnp.uint32(GENERATOR), own_secrets[1])

    def subtract(found, mask, sign):
        return [ring.add(x, _signed(ring, y, sign)) for x, y in zip(found, mask, strict=True)]

    def one(slot, found):
        def own(found):
            return subtract(found, _mask(ring, opened[0][slot], 0, shapes), jnp.int32(-1))

        def pairs(found):
            def pair(i, found):
                other = holders[slot, i]
                sign = jnp.where(uploaded[other], jnp.sign(other - slot), 0)  # against the survivor's own sign
                return subtract(found, _mask(ring, power(publics[other], opened[1][slot]), 1, shapes), sign)

            return jax.lax.fori_loop(0, count, pair, found)

        case = jnp.where(uploaded[slot], 1, jnp.where(shared[slot], 2, 0))
        return jax.lax.switch(case, (lambda found: found, own, pairs), found)

    start = [tuple(x) for x in leaves]
    found = jax.lax.fori_loop(0, shared.shape[0], one, start)
    return structure.unflatten([jnp.stack(x) for x in found])


def is_aborted(graph: Circle, stages: Stages, threshold: int, least: int) -> Array:
    """[] bool: whether a secret that the server needs stays closed, fewer than `least` messages came, or the circle
    is too small.

    Guarantees: an exhaustive count of who holds what (tests/aggregation/secure/test_secagg.py::test_aborts).
    """
    neighbour_came = graph.holders(stages.uploaded) > 0
    needed = stages.uploaded | (stages.shared & neighbour_came)
    closed = needed & (graph.holders(stages.answered) < threshold)
    return closed.any() | (stages.uploaded.sum(dtype=jnp.int32) < least) | graph.too_small
