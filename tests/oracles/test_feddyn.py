"""FedDyn against a NumPy transcription of Acar et al. 2021, algorithm 1, and its fixed point."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, engine, sampling
from fedjax_sim.transform import stateless
from tests.laws import laws, problems as p
from tests.oracles import paper, scalars

COEFFICIENT = 0.8


class Paper:
    """float64; clients' own vectors are the paper's gradients at their last models."""

    def __init__(self, weights=None):
        self.weights = np.ones(p.NUM_CLIENTS) if weights is None else np.asarray(weights, float)
        self.x, self.h = p.START.astype(float), np.zeros(p.WIDTH)
        self.own = np.zeros((p.NUM_CLIENTS, p.WIDTH))

    def local(self, key, id):
        y = self.x.copy()
        for rows in paper.batches(key, id):
            tilted = paper.gradient(y, id, rows) - self.own[id] + COEFFICIENT * (y - self.x)
            y = y - p.RATE * tilted
        return y

    def round(self, key, cohort):
        models = np.array([self.local(key, id) for id in cohort])
        shares = self.weights[cohort]
        self.own[cohort] -= COEFFICIENT * (models - self.x)
        self.h = self.h - COEFFICIENT * shares @ (models - self.x) / self.weights.sum()
        self.x = np.average(models, axis=0, weights=shares) - self.h / COEFFICIENT

    def state(self):
        return self.x, self.h, self.own


@functools.cache
def library(weighting="uniform", plan=p.PLAN, mesh=None, transform=None):
    def make(sampler, **run):
        options = paper.EPOCHS | {"weighting": weighting} | ({"transform": transform} if transform else {})
        options |= {"total_weight": float(p.SIZES.sum())} if weighting == "examples" else {}
        return algorithms.feddyn(
            p.linear_loss, sampler, optax.sgd(p.RATE), coefficient=COEFFICIENT, nonfinite="error", **options, **run
        )

    return p.Federation(make=make, plan=plan, mesh=mesh)


def found(algorithm, state):
    return state.server.server.params, state.server.mean, state.clients


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_matches_the_paper(weighting):
    """w, h and every h_i for partial participation, unequal and partial batches, messages lost on the way.

    Catches a swapped sign of a tilt, h divided by the cohort instead of the population or updated after the model,
    a proximal pull towards the last local model, memory written for absent clients.
    """
    paper.check(Paper(p.SIZES if weighting == "examples" else None), library(weighting), found, lost=(2, 5, 7))


@pytest.mark.full
def test_messages_hold_the_update_alone():
    """Messages of half length: half of h, and the bytes of a model. Catches a share of the population that is sent with
    the update, and so clipped, rounded or noised with it."""
    half = stateless(lambda key, update: jax.tree.map(lambda x: x / 2, update))
    (whole, (info,)), (less, _) = (library(transform=x).run(p.COHORT, num_rounds=1) for x in (None, half))
    np.testing.assert_allclose(less.server.mean, whole.server.mean / 2, rtol=1e-6)
    assert np.abs(whole.server.mean).max() > 0.01
    assert info["uplink_bytes"].total() == len(p.COHORT) * 4 * p.WIDTH


@pytest.mark.full
def test_the_server_holds_the_mean():
    """h = sum_i h_i / N under any participation. Catches an h that drifts from what clients keep."""
    rng, state = np.random.default_rng(2), None
    for i in range(5):
        ids = rng.choice(p.NUM_CLIENTS, p.SLOTS, replace=False).astype(np.int32)
        state, _ = library().run(p.cohort(ids, reported=rng.random(p.SLOTS) < 0.7), state=state, keys=[i])
    mean = np.asarray(state.clients, float).mean(axis=0)
    assert np.abs(mean).max() > 0.05
    np.testing.assert_allclose(state.server.mean, mean, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("num_present, num_rounds", [(4, 150), (1, 400)], ids=["everybody", "one of four"])
def test_reaches_the_optimum(num_present, num_rounds):
    """Curvatures 1, 2, 4, 10, five full-batch steps: FedDyn converges to the optimum, FedAvg does not.

    Catches an h scaled by the cohort's share twice or never: for one client of four it has another fixed point.
    """
    curvatures, centers = np.array([1.0, 2.0, 4.0, 10.0]), np.array([0.0, 3.0, -1.0, 1.0])
    data, optimum = scalars.clients(curvatures, centers, (1,) * 4), curvatures @ centers / curvatures.sum()
    work = {"num_steps": 5, **scalars.OPTIONS}
    sampler = sampling.full(4) if num_present == 4 else sampling.uniform(4, num_present)
    dynamic = algorithms.feddyn(scalars.loss, sampler, optax.sgd(0.03), coefficient=10.0, weighting="uniform", **work)
    _, path = scalars.converged(dynamic, data, num_rounds=num_rounds)
    assert np.abs(np.array(path[-20:]) - optimum).max() < 5e-6
    if num_present == 4:
        drifting = algorithms.fedavg(scalars.loss, sampler, optax.sgd(0.03), **work)
        assert abs(scalars.converged(drifting, data, num_rounds=num_rounds)[0] - optimum) > 0.01


@pytest.mark.full
def test_without_examples_nothing_moves():
    """A client that lost its rows keeps its vector. Catches one that is built from the tilt alone."""
    empty = p.COHORT[4]
    before, _ = library().run(p.COHORT, num_rounds=1)
    sizes = np.where(np.arange(p.NUM_CLIENTS) == empty, 0, p.SIZES)
    after, _ = library().run(p.COHORT, p.ragged(sizes=sizes), state=before, num_rounds=1)
    old, new = np.asarray(before.clients), np.asarray(after.clients)
    assert (old[empty] != 0).any()
    np.testing.assert_array_equal((new != old).any(1), np.isin(np.arange(p.NUM_CLIENTS), p.COHORT[p.COHORT != empty]))


@pytest.mark.optimised
@pytest.mark.full
def test_same_bits():
    """In any order, chunk, and on two devices; a NaN client equals an absent one. Catches memory written by slot."""
    laws.order_is_irrelevant(library())
    laws.nonfinite_clients_are_dropped(federation=library())
    laws.nothing_received_changes_nothing(library())
    here = library().run(p.COHORT)
    laws._compare(here, library(plan=engine.Plan(2, 6), mesh=engine.device_mesh(2)).run(p.COHORT), "devices, chunk")


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"coefficient": 0.0}, "coefficient: expected a finite number > 0"),
        ({"weighting": "examples"}, "total_weight: expected the sum"),
        ({"weighting": "examples", "total_weight": -3.0}, "total_weight: expected a finite number > 0"),
        ({"total_weight": 80.0}, "total_weight: expected none with weighting='uniform'"),
        ({"sampler": sampling.with_replacement(4, 2)}, "sampler: expected a design without replacement"),
    ],
)
def test_wrong_input(wrong, words):
    """Catches a division by zero, a mean over an unknown population, and clients that count twice."""
    options = {"sampler": sampling.full(4), "num_steps": 2, "weighting": "uniform"} | wrong
    with pytest.raises(ValueError, match=words):
        algorithms.feddyn(p.linear_loss, optimizer=optax.sgd(0.1), **options)
