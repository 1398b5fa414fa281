"""What a sweep's folder tells: its config, how to go on, how to repeat it."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from fedjax_sim.command.app import app
from fedjax_sim.sweeps import config as sweep_config
from fedjax_sim.sweeps.config import load_sweep
from fedjax_sim.sweeps.finished import Finished
from fedjax_sim.sweeps.results import Sweep

SMALL = ["data.num_clients=40", "model.name=linear", "sampler.cohort_size=8", "run.rounds=2"]
TABLES = "sweep.grid.transform=[{}, {error_feedback={quantize={bits=8}}}]"


def call(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def set_all(*settings):
    return [word for setting in settings for word in ("--set", setting)]


@pytest.fixture
def made(monkeypatch):
    """Replaces the training of a sweep by made numbers; `made[-1]` is what it was asked for last."""
    calls = []

    def run(loaded, folder, resume=False, **options):
        calls.append(loaded)
        Finished(folder, {"grid": loaded.combinations}, resume)
        rows = [
            values | {"seed": seed, "round": 2, "test_accuracy": 0.5, "test_loss": 0.5, "uplink_bytes_so_far": 2000 + i}
            for i, values in enumerate(loaded.combinations)
            for seed in loaded.seeds
        ]
        return Sweep(rows, tuple(loaded.combinations[0]), loaded.seeds, 1, True, labels=loaded.presentation.labels)

    monkeypatch.setattr(sweep_config, "run_sweep", run)
    return calls


@pytest.mark.parametrize("name", ["algorithms", "paper", "quantised_adam", "step_sizes"])
def test_a_sweep_is_written_and_read_back(name, tmp_path):
    """Faults: a name with dots that becomes tables, an option of one algorithm that another does not take, settings
    that are lost."""
    loaded = load_sweep(f"sweeps/{name}", ["sweep.seeds=[4, 2]", "run.rounds=3"])
    (tmp_path / "sweep.toml").write_text(loaded.to_toml(tmp_path))
    assert load_sweep(tmp_path / "sweep.toml") == loaded._replace(document=load_sweep(tmp_path / "sweep.toml").document)


def test_paths_of_a_written_sweep(tmp_path, monkeypatch):
    """Faults: a path that leads elsewhere from the sweep's folder; rows under the names of other paths."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "phones.csv").write_text("device,speed\n")
    rates = "sweep.grid.client_optimizer.learning_rate=[0.1, 0.2]"
    devices = ["sampler.with_clock.overhead_seconds=1.0", "devices.name=measured"]
    loaded = load_sweep(None, [*SMALL, *devices, "devices.path=phones.csv", rates])
    (tmp_path / "out" / "sweep.toml").write_text(loaded.to_toml("out"))
    again = load_sweep("out/sweep.toml")
    assert [config.resolved() for config in again.configs] == [config.resolved() for config in loaded.configs]
    assert os.path.join("..", "phones.csv") in (tmp_path / "out" / "sweep.toml").read_text()
    axis = 'sweep.grid.devices.path=["phones.csv", "others.csv"]'
    assert load_sweep(None, [*SMALL, *devices, axis]).to_toml("out") is None


def test_a_sweep_resumes_from_its_folder(made, tmp_path):
    """Faults: a resume that needs the config, one that begins another sweep, a page that does not tell what was run."""
    folder = tmp_path / "s"
    done = call("sweep", "--out", folder, *set_all(*SMALL, TABLES, "sweep.seeds=2"))
    assert done.exit_code == 0, done.output
    page = (folder / "report.html").read_text()
    again = call("sweep", "--resume", "--out", folder)
    assert again.exit_code == 0 and again.output == done.output
    assert made[0].combinations == made[1].combinations and made[0].seeds == made[1].seeds
    assert [config.resolved() for config in made[0].configs] == [config.resolved() for config in made[1].configs]
    assert (folder / "report.html").read_text() == page
    for words in ("How to repeat it", "fedjax-sim sweep --set data.num_clients=40", "[sweep.grid]", "versions.jax"):
        assert words in page
    assert "num_clients = 40" in page and "sent up (kB)" in page


def test_a_folder_without_a_config(tmp_path):
    """Fault: "sweep.grid: expected values" where nothing tells which sweep it was."""
    done = call("sweep", "--resume", "--out", tmp_path)
    assert done.exit_code == 2 and "the config that the sweep in" in done.output and "sweep.toml" in done.output


def test_a_file_of_the_users_stays(made, tmp_path):
    """Fault: a config named sweep.toml in the folder, written over or removed."""
    text = "[sweep.grid]\n" + '"client_optimizer.learning_rate" = [0.1, 0.2]\n'
    (tmp_path / "sweep.toml").write_text(text)
    done = call("sweep", tmp_path / "sweep.toml", "--out", tmp_path, *set_all(*SMALL))
    assert done.exit_code == 0 and (tmp_path / "sweep.toml").read_text() == text


@pytest.mark.parametrize("command", ["show", "report"])
def test_a_sweeps_folder_is_no_runs(made, command, tmp_path):
    """Fault: a list of missing files, where the folder holds a sweep."""
    assert call("sweep", "-q", "--out", tmp_path / "s", *set_all(*SMALL, TABLES, "sweep.seeds=1")).exit_code == 0
    page = (tmp_path / "s" / "report.html").read_text()
    done = call(command, tmp_path / "s")
    assert done.exit_code == 2 and f"fedjax-sim sweep --resume --out {tmp_path / 's'}" in done.output
    assert "Traceback" not in done.output and (tmp_path / "s" / "report.html").read_text() == page


def test_the_terminal_of_a_sweep(made, tmp_path, monkeypatch):
    """Faults: a table in a cell over three lines, its own defaults told as other differences, ties as a proof, an
    interval of one seed."""
    monkeypatch.setenv("COLUMNS", "100")
    several = call("sweep", "--out", tmp_path / "a", *set_all(*SMALL, TABLES, "sweep.seeds=3"))
    assert "error_feedback.quantize.bits=8      3" in several.output and "Besides the grid" not in several.output
    assert "0 ± 0: 1 of 1 combinations have the first's test_accuracy at every seed." in several.output
    assert "A loss may tell them apart: test_loss." in several.output
    one = call("sweep", "--out", tmp_path / "b", *set_all(*SMALL, TABLES, "sweep.seeds=1"))
    assert "One seed: no intervals." in one.output and "±" not in one.output


def test_a_paper_has_its_figure_and_table(made, tmp_path):
    """The example of the page on comparisons. Faults: words that are stated and not drawn, a figure that a later wish
    does not change, points that run again for it."""
    folder = tmp_path / "s"
    wish = ["--unset", "sweep.figure.x", *set_all("sweep.figure.kind=dots")]
    done = call("sweep", "sweeps/paper", "--out", folder, *wish, "-q")
    assert done.exit_code == 0, done.output
    assert {path.name for path in folder.glob("sweep.*")} == {"sweep.pdf", "sweep.png", "sweep.svg", "sweep.toml"}
    drawn = {path.name: path.read_bytes() for path in folder.glob("sweep.*")}
    table = (folder / "table.tex").read_text()
    assert (
        r"SCAFFOLD & 4 bits & $\mathbf{50 \pm 0}$ & $\mathbf{0.5 \pm 0}$ \\" in table and r"Test accuracy (\%)" in table
    )
    assert r"\label{tab:algorithms}" in table and "the standard deviation over seeds" in table
    assert "| FedAvg | 32 bits | **50 ± 0** | **0.5 ± 0** |" in (folder / "table.md").read_text()
    again = call("sweep", "--resume", "--out", folder, "-q", *set_all('sweep.figure.title="Five seeds"'))
    assert again.exit_code == 0, again.output
    changed = {name for name, content in drawn.items() if (folder / name).read_bytes() != content}
    assert changed == {"sweep.pdf", "sweep.png", "sweep.svg"}
    call("sweep", "--resume", "--out", folder, "-q")
    assert {path.name: path.read_bytes() for path in folder.glob("sweep.*")} == drawn
