"""The nouns that all subpackages share. Data are pytrees; behaviour is a NamedTuple of pure functions.

Parts carry static facts about themselves. What a part does not state counts as the claim that promises least
(tests/laws/test_facts.py::test_facts_fail_closed).

Letters: N population, m cohort slots, c slots in a chunk, n examples of a client, T rounds, d model dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

Array = jax.Array
PyTree = Any

__all__ = [
    "Aggregator",
    "Algorithm",
    "ClientData",
    "ClientUpdate",
    "Cohort",
    "Count",
    "Mean",
    "Metric",
    "Noise",
    "Observed",
    "Outcome",
    "Population",
    "Received",
    "Report",
    "Round",
    "Sampler",
    "ServerUpdate",
    "Star",
    "UpdateTransform",
    "Wire",
    "Work",
    "noisy_parts",
]


class ClientData(NamedTuple):
    """What one client holds, padded to a static number of rows."""

    examples: PyTree  # leaves [n, ...]; rows where mask is False may hold anything, NaN included
    mask: Array  # [n] bool; True = a real example
    work: Array | None = None  # [] how much of its local work the client gets done, as in `Cohort.work`; None = all


@runtime_checkable
class Population(Protocol):
    """Who exists: a frozen pytree dataclass, passed to a round as an argument; `size` is a static field.

    These two members are enough for all that reads populations. A population may have more, used where they are there:

    - `count(id)`: the number of examples, without reading them. Without it a cohort is not sorted by its clients' work,
      which changes rounding at most.
    - `capacities`, the rows that classes of clients may have, rising, with `capped(rows)`, itself with room for fewer.
      Without the two every client is read with all its rows.
    - `sizes`: [N] examples per client. Without it they are counted in the masks, client by client.
    - `announce(ids)`: the ids, once somebody has been told that their data are wanted soon.

    Guarantees: tests/population/test_protocol.py::test_size_and_client_are_enough_to_train.
    """

    size: int  # N

    def client(self, id: Array) -> ClientData:
        """Data of one client, with the same shapes for all; pure, traceable, `id` a scalar int32 in [0, size)."""


class Cohort(NamedTuple):
    """Who was invited to a round, and whose message arrived."""

    ids: Array  # [m] int32 population index, always in [0, N); any valid index in padding
    invited: Array  # [m] bool; False = padding
    reported: Array  # [m] bool; invited and arrived
    metrics: dict[str, Array] = {}  # scalars, e.g. how many clients a truncated sampler left out
    sent: Array | None = None  # [m] bool; those who sent a message, in time or too late; None = who reported
    work: Array | None = None  # [m] share of its local work (float, in (0, 1]) or steps (int32) that a slot gets done


class Mean(NamedTuple):
    """A metric that pools correctly: totals and weights are summed over clients before dividing."""

    total: Array  # [] sum over examples
    weight: Array  # [] number (or weight) of those examples


class Metric(NamedTuple):
    """What a part states about a number of its own in Info, so that logs and pages can add it up and show it."""

    name: str  # in Info
    words: str  # as a person reads it, e.g. "clients that dropped out"
    unit: str = ""  # "count", "bytes", "share", "seconds", or "" for a plain number
    pooled: str = "sum"  # over a run's rounds: "sum", "mean" or "last"
    instead: str | None = None  # the number that counts in a round without this one


class Report(NamedTuple):
    """What one client hands over."""

    update: PyTree  # local params - broadcast params, or whatever the server expects
    weight: Array  # [] float32, usually the number of examples; 0 = nothing to report
    metrics: dict[str, Mean]
    counts: dict[str, Array] = {}  # [] non-negative int32 or uint32, summed exactly over clients: bytes, edges, joules


class Received(NamedTuple):
    """A chunk of messages, as the aggregator gets them."""

    updates: PyTree  # leaves [c, ...]; finite everywhere, zero where nothing arrived
    weights: Array  # [c] float32; 0 where nothing arrived
    ids: Array  # [c] int32
    slots: Array  # [c] int32 position in the cohort; >= num_slots in the engine's padding


class Round(NamedTuple):
    """What an aggregator may know of a round: the cohort's fields, the broadcast model, and its own state."""

    ids: Array  # [m] int32, as in `Cohort`; so are the next five
    invited: Array
    reported: Array
    metrics: dict[str, Array] = {}
    sent: Array | None = None
    work: Array | None = None
    broadcast: PyTree = ()  # what clients received
    state: PyTree = ()  # the aggregator's own, from the round before


class Work(NamedTuple):
    """What a round asks of one client, on the host."""

    bytes_up: int  # of its message
    bytes_down: int  # of the broadcast
    steps: int | Callable | None  # local steps, or (examples) -> local steps; None = a client that does not say
    flops: float  # of its local work with all rows, as XLA counts them: loops of unknown length once


class Outcome(NamedTuple):
    """What came back from a cohort, for a sampler that learns from it."""

    arrived: Array  # [m] bool; a usable message came
    losses: Array  # [m] mean local loss (`local_loss`); NaN where nothing arrived or the client has no such metric


class Sampler(NamedTuple):
    """Population -> cohort."""

    init: Callable  # () -> state
    sample: Callable  # (key, state) -> (Cohort, state)
    num_slots: int  # m, static
    design: Any  # sampling.design.SamplingDesign: what theory and the accountant read
    tell: Callable | None = None  # (state, Work) -> state, once, before the first round
    observe: Callable | None = None  # (state, Cohort, Outcome) -> state, after each round
    metrics: tuple[Metric, ...] = ()  # of `Cohort.metrics`

    def then(self, change: Callable, design: Any = None, metrics: tuple[Metric, ...] = ()) -> Sampler:
        """This sampler, whose cohorts go through `change(key, cohort) -> cohort`; the key is that of the draw."""

        def sample(key, state):
            cohort, state = self.sample(key, state)
            return change(key, cohort), state

        design = self.design if design is None else design
        return self._replace(sample=sample, design=design, metrics=(*self.metrics, *metrics))


class Noise(NamedTuple):
    """What a private part promises to add, as an accountant reads it; std = multiplier * clip_norm."""

    mechanism: str  # "gaussian", "discrete_gaussian", "skellam", or a matrix mechanism's name
    place: str  # "central": once, on the cohort's sum; "distributed": a share on each message; "local": on each message
    multiplier: float  # of the noise that the released sum holds; "local": that one message holds
    clip_norm: float  # the most that one unit moves what the noise is added to
    unit: str  # whose presence is hidden: "client", or "record" of a client's data
    details: Any = None  # what a mechanism's accountant must know beside


class Wire(NamedTuple):
    """What one message costs on the wire."""

    values: int  # numbers sent
    payload_bits: int  # of those numbers
    side_bits: int = 0  # indices, scales, seeds
    coded_bits: int | None = None  # at most, under the best code that is known for such a message; None = as sent

    @property
    def bits(self) -> int:
        """Of the message as it is sent."""
        return self.payload_bits + self.side_bits

    @property
    def coded(self) -> int:
        """Of the message under an entropy code."""
        return self.bits if self.coded_bits is None else min(self.coded_bits, self.bits)

    def with_plain(self, more: Wire) -> Wire:
        """Of the message with `more` numbers beside it, sent as they are."""
        coded = None if self.coded_bits is None else self.coded_bits + more.bits
        return Wire(self.values + more.values, self.payload_bits + more.bits, self.side_bits, coded)


class ClientUpdate(NamedTuple):
    """Local work, written for ONE client; the engine adds the axis."""

    init: Callable  # (params) -> client state; () if stateless
    apply: Callable  # (key, broadcast, client state, ClientData) -> (Report, client state)
    num_steps: int | Callable | None = None  # of a client that reads minibatches, or (examples) -> steps; else None
    noise: Noise | None = None  # of record-level privacy
    uniform_weights: bool = False  # every report weighs 1, or 0 for nothing to report, whatever the client holds
    all_steps: int | Callable | None = None  # steps, or (examples) -> steps, of which it does the part that `data.work`
    # says; None = it always does all
    metrics: tuple[Metric, ...] = ()  # of its reports, counts included


class UpdateTransform(NamedTuple):
    """Both ends of what an update goes through on its way."""

    init: Callable  # (update_spec) -> server-side state
    init_client: Callable  # (update_spec) -> per-client memory; () if none
    on_client: Callable  # (key, update, state, memory) -> (update, memory, measured); measured: pytree of Mean
    on_server: Callable  # (key, cohort, aggregate, state, measured, sensitivity) -> (aggregate, state, metrics)
    wire: Callable  # (update_spec, Wire of what comes in) -> Wire of what goes out
    l2_bound: float | None = None  # no output of on_client has a larger norm
    nonexpansive: bool = False  # on_client never lengthens an update
    releases_when_empty: bool = False  # a round without messages still moves the model (noise-only release)
    unbiased: bool = False  # the mean of on_client's output, over its key, is its input
    squared_error: Callable | None = None  # (update) -> E |output - update|^2 over the key, or a bound of it
    exact_error: bool = False  # squared_error is the error itself, not a bound
    integer_range: tuple[int, int] | None = None  # on_client sends integers from here to there, in a unit all share
    noise: Noise | None = None  # what the accountant reads
    mirrored: bool = True  # its two ends may keep copies of what is sent: nothing may change that on the way
    metrics: tuple[Metric, ...] = ()  # of `on_server`


class Aggregator(NamedTuple):
    """Many messages -> one aggregate.

    LAW: carries of disjoint slots combine (`engine.combine`) to the carry of their union: exact sums merge, arrays add.
    One that keeps something between rounds has a `start`; its `finalize` then returns (aggregate, metrics, state).
    """

    init: Callable  # (update_spec, num_slots) -> carry, all zeros
    accumulate: Callable  # (key, Round, carry, Received) -> carry
    finalize: Callable  # (key, Round, carry) -> (aggregate, metrics), or with the next state behind them
    sensitivity: float | None = None  # L2 motion of the aggregate per unit motion of one update; None = unbounded
    modulus: int | None = None  # it sums integers modulo this one; None = it sums numbers
    weighted: bool = True  # the result may depend on the weights that clients report
    homogeneous: bool = False  # messages in another unit give the result in that unit
    design: Any = None  # the SamplingDesign whose unequal chances it corrects for; None = it corrects nothing
    start: Callable | None = None  # (update_spec) -> its state before the first round (`Round.state`); None = stateless
    metrics: tuple[Metric, ...] = ()  # of `finalize`


class ServerUpdate(NamedTuple):
    """The server's step."""

    init: Callable  # (params) -> state
    broadcast: Callable  # (state) -> what clients receive
    apply: Callable  # (key, aggregate, state) -> state
    params: Callable  # (state) -> params to evaluate
    wire: Callable | None = None  # (broadcast_spec) -> Wire of what each client receives; None = sent as it is
    takes: Callable | None = None  # (params_spec) -> what aggregates look like; None = shaped like the params

    def expects(self, params_spec: PyTree) -> PyTree:
        """Shapes and dtypes of an aggregate, where clients send the model's dtypes."""
        return params_spec if self.takes is None else self.takes(params_spec)


class Star(NamedTuple):
    """The parts of a federation around one server: what the verbs of `algorithms.round` work on."""

    sampler: Sampler
    client: ClientUpdate
    aggregator: Aggregator
    server: ServerUpdate
    transform: UpdateTransform
    plan: Any = None  # engine.Plan: clients vmapped and summed at once; None = fitted to the model
    mesh: Any = "all"  # devices that share the cohort; "all" = all that are visible, None = one
    nonfinite: str = "drop"  # or "error": what a message that is not finite does


def noisy_parts(parts: Star | Mapping[str, Any] | None) -> dict[str, Noise]:
    """The noise of each part that has any, by the part's name."""
    named = parts._asdict() if isinstance(parts, Star) else parts or {}
    return {name: noise for name, part in named.items() if (noise := getattr(part, "noise", None)) is not None}


class Observed(NamedTuple):
    """What a server saw in a round. One row a slot; where nothing arrived, weight 0 and a message of zeros."""

    broadcast: PyTree  # what it sent
    messages: PyTree  # leaves [m, ...], as they arrived: behind the clients' ends of the transform
    weights: Array  # [m] float32
    ids: Array  # [m] int32


class Algorithm(NamedTuple):
    """The one outer contract: everything that learns over rounds."""

    init: Callable  # (key, params, population) -> state
    step: Callable  # (key, state, population) -> (state, info)
    params: Callable  # (state) -> params to evaluate
    parts: Star | None = None  # what an accountant and theory read; None = nobody knows what it is made of
    observe: Callable | None = None  # (key, state, population) -> Observed of the round that `step` makes
    personal: Callable | None = None  # (state, ids) -> params of these clients, leaves [len(ids), ...]
    metrics: tuple[Metric, ...] = ()  # of its Info


class Count(NamedTuple):
    """An exact count in Info that may pass int32: `number` times `unit`, multiplied on the host."""

    number: Array  # [] int32, e.g. messages that arrived
    unit: Array  # [2] uint32, high and low words, e.g. of the bytes of one message

    @classmethod
    def of(cls, number: Array, unit: int) -> Count:
        """`number` times a Python integer below 2^64."""
        return cls(number, jnp.array(divmod(unit, 1 << 32), jnp.uint32))

    def total(self) -> int:
        """The product, on the host."""
        high, low = (int(word) for word in self.unit)
        return int(self.number) * ((high << 32) + low)
