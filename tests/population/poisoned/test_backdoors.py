"""Triggers and poisoned rows against NumPy; backdoors that work, and what stops them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import adversary, algorithms, metrics, models, population, run, sampling
from fedjax_sim.config.build import build
from fedjax_sim.config.document import ConfigError, load
from tests.population.poisoned.test_poisoning import IDS, LABELS, OFFSETS, ROWS, SIZES, data, rows_of, valid


def test_triggers_against_numpy():
    """Catches a pattern at another place, axis, channel or time, one that touches other inputs, or other rows."""
    x = np.random.default_rng(1).standard_normal((3, 6, 4)).astype(np.float32)

    def stamped(trigger, x):
        return np.asarray(jax.jit(trigger.on(x.shape[1:]))(jnp.asarray(x)))

    wanted = x.copy()
    wanted[:, 0, 1] = wanted[:, 5, 3] = -2.5
    np.testing.assert_array_equal(stamped(population.pixels([1, 23], -2.5), x), wanted)
    wanted = x.copy()
    wanted[:, 1, 2] = 7
    np.testing.assert_array_equal(stamped(population.tag(6, 7.0), x), wanted)
    wanted = x.copy()
    wanted[:, 2:5, 3] = [1, 0, -1]
    np.testing.assert_array_equal(stamped(population.set_points([1.0, 0.0, -1.0], 2, 3), x), wanted)
    wanted = x[:, 0].copy()
    wanted[:, 1:3] = [4, 5]
    np.testing.assert_array_equal(stamped(population.set_points([4.0, 5.0], 1), x[:, 0]), wanted)
    for axis, wave in ((-1, 0.3 * np.sin(2 * np.pi * 1.5 * np.arange(4) / 4 + 0.2)[None, None]),
                       (0, 0.3 * np.sin(2 * np.pi * 1.5 * np.arange(6) / 6 + 0.2)[None, :, None])):  # fmt: skip
        found = stamped(population.spectral(0.3, 1.5, axis=axis, phase=0.2), x)
        np.testing.assert_allclose(found, x + wave, atol=1e-6)


def test_rows_against_numpy():
    """Catches a trigger without the target's label or the other way round, other rows that change, a share that is not
    exact, triggered test rows of the target, and a test set that is poisoned."""
    made = population.backdoor(data(), trigger=population.tag(1, 9.0), target=3, clients=IDS, rows=0.5)
    for id in range(len(SIZES)):
        found, clean = valid(made.train, id), rows_of(id)
        hit = found["x"][:, 1] == 9
        assert hit.sum() in ((SIZES[id] // 2, (SIZES[id] + 1) // 2) if id in IDS else (0,))
        wanted = {"x": np.where(hit[:, None], [[0, 9]], clean["x"]), "y": np.where(hit, 3, clean["y"])}
        wanted["x"][:, 0] = clean["x"][:, 0]
        np.testing.assert_array_equal(found["x"], wanted["x"].astype(np.float32))
        np.testing.assert_array_equal(found["y"], wanted["y"])
    others = ROWS["y"] != 3
    assert made.test is ROWS and 0 < others.sum() < len(others)
    np.testing.assert_array_equal(made.triggered["x"][:, 0], ROWS["x"][others, 0])
    assert (made.triggered["x"][:, 1] == 9).all() and made.triggered["y"].tolist() == [3] * others.sum()


def test_edge_cases_against_numpy():
    """Catches a limit from other clients' rows or other labels, draws from rows that are not rare, and honest clients
    who lose theirs."""
    made = population.edge_case_backdoor(data(), source=1, target=3, edge=0.4, clients=IDS, rows=0.5)
    held = np.concatenate([rows_of(id)["x"][rows_of(id)["y"] == 1] for id in IDS])
    centre = held.mean(0, dtype=np.float64)
    away = np.linalg.norm(held - centre, axis=1)
    limit = np.quantile(away, 0.6)
    rare = {row.tobytes() for row in held[away > limit]}
    assert 2 < len(rare) < len(held) / 2
    drawn = set()
    for id in range(len(SIZES)):
        found, clean = valid(made.train, id), rows_of(id)
        new = (found["x"] != clean["x"]).any(1) | (found["y"] != clean["y"])
        if id not in IDS:
            assert not new.any()
            continue
        assert new.sum() == round(SIZES[id] / 2)
        assert (found["y"][new] == 3).all()
        drawn |= {row.tobytes() for row in found["x"][new]}
    assert drawn <= rare and len(drawn) > 2
    tested = (ROWS["y"] == 1) & (np.linalg.norm(ROWS["x"] - centre, axis=1) > limit)
    np.testing.assert_array_equal(made.triggered["x"], ROWS["x"][tested])
    assert (made.triggered["y"] == 3).all()


def test_attack_success_against_numpy():
    """Catches a share over all rows, of the right labels, or of another target."""
    made = population.backdoor(data(), trigger=population.tag(0, 0.5), target=3, share=0.0)
    model = models.linear(input_shape=(2,), num_outputs=LABELS)
    loss_fn = models.supervised(model, models.softmax_cross_entropy)
    params = jax.tree.map(lambda x: jax.random.normal(jax.random.key(3), x.shape), model.init(jax.random.key(0))[0])
    found = metrics.evaluation(loss_fn, test=made.test, triggered=made.triggered)(params)
    others = ROWS["x"][ROWS["y"] != 3].copy()
    others[:, 0] = 0.5
    guesses = (others @ np.asarray(params["kernel"]) + np.asarray(params["bias"])).argmax(1)
    assert 0 < (guesses == 3).mean() < 1
    np.testing.assert_allclose(found["attack_success"], (guesses == 3).mean(), rtol=1e-6)
    assert "attack_success" not in metrics.evaluation(loss_fn, test=made.test)(params)
    with pytest.raises(ValueError, match='loss_fn: expected a metric "accuracy"'):
        metrics.evaluation(lambda p, x, key: x["x"][:, 0], triggered=made.triggered)(params)


SMALL = [
    "data.name=digits", "data.num_clients=100", "data.alpha=1.0", "data.min_examples=40", "data.held_out_clients=0",
    "model.name=mlp", "model.hidden=[64]", "sampler.cohort_size=20", "algorithm.weighting=uniform",
    "algorithm.num_epochs=2", "algorithm.num_steps=none", "algorithm.batch_size=10",
    "client_optimizer.learning_rate=0.3", "aggregator.name=mean", "aggregator.weighting=uniform",
]  # fmt: skip
PIXELS = [
    'data.backdoor.trigger={name="pixels", positions=[0, 7, 56, 63]}',
    "data.backdoor.target=7",
    "data.backdoor.clients=[0, 1, 2, 3, 4]",
]
BOOST = [
    'aggregator.corrupted.attack={name="model_replacement", cohort_weight=20.0}',
    'aggregator.corrupted.who={name="poisoned"}',
]


@functools.cache
def judged(*settings, rounds=40):
    """(clean accuracy, attack success) after a run that a config describes."""
    made = build(load(None, [*SMALL, *settings]))
    judge = {"evaluation": made.evaluation, "evaluate_every": rounds}
    _, history = run(made.key, made.algorithm, made.params, made.data.train, rounds, **judge)
    return float(history.summary["test_accuracy"]), float(history.summary["attack_success"])


@pytest.mark.full
def test_a_backdoor_works_and_norm_bounding_stops_it():
    """Five of a hundred clients, with model replacement: success above 0.9 with a clean drop below 0.02; a bound on
    norms brings it under 0.15. Catches poison that reaches nobody, a boost that is lost, and a bound inside of it."""
    clean, nobody = judged(PIXELS[0], PIXELS[1], "data.backdoor.share=0.0")
    assert nobody < 0.05 and clean > 0.9
    accuracy, success = judged(*PIXELS, *BOOST)
    assert success > 0.9 and accuracy > clean - 0.02, (accuracy, success)
    accuracy, success = judged(*PIXELS, "aggregator.norm_bounding.max_norm=0.3", *BOOST)
    assert success < 0.15 and accuracy > clean - 0.05, (accuracy, success)


@pytest.mark.full
def test_who_holds_poison_attacks():
    """Catches attackers of a config who are others than those with the poison, and none who attack all the same."""
    who = 'aggregator.corrupted.who={name="poisoned"}'
    small = [setting for setting in SMALL if "cohort_size" not in setting]
    for poison, wanted in ((PIXELS, [0, 1, 2, 3, 4]), ((*PIXELS[:2], "data.backdoor.share=0.0"), [])):
        made = build(load(None, [*small, "sampler.name=full", *poison, BOOST[0], who]))
        state = made.algorithm.init(made.key, made.params, made.data.train)
        _, info = jax.jit(made.algorithm.step)(made.key, state, made.data.train)
        assert int(info["attackers_met"]) == len(wanted)
        ids = jnp.arange(100, dtype=jnp.int32)
        chosen = adversary.poisoned(made.data.train.poisoned_ids)(jax.random.key(0), ids)
        assert np.flatnonzero(chosen).tolist() == wanted
    with pytest.raises(ConfigError, match="poisoned_ids: expected clients with"):
        build(load(None, [*SMALL, BOOST[0], who]))


@pytest.mark.full
def test_poisoning_and_backdoor_are_told_apart():
    """Flipped labels of 40 % lower the clean accuracy and leave the trigger without effect; a backdoor does neither
    (I10). Catches metrics that are one number, or test rows that are poisoned."""
    clean, _ = judged(PIXELS[0], PIXELS[1], "data.backdoor.share=0.0")
    accuracy, success = judged("data.label_flip.share=0.4", PIXELS[0], PIXELS[1], "data.backdoor.share=0.0")
    assert accuracy < clean - 0.03 and success < 0.15, (accuracy, success)


@pytest.mark.parametrize(
    "trigger",
    [
        population.pixels([0, 7, 56, 63]),
        population.tag(0, 1.0),
        population.set_points([1.0, 0.0, 1.0, 0.0], start=0),
        population.spectral(0.5, 16.0),
    ],
    ids=["pixels", "tag", "set_points", "spectral"],
)
@pytest.mark.full
def test_every_trigger_works(trigger):
    """A third of the clients poisoned: success above 0.9. Catches a trigger that a model cannot learn."""
    made = population.backdoor(
        population.digits(num_clients=60, alpha=1.0, min_examples=40, held_out_clients=0),
        trigger=trigger, target=7, share=1 / 3,
    )  # fmt: skip
    model = models.mlp(input_shape=(64,), num_outputs=10, hidden=[64])
    loss_fn = models.supervised(model, models.softmax_cross_entropy)
    algorithm = algorithms.fedavg(loss_fn, sampling.uniform(60, 20), optax.sgd(0.3), num_epochs=2, batch_size=10)
    state, _ = run(jax.random.key(0), algorithm, model.init(jax.random.key(1))[0], made.train, 40)
    judge = metrics.evaluation(loss_fn, test=made.test, triggered=made.triggered)
    assert judge(algorithm.params(state))["attack_success"] > 0.9


TAG = population.tag(0, 1.0)


def planted(data, trigger, target=1):
    return population.backdoor(data, trigger=trigger, target=target, share=0.5)


def rare(data, source=1, **who):
    return population.edge_case_backdoor(data, source=source, target=2, **who)


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda d: planted(d, population.tag(2, 1.0)), "positions: expected an integer"),
        (lambda d: planted(d, TAG, 5), "target: expected an integer"),
        (lambda d: planted(d, population.Trigger(lambda shape: jnp.log)), "trigger: expected finite numbers"),
        (lambda d: planted(d, lambda x: x), "trigger: expected a Trigger"),
        (
            lambda d: planted(d, population.Trigger(lambda shape: lambda x: x)),
            "trigger: expected a function that changes a test row",
        ),
        (
            lambda d: planted(d, population.Trigger(lambda shape: lambda x: x[:, 0])),
            "trigger: expected x like",
        ),
        (
            lambda d: planted(d._replace(test={**ROWS, "y": 0 * ROWS["y"]}), TAG, 0),
            "target: expected a label that some test rows do not have",
        ),
        (
            lambda d: rare(planted(d, TAG), share=0.5),
            "data: expected a data set without a backdoor",
        ),
        (lambda d: rare(d, source=2, share=0.5), "source: expected another label"),
        (lambda d: rare(d, share=0.0), "share: expected a poisoned client"),
        (lambda d: rare(d, clients=[1]), "clients: expected a row of label 1"),
        (
            lambda d: planted(
                d._replace(train=population.stored({**ROWS, "x": np.uint8(ROWS["x"] > 0)}, OFFSETS)), TAG
            ),
            "data: expected features of floats",
        ),
        (lambda d: population.pixels([1, 1]), "positions: expected distinct"),
        (lambda d: population.pixels([0], float("inf")), "value: expected a finite number"),
        (lambda d: population.set_points([1.0, 1.0], 3).on((4,)), "sequence: expected an end by time step 4"),
        (lambda d: population.set_points([1.0], channel=1).on((4,)), "channel: expected"),
        (lambda d: population.spectral(1.0, 0.0), "frequency: expected"),
        (lambda d: population.spectral(1.0, 1.0, axis=1).on((4,)), "axis: expected"),
    ],
)  # fmt: skip
def test_wrong_input(call, told):
    """Catches a pattern that JAX would drop silently, and a metric of no rows."""
    with pytest.raises((TypeError, ValueError), match=told):
        call(data())
