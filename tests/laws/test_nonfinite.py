"""Nothing that is not finite reaches the model, and every loss is counted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, client, population, sampling, server, transform
from fedjax_sim.algorithms import federated
from fedjax_sim.engine import Plan
from fedjax_sim.types import ClientData
from tests.laws import laws, problems as p

pytestmark = pytest.mark.optimised(False)  # these laws do not depend on the compiler


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e18], ids=str)
def test_dropped_clients_equal_absent_ones(value, federation):
    """Catches 0 * NaN in a sum, a metric that is poisoned, a missing count. 1e18 overflows only in the update."""
    laws.nonfinite_clients_are_dropped(value, federation)


def test_absent_clients_leave_no_trace(federation):
    """Catches a denominator that counts the cohort, and memory written for those who are not there."""
    laws.absent_clients_leave_no_trace(federation)


def test_nothing_received(federation):
    """Catches 0 / 0, and a server step (momentum, decay) on an empty round."""
    laws.nothing_received_changes_nothing(federation)


@pytest.mark.parametrize(
    "rule", [pytest.param(optax.sgd(3e38), id="model", marks=pytest.mark.full), pytest.param(None, id="moment")]
)
def test_diverging_server_step(rule):
    """Catches an infinite model, or an infinite moment behind a finite model, that ends all later learning."""
    rule = rule and optax.chain(optax.scale(1e3), rule)
    laws.diverging_server_steps_are_skipped(rule)


@pytest.mark.full
def test_broken_clients_among_many_lanes_are_counted():
    """Catches a maximum over many clients' updates at once that drops NaN, as XLA:CPU's does: then the round is lost.

    The loss is finite and its gradient is not, so that only the update shows it.
    """
    clients, width = 64, 64
    broken = np.arange(clients) % 3 == 0

    def read(broken, id):
        return ClientData(broken[id, None].astype(jnp.float32), jnp.ones(1, bool))

    def loss(params, broken, key):
        return ((params - 1) ** 2).sum()[None] + jnp.sqrt(broken * params[1] ** 2 + 1 - broken)

    work = client.local_sgd(loss, optax.sgd(0.25), client.work(num_steps=1))
    parts = {"client": work, "aggregator": aggregation.mean(), "server": server.optimizer(optax.sgd(1.0))}
    everybody, plan = sampling.uniform(clients, clients), Plan(lanes=clients, chunk=clients)
    algorithm = federated(everybody, **parts, plan=plan, mesh=None)
    data = population.generated(clients, read, jnp.array(broken))
    start = algorithm.init(jax.random.key(0), jnp.zeros(width), data)
    state, info = jax.jit(algorithm.step)(jax.random.key(1), start, data)
    assert int(info["dropped_clients"]) == broken.sum()
    assert algorithm.params(state).tolist() == [0.5] * width


def test_a_client_who_does_not_exist_is_counted(federation):
    """Fault: a sampler's id past the population, which JAX would clamp to somebody else or lose as an empty client."""
    ids = p.COHORT.copy()
    ids[2] = p.NUM_CLIENTS + 5
    there = np.arange(len(ids)) != 2
    state, infos = federation.run(ids)
    without, _ = federation.run(p.cohort(p.COHORT, reported=there))
    assert [int(info["dropped_clients"]) for info in infos] == [1] * len(infos)
    laws.check_equal_bits(state.server, without.server, "model")


@pytest.mark.full
def test_a_weight_too_small_to_sum_is_counted():
    """Catches a round whose weighted updates vanish in the sum, though every client reported."""
    tiny = client.local_sgd(p.linear_loss, optax.sgd(p.RATE), client.work(num_steps=1))

    def apply(key, broadcast, state, data):
        report, state = tiny.apply(key, broadcast, state, data)
        return report._replace(weight=report.weight * 1e-36), state

    _, infos = p.Federation(client=tiny._replace(apply=apply)).run(p.COHORT, num_rounds=1)
    assert int(infos[0]["dropped_clients"]) == len(p.COHORT) and int(infos[0]["skipped_rounds"]) == 1


def test_integers_do_not_hide_a_broken_client():
    """Catches a NaN that becomes an integer on its way: only what the transform measured still shows it."""
    messages = transform.quantize(4, range=1.0, integers=True)
    laws.nonfinite_clients_are_dropped(np.nan, p.Federation(transform=messages, aggregator=aggregation.fixed_mean(9.0)))


@pytest.mark.parametrize("stated", [pytest.param(True, marks=pytest.mark.full), False])
def test_missing_shares_of_noise_release_nothing(stated):
    """Catches a round whose messages have less noise than its accountant assumes: of every slot, where no number of
    shares is stated."""
    noisy = transform.distributed_gaussian(1.0, 1.0, p.SLOTS)
    federation = p.Federation(
        client=client.local_sgd(p.linear_loss, optax.sgd(p.RATE), client.work(num_steps=1)),
        transform=noisy if stated else noisy.stating(noise=noisy.facts.noise._replace(details=None)),
        aggregator=aggregation.fixed_mean(float(p.SLOTS)),
    )
    start = p.flat(federation.algorithm.params(federation.init()))
    state, infos = federation.run(p.cohort(p.COHORT, reported=np.arange(p.SLOTS) != 4), num_rounds=1)
    assert int(infos[0]["skipped_rounds"]) == 1 and (p.flat(federation.algorithm.params(state)) == start).all()
    state, infos = federation.run(p.COHORT, num_rounds=1)
    assert int(infos[0]["skipped_rounds"]) == 0 and (p.flat(federation.algorithm.params(state)) != start).any()
