"""Joins the processes of a job on JAX's own runtime."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from functools import partial
from typing import Any, NoReturn

from fedjax_sim.running.processes import Processes, current

HEARTBEAT_SECONDS = 30  # a process without a heartbeat for so long counts as dead, and the runtime ends the others
START_SECONDS = 180  # timeout for all processes to join
SHUTDOWN_SECONDS = 60  # timeout for all processes to leave, which they agree on first
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
LAUNCHED = "FEDJAX_SIM_LAUNCHED"  # set by the launcher: standard input closes when the launcher ends
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def join(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> Processes:
    """Joins the processes of a job, and returns them; a process on its own joins none.

    Call it before JAX is used. Without arguments a SLURM step of several tasks is joined as SLURM describes it. When a
    process dies the others end within a minute, since a collective would wait for it forever. Resume the run to
    continue.

    Args:
      coordinator: HOST:PORT where process 0 listens. All three arguments are None for a SLURM step, or one process.
        With a loopback host all processes are on this machine, whose cores are then divided among them.
      num_processes: the number of processes, at least 1, or None.
      process_id: the number of this process, in [0, num_processes), or None.

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
    if coordinator is not None and num_processes is not None and process_id is not None:
        if not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", coordinator):
            _refuse("--coordinator", "HOST:PORT", coordinator)
        if num_processes < 1:
            _refuse("--num-processes", "an integer of at least 1", num_processes)
        if not 0 <= process_id < num_processes:
            _refuse("--process-id", f"an integer in [0, {num_processes - 1}]", process_id)
    elif stated_options:
        missing = ", ".join(name for name in options if name not in stated_options)
        _refuse(", ".join(options), "all three or none", list(stated_options), f"Add {missing}.")
    elif not all(name in os.environ for name in SLURM):
        return current()
    _end_with_the_launcher()
    if (num_processes or int(os.environ["SLURM_NTASKS"])) == 1:
        return current()
    import jax

    from fedjax_sim.running.environment import prepare

    host, _, port = (coordinator or "").rpartition(":")
    is_local = host in LOOPBACK
    if is_local:
        assert num_processes is not None and process_id is not None, "they are stated with the coordinator"
        prepare(num_processes)
        _keep_to_own_cores(num_processes, process_id)
    else:
        prepare(1)
    # JAX's preemption service would swallow SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    initialize = partial(
        jax.distributed.initialize,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        initialization_timeout=START_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )
    if stated_options:
        initialize(
            coordinator,
            num_processes,
            process_id,
            coordinator_bind_address=f"{host}:{port}" if is_local else None,
            cluster_detection_method="deactivate",
        )
    else:
        initialize(cluster_detection_method="slurm")
    processes = current()
    _meet(processes)
    return processes


def _refuse(name: str, rule: str, value: Any, hint: str = "") -> NoReturn:
    """Raises ValueError for an option of `join`."""
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


def _meet(processes: Processes) -> None:
    """Runs the first collectives, of processes and of devices, with standard output closed, because Gloo prints on it.

    Connections are made at the first collective. An error in them ends the job here and not in the first round.

    Args:
      processes: of this job, which have joined.
    """
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from fedjax_sim import engine

    mesh = engine.device_mesh()
    assert mesh is not None, "several processes have several devices"
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    replicated = NamedSharding(mesh, PartitionSpec())
    sys.stdout.flush()
    # Gloo prints from C++: only replacing the file descriptor itself silences it.
    stdout_copy = os.dup(1)
    silent = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(silent, 1)
        processes.gathered_numbers(processes.index)
        ones = jax.make_array_from_process_local_data(split, np.ones(jax.local_device_count(), np.int32))
        jax.block_until_ready(jax.jit(lambda x: x.sum(), out_shardings=replicated)(ones))
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)
        os.close(silent)
