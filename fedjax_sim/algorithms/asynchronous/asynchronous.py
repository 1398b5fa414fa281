"""Asynchronous federated learning: each client trains on the version of the model that it was sent.

A step of the server has three parts. `algorithms.asynchronous.arrivals` finds the next arrivals, `collect` trains each
of these clients from its own base (`Bases`), and `close` takes the server's step. `asynchronous` makes FedBuff from its
parts, as `federated` makes FedAvg; the recipe with all defaults is in `algorithms.asynchronous.fedbuff`. FedAsync,
whose server takes a step after every message, is in `algorithms.asynchronous.fedasync`.
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
from fedjax_sim.round.bases import Bases, starting_from
from fedjax_sim.round.compatibility import check_alone, check_discount, discounts, looks_like_the_model
from fedjax_sim.round.costs import message_spec, metrics_of, work_of
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import BroadcastOptions
from fedjax_sim.round.round import close, collect
from fedjax_sim.round.state import FederatedState, initial_state
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.sampling.time.clock import INTERRUPTED
from fedjax_sim.server.staleness import polynomial
from fedjax_sim.types import (
    Aggregator,
    Algorithm,
    Array,
    CheapReads,
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
    """Options of clients in flight, of the buffer and of staleness; `asynchronous` describes each."""

    concurrency: Annotated[int, Default(100)]
    buffer_size: Annotated[int, Default(10)]
    staleness: Annotated[StalenessWeight | None, Default(None)]
    max_staleness: Annotated[int, Default(100)]
    refill: Annotated[Literal["other", "same"], Default("other")]
    hazard: Annotated[Hazard | None, Default(None)]


class AsyncState(NamedTuple):
    """The state between two steps."""

    federation: FederatedState  # of the server
    flights: Flights  # the clients in flight
    models: PyTree  # leaves [V, ...]: the broadcast of version v is at v mod V, where V = `Traffic.num_models`


@validate.named_arguments
def check_traffic(traffic: Traffic, population_size: PositiveInt, block: str) -> None:
    """Raises ValueError, TypeError for options out of range, with the option's name.

    Args:
      traffic: the options.
      population_size: N.
      block: the name of the option that gives M, the arrivals of a step.
    """
    check_devices(traffic.devices, population_size)
    validate.one_of("refill", traffic.refill, ("other", "same"))
    validate.integer("concurrency", traffic.concurrency, 1, population_size)
    validate.integer(block, traffic.block, 1, traffic.concurrency)
    validate.integer("max_staleness", traffic.max_staleness, 0, MOST_STALENESS)
    check_hazard(traffic.hazard)
    # In each step up to M other clients are sent work, none of whom may be in flight already.
    if traffic.refill == "other" and traffic.concurrency + traffic.block > population_size:
        hint = "Other clients are sent work than those in flight; or refill = 'same'."
        rule = f"at most {population_size - traffic.block}: N - the arrivals of a step"
        validate.fail("concurrency", rule, traffic.concurrency, hint)


def check_hazard(hazard: Hazard | None) -> None:
    """Raises TypeError for a value that is neither a `Hazard` nor None."""
    if hazard is not None:
        validate.part("hazard", hazard, Hazard)


def arrivals_only(traffic: Traffic) -> Sampler:
    """Makes the sampler among an asynchronous algorithm's parts, whose design says that its law is not known.

    It draws no cohorts. Formulas and accountants refuse its design, and weights by examples are refused too, because
    fast clients arrive more often. Nobody arrives twice in a step, so clients may keep states.

    Args:
      traffic: how clients come and go; its block is the cohort's size.

    Guarantees: `sample`, the accountants' mechanism, the variance budget, and weights by examples in an aggregator that
    takes weights raise ValueError
    (tests/algorithms/asynchronous/test_asynchronous.py::test_what_reads_the_parts_refuses).
    """
    m = traffic.block
    population_size = traffic.devices.population_size
    scheme = "unknown_without_replacement"
    design = SamplingDesign(scheme=scheme, population_size=population_size, cohort_size=m, num_slots=m)

    def sample(key, state):
        hint = "Who arrives follows from what was sent before: call the algorithm's step."
        validate.fail("sampler", "one that draws cohorts", "the arrivals of an asynchronous algorithm", hint)

    return Sampler(lambda: (), sample, m, design)


def load_for(star: Star, params: PyTree, population: Population) -> Callable:
    """Makes the function (ids [c]) -> `Load`, the work that a model and its training ask of these clients.

    Args:
      star: the parts.
      params: the model, or its spec.
      population: all clients.
    """
    work = work_of(star, params, population)

    def load(ids):
        if not isinstance(population, CheapReads):
            return load_of(work, jnp.full(ids.shape, num_rows(population), jnp.int32))
        return load_of(work, jax.vmap(population.count)(ids))

    return load


def start(
    star: Star, traffic: Traffic, key: Array, params: PyTree, population: Population, *, federation: FederatedState
) -> AsyncState:
    """Makes the state before the first step, in which C clients train on the initial model.

    Args:
      star, traffic: the parts, and how clients come and go.
      key: of the run's start.
      params: the model.
      population: all clients.
      federation: the server's state, whose broadcast is version 0.
    """
    # All places of the ring hold version 0; the others are written before anybody reads them.
    broadcast = star.server.broadcast(federation.server)
    models = jax.tree.map(lambda x: jnp.broadcast_to(x, (traffic.num_models, *jnp.shape(x))), broadcast)
    flights = take_off(key, traffic, load_for(star, params, population))
    return AsyncState(federation, flights, models)


def arrive(
    star: Star, traffic: Traffic, key: Array, state: AsyncState, population: Population
) -> tuple[Arrivals, Flights, Cohort]:
    """Finds the next arrivals, and makes their cohort, whose metrics state times and staleness.

    Args:
      star, traffic: the parts, and how clients come and go.
      key: of the step.
      state: before the step.
      population: all clients.

    Returns: (`Arrivals`, the flights after the step, the `Cohort` of the arrivals).
    """

    params = tree.spec(star.server.params(state.federation.server))

    def events(key, flights, population):
        arrivals, after = next_arrivals(key, traffic, flights, load_for(star, params, population))
        return arrivals, after, _metrics(traffic, arrivals, after)

    key = stream(key, "arrivals")
    arrivals, after, metrics = engine.reproducible(events)(key, state.flights, population)
    return arrivals, after, Cohort(arrivals.ids, arrivals.there, arrivals.there, metrics)


def _metrics(traffic: Traffic, arrivals: Arrivals, after: Flights) -> dict[str, Array]:
    """Computes the metrics of a step, as `asynchronous` lists them.

    Args:
      traffic: how clients come and go.
      arrivals: the messages that the step takes, L of M rows, times in ticks.
      after: the state after the step; its clock is the simulated time so far.

    Returns: arrays [] by name, times in seconds, and `staleness_counts` [max_staleness + 1], where entry g is the
    number of arrivals of staleness g. Means over arrivals are NaN for L = 0. `utilisation` is busy / (elapsed C), in
    [0, 1].
    """
    seconds_per_tick = 1.0 / traffic.devices.ticks_per_second
    # Means over arrivals are NaN in a step without any, and such a step does not count in a run's mean (`Metric.by`).
    num_arrivals = arrivals.there.sum(dtype=jnp.float32)
    elapsed = arrivals.elapsed.astype(jnp.float32)
    simulated_seconds = after.clock.read(traffic.devices.ticks_per_second)
    no_counts = jnp.zeros(traffic.max_staleness + 1, jnp.int32)
    staleness_counts = no_counts.at[arrivals.gaps].add(arrivals.there.astype(jnp.int32))
    return {
        "round_seconds": elapsed * seconds_per_tick,
        "simulated_seconds": simulated_seconds,
        "arrivals": arrivals.there.sum(dtype=jnp.int32),
        "staleness": arrivals.gaps.sum(dtype=jnp.float32) / num_arrivals,
        "largest_staleness": arrivals.gaps.max(),
        "staleness_counts": staleness_counts,
        "delay_seconds": arrivals.waited.astype(jnp.float32).sum() * seconds_per_tick / num_arrivals,
        "updates_per_second": after.arrived.astype(jnp.float32) / simulated_seconds,
        "utilisation": arrivals.busy / jnp.maximum(elapsed, 1) / traffic.concurrency,
        "empty_places": traffic.concurrency - arrivals.flying,
        "stopped_clients": arrivals.stopped,
        "joules": arrivals.begun.joules,
        SATURATED.name: arrivals.begun.saturated,
    } | ({} if arrivals.interrupted is None else {INTERRUPTED.name: arrivals.interrupted})


def sent_instead(info: dict[str, Any], begun: Begun) -> dict[str, Any]:
    """Replaces the counts of messages in an info by those of the messages that were really sent in the step.

    `close` counts a model sent to each client that arrives. Here models are sent to the clients that follow them.
    Updates are also sent by clients who leave while their message is on the way.

    Args:
      info: of `close`.
      begun: the work that clients were sent.
    """
    corrected = {"clients_invited": begun.sent, "downlink_bytes": info["downlink_bytes"]._replace(number=begun.sent)}
    if begun.wasted is not None:
        for name in {"uplink_bytes", "uplink_coded_bytes"} & info.keys():
            corrected[name] = info[name]._replace(number=info[name].number + begun.wasted)
        corrected["wasted_bytes"] = info["uplink_bytes"]._replace(number=begun.wasted)
    return info | corrected


def losses(traffic: Traffic) -> tuple[Metric, ...]:
    """The descriptions of the info's numbers beside `METRICS`, where clients may leave."""
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
    """Makes a buffered asynchronous algorithm from its parts: the server takes a step once K messages have arrived.

    C clients are in flight. A message is computed from the version of the model that its client was sent. The number of
    versions made since then is its staleness. One `step` of the algorithm aggregates K messages, and the server's step
    makes the next version.

    Args:
      devices: how long clients take, in ticks, and whether they are there; a client takes one tick at least.
      client, aggregator, server, transform, downlink, nonfinite, plan, mesh: as in `federated`.
      population_size: N.
      concurrency: C in [1, N]; C + K <= N with `refill` "other".
      buffer_size: K in [1, C]. Fewer than K arrive if fewer are in flight, because too few clients were there.
      staleness: (staleness) -> factor of the update, applied before its transform: so a clip holds for the vector that
        is added, and shares of noise stay whole. None = 1 / sqrt(1 + staleness). Clients with a state that belongs to
        the whole update, and messages of integers, need `server.staleness.constant()`.
      max_staleness: in [0, 4095]. A client whose model is older at the beginning of a step is stopped, which
        `stopped_clients` counts, and its place is filled at the end of the step. So many earlier models are kept.
      refill: who is sent work in the place of a client that arrived. "other": at once, a client drawn uniformly from
        those who were there, and not in flight, when the buffer was opened. "same": the same client, with the next
        version. A place whose client is away, has left or was stopped is empty. At the end of a step such places (at
        most K where clients never leave) go to other clients who are there, and then to their own clients.
      hazard: when clients leave while they train, as for `sampling.with_hazard`; None = they stay.

    A client who leaves before its message has arrived, by the hazard or because it is away, reports nothing. Its
    presence is looked up at the moments of `sampling.with_clock` (`checks=8`), so that synchronous and asynchronous
    servers lose the same work. Its place is empty from then to the end of the step, which `utilisation` shows. A step
    in which nobody will arrive ends when the first client in flight leaves, after a minute at most.

    Returns: an Algorithm with the info of `federated`, in which clients who are sent a model count as invited. Its info
    also holds
      `round_seconds`, `simulated_seconds`: the time of the step, and of the run so far;
      `arrivals`: the number of messages that arrived;
      `staleness` (a mean over arrivals), `largest_staleness`, `staleness_counts`;
      `delay_seconds`: from arrival to use (waiting in a buffer makes no update staler);
      `updates_per_second`, `utilisation`, `empty_places`, `stopped_clients`, `saturated_clients`;
      `joules`: of the work that was begun, until the client leaves or its message has arrived;
      `interrupted` and `wasted_bytes`, where clients may leave: clients who left, and bytes of messages on their way.
    Joules and wasted bytes are counted when work begins, also for a client that is stopped later. The message of a
    stopped client that had not left is in no count of bytes. A run's means are over its arrivals, or over its time. A
    round cannot be observed.

    Raises: ValueError, TypeError for options out of range, and for parts that do not fit, as in `federated`. Weights by
    examples are refused too, because fast clients arrive more often already. `init` refuses clients whose updates may
    not count in part (`ClientFacts.scalable`), unless every update counts in full.

    Guarantees: the models are those of an event loop in NumPy (tests/algorithms/asynchronous/test_asynchronous.py::
    test_fedbuff_is_the_event_loop); with K = C and the same clients again the bits are those of synchronous FedAvg,
    whatever the delays (::test_a_full_buffer_is_synchronous); a client alone is sequential SGD
    (::test_one_client_is_sequential); delay and staleness are counted apart (the same test), and a run's means are over
    all arrivals (::test_summary_of_a_run); a client who leaves is lost as under a clock
    (tests/algorithms/asynchronous/test_arrivals.py::test_who_leaves_is_lost_as_under_a_clock); SCAFFOLD's c stays the
    clients' mean (tests/algorithms/asynchronous/test_asynchronous.py::test_control_variates_without_a_discount), and
    error feedback keeps exactly what was not sent (::test_what_feedback_keeps); no epsilon is stated
    (::test_what_reads_the_parts_refuses).

    References: Nguyen et al. 2022 (FedBuff), algorithm 1; Koloskova, Stich and Jaggi 2022, for waiting ("same").
    """
    traffic = Traffic(
        devices,
        concurrency=concurrency,
        block=buffer_size,
        buffer_size=buffer_size,
        max_staleness=max_staleness,
        refill=refill,
        hazard=hazard,
    )
    check_traffic(traffic, population_size, "buffer_size")
    staleness_weight = polynomial() if staleness is None else staleness
    validate.function("staleness", staleness_weight, "gaps")
    discounts_updates = discounts(staleness_weight, max_staleness)
    validate.part("client", client, ClientUpdate)
    check_alone(client)
    if client.federation is not None:
        hint = "Who takes part inside is drawn when its message arrives, so its time is not known before. Take "
        hint += "algorithms.federated with a clock (with_over_selection for the first to arrive)."
        validate.fail("client", "one that is no federation, for asynchronous rounds", "a federation", hint)
    star = federated(arrivals_only(traffic), client, aggregator, server, transform, **options).parts
    assert star is not None, "`federated` states its parts"
    star = star._replace(complete=False)  # a star has no versions, no clients in flight and no time

    def init(key, params, population):
        federation = initial_state(star, params, population)
        state = start(star, traffic, key, params, population, federation=federation)
        spec = message_spec(star, jax.eval_shape(star.server.broadcast, federation.server), population)
        if discounts_updates:
            check_discount(client, spec)
        if not looks_like_the_model(spec, star.server, tree.spec(params)):
            jax.eval_shape(step, key, state, population)  # `close` checks the aggregate of such updates
        return state

    def step(key, state, population):
        arrivals, flights, cohort = arrive(star, traffic, key, state, population)
        num_models = traffic.num_models
        factors = engine.reproducible(staleness_weight)(arrivals.gaps)
        bases = Bases(state.models, arrivals.bases % num_models, factors, arrivals.bases)
        gathered = collect(star, key, cohort, state.federation, population, extension=starting_from(bases))
        federation, info = close(star, key, cohort, gathered, state.federation)
        broadcast = engine.reproducible(star.server.broadcast)(federation.server)
        # The new version takes the place of the oldest, which no client in flight needs any longer.
        models = jax.tree.map(lambda ring, x: ring.at[flights.version % num_models].set(x), state.models, broadcast)
        return AsyncState(federation, flights, models), sent_instead(info, arrivals.begun)

    def params(state):
        return star.server.params(state.federation.server)

    metrics = (*metrics_of(star), *METRICS, *losses(traffic))
    return Algorithm(init, step, params, star, metrics=metrics, params_kind=star.params_kind)
