"""This module defines `FederatedData`, which every data set factory returns, and the checks that every data set passes.

`from_sites` is the common way to build one: a dict of examples per client.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.population import stored
from fedjax_sim.types import Learned, Population, PyTree, Units, learned_from

TASKS = ("binary", "classification", "next_token", "quadratic", "regression")
PACKED = (".bz2", ".gz", ".xz", ".zip", ".zst")  # suffixes of compressed files
SITE = '{"x": features, "y": labels}'  # a client's examples, as error messages describe them
PADDING = -1  # a label that a loss must leave out
SCALED_BYTES = "features of one byte, 0 to 255, are divided by 255"


class TableColumn(NamedTuple):
    """A column of a table, and what it became in a data set."""

    name: str
    use: str  # "feature", "label", "client id" or "not used"
    preparation: str = ""  # of a feature, in words


class FederatedData(NamedTuple):
    """A federated data set has clients to train on, test data, and the facts that a model and a loss must fit.

    Examples are dicts with features `x` [n, *input_shape] and targets `y`. The task says what `y` is:

    - "binary": int32 [n], 0 or 1. The model has one output.
    - "classification": int32 [n], in [0, num_outputs).
    - "next_token": int32 [n, *input_shape], where -1 marks padding.
    - "regression": float32 [n, num_outputs].
    - "quadratic": there is no x and y, but `hessian` [n, d, d] and `center` [n, d]. The loss is `quadratic_loss`.
    - "node_classification", "graph_classification", "link_prediction": x is a batch of `GraphData`, and `input_shape`
      is (F,), the number of features of a node.
    """

    train: Population  # the clients who train
    test: PyTree  # central test set: NumPy leaves [n, ...]
    held_out: Population | None  # clients made of test rows: new ones, or, where files name clients, some of `train`
    input_shape: tuple[int, ...]  # of one example
    num_outputs: int
    task: str  # one of TASKS, or of graphs
    label_names: tuple[str, ...] | None = None  # what outputs 0, 1, ... mean
    vocabulary: tuple[str, ...] | None = None  # what tokens 0, 1, ... mean
    name: str = ""
    local_test: Population | None = None  # the clients of `train`, by id, with other rows, which are not trained on
    triggered: PyTree | None = None  # of a backdoor: test rows of other labels with its trigger, labelled as its target
    poisons: tuple[str, ...] = ()  # how clients of `train` were poisoned, as text for reports
    server: PyTree | None = None  # rows that the server holds: NumPy leaves [n, ...], not of `train` and no test set
    measure: Callable | None = None  # (outputs [n, ...], examples) -> {metric: [n]}, reported by evaluations
    columns: tuple[int, ...] | None = None  # number of columns of x [n, d] that each party holds, in the parties' order
    notes: tuple[str, ...] = ()  # what reading the files changed, as text for reports
    client_names: tuple[str, ...] | None = None  # of the clients of `train` and `local_test`, by id; None = no names
    held_out_names: tuple[str, ...] | None = None  # of the clients of `held_out`, by id
    table_columns: tuple[TableColumn, ...] = ()  # what became of the columns of the files
    feature_names: tuple[str, ...] | None = None  # of the numbers of x [n, d], or of x as vectors; None = no names
    units: Units | None = None  # the own units of the numbers of x, if they were standardised; None = they are in them
    warnings: tuple[str, ...] = ()  # what in the files looks wrong, as text for reports
    special_tokens: tuple[int, ...] = ()  # tokens that stand for no word, such as an end; accuracy leaves them out

    @property
    def learned(self) -> tuple[Learned, ...] | None:
        """What prepared the clients' inputs and was learnt from the rows of several of them; None = not known.

        It is the record of the population `train`, so that it stays with the clients whatever wraps them.

        >>> from fedjax_sim import population
        >>> population.digits(num_clients=5).learned, [record.what for record in population.breast_cancer().learned]
        ((), ['mean and standard deviation'])
        """
        return learned_from(self.train)

    def __repr__(self) -> str:
        """Returns a line without the arrays.

        >>> from fedjax_sim import population
        >>> population.digits(num_clients=5)
        FederatedData('digits': 5 clients, task 'classification', x [64], 10 outputs)
        """
        kind = f"task {self.task!r}, x {list(self.input_shape)}, {self.num_outputs} outputs"
        return f"FederatedData({self.name!r}: {self.train.size} clients, {kind})"


def cast_examples(where: str, examples: dict[str, np.ndarray], task: str, num_outputs: int) -> dict[str, np.ndarray]:
    """Checks and casts x and y of one client or of the test set.

    Both must be finite and equally long, and labels in range. Labels [n, 1] are read as [n]. If there are no rows,
    shapes and dtypes are not checked.

    Args:
      where: the name of the examples in error messages.
      examples: a dict with `x` and `y`.
      task, num_outputs: see `FederatedData`.

    Returns: {"x", "y"}. Tokens and labels are int32, all other numbers float32.

    Raises: ValueError or TypeError that names `where`, for examples that do not fit the task.
    """
    x, y = (_rows(f"{where}.{leaf}", examples[leaf]) for leaf in ("x", "y"))
    if len(x) != len(y):
        validate.fail(where, "as many labels as examples", (len(x), len(y)))
    if task in ("binary", "classification") and len(y):
        if y.size != len(y):
            validate.fail(f"{where}.y", "one label per example", f"shape {y.shape}", "One-hot labels: y.argmax(1).")
        y = y.reshape(-1)
    if task == "next_token" and len(y) and y.shape != x.shape:
        validate.fail(f"{where}.y", f"a token for each of x, shape {x.shape}", f"shape {y.shape}")
    if task == "next_token":
        _labels(f"{where}.x", x, 0, num_outputs)
        x = x.astype(np.int32)
    with np.errstate(over="ignore"):  # a number beyond float32 becomes inf, and `_finite` refuses it below
        x = x if task == "next_token" else x.astype(np.float32)
        if task == "regression":
            y = y.astype(np.float32).reshape(len(y), -1 if len(y) else num_outputs)
    _finite(f"{where}.x", x)
    if task == "regression":
        _finite(f"{where}.y", y)
        if len(y) and y.shape[-1] != num_outputs:
            validate.fail(f"{where}.y", f"{num_outputs} targets per example", y.shape[-1])
    else:
        # A binary model has one output for two classes.
        classes = 2 if task == "binary" else num_outputs
        _labels(f"{where}.y", y, PADDING if task == "next_token" else 0, classes)
        y = y.astype(np.int32)
    return {"x": x, "y": y}


def _rows(where: str, values: Any) -> np.ndarray:
    """Returns `values` as an array of numbers with one row per example.

    Args:
      where: the name of the values in error messages, such as "train['a'].x".
      values: anything that NumPy makes an array of: [n] or [n, ...], booleans, integers or floats without a mask.

    Returns: the array in its own dtype. Values of length 0 have the dtype float32, whatever theirs is.

    Raises: TypeError for values that are no numbers; ValueError for rows of different lengths, masks, and one number.
    """
    rule = "numbers in rows of equal length"
    if np.ma.is_masked(values):
        validate.fail(where, "numbers, none of them missing", "a mask", "Impute or drop the rows before loading.")
    try:
        rows = np.asarray(values)
    except ValueError:
        validate.fail(where, rule, "rows of different lengths")
    if rows.ndim and not len(rows):
        return np.zeros(rows.shape, np.float32)  # the dtype that NumPy gives to an empty list means nothing
    if rows.dtype.kind not in "biuf":
        hint = "A client without rows has []." if values is None else ""
        validate.fail(where, rule, str(rows.dtype), hint, TypeError)
    if rows.ndim == 0:
        validate.fail(where, "one row per example", rows.item())
    return rows


def _check_site(where: str, site: Any) -> None:
    """Refuses a client's examples unless they are a mapping with the keys x and y and no others."""
    if not isinstance(site, Mapping):
        validate.fail(where, SITE, type(site).__name__, error=TypeError)
    if not {"x", "y"} <= site.keys():
        hint = "Rename the features x and the labels y."
        validate.fail(where, "a dict of x and y", sorted(map(str, site)), hint)
    for leaf in site:
        if leaf not in ("x", "y"):
            validate.fail(where, "x and y alone", leaf, "Put features into x, and leave out what no model reads.")


def _finite(where: str, values: np.ndarray) -> None:
    """Refuses NaN and infinity, and names the first position."""
    if not np.isfinite(values).all():
        position = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        hint = "Impute or drop the row before loading."
        validate.fail(f"{where}[{', '.join(map(str, position))}]", "a finite number", float(values[position]), hint)


def _labels(where: str, values: np.ndarray, low: int, num_classes: int) -> None:
    """Refuses values that are not integers in [low, num_classes), and names the first position."""
    # Labels may be floats in a file, as long as they are whole. A comparison with NaN is False, so NaN is refused too.
    is_wrong = ~((values >= low) & (values < num_classes) & (values == np.floor(values)))
    if is_wrong.any():
        position = tuple(int(i) for i in np.argwhere(is_wrong)[0])
        place = f"{where}[{', '.join(map(str, position))}]"
        validate.fail(place, f"an integer label in [{low}, {num_classes - 1}]", values[position].item())


def check_ids(where: str, ids: Sequence[str]) -> list[str]:
    """Returns the ids as a list. It refuses ids that are not strings, empty, like a path, or listed twice."""
    seen = set()
    for id in ids:
        if not isinstance(id, str):
            validate.fail(where, "client ids that are strings", id, error=TypeError)
        if not id or id in (".", "..") or len(id) > 255 or any(c in "/\\" or ord(c) < 32 for c in id):
            validate.fail(where, "a client id of 1 to 255 characters that is no path", id)
        if id in seen:
            validate.fail(where, "distinct client ids", id, "The same client is listed twice.")
        seen.add(id)
    return list(ids)


def existing_path(name: str, path: str, *, folder: bool = True) -> pathlib.Path:
    """Returns the path of a folder, or of a file if `folder` is False, that exists. `~` is the user's home."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        validate.fail(name, "a path", path, error=TypeError)
    expanded = pathlib.Path(os.path.expanduser(path))
    if not (expanded.is_dir() if folder else expanded.is_file()):
        validate.fail(name, f"an existing {'folder' if folder else 'file'}", str(path))
    return expanded


def files_of(folder: pathlib.Path, suffix: str, what: str) -> list[pathlib.Path]:
    """Returns the files of a folder with this suffix, sorted by name.

    Args:
      folder: an existing folder.
      suffix: such as ".json".
      what: the kind of file, for error messages.
    Raises: ValueError if there are none. ValueError also for an entry that only looks like such a file: a broken link,
      a folder, the suffix in capitals, or a compressed file. Otherwise the entry would be skipped silently.
    """
    paths = sorted(path for path in folder.iterdir() if path.suffix == suffix and path.is_file())
    similar_suffixes = (suffix, *(suffix + packed for packed in PACKED))
    for path in sorted(folder.iterdir()):
        if path not in paths and path.name.lower().endswith(similar_suffixes):
            validate.fail(path.name, f"{what} NAME{suffix}", str(path), "Rename it, unpack it, or take it away.")
    if not paths:
        validate.fail("directory", f"a folder with {suffix} files", str(folder))
    return paths


def concatenate(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the rows of all parts, in order."""
    return {leaf: np.concatenate([part[leaf] for part in parts]) for leaf in parts[0]}


def offsets_of(parts: Sequence[dict[str, np.ndarray]]) -> np.ndarray:
    """Returns where each part's rows begin in their concatenation, [N + 1] int64."""
    return np.concatenate([[0], np.cumsum([len(part["y"]) for part in parts])]).astype(np.int64)


@validate.named_arguments
def from_sites(
    train: dict[str, Any],
    test: dict[str, Any],
    *,
    task: str,
    num_outputs: int,
    name: str,
    label_names: tuple[str, ...] | None = None,
    vocabulary: tuple[str, ...] | None = None,
    scale_bytes: bool = True,
    learned: tuple[Learned, ...] | None = None,
    special_tokens: tuple[int, ...] = (),
) -> FederatedData:
    """Builds federated data from one dict of examples per client.

    Args:
      train: client id -> {"x", "y"}. Client i of the population is the i-th of the dict, and its id is its name in
        `client_names`. A client may be empty, of length 0. The shapes are those of the first client with rows.
      test: client id -> {"x", "y"}. All rows together are the central test set. Each client with rows is also one
        held-out client, and keeps its id in `held_out_names`.
      task, num_outputs, name: see `FederatedData`.
      label_names, vocabulary: what labels and tokens 0, 1, ... mean; None: nobody says.
      scale_bytes: whether features of dtype uint8, such as images, become x / 255 in float32. `notes` then says so.
        False keeps the values 0 to 255. Tokens are never scaled.
      learned: what prepared the examples and was learnt from several clients' rows. () states that nothing was. None
        states nothing, which privacy statements then say.
      special_tokens: see `FederatedData`.

    Raises: ValueError or TypeError, which names client, leaf and row. Rows are refused for features that are not
      finite, labels out of range, and lengths or shapes that differ. Clients are refused for leaves other than x and y,
      and for bytes at some clients and other numbers at others. There must be a client and a test row.

    Guarantees: rows keep their client and order (tests/population/datasets/test_leaf_tff.py::test_sites_keep_rows),
    also beside clients without rows, whatever the shape and dtype of their arrays (::test_clients_without_rows). Bytes
    are divided by 255 (::test_bytes_are_scaled). Names stay with their clients
    (tests/population/test_client_names.py::test_names_of_sites).

    >>> rows = {"x": np.ones((2, 3)), "y": np.array([0, 1])}
    >>> data = from_sites({"a": rows, "b": rows}, {"a": rows}, task="binary", num_outputs=1, name="toy")
    >>> data.train.size, data.held_out.size, data.input_shape
    (2, 1, (3,))
    """
    validate.one_of("task", task, TASKS)
    for split, clients in (("train", train), ("test", test)):
        if not isinstance(clients, Mapping):
            validate.fail(split, f"a dict from client id to {SITE}", type(clients).__name__, error=TypeError)
        for id, site in clients.items():
            _check_site(f"{split}[{id!r}]", site)
    if not train:
        validate.fail("train", "at least one client", {})
    # `checked` is what the data set will hold. `features` keeps the original arrays, whose dtype says what are bytes.
    checked = []
    features = {}
    for split, clients in (("train", train), ("test", test)):
        check_ids(split, list(clients))
        parts = {id: cast_examples(f"{split}[{id!r}]", part, task, num_outputs) for id, part in clients.items()}
        if not any(len(part["y"]) for part in parts.values()):
            validate.fail(split, f"at least one {split} row", 0)
        checked.append(parts)
        features |= {f"{split}[{id!r}]": np.asarray(clients[id]["x"]) for id, part in parts.items() if len(part["y"])}
    first_id, first = next((id, part) for id, part in checked[0].items() if len(part["y"]))
    shape = first["x"].shape[1:]
    # All clients must have the shape of the first client with rows.
    for split, parts in zip(("train", "test"), checked, strict=True):
        for id, part in parts.items():
            if not len(part["y"]):  # a client without rows has no shape of its own
                part |= {leaf: values[:0] for leaf, values in first.items()}
            elif part["x"].shape[1:] != shape:
                rule = f"examples of shape {shape}, as those of {first_id!r}"
                validate.fail(f"{split}[{id!r}].x", rule, part["x"].shape[1:])
    # Either all clients hold bytes or none does: `are_bytes` refuses a mix, whose scales would differ between clients.
    if scale := scale_bytes and task != "next_token" and are_bytes(features):
        for part in (*checked[0].values(), *checked[1].values()):
            part["x"] = part["x"] / np.float32(255)
    train_parts = list(checked[0].values())
    tested = {id: part for id, part in checked[1].items() if len(part["y"])}
    test_parts = list(tested.values())
    population = stored(concatenate(train_parts), offsets_of(train_parts), learned=learned)
    central_test = concatenate(test_parts)
    held_out = stored(central_test, offsets_of(test_parts))
    notes = (SCALED_BYTES,) if scale else ()
    return FederatedData(
        train=population,
        test=central_test,
        held_out=held_out,
        input_shape=shape,
        num_outputs=num_outputs,
        task=task,
        label_names=label_names,
        vocabulary=vocabulary,
        name=name,
        notes=notes,
        client_names=tuple(train),
        held_out_names=tuple(tested),
        special_tokens=special_tokens,
    )


def are_bytes(features: dict[str, Any]) -> bool:
    """Returns whether all arrays are of dtype uint8, as images often are. It refuses a mix of uint8 and other dtypes.

    Args:
      features: name of the array, for the error message -> anything with a dtype.
    """
    first_of_kind: dict[bool, str] = {}  # is uint8 -> the first array for which that holds
    for name, x in features.items():
        first_of_kind.setdefault(x.dtype == np.uint8, f"{x.dtype} at {name}")
    if len(first_of_kind) == 2:
        hint = "Cast all to one dtype, or pass scale_bytes=False."
        validate.fail("x", "uint8 everywhere or nowhere", " and ".join(first_of_kind.values()), hint)
    return True in first_of_kind


def standardiser(train: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and standard deviation of every column of the training rows. A constant column gets 1."""
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    return mean, np.where(deviation > 0, deviation, 1.0)
