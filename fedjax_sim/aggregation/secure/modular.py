"""Sums of integers in a ring: what secure aggregation gives the server."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import engine, validate
from fedjax_sim.aggregation.secure.ring import MAX_MESSAGES, Ring
from fedjax_sim.types import Aggregator, AggregatorFacts, Array, PyTree
from fedjax_sim.validate import Positive

__all__ = ["ModularSum", "modular_sum", "ring_of"]


class ModularSum(NamedTuple):
    """The carry of `modular_sum`."""

    lanes: PyTree  # of the update's structure, leaves [lanes, ...] uint32: sums of `Ring.lanes`
    messages: Array  # [] int32


def ring_of(aggregator: Aggregator) -> Ring:
    """The ring of a modular sum, by its modulus.

    >>> ring_of(modular_sum(1.0, modulus_bits=40))
    Ring(bits=40, prime=False)
    """
    modulus = aggregator.facts.modulus
    return Ring(modulus.bit_length() - 1) if modulus & 1 == 0 else Ring(31, prime=True)


@validate.named_arguments
def modular_sum(denominator: Positive | None, *, modulus_bits: int = 32, prime: bool = False) -> Aggregator:
    """The sum of integer messages modulo q, lifted to [-q/2, q/2), over a number.

    Sums wrap around, in any order, to the true sum if that lies in the lifted range; `federated` refuses messages whose
    sum could leave it. A message counts if its weight is positive, however large. Messages are int32, in a unit that
    all clients share: the transform that made them decodes the aggregate.

    Args:
      denominator: positive, fixed beforehand; 1 for the sum itself. None: the number of messages in the sum, so that
        the result is their mean; one client then moves it by an amount that depends on who else is there, and no
        sensitivity is stated.
      modulus_bits: q = 2^modulus_bits, in [2, 64]; past 32 sums are held in six words a coordinate, of at most
        2,098,176 messages.
      prime: q = 2^31 - 1 instead, a field; the same limit of messages.

    Raises: TypeError for messages that are not int32, when traced.

    Guarantees: exactly the integers' sum, however partial sums wrap, up to float32's rounding
    (tests/aggregation/secure/test_modular.py::test_sums_are_exact); carries of disjoint slots add
    (tests/laws/test_aggregators.py::test_carries_of_disjoint_slots_combine); one message moves the aggregate by at most
    its norm / denominator (::test_declared_sensitivity_holds), as long as the sum does not leave the range.

    References: Bonawitz et al. 2017, section 4.

    >>> aggregator = modular_sum(10.0, modulus_bits=20)
    >>> aggregator.facts.modulus, aggregator.facts.sensitivity
    (1048576, 0.1)
    """
    validate.integer("modulus_bits", modulus_bits, 2, 64, hint="Sums are held in two words of 32 bits at most.")
    if not isinstance(prime, bool):
        validate.fail("prime", "True or False", prime, error=TypeError)
    if prime and modulus_bits != 32:
        validate.fail("modulus_bits", "none beside prime=True, whose modulus is 2^31 - 1", modulus_bits)
    ring = Ring(31, prime=True) if prime else Ring(modulus_bits)

    def init(update_spec, num_slots):
        if (prime or ring.words == 2) and num_slots > MAX_MESSAGES:
            validate.fail("num_slots", f"at most {MAX_MESSAGES:,} messages in this ring", num_slots)
        for x in jax.tree.leaves(update_spec):
            if x.dtype != jnp.int32:
                hint = "End the transform with one that sends integers, such as discrete_gaussian_mechanism."
                validate.fail("update", "int32 messages for a modular sum", str(x.dtype), hint, TypeError)
        zeros = jax.tree.map(lambda x: jnp.zeros((ring.num_lanes, *x.shape), jnp.uint32), update_spec)
        return ModularSum(zeros, jnp.zeros((), jnp.int32))

    def accumulate(key, cohort, carry, received):
        here = received.weights > 0

        def add(x, old):
            flat = jnp.where(here[:, None], x.reshape(x.shape[0], -1), 0)  # XLA:CPU likes one axis
            sums = [y.sum(0, dtype=jnp.uint32) for y in ring.lanes(ring.of(flat))]
            return old + jnp.stack(sums).reshape(old.shape)

        total = jax.tree.map(add, received.updates, carry.lanes)
        return ModularSum(total, carry.messages + here.sum(dtype=jnp.int32))

    def finalize(key, cohort, carry):
        zero = engine.HiddenZero(jnp.minimum(carry.messages, 0))
        count = carry.messages.astype(jnp.float32)
        leaves = jax.tree.map(lambda lanes: ring.lifted(ring.gathered(tuple(lanes))), carry.lanes)
        if denominator is None:
            mean = jax.tree.map(lambda x: engine.divide(x, jnp.broadcast_to(jnp.maximum(count, 1), x.shape)), leaves)
        else:
            mean = jax.tree.map(lambda x: x * (1 / denominator), leaves)
        return engine.rounded_here(mean, zero), {"total_weight": count}

    sensitivity = None if denominator is None else 1 / denominator
    facts = AggregatorFacts(sensitivity=sensitivity, modulus=ring.modulus, weighted=False, homogeneous=True)
    return Aggregator(init, accumulate, finalize, facts)
