"""A whole federated data set as a folder of native stores, into which other formats are converted once."""

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

from fedjax_sim import text_files, validate
from fedjax_sim.population.federated_data import (
    SCALED_BYTES,
    TASKS,
    FederatedData,
    are_bytes,
    check_examples,
    existing,
)
from fedjax_sim.population.host import host_store
from fedjax_sim.population.population import pooled
from fedjax_sim.population.private_labels import has_private_labels
from fedjax_sim.population.protocol import sizes_of
from fedjax_sim.population.store import read_store, write_store
from fedjax_sim.population.wrapper import Around
from fedjax_sim.types import Array, ClientData, FolderPath, Population

__all__ = ["native", "write_native"]

SCHEMA = 1
FIELDS = ("schema", "name", "task", "input_shape", "num_outputs", "label_names", "vocabulary")
NOT_HELD = ("poisons", "triggered", "local_test", "measure", "server", "columns")  # by a folder
LARGEST_INFO = 1 << 26  # bytes
QUOTIENTS = np.arange(256, dtype=np.float32) / np.float32(255)  # XLA multiplies by 1 / 255, which rounds otherwise


def write_native(directory: str | os.PathLike, data: FederatedData) -> None:
    """Writes train/, test/, held_out/ (if any) and info.json, to be read by `native`.

    Args:
      directory: the folder to make; it must not exist.
      data: its populations must be enumerable: up to 2^24 clients.

    Raises: FileExistsError for an existing folder; ValueError for poisoned clients, a local test, a measure, a server
      with rows, parties, groups and private labels, which a folder does not hold: put those around `native(...)`.

    Guarantees: what is read is what was written (tests/population/datasets/test_native.py::test_round_trip); the folder
    appears complete or not at all (tests/population/datasets/test_native.py::test_a_failed_write_leaves_nothing).
    """
    facts = {field: getattr(data, field) for field in NOT_HELD}
    facts |= {"groups": hasattr(data.train, "group"), "private labels": has_private_labels(data.train)}
    for fact, is_there in facts.items():
        if is_there:
            hint = "A folder does not hold it: write the plain data, and wrap what is read."
            validate.fail("data", f"a data set without {fact}", data.name, hint)
    target = pathlib.Path(directory).absolute()
    if target.exists():
        raise FileExistsError(f"directory: expected a folder that does not exist, got {str(target)!r}.")
    aside = target.parent / f".{target.name}.{secrets.token_hex(8)}"
    aside.mkdir(parents=True)
    try:
        for name, population in (("train", data.train), ("held_out", data.held_out)):
            if population is not None:
                offsets = np.concatenate([[0], np.cumsum(np.asarray(sizes_of(population), np.int64))])
                write_store(aside / name, jax.device_get(pooled(population).examples), offsets)
        write_store(aside / "test", data.test, np.array([0, len(jax.tree.leaves(data.test)[0])]))
        info = {"schema": SCHEMA, **{field: getattr(data, field) for field in FIELDS[1:]}}
        with (aside / "info.json").open("w", encoding="utf-8") as file:
            json.dump(info, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _info(path: pathlib.Path) -> dict[str, Any]:
    """The checked content of info.json."""
    existing("directory", str(path), folder=False)
    if path.stat().st_size > LARGEST_INFO:
        validate.fail(str(path), f"at most {LARGEST_INFO} bytes", path.stat().st_size)
    text = text_files.text_of(path.name, path, "JSON text in UTF-8")
    try:
        info = json.loads(text)
    except (ValueError, RecursionError) as error:
        validate.fail(str(path), "JSON text", str(error))
    if not isinstance(info, dict) or set(info) != set(FIELDS):
        validate.fail(str(path), f"an object with {', '.join(FIELDS)}", info)
    validate.one_of("info.schema", info["schema"], (SCHEMA,))
    validate.one_of("info.task", info["task"], TASKS)
    validate.integer("info.num_outputs", info["num_outputs"])
    if not isinstance(info["name"], str):
        validate.fail("info.name", "a string", info["name"], error=TypeError)
    shape = info["input_shape"]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 1 for n in shape):
        validate.fail("info.input_shape", "a list of integers >= 1", shape)
    for field in ("label_names", "vocabulary"):
        names = info[field]
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            validate.fail(f"info.{field}", "null or a list of strings", names, error=TypeError)
        info[field] = None if names is None else tuple(names)
    return {**info, "input_shape": tuple(shape)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ScaledBytes(Around):
    """A population whose x are bytes, read as x / 255; they are kept and moved as bytes.

    Guarantees: tests/population/datasets/test_native.py::test_a_store_of_bytes; quotients have NumPy's bits, as in the
    test set and from `from_sites` (::test_every_byte_has_one_quotient).
    """

    inner: Population

    @property
    def size(self) -> int:
        """N."""
        return self.inner.size

    def client(self, id: Array) -> ClientData:
        """Data of client `id`, with x in float32."""
        data = self.inner.client(id)
        x = jnp.asarray(QUOTIENTS)[data.examples["x"].astype(jnp.int32)]
        return data._replace(examples={**data.examples, "x": x})


@validate.named_arguments
def native(*, directory: FolderPath, host: bool = False, scale_bytes: bool = True) -> FederatedData:
    """A data set written by `write_native`.

    Args:
      directory: holds info.json, the stores train/ and test/ and, optionally, held_out/. Without test/ the rows of
        held_out/ are the test set.
      host: True to leave the training clients on the disk, and read each when it is in a cohort; their labels are then
        not checked beforehand.
      scale_bytes: features of dtype uint8, as `write_store` may have written, are read as x / 255; False keeps them.

    Returns: `FederatedData`.

    Raises: ValueError or TypeError for a missing or damaged store, and for shapes or labels that contradict info.json.

    Guarantees: tests/population/datasets/test_native.py::test_round_trip, ::test_a_store_of_bytes.
    """
    folder = existing("directory", directory)
    info = _info(folder / "info.json")
    info.pop("schema")

    def check(split: str, examples: Any) -> dict[str, np.ndarray]:
        examples = {name: np.asarray(leaf) for name, leaf in examples.items()}
        if info["task"] == "quadratic":
            return examples
        if not {"x", "y"} <= examples.keys():
            validate.fail(split, "leaves x and y", sorted(examples))
        if examples["x"].shape[1:] != info["input_shape"]:
            validate.fail(f"{split}.x", f"examples of shape {info['input_shape']}", examples["x"].shape[1:])
        return {**examples, **check_examples(split, examples, info["task"], info["num_outputs"])}

    def store(split: str) -> Population | None:
        if not (folder / split).exists():
            return None
        population = read_store(folder / split)
        check(split, population.examples)
        return population

    existing("directory", str(folder / "train"))
    train = host_store(folder / "train") if host else store("train")
    held_out, central = store("held_out"), store("test") or store("held_out")
    if central is None:
        validate.fail("directory", "a store test/ or held_out/", str(folder), "Without one there is no test set.")
    data = FederatedData(train=train, test=check("test", central.examples), held_out=held_out, **info)
    if not scale_bytes or info["task"] in ("next_token", "quadratic"):
        return data
    splits = {"train": train, "test": central, "held_out": held_out}
    return _scaled(data) if are_bytes({name: _features(p) for name, p in splits.items() if p is not None}) else data


def _features(population: Population) -> Any:
    """Shape and dtype of a client's x, which is not read."""
    client = jax.eval_shape(population.client, jax.ShapeDtypeStruct((), jnp.int32))
    return client.examples["x"]


def _scaled(data: FederatedData) -> FederatedData:
    """A data set whose x are bytes, with x / 255; populations keep the bytes."""
    return data._replace(
        train=ScaledBytes(data.train),
        test={**data.test, "x": data.test["x"] / np.float32(255)},
        held_out=None if data.held_out is None else ScaledBytes(data.held_out),
        notes=(SCALED_BYTES,),
    )
