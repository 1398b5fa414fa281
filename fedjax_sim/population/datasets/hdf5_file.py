"""HDF5 files of TensorFlow Federated: examples/<client>/<feature>, read without following links out of the file."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.federated_data import check_ids

__all__ = ["random_split", "read_clients"]


def read_clients(
    caller: str,
    path: pathlib.Path,
    leaves: dict[str, str],
    *,
    texts: bool = False,
    max_clients: int | None = None,
    max_bytes: int,
) -> dict[str, dict[str, np.ndarray]]:
    """client -> leaf -> array, in the order of the clients' ids.

    Args:
      caller: whose extra is missing, where h5py is.
      leaves: leaf -> the name of the feature in the file.
      texts: whether features are texts [n] of UTF-8, rather than numbers [n, ...].
      max_clients: the first so many alone; None for all.
      max_bytes: refuse what takes more.

    Raises: ImportError, ValueError or TypeError naming file and member, MemoryError.

    Guarantees: tests/population/datasets/test_leaf_tff.py::test_broken_tff_hdf5.
    """
    try:
        import h5py
    except ImportError:
        message = f"{caller}: expected h5py to be installed. Install the extra: pip install 'fedjax_sim[hdf5]'."
        raise ImportError(message) from None
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        validate.fail(path.name, "an HDF5 file", str(error))
    with file:
        examples = _member(file, "examples", path.name, h5py)
        if not isinstance(examples, h5py.Group) or not len(examples):
            validate.fail(f"{path.name}/examples", "a group with a member per client", str(examples), error=TypeError)
        clients: dict[str, dict[str, np.ndarray]] = {}
        num_bytes = 0
        for id in check_ids(f"{path.name}/examples", list(examples))[:max_clients]:
            place = f"{path.name}/examples/{id}"
            group = _member(examples, id, f"{path.name}/examples", h5py)
            if not isinstance(group, h5py.Group):
                validate.fail(place, "a group of features", str(group), error=TypeError)
            found = {leaf: _member(group, feature, place, h5py) for leaf, feature in leaves.items()}
            for values in found.values():
                _check(values, texts, h5py)
                num_bytes += values.size * values.dtype.itemsize  # declared, before anything is allocated
            _fits(path, num_bytes, max_bytes)
            clients[id] = {leaf: _texts(values) if texts else values[...] for leaf, values in found.items()}
            if texts:
                num_bytes += sum(len(text) for values in clients[id].values() for text in values)
                _fits(path, num_bytes, max_bytes)
    return clients


def random_split(
    client: dict[str, np.ndarray], test_fraction: float, rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A client's training and test examples, at random and each in their order."""
    size = len(next(iter(client.values())))
    order = rng.permutation(size)
    cut = size - round(test_fraction * size)
    kept, tested = ({leaf: v[np.sort(rows)] for leaf, v in client.items()} for rows in (order[:cut], order[cut:]))
    return kept, tested


def _member(group: Any, name: str, place: str, h5py: Any) -> Any:
    """The member of that name in an HDF5 group; refuses links, which may lead to other files."""
    if name not in group or group.get(name, getlink=True) is None:
        validate.fail(place, f"a member {name!r}", sorted(group)[:10], validate.nearest(name, group))
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        hint = "Links may lead to other files; copy the data in."
        validate.fail(f"{place}/{name}", "data in this file", "a link", hint)
    return group[name]


def _check(values: Any, texts: bool, h5py: Any) -> None:
    """Refuses all but numbers, or texts, that are in this file."""
    is_text = isinstance(values, h5py.Dataset) and h5py.check_string_dtype(values.dtype) is not None
    if texts and not (is_text and values.ndim == 1):
        hint = "Numbers are read by population.tff_hdf5."
        validate.fail(values.name, "an array of texts, one per example", str(values), hint, TypeError)
    if not texts and not (isinstance(values, h5py.Dataset) and values.dtype.kind in "biuf" and values.ndim):
        hint = "Texts are read by population.tff_text." if is_text else ""
        validate.fail(values.name, "an array of numbers with a row per example", str(values), hint, TypeError)
    if values.external or values.is_virtual:
        validate.fail(values.name, "data in this file", "data stored elsewhere")


def _texts(values: Any) -> np.ndarray:
    """[n] texts, as objects."""
    try:
        return np.array(values.asstr("utf-8")[...], object)
    except UnicodeDecodeError as error:
        validate.fail(values.name, "texts in UTF-8", str(error))
        raise


def _fits(path: pathlib.Path, num_bytes: int, max_bytes: int) -> None:
    validate.fits_in_memory(path.name, num_bytes, max_bytes, hint="Raise max_bytes if you trust the file.")
