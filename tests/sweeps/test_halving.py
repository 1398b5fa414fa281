"""Successive halving: who runs on, for how long, and that each rung is a sweep like others."""

import itertools
import json

import pytest
from typer.testing import CliRunner

from fedjax_sim.command.app import app
from fedjax_sim.config.document import ConfigError
from fedjax_sim.sweeps.config import Halving, load_sweep, run_sweep
from fedjax_sim.sweeps.halving import halving_rounds, run_halving, survivors
from fedjax_sim.sweeps.results import Sweep

RATES = [0.001, 0.3, 1e30]
SWEEP = ["data.num_clients=40", "model.name=linear", "sampler.cohort_size=8", "algorithm.num_steps=3", "run.rounds=2",
         "run.evaluate_every=2", "sweep.seeds=2", f"sweep.grid.client_optimizer.learning_rate={RATES}"]  # fmt: skip
HALVING = ["sweep.halving.metric=test_loss", "sweep.halving.best=lowest", "sweep.halving.factor=2"]


def test_survivors_are_the_best():
    """Catches the worst ones, a diverged one before a finite one, and a factor that rounds down to none."""
    values = {"a": 1.0, "b": "nan", "c": 3.0, "d": 2.0, "e": 0.5}
    rows = [{"seed": s, "round": 1, "x": x, "loss": y} for x, y in values.items() for s in (0, 1)]
    found = Sweep(rows, ("x",), [0, 1], 1, True)
    for best, factor, expected in (("lowest", 2, "ead"), ("highest", 3, "cd"), ("highest", 5, "c"), ("lowest", 9, "e")):
        assert [values["x"] for values in survivors(found, Halving("loss", best, factor))] == list(expected)
    only_diverged = found._replace(rows=[row for row in rows if row["x"] == "b"])
    assert survivors(only_diverged, Halving("loss", "lowest", 3)) == [{"x": "b"}]


@pytest.mark.parametrize("num_combinations", [1, 2, 3, 8, 9, 26, 27, 100])
@pytest.mark.parametrize("num_rounds", [1, 2, 10, 100])
@pytest.mark.parametrize("factor", [2, 3, 10])
def test_rungs_grow_and_end_with_all_rounds(num_combinations, num_rounds, factor):
    rounds = halving_rounds(num_combinations, num_rounds, factor)
    assert rounds[-1] == num_rounds and rounds[0] >= 1 and rounds == sorted(set(rounds))
    # All rungs but the last together cost no more than the first one's rounds for each rung.
    counts = [num_combinations]
    for _ in rounds[1:]:
        counts.append(-(-counts[-1] // factor))
    assert factor ** (len(rounds) - 1) <= num_combinations


@pytest.mark.full
def test_rungs_are_sweeps(tmp_path):
    """Catches a rung of other rounds, other combinations or other bits, and a resume that runs it anew."""
    loaded = load_sweep(None, [*SWEEP, *HALVING])
    rungs = run_halving(loaded, tmp_path)
    assert [rung.num_rounds for rung in rungs] == halving_rounds(3, 2, 2) == [1, 2]
    assert [len(rung.result.summary("test_loss")) for rung in rungs] == [3, 2]
    name = "client_optimizer.learning_rate"
    for before, after in itertools.pairwise(rungs):
        there = after.result.summary("test_loss")
        assert {values[name] for values in before.kept} == {cell[name] for cell in there}
    (best,) = rungs[-1].kept
    means = {cell[name]: cell["mean"] for cell in rungs[-1].result.summary("test_loss")}
    assert best[name] == min(means, key=means.get)
    # The whole grid for as many rounds has the same numbers for them.
    whole = run_sweep(load_sweep(None, SWEEP), None)
    rows = {(row["seed"], row[name]): row for row in whole.rows}
    assert all(row == rows[row["seed"], row[name]] for row in rungs[-1].result.rows)
    files = {path: path.read_bytes() for path in tmp_path.rglob("points.jsonl")}
    assert len(files) == 2
    again = run_halving(loaded, tmp_path, resume=True)
    assert [rung.kept for rung in again] == [rung.kept for rung in rungs]
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("points.jsonl")}


@pytest.mark.full
def test_on_the_command_line(tmp_path):
    """Catches a winner without the rungs that chose it, and a page of combinations that did not run to the end."""
    settings = [word for setting in [*SWEEP, *HALVING] for word in ("--set", setting)]
    done = CliRunner().invoke(app, ["sweep", "--out", str(tmp_path / "s"), *settings])
    assert done.exit_code == 0, done.output
    assert "After 1 rounds 2 of 3 combinations ran on, the best: learning_rate = " in done.output
    rows = [json.loads(line) for line in (tmp_path / "s" / "results.jsonl").read_text().splitlines()]
    assert {row["round"] for row in rows} == {2} and len(rows) == 4
    assert (tmp_path / "s" / "report.html").is_file() and (tmp_path / "s" / "rung-1" / "points.jsonl").is_file()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["sweep.halving=3"], "sweep.halving: expected a table"),
        ([*HALVING, "sweep.grid.data.alpha=[0.1, 1.0]"], "Numbers on other data cannot be compared"),
        (["sweep.halving.metric=test_loss"], "sweep.halving.best: expected one of"),
        (["sweep.halving.best=lowest"], "sweep.halving.metric: expected the name of a metric"),
        ([*HALVING[:2], "sweep.halving.factor=1"], "sweep.halving.factor: expected an integer >= 2"),
        ([*HALVING, "sweep.halving.factr=3"], "Did you mean 'factor'"),
    ],
)
def test_wrong_tables(settings, words):
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        load_sweep(None, [*SWEEP, *settings])
