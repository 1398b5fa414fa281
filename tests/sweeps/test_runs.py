"""Runs that are read back as a sweep: their grid, pairs and tables."""

from __future__ import annotations

import csv
import io
import json
import math

import numpy as np
import pytest

from fedjax_sim.config.document import load
from fedjax_sim.sweeps.curves import curves_figure
from fedjax_sim.sweeps.results import Sweep, shown_by_default
from fedjax_sim.sweeps.runs import read_run, sweep_of
from fedjax_sim.sweeps.table import as_csv, as_latex, as_markdown, sweep_comparison
from tests.refusals import refused

RATES = (0.5, 0.1)


@pytest.fixture
def folder(tmp_path):
    """Makes the folder of a run that was logged: accuracy = rate + seed / 100 + round / 1000, four rounds."""

    def make(name, seed, *settings, rounds=4, accuracy=None):
        path = tmp_path / name
        path.mkdir()
        (path / "config.toml").write_text(load(None, [f"seed={seed}", *settings]).to_toml())
        records = [{"round": 0, "test_accuracy": 0.1}]
        for round in range(1, rounds + 1):
            record = {"round": round, "uplink_bytes": 100, "downlink_bytes": 50}
            if round % 2 == 0:  # evaluated every two rounds
                record["test_accuracy"] = accuracy(round)
            records.append(record)
        (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return read_run(path)

    return make


def runs_of(folder, seeds=(0, 1, 2), rates=RATES, **options):
    return [
        folder(
            f"rate_{rate}_{seed}", seed, f"client_optimizer.learning_rate={rate}",
            accuracy=lambda round, rate=rate, seed=seed: rate + seed / 100 + round / 1000, **options,
        )
        for rate in rates
        for seed in seeds
    ]  # fmt: skip


def test_runs_are_the_points_of_a_sweep(folder):
    """Faults: a seed that counts as an option, rounds that were not evaluated, options that do not differ, totals of
    evaluated rounds alone."""
    found = sweep_of(runs_of(folder))
    assert found.names == ("client_optimizer.learning_rate",)
    assert found.seeds == [0, 1, 2]
    assert sorted({row["round"] for row in found.rows}) == [2, 4]
    last = [row for row in found.rows if row["round"] == 4]
    assert {row["uplink_bytes_so_far"] for row in last} == {400}
    assert [row["test_accuracy"] for row in last] == [rate + seed / 100 + 0.004 for rate in RATES for seed in range(3)]


def test_seeds_of_parts(folder):
    """Data that follow the run's seed are no option. Faults: another seed that is taken for one; data with a seed of
    their own beside these, without a word."""
    first, second = (folder(f"run_{seed}", seed, accuracy=lambda round: 0.5) for seed in (0, 1))
    assert sweep_of([first, second]).names == ()
    other = folder("other", 0, "data.seed=7", accuracy=lambda round: 0.5)
    assert sweep_of([first, other]).names == ("data.seed",)


def test_runs_of_other_lengths(folder):
    """Fault: the accuracy after 4 rounds beside that after 8."""
    runs = runs_of(folder, rates=(0.5,)) + runs_of(folder, rates=(0.1,), rounds=8)
    assert sweep_of(runs).last_round == 4


def test_parts_that_one_run_has(folder):
    """Fault: a run with a part beside one without it, which then look alike."""
    plain = folder("plain", 0, accuracy=lambda round: 0.5)
    clipped = folder("clipped", 0, "transform.clip.clip_norm=1.0", accuracy=lambda round: 0.4)
    found = sweep_of([plain, clipped])
    assert "transform.clip.clip_norm" in found.names
    assert [row["transform.clip.clip_norm"] for row in found.rows if row["round"] == 4] == ["none", 1.0]


def test_differences_are_taken_seed_by_seed(folder):
    """The first combination has seeds 0 and 1, the second 1 and 2. Faults: a difference of means over other seeds; an
    error where no seed is shared."""
    first, second = runs_of(folder, seeds=(0, 1), rates=(0.5,)), runs_of(folder, seeds=(1, 2), rates=(0.1,))
    (gap,) = sweep_of([*first, *second]).differences("test_accuracy")
    assert gap["seeds"] == 1 and gap["difference"] == pytest.approx(-0.4)
    (gap,) = sweep_of([first[0], second[1]]).differences("test_accuracy")
    assert gap["seeds"] == 0 and math.isnan(gap["difference"])


def test_tables_hold_the_numbers(folder):
    """Faults: a table whose numbers are not the sweep's; LaTeX heads that are no words."""
    found = sweep_of(runs_of(folder))
    table = sweep_comparison(found, "test_accuracy")
    rows = list(csv.DictReader(io.StringIO(as_csv(table))))
    (gap,) = found.differences("test_accuracy")
    summary = found.summary("test_accuracy")
    assert [float(row["mean"]) for row in rows] == [cell["mean"] for cell in summary]
    assert rows[0]["difference"] == "" and float(rows[1]["difference"]) == gap["difference"]
    assert float(rows[1]["difference_low"]) == gap["low"] and float(rows[1]["p_value"]) == gap["p_value"]
    assert as_markdown(table).splitlines()[0] == "| learning_rate | seeds | test_accuracy | minus the first | p |"
    assert r"learning rate & seeds & test accuracy & minus the first & p \\" in as_latex(table)
    assert f"{summary[0]['mean']:.5g} $\\pm$" in as_latex(table)


def test_a_part_is_called_by_its_table():
    """Catches a column that is called "name", and two columns of one name."""
    rows = [{"seed": 0, "round": 1, "algorithm.name": x, "data.alpha": 1, "loss": 0.5} for x in ("fedavg", "fedprox")]
    found = Sweep(rows, ("algorithm.name", "data.alpha"), [0], 1, True)
    assert sweep_comparison(found, "loss").texts()[0][:2] == ["algorithm", "alpha"]
    alike = Sweep([row | {"model.alpha": 2} for row in rows], ("data.alpha", "model.alpha"), [0], 1, True)
    assert sweep_comparison(alike, "loss").texts()[0][:2] == ["data.alpha", "model.alpha"]


def test_own_models_are_shown_where_all_runs_have_them(folder):
    """Faults: the shared model, by which Ditto looks like FedAvg; a metric that one of two runs has not."""
    runs = runs_of(folder)
    assert shown_by_default(sweep_of(runs)) == "test_accuracy"
    for have_own, metric in ((runs[:-1], "test_accuracy"), (runs[-1:], "personal_accuracy")):
        for run in have_own:
            run.records[-1]["personal_accuracy"] = 0.9
        assert shown_by_default(sweep_of(runs)) == metric


def test_curves(folder):
    """Faults: curves at the place of another run, or over bytes of one direction; a run that diverged, by which nothing
    is drawn."""
    runs = runs_of(folder)
    runs[-1].records[-1]["test_accuracy"] = "nan"
    figure = curves_figure(sweep_of(runs), "test_accuracy")
    rounds, sent = figure.axes
    assert rounds.get_xlabel() == "round" and sent.get_xlabel().endswith("sent, up and down")
    assert rounds.lines[0].get_xdata().tolist() == [2, 4]
    unit = {"B": 1.0, "kB": 1e3}[sent.get_xlabel().split()[0]]
    np.testing.assert_allclose(sent.lines[0].get_xdata(), np.array([300, 600]) / unit)
    np.testing.assert_allclose(rounds.lines[0].get_ydata(), [51.2, 51.4])
    assert rounds.get_ylabel() == "test accuracy (%)"
    assert math.isnan(rounds.lines[1].get_ydata()[-1]) and rounds.lines[2].get_xydata()[:, 0].tolist() == [4]  # a cross


def test_what_cannot_be_compared(folder):
    """Faults: one run compared with nothing, a run that counts twice, runs without a common round."""
    runs = runs_of(folder, seeds=(0,))
    with pytest.raises(ValueError, match="runs: expected at least two, got 1"):
        sweep_of(runs[:1])
    with refused("runs", value=(runs[0].name, runs[0].name), rule="seed"):
        sweep_of([runs[0], runs[0]])
    short = folder("short", 7, rounds=1, accuracy=lambda round: 0.0)
    with refused("runs", rule="all were evaluated"):
        sweep_of([runs[0], short])
