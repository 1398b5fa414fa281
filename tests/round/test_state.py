"""The state before the first round."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import sampling, transform
from fedjax_sim.round.state import initial_state
from fedjax_sim.types import ClientUpdate
from tests.laws import problems as p
from tests.refusals import refused
from tests.round.stars import local, star

START = jnp.array(p.START)


def remembering() -> ClientUpdate:
    """Clients whose state begins from the model that they are first sent, and a number of visits."""
    work = local()
    return ClientUpdate(lambda params: {"own": 2 * params, "visits": jnp.int32(-1)}, lambda *args: work.apply(*args))


def test_everybody_begins_alike():
    """Faults: zeros in the place of what a client begins with, a row too few, the memory of a transform that is left
    out, a state of the server that is not that of the given model."""
    made = star(
        sampling.uniform(p.NUM_CLIENTS, 4),
        client=remembering(),
        transform=transform.error_feedback(transform.top_k(count=1)),
    )
    state = initial_state(made.parts, START, p.ragged())
    np.testing.assert_array_equal(state.clients["own"], np.tile(2 * p.START, (p.NUM_CLIENTS, 1)))
    np.testing.assert_array_equal(state.clients["visits"], np.full(p.NUM_CLIENTS, -1))
    memory = jax.tree.leaves(state.memory)
    assert [x.shape for x in memory] == [(p.NUM_CLIENTS, p.WIDTH)] and not memory[0].any()
    np.testing.assert_array_equal(made.params(state), p.START)
    assert int(state.round) == 0 and state.aggregator == ()


@pytest.mark.parametrize("num_clients", [p.NUM_CLIENTS - 1, p.NUM_CLIENTS + 1])
def test_a_sampler_of_another_population_is_refused(num_clients):
    """Catches clients that no round draws, and ids that nobody has."""
    made = star(sampling.uniform(num_clients, 4))
    with refused("sampler", value=num_clients, rule=f"the population's {p.NUM_CLIENTS} clients"):
        initial_state(made.parts, START, p.ragged())


def test_who_is_drawn_twice_keeps_no_state():
    """Catches a client whose state after one of its two messages would be lost; without states it may be drawn."""
    twice = sampling.with_replacement(p.NUM_CLIENTS, 4)
    initial_state(star(twice).parts, START, p.ragged())
    for parts in ({"client": remembering()}, {"transform": transform.error_feedback(transform.top_k(count=1))}):
        with refused("sampler", rule="without replacement"):
            initial_state(star(twice, **parts).parts, START, p.ragged())
