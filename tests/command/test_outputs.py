"""No command with an output, and no function, changes a file of a run, and each output has a kind of its own."""

import os
import shutil

import jax
import pytest
from typer.testing import CliRunner

from fedjax_sim import run
from fedjax_sim.command.app import app
from fedjax_sim.command.folders import check_fresh
from fedjax_sim.config.build import build
from fedjax_sim.config.document import load
from fedjax_sim.running.kept_files import MARKS, WRITTEN
from fedjax_sim.study.findings import Findings, measured
from fedjax_sim.study.page import write_findings
from fedjax_sim.sweeps.config import load_sweep, run_sweep

SMALL = ["data.name=mean_estimation", "data.num_clients=30", "model.name=linear", "sampler.cohort_size=5"]
SMALL += ["run.rounds=2"]
STATED = [word for setting in SMALL for word in ("--set", setting)]
STUDY = ["study", "participation", "--set", "population_sizes=[4]", "--set", "rates=[1.0]", "--set", "num_rounds=250"]
STUDY += ["--set", "model_clients=0", "--set", "compare_samplers=false"]
# A command before its output, its option, and the kinds of file that it takes; () for a folder.
COMMANDS = {
    "run": (["run", "-q", *STATED], "--out", ()),
    "sweep": (["sweep", "-q", *STATED, "--set", "sweep.seeds=1", "--set", "sweep.grid.algorithm.num_steps=[1, 2]"],
              "--out", ()),
    "study": (STUDY, "--out", ()),
    "compare": (["compare", "RUN", "OTHER"], "--out", (".html",)),
    "export": (["export", "RUN"], "", (".npz", ".safetensors")),
    "init": (["init", "quickstart"], "", (".toml",)),
    "data": (["data", *STATED], "--out", (".png", ".svg")),
    "audit": (["audit", "--releases", "1000", "--canaries", "0"], "--figure", (".png", ".svg", ".pdf")),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run and another one, with a page, a timeline, and what loggers leave."""
    folder = tmp_path_factory.mktemp("outputs")
    for name, rate in (("run", 0.1), ("other", 0.2)):
        rate_option = ["--set", f"client_optimizer.learning_rate={rate}"]
        done = CliRunner().invoke(app, ["run", "-q", "--out", str(folder / name), *STATED, *rate_option])
        assert done.exit_code == 0, done.output
    for name in ("timeline_3.html", "tensorboard/events.png", "wandb/media.html", "notes.html", "sweep.png"):
        path = folder / "run" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("of the run")
    return folder


def content(folder):
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_every_output_is_here():
    """Fault: a command with an output that the law below does not know."""
    given = {
        command.callback.__name__
        for command in app.registered_commands
        for name in command.callback.__annotations__
        if name in ("out", "path", "figure")
    }
    assert given == set(COMMANDS)


@pytest.mark.default_rows("run", "sweep", "compare", "export")
@pytest.mark.parametrize("name", COMMANDS)
def test_no_output_changes_a_run(folder, name):
    """Fault: `compare A B --out A/metrics.jsonl`, which wrote a page over the log of a run; a page beside it that
    passes for the run's; a figure written through a link; work that is done before a bad output is refused."""
    command, option, kinds = COMMANDS[name]
    command = [{"RUN": str(folder / "run"), "OTHER": str(folder / "other")}.get(word, word) for word in command]
    before = content(folder)
    targets = [folder / "run" / file for file in content(folder / "run")]
    targets += [folder / "run", folder / "run" / "checkpoints", folder / "run" / "wandb" / "deep" / "new.html"]
    for kind in kinds:
        links = [folder / f"link{kind}", folder / "linked" / f"notes{kind}", folder / "linked" / f"report{kind}"]
        for link, target in ((links[0], "run/metrics.jsonl"), (folder / "linked", "run")):
            if not link.is_symlink():
                link.symlink_to(folder / target)
        targets += [links[0]] + [links[1]] * (kind == ".html") + [links[2]] * (kind == ".html")
    try:
        for target in targets:
            done = CliRunner().invoke(app, [*command, *([option] if option else []), str(target)])
            assert done.exit_code == 2, f"{target}: {done.output}"
            assert f"{option or 'FILE'}: expected" in done.output and "Traceback" not in done.output
    finally:
        for link in [path for path in folder.iterdir() if path.is_symlink()]:
            link.unlink()
    assert content(folder) == before


@pytest.mark.full  # by default what is refused
def test_new_files_beside_a_run(folder, tmp_path):
    """Fault: a rule so wide that a model can no longer be exported into its run's folder, twice, or into a folder of
    the user's inside of it; a run inside of a project that is a run's folder."""
    copy = shutil.copytree(folder / "run", tmp_path / "run")
    for target in (copy / "model.npz", copy / "model.npz", copy / "mine" / "model.npz"):
        done = CliRunner().invoke(app, ["export", str(copy), str(target)])
        assert done.exit_code == 0 and target.is_file(), done.output
    done = CliRunner().invoke(app, ["compare", str(copy), str(folder / "other"), "--out", str(copy / "new.html")])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["run", "-q", *STATED, "--out", str(copy / "inner")])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("name", ["run", "sweep", "study"])
def test_a_users_files_stay(folder, tmp_path, name):
    """Fault: `run config.toml --out .`, which wrote the resolved config over the user's own, comments and all."""
    written = WRITTEN[f"a {name}"]
    for file in written:
        mine = tmp_path / f"with_{file}" / file
        mine.parent.mkdir()
        mine.write_text("mine")
        done = CliRunner().invoke(app, [*COMMANDS[name][0], "--out", str(mine.parent)])
        assert done.exit_code == 2 and f"It holds {file}. Choose another --out." in done.output, done.output
        assert mine.read_text() == "mine" and os.listdir(mine.parent) == [file]
    if name == "run":  # nothing that a run writes is missing above
        marks = {path.name for mark in MARKS["a run"] for path in (folder / "other").glob(mark)}
        assert set(os.listdir(folder / "other")) - marks <= {*written, ".lock", "checkpoints"}


def test_an_interrupted_start_begins_anew(tmp_path):
    """Fault: files of a start that was interrupted, which are taken for a user's."""
    for file in (".lock", "config.toml", "metrics.jsonl"):
        (tmp_path / file).write_text("")
    check_fresh(tmp_path)


def test_outputs_are_checked_first(tmp_path):
    """Fault: a page, a figure or a model that cannot be written, which is found after the work."""
    (tmp_path / "file").write_text("")
    for name, (command, option, kinds) in COMMANDS.items():
        for target in [tmp_path / "file" / f"x{kinds[0]}"] if kinds else [tmp_path / "file", tmp_path / "file" / "x"]:
            words = [word if word not in ("RUN", "OTHER") else str(tmp_path / "absent") for word in command]
            done = CliRunner().invoke(app, [*words, *([option] if option else []), str(target)])
            assert done.exit_code == 2 and "Not a directory" in done.output, f"{name}: {done.output}"
    assert os.listdir(tmp_path) == ["file"]


def test_python_changes_no_run(folder, tmp_path):
    """Fault: a sweep or a study in the folder of a run, whose page it would replace; a run in the folder of a sweep."""
    before = content(folder / "run")
    with pytest.raises(FileExistsError, match="without a run"):
        run_sweep(load_sweep(None, [*SMALL, "sweep.grid.algorithm.num_steps=[1, 2]"]), folder / "run")
    with pytest.raises(FileExistsError, match="without a run"):
        write_findings(
            Findings(
                name="x",
                question="?",
                comparisons=[measured({}, "x", [1.0])],
                figure=lambda: None,
                options={},
            ),
            folder / "run",
        )
    assert content(folder / "run") == before
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "points.jsonl").write_text("{}\n")
    made = build(load(None, SMALL))
    with pytest.raises(FileExistsError, match="without a sweep"):
        run(jax.random.key(0), made.algorithm, made.params, made.data.train, 1, directory=tmp_path / "sweep")
    assert os.listdir(tmp_path / "sweep") == ["points.jsonl"]
