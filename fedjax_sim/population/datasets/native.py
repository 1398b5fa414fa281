"""This module writes and reads a whole federated data set as a folder of native stores.

Data in another format can be converted into such a folder once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import secrets
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.files import text_files
from fedjax_sim.files.regular_files import json_of
from fedjax_sim.population.federated_data import (
    SCALED_BYTES,
    TASKS,
    FederatedData,
    are_bytes,
    cast_examples,
    existing_path,
)
from fedjax_sim.population.host import host_store
from fedjax_sim.population.population import Stored, pooled
from fedjax_sim.population.private_labels import has_private_labels
from fedjax_sim.population.protocol import sizes_of
from fedjax_sim.population.store import read_store, write_store
from fedjax_sim.population.wrapper import Around
from fedjax_sim.types import Array, ClientData, FolderPath, Groups, Learned, Population, Units

SCHEMA = 1
FIELDS = ("schema", "name", "task", "input_shape", "num_outputs", "label_names", "vocabulary")
# Fields of info.json, which it lacks if an earlier version wrote it. Without a record, nothing is known of the rows.
NAME_FIELDS = ("client_names", "held_out_names")
FEATURES = ("feature_names", "units")
RECORD = "learned"
SPECIAL = "special_tokens"
NOT_HELD = ("poisons", "triggered", "local_test", "measure", "server", "columns")  # fields that a folder cannot hold
LARGEST_INFO = 1 << 26  # bytes
# The quotient of every byte, as NumPy rounds it. XLA would multiply by 1 / 255, which rounds differently.
QUOTIENTS = np.arange(256, dtype=np.float32) / np.float32(255)


def write_native(directory: str | os.PathLike, data: FederatedData) -> None:
    """Writes a data set to a folder, which `native` reads: train/, test/, held_out/ (if any) and info.json.

    Args:
      directory: the folder to make. It must not exist.
      data: a data set whose populations have up to 2^24 clients.

    Raises: FileExistsError for an existing folder. ValueError for poisoned clients, a local test, a measure, a server
      with rows, parties, groups and private labels. A folder does not hold these, so apply them to `native(...)`.

    Guarantees: the data set that is read equals the one that was written
    (tests/population/datasets/test_native.py::test_round_trip). The folder appears complete or not at all
    (tests/population/datasets/test_native.py::test_a_failed_write_leaves_nothing).
    """
    facts = {field: getattr(data, field) for field in NOT_HELD}
    facts |= {"groups": isinstance(data.train, Groups), "private labels": has_private_labels(data.train)}
    for fact, is_there in facts.items():
        if is_there:
            hint = "A folder does not hold it: write the plain data, and wrap what is read."
            validate.fail("data", f"a data set without {fact}", data.name, hint)
    target = pathlib.Path(directory).absolute()
    if target.exists():
        raise FileExistsError(f"directory: expected a folder that does not exist, got {str(target)!r}.")
    # The temporary folder lies beside the target, on the same file system, so that renaming it is atomic.
    temporary = target.parent / f".{target.name}.{secrets.token_hex(8)}"
    temporary.mkdir(parents=True)
    try:
        for name, population in (("train", data.train), ("held_out", data.held_out)):
            if population is not None:
                offsets = np.concatenate([[0], np.cumsum(np.asarray(sizes_of(population), np.int64))])
                write_store(temporary / name, jax.device_get(pooled(population).examples), offsets)
        # The test set is stored as a population of one client.
        write_store(temporary / "test", data.test, np.array([0, len(jax.tree.leaves(data.test)[0])]))
        fields = (*FIELDS[1:], *NAME_FIELDS, *FEATURES, SPECIAL)
        info = {"schema": SCHEMA, **{field: getattr(data, field) for field in fields}}
        info[RECORD] = None if data.learned is None else [record._asdict() for record in data.learned]
        with (temporary / "info.json").open("w", encoding="utf-8") as file:
            json.dump(info, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _info(path: pathlib.Path) -> dict[str, Any]:
    """Reads info.json and checks its content.

    Args:
      path: of the file, of at most `LARGEST_INFO` bytes.

    Returns: field -> value, with tuples in the place of lists, `Units` for "units" and `Learned` for "learned". Fields
      that an earlier version did not write are None, and () for "special_tokens".

    Raises: ValueError or TypeError that names the field.
    """
    existing_path("directory", str(path), folder=False)
    if path.stat().st_size > LARGEST_INFO:
        validate.fail(str(path), f"at most {LARGEST_INFO} bytes", path.stat().st_size)
    text = text_files.text_of(path.name, path, "JSON text in UTF-8")
    try:
        info = json_of(text)
    except ValueError as error:
        validate.fail(str(path), "JSON text", str(error))
    if isinstance(info, dict):
        info = {**dict.fromkeys((*NAME_FIELDS, *FEATURES, RECORD)), SPECIAL: []} | info
    if not isinstance(info, dict) or set(info) != {*FIELDS, *NAME_FIELDS, *FEATURES, RECORD, SPECIAL}:
        validate.fail(str(path), f"an object with {', '.join(FIELDS)}", info)
    validate.one_of("info.schema", info["schema"], (SCHEMA,))
    validate.one_of("info.task", info["task"], TASKS)
    validate.integer("info.num_outputs", info["num_outputs"])
    if not isinstance(info["name"], str):
        validate.fail("info.name", "a string", info["name"], error=TypeError)
    shape = info["input_shape"]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 1 for n in shape):
        validate.fail("info.input_shape", "a list of integers >= 1", shape)
    for field in ("label_names", "vocabulary", *NAME_FIELDS, "feature_names"):
        names = info[field]
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            validate.fail(f"info.{field}", "null or a list of strings", names, error=TypeError)
        info[field] = None if names is None else tuple(names)
    special = info[SPECIAL]
    if not isinstance(special, list) or not all(type(n) is int and 0 <= n < info["num_outputs"] for n in special):
        validate.fail(f"info.{SPECIAL}", f"a list of integers in [0, {info['num_outputs']})", special)
    about = {"input_shape": tuple(shape), "units": _units(info["units"]), RECORD: _record(info[RECORD])}
    return {**info, **about, SPECIAL: tuple(special)}


def _units(fields: Any) -> Units | None:
    """Returns the own units of the features, as info.json has them."""
    if fields is None:
        return None
    is_pair = isinstance(fields, list) and len(fields) == 2 and all(isinstance(numbers, list) for numbers in fields)
    if not is_pair or len(fields[0]) != len(fields[1]) or not all(type(x) is float for x in fields[0] + fields[1]):
        validate.fail("info.units", "null or two lists of numbers of one length", fields, error=TypeError)
    return Units(*map(tuple, fields))


def _record(fields: Any) -> tuple[Learned, ...] | None:
    """Returns the record of what was learnt from the rows, as info.json has it.

    Args:
      fields: as JSON has it: a list with a dict of the fields of `Learned` for each entry; or None.

    Returns: the record. () states that nothing was learnt, and None that nothing is known.

    Raises: TypeError for anything else.
    """
    if fields is None:
        return None
    names = ("what", "columns", "effect", "instead", "is_scale", "is_public", "unit")
    facts = ("is_scale", "is_public")
    rule = f"null or a list of objects with {', '.join(names)}"
    if not isinstance(fields, list):
        validate.fail("info.learned", rule, fields, error=TypeError)
    for entry in fields:
        if (
            not isinstance(entry, dict)
            or set(entry) != set(names)
            or not all(isinstance(entry[fact], bool) for fact in facts)
            or entry["unit"] not in ("client", "record")
        ):
            validate.fail("info.learned", rule, entry, error=TypeError)
        texts = [entry["what"], entry["effect"], entry["instead"]]
        columns = entry["columns"]
        if not isinstance(columns, list) or not all(isinstance(text, str) for text in texts + columns):
            validate.fail("info.learned", "texts, and a list of texts as columns", entry, error=TypeError)
    return tuple(Learned(**entry | {"columns": tuple(entry["columns"])}) for entry in fields)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ScaledBytes(Around):
    """A `ScaledBytes` population reads features of dtype uint8 as x / 255. They are stored and moved as bytes.

    Guarantees: x is the bytes divided by 255 up to rounding, while the population's own arrays are not float32
    (tests/population/datasets/test_native.py::test_a_store_of_bytes). Quotients have the same bits as in NumPy, so they
    equal those of the test set and of `from_sites` (::test_every_byte_has_one_quotient).
    """

    inner: Population

    # A field of a protocol is read only, but Python's types have no word for it.
    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """N, the number of clients."""
        return self.inner.size

    def client(self, id: Array) -> ClientData:
        """Returns the data of client `id`, with x in float32."""
        data = self.inner.client(id)
        x = jnp.asarray(QUOTIENTS)[data.examples["x"].astype(jnp.int32)]
        return data._replace(examples={**data.examples, "x": x})


@validate.named_arguments
def native(*, directory: FolderPath, host: bool = False, scale_bytes: bool = True) -> FederatedData:
    """Reads a data set that was written by `write_native`.

    Args:
      directory: a folder with info.json, the stores train/ and test/ and, optionally, held_out/. If there is no test/,
        the rows of held_out/ are the test set.
      host: True leaves the training clients on the disk, and reads each of them when it is in a cohort. Their labels
        are then not checked beforehand.
      scale_bytes: True reads features of dtype uint8, which `write_store` may have written, as x / 255. False keeps
        them as bytes.

    Returns: `FederatedData`.

    Raises: ValueError or TypeError for a missing or damaged store, and for shapes or labels that contradict info.json.

    Guarantees: clients, held-out clients, test set and facts equal those of a data set of floats that `write_native`
    wrote (tests/population/datasets/test_native.py::test_round_trip); features of dtype uint8 are read as x / 255 in
    all splits (::test_a_store_of_bytes).
    """
    folder = existing_path("directory", directory)
    info = _info(folder / "info.json")
    info.pop("schema")
    learned = info.pop(RECORD)

    # info.json and the stores are separate files, so shapes and labels are compared with what info.json declares.
    def check(split: str, examples: Any) -> dict[str, np.ndarray]:
        examples = {name: np.asarray(leaf) for name, leaf in examples.items()}
        if info["task"] == "quadratic":
            return examples
        if not {"x", "y"} <= examples.keys():
            validate.fail(split, "leaves x and y", sorted(examples))
        if examples["x"].shape[1:] != info["input_shape"]:
            validate.fail(f"{split}.x", f"examples of shape {info['input_shape']}", examples["x"].shape[1:])
        return {**examples, **cast_examples(split, examples, info["task"], info["num_outputs"])}

    def store(split: str) -> Stored | None:
        if not (folder / split).exists():
            return None
        population = read_store(folder / split)
        check(split, population.examples)
        return population

    existing_path("directory", str(folder / "train"))
    stored_train = host_store(folder / "train") if host else store("train")
    assert stored_train is not None, "the folder exists"
    train = dataclasses.replace(stored_train, learned=learned)
    held_out = store("held_out")
    central_test = store("test") or store("held_out")
    if central_test is None:
        validate.fail("directory", "a store test/ or held_out/", str(folder), "Without one there is no test set.")
    for field, population in zip(NAME_FIELDS, (train, held_out), strict=True):
        if info[field] is not None and len(info[field]) != (0 if population is None else population.size):
            hint = "If another store took the place of theirs, write null."
            validate.fail(f"info.{field}", "a name for each client", f"{len(info[field]):,} names", hint)
    data = FederatedData(train=train, test=check("test", central_test.examples), held_out=held_out, **info)
    if not scale_bytes or info["task"] in ("next_token", "quadratic"):
        return data
    splits = {"train": train, "test": central_test, "held_out": held_out}
    features = {name: _features(population) for name, population in splits.items() if population is not None}
    return _scaled(data) if are_bytes(features) else data


def _features(population: Population) -> Any:
    """Returns shape and dtype of a client's x, without reading it."""
    client = jax.eval_shape(population.client, jax.ShapeDtypeStruct((), jnp.int32))
    return client.examples["x"]


def _scaled(data: FederatedData) -> FederatedData:
    """Returns the data set with x / 255 for x. The populations keep x as bytes."""
    return data._replace(
        train=ScaledBytes(data.train),
        test={**data.test, "x": data.test["x"] / np.float32(255)},
        held_out=None if data.held_out is None else ScaledBytes(data.held_out),
        notes=(SCALED_BYTES,),
    )
