"""The clients' half of a round: messages and counts by slot, and the stores of clients' states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, client, engine, population, run, sampling, server, transform
from fedjax_sim.algorithms import federated
from fedjax_sim.round.collect import collect, everything
from fedjax_sim.round.round import invite
from fedjax_sim.types import ClientData, Count
from tests.laws import problems as p
from tests.round.stars import KEY, counted, local, star, started


def test_each_slot_by_hand():
    """Five slots in chunks of four, one client absent and one not finite. Faults: the engine's padding among the
    counts, rows by id and not by slot, a dropped message that leaves its weight, or that counts as one that arrived."""
    ids, broken = np.array([3, 17, 0, 5, 22], np.int32), 17
    reported = np.array([True, True, True, False, True])
    made = star(sampling.uniform(p.NUM_CLIENTS, len(ids)), client=p.counting(local()))
    parts = made.parts._replace(aggregator=everything(made.parts))
    people = p.ragged(spoil={broken: 1e30})

    @jax.jit
    def collected(state, people):
        gathered = collect(parts, KEY, p.cohort(ids, reported=reported), state, people)
        messages, weights = engine.all_rows(gathered.carry, jnp.arange(len(ids)))
        numbers = gathered.arrived, gathered.dropped, gathered.num_arrived, gathered.num_dropped
        return messages, weights, gathered.clients[1], numbers

    messages, weights, clients, (arrived, dropped, *totals) = collected(started(made), people)
    expected = reported & (ids != broken)
    assert arrived.tolist() == expected.tolist() and dropped.tolist() == (reported & (ids == broken)).tolist()
    assert [int(x) for x in totals] == [3, 1]
    np.testing.assert_array_equal(weights, np.where(expected, p.SIZES[ids], 0))
    np.testing.assert_array_equal(np.any(messages, axis=1), expected)
    assert np.asarray(clients["rounds"])[expected].tolist() == [1, 1, 1]
    np.testing.assert_allclose(np.asarray(clients["sum"])[expected], messages[expected].sum(1), rtol=1e-5)


def test_counts_are_exact():
    """Past 2^32 in a sum, on two devices. Catches float sums, a sum that wraps, clients that did not take part."""
    amount, sampler = 200_000_003, sampling.with_dropout(sampling.full(p.NUM_CLIENTS), 0.3)
    parts = sampler, counted(amount), aggregation.mean(), server.optimizer(optax.sgd(1.0))
    made = federated(*parts, plan=p.PLAN, mesh=engine.device_mesh(2))
    state = started(made)
    cohort, _ = jax.jit(lambda state: invite(made.parts, KEY, state))(state)
    there = np.asarray(cohort.reported)
    assert 0 < there.sum() < p.NUM_CLIENTS
    expected = int(amount) * int(p.SIZES[np.asarray(cohort.ids)[there]].sum())
    _, info = jax.jit(made.step)(KEY, state, p.ragged())
    assert isinstance(info["inner_bytes"], Count) and info["inner_bytes"].total() == expected > 2**33  # on a device


def test_counts_are_counts():
    """Catches a float that a sum of bytes would round."""
    made = star(sampling.full(p.NUM_CLIENTS), client=counted(1, jnp.float32))
    with pytest.raises(TypeError, match=r"counts\['inner_bytes'\]: expected a scalar of an integer dtype"):
        jax.eval_shape(made.step, KEY, started(made), p.ragged())


@pytest.mark.full
def test_counts_of_a_log_are_integers():
    """Catches a count that is rounded, or a float, on its way into a log."""
    made = star(sampling.full(p.NUM_CLIENTS), client=counted(5))
    _, history = run(KEY, made, jnp.array(p.START), p.ragged(), 2)
    assert [record["inner_bytes"] for record in history.records] == [5 * int(p.SIZES.sum())] * 2


@pytest.mark.full
def test_client_memory_is_written_in_place():
    """Rounds in a loop, their info kept: the program needs less than half of what all clients remember beside it.

    Catches a late read of the memory's old rows, for which the compiler copies it whole in every round.
    """
    size, width = 4_000, 500
    people = population.generated(size, wide_row, jnp.zeros(width))

    def loss(params, examples, key):
        return ((params[None] - examples["x"]) ** 2).sum(-1)

    work = client.local_sgd(loss, optax.sgd(0.1), client.work(num_steps=1))
    change = {"transform": transform.error_feedback(transform.top_k(0.1))}
    made = star(sampling.uniform(size, 4), client=work, **change)
    state = made.init(KEY, jnp.zeros(width), people)

    def rounds(state, count):
        _, info = jax.eval_shape(made.step, KEY, state, people)
        kept = jax.tree.map(lambda x: jnp.zeros((8, *x.shape), x.dtype), info)

        def one(i, carry):
            state, kept = carry
            state, info = made.step(jax.random.fold_in(KEY, i), state, people)
            return state, jax.tree.map(lambda rows, x: rows.at[i].set(x), kept, info)

        return jax.lax.fori_loop(0, count, one, (state, kept))

    compiled = jax.jit(rounds, donate_argnums=0).lower(state, 8).compile()
    assert engine.needs(compiled).temporary < 4 * size * width / 2


def wide_row(parameters, id):
    """One example a client."""
    return ClientData({"x": (parameters + id)[None]}, jnp.ones(1, bool))
