"""`FederatedData`, which a data set factory returns, and the checks that every data set passes."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.population import stored
from fedjax_sim.types import Population, PyTree

__all__ = ["FederatedData", "from_sites"]

TASKS = ("binary", "classification", "next_token", "quadratic", "regression")
PACKED = (".bz2", ".gz", ".xz", ".zip", ".zst")
SITE = '{"x": features, "y": labels}'  # of a client
PADDING = -1  # a label that a loss must leave out
SCALED_BYTES = "features of one byte, 0 to 255, are divided by 255"


class FederatedData(NamedTuple):
    """A population to train on, test data to evaluate on, and the facts that a model and a loss must fit.

    Examples are dicts `x` [n, *input_shape] and `y`: int32 [n] for "binary" (0 or 1, one output) and "classification",
    int32 [n, *input_shape] for "next_token" (-1 marks padding), float32 [n, num_outputs] for "regression". The task
    "quadratic" has `hessian` [n, d, d] and `center` [n, d] instead, and its own loss, `quadratic_loss`. Those of
    graphs, "node_classification", "graph_classification" and "link_prediction", have batches of `GraphData` as x, and F
    of a node as input shape.
    """

    train: Population  # the clients who train
    test: PyTree  # central test set: NumPy leaves [n, ...]
    held_out: Population | None  # clients made of test rows, who never train
    input_shape: tuple[int, ...]  # of one example
    num_outputs: int
    task: str  # one of TASKS, or of graphs
    label_names: tuple[str, ...] | None = None  # what outputs 0, 1, ... mean
    vocabulary: tuple[str, ...] | None = None  # what tokens 0, 1, ... mean
    name: str = ""
    local_test: Population | None = None  # the clients of `train`, by id, with rows of theirs that nobody trains on
    triggered: PyTree | None = None  # of a backdoor: test rows of other labels with its trigger, labelled as its target
    poisons: tuple[str, ...] = ()  # what was done to clients of `train`, as a person reads it
    server: PyTree | None = None  # rows that the server holds: NumPy leaves [n, ...], no client's and not tested on
    measure: Callable | None = None  # (outputs [n, ...], examples) -> {metric: [n]}, told in evaluations
    columns: tuple[int, ...] | None = None  # of each party in x [n, d], in order: they hold the same rows vertically
    notes: tuple[str, ...] = ()  # what reading changed, as a person reads it


def check_examples(where: str, examples: dict[str, np.ndarray], task: str, num_outputs: int) -> dict[str, np.ndarray]:
    """One client's (or the test set's) x and y, cast and checked: finite, equally long, labels in range. Labels [n, 1]
    are taken for [n]. Without rows shapes and dtypes mean nothing."""
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
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes inf, and is refused
        x = x if task == "next_token" else x.astype(np.float32)
        if task == "regression":
            y = y.astype(np.float32).reshape(len(y), -1 if len(y) else num_outputs)
    _finite(f"{where}.x", x)
    if task == "regression":
        _finite(f"{where}.y", y)
        if len(y) and y.shape[1] != num_outputs:
            validate.fail(f"{where}.y", f"{num_outputs} targets per example", y.shape[1])
    else:
        classes = 2 if task == "binary" else num_outputs
        _labels(f"{where}.y", y, PADDING if task == "next_token" else 0, classes)
        y = y.astype(np.int32)
    return {"x": x, "y": y}


def _rows(where: str, values: Any) -> np.ndarray:
    """An array of numbers, a row an example."""
    rule = "numbers in rows of equal length"
    try:
        rows = np.asarray(values)
    except ValueError:
        validate.fail(where, rule, "rows of different lengths")
    if rows.ndim and not len(rows):
        return np.zeros(rows.shape, np.float32)  # of no values NumPy tells any dtype
    if rows.dtype.kind not in "biuf":
        hint = "A client without rows has []." if values is None else ""
        validate.fail(where, rule, str(rows.dtype), hint, TypeError)
    if rows.ndim == 0:
        validate.fail(where, "one row per example", rows.item())
    return rows


def _check_site(where: str, site: Any) -> None:
    """Refuses what is no mapping of x and y alone."""
    if not isinstance(site, Mapping):
        validate.fail(where, SITE, type(site).__name__, error=TypeError)
    if not {"x", "y"} <= site.keys():
        hint = "Rename the features x and the labels y."
        validate.fail(where, "a dict of x and y", sorted(map(str, site)), hint)
    for leaf in site:
        if leaf not in ("x", "y"):
            validate.fail(where, "x and y alone", leaf, "Put features into x, and leave out what no model reads.")


def _finite(where: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        position = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        hint = "Impute or drop the row before loading."
        validate.fail(f"{where}[{', '.join(map(str, position))}]", "a finite number", float(values[position]), hint)


def _labels(where: str, values: np.ndarray, low: int, num_classes: int) -> None:
    wrong = ~((values >= low) & (values < num_classes) & (values == np.floor(values)))
    if wrong.any():
        position = tuple(int(i) for i in np.argwhere(wrong)[0])
        place = f"{where}[{', '.join(map(str, position))}]"
        validate.fail(place, f"an integer label in [{low}, {num_classes - 1}]", values[position].item())


def check_ids(where: str, ids: Sequence[str]) -> list[str]:
    """The ids as a list; refuses what is no string, empty, a path, or listed twice."""
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


def existing(name: str, path: str, *, folder: bool = True) -> pathlib.Path:
    """A folder (or file) that exists; `~` is the user's own."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        validate.fail(name, "a path", path, error=TypeError)
    found = pathlib.Path(os.path.expanduser(path))
    if not (found.is_dir() if folder else found.is_file()):
        validate.fail(name, f"an existing {'folder' if folder else 'file'}", str(path))
    return found


def files_of(folder: pathlib.Path, suffix: str, what: str) -> list[pathlib.Path]:
    """The files of a folder with this suffix, sorted by name.

    Raises: ValueError if there are none, and for an entry that is no such file but looks like one: a broken link, a
      folder, the suffix in capitals, a compressed file. It would be missed silently.
    """
    paths = sorted(path for path in folder.iterdir() if path.suffix == suffix and path.is_file())
    alike = (suffix, *(suffix + packed for packed in PACKED))
    for path in sorted(folder.iterdir()):
        if path not in paths and path.name.lower().endswith(alike):
            validate.fail(path.name, f"{what} NAME{suffix}", str(path), "Rename it, unpack it, or take it away.")
    if not paths:
        validate.fail("directory", f"a folder with {suffix} files", str(folder))
    return paths


def concatenate(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The rows of all parts, in order."""
    return {leaf: np.concatenate([part[leaf] for part in parts]) for leaf in parts[0]}


def offsets_of(parts: Sequence[dict[str, np.ndarray]]) -> np.ndarray:
    """[N + 1] int64: where each part's rows begin."""
    return np.concatenate([[0], np.cumsum([len(part["y"]) for part in parts])]).astype(np.int64)


@validate.named_arguments
def from_sites(
    train: dict[str, Any],
    test: dict[str, Any],
    *,
    task: Literal["binary", "classification", "next_token", "quadratic", "regression"],
    num_outputs: int,
    name: str,
    label_names: tuple[str, ...] | None = None,
    vocabulary: tuple[str, ...] | None = None,
    scale_bytes: bool = True,
) -> FederatedData:
    """Federated data from one dict of examples per client.

    Args:
      train: client id -> {"x", "y"}; client i of the population is the i-th of the dict. A client may be empty, of
        length 0: shapes are those of the first client with rows.
      test: client id -> {"x", "y"}; all rows make the central test set, each client with rows one held-out client.
      task, num_outputs, name, label_names, vocabulary: see `FederatedData`.
      scale_bytes: features of dtype uint8, as images often are, become x / 255 in float32, and `notes` says so; False
        keeps 0 to 255. Tokens are kept always.

    Raises: ValueError or TypeError naming client, leaf and row for features that are not finite, labels out of range,
      lengths or shapes that differ, leaves beside x and y, bytes at some clients and numbers at others, no clients, no
      test rows.

    Guarantees: rows keep their client and order (tests/population/datasets/test_leaf_tff.py::test_sites_keep_rows),
    beside clients without rows, whatever the shape and dtype of their arrays (::test_clients_without_rows); bytes are
    divided by 255 (::test_bytes_are_scaled).

    >>> rows = {"x": np.ones((2, 3)), "y": np.array([0, 1])}
    >>> data = from_sites({"a": rows, "b": rows}, {"a": rows}, task="binary", num_outputs=1, name="toy")
    >>> data.train.size, data.held_out.size, data.input_shape
    (2, 1, (3,))
    """
    for split, clients in (("train", train), ("test", test)):
        if not isinstance(clients, Mapping):
            validate.fail(split, f"a dict from client id to {SITE}", type(clients).__name__, error=TypeError)
        for id, site in clients.items():
            _check_site(f"{split}[{id!r}]", site)
    if not train:
        validate.fail("train", "at least one client", {})
    checked, features = [], {}
    for split, clients in (("train", train), ("test", test)):
        check_ids(split, list(clients))
        parts = {id: check_examples(f"{split}[{id!r}]", part, task, num_outputs) for id, part in clients.items()}
        if not any(len(part["y"]) for part in parts.values()):
            validate.fail(split, f"at least one {split} row", 0)
        checked.append(parts)
        features |= {f"{split}[{id!r}]": np.asarray(clients[id]["x"]) for id, part in parts.items() if len(part["y"])}
    first_id, first = next((id, part) for id, part in checked[0].items() if len(part["y"]))
    shape = first["x"].shape[1:]
    for split, parts in zip(("train", "test"), checked, strict=True):
        for id, part in parts.items():
            if not len(part["y"]):  # a client without rows has no shape of its own
                part |= {leaf: values[:0] for leaf, values in first.items()}
            elif part["x"].shape[1:] != shape:
                rule = f"examples of shape {shape}, as those of {first_id!r}"
                validate.fail(f"{split}[{id!r}].x", rule, part["x"].shape[1:])
    if scale := scale_bytes and task != "next_token" and are_bytes(features):
        for part in (*checked[0].values(), *checked[1].values()):
            part["x"] = part["x"] / np.float32(255)
    rows = list(checked[0].values())
    tested = [part for part in checked[1].values() if len(part["y"])]
    population = stored(concatenate(rows), offsets_of(rows))
    central = concatenate(tested)
    held_out = stored(central, offsets_of(tested))
    notes = (SCALED_BYTES,) if scale else ()
    return FederatedData(
        population, central, held_out, shape, num_outputs, task, label_names, vocabulary, name, notes=notes
    )


def are_bytes(features: dict[str, Any]) -> bool:
    """Whether these arrays are of unsigned bytes, as images often are; refuses some that are beside some that are not.

    Args:
      features: name, for the error -> anything with a dtype.
    """
    first: dict[bool, str] = {}  # one of each kind
    for name, x in features.items():
        first.setdefault(x.dtype == np.uint8, f"{x.dtype} at {name}")
    if len(first) == 2:
        hint = "Cast all to one dtype, or pass scale_bytes=False."
        validate.fail("x", "uint8 everywhere or nowhere", " and ".join(first.values()), hint)
    return True in first


def stratified_split(
    labels: np.ndarray, test_fraction: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Sorted (training rows, test rows) with `test_fraction` of every class in the test set, rounded per class."""
    validate.in_range("test_fraction", test_fraction, 0, 1, open_low=True, open_high=True)
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        test[rows[: round(test_fraction * len(rows))]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)


def standardiser(train: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of every column of the training rows; a constant column gets deviation 1."""
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    return mean, np.where(deviation > 0, deviation, 1.0)
