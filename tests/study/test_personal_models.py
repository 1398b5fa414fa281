"""The study of personal models: a number is a run by itself, the baseline always runs, and rates are chosen apart."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from fedjax_sim import metrics, models, population
from fedjax_sim.running.loop import run
from fedjax_sim.study.findings import comparisons_of
from fedjax_sim.study.personal_models import question
from fedjax_sim.study.personal_models.methods import BASELINE, METHODS, Problem
from fedjax_sim.study.personal_models.question import personal_models
from fedjax_sim.sweeps.sweep import sweep

ROOT = Path(__file__).parents[2]
SMALL = {"num_clients": 4, "alpha": 1.0, "hidden": 4, "num_rounds": 2, "num_steps": 2, "num_runs": 2,
         "personal_steps": 3}  # fmt: skip


@functools.cache
def findings(methods=("FedPer",), rates=(0.3,)):
    return personal_models(methods=methods, learning_rates=rates, **SMALL)


def alone(method, rate, seed):
    """The accuracies of a method's run by itself, with the public parts."""
    data = population.digits_partition(num_clients=4, alpha=1.0, test_fraction=0.05, held_out_clients=0)
    data = population.with_local_test(data, fraction=0.25)
    model = models.mlp(input_shape=data.input_shape, num_outputs=10, hidden=(4,))
    algorithm = METHODS[method](Problem(model, data, rate, {"num_steps": 2, "batch_size": 10}, 3))
    evaluated = algorithm.evaluated
    loss_fn = models.supervised(model, models.default_loss(data.task))
    judge = metrics.evaluation(
        loss_fn, local_test=data.local_test, personal=evaluated.personal, has_trained=evaluated.has_trained,
        adapt=evaluated.adapt, owners=data.train,
    )  # fmt: skip
    key = jax.random.key(seed)
    start = model.init(jax.random.fold_in(key, 2**31 - 1))[0]
    _, history = run(key, algorithm, start, data.train, 2, evaluation=judge)
    return history.records[-1]


@pytest.mark.full
@pytest.mark.parametrize("method", ["FedPer", BASELINE])
def test_a_number_is_a_run(method):
    """Catches another method's models, a run that tunes among those reported, and rows that trained the model."""
    records = [alone(method, 0.3, seed) for seed in range(2)]
    for quantity, name in (("accuracy", "personal_accuracy"), ("lowest tenth", "personal_accuracy_lowest_decile")):
        (found,) = comparisons_of(findings().comparisons, "digits", quantity, method=method)
        expected = [record[name] for record in records]
        np.testing.assert_allclose(found.measured, np.mean(expected), atol=1e-4)
        np.testing.assert_allclose(found.conditions["standard_deviation"], np.std(expected, ddof=1), atol=1e-4)


@pytest.mark.full
def test_gains_are_paired():
    """Catches differences of runs with other first models, and a baseline beside itself."""
    (gain,) = comparisons_of(findings().comparisons, "digits", "gain")
    differences = [alone("FedPer", 0.3, s)["personal_accuracy"] - alone(BASELINE, 0.3, s)["personal_accuracy"]
                   for s in range(2)]  # fmt: skip
    assert gain.conditions["method"] == "FedPer"
    np.testing.assert_allclose(gain.measured, np.mean(differences), atol=2e-4)
    np.testing.assert_allclose(gain.standard_error, np.std(differences, ddof=1) / 2**0.5, atol=2e-4)


@pytest.mark.full
def test_every_method_and_a_figure():
    """Catches a method that cannot be judged, one without its row, and rates that reported runs have chosen."""
    found = findings(None, (0.01, 0.3))
    shown = {comparison.conditions["method"]: comparison.conditions["rate"] for comparison in found.comparisons}
    assert shown.keys() == METHODS.keys() and set(shown.values()) <= {0.01, 0.3}
    records = {rate: [alone("FedPer", rate, seed)["personal_accuracy"] for seed in (2, 3)] for rate in (0.01, 0.3)}
    assert shown["FedPer"] == max(records, key=lambda rate: np.mean(records[rate]))
    (axes,) = found.draw().axes
    assert len(axes.get_yticks()) == len(METHODS) and None not in {claim.holds for claim in found.claims}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"methods": ["FedBest"]}, "methods: expected one of"),
        ({"learning_rates": [0.3, 0.1]}, "learning_rates: expected rising numbers"),
        ({"learning_rates": [0.0]}, "learning_rates: expected"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(ValueError, match=words):
        personal_models(**options)


@pytest.mark.full
def test_divergence_is_no_accuracy(monkeypatch):
    """Catches dropped clients whose stalled models are reported, and a rate that diverges and is chosen."""

    def diverging(*args, **options):
        found = sweep(*args, **options)
        for row in found.rows:
            row["dropped_clients_so_far"] += row["rate"] == 0.3
        return found

    monkeypatch.setattr(question, "kept_sweep", diverging)
    rates = {comparison.conditions["rate"] for comparison in findings(("FedPer",), (0.01, 0.3)).comparisons}
    assert rates == {0.01}
    with pytest.raises(FloatingPointError, match="diverged with every learning rate"):
        personal_models(methods=["FedPer"], learning_rates=[0.3], **SMALL)


def test_the_page_has_the_published_numbers():
    """Fault: a study that was run again, beside the table of the run before."""
    published = json.loads((ROOT / "experiments/studies/results/personal_models.json").read_text(encoding="utf-8"))
    rows = {(row["part"], row["quantity"], row["method"]): row for row in published["rows"]}
    columns = [(part, quantity) for part in ("digits", "heart disease") for quantity in ("accuracy", "lowest tenth")]
    page = (ROOT / "docs/wings/personal.md").read_text(encoding="utf-8")
    for method in METHODS:
        told = [f"{100 * rows[part, quantity, method]['measured']:.1f}" for part, quantity in columns]
        gain = rows.get(("digits", "gain", method))
        told.insert(2, f"{100 * gain['low']:+.1f} to {100 * gain['high']:+.1f}" if gain else "baseline")
        assert f"| {method} | {' | '.join(told)} |" in page, f"{method}: expected {told}"
