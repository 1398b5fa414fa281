"""Several processes of `fedjax-sim` on this machine, started, watched and ended together."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from fedjax_sim.running.distributed import LAUNCHED

__all__ = ["launch_processes"]

POLL_SECONDS = 0.05
LEAVE_SECONDS = 5.0  # for the others to end by themselves after one has failed: all may fail in the same way
TERMINATE_SECONDS = 5.0  # from SIGTERM to SIGKILL
INTERRUPT_SECONDS = 600.0  # for a round to end and its checkpoint to be written, after the first Ctrl-C
TAIL_BYTES, TAIL_LINES = 8192, 20  # of a failed process's output that are shown


class _Child(NamedTuple):
    process: subprocess.Popen
    output: IO[bytes] | None  # None for process 0, which prints to the terminal


def launch_processes(arguments: Sequence[str], num_processes: int) -> int:
    """Runs `fedjax-sim ARGUMENTS` in `num_processes` processes that share this machine.

    Process 0 prints to the terminal; the output of the others is shown when they fail. SIGINT and SIGTERM are passed
    on. If one process dies the others are ended within seconds; if the launcher itself is killed, they end too.

    Returns: the exit code: that of the processes where they agree, 1 where one died, 128 + the number of a signal.

    Guarantees: tests/running/test_distributed.py::test_killing_one_ends_the_other_and_one_goes_on,
    ::test_a_bad_config_is_told_once, ::test_a_killed_launcher_leaves_nobody.
    """
    arguments = list(arguments)
    signals: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    children: list[_Child] = []
    try:
        for number in before:
            signal.signal(number, lambda number, frame: signals.append(number))
        address = f"127.0.0.1:{_free_port()}"
        for i in range(num_processes):
            children.append(_start(arguments, address, num_processes, i))
        died = _watch(children, signals)
        codes = [child.process.returncode for child in children]
        if signal.SIGTERM in signals:
            return 128 + signal.SIGTERM
        if died is None:
            return 0
        alike = codes[0] > 0 and len(set(codes)) == 1  # all refused or failed together: process 0 has reported why
        outputs = [(i, _tail(children[i])) for i in (range(num_processes) if alike else [died])]
        for words in dict.fromkeys("".join(f"[{i}] {line}\n" for line in lines) for i, lines in outputs):
            sys.stderr.write(words)
        if alike:
            return codes[0]
        sys.stderr.write(_failure(died, codes[died], num_processes, arguments))
        return 1
    finally:
        _end(children)
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(arguments: list[str], address: str, num_processes: int, i: int) -> _Child:
    environment = os.environ | {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(num_processes),
        "JAX_PROCESS_ID": str(i),
        LAUNCHED: "1",
    }
    share = _accelerators() // num_processes
    if share:  # JAX itself refuses more processes than accelerators
        environment.setdefault("JAX_LOCAL_DEVICE_IDS", ",".join(str(i * share + k) for k in range(share)))
    output = tempfile.TemporaryFile() if i else None
    process = subprocess.Popen(
        [sys.executable, "-m", "fedjax_sim", *arguments],
        env=environment,
        stdin=subprocess.PIPE,  # closed by the kernel when this launcher ends, which ends the child
        stdout=output,
        stderr=output,
        start_new_session=True,  # so that a terminal's Ctrl-C reaches it once, passed on by the launcher
    )
    return _Child(process, output)


def _accelerators() -> int:
    """NVIDIA devices that JAX may use."""
    if os.environ.get("JAX_PLATFORMS", "cuda").split(",")[0] not in ("cuda", "gpu"):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _watch(children: list[_Child], signals: list[int]) -> int | None:
    """Waits until all have ended, or one has failed and the others' time is over; the first that failed, or None."""
    died = None
    deadline = float("inf")
    passed_on = 0
    while True:
        codes = [child.process.poll() for child in children]
        failed = [i for i, code in enumerate(codes) if code not in (None, 0)]
        if died is None and failed:
            died = min(failed, key=lambda i: codes[i] > 0)  # one that died by a signal first: the others react to it
            deadline = min(deadline, time.monotonic() + LEAVE_SECONDS)
        if None not in codes or time.monotonic() > deadline:
            return died
        for number in signals[passed_on:]:
            for child in children:
                if child.process.poll() is None:
                    child.process.send_signal(number)
            passed_on += 1
            wait = INTERRUPT_SECONDS if number == signal.SIGINT and passed_on == 1 else TERMINATE_SECONDS
            deadline = min(deadline, time.monotonic() + wait)
        time.sleep(POLL_SECONDS)


def _end(children: list[_Child]) -> None:
    """Ends the processes that still run: SIGTERM, then SIGKILL."""
    for child in children:
        if child.process.poll() is None:
            child.process.terminate()
    deadline = time.monotonic() + TERMINATE_SECONDS
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        child.process.stdin.close()
        if child.output:
            child.output.close()


def _tail(child: _Child) -> list[str]:
    """The last lines of a process's output."""
    if child.output is None:
        return []
    child.output.seek(max(0, child.output.seek(0, os.SEEK_END) - TAIL_BYTES))
    return child.output.read().decode(errors="replace").splitlines()[-TAIL_LINES:]


def _failure(died: int, code: int, num_processes: int, arguments: list[str]) -> str:
    """How a process ended, and the command that continues the run."""
    try:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    except ValueError:
        how = f"was killed by signal {-code}"
    words = f"Process {died} of {num_processes} {how}; the others were ended."
    if arguments[:1] != ["run"]:
        return words + "\n"
    again = ["fedjax-sim", "launch", "-n", str(num_processes), "--", "run", "--resume"]
    for i, word in enumerate(arguments):
        if word == "--out" and i + 1 < len(arguments):
            again += ["--out", arguments[i + 1]]
        elif word.startswith("--out="):
            again += ["--out", word.removeprefix("--out=")]
    return f"{words} Continue from the last checkpoint with: {shlex.join(again)}\n"
