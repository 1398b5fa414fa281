"""Wang et al. 2020: unequal local work shifts FedAvg's fixed point, and normalised averaging removes the shift."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import adversary, aggregation, algorithms, client, sampling, server, transform
from fedjax_sim.transform.chain import wire_of
from fedjax_sim.types import ClientData
from tests.oracles import scalars
from tests.refusals import refused

# curvature 1, a = (0, 1), p = (1/2, 1/2), K = (1, 10): one epoch of batches of one over n = (1, 10) examples
WORK = {"num_epochs": 1, "batch_size": 1, "weighting": "uniform"}


def data():
    return scalars.clients((1.0, 1.0), (0.0, 1.0), (1, 10))


def fednova(rate=0.1, **options):
    return algorithms.fednova(scalars.loss, sampling.full(2), optax.sgd(rate), **WORK, **scalars.OPTIONS, **options)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("rate, expected", [(0.1, 0.866901), (0.01, 0.905319)])
def test_unequal_work_shifts_fedavg(rate, expected):
    """Catches clients that are all given the same number of steps (0.5 then)."""
    algorithm = algorithms.fedavg(scalars.loss, sampling.full(2), optax.sgd(rate), **WORK, **scalars.OPTIONS)
    reached, _ = scalars.converged(algorithm, data(), num_rounds=round(12 / rate))
    assert abs(reached - expected) < 2e-6
    small_rate_limit = 10 / 11
    assert abs(reached - small_rate_limit) < 0.5 * rate


@pytest.mark.full
def test_fednova_converges_to_the_optimum_for_small_rates():
    """FedNova's normalised directions are means of the local gradients, so the remaining shift is of the rate's order.

    With progress q_i = 1 - (1 - eta)^K_i of K_i steps its fixed point is (sum q_i a_i / K_i) / (sum q_i / K_i), and
    tends to 1/2 where FedAvg tends to 10/11. Catches a missing division by the steps.
    """
    for rate in (0.1, 0.01):
        progress = 1 - (1 - rate) ** np.array([1, 10])
        shares = progress / np.array([1, 10])
        algorithm = fednova(rate)
        reached, path = scalars.converged(algorithm, data(), num_rounds=round(12 / rate))
        assert abs(reached - shares[1] / shares.sum()) < 2e-6
        assert abs(reached - 0.5) < 2 * rate
        mean_steps = 5.5  # tau_eff scales the mean direction: the factor by which a round contracts
        assert abs((path[1] - reached) / (path[0] - reached) - (1 - mean_steps * shares.mean())) < 1e-3


def test_steps_are_sent_beside():
    """Catches a number of steps that a clip shortens or a sparsifier drops, one that is not counted as sent, and noise,
    beside which it would reveal the number of examples."""

    def part(member):
        return fednova(transform=member).parts.transform

    message = {"direction": jnp.array([3.0, 4.0]), "steps": jnp.float32(10)}
    clip, sparse = part(transform.clip(1.0)), part(transform.top_k(count=1))
    for member, expected in ((clip, [0.6, 0.8]), (sparse, [0.0, 4.0])):
        state, memory = member.init(message), member.init_client(message)
        sent, _, measured = member.on_client(jax.random.key(0), message, state, memory)
        np.testing.assert_allclose(sent["direction"], expected, rtol=1e-4)
        assert sent["steps"] == 10
        after, _, _ = member.on_server(jax.random.key(0), None, sent, state, measured, None)
        assert after["steps"] == 10
    assert wire_of(sparse, message).bits == wire_of(transform.top_k(count=1), message["direction"]).bits + 32
    with refused("transform", value="gaussian"):
        part(transform.gaussian_mechanism(1.0, 1.0))
    with pytest.raises(TypeError, match="transform: expected an UpdateTransform"):
        part(transform.clip)


@pytest.mark.full
def test_attackers_would_change_the_steps():
    """Catches an attack that is none: where everybody flips a whole message, the step is the honest one."""
    everybody = adversary.share_of_clients(1.0)
    flipped = adversary.corrupted(aggregation.mean(), adversary.sign_flip(), everybody)
    with refused("aggregator", rule="attackers inside"):
        fednova(aggregator=flipped)
    rule = aggregation.by_part({"direction": flipped, "steps": aggregation.mean()})
    solver = client.local_sgd(scalars.loss, optax.sgd(0.1), client.work(**WORK))
    parts = client.normalized(solver), rule, server.rescaled(server.optimizer(optax.sgd(1.0)))
    attacked = algorithms.federated(sampling.full(2), *parts, **scalars.OPTIONS)
    honest = fednova()
    moved = []
    for algorithm in (honest, attacked):  # the way from the start after one round
        _, path = scalars.converged(algorithm, data(), num_rounds=1)
        moved.append(path[0] - 0.3)
    assert moved[0] > 0.04
    np.testing.assert_allclose(moved[1], -moved[0], rtol=1e-4)


def test_a_bound_would_shorten_the_steps():
    """Catches a bound on the norm of direction and steps together, which makes a client's local work shorter too."""
    bounded = aggregation.norm_bounding(aggregation.mean(), 1.0)
    for rule in (bounded, aggregation.by_part({"direction": bounded, "steps": aggregation.mean()})):
        with refused("aggregator", rule="homogeneous"):
            fednova(aggregator=rule)
    fednova(aggregator=aggregation.median())


@pytest.mark.full
def test_equal_work_is_fedavg():
    """Catches a wrong tau_eff: with K_i = K for all the normalisation cancels."""
    equal = scalars.clients((1.0, 10.0), (0.0, 1.0), (2, 3))
    work = {"num_steps": 4, **scalars.OPTIONS}
    plain = algorithms.fedavg(scalars.loss, sampling.full(2), optax.sgd(0.05), **work)
    nova = algorithms.fednova(scalars.loss, sampling.full(2), optax.sgd(0.05), **work)
    one, other = (scalars.converged(algorithm, equal, num_rounds=5)[1] for algorithm in (plain, nova))
    np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("momentum, shrinkage", [(0.0, 0.0), (0.7, 0.0), (0.0, 0.2)])
def test_effective_steps_weigh_constant_gradients(momentum, shrinkage):
    """|a|_1 by running the solver on a constant gradient of -1: w = rate |a|_1. Catches a wrong geometric sum."""
    from fedjax_sim.client.normalized import effective_steps

    rate, steps = 0.1, 5
    data = ClientData(jnp.ones(2), jnp.ones(2, bool))
    options = {"num_steps": steps}
    if shrinkage:
        work = client.proximal(lambda w, x, key: -w * x, optax.sgd(rate), shrinkage / rate, client.work(**options))
    else:
        work = client.local_sgd(
            lambda w, x, key: -w * x, optax.sgd(rate, momentum=momentum or None), client.work(**options)
        )
    wrapped = client.normalized(work, momentum=momentum, shrinkage=shrinkage)
    report, _ = jax.jit(wrapped.apply)(jax.random.key(0), jnp.float32(0), (), data)
    moved = work.apply(jax.random.key(0), jnp.float32(0), (), data)[0].update
    np.testing.assert_allclose(moved / rate, effective_steps(jnp.float32(steps), momentum, shrinkage), rtol=1e-5)
    np.testing.assert_allclose(report.update["steps"], moved / rate, rtol=1e-5)
    np.testing.assert_allclose(report.update["direction"], rate, rtol=1e-5)
