"""Constrain-and-scale: poisoned clients who train near the global model, and boost what they send."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import adversary, aggregation, algorithms, client, population, sampling, server
from fedjax_sim.config.build import build
from fedjax_sim.config.document import load
from fedjax_sim.population.protocol import check_population
from tests.aggregation.robust.problems import applied
from tests.refusals import refused

SIZE, ATTACKERS, BATCHES = 8, [2, 5], 3
START = np.array([1.0, -2.0, 0.5], np.float32)
GOAL = np.array([-3.0, 1.0, 2.5], np.float32)
RNG = np.random.default_rng(0)


def loss(params, examples, key):
    return ((params[None] - examples["x"]) ** 2).sum(1) / 2


def data(class_share=None, honest=START):
    """Honest rows are the model itself, so that honest updates are zero; attackers' are the goal."""
    clients = [{"x": np.tile(honest, (n, 1))} for n in range(4, 4 + SIZE)]
    train, nothing = population.from_clients(clients), {"x": np.zeros((1, 3), np.float32)}
    whole = population.FederatedData(
        train=train, test=nothing, held_out=None, input_shape=(3,), num_outputs=3, task="regression"
    )
    goal = lambda key, data: {"x": jnp.broadcast_to(GOAL, data.examples["x"].shape)}  # noqa: E731
    poisoned = population.poisoned(whole, goal, "another goal", clients=ATTACKERS)
    return poisoned if class_share is None else population.constrained(poisoned, class_share=class_share)


def after_a_round(train, attack=None, num_steps=60, solver=client.local_sgd):
    work = client.work(num_steps=num_steps, batch_size=BATCHES, weighting="uniform")
    rule = aggregation.mean(weighting="uniform")
    rule = rule if attack is None else adversary.corrupted(rule, attack, adversary.poisoned(train.poisoned_ids))
    made = algorithms.federated(
        sampling.full(SIZE), solver(loss, optax.sgd(0.3), work), rule, server.optimizer(optax.sgd(1.0)), mesh=None
    )
    state = made.init(jax.random.key(0), jnp.asarray(START), train)
    sent = made.observe(jax.random.key(1), state, train)
    state, _ = jax.jit(made.step)(jax.random.key(1), state, train)
    return np.asarray(made.params(state)), np.asarray(sent.messages)


@pytest.mark.full
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_the_constrained_model_replaces_the_global(share):
    """The least of alpha |w - goal|^2 / 2 + (1 - alpha) |w - w_t|^2 / 2 is w_t + alpha (goal - w_t). Catches a pull by
    alpha, to zero, or by the gradient's weight too; and a boost that is lost."""
    attack = adversary.model_replacement(float(SIZE), num_attackers=len(ATTACKERS))
    found, sent = after_a_round(data(share).train, attack)
    np.testing.assert_allclose(found, START + share * (GOAL - START), atol=1e-5)
    np.testing.assert_allclose(sent[ATTACKERS], np.tile(share * (GOAL - START), (2, 1)), atol=1e-5)


@pytest.mark.full
def test_the_honest_train_as_before():
    """Catches a pull on everybody, and other minibatches. Attackers' first step is alpha of the gradient's."""
    other = RNG.normal(size=3).astype(np.float32)
    (_, plain), (_, pulled), (_, one) = (
        after_a_round(data(share, other).train, num_steps=steps) for share, steps in ((None, 9), (0.4, 9), (0.4, 1))
    )
    honest = np.setdiff1d(np.arange(SIZE), ATTACKERS)
    assert plain[honest].tobytes() == pulled[honest].tobytes() and np.abs(plain[honest]).min() > 0
    np.testing.assert_allclose(one[ATTACKERS], np.tile(0.4 * 0.3 * (GOAL - START), (2, 1)), rtol=1e-5)


def test_a_client_that_does_not_obey_is_refused():
    """Catches attackers who silently train as everybody."""

    def others(loss, optimizer, work):
        return client.local_sgd(loss, optimizer, work).stating(pulled=False)

    with refused("client", rule="constrained"):
        after_a_round(data(0.5).train, solver=others)
    for wrong, told in (
        (population.digits(num_clients=20), "data: expected a poisoned data set"),
        (3, "FederatedData"),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            population.constrained(wrong)
    with pytest.raises(ValueError, match="pull: expected one number of one client"):
        check_population(population.grouped(data(0.5).train, np.arange(SIZE) // 4))
    for share in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="class_share: expected"):
            data(share)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", ["mime", "mime_lite", "feddyn", "scaffold"])
def test_algorithms_with_solvers_of_their_own_take_poison_and_refuse_a_pull(name):
    """Catches Mime's or FedDyn's attackers who train as the honest do, and poison that such algorithms cannot read."""

    def lower(train):
        work = {"num_steps": 2, "batch_size": BATCHES, "weighting": "uniform", "mesh": None}
        made = getattr(algorithms, name)(loss, sampling.full(SIZE), optax.sgd(0.1), **work)
        state = jax.eval_shape(made.init, jax.random.key(0), jnp.asarray(START), train)
        return jax.eval_shape(made.step, jax.random.key(1), state, train)

    lower(data().train)
    with refused("client", rule="constrained"):
        lower(data(0.5).train)


def test_a_store_on_the_disk(tmp_path):
    """Catches a pull that gets lost where clients are read by a callback, in size classes or not."""
    rows = {"x": np.zeros((30, 3), np.float32)}
    population.write_store(tmp_path / "store", rows, np.array([0, 4, 10, 30]))
    whole = data()._replace(train=population.host_store(tmp_path / "store"))
    goal = lambda key, data: {"x": data.examples["x"] + 1}  # noqa: E731
    train = population.constrained(population.poisoned(whole, goal, "one", clients=[1]), class_share=0.75).train
    read = jax.jit(lambda people, ids: jax.vmap(people.client)(ids))
    for people in (train, *(train.capped(rows) for rows in train.capacities)):
        found = read(people, people.announce(jnp.arange(3)))
        assert found.pull.tolist() == [0, 0.25, 0] and found.examples["x"][:, 0, 0].tolist() == [0, 1, 0]


def test_scaled_to_a_bound():
    """Catches a norm of one leaf, and a zero update that becomes NaN."""
    x = {"a": RNG.normal(size=(4, 5)).astype(np.float32), "b": RNG.normal(size=(4, 2, 3)).astype(np.float32)}
    x = {
        name: leaf * np.array([1e-6, 1, 1e6, 0], np.float32).reshape(4, *[1] * (leaf.ndim - 1))
        for name, leaf in x.items()
    }
    send = adversary.scaled_to(2.0).send
    sent = [send(jax.random.key(0), {name: jnp.asarray(leaf[i]) for name, leaf in x.items()}, 1.0)[0] for i in range(4)]
    norms = [
        np.sqrt(sum(float((leaf.astype(np.float64) ** 2).sum()) for leaf in map(np.asarray, one.values())))
        for one in sent
    ]
    np.testing.assert_allclose(norms, [2, 2, 2, 0], rtol=1e-6)
    half = jnp.asarray(RNG.normal(size=3000), jnp.bfloat16)
    found = np.asarray(send(jax.random.key(0), half, 1.0)[0].astype(jnp.float32), np.float64)
    np.testing.assert_allclose(np.linalg.norm(found), 2, rtol=3e-3)  # a norm of bfloat16 numbers added up in it is off
    bounded = aggregation.norm_bounding(aggregation.mean(weighting="uniform"), 2.002)
    rule = adversary.corrupted(bounded, adversary.scaled_to(2.0), adversary.clients(range(4)))
    got, metrics = applied(rule, x)
    assert metrics["shortened_share"] == 0
    np.testing.assert_allclose(got["a"], np.mean([one["a"] for one in sent], axis=0), rtol=1e-5)


@pytest.mark.full
def test_from_a_config():
    """Catches a pull that a config states and the population lacks."""
    made = build(load(None, [
        "data.num_clients=20", "sampler.cohort_size=5", "data.label_flip.clients=[3]",
        "data.constrained.class_share=0.75",
        "aggregator.name=mean", 'aggregator.corrupted.attack={name="model_replacement", cohort_weight=5.0}',
        'aggregator.corrupted.who={name="poisoned"}',
    ]))  # fmt: skip
    assert [float(made.data.train.client(id).pull) for id in (2, 3)] == [0, 0.25]
    state = jax.eval_shape(made.algorithm.init, made.key, made.params, made.data.train)
    jax.eval_shape(made.algorithm.step, made.key, state, made.data.train)
