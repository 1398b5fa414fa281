"""Mime and MimeLite against a NumPy transcription of Karimireddy et al. 2021, algorithm 1, and their fixed points."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, client, engine, sampling, transform
from fedjax_sim.algorithms.server.mime_optimizer import OPTIMIZER_RULES, base_optimizer
from tests.laws import cases, laws, problems as p
from tests.oracles import paper, scalars
from tests.refusals import refused

FIRST, SECOND, TAU, RATE = 0.6, 0.9, 0.3, 0.02


class Base:
    """Table 1 of the paper, float64: U with s as it stands, V once a round."""

    def __init__(self, rule):
        self.rule, self.m, self.v = rule, np.zeros(p.WIDTH), np.full(p.WIDTH, TAU**2)

    def direction(self, g):
        step = FIRST * self.m + (1 - FIRST) * g if self.rule in ("momentum", "adam") else g
        return step / (np.sqrt(self.v) + TAU) if self.rule in ("rmsprop", "adam") else step

    def track(self, g):
        self.m = FIRST * self.m + (1 - FIRST) * g
        self.v = SECOND * self.v + (1 - SECOND) * g**2


class Paper:
    """Both algorithms; only the order of a client's examples comes from the library."""

    def __init__(self, rule, lite, weights=None):
        self.base, self.lite, self.x = Base(rule), lite, p.START.astype(float)
        self.weights = np.ones(p.NUM_CLIENTS) if weights is None else weights

    def local(self, key, id, c):
        y = self.x.copy()
        for rows in paper.batches(key, id):
            g = paper.gradient(y, id, rows)
            g = g if self.lite else g - paper.gradient(self.x, id, rows) + c
            y = y - RATE * self.base.direction(g)
        return y

    def round(self, key, cohort):
        shares = self.weights[cohort]
        c = np.average([paper.gradient(self.x, id) for id in cohort], axis=0, weights=shares)
        self.x = np.average([self.local(key, id, c) for id in cohort], axis=0, weights=shares)
        self.base.track(c)

    def state(self):
        moments = {"momentum": [self.base.m], "adam": [self.base.m, self.base.v], "sgd": [], "rmsprop": [self.base.v]}
        return [self.x, *moments[self.base.rule]]


def own(rule):
    """The numbers that a rule has."""
    first = {"momentum": FIRST} if rule in ("momentum", "adam") else {}
    return first | ({"second_decay": SECOND, "adaptivity": TAU} if rule in ("rmsprop", "adam") else {})


@functools.cache
def library(rule="adam", lite=False, weighting="uniform", plan=p.PLAN, mesh=None):
    def make(sampler, **run):
        recipe = algorithms.mime_lite if lite else algorithms.mime
        options = own(rule) | {"rule": rule, "weighting": weighting, "nonfinite": "error"}
        return recipe(p.linear_loss, sampler, optax.sgd(RATE), **options, **paper.EPOCHS, **run)

    return p.Federation(make=make, plan=plan, mesh=mesh)


def found(algorithm, state):
    inner = getattr(state.server, "server", state.server)
    statistics = (state.server if hasattr(state.server, "statistics") else inner).statistics
    return [algorithm.params(state), *statistics.values()]


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(
    "rule, lite, weighting",
    [("adam", False, "uniform"), ("momentum", True, "uniform"), ("momentum", False, "examples")],
)
def test_matches_the_paper(rule, lite, weighting):
    """Model and statistics under partial participation, partial batches and lost messages.

    Catches statistics that move during local steps or from the local gradients, c over other clients than those whose
    messages count, a correction on another batch, s brought up to date before the local steps.
    """
    transcribed = Paper(rule, lite, p.SIZES if weighting == "examples" else None)
    infos = paper.check(transcribed, library(rule, lite, weighting), found, lost=(2, 5, 7))
    number = p.WIDTH * 4
    up, down = infos[0]["uplink_bytes"], infos[0]["downlink_bytes"]
    statistics = 2 if rule == "adam" else 1
    assert up.total() == 7 * 2 * number, "a gradient and an update each"
    assert down.total() == 10 * (1 + statistics + (not lite)) * number, "x, s and, for Mime, c"


@pytest.mark.parametrize("rule", OPTIMIZER_RULES)
def test_rules(rule):
    """U and V of each base optimiser. Catches a moment that U moves, or a decay in the wrong place."""
    base, theirs = base_optimizer(rule, **own(rule)), Base(rule)
    statistics, rng = base.start(jnp.zeros(p.WIDTH)), np.random.default_rng(3)
    for _ in range(3):
        local, mean = rng.normal(size=(2, p.WIDTH))
        np.testing.assert_allclose(base.direction(jnp.float32(local), statistics), theirs.direction(local), rtol=1e-5)
        statistics = base.track(jnp.float32(mean), statistics)
        theirs.track(mean)


OPTIMUM, SLOW = 10 / 11, {"num_steps": 5, "weighting": "uniform", **scalars.OPTIONS}


@pytest.mark.full  # by default its rounds are the paper's
@pytest.mark.parametrize("rule", cases.rows(["sgd", "momentum"], ["momentum"]))
def test_fixed_point_with_everybody(rule):
    """Curvatures 1 and 10, five full-batch steps. Mime with everybody: the optimum 10/11, for any base optimiser.

    Catches a correction that vanishes or is taken over one pass too late.
    """
    momentum = 0.5 if rule == "momentum" else None
    full = algorithms.mime(scalars.loss, sampling.full(2), optax.sgd(0.05), rule=rule, momentum=momentum, **SLOW)
    assert abs(scalars.converged(full, scalars.clients(), num_rounds=400)[0] - OPTIMUM) < 2e-6


@pytest.mark.full
def test_error_floor_with_a_few():
    """With one client of two c is that client's own gradient: it is SGD over clients, which does not converge. MimeLite
    has FedAvg's fixed point. Catches a correction although no client sent one."""
    data, options = scalars.clients(), {"optimizer": optax.sgd(0.05), "rule": "sgd", **SLOW}
    everybody, one = sampling.full(2), sampling.uniform(2, 1)
    _, path = scalars.converged(algorithms.mime(scalars.loss, one, **options), data, num_rounds=400)
    assert np.std(path[-100:]) > 0.05
    lite, _ = scalars.converged(algorithms.mime_lite(scalars.loss, everybody, **options), data, num_rounds=400)
    progress = 1 - (1 - 0.05 * np.array([1.0, 10.0])) ** 5
    assert abs(lite - progress[1] / progress.sum()) < 2e-6 and abs(lite - OPTIMUM) > 0.01


@pytest.mark.full
def test_sgd_without_correction_is_fedavg():
    """Row for row. Catches another stream of batches, or a rate that is applied twice."""

    def average(sampler, **run):
        return algorithms.fedavg(p.linear_loss, sampler, optax.sgd(RATE), weighting="uniform", **paper.EPOCHS, **run)

    one, other = library("sgd", lite=True), p.Federation(make=average)
    np.testing.assert_allclose(one.params(p.COHORT), other.params(p.COHORT), rtol=1e-6)


def test_full_gradient_is_a_step():
    """Catches a mean over padding rows, or a sum."""
    gradient, step = (
        client.full_gradient(p.linear_loss),
        client.local_sgd(p.linear_loss, optax.sgd(1.0), client.work(num_steps=1)),
    )
    for id in (0, 3):
        data, start = p.ragged().client(jnp.int32(id)), jnp.array(p.START)
        one, other = (work.apply(jax.random.key(0), start, (), data)[0] for work in (gradient, step))
        np.testing.assert_allclose(one.update, -other.update, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(one.update, paper.gradient(p.START.astype(float), id), rtol=1e-5)
        assert float(one.weight) == float(other.weight) == p.SIZES[id]
        np.testing.assert_allclose(one.metrics["local_loss"], other.metrics["local_loss"])


@pytest.mark.optimised
@pytest.mark.full
def test_same_bits():
    """In any order; a NaN client equals an absent one; an empty round changes nothing."""
    laws.order_is_irrelevant(library())
    laws.nonfinite_clients_are_dropped(federation=library())
    laws.nothing_received_changes_nothing(library())


@pytest.mark.full  # as Mime's rows of tests/laws/test_devices.py
@pytest.mark.optimised
def test_same_bits_in_any_chunk():
    """On two devices, too. Catches a pass whose sums depend on the chunk."""
    there = library().run(p.COHORT)
    laws._compare(there, library(plan=engine.Plan(2, 6), mesh=engine.device_mesh(2)).run(p.COHORT), "devices, chunk")


@pytest.mark.full
@pytest.mark.optimised
def test_no_usable_gradient():
    """Gradients past 2^100, a rate so small that local steps are not. Catches a round that goes on with c = 0."""

    def make(sampler, **run):
        work = {"num_steps": 1, "weighting": "uniform"}
        return algorithms.mime(p.linear_loss, sampler, optax.sgd(1e-36), rule="sgd", **work, **run)

    federation = p.Federation(make=make)
    start = federation.init()
    state, (info,) = federation.run(p.COHORT, p.ragged(spoil={int(id): 3e15 for id in p.COHORT}), num_rounds=1)
    assert int(info["skipped_rounds"]) == 1 and int(info["dropped_clients"]) == len(p.COHORT)
    laws.check_equal_bits(start.server, state.server, "server")
    assert int(federation.run(p.COHORT, num_rounds=1)[1][0]["skipped_rounds"]) == 0


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"rule": "adma"}, "rule: expected one of .* Did you mean 'adam'"),
        ({"momentum": 1.0}, "momentum: expected"),
        ({"downlink": transform.quantize(8)}, "mime: expected one of its arguments, got .downlink."),
        ({"transform": transform.local_gaussian(1.0, 1.0)}, "transform: expected one without noise"),
        ({"transform": transform.error_feedback(transform.top_k(0.5))}, "transform: expected one without memory"),
        ({"transform": "quantize"}, "transform: expected an UpdateTransform, got 'str'"),
    ],
)
def test_wrong_input(wrong, words):
    """Catches parts whose guarantees do not hold for two messages a round."""
    with pytest.raises((TypeError, ValueError), match=words):
        algorithms.mime(p.linear_loss, sampling.full(4), optax.sgd(0.1), num_steps=2, weighting="uniform", **wrong)


@pytest.mark.parametrize("rule", ["adam", "rmsprop", "momentum"])
def test_second_moments_are_not_compressed(rule):
    """Catches a v that a compressor makes negative, whose root drops every client from then on."""

    def make():
        options = {"rule": rule, "num_steps": 2, "weighting": "uniform", "downlink": transform.quantize(8)}
        return algorithms.mime_lite(p.linear_loss, sampling.full(4), optax.sgd(0.1), **options)

    if rule == "momentum":
        assert make().parts.server.wire is not None
    else:
        with refused("downlink", value="a compressor", rule=rule):
            make()


@pytest.mark.full
def test_messages_of_many_bits():
    """A model of 2^27 floats, traced alone. Catches the bits of a message among numbers of 32 bits."""

    def loss(params, *rest):
        return p.linear_loss(params[:3], *rest)

    made = algorithms.mime(loss, cases.SAMPLER, optax.sgd(0.1), num_steps=1, weighting="uniform")
    start = jax.ShapeDtypeStruct((1 << 27,), jnp.float32)
    state = jax.eval_shape(lambda start: made.init(jax.random.key(0), start, p.ragged()), start)
    for step in (made.step, made.observe):
        jax.eval_shape(step, jax.random.key(0), state, p.ragged())
