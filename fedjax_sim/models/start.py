"""This module starts a model from the parameters in a file of arrays, such as `fedjax-sim export` writes."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.models.model import Model
from fedjax_sim.types import Array, FilePath, PyTree
from fedjax_sim.validate import fail, named_arguments, nearest, part

__all__ = ["started_from"]

# dtype in a file -> its name in NumPy
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}


@named_arguments
def started_from(model: Model, *, path: FilePath) -> Model:
    """Makes the model start from the parameters in a safetensors file, in place of drawn ones.

    Args:
      model: whose parameters are dicts. Its state is drawn as before.
      path: a file with an array for each leaf, under the leaf's path, such as "hidden_0/kernel". `fedjax-sim export`
        writes it. The format holds numbers alone, so that reading a file runs no code.

    Returns: the `Model`, whose `init` returns the file's arrays, whatever the key.

    Raises: ValueError for a file in another format, where a leaf is missing, unknown, or of another shape or dtype, and
    for numbers that are not finite.
    ImportError without the package `safetensors`, and OSError for a file that cannot be read.

    Guarantees: a model that was exported starts with the same bits
    (tests/models/test_start.py::test_starts_with_the_bits_of_the_file). Every difference between file and model is
    refused with the leaf's name (tests/models/test_start.py::test_other_files_are_refused).
    """
    part("model", model, Model)
    arrays = _read(Path(path).expanduser())
    spec = jax.eval_shape(lambda: model.init(jax.random.key(0))[0])
    leaves = {_name(place): leaf for place, leaf in jax.tree_util.tree_leaves_with_path(spec)}
    for name, leaf in leaves.items():
        if name not in arrays:
            fail("path", f"a file with the array {name!r}", f"a file with {sorted(arrays)}", nearest(name, arrays))
        if arrays[name].shape != leaf.shape or arrays[name].dtype != leaf.dtype:
            stated = f"{arrays[name].dtype}{list(arrays[name].shape)}"
            fail("path", f"{name!r} as {leaf.dtype}{list(leaf.shape)}", stated, "It is the file of another model.")
        num_wrong = int((~np.isfinite(arrays[name].astype(np.float64))).sum())
        if num_wrong:
            fail("path", f"finite numbers in {name!r}", f"{num_wrong} that are not", "It is a diverged model.")
    if unknown := sorted(set(arrays) - set(leaves)):
        fail("path", f"arrays of the model's leaves {sorted(leaves)}", unknown[0], nearest(unknown[0], list(leaves)))

    def init(key: Array) -> tuple[PyTree, PyTree]:
        params = jax.tree_util.tree_map_with_path(lambda place, _: jnp.asarray(arrays[_name(place)]), spec)
        return params, model.init(key)[1]

    return model._replace(init=init)


def _name(place: tuple) -> str:
    """Returns the path of a leaf as a word, such as "hidden_0/kernel"; "params" for a single array."""
    keys = (str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in place)
    return "/".join(keys) or "params"


def _read(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a safetensors file by their names."""
    try:
        from safetensors import SafetensorError, deserialize
    except ImportError as error:
        raise ImportError("safetensors: expected the package, got none. pip install 'fedjax_sim[export]'") from error
    try:
        arrays = dict(deserialize(path.read_bytes()))
    except SafetensorError as error:
        fail("path", "a safetensors file", str(path), f"{error}. fedjax-sim export RUN model.safetensors writes one.")
    for name, array in arrays.items():
        if array["dtype"] not in DTYPES:
            fail("path", f"arrays of {', '.join(DTYPES)}", f"{name!r} of {array['dtype']}")
    # The package's own reader of NumPy arrays knows no bfloat16.
    return {
        name: np.frombuffer(array["data"], jnp.dtype(DTYPES[array["dtype"]])).reshape(array["shape"])
        for name, array in arrays.items()
    }
