"""Several processes: the bits of one, and an end for all when one dies. Real processes, real signals."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedjax_sim.command import app
from fedjax_sim.running import checkpoint, distributed
from fedjax_sim.running.checkpoint_format import read_file
from fedjax_sim.running.processes import Processes, current
from tests import compiler

pytestmark = pytest.mark.optimised(False)  # bits that are compared here are those of one program on one device or more

ROOT = Path(__file__).parents[2]
TINY = ["data.num_clients=200", "data.held_out_clients=5", "sampler.cohort_size=20", "model.name=logistic"]
TINY += ["algorithm.num_steps=1", "run.evaluate_every=4", "run.checkpoint_every=3", "run.progress=false"]
ENDLESS = "run.rounds=1000000"
MINUTE = 60


def words(*arguments, settings=()):
    return [*map(str, arguments), *(word for text in settings for word in ("--set", text))]


def call(*arguments, **options):
    return CliRunner().invoke(app.app, words(*arguments, **options))


@pytest.fixture(autouse=True, scope="module")
def environment(request):
    """Nothing in the user's cache; here the tests' own serves. Processes compile as this one does."""
    quick = {} if request.config.getoption("--optimised") else compiler.known()
    flags = [os.environ.get("XLA_FLAGS", ""), *(f"--{name}={value}" for name, value in quick.items())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDJAX_SIM_CACHE", "off")
        patch.setenv("XLA_FLAGS", " ".join(flags))
        yield


@contextlib.contextmanager
def started(*arguments, environment=None, **options):
    """A process of the command line; it and all that it started are killed at the end, whatever happens."""
    own = {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1", "FEDJAX_SIM_CACHE": "off"}
    process = subprocess.Popen(
        [sys.executable, "-m", "fedjax_sim", *words(*arguments, **options)],
        env=os.environ | own | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen = set()
    process.children = lambda: seen.update(children(process.pid)) or sorted(seen)
    try:
        yield process
    finally:
        process.children()
        for pid in [process.pid, *seen]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def processes():
    """(process id, its parent's, its state) of each process of this machine, by id."""
    if os.path.isdir("/proc/self"):
        rows = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                state, parent = path.read_text().rpartition(")")[2].split()[:2]
                rows.append((int(path.parent.name), int(parent), state))
        return sorted(rows)
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,state="], capture_output=True, text=True, check=True).stdout
    return sorted((int(pid), int(parent), state) for pid, parent, state in map(str.split, listed.splitlines()))


def children(pid):
    """Process ids of the children; process 0 of a job was started first."""
    return [child for child, parent, _ in processes() if parent == pid]


def alive(pid):
    return any(found == pid and not state.startswith("Z") for found, _, state in processes())


def until(condition, seconds=5 * MINUTE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def rounds_logged(folder):
    path = folder / "metrics.jsonl"
    return max(0, path.read_text().count("\n") - 1) if path.exists() else 0  # the first is round 0


def state_bytes(folder):
    header, payload = read_file(checkpoint.latest(folder / "checkpoints"))
    return header["leaves"], header["meta"]["round"], payload.tobytes()


def assert_same(folder, other):
    assert (folder / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    assert state_bytes(folder) == state_bytes(other)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """An uninterrupted run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    result = call("run", "--out", folder, "--quiet", settings=[*TINY, "run.rounds=12"])
    assert result.exit_code == 0, result.output
    return folder


def test_two_processes_give_the_bits_of_one(alone, tmp_path):
    """Fault: a sum, key, evaluation or log that knows how many processes there are; a second writer."""
    two = tmp_path / "two"
    with started("launch", "-n", 2, "--", "run", "--out", two, settings=[*TINY, "run.rounds=12"]) as job:
        said, errors = job.communicate(timeout=3 * MINUTE)
    assert job.returncode == 0, errors
    assert_same(two, alone)
    assert (two / "by_client.csv").read_bytes() == (alone / "by_client.csv").read_bytes()
    assert '"processes": 2' in (two / "env.json").read_text()
    assert {path.name for path in two.iterdir()} == {path.name for path in alone.iterdir()}
    assert said.count("test accuracy") == 1 and "Gloo" not in said, said


@pytest.mark.full
def test_a_run_of_one_process_goes_on_with_two(alone, tmp_path):
    """Fault: a checkpoint that fits the number of processes that wrote it."""
    folder = tmp_path / "run"
    assert call("run", "--out", folder, "--quiet", settings=[*TINY, "run.rounds=8"]).exit_code == 0
    command = words("run", "--resume", "--out", folder, "--quiet", settings=["run.rounds=12"])
    with started("launch", "-n", 2, "--", *command) as job:
        said, errors = job.communicate(timeout=3 * MINUTE)
    assert (job.returncode, said) == (0, ""), errors
    assert_same(folder, alone)


@pytest.mark.full
def test_killing_one_ends_the_other_and_one_goes_on(tmp_path):
    """Fault: a survivor that waits for the dead for ever; a resume on fewer processes with other bits."""
    folder = tmp_path / "run"
    with started("launch", "-n", 2, "--", "run", "--out", folder, settings=[*TINY, ENDLESS]) as job:
        until(lambda: rounds_logged(folder) >= 7)
        os.kill(job.children()[1], signal.SIGKILL)
        killed = time.monotonic()
        _, errors = job.communicate(timeout=MINUTE)
        assert time.monotonic() - killed < MINUTE / 2
        assert job.returncode == 1, errors
        assert "Process 1 of 2 was killed by SIGKILL" in errors and f"--resume --out {folder}" in errors
        until(lambda: not any(map(alive, job.children())), 5)
    rounds = f"run.rounds={state_bytes(folder)[1] + 5}"
    again = call("run", "--resume", "--out", folder, "--quiet", settings=[rounds])
    assert again.exit_code == 0, again.output
    whole = tmp_path / "whole"
    assert call("run", "--out", whole, "--quiet", settings=[*TINY, rounds]).exit_code == 0
    assert_same(folder, whole)


@pytest.mark.full
def test_interrupt_is_passed_on(tmp_path):
    """Fault: Ctrl-C that stops the processes in different rounds, so that they wait for one another."""
    folder = tmp_path / "run"
    with started("launch", "-n", 2, "--", "run", "--out", folder, settings=[*TINY, ENDLESS]) as job:
        until(lambda: rounds_logged(folder) >= 4)
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=MINUTE)
    assert job.returncode == 130 and errors.startswith("Interrupted. Round "), errors
    assert errors.count("\n") == 1 and state_bytes(folder)[1] == rounds_logged(folder)


FINISHED = pytest.param([], "It holds metrics.jsonl", marks=pytest.mark.full)


@pytest.mark.full
@pytest.mark.parametrize("settings, told", [(["run.rounds=0"], "run.rounds: expected"), FINISHED])
def test_a_bad_config_is_told_once(alone, settings, told):
    """Fault: one message a process, or a process that waits for those who refused."""
    with started("launch", "-n", 2, "--", *words("run", "--out", alone, settings=[*TINY, *settings])) as job:
        said, errors = job.communicate(timeout=MINUTE)
    assert (job.returncode, said) == (2, "") and errors.count(told) == 1 and errors.count("\n") == 1, errors


def test_a_killed_launcher_leaves_nobody(tmp_path):
    """Fault: orphans that train on."""
    with started("launch", "-n", 2, "--", "run", "--out", tmp_path / "run", settings=[*TINY, ENDLESS]) as job:
        until(lambda: len(job.children()) == 2)
        job.kill()
        until(lambda: not any(map(alive, job.children())), MINUTE)


@contextlib.contextmanager
def joined(folder):
    """Two processes without a launcher, as a cluster starts them, some rounds into a run; stops both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    options = ["--out", folder, "--coordinator", address, "--num-processes", 2, "--process-id"]
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(started("run", *options, i, settings=[*TINY, ENDLESS])) for i in range(2)]
        until(lambda: rounds_logged(folder) >= 4)
        yield jobs


def ends_with(jobs, dead, number):
    jobs[dead].send_signal(number)
    _, errors = jobs[1 - dead].communicate(timeout=MINUTE)
    assert jobs[1 - dead].returncode not in (0, None), errors


@pytest.mark.full
def test_a_dead_peer_ends_the_others(tmp_path):
    """Fault: a job on a cluster that burns its allocation after one of its processes died."""
    with joined(tmp_path / "run") as jobs:
        ends_with(jobs, 1, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_silent_peer_ends_the_others(tmp_path, dead, number):
    """Fault: only a closed connection counts as death, so that a lost machine or a hung process is waited for."""
    with joined(tmp_path / "run") as jobs:
        ends_with(jobs, dead, number)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("127.0.0.1:1", None, None), "Add --num-processes, --process-id"),
        ((None, 2, 0), "Add --coordinator"),
        (("127.0.0.1", 2, 0), "--coordinator: expected HOST:PORT"),
        (("host:1;ls", 2, 0), "--coordinator: expected HOST:PORT"),
        (("127.0.0.1:1", 0, 0), "--num-processes: expected"),
        (("127.0.0.1:1", 2, 2), "--process-id: expected"),
        (("127.0.0.1:1", 2, -1), "--process-id: expected"),
    ],
)
def test_wrong_options_are_refused(options, told):
    """Fault: minutes of waiting for a process that cannot come."""
    with pytest.raises(ValueError, match=told):
        distributed.join(*options)


@pytest.mark.parametrize("cores, number", [({0, 1}, 2), ({0, 1, 2, 3, 4, 5, 6}, 3), ({2, 5}, 2), ({3}, 2), ({0, 1}, 5)])
def test_processes_of_a_machine_share_its_cores(monkeypatch, cores, number):
    """Every core is somebody's, and nobody's twice unless there are too few. Fails where all take all of them."""
    held = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, share: held.append(set(share)), raising=False)
    for index in range(number):
        distributed._keep_to_own_cores(number, index)
    assert set().union(*held) == cores and all(held)
    assert sum(map(len, held)) == max(len(cores), number)


def test_one_process_needs_nothing(monkeypatch):
    """Fault: a runtime started for nobody; a batch script outside of srun that waits for its other tasks."""
    alone = Processes()
    assert distributed.join("127.0.0.1:1", 1, 0) == alone
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert distributed.join() == current() == alone
