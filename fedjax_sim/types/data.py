"""What flows through a round: data of clients, cohorts, reports, messages, and what is stated about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from fedjax_sim.types.time import Timing

Array = jax.Array
PyTree = Any
FilePath = str  # of a file: a run's identity has its content, and a config's relative path begins at the config
FolderPath = str  # of a folder with data: likewise, where the content is what was read
Attackers = Callable  # (key, ids [c]) -> [c] bool: which clients attack in the round of this key
StalenessWeight = Callable  # (gaps [c] int32 >= 0) -> [c] float32 in (0, 1]: how much updates count that are so stale

__all__ = [
    "Array",
    "Attackers",
    "ClientData",
    "Cohort",
    "Count",
    "Mean",
    "Metric",
    "Noise",
    "Observed",
    "Outcome",
    "Population",
    "PyTree",
    "Received",
    "Report",
    "Round",
    "StalenessWeight",
    "Wire",
]


class ClientData(NamedTuple):
    """The examples of one client, padded to a static number of rows n that is the same for all clients."""

    examples: PyTree  # leaves [n, ...]; rows where mask is False may hold anything, NaN included
    mask: Array  # [n] bool; True = a real example
    work: Array | None = None  # [] how much of its local work the client completes, as in `Cohort.work`; None = all
    pull: Array | None = None  # [] in [0, 1): the share of (local - broadcast params) in its steps' direction, beside
    # that of the gradient: an attacker's, who hides near the global model; None = none
    round: Array | None = (
        None  # [] int32 from 0, the round that it trains in, for clients that read it; None = not told
    )


@runtime_checkable
class Population(Protocol):
    """All clients, as a frozen pytree dataclass that a round takes as an argument; `size` is a static field.

    `size` and `client` suffice for everything that reads populations. Further members are optional, and used where they
    exist:

    - `count(id)`: [] int32, the client's number of examples, without reading them. Without it a cohort is not sorted by
      its clients' work, which changes rounding at most.
    - `capacities`: rising numbers of rows, one for each size class of clients; with `capped(rows)`: the same population
      whose clients have only `rows` rows. Without the two every client is read with all its rows.
    - `sizes`: [N] number of examples of each client. Without it they are counted from the masks, client by client.
    - `announce(ids)`: the same ids, after the storage was asked to read these clients' data ahead.
    - `group(id)`: the client as a population of its own clients, for a client that is a federation
      (`ClientUpdate.federation`); one without clients where the id is outside of [0, size).
    - `num_members`: of groups, the number of all their clients, on the lowest level of a hierarchy; static.
    - `there(ids)`: [c] bool, which of these clients exist, where ids are places of which some may be empty, as in a
      group. Without it all do. `ragged`: whether some places stay empty. `place(ids)`: where clients whom data name by
      their ids in the whole population are among these; -1 for those of other groups. Without it ids are places.
      `own_ids(places)`: these ids of the clients at some places, -1 where nobody is.

    Guarantees: tests/population/test_protocol.py::test_size_and_client_are_enough_to_train.
    """

    size: int  # N

    def client(self, id: Array) -> ClientData:
        """The data of one client.

        Args:
          id: [] int32 in [0, size).

        Returns: `ClientData`, with the same shapes for every client. The method is pure and traceable.
        """


class Cohort(NamedTuple):
    """The clients that a round invites, one a slot, and which of them report."""

    ids: Array  # [m] int32 index into the population, always in [0, N); any valid index in padding
    invited: Array  # [m] bool; False = padding
    reported: Array  # [m] bool; invited, and its message arrived in time
    metrics: dict[str, Array] = {}  # scalars, e.g. how many clients a truncated sampler left out
    work: Array | None = None  # [m] how much of its local work each slot completes: a share in (0, 1] (float), or a
    # number of steps (int32); None = all of it
    timing: Timing = Timing()

    def timed(self, **timing) -> Cohort:
        """The same cohort with these fields of its `timing` changed."""
        return self._replace(timing=self.timing._replace(**timing))


class Mean(NamedTuple):
    """A metric that pools correctly: totals and weights are summed over clients, then divided."""

    total: Array  # [] sum over examples
    weight: Array  # [] number (or weight) of those examples


class Metric(NamedTuple):
    """What a part states about a number of its own in Info, so that logs and pages can add it up and show it."""

    name: str  # in Info
    words: str  # as a person reads it, e.g. "clients that dropped out"
    unit: str = ""  # "count", "bytes", "share", "seconds", or "" for a plain number
    pooled: str = "sum"  # over a run's rounds: "sum", "mean", "max" or "last"
    instead: str | None = None  # the number that counts in a round without this one
    by: str | None = None  # of a mean: the number in Info that a round weighs, such as its messages; None = all alike
    besides: bool = False  # bytes that are sent, besides `uplink_bytes` and `downlink_bytes`, and in no other number


class Report(NamedTuple):
    """The result of one client's local work, before the transform."""

    update: PyTree  # local params - broadcast params, or whatever else the server expects
    weight: Array  # [] float32, usually the number of examples; 0 = nothing to report
    metrics: dict[str, Mean]
    counts: dict[str, Array] = {}  # [] non-negative int32 or uint32, or [2] uint32, the high and low word of a larger
    # one; summed exactly over clients: bytes, edges, joules


class Received(NamedTuple):
    """A chunk of messages, as the aggregator receives them."""

    updates: PyTree  # leaves [c, ...]; finite everywhere, zero where nothing arrived
    weights: Array  # [c] float32; 0 where nothing arrived
    ids: Array  # [c] int32
    slots: Array  # [c] int32 position in the cohort; >= num_slots in the engine's padding


class Round(NamedTuple):
    """What an aggregator may read in a round: the cohort, the broadcast model, and its own state."""

    cohort: Cohort
    broadcast: PyTree = ()  # what the clients received
    state: PyTree = ()  # the aggregator's own, from the round before
    key: Array | None = None  # of the whole message, where the aggregator of a part of it has a stream of its own


class Outcome(NamedTuple):
    """What a sampler that learns observes after a round."""

    arrived: Array  # [m] bool; a usable message arrived
    losses: Array  # [m] mean local loss (`local_loss`); NaN where nothing arrived or the client has no such metric


class Noise(NamedTuple):
    """What a part states of the noise that it adds, for an accountant; its std is multiplier * clip_norm."""

    mechanism: str  # "gaussian", "discrete_gaussian", "skellam", or a matrix mechanism's name
    place: str  # "central": once, on the cohort's sum; "distributed": a share on each message; "local": on each message
    multiplier: float  # of the noise in the released sum; with "local": of that in one message
    clip_norm: float  # L2 bound on how far one unit moves what the noise is added to
    unit: str  # whose presence is hidden: "client", or "record" of a client's data
    details: Any = None  # what the accountant of this mechanism needs beside: a dict or a NamedTuple

    @property
    def named_details(self) -> dict[str, Any]:
        """The details as a dict, empty without any.

        >>> Noise("gaussian", "distributed", 1.0, 1.0, "client", {"cohort_size": 10}).named_details
        {'cohort_size': 10}
        """
        return self.details._asdict() if hasattr(self.details, "_asdict") else dict(self.details or {})


class Wire(NamedTuple):
    """The size of one message.

    >>> sent = Wire(values=10, payload_bits=80, side_bits=32, coded_bits=60)
    >>> sent.bits, sent.coded, sent.with_plain(Wire(1, 32)).bits
    (112, 60, 144)
    """

    values: int  # numbers sent
    payload_bits: int  # of those numbers
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
        """The message with so many further bits of side information, uncoded.

        >>> Wire(values=10, payload_bits=320).with_side(512).bits
        832
        """
        coded = None if self.coded_bits is None else self.coded_bits + bits
        return self._replace(side_bits=self.side_bits + bits, coded_bits=coded)

    def with_plain(self, more: Wire) -> Wire:
        """The message with the numbers of `more` appended uncoded."""
        coded = None if self.coded_bits is None else self.coded_bits + more.bits
        return Wire(self.values + more.values, self.payload_bits + more.bits, self.side_bits, coded)


class Observed(NamedTuple):
    """What a server saw in a round, one row a slot; where nothing arrived, weight 0 and a message of zeros."""

    broadcast: PyTree  # what it sent
    messages: PyTree  # leaves [m, ...], as they arrived: after the clients' end of the transform
    weights: Array  # [m] float32
    ids: Array  # [m] int32


class Count(NamedTuple):
    """An exact count in a round's info that may exceed int32: `number` times `unit`, multiplied on the host.

    >>> Count.of(jnp.int32(1_000_000), 5_000).total()
    5000000000
    """

    number: Array  # [] int32, e.g. messages that arrived
    unit: Array  # [2] uint32, high and low words, e.g. of the bytes of one message

    @classmethod
    def of(cls, number: Array, unit: int) -> Count:
        """`number` times `unit`, a Python integer in [0, 2^64)."""
        return cls(number, jnp.array(divmod(unit, 1 << 32), jnp.uint32))

    def total(self) -> int:
        """The product, as a Python integer."""
        high, low = (int(word) for word in self.unit)
        return int(self.number) * ((high << 32) + low)
