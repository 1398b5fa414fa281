"""What the clients of a cohort receive: examples, or groups of clients where they are federations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, population, sampling
from fedjax_sim.algorithms import as_client_update
from fedjax_sim.round.inputs import inputs_of
from fedjax_sim.round.message import Shared, Slot
from fedjax_sim.types import Cohort
from tests.laws import problems as p
from tests.round.stars import KEY, star

GROUPS = np.arange(p.NUM_CLIENTS) % 5 % 3  # groups of 10, 9 and 5 clients
FLAT = star(sampling.full(p.NUM_CLIENTS)).parts
EDGES = star(sampling.full(3), client=as_client_update(star(sampling.full(10)).parts)).parts


def read(inputs, people, id, *, rows=None, reported=True, worked=True, **slot_fields):
    """What the client of one slot receives."""
    shared = Shared(
        key=KEY, broadcast=(), transform=(), population=people, cohort=None, aggregator=(), round=jnp.int32(7)
    )
    fields = {"client": (), "memory": (), "work": None} | slot_fields
    slot = Slot(position=0, id=id, keys=(), reported=jnp.array(reported), worked=jnp.array(worked), **fields)
    return inputs.read(shared, slot, rows)


def test_who_does_not_report_sees_nothing():
    """Faults: padding's NaN that reach the loss, rows of another client, a client that trains for nothing, a round or
    a share of the work that is not the slot's."""
    people, id = p.ragged(), 1
    inputs = inputs_of(FLAT, people)
    present, absent = (read(inputs, people, jnp.int32(id), reported=x) for x in (True, False))
    size = int(p.SIZES[id])
    expected = np.where(np.arange(p.ROWS)[:, None] < size, p.FEATURES[id], 0)
    np.testing.assert_array_equal(present.examples["x"], expected)
    assert present.mask.tolist() == [i < size for i in range(p.ROWS)] and int(present.round) == 7
    assert not absent.mask.any() and not any(x.any() for x in jax.tree.leaves(absent.examples))
    other = read(inputs, people, jnp.int32(id), work=jnp.int32(2), version=jnp.int32(3))
    assert (int(other.work), int(other.round)) == (2, 3)


def test_few_rows_are_read_where_few_are_asked_for():
    """Fault: clients of a small size class that read, and train on, as many rows as the largest class has."""
    sizes = [2, 70, 1]
    rows = {"x": np.arange(73.0, dtype=np.float32)}
    people = population.stored(rows, np.concatenate([[0], np.cumsum(sizes)]))
    inputs = inputs_of(FLAT, people)
    small, large = people.capacities
    assert 2 < small < large == 70
    for number, expected in ((None, large), (large, large), (small, small)):
        assert read(inputs, people, jnp.int32(0), rows=number).mask.shape == (expected,)
    last = read(inputs, people, jnp.int32(2), rows=small)
    assert float(last.examples["x"][0]) == 72 and int(last.mask.sum()) == 1


def test_groups_work_whose_messages_are_late():
    """Faults: rounds inside of a late edge that are not counted, an edge that never sent and is counted, a group that
    makes its rounds although it was not invited."""
    people = population.grouped(p.ragged(), GROUPS)
    inputs = inputs_of(EDGES, people)
    invited, in_time, sent = (jnp.array(x) for x in ([True, True, True], [True, False, False], [True, True, False]))
    cohort = Cohort(jnp.arange(3), invited, in_time)
    assert inputs.works(cohort, in_time).tolist() == in_time.tolist()
    assert inputs.works(cohort.timed(sent=sent), in_time).tolist() == sent.tolist()
    assert inputs_of(FLAT, people).works(cohort.timed(sent=sent), in_time).tolist() == in_time.tolist()
    at_work, at_rest = (read(inputs, people, jnp.int32(2), worked=x) for x in (True, False))
    places = jnp.arange(10)
    assert int(at_work.there(places).sum()) == int((GROUPS == 2).sum()) == 5
    assert at_work.own_ids(places)[:5].tolist() == np.flatnonzero(GROUPS == 2).tolist()
    assert not at_rest.there(places).any()


def test_what_follows_from_the_parts():
    """Catches edges that are vmapped, empty places that cost as much as clients, and clients of a whole population
    that pass for places which may be empty."""
    people = population.grouped(p.ragged(), GROUPS)
    assert inputs_of(EDGES, people).plan == engine.Plan(1, 1) and inputs_of(FLAT, p.ragged()).plan is None
    assert inputs_of(FLAT, people.group(jnp.int32(0))).may_skip
    assert not inputs_of(FLAT, p.ragged()).may_skip and not inputs_of(EDGES, people).may_skip
