"""Runs of stateful algorithms: the kind of client memory changes nothing, and neither does a kill."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import checkpoint, engine, sampling
from fedjax_sim.algorithms import scaffold
from fedjax_sim.config import load
from fedjax_sim.experiment import build
from fedjax_sim.population import from_clients
from fedjax_sim.run import run

KEY, NUM_CLIENTS, ROUNDS = jax.random.key(5), 41, 20
START = {"w": jnp.zeros(3), "b": jnp.zeros(())}


def loss_fn(params, examples, key):
    return {"loss": (examples["x"] @ params["w"] + params["b"] - examples["y"]) ** 2}


def problem(mesh="all"):
    rng = np.random.default_rng(0)
    clients = [
        {"x": rng.normal(size=(n, 3)).astype(np.float32), "y": rng.normal(size=n).astype(np.float32)}
        for n in rng.integers(1, 9, NUM_CLIENTS)
    ]
    sampler = sampling.with_dropout(sampling.uniform(NUM_CLIENTS, 7), 0.2)
    work = {"learning_rate": 0.05, "num_steps": 2, "batch_size": 2, "mesh": mesh}
    return scaffold(loss_fn, sampler, **work), START, from_clients(clients)


@pytest.fixture(scope="module")
def parts():
    return problem()


def everything(state):
    """Model, server and the row of every client, on the host."""
    rows, _ = engine.take(state.clients, jnp.arange(NUM_CLIENTS))
    return jax.device_get((state.server, rows))


def same_bits(a, b):
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.fixture(scope="module")
def reference(parts):
    state, history = run(KEY, *parts, ROUNDS)
    return everything(state), history.records


@pytest.mark.parametrize("kind, stop", [("device", 13), ("disk", 6)])
def test_resume_gives_the_same_bits(parts, reference, tmp_path, kind, stop):
    """Fault: client memory forgotten, or ahead of the model, after a resume. Rounds past the commit were on disk."""
    options = {"directory": tmp_path, "client_memory": kind, "evaluate_every": 3}

    def dies(round, state, record):
        if round > stop:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run(KEY, *parts, ROUNDS, callbacks=[dies], checkpoint_every=4, **options)
    state, history = run(KEY, *parts, ROUNDS, resume=True, **options | {"client_memory": "auto"})
    assert isinstance(state.clients, engine.Disk) == (kind == "disk") == (tmp_path / "clients.mem").exists()
    assert same_bits(everything(state), reference[0]) and history.records == reference[1]


@pytest.mark.parametrize("kind, first, then", [("device", "all", None), ("disk", None, "all")])
def test_resume_on_another_number_of_devices(parts, reference, tmp_path, first, then, kind):
    """Fault: rows in the order or padding of the devices that wrote them."""
    options = {"directory": tmp_path, "client_memory": kind}
    run(KEY, *problem(first), 7, **options)
    state, _ = run(KEY, *problem(then), ROUNDS, resume=True, **options)
    assert jax.device_count() > 1 and same_bits(everything(state), reference[0])


def test_the_previous_checkpoint_has_its_memory(parts, reference, tmp_path):
    """Fault: a journal dropped while its checkpoint is kept."""
    options = {"directory": tmp_path, "client_memory": "disk", "checkpoint_every": 4}
    run(KEY, *parts, 15, **options)
    newest = checkpoint.latest(tmp_path / "checkpoints")
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(checkpoint.CheckpointError, match="truncated"):
        run(KEY, *parts, ROUNDS, resume=True, **options)
    with pytest.warns(RuntimeWarning, match="Going on from round_00000012"):
        state, history = run(KEY, *parts, ROUNDS, resume=True, allow_previous=True, **options)
    assert same_bits(everything(state), reference[0]) and history.records == reference[1]


def test_what_the_folder_holds_is_respected(parts, tmp_path):
    """Fault: memory of another run or kind taken for this one's, a damaged row that trains on."""
    options = {"directory": tmp_path / "run", "client_memory": "disk"}
    run(KEY, *parts, 2, **options)
    run(KEY, *parts, 0, **options | {"directory": tmp_path / "other"})
    memory, other = (tmp_path / name / "clients.mem" for name in ("run", "other"))
    own = memory.read_bytes()
    with pytest.raises(checkpoint.CheckpointError, match="does not fit this run"):
        run(KEY, *parts, 4, resume=True, **options | {"client_memory": "device"})
    memory.write_bytes(other.read_bytes())
    with pytest.raises(engine.MemoryFileError, match="of this run, got another run's"):
        run(KEY, *parts, 4, resume=True, **options)
    memory.write_bytes(own[:-100])
    with pytest.raises(engine.MemoryFileError, match=r"expected .* bytes"):
        run(KEY, *parts, 4, resume=True, **options)
    memory.write_bytes(own[:4096] + bytes(255 - x for x in own[4096:]))
    with pytest.raises(engine.MemoryFileError, match=r"checksum of client \d+ does not match"):
        run(KEY, *parts, 40, resume=True, **options)


PROGRAM = """
import sys, time
sys.path.insert(0, {tests!r})
import conftest, test_client_memory as here
state, history = here.run(
    here.KEY, *here.problem(), 60, directory=sys.argv[1], resume=sys.argv[2] == "resume", client_memory="disk",
    evaluate_every=3, checkpoint_every=7, callbacks=[lambda *a: time.sleep(0.01)],
)
print([x.tolist() for x in here.jax.tree.leaves(here.everything(state))])
"""


def test_kill_and_resume_with_memory_on_disk(tmp_path):
    """Fault: rows overwritten whose old values a resume needs. Killed twice, at moments of the clock's choice."""
    code = PROGRAM.format(tests=str(pathlib.Path(__file__).parent))

    def start(directory, mode):
        return subprocess.Popen([sys.executable, "-c", code, directory, mode], stdout=subprocess.PIPE, text=True)

    whole, log = start(tmp_path / "whole", "fresh"), tmp_path / "victim" / "metrics.jsonl"
    for mode, rounds in (("fresh", 11), ("resume", 29)):
        victim, deadline = start(tmp_path / "victim", mode), time.monotonic() + 120
        while time.monotonic() < deadline and not (log.exists() and log.read_text().count("\n") >= rounds):
            time.sleep(0.003)
        os.kill(victim.pid, signal.SIGKILL)
        victim.communicate()
        assert rounds <= log.read_text().count("\n") < 60
    resumed, _ = start(tmp_path / "victim", "resume").communicate()
    expected, _ = whole.communicate()
    assert resumed == expected and expected
    assert log.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_from_a_config(tmp_path):
    """Fault: an option that is part of a run's identity although it changes no bit; a recipe that no config reaches."""
    settings = ["data.num_clients=50", "model.name=linear", "sampler.cohort_size=8", "algorithm.name=scaffold"]
    settings += ["algorithm.num_steps=2", "algorithm.learning_rate=0.2", "run.rounds=3", "algorithm.weighting=examples"]
    finals = []
    for kind in ("auto", "disk"):
        config = load(None, [*settings, f"run.client_memory={kind}"])
        made = build(config)
        directory = tmp_path / kind
        state, _ = run(
            made.key, made.algorithm, made.params, made.data.train, 3, directory=directory, client_memory=kind,
            identity=config.identity(),
        )  # fmt: skip
        finals.append(jax.device_get(state.server))
        assert "client_memory" not in json.dumps(config.identity())
    assert same_bits(*finals) and (tmp_path / "disk" / "clients.mem").exists()
