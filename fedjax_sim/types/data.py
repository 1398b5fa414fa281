"""The data of a round: clients' examples, cohorts, reports and messages, and statements about them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.types.time import Timing

Array = jax.Array
AnyArray: TypeAlias = np.ndarray | Array  # on the host, or in a program
PyTree = Any
# A path of a file. The file's content is part of a run's identity; a relative path in a config begins at the config.
FilePath = str
# A path of a folder with data. It works like `FilePath`, with the data that were read as the content.
FolderPath = str
Scale = Mapping  # {"mean": [d], "deviation": [d]}: the constants that d columns are standardised by
ColumnFills = Mapping  # name of a column -> the number that stands for its missing values
ColumnValues = Mapping  # name of a column -> the values that it may have
# (key, ids [c]) -> [c] bool: which clients attack in the round of this key
Attackers: TypeAlias = Callable[[Array, Array], Array]
# (gaps [c] int32 >= 0) -> [c] float32 in (0, 1]: the factor of an update that is so many versions stale
StalenessWeight: TypeAlias = Callable[[Array], Array]


class ClientData(NamedTuple):
    """The examples of one client, padded to a static number of rows n that is the same for all clients."""

    examples: PyTree  # leaves [n, ...]; rows where mask is False may hold anything, NaN included
    mask: Array  # [n] bool; True = a real example
    work: Array | None = None  # [] how much of its local work the client completes, as in `Cohort.work`; None = all
    # [] in [0, 1): the share of (local - broadcast params) in the direction of a local step, beside the gradient. An
    # attacker uses it to stay near the global model, where it is not noticed. None = no client is pulled
    pull: Array | None = None
    # [] int32 from 0, the round in which the client trains; None for clients that do not read it
    round: Array | None = None


@runtime_checkable
class Population(Protocol):
    """All clients, as a frozen pytree dataclass that a round takes as an argument; `size` is a static field.

    `size` and `client` suffice for everything that reads populations. A population may offer more:

    - `CheapReads`: it reads parts of a client, or many clients, at less cost.
    - `Groups`: its clients are groups of clients.
    - `Subpopulation`: it is one group of clients of a whole population.

    A class that inherits from one of these protocols gets its defaults. A class that has all members of a protocol
    offers it too. A population with some of the members only is refused by `population.protocol.check_population`.

    A population may also have `sizes`, an array [N] of each client's number of examples. It belongs to no protocol,
    because Python 3.11 computes every property of a protocol in `isinstance`, and sizes may be computed client by
    client. `population.protocol.sizes_of` reads it, and counts the examples of a population without it.

    A population may also have `learned`, a static record of what prepared its clients' inputs and was learnt from the
    rows of several clients, see `Learned`. `learned_from` reads it.

    Guarantees: a population with `size` and `client` alone can be trained on and evaluated, with the same records as a
    built-in population of the same clients
    (tests/population/test_protocol.py::test_size_and_client_are_enough_to_train).
    """

    size: int  # N

    @abc.abstractmethod
    def client(self, id: Array) -> ClientData:
        """The data of one client.

        Args:
          id: [] int32 in [0, size).

        Returns: `ClientData`, with the same shapes for every client. The method is pure and traceable.
        """


class Learned(NamedTuple):
    """Something that prepares the clients' inputs, and was learnt from the rows of all clients without noise.

    An example is the mean of a column, by which every client's rows are standardised. One client can then change the
    inputs of all others, which no noise for one client's message hides.
    """

    what: str  # such as "mean and standard deviation"
    columns: tuple[str, ...]  # the names of the columns that it was learnt from; () = of all
    effect: str  # what one client can do to the inputs of the others, a verb phrase after "can"
    instead: str  # how the data set's options state it as known beforehand, as a config writes them; "" = they cannot
    is_scale: bool = False  # whether it is the scale of the features, which are then not in their own units
    is_public: bool = False  # whether the user said that it may be taken as known beforehand all the same
    unit: str = "client"  # the smallest whose rows change others' inputs; a "record" changes those of its client alone

    def __str__(self) -> str:
        """Returns what was learnt, and from which columns, as a phrase."""
        names = ", ".join(self.columns[:10]) + (", ..." if len(self.columns) > 10 else "")
        return f"{self.what} of {names}" if names else self.what


class Units(NamedTuple):
    """The own units of features that were standardised: feature j is x[j] factors[j] + offsets[j] in them."""

    offsets: tuple[float, ...]  # [d]
    factors: tuple[float, ...]  # [d]


@runtime_checkable
class HasLearned(Protocol):
    """A population, or a part of one, that states what was learnt; see `learned_from`."""

    learned: tuple[Learned, ...] | None


def learned_from(population: Any) -> tuple[Learned, ...] | None:
    """Returns the record of what was learnt from several clients' rows to prepare the inputs of a population.

    The record is the population's attribute `learned`. A population without that attribute states nothing. What the
    populations inside of it record holds for it too, beside what it may have learnt itself.

    Args:
      population: of any type.

    Returns: () if nothing was learnt; None if that is not known.

    >>> learned_from(object()) is None
    True
    """
    if isinstance(population, HasLearned):
        return population.learned
    parts = jax.tree.leaves(population, is_leaf=lambda part: isinstance(part, HasLearned))
    inside = tuple(record for part in parts if isinstance(part, HasLearned) for record in part.learned or ())
    if not inside:
        return None
    # A wrapper that states nothing may have learnt more than what is inside of it.
    is_public = all(record.is_public for record in inside)
    effect = "change the inputs of every other client"
    return (*inside, Learned("whatever a wrapper without a record learnt", (), effect, "", is_public=is_public))


@runtime_checkable
class CheapReads(Population, Protocol):
    """A `CheapReads` population counts a client's examples without reading them, reads short arrays, and reads ahead.

    A cohort is sorted by `count`, so that clients with similar work train side by side. Otherwise the longest client of
    a chunk decides its time. Sorting changes rounding at most.

    A class that inherits from this protocol defines `count`. By default it has no size classes, so all clients are read
    with all their rows, and nothing is read ahead.

    Guarantees: tests/population/test_protocol.py::test_defaults_of_cheap_reads.
    """

    capacities: tuple[int, ...] = ()  # static; rising numbers of rows, one for each size class of clients

    @abc.abstractmethod
    def count(self, id: Array) -> Array:
        """The number of examples of client `id`, [] int32, without reading the examples."""

    def capped(self, rows: int) -> Self:
        """The same population whose clients have only `rows` rows.

        The default returns the population as it is. It is correct only without size classes: a population with
        `capacities` defines this method.

        Args:
          rows: one of `capacities`. No client that is read may have more examples.
        """
        return self

    def announce(self, ids: Array) -> Array:
        """The same ids, after the storage was asked to read these clients' data ahead. By default it is not asked."""
        return ids


@runtime_checkable
class RowsOfTable(Population, Protocol):
    """A `RowsOfTable` population states which rows of one table its clients hold.

    An evaluation then measures a row once that is in a test set and at clients.
    """

    @abc.abstractmethod
    def rows_of_table(self) -> tuple[PyTree, Array, Array]:
        """Returns a table with leaves [rows, ...], row numbers of one client after the other, and [N + 1] offsets.

        Client i holds the rows with the numbers at offsets[i] to offsets[i + 1], as they are in the table.
        """


@runtime_checkable
class Groups(Population, Protocol):
    """A `Groups` population consists of groups of clients.

    A client that is a federation (`ClientUpdate.federation`) receives `group(id)`. For other clients,
    `client(id)` reads a group as one client.
    """

    # Static; the number of clients in all groups together, on the lowest level of a hierarchy; None = not known
    num_members: int | None = None

    @abc.abstractmethod
    def group(self, id: Array) -> Population:
        """The group `id` as a population of its clients. It has no clients where the id is outside of [0, size).

        The method is pure and traceable. A group with places that stay empty is a `Subpopulation`.
        """


@runtime_checkable
class Subpopulation(Population, Protocol):
    """A `Subpopulation` is one group of a whole population. Its ids are places in the group, and some may be empty.

    In a population that is no `Subpopulation` there is a client for each id, and ids are those of the whole population.
    """

    has_empty_places: bool  # static; False = every group of the whole population fills all its places

    @abc.abstractmethod
    def there(self, ids: Array) -> Array:
        """Which of these places have a client, bool in the shape of `ids`."""

    @abc.abstractmethod
    def place(self, ids: Array) -> Array:
        """The places of the clients with these ids in the whole population; -1 for clients of other groups."""

    @abc.abstractmethod
    def own_ids(self, places: Array) -> Array:
        """The ids in the whole population of the clients at these places; -1 for empty places."""


class Cohort(NamedTuple):
    """The clients that a round invites, one in each slot, and which of them report."""

    ids: Array  # [m] int32 index into the population, always in [0, N); any valid index in padding
    invited: Array  # [m] bool; False = padding
    reported: Array  # [m] bool; invited, and its message arrived in time
    metrics: dict[str, Array] = {}  # scalars, e.g. how many clients a truncated sampler left out
    # [m] how much of its local work each slot completes: a share in (0, 1] (float), or a number of steps (int32);
    # None = all of it
    work: Array | None = None
    timing: Timing = Timing()

    def timed(self, **timing) -> Cohort:
        """Returns the cohort with these fields of its `timing` changed."""
        return self._replace(timing=self.timing._replace(**timing))


class Mean(NamedTuple):
    """A `Mean` is a metric that pools correctly: totals and weights are summed over clients, then divided."""

    total: Array  # [] sum over examples
    weight: Array  # [] number (or weight) of those examples


class Metric(NamedTuple):
    """The description of a number that a part puts into Info, for logs and pages that pool and show the number."""

    name: str  # in Info
    words: str  # as a person reads it, e.g. "clients that dropped out"
    unit: str = ""  # "count", "bytes", "share", "seconds", or "" for a plain number
    pooled: str = "sum"  # over a run's rounds: "sum", "mean", "max" or "last"
    instead: str | None = None  # the name of the number that is taken in a round without this number
    # For a mean over rounds: the name of the number in Info that weights a round, such as its messages; None = all
    # rounds weigh the same
    by: str | None = None
    besides: bool = False  # bytes that are sent, besides `uplink_bytes` and `downlink_bytes`, and in no other number


class Scores(NamedTuple):
    """What a model said of n rows, and what they are: an entry of a loss function's dict in evaluations."""

    outputs: Array  # [n, ...], such as logits
    targets: Array  # [n, ...]


class Report(NamedTuple):
    """The result of one client's local work, before the transform."""

    update: PyTree  # local params - broadcast params, or another pytree that the server expects
    weight: Array  # [] float32, usually the number of examples; 0 = nothing to report
    metrics: dict[str, Mean]
    # Numbers that are summed exactly over clients, such as bytes, edges or joules: [] non-negative int32 or uint32, or
    # [2] uint32, the high and the low word of a larger integer
    counts: dict[str, Array] = {}


class Received(NamedTuple):
    """A chunk of messages, as the aggregator receives them."""

    updates: PyTree  # leaves [c, ...]; finite everywhere, zero where nothing arrived
    weights: Array  # [c] float32; 0 where nothing arrived
    ids: Array  # [c] int32
    slots: Array  # [c] int32 position in the cohort; >= num_slots in the engine's padding


class Round(NamedTuple):
    """The context that an aggregator may read in a round: the cohort, the broadcast model, and its own state."""

    cohort: Cohort
    broadcast: PyTree = ()  # what the clients received
    state: PyTree = ()  # the aggregator's own state, from the round before
    # The key of the whole message, for an aggregator of a part of it, whose own key is derived for that part
    key: Array | None = None


class Outcome(NamedTuple):
    """The outcome of a round, as a sampler that learns from it observes it."""

    arrived: Array  # [m] bool; a usable message arrived
    losses: Array  # [m] mean local loss (`local_loss`); NaN where nothing arrived or the client has no such metric


class Noise(NamedTuple):
    """The noise that a part adds, as an accountant reads it; its std is multiplier * clip_norm."""

    # "gaussian", "discrete_gaussian", "skellam", a matrix mechanism's name, or "laplace", "privunit" or
    # "randomized_response", whose messages have no delta
    mechanism: str
    place: str  # "central": once, on the cohort's sum; "distributed": a share on each message; "local": on each message
    # Of the noise in the released sum; with place "local", of the noise in one message. For a mechanism without a delta
    # it is 1 / epsilon of one message
    multiplier: float
    clip_norm: float  # L2 bound on how far one unit (next field) moves the value to which the noise is added
    unit: str  # whose presence is hidden: "client", or "record" of a client's data
    details: Any = None  # further numbers that the accountant of this mechanism needs: a dict or a NamedTuple

    @property
    def named_details(self) -> dict[str, Any]:
        """The details as a dict, which is empty without details.

        >>> Noise("gaussian", "distributed", 1.0, 1.0, "client", {"cohort_size": 10}).named_details
        {'cohort_size': 10}
        """
        if self.details is None:
            return {}
        return dict(self.details) if isinstance(self.details, Mapping) else self.details._asdict()


class Wire(NamedTuple):
    """A `Wire` states the size of one message.

    >>> sent = Wire(values=10, payload_bits=80, side_bits=32, coded_bits=60)
    >>> sent.bits, sent.coded, sent.with_plain(Wire(1, 32)).bits
    (112, 60, 144)
    """

    values: int  # how many numbers are sent
    payload_bits: int  # bits of these numbers
    side_bits: int = 0  # of indices, scales, seeds
    coded_bits: int | None = None  # upper bound under the best known entropy code for such messages; None = no code

    @property
    def bits(self) -> int:
        """Bits of the message as it is sent."""
        return self.payload_bits + self.side_bits

    @property
    def coded(self) -> int:
        """Bits of the message under an entropy code; never more than `bits`."""
        return self.bits if self.coded_bits is None else min(self.coded_bits, self.bits)

    def with_side(self, bits: int) -> Wire:
        """Adds bits of side information, which no entropy code shortens.

        >>> Wire(values=10, payload_bits=320).with_side(512).bits
        832
        """
        coded = None if self.coded_bits is None else self.coded_bits + bits
        return self._replace(side_bits=self.side_bits + bits, coded_bits=coded)

    def with_plain(self, more: Wire) -> Wire:
        """Appends the numbers of another message, which no entropy code shortens."""
        coded = None if self.coded_bits is None else self.coded_bits + more.bits
        return Wire(self.values + more.values, self.payload_bits + more.bits, self.side_bits, coded)


class Observed(NamedTuple):
    """An `Observed` holds what a server saw in a round, one row for each slot.

    A slot from which nothing arrived has weight 0 and a message of zeros.
    """

    broadcast: PyTree  # what the server sent
    messages: PyTree  # leaves [m, ...], as they arrived: after the clients' end of the transform
    weights: Array  # [m] float32
    ids: Array  # [m] int32


class Count(NamedTuple):
    """An exact count in a round's info that may exceed int32: `number` times `unit`, multiplied on the host.

    >>> Count.of(jnp.int32(1_000_000), 5_000).total()
    5000000000
    """

    number: Array  # [] int32, e.g. the number of messages that arrived
    unit: Array  # [2] uint32, the high and the low word of an integer, e.g. of the bytes of one message

    @classmethod
    def of(cls, number: Array, unit: int) -> Count:
        """Makes the count `number` times `unit`, where `unit` is a Python integer in [0, 2^64)."""
        return cls(number, jnp.array(divmod(unit, 1 << 32), jnp.uint32))

    def total(self) -> int:
        """Returns the product as a Python integer, computed on the host."""
        high, low = (int(word) for word in self.unit)
        return int(self.number) * ((high << 32) + low)
