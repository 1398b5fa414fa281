"""An attacker is the same client in every algorithm: by its id in the whole population, at whatever level it is met."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import adversary, aggregation, algorithms, network, population, sampling, server
from fedjax_sim.algorithms import as_client_update, federated
from fedjax_sim.config.build import build
from fedjax_sim.config.document import load
from fedjax_sim.round.levels import by_own_ids
from fedjax_sim.types import Devices, Spent
from tests.laws import cases
from tests.refusals import refused

pytestmark = pytest.mark.optimised(False)  # these laws do not depend on the compiler

SIZE, ATTACKER = 8, 5
CENTRES = 2.0 ** np.arange(SIZE)  # every set of clients has a sum of its own
GROUPS = np.array([1, 0, 3, 2, 1, 0, 2, 3])  # pairs whose members are at places 0 and 1
WORK = {"num_steps": 1, "mesh": None, "plan": cases.RUN["plan"]}
FLIP = (adversary.sign_flip(), adversary.clients([ATTACKER]))
CORRUPTED = adversary.corrupted(aggregation.mean(), *FLIP)
MEAN = {"aggregator": aggregation.mean(), "server": server.optimizer(optax.sgd(1.0)), "mesh": None}


def _flat(sampler, aggregator):
    return algorithms.fedavg(population.quadratic_loss, sampler, optax.sgd(1.0), aggregator=aggregator, **WORK)


def _over(star, size, name):
    return federated(sampling.full(size), as_client_update(star, name=name), **MEAN)


def _edges(aggregator):
    return _over(_flat(sampling.full(2), aggregator), 4, "edge")


def _regions(aggregator):
    return _over(_over(_flat(sampling.full(2), aggregator), 2, "edge"), 2, "region")


def _fedbuff(aggregator):
    instant = Devices(SIZE, lambda key, ids, load: Spent(*[jnp.zeros_like(ids)] * 3, jnp.zeros(ids.shape)))
    return algorithms.fedbuff(
        population.quadratic_loss, instant, optax.sgd(1.0), population_size=SIZE, concurrency=SIZE, buffer_size=SIZE,
        refill="same", aggregator=aggregator, **WORK,
    )  # fmt: skip


def _gossip(aggregator):
    attack, who = FLIP if aggregator is CORRUPTED else (adversary.scaled(1.0), FLIP[1])
    mixing = network.metropolis(network.complete(SIZE))
    return algorithms.clipped_gossip(
        population.quadratic_loss, mixing, optax.sgd(1.0), radius=1e9, attack=attack, who=who, **WORK
    )


ROWS = {
    "flat": (lambda rule: _flat(sampling.full(SIZE), rule), 0),
    "edges": (_edges, 1),
    "regions": (_regions, 2),
    "asynchronous": (_fedbuff, 0),
    "gossip": (_gossip, 0),
}


def clients(levels):
    """The clients, in groups of two, and groups of these."""
    people = population.quadratic_population(np.ones(SIZE), CENTRES)
    for level in range(levels):
        people = population.grouped(people, [0, 1, 1, 0] if level else GROUPS)
    return people


def model(algorithm, people):
    """After one round from 0; that of node 0 where nobody has all messages."""
    state = algorithm.init(jax.random.key(0), {"w": jnp.zeros(1)}, people)
    state, _ = jax.jit(algorithm.step)(jax.random.key(1), state, people)
    if algorithm.evaluated.personal is not None:
        return float(algorithm.evaluated.personal(state, jnp.arange(1))["w"][0, 0])
    return float(algorithm.params(state)["w"][0])


@pytest.mark.parametrize("name", cases.rows(ROWS, ["edges"]))
def test_an_attacker_is_the_same_client(name):
    """All send c_i, one -c_i: the mean of the messages falls by 2 c_5 / 8, and says so of no other client.

    Catches places in a group, or in a buffer, for ids: client 5 is at place 1 of an edge, where four clients are.
    """
    make, levels = ROWS[name]
    attacked = model(make(CORRUPTED), clients(levels))
    assert attacked == pytest.approx(CENTRES.mean() - 2 * CENTRES[ATTACKER] / SIZE, rel=1e-5)


class _NoIds:
    """Groups that do not say whom they hold."""

    def __init__(self, group):
        self.size, self.client = group.size, group.client


def test_groups_without_ids_refuse_attackers():
    """Catches attackers by place where a population of one's own does not state ids."""
    group = clients(1).group(jnp.int32(0))
    rule = by_own_ids(aggregation.mean(), _NoIds(group))
    assert rule.facts.attackers is None
    with refused("population", value="_NoIds"):
        by_own_ids(CORRUPTED, _NoIds(group))


@pytest.mark.full
def test_a_rule_at_edges_remembers_all_clients():
    """FoolsGold from a config. Catches a memory made for the clients of one edge, into which most ids do not fit."""
    small = "data.num_clients=60 data.with_groups.num_groups=6 model.name=linear algorithm.keep_edges=true".split()
    rule = build(load("edges", [*small, "algorithm.edge_aggregator={name='foolsgold'}"])).algorithm.parts.client
    memory = jax.eval_shape(rule.federation.aggregator.start, jax.ShapeDtypeStruct((3,), jnp.float32))
    assert memory.shape == (60, 3)
