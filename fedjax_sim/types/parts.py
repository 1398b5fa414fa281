"""The parts of a federation, as NamedTuples of pure functions with static facts, and the `Algorithm` made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedjax_sim.types.data import Metric, Noise, PyTree
from fedjax_sim.types.facts import AggregatorFacts, ClientFacts, TransformFacts
from fedjax_sim.types.time import TimeInside

__all__ = [
    "Aggregator",
    "Algorithm",
    "Availability",
    "ClientUpdate",
    "Devices",
    "Evaluated",
    "Execution",
    "Inside",
    "Level",
    "Sampler",
    "ServerUpdate",
    "Star",
    "UpdateTransform",
    "noisy_parts",
]


class Sampler(NamedTuple):
    """Population -> cohort.

    `tell` and `observe` are for samplers that depend on clients' costs or losses; the design of one whose cohorts
    follow what it observes has the scheme "unknown" or "unknown_without_replacement".
    """

    init: Callable  # () -> state
    sample: Callable  # (key, state) -> (Cohort, state)
    num_slots: int  # m, static
    design: Any  # sampling.design.SamplingDesign: what theory and the accountant read
    tell: Callable | None = None  # (state, Work) -> state, called once, before the first round
    observe: Callable | None = None  # (state, Cohort, Outcome) -> state, called after each round
    metrics: tuple[Metric, ...] = ()  # what it states of `Cohort.metrics`
    devices: Devices | None = None  # what its clients run on: then its state holds a `Clock`, and its cohorts `spent`;
    # None = its rounds take no time

    def then(self, change: Callable, design: Any = None, metrics: tuple[Metric, ...] = ()) -> Sampler:
        """This sampler with a change applied to each of its cohorts.

        Args:
          change: (key, Cohort) -> Cohort; the key is the one that the cohort was drawn with.
          design: that of the changed cohorts; None = that of this sampler.
          metrics: what the change states of the numbers that it adds.
        """

        def sample(key, state):
            cohort, state = self.sample(key, state)
            return change(key, cohort), state

        design = self.design if design is None else design
        return self._replace(sample=sample, design=design, metrics=(*self.metrics, *metrics))


class ClientUpdate(NamedTuple):
    """Local work, written for ONE client; the engine adds the batch axis."""

    init: Callable  # (params) -> client state; () if stateless
    apply: Callable  # (key, broadcast, client state, ClientData) -> (Report, client state)
    facts: ClientFacts = ClientFacts()
    federation: Any = None  # the `Star` that it is, seen from above: `init` is then (params, Population) -> state, and
    # `apply` takes a Population (`Population.group`) in the place of ClientData; None = an ordinary client
    time_inside: TimeInside | None = None  # of a federation; None = not known, so no clock prices it

    def stating(self, **facts) -> ClientUpdate:
        """The same local work with these facts changed."""
        return self._replace(facts=self.facts._replace(**facts))


class UpdateTransform(NamedTuple):
    """Both ends of what an update passes through between client and server: clipping, compression, noise."""

    init: Callable  # (update_spec) -> server-side state
    init_client: Callable  # (update_spec) -> per-client memory; () if none
    on_client: Callable  # (key, update, state, memory) -> (update, memory, measured); measured: pytree of Mean
    on_server: Callable  # (key, cohort, aggregate, state, measured, sensitivity) -> (aggregate, state, metrics)
    wire: Callable  # (update_spec, Wire of the incoming update) -> Wire of the outgoing one
    facts: TransformFacts = TransformFacts()
    squared_error: Callable | None = None  # (update) -> E |output - update|^2 over the key, or an upper bound

    def stating(self, **facts) -> UpdateTransform:
        """The same transform with these facts changed."""
        return self._replace(facts=self.facts._replace(**facts))


class Aggregator(NamedTuple):
    """Many messages -> one aggregate.

    LAW: carries of disjoint slots combine (`engine.combine`) to the carry of their union: exact sums merge, arrays add.
    An aggregator with state has a `start`; its `finalize` then returns (aggregate, metrics, state).
    """

    init: Callable  # (update_spec, num_slots) -> carry, all zeros
    accumulate: Callable  # (key, Round, carry, Received) -> carry
    finalize: Callable  # (key, Round, carry) -> (aggregate, metrics), followed by the next state if it has one
    facts: AggregatorFacts = AggregatorFacts()
    start: Callable | None = None  # (update_spec) -> its state before the first round (`Round.state`); None = stateless
    rule: Callable | None = None  # (key, Round, SideBySide) -> what `finalize` returns; for
    # wrappers that change messages before an aggregator sees them. None = it takes a stream of messages
    stays: Callable | None = None  # (key, Round) -> [m] bool: whose message reaches it; the others count as
    # clients who did not report; None = every message that arrives does
    view: Callable | None = None  # (key, Round, Received of all slots) -> (messages [m, ...], weights [m]) that the
    # server sees; None = the messages as they arrive

    def stating(self, **facts) -> Aggregator:
        """The same aggregator with these facts changed."""
        return self._replace(facts=self.facts._replace(**facts))


class ServerUpdate(NamedTuple):
    """The server's step."""

    init: Callable  # (params) -> state
    broadcast: Callable  # (state) -> what clients receive
    apply: Callable  # (key, aggregate, state) -> state
    params: Callable  # (state) -> params to evaluate
    wire: Callable | None = None  # (broadcast_spec) -> Wire of what each client receives; None = sent as it is
    takes: Callable | None = None  # (params_spec) -> spec of an aggregate; None = that of the params
    moved: Callable | None = None  # (state, params) -> the same state at another model; None = that is not known

    def expects(self, params_spec: PyTree) -> PyTree:
        """Shapes and dtypes of an aggregate, where clients send the model's dtypes."""
        return params_spec if self.takes is None else self.takes(params_spec)


class Availability(NamedTuple):
    """When clients can take part, as a pure function of id and time: nothing is kept for N clients."""

    at: Callable  # (ids [c], seconds [] or [c] int32 since the start, as `Clock.seconds`) -> [c] bool
    rate: Callable | None = None  # (ids [c] on the host) -> [c] float64 share of all time; None = unknown. That of a
    # run may be another: formulas, Horvitz-Thompson and accountants take none, and refuse samplers over availability


class Devices(NamedTuple):
    """What clients run on: the time and energy of a round as pure functions of a client's id, at no cost in N."""

    population_size: int
    spend: Callable  # (key, ids [c], Load) -> Spent
    availability: Availability | None = None  # None = always there
    ticks_per_second: int = 1000  # the unit of simulated time, in [1, 10^6]; a duration is below 2^31 ticks


class Execution(NamedTuple):
    """How rounds are computed: no plan and no mesh changes a result."""

    plan: Any = None  # engine.Plan: how many clients are vmapped and summed at once; None = fitted to the model
    mesh: Any = "all"  # devices that share the cohort; "all" = every visible one, None = one
    nonfinite: str = "drop"  # or "error": what happens on a message that is not finite


class Star(NamedTuple):
    """The parts of a federation around one server; `round` has the steps of a round over it."""

    sampler: Sampler
    client: ClientUpdate
    aggregator: Aggregator
    server: ServerUpdate
    transform: UpdateTransform
    execution: Execution = Execution()
    complete: bool = False  # these parts are the whole algorithm: its rounds are invite, collect and close over them


class Inside(NamedTuple):
    """What a round inside of a hierarchy tells: `Info`, apart from it the clients' own metrics, and what they weigh."""

    info: dict[str, Any]  # of the round
    means: dict[str, Any]  # `Mean`, the clients' metrics
    counts: dict[str, Any]  # the clients' counts, [4] or [8] uint32, the bytes of each, the lowest first
    weight: Any  # [] float32 of those who reported, together
    broken: Any  # [] bool; something that was sent was not finite


class Level(NamedTuple):
    """A federation as a hierarchy above it needs it."""

    star: Star  # its sampler and server, and the facts of its clients; all of it where rounds are those of a star
    init: Callable  # (params, Population) -> state, whose `server` is that of the star
    step: Callable  # (key, state, Population) -> (state, Inside)
    metrics: tuple[Metric, ...] = ()  # what it states of its Info's numbers


class Evaluated(NamedTuple):
    """What evaluations ask of an algorithm beside its params."""

    personal: Callable | None = None  # (state, ids) -> params of these clients, leaves [len(ids), ...]
    model: Any = None  # the `models.Model` as those who trained it compute it together, with what changes between them.
    # None = the model as it was given


class Algorithm(NamedTuple):
    """Anything that learns over rounds: the one interface that `run`, sweeps and instruments take."""

    init: Callable  # (key, params, population) -> state
    step: Callable  # (key, state, population) -> (state, info)
    params: Callable  # (state) -> params to evaluate
    parts: Star | None = None  # what an accountant and theory read; None = unknown, so no epsilon is stated
    observe: Callable | None = None  # (key, state, population) -> Observed of the round that `step` makes
    evaluated: Evaluated = Evaluated()
    metrics: tuple[Metric, ...] = ()  # what it states of its Info's numbers
    level: Level | None = None  # what a hierarchy above needs of it; None = its parts, where they are whole


def noisy_parts(parts: Star | Mapping[str, Any] | None) -> dict[str, Noise]:
    """The noise of each part that has any, by the part's name.

    Args:
      parts: a `Star`, or parts by name; None for an algorithm that does not state its parts.

    Returns: {"transform": Noise, ...}; empty where no part has noise, and for None. Noise inside a client that is a
    federation is there too, as "client.transform".

    Guarantees: noise in any part is found (tests/running/test_privacy_ledger.py::test_noise_in_any_part_is_seen), on
    any level of a hierarchy (tests/algorithms/hierarchy/test_hierfavg.py::test_noise_inside_an_edge_has_no_epsilon).
    """
    named = parts._asdict() if isinstance(parts, Star) else parts or {}
    found = {}
    for name, part in named.items():
        noise = getattr(getattr(part, "facts", part), "noise", None)
        if noise is not None:
            found[name] = noise
    for name, part in named.items():
        inside = noisy_parts(getattr(part, "federation", None))
        found |= {f"{name}.{inner}": noise for inner, noise in inside.items()}
    return found
