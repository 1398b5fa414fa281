"""Records of a wing go to the clients as they are, and its functions say what becomes of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import aggregation, engine, sampling, transform
from fedjax_sim.round.collect import collect, everything
from fedjax_sim.round.extension import Extension
from fedjax_sim.types import Aggregator, ClientFacts, ClientUpdate, Execution, Report
from tests.laws import problems as p
from tests.round.stars import KEY, star, started

IDS = np.array([3, 17, 0, 5, 22], np.int32)
ONE_BY_ONE = Execution(plan=engine.Plan(1, 1), mesh=None)


def plus_one(key, start, state, data):
    """A client that sends the model that it was given, plus one."""
    return Report(start + 1, jnp.float32(1), {}), state


def squared(key, update):
    return jax.tree.map(jnp.square, update)


def parts_with(aggregator=None, **changes):
    client = ClientUpdate(lambda params: (), plus_one, ClientFacts(uniform_weights=True))
    made = star(sampling.uniform(p.NUM_CLIENTS, len(IDS)))
    parts = made.parts._replace(client=client, **changes)
    return parts._replace(aggregator=aggregator or everything(parts)), started(made)


def test_a_wing_of_its_own():
    """Clients start from a row of the slot times a number that all share, and add 100 times their row to what they
    send, which a transform then squares. Faults: a row of another slot, functions that see the records of another kind,
    an update that is scaled after its transform or never."""
    parts, state = parts_with(transform=transform.stateless(squared))
    rows = np.random.default_rng(4).integers(-8, 8, (len(IDS), p.WIDTH)).astype(np.float32)

    @jax.jit
    def messages(rows, state, people):
        extension = Extension(
            rows={"offset": rows},
            shared=jnp.float32(3),
            start=lambda broadcast, shared, row: broadcast + shared * row["offset"],
            scaled=lambda update, row: update + 100 * row["offset"],
        )
        gathered = [collect(parts, KEY, p.cohort(IDS), state, people, **x) for x in ({}, {"extension": extension})]
        return [engine.all_rows(x.carry, jnp.arange(len(IDS)))[0] for x in gathered]

    plain, extended = messages(jnp.array(rows), state, p.ragged())
    np.testing.assert_array_equal(plain, np.tile((p.START + 1) ** 2, (len(IDS), 1)))  # an ordinary round
    np.testing.assert_array_equal(extended, (p.START + 3 * rows + 1 + 100 * rows) ** 2)


def test_what_is_shared_may_change_from_chunk_to_chunk():
    """Each client doubles what the clients before it left, and adds one: after five clients 2^5 - 1. Faults: clients
    that all see the first carry, whose sum is 5, and chunks that follow each other in another order than the slots."""

    def accumulate(key, round, carry, received):
        arrived = received.weights > 0
        slots = jnp.where(arrived, received.slots, len(IDS))
        order = carry["order"].at[slots].set(carry["turn"], mode="drop")
        total = carry["total"] + jnp.where(arrived[:, None], received.updates, 0).sum(0)
        return {"total": total, "order": order, "turn": carry["turn"] + arrived.sum(dtype=jnp.int32)}

    def init(update_spec, num_slots):
        order = jnp.zeros(num_slots, jnp.int32)
        return {"total": jnp.zeros(update_spec.shape), "order": order, "turn": jnp.int32(0)}

    aggregator = Aggregator(init, accumulate, finalize=aggregation.mean().finalize)
    parts, state = parts_with(aggregator, execution=ONE_BY_ONE)
    extension = Extension(
        shared=jnp.zeros(p.WIDTH),
        start=lambda broadcast, shared, row: shared,
        renewed=lambda carry: carry["total"],
    )

    @jax.jit
    def carry(state, people):
        return collect(parts, KEY, p.cohort(IDS), state, people, extension=extension).carry

    found = carry(state, p.ragged())
    assert found["total"].tolist() == [2 ** len(IDS) - 1] * p.WIDTH
    assert found["order"].tolist() == list(range(len(IDS)))
