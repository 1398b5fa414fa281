"""What a statement of privacy calls one unit moves a release by no more than the statement says, at every level."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import client, population, sampling, server
from fedjax_sim.algorithms import as_client_update, federated
from fedjax_sim.privacy import mechanism_of
from fedjax_sim.types import ClientData
from tests.laws import cases
from tests.laws.test_compositions import MEMBERS, aggregator_for

pytestmark = pytest.mark.optimised(False)  # these laws do not depend on the compiler

UNITS = 10  # at the top level; every aggregator here divides by so many
LEVELS = {"flat": [], "edges": ["edge"], "regions": ["edge", "region"]}
# Randomised answers hide a client by their probabilities, and not by what it moves (tests/transform/test_local.py).
NOISY = [name for name, row in MEMBERS.items() if row().facts.noise is not None and not row.answers_at_random]
WORK = client.local_sgd(
    lambda params, examples, key: (params["w"][0] - examples["y"]) ** 2 / 2,
    optax.sgd(1.0),
    client.work(num_steps=1, weighting="uniform"),
)
START = {"w": np.zeros(1, np.float32)}


def _read(arrays, id):
    return ClientData({"y": arrays["y"][id][None]}, arrays["mask"][id][None])


def clients(levels, *, targets=None, without=()):
    """Clients of one row, in groups of two, and groups of these: 100 at client 0, and 3 below 0 beside it."""
    size = UNITS << len(levels)
    y = np.ones(size, np.float32)
    y[:2] = 100, -3
    for id, target in (targets or {}).items():
        y[id] = target
    mask = ~np.isin(np.arange(size), list(without))
    people = population.generated(size, _read, {"y": jnp.array(y), "mask": jnp.array(mask)})
    for _ in levels:
        people = population.grouped(people, np.arange(people.size) // 2)
    return people


def made(name, levels):
    """The federation of a noisy transform at the top of these levels."""
    member, work = MEMBERS[name](), WORK
    plain = {"server": server.optimizer(optax.sgd(1.0)), "plan": cases.RUN["plan"], "mesh": None}
    for level in levels:
        inside = federated(sampling.full(2), work, aggregator_for("identity"), **plain)
        work = as_client_update(inside, name=level, weighting="uniform")
    in_turn = "separation" in member.facts.noise.named_details
    sampler = sampling.cyclic(UNITS, 1) if in_turn else sampling.full(UNITS)
    return federated(sampler, work, aggregator_for(name), transform=member, **plain)


def neighbours(mechanism, ids, levels):
    """Populations in which the clients `ids`, one unit, are another one, or none, as the adjacency says."""
    replaced = clients(levels, targets=dict.fromkeys(ids, -100.0))
    removed = clients(levels, without=ids)
    if mechanism.detail("protects") == "members":
        return [replaced, removed]
    return [replaced] if mechanism.adjacency == "replace_one" else [removed]


@pytest.mark.parametrize("levels", cases.rows(LEVELS, ["flat", "edges"]))
@pytest.mark.parametrize("name", cases.rows(NOISY, ["gaussian_mechanism"]))
def test_one_unit_moves_a_release_by_at_most_what_is_stated(name, levels):
    """One holder of data is removed or replaced under the same noise: the sum moves by `moves` clip norms at most.

    Catches a statement for edges that is read as one for their clients: client 0 turns its edge's message round, and
    the sum by two clip norms, whatever the neighbours of edges are.
    """
    inner = LEVELS[levels]
    algorithm = made(name, inner)
    step = jax.jit(algorithm.step)

    def release(people):
        state, _ = step(jax.random.key(1), algorithm.init(jax.random.key(0), START, people), people)
        return float(algorithm.params(state)["w"][0])

    unit = mechanism_of(algorithm, dimension=1, population=clients(inner))
    members = unit.of_members()
    assert (members is None) == (not inner)
    before = release(clients(inner))
    slack = 2 * getattr(MEMBERS[name]().facts.noise.details, "granularity", 1e-4)  # of rounding to integers
    for mechanism, ids in ((unit, range(1 << len(inner))), (members, [0])):
        if mechanism is None:
            continue
        moved = [abs(release(people) - before) * UNITS for people in neighbours(mechanism, ids, inner)]
        clip_norm = mechanism.clip_norm
        assert max(moved) <= mechanism.moves * clip_norm + slack
        assert max(moved) >= (mechanism.moves - 0.5) * clip_norm  # and does not promise too little
