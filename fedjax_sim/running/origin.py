"""Takes digests of all that decides a program: the values that it is made from, source files, packages, the machine.

A start that knows them needs no trace to know its program. What is not known by value has no digest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jaxlib.version

import fedjax_sim
from fedjax_sim.files.regular_files import content_of
from fedjax_sim.running import program_files, seconds
from fedjax_sim.running.environment import numerics
from fedjax_sim.running.fingerprint import is_opaque, value_digest
from fedjax_sim.running.processes import current

INSTALLED = {"site-packages", "dist-packages"}  # folders of packages that an installer wrote
VARIABLES = ("CUDA_", "JAX_", "LIBTPU_", "NCCL_", "NPROC", "NVIDIA_", "ROCM_", "TF_", "TPU_", "XLA_")


def digest_of(*words: Any) -> str:
    """Returns 40 hex digits that depend on the texts of all words."""
    return hashlib.sha256(repr(words).encode()).hexdigest()[:40]


def origin_of(*values: Any) -> str | None:
    """Returns a digest of all that decides the programs of a run; None if a part of it is not known by value.

    The digest covers the values, every file of this package, the packages that are installed and when their loaded
    files were changed last, Python, and this machine with its devices, flags and settings. Code that was changed in
    memory is not seen.

    Args:
      values: what the run is made from: plain values and arrays, such as a resolved config and a digest of its data.

    Guarantees: another value, source line, package, flag, version or number of devices is another origin, and values or
    files that cannot be known have none (tests/running/test_origin.py).
    """
    if program_files.folder() is None or current().several:
        return None
    values_digest = value_digest(values)
    sources = _sources()
    if sources is None or is_opaque(values_digest):
        return None
    return digest_of(values_digest, sources, _packages(), _installed_files(), machine())


def machine() -> tuple:
    """Returns what an executable depends on beside its program: versions, settings, flags, processor and devices."""
    devices = [(device.platform, device.id, device.device_kind) for device in jax.devices()]
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(VARIABLES))
    versions = (fedjax_sim.__version__, jax.__version__, jaxlib.version.__version__, sys.version)
    settings = sorted(map(repr, jax.config.values.items()))
    backend = jax.local_devices()[0].client.platform_version
    return versions, backend, devices, _processor(), variables, settings, sorted(numerics().items())


@functools.cache
def _processor() -> list[str]:
    """Returns the features of this machine's processor, in the words of its system."""
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.node(), platform.platform(), platform.processor()]
    return sorted({line for line in lines if line.startswith(names)})


@functools.cache
def _process_began() -> int:
    """Returns when this process began, in nanoseconds of `time.time_ns`."""
    return time.time_ns() - (time.perf_counter_ns() - seconds.process_began())


def _sources() -> str | None:
    """Returns a digest of this package's files, and of the files of loaded modules that no installer wrote.

    None if one of them cannot be read, or changed after this process began: then it may not be what was loaded.
    """
    package = Path(fedjax_sim.__file__).parent
    paths = {path for path in package.rglob("*") if "__pycache__" not in path.parts and path.is_file()}
    own_modules = [module for module in list(sys.modules.values()) if _is_own(module)]
    paths |= {Path(module.__file__) for module in own_modules if module.__file__ is not None}
    sha = hashlib.sha256()
    try:
        for path in sorted(paths):
            # Unlike the time of the last write, that of the last change cannot be set back.
            if path.stat().st_ctime_ns >= _process_began():
                return None
            sha.update(repr((str(path), hashlib.sha256(content_of(path)).hexdigest())).encode())
        for path in sorted(_bytecode_files(own_modules)):
            sha.update(hashlib.sha256(content_of(path)).digest())
    except OSError:
        return None
    return sha.hexdigest()


def _is_own(module: ModuleType) -> bool:
    """Returns whether a module has a file, and is neither Python's own nor installed."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not INSTALLED & set(Path(file).parts) and not file.startswith(_library())


@functools.cache
def _library() -> tuple[str, ...]:
    """Returns the folders of Python's own modules."""
    return tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))


def _bytecode_files(modules: list[ModuleType]) -> Iterator[Path]:
    """Yields the files of bytecode that Python may have loaded in the place of sources.

    Python takes bytecode for that of a source of the same size and second of the last write, which need not be true.
    """
    for module in modules:
        cached = getattr(module, "__cached__", None)
        if isinstance(cached, str) and os.path.isfile(cached):
            yield Path(cached)


def _installed_files() -> list[tuple[str, int, int, int]]:
    """Returns size and times of the loaded files of installed packages, which a user may have edited in their place."""
    files = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and INSTALLED & set(Path(file).parts):
            with contextlib.suppress(OSError):
                status = os.stat(file)
                files.append((file, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return sorted(files)


def _packages() -> list[tuple[str, int]]:
    """Returns the folders that name each installed package with its version, and when an installer wrote them."""
    packages = set()
    for folder in map(Path, sys.path):
        with contextlib.suppress(OSError):
            packages |= {
                (x.name, x.stat().st_mtime_ns) for x in folder.iterdir() if x.suffix in (".dist-info", ".egg-info")
            }
    return sorted(packages)
