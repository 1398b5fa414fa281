"""FedAsync: the server mixes every model that arrives into its own. One `step` handles several arrivals."""

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
from fedjax_sim.round.bases import Bases, starting_from
from fedjax_sim.round.collect import in_turn
from fedjax_sim.round.compatibility import discounts
from fedjax_sim.round.costs import metrics_of
from fedjax_sim.round.options import ExecutionOptions
from fedjax_sim.round.round import close, collect
from fedjax_sim.round.state import initial_state
from fedjax_sim.server import replacement
from fedjax_sim.server.staleness import polynomial
from fedjax_sim.transform import identity
from fedjax_sim.types import Aggregator, Algorithm, Array, Devices, Execution, PyTree, StalenessWeight, Star
from fedjax_sim.validate import LossFn, PopulationSize, PositiveShare

MAX_MIXED_TOGETHER = 2048  # leaves of at most so many numbers are mixed together, as one array


class FedAsyncOptions(client.LocalSteps, ExecutionOptions, total=False):
    """The options of `client.work` without `weighting`, and the execution options of `federated`."""


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
    """Makes FedAsync: the server mixes each client's model into its own as soon as it arrives.

    The new model is w <- (1 - a) w + a w_i with a = mixing_rate * s(staleness), where w_i is the client's model. Every
    arrival makes a version of the model.

    Args:
      loss_fn: as in `client.local_sgd`.
      devices, population_size, concurrency, max_staleness, hazard: as in `asynchronous`.
      optimizer: the clients' optimizer; `num_steps`, `num_epochs`, `batch_size`, `shuffle` as in `client.work`. A
        client's number of examples has no influence on a.
      mixing_rate: alpha in (0, 1].
      staleness: s, such as `constant()`, `polynomial(0.5)`, `hinge(10.0, 4)`; None = `polynomial(0.5)`. A message whose
        a is outside of [0, 1] changes nothing.
      coefficient: of the clients' proximal term, as in `fedprox`.
      refill: who is sent the new model after an arrival. "other": a client drawn uniformly from those who were there,
        and not in flight, at the step's beginning. "same": the client who arrived.
      arrivals_per_step: M in [1, C], the largest number of arrivals that a step takes. Clients whose models were sent
        before the step are trained together, and their models are mixed in one after the other. The step ends before
        the first client whose model is made in the step. So M changes the speed. It changes results only through random
        draws, since keys belong to steps. C / 8 is a good value.
      nonfinite, plan, mesh: as in `federated`.

    Returns: an Algorithm with the info of `asynchronous`; `update_norm` is the norm of the change in the whole step. A
    message that is not finite makes a version too, which equals the version before it.

    Guarantees: the models are those of an event loop in NumPy (tests/algorithms/asynchronous/test_fedasync.py::
    test_fedasync_is_the_event_loop), in any blocks (::test_blocks_change_nothing); a message that is not finite changes
    nothing (::test_a_message_that_is_not_finite), nor does a message that cannot be mixed
    (::test_a_factor_that_is_none); no step copies all versions, not in a sweep either (::test_no_copy_of_the_versions);
    several devices give the bits of one device (::test_mixed_as_they_come_and_at_the_end); one device stores no message
    (::test_no_message_is_kept), unless it is given as a mesh, clients are packed by size, or places may be empty
    (`Population.there`); one client with rate 1 is sequential SGD, bit for bit
    (tests/algorithms/asynchronous/test_asynchronous.py::test_one_client_is_sequential).

    References: Xie, Koyejo and Gupta 2019 (FedAsync), algorithm 1.
    """
    traffic = Traffic(
        devices,
        concurrency=concurrency,
        block=arrivals_per_step,
        buffer_size=1,
        max_staleness=max_staleness,
        refill=refill,
        hazard=hazard,
    )
    check_traffic(traffic, population_size, "arrivals_per_step")
    staleness_weight = polynomial() if staleness is None else staleness
    validate.function("staleness", staleness_weight, "gaps")
    discounts(staleness_weight, max_staleness)  # checks the range of the factors
    work, execution = client.local_work({**options, "weighting": "uniform"})
    local = stateless_client(loss_fn, optimizer, work, proximal_term(coefficient), sends_model=True)
    star = Star(
        sampler=arrivals_only(traffic),
        client=local,
        aggregator=_in_order(),
        server=replacement(),
        transform=identity(),
        execution=Execution(**execution),
    )
    num_models = traffic.num_models
    all_slots = jnp.arange(arrivals_per_step, dtype=jnp.int32)

    def init(key, params, population):
        federation = initial_state(star, params, population)
        return start(star, traffic, key, params, population, federation=federation)

    def mixed(model_and_versions, messages_and_weights, rows, slots, mixing):
        """Mixes the messages of some slots into the model, one after the other.

        Args:
          model_and_versions: (the model, the ring of versions) before them.
          rows: of the messages, in the order of arrival.
          slots: of these messages.
          mixing: ([M] factors a of all slots, [] version before the step).

        Returns: (the model, the ring of versions) after them.
        """
        messages, weights = messages_and_weights
        factors, version = mixing
        is_usable = (weights[rows] > 0) & (factors[slots] >= 0) & (factors[slots] <= 1)
        # A step always writes M versions. Those past the last arrival equal the model, and are written to places where
        # no version is kept (`Traffic.num_models`).
        places = (version + 1 + slots) % num_models
        usable_factors = jnp.where(is_usable, factors[slots], 0)
        model, versions = model_and_versions
        return _chain(model, versions, messages, rows=rows, factors=usable_factors, places=places)

    def step(key, state, population):
        arrivals, flights, cohort = arrive(star, traffic, key, state, population)
        federation = state.federation
        bases = Bases(state.models, arrivals.bases % num_models, versions=arrivals.bases)
        model_and_versions = federation.server, state.models
        factors = engine.reproducible(lambda gaps: mixing_rate * staleness_weight(gaps))(arrivals.gaps)
        mixing = factors, state.flights.version
        if in_turn(star, population):
            # Chunks come in the order of arrival, so each is mixed in before the next one trains, and no message is
            # kept. The ring of versions is in the aggregator's carry, and later chunks read their bases from there.
            mixing_star = star._replace(aggregator=_mixing_at_once(star.aggregator, model_and_versions, mixed))
            extension = starting_from(bases._replace(kept=itemgetter(1)))
            mixing_state = federation._replace(aggregator=mixing)
            gathered = collect(mixing_star, key, cohort, mixing_state, population, extension=extension)
            new_model, models = gathered.carry
        else:
            gathered = collect(star, key, cohort, federation, population, extension=starting_from(bases))
            messages_and_weights, rows = engine.rows_in_place(gathered.carry)
            new_model, models = engine.reproducible(mixed)(
                model_and_versions, messages_and_weights, rows, all_slots, mixing
            )
        # The new model takes the place of the aggregate: the server of `star` replaces its model by that.
        federation, info = close(star, key, cohort, gathered._replace(carry=new_model), federation)
        return AsyncState(federation, flights, models), sent_instead(info, arrivals.begun)

    metrics = (*metrics_of(star), *METRICS, *losses(traffic))
    kind = star.params_kind
    return Algorithm(init, step, lambda state: state.federation.server, star, metrics=metrics, params_kind=kind)


def _chain(
    params: PyTree, models: PyTree, messages: PyTree, *, rows: Array, factors: Array, places: Array
) -> tuple[PyTree, PyTree]:
    """Mixes messages into the model one after the other, and writes the versions that this makes.

    Message i makes w_i = w_{i-1} + a_i (x_i - w_{i-1}), where w_0 is the model and x_i the message at `rows[i]`.

    Args:
      params: the model, leaves [...].
      models: the ring of versions, leaves [V, ...].
      messages: leaves [c or more, ...], of which c are mixed: all messages of a step, or a chunk of them.
      rows: [c] int32, the row of each message, in the order of arrival.
      factors: [c] float32 in [0, 1], the factor a of each message.
      places: [c] int32 in [0, V), the place in the ring of the version that each message makes.

    Returns: (the model after all messages, the ring of versions).
    """
    leaves, structure = jax.tree.flatten(params)
    rings, message_leaves = (structure.flatten_up_to(x) for x in (models, messages))
    # Small leaves are mixed as one array, and their versions are written after the loop: an operation of a turn costs
    # more than so few numbers.
    small = [i for i, x in enumerate(leaves) if x.size <= MAX_MIXED_TOGETHER and x.dtype == jnp.float32]
    large = [i for i in range(len(leaves)) if i not in small]
    small_shapes = [leaves[i].shape for i in small]
    small_ends = np.cumsum([leaves[i].size for i in small])

    def join_small(parts, lead):
        # The empty array makes the result right where there is no small leaf.
        return jnp.concatenate([jnp.zeros((*lead, 0), jnp.float32), *(x.reshape(*lead, -1) for x in parts)], axis=-1)

    def split_small(x):
        parts = jnp.split(x, small_ends[:-1], axis=-1) if small else []
        return [part.reshape(*x.shape[:-1], *shape) for part, shape in zip(parts, small_shapes, strict=True)]

    small_messages = join_small([message_leaves[i] for i in small], message_leaves[0].shape[:1])
    all_messages = [message_leaves[i] for i in large] + [small_messages]

    def mix_one(carry, arrival):
        params, large_rings = carry
        row, factor, place = arrival
        params = [_between(w, x[row], factor) for w, x in zip(params, all_messages, strict=True)]
        put = partial(jax.lax.dynamic_update_index_in_dim, index=place, axis=0)
        large_rings = [put(ring, w) for ring, w in zip(large_rings, params[:-1], strict=True)]
        return (params, large_rings), params[-1]

    start_params = [leaves[i] for i in large] + [join_small([leaves[i] for i in small], ())]
    start = start_params, [rings[i] for i in large]
    (new_params, new_rings), small_versions = jax.lax.scan(mix_one, start, (rows, factors, places))
    new_rings += [rings[i].at[places].set(x) for i, x in zip(small, split_small(small_versions), strict=True)]
    original_order = np.argsort(large + small)
    results = ([*new_params[:-1], *split_small(new_params[-1])], new_rings)
    return tuple(structure.unflatten([x[i] for i in original_order]) for x in results)


def _between(old: Array, new: Array, factor: Array) -> Array:
    """Computes old + factor (new - old), in the dtype of `old`.

    It is computed in a wider dtype, because a difference of floats of 16 bits may overflow.
    """
    wide = tree.widened(old)
    return engine.unsigned_zeros((wide + factor * (tree.widened(new) - wide)).astype(old.dtype))


def _mixing_at_once(rule: Aggregator, model_and_versions: tuple, mixed: Callable) -> Aggregator:
    """Makes an aggregator that mixes messages into the model chunk by chunk, and keeps none (`collect.in_turn`).

    Args:
      rule: of `_in_order`.
      model_and_versions: (the model, the ring of versions) before the step, with which the carry begins.
      mixed: as in `fedasync`; its argument `mixing` is the aggregator's state.
    """

    def accumulate(key, round, carry, received):
        rows = jnp.arange(received.slots.size, dtype=jnp.int32)
        # Padding has weight 0, so it mixes nothing in: it writes the last version once more.
        slots = jnp.minimum(received.slots, round.cohort.ids.size - 1)
        return mixed(carry, (received.updates, received.weights), rows, slots, round.state)

    return rule._replace(init=lambda update_spec, num_slots: model_and_versions, accumulate=accumulate)


def _in_order() -> Aggregator:
    """Makes an aggregator that keeps all messages and weights in their order of arrival.

    Its aggregate is its carry. `fedasync` puts the new model there before it closes the round.
    """

    def init(update_spec, num_slots):
        return engine.buffer((update_spec, jax.ShapeDtypeStruct((), jnp.float32)), num_slots)

    def accumulate(key, round, carry, received):
        return engine.fill(carry, received.slots, (received.updates, received.weights))

    return Aggregator(init, accumulate, lambda key, round, carry: (carry, {}))
