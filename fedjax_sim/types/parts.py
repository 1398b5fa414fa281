"""The parts of a federation, as NamedTuples of pure functions with static facts, and the `Algorithm` made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedjax_sim.types.data import Metric, Noise, PyTree
from fedjax_sim.types.facts import AggregatorFacts, ClientFacts, ParamsKind, TransformFacts
from fedjax_sim.types.time import TimeInside


class Sampler(NamedTuple):
    """A sampler draws a cohort from the population in each round.

    `tell` and `observe` are for samplers that depend on clients' costs or losses. A sampler whose cohorts depend on
    what it observes has a design of the scheme "unknown" or "unknown_without_replacement".
    """

    init: Callable  # () -> state
    sample: Callable  # (key, state) -> (Cohort, state)
    num_slots: int  # m, static
    design: Any  # sampling.design.SamplingDesign: what theory and the accountant read
    tell: Callable | None = None  # (state, Work) -> state, called once, before the first round
    observe: Callable | None = None  # (state, Cohort, Outcome) -> state, called after each round
    metrics: tuple[Metric, ...] = ()  # descriptions of `Cohort.metrics`
    # The devices of its clients. With devices its state holds a `Clock`, and its cohorts hold `Timing.spent`; None =
    # its rounds take no time
    devices: Devices | None = None

    def then(self, change: Callable, design: Any = None, metrics: tuple[Metric, ...] = ()) -> Sampler:
        """Returns this sampler with a change applied to each of its cohorts.

        Args:
          change: (key, Cohort) -> Cohort; the key is that with which the cohort was drawn.
          design: of the changed cohorts; None = the design of this sampler.
          metrics: descriptions of the numbers that the change adds to `Cohort.metrics`.
        """

        def sample(key, state):
            cohort, state = self.sample(key, state)
            return change(key, cohort), state

        design = self.design if design is None else design
        return self._replace(sample=sample, design=design, metrics=(*self.metrics, *metrics))


class ClientUpdate(NamedTuple):
    """Local work, written for ONE client; the engine adds the batch axis."""

    init: Callable  # (params) -> client state; () if stateless
    # (key, broadcast, client state, ClientData) -> (Report, client state); a client that reports weight 0, such as one
    # without examples, keeps the state that it had (`round/message.py`)
    apply: Callable
    facts: ClientFacts = ClientFacts()
    # The `Star` of a client that is itself a federation. Then `init` is (params, Population) -> state, and `apply`
    # takes a Population (`Population.group`) in the place of ClientData; None = an ordinary client
    federation: Any = None
    time_inside: TimeInside | None = None  # of a federation's rounds; None = not known, so no clock prices them

    def stating(self, **facts) -> ClientUpdate:
        """Returns the same local work with these facts changed."""
        return self._replace(facts=self.facts._replace(**facts))


class UpdateTransform(NamedTuple):
    """A transform changes an update between client and server, by clipping, compression or noise.

    It has both ends, so that the server's end can rely on what the client's end did.
    """

    init: Callable  # (update_spec) -> server-side state
    init_client: Callable  # (update_spec) -> per-client memory; () if none
    on_client: Callable  # (key, update, state, memory) -> (update, memory, measured); measured: pytree of Mean
    # (key, cohort, aggregate, state, measured, sensitivity) -> (aggregate, state, metrics). `measured`: the `Mean`s
    # of `on_client` over all messages; `sensitivity` is that of `AggregatorFacts`, None = unbounded
    on_server: Callable
    wire: Callable  # (update_spec, Wire of the incoming update) -> Wire of the outgoing one
    facts: TransformFacts = TransformFacts()
    squared_error: Callable | None = None  # (update) -> E |output - update|^2 over the key, or an upper bound

    def stating(self, **facts) -> UpdateTransform:
        """Returns the same transform with these facts changed."""
        return self._replace(facts=self.facts._replace(**facts))


class Aggregator(NamedTuple):
    """An aggregator combines the messages of a cohort, chunk by chunk, into one aggregate.

    LAW: carries of disjoint slots combine (`engine.exact_sums.combine`) to the carry of their union: exact sums merge,
    arrays add.
    An aggregator with state has a `start`; its `finalize` then returns (aggregate, metrics, state).
    """

    init: Callable  # (update_spec, num_slots) -> carry, all zeros
    accumulate: Callable  # (key, Round, carry, Received) -> carry
    finalize: Callable  # (key, Round, carry) -> (aggregate, metrics), followed by the next state if there is a state
    facts: AggregatorFacts = AggregatorFacts()
    start: Callable | None = None  # (update_spec) -> its state before the first round (`Round.state`); None = stateless
    # (key, Round, SideBySide) -> what `finalize` returns, for an aggregator that sees all messages at once. Wrappers
    # use it to change messages before the rule sees them. None = the aggregator takes a stream of messages
    rule: Callable | None = None
    # (key, Round) -> [m] bool: whose message reaches the aggregator. All others count as clients who did not report;
    # None = every message that arrives reaches it
    stays: Callable | None = None
    # (key, Round, Received of all slots) -> (messages [m, ...], weights [m]) that the server sees; None = the messages
    # as they arrive
    view: Callable | None = None

    def stating(self, **facts) -> Aggregator:
        """Returns the same aggregator with these facts changed."""
        return self._replace(facts=self.facts._replace(**facts))


class ServerUpdate(NamedTuple):
    """A server broadcasts its model, and takes a step with the aggregate of each round."""

    init: Callable  # (params) -> state
    broadcast: Callable  # (state) -> what clients receive
    apply: Callable  # (key, aggregate, state) -> state
    params: Callable  # (state) -> params to evaluate
    wire: Callable | None = None  # (broadcast_spec) -> Wire of what each client receives; None = sent as it is
    takes: Callable | None = None  # (params_spec) -> spec of an aggregate; None = the spec of the params
    # (state, params) -> the same state at another model; None = the server cannot go on from another model
    moved: Callable | None = None
    params_kind: ParamsKind = ParamsKind.UNSTATED  # what `params` are

    def expects(self, params_spec: PyTree) -> PyTree:
        """Shapes and dtypes of the aggregate that the server takes, where clients send the model's dtypes."""
        return params_spec if self.takes is None else self.takes(params_spec)


class Availability(NamedTuple):
    """The times at which clients can take part, as a pure function of id and time: nothing is kept for N clients."""

    at: Callable  # (ids [c], seconds [] or [c] int32 since the start, as `Clock.seconds`) -> [c] bool
    # (ids [c] on the host) -> [c] float64, the long-run share of time in which a client is there; None = unknown. The
    # share in one run may differ. So formulas, Horvitz-Thompson and accountants do not use it, and refuse samplers with
    # availability
    rate: Callable | None = None


class Devices(NamedTuple):
    """The devices of clients: time and energy of a round as pure functions of a client's id, at no cost in N."""

    population_size: int
    spend: Callable  # (key, ids [c], Load) -> Spent
    availability: Availability | None = None  # None = clients are always there
    ticks_per_second: int = 1000  # the unit of simulated time, in [1, 10^6]; a duration is below 2^31 ticks


class Execution(NamedTuple):
    """Options that say how rounds are computed: no plan and no mesh changes a result."""

    plan: Any = None  # engine.Plan: how many clients are vmapped and summed at once; None = fitted to the model
    mesh: Any = "all"  # devices that share the cohort; "all" = every visible device, None = one device
    nonfinite: str = "drop"  # a message that is not finite is dropped; "error": it also stops the run


class Star(NamedTuple):
    """The parts of a federation around one server; the subpackage `round` has the steps of a round over a star."""

    sampler: Sampler
    client: ClientUpdate
    aggregator: Aggregator
    server: ServerUpdate
    transform: UpdateTransform
    execution: Execution = Execution()
    complete: bool = False  # these parts are the whole algorithm: its rounds are invite, collect and close over them

    @property
    def params_kind(self) -> ParamsKind:
        """What the server's `params` are; where clients are federations, what these make of them."""
        kind, federation = self.server.params_kind, self.client.federation
        return kind if kind is not ParamsKind.MODEL or federation is None else federation.params_kind


class Inside(NamedTuple):
    """The result of a round inside of a hierarchy: its info, its clients' metrics and counts, and their weight."""

    info: dict[str, Any]  # of the round
    means: dict[str, Any]  # `Mean`, the clients' metrics
    counts: dict[str, Any]  # the clients' counts, [4] or [8] uint32, the bytes of each, the lowest first
    weight: Any  # [] float32, the sum of the weights of the clients who reported
    broken: Any  # [] bool; some message was not finite


class Level(NamedTuple):
    """A federation in the form that the level above it in a hierarchy needs."""

    # Its sampler, its server and the facts of its clients. All parts are used where its rounds are those of a star
    star: Star
    init: Callable  # (params, Population) -> state, whose field `server` is the state of the star's server
    step: Callable  # (key, state, Population) -> (state, Inside)
    metrics: tuple[Metric, ...] = ()  # descriptions of its info's numbers


class Evaluated(NamedTuple):
    """An `Evaluated` holds what an evaluation needs from an algorithm beside its params."""

    # (state, ids) -> params of these clients' personal models, leaves [len(ids), ...]; None = there are none
    personal: Callable | None = None
    # (state, ids) -> [len(ids)] bool: these clients' personal models have been trained; None = all of them
    has_trained: Callable | None = None
    # (key, params, ClientData) -> params: what ONE client does with its model, on rows of its own, before the model is
    # judged; None = nothing
    adapt: Callable | None = None
    # The `models.Model` as the parties compute it together, with the changes (noise, rounding) that links between them
    # make. None = the model as it was given
    model: Any = None
    # (params, examples, key) -> per-row values, by which its params are judged: those of a statistic, which trains no
    # model. None = by the loss that it was given
    loss_fn: Callable | None = None
    # (params as NumPy arrays) -> {name: array}: what a statistic found, as a reader wants it. None = it is a model
    answer: Callable | None = None
    # (state) -> (params of the server's models, leaves [k, ...], [] int32: how many of them are in use), where
    # `params` are one of them. None = there is one model, or none
    models: Callable | None = None


class Algorithm(NamedTuple):
    """An algorithm that learns over rounds: the one interface that `run`, sweeps and instruments take."""

    init: Callable  # (key, params, population) -> state
    step: Callable  # (key, state, population) -> (state, info)
    params: Callable  # (state) -> params to evaluate
    parts: Star | None = None  # the parts, for accountant and theory; None = unknown, so no epsilon is stated
    observe: Callable | None = None  # (key, state, population) -> Observed of the round that `step` makes
    evaluated: Evaluated = Evaluated()
    metrics: tuple[Metric, ...] = ()  # descriptions of its info's numbers
    # Its form as a level of a hierarchy; None = made of its parts, where these are the whole algorithm
    level: Level | None = None
    params_kind: ParamsKind = ParamsKind.UNSTATED  # what `params` are

    @property
    def is_judged_by_owners(self) -> bool:
        """Whether its result is clients' own models, which are judged on rows that clients keep from training."""
        is_own = self.evaluated.has_trained is not None or self.evaluated.adapt is not None
        return is_own or not self.params_kind.is_judged


def noisy_parts(parts: Star | Mapping[str, Any] | None) -> dict[str, Noise]:
    """Finds the noise of each part that adds noise, by the part's name.

    Args:
      parts: a `Star`, or parts by name; None for an algorithm that does not state its parts.

    Returns: {"transform": Noise, ...}; empty where no part has noise, and for None. Noise inside of a client that is a
    federation has a name such as "client.transform".

    Guarantees: noise in any part is found (tests/running/test_privacy_ledger.py::test_noise_in_any_part_is_seen), on
    any level of a hierarchy (tests/algorithms/hierarchy/test_hierfavg.py::test_noise_inside_an_edge_has_no_epsilon).
    """
    parts_by_name = parts._asdict() if isinstance(parts, Star) else parts or {}
    noise_by_part = {}
    for name, part in parts_by_name.items():
        noise = getattr(getattr(part, "facts", part), "noise", None)
        if noise is not None:
            noise_by_part[name] = noise
    for name, part in parts_by_name.items():
        inner_noise = noisy_parts(getattr(part, "federation", None))
        noise_by_part |= {f"{name}.{inner_name}": noise for inner_name, noise in inner_noise.items()}
    return noise_by_part
