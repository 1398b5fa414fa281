"""Sets JAX up before its first use, and describes the machine and the versions of a run."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from pathlib import Path
from typing import Any

import fedjax_sim

MAX_CPU_DEVICES = 8
# Threads of the pool that `prepare` requests: at least one for each device.
HOST_THREADS = 8
# Distributions whose versions `env.json` has.
DESCRIBED = ("fedjax-sim", "jax", "jaxlib", "optax", "flax", "numpy")


def versions(*names: str) -> dict[str, str]:
    """Returns versions by distribution name: of this package from its source, of the others as they are installed."""
    from importlib.metadata import PackageNotFoundError, version

    version_by_name = {}
    for name in names:
        try:
            version_by_name[name] = fedjax_sim.__version__ if name == "fedjax-sim" else version(name)
        except PackageNotFoundError:
            version_by_name[name] = "not installed"
    return version_by_name


def environment(command: str) -> dict[str, Any]:
    """Returns the content of `env.json`; `command` is the command line that repeats the run.

    Args:
      command: for a shell.
    """
    import platform

    import jax

    return {
        "command": command,
        "versions": versions(*DESCRIBED),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "devices": [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()],
        "processes": jax.process_count(),
        "cpu_count": _cores(),
        **numerics(),
        "random_generator": str(jax.config.values["jax_default_prng_impl"]),
    }


def _cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_threads() -> int | None:
    """Returns the number of threads of the CPU backend's pool, a part of a result's identity; None for other backends.

    XLA:CPU splits products over about a thousand rows, and sums of 10^5 numbers, by the size of its pool. So the last
    bits of these numbers depend on the size. The size is `NPROC`, which JAX reads when it starts, or else the number of
    visible cores. The pool has at least one thread for each device.
    """
    import jax

    if jax.default_backend() != "cpu":
        return None
    stated = os.environ.get("NPROC", "")
    return max(int(stated) if stated.isdecimal() else _cores(), jax.local_device_count())


def matmul_precision() -> str:
    """Returns the precision of matrix products in a run: JAX's setting if there is one, else "highest"."""
    import jax

    return str(jax.config.values["jax_default_matmul_precision"] or "highest")


def numerics() -> dict[str, Any]:
    """Returns the settings, besides program, data and versions, that random draws and last bits depend on.

    They are a part of a run's identity, as JSON.

    Guarantees: a run does not continue under other settings, and a private run then draws other noise
    (tests/running/test_fingerprint.py::test_other_numerics_are_another_run).
    """
    import jax

    from fedjax_sim.engine.arithmetic.mode import is_fast

    return {
        "arithmetic": "fast" if is_fast() else "reproducible",
        "backend": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "host_threads": host_threads(),
        "matmul_precision": matmul_precision(),
        "threefry_partitionable": bool(jax.config.values["jax_threefry_partitionable"]),
    }


def prepare(processes_here: int = 1) -> None:
    """Sets JAX up before its first use.

    JAX gets one virtual CPU device per core (at most 8), matrix products in full precision, and a private compilation
    cache. It also gets a thread pool of the same size on every machine, over which only matrix products are split
    (`engine.compiler_options`). Settings that are made already, by `JAX_DEFAULT_MATMUL_PRECISION`,
    `JAX_NUM_CPU_DEVICES`, `NPROC` or `JAX_COMPILATION_CACHE_DIR`, are kept. `FEDJAX_SIM_CACHE=off` disables the cache.
    A cache holds programs that are run without a check, so a folder that others may write to is not used.

    On Linux the scheduler treats the process as a batch job. The pool may have more threads than there are cores, and
    each thread that woke up took a core from a thread that computes. On two cores, a small CNN ran at 0.6 of its speed
    and an MLP at 0.85.

    Args:
      processes_here: processes on this machine, which divide its cores; each has at least one device.

    Guarantees:
      The compilation cache is private (tests/command/test_app.py::test_compilation_cache_is_private).
      One and two visible cores give the same bits, and every thread of the pool is a batch job
      (tests/laws/test_devices.py::test_visible_cores).
    """
    import jax

    from fedjax_sim.engine.xla_passes import SERIAL_FLAG

    jax.config.update("jax_default_matmul_precision", matmul_precision())
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        # A sandbox may forbid the change. Threads that start later inherit it.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    stated_devices = jax.config.values["jax_num_cpu_devices"]
    devices = stated_devices if stated_devices >= 1 else max(1, min(_cores() // processes_here, MAX_CPU_DEVICES))
    try:
        # JAX refuses a change of this number once it is in use. Setting another number first makes sure of a change.
        jax.config.update("jax_num_cpu_devices", devices + 1)
        jax.config.update("jax_num_cpu_devices", devices)
        # The backend reads both variables when it starts.
        os.environ.setdefault("NPROC", str(HOST_THREADS))
        flags = os.environ.get("XLA_FLAGS", "").split()
        os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*flags, SERIAL_FLAG]))
    except RuntimeError:
        # JAX is in use already: the devices stay as they are.
        pass
    use_compilation_cache()


def use_compilation_cache() -> None:
    """Keeps compiled programs in a private folder of the user's cache, unless JAX has a folder already.

    `FEDJAX_SIM_CACHE=off` opts out, and then no executable is stored either (`executables`). A cache holds programs
    that are run without a check, so a folder that others may write to is not used.

    Guarantees:
      The folder is private (tests/command/test_app.py::test_compilation_cache_is_private).
      A run from Python finds the programs of the run before (tests/running/test_loop.py::test_programs_are_kept).
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    if jax.config.values["jax_compilation_cache_dir"] is not None or os.environ.get("FEDJAX_SIM_CACHE") == "off":
        return
    if (folder := private_folder("xla")) is not None:
        # Programs that compiled before now may have made JAX settle that there is no cache.
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def private_folder(name: str) -> Path | None:
    """Returns a folder of this user's cache, made if it is absent; None if it cannot be made.

    What lies there is run without a check. So a folder that others may write to is not used, which is said once.

    Args:
      name: such as "xla".
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "fedjax_sim" / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except (OSError, RuntimeError):
        return None
    if (status.st_mode & 0o077) == 0 and status.st_uid == getattr(os, "getuid", lambda: status.st_uid)():
        return folder
    hint = "Make it yours alone (chmod 700), or set FEDJAX_SIM_CACHE=off."
    _warn_once(f"{folder}: others may use it, so no compiled program is kept or read. {hint}")
    return None


@functools.cache
def _warn_once(words: str) -> None:
    """Warns; the interpreter itself would warn again after each change of its filters."""
    warnings.warn(words, RuntimeWarning, stacklevel=3)
