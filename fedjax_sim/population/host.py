"""A population larger than memory: its files are memory-mapped, and a callback gathers the rows of each chunk."""

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
from fedjax_sim.population.store import Opened, open_store
from fedjax_sim.types import Array, ClientData

__all__ = ["Host", "host_store"]

CALLBACK_IDS = 16_384  # JAX copies arguments below 100 kB at once; waiting for a larger copy can deadlock XLA:CPU
NEAR_BYTES = 1 << 16  # byte ranges closer to each other than this are announced as one
static = {"static": True}


class _Source:
    """The mapped files; static, compared by path and manifest, never copied to a device.

    The names of class and methods enter the fingerprint of a private run: with others it would draw other noise.
    """

    def __init__(self, opened: Opened):
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
        """The first `most` rows of clients `ids` (any shape) and their mask, as NumPy arrays; read in file order."""
        if ids.size > CALLBACK_IDS:
            validate.fail("clients in one chunk", f"at most {CALLBACK_IDS}", ids.size, "Use a smaller chunk.")
        ids = np.asarray(ids)
        flat = ids.reshape(-1).astype(np.int64)
        order = np.argsort(flat, kind="stable")
        known = np.clip(flat[order], 0, self.size - 1)
        counts = np.where(known == flat[order], self.counts[known], 0)
        row = np.arange(most)
        valid = row < counts[:, None]
        sources = (self.opened.offsets[known][:, None] + row)[valid]
        targets = (order[:, None] * most + row)[valid]
        mask = np.zeros(valid.size, bool)
        mask[targets] = True
        examples = {}
        for name, leaf in self.opened.leaves.items():
            out = np.zeros((valid.size, *leaf.array.shape[1:]), leaf.array.dtype)
            out[targets] = leaf.array[sources]
            examples[name] = out.reshape(*ids.shape, most, *out.shape[1:])
        return examples, mask.reshape(*ids.shape, most)

    def announce(self, ids) -> np.ndarray:
        """Asks the kernel to read the pages of clients `ids` [..., m] soon; returns zeros [...]."""
        known = np.unique(np.clip(np.asarray(ids), 0, self.size - 1))
        known = known[self.counts[known] > 0]
        told = np.zeros(ids.shape[:-1], np.int32)
        if not hasattr(mmap.mmap, "madvise") or not len(known):
            return told
        for leaf in self.opened.leaves.values():
            row_bytes = leaf.array.strides[0]
            begin = leaf.start + self.opened.offsets[known] * row_bytes
            end = leaf.start + self.opened.offsets[known + 1] * row_bytes
            first = np.concatenate([[True], begin[1:] > end[:-1] + NEAR_BYTES])
            last = np.concatenate([first[1:], [True]])
            begin = begin[first] // mmap.PAGESIZE * mmap.PAGESIZE
            for start, length in zip(begin.tolist(), (end[last] - begin).tolist(), strict=True):
                if length:
                    leaf.map.madvise(mmap.MADV_WILLNEED, start, length)
        return told


def _follow(x: Array, id: Array) -> Array:
    """`x`, typed as varying over devices if the scalar `id` is; under shard_map a callback's result is not typed so."""
    return jnp.where(id == id, x, jnp.zeros_like(x))  # XLA folds this away


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Host:
    """Clients of a native store, each read from the disk when `client` is evaluated. Built by `host_store`."""

    sizes: Array  # [N] int32 examples per client: all that is held in memory
    source: _Source = dataclasses.field(metadata=static)
    max_examples: int = dataclasses.field(metadata=static)  # n, the largest client
    capacities: tuple[int, ...] = dataclasses.field(metadata=static)

    @property
    def size(self) -> int:
        """N."""
        return self.source.size

    def count(self, id: Array) -> Array:
        """Examples of client `id`, without reading them."""
        known = jnp.clip(id, 0, self.size - 1)
        return jnp.where(known == id, self.sizes[known], 0)

    def capped(self, rows: int) -> Host:
        """The same clients in arrays of `rows` rows, for clients that have no more examples than that."""
        return dataclasses.replace(self, max_examples=rows)

    def client(self, id: Array) -> ClientData:
        """Data of client `id`; a vmapped chunk is one gather. Padding rows are zero."""
        id = jnp.asarray(id, jnp.int32)

        def spec(shape, dtype):
            return jax.ShapeDtypeStruct((self.max_examples, *shape), dtype)

        leaves = self.source.opened.leaves.items()
        result = {name: spec(leaf.array.shape[1:], leaf.array.dtype) for name, leaf in leaves}, spec((), bool)
        read = partial(self.source.gather, most=self.max_examples)
        data = jax.pure_callback(read, result, id, vmap_method="expand_dims")
        return ClientData(*jax.tree.map(lambda x: _follow(x, id), data))

    def announce(self, ids: Array) -> Array:
        """`ids` unchanged, after asking the operating system to read the data of these clients ahead.

        Use the returned ids, or the compiler drops the request. It has no state and changes no bit. With several
        processes nothing is asked: outside of `shard_map` process 0 alone would run the callback while all wait for it.
        """
        ids = jnp.asarray(ids, jnp.int32)
        if jax.process_count() > 1:
            return ids
        flat = ids.reshape(-1)
        token = jax.ShapeDtypeStruct((), jnp.int32)
        for start in range(0, flat.shape[0], CALLBACK_IDS):
            piece = flat[start : start + CALLBACK_IDS]
            ids = ids + jax.pure_callback(self.source.announce, token, piece, vmap_method="expand_dims")
        return ids


def host_store(directory: str | os.PathLike, *, verify: bool = False) -> Host:
    """A native store as a population that stays on the disk.

    Args:
      directory: a folder written by `write_store`.
      verify: True to read every byte now and compare the SHA-256 sums; else names, sizes, headers and offsets only.
    Raises: ValueError as `read_store`.
    Guarantees: the same valid rows and masks as `read_store`, under jit, scan, vmap and shard_map
    (tests/population/test_native_store.py::test_host_equals_stored). A model trained on them can differ in the last
    bits, since XLA compiles another program: a result depends on the kind of population, as on lanes and chunk.

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
