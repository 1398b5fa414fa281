"""What went wrong is said in words of the surface in use, and each refusal names a way that works."""

import importlib
import os
import re
import shlex
import shutil
import sys

import pytest
from typer.testing import CliRunner

from fedjax_sim.command.app import app
from fedjax_sim.command.folders import check_unfinished
from fedjax_sim.config.value_kinds import ConfigError
from fedjax_sim.running import checkpoint, files

SMALL = ["data.name=mean_estimation", "data.num_clients=30", "model.name=linear", "sampler.cohort_size=5"]
SMALL += ["run.rounds=4", "run.evaluate_every=2", "run.checkpoint_every=1", "run.devices=1"]
STATED = [word for setting in SMALL for word in ("--set", setting)]


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ended") / "run"
    done = call("run", "-q", "--out", folder, *STATED)
    assert done.exit_code == 0, done.output
    return folder


def newest(folder):
    return max((folder / "checkpoints").glob("*.ckpt"))


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("what", ["damaged", "missing"])
def test_a_damaged_newest_checkpoint_is_told(ended, tmp_path, what):
    """Fault: `show` and `report` of a run whose last checkpoint is damaged, without a word; `export` that names an
    argument of Python, has no such option, and writes the model of round 3 of a run of 4 rounds."""
    folder = shutil.copytree(ended, tmp_path / "run")
    if what == "damaged":
        damage(newest(folder))
    else:
        newest(folder).unlink()
    words = "SHA-256 does not match" if what == "damaged" else "the checkpoint of round 4, with which the run ended"
    for command in ("show", "report"):
        done = call(command, folder)
        assert done.exit_code == 0 and words in done.stderr, (command, done.output)
    assert words in (folder / "report.html").read_text()
    refused = call("export", folder, tmp_path / "model.npz")
    assert refused.exit_code == 1 and words in refused.output and "--allow-previous" in refused.output
    assert not (tmp_path / "model.npz").exists()
    context = pytest.warns(RuntimeWarning, match="Continuing") if what == "damaged" else _nothing()
    with context:
        done = call("export", folder, tmp_path / "model.npz", "--allow-previous")
    assert done.exit_code == 0 and "after round 3" in done.output
    for command in (["show", ended], ["report", ended]):
        assert not call(*command).stderr


WITHOUT_EFFECT = {
    "no resume": (["run", "--allow-previous"], "--allow-previous: expected --resume beside it, got none."),
    "no run": (
        ["launch", "-n", "2", "--", "sweep"],
        "COMMAND: expected run, whose processes share the work, got 'sweep'.",
    ),
    "no module": (
        ["report", ".", "--with", "no_module"],
        "--with: expected a module with source code, got 'no_module'",
    ),
}


@pytest.mark.parametrize("words", WITHOUT_EFFECT)
def test_what_would_have_no_effect_is_refused(tmp_path, monkeypatch, words):
    """Faults: an option that is ignored without a word; two sweeps in the place of one that two processes share."""
    monkeypatch.chdir(tmp_path)
    command, told = WITHOUT_EFFECT[words]
    refused = call(*command, *(STATED if command[0] == "run" else []))
    assert refused.exit_code == 2 and told in refused.output, refused.output
    assert not any(tmp_path.iterdir())


def test_a_figure_needs_its_package(tmp_path, monkeypatch):
    """Faults: a traceback where matplotlib is missing, and for an audit only after its million releases."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    module = importlib.import_module("fedjax_sim.instruments.audit_command")  # the package has a function of this name
    monkeypatch.setattr(module, "audit_algorithm", lambda *arguments, **options: pytest.fail("it began"))
    for command in (["data", "--set", "data.num_clients=20", "--out"], ["audit", "--figure"]):
        done = call(*command, tmp_path / "figure.png")
        assert done.exit_code == 1 and "ImportError: figures need matplotlib: pip install" in done.output, done.output
    assert not any(tmp_path.iterdir())


def test_a_config_alone_is_no_run(tmp_path):
    """Fault: a page of nothing, over a report.html of the user's."""
    (tmp_path / "config.toml").write_text("seed = 1")
    (tmp_path / "report.html").write_text("mine")
    refused = call("report", tmp_path)
    assert refused.exit_code == 2 and "which has config.toml alone" in refused.output
    assert (tmp_path / "report.html").read_text() == "mine" and not (tmp_path / ".lock").exists()


def test_a_way_can_be_pasted(ended, tmp_path):
    """Fault: a command for a folder with a space in its name, which is no command."""
    folder = shutil.copytree(ended, tmp_path / "my run")
    with pytest.raises(ConfigError, match=re.escape(f"fedjax-sim report {shlex.quote(str(folder))}")):
        check_unfinished(folder, 4)
    (folder / "summary.json").unlink()
    shown = call("show", folder)
    assert shown.exit_code == 0 and f"--resume --out {shlex.quote(str(folder))}" in shown.output


def _nothing():
    import contextlib

    return contextlib.nullcontext()


@pytest.mark.full  # by default an export does
def test_a_resume_names_its_own_option(ended, tmp_path):
    """Fault: "pass allow_previous=True" to somebody at a terminal, where that is no option."""
    folder = shutil.copytree(ended, tmp_path / "run")
    damage(newest(folder))
    more = ["run", "-q", "--resume", "--out", folder, "--set", "run.rounds=5"]
    refused = call(*more)
    assert refused.exit_code == 1 and "--allow-previous" in refused.output
    with pytest.warns(RuntimeWarning, match="Continuing from round_00000003"):
        assert call(*more, "--allow-previous").exit_code == 0


REMAINS = {
    "checkpoints alone": ["checkpoints"],
    "no config": ["checkpoints", "metrics.jsonl", "timing.jsonl"],
    "no log": ["checkpoints", "config.toml"],
    "no checkpoints": ["config.toml", "metrics.jsonl", "timing.jsonl"],
    "a config": ["config.toml"],
}


@pytest.mark.default_rows("no config", "a config")
@pytest.mark.parametrize("remains", REMAINS)
def test_every_folder_has_a_way(ended, tmp_path, remains):
    """Fault: a folder that is refused to a new run, which shall resume, and to a resume, which shall begin anew."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in REMAINS[remains]:
        source = ended / name
        shutil.copytree(source, folder / name) if source.is_dir() else shutil.copy(source, folder / name)
    fresh = call("run", "-q", "--out", folder, *STATED)
    resumed = call("run", "-q", "--resume", "--out", folder, "--set", "run.rounds=5")
    assert fresh.exit_code == resumed.exit_code == 2
    can_go_on = remains == "no config"
    for done in (fresh, resumed):
        assert ("--resume" in done.output.replace("without --resume", "")) == can_go_on, done.output
        assert can_go_on or re.search("another --out", done.output), done.output
    if can_go_on:
        shutil.copy(ended / "config.toml", tmp_path / "mine.toml")
        config = tmp_path / "mine.toml"
        done = call("run", config, "-q", "--resume", "--out", folder, "--set", "run.rounds=5")
        assert done.exit_code == 0, done.output
    assert call("run", "-q", "--out", tmp_path / "another", *STATED).exit_code == 0


def full_disk(monkeypatch, name):
    """A disk without space for a file."""
    write = os.write

    def fails(file, data):
        if name in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(files.os, "write", fails)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="the names of open files")
@pytest.mark.default_rows("summary.json")
@pytest.mark.parametrize("name", ["report.html", "summary.json"])
def test_a_full_disk_at_the_end(tmp_path, monkeypatch, name):
    """Fault: "[Errno 28] No space left on device" at the end of hours of training, without the file, without a word
    whether the run is lost, and without the way to its page."""
    folder = tmp_path / "a run"
    with monkeypatch.context() as patch:
        full_disk(patch, name)
        done = call("run", "--out", folder, *STATED)
    assert done.exit_code == 1 and f"No space left on device: '{folder / name}'" in done.output
    assert "Traceback" not in done.output
    (way,) = re.findall(r"(?:make its page: |folder, then )(fedjax-sim .*)", done.output)
    if name == "report.html":
        assert "The run is complete" in done.output and "client visits" in done.output
    again = call(*shlex.split(way)[1:])
    assert again.exit_code == 0 and (folder / "report.html").is_file() and (folder / "summary.json").is_file()


def test_nothing_is_wrong_with_a_copy_without_checkpoints(ended, tmp_path):
    """Fault: a warning about a folder that somebody shared without its checkpoints."""
    folder = shutil.copytree(ended, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    assert checkpoint.trouble_with_newest(folder / "checkpoints", 4) == "" and not call("show", folder).stderr
