"""This module provides a population that may be larger than memory.

Its files are memory-mapped, and a host callback gathers the rows of each chunk of clients inside the compiled round.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.arrays import capacities
from fedjax_sim.population.store import CheckedStore, open_store
from fedjax_sim.types import Array, CheapReads, ClientData, Learned

# The most ids in one callback. JAX copies arguments below 100 kB at once. Waiting for a larger copy can deadlock
# XLA:CPU when two devices are inside callbacks (seen with jax 0.10.2).
CALLBACK_IDS = 16_384
NEAR_BYTES = 1 << 16  # byte ranges closer to each other than this are announced as one range
static = {"static": True}


class _Source:
    """A `_Source` holds the mapped files. It is static, compared by path and manifest, and never copied to a device.

    Do not rename the class or its methods. Their names enter the fingerprint of a private run, so the run would draw
    other noise.
    """

    def __init__(self, opened: CheckedStore):
        self.opened = opened
        self.counts = np.diff(opened.offsets)
        self.size = len(self.counts)
        self.max_examples = int(self.counts.max())

    @property
    def fingerprint(self) -> str:
        """The digest of everything that the callbacks read."""
        return self.opened.digest

    def __eq__(self, other):
        return isinstance(other, _Source) and self.opened[:2] == other.opened[:2]

    def __hash__(self):
        return hash(self.opened[:2])

    def gather(self, ids, most: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Reads the first `most` rows of clients `ids`, which may have any shape, in the order of the file.

        Args:
          ids: integers; a client out of range has no rows.
          most: rows of each client in the result.

        Returns: the leaves [*ids.shape, most, ...] and their mask [*ids.shape, most], as NumPy arrays.
        """
        if ids.size > CALLBACK_IDS:
            validate.fail("clients in one chunk", f"at most {CALLBACK_IDS}", ids.size, "Use a smaller chunk.")
        ids = np.asarray(ids)
        flat_ids = ids.reshape(-1).astype(np.int64)
        # Clients are visited by rising id, so that the disk is read forwards.
        order = np.argsort(flat_ids, kind="stable")
        valid_ids = np.clip(flat_ids[order], 0, self.size - 1)
        counts = np.where(valid_ids == flat_ids[order], self.counts[valid_ids], 0)
        row = np.arange(most)
        is_valid = row < counts[:, None]
        file_rows = (self.opened.offsets[valid_ids][:, None] + row)[is_valid]
        output_rows = (order[:, None] * most + row)[is_valid]
        mask = np.zeros(is_valid.size, bool)
        mask[output_rows] = True
        examples = {}
        for name, leaf in self.opened.leaves.items():
            values = np.zeros((is_valid.size, *leaf.array.shape[1:]), leaf.array.dtype)
            values[output_rows] = leaf.array[file_rows]
            examples[name] = values.reshape(*ids.shape, most, *values.shape[1:])
        return examples, mask.reshape(*ids.shape, most)

    def announce(self, ids) -> np.ndarray:
        """Asks the operating system to read the pages of clients `ids` [..., m] soon, and returns zeros [...].

        Args:
          ids: [..., m] integers; those out of range count as the nearest client.
        """
        valid_ids = np.unique(np.clip(np.asarray(ids), 0, self.size - 1))
        valid_ids = valid_ids[self.counts[valid_ids] > 0]
        zeros = np.zeros(ids.shape[:-1], np.int32)
        if not hasattr(mmap.mmap, "madvise") or not len(valid_ids):
            return zeros
        for leaf in self.opened.leaves.values():
            row_bytes = leaf.array.strides[0]
            begin = leaf.start + self.opened.offsets[valid_ids] * row_bytes
            end = leaf.start + self.opened.offsets[valid_ids + 1] * row_bytes
            # Neighbouring byte ranges are merged, for each range costs a system call.
            starts_range = np.concatenate([[True], begin[1:] > end[:-1] + NEAR_BYTES])
            ends_range = np.concatenate([starts_range[1:], [True]])
            # madvise takes addresses at page borders only.
            begin = begin[starts_range] // mmap.PAGESIZE * mmap.PAGESIZE
            lengths = (end[ends_range] - begin).tolist()
            for start, length in zip(begin.tolist(), lengths, strict=True):
                if length:
                    leaf.map.madvise(mmap.MADV_WILLNEED, start, length)
        return zeros


def _follow(x: Array, id: Array) -> Array:
    """Returns `x`, typed as varying over devices if the scalar `id` is.

    Under shard_map the result of a callback is not typed so, although it depends on an id that varies.
    """
    return jnp.where(id == id, x, jnp.zeros_like(x))  # XLA folds this away


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Host(CheapReads):
    """A `Host` population reads each client from the disk when `client` is evaluated. `host_store` builds it."""

    sizes: Array  # [N] int32 examples per client, the only array that is held in memory
    source: _Source = dataclasses.field(metadata=static)
    max_examples: int = dataclasses.field(metadata=static)  # rows of the largest client
    capacities: tuple[int, ...] = dataclasses.field(metadata=static)  # see `arrays.capacities`
    learned: tuple[Learned, ...] | None = dataclasses.field(default=None, metadata=static)  # None = not known

    # A field of a protocol is read only, but Python's types have no word for it.
    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """N, the number of clients."""
        return self.source.size

    def count(self, id: Array) -> Array:
        """Returns the number of examples of client `id`, without reading them."""
        valid_id = jnp.clip(id, 0, self.size - 1)
        return jnp.where(valid_id == id, self.sizes[valid_id], 0)

    def capped(self, rows: int) -> Host:
        """Returns the same clients in arrays of `rows` rows. No client that is read may have more examples."""
        return dataclasses.replace(self, max_examples=rows)

    def client(self, id: Array) -> ClientData:
        """Returns the data of client `id`. A vmapped chunk of clients is one callback. Padding rows are zero."""
        id = jnp.asarray(id, jnp.int32)

        def spec(shape, dtype):
            return jax.ShapeDtypeStruct((self.max_examples, *shape), dtype)

        leaves = self.source.opened.leaves.items()
        example_specs = {name: spec(leaf.array.shape[1:], leaf.array.dtype) for name, leaf in leaves}
        result = example_specs, spec((), bool)
        read = partial(self.source.gather, most=self.max_examples)
        # "expand_dims" hands all ids of a vmapped chunk to one call, which can then read them in file order.
        data = jax.pure_callback(read, result, id, vmap_method="expand_dims")
        return ClientData(*jax.tree.map(lambda x: _follow(x, id), data))

    def announce(self, ids: Array) -> Array:
        """Asks the operating system to read the data of these clients ahead, and returns `ids` unchanged.

        Use the returned ids, or the compiler drops the request. The request has no state and changes no bit. With
        several processes it is not made: outside of `shard_map` process 0 alone would run the callback, while all
        processes wait for it.

        Args:
          ids: integers of any shape.
        """
        ids = jnp.asarray(ids, jnp.int32)
        if jax.process_count() > 1:
            return ids
        flat_ids = ids.reshape(-1)
        token = jax.ShapeDtypeStruct((), jnp.int32)
        for start in range(0, flat_ids.shape[0], CALLBACK_IDS):
            piece = flat_ids[start : start + CALLBACK_IDS]
            # The callback returns 0. Adding it makes later reads of these ids depend on the request.
            ids = ids + jax.pure_callback(self.source.announce, token, piece, vmap_method="expand_dims")
        return ids


def host_store(directory: str | os.PathLike, *, verify: bool = False) -> Host:
    """Opens a native store as a population whose data stay on the disk.

    Args:
      directory: a folder written by `write_store`.
      verify: True reads every byte now and compares the SHA-256 sums. False checks names, sizes, headers and the
        offsets only.
    Raises: ValueError as `read_store`.
    Guarantees: valid rows and masks are those of `read_store`, under jit, scan, vmap and shard_map
    (tests/population/test_native_store.py::test_host_equals_stored). A trained model can differ in its last bits, since
    XLA compiles another program for another kind of population, as it does for other lanes and chunks.

    >>> import numpy as np, pathlib, tempfile
    >>> from fedjax_sim.population.store import write_store
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_store(pathlib.Path(folder) / "toy", {"y": np.array([3, 4, 5])}, [0, 1, 3])
    ...     host_store(pathlib.Path(folder) / "toy").client(1).examples["y"].tolist()
    [4, 5]
    """
    validate.one_of("verify", verify, [True, False])
    source = _Source(open_store(directory, verify=verify))
    return Host(jnp.array(source.counts, jnp.int32), source, source.max_examples, capacities(source.counts))
