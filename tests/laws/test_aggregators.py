"""Aggregators: order is irrelevant, carries of disjoint slots combine, declared sensitivity holds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine
from fedjax_sim.types import Received
from tests.laws import cases, laws, problems as p

KEY = jax.random.key(0)
SPEC = jax.ShapeDtypeStruct((3,), jnp.float32)
RNG = np.random.default_rng(5)
WEIGHTS = np.where(np.arange(p.SLOTS) == 3, 0, p.SIZES[p.COHORT]).astype(np.float32)  # one message did not arrive
UPDATES = np.where(WEIGHTS[:, None] > 0, RNG.normal(size=(p.SLOTS, 3)) * 10.0 ** RNG.integers(-4, 5, (p.SLOTS, 1)), 0)
UPDATES = UPDATES.astype(np.float32)


class Compiled:
    """An aggregator compiled for chunks of the whole cohort, padding at slot m."""

    def __init__(self, name):
        self.member = member = cases.CASES["aggregation"][name]()
        self.empty = member.init(SPEC, p.SLOTS)
        round = cases.round_for(member)
        self._add = jax.jit(lambda carry, received: member.accumulate(KEY, round, carry, received))
        self.finalize = jax.jit(lambda carry: member.finalize(KEY, round, carry))

    def cohort(self, messages, absent_id):
        """What becomes of these messages at slots 0, 1, ...; the one that did not arrive bears another client's id."""
        ids = np.where(WEIGHTS > 0, p.COHORT, absent_id)[messages]
        slots = jnp.arange(p.SLOTS, dtype=jnp.int32)
        received = Received(
            jnp.array(UPDATES[messages]), jnp.array(WEIGHTS[messages]), jnp.array(ids, jnp.int32), slots
        )
        return self.finalize(self._add(self.empty, received))

    def add(self, carry, slots, updates=UPDATES):
        """The carry with the messages of these slots, at the end of a chunk of padding."""
        slots = np.asarray(slots, int)
        blank = p.SLOTS - len(slots)
        received = Received(
            jnp.array(np.concatenate([np.zeros((blank, 3), np.float32), updates[slots]])),
            jnp.array(np.concatenate([np.zeros(blank, np.float32), WEIGHTS[slots]])),
            jnp.array(np.concatenate([np.zeros(blank, int), p.COHORT[slots]]), jnp.int32),
            jnp.array(np.concatenate([np.full(blank, p.SLOTS), slots]), jnp.int32),
        )
        return self._add(carry, received)


TWICE = np.array([7, 0, 1, 2, 3, 4, 5, 6, 7, 8])  # messages of a cohort in which one client stands twice


@pytest.fixture(scope="module", params=cases.compiled_rows("aggregation"))
def aggregator(request):
    return Compiled(request.param)


def test_order_of_arrival_is_irrelevant(aggregator):
    """Catches float sums and rows by arrival: any order, in one chunk or in three."""
    expected = aggregator.finalize(aggregator.add(aggregator.empty, range(p.SLOTS)))
    carry = aggregator.empty
    for slots in ([9, 0, 5, 1], [2], [8, 3, 4, 7, 6]):
        carry = aggregator.add(carry, slots)
    laws.check_equal_bits(expected, aggregator.finalize(carry), "order")


def test_order_of_the_cohort_is_irrelevant(aggregator):
    """Catches rows by slot, float sums and keys by slot: any permutation of a cohort, a client drawn twice included,
    and whatever id stands at a slot without a message."""
    expected = aggregator.cohort(TWICE, absent_id=9)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(p.SLOTS)
        laws.check_equal_bits(expected, aggregator.cohort(TWICE[order], absent_id=seed), "order of the cohort")


def test_carries_of_disjoint_slots_combine(aggregator):
    """Catches a carry that cannot be added across devices: the engine merges them by its own rule."""
    halves = [aggregator.add(aggregator.empty, slots) for slots in ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9])]
    merged = jax.jit(engine.exact_sums.merge)(*halves)
    whole = aggregator.add(aggregator.empty, range(p.SLOTS))
    normal = jax.jit(engine.exact_sums.merge)(
        whole, aggregator.empty
    )  # the normal form of a sum, all carries propagated
    laws.check_equal_bits(normal, merged, "merged carries")
    laws.check_equal_bits(
        normal, jax.jit(engine.exact_sums.merge)(normal, aggregator.empty), "an empty carry changes nothing"
    )
    laws.check_equal_bits(aggregator.finalize(whole), aggregator.finalize(merged), "finalized carries")


def test_padding_changes_nothing(aggregator):
    """Catches padding that counts: a chunk of nothing but padding."""
    once = aggregator.add(aggregator.empty, range(p.SLOTS))
    merge = jax.jit(engine.exact_sums.merge)
    laws.check_equal_bits(merge(once, aggregator.empty), merge(aggregator.add(once, []), aggregator.empty), "padding")


def test_declared_sensitivity_holds(aggregator):
    """Catches a sensitivity that is too small: one client's update moved by 1 in every direction, tight for sums."""
    declared = aggregator.member.facts.sensitivity
    if declared is None:
        return
    moderate = np.where(WEIGHTS[:, None] > 0, RNG.normal(size=(p.SLOTS, 3)), 0).astype(np.float32)
    before = np.asarray(aggregator.finalize(aggregator.add(aggregator.empty, range(p.SLOTS), moderate))[0])
    largest = 0.0
    for slot in np.flatnonzero(WEIGHTS)[:4]:
        for direction in np.eye(3, dtype=np.float32):
            moved = moderate.copy()
            moved[slot] += direction
            after = np.asarray(aggregator.finalize(aggregator.add(aggregator.empty, range(p.SLOTS), moved))[0])
            largest = max(largest, np.linalg.norm(after - before))
    assert 0.99 * declared < largest <= declared * (1 + 1e-5)


def test_declared_homogeneity_holds(aggregator):
    """Messages in another unit give the result in that unit. Catches a rule that compares them with a number."""
    if not aggregator.member.facts.homogeneous or aggregator.member.facts.modulus is not None:
        return
    result = [aggregator.finalize(aggregator.add(aggregator.empty, range(p.SLOTS), UPDATES * unit))[0]
              for unit in np.float32([1, 2.0**-9, -(2.0**7)])]  # fmt: skip
    for found, unit in zip(result[1:], (2.0**-9, -(2.0**7)), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(result[0]) * unit, rtol=2e-6)
