"""The environment of a run: sets JAX up before its first use, and describes machine and versions."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import fedjax_sim

__all__ = [
    "environment",
    "host_threads",
    "matmul_precision",
    "numerics",
    "prepare",
    "use_compilation_cache",
    "versions",
]

MAX_CPU_DEVICES = 8
HOST_THREADS = 8  # of the thread pool that `prepare` requests: at least one for each device


def versions(*names: str) -> dict[str, str]:
    """Versions by distribution name: that of this package from its source, the others as they are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        try:
            found[name] = fedjax_sim.__version__ if name == "fedjax-sim" else version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def environment(command: str) -> dict[str, Any]:
    """The content of `env.json`; `command` is the command line that repeats the run."""
    import platform

    import jax

    return {
        "command": command,
        "versions": versions("fedjax-sim", "jax", "jaxlib", "optax", "flax", "numpy"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "devices": [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()],
        "processes": jax.process_count(),
        "cpu_count": _cores(),
        **numerics(),
        "random_generator": str(jax.config.jax_default_prng_impl),
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_threads() -> int | None:
    """The number of threads of the CPU backend's pool, part of a result's identity; None for other backends.

    XLA:CPU splits products over about a thousand rows, and sums of 10^5 numbers, by the size of its pool, so their last
    bits depend on it. The size is `NPROC`, which JAX reads when it starts, else the number of visible cores; at least
    one for each device.
    """
    import jax

    if jax.default_backend() != "cpu":
        return None
    asked = os.environ.get("NPROC", "")
    return max(int(asked) if asked.isdecimal() else _cores(), jax.local_device_count())


def matmul_precision() -> str:
    """The precision of matrix products in a run: JAX's setting if there is one, else "highest"."""
    import jax

    return str(jax.config.jax_default_matmul_precision or "highest")


def numerics() -> dict[str, Any]:
    """What random draws and last bits depend on besides program, data and versions: part of a run's identity, as JSON.

    Guarantees: a run does not continue under others, and a private run then draws other noise
    (tests/running/test_fingerprint.py::test_other_numerics_are_another_run).
    """
    import jax

    from fedjax_sim import engine

    return {
        "arithmetic": "fast" if engine.is_fast() else "reproducible",
        "backend": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "host_threads": host_threads(),
        "matmul_precision": matmul_precision(),
        "threefry_partitionable": bool(jax.config.jax_threefry_partitionable),
    }


def prepare(processes_here: int = 1) -> None:
    """Sets JAX up before its first use.

    One virtual CPU device per core (at most 8), a thread pool of the same size on every machine that only matrix
    products are split over (`engine.compiler_options`), full precision of them, and a private compilation cache.
    Settings that are made already, by `JAX_NUM_CPU_DEVICES`, `NPROC` or `JAX_COMPILATION_CACHE_DIR`, are kept. On Linux
    the process becomes a batch job to the scheduler: the pool may have more threads than there are cores, and each that
    woke up took a core from one that computes (two cores: a small CNN ran at 0.6 of its speed, an MLP at 0.85).
    `FEDJAX_SIM_CACHE=off` disables the cache. A cache holds programs that are run without a check, so a folder that
    others may write to is not used.

    Args:
      processes_here: processes on this machine, which divide its cores; each has at least one device.

    Guarantees: tests/command/test_app.py::test_compilation_cache_is_private; the same bits on one visible core and on
    two, and every thread of the pool a batch job (tests/laws/test_devices.py::test_visible_cores).
    """
    import jax

    from fedjax_sim.engine.platform import SERIAL_FLAG

    jax.config.update("jax_default_matmul_precision", "highest")
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # where a sandbox forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # threads that start later inherit it
    asked = jax.config.jax_num_cpu_devices
    devices = asked if asked >= 1 else max(1, min(_cores() // processes_here, MAX_CPU_DEVICES))
    try:
        jax.config.update("jax_num_cpu_devices", devices + 1)  # a change is refused if JAX is in use already
        jax.config.update("jax_num_cpu_devices", devices)
        os.environ.setdefault("NPROC", str(HOST_THREADS))  # read when the backend starts, as the flags are
        flags = os.environ.get("XLA_FLAGS", "").split()
        os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*flags, SERIAL_FLAG]))
    except RuntimeError:
        pass
    use_compilation_cache()


def use_compilation_cache() -> None:
    """Keeps compiled programs in a private folder of the user's cache, unless JAX has a folder already.

    `FEDJAX_SIM_CACHE=off` opts out. A cache holds programs that are run without a check, so a folder that others may
    write to is not used.

    Guarantees: tests/command/test_app.py::test_compilation_cache_is_private; a run from Python finds the programs of
    the one before (tests/running/test_loop.py::test_programs_are_kept).
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    if jax.config.jax_compilation_cache_dir is not None or os.environ.get("FEDJAX_SIM_CACHE") == "off":
        return
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "fedjax_sim" / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except (OSError, RuntimeError):
        return
    if (status.st_mode & 0o077) == 0 and status.st_uid == getattr(os, "getuid", lambda: status.st_uid)():
        compilation_cache.reset_cache()  # what compiled before now may have settled that there is none
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
