"""A user's own population: `size` and `client(id)`, and nothing else, is enough for all that reads populations."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, metrics, population, run, sampling
from fedjax_sim.population.describe import describe
from fedjax_sim.population.protocol import sizes_of
from fedjax_sim.types import ClientData
from tests.laws import problems as p

KEY, START = jax.random.key(0), jnp.array(p.START)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own:
    """The least that the protocol asks for. An id outside of [0, size), which must not occur, gives another's rows."""

    rows: dict  # [N, n, ...]
    mask: jax.Array  # [N, n]
    size: int = dataclasses.field(metadata={"static": True})

    def client(self, id):
        return ClientData(jax.tree.map(lambda x: x[id], self.rows), self.mask[id])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counting(Own):
    """With the number of examples too, without which clients are not sorted by size."""

    def count(self, id):
        return self.mask[id].sum()


def own(kind=Own):
    full = jax.vmap(p.ragged().client)(jnp.arange(p.NUM_CLIENTS))
    return kind(full.examples, full.mask, p.NUM_CLIENTS)


def make(**work):
    return algorithms.fedavg(p.linear_loss, sampling.uniform(p.NUM_CLIENTS, 4), optax.sgd(0.05), mesh=None, **work)


def test_size_and_client_are_enough_to_train():
    """Catches a round, an evaluation or a plan that reads what only the built-in populations have."""
    judge = metrics.evaluation(p.linear_loss, held_out=own())
    found, expected = (
        run(KEY, make(num_steps=2), START, people, 2, evaluation=judge)[1].records for people in (own(), p.ragged())
    )
    assert found == expected and "held_out_loss" in found[-1]
    algorithm = make(num_epochs=2, batch_size=2)
    for people in (own(), own(Counting)):  # traced is planned; sorted where they can be counted
        state = jax.eval_shape(algorithm.init, KEY, START, people)
        assert "local_loss" in jax.eval_shape(algorithm.step, KEY, state, people)[1]


def test_size_and_client_are_enough_to_look_at():
    """Catches rows lost or read twice where the population does not count them, and ids past the last client."""
    mine, built = own(), p.ragged()
    np.testing.assert_array_equal(sizes_of(mine), built.sizes)
    jax.tree.map(np.testing.assert_array_equal, population.pooled(mine), population.pooled(built))
    halves = [population.grouped(x, np.arange(x.size) % 2) for x in (mine, built)]
    jax.tree.map(np.testing.assert_array_equal, halves[0].sizes, halves[1].sizes)
    jax.tree.map(np.testing.assert_array_equal, halves[0].group(1).sizes, halves[1].group(1).sizes)
    jax.tree.map(np.testing.assert_array_equal, *(population.pooled(x) for x in halves))
    data = population.digits(num_clients=5)
    about = [describe(data._replace(train=x, task="regression")) for x in (mine, built)]
    assert about[0] == about[1]


class Named(NamedTuple):
    size: int
    x: jax.Array

    def client(self, id):
        return ClientData({"x": self.x}, jnp.ones(3, bool))


class Plain:
    size = 3

    def client(self, id):
        return ClientData({"x": jnp.ones((3, 1))}, jnp.ones(3, bool))


def of(client, size=3, rows=None):
    """A population whose client is this function's result."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Other:
        rows: jax.Array
        size: int = dataclasses.field(metadata={"static": True})

        def client(self, id):
            return client(self.rows)

    return Other(jnp.ones((3, 2)) if rows is None else rows, size)


MASK = jnp.ones(3, bool)
WRONG = {
    "unregistered": (Plain(), TypeError, "population: expected a pytree dataclass, got 'Plain'. Write @jax.tree_util."),
    "size that is a leaf": (Named(3, jnp.ones(3)), TypeError, "population.size: expected a static integer"),
    "size that is a float": (of(lambda x: ClientData(x, MASK), 3.0), TypeError, "population.size: expected an integer"),
    "nobody": (of(lambda x: ClientData(x, MASK), 0), ValueError, "population.size: expected an integer in"),
    "text": (of(lambda x: ClientData(x, MASK), rows=np.array(["a"])), TypeError, "population.rows: expected an array"),
    "complex": (of(lambda x: ClientData(x * 1j, MASK)), TypeError, "of bool, integer or float, got 'complex64'"),
    "a tuple": (of(lambda x: (x, MASK)), TypeError, "population.client: expected ClientData(examples"),
    "a float mask": (of(lambda x: ClientData(x, jnp.ones(3))), TypeError, "population.client: expected ClientData("),
    "no rows": (of(lambda x: ClientData({}, MASK)), ValueError, "population.client: expected leaves of 3 rows"),
    "other rows": (of(lambda x: ClientData(x[:2], MASK)), ValueError, "leaves of 3 rows like the mask, got [(2, 2)]"),
    "a data set": (population.quadratics(), TypeError, "population: expected a Population, got 'FederatedData'"),
}


@pytest.mark.parametrize(("people", "error", "words"), WRONG.values(), ids=WRONG)
def test_what_is_no_population_is_refused(people, error, words):
    """Catches JAX's own error message, or a wrong broadcast, where a user's population breaks the protocol."""
    with pytest.raises(error) as caught:
        run(KEY, make(num_steps=1), START, people, 1)
    assert words in str(caught.value)
