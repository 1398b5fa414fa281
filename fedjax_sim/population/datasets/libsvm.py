"""This module reads files of LIBSVM and divides them among clients. A line has a label and its nonzero features."""

from __future__ import annotations

import array
import os
import pathlib
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.files import text_files
from fedjax_sim.population.datasets.quantities import classes_learned
from fedjax_sim.population.datasets.sklearn import partitioned, split_rows
from fedjax_sim.population.federated_data import FederatedData, existing_path
from fedjax_sim.types import FilePath, Learned
from fedjax_sim.validate import Integer, NonNegativeInt

MOST_FEATURES = 1 << 24
# A file whose largest index is a mistake must not take all memory: rows with a number of features that is not stated
# may be so many times larger than their file, or have so many bytes.
MOST_EXPANSION = 256
SMALL_BYTES = 1 << 24


class Sparse(NamedTuple):
    """A `Sparse` holds the lines of one file. Row `rows[k]` has `values[k]` in column `columns[k]`, and 0 elsewhere."""

    labels: np.ndarray  # [n] float64
    rows: np.ndarray  # [entries]
    columns: np.ndarray  # [entries], from 0
    values: np.ndarray  # [entries] float64

    def dense(self, num_features: int, max_bytes: int) -> np.ndarray:
        """Returns the rows as a dense array [n, num_features] float32. Columns beyond that are left out."""
        hint = "Raise max_bytes if the memory is there, or set num_features to a smaller number."
        validate.fits_in_memory("path", 4 * len(self.labels) * num_features, max_bytes, hint=hint)
        x = np.zeros((len(self.labels), num_features), np.float32)
        is_inside = self.columns < num_features
        with np.errstate(over="ignore"):  # a number beyond float32 becomes inf, which `split_rows` refuses
            x[self.rows[is_inside], self.columns[is_inside]] = self.values[is_inside]
        return x


@validate.named_arguments
def libsvm(
    *,
    path: FilePath,
    test_path: FilePath | None = None,
    task: Literal["binary", "classification", "regression"] = "binary",
    num_features: int | None = None,
    classes: Sequence[float] | None = None,
    first_index: Literal[0, 1] = 1,
    num_clients: int = 100,
    partition: str = "iid",
    alpha: float = 0.3,
    shards_per_client: int = 2,
    test_fraction: float = 0.2,
    held_out_clients: int = 10,
    max_bytes: Annotated[int, Integer(1, 4611686018427387904)] = 2**33,
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """Reads a data set in the format of LIBSVM (a9a, w8a, ijcnn1, ...), and divides its rows among clients.

    Each line is `label index:value index:value ...`.

    Args:
      path: file of the training rows.
      test_path: file of the test rows. None splits the training rows at random.
      task: "binary" (two labels, such as -1 and 1), "classification" or "regression". The labels in the file become
        0, 1, ... in rising order, and `label_names` keeps the original labels.
      num_features: d. Features beyond d are left out. None takes the largest index of the two files, unless the dense
        table would then have more than 16 MiB and more than 256 times the bytes of the files: such a d must be stated.
      classes: the labels in the file that become 0, 1, ..., such as [-1, 1]. No row may have another label. None takes
        the labels of the two files. Noise needs these and num_features stated, since one client could change them.
      first_index: the number of the first feature in the file, 0 or 1.
      num_clients, partition, alpha, shards_per_client, held_out_clients: as in `digits_partition`. For "regression" the
        partition must be "iid".
      test_fraction: share of the rows that is kept for the test set, if there is no test_path. Unless the task is
        "regression", it is a share of the rows of each label.
      max_bytes: the most bytes that the rows may take as a dense table, 4 n d for n rows.
      seed: of the split and the partition.

    Returns: `FederatedData` with x [n, d], which is zero where the file has no value.

    Raises: ValueError that names file and line, for a text that is not a label or not index:value, and for indices that
      do not rise; for a number of features that must be stated. MemoryError beyond `max_bytes`.

    Guarantees: rows, features and labels are those of the file
    (tests/population/datasets/test_libsvm.py::test_rows_and_labels), and no broken line is read (::test_broken_lines).

    References: Chang and Lin, LIBSVM: a library for support vector machines, 2011.
    """
    if task == "regression":
        validate.one_of("partition", partition, ("iid",), hint="The others go by labels.")
    files = [_read(existing_path("path", path, folder=False), first_index)]
    if test_path is not None:
        files.append(_read(existing_path("test_path", test_path, folder=False), first_index))
    learned: tuple[Learned, ...] = ()
    stated = num_features
    if num_features is None:
        effect = "change the number of inputs of every other client"
        learned = (Learned("the number of features", (), effect, "num_features = D"),)
        num_features = max(int(file.columns.max(initial=0)) for file in files) + 1
    validate.integer("num_features", num_features, 1, MOST_FEATURES)
    file_bytes = sum(os.stat(os.path.expanduser(name)).st_size for name in (path, test_path) if name is not None)
    dense_bytes = 4 * sum(len(file.labels) for file in files) * num_features
    if stated is None and dense_bytes > max(SMALL_BYTES, MOST_EXPANSION * file_bytes):
        index = num_features - 1 + first_index
        hint = f"The largest index, {index:,}, makes {dense_bytes:,} bytes of a file of {file_bytes:,}."
        hint += f" If it is right: num_features = {num_features}."
        validate.fail("num_features", "a stated number for so sparse a file", None, hint)
    label_names = None
    num_outputs = 1
    if task != "regression":
        # Labels of both files are numbered together, so that a number means the same label in both.
        file_labels = np.unique(np.concatenate([file.labels for file in files]))
        labels = file_labels
        if classes is None:
            learned += classes_learned("classes = [-1, 1], say")
        else:
            validate.sequence("classes", classes)
            labels = np.array(classes, np.float64)
            if len(np.unique(labels)) != len(labels):
                validate.fail("classes", "distinct labels", list(classes))
            is_class = np.isin(file_labels, labels)
            if not is_class.all():
                validate.fail("path", f"labels among the classes {list(classes)}", file_labels[~is_class].tolist())
        if task == "binary" and len(labels) != 2:
            hint = "Of more labels, task = 'classification'; of measured numbers, task = 'regression'."
            validate.fail("path", "two labels", labels[:10].tolist(), hint)
        order = np.argsort(labels, kind="stable")
        files = [file._replace(labels=order[np.searchsorted(labels[order], file.labels)]) for file in files]
        label_names = tuple(f"{label:.15g}" for label in labels)
        num_outputs = 1 if task == "binary" else len(labels)
    # Rows become dense here, after their size has been checked, since models read dense rows.
    tables = [{"x": file.dense(num_features, max_bytes), "y": file.labels} for file in files]
    rng = np.random.default_rng(seed)
    test_table = None if test_path is None else tables[1]
    train, test = split_rows(tables[0], test_fraction, rng, task=task, num_outputs=num_outputs, test=test_table)
    return partitioned(
        (train, test),
        num_clients=num_clients,
        partition=partition,
        alpha=alpha,
        shards_per_client=shards_per_client,
        held_out_clients=held_out_clients,
        seed=seed,
        learned=learned,
        num_outputs=num_outputs,
        task=task,
        label_names=label_names,
        name=pathlib.Path(path).stem,
    )


def _read(path: pathlib.Path, first_index: int) -> Sparse:
    """Reads and checks the lines `label index:value index:value ...` of one file.

    Args:
      path: an existing file. Empty lines are skipped, and so is what follows a "#".
      first_index: the number of the first feature in the file, 0 or 1. Indices must rise along a line, and have nine
        digits at most.

    Returns: `Sparse`, with at least one row. Its columns are counted from 0, whatever `first_index` is.

    Raises: ValueError that names file and line.
    """
    # These arrays of machine numbers take a fraction of the memory of lists, for files of millions of values.
    labels = array.array("d")
    values = array.array("d")
    rows = array.array("q")
    columns = array.array("q")
    for line, cells in text_files.table_rows(path.name, path, delimiter="space", comments="#"):
        place = f"{path.name}:{line}"
        previous_index = first_index - 1
        for cell in cells[1:]:
            if cell.startswith("#"):  # the rest of the line is a comment
                break
            index, colon, value = cell.partition(":")
            # Ten digits or more could not be an index, and isdigit alone would accept digits of other scripts.
            if not (colon and index.isascii() and index.isdigit() and len(index) < 10):
                hint = "Files with qid rank documents; they are not read." if index == "qid" else ""
                validate.fail(place, "index:value after the label", cell, hint)
            if int(index) <= previous_index:
                hint = "If the file numbers features from 0: first_index = 0." if int(index) == 0 else ""
                validate.fail(place, f"rising indices, from {first_index}", cell, hint)
            previous_index = int(index)
            rows.append(len(labels))
            columns.append(previous_index - first_index)
            values.append(text_files.number(place, value))
        labels.append(text_files.number(place, cells[0]))
    if not labels:
        validate.fail(path.name, "at least one row", "none")
    return Sparse(*(np.array(column) for column in (labels, rows, columns, values)))
