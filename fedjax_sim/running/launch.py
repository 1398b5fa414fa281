"""Starts several processes of `fedjax-sim` on this machine, watches them, and ends them together."""

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

POLL_SECONDS = 0.05
# After a process has failed the others get this time to end by themselves: all may fail in the same way.
LEAVE_SECONDS = 5.0
TERMINATE_SECONDS = 5.0  # from SIGTERM to SIGKILL
# After the first Ctrl-C a round must end, and its checkpoint must be written.
INTERRUPT_SECONDS = 600.0
TAIL_BYTES, TAIL_LINES = 8192, 20  # of a failed process's output that are shown


class _Child(NamedTuple):
    """A process of the job, and where its output goes."""

    process: subprocess.Popen
    output: IO[bytes] | None  # None for process 0, which prints to the terminal


def launch_processes(arguments: Sequence[str], num_processes: int) -> int:
    """Runs `fedjax-sim ARGUMENTS` in `num_processes` processes that share this machine.

    Process 0 prints to the terminal; the output of the others is shown when they fail. SIGINT and SIGTERM are passed
    on. If one process dies the others are ended within seconds; if the launcher itself is killed, they end too.

    Args:
      arguments: the command line after `fedjax-sim`, such as ["run", "--out", "folder"].
      num_processes: how many processes are started.

    Returns: the exit code of the processes where they agree, 1 where a process died, 128 + the number of a signal.

    Guarantees:
      If a process dies the others end, and fewer processes resume the run with the same bits
      (tests/running/test_distributed.py::test_killing_one_ends_the_other_and_one_goes_on).
      A wrong config is reported once (tests/running/test_distributed.py::test_a_bad_config_is_told_once).
      If the launcher is killed, no process is left
      (tests/running/test_distributed.py::test_a_killed_launcher_leaves_nobody).
    """
    arguments = list(arguments)
    signals: list[int] = []
    previous_handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    children: list[_Child] = []
    try:
        for number in previous_handlers:
            signal.signal(number, lambda number, frame: signals.append(number))
        address = f"127.0.0.1:{_free_port()}"
        for i in range(num_processes):
            children.append(_start(arguments, address, num_processes, i))
        first_to_fail = _watch(children, signals)
        codes = [child.process.returncode for child in children]
        if signal.SIGTERM in signals:
            return 128 + signal.SIGTERM
        if first_to_fail is None:
            return 0
        # All were refused, or failed together: process 0 has reported why.
        all_failed_alike = codes[0] > 0 and len(set(codes)) == 1
        outputs = [(i, _tail(children[i])) for i in (range(num_processes) if all_failed_alike else [first_to_fail])]
        for words in dict.fromkeys("".join(f"[{i}] {line}\n" for line in lines) for i, lines in outputs):
            sys.stderr.write(words)
        if all_failed_alike:
            return codes[0]
        sys.stderr.write(_failure(first_to_fail, codes[first_to_fail], num_processes, arguments))
        return 1
    finally:
        _end(children)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _free_port() -> int:
    """Returns a TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(arguments: list[str], address: str, num_processes: int, i: int) -> _Child:
    """Starts process i of a job.

    The accelerators of this machine are shared out in order: of A accelerators and P processes, process i gets the
    numbers i * floor(A / P) to (i + 1) * floor(A / P) - 1, unless `JAX_LOCAL_DEVICE_IDS` is set already.

    Args:
      arguments: the command line after `fedjax-sim`.
      address: "HOST:PORT", where process 0 listens.
      num_processes: P, how many processes the job has.
      i: the number of this process, in [0, P).
    """
    environment = os.environ | {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(num_processes),
        "JAX_PROCESS_ID": str(i),
        LAUNCHED: "1",
    }
    num_own_devices = _accelerators() // num_processes
    # JAX itself refuses more processes than accelerators.
    if num_own_devices:
        own_devices = (str(i * num_own_devices + k) for k in range(num_own_devices))
        environment.setdefault("JAX_LOCAL_DEVICE_IDS", ",".join(own_devices))
    output = tempfile.TemporaryFile() if i else None
    process = subprocess.Popen(
        [sys.executable, "-m", "fedjax_sim", *arguments],
        env=environment,
        stdin=subprocess.PIPE,  # the kernel closes it when this launcher ends, which ends the child
        stdout=output,
        stderr=output,
        start_new_session=True,  # a terminal's Ctrl-C then reaches it once, passed on by the launcher
    )
    return _Child(process, output)


def _accelerators() -> int:
    """Returns the number of NVIDIA devices that JAX may use."""
    if os.environ.get("JAX_PLATFORMS", "cuda").split(",")[0] not in ("cuda", "gpu"):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _watch(children: list[_Child], signals: list[int]) -> int | None:
    """Waits until all processes have ended, or one has failed and the others' time is over.

    Args:
      children: the processes.
      signals: numbers of signals that the launcher received, in their order; the list grows while this waits.

    Returns: the index of the process that failed first, or None.
    """
    first_to_fail = None
    deadline = float("inf")
    num_passed_on = 0
    while True:
        codes = [child.process.poll() for child in children]
        failed = {i: code for i, code in enumerate(codes) if code}
        if first_to_fail is None and failed:
            # A process that a signal killed counts as the first to fail, since the others react to its death.
            first_to_fail = min(failed, key=lambda i: failed[i] > 0)
            deadline = min(deadline, time.monotonic() + LEAVE_SECONDS)
        if None not in codes or time.monotonic() > deadline:
            return first_to_fail
        for number in signals[num_passed_on:]:
            for child in children:
                if child.process.poll() is None:
                    child.process.send_signal(number)
            num_passed_on += 1
            is_first_interrupt = number == signal.SIGINT and num_passed_on == 1
            patience_seconds = INTERRUPT_SECONDS if is_first_interrupt else TERMINATE_SECONDS
            deadline = min(deadline, time.monotonic() + patience_seconds)
        time.sleep(POLL_SECONDS)


def _end(children: list[_Child]) -> None:
    """Ends the processes that still run: SIGTERM, then SIGKILL for those that run `TERMINATE_SECONDS` later.

    Args:
      children: all processes that were started; files of their output are closed, too.
    """
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
        assert child.process.stdin is not None, "`_start` opens a pipe"
        child.process.stdin.close()
        if child.output:
            child.output.close()


def _tail(child: _Child) -> list[str]:
    """Returns the last lines of a process's output."""
    if child.output is None:
        return []
    child.output.seek(max(0, child.output.seek(0, os.SEEK_END) - TAIL_BYTES))
    return child.output.read().decode(errors="replace").splitlines()[-TAIL_LINES:]


def _failure(died: int, code: int, num_processes: int, arguments: list[str]) -> str:
    """Returns how a process ended, and the command that continues the run, as text.

    Args:
      died: the number of the process that failed first, in [0, num_processes).
      code: its exit code if it is > 0; if it is < 0, minus the number of the signal that killed it.
      num_processes: how many processes the job has.
      arguments: the command line after `fedjax-sim`. A command is named only for a run, since only runs continue so.

    Returns: one line, with its end.
    """
    try:
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    except ValueError:
        ending = f"was killed by signal {-code}"
    words = f"Process {died} of {num_processes} {ending}; the others were ended."
    if arguments[:1] != ["run"]:
        return words + "\n"
    resume_command = ["fedjax-sim", "launch", "-n", str(num_processes), "--", "run", "--resume"]
    for i, word in enumerate(arguments):
        if word == "--out" and i + 1 < len(arguments):
            resume_command += ["--out", arguments[i + 1]]
        elif word.startswith("--out="):
            resume_command += ["--out", word.removeprefix("--out=")]
    return f"{words} Continue from the last checkpoint with: {shlex.join(resume_command)}\n"
