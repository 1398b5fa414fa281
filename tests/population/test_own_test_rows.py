"""Rows that clients keep from training, and personal models judged by them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidType, algorithms, engine, metrics, population, run, sampling
from fedjax_sim.config.build import build
from fedjax_sim.config.document import ConfigError, load
from fedjax_sim.population.describe import digest
from fedjax_sim.types import Evaluated
from tests.laws import problems as p
from tests.refusals import refused


def split(fraction=0.3, seed=0):
    whole = population.mean_estimation(num_clients=p.NUM_CLIENTS)._replace(train=p.ragged())
    return whole, population.with_local_test(whole, fraction=fraction, seed=seed)


mask_of = jax.jit(lambda people, id: people.client(id).mask)


def rows(people, id):
    return set(np.flatnonzero(np.asarray(mask_of(people, jnp.int32(id)))).tolist())


def test_rows_are_split():
    """Catches a row in both, a row lost, padding taken for one, the same rows at every client or seed."""
    (whole, data), (_, other) = split(0.5), split(0.5, seed=1)
    chosen, differing = set(), 0
    for id in range(p.NUM_CLIENTS):
        train, test = rows(data.train, id), rows(data.local_test, id)
        assert not train & test and train | test == rows(whole.train, id)
        assert len(test) in (p.SIZES[id] // 2, (p.SIZES[id] + 1) // 2)
        chosen.add(tuple(sorted(test)))
        differing += test != rows(other.local_test, id)
    assert len(chosen) > 8 and differing > 4


def test_counts():
    """Catches sizes of the rows that were there before."""
    _, data = split()
    for people in (data.train, data.local_test):
        real = [len(rows(people, id)) for id in range(p.NUM_CLIENTS)]
        assert np.asarray(people.sizes).tolist() == real
        assert jax.jit(jax.vmap(people.count))(jnp.arange(p.NUM_CLIENTS)).tolist() == real


def test_personal_models_are_judged_by_their_owners_rows():
    """Client i's own model is i / 10 everywhere. Catches models or rows of another client, and rows trained on."""
    _, data = split()

    def personal(state, ids):
        return jnp.full((*ids.shape, len(p.START)), 1.0) * (state * ids[:, None] / 10)

    judge = metrics.evaluation(p.linear_loss, local_test=data.local_test, personal=personal)
    found, totals, weights = judge(jnp.array(p.START), jnp.float32(1)), 0.0, 0.0

    @jax.jit
    def own(id):
        one = data.local_test.client(id)
        return one.mask, p.linear_loss(jnp.full(len(p.START), id / 10), one.examples, None)

    for id in range(p.NUM_CLIENTS):
        here, losses = map(np.asarray, own(jnp.int32(id)))
        totals += losses[here].sum()
        weights += here.sum()
    np.testing.assert_allclose(found["personal_loss"], totals / weights, rtol=1e-5)
    assert found["local_test_loss"] != found["personal_loss"] and len(found["personal_loss_quantiles"]) == 5
    with refused("personal", rule="judge"):
        metrics.evaluation(p.linear_loss, personal=personal)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_evaluates_personal_models(devices):
    """Catches an evaluation that is called without the state, with that of another round, or apart from its devices."""
    _, data = split()
    work = {"num_steps": 1, "weighting": "uniform", "mesh": engine.device_mesh(devices)}
    made = algorithms.fedavg(p.linear_loss, sampling.full(p.NUM_CLIENTS), optax.sgd(0.01), **work)
    personal = lambda state, ids: made.params(state)[None] * jnp.ones((len(ids), 1))  # noqa: E731
    made = made._replace(evaluated=Evaluated(personal))
    judge = metrics.evaluation(p.linear_loss, local_test=data.local_test, personal=made.evaluated.personal)
    _, history = run(jax.random.key(0), made, jnp.array(p.START), data.train, 2, evaluation=judge, evaluate_every=1)
    for name in ("loss", "loss_quantiles"):  # everybody's own model is the global one
        own, shared = (np.stack([r[f"{who}_{name}"] for r in history.records]) for who in ("personal", "local_test"))
        np.testing.assert_allclose(own, shared, rtol=1e-6)
    assert len(set(history.column("personal_loss")[1])) == 3


def test_a_config_may_keep_rows():
    """Catches a wrapper of the data that a config cannot name."""
    small = ["data.name=mean_estimation", "data.num_clients=50", "model.name=linear", "sampler.cohort_size=10"]
    made = build(load(None, [*small, "data.with_local_test.fraction=0.4"]))
    assert made.data.local_test.size == made.data.train.size == 50
    assert "local_test_loss" in made.evaluation(made.params)
    with pytest.raises(ConfigError, match=r"with_local_test\.fraction: expected"):
        build(load(None, [*small, "data.with_local_test.fraction=1.0"]))


def test_other_rows_have_another_digest(tmp_path):
    """Catches a run that goes on with other rows kept, or with another store under them, unnoticed."""
    made = {digest(split(fraction, seed)[1]) for fraction in (0.3, 0.5) for seed in (0, 1)}
    assert len(made) == 4
    whole = split()[0]
    for name, value in (("a", 1.0), ("b", 2.0)):
        population.write_store(tmp_path / name, {"x": np.full((4, 1), value, np.float32)}, [0, 2, 4])
        stored = whole._replace(train=population.host_store(tmp_path / name))
        made.add(digest(population.with_local_test(stored)))
    assert len(made) == 6


def test_what_is_no_data_set_is_refused():
    """Catches an AttributeError about something that the caller did not write."""
    with refused("data", value="Generated", rule="FederatedData", kind=InvalidType):
        population.with_local_test(p.ragged())


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("wrapped", [lambda data: data, lambda data: population.with_groups(data, num_groups=4)])
def test_a_local_test_has_true_labels(wrapped):
    """Catches personal models that are judged by labels that went through randomised response."""
    data = population.digits(num_clients=20)
    hidden = wrapped(population.with_private_labels(data, epsilon=0.1))
    with refused("data", value="digits", rule="private"):
        population.with_local_test(hidden)
    kept = population.with_private_labels(population.with_local_test(data), epsilon=0.1)
    plain = population.with_local_test(data)
    for id in range(5):
        ours, true = (people.client(jnp.int32(id)).examples["y"] for people in (kept.local_test, plain.local_test))
        np.testing.assert_array_equal(ours, true)
