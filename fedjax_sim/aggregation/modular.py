"""Sums of integers modulo a power of two: what secure aggregation gives the server."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import engine, validate
from fedjax_sim.types import Aggregator, Array

__all__ = ["modular_sum"]


def modular_sum(denominator: float, *, modulus_bits: int = 32) -> Aggregator:
    """The sum of integer messages modulo 2^modulus_bits, lifted to [-2^(bits-1), 2^(bits-1)), over a fixed number.

    Sums wrap around, in any order, to the true sum if that lies in the lifted range; `federated` refuses messages whose
    sum could leave it. A message counts if its weight is positive, however large. Messages are int32, in a unit that
    all clients share: the transform that made them decodes the aggregate.

    Args:
      denominator: positive, fixed beforehand; 1 for the sum itself.
      modulus_bits: in [2, 32].

    Raises: TypeError for messages that are not int32, when traced.

    Guarantees: exactly the integers' sum, however partial sums wrap, up to float32's rounding
    (tests/aggregation/test_modular.py::test_sums_are_exact); carries of disjoint slots add
    (tests/laws/test_aggregators.py::test_carries_of_disjoint_slots_combine); one message moves the aggregate by at most
    its norm / denominator (::test_declared_sensitivity_holds), as long as the sum does not leave the range.

    References: Bonawitz et al. 2017, section 4.

    >>> aggregator = modular_sum(10.0, modulus_bits=20)
    >>> aggregator.modulus, aggregator.sensitivity
    (1048576, 0.1)
    """
    validate.positive("denominator", denominator)
    validate.integer("modulus_bits", modulus_bits, 2, 32, hint="Sums are held in 32 bits.")

    def init(update_spec, num_slots):
        for x in jax.tree.leaves(update_spec):
            if x.dtype != jnp.int32:
                hint = "End the transform with one that sends integers, such as discrete_gaussian_mechanism."
                validate.fail("update", "int32 messages for a modular sum", str(x.dtype), hint, TypeError)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.uint32), update_spec)
        return {"sum": zeros, "messages": jnp.zeros((), jnp.int32)}

    def accumulate(key, cohort, carry, received):
        here = received.weights > 0

        def add(old, x):
            flat = jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(x.shape[0], -1)  # XLA:CPU likes one axis
            flat = jnp.where(here[:, None], flat, jnp.uint32(0))
            return old + flat.sum(0, dtype=jnp.uint32).reshape(old.shape)

        total = jax.tree.map(add, carry["sum"], received.updates)
        return {"sum": total, "messages": carry["messages"] + here.sum(dtype=jnp.int32)}

    def lifted(x: Array) -> Array:
        spare = 32 - modulus_bits
        signed = jax.lax.bitcast_convert_type(x << spare, jnp.int32)
        return signed >> spare

    def finalize(key, cohort, carry):
        zero = engine.HiddenZero(jnp.minimum(carry["messages"], 0))
        mean = jax.tree.map(lambda x: lifted(x).astype(jnp.float32) * (1 / denominator), carry["sum"])
        return engine.rounded_here(mean, zero), {"total_weight": carry["messages"].astype(jnp.float32)}

    modulus = 1 << modulus_bits
    return Aggregator(init, accumulate, finalize, 1 / denominator, modulus, weighted=False, homogeneous=True)
