"""`run.metrics`: what is in the log, what stops a run by it, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import sklearn.metrics as oracle
from typer.testing import CliRunner

from fedjax_sim import metrics
from fedjax_sim.command.app import app
from fedjax_sim.config import load, registry
from fedjax_sim.config.build import build
from fedjax_sim.config.document import ConfigError
from fedjax_sim.config.signatures import SCORE_METRIC
from fedjax_sim.sweeps.config import load_sweep, run_sweep

SMALL = ["data.num_clients=20", "data.held_out_clients=6", "model.name=linear", "sampler.cohort_size=5"]
SMALL += ["run.rounds=4", "run.evaluate_every=2", "run.progress=false"]
BINARY = ["data.name=breast_cancer", "data.num_clients=5", "model.name=linear", "sampler.cohort_size=5"]
BINARY += ["run.evaluate_every=2", "run.progress=false"]
CHOSEN = 'run.metrics=["roc_auc", "f1_macro"]'


def invoke(*words):
    return CliRunner().invoke(app, [*words])


def with_settings(*settings):
    return [word for setting in settings for word in ("--set", setting)]


def records_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_columns_of_the_log(tmp_path):
    runs = {"plain": [], "judged": [CHOSEN]}
    for name, settings in runs.items():
        done = invoke("run", "--out", str(tmp_path / name), *with_settings(*SMALL, *settings))
        assert done.exit_code == 0, done.output
    assert "test roc auc" in done.output and "test f1 macro" in done.output
    plain, judged = (records_of(tmp_path / name) for name in runs)
    # Off, no metric is computed, and looking changes no other number.
    assert [{name: record[name] for name in other} for record, other in zip(judged, plain, strict=True)] == plain
    assert {name for record in judged for name in record} - {name for record in plain for name in record} == {
        f"{group}_{metric}{kind}"
        for group, kinds in {"test": [""], "held_out": ["", "_clients", *SPREAD]}.items()
        for metric in ("roc_auc", "f1_macro")
        for kind in kinds
    }
    experiment = build(load(None, [*SMALL, CHOSEN]))
    # The value before training, from the model itself.
    test = experiment.data.test
    params = experiment.params
    logits = np.asarray(test["x"]).reshape(len(test["y"]), -1) @ np.asarray(params["kernel"]) + np.asarray(
        params["bias"]
    )
    p = np.exp(np.asarray(logits, np.float64))
    p /= p.sum(axis=1, keepdims=True)
    expected = oracle.roc_auc_score(test["y"], p, multi_class="ovr")
    assert judged[0]["test_roc_auc"] == pytest.approx(expected, abs=1e-5)
    page = (tmp_path / "judged" / "report.html").read_text()
    assert "test roc auc" in page and "held out roc auc" in page


SPREAD = ("_quantiles", "_lowest_decile", "_highest_decile")


def test_a_metric_stops_a_run(tmp_path):
    """The config of the page on metrics, which stops at 0.99."""
    page = Path(__file__).parents[2] / "docs" / "how_to" / "measure_more_than_accuracy.md"
    (tmp_path / "page.toml").write_text(re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.S | re.M)[0])
    done = invoke("run", str(tmp_path / "page.toml"), "--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    values = [record["test_roc_auc"] for record in records_of(tmp_path / "run") if "test_roc_auc" in record][1:]
    assert values[-1] >= 0.99 and all(value < 0.99 for value in values[:-1])


@pytest.mark.full
def test_sweeps_and_compared_runs_have_the_metrics(tmp_path):
    chosen = [*BINARY, 'run.metrics=["roc_auc"]', "run.rounds=2"]
    found = run_sweep(
        load_sweep(None, [*chosen, "sweep.seeds=[0]", "sweep.grid.client_optimizer.learning_rate=[0.05, 0.2]"]), None
    )
    last = [row["test_roc_auc"] for row in found.rows if row["round"] == 2]
    assert len(last) == 2 and all(0.5 < value <= 1 for value in last)
    for rate in (0.05, 0.2):
        settings = with_settings(*chosen, f"client_optimizer.learning_rate={rate}")
        assert invoke("run", "--out", str(tmp_path / str(rate)), *settings).exit_code == 0
    compared = invoke("compare", str(tmp_path / "0.05"), str(tmp_path / "0.2"), "--metric", "test_roc_auc")
    assert compared.exit_code == 0 and all(f"{value:.5g}" in compared.output for value in last), compared.output


REFUSED = {
    'run.metrics=["auc"]': "Did you mean 'roc_auc'?",
    'run.metrics=["f1_macro", "f1_macro"]': "each metric once",
    'run.metrics="roc_auc"': "run.metrics: expected a list",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_names_that_are_no_metric(setting):
    with pytest.raises(ConfigError) as refused:
        load(None, [*SMALL, setting])
    assert REFUSED[setting] in str(refused.value)


def test_metrics_that_the_task_has_not():
    digits = ["data.num_clients=20", "model.name=linear", "sampler.cohort_size=5"]
    quadratic = ["data.name=quadratics", "data.num_clients=20", "model.name=point", "sampler.cohort_size=5"]
    statistic = ["data.name=mixture", "data.num_clients=20", "algorithm.name=kmeans", "sampler.cohort_size=5"]
    few_classes = ["data.name=mixture", "data.num_clients=20", "data.num_components=3", "sampler.cohort_size=5"]
    for settings, words in [
        ([*digits, 'run.metrics=["rmse"]'], "run.metrics: expected metrics of the task 'classification': average_prec"),
        ([*digits, 'run.metrics=["roc_auc", "f1_binary"]'], "got 'f1_binary'"),
        ([*quadratic, 'run.metrics=["rmse"]'], "run.metrics: expected none here, got 'rmse'"),
        ([*statistic, 'run.metrics=["f1_macro"]'], "run.metrics: expected none here, got 'f1_macro'"),
        ([*few_classes, 'run.metrics=["top_k_accuracy"]'], "run.metrics: k: expected"),
    ]:
        with pytest.raises(ConfigError) as refused:
            build(load(None, settings))
        assert words in str(refused.value)


def test_every_metric_has_a_name_of_its_own():
    known = registry.named(SCORE_METRIC)
    made = [getattr(metrics, name)() for name in known]
    assert {metric.name for metric in made} == {
        "top_5_accuracy" if name == "top_k_accuracy" else name for name in known
    }
    assert all(metric.tasks for metric in made)


def test_errors_of_numbers_are_of_the_same_rows_as_the_loss():
    settings = ["data.name=sensor_calibration", "data.num_clients=10", "model.name=linear", "sampler.cohort_size=5"]
    experiment = build(load(None, [*settings, 'run.metrics=["rmse", "mae", "r2"]']))
    record = experiment.evaluation(jax.tree.map(lambda x: x + 0.5, experiment.params))
    assert 0 < record["test_mae"] < record["test_rmse"]
    assert record["test_rmse"] ** 2 == pytest.approx(record["test_loss"], rel=1e-5)
    y = np.asarray(experiment.data.test["y"], np.float64)
    assert record["test_r2"] == pytest.approx(1 - record["test_loss"] / y.var(), rel=1e-5, abs=1e-6)


def test_a_resumed_run_may_have_other_metrics(tmp_path):
    """Fault: the scores of an evaluation as a part of what a run must share with its checkpoint."""
    settings = [*BINARY, "data.held_out_clients=0", "run.rounds=2"]
    assert invoke("run", "--out", str(tmp_path / "run"), *with_settings(*settings)).exit_code == 0
    more = with_settings('run.metrics=["f1_macro"]', "run.rounds=4")
    done = invoke("run", "--resume", "--out", str(tmp_path / "run"), *more)
    assert done.exit_code == 0, done.output
    first, *_, last = records_of(tmp_path / "run")
    assert "test_f1_macro" in last and "test_f1_macro" not in first
