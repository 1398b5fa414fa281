"""FedAT: clients of similar speed form tiers, which are synchronous inside and asynchronous to each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import aggregation, client, engine, sampling, server, tree, validate
from fedjax_sim.algorithms.asynchronous.arrivals import PATIENCE
from fedjax_sim.algorithms.asynchronous.asynchronous import arrivals_only, check_hazard, load_for, losses, sent_instead
from fedjax_sim.algorithms.asynchronous.clock_ticks import NEVER_ARRIVES, advanced, last
from fedjax_sim.algorithms.asynchronous.in_flight import LOOKING, Begun, Traffic, trips
from fedjax_sim.network import Hazard
from fedjax_sim.network.devices import SATURATED, check_devices, spent_by, there_at
from fedjax_sim.prng import stream
from fedjax_sim.round.bases import Bases, starting_from
from fedjax_sim.round.costs import metrics_of
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import MessageOptions
from fedjax_sim.round.round import close, collect
from fedjax_sim.round.state import FederatedState, initial_state
from fedjax_sim.sampling.permutation import permute
from fedjax_sim.sampling.time.clock import INTERRUPTED
from fedjax_sim.types import (
    Aggregator,
    Algorithm,
    Array,
    Clock,
    Cohort,
    Devices,
    Metric,
    ParamsKind,
    Population,
    PyTree,
    ServerUpdate,
    Star,
)
from fedjax_sim.validate import LossFn, PopulationSize

METRICS = (
    Metric("round_seconds", "mean simulated time of a step", "seconds", "mean"),
    Metric("simulated_seconds", "simulated time", "seconds", "last"),
    Metric("arrivals", "messages that arrived", "count"),
    Metric("staleness", "steps between a model's sending and its tier's update", "", "mean", by="arrivals"),
    Metric("tier", "which tier was done, 0 the fastest", "", "last"),
    Metric("joules", "energy of the work that was begun, until clients leave", "joules"),
    SATURATED,
)


class FedATOptions(client.LocalOptions, MessageOptions, total=False):
    """The options of `client.work` and `federated`, but no `downlink`: each tier is sent a model of its own."""


class _Mean(NamedTuple):
    """The server's state: a model of each tier, and their mean, which is the global model."""

    params: PyTree  # the mean, weighted by the counts of the mirrored tiers
    models: PyTree  # leaves [Q, ...], the tiers' models
    counts: Array  # [Q] int32, updates of each tier so far
    tier: Array  # [] int32, the tier whose update is aggregated
    base: PyTree  # the model that this tier was sent


class _Rounds(NamedTuple):
    """The rounds that the tiers are in."""

    ids: Array  # [Q, m] int32, the clients of each round
    there: Array  # [Q, m] bool, which of them will report
    due: Array  # [Q] uint32 ticks until the last client of each round is done
    versions: Array  # [Q] int32 version of the model that each tier was sent
    lost: Array  # [Q] int32 clients who leave before their message has arrived


class TierState(NamedTuple):
    """The state between two steps."""

    federation: FederatedState
    rounds: _Rounds
    bases: PyTree  # leaves [Q, ...]: the model that each tier was sent
    order: Array  # [N] int32: all clients, from the fastest to the slowest
    version: Array  # [] int32 steps so far
    clock: Clock
    begun: Begun  # the work of the first rounds, until the first info has counted it


@validate.named_arguments
def fedat(
    loss_fn: LossFn,
    devices: Devices,
    optimizer: optax.GradientTransformation,
    *,
    population_size: PopulationSize,
    num_tiers: int = 5,
    clients_per_tier: int = 10,
    coefficient: float = 0.0,
    hazard: Hazard | None = None,
    aggregator: Aggregator | None = None,
    **options: Unpack[FedATOptions],
) -> Algorithm:
    """Makes FedAT: clients form Q tiers of similar speed, and the model is a weighted mean of the tiers' models.

    Each tier makes rounds of its own. A step of the algorithm is the end of that tier's round which ends next. The m
    clients of the round were sent a model w, and the mean of their updates makes the tier's model w_q = w + mean. The
    new global model is sum_q (T_{Q+1-q} / T) w_q, where tier 1 is the fastest, T_q is the number of rounds of tier q so
    far and T their sum. So the weight of a slow tier is the number of rounds of its mirror image, a fast tier. The tier
    is then sent the new model. Until its mirror image has ended a round a tier has weight 0. Therefore early steps of
    fast tiers do not move the model.

    Args:
      loss_fn: as in `client.local_sgd`.
      devices: their times at the run's start decide the tiers, for the whole run. Tiers have equal numbers of clients
        (up to one), ordered by total time and then by id. A client who is away when its tier's round begins is not sent
        work.
      optimizer: the clients' optimizer; `num_steps`, `num_epochs`, `batch_size`, `weighting`, `shuffle` as in
        `client.work`.
      population_size: N, of `devices` too.
      num_tiers: Q in [1, N].
      clients_per_tier: m in [1, N // Q], drawn uniformly from the tier for each of its rounds.
      coefficient: of the clients' proximal term, as in `fedprox`; the paper's lambda.
      hazard: when clients leave, as in `asynchronous`. A tier waits for a client who leaves until it has left.
      aggregator, transform, nonfinite, plan, mesh: as in `federated`.

    Returns: an Algorithm with the info of `federated`, and with `round_seconds`, `simulated_seconds`, `arrivals`,
    `staleness` (steps between a model's sending and the tier's update), `tier`, `joules` and the numbers of
    `asynchronous` on clients who leave. A round cannot be observed, and no epsilon is stated, because the law of the
    cohorts is not known.

    Guarantees: the models are those of an event loop in NumPy
    (tests/algorithms/asynchronous/test_fedat.py::test_fedat_is_the_event_loop); one tier of all clients is FedAvg
    (::test_one_tier_is_synchronous).

    References: Chai et al. 2021 (FedAT), algorithm 1 and equation 4.
    """
    check_devices(devices, population_size)
    validate.integer("num_tiers", num_tiers, 1, population_size)
    validate.integer("clients_per_tier", clients_per_tier, 1, population_size // num_tiers)
    work, round_options = client.local_work(options)
    check_hazard(hazard)
    traffic = Traffic(
        devices,
        concurrency=num_tiers,
        block=clients_per_tier,
        buffer_size=clients_per_tier,
        max_staleness=0,
        refill="",
        hazard=hazard,
    )
    tiers = _Tiers(traffic, num_tiers, clients_per_tier)
    rule = aggregation.mean() if aggregator is None else aggregator
    validate.part("aggregator", rule, Aggregator)
    if rule.facts.design is not None:
        hint = "Tiers differ by a client in size, and draw among those who are there: take aggregation.mean()."
        validate.fail("aggregator", "one that takes weights as they come", "one made for a sampler's chances", hint)
    local = client.proximal(loss_fn, optimizer, coefficient, work)
    # The parts are checked with the sampler of a tier; then the sampler says that the law of the cohorts is not known.
    tier_sampler = sampling.uniform(population_size // num_tiers, clients_per_tier)
    star = federated(tier_sampler, local, rule, _mirrored(num_tiers), **round_options).parts
    assert star is not None, "`federated` states its parts"
    star = star._replace(sampler=arrivals_only(traffic), complete=False)
    # The same with a server whose state is the model alone, for the work that a model asks of clients.
    plain = star._replace(server=server.replacement())

    def init(key, params, population):
        return _initial_tiers(tiers, plain, key, params, population)

    def step(key, state, population):
        # Without the per-client rows, which this part does not read.
        light = state._replace(federation=state.federation._replace(clients=(), memory=()))
        end_round = engine.reproducible(partial(_end_round, tiers, plain))
        tier, cohort, rounds, clock, begun = end_round(stream(key, "arrivals"), light, population)
        base_index = jnp.full(clients_per_tier, tier)
        base_versions = jnp.full(clients_per_tier, state.rounds.versions[tier])
        bases = Bases(state.bases, base_index, jnp.ones(clients_per_tier, jnp.float32), base_versions)
        base = jax.tree.map(lambda x: x[tier], state.bases)
        federation = state.federation._replace(server=state.federation.server._replace(tier=tier, base=base))
        gathered = collect(star, key, cohort, federation, population, extension=starting_from(bases))
        federation, info = close(star, key, cohort, gathered, federation)
        server_state = federation.server
        next_bases = jax.tree.map(lambda bases, x: bases.at[tier].set(x), state.bases, server_state.params)
        federation = federation._replace(server=server_state._replace(tier=jnp.zeros_like(tier), base=()))
        nothing_begun = jax.tree.map(jnp.zeros_like, state.begun)
        after = TierState(
            federation=federation,
            rounds=rounds,
            bases=next_bases,
            order=state.order,
            version=state.version + 1,
            clock=clock,
            begun=nothing_begun,
        )
        return after, sent_instead(info, begun)

    metrics = (*metrics_of(star), *METRICS, *losses(traffic))
    kind = star.params_kind
    return Algorithm(init, step, lambda state: state.federation.server.params, star, metrics=metrics, params_kind=kind)


class _Tiers(NamedTuple):
    """Which clients are in which tier, and how a tier's round begins; static."""

    traffic: Traffic
    number: int  # Q
    cohort_size: int  # m

    @property
    def devices(self) -> Devices:
        """The devices of the tiers' clients."""
        return self.traffic.devices

    def order(self, key: Array, load: Callable) -> Array:
        """All clients in the order of their times, equal times by id: [N] int32. Each tier is a section of it."""
        ids = jnp.arange(self.devices.population_size, dtype=jnp.int32)
        spent = spent_by(self.devices, stream(key, "profile"), ids, load(ids))
        return jax.lax.sort((jnp.maximum(spent.total, 1), ids), num_keys=2)[1]

    def begin(self, key: Array, order: Array, load: Callable, clock: Clock) -> Callable:
        """Makes the function (tier) -> the tier's next round, which begins now.

        Its result is (ids [m], who will report [m] bool, ticks until the last client is done or has left, how many
        leave, `Begun`).

        Args:
          key: of the round's draws.
          order: [N] int32, all clients from the fastest to the slowest, from `order`.
          load: as in `take_off`.
          clock: the time at which the round begins.
        """
        size = self.devices.population_size
        edges = [q * size // self.number for q in range(self.number + 1)]
        # Where clients may be away, more candidates are drawn, of which those who are there take part.
        candidates_per_place = 1 if self.devices.availability is None else LOOKING
        num_candidates = [min(candidates_per_place * self.cohort_size, b - a) for a, b in pairwise(edges)]
        most_candidates = max(num_candidates)
        draws = [
            a + permute(stream(key, "cohort"), jnp.arange(most_candidates) % count, b - a)
            for (a, b), count in zip(pairwise(edges), num_candidates, strict=True)
        ]

        def begin_round(tier):
            ids = order[jnp.stack(draws)[tier]]
            # Tiers differ in size by a client, so a smaller tier may have fewer candidates than there are rows.
            is_candidate = jnp.arange(most_candidates) < jnp.array(num_candidates)[tier]
            is_there = there_at(self.devices, ids, clock.seconds) & is_candidate
            # False sorts before True: the first candidates who are there make the cohort.
            chosen = jnp.argsort(~is_there, stable=True)[: self.cohort_size]
            ids = ids[chosen]
            is_there = is_there[chosen]
            trip = trips(key, self.traffic, load, ids, is_there)
            now = jnp.zeros(ids.shape, jnp.uint32)
            arrive, leaves = trip.ends(self.traffic, clock, now)
            last_end = last(arrive) if leaves is None else jnp.maximum(last(arrive), last(leaves))
            patience = np.uint32(PATIENCE * self.devices.ticks_per_second)
            num_lost = jnp.int32(0) if leaves is None else (leaves != NEVER_ARRIVES).sum(dtype=jnp.int32)
            end_ticks = jnp.where(is_there.any(), jnp.maximum(last_end, 1), patience)
            return ids, arrive != NEVER_ARRIVES, end_ticks, num_lost, trip.begun(self.traffic, key, clock, now)

        return begin_round


def _initial_tiers(tiers: _Tiers, plain: Star, key: Array, params: PyTree, population: Population) -> TierState:
    """Makes the state before the first step, in which every tier's first round has begun.

    Args:
      tiers: which clients are in which of the Q tiers.
      plain: the star with a server whose state is the model alone.
      key: of the run's start.
      params: the initial model, which is every tier's model and which every tier was sent; leaves [...].
      population: all N clients.
    """
    load = load_for(plain, params, population)
    order = tiers.order(key, load)
    # A state is donated to the program that makes the next one, so no array may be in it twice.
    tier, version, seconds, ticks = (jnp.zeros((), jnp.int32) for _ in range(4))
    clock = Clock(seconds, ticks)
    first_rounds = [tiers.begin(stream(key, f"tier {q}"), order, load, clock)(q) for q in range(tiers.number)]
    ids, reports, end_ticks, num_lost, begun = jax.tree.map(lambda *x: jnp.stack(x), *first_rounds)
    first_versions = jnp.zeros_like(end_ticks, jnp.int32)
    rounds = _Rounds(ids=ids, there=reports, due=end_ticks, versions=first_versions, lost=num_lost)
    models = jax.tree.map(lambda x: jnp.broadcast_to(x, (tiers.number, *jnp.shape(x))), params)
    counts = jnp.zeros(tiers.number, jnp.int32)
    federation = initial_state(plain, params, population)
    federation = federation._replace(server=_Mean(params, models, counts, tier, ()))
    bases = jax.tree.map(jnp.copy, models)
    begun = jax.tree.map(lambda x: x.sum(dtype=x.dtype), begun)
    return TierState(
        federation=federation, rounds=rounds, bases=bases, order=order, version=version, clock=clock, begun=begun
    )


def _end_round(
    tiers: _Tiers, plain: Star, key: Array, state: TierState, population: Population
) -> tuple[Array, Cohort, _Rounds, Clock, Begun]:
    """Finds the tier whose round ends next, and begins the tier's next round.

    The tier is q = argmin `due`, of equal ones the fastest, and `due` of all tiers is reduced by the ticks elapsed.

    Args:
      tiers: which clients are in which of the Q tiers.
      plain: the star with a server whose state is the model alone.
      key: of the stage "arrivals" of the step.
      state: before the step; the clients' own states are not read, and may be ().
      population: all N clients.

    Returns:
      - the tier, [] int32 in [0, Q);
      - the cohort of the round that ends, m slots, with the step's metrics;
      - the rounds of all tiers after it;
      - the time at which it ends;
      - the work that was begun in the step, and before the first step if no info has counted it yet.
    """
    unit = tiers.devices.ticks_per_second
    rounds = state.rounds
    tier = jnp.argmin(rounds.due).astype(jnp.int32)
    elapsed = rounds.due[tier]
    clock = advanced(state.clock, elapsed, unit)
    load = load_for(plain, tree.spec(state.federation.server.params), population)
    ids, reports, end_ticks, num_lost, begun = tiers.begin(key, state.order, load, clock)(tier)
    begun = jax.tree.map(jnp.add, state.begun, begun)
    metrics = {
        "round_seconds": elapsed.astype(jnp.float32) * (1.0 / unit),
        "simulated_seconds": clock.read(unit),
        "arrivals": rounds.there[tier].sum(dtype=jnp.int32),
        "staleness": (state.version - rounds.versions[tier]).astype(jnp.float32),
        "tier": tier,
        "joules": begun.joules,
        SATURATED.name: begun.saturated,
    }
    if tiers.traffic.loses:
        metrics[INTERRUPTED.name] = rounds.lost[tier]
    next_rounds = _Rounds(
        ids=rounds.ids.at[tier].set(ids),
        there=rounds.there.at[tier].set(reports),
        due=(rounds.due - elapsed).at[tier].set(end_ticks),
        versions=rounds.versions.at[tier].set(state.version + 1),
        lost=rounds.lost.at[tier].set(num_lost),
    )
    cohort = Cohort(rounds.ids[tier], rounds.there[tier], rounds.there[tier], metrics)
    return tier, cohort, next_rounds, clock, begun


def _mirrored(number: int) -> ServerUpdate:
    """Makes FedAT's server, which sets the model of one tier and then the mean of the tiers' models.

    A tier's weight is the number of rounds of its mirror image: that of the fastest tier counts for the slowest.

    Args:
      number: Q.
    """

    def apply(key, aggregate, state):
        tier_model = jax.tree.map(lambda x, u: x + u.astype(x.dtype), state.base, aggregate)
        models = jax.tree.map(lambda x, x_tier: x.at[state.tier].set(x_tier), state.models, tier_model)
        counts = state.counts.at[state.tier].add(1)
        shares = counts[::-1].astype(jnp.float32) / counts.sum(dtype=jnp.float32)
        wide = jax.tree.map(lambda x: x.astype(tree.at_least_float32(x.dtype)), models)
        params = jax.tree.map(lambda x, w: x.sum(0).astype(w.dtype), tree.scaled(wide, shares), state.params)
        return state._replace(params=params, models=models, counts=counts)

    return ServerUpdate(
        init=lambda params: _Mean(
            params,
            jax.tree.map(lambda x: jnp.stack([x] * number), params),
            jnp.zeros(number, jnp.int32),
            jnp.int32(0),
            params,
        ),
        broadcast=lambda state: state.params,
        apply=apply,
        params=lambda state: state.params,
        params_kind=ParamsKind.MODEL,
    )
