"""After a run: show, compare, export, init."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from fedjax_sim.command.app import app
from fedjax_sim.config.document import load
from fedjax_sim.running import checkpoint

SMALL = ["data.name=mean_estimation", "data.num_clients=30", "model.name=linear", "sampler.cohort_size=5"]
SMALL += ["run.rounds=4", "run.evaluate_every=2"]


def call(*words):
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that differ in their learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    for name, rate in (("a", 0.1), ("b", 0.2)):
        settings = [*SMALL, f"client_optimizer.learning_rate={rate}"]
        options = [word for setting in settings for word in ("--set", setting)]
        done = call("run", "--quiet", "--out", folder / name, *options)
        assert done.exit_code == 0, done.output
    return folder / "a", folder / "b"


def test_compare(runs, tmp_path):
    """Faults: an option that differs and is not shown; a table in another form than was asked for; no page."""
    page = tmp_path / "compared.html"
    done = call("compare", *runs, "--out", page)
    assert done.exit_code == 0, done.output
    assert "learning_rate" in done.output and "minus the first" in done.output
    assert "After 4 rounds" in done.output and "One seed: no intervals." in done.output
    text = page.read_text()
    assert "<svg" in text and "learning_rate" in text and "<script" not in text
    assert call("compare", *runs, "--format", "csv").output.startswith("client_optimizer.learning_rate,seeds,")
    assert call("compare", *runs, "--format", "latex").output.startswith(r"\begin{tabular}")


def made_run(folder, *settings):
    """The folder of a run with made numbers."""
    folder.mkdir()
    (folder / "config.toml").write_text(load(None, [*SMALL, *settings]).to_toml())
    (folder / "metrics.jsonl").write_text('{"round": 0, "test_loss": 2.0}\n{"round": 1, "test_loss": 1.5}\n')
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.name=ditto", "client_optimizer.name=adam"],  # many options
        # few, with a long value
        ["client_optimizer.learning_rate=1.2345678901234567e-10", "algorithm.num_steps=7", "algorithm.batch_size=3"],
    ],
)
def test_unlike_runs_are_compared_in_80_columns(settings, tmp_path, monkeypatch):
    """Fault: one letter a line, in columns of which a terminal has no place for so many."""
    monkeypatch.setenv("COLUMNS", "80")
    folders = made_run(tmp_path / "plain"), made_run(tmp_path / "other", *settings)
    done = call("compare", *folders)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].split() == ["run", "seeds", "test_loss", "minus", "the", "first"]
    assert lines[1].split()[:3] == ["plain", "1", "1.5"] and lines[2].split()[:4] == ["other", "1", "1.5", "0"]
    differing = call("compare", *folders, "--format", "csv").output.partition(",seeds,")[0].split(",")
    assert [line.partition(":")[0] for line in lines[3:-2]] == differing and len(differing) > 1
    assert all(" | " in line for line in lines[3:-2])


@pytest.mark.parametrize(
    "words, message",
    [
        (("--format", "html"), "--format: expected one of terminal, csv, latex, markdown, got 'html'"),
        (("--metric", "test_accurcy"), "metric: expected one of"),
    ],
)
def test_compare_refuses(runs, words, message):
    """Fault: a misspelled word that is taken for another one."""
    done = call("compare", *runs, *words)
    assert done.exit_code == 2 and message in done.output


def test_a_folder_without_a_run(tmp_path):
    """Fault: a traceback."""
    for words in (("compare", tmp_path, tmp_path), ("show", tmp_path), ("export", tmp_path, tmp_path / "m.npz")):
        done = call(*words)
        assert done.exit_code == 2 and "RUN: expected a run's folder" in done.output


def test_changed_files_are_refused(runs, tmp_path):
    """Fault: a number that somebody changed, shown as the run's."""
    import shutil

    copy = shutil.copytree(runs[0], tmp_path / "copy")
    text = (copy / "summary.json").read_text()
    (copy / "summary.json").write_text(text.replace('"rounds": 4', '"rounds": 5'))
    done = call("show", copy)
    assert done.exit_code == 1 and "summary.json" in done.output


def test_show(runs):
    """Fault: a summary that is not the run's."""
    done = call("show", runs[0])
    assert done.exit_code == 0 and "rounds" in done.output and str(runs[0]) in done.output


@pytest.mark.parametrize("name", ["model.npz", "model.safetensors"])
def test_the_model_of_a_run(runs, tmp_path, name):
    """Faults: the model of another round, arrays under other names or in another order."""
    if name.endswith("safetensors"):
        pytest.importorskip("safetensors")
        from safetensors.numpy import load_file
    else:
        load_file = np.load
    done = call("export", runs[0], tmp_path / name)
    assert done.exit_code == 0 and "after round 4" in done.output
    arrays = load_file(tmp_path / name)
    # The checkpoint's leaves follow each other in its file; those of the model are the params of the server's state.
    header, payload = checkpoint.read_file(checkpoint.latest(runs[0] / "checkpoints"))
    saved, offset = {}, 0
    for entry in header["leaves"]:
        saved[entry["path"]] = bytes(payload[offset : offset + entry["bytes"]])
        offset += entry["bytes"]
    in_model = {path: raw for path, raw in saved.items() if "params" in path}
    assert len(in_model) == len(arrays) > 0
    assert sorted(in_model.values()) == sorted(x.tobytes() for x in arrays.values())
    for key, x in arrays.items():
        words = key.split("/")
        assert any(all(word in path for word in words) and raw == x.tobytes() for path, raw in in_model.items())


def test_export_refuses_another_ending(runs, tmp_path):
    """Fault: a file whose format nobody knows."""
    done = call("export", runs[0], tmp_path / "model.pt")
    assert done.exit_code == 2 and "FILE: expected a name that ends in .npz or .safetensors" in done.output


def test_init(tmp_path, monkeypatch):
    """Faults: an example that is not the package's; a file that is written over."""
    monkeypatch.chdir(tmp_path)
    done = call("init", "cross_device")
    assert done.exit_code == 0
    assert load(tmp_path / "cross_device.toml").resolved() == load("cross_device").resolved()
    assert "FILE: expected a path where nothing is yet" in call("init", "cross_device").output
    assert "Did you mean 'quickstart'?" in call("init", "quikstart").output
    assert call("init", "cross_device", "new/folder/mine.toml").exit_code == 0  # as other outputs may be


def test_a_sweeps_file_is_run_by_sweep(tmp_path, monkeypatch):
    """Fault: an unknown key, "Did you mean 'seed'?", where the file is a sweep."""
    monkeypatch.chdir(tmp_path)
    assert "then fedjax-sim sweep step_sizes.toml" in call("init", "sweeps/step_sizes").output
    done = call("run", "step_sizes.toml")
    assert done.exit_code == 2 and "This file is a sweep: fedjax-sim sweep step_sizes.toml" in done.output
