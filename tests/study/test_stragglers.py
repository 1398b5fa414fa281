"""The study of stragglers: a number is a run by itself, arms are paired, and the map is NumPy's."""

import functools

import jax
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, engine, metrics, models, population, sampling, theory
from fedjax_sim.prng import init_key, stream
from fedjax_sim.running.loop import run
from fedjax_sim.study.findings import comparisons_of, measured, rows_of
from fedjax_sim.study.quadratic_settings import quadratic_clients
from fedjax_sim.study.stragglers import training
from fedjax_sim.study.stragglers.claims import stragglers_claims
from fedjax_sim.study.stragglers.proximal_map import MAP, ProximalMap, best_weights, map_rows, predicted_gap
from fedjax_sim.study.stragglers.question import stragglers
from fedjax_sim.study.stragglers.training import FEDAVG, FEDPROX, PARTIAL, QUANTITIES, TUNING_RUNS, paths_of

TRAINING = {
    "heterogeneities": [0.0, 1.0], "shares": [0.0, 0.5], "coefficients": [0.1, 3.0], "num_clients": 6, "cohort_size": 3,
    "num_epochs": 3, "batch_size": 10, "learning_rate": 0.03, "max_examples": 60, "num_rounds": 4, "num_runs": 2,
    "seed": 0,
}  # fmt: skip
MAPPED = {"proximal_weights": [0.0, 1.0, 10.0], "step_sizes": [0.02, 0.1, 0.5], "map_steps": 10, "map_rounds": 30}


@functools.cache
def paths():
    return paths_of(TRAINING)


@functools.cache
def findings():
    return stragglers(**TRAINING, **MAPPED)


def setting():
    return ProximalMap(quadratic_clients(4, 3, 2.0, 1), 5, 12)


def rounds_in_numpy(setting, weight, step, num_rounds):
    """The gap to the optimum after rounds in which each client takes its steps one after the other."""
    problem = setting.problem
    w = problem.start
    for _ in range(num_rounds):
        ends = []
        for hessian, center in zip(*problem, strict=True):
            local = w
            for _ in range(setting.num_steps):
                local = local - step * (hessian @ (local - center) + weight * (local - w))
            ends.append(local)
        w = np.mean(ends, axis=0)
    return np.linalg.norm(w - problem.optimum)


@pytest.mark.parametrize(("weight", "step"), [(0.0, 0.1), (1.0, 0.5), (10.0, 0.05), (10.0, 0.3)])
def test_the_map_is_numpy(weight, step):
    """Fault: a round's matrix with the weights, the steps or the term of another pair; (10, 0.3) diverges."""
    for num_rounds in (1, 2, 12):
        expected = rounds_in_numpy(setting(), weight, step, num_rounds)
        np.testing.assert_allclose(predicted_gap(setting(), weight, step, num_rounds), expected, rtol=1e-9)


@pytest.mark.full
def test_the_map_holds():
    """Fault: a gap of another pair, rounds that diverge and are run on, pairs that theory lets contract and do not."""
    weights, steps = [0.0, 3.0, 10.0], [0.05, 0.3]
    found = list(map_rows(setting(), weights, steps))
    start_gap = np.linalg.norm(setting().problem.start - setting().problem.optimum)
    pairs = [(row.conditions["proximal_weight"], row.conditions["step_size"]) for row in found]
    assert pairs == [(weight, step) for weight in weights for step in steps]
    assert all(row["holds"] for row in rows_of(found))
    for (weight, step), row in zip(pairs, found, strict=True):
        contraction = theory.fedprox_contraction(
            *setting().problem, proximal_weight=weight, num_steps=5, step_size=step
        )
        assert row.conditions["contraction"] == contraction
        assert row.conditions["rounds"] == (12 if contraction < 1 else 1)
        if contraction < 1:  # the start is 2 from the optimum, and fixed points are within 1 of it
            assert row.measured < 0.5 * start_gap
    assert sum(row.conditions["contraction"] >= 1 for row in found) == 1
    best = {step: row["proximal_weight"] for step, row in best_weights(rows_of(found)).items()}
    for step, stable in ((0.05, weights), (0.3, weights[:2])):
        assert best[step] == min(stable, key=lambda weight: rounds_in_numpy(setting(), weight, step, 12))


@pytest.mark.full
def test_it_can_tell_a_wrong_map():
    """Fault: a resolution in which a gap that is 1 % off would hold as well, or the gap of one round more."""
    found = findings()
    gaps = comparisons_of(found.comparisons, MAP)
    assert all(row["holds"] for row in found.rows() if row["part"] == MAP) and len(gaps) == 9
    wrong = [gap._replace(predicted=1.01 * gap.predicted) for gap in gaps]
    assert not any(row["holds"] for row in found._replace(comparisons=wrong).rows())


def alone(algorithm, heterogeneity, share, number, coefficient=0.0):
    """Training losses after each round, and the accuracy after the last, of run `number`, with the public parts."""
    data = population.synthetic(alpha=heterogeneity, beta=heterogeneity, num_clients=6, max_examples=60)
    model = models.linear(input_shape=data.input_shape, num_outputs=10)
    loss_fn = models.supervised(model, models.default_loss(data.task))
    late = "dropped" if algorithm == FEDAVG else "partial"
    sampler = sampling.with_stragglers(sampling.uniform(6, 3), share, num_parts=3, late=late)
    work = {"num_epochs": 3, "batch_size": 10, "plan": engine.Plan.checked(lanes=1)}
    if algorithm == FEDAVG:
        made = algorithms.fedavg(loss_fn, sampler, optax.sgd(0.03), **work)
    else:
        made = algorithms.fedprox(loss_fn, sampler, optax.sgd(0.03), coefficient=coefficient, **work)
    key = jax.random.split(stream(jax.random.key(0), "runs"), 2 + TUNING_RUNS)[number]
    judge = metrics.evaluation(loss_fn, test=data.test, train=data.train)
    start = model.init(init_key(key))[0]
    _, history = run(key, made, start, data.train, 4, evaluation=judge, evaluate_every=1)
    records = history.records[-4:]
    return np.array([[record[name] for record in records] for name in ("train_loss", "test_accuracy")])


@pytest.mark.full
@pytest.mark.parametrize("algorithm", [FEDAVG, PARTIAL, FEDPROX])
def test_a_number_is_a_run(algorithm):
    """Fault: runs of another key, data set, share or coefficient, or a run that tunes among those reported."""
    found = paths()[1.0, 0.5]
    for number in range(2):
        coefficient = found.coefficient if algorithm == FEDPROX else 0.0
        losses, accuracies = alone(algorithm, 1.0, 0.5, number, coefficient)
        np.testing.assert_allclose(found.loss[algorithm][number], losses, rtol=1e-5)
        np.testing.assert_allclose(found.accuracy[algorithm][number], accuracies, atol=1e-6)


@pytest.mark.full
def test_arms_are_paired():
    """Fault: without stragglers, other cohorts or minibatches for FedAvg than for FedProx with mu = 0.

    Their bits are equal one by one (tests/client/test_stragglers.py::test_without_stragglers_all_are_fedavg). Here one
    and two coefficients are vmapped, which XLA may round otherwise.
    """
    for heterogeneity in TRAINING["heterogeneities"]:
        whole, half = paths()[heterogeneity, 0.0], paths()[heterogeneity, 0.5]
        np.testing.assert_allclose(whole.loss[FEDAVG], whole.loss[PARTIAL], rtol=1e-6)
        for different in (whole.loss[FEDPROX] - whole.loss[PARTIAL], half.loss[FEDAVG] - half.loss[PARTIAL]):
            assert np.abs(different).max() > 1e-4


def test_coefficients_are_chosen_apart(monkeypatch):
    """Fault: reported runs that choose the coefficient, one share that does, or the largest loss in place of the least.

    The runs are fakes. With 0.1 the loss is 3 without stragglers and 1 with them, and 2.5 with the other coefficient.
    """
    calls = []

    def fake_runs(model, data, options, late):
        def runs(keys, data, share, coefficients):
            calls.append((late, jax.random.key_data(keys), coefficients))
            levels = [(3.0 if share == 0 else 1.0) if coefficient == 0.1 else 2.5 for coefficient in coefficients]
            paths = np.broadcast_to(np.array(levels)[:, None], (len(keys), len(levels), 4))
            return {"loss": paths, "accuracy": paths}

        return runs

    monkeypatch.setattr(training, "_runs", fake_runs)
    found = paths_of(TRAINING)
    assert {paths.coefficient for paths in found.values()} == {0.1}  # a mean of 2 beside 2.5
    tuning = [keys for _, keys, coefficients in calls if coefficients == TRAINING["coefficients"]]
    reported = [keys for _, keys, coefficients in calls if coefficients != TRAINING["coefficients"]]
    assert len(tuning) == 4 and len(reported) == 8 and {late for late, *_ in calls} == {"dropped", "partial"}
    assert all(keys.tolist() == tuning[0].tolist() for keys in tuning)
    assert all(keys.tolist() == reported[0].tolist() for keys in reported)
    words = [tuple(key) for key in (*tuning[0].tolist(), *reported[0].tolist())]
    assert len(set(words)) == TUNING_RUNS + TRAINING["num_runs"]


@pytest.mark.full
def test_findings_are_of_the_paths():
    """Fault: a difference with the wrong sign or of the wrong pair; a figure without a panel of the study."""
    found = findings()
    ours = paths()[1.0, 0.5]
    part = "Synthetic(1, 1)"
    for quantity in QUANTITIES:
        (level,) = comparisons_of(found.comparisons, part, quantity, stragglers=0.5, algorithm=FEDPROX)
        assert level.measured == ours.number(quantity, FEDPROX).mean()
    numbers = [ours.number("variance of the loss", name) for name in (PARTIAL, FEDAVG)]
    (row,) = comparisons_of(
        found.comparisons, part, "log10 of the variance, difference", stragglers=0.5, algorithm=PARTIAL, minus=FEDAVG
    )
    ratios = np.log10(np.maximum(numbers[0], 1e-12)) - np.log10(np.maximum(numbers[1], 1e-12))
    np.testing.assert_allclose(row.measured, ratios.mean(), rtol=1e-9)
    assert not comparisons_of(found.comparisons, part, stragglers=0.0, algorithm=PARTIAL, minus=FEDAVG)
    assert len(found.figure().axes) == 4 and len(found.claims) == 6


def test_claims_are_of_what_is_certain():
    """Fault: a higher loss read as better, a lower accuracy read as better, or a difference within its interval."""
    shares = [0.0, 0.9]
    down, up, unknown = np.full(5, -1.0), np.full(5, 1.0), np.array([-9.0, 9.0, -9.0, 9.0, 0.1])
    options = {"heterogeneities": [0.0, 1.0], "shares": shares, "step_sizes": [0.1], "proximal_weights": [3.0],
               "map_rounds": 30}  # fmt: skip

    def holds(loss, variance, accuracy):
        differences = {
            "training loss, difference": loss,
            "log10 of the variance, difference": variance,
            "test accuracy, difference": accuracy,
        }
        found = [
            measured({"part": "Synthetic(1, 1)", "stragglers": share, "algorithm": algorithm, "minus": baseline}, *both)
            for share in shares
            for algorithm, baseline in training.CONTRASTS
            for both in differences.items()
        ]
        return [claim.holds for claim in stragglers_claims(rows_of(found), options)][:3]

    assert holds(down, down, up) == [True, True, True]
    assert holds(up, down, up) == holds(down, down, down) == [False, False, True]
    assert holds(unknown, unknown, up) == holds(up, up, unknown) == [False, False, False]


@pytest.mark.full
def test_divergence_speaks():
    """Fault: dropped clients whose stalled models are reported."""
    with pytest.raises(FloatingPointError, match="not finite: lower the learning rate"):
        stragglers(**TRAINING | {"learning_rate": 3e38, "shares": [0.0], "heterogeneities": [1.0]}, **MAPPED)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shares": [1.0]}, "shares: expected"),
        ({"shares": [0.5, 0.0]}, "shares: expected rising numbers"),
        ({"coefficients": []}, "coefficients: expected"),
        ({"heterogeneities": [float("nan")]}, "heterogeneities: expected"),
        ({"cohort_size": 31}, "cohort_size: expected"),
        ({"step_sizes": [0.0]}, "step_sizes: expected"),
        ({"step_sizes": [0.6]}, "step_sizes: expected"),
        ({"proximal_weights": [-1.0]}, "proximal_weights: expected"),
        ({"proximal_weights": [1e3], "map_steps": 10}, "proximal_weights: expected weights whose rounds fit"),
        ({"num_runs": 1}, "num_runs: expected"),
        ({"learning_rate": 0.0}, "learning_rate: expected"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot."""
    with pytest.raises((TypeError, ValueError), match=words):
        stragglers(**options)
