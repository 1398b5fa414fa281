"""Asynchronous federated learning: clients train on the version of the model that they were sent, while others move on.

A step of the server is: whose messages arrive next (`algorithms.asynchronous.arrivals`), collect with each of them at
its own base (`Bases`), close. `asynchronous` is FedBuff from its parts, as `federated` is FedAvg; its recipe is in
`algorithms.fedbuff`. FedAsync, whose server steps after every message, is in `algorithms.fedasync`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.algorithms.asynchronous.arrivals import Arrivals, Flights, next_arrivals, take_off
from fedjax_sim.algorithms.asynchronous.in_flight import Begun, Traffic
from fedjax_sim.network import Hazard, load_of
from fedjax_sim.network.devices import SATURATED, check_devices
from fedjax_sim.population.protocol import num_rows
from fedjax_sim.prng import stream
from fedjax_sim.round.compatibility import check_alone, check_discount, discounts, looks_like_the_model
from fedjax_sim.round.costs import message_spec, metrics_of, work_of
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import BroadcastOptions
from fedjax_sim.round.round import close, collect
from fedjax_sim.round.state import Bases, FederatedState, initial_state
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.sampling.time.clock import INTERRUPTED
from fedjax_sim.server.staleness import polynomial
from fedjax_sim.types import (
    Aggregator,
    Algorithm,
    Array,
    ClientUpdate,
    Cohort,
    Devices,
    Metric,
    Population,
    PyTree,
    Sampler,
    ServerUpdate,
    StalenessWeight,
    Star,
    UpdateTransform,
)
from fedjax_sim.validate import Default, PopulationSize, PositiveInt

__all__ = [
    "METRICS",
    "AsyncState",
    "BufferOptions",
    "arrivals_only",
    "arrive",
    "asynchronous",
    "check_hazard",
    "check_traffic",
    "losses",
    "sent_instead",
    "start",
]

MOST_STALENESS = 4095  # an entry of Info holds 4,096 numbers
METRICS = (
    Metric("round_seconds", "mean simulated time of a step", "seconds", "mean"),
    Metric("simulated_seconds", "simulated time", "seconds", "last"),
    Metric("arrivals", "messages that arrived", "count"),
    Metric("staleness", "server steps between a model's sending and its update's use", "", "mean", by="arrivals"),
    Metric("largest_staleness", "the largest of them", "count", "max"),
    Metric("delay_seconds", "simulated time from an update's arrival to its use", "seconds", "mean", by="arrivals"),
    Metric("updates_per_second", "updates in a second of simulated time, so far", "", "last"),
    Metric("utilisation", "share of the places whose client was at work", "share", "mean", by="round_seconds"),
    Metric("empty_places", "places without a client", "count", "last"),
    Metric("stopped_clients", "clients stopped, for their model was too old", "count"),
    Metric("joules", "energy of the work that was begun, until clients leave", "joules"),
    SATURATED,
)


class BufferOptions(TypedDict, total=False):
    """Who is in flight, how many updates make a step, and what a stale one counts, as `asynchronous` describes it."""

    concurrency: Annotated[int, Default(100)]
    buffer_size: Annotated[int, Default(10)]
    staleness: Annotated[StalenessWeight | None, Default(None)]
    max_staleness: Annotated[int, Default(100)]
    refill: Annotated[Literal["other", "same"], Default("other")]
    hazard: Annotated[Hazard | None, Default(None)]


class AsyncState(NamedTuple):
    """The state between two steps."""

    federation: FederatedState
    flights: Flights
    models: PyTree  # leaves [V, ...]: what was broadcast as version v stands at v mod V, V = `Traffic.num_models`


@validate.named_arguments
def check_traffic(traffic: Traffic, population_size: PositiveInt, block: str) -> None:
    """Raises ValueError, TypeError for options out of range, with the option's name; `block` is that of M."""
    check_devices(traffic.devices, population_size)
    validate.one_of("refill", traffic.refill, ("other", "same"))
    validate.integer("concurrency", traffic.concurrency, 1, population_size)
    validate.integer(block, traffic.block, 1, traffic.concurrency)
    validate.integer("max_staleness", traffic.max_staleness, 0, MOST_STALENESS)
    check_hazard(traffic.hazard)
    if traffic.refill == "other" and traffic.concurrency + traffic.block > population_size:
        hint = "Other clients are sent work than those in flight; or refill = 'same'."
        most = f"at most {population_size - traffic.block}: N - the arrivals of a step"
        validate.fail("concurrency", most, traffic.concurrency, hint)


def check_hazard(hazard: Hazard | None) -> None:
    """Raises TypeError for what is no hazard."""
    if hazard is not None:
        validate.part("hazard", hazard, Hazard)


def arrivals_only(traffic: Traffic) -> Sampler:
    """What stands for a sampler in the parts: its design says that nobody knows the law of who arrives.

    Formulas and accountants refuse it, and so do weights by examples: fast clients arrive more often. Nobody arrives
    twice in a step, so clients may keep states.

    Guarantees: tests/algorithms/asynchronous/test_asynchronous.py::test_what_reads_the_parts_refuses.
    """
    scheme, m = "unknown_without_replacement", traffic.block
    design = SamplingDesign(scheme=scheme, population_size=traffic.devices.population_size, cohort_size=m, num_slots=m)

    def sample(key, state):
        hint = "Who arrives follows from what was sent before: call the algorithm's step."
        validate.fail("sampler", "one that draws cohorts", "the arrivals of an asynchronous algorithm", hint)

    return Sampler(lambda: (), sample, m, design)


def load_for(star: Star, params: PyTree, population: Population) -> Callable:
    """(ids [c]) -> `Load`: what a model and its training ask of these clients.

    Args:
      params: the model, or its spec.
    """
    work = work_of(star, params, population)

    def load(ids):
        if not hasattr(population, "count"):
            return load_of(work, jnp.full(ids.shape, num_rows(population), jnp.int32))
        return load_of(work, jax.vmap(population.count)(ids))

    return load


def start(
    star: Star, traffic: Traffic, key: Array, params: PyTree, population: Population, federation: FederatedState
) -> AsyncState:
    """The state before the first step: C clients train on the initial model.

    Args:
      federation: of the server, its model broadcast as version 0.
    """
    broadcast = star.server.broadcast(federation.server)
    models = jax.tree.map(lambda x: jnp.broadcast_to(x, (traffic.num_models, *jnp.shape(x))), broadcast)
    flights = take_off(key, traffic, load_for(star, params, population))
    return AsyncState(federation, flights, models)


def arrive(
    star: Star, traffic: Traffic, key: Array, state: AsyncState, population: Population
) -> tuple[Arrivals, Flights, Cohort]:
    """Who arrives next, the flights after it, and the cohort of the arrivals, whose metrics tell of time and staleness.

    Args:
      key: of the step.
    """

    params = tree.spec(star.server.params(state.federation.server))

    def events(key, flights, population):
        found, after = next_arrivals(key, traffic, flights, load_for(star, params, population))
        return found, after, _metrics(traffic, found, after)

    key = stream(key, "arrivals")
    found, after, metrics = engine.steady(events)(key, state.flights, population)
    return found, after, Cohort(found.ids, found.there, found.there, metrics)


def _metrics(traffic: Traffic, found: Arrivals, after: Flights) -> dict[str, Array]:
    tick = 1.0 / traffic.devices.ticks_per_second
    count, elapsed = found.there.sum(dtype=jnp.float32), found.elapsed.astype(jnp.float32)
    now = after.clock.read(traffic.devices.ticks_per_second)
    counts = jnp.zeros(traffic.max_staleness + 1, jnp.int32).at[found.gaps].add(found.there.astype(jnp.int32))
    return {
        "round_seconds": elapsed * tick,
        "simulated_seconds": now,
        "arrivals": found.there.sum(dtype=jnp.int32),
        "staleness": found.gaps.sum(dtype=jnp.float32) / count,
        "largest_staleness": found.gaps.max(),
        "staleness_counts": counts,
        "delay_seconds": found.waited.astype(jnp.float32).sum() * tick / count,
        "updates_per_second": after.arrived.astype(jnp.float32) / now,
        "utilisation": found.busy / jnp.maximum(elapsed, 1) / traffic.concurrency,
        "empty_places": traffic.concurrency - found.flying,
        "stopped_clients": found.stopped,
        "joules": found.begun.joules,
        SATURATED.name: found.begun.saturated,
    } | ({} if found.interrupted is None else {INTERRUPTED.name: found.interrupted})


def sent_instead(info: dict[str, Any], begun: Begun) -> dict[str, Any]:
    """The info with the messages that were sent: models not to those who arrive, but to those who follow them, and
    updates also of clients who leave while theirs are on the way."""
    told = {"clients_invited": begun.sent, "downlink_bytes": info["downlink_bytes"]._replace(number=begun.sent)}
    if begun.wasted is not None:
        for name in {"uplink_bytes", "uplink_coded_bytes"} & info.keys():
            told[name] = info[name]._replace(number=info[name].number + begun.wasted)
        told["wasted_bytes"] = info["uplink_bytes"]._replace(number=begun.wasted)
    return info | told


def losses(traffic: Traffic) -> tuple[Metric, ...]:
    """What Info tells beside `METRICS` where clients may leave."""
    return (INTERRUPTED,) if traffic.loses else ()


@validate.named_arguments
def asynchronous(
    devices: Devices,
    client: ClientUpdate,
    aggregator: Aggregator,
    server: ServerUpdate,
    transform: UpdateTransform | None = None,
    *,
    population_size: PopulationSize,
    concurrency: int = 100,
    buffer_size: int = 10,
    staleness: StalenessWeight | None = None,
    max_staleness: int = 100,
    refill: Literal["other", "same"] = "other",
    hazard: Hazard | None = None,
    **options: Unpack[BroadcastOptions],
) -> Algorithm:
    """Buffered asynchronous federated learning from its parts: the server steps once K messages have arrived.

    C clients are in flight. A message is computed from the version of the model that its client was sent; the versions
    made since then are its staleness. K messages are aggregated, and the server's step makes the next version: one
    `step` of the algorithm.

    Args:
      devices: how long clients take, in ticks, and whether they are there; a client takes one tick at least.
      client, aggregator, server, transform, downlink, nonfinite, plan, mesh: as in `federated`.
      population_size: N.
      concurrency: C in [1, N]; C + K <= N with other clients.
      buffer_size: K in [1, C]. Fewer arrive if fewer are in flight, for too few were there.
      staleness: factor of each update by its staleness, before its transform: a clip holds for what is added, and
        shares of noise stay whole. None = 1 / sqrt(1 + staleness). Clients with a state that belongs to the whole
        update, and messages of integers, take `server.staleness.constant()`.
      max_staleness: in [0, 4095]; a client whose model is older at the beginning of a step is stopped, which
        `stopped_clients` counts, and its place filled at the end of the step. So many earlier models are kept.
      refill: who is sent work in the place of a client that arrived. "other": at once, one drawn uniformly from those
        who were there, and not in flight, when the buffer was opened. "same": the same client, with the next version.
        A place whose client is away, has left or was stopped is empty; at the end of a step such places (K of them at
        most where clients never leave) go to others who are there, and then to their own clients.
      hazard: when clients leave while they train, as for `sampling.with_hazard`; None = they stay.

    A client who leaves before its message has arrived, by the hazard or because it is not there any more, reports
    nothing. Presence is looked up at the moments of `sampling.with_clock` (`checks=8`), so that both servers lose the
    same work. Its place is empty from then to the end of the step, which `utilisation` tells. A step in which nobody
    will arrive ends when the first of those in flight leaves, after a minute at most.

    Returns: an Algorithm with the info of `federated`, where invited are those who are sent a model, and with time and
    staleness: `round_seconds`, `simulated_seconds`, `arrivals`, `staleness` (mean of these), `largest_staleness`,
    `staleness_counts`, `delay_seconds` (from arrival to use: waiting in a buffer makes nothing staler),
    `updates_per_second`, `utilisation`, `empty_places`, `stopped_clients`, `joules` (of the work that was begun, until
    the client leaves or its message has arrived), `saturated_clients` and, where clients may leave, `interrupted` and
    `wasted_bytes` (of messages on their way then). Joules and wasted bytes count where work begins, also those of a
    client that is stopped later. The message of a stopped client that had not left is in no bytes. A run's means are
    those of its arrivals, or of its time. A round cannot be observed.

    Raises: ValueError, TypeError for options out of range, and for parts that do not fit, as in `federated`: weights by
    examples too, for fast clients arrive more often already. `init` refuses clients whose updates may not count in
    part (`ClientFacts.scalable`), unless no update does.

    Guarantees: the models of an event loop in NumPy (tests/algorithms/asynchronous/test_asynchronous.py::
    test_fedbuff_is_the_event_loop); with K = C and the same clients again the bits of synchronous FedAvg, whatever the
    delays (::test_a_full_buffer_is_synchronous); a client alone is sequential SGD (::test_one_client_is_sequential);
    delay and staleness are counted apart (the same test), and a run's means are those of all arrivals
    (::test_summary_of_a_run); who leaves is lost as under a clock
    (tests/algorithms/asynchronous/test_arrivals.py::test_who_leaves_is_lost_as_under_a_clock); SCAFFOLD's c stays the
    clients' mean (tests/algorithms/asynchronous/test_asynchronous.py::test_control_variates_without_a_discount), and
    what error feedback keeps is what was not sent (::test_what_feedback_keeps); no epsilon is stated
    (::test_what_reads_the_parts_refuses).

    References: Nguyen et al. 2022 (FedBuff), algorithm 1; Koloskova, Stich and Jaggi 2022, for waiting ("same").
    """
    traffic = Traffic(devices, concurrency, buffer_size, buffer_size, max_staleness, refill, hazard)
    check_traffic(traffic, population_size, "buffer_size")
    weigh = polynomial() if staleness is None else staleness
    validate.function("staleness", weigh, "gaps")
    discounted = discounts(weigh, max_staleness)
    validate.part("client", client, ClientUpdate)
    check_alone(client)
    if client.federation is not None:
        hint = "Who takes part inside is drawn when its message arrives, so its time is not known before. Take "
        hint += "algorithms.federated with a clock (with_over_selection for the first to arrive)."
        validate.fail("client", "one that is no federation, for asynchronous rounds", "a federation", hint)
    star = federated(arrivals_only(traffic), client, aggregator, server, transform, **options).parts
    star = star._replace(complete=False)  # versions, flights and time are not in it

    def init(key, params, population):
        federation = initial_state(star, params, population)
        state = start(star, traffic, key, params, population, federation)
        spec = message_spec(star, jax.eval_shape(star.server.broadcast, federation.server), population)
        if discounted:
            check_discount(client, spec)
        if not looks_like_the_model(spec, star.server, tree.spec(params)):
            jax.eval_shape(step, key, state, population)
        return state

    def step(key, state, population):
        found, flights, cohort = arrive(star, traffic, key, state, population)
        size = traffic.num_models
        bases = Bases(state.models, found.bases % size, engine.steady(weigh)(found.gaps), found.bases)
        gathered = collect(star, key, cohort, state.federation, population, bases)
        federation, info = close(star, key, cohort, gathered, state.federation)
        broadcast = engine.steady(star.server.broadcast)(federation.server)
        models = jax.tree.map(lambda x, new: x.at[flights.version % size].set(new), state.models, broadcast)
        return AsyncState(federation, flights, models), sent_instead(info, found.begun)

    def params(state):
        return star.server.params(state.federation.server)

    return Algorithm(init, step, params, star, metrics=(*metrics_of(star), *METRICS, *losses(traffic)))
