"""Clients' values: those of separate runs, of the definition over all orders, and of permutations."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, population, sampling
from fedjax_sim.instruments import client_values
from fedjax_sim.population.members import without_clients
from fedjax_sim.prng import init_key
from fedjax_sim.running.loop import run
from tests.algorithms.personal import problem as p
from tests.refusals import refused

KEY, ROUNDS = jax.random.key(3), 3
# Two equal clients, one without rows, and two others.
ROWS = [p.rows()[0], p.rows()[0], {name: x[:0] for name, x in p.rows()[1].items()}, p.rows()[2], p.rows()[4]]
PEOPLE, SIZE = population.from_clients(ROWS), len(ROWS)
TEST = {name: jnp.concatenate([jnp.asarray(client[name]) for client in p.rows(1)]) for name in ("x", "y")}


def value(params):
    return -p.loss_fn(params, TEST, None)["loss"].mean()


@functools.cache
def algorithm():
    return algorithms.fedavg(p.loss_fn, sampling.full(SIZE), optax.sgd(p.RATE), **p.OPTIONS)


@functools.cache
def exact():
    return client_values(algorithm(), p.start(), PEOPLE, ROUNDS, value, key=KEY)


@functools.cache
def step():
    return jax.jit(algorithm().step)


@functools.cache
def alone(members):
    """The value of a coalition's rounds by themselves."""
    people = without_clients(PEOPLE, [i for i in range(SIZE) if i not in members])
    state = algorithm().init(init_key(KEY), p.start(), people)
    for t in range(ROUNDS):
        state, _ = step()(jax.random.fold_in(KEY, t), state, people)
    return float(value(algorithm().params(state)))


def test_values_are_those_of_runs():
    """Catches shares of coalitions by another law than that of all orders, and clients outside who train."""
    shapley = np.zeros(SIZE)
    orders = list(itertools.permutations(range(SIZE)))
    for order in orders:
        for place, client in enumerate(order):
            gain = alone(frozenset(order[: place + 1])) - alone(frozenset(order[:place]))
            shapley[client] += gain / len(orders)
    state, _ = run(KEY, algorithm(), p.start(), PEOPLE, ROUNDS)
    assert alone(frozenset(range(SIZE))) == float(value(algorithm().params(state)))
    found = exact()
    np.testing.assert_allclose(found.shapley, shapley, atol=1e-6)
    everyone = frozenset(range(SIZE))
    expected = [alone(everyone) - alone(everyone - {i}) for i in range(SIZE)]
    np.testing.assert_allclose(found.leave_one_out, expected, atol=1e-6)
    assert found.value_of_none == pytest.approx(float(value(p.start())), abs=1e-6)
    assert found.num_coalitions == 2**SIZE and not found.standard_errors.any()
    assert found.shapley.sum() == pytest.approx(found.value_of_all - found.value_of_none, abs=1e-9)
    assert found.shapley[0] == pytest.approx(found.shapley[1], abs=1e-6) and abs(found.shapley[0]) > 1e-3
    assert found.shapley[2] == pytest.approx(0, abs=1e-6)


@pytest.mark.full
def test_permutations():
    """Within five standard errors: a false alarm in 10^5 runs at most. Catches orders that are not uniform."""
    found = client_values(algorithm(), p.start(), PEOPLE, ROUNDS, value, key=KEY, num_permutations=60)
    errors = np.maximum(found.standard_errors, 1e-6)
    assert (np.abs(found.shapley - exact().shapley) < 5 * errors).all() and found.standard_errors.max() > 1e-4
    assert found.shapley.sum() == pytest.approx(found.value_of_all - found.value_of_none, abs=1e-9)
    np.testing.assert_allclose(found.leave_one_out, exact().leave_one_out, atol=1e-6)


def test_what_is_refused():
    many = population.from_clients(p.rows() * 3)
    wide = algorithms.fedavg(p.loss_fn, sampling.full(15), optax.sgd(p.RATE), **p.OPTIONS)
    with refused("population", value=15, rule="at most 12"):
        client_values(wide, p.start(), many, ROUNDS, value, key=KEY)
    two, start = population.quadratic_population([1.0, 1.0], [1.0, 2.0]), {"w": jnp.zeros(1)}
    tame, wild = (
        algorithms.fedavg(population.quadratic_loss, sampling.full(2), optax.sgd(rate), num_steps=1, mesh=None)
        for rate in (0.1, 1e30)
    )
    with pytest.raises(FloatingPointError, match="values are not finite"):
        client_values(tame, start, two, 1, lambda params: jnp.nan, key=KEY)
    with refused("value", rule="single number"):
        client_values(tame, start, two, 1, lambda params: jnp.zeros(2), key=KEY)
    with pytest.raises(FloatingPointError, match="updates were not finite"):
        client_values(wild, start, two, ROUNDS, lambda params: params["w"][0], key=KEY)
