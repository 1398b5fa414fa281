"""Keeps the results of compiled programs on disk, so that what was killed goes on behind its last finished program.

A result is kept under a digest of all that decides it: the program with its constants, the arguments, the versions of
JAX and its compiler, and the settings that last bits depend on. So a result of other code is never found.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np

from fedjax_sim.running.checkpoint_format import SCHEMA, encoded, read_file, restored, to_host
from fedjax_sim.running.environment import numerics
from fedjax_sim.running.files import CheckpointError, write_atomically
from fedjax_sim.running.fingerprint import array_digest, is_opaque, round_program

_kept: contextvars.ContextVar[Kept | None] = contextvars.ContextVar("kept", default=None)


class Kept:
    """The results in a folder, each in a file of its own with a SHA-256.

    Args:
      folder: where the results are; it is made when the first result is written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.earlier = {path.name for path in folder.glob("*") if not path.name.startswith(".")}
        self.used: set[str] = set()  # names of results that were found
        self.num_computed = 0  # results that were not found, and were computed

    @property
    def num_unused(self) -> int:
        """The results of earlier processes that were not used: of other code or versions, or damaged."""
        return len(self.earlier - self.used)

    def read(self, name: str, like: list) -> list[jax.Array | np.ndarray] | None:
        """Returns the arrays of a result; None if it is not kept, or is damaged.

        Args:
          name: of the file.
          like: shapes and dtypes of the arrays.
        """
        try:
            header, payload = read_file(self.folder / name)
            sizes = [entry["bytes"] for entry in header["leaves"]]
            ends = list(itertools.accumulate(sizes))
            raw = [payload[end - size : end] for end, size in zip(ends, sizes, strict=True)]
            arrays = [restored(*parts) for parts in zip(raw, header["leaves"], like, strict=True)]
        except (CheckpointError, TypeError, ValueError):
            return None
        self.used.add(name)
        return arrays

    def write(self, name: str, arrays: list[jax.Array]) -> None:
        """Keeps the arrays of a result, as a checkpoint keeps its leaves."""
        hosted = [to_host(f"{i}", x) for i, x in enumerate(arrays)]
        entries = [{"path": f"{i}", **entry} for i, (_, entry) in enumerate(hosted)]
        header = json.dumps({"schema": SCHEMA, "leaves": entries, "meta": {}}).encode()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / name, encoded(header, [array for array, _ in hosted]))


@contextlib.contextmanager
def keeping(folder: str | Path) -> Iterator[Kept]:
    """Inside of the block, `call` keeps results in a folder, and finds those that are there.

    Args:
      folder: of the kept results.

    Yields: the kept results, which count what was computed anew.

    Guarantees:
      What was killed and goes on has the results of what was never killed
      (tests/study/test_kept.py::test_killed_and_resumed).
      A result of another program, of other arguments or versions is computed anew, and so is a damaged one
      (tests/study/test_kept.py::test_what_a_result_depends_on).
    """
    kept = Kept(Path(folder))
    token = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(token)


def current_results() -> Kept | None:
    """Returns the results of the block of `keeping` that the caller is in; None outside of one."""
    return _kept.get()


def call(function: jax.stages.Wrapped, *args: Any) -> Any:
    """Calls a function that `jax.jit` returned; inside of `keeping`, its result may come from the disk.

    Programs that call the host are always run, because what the host computes cannot be known.

    Args:
      function: of arrays, pure.
      args: of the function; their contents count.

    >>> call(jax.jit(lambda x: 2 * x), 3).item()
    6
    """
    kept = _kept.get()
    if kept is None:
        return function(*args)
    traced = function.trace(*args)
    like, structure = jax.tree.flatten(traced.out_info)
    program = round_program(traced.jaxpr)
    if is_opaque(program.sha256):
        return function(*args)
    words = [*program, array_digest(args), jax.__version__, jaxlib.version.__version__, sorted(numerics().items())]
    name = f"{hashlib.sha256(repr(words).encode()).hexdigest()[:32]}.kept"
    arrays = kept.read(name, like)
    if arrays is None:
        arrays = jax.tree.leaves(function(*args))
        kept.num_computed += 1
        kept.write(name, arrays)
    return jax.tree.unflatten(structure, arrays)
