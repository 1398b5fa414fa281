"""FedAsync: the server mixes every message into its model as it arrives. Several arrivals are one step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import client, engine, tree, validate
from fedjax_sim.algorithms.asynchronous.asynchronous import (
    METRICS,
    AsyncState,
    arrivals_only,
    arrive,
    check_traffic,
    losses,
    sent_instead,
    start,
)
from fedjax_sim.algorithms.asynchronous.in_flight import Traffic
from fedjax_sim.client.local_sgd import stateless_client
from fedjax_sim.client.proximal import proximal_term
from fedjax_sim.network import Hazard
from fedjax_sim.round.collect import in_turn
from fedjax_sim.round.compatibility import discounts
from fedjax_sim.round.costs import metrics_of
from fedjax_sim.round.options import ExecutionOptions
from fedjax_sim.round.round import close, collect
from fedjax_sim.round.state import Bases, initial_state
from fedjax_sim.server import replacement
from fedjax_sim.server.staleness import polynomial
from fedjax_sim.transform import identity
from fedjax_sim.types import Aggregator, Algorithm, Array, Devices, Execution, PyTree, StalenessWeight, Star
from fedjax_sim.validate import LossFn, PopulationSize, PositiveShare

__all__ = ["fedasync"]

SMALL = 2048  # numbers in a leaf


class FedAsyncOptions(client.LocalSteps, ExecutionOptions, total=False):
    """The options of `client.work` without a weight, and how a round is carried out."""


@validate.named_arguments
def fedasync(
    loss_fn: LossFn,
    devices: Devices,
    optimizer: optax.GradientTransformation,
    *,
    population_size: PopulationSize,
    concurrency: int = 100,
    mixing_rate: PositiveShare = 0.6,
    staleness: StalenessWeight | None = None,
    max_staleness: int = 400,
    coefficient: float = 0.0,
    refill: Literal["other", "same"] = "other",
    hazard: Hazard | None = None,
    arrivals_per_step: int = 1,
    **options: Unpack[FedAsyncOptions],
) -> Algorithm:
    """Each arriving model is mixed into the server's: w <- (1 - a) w + a w_i with a = mixing_rate * s(staleness).

    Args:
      devices, population_size, concurrency, max_staleness, hazard: as in `asynchronous`; every arrival makes a version.
      optimizer: the clients'; `num_steps`, `num_epochs`, `batch_size`, `shuffle` as in `client.work`. A client's number
        of examples has no influence on a.
      mixing_rate: alpha in (0, 1].
      staleness: s, such as `constant()`, `polynomial(0.5)`, `hinge(10.0, 4)`; None = `polynomial(0.5)`. A message with
        a outside of [0, 1] changes nothing.
      coefficient: of the clients' proximal term, as in `fedprox`.
      refill: who is sent the new model after an arrival: "other", a client drawn uniformly from those who were there,
        and not in flight, at the step's beginning; or "same", the one who arrived.
      arrivals_per_step: M in [1, C] arrivals that a step takes at most. Those whose models were sent before the step
        are trained at once, and mixed in one after the other; the step ends before the first one whose model is made in
        it. So M changes the speed, and of the result only what is drawn: keys are a step's. C / 8 is good.

    Returns: an Algorithm with the info of `asynchronous`; `update_norm` is that of the whole step. A message that is
    not finite makes a version too, equal to the one before.

    Guarantees: the models of an event loop in NumPy (tests/algorithms/asynchronous/test_fedasync.py::
    test_fedasync_is_the_event_loop), in any blocks (::test_blocks_change_nothing); a message that is not finite changes
    nothing (::test_a_message_that_is_not_finite), nor does one that cannot be mixed (::test_a_factor_that_is_none); no
    step copies all versions, in a sweep neither (::test_no_copy_of_the_versions); several devices give the bits
    of one (::test_mixed_as_they_come_and_at_the_end), which stores no message (::test_no_message_is_kept) unless it is
    given as a mesh, clients are packed by size, or places may be empty (`Population.there`); with one client and rate 1
    sequential SGD, bit for bit (tests/algorithms/asynchronous/test_asynchronous.py::test_one_client_is_sequential).

    References: Xie, Koyejo and Gupta 2019 (FedAsync), algorithm 1.
    """
    traffic = Traffic(devices, concurrency, arrivals_per_step, 1, max_staleness, refill, hazard)
    check_traffic(traffic, population_size, "arrivals_per_step")
    weigh = polynomial() if staleness is None else staleness
    validate.function("staleness", weigh, "gaps")
    discounts(weigh, max_staleness)
    work, execution = client.local_work({**options, "weighting": "uniform"})
    local = stateless_client(loss_fn, optimizer, work, proximal_term(coefficient), sends_model=True)
    star = Star(arrivals_only(traffic), local, _in_order(), replacement(), identity(), Execution(**execution))
    size, order = traffic.num_models, jnp.arange(arrivals_per_step, dtype=jnp.int32)

    def init(key, params, population):
        return start(star, traffic, key, params, population, initial_state(star, params, population))

    def mixed(made, sent, rows, slots, mixing):
        """`made`, (the model, the versions), after the messages of some slots, one after the other."""
        (messages, weights), (factors, version) = sent, mixing
        usable = (weights[rows] > 0) & (factors[slots] >= 0) & (factors[slots] <= 1)
        # Past the arrivals nothing changes the model: it is written to places that no version holds (`num_models`).
        places = (version + 1 + slots) % size
        return _chain(*made, messages, rows, jnp.where(usable, factors[slots], 0), places)

    def step(key, state, population):
        found, flights, cohort = arrive(star, traffic, key, state, population)
        federation, bases = state.federation, Bases(state.models, found.bases % size, versions=found.bases)
        made = federation.server, state.models
        mixing = engine.steady(lambda gaps: mixing_rate * weigh(gaps))(found.gaps), state.flights.version
        if in_turn(star, population):
            turns = star._replace(aggregator=_as_they_come(star.aggregator, made, mixed))
            bases, told = bases._replace(kept=itemgetter(1)), federation._replace(aggregator=mixing)
            gathered = collect(turns, key, cohort, told, population, bases)
            last, models = gathered.carry
        else:
            gathered = collect(star, key, cohort, federation, population, bases)
            sent, rows = engine.rows_in_place(gathered.carry)
            last, models = engine.steady(mixed)(made, sent, rows, order, mixing)
        federation, info = close(star, key, cohort, gathered._replace(carry=last), federation)
        return AsyncState(federation, flights, models), sent_instead(info, found.begun)

    metrics = (*metrics_of(star), *METRICS, *losses(traffic))
    return Algorithm(init, step, lambda state: state.federation.server, star, metrics=metrics)


def _chain(params: PyTree, models: PyTree, messages: PyTree, rows: Array, factors: Array, places: Array) -> tuple:
    """(The model after messages were mixed in one after the other, the versions with those that this made.)

    Small leaves are mixed as one, and their versions are written at the end: a turn of the loop costs more than they.

    Args:
      params, models, messages: leaves [...], [V, ...], [M or more, ...].
      rows, factors, places: [M] each: which message is next, a, and where the version that it makes is kept.
    """
    leaves, structure = jax.tree.flatten(params)
    kept, sent = (structure.flatten_up_to(x) for x in (models, messages))
    small = [i for i, x in enumerate(leaves) if x.size <= SMALL and x.dtype == jnp.float32]
    large = [i for i in range(len(leaves)) if i not in small]
    shapes, ends = [leaves[i].shape for i in small], np.cumsum([leaves[i].size for i in small])

    def together(parts, lead):
        return jnp.concatenate([jnp.zeros((*lead, 0), jnp.float32), *(x.reshape(*lead, -1) for x in parts)], axis=-1)

    def apart(x):
        parts = jnp.split(x, ends[:-1], axis=-1) if small else []
        return [part.reshape(*x.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]

    rest = [sent[i] for i in large] + [together([sent[i] for i in small], sent[0].shape[:1])]

    def one(made, arrival):
        params, kept = made
        row, factor, place = arrival
        params = [_between(w, x[row], factor) for w, x in zip(params, rest, strict=True)]
        put = partial(jax.lax.dynamic_update_index_in_dim, index=place, axis=0)
        return (params, [put(ring, w) for ring, w in zip(kept, params[:-1], strict=True)]), params[-1]

    start = [leaves[i] for i in large] + [together([leaves[i] for i in small], ())], [kept[i] for i in large]
    (last, rings), versions = jax.lax.scan(one, start, (rows, factors, places))
    rings += [kept[i].at[places].set(x) for i, x in zip(small, apart(versions), strict=True)]
    turn = np.argsort(large + small)
    found = ([*last[:-1], *apart(last[-1])], rings)
    return tuple(structure.unflatten([x[i] for i in turn]) for x in found)


def _between(old: Array, new: Array, factor: Array) -> Array:
    """old + factor (new - old), in the old one's dtype: a difference of floats of 16 bits may be past them."""
    wide = tree.widened(old)
    return engine.unsigned_zeros((wide + factor * (tree.widened(new) - wide)).astype(old.dtype))


def _as_they_come(rule: Aggregator, made: tuple, mixed: Callable) -> Aggregator:
    """`_in_order`, but messages are mixed in chunk by chunk, and none is kept (`collect.in_turn`).

    Args:
      made: (the model, the versions) before them: the carry to begin with.
      mixed: as in `fedasync`; its `mixing` is the aggregator's state.
    """

    def accumulate(key, round, carry, received):
        rows = jnp.arange(received.slots.size, dtype=jnp.int32)
        slots = jnp.minimum(received.slots, round.cohort.ids.size - 1)  # the padding writes the last version once more
        return mixed(carry, (received.updates, received.weights), rows, slots, round.state)

    return rule._replace(init=lambda update_spec, num_slots: made, accumulate=accumulate)


def _in_order() -> Aggregator:
    """All messages and weights by their order of arrival; what the server made of them is the aggregate."""

    def init(update_spec, num_slots):
        return engine.buffer((update_spec, jax.ShapeDtypeStruct((), jnp.float32)), num_slots)

    def accumulate(key, round, carry, received):
        return engine.fill(carry, received.slots, (received.updates, received.weights))

    return Aggregator(init, accumulate, lambda key, round, carry: (carry, {}))
