"""This module reads the federated data sets of LEAF and TensorFlow Federated from local files.

Reading a file never runs code from it.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np

from fedjax_sim import validate
from fedjax_sim.files import text_files
from fedjax_sim.population.datasets.hdf5_file import read_clients, split_clients
from fedjax_sim.population.datasets.quantities import classes_learned
from fedjax_sim.population.datasets.vocabularies import codes_of, vocabulary_learned
from fedjax_sim.population.federated_data import PADDING, FederatedData, check_ids, existing_path, files_of, from_sites
from fedjax_sim.population.splits import split_learned
from fedjax_sim.types import FilePath, FolderPath, Learned
from fedjax_sim.validate import Integer, NonNegativeInt, OpenShare

TASKS = ("binary", "classification", "next_token", "regression")


def _num_outputs(task: str, num_classes: int | None, *splits: dict[str, dict[str, np.ndarray]]) -> int:
    """Returns the number of outputs: 1 for "binary", the number of targets for "regression", otherwise C.

    C is `num_classes`, or the largest label + 1 if that is None.

    Args:
      task: one of `TASKS`.
      num_classes: C >= 2, for "classification" and "next_token" alone; None if it is not stated.
      splits: client -> {"x": [n, ...], "y": [n, ...]}, for each of training, test, ... The arrays may be empty.

    Raises: ValueError for a number of classes with another task, and for a largest label outside of [0, 10^7).
    """
    validate.one_of("task", task, TASKS)
    if num_classes is not None:
        validate.integer("num_classes", num_classes, 2)
        if task in ("classification", "next_token"):
            return num_classes
        validate.fail("num_classes", f"None for task {task!r}", num_classes)
    if task == "binary":
        return 1
    arrays = [client[leaf] for split in splits for client in split.values() for leaf in ("x", "y")]
    targets = [values for values in arrays[1::2] if values.size]
    if task == "regression":
        return int(np.prod(targets[0].shape[1:], dtype=int)) if targets else 1
    # Inputs of "next_token" are tokens too, and may contain a token that is never a target.
    labels = targets + [values for values in arrays[::2] if values.size] if task == "next_token" else targets
    largest = max((float(values.max()) for values in labels), default=0.0)
    if not (0 <= largest < 10_000_000):
        validate.fail("label", "labels in 0..C-1", largest, "Set num_classes, or another task.")
    return int(largest) + 1


def _classes_learned(task: str, num_classes: int | None) -> tuple[Learned, ...]:
    """Returns the record that the number of classes is that of all labels, unless it is stated."""
    is_counted = num_classes is None and task in ("classification", "next_token")
    return classes_learned("num_classes = C") if is_counted else ()


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object as a dict, and refuses equal keys. The standard library would silently keep the last."""
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated_key = next(key for key in keys if keys.count(key) > 1)
        validate.fail("user_data", "distinct keys", repeated_key, "The same key is there twice.")
    return content


def _array(place: str, values: Any) -> np.ndarray:
    """Returns values of a JSON file as an array with one row per example."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        array = np.asarray(None)  # is refused below, with the same message as other wrong values
    if array.ndim == 0 or array.dtype == object:
        validate.fail(place, "a list of rows of equal length, numbers or strings", values, error=TypeError)
    return array


def leaf_split(folder: pathlib.Path) -> dict[str, dict[str, np.ndarray]]:
    """Reads every JSON file in a folder of LEAF, such as train/.

    Args:
      folder: of the files `*.json`.

    Returns: user -> {"x", "y"}, arrays of numbers or texts. Users are in the order of the sorted file names.

    Raises: ValueError or TypeError for a file that is not JSON in LEAF's layout, for users that occur twice, and for
      counts or lengths that differ. The error names the file, and the user if it concerns a single one.
    """
    existing_path("directory", str(folder))
    paths = files_of(folder, ".json", "a file")
    clients: dict[str, dict[str, np.ndarray]] = {}
    for path in paths:
        place = f"{folder.name}/{path.name}"
        text = text_files.text_of(place, path, "JSON text in UTF-8")
        try:
            content = json.loads(text, object_pairs_hook=_object_of_pairs)
        except (json.JSONDecodeError, RecursionError) as error:
            validate.fail(place, "JSON text", str(error))
        except ValueError as error:  # of `_object_of_pairs`, which does not know the file
            raise validate.InvalidArgument(f"{place}: {error}") from None
        if not isinstance(content, dict) or not {"users", "num_samples", "user_data"} <= content.keys():
            validate.fail(place, "an object with users, num_samples and user_data", content, error=TypeError)
        users = content["users"]
        counts = content["num_samples"]
        data = content["user_data"]
        if not (isinstance(users, list) and isinstance(counts, list) and isinstance(data, dict)):
            validate.fail(place, "lists users and num_samples and an object user_data", content, error=TypeError)
        check_ids(f"{place} users", users)
        if len(counts) != len(users) or set(users) != data.keys():
            validate.fail(
                place, "users, num_samples and user_data of the same users", (len(users), len(counts), len(data))
            )
        for user, count in zip(users, counts, strict=True):
            if user in clients:
                validate.fail(f"{place} users", "distinct client ids", user, "Another file of the folder has it too.")
            if not isinstance(data[user], dict) or not {"x", "y"} <= data[user].keys():
                validate.fail(f"{place} user_data[{user!r}]", "an object with x and y", data[user], error=TypeError)
            x, y = (_array(f"{place} {user!r}.{leaf}", data[user][leaf]) for leaf in ("x", "y"))
            if not (len(x) == len(y) == count):
                validate.fail(f"{place} {user!r}", f"{count} examples, as num_samples says", (len(x), len(y)))
            clients[user] = {"x": x, "y": y}
    return clients


def _characters(
    stated: Sequence[str] | None, *splits: dict[str, dict[str, np.ndarray]]
) -> tuple[tuple[str, ...], list[dict]]:
    """Encodes texts as codes of characters.

    Args:
      stated: the characters of the vocabulary; None for those of the texts.
      splits: user -> {"x", "y"}, texts.

    Returns: the vocabulary, and the splits with codes for texts. y is the label at the last position and -1 elsewhere.
    """
    clients = [(f"{user!r}", client) for split in splits for user, client in split.items() if client["y"].size]
    # All texts must be as long as the first text of the first client.
    length = max((len(str(text)) for _, client in clients[:1] for text in client["x"].flat[:1]), default=0)
    for place, client in clients:
        texts, targets = client["x"], client["y"]
        if texts.ndim != 1 or targets.ndim != 1 or texts.dtype.kind != "U" or targets.dtype.kind != "U":
            hint = "Sent140's tweets are read by population.sent140, CelebA's images by population.celeba."
            rule, shown = "one text and one character per example", (str(texts.dtype), str(targets.dtype))
            validate.fail(place, rule, shown, hint)
        wrong = [text for text in texts if len(text) != length or not length] + [c for c in targets if len(c) != 1]
        if wrong:
            validate.fail(place, f"texts of {length} characters and labels of one", str(wrong[0]))
    used = set().union(*(set("".join(client[leaf])) for _, client in clients for leaf in ("x", "y")))
    characters, code = codes_of(stated, used)

    def encode(client: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        n = len(client["y"])
        x = np.array([[code[c] for c in text] for text in client["x"]], np.int32).reshape(n, length)
        y = np.full((n, length), PADDING, np.int32)
        y[:, length - 1 :] = np.array([code[c] for c in client["y"]], np.int32).reshape(n, 1)
        return {"x": x, "y": y}

    encoded = [{user: encode(client) for user, client in split.items()} for split in splits]
    return ("<padding>", *characters), encoded


def leaf(
    *,
    directory: FolderPath,
    task: str = "classification",
    num_classes: int | None = None,
    vocabulary: Sequence[str] | None = None,
) -> FederatedData:
    """Reads a LEAF data set: train/*.json and test/*.json with users, num_samples, user_data {x, y}.

    If x is a text and y its next character, as in LEAF's Shakespeare, the task is "next_token". Then x [n, L] holds
    codes of characters, and y [n, L] is -1 except at the last position.

    Args:
      directory: a folder with train/ and test/.
      task: "classification", "binary" or "regression", for numbers.
      num_classes: C. None for the largest label + 1.
      vocabulary: the characters of texts, in the order of their codes; texts may have no others. None for the
        characters of all texts.

    Returns: `FederatedData`. Held-out clients are the users of test/. They are the training users if LEAF split by
      sample.

    Raises: ValueError or TypeError that names file and user, for ids that are paths or occur twice, and for counts or
      lengths that differ.

    Guarantees: the users of all files of train/ are clients in the order of their ids, and the users of test/ are held
    out (tests/population/datasets/test_leaf_tff.py::test_leaf).

    References: Caldas et al., LEAF: a benchmark for federated settings, 2018.
    """
    folder = existing_path("directory", directory)
    validate.one_of("task", task, TASKS)
    train = leaf_split(folder / "train")
    test = leaf_split(folder / "test")
    # Texts decide the task, whatever the argument says.
    tokens = None
    learned = _classes_learned(task, num_classes)
    if any(client["x"].dtype.kind == "U" for client in train.values()):
        tokens, (train, test) = _characters(vocabulary, train, test)
        task = "next_token"
        num_classes = len(tokens)
        learned = vocabulary_learned(vocabulary)
    elif vocabulary is not None:
        validate.fail("vocabulary", "none beside numbers", list(vocabulary))
    for split, clients in (("train", train), ("test", test)):
        for user, client in clients.items():
            for name, values in client.items():
                if values.dtype.kind not in "biuf":
                    validate.fail(f"{split} {user!r}.{name}", "numbers", str(values.dtype), error=TypeError)
    num_outputs = _num_outputs(task, num_classes, train, test)
    about = {"vocabulary": tokens, "name": folder.name, "learned": learned}
    return from_sites(train, test, task=task, num_outputs=num_outputs, **about)


@validate.named_arguments
def tff_hdf5(
    *,
    path: FilePath,
    test_path: FilePath | None = None,
    features: str = "pixels",
    label: str = "label",
    task: str = "classification",
    num_classes: int | None = None,
    test_fraction: OpenShare = 0.2,
    split: Literal["together", "by_client"] = "together",
    max_bytes: Annotated[int, Integer(1, 4611686018427387904)] = 2**34,
    scale_bytes: bool = True,
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """Reads a data set of TensorFlow Federated from HDF5 files with examples/<client>/<feature>.

    It needs the extra `hdf5`.

    Args:
      path: file of the training clients, such as fed_emnist_train.h5.
      test_path: file of the test clients. None splits each client's examples at random.
      features: name of the feature in the file that is used as x ("pixels" of EMNIST, "image" of CIFAR-100).
      label: name of the feature that is used as y ("label" of both).
      task: "classification", "binary", "regression" or "next_token".
      num_classes: C. None for the largest label + 1.
      test_fraction: share of each client's examples that is its test part, if there is no test_path.
      split: "together" or "by_client", as in `csv_sites`, if there is no test_path.
      max_bytes: a file that declares more bytes is refused.
      scale_bytes: whether features of dtype uint8, such as those of CIFAR-100, become x / 255. False keeps 0 to 255.
      seed: of the split.

    Returns: `FederatedData` with clients in the order of their ids.

    Raises: ImportError without h5py, which names the extra. ValueError or TypeError that names file and member.
      MemoryError for a file that is too large.

    Guarantees: each example is in the training part or in the test part of its client, with its own label
    (tests/population/datasets/test_leaf_tff.py::test_tff_hdf5); bytes become x / 255 unless `scale_bytes` is False
    (::test_bytes_of_a_file_are_scaled).

    References: the layout of `tff.simulation.datasets`, TensorFlow Federated, 2019.
    """
    source = existing_path("path", path, folder=False)
    leaves = {"x": features, "y": label}
    train = read_clients("tff_hdf5", source, leaves, max_bytes=max_bytes)
    test = {}
    if test_path is not None:
        file = existing_path("test_path", test_path, folder=False)
        test = read_clients("tff_hdf5", file, leaves, max_bytes=max_bytes)
    else:
        # A split takes rows of all leaves, so their lengths are compared before `from_sites` would do it.
        for id, client in train.items():
            if len(client["x"]) != len(client["y"]):
                validate.fail(f"{source.name}/examples/{id}", "as many labels as examples", len(client["y"]))
        train, test = split_clients(train, test_fraction, seed, split)
    num_outputs = _num_outputs(task, num_classes, train, test)
    about: dict[str, Any] = {
        "name": source.stem,
        "scale_bytes": scale_bytes,
        "learned": _classes_learned(task, num_classes),
    }
    if test_path is None:
        about["learned"] += split_learned(split)
    return from_sites(train, test, task=task, num_outputs=num_outputs, **about)
