"""This module reads HDF5 files of TensorFlow Federated, which have members examples/<client>/<feature>.

Links, which may lead out of the file, are not followed.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any, Literal

import numpy as np

from fedjax_sim import validate
from fedjax_sim.files.regular_files import opened
from fedjax_sim.population.federated_data import check_ids
from fedjax_sim.population.splits import site_splits

MOST_EXPANSION = 1032  # times that deflate, HDF5's compression, can make bytes smaller


def read_clients(
    caller: str,
    path: pathlib.Path,
    leaves: dict[str, str],
    *,
    texts: bool = False,
    max_clients: int | None = None,
    max_bytes: int,
) -> dict[str, dict[str, np.ndarray]]:
    """Reads the clients of a file, in the order of their ids.

    Args:
      caller: name of the calling function, for the error if h5py is missing.
      path: the file.
      leaves: leaf -> the name of the feature in the file.
      texts: whether features are texts [n] in UTF-8, rather than numbers [n, ...].
      max_clients: only the first clients, up to this number, are read. None for all.
      max_bytes: a file whose features take more bytes is refused.

    Returns: client -> leaf -> array.

    Raises: ImportError without h5py. ValueError or TypeError that names file and member. MemoryError for too many
      bytes.

    Guarantees: a link to another file, a file beyond `max_bytes`, texts in place of numbers, a name without a feature,
    and a file that is not HDF5 are refused (tests/population/datasets/test_leaf_tff.py::test_broken_tff_hdf5).
    """
    try:
        import h5py
    except ImportError:
        message = f"{caller}: expected h5py to be installed. Install the extra: pip install 'fedjax_sim[hdf5]'."
        raise ImportError(message) from None
    try:
        with opened(path) as raw_file:
            file_bytes = os.fstat(raw_file.fileno()).st_size
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
            members = {leaf: _member(group, feature, place, h5py) for leaf, feature in leaves.items()}
            # Sizes are checked as they are declared, before anything is allocated.
            for values in members.values():
                _check(values, texts, h5py)
                num_bytes += values.size * values.dtype.itemsize
            _fits(path, num_bytes, max_bytes)
            if num_bytes > MOST_EXPANSION * file_bytes:
                rule = f"features of at most {MOST_EXPANSION:,} times the file's {file_bytes:,} bytes"
                validate.fail(path.name, rule, f"{num_bytes:,} bytes declared", "No compression packs numbers closer.")
            # A text of variable length declares the size of a pointer only, so characters are counted as they are read.
            # None is longer than the file, and many may be the same bytes of it.
            piece = max(1, max_bytes // file_bytes)
            clients[id] = {}
            for leaf, values in members.items():
                if not texts:
                    clients[id][leaf] = values[...]
                    continue
                pieces = [np.array([], object)]
                for first in range(0, len(values), piece):
                    pieces.append(_texts(values, slice(first, first + piece)))
                    num_bytes += sum(map(len, pieces[-1]))
                    _fits(path, num_bytes, max_bytes)
                clients[id][leaf] = np.concatenate(pieces)
    return clients


def split_clients(
    clients: dict[str, dict[str, np.ndarray]],
    test_fraction: float,
    seed: int,
    split: Literal["together", "by_client"],
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, dict[str, np.ndarray]]]:
    """Splits each client's examples at random into training and test examples, which keep their order.

    Args:
      clients: client -> leaf -> [n, ...].
      test_fraction, seed: of the split.
      split: as in `splits.site_splits`.
    """
    labels = {id: np.zeros(len(next(iter(client.values())))) for id, client in clients.items()}
    parts = site_splits(labels, test_fraction, seed, split)
    train, test = (
        {id: {leaf: values[parts[id][part]] for leaf, values in client.items()} for id, client in clients.items()}
        for part in (0, 1)
    )
    return train, test


def _member(group: Any, name: str, place: str, h5py: Any) -> Any:
    """Returns the member of this name in an HDF5 group. It refuses links, which may lead to other files."""
    if name not in group or group.get(name, getlink=True) is None:
        validate.fail(place, f"a member {name!r}", sorted(group)[:10], validate.nearest(name, group))
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        hint = "Links may lead to other files; copy the data in."
        validate.fail(f"{place}/{name}", "data in this file", "a link", hint)
    return group[name]


def _check(values: Any, texts: bool, h5py: Any) -> None:
    """Refuses everything except numbers (or texts, if `texts`) that are stored in this file."""
    is_text = isinstance(values, h5py.Dataset) and h5py.check_string_dtype(values.dtype) is not None
    if texts and not (is_text and values.ndim == 1):
        hint = "Numbers are read by population.tff_hdf5."
        validate.fail(values.name, "an array of texts, one per example", str(values), hint, TypeError)
    if not texts and not (isinstance(values, h5py.Dataset) and values.dtype.kind in "biuf" and values.ndim):
        hint = "Texts are read by population.tff_text." if is_text else ""
        validate.fail(values.name, "an array of numbers with a row per example", str(values), hint, TypeError)
    # HDF5 can store the values of a data set in other files, even if the data set itself is in this one.
    if values.external or values.is_virtual:
        validate.fail(values.name, "data in this file", "data stored elsewhere")


def _texts(values: Any, rows: slice) -> np.ndarray:
    """Returns some of the texts [n] as an array of Python strings."""
    try:
        return np.array(values.asstr("utf-8")[rows], object)
    except UnicodeDecodeError as error:
        validate.fail(values.name, "texts in UTF-8", str(error))
        raise


def _fits(path: pathlib.Path, num_bytes: int, max_bytes: int) -> None:
    """Refuses a file whose features take more than `max_bytes`."""
    validate.fits_in_memory(path.name, num_bytes, max_bytes, hint="Raise max_bytes if you trust the file.")
