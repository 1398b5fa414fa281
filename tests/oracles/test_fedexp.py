"""FedExP against its rule in NumPy (Jhunjhunwala, Wang and Joshi 2023), and what it is good for."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, engine, population, sampling, transform
from tests.laws import laws, problems as p
from tests.oracles import paper, scalars
from tests.refusals import refused

EPSILON = 1e-3


class Paper:
    """float64, algorithm 1 with Delta_i = w - w_i; only the order of a client's examples comes from the library."""

    def __init__(self, weights=None):
        self.weights = np.ones(p.NUM_CLIENTS) if weights is None else weights
        self.w = self.before = p.START.astype(float)
        self.factors = []

    def local(self, key, id):
        w = self.w.copy()
        for rows in paper.batches(key, id):
            w = w - p.RATE * paper.gradient(w, id, rows)
        return self.w - w

    def round(self, key, cohort):
        moves, shares = np.array([self.local(key, id) for id in cohort]), self.weights[cohort]
        mean = np.average(moves, axis=0, weights=shares)
        squares = np.average((moves**2).sum(axis=1), weights=shares)
        self.factors.append(max(1.0, squares / (2 * (mean @ mean + EPSILON))))
        self.before, self.w = self.w, self.w - self.factors[-1] * mean

    def state(self):
        return self.w, (self.w + self.before) / 2


@functools.cache
def library(weighting="uniform", average_last=True, plan=p.PLAN, mesh=None):
    def make(sampler, **run):
        options = {"weighting": weighting, "average_last": average_last, "nonfinite": "error"}
        return algorithms.fedexp(p.linear_loss, sampler, optax.sgd(p.RATE), **options, **paper.EPOCHS, **run)

    return p.Federation(make=make, plan=plan, mesh=mesh)


def found(algorithm, state):
    return state.server.server.params, algorithm.params(state)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_matches_the_paper(weighting):
    """Catches norms of the mean for means of norms, a lost factor of two, weights in one mean only."""
    transcribed = Paper(p.SIZES if weighting == "examples" else None)
    infos = paper.check(transcribed, library(weighting), found, lost=(2, 5, 7), rtol=1e-4, atol=1e-4)
    factors = [float(info["extrapolation"]) for info in infos]
    np.testing.assert_allclose(factors, transcribed.factors, rtol=1e-4)
    assert max(factors) > 1.2


@pytest.mark.full
def test_never_shorter_than_the_mean():
    """Equal updates are averaged as usual. Catches a factor of one half."""
    one = population.from_clients([{"h": np.ones(1, np.float32), "a": np.ones(1, np.float32)}] * 3)
    work = {"num_steps": 2, **scalars.OPTIONS}
    everybody, rate = sampling.full(3), optax.sgd(0.1)
    stretched = algorithms.fedexp(scalars.loss, everybody, rate, average_last=False, weighting="uniform", **work)
    plain = algorithms.fedavg(scalars.loss, everybody, rate, **work)
    assert scalars.converged(stretched, one, num_rounds=3)[1] == scalars.converged(plain, one, num_rounds=3)[1]


@pytest.mark.full
def test_fewer_rounds_than_fedavg():
    """Clients that each see one of four directions and share a minimum: a mean of four moves a quarter as far.

    The factor is 4 / 2 there, so FedExP contracts twice as much a round. Catches an extrapolation that does nothing.
    """
    rows = [{"x": np.eye(4, dtype=np.float32)[[i]], "y": np.ones(1, np.float32)} for i in range(4)]
    data, start = population.from_clients(rows), jnp.zeros(4)
    distances = {}
    extrapolated = {"epsilon": 1e-9, "average_last": False, "weighting": "uniform"}
    for make, options in ((algorithms.fedavg, {}), (algorithms.fedexp, extrapolated)):
        algorithm = make(p.linear_loss, sampling.full(4), optax.sgd(0.9), num_steps=2, **scalars.OPTIONS, **options)

        def body(state, key, algorithm=algorithm):
            state, _ = algorithm.step(key, state, data)
            return state, jnp.linalg.norm(algorithm.params(state) - 1)

        state = algorithm.init(jax.random.key(0), start, data)
        keys = jax.random.split(jax.random.key(1), 8)
        distances[make] = np.asarray(
            jax.jit(lambda state, body=body, keys=keys: jax.lax.scan(body, state, keys))(state)[1]
        )
    rounds = np.arange(1, 9)
    np.testing.assert_allclose(distances[algorithms.fedavg], 2 * (1 - 0.99 / 4) ** rounds, rtol=1e-4)
    np.testing.assert_allclose(distances[algorithms.fedexp], 2 * (1 - 0.99 / 2) ** rounds, rtol=1e-3)


@pytest.mark.full
@pytest.mark.optimised
def test_mean_of_the_last_two():
    """Catches a mean that clients train from, or one of other rounds."""
    averaged, plain = library(), library(average_last=False)
    first, second = (plain.run(p.COHORT, num_rounds=n)[0].server.params for n in (1, 2))
    state, _ = averaged.run(p.COHORT, num_rounds=2)
    laws.check_equal_bits(state.server.server.params, second, "trajectory")
    np.testing.assert_allclose(averaged.algorithm.params(state), (first + second) / 2, rtol=1e-6)


@pytest.mark.optimised
@pytest.mark.full
def test_same_bits():
    """In any order and chunk, on two devices; a NaN client equals an absent one. Catches norms that round by chunk."""
    laws.order_is_irrelevant(library())
    laws.nonfinite_clients_are_dropped(federation=library())
    laws.nothing_received_changes_nothing(library())
    here = library().run(p.COHORT)
    laws._compare(here, library(plan=engine.Plan(2, 6), mesh=engine.device_mesh(2)).run(p.COHORT), "devices, chunk")


def test_integers_are_refused():
    """Catches norms of integers, in whose unit epsilon is almost zero, also inside `by_part`."""
    integers = transform.quantize(8, range=1.0, integers=True)
    with refused("transform", value="integers in (-127, 127)"):
        algorithms.fedexp(
            p.linear_loss, sampling.full(4), optax.sgd(0.1), num_steps=2, weighting="uniform", transform=integers
        )
    assert not aggregation.by_part({"one": aggregation.mean(), "other": aggregation.extrapolated()}).facts.homogeneous
    assert aggregation.by_part({"one": aggregation.mean()}).facts.homogeneous


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan")])
def test_wrong_epsilon(epsilon):
    """Catches 0 / 0 where nothing moves."""
    with pytest.raises(ValueError, match="epsilon: expected a finite number > 0"):
        aggregation.extrapolated(epsilon=epsilon)
