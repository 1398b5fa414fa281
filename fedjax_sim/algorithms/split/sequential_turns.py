"""Rounds of split learning in turns: copies of the servers' part serve the clients of a cohort one after the other.

With S copies a round has ceil(m / S) turns. In a turn each copy serves one client: its local steps move the copy and
the client's own part, and the copy goes on with the next client of the cohort, in the order of its slots. At the end
the clients' parts are aggregated, and so are the copies.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree
from fedjax_sim.algorithms.split.loss import Split
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.prng import stream
from fedjax_sim.round.collect import collect, everything
from fedjax_sim.round.compatibility import check_distinct
from fedjax_sim.round.costs import client_wires
from fedjax_sim.round.round import close, invite
from fedjax_sim.round.state import Bases, Gathered
from fedjax_sim.types import Algorithm, Array, Cohort, PyTree, Received, Round, Star

__all__ = ["in_turns"]


def in_turns(made: Algorithm, split: Split, copies: int, *, relay: bool = False) -> Algorithm:
    """The algorithm whose round goes through its cohort in turns of so many clients.

    Args:
      made: of `federated`, with a client that trains the joint model.
      split: says which part of it is the client's.
      copies: of the servers' part.
      relay: the client's part goes on with the copy.

    Raises: ValueError for samplers that may draw a client twice.

    Guarantees: tests/algorithms/split/test_splitfed.py::test_copies_by_hand, ::test_relay_is_centralised_sgd; only who
    is invited counts, not where else slots are empty (tests/laws/test_turns.py::test_padding); aggregators see zeros
    for the absent (tests/algorithms/split/test_splitfed.py::test_aggregators_see_zeros_for_the_absent).
    """
    star = made.parts
    check_distinct(star.sampler, "A client is served once a round.")
    keeping = star._replace(aggregator=everything(star))

    def step(key, state, population):
        cohort, sampler_state = invite(star, key, state)
        gathered = _turns(star, keeping, split, copies, relay, key, cohort, state, population)
        return close(star, key, cohort, gathered, state._replace(sampler=sampler_state))

    parts = star._replace(complete=False)  # its rounds are turns, which no edge above would make
    return made._replace(step=step, observe=None, parts=parts)


def _turns(
    star: Star, keeping: Star, split: Split, copies: int, relay: bool, key, cohort: Cohort, state, population
) -> Gathered:
    """`Gathered` of a cohort that goes through the servers' copies; its messages end at the copies' last models."""
    num_slots = cohort.ids.shape[0]
    turns = -(-num_slots // copies)
    line = jnp.argsort(~cohort.invited, stable=True).astype(jnp.int32)  # slots: the invited in their order, then others
    rank = jnp.argsort(line)  # of a slot in that line
    room = jnp.arange(turns * copies, dtype=jnp.int32).reshape(turns, copies)
    place = line[jnp.minimum(room, num_slots - 1)]
    there = room < num_slots
    broadcast = engine.steady(star.server.broadcast)(state.server)
    models = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (copies, *x.shape)), broadcast)

    def turn(models, slots):
        at, real = slots
        work = None if cohort.work is None else cohort.work[at]
        some = Cohort(cohort.ids[at], cohort.invited[at] & real, cohort.reported[at] & real, work=work)
        bases = Bases(models, jnp.arange(copies, dtype=jnp.int32), jnp.ones(copies))
        found = collect(keeping, key, some, state, population, bases)
        updates, weights = engine.all_rows(found.carry, jnp.arange(copies, dtype=jnp.int32))

        def moved(models, updates):
            after = jax.tree.map(lambda x, u: x + u.astype(x.dtype), models, updates)
            if relay:
                return after
            return jax.vmap(split.cut.join)((_parts(split, models)[0], *_parts(split, after)[1:]))

        losses = () if found.losses is None else found.losses
        told = (updates, weights, found.arrived, found.dropped, losses)
        rest = (found.means, found.counts, found.num_arrived, found.num_dropped)
        return engine.steady(moved)(models, updates), (told, rest)

    last, (told, rest) = jax.lax.scan(turn, models, (place, there))
    updates, weights, arrived, dropped, losses = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[rank], told)
    means, counts, num_arrived, num_dropped = rest
    means = jax.lax.scan(lambda a, b: (exact_sums.merge(a, b), None), *_first(means))[0]
    sums = [jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), x) for x in (counts, num_arrived, num_dropped)]
    messages = engine.steady(lambda *x: _ends(split, relay, *x))(broadcast, last, updates, rank % copies)
    messages = tree.where(arrived, messages, tree.zeros_like(messages))
    round = Round(cohort, broadcast, state.aggregator)
    carry = star.aggregator.init(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), messages), num_slots
    )

    def accumulate(carry, one):
        received = Received(*jax.tree.map(lambda x: x[None], one))
        return star.aggregator.accumulate(stream(key, "aggregation"), round, carry, received), None

    positions = jnp.arange(num_slots, dtype=jnp.int32)
    rows = (messages, weights, cohort.ids, positions)
    carry = jax.lax.scan(engine.steady(accumulate), carry, rows)[0]
    stores = [engine.take(store, cohort.ids)[::-1] for store in (state.clients, state.memory)]
    losses = None if star.sampler.observe is None else losses
    up_down = client_wires(star, broadcast, population)
    return Gathered(carry, means, sums[0], arrived, dropped, *sums[1:], *stores, losses, broadcast, *up_down)


def _ends(split: Split, relay: bool, broadcast: PyTree, last: PyTree, updates: PyTree, copy: Array) -> PyTree:
    """The messages [m, ...]: a client's own part moved as it says, all else to where its copy [m] ended."""
    ends = jax.tree.map(lambda x, y: (x - y[None])[copy], last, broadcast)
    if relay:
        return ends
    return jax.vmap(split.cut.join)((_parts(split, updates)[0], *_parts(split, ends)[1:]))


def _parts(split: Split, models: PyTree) -> tuple[PyTree, ...]:
    """Each party's part of models [k, ...]."""
    return jax.vmap(split.cut.split)(models)


def _first(stacked: PyTree) -> tuple[PyTree, PyTree]:
    """(the first of stacked pytrees, the others)."""
    return jax.tree.map(lambda x: x[0], stacked), jax.tree.map(lambda x: x[1:], stacked)
