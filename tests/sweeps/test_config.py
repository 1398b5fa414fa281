"""`fedjax-sim sweep`: a config's sweep is its runs; errors name the path of the wrong option."""

from __future__ import annotations

import json
import pathlib

import jax
import pytest
from typer.testing import CliRunner

from fedjax_sim import engine
from fedjax_sim.command import sweep
from fedjax_sim.command.app import app
from fedjax_sim.config.build import build
from fedjax_sim.config.document import ConfigError, load
from fedjax_sim.running.loop import run
from fedjax_sim.sweeps import config as sweep_config
from fedjax_sim.sweeps.config import load_sweep, run_sweep
from fedjax_sim.sweeps.figure import sweep_figure
from fedjax_sim.sweeps.finished import Finished
from fedjax_sim.sweeps.results import Sweep
from tests.refusals import refused

pytestmark = pytest.mark.optimised

BASE = ["seed=3", "data.num_clients=40", "model.name=linear", "sampler.cohort_size=8", "algorithm.name=fedprox",
        "algorithm.num_steps=3", "run.rounds=4", "run.evaluate_every=2"]  # fmt: skip
GRID = ["sweep.grid.client_optimizer.learning_rate=[0.1, 0.3]", "sweep.grid.algorithm.coefficient=[0.5, 2.0]"]


@pytest.mark.full
def test_a_config_sweep_is_runs(tmp_path):
    """Catches other data, keys, plans or options than those of `fedjax-sim run`; a resume that computes anew."""
    out, settings = tmp_path / "s", [*BASE, *GRID, "sweep.seeds=[3, 8]"]
    arguments = ["sweep", "--out", str(out), *(word for setting in settings for word in ("--set", setting))]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "8 points in 1 programs" in done.output and "diverged" in done.output
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and {path.suffix for path in out.glob("sweep.*")} == {".png", ".svg", ".toml"}
    assert {path.name for path in out.glob("table.*")} == {"table.csv", "table.tex"}
    choice = ["client_optimizer.learning_rate=0.3", "algorithm.coefficient=2.0"]
    made = build(load(None, [*BASE[1:], *choice, "seed=8", "data.seed=3"]))
    parts = made.key, made.algorithm, made.params, made.data.train
    _, history = run(*parts, 4, evaluation=made.evaluation, evaluate_every=2)
    for row in rows:
        if (row["seed"], row["client_optimizer.learning_rate"], row["algorithm.coefficient"]) == (8, 0.3, 2.0):
            record = history.records[row["round"]]  # round 0 comes first
            assert {name: row[name] for name in record} == record
    before = (out / "points.jsonl").read_bytes()
    assert CliRunner().invoke(app, arguments).exit_code == 2
    again = CliRunner().invoke(app, [*arguments, "--resume"])
    assert again.exit_code == 0 and (out / "points.jsonl").read_bytes() == before
    other = CliRunner().invoke(app, [*arguments, "--resume", "--set", "run.lanes=3", "--set", "run.delta=0.01"])
    assert other.exit_code == 1 and "config.run.delta: None in the file, 0.01 now" in other.output
    assert "config.run.lanes: " in other.output and (out / "points.jsonl").read_bytes() == before


@pytest.mark.full
def test_points_have_the_plans_of_their_runs(monkeypatch):
    """Over cohort sizes, lanes differ. Catches points in the plan of the first, whose last bits may differ."""
    fold, plans = engine.fold, set()

    def seen(each, accumulate, shared, carry, slots, **options):
        plans.add((len(jax.tree.leaves(slots)[0]), options["plan"]))
        return fold(each, accumulate, shared, carry, slots, **options)

    monkeypatch.setattr(engine, "fold", seen)
    base = [x for x in BASE if "cohort_size" not in x]
    run_sweep(load_sweep(None, [*base, "sweep.grid.sampler.cohort_size=[8, 40]", "sweep.seeds=[3]"]), None)
    of_points = plans.copy()
    plans.clear()
    for size in (8, 40):
        made = build(load(None, [*base, f"sampler.cohort_size={size}"]))
        jax.eval_shape(
            made.algorithm.step, made.key, made.algorithm.init(made.key, made.params, made.data.train), made.data.train
        )
    assert len(plans) == 2 and of_points == plans


@pytest.mark.full
def test_axes_over_data_and_models(tmp_path):
    """Catches points over the first point's data, rows out of order or lost, and a resume that begins anew."""
    out = tmp_path / "s"
    grid = ["sweep.grid.algorithm.coefficient=[0.5, 2.0]", "sweep.grid.data.alpha=[0.1, 10.0]"]
    loaded = load_sweep(None, [*BASE, *grid, "sweep.seeds=[8]"])
    result = run_sweep(loaded, out)
    assert result.names == ("algorithm.coefficient", "data.alpha") and result.num_programs == 2
    lines = (out / "results.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == result.rows
    assert [tuple(row[name] for name in result.names) for row in result.rows[::2]] == [
        (0.5, 0.1), (0.5, 10.0), (2.0, 0.1), (2.0, 10.0)
    ]  # fmt: skip
    for coefficient, alpha in ((0.5, 10.0), (2.0, 0.1)):
        options = [f"algorithm.coefficient={coefficient}", f"data.alpha={alpha}", "data.seed=3", "seed=8"]
        made = build(load(None, [*BASE[1:], *options]))
        parts = made.key, made.algorithm, made.params, made.data.train
        _, history = run(*parts, 4, evaluation=made.evaluation, evaluate_every=2)
        for row in result.rows:
            if (row["algorithm.coefficient"], row["data.alpha"]) == (coefficient, alpha):
                record = history.records[row["round"]]
                assert {name: row[name] for name in record} == record
    # A kill during the second group leaves the first group's points.
    first, second = out / "part-1" / "points.jsonl", out / "part-2" / "points.jsonl"
    points = first.read_bytes()
    second.unlink()
    assert run_sweep(loaded, out, resume=True).rows == result.rows and first.read_bytes() == points
    with pytest.raises(FileExistsError, match="part-1"):
        run_sweep(loaded, out)


def test_none_leaves_a_part_out():
    """Catches a point without a wrapper that keeps the file's, and a text as a wrapper."""
    grid = ['sweep.grid.sampler.with_dropout=["none", {rate=0.1}, {rate=0.5}]', "sampler.with_dropout.rate=0.2"]
    tables = [config.resolved()["sampler"] for config in load_sweep(None, grid).configs]
    assert [table.get("with_dropout", {}).get("rate") for table in tables] == [None, 0.1, 0.5]


@pytest.mark.optimised(False)
@pytest.mark.full
def test_a_metric_that_is_not_there_is_told_at_once(monkeypatch, tmp_path):
    """Catches a typing error that is reported after the last of a thousand points."""
    added = []
    monkeypatch.setattr(Finished, "add", lambda self, found: added.append(found))
    loaded = load_sweep(None, [*BASE, GRID[0], "sweep.seeds=1"])
    with refused("metric", value="test_los", rule="test_loss", hint="Did you mean"):
        run_sweep(loaded, tmp_path / "sweep", metric="test_los")
    assert not [*tmp_path.rglob("points*")]  # it can be started again
    assert not added


@pytest.mark.parametrize("started", [False, True])
def test_interrupted(started, tmp_path, monkeypatch):
    """Catches a promise that points are safe where none was written."""

    def stop(loaded, folder, **options):
        if started:
            Finished(folder, {}, False)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_config, "run_sweep", stop)
    done = CliRunner().invoke(app, ["sweep", "--out", str(tmp_path), "--set", GRID[0]])
    assert done.exit_code == 130 and ("add --resume" in done.output) == started


def test_the_example_loads():
    """Catches an example that the options have left behind."""
    path = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "sweeps" / "step_sizes.toml"
    assert len(load_sweep(path).configs) == 12


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "sweep.grid: expected values"),
        (["sweep.grid.client_optimizer.learning_rat=[1.0]"], "client_optimizer.learning_rat"),
        (["sweep.grid.client_optimizer.learning_rate=0.1"], "Put it into a list"),
        (["sweep.grid.client_optimizer.learning_rate=[0.1, 0.1]"], "each once"),
        (["sweep.grid.run.rounds=[10, 20]"], "All points share the rounds"),
        (['sweep.grid.data.label_flip=["none", 3]'], "data.label_flip"),
        (['sweep.grid.aggregator=["none", {name="median"}]'], "under the label none"),
        (["sweep.grid.seed=[1, 2]"], "a path such as"),
        (["sampler=5", 'sweep.grid.sampler.with_dropout=["none", {}]'], "sampler: expected a table, got 5"),
        ([GRID[0], "sweep.seed=3"], "Did you mean 'seeds'"),
        ([GRID[0], "sweep.seeds=0"], "sweep.seeds"),
        ([GRID[0], "sweep.batch=0"], "sweep.batch"),
        ([GRID[0], "run.variance_probe=8"], "It probes one algorithm"),
        ([GRID[0], "run.stop_when=test_loss <= 1"], "All points run for all rounds"),
        ([GRID[0], 'run.log=["wandb"]'], "Loggers get single runs"),
        ([GRID[0], "sweep.metrics=3"], "sweep.metrics"),
        (["sweep=3"], "sweep: expected a table"),
    ],
)
def test_wrong_sweeps(settings, words):
    """Catches a config that is passed over in silence; nothing is compiled."""
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        load_sweep(None, settings)


@pytest.mark.full  # by default each statistic is judged by itself, below
@pytest.mark.parametrize(
    "options",
    [
        ["algorithm.name=apfl", "sweep.grid.algorithm.share=[0.3, 0.8]"],
        ['sweep.grid.algorithm.name=["per_fedavg", "fedavg", "ditto"]'],
        ["run.personal_steps=2", "sweep.grid.client_optimizer.learning_rate=[0.05, 0.2]"],
    ],
)
def test_each_point_is_judged_by_its_own_models(options):
    """Catches points that are judged as the first one is: without own models, by its step, its rate or its share."""
    base = ["seed=3", *BASE[1:4], "run.rounds=3", "data.with_local_test={}"]
    others = [option for option in options if not option.startswith("sweep")]
    loaded = load_sweep(None, [*base, *options, "sweep.seeds=[8]"])
    for row in run_sweep(loaded, None).rows:
        point = [f"{name}={row[name]}" for name in loaded.combinations[0]]
        seeds = ["seed=8", "data.seed=3", "data.with_local_test.seed=3"]
        made = build(load(None, [*base[1:], *others, *point, *seeds]))
        _, history = run(
            made.key, made.algorithm, made.params, made.data.train, 3, evaluation=made.evaluation, evaluate_every=3
        )
        record = history.records[-1]
        assert {name: row.get(name) for name in record} == record
        assert ("personal_loss" in row) == (point != ["algorithm.name=fedavg"])


def test_figure():
    """Catches a diverged point that the figure hides, and lines that cannot be told apart."""
    rows = [
        {"seed": s, "a": a, "b": b, "c": "x", "round": 1, "loss": "nan" if a == 1.0 and s == 1 else a + s}
        for a in (0.01, 0.1, 1.0) for b in (True, False) for s in range(3)
    ]  # fmt: skip
    found = Sweep(rows, ("a", "b", "c"), [0, 1, 2], 1, True)
    figure = sweep_figure(found, "loss")
    (panel,) = figure.axes
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert panel.get_xscale() == "log" and panel.get_xlabel() == "a"
    assert sorted(names) == ["b = False", "b = True", "diverged"]
    with pytest.raises(ValueError, match="one of"):
        sweep_figure(found, "loss", x="d")
    alone = found._replace(rows=[{"seed": 0, "round": 1, "loss": 1.0}], names=())
    with refused("found", value="seeds alone"):
        sweep_figure(alone, "loss")


def test_differences_are_shown(monkeypatch, capsys, tmp_path):
    """Catches a table whose wide intervals hide what equal seeds tell apart, and a difference of what diverged."""
    monkeypatch.setenv("COLUMNS", "80")
    wide = (0.0, 10.0, 30.0)
    rows = [
        {"seed": s, "rate": rate, "round": 1, "loss": "nan" if rate == 0.3 and s == 2 else x + rate + 0.01 * s * rate}
        for rate in (0.1, 0.2, 0.3) for s, x in enumerate(wide)
    ]  # fmt: skip
    found = Sweep(rows, ("rate",), [0, 1, 2], 1, True)
    sweep._show(found, "loss", found.summary("loss"), tmp_path)
    head, first, second, third, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["rate", "seeds", "loss", "minus", "the", "first", "diverged"]
    assert first.split() == ["0.1", "3", "13.434", "±", "38"]
    assert second.split() == ["0.2", "3", "13.535", "±", "38", "0.101", "±", "0.0025"]
    assert third.split() == ["0.3", "3", "nan", "1"]


@pytest.mark.optimised(False)
def test_each_statistic_is_judged_by_itself():
    """Options of a statistic say how its estimate is judged. Faults: bins of one point by those of another, and a first
    model that is asked for before there is one."""
    settings = ["data.name=mixture", "data.num_clients=60", "sampler.name=full", "algorithm.name=histogram"]
    settings += ["algorithm.low=0.0", "algorithm.high=1.0", "algorithm.column=0", "algorithm.num_bins=2"]
    settings += ["run.rounds=1", "run.devices=1", "sweep.grid.algorithm.num_bins=[2, 5]"]
    result = run_sweep(load_sweep(None, [*settings, "sweep.seeds=1"]), None, progress=False)
    for row in result.rows[1:]:  # the second point; the first one is judged like this in any case
        bins = row["algorithm.num_bins"]
        one = build(load(None, [*settings[:7], f"algorithm.num_bins={bins}", *settings[8:10]]))
        state = one.algorithm.init(one.key, one.params, one.data.train)
        state, _ = jax.jit(one.algorithm.step)(jax.random.fold_in(one.key, 1), state, one.data.train)
        expected = one.evaluation(one.algorithm.params(state))["test_loss"]
        assert row["test_loss"] == pytest.approx(expected, rel=1e-5)
