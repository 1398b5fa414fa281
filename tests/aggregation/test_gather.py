"""A user's rule that sees every letter."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import engine, transform
from fedjax_sim.aggregation import gather
from fedjax_sim.types import Received
from tests.laws import laws
from tests.laws import problems as p


def test_rule_sees_rows_by_slot_and_zeros_for_the_absent():
    """Catches rows of the padding among the letters, weights out of step with rows."""
    seen = {}

    def rule(key, updates, weights):
        seen.update(updates=updates, weights=weights)
        return jax.tree.map(lambda x: jnp.median(x, axis=0), updates)

    table = gather(rule, sensitivity=2.0)
    carry = table.init({"w": jax.ShapeDtypeStruct((), jnp.float32)}, 4)
    for slots, values in (([2, 0], [7.0, 5.0]), ([1, 4], [6.0, 99.0])):
        received = Received({"w": jnp.array(values)}, jnp.array(values), jnp.array([0, 1]), jnp.array(slots))
        carry = table.accumulate(jax.random.key(0), None, carry, received)
    update, metrics = table.finalize(jax.random.key(0), None, carry)
    assert seen["updates"]["w"].tolist() == seen["weights"].tolist() == [5, 6, 7, 0]
    assert float(update["w"]) == 5.5 and float(metrics["total_weight"]) == 18
    assert table.sensitivity == 2.0


def test_signs_of_zeros_are_the_same_on_two_devices():
    """Catches -0.0 in a letter that a sum over devices turns into 0.0, while one device keeps it."""
    found = []
    for mesh in (None, engine.device_mesh(2)):
        rule = gather(lambda key, updates, weights: jnp.copysign(1.0, updates[0]))
        letters = transform.stateless(lambda key, x: -0.0 * jnp.abs(x))
        found.append(p.Federation(aggregator=rule, transform=letters, mesh=mesh).run(p.COHORT, num_rounds=1)[0].server)
    laws.check_equal_bits(*found, "model")
