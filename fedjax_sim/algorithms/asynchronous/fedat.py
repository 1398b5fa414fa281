"""FedAT: clients of like speed form tiers, which are synchronous inside and asynchronous to each other."""

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
from fedjax_sim.round.costs import metrics_of
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import MessageOptions
from fedjax_sim.round.round import close, collect
from fedjax_sim.round.state import Bases, FederatedState, initial_state
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
    Population,
    PyTree,
    ServerUpdate,
    Star,
)
from fedjax_sim.validate import LossFn, PopulationSize

__all__ = ["TierState", "fedat"]

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
    """Those of algorithms around a server without `downlink`: each tier is sent a model of its own."""


class _Mean(NamedTuple):
    """The server: a model of each tier, and the model that is their mean by the mirrored counts."""

    params: PyTree
    models: PyTree  # leaves [Q, ...]
    counts: Array  # [Q] int32 updates of each tier
    tier: Array  # [] int32 whose update comes
    base: PyTree  # the model that it was sent


class _Rounds(NamedTuple):
    """The rounds that the tiers are in."""

    ids: Array  # [Q, m] int32
    there: Array  # [Q, m] bool
    due: Array  # [Q] uint32 ticks until the last client of each is done
    versions: Array  # [Q] int32 version of the model that they were sent
    lost: Array  # [Q] int32 of their clients who leave before their message has arrived


class TierState(NamedTuple):
    """The state between two steps."""

    federation: FederatedState
    rounds: _Rounds
    bases: PyTree  # leaves [Q, ...]: the model that each tier was sent
    order: Array  # [N] int32: all clients, from the fastest to the slowest
    version: Array  # [] int32 steps so far
    clock: Clock
    begun: Begun  # of the first rounds, until an info has counted it


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
    """FedAT: Q tiers of like speed, each in rounds of its own; the model is the mean of the tiers' models.

    A step is the end of one tier's round, that which ends next: its m clients' updates of the model w that they were
    sent make the tier's model w_q = w + mean. The new model is sum_q (T_{Q+1-q} / T) w_q, tier 1 the fastest, T_q the
    rounds of tier q so far: a slow tier counts as much as its mirror image is fast. The tier then goes on with it.
    Until its mirror image has ended a round a tier counts for nothing: early steps of fast tiers do not move the model.

    Args:
      devices: their times at the run's start decide the tiers, for good: equal numbers of clients, by total time and
        then by id. A client who is not there when its tier's round begins is not sent work.
      optimizer: the clients'; `num_steps`, `num_epochs`, `batch_size`, `weighting`, `shuffle` as in `client.work`.
      population_size: N, of `devices` too.
      num_tiers: Q in [1, N].
      clients_per_tier: m in [1, N // Q], drawn uniformly from the tier for each of its rounds.
      coefficient: of the clients' proximal term, as in `fedprox`; the paper's lambda.
      hazard: when clients leave, as in `asynchronous`. A tier waits for those who leave until they do.
      aggregator, transform, nonfinite, plan, mesh: as in `federated`.

    Returns: an Algorithm with the info of `federated`, `round_seconds`, `simulated_seconds`, `arrivals`, `staleness`
    (steps between a model's sending and the tier's update), `tier`, `joules` and what `asynchronous` tells of clients
    who leave. A round cannot be observed, and no epsilon is stated: nobody knows the law of who takes part.

    Guarantees: the models of an event loop in NumPy
    (tests/algorithms/asynchronous/test_fedat.py::test_fedat_is_the_event_loop); one tier of everybody is FedAvg
    (::test_one_tier_is_synchronous).

    References: Chai et al. 2021 (FedAT), algorithm 1 and equation 4.
    """
    check_devices(devices, population_size)
    validate.integer("num_tiers", num_tiers, 1, population_size)
    validate.integer("clients_per_tier", clients_per_tier, 1, population_size // num_tiers)
    work, round_options = client.local_work(options)
    check_hazard(hazard)
    traffic = Traffic(devices, num_tiers, clients_per_tier, clients_per_tier, 0, "", hazard)
    tiers = _Tiers(traffic, num_tiers, clients_per_tier)
    rule = aggregation.mean() if aggregator is None else aggregator
    validate.part("aggregator", rule, Aggregator)
    if rule.facts.design is not None:
        hint = "Tiers differ by a client in size, and draw among those who are there: take aggregation.mean()."
        validate.fail("aggregator", "one that takes weights as they come", "one made for a sampler's chances", hint)
    local = client.proximal(loss_fn, optimizer, coefficient, work)
    inside = sampling.uniform(population_size // num_tiers, clients_per_tier)  # the law in a tier, for the checks
    star = federated(inside, local, rule, _mirrored(num_tiers), **round_options).parts
    star = star._replace(sampler=arrivals_only(traffic), complete=False)
    plain = star._replace(server=server.replacement())  # what clients are sent

    def init(key, params, population):
        return _taken_off(tiers, plain, key, params, population)

    def step(key, state, population):
        light = state._replace(federation=state.federation._replace(clients=(), memory=()))
        ended = engine.steady(partial(_round_ended, tiers, plain))
        tier, cohort, rounds, clock, begun = ended(stream(key, "arrivals"), light, population)
        slots = jnp.full(clients_per_tier, tier)
        sent_at = jnp.full(clients_per_tier, state.rounds.versions[tier])
        bases = Bases(state.bases, slots, jnp.ones(clients_per_tier, jnp.float32), sent_at)
        base = jax.tree.map(lambda x: x[tier], state.bases)
        federation = state.federation._replace(server=state.federation.server._replace(tier=tier, base=base))
        gathered = collect(star, key, cohort, federation, population, bases)
        federation, info = close(star, key, cohort, gathered, federation)
        kept = federation.server
        sent_next = jax.tree.map(lambda x, new: x.at[tier].set(new), state.bases, kept.params)
        federation = federation._replace(server=kept._replace(tier=jnp.zeros_like(tier), base=()))
        nothing = jax.tree.map(jnp.zeros_like, state.begun)
        after = TierState(federation, rounds, sent_next, state.order, state.version + 1, clock, nothing)
        return after, sent_instead(info, begun)

    metrics = (*metrics_of(star), *METRICS, *losses(traffic))
    return Algorithm(init, step, lambda state: state.federation.server.params, star, metrics=metrics)


class _Tiers(NamedTuple):
    """Who is in which tier, and how a tier's round begins; static."""

    traffic: Traffic
    number: int
    cohort_size: int

    @property
    def devices(self) -> Devices:
        """What their clients run on."""
        return self.traffic.devices

    def order(self, key: Array, load: Callable) -> Array:
        """[N] int32: all clients by their times, equal ones by id; each tier is a part of it."""
        ids = jnp.arange(self.devices.population_size, dtype=jnp.int32)
        spent = spent_by(self.devices, stream(key, "profile"), ids, load(ids))
        return jax.lax.sort((jnp.maximum(spent.total, 1), ids), num_keys=2)[1]

    def begin(self, key: Array, order: Array, load: Callable, clock: Clock) -> Callable:
        """(tier) -> (ids [m], who will report [m], ticks until the last is done or gone, how many leave, `Begun`)."""
        size = self.devices.population_size
        edges = [q * size // self.number for q in range(self.number + 1)]
        each = 1 if self.devices.availability is None else LOOKING
        most = [min(each * self.cohort_size, b - a) for a, b in pairwise(edges)]
        draws = [
            a + permute(stream(key, "cohort"), jnp.arange(max(most)) % count, b - a)
            for (a, b), count in zip(pairwise(edges), most, strict=True)
        ]

        def one(tier):
            ids = order[jnp.stack(draws)[tier]]
            there = there_at(self.devices, ids, clock.seconds) & (jnp.arange(max(most)) < jnp.array(most)[tier])
            first = jnp.argsort(~there, stable=True)[: self.cohort_size]
            ids, there = ids[first], there[first]
            trip, now = trips(key, self.traffic, load, ids, there), jnp.zeros(ids.shape, jnp.uint32)
            arrive, leaves = trip.ends(self.traffic, clock, now)
            until = last(arrive) if leaves is None else jnp.maximum(last(arrive), last(leaves))
            wait = np.uint32(PATIENCE * self.devices.ticks_per_second)
            lost = jnp.int32(0) if leaves is None else (leaves != NEVER_ARRIVES).sum(dtype=jnp.int32)
            due = jnp.where(there.any(), jnp.maximum(until, 1), wait)
            return ids, arrive != NEVER_ARRIVES, due, lost, trip.begun(self.traffic, key, clock, now)

        return one


def _taken_off(tiers: _Tiers, plain: Star, key: Array, params: PyTree, population: Population) -> TierState:
    """The state before the first step: every tier's first round has begun."""
    load = load_for(plain, params, population)
    order = tiers.order(key, load)
    tier, version, seconds, ticks = (jnp.zeros((), jnp.int32) for _ in range(4))  # to be donated: no array twice
    clock = Clock(seconds, ticks)
    first = [tiers.begin(stream(key, f"tier {q}"), order, load, clock)(q) for q in range(tiers.number)]
    ids, there, due, lost, begun = jax.tree.map(lambda *x: jnp.stack(x), *first)
    rounds = _Rounds(ids, there, due, jnp.zeros_like(due, jnp.int32), lost)
    models = jax.tree.map(lambda x: jnp.broadcast_to(x, (tiers.number, *jnp.shape(x))), params)
    counts = jnp.zeros(tiers.number, jnp.int32)
    federation = initial_state(plain, params, population)
    federation = federation._replace(server=_Mean(params, models, counts, tier, ()))
    bases = jax.tree.map(jnp.copy, models)
    begun = jax.tree.map(lambda x: x.sum(dtype=x.dtype), begun)
    return TierState(federation, rounds, bases, order, version, clock, begun)


def _round_ended(
    tiers: _Tiers, plain: Star, key: Array, state: TierState, population: Population
) -> tuple[Array, Cohort, _Rounds, Clock, Begun]:
    """(The tier whose round ends next, who reports, all rounds once its next one has begun, the time, the new work.)"""
    unit, rounds = tiers.devices.ticks_per_second, state.rounds
    tier = jnp.argmin(rounds.due).astype(jnp.int32)
    elapsed = rounds.due[tier]
    clock = advanced(state.clock, elapsed, unit)
    load = load_for(plain, tree.spec(state.federation.server.params), population)
    ids, there, due, lost, begun = tiers.begin(key, state.order, load, clock)(tier)
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
    next = _Rounds(
        rounds.ids.at[tier].set(ids),
        rounds.there.at[tier].set(there),
        (rounds.due - elapsed).at[tier].set(due),
        rounds.versions.at[tier].set(state.version + 1),
        rounds.lost.at[tier].set(lost),
    )
    cohort = Cohort(rounds.ids[tier], rounds.there[tier], rounds.there[tier], metrics)
    return tier, cohort, next, clock, begun


def _mirrored(number: int) -> ServerUpdate:
    """Sets a tier's model, and the model to the tiers' mean by their mirror images' counts."""

    def apply(key, aggregate, state):
        own = jax.tree.map(lambda x, u: x + u.astype(x.dtype), state.base, aggregate)
        models = jax.tree.map(lambda x, new: x.at[state.tier].set(new), state.models, own)
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
    )
