"""SCAFFOLD against a NumPy transcription of Karimireddy et al. 2020, algorithm 1."""

from __future__ import annotations

import functools

import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, sampling
from fedjax_sim.engine import Plan
from tests.laws import laws, problems as p
from tests.oracles import paper, scalars

EPOCHS = paper.EPOCHS


class Paper:
    """float64; only the order of a client's examples comes from the library."""

    def __init__(self, option, *, server_rate=1.0, weights=None):
        self.option, self.server_rate = option, server_rate
        self.weights = np.ones(p.NUM_CLIENTS) if weights is None else np.asarray(weights, float)  # w_i
        self.x, self.c = p.START.astype(float), np.zeros(p.WIDTH)
        self.own = np.zeros((p.NUM_CLIENTS, p.WIDTH))

    def local(self, key, id):
        y, steps = self.x.copy(), 0
        for rows in paper.batches(key, id):
            y -= p.RATE * (paper.gradient(y, id, rows) - self.own[id] + self.c)
            steps += 1
        if self.option == 1:
            new = paper.gradient(self.x, id)
        else:
            new = self.own[id] - self.c + (self.x - y) / (steps * p.RATE)
        return y - self.x, new - self.own[id]

    def round(self, key, cohort):
        moves, changes = map(np.array, zip(*(self.local(key, id) for id in cohort), strict=True))
        self.own[cohort] += changes
        shares = self.weights[cohort]
        self.x = self.x + self.server_rate * np.average(moves, axis=0, weights=shares)
        self.c = self.c + shares @ changes / self.weights.sum()

    def state(self):
        return self.x, self.c, self.own


@functools.cache
def library(option, weighting="uniform", **options):
    def make(sampler, **run):
        work = {"option": option, "weighting": weighting, **EPOCHS}
        return algorithms.scaffold(p.linear_loss, sampler, optax.sgd(p.RATE), **work, **options, **run)

    return p.Federation(make=make)


def found(algorithm, state):
    return state.server.server.params, state.server.control, state.clients


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("option", [1, 2])
def test_matches_the_paper(option):
    """x, c and every c_i for partial participation, unequal and partial batches, messages lost on the way.

    Catches a wrong sign of the correction, K rate with the planned steps instead of those taken, c divided by the
    cohort's size, memory written for the wrong or absent clients.
    """
    paper.check(Paper(option, server_rate=0.7), library(option, server_learning_rate=0.7), found, lost=(2, 5, 7))


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("option", [1, 2])
def test_without_examples_nothing_moves(option):
    """A client that lost its rows keeps its control variate. Catches one that is built from no gradient at all."""
    empty, federation = p.COHORT[4], library(option, server_learning_rate=0.7)
    before, _ = federation.run(p.COHORT, num_rounds=1)
    sizes = np.where(np.arange(p.NUM_CLIENTS) == empty, 0, p.SIZES)
    after, _ = federation.run(p.COHORT, p.ragged(sizes=sizes), state=before, num_rounds=1)
    old, new = np.asarray(before.clients), np.asarray(after.clients)
    assert (old[empty] != 0).any()
    np.testing.assert_array_equal((new != old).any(1), np.isin(np.arange(p.NUM_CLIENTS), p.COHORT[p.COHORT != empty]))


@pytest.mark.full
def test_weighs_by_examples():
    """Catches c as a uniform mean where the objective is not."""
    total = float(p.SIZES.sum())
    paper.check(Paper(2, weights=p.SIZES), library(2, weighting="examples", total_weight=total), found, lost=(3,))


@pytest.mark.full  # by default c and every c_i are the paper's
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_control_is_the_mean_of_the_clients(weighting):
    """c = sum_i w_i c_i / W under any participation. Catches c that drifts from what clients subtract."""
    total, weights = (float(p.SIZES.sum()), p.SIZES) if weighting == "examples" else (None, np.ones(p.NUM_CLIENTS))
    federation = library(2, weighting=weighting, total_weight=total)
    rng, state = np.random.default_rng(2), None
    for i in range(5):
        ids = rng.choice(p.NUM_CLIENTS, p.SLOTS, replace=False).astype(np.int32)
        state, _ = federation.run(p.cohort(ids, reported=rng.random(p.SLOTS) < 0.7), state=state, keys=[i])
    mean = np.average(np.asarray(state.clients, float), axis=0, weights=weights)
    assert np.abs(mean).max() > 0.05
    np.testing.assert_allclose(state.server.control, mean, atol=1e-6)


@pytest.mark.full  # by default its rounds are the paper's
@pytest.mark.parametrize(
    "option, counts, optimum",
    [
        (1, (1, 3), 30 / 31),
        (2, (1, 1), 10 / 11),
        (1, (1, 1), 10 / 11),
        (2, (1, 3), 30 / 31),
    ],
)
def test_no_client_drift(option, counts, optimum):
    """Quadratics with curvatures 1 and 10, 5 local steps: SCAFFOLD converges to the optimum, FedAvg does not.

    Counts of 1 and 3 are the weights. Catches corrections that vanish, or the minimum of another objective.
    """
    data, work = scalars.clients(counts=counts), {"num_steps": 5, **scalars.OPTIONS}
    weights = {"weighting": "examples", "total_weight": 4.0} if counts == (1, 3) else {"weighting": "uniform"}
    corrected = algorithms.scaffold(scalars.loss, sampling.full(2), optax.sgd(0.05), option=option, **weights, **work)
    reached, _ = scalars.converged(corrected, data, num_rounds=400)
    assert abs(reached - optimum) < 2e-6
    drifting, _ = scalars.converged(
        algorithms.fedavg(scalars.loss, sampling.full(2), optax.sgd(0.05), **work), data, num_rounds=400
    )
    assert abs(drifting - optimum) > 0.01


@pytest.mark.full
def test_first_round_is_fedavg():
    """With all control variates at zero, for the same keys. Catches another stream or order of batches."""

    def average(sampler, **run):
        return algorithms.fedavg(p.linear_loss, sampler, optax.sgd(p.RATE), weighting="uniform", **EPOCHS, **run)

    one = library(2).run(p.COHORT, num_rounds=1)[0]
    other = p.Federation(make=average).run(p.COHORT, num_rounds=1)[0]
    np.testing.assert_allclose(one.server.server.params, other.server.params, rtol=1e-6, atol=1e-7)


def plain(sampler, **run):
    return algorithms.scaffold(p.linear_loss, sampler, optax.sgd(p.RATE), weighting="uniform", **EPOCHS, **run)


@pytest.mark.full
@pytest.mark.optimised
def test_same_bits_in_any_order():
    """Catches memory written by slot."""
    laws.order_is_irrelevant(p.Federation(make=plain))


@pytest.mark.full  # the laws of any chunk run always
@pytest.mark.optimised
def test_same_bits_in_any_chunk():
    """Catches control variates that are summed by chunk."""
    laws._compare(
        p.Federation(make=plain, plan=Plan(2, 2)).run(p.COHORT),
        p.Federation(make=plain, plan=Plan(2, 6)).run(p.COHORT),
        "chunk",
    )
