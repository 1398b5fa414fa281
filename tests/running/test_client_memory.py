"""Runs of stateful algorithms: the kind of client memory changes nothing, and neither does a kill."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import engine, sampling
from fedjax_sim.algorithms import scaffold
from fedjax_sim.config.build import build
from fedjax_sim.config.document import load
from fedjax_sim.population import from_clients
from fedjax_sim.running import checkpoint
from fedjax_sim.running.loop import run

pytestmark = pytest.mark.optimised

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
    work = {"num_steps": 2, "batch_size": 2, "weighting": "uniform", "mesh": mesh}
    return scaffold(loss_fn, sampler, optax.sgd(0.05), **work), START, from_clients(clients)


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


@pytest.mark.full
@pytest.mark.parametrize("kind, stop", [("device", 13), ("disk", 6)])
def test_resume_gives_the_same_bits(parts, reference, tmp_path, kind, stop):
    """Fault: client memory forgotten, or ahead of the model, after a resume; rows on disk in the order of the devices
    that wrote them. Rounds past the commit were on disk."""
    options = {"directory": tmp_path, "client_memory": kind, "evaluate_every": 3}

    def dies(round, state, record):
        if round > stop:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run(KEY, *parts, ROUNDS, callbacks=[dies], checkpoint_every=4, **options)
    then = problem("all") if kind == "disk" else parts
    state, history = run(KEY, *then, ROUNDS, resume=True, **options | {"client_memory": "auto"})
    assert isinstance(state.clients, engine.Disk) == (kind == "disk") == (tmp_path / "clients.mem").exists()
    assert same_bits(everything(state), reference[0]) and history.records == reference[1]


DISK = pytest.param("disk", None, "all", marks=pytest.mark.full)  # the resume above is such a one


@pytest.mark.full
@pytest.mark.parametrize("kind, first, then", [("device", "all", None), DISK])
def test_resume_on_another_number_of_devices(parts, reference, tmp_path, first, then, kind):
    """Fault: rows in the order or padding of the devices that wrote them."""
    options = {"directory": tmp_path, "client_memory": kind}
    run(KEY, *problem(first), 7, **options)
    state, _ = run(KEY, *problem(then), ROUNDS, resume=True, **options)
    assert jax.device_count() > 1 and same_bits(everything(state), reference[0])


@pytest.fixture(scope="module")
def fifteen_rounds(parts, tmp_path_factory):
    """The folder of a run with memory on disk, for copies: what calls the host is compiled anew in every run."""
    folder = tmp_path_factory.mktemp("disk") / "run"
    run(KEY, *parts, 15, directory=folder, client_memory="disk", checkpoint_every=4)
    return folder


@pytest.mark.full
def test_the_previous_checkpoint_has_its_memory(parts, reference, fifteen_rounds, tmp_path):
    """Fault: a journal dropped while its checkpoint is kept."""
    copy = shutil.copytree(fifteen_rounds, tmp_path / "run")
    options = {"directory": copy, "client_memory": "disk", "checkpoint_every": 4}
    newest = checkpoint.latest(copy / "checkpoints")
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(checkpoint.CheckpointError, match="truncated"):
        run(KEY, *parts, ROUNDS, resume=True, **options)
    with pytest.warns(RuntimeWarning, match="Continuing from round_00000012"):
        state, history = run(KEY, *parts, ROUNDS, resume=True, allow_previous=True, **options)
    assert same_bits(everything(state), reference[0]) and history.records == reference[1]


@pytest.mark.full
@pytest.mark.optimised(False)
def test_what_the_folder_holds_is_respected(parts, fifteen_rounds, tmp_path):
    """Fault: memory of another run or kind taken for this one's, a damaged row that trains on."""
    options = {"directory": shutil.copytree(fifteen_rounds, tmp_path / "run"), "client_memory": "disk"}
    (tmp_path / "other").mkdir()
    with engine.client_memory("disk", tmp_path / "other"):
        ((file, _),) = engine.memory_files(parts[0].init(KEY, *parts[1:]))
    file.create()
    memory, other = (tmp_path / name / "clients.mem" for name in ("run", "other"))
    own = memory.read_bytes()
    with pytest.raises(checkpoint.CheckpointError, match="does not fit this run"):
        run(KEY, *parts, 40, resume=True, **options | {"client_memory": "device"})
    memory.write_bytes(other.read_bytes())
    with pytest.raises(engine.MemoryFileError, match="of this run, got another run's"):
        run(KEY, *parts, 40, resume=True, **options)
    memory.write_bytes(own[:-100])
    with pytest.raises(engine.MemoryFileError, match=r"expected .* bytes"):
        run(KEY, *parts, 40, resume=True, **options)
    memory.write_bytes(own[:4096] + bytes(255 - x for x in own[4096:]))
    with pytest.raises(engine.MemoryFileError, match=r"checksum of client \d+ does not match"):
        run(KEY, *parts, 40, resume=True, **options)


PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
from tests import conftest
from tests.running import test_client_memory as here
state, history = here.run(
    here.KEY, *here.problem(), 60, directory=sys.argv[1], resume=sys.argv[2] == "resume", client_memory="disk",
    evaluate_every=3, checkpoint_every=7, callbacks=[lambda *a: time.sleep(0.01)],
)
print(here.numbers(state))
"""


def numbers(state):
    return [x.tolist() for x in jax.tree.leaves(everything(state))]


@pytest.mark.full
def test_kill_and_resume_with_memory_on_disk(parts, tmp_path):
    """Fault: rows overwritten whose old values a resume needs, or dealt out by the devices that wrote them.

    Killed twice, at moments of the clock's choice, on another number of devices at each start.
    """
    code = PROGRAM.format(root=str(pathlib.Path(__file__).parents[2]))

    def start(directory, mode, devices):
        command, env = [sys.executable, "-c", code, directory, mode], os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)

    log = tmp_path / "victim" / "metrics.jsonl"
    for mode, rounds, devices in (("fresh", 11, 1), ("resume", 29, 3)):
        victim, deadline = start(tmp_path / "victim", mode, devices), time.monotonic() + 120
        while time.monotonic() < deadline and not (log.exists() and log.read_text().count("\n") >= rounds):
            time.sleep(0.003)
        os.kill(victim.pid, signal.SIGKILL)
        victim.communicate()
        assert rounds <= log.read_text().count("\n") < 60
    resumed, _ = start(tmp_path / "victim", "resume", 1).communicate()
    whole, _ = run(KEY, *parts, 60, directory=tmp_path / "whole", client_memory="device")
    assert jax.device_count() > 1 and resumed == f"{numbers(whole)}\n"
    assert log.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


@pytest.mark.full
@pytest.mark.optimised(False)
def test_from_a_config(tmp_path):
    """Fault: an option that is part of a run's identity although it changes no bit; a recipe that no config reaches."""
    settings = ["data.name=mean_estimation", "data.num_clients=50", "model.name=linear", "sampler.cohort_size=8"]
    settings += ["algorithm.name=scaffold", "algorithm.num_steps=1", "client_optimizer.learning_rate=0.2"]
    settings += ["algorithm.weighting=examples", "run.rounds=3", "run.devices=1"]
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
