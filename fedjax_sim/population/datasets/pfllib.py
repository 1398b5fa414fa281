"""This module reads the folders that PFLlib writes: a NumPy archive of each client's training and test rows."""

from __future__ import annotations

import io
import pathlib
import zipfile
import zlib
from typing import Annotated, Any, Literal

import numpy as np

from fedjax_sim import validate
from fedjax_sim.files.pickled_arrays import read_pickled
from fedjax_sim.files.regular_files import content_of, json_of
from fedjax_sim.population.datasets.hdf5_file import MOST_EXPANSION
from fedjax_sim.population.federated_data import FederatedData, existing_path, from_sites
from fedjax_sim.types import FolderPath
from fedjax_sim.validate import Integer, PositiveInt

MEMBER = "data.npy"  # of each archive: an array of one object, the client's dict


@validate.named_arguments
def pfllib(
    *,
    directory: FolderPath,
    num_classes: PositiveInt,
    channels: Literal["first", "last"] = "first",
    max_bytes: Annotated[int, Integer(1, 4611686018427387904)] = 2**34,
) -> FederatedData:
    """Reads a data set that PFLlib's scripts have divided among clients, images or other numbers with class labels.

    Args:
      directory: a folder with config.json, train/0.npz, train/1.npz, ... and test/0.npz, ..., such as PFLlib's
        dataset/Cifar10 after generate_Cifar10.py.
      num_classes: C, as config.json says it: labels are 0 to C - 1.
      channels: whether images, arrays [n, ., ., .], have their colours "first", as PFLlib's have, or "last". Those that
        are first are moved behind height and width.
      max_bytes: the most bytes that the arrays of all clients may take.

    Returns: `FederatedData` of the task "classification". Client i has the number i as its name. Features are as they
    are in the files, where PFLlib has scaled pixels to [-1, 1].

    Raises: ValueError that names the file, for a missing file, other numbers of clients or classes than config.json's,
    an archive that is none, and objects in it other than a dict of arrays x and y. MemoryError beyond `max_bytes`.

    Guarantees: each client has its own training and test rows, in the order of the numbers
    (tests/population/datasets/test_pfllib.py::test_clients_have_their_rows). Archives hold pickles, and reading them
    runs nothing (::test_hostile_archives).

    References: Zhang et al., PFLlib: a beginner-friendly and comprehensive personalized federated learning library and
    benchmark, 2025.
    """
    folder = existing_path("directory", directory)
    path = folder / "config.json"
    existing_path("directory", str(path), folder=False)
    try:
        config = json_of(content_of(path, 1 << 24))
    except ValueError as error:
        validate.fail(path.name, "JSON", str(error))
    stated = config if isinstance(config, dict) else {}
    num_clients: Any = stated.get("num_clients")
    validate.integer(f"{path.name} num_clients", num_clients, 1, 1_000_000)
    if stated.get("num_classes") != num_classes:
        validate.fail("num_classes", f"that of {path.name}, {stated.get('num_classes')}", num_classes)
    left = max_bytes
    splits: dict[str, dict[str, dict[str, np.ndarray]]] = {"train": {}, "test": {}}
    for split, clients in splits.items():
        numbers = {file.stem for file in (folder / split).glob("*.npz")}
        expected = [str(i) for i in range(num_clients)]
        if numbers != set(expected):
            odd = sorted(numbers.symmetric_difference(expected))[:10]
            rule = f"files {split}/0.npz to {split}/{expected[-1]}.npz, one a client of config.json"
            validate.fail("directory", rule, f"missing or more: {', '.join(odd)}", "Run PFLlib's script again.")
        for id in expected:
            clients[id] = _client(folder / split / f"{id}.npz", channels, left)
            left -= sum(values.nbytes for values in clients[id].values())
    name = folder.resolve().name or "pfllib"
    train, test = splits["train"], splits["test"]
    return from_sites(
        train, test, task="classification", num_outputs=num_classes, name=name, scale_bytes=False, learned=None
    )


def _client(path: pathlib.Path, channels: str, max_bytes: int) -> dict[str, np.ndarray]:
    """Reads the rows of a client, {"x": [n, ...], "y": [n]}.

    Args:
      path: of its archive.
      channels: as in `pfllib`.
      max_bytes: the most bytes that they may take.
    """
    place = f"{path.parent.name}/{path.name}"
    content = content_of(path)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            size = archive.getinfo(MEMBER).file_size  # as it is declared, before it is unpacked
            validate.fits_in_memory(place, size, max_bytes, hint="Raise max_bytes if you trust the file.")
            if size > MOST_EXPANSION * len(content):
                validate.fail(place, f"at most {MOST_EXPANSION:,} times the file's {len(content):,} bytes", size)
            member = archive.read(MEMBER)
        file = io.BytesIO(member)
        version = np.lib.format.read_magic(file)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = reader(file)
    except validate.InvalidArgument:
        raise
    except (
        OSError, EOFError, KeyError, NotImplementedError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error
    ) as error:  # fmt: skip
        validate.fail(place, f"a NumPy archive with the array {MEMBER}", f"{type(error).__name__}: {error}")
    if dtype.kind != "O" or shape != ():
        validate.fail(place, "one dict as an object", f"{dtype}{list(shape)}", "Is it a file of PFLlib?")
    objects = read_pickled(place, member[file.tell() :])
    rows: Any = objects[()] if isinstance(objects, np.ndarray) and objects.shape == () else None
    if not isinstance(rows, dict) or rows.keys() != {"x", "y"}:
        found = sorted(rows) if isinstance(rows, dict) else type(rows).__name__
        validate.fail(place, "a dict with x and y", found)
    for leaf, values in rows.items():
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "iuf" or not values.ndim:
            shown = values.dtype.name if isinstance(values, np.ndarray) else type(values).__name__
            hint = "PFLlib's texts, lists of tokens with lengths, are not read: write them with population.from_sites."
            validate.fail(f"{place} {leaf}", "an array of numbers with a row an example", shown, hint)
    if channels == "first" and rows["x"].ndim == 4:
        rows["x"] = np.moveaxis(rows["x"], 1, -1)
    return rows
