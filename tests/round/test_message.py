"""Which messages can be used, and what is left of the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import sampling
from fedjax_sim.round.extension import Extension
from fedjax_sim.round.message import LARGEST, SMALLEST, Message, Shared, Slot, client_round, stays_finite, usable_rows
from fedjax_sim.types import ClientUpdate, Mean, Report
from tests.laws import problems as p
from tests.round.stars import KEY, star

NAN, INF = np.nan, np.inf
# (largest number of the update, weight, metric, state, reported, id), and what becomes of the message.
ARRIVED, DROPPED, ABSENT = (True, False), (False, True), (False, False)
CASES = [
    ((1.0, 2.0, 0.0, 0.0, True, 3), ARRIVED),
    ((1.0, 2.0, 0.0, 0.0, False, 3), ABSENT),
    ((1.0, 0.0, 0.0, 0.0, True, 3), ABSENT),  # a weight of 0 says that there is nothing to report
    ((NAN, 0.0, 0.0, 0.0, True, 3), ABSENT),
    ((1.0, -1.0, 0.0, 0.0, True, 3), DROPPED),
    ((1.0, NAN, 0.0, 0.0, True, 3), DROPPED),
    ((1.0, SMALLEST, 0.0, 0.0, True, 3), ARRIVED),
    ((1.0, SMALLEST / 2, 0.0, 0.0, True, 3), DROPPED),
    ((NAN, 2.0, 0.0, 0.0, True, 3), DROPPED),
    ((-INF, 2.0, 0.0, 0.0, True, 3), DROPPED),
    ((LARGEST / 2, 1.0, 0.0, 0.0, True, 3), ARRIVED),
    ((-LARGEST, 1.0, 0.0, 0.0, True, 3), DROPPED),
    ((LARGEST / 4, 2.0, 0.0, 0.0, True, 3), ARRIVED),
    ((LARGEST / 4, 4.0, 0.0, 0.0, True, 3), DROPPED),  # their product overflows in a sum, and neither does alone
    ((1.0, LARGEST, 0.0, 0.0, True, 3), DROPPED),
    ((1.0, 2.0, NAN, 0.0, True, 3), DROPPED),
    ((1.0, 2.0, 0.0, INF, True, 3), DROPPED),
    ((NAN, 2.0, NAN, NAN, False, 3), ABSENT),
    ((1.0, 2.0, 0.0, 0.0, True, 0), ARRIVED),
    ((1.0, 2.0, 0.0, 0.0, True, p.NUM_CLIENTS - 1), ARRIVED),
    ((1.0, 2.0, 0.0, 0.0, True, p.NUM_CLIENTS), DROPPED),  # nobody has these ids
    ((1.0, 2.0, 0.0, 0.0, True, -1), DROPPED),
    ((1.0, 2.0, 0.0, 0.0, False, -1), ABSENT),
]


def test_what_can_be_used():
    """A table by hand. Faults: a bound that is off by one, a product that is not looked at, NaN in a metric or a state
    that passes, a client with nothing to report that counts as broken, an id behind the last that is read as the last.
    """
    values, outcomes = zip(*CASES, strict=True)
    largest, weight, metric, state, reported, id = (np.array(x) for x in zip(*values, strict=True))

    def apply(key, start, state, row):
        update = jnp.zeros(5).at[2].set(row["largest"])
        return Report(update, row["weight"], {"own": Mean(row["metric"], jnp.float32(1))}), row["state"]

    parts = star(sampling.full(p.NUM_CLIENTS)).parts._replace(client=ClientUpdate(lambda params: (), apply))
    rows = {"largest": largest, "weight": weight, "metric": metric, "state": state}
    rows = {name: jnp.array(x, jnp.float32) for name, x in rows.items()}
    one_client = client_round(parts, lambda shared, slot, rows: slot.extension, Extension())

    @jax.jit
    def messages(rows, reported, id):
        shared = Shared(KEY, jnp.zeros(5), (), p.ragged(), cohort=None, aggregator=())
        keys = jax.random.key_data(jax.random.split(KEY, len(CASES)))
        slots = Slot(
            position=jnp.arange(len(CASES)),
            id=id,
            keys=(keys, keys),
            reported=reported,
            worked=reported,
            client=jnp.zeros(len(CASES)),
            memory=(),
            work=None,
            extension=rows,
        )
        return jax.vmap(lambda slot: one_client(shared, slot, None)[0])(slots)

    found = messages(rows, jnp.array(reported), jnp.array(id, jnp.int32))
    assert list(zip(found.arrived.tolist(), found.dropped.tolist(), strict=True)) == list(outcomes)


def test_nothing_is_left_of_what_did_not_arrive():
    """Faults: NaN times zero in a sum, a row of another client, a metric of a client that was dropped."""
    arrived = np.array([True, False, True, False])
    numbers = np.array([1.0, NAN, 2.0, 5.0], np.float32)
    update = {"matrix": np.tile(numbers[:, None, None], (1, 2, 3)), "number": numbers, "integer": np.arange(4)}
    message = Message(
        update=update,
        weight=numbers,
        means={"loss": Mean(numbers, numbers)},
        arrived=arrived,
        dropped=~arrived,
        counts={},
    )
    found = usable_rows(jax.tree.map(jnp.asarray, message))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(message), strict=True):
        if y.dtype != bool:
            mask = arrived.reshape(-1, *[1] * (y.ndim - 1))
            np.testing.assert_array_equal(x, np.where(mask, y, 0))


def test_only_what_was_finite_can_break():
    """Catches a moment that overflows beside finite parameters, an infinity of the start that ends all learning, and a
    leaf that is skipped beside the one that is known."""
    good, bad, numbers = jnp.ones(2), jnp.array([1.0, INF]), jnp.arange(2)
    for old, new, expected in (
        ((good, numbers), (good, numbers), True),
        ((good, good), (good, bad), False),
        ((bad, good), (bad, good), True),
        ((bad, good), (bad, bad), False),
        ((), (), True),
    ):
        assert bool(stays_finite(old, new)) == expected
    assert not stays_finite((good, good), (good, bad), finite=good)
    assert stays_finite((good, good), (good, bad), finite=bad)  # it was looked at already
