"""`modular_sum` sums integer messages in a ring, the sum that secure aggregation computes."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.aggregation.secure.ring import MAX_MESSAGES, Ring
from fedjax_sim.types import Aggregator, AggregatorFacts, Array, PyTree
from fedjax_sim.validate import Positive


class ModularSum(NamedTuple):
    """A `ModularSum` is the carry of `modular_sum`: sums over the messages so far."""

    lanes: PyTree  # the structure of an update, leaves [lanes, ...] uint32: sums of `Ring.lanes`
    messages: Array  # [] int32, the number of messages


def ring_of(aggregator: Aggregator) -> Ring:
    """Returns the ring of a modular sum, which follows from its modulus.

    >>> ring_of(modular_sum(1.0, modulus_bits=40))
    Ring(bits=40, prime=False)
    """
    modulus = aggregator.facts.modulus
    assert modulus is not None, "a modular sum states its modulus"
    # The modulus is a power of two, or the prime, which is odd.
    return Ring(modulus.bit_length() - 1) if modulus & 1 == 0 else Ring(31, prime=True)


@validate.named_arguments
def modular_sum(denominator: Positive | None, *, modulus_bits: int = 32, prime: bool = False) -> Aggregator:
    """The aggregate is the sum of integer messages modulo q, lifted to [-q/2, q/2) and divided by a number.

    Partial sums may wrap around modulo q. The lifted sum is the true sum if the true sum is in [-q/2, q/2); `federated`
    refuses messages whose sum could leave this range. A message counts once if its weight is positive. Messages are
    int32, in a unit that all clients share: the transform that made the integers also decodes the aggregate.

    Args:
      denominator: positive, fixed beforehand; 1 for the sum itself. None: the number of messages in the sum, so that
        the aggregate is their mean. One client then moves it by an amount that depends on who else reports, so no
        sensitivity is stated.
      modulus_bits: q = 2^modulus_bits, in [2, 64]. With more than 32 bits, sums are held in six words for each
        coordinate, and a sum has at most 2,097,152 messages.
      prime: True: q = 2^31 - 1, so that the ring is a field; the same limit on messages holds.

    Returns: an Aggregator; the metric `total_weight` is the number of messages.

    Raises: TypeError, when traced, for messages that are not int32; ValueError for options out of their ranges and,
      when the round is built, for a cohort above the limit on messages.

    Guarantees:
      - exactly the sum of the integers, however partial sums wrap, up to the rounding to float32
        (tests/aggregation/secure/test_modular.py::test_sums_are_exact)
      - carries of disjoint slots add (tests/laws/test_aggregators.py::test_carries_of_disjoint_slots_combine)
      - one message moves the aggregate by at most its norm / denominator (::test_declared_sensitivity_holds), as long
        as the sum does not leave the range

    References: Bonawitz et al. 2017, section 4.

    >>> aggregator = modular_sum(10.0, modulus_bits=20)
    >>> aggregator.facts.modulus, aggregator.facts.sensitivity
    (1048576, 0.1)
    """
    validate.integer("modulus_bits", modulus_bits, 2, 64, hint="A number is sent in two words of 32 bits at most.")
    if not isinstance(prime, bool):
        validate.fail("prime", "True or False", prime, error=TypeError)
    if prime and modulus_bits != 32:
        validate.fail("modulus_bits", "none beside prime=True, whose modulus is 2^31 - 1", modulus_bits)
    ring = Ring(31, prime=True) if prime else Ring(modulus_bits)

    def init(update_spec, num_slots):
        if (prime or ring.words == 2) and num_slots > MAX_MESSAGES:
            validate.fail("num_slots", f"at most {MAX_MESSAGES:,} messages in this ring", num_slots)
        for leaf in jax.tree.leaves(update_spec):
            if leaf.dtype != jnp.int32:
                hint = "End the transform with one that sends integers, such as discrete_gaussian_mechanism."
                validate.fail("update", "int32 messages for a modular sum", str(leaf.dtype), hint, TypeError)
        zeros = jax.tree.map(lambda x: jnp.zeros((ring.num_lanes, *x.shape), jnp.uint32), update_spec)
        return ModularSum(zeros, jnp.zeros((), jnp.int32))

    def accumulate(key, cohort, carry, received):
        has_arrived = received.weights > 0

        def add(messages, lanes):
            # XLA:CPU sums rows of one axis faster.
            flat = jnp.where(has_arrived[:, None], messages.reshape(messages.shape[0], -1), 0)
            sums = [x.sum(0, dtype=jnp.uint32) for x in ring.lanes(ring.of(flat))]
            return lanes + jnp.stack(sums).reshape(lanes.shape)

        total = jax.tree.map(add, received.updates, carry.lanes)
        return ModularSum(total, carry.messages + has_arrived.sum(dtype=jnp.int32))

    def finalize(key, cohort, carry):
        count = carry.messages.astype(jnp.float32)
        sums = jax.tree.map(lambda lanes: ring.lifted(ring.gathered(tuple(lanes))), carry.lanes)
        if denominator is None:
            mean = jax.tree.map(lambda x: x / jnp.maximum(count, 1), sums)
        else:
            mean = jax.tree.map(lambda x, divisor=denominator: x * (1 / divisor), sums)
        return mean, {"total_weight": count}

    sensitivity = None if denominator is None else 1 / denominator
    facts = AggregatorFacts(sensitivity=sensitivity, modulus=ring.modulus, weighted=False, homogeneous=True)
    return Aggregator(init, accumulate, finalize, facts)
