"""A user's rule that sees all messages at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidType, client, engine, server
from fedjax_sim.aggregation import by_part, gather, mean
from fedjax_sim.types import ClientUpdate, Received, Report
from tests.laws import laws, problems as p
from tests.refusals import refused


def test_rule_sees_rows_by_id_and_zeros_for_the_absent():
    """Catches rows of the padding among the messages, weights out of step with rows, the absent among those present."""
    seen = {}

    def rule(key, updates, weights, ids):
        seen.update(updates=updates, weights=weights)
        return jax.tree.map(lambda x: jnp.median(x, axis=0), updates)

    aggregator = gather(rule, sensitivity=2.0, weighted=False)
    carry = aggregator.init({"w": jax.ShapeDtypeStruct((), jnp.float32)}, 4)
    for slots, ids, values in (([2, 0], [8, 40], [6.0, 7.0]), ([1, 4], [3, 1], [5.0, 99.0]), ([3], [0], [0.0])):
        received = Received({"w": jnp.array(values)}, jnp.array(values), jnp.array(ids), jnp.array(slots))
        carry = aggregator.accumulate(jax.random.key(0), None, carry, received)
    update, metrics = aggregator.finalize(jax.random.key(0), None, carry)
    assert seen["updates"]["w"].tolist() == seen["weights"].tolist() == [5, 6, 7, 0]
    assert float(update["w"]) == 5.5 and float(metrics["total_weight"]) == 18
    facts = aggregator.facts
    assert (facts.sensitivity, facts.weighted, facts.homogeneous) == (2.0, False, False)


@pytest.mark.full
def test_a_rule_with_memory():
    """Each round's result is half of the last one and half of the new mean, towards the model; in NumPy.

    Catches a state that is not kept, is another part's, or a model that is not the one that clients got.
    """

    def rule(key, updates, weights, ids, round):
        mean = (updates * weights[:, None]).sum(0) / weights.sum()
        return 0.5 * round.state + 0.5 * mean - 0.1 * round.broadcast, 0.5 * round.state + 0.5 * mean

    def made(aggregator, **parts):
        return p.Federation(aggregator=aggregator, **parts)

    stateful = gather(rule, start=lambda spec: jnp.zeros(spec.shape))
    plain = made(mean())
    both = made(by_part({"one": stateful, "other": mean()}), client=twice(), server=first_part())
    for federation in (made(stateful), both):
        state, w, v = federation.init(), np.array(p.START, float), 0.0
        for t in range(3):
            alone = plain.params(p.COHORT, params=np.float32(w), keys=[t])
            update = alone - w
            state, _ = federation.run(p.COHORT, state=state, keys=[t])
            v = 0.5 * v + 0.5 * update
            w = w + v - 0.1 * w
            np.testing.assert_allclose(federation.algorithm.params(state), w, rtol=1e-4, atol=1e-6)


def twice():
    """Clients that send their update under two names."""
    work = p.counting(
        client.local_sgd(p.linear_loss, optax.sgd(p.RATE), client.work(num_steps=p.STEPS, batch_size=p.BATCH))
    )

    def apply(key, broadcast, state, data):
        report, state = work.apply(key, broadcast, state, data)
        return report._replace(update={"one": report.update, "other": report.update}), state

    return work._replace(apply=apply)


def first_part():
    """A server that takes the first of two parts."""
    step = server.optimizer(optax.sgd(1.0))
    return step._replace(
        apply=lambda key, aggregate, state: step.apply(key, aggregate["one"], state),
        takes=lambda params: {"one": params, "other": params},
    )


def test_ids_stand_beside_their_rows():
    """Catches ids of slots, and ids of who did not report."""
    seen = {}

    def rule(key, updates, weights, ids):
        seen.update(ids=ids, weights=weights)
        return updates.sum(0)

    aggregator = gather(rule)
    carry = aggregator.init(jax.ShapeDtypeStruct((), jnp.float32), 3)
    received = Received(jnp.ones(3), jnp.array([2.0, 0.0, 1.0]), jnp.array([9, 4, 5]), jnp.array([0, 1, 2]))
    aggregator.finalize(jax.random.key(0), None, aggregator.accumulate(jax.random.key(0), None, carry, received))
    assert seen["ids"].tolist() == [5, 9, -1] and seen["weights"].tolist() == [1, 2, 0]
    with refused("rule", rule="(key, updates, weights, ids)", kind=InvalidType):
        gather(lambda key, updates, weights: updates)


@pytest.mark.full
@pytest.mark.optimised
def test_signs_of_zeros_are_the_same_on_two_devices():
    """Catches -0.0 in a message that a sum over devices turns into 0.0, while one device keeps it."""

    def silent(key, broadcast, state, data):
        return Report(-0.0 * jnp.abs(broadcast), jnp.float32(1), {}), state

    work, found = ClientUpdate(lambda params: (), silent), []
    for mesh in (None, engine.device_mesh(2)):
        rule = gather(lambda key, updates, weights, ids: jnp.copysign(1.0, updates[0]))
        found.append(p.Federation(aggregator=rule, client=work, mesh=mesh).run(p.COHORT, num_rounds=1)[0].server)
    laws.check_equal_bits(*found, "model")
