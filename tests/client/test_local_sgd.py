"""Local training of one client: which examples, how many steps, what is reported."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, client, sampling, server
from fedjax_sim.population import from_clients
from fedjax_sim.types import ClientData
from tests.laws import problems as p
from tests.refusals import refused

ROWS = 7
KEY = jax.random.key(3)


def visits(params, examples, key):
    """Each example's gradient adds one to its own coordinate: the update counts the visits."""
    return -(examples["one_hot"] @ params) * examples["weight"]


def visited(num_examples: int, *, batch_size, seed=0, **work) -> np.ndarray:
    """How often each row was visited, per example of a batch (mean losses divide by the batch's size)."""
    one_hot = np.eye(ROWS, dtype=np.float32)
    one_hot[num_examples:] = np.nan
    data = ClientData({"one_hot": jnp.array(one_hot), "weight": jnp.ones(ROWS)}, jnp.arange(ROWS) < num_examples)
    one = client.local_sgd(visits, optax.sgd(1.0), client.work(batch_size=batch_size, **work))
    report, _ = jax.jit(one.apply)(jax.random.key(seed), jnp.zeros(ROWS), (), data)
    return np.asarray(report.update), report


@pytest.mark.parametrize("num_examples", [1, 4, 5, 7])
def test_an_epoch_visits_each_example_once(num_examples):
    """Catches sampling with replacement, a dropped last batch, and padding rows that are visited.

    In one epoch of batches of 2 every example moves its coordinate once, by 1 / (size of its batch).
    """
    update, report = visited(num_examples, batch_size=2, num_epochs=1)
    odd = num_examples % 2
    assert sorted(update.tolist()) == sorted([0] * (ROWS - num_examples) + [0.5] * (num_examples - odd) + [1.0] * odd)
    assert (update[:num_examples] > 0).all()
    assert float(report.weight) == num_examples
    assert float(report.metrics["local_steps"].total) == -(-num_examples // 2)
    assert float(report.metrics["local_loss"].weight) == num_examples


def test_steps_continue_through_epochs():
    """Catches steps that start the same epoch again: 6 steps of 2 of 5 examples are two whole epochs."""
    update, report = visited(5, batch_size=2, num_steps=6)
    two = sum(sorted(update.tolist()))
    assert two == 2 * 3 and (update[:5] >= 1).all() and (update[5:] == 0).all()
    assert float(report.metrics["local_steps"].total) == 6
    orders = {tuple(visited(5, batch_size=2, num_epochs=1, seed=seed)[0].tolist()) for seed in range(4)}
    assert len(orders) > 1  # the odd one out changes with the key


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("mask", [[1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1, 1]])
def test_stored_order(mask):
    """Three steps of 2 of 5 examples, a fourth of the next epoch. Catches a shuffle, and padding that takes a place."""
    mask = np.array(mask, bool)
    data = ClientData({"one_hot": jnp.eye(ROWS), "weight": jnp.ones(ROWS)}, jnp.array(mask))
    rows = np.flatnonzero(mask)
    updates = [np.zeros(ROWS)]
    for steps, met in enumerate(([0, 1], [2, 3], [4], [0, 1]), 1):
        work = client.work(num_steps=steps, batch_size=2, shuffle=False)
        made = client.local_sgd(visits, optax.sgd(1.0), work)
        report, _ = jax.jit(made.apply)(jax.random.key(0), jnp.zeros(ROWS), (), data)
        updates.append(np.asarray(report.update))
        assert np.flatnonzero(updates[steps] - updates[steps - 1]).tolist() == rows[met].tolist()


def test_full_batches_and_large_batches():
    """Catches a batch larger than the client: it is the full batch."""
    for size in (None, ROWS, 100):
        update, _ = visited(4, batch_size=size, num_steps=3)
        np.testing.assert_allclose(update, [0.75] * 4 + [0] * 3, rtol=1e-6)


@pytest.mark.parametrize("weighting, weight", [("examples", 4), ("uniform", 1)])
def test_reported_weight(weighting, weight):
    """Catches weights by rows, padding included; a client without examples weighs nothing and moves nothing."""
    _, report = visited(4, batch_size=2, num_epochs=2, weighting=weighting)
    assert float(report.weight) == weight
    update, report = visited(0, batch_size=2, num_epochs=2, weighting=weighting)
    assert float(report.weight) == 0 and (update == 0).all()
    assert float(report.metrics["local_steps"].weight) == 0


def test_a_loss_may_weigh_its_examples():
    """Catches a 'weight' that is averaged as a metric: the loss is the weighted mean."""

    def weighted(params, x, key):
        return {"loss": params * x, "weight": x, "doubled": 2 * x}

    one = client.local_sgd(weighted, optax.sgd(1.0), client.work(num_steps=1))
    data = ClientData(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False]))
    report, _ = one.apply(jax.random.key(0), jnp.float32(1), (), data)
    assert float(report.update) == -10 / 4
    assert (float(report.metrics["local_doubled"].total), float(report.metrics["local_doubled"].weight)) == (20, 4)
    assert "weight" not in report.metrics


@pytest.mark.parametrize("mean_loss", [lambda w, x, key: jnp.mean(w * x), lambda w, x, key: {"accuracy": w * x}])
def test_losses_are_per_example(mean_loss):
    """Catches a loss averaged by the user: padding could not be taken out of it."""
    one = client.local_sgd(mean_loss, optax.sgd(1.0), client.work(num_steps=1))
    data = ClientData(jnp.ones(3), jnp.ones(3, bool))
    with refused("loss_fn", rule="(3,)"):
        one.apply(jax.random.key(0), jnp.float32(1), (), data)


@pytest.mark.full
def test_model_and_update_forms_agree_only_for_weights_that_sum_to_one():
    """Equal to 1e-6, and different for partial weights. Catches a model form that adds to the old model."""
    work = client.local_sgd(p.linear_loss, optax.sgd(p.RATE), client.work(num_steps=2))
    model = {"client": client.send_model(work), "server": server.replacement()}
    agree = p.Federation(**model).run(p.COHORT, num_rounds=1)[0].server
    update = p.Federation(client=work).params(p.COHORT, num_rounds=1)
    np.testing.assert_allclose(np.asarray(agree), update, rtol=1e-6, atol=1e-6)
    partial = aggregation.keep_old(2.0 * p.SIZES[p.COHORT].sum())
    half = p.Federation(client=work, aggregator=partial).params(p.COHORT, num_rounds=1)
    replaced = np.asarray(p.Federation(**model, aggregator=partial).run(p.COHORT, num_rounds=1)[0].server)
    np.testing.assert_allclose(half - p.START, (update - p.START) / 2, rtol=1e-4)
    np.testing.assert_allclose(replaced, update / 2, rtol=1e-5)  # the old model is rescaled too
    assert np.abs(half - replaced).max() > 0.1


@pytest.mark.parametrize(
    "work, error, message",
    [
        ({}, ValueError, "num_steps, num_epochs: expected exactly one"),
        ({"num_steps": 1, "num_epochs": 1}, ValueError, "num_steps, num_epochs"),
        ({"num_steps": 0}, ValueError, "num_steps: expected an integer"),
        ({"num_steps": True}, TypeError, "num_steps"),
        ({"num_epochs": 1.5}, TypeError, "num_epochs"),
        ({"num_steps": 1, "batch_size": 0}, ValueError, "batch_size: .*full-batch"),
        ({"num_steps": 1, "weighting": "uniforms"}, ValueError, "weighting: .*Did you mean 'uniform'"),
    ],
)
def test_wrong_input(work, error, message):
    """Catches work that means nothing, before anything compiles."""
    with pytest.raises(error, match=message):
        client.local_sgd(p.linear_loss, optax.sgd(0.1), client.work(**work))


def test_a_client_weighs_as_much_as_its_examples():
    """Fault: tokens as weights in the local loss and in the evaluation, but rows as clients' weights: 3.0, not 4.6."""
    clients = from_clients([{"x": np.float32([1]), "w": np.float32([1])}, {"x": np.float32([5]), "w": np.float32([9])}])

    def loss(w, examples, key):
        return {"loss": (w - examples["x"]) ** 2 / 2, "weight": examples["w"]}

    algorithm = algorithms.fedsgd(loss, sampling.full(2), optax.sgd(1.0), mesh=None)
    state = algorithm.init(jax.random.key(0), jnp.zeros(()), clients)
    state, _ = jax.jit(algorithm.step)(jax.random.key(0), state, clients)
    assert float(algorithm.params(state)) == pytest.approx(4.6)


def _clients_with_steps():
    """Clients of several local steps, by name: (loss, number of steps) -> a client."""
    optimizer = optax.sgd(0.23, momentum=0.73)
    return {
        "local_sgd": lambda loss, steps: client.local_sgd(loss, optimizer, client.work(num_steps=steps, batch_size=3)),
        "full_batch": lambda loss, steps: client.local_sgd(loss, optimizer, client.work(num_steps=steps)),
        "private_sgd": lambda loss, steps: client.private_sgd(
            loss, 0.23, 0.73, 0.9, num_steps=steps, batch_size=3, num_examples=p.ROWS
        ),
    }


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(_clients_with_steps()))
@pytest.mark.parametrize("steps", [2, 5])
def test_loop_and_written_out_steps(name, steps, monkeypatch):
    """Of whole rounds of an MLP. Catches a step that is rounded in another way in a loop, or draws another batch."""
    digests, data = [], p.ragged()
    for is_unrolled in (False, True):
        for module in ("local_sgd", "private"):  # the package has functions of these names
            module = importlib.import_module(f"fedjax_sim.client.{module}")
            monkeypatch.setattr(module, "is_unrolled", lambda num_steps, x=is_unrolled: x)
        worker = _clients_with_steps()[name](p.mlp_loss, steps)
        algorithm = algorithms.federated(
            p.given(4), worker, aggregation.mean(), server.optimizer(optax.sgd(1.0)), mesh=None
        )
        state, step = algorithm.init(KEY, p.mlp_params(), data), jax.jit(algorithm.step)
        for i in range(3):
            state, _ = step(jax.random.fold_in(KEY, i), state, data)
        digests.append(p.digest(jax.device_get(algorithm.params(state))))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("given", [(None, None), (1, 1)])
def test_work_that_was_made_by_hand(given):
    """Fault: an `assert` in the first round, for steps and epochs that `client.work` would have refused."""
    with refused("work", rule="one of num_steps and num_epochs"):
        client.local_sgd(lambda w, x, key: w * x, optax.sgd(0.1), client.LocalWork(*given, 1, None, True))
