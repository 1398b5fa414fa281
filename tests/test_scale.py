"""Scale: a million clients in one round, a cohort out of a billion."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, client, population, run, sampling, server
from fedjax_sim.types import ClientData

pytestmark = pytest.mark.optimised


def mean_loss(params, examples, key):
    return 0.5 * ((params[None] - examples["x"]) ** 2).sum(-1)


def one_step(sampler, aggregator):
    """One full gradient step of rate 1 from 0: each client sends the mean of what it holds."""
    work = client.local_sgd(mean_loss, optax.sgd(1.0), client.work(num_steps=1, weighting="uniform"))
    return algorithms.federated(sampler, work, aggregator, server.optimizer(optax.sgd(1.0)))


def clients(size):
    def generate(parameters, id):
        x = (id % 1000).astype(jnp.float32)[None, None] + parameters
        return ClientData({"x": x}, jnp.ones(1, bool))

    return population.generated(size, generate, jnp.float32(0.25))


@pytest.mark.full
def test_a_million_clients_in_one_round_are_summed_exactly():
    """Fault: a float32 running sum, 1 % off by the end, or memory that grows with the cohort."""
    size = 1_000_000
    state, history = run(
        jax.random.key(0), one_step(sampling.full(size), aggregation.mean()), jnp.zeros(1), clients(size), 1
    )
    assert history.summary["client_visits"] == size
    assert float(state.server.params[0]) == 499.75  # the mean of 0..999, plus 0.25, with no rounding at all


@pytest.mark.optimised(False)
def test_a_cohort_out_of_a_billion():
    """Fault: anything of size N: an id table, a sort of the population, 32-bit overflow of ids."""
    size, cohort = 10**9, 100_000
    state, _ = run(
        jax.random.key(0), one_step(sampling.uniform(size, cohort), aggregation.mean()), jnp.zeros(1), clients(size), 1
    )
    deviation = np.sqrt((1000**2 - 1) / 12 / cohort)
    assert abs(float(state.server.params[0]) - 499.75) < 5 * deviation  # false alarm below 1e-6
