"""This module starts a model from the parameters in a file of arrays, such as `fedjax-sim export` writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.files.regular_files import content_of
from fedjax_sim.models.model import Model
from fedjax_sim.models.paths import chosen_paths
from fedjax_sim.types import Array, FilePath, PyTree
from fedjax_sim.validate import fail, named_arguments, nearest, part

# dtype in a file -> its name in NumPy
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}


@named_arguments
def started_from(model: Model, *, path: FilePath, leaves: Sequence[str] | None = None) -> Model:
    """Makes the model start from the parameters in a safetensors file, in place of drawn ones.

    Args:
      model: whose parameters are dicts. Its state is drawn as before.
      path: a file with an array for each leaf, under the leaf's path, such as "hidden_0/kernel". `fedjax-sim export`
        writes it. The format holds numbers alone, so that reading a file runs no code.
      leaves: paths of leaves or dicts that start from the file, such as "hidden_0"; the others are drawn, and
        other arrays of the file are not read. By default these are all leaves, and the file has no other array.

    Returns: the `Model`, whose `init` returns the file's arrays, whatever the key.

    Raises: ValueError for a file that is not there or in another format, where a leaf is missing, unknown, or of
    another shape or dtype, for numbers that are not finite, and for a path that the parameters lack.
    ImportError without the package `safetensors`, and OSError for a file that cannot be read or is no regular file.

    Guarantees: a model that was exported starts with the same bits
    (tests/models/test_start.py::test_starts_with_the_bits_of_the_file). Every difference between file and model is
    refused with the leaf's name (tests/models/test_start.py::test_other_files_are_refused). Leaves that do not start
    from the file have the bits that the key draws (tests/models/test_start.py::test_a_part_starts_from_the_file).
    """
    part("model", model, Model)
    arrays = _read(Path(path).expanduser())
    spec, state_spec = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    all_leaves = {_name(place): leaf for place, leaf in jax.tree_util.tree_leaves_with_path(spec)}
    read = list(all_leaves) if leaves is None else chosen_paths("leaves", spec, leaves)
    if not read:
        fail("leaves", "paths of at least one leaf", leaves, "Leave out the wrapper to draw them all.")
    for name in read:
        leaf = all_leaves[name]
        if name not in arrays:
            fail("path", f"a file with the array {name!r}", f"a file with {sorted(arrays)}", nearest(name, arrays))
        if arrays[name].shape != leaf.shape or arrays[name].dtype != leaf.dtype:
            stated = f"{arrays[name].dtype}{list(arrays[name].shape)}"
            fail("path", f"{name!r} as {leaf.dtype}{list(leaf.shape)}", stated, "It is the file of another model.")
        num_wrong = int((~np.isfinite(arrays[name].astype(np.float64))).sum())
        if num_wrong:
            fail("path", f"finite numbers in {name!r}", f"{num_wrong} that are not", "It is a diverged model.")
    if leaves is None and (unknown := sorted(set(arrays) - set(read))):
        hint = nearest(unknown[0], read) or "State the leaves that start from it, if the others are to be drawn."
        fail("path", f"arrays of the model's leaves {sorted(read)}", unknown[0], hint)

    def init(key: Array) -> tuple[PyTree, PyTree]:
        is_read = len(read) == len(all_leaves) and not jax.tree.leaves(state_spec)
        drawn, state = (spec, state_spec) if is_read else model.init(key)

        def start(place: tuple, leaf: Array) -> Array:
            return jnp.asarray(arrays[_name(place)]) if _name(place) in read else leaf

        return jax.tree_util.tree_map_with_path(start, drawn), state

    return model._replace(init=init)


def _name(place: tuple) -> str:
    """Returns the path of a leaf as a word, such as "hidden_0/kernel"; "params" for a single array."""
    keys = (str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in place)
    return "/".join(keys) or "params"


def _read(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a safetensors file by their names, in the shapes and dtypes that the file states.

    Args:
      path: of the file. No code in it is run.

    Raises: ImportError without the package `safetensors`; ValueError for a file that is not there or in another format,
      and for a dtype that is not in `DTYPES`; OSError for a file that cannot be read.
    """
    try:
        from safetensors import SafetensorError, deserialize
    except ImportError as error:
        raise ImportError("safetensors: expected the package, got none. pip install 'fedjax_sim[export]'") from error
    try:
        arrays = dict(deserialize(content_of(path)))
    except FileNotFoundError:
        fail("path", "an existing file", str(path), "fedjax-sim export RUN model.safetensors writes one.")
    except (OverflowError, SafetensorError, ValueError) as error:
        fail("path", "a .safetensors file", str(path), f"{error}. fedjax-sim export RUN model.safetensors writes one.")
    for name, array in arrays.items():
        if array["dtype"] not in DTYPES:
            fail("path", f"arrays of {', '.join(DTYPES)}", f"{name!r} of {array['dtype']}")
    # The package's own reader of NumPy arrays knows no bfloat16.
    return {
        name: np.frombuffer(array["data"], jnp.dtype(DTYPES[array["dtype"]])).reshape(array["shape"])
        for name, array in arrays.items()
    }
