"""What is in the files that a config names is part of a run's identity."""

from __future__ import annotations

import hashlib
import shutil

import pytest
from typer.testing import CliRunner

from fedjax_sim.command import app
from fedjax_sim.config.document import Config, load
from fedjax_sim.config.files import named_paths
from fedjax_sim.sweeps.config import load_sweep

PHONES = "speed,bandwidth_down,bandwidth_up\n1e9,1e6,1e5\n2e9,2e6,2e5\n"
TIMES = "client,start,end\na,0,50\nb,20,100\n"
EDGES = "0,1\n1,2\n2,3\n"
TINY = ["data.num_clients=40", "data.held_out_clients=4", "sampler.cohort_size=4", "model.name=logistic"]
TINY += ["algorithm.num_steps=1", "run.evaluate_every=1"]
DEVICES = ["devices.name=measured", "devices.path=phones.csv", "sampler.with_clock.overhead_seconds=1.0"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDJAX_SIM_CACHE", "off")
    for name, text in (("phones.csv", PHONES), ("times.csv", TIMES), ("edges.csv", EDGES)):
        (tmp_path / name).write_text(text)
    return tmp_path


def command(*words, name="run"):
    return CliRunner().invoke(app.app, [name, "-q", *map(str, words)])


def sets(options):
    return [word for text in options for word in ("--set", text)]


def test_files_of_a_config():
    """Fault: a file that is missed where it is an option of a table, of a part inside another, or of the algorithm."""
    config = load(None, [*TINY, *DEVICES, "devices.availability={name='trace', path='times.csv'}"])
    assert named_paths(config.tables) == {"devices.path": "phones.csv", "devices.availability.path": "times.csv"}
    sums = [hashlib.sha256(text.encode()).hexdigest() for text in (PHONES, TIMES)]
    found = {"devices.path": f"SHA-256 {sums[0]}", "devices.availability.path": f"SHA-256 {sums[1]}"}
    assert config.identity()["files"] == found
    gossip = ["algorithm.name=dpsgd", "algorithm.mixing={name='metropolis', graph={name='from_csv', file='edges.csv'}}"]
    graph = load(None, [TINY[0], "model.name=logistic", *gossip])
    assert named_paths(graph.tables) == {"algorithm.mixing.graph.file": "edges.csv"}
    assert "files" not in load(None, TINY).identity()


@pytest.mark.full
def test_another_content_is_another_run(folder):
    """Fault: a run that goes on with other devices than it began with."""
    assert command("--out", "run", *sets([*TINY, *DEVICES, "run.rounds=1"])).exit_code == 0
    (folder / "phones.csv").write_text(PHONES.replace("2e9", "3e9"))
    refused = command("--out", "run", "--resume", "--set", "run.rounds=2")
    assert refused.exit_code == 1 and "files.devices.path: 'SHA-256 " in refused.output, refused.output
    assert "An earlier version" not in refused.output
    (folder / "phones.csv").write_text(PHONES)
    assert command("--out", "run", "--resume", "--set", "run.rounds=2").exit_code == 0


def test_paths_are_relative_to_their_file(folder, monkeypatch):
    """Fault: paths that mean something else from another folder; one on the command line that is taken to the file's
    folder; a table or a swept value that is missed."""
    (folder / "configs").mkdir()
    lines = ["data.num_clients = 4", 'model.name = "logistic"', "sampler.cohort_size = 2"]
    lines += [
        "sampler.with_clock.overhead_seconds = 1.0",
        'devices.name = "measured"',
        'devices.path = "../phones.csv"',
    ]
    lines += ['devices.availability = {name = "trace", path = "~/times.csv"}']
    path = folder / "configs" / "run.toml"
    path.write_text("\n".join(lines) + "\n")

    def paths(*overrides, where=path):
        return list(named_paths(load(where, overrides).tables).values())

    assert paths() == ["phones.csv", "~/times.csv"]
    assert paths("devices.path=a/b.csv") == ["a/b.csv", "~/times.csv"]
    assert paths("devices={name='measured', path='b.csv'}") == ["b.csv"]
    assert paths("devices.path=/b.csv") == ["/b.csv", "~/times.csv"]
    (folder / "link").symlink_to(folder / "configs")
    monkeypatch.chdir(folder / "configs")
    assert paths() == paths(where="run.toml") == paths(where="../link/run.toml") == ["../phones.csv", "~/times.csv"]

    monkeypatch.chdir(folder)
    path.write_text("\n".join([*lines, "[sweep.grid]", '"devices.path" = ["a.csv", "../b.csv"]']))
    swept = [named_paths(config.tables)["devices.path"] for config in load_sweep(path).configs]
    assert swept == ["configs/a.csv", "b.csv"]
    given = load_sweep(path, ['sweep.grid.devices.path=["a.csv", "c.csv"]', "devices.path=d.csv"]).configs
    assert [named_paths(config.tables)["devices.path"] for config in given] == ["a.csv", "c.csv"]


def write_sites(folder, last="9"):
    folder.mkdir(exist_ok=True)
    for site in ("north", "south"):
        (folder / f"{site}.csv").write_text("a,y\n" + "".join(f"{i},{i % 2}\n" for i in range(9)) + f"{last},1\n")


CONFIG = """
data = {name = "csv_sites", directory = "../sites", label = "y"}
model.name = "logistic"
sampler.name = "full"
algorithm.num_steps = 1
run.rounds = 1
"""


@pytest.mark.full
def test_a_run_and_its_data_move(folder, monkeypatch):
    """Fault: a run that its data's path decides: renamed or mounted elsewhere it could not be resumed, and from another
    folder it was not found."""
    project = folder / "project"
    (project / "configs").mkdir(parents=True)
    (project / "configs" / "sites.toml").write_text(CONFIG)
    write_sites(project / "sites")
    started = command("project/configs/sites.toml", "--out", "project/runs/one")
    assert started.exit_code == 0, started.output
    assert 'directory = "../../sites"' in (project / "runs" / "one" / "config.toml").read_text()

    project.rename(folder / "elsewhere")  # all of it
    monkeypatch.chdir(folder / "elsewhere" / "configs")
    resumed = command("--resume", "--out", "../runs/one", "--set", "run.rounds=2")
    assert resumed.exit_code == 0, resumed.output

    write_sites(folder / "data")  # the data alone
    shutil.rmtree(folder / "elsewhere" / "sites")
    more = ["--resume", "--out", "../runs/one", "--set", "run.rounds=3"]
    refused = command(*more)
    assert refused.exit_code == 2 and refused.output == (
        "data.directory: expected a path that exists, got '../sites'. If it was moved, name its place, "
        "--set data.directory=PATH: a run goes on with the same content anywhere.\n"
    )
    moved = command(*more, "--set", "data.directory=../../data")
    assert moved.exit_code == 0, moved.output
    assert 'directory = "../../../data"' in (folder / "elsewhere/runs/one/config.toml").read_text()

    write_sites(folder / "data", last="10")
    changed = command(*more[:-1], "run.rounds=4")
    assert changed.exit_code == 1 and "data_sha256: " in changed.output and "data.directory" not in changed.output


@pytest.mark.full  # by default tests/running/test_same_program.py is refused in these words
def test_a_checkpoint_of_an_earlier_version(monkeypatch):
    """Fault: a list of paths and sums, without a word on why a run cannot go on."""
    identity = Config.identity

    def with_paths(config):
        found = identity(config)
        return found | {"devices": found["devices"] | {"path": "phones.csv"}}

    with monkeypatch.context() as earlier:
        earlier.setattr(Config, "identity", with_paths)
        assert command("--out", "run", *sets([*TINY, *DEVICES, "run.rounds=1"])).exit_code == 0
    refused = command("--out", "run", "--resume", "--set", "run.rounds=2")
    assert refused.exit_code == 1 and "  devices.path: 'phones.csv' in the checkpoint, 'absent' now" in refused.output
    assert "An earlier version wrote it, which compared paths" in refused.output


@pytest.mark.full
def test_a_sweep_goes_on_with_the_same_files(folder, monkeypatch):
    """Fault: points over other devices, or judged on other rows, than those that are there; a sweep whose files were
    moved and cannot go on; rows whose labels are two names of one file."""
    (folder / "slow.csv").write_text(PHONES.replace("2e9", "1e8"))
    write_sites(folder / "sites")
    options = ["data.name=csv_sites", "data.directory=sites", "data.label=y", "model.name=logistic"]
    options += ["sampler.name=full", "sampler.with_clock.overhead_seconds=1.0", "algorithm.num_steps=1"]
    options += ["devices.name=measured", "run.rounds=1", "sweep.seeds=1"]
    grid = "sweep.grid.devices.path=['phones.csv', 'slow.csv']"
    started = command("--out", "swept", *sets([*options, grid]), name="sweep")
    assert started.exit_code == 0, started.output
    (folder / "moved").mkdir()
    for name in ("sites", "phones.csv", "slow.csv"):
        (folder / name).rename(folder / "moved" / name)
    options[1] = "data.directory=moved/sites"
    grid = "sweep.grid.devices.path=['moved/phones.csv', 'moved/slow.csv']"
    again = ["--resume", "--out", "swept", *sets([*options, grid])]
    resumed = command(*again, name="sweep")
    assert resumed.exit_code == 0, resumed.output
    assert "moved/slow.csv" in (folder / "swept" / "results.csv").read_text()
    (folder / "moved" / "slow.csv").write_text(PHONES.replace("2e9", "1e7"))
    changed = command(*again, name="sweep")
    assert changed.exit_code == 1 and "grid.1.devices.path: " in changed.output, changed.output
    (folder / "moved" / "slow.csv").write_text(PHONES.replace("2e9", "1e8"))
    write_sites(folder / "moved" / "sites", last="10")
    changed = command(*again, name="sweep")
    assert changed.exit_code == 1 and "data_sha256: " in changed.output, changed.output
