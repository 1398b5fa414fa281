"""Who is judged by which model: clients that trained, newcomers, and models that are fine-tuned before."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, client, metrics, sampling
from tests.algorithms.personal import problem as p
from tests.refusals import refused

SGD, FULL = optax.sgd(p.RATE), sampling.full(p.NUM_CLIENTS)


def judged(algorithm, state):
    """The record of the personal models on rows that nobody trains on."""
    evaluated = algorithm.evaluated
    evaluate = metrics.evaluation(
        p.loss_fn, local_test=p.population(1), personal=evaluated.personal, has_trained=evaluated.has_trained,
        adapt=evaluated.adapt, owners=p.population(0),
    )  # fmt: skip
    params = algorithm.params(state)
    return evaluate(params, state) if evaluated.personal is not None else evaluate(params)


def pooled(models, chosen):
    """The mean loss over the unseen rows of the chosen clients, each at its own model."""
    clients = p.rows(1)
    totals = [p.loss(models[i], clients[i]) * len(clients[i]["y"]) for i in chosen]
    return sum(totals) / sum(len(clients[i]["y"]) for i in chosen)


def test_newcomers_are_told_apart():
    """Catches a client that was never drawn and counts with the model before training."""
    algorithm = algorithms.ditto(p.loss_fn, sampling.cyclic(p.NUM_CLIENTS, 2), SGD, **p.OPTIONS)
    state, _ = p.trained(algorithm, rounds=1)
    has_trained = np.asarray(algorithm.evaluated.has_trained(state, np.arange(p.NUM_CLIENTS)))
    trained, others = np.flatnonzero(has_trained), np.flatnonzero(~has_trained)
    assert len(trained) == 2
    models = p.own_models(algorithm, state)
    shared = p.vector(algorithm.params(state))
    for i in others:  # a newcomer has the shared model of now
        np.testing.assert_array_equal(models[i], shared)
    record = judged(algorithm, state)
    assert record["personal_clients"] == 2
    np.testing.assert_allclose(record["personal_loss"], pooled(models, trained), rtol=1e-5)
    np.testing.assert_allclose(record["newcomer_loss"], pooled(models, others), rtol=1e-5)
    state, _ = p.trained(algorithm, rounds=3)
    record = judged(algorithm, state)
    assert record["personal_clients"] == p.NUM_CLIENTS and "newcomer_loss" not in record


@pytest.mark.full
@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_judged_models_are_fine_tuned(name):
    """Catches fine-tuning on the rows that judge, from another model, or one that changes the rounds."""
    plain = {"fedavg": algorithms.fedavg, "ditto": algorithms.ditto}[name](p.loss_fn, FULL, SGD, **p.OPTIONS)
    algorithm = algorithms.fine_tuned(plain, p.loss_fn, optax.sgd(0.05), num_steps=4)
    state, _ = p.trained(algorithm)
    expected, _ = p.trained(plain)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)
    if name == "ditto":
        starts = p.own_models(plain, state)
    else:
        starts = np.tile(p.vector(plain.params(state)), (p.NUM_CLIENTS, 1))
    models = []
    for model, rows in zip(starts, p.rows(), strict=True):
        for _ in range(4):
            model = model - 0.05 * p.gradient(model, rows)
        models.append(model)
    record = judged(algorithm, state)
    np.testing.assert_allclose(record["personal_loss"], pooled(models, range(p.NUM_CLIENTS)), rtol=1e-5)
    unchanged = {name: value for name, value in judged(plain, state).items() if name.startswith("local_test")}
    for metric, value in unchanged.items():
        np.testing.assert_array_equal(record[metric], value)
    assert unchanged


def test_what_is_missing_is_named():
    with refused("optimizer", rule="does not fall"):
        falling = client.over_rounds(optax.sgd, optax.linear_schedule(0.1, 0.0, 9))
        algorithms.fine_tuned(algorithms.fedavg(p.loss_fn, FULL, SGD, **p.OPTIONS), p.loss_fn, falling)
    adapt = algorithms.fine_tuned(algorithms.fedavg(p.loss_fn, FULL, SGD, **p.OPTIONS), p.loss_fn, SGD).evaluated.adapt
    with refused("personal", rule="judge"):
        metrics.evaluation(p.loss_fn, adapt=adapt)
    with refused("owners", rule="training rows"):
        metrics.evaluation(p.loss_fn, adapt=adapt, local_test=p.population(1))
