"""Keeps the results of compiled programs on disk, so that what was killed goes on behind its last finished program.

A result is kept under a digest of all that decides it: the program with its constants, the arguments, the versions of
JAX and its compiler, and the settings that last bits depend on. So a result of other code is never found.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from fedjax_sim.running.environment import numerics
from fedjax_sim.running.files import write_atomically
from fedjax_sim.running.fingerprint import array_digest, is_opaque, round_program

__all__ = ["Kept", "call", "current", "keeping"]

_kept: contextvars.ContextVar[Kept | None] = contextvars.ContextVar("kept", default=None)


class Kept:
    """The results in a folder, each in a file of its own with a CRC-32.

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

    def read(self, name: str, like: list) -> list[np.ndarray] | None:
        """Returns the arrays of a result; None if it is not kept, or is damaged.

        Args:
          name: of the file.
          like: shapes and dtypes of the arrays.
        """
        try:
            with np.load(self.folder / name, allow_pickle=False) as archive:
                arrays = [archive[f"{i}"] for i in range(len(like))]
        except (EOFError, KeyError, OSError, ValueError, zipfile.BadZipFile, zlib.error):
            return None
        if [(x.shape, x.dtype) for x in arrays] != [(x.shape, x.dtype) for x in like]:
            return None
        self.used.add(name)
        return arrays

    def write(self, name: str, arrays: list[np.ndarray]) -> None:
        """Keeps the arrays of a result."""
        content = io.BytesIO()
        np.savez(content, **{f"{i}": x for i, x in enumerate(arrays)})
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / name, [content.getvalue()])


@contextlib.contextmanager
def keeping(folder: str | Path) -> Iterator[Kept]:
    """Inside of the block, `call` keeps results in a folder, and finds those that are there.

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


def current() -> Kept | None:
    """Returns the results of the block of `keeping` that the caller is in; None outside of one."""
    return _kept.get()


def call(function: Callable, *args: Any) -> Any:
    """Calls a function that `jax.jit` returned; inside of `keeping`, its result may come from the disk.

    Programs that call the host are always run, because what the host computes cannot be known.

    >>> call(jax.jit(lambda x: 2 * x), 3).item()
    6
    """
    kept = _kept.get()
    if kept is None:
        return function(*args)
    traced = function.trace(*args)
    like, structure = jax.tree.flatten(traced.out_info)
    program = round_program(traced.jaxpr)
    # NumPy's files have no types but NumPy's own.
    is_plain = all(isinstance(x.dtype, np.dtype) and x.dtype.kind in "biufc" for x in like)
    if is_opaque(program.sha256) or not is_plain:
        return function(*args)
    words = [*program, array_digest(args), jax.__version__, jaxlib.__version__, sorted(numerics().items())]
    name = f"{hashlib.sha256(repr(words).encode()).hexdigest()[:32]}.npz"
    arrays = kept.read(name, like)
    if arrays is None:
        arrays = [np.asarray(x) for x in jax.tree.leaves(jax.device_get(function(*args)))]
        kept.num_computed += 1
        kept.write(name, arrays)
    return jax.tree.unflatten(structure, [jnp.asarray(x) for x in arrays])
