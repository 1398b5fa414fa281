"""What is in the files that a config names is part of a run's identity."""

from __future__ import annotations

import hashlib

import pytest
from typer.testing import CliRunner

from fedjax_sim.command import app
from fedjax_sim.config import registry
from fedjax_sim.config.document import load
from fedjax_sim.config.files import file_contents

PHONES = "speed,bandwidth_down,bandwidth_up\n1e9,1e6,1e5\n2e9,2e6,2e5\n"
TIMES = "client,start,end\na,0,50\nb,20,100\n"
EDGES = "0,1\n1,2\n2,3\n"
TINY = ["data.num_clients=40", "data.held_out_clients=4", "sampler.cohort_size=4", "model.name=logistic"]
TINY += ["algorithm.num_steps=1", "run.evaluate_every=1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDJAX_SIM_CACHE", "off")
    for name, text in (("phones.csv", PHONES), ("times.csv", TIMES), ("edges.csv", EDGES)):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_files_of_a_config():
    """Fault: a file that is missed where it is an option of a table, of a part inside another, or of the algorithm."""
    devices = ["devices.name=measured", "devices.path=phones.csv", "sampler.with_clock.overhead_seconds=1.0"]
    devices += ["devices.availability={name='trace', path='times.csv'}"]
    found = file_contents(load(None, [*TINY, *devices]).tables)
    sums = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in (("p", PHONES), ("t", TIMES))}
    assert found == {
        "devices.path": f"phones.csv (SHA-256 {sums['p']})",
        "devices.availability.path": f"times.csv (SHA-256 {sums['t']})",
    }
    gossip = ["algorithm.name=dpsgd", "algorithm.mixing={name='metropolis', graph={name='from_csv', file='edges.csv'}}"]
    graph = file_contents(load(None, [*TINY[:2], "model.name=logistic", *gossip]).tables)
    assert graph.keys() == {"algorithm.mixing.graph.file"} and "edges.csv" in graph["algorithm.mixing.graph.file"]
    assert file_contents(load(None, TINY).tables) == {}


def test_every_file_is_declared():
    """Fault: a part of a network that reads a file whose content no identity holds, for it is annotated as a text."""
    for part in registry.parts("network").values():
        for name, option in part.options.items():
            assert name not in ("path", "file") or registry.is_file(option), f"{part.name}: {name}"


def test_another_content_is_another_run(folder):
    """Fault: a run that goes on with other devices than it began with."""
    devices = ["devices.name=measured", "devices.path=phones.csv", "sampler.with_clock.overhead_seconds=1.0"]
    sets = [word for text in [*TINY, *devices] for word in ("--set", text)]

    def call(*words):
        return CliRunner().invoke(app.app, ["run", "--out", "run", "-q", *words])

    assert call(*sets, "--set", "run.rounds=1").exit_code == 0
    (folder / "phones.csv").write_text(PHONES.replace("2e9", "3e9"))
    refused = call("--resume", "--set", "run.rounds=2")
    assert refused.exit_code == 1 and "files.devices.path: 'phones.csv (SHA-256 " in refused.output, refused.output
    (folder / "phones.csv").write_text(PHONES)
    assert call("--resume", "--set", "run.rounds=2").exit_code == 0
