"""Where a run happens: JAX set up before its first use, and what was found there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = ["environment", "prepare", "versions"]

MAX_CPU_DEVICES = 8


def versions(*names: str) -> dict[str, str]:
    """Installed versions by distribution name."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"  # run from its source, say
    return found


def environment(command: str) -> dict[str, Any]:
    """What `env.json` holds; `command` repeats the run."""
    import platform

    import jax

    return {
        "command": command,
        "versions": versions("fedjax-sim", "jax", "jaxlib", "optax", "flax", "numpy"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "backend": jax.default_backend(),
        "devices": [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()],
        "processes": jax.process_count(),
        "cpu_count": _cores(),
        "matmul_precision": str(jax.config.jax_default_matmul_precision),
        "random_generator": str(jax.config.jax_default_prng_impl),
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(processes_here: int = 1) -> None:
    """Sets JAX up before its first use: a virtual CPU device per core, full precision, a private compilation cache.

    Processes on one machine share its cores out, one device each at least. What is set already, by
    `JAX_NUM_CPU_DEVICES` or `JAX_COMPILATION_CACHE_DIR`, stays. `FEDJAX_SIM_CACHE=off` does without a cache. A cache
    holds programs that are run as they are: a folder that others may write is not used.

    Guarantees: tests/test_cli.py::test_compilation_cache_is_private.
    """
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")
    if jax.config.jax_num_cpu_devices < 1:
        try:
            jax.config.update("jax_num_cpu_devices", max(1, min(_cores() // processes_here, MAX_CPU_DEVICES)))
        except RuntimeError:  # JAX is in use already, by whoever called us
            pass
    if jax.config.jax_compilation_cache_dir is None and os.environ.get("FEDJAX_SIM_CACHE") != "off":
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "fedjax_sim" / "xla"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = folder.stat()
        except (OSError, RuntimeError):
            return
        if (status.st_mode & 0o077) == 0 and status.st_uid == getattr(os, "getuid", lambda: status.st_uid)():
            jax.config.update("jax_compilation_cache_dir", str(folder))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
