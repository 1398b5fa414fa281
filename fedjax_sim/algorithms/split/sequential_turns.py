"""Rounds of split learning in turns: copies of the server's part serve the clients of a cohort one after the other.

With S copies a round has ceil(m / S) turns. In a turn each copy serves one client: the client's local steps change the
copy and the client's own part. The copy then serves the next client of the cohort, in the order of its slots. At the
end of the round the clients' parts are aggregated, and so are the copies.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree
from fedjax_sim.algorithms.split.loss import Split
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.prng import stream
from fedjax_sim.round.bases import Bases, starting_from
from fedjax_sim.round.collect import collect, everything
from fedjax_sim.round.compatibility import check_distinct
from fedjax_sim.round.costs import client_wires
from fedjax_sim.round.round import close, invite
from fedjax_sim.round.state import FederatedState, Gathered
from fedjax_sim.types import Algorithm, Array, Cohort, Population, PyTree, Received, Round, Star


class _Turns(NamedTuple):
    """The parts of rounds in turns; all of it is static."""

    star: Star  # the parts of the algorithm
    keeping_star: Star  # the same with an aggregator that keeps each message
    split: Split  # says which part of the model is the client's
    copies: int  # S, the number of copies of the server's part
    relay: bool  # whether the client's part is passed on together with the copy


def in_turns(made: Algorithm, split: Split, copies: int, *, relay: bool = False) -> Algorithm:
    """Makes the rounds of an algorithm go through the cohort in turns of `copies` clients.

    Args:
      made: of `federated`, with a client that trains the joint model.
      split: says which part of the model is the client's.
      copies: S, the number of copies of the server's part.
      relay: True: the client's part is passed on together with the copy. False: it starts from the broadcast at each
        client.

    Raises: ValueError for samplers that may draw a client twice.

    Guarantees: copies follow NumPy's loop (tests/algorithms/split/test_splitfed.py::test_copies_by_hand), and the relay
    is centralised SGD (::test_relay_is_centralised_sgd); only invited clients count, wherever empty slots stand
    (tests/laws/test_turns.py::test_padding); aggregators see zeros for the absent
    (tests/algorithms/split/test_splitfed.py::test_aggregators_see_zeros_for_the_absent).
    """
    star = made.parts
    assert star is not None, "`federated` states its parts"
    check_distinct(star.sampler, "A client is served once a round.")
    keeping_star = star._replace(aggregator=everything(star))
    turns = _Turns(star=star, keeping_star=keeping_star, split=split, copies=copies, relay=relay)

    def step(key, state, population):
        cohort, sampler_state = invite(star, key, state)
        gathered = _collect_in_turns(turns, key, cohort, state, population)
        return close(star, key, cohort, gathered, state._replace(sampler=sampler_state))

    parts = star._replace(complete=False)  # an edge made of the parts would not make turns
    return made._replace(step=step, observe=None, parts=parts)


def _collect_in_turns(
    turns: _Turns, key: Array, cohort: Cohort, state: FederatedState, population: Population
) -> Gathered:
    """Collects the messages of a cohort whose clients are served in turns.

    The aggregator must see messages relative to the broadcast, so the messages of all turns are kept first. Then the
    server's part of each (with `relay` all of it) is replaced by the difference between the last model of its copy and
    the broadcast, and they are accumulated.

    Args:
      turns: the parts.
      key, cohort, state, population: as in `collect`.
    """
    star, copies = turns.star, turns.copies
    num_slots = cohort.ids.shape[0]
    num_turns = -(-num_slots // copies)
    # The queue holds slots: those of invited clients in their order, then the others.
    queue = jnp.argsort(~cohort.invited, stable=True).astype(jnp.int32)
    rank = jnp.argsort(queue)  # the place of each slot in the queue
    places = jnp.arange(num_turns * copies, dtype=jnp.int32).reshape(num_turns, copies)
    slots_by_turn = queue[jnp.minimum(places, num_slots - 1)]
    is_slot = places < num_slots  # the last turn may have fewer clients than there are copies
    broadcast = engine.reproducible(star.server.broadcast)(state.server)
    models = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (copies, *x.shape)), broadcast)

    def turn(models, turn_slots):
        slots, is_real = turn_slots
        work = None if cohort.work is None else cohort.work[slots]
        turn_cohort = Cohort(
            cohort.ids[slots], cohort.invited[slots] & is_real, cohort.reported[slots] & is_real, work=work
        )
        bases = Bases(models, jnp.arange(copies, dtype=jnp.int32), jnp.ones(copies))
        gathered = collect(turns.keeping_star, key, turn_cohort, state, population, extension=starting_from(bases))
        updates, weights = engine.all_rows(gathered.carry, jnp.arange(copies, dtype=jnp.int32))

        def next_models(models, updates):
            after = jax.tree.map(lambda x, u: x + u.astype(x.dtype), models, updates)
            if turns.relay:
                return after
            # The next client starts from its own part of the broadcast, and from the copy as it is now.
            own_part = _parts(turns.split, models)[0]
            other_parts = _parts(turns.split, after)[1:]
            return jax.vmap(turns.split.cut.join)((own_part, *other_parts))

        losses = () if gathered.losses is None else gathered.losses
        by_slot = (updates, weights, gathered.arrived, gathered.dropped, losses)
        sums = (gathered.means, gathered.counts, gathered.num_arrived, gathered.num_dropped)
        return engine.reproducible(next_models)(models, updates), (by_slot, sums)

    last_models, (by_slot, sums) = jax.lax.scan(turn, models, (slots_by_turn, is_slot))
    # From [turns, copies] back to the order of slots.
    updates, weights, arrived, dropped, losses = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[rank], by_slot)
    means, counts, num_arrived, num_dropped = sums
    # Exact sums merge instead of adding up; all other numbers are integers.
    means, _ = jax.lax.scan(lambda a, b: (exact_sums.merge(a, b), None), *_first_and_others(means))
    counts, num_arrived, num_dropped = (
        jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), x) for x in (counts, num_arrived, num_dropped)
    )
    copy_index = rank % copies
    messages = engine.reproducible(lambda *x: _messages(turns, *x))(broadcast, last_models, updates, copy_index)
    messages = tree.where(arrived, messages, tree.zeros_like(messages))
    round = Round(cohort, broadcast, state.aggregator)
    carry = star.aggregator.init(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), messages), num_slots
    )

    def accumulate(carry, row):
        received = Received(*jax.tree.map(lambda x: x[None], row))
        return star.aggregator.accumulate(stream(key, "aggregation"), round, carry, received), None

    positions = jnp.arange(num_slots, dtype=jnp.int32)
    rows = (messages, weights, cohort.ids, positions)
    carry, _ = jax.lax.scan(engine.reproducible(accumulate), carry, rows)
    # (store, rows) of client states and memories. Neither client nor transform has any in turns, so they are unchanged.
    clients, memory = (engine.take(store, cohort.ids)[::-1] for store in (state.clients, state.memory))
    losses = None if star.sampler.observe is None else losses
    up, down = client_wires(star, broadcast, population)
    return Gathered(
        carry=carry,
        means=means,
        counts=counts,
        arrived=arrived,
        dropped=dropped,
        num_arrived=num_arrived,
        num_dropped=num_dropped,
        clients=clients,
        memory=memory,
        losses=losses,
        broadcast=broadcast,
        up=up,
        down=down,
    )


def _messages(turns: _Turns, broadcast: PyTree, last_models: PyTree, updates: PyTree, copy_index: Array) -> PyTree:
    """Returns the messages [m, ...] relative to the broadcast.

    A client's own part has its own update. All other parts have the change of its copy over the whole round; with
    `relay` all parts do.

    Args:
      turns: the parts.
      broadcast: the joint model at the round's beginning, leaves [...].
      last_models: leaves [S, ...], the copies at the end of the round.
      updates: leaves [m, ...], of the clients.
      copy_index: [m] int32, the copy that served each slot.
    """
    changes = jax.tree.map(lambda x, y: (x - y[None])[copy_index], last_models, broadcast)
    if turns.relay:
        return changes
    own_part = _parts(turns.split, updates)[0]
    other_parts = _parts(turns.split, changes)[1:]
    return jax.vmap(turns.split.cut.join)((own_part, *other_parts))


def _parts(split: Split, models: PyTree) -> tuple[PyTree, ...]:
    """Returns each party's part of models [k, ...]."""
    return jax.vmap(split.cut.split)(models)


def _first_and_others(stacked: PyTree) -> tuple[PyTree, PyTree]:
    """Returns (the first of the stacked pytrees, the others)."""
    return jax.tree.map(lambda x: x[0], stacked), jax.tree.map(lambda x: x[1:], stacked)
