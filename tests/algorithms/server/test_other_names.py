"""Methods that are a config of other algorithms' parts, each against the formula of its paper."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, population, sampling
from fedjax_sim.config.document import load
from tests.algorithms.personal import problem as p
from tests.config.test_document import algorithm_of

SGD = optax.sgd(p.RATE)
PAGE = Path(__file__).parents[3] / "docs/wings/algorithms.md"


def local(model, client, steps=p.STEPS):
    for _ in range(steps):
        model = model - p.RATE * p.gradient(model, client)
    return model


def model_of(algorithm, rounds=p.ROUNDS, people=None):
    return p.vector(algorithm.params(p.trained(algorithm, rounds, people)[0]))


def test_reptile():
    """Nichol et al. 2018, with the clients as its tasks. Catches a mean by rows, and a rate that is applied twice."""
    options = p.OPTIONS | {"momentum": 0.0, "server_learning_rate": 0.5, "weighting": "uniform"}
    found = model_of(algorithms.fedavgm(p.loss_fn, sampling.full(p.NUM_CLIENTS), SGD, **options))
    model = p.START
    for _ in range(p.ROUNDS):
        model = model + 0.5 * np.mean([local(model, client) - model for client in p.rows()], axis=0)
    np.testing.assert_allclose(found, model, rtol=1e-4)


def test_cyclic_weight_transfer():
    """The model's way through the clients, twice around. Catches a start that is not the last client's end."""
    found = model_of(algorithms.fedavg(p.loss_fn, sampling.cyclic(p.NUM_CLIENTS, 1), SGD, **p.OPTIONS), 10)
    model = p.START
    for client in p.rows() + p.rows():
        model = local(model, client)
    np.testing.assert_allclose(found, model, rtol=1e-4)


def test_central_training():
    """Catches a group whose clients train apart, and padding that counts."""
    one = population.grouped(p.population(), [0] * p.NUM_CLIENTS)
    found = model_of(algorithms.fedavg(p.loss_fn, sampling.full(1), SGD, **p.OPTIONS), people=one)
    rows = {name: np.concatenate([client[name] for client in p.rows()]) for name in ("x", "y")}
    np.testing.assert_allclose(found, local(p.START, rows, p.ROUNDS * p.STEPS), rtol=1e-4)


def test_lg_fedavg():
    """The first part stays at its client, and the last one is averaged by rows. Catches the two exchanged."""
    algorithm = algorithms.fedper(p.loss_fn, sampling.full(p.NUM_CLIENTS), SGD, own=["body"], **p.OPTIONS)
    state, info = p.trained(algorithm)
    shared, bodies = p.START[p.OUTPUT], [p.START[p.BODY]] * p.NUM_CLIENTS
    for _ in range(p.ROUNDS):
        ends = [local(np.concatenate([body, shared]), client) for body, client in zip(bodies, p.rows(), strict=True)]
        bodies = [end[p.BODY] for end in ends]
        shared = p.mean([end[p.OUTPUT] for end in ends])
    expected = [np.concatenate([body, shared]) for body in bodies]
    np.testing.assert_allclose(p.own_models(algorithm, state), expected, rtol=1e-4, atol=1e-6)
    assert info["uplink_bytes"].total() == info["downlink_bytes"].total() == p.NUM_CLIENTS * 4


def settings_on_the_page() -> dict[str, list[str]]:
    """Method -> its settings, from the table of the page."""
    table = PAGE.read_text(encoding="utf-8").split("## Under other names")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("|") and "`" in line]
    return {row[0].split(":")[0].strip("| "): re.findall(r"'[^']*'|\S+", row[1].split("`")[1]) for row in rows}


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("method", settings_on_the_page())
def test_settings_of_the_page(method):
    """Catches a line that no config takes."""
    settings = [each.strip("'") for each in settings_on_the_page()[method]]
    is_full, is_told = "sampler.name=full" in settings, any("cohort_size" in each for each in settings)
    cohort = [] if is_full or is_told else ["sampler.cohort_size=5"]
    small = ["data.num_clients=10", "model.hidden=[8]", "run.devices=1", *cohort]
    algorithm, *_ = algorithm_of(load("quickstart", [*small, *settings], ["sampler.cohort_size"] if is_full else []))
    assert algorithm.parts.complete
