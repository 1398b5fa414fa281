"""This module defines the populations: frozen pytree dataclasses that hold the clients and their data.

A population is an argument of the compiled round, so its arrays are never constants of the program. Every population
obeys `types.Population`. Rows where the mask is False hold arbitrary values. An id outside [0, N) stands for a client
without examples, whose mask is all False. JAX would silently clamp such an id to another client's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim import tree, validate
from fedjax_sim.population.arrays import capacities, checked_examples, checked_offsets
from fedjax_sim.population.protocol import check_client, check_population, counted, num_rows, sizes_of, visitable
from fedjax_sim.types import Array, CheapReads, ClientData, Learned, Population, PyTree
from fedjax_sim.validate import PositiveInt

if TYPE_CHECKING:
    from fedjax_sim.population.partition import Partition


static = {"static": True}  # metadata of a field that is part of the compiled program, not an argument of it


@partial(jax.jit, static_argnames=("size", "max_examples"), inline=True)
def _span(offsets: Array, id: Array, size: int, max_examples: int) -> tuple[Array, Array]:
    """Returns the row numbers [max_examples] of client `id` and their mask [max_examples]."""
    # An id outside [0, N) reads an existing client's offsets, and its count is then set to 0.
    valid_id = jnp.clip(id, 0, size - 1)
    count = jnp.where(valid_id == id, offsets[valid_id + 1] - offsets[valid_id], 0)
    row = jnp.arange(max_examples, dtype=jnp.int32)
    return offsets[valid_id] + row, row < count


def _count(self, id: Array) -> Array:
    """Returns the number of examples of client `id`, without reading them."""
    valid_id = jnp.clip(id, 0, self.size - 1)
    return jnp.where(valid_id == id, self.offsets[valid_id + 1] - self.offsets[valid_id], 0)


def _capped(self, rows: int):
    """Returns the same clients in arrays of `rows` rows. No client that is read may have more examples."""
    return dataclasses.replace(self, max_examples=rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Stored(CheapReads):
    """A `Stored` population holds clients of unequal size in flat arrays, without padding. `stored` builds it.

    Client i owns rows offsets[i] to offsets[i + 1] of every array.

    Guarantees: a client's valid rows are its own rows in order
    (tests/population/test_population.py::test_ragged_client_matches_numpy).
    """

    examples: PyTree  # leaves [total, ...]
    offsets: Array  # [N + 1] int32
    max_examples: int = dataclasses.field(metadata=static)  # rows of the largest client
    size: int = dataclasses.field(metadata=static)  # N, the number of clients
    capacities: tuple[int, ...] = dataclasses.field(default=(), metadata=static)  # see `arrays.capacities`
    learned: tuple[Learned, ...] | None = dataclasses.field(default=None, metadata=static)  # None = not known

    @property
    def sizes(self) -> Array:
        """[N] int32 examples per client."""
        return jnp.diff(self.offsets)

    count = _count
    capped = _capped

    def client(self, id: Array) -> ClientData:
        """Returns the data of client `id`, a scalar int32."""
        rows, mask = _span(self.offsets, id, self.size, self.max_examples)
        return ClientData(tree.take_rows(self.examples, rows), mask)

    def rows_of_table(self) -> tuple[PyTree, np.ndarray, Array]:
        """Returns (the rows of all clients, their numbers, where each client's begin)."""
        return self.examples, np.arange(len(jax.tree.leaves(self.examples)[0])), self.offsets


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Indexed(CheapReads):
    """An `Indexed` population holds each client as row numbers of one shared table. `indexed` builds it.

    The row numbers of a million clients with 20 rows each take 80 MB.

    Guarantees: equals the `Stored` population of the gathered rows
    (tests/population/test_population.py::test_indexed_equals_stored_of_gathered_rows).
    """

    table: PyTree  # leaves [rows, ...]
    indices: Array  # [total] int32 rows of the table; client i has those at offsets[i] to offsets[i + 1]
    offsets: Array  # [N + 1] int32
    max_examples: int = dataclasses.field(metadata=static)  # rows of the largest client
    size: int = dataclasses.field(metadata=static)  # N, the number of clients
    capacities: tuple[int, ...] = dataclasses.field(default=(), metadata=static)  # see `arrays.capacities`
    learned: tuple[Learned, ...] | None = dataclasses.field(default=None, metadata=static)  # None = not known

    @property
    def sizes(self) -> Array:
        """[N] int32 examples per client."""
        return jnp.diff(self.offsets)

    count = _count
    capped = _capped

    def client(self, id: Array) -> ClientData:
        """Returns the data of client `id`, a scalar int32."""
        positions, mask = _span(self.offsets, id, self.size, self.max_examples)
        rows = tree.take_rows(self.indices, positions)
        return ClientData(tree.take_rows(self.table, rows), mask)

    def rows_of_table(self) -> tuple[PyTree, Array, Array]:
        """Returns (the table, the clients' rows of it, where each client's begin)."""
        return self.table, self.indices, self.offsets


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Generated(CheapReads):
    """A `Generated` population computes each client from its id, so 10^9 clients take no memory. `generated` builds it.

    Guarantees: a population of 10^9 clients reads its last client, and its parameters are its only array
    (tests/population/test_population.py::test_generated_billion_clients).
    """

    size: int = dataclasses.field(metadata=static)  # N, the number of clients
    generate: Callable[[PyTree, Array], ClientData] = dataclasses.field(metadata=static)  # (parameters, id) -> data
    parameters: PyTree = ()  # arrays that `generate` reads
    learned: tuple[Learned, ...] | None = dataclasses.field(default=None, metadata=static)  # None = not known

    @property
    def max_examples(self) -> int:
        """The number of rows that `generate` returns, padding included."""
        return num_rows(self)

    @property
    def sizes(self) -> Array:
        """[N] int32 examples per client. Every client is generated to count them, so N is limited to 2^24."""
        return counted(self)

    def count(self, id: Array) -> Array:
        """Returns the number of examples of client `id`.

        Only the mask is used, so the compiler drops the computation of the examples.
        """
        return self.client(id).mask.sum(dtype=jnp.int32)

    def client(self, id: Array) -> ClientData:
        """Returns the data of client `id`, a scalar int32."""
        valid_id = jnp.clip(id, 0, self.size - 1)
        data = self.generate(self.parameters, valid_id)
        return data._replace(mask=data.mask & (valid_id == id))


def _static_fields(offsets: np.ndarray) -> dict[str, Any]:
    """Returns the static fields of clients of unequal size. It refuses more rows than int32 can count."""
    sizes = np.diff(offsets)
    largest = int(sizes.max())
    # `_span` adds up to `largest` rows of padding to a client's offset, so that sum must fit int32 as well.
    validate.integer("number of rows", int(offsets[-1]) + largest, hint="Use host_store for more.")
    return {"max_examples": largest, "size": len(sizes), "capacities": capacities(sizes)}


def stored(examples: PyTree, offsets: ArrayLike, *, learned: tuple[Learned, ...] | None = None) -> Stored:
    """Builds a population of clients of unequal size from flat arrays, which are copied.

    Args:
      examples: pytree of arrays [total, ...], finite. Integers and uint8 images keep their dtype.
      offsets: [N + 1] integers. Client i owns rows offsets[i] to offsets[i + 1]. Empty clients are allowed.
      learned: what prepared the examples and was learnt from several clients' rows. () states that nothing was. None
        states nothing, which privacy statements then say.
    Raises: ValueError or TypeError for lengths that differ, offsets that fall, NaN, or no example at all.
    Guarantees: later writes to the caller's arrays change nothing
    (tests/population/test_population.py::test_stored_copies_what_it_is_given).

    >>> import numpy as np
    >>> population = stored({"x": np.arange(6.0).reshape(3, 2), "y": np.array([0, 1, 1])}, [0, 2, 3])
    >>> population.size, population.max_examples, population.client(1).mask.tolist()
    (2, 2, [True, False])
    """
    examples, total = checked_examples("examples", examples)
    offsets = checked_offsets("offsets", offsets, total)
    static_fields = _static_fields(offsets)
    return Stored(jax.tree.map(jnp.array, examples), jnp.array(offsets, jnp.int32), **static_fields, learned=learned)


def from_clients(clients: Sequence[PyTree], *, learned: tuple[Learned, ...] | None = None) -> Stored:
    """Builds a population from one pytree of arrays for each client.

    Args:
      clients: a pytree per client, all of one structure, dtypes and trailing shapes. The leaves of client i are
        [n_i, ...], and n_i may differ between clients.
      learned: as in `stored`.
    Raises: ValueError for no client at all, or a client whose structure, shapes or dtypes differ from client 0's.

    >>> import numpy as np
    >>> from_clients([{"y": np.array([1, 2])}, {"y": np.array([3])}]).sizes.tolist()
    [2, 1]
    """
    clients = list(clients)
    if not clients:
        validate.fail("clients", "a client at least", clients)
    structure = jax.tree.structure(clients[0])
    # np.concatenate would silently promote unequal dtypes, so each client is compared with the first.
    dtypes = [[np.result_type(getattr(x, "dtype", x)) for x in jax.tree.leaves(client)] for client in clients]
    expected = [(np.shape(x)[1:], dtype) for x, dtype in zip(jax.tree.leaves(clients[0]), dtypes[0], strict=True)]
    counts = []
    for i, client in enumerate(clients):
        leaves, client_structure = jax.tree.flatten(client)
        if client_structure != structure:
            validate.fail(f"clients[{i}]", f"the structure of clients[0], {structure}", client_structure)
        if any(np.ndim(x) == 0 for x in leaves) or len({len(x) for x in leaves}) != 1:
            validate.fail(f"clients[{i}]", "leaves of one length", [np.shape(x) for x in leaves])
        for x, leaf_dtype, (shape, dtype) in zip(leaves, dtypes[i], expected, strict=True):
            if np.shape(x)[1:] != shape or leaf_dtype != dtype:
                shown = f"{leaf_dtype}{list(np.shape(x)[1:])}"
                validate.fail(f"clients[{i}]", f"examples like clients[0]'s {dtype}{list(shape)}", shown)
        counts.append(len(leaves[0]))
    examples = jax.tree.map(lambda *xs: np.concatenate([np.asarray(x) for x in xs]), *clients)
    return stored(examples, np.concatenate([[0], np.cumsum(counts)]), learned=learned)


def indexed(table: PyTree, partition: Partition, *, learned: tuple[Learned, ...] | None = None) -> Indexed:
    """Builds a population whose clients hold rows of one shared table, as a partition says.

    Args:
      table: pytree of arrays [rows, ...].
      partition: `(indices [total], offsets [N + 1])`, as a partitioner such as `iid` or `dirichlet` returns it. Several
        clients may share a row, and a row may belong to nobody.
      learned: as in `stored`.
    Raises: ValueError for a row outside the table.

    >>> import numpy as np
    >>> population = indexed({"y": np.array([7, 8, 9])}, (np.array([2, 0]), np.array([0, 1, 2])))
    >>> population.client(0).examples["y"].tolist()
    [9]
    """
    table, rows = checked_examples("table", table)
    indices, offsets = partition
    indices = np.asarray(indices)
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or not len(indices):
        shown = f"{indices.dtype.name}{list(indices.shape)}"
        validate.fail("partition.indices", "a 1-D integer array that is not empty", shown)
    low = int(indices.min())
    high = int(indices.max())
    if not (0 <= low and high < rows):
        validate.fail(
            "partition.indices", f"rows in [0, {rows})", f"rows in [{low}, {high}]", "Was it made for this table?"
        )
    offsets = checked_offsets("partition.offsets", offsets, len(indices))
    static_fields = _static_fields(offsets)
    return Indexed(
        jax.tree.map(jnp.array, table),
        jnp.array(indices, jnp.int32),
        jnp.array(offsets, jnp.int32),
        **static_fields,
        learned=learned,
    )


@validate.named_arguments
def generated(
    size: PositiveInt,
    generate: Callable[[PyTree, Array], ClientData],
    parameters: PyTree = (),
    *,
    learned: tuple[Learned, ...] | None = None,
) -> Generated:
    """Builds a population whose clients are computed from their ids when they are needed.

    Args:
      size: N, up to 2^31 - 1.
      generate: pure `(parameters, id) -> ClientData`. Two populations share a compiled program if they share this
        function, so it should be defined at module level.
      parameters: pytree of arrays that `generate` reads. They are arguments of the compiled program, not constants.
      learned: as in `stored`.

    >>> import jax, jax.numpy as jnp
    >>> def draw(parameters, id):
    ...     key = jax.random.fold_in(jax.random.key(0), id)
    ...     return ClientData({"x": parameters + jax.random.normal(key, (4,))}, jnp.ones(4, bool))
    >>> generated(10**9, draw, jnp.float32(3)).max_examples
    4
    """
    population = Generated(int(size), generate, parameters, learned)
    # An abstract call finds most errors in `generate` here, rather than inside the first round.
    try:
        data = jax.eval_shape(generate, parameters, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:
        raise validate.InvalidArgument(
            f"generate: expected a traceable (parameters, id) -> ClientData, got {error}"
        ) from error
    check_client("generate", data)
    return population


@jax.jit
def _read(population: Population, ids: Array) -> ClientData:
    """Returns the data of clients `ids` [m], with leaves [m, n, ...]."""
    return jax.vmap(population.client)(ids)


def pooled(population: Population, *, limit_bytes: int = 8 << 30) -> ClientData:
    """Returns every example of every client, in client order and without padding: the centralised view of the data.

    Args:
      population: at most 2^24 clients.
      limit_bytes: the most bytes that the examples may take.
    Returns: `ClientData` with leaves [total, ...] and a mask that is True everywhere.
    Raises: MemoryError if the examples would take more than `limit_bytes`.
    Guarantees: the result has the valid rows only, each once
    (tests/population/test_population.py::test_pooled_is_the_concatenation).

    >>> import numpy as np
    >>> pooled(stored({"y": np.array([5, 6, 7])}, [0, 1, 1, 3])).examples["y"].tolist()
    [5, 6, 7]
    """
    check_population(population)
    visitable(population)
    # The memory is computed from sizes and shapes alone, so that too large a population is refused before it is read.
    sizes = np.asarray(sizes_of(population))
    spec = jax.eval_shape(population.client, jax.ShapeDtypeStruct((), jnp.int32))
    row_bytes = sum(x.dtype.itemsize * int(np.prod(x.shape[1:])) for x in jax.tree.leaves(spec.examples))
    validate.fits_in_memory(
        "pooled", int(sizes.sum(dtype=np.int64)) * row_bytes, limit_bytes, hint="Raise limit_bytes."
    )
    # Clients are read in chunks of about 32 MB, padding included, since all padded clients at once might not fit.
    client_bytes = row_bytes * spec.mask.shape[0]
    chunk = int(np.clip((1 << 25) // max(1, client_bytes), 1, min(population.size, 4096)))
    parts = []
    for start in range(0, population.size, chunk):
        # Every chunk has the same shape, so `_read` compiles once. The last one repeats client N - 1 and masks it out.
        ids = np.arange(start, start + chunk, dtype=np.int32)
        data = jax.device_get(_read(population, np.minimum(ids, population.size - 1)))
        mask = data.mask & (ids < population.size)[:, None]
        parts.append(jax.tree.map(lambda x, mask=mask: x[mask], data.examples))
    examples = jax.tree.map(lambda *xs: jnp.array(np.concatenate(xs)), *parts)
    return ClientData(examples, jnp.ones(len(jax.tree.leaves(examples)[0]), bool))
