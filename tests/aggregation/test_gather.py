"""A user's rule that sees every letter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fedjax_sim import engine
from fedjax_sim.aggregation import gather
from fedjax_sim.types import ClientUpdate, Received, Report
from tests.laws import laws
from tests.laws import problems as p


def test_rule_sees_rows_by_id_and_zeros_for_the_absent():
    """Catches rows of the padding among the messages, weights out of step with rows, the absent among those present."""
    seen = {}

    def rule(key, updates, weights):
        seen.update(updates=updates, weights=weights)
        return jax.tree.map(lambda x: jnp.median(x, axis=0), updates)

    table = gather(rule, sensitivity=2.0, weighted=False)
    carry = table.init({"w": jax.ShapeDtypeStruct((), jnp.float32)}, 4)
    for slots, ids, values in (([2, 0], [8, 40], [6.0, 7.0]), ([1, 4], [3, 1], [5.0, 99.0]), ([3], [0], [0.0])):
        received = Received({"w": jnp.array(values)}, jnp.array(values), jnp.array(ids), jnp.array(slots))
        carry = table.accumulate(jax.random.key(0), None, carry, received)
    update, metrics = table.finalize(jax.random.key(0), None, carry)
    assert seen["updates"]["w"].tolist() == seen["weights"].tolist() == [5, 6, 7, 0]
    assert float(update["w"]) == 5.5 and float(metrics["total_weight"]) == 18
    assert (table.sensitivity, table.weighted, table.homogeneous) == (2.0, False, False)


@pytest.mark.optimised
def test_signs_of_zeros_are_the_same_on_two_devices():
    """Catches -0.0 in a letter that a sum over devices turns into 0.0, while one device keeps it."""

    def silent(key, broadcast, state, data):
        return Report(-0.0 * jnp.abs(broadcast), jnp.float32(1), {}), state

    work, found = ClientUpdate(lambda params: (), silent), []
    for mesh in (None, engine.device_mesh(2)):
        rule = gather(lambda key, updates, weights: jnp.copysign(1.0, updates[0]))
        found.append(p.Federation(aggregator=rule, client=work, mesh=mesh).run(p.COHORT, num_rounds=1)[0].server)
    laws.check_equal_bits(*found, "model")
