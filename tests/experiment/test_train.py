"""An experiment that is trained from Python leaves the folder that the command leaves."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from fedjax_sim import InvalidArgument, InvalidType
from fedjax_sim.command import app
from fedjax_sim.config.build import build
from fedjax_sim.config.document import load
from fedjax_sim.experiment import train
from fedjax_sim.experiment.train import _finish, _timeline
from fedjax_sim.running.checkpoint_format import read_file
from fedjax_sim.running.history import History
from tests import pictures
from tests.refusals import refused

pytestmark = pytest.mark.optimised(False)  # bits that are compared here are those of one program

# With own test rows there are results by client, and with a clock a timeline.
SETTINGS = ["data.num_clients=40", "data.held_out_clients=0", "data.with_local_test.fraction=0.3", "model.name=linear"]
SETTINGS += ["devices.name=cross_device", "sampler.cohort_size=20", "sampler.with_clock.num_invited=8"]
SETTINGS += ["algorithm.num_steps=1", "run.evaluate_every=2", "run.checkpoint_every=2", "run.lanes=4"]
# What a summary holds of wall time and of the process.
OF_THE_PROCESS = {"rounds_seconds", "compile_seconds", "clients_per_second", "peak_memory_bytes", "seconds"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three rounds: by the command, and from Python."""
    root = tmp_path_factory.mktemp("runs")
    by_command, from_python = (root / name for name in ("command", "python"))
    words = [word for text in [*SETTINGS, "run.rounds=3"] for word in ("--set", text)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDJAX_SIM_CACHE", "off")
        patch.setattr("fedjax_sim.report.axes.to_svg", pictures.drawn)
        result = CliRunner().invoke(app.app, ["run", *words, "--out", str(by_command), "--quiet"])
        assert result.exit_code == 0, result.output
        command = json.loads((by_command / "env.json").read_text())["command"]
        train(build(load(None, [*SETTINGS, "run.rounds=3"])), from_python, command=command)
    return by_command, from_python


def check_same(folder, other):
    """Compares two runs: every file is there, with the same bits but for times."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {str(path.relative_to(other)) for path in other.rglob("*") if path.is_file()}
    for name in ("config.toml", "env.json", "population.json", "metrics.jsonl", "by_client.csv", "timeline.json"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    summaries = [json.loads((place / "summary.json").read_text()) for place in (folder, other)]
    assert summaries[0].keys() == summaries[1].keys() >= OF_THE_PROCESS
    assert summaries[0]["seconds"].keys() == summaries[1]["seconds"].keys()
    without_times = [{k: v for k, v in x.items() if k not in OF_THE_PROCESS} for x in summaries]
    assert without_times[0] == without_times[1]
    (header, leaves), (other_header, other_leaves) = (
        read_file(max(place.glob("checkpoints/*.ckpt"))) for place in (folder, other)
    )
    assert header["leaves"] == other_header["leaves"] and bytes(leaves) == bytes(other_leaves)
    assert header["meta"]["identity"] == other_header["meta"]["identity"]


def test_the_folder_is_that_of_the_command(folders):
    """Fault: a file, a number or an option that a user of Python does not get."""
    check_same(*folders)


@pytest.mark.full  # by default the loop and the command resume
def test_a_resumed_run_is_that_of_the_command(folders, tmp_path, monkeypatch):
    """Fault: a second session that forgets what the first one wrote, or begins the log anew."""
    monkeypatch.setenv("FEDJAX_SIM_CACHE", "off")
    monkeypatch.setattr("fedjax_sim.report.axes.to_svg", pictures.drawn)
    by_command, _ = folders
    command = json.loads((by_command / "env.json").read_text())["command"]
    resumed = tmp_path / "resumed"
    train(build(load(None, [*SETTINGS, "run.rounds=2"])), resumed, command=command)
    more = build(load(resumed / "config.toml", ["run.rounds=3"]))
    _, history = train(more, resumed, resume=True)
    check_same(by_command, resumed)
    assert history.summary == json.loads((resumed / "summary.json").read_text())
    assert [record["round"] for record in history.records] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "told"), [("report.html", "files that a run writes"), ("results.jsonl", "without a sweep")]
)
def test_a_folder_of_others_is_refused(tmp_path, name, told):
    """Fault: a user's file, or a sweep's, that is written over, or a refusal after minutes of compilation."""
    (tmp_path / name).write_text("mine")
    experiment = build(load(None, SETTINGS))
    with pytest.raises(FileExistsError, match=told):
        train(experiment, tmp_path, before_rounds=lambda: pytest.fail("it began"))
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "mine"


@pytest.fixture(scope="module")
def experiment():
    return build(load(None, SETTINGS))


def replaced(experiment, field):
    """The experiment with another algorithm, other data or another config than it was built with."""
    other = {"algorithm": lambda x: x._replace(metrics=()), "data": lambda x: x._replace(name="other")}
    other |= {"config": lambda x: x.planned(experiment.plan), "built": lambda x: None}
    return experiment._replace(**{field: other[field](getattr(experiment, field))})


@pytest.mark.parametrize("field", ["algorithm", "data", "config", "built"])
def test_what_does_not_follow_from_the_config_is_refused(experiment, tmp_path, field):
    """Fault: the kept rounds of the config's algorithm that run in the place of another one, and a folder whose config
    is not that of its results."""
    with refused("experiment", rule="algorithm, data and config", hint="fedjax_sim.run"):
        train(replaced(experiment, field), tmp_path / "run", before_rounds=lambda: pytest.fail("it began"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wrong", "argument", "kind"),
    [
        ({"experiment": load(None)}, "experiment", InvalidType),
        ({"directory": None}, "directory", InvalidType),
        ({"resume": "yes"}, "resume", InvalidType),
        ({"before_rounds": "now"}, "before_rounds", InvalidType),
        ({"before_page": 3}, "before_page", InvalidType),
    ],
)
def test_arguments_of_another_kind(experiment, tmp_path, wrong, argument, kind):
    """Fault: an error of Python, or one that comes after all rounds."""
    with refused(argument, kind=kind):
        train(**{"experiment": experiment, "directory": tmp_path} | wrong)
    assert not any(tmp_path.iterdir())


def test_a_file_is_no_folder(experiment, tmp_path):
    """Fault: an error of the system after minutes of compilation."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="expected a folder"):
        train(experiment, tmp_path / "file", before_rounds=lambda: pytest.fail("it began"))


def test_a_resume_of_nothing_is_refused(experiment, tmp_path):
    """Fault: a folder that is made for a run which does not begin."""
    with pytest.raises(FileNotFoundError, match="expected a checkpoint"):
        train(experiment, tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()


def test_a_model_with_nan_is_refused(experiment, tmp_path):
    """Fault: rounds in which nobody sends a finite message."""
    params = jax.tree.map(lambda x: x * jnp.nan, experiment.params)
    with pytest.raises(InvalidArgument, match=r"params.*: expected finite numbers"):
        train(experiment._replace(params=params), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_state_of_a_users_own_has_no_timeline(experiment):
    """Fault: an error of Python after all rounds, for an algorithm whose state is another than that of its parts."""
    assert _timeline(experiment, {"mine": 0}) is None


def test_the_summary_comes_before_the_page(tmp_path, monkeypatch):
    """Fault: a summary that waits for figures, or no page where nobody reads the output any more."""
    events = []
    monkeypatch.setattr("fedjax_sim.report.page.write_report", lambda folder: events.append("page"))
    monkeypatch.setattr("fedjax_sim.running.seconds.so_far", lambda: {"page": 1.0})
    arguments = SimpleNamespace(data=None), tmp_path, History([], {"rounds": 3}), None
    summary = _finish(*arguments, lambda history: events.append(history.summary["rounds"]))
    assert events == [3, "page"] and summary["seconds"] == {"page": 1.0}

    def closed(history):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        _finish(*arguments, closed)
    assert events == [3, "page", "page"]
