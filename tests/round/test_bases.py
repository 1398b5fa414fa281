"""Clients that start from models of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine, sampling
from fedjax_sim.round.bases import Bases, starting_from
from fedjax_sim.round.collect import collect, everything
from fedjax_sim.types import ClientFacts, ClientUpdate, Report
from fedjax_sim.validate import InvalidType
from tests.laws import problems as p
from tests.refusals import refused
from tests.round.stars import KEY, star, started

IDS = np.array([3, 17, 0, 5, 22], np.int32)
INDEX = np.array([2, 0, 1, 1, 2], np.int32)  # neither the slots nor the ids
VERSIONS = np.array([4, 9, 1, 1, 6], np.int32)
FACTORS = np.array([1.0, 0.5, 0.25, 2.0, 0.125], np.float32)
MODELS = np.random.default_rng(2).normal(size=(3, p.WIDTH)).astype(np.float32)


def sending_its_start(key, start, state, data):
    """A client that sends what it was given: its model, and the round that it was told."""
    number = jnp.broadcast_to(jnp.float32(data.round), start.shape)
    return Report(jnp.stack([start, number]), jnp.float32(1), {}), state


@pytest.mark.parametrize("factors, versions", [(None, None), (FACTORS, VERSIONS)])
def test_own_models_and_factors(factors, versions):
    """Every message is the slot's factor times its own model, exactly; the factors are powers of two. Faults: the
    broadcast, a model by slot or by id, a factor of another slot, a round of the server in the place of a version."""
    client = ClientUpdate(lambda params: (), sending_its_start, ClientFacts(uniform_weights=True, reads_round=True))
    made = star(sampling.uniform(p.NUM_CLIENTS, len(IDS)))
    parts = made.parts._replace(client=client)
    parts = parts._replace(aggregator=everything(parts))
    state = started(made)._replace(round=jnp.int32(7))

    @jax.jit
    def messages(models, state, people):
        bases = Bases(models, jnp.array(INDEX), factors, versions)
        gathered = collect(parts, KEY, p.cohort(IDS), state, people, extension=starting_from(bases))
        return engine.all_rows(gathered.carry, jnp.arange(len(IDS)))[0], gathered.broadcast

    found, broadcast = messages(jnp.array(MODELS), state, p.ragged())
    scale = np.ones(len(IDS), np.float32) if factors is None else factors
    numbers = np.full(len(IDS), 7) if versions is None else versions
    np.testing.assert_array_equal(found[:, 0], scale[:, None] * MODELS[INDEX])
    np.testing.assert_array_equal(found[:, 1, 0], scale * numbers)
    np.testing.assert_array_equal(broadcast, p.START)  # what an aggregator sees stays the server's


def test_bases_alone_are_no_extension():
    """Catches models that are handed to `collect` and then ignored, so that every client starts from the broadcast."""
    made = star(sampling.uniform(p.NUM_CLIENTS, len(IDS)))
    with refused("extension", value="Bases", rule="an Extension", kind=InvalidType):
        collect(made.parts, KEY, p.cohort(IDS), started(made), p.ragged(), extension=Bases(MODELS, INDEX))
