"""What a round costs each client: that of real cohorts, and what is refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, network, population, sampling, theory, transform
from fedjax_sim.instruments import client_costs
from fedjax_sim.types import Algorithm

N = 12
PARAMS = {"w": jnp.zeros(3)}
DEVICES = {"speed": network.lognormal(30.0, 1.0), "bandwidth_down": 20.0, "bandwidth_up": network.lognormal(9.0, 0.5),
           "latency": 0.1}  # fmt: skip
ENERGY = {"joules_per_flop": 0.01, "compute_watts": network.uniform(1.0, 2.0), "radio_watts": 0.5}


@functools.cache
def clients():
    return population.quadratic_population(np.broadcast_to(np.eye(3), (N, 3, 3)), np.arange(3.0 * N).reshape(N, 3))


def fedavg(sampler, **options):
    options = {"num_steps": 2, "batch_size": 1, "mesh": None} | options
    return algorithms.fedavg(population.quadratic_loss, sampler, optax.sgd(0.1), **options)


def clocked(cohort_size=5, **options):
    return sampling.with_clock(sampling.uniform(N, cohort_size), network.heterogeneous(N, **DEVICES, **options))


@pytest.mark.default_rows("0.5")
@pytest.mark.parametrize("share", [None, 0.5])
def test_cohorts_spend_what_is_predicted(share):
    """4,000 cohorts, 5 standard errors. Fault: phases in another order, energy that a deadline does not end, ticks."""
    sampler = clocked(**ENERGY)
    algorithm = fedavg(sampler, transform=transform.quantize(8, range=1.0, keeps_zeros=False))
    costs = client_costs(algorithm, PARAMS, clients())
    assert (costs.bytes_down, costs.bytes_up) == (12, 3) and costs.seconds.shape == costs.joules.shape == (3, N)
    problem = theory.SharedQuadratics(population_size=N, dimension=3, strong_convexity=1.0, step_size=0.1, start=1.0,
                                      range=1.0, keeps_zeros=False)  # fmt: skip
    # A deadline after half of the clients have arrived, with others on their way.
    deadline = None if share is None else float(np.quantile(costs.seconds.sum(0), share))
    choice = theory.allocate(problem, {8: costs}, cohort_sizes=[5], deadlines=[deadline], bytes=1e9).best
    timed = sampler if deadline is None else sampling.with_deadline(sampler, deadline)
    # The state of the sampler without a deadline has the price of a round.
    state = algorithm.init(jax.random.key(0), PARAMS, clients()).sampler

    @jax.jit
    @jax.vmap
    def cohorts(key):
        cohort = timed.sample(key, state)[0]
        sent = cohort.reported if cohort.timing.sent is None else cohort.timing.sent
        joules = cohort.timing.spent.joules.sum()
        return cohort.reported.sum(), sent.sum(), joules, cohort.metrics["round_seconds"]

    reported, sent, joules, seconds = (
        np.asarray(x, np.float64) for x in cohorts(jax.random.split(jax.random.key(1), 4000))
    )
    predicted = choice.costs | {"reports": choice.reports}
    for name, samples in (("reports", reported), ("bytes", 5 * 12 + 3 * sent), ("joules", joules),
                          ("seconds", seconds)):  # fmt: skip
        error = max(samples.std() / 4000**0.5, 1e-6 * samples.mean())
        assert abs(samples.mean() - predicted[name]) < 5 * error < 0.05 * samples.mean(), name
    assert deadline is None or (1 < choice.reports < 4 and reported.mean() < sent.mean() < 5)


def test_unknown_energy_stays_unknown():
    """Fault: devices without energies whose rounds cost nothing."""
    assert client_costs(fedavg(clocked()), PARAMS, clients()).joules is None


@pytest.mark.parametrize(
    "algorithm, words",
    [
        (lambda: fedavg(sampling.uniform(N, 5)), "algorithm: expected one whose sampler has a clock"),
        (lambda: fedavg(sampling.with_deadline(clocked(), 2.0)), "sampler: expected with_clock"),
        (lambda: fedavg(sampling.with_over_selection(clocked(), 2)), "sampler: expected with_clock"),
        (lambda: fedavg(clocked(jitter=0.5)), "devices: expected times that are the same"),
        (lambda: fedavg(clocked(availability=network.bernoulli(0.5, slot_seconds=1))), "sampler: expected with_clock"),
        (lambda: fedavg(sampling.with_clock(sampling.with_dropout(sampling.uniform(N, 5), 0.5),
                                            network.heterogeneous(N, **DEVICES))), "sampler: expected with_clock"),
        (lambda: fedavg(sampling.with_clock(sampling.with_stragglers(sampling.uniform(N, 5), 0.5),
                                            network.heterogeneous(N, **DEVICES))), "sampler: expected with_clock"),
        (lambda: algorithms.mime(population.quadratic_loss, clocked(), optax.sgd(0.1), num_steps=2, batch_size=1,
                                 mesh=None), "two messages a round"),
        (lambda: Algorithm(lambda *_: 0, lambda *_: (0, {}), lambda state: state), "algorithm: expected one whose"),
    ],
)  # fmt: skip
def test_what_is_refused(algorithm, words):
    """Fault: costs of a round that `theory.allocate` does not describe."""
    with pytest.raises((TypeError, ValueError), match=words):
        client_costs(algorithm(), PARAMS, clients())
