"""Runs one job over several processes on JAX's own runtime: processes join the job, and agree on decisions and errors.

Every process runs the same program; process 0 alone reads the config, writes files and prints. A decision that depends
on wall time, files or signals is made by one process and sent to all. Otherwise the processes would run different
collectives. With one process, every function here returns its argument, or the result of the function that it is given.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from fedjax_sim.running import seconds
from fedjax_sim.running.processes import index as index, is_first as is_first, several as several
from fedjax_sim.running.shared_arrays import broadcast

T = TypeVar("T")
HEARTBEAT_SECONDS = 30  # a process without a heartbeat for so long counts as dead, and the runtime ends the others
START_SECONDS = 180  # timeout for all processes to join
SHUTDOWN_SECONDS = 60  # timeout for all processes to leave, which they agree on first
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
LAUNCHED = "FEDJAX_SIM_LAUNCHED"  # set by the launcher: standard input closes when the launcher ends
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class PeerFailed(RuntimeError):
    """Another process failed at a step that all processes take together; that process reports why."""

    code = 1  # the exit code of this process


# ---- joining


def initialize(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Joins the processes of a job; does nothing for a process on its own.

    Call it before JAX is used. Without arguments a SLURM step of several tasks is joined as SLURM describes it. When a
    process dies the others end within a minute, since a collective would wait for it forever. Resume the run to
    continue.

    Args:
      coordinator: HOST:PORT where process 0 listens. With a loopback host all processes are on this machine, whose
        cores are then divided among them.
      num_processes: the number of processes, at least 1.
      process_id: the number of this process, in [0, num_processes).

    Raises: ValueError unless all three are given and fit together.

    Guarantees:
      A process that dies ends the others (tests/running/test_distributed.py::test_a_dead_peer_ends_the_others).
      Options that do not fit together are refused
      (tests/running/test_distributed.py::test_wrong_options_are_refused).
      Processes of a machine share its cores without overlap
      (tests/running/test_distributed.py::test_processes_of_a_machine_share_its_cores).
    """
    options = {"--coordinator": coordinator, "--num-processes": num_processes, "--process-id": process_id}
    stated_options = {name: value for name, value in options.items() if value is not None}
    if stated_options and len(stated_options) < len(options):
        missing = ", ".join(name for name in options if name not in stated_options)
        _refuse(", ".join(options), "all three or none", list(stated_options), f"Add {missing}.")
    if stated_options:
        if not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", coordinator):
            _refuse("--coordinator", "HOST:PORT", coordinator)
        if num_processes < 1:
            _refuse("--num-processes", "an integer of at least 1", num_processes)
        if not 0 <= process_id < num_processes:
            _refuse("--process-id", f"an integer in [0, {num_processes - 1}]", process_id)
    elif not all(name in os.environ for name in SLURM):
        return
    _end_with_the_launcher()
    if (num_processes or int(os.environ["SLURM_NTASKS"])) == 1:
        return
    import jax

    from fedjax_sim.running.environment import prepare

    host, _, port = (coordinator or "").rpartition(":")
    is_local = host in LOOPBACK
    prepare(num_processes if is_local else 1)
    if is_local:
        _keep_to_own_cores(num_processes, process_id)
    # JAX's preemption service would swallow SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    timeouts = {
        "heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
        "initialization_timeout": START_SECONDS,
        "shutdown_timeout_seconds": SHUTDOWN_SECONDS,
    }
    if stated_options:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            coordinator_bind_address=f"{host}:{port}" if is_local else None,
            cluster_detection_method="deactivate",
            **timeouts,
        )
    else:
        jax.distributed.initialize(cluster_detection_method="slurm", **timeouts)
    _meet()


def _refuse(name: str, rule: str, value: Any, hint: str = "") -> None:
    """Raises ValueError for an option of `initialize`."""
    from fedjax_sim import validate  # imports JAX, which the launcher does without

    validate.fail(name, rule, value, hint)


def _keep_to_own_cores(number: int, index: int) -> None:
    """Pins this process to its share of the cores, where the system can, so that no two processes share a core."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        first, last = (i * len(cores) // number for i in (index, index + 1))
        os.sched_setaffinity(0, cores[first : max(last, first + 1)])


def _end_with_the_launcher() -> None:
    """Ends this process when its launcher is killed, which closes the launcher's end of our standard input."""
    if os.environ.pop(LAUNCHED, None) is None:
        return

    def end_when_input_closes() -> None:
        # Nothing is ever sent: reading returns only when the launcher's end is closed.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_when_input_closes, daemon=True).start()


def _meet() -> None:
    """Runs the first collectives, of processes and of devices, with standard output closed, because Gloo prints on it.

    Connections are made at the first collective. An error in them ends the job here and not in the first round.
    """
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from fedjax_sim import engine

    mesh = engine.device_mesh()
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    replicated = NamedSharding(mesh, PartitionSpec())
    sys.stdout.flush()
    # Gloo prints from C++: only replacing the file descriptor itself silences it.
    stdout_copy = os.dup(1)
    silent = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(silent, 1)
        gathered_numbers(index())
        ones = jax.make_array_from_process_local_data(split, np.ones(jax.local_device_count(), np.int32))
        jax.block_until_ready(jax.jit(lambda x: x.sum(), out_shardings=replicated)(ones))
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)
        os.close(silent)


# ---- agreeing


def gathered_numbers(*numbers: int) -> Any:
    """Gathers the numbers of every process: an int32 array [processes, numbers], the same on all of them."""
    import numpy as np

    own_numbers = np.array(numbers, np.int32)
    if not several():
        return own_numbers[None]
    from jax.experimental import multihost_utils

    with seconds.part("waiting"):
        return np.asarray(multihost_utils.process_allgather(own_numbers)).reshape(-1, len(numbers))


def agreed(call: Callable[[], T]) -> T:
    """Returns what `call` returns on this process; if it fails on one process, it fails on all.

    Raises: the error of `call`; PeerFailed if only other processes have an error.
    """
    if not several():
        return call()
    failure = result = None
    try:
        result = call()
    except BaseException as error:
        # Every kind of error is caught, since the others must learn of an interrupt too.
        failure = error
    # A collective: all processes meet here, whether their call failed or not.
    codes = gathered_numbers(0 if failure is None else exit_code(failure))[:, 0]
    if codes.any():
        first_to_fail = int(codes.nonzero()[0][0])
        if failure is None:
            failure = PeerFailed(f"process {first_to_fail} failed; it reports why")
        failure.reported_by = first_to_fail
        if isinstance(failure, PeerFailed):
            failure.code = int(codes[first_to_fail])
        raise failure
    return result


def by_first(call: Callable[[], T]) -> T | None:
    """Returns what `call` returns on process 0, which alone runs it; returns None on the others.

    Raises: the error of `call` on process 0, and PeerFailed elsewhere.
    """
    return agreed(lambda: call() if is_first() else None)


def from_first(call: Callable[[], T]) -> T:
    """Returns on every process what `call` returns on process 0; the result must be a JSON value."""
    if not several():
        return call()
    import numpy as np

    value = by_first(call)
    text = json.dumps(value).encode() if is_first() else b""
    # Collectives need equal shapes everywhere, so the length is sent before the text.
    size = int(gathered_numbers(len(text))[0, 0])
    text = broadcast(np.frombuffer(text.ljust(size), np.uint8) if is_first() else np.zeros(size, np.uint8))
    return value if is_first() else json.loads(text.tobytes())


def check_same(name: str, digest: str, hint: str) -> None:
    """Raises RuntimeError, on all processes, if they differ in something that must be the same.

    Args:
      name: what must be the same, for the error message.
      digest: its digest on this process, in hexadecimal.
      hint: what to do about a difference.
    """
    # Seven hexadecimal digits fit an int32.
    words = gathered_numbers(*(int(digest[i : i + 7], 16) for i in range(0, len(digest), 7)))
    differing_processes = [i for i, row in enumerate(words) if (row != words[0]).any()]
    if differing_processes:
        raise everywhere(
            RuntimeError(f"{name}: expected the same on all processes, got others on {differing_processes}. {hint}")
        )


# ---- failing


def exit_code(error: BaseException) -> int:
    """Returns the exit code for an error: 2 for wrong input, 130 for an interrupt, 1 for a run that failed."""
    if isinstance(error, PeerFailed):
        return error.code
    is_wrong_input = isinstance(error, (ValueError, TypeError, FileExistsError, FileNotFoundError))
    return 2 if is_wrong_input else 130 if isinstance(error, KeyboardInterrupt) else 1


def everywhere(error: BaseException) -> BaseException:
    """Marks an error as raised by all processes at the same place, so that process 0 alone reports it; returns it."""
    error.reported_by = 0
    return error


def reports(error: BaseException) -> bool:
    """Returns whether this process is the one that reports an error."""
    return not several() or getattr(error, "reported_by", index()) == index()


def lost_peer(error: BaseException) -> bool:
    """Returns whether an error says that another process died."""
    return several() and any(word in str(error) for word in ("Gloo", "NCCL", "coordination service", "heartbeat"))


def leave(error: BaseException) -> None:
    """Exits at once if this process failed alone.

    An orderly exit would wait for the other processes, which wait for this one in a collective.
    """
    if several() and not hasattr(error, "reported_by"):
        _exit(exit_code(error))


def _exit(code: int) -> NoReturn:
    """Ends this process without JAX's own exit, which waits for the other processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
