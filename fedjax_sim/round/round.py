"""The steps of a round around one server are invite, collect and close; `observe` replays a round.

These three lines are a round of `federated`, where `star` holds the parts:

    cohort, sampler_state = invite(star, key, state)
    gathered = collect(star, key, cohort, state, population)
    state, info = close(star, key, cohort, gathered, state._replace(sampler=sampler_state))

`close` consists of `aggregate`, the server's step and `remember`. An algorithm that needs these apart calls them
itself, as FedBuff, D-PSGD and a hierarchy do (tests/algorithms/hierarchy/test_seams.py). The clients' half of a round,
`collect` and `seen`, is in `round.collect`.

The example has two clients with f_i(w) = (w - c_i)^2 / 2 and c = (0, 2). Each takes one step of rate 1/2 from w = 0:

>>> import jax, jax.numpy as jnp, optax
>>> from fedjax_sim import algorithms, population, sampling
>>> people, start = population.quadratic_population([1.0, 1.0], [0.0, 2.0]), {"w": jnp.zeros(1)}
>>> fedavg = algorithms.fedavg(population.quadratic_loss, sampling.full(2), optax.sgd(0.5), num_steps=1)
>>> star, key = fedavg.parts, jax.random.key(0)
>>> state = initial_state(star, start, people)
>>> @jax.jit
... def steps(state):
...     cohort, sampler_state = invite(star, key, state)
...     gathered = collect(star, key, cohort, state, people)
...     mean = aggregate(star, key, cohort, gathered, state).update
...     new, info = close(star, key, cohort, gathered, state._replace(sampler=sampler_state))
...     return cohort.ids, mean, remember(cohort, gathered), star.server.params(new.server), info
>>> ids, mean, kept, model, info = steps(state)
>>> ids.tolist(), mean["w"].tolist(), kept  # the mean of the updates 0 and 1; FedAvg's clients keep nothing
([0, 1], [0.5], ((), ()))
>>> model["w"].tolist(), int(info["clients_reported"]), info["uplink_bytes"].total()  # one float32 a message
([0.5], 2, 8)
>>> jax.jit(lambda state: observe(fedavg, key, state, people).messages["w"])(state).tolist()
[[0.0], [1.0]]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import engine, tree, validate
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.prng import stream
from fedjax_sim.round.collect import collect as collect, seen as seen
from fedjax_sim.round.compatibility import check_aggregate
from fedjax_sim.round.costs import spending_metrics, traffic, unusable
from fedjax_sim.round.counts import words_by_name
from fedjax_sim.round.inner_time import with_rounds_inside
from fedjax_sim.round.message import stays_finite
from fedjax_sim.round.state import (
    Aggregated as Aggregated,
    FederatedState as FederatedState,
    Gathered as Gathered,
    initial_state as initial_state,
)
from fedjax_sim.sampling.time.cut import price_in, repriced
from fedjax_sim.sampling.time.round_cost import NOTHING_MORE
from fedjax_sim.types import (
    Algorithm,
    Array,
    Cohort,
    Count,
    Observed,
    Outcome,
    Population,
    PyTree,
    Round,
    Star,
)


def invite(star: Star, key: Array, state: FederatedState) -> tuple[Cohort, PyTree]:
    """Draws the cohort of a round.

    Args:
      star: the parts; only the sampler draws.
      key: of the round, here and in the other steps; each step derives its own stream from it.
      state: before the round.

    Returns: (`Cohort` of m slots, the sampler's next state). The caller puts the sampler's state into the state of the
    next round, as above; a round that is only observed discards it. Where clients are federations and rounds take time,
    the cohort's times are those of the rounds that these clients will make.

    Guarantees: two steps of a round share no random stream (tests/test_prng.py::test_stage_names_do_not_collide).
    """
    time_inside = star.client.time_inside
    if star.sampler.devices is None or time_inside is None:
        return _draw_cohort(star, key, state.sampler)

    def priced(_, cohort, price):
        return with_rounds_inside(time_inside, key, cohort, price)

    return invite_together(star, key, state, priced)


def _draw_cohort(star: Star, key: Array, sampler_state: PyTree) -> tuple[Cohort, PyTree]:
    """Draws (`Cohort`, the sampler's next state) with the round's stream for sampling."""
    return engine.reproducible(star.sampler.sample)(stream(key, "sampling"), sampler_state)


def invite_together(star: Star, key: Array, state: FederatedState, priced: Callable) -> tuple[Cohort, PyTree]:
    """Draws a cohort whose clients' times depend on the round's key or on the other clients of the cohort.

    A sampler alone cannot know such times, so the cohort is drawn twice with the same key. The first draw tells who is
    invited, in which slots; no price has an influence on that. The second draw uses the price of this cohort.

    Args:
      star, key, state: as for `invite`.
      priced: (key that the cohort is drawn with, Cohort, `Price`) -> `Price` of this cohort.

    Returns: as `invite`.

    Guarantees: the price is that of the cohort that is drawn, in gossip
    (tests/algorithms/gossip/test_pairwise_time.py::test_each_meeting_is_paid_for_at_both_ends) and inside of edges
    (tests/round/test_inner_time.py::test_rounds_inside_by_hand).
    """
    price = price_in(state.sampler)
    cohort, _ = _draw_cohort(star, key, repriced(state.sampler, price._replace(more=NOTHING_MORE)))
    cohort_price = engine.reproducible(priced)(stream(key, "sampling"), cohort, price)
    cohort, sampler_state = _draw_cohort(star, key, repriced(state.sampler, cohort_price))
    # The next round starts from the general price: that of this cohort is kept in no state.
    return cohort, repriced(sampler_state, price)


def aggregate(star: Star, key: Array, cohort: Cohort, gathered: Gathered, state: FederatedState) -> Aggregated:
    """Computes the aggregate of the messages, and applies the server's end of the transform.

    Args:
      star, key, cohort: as for `collect`.
      gathered: of `collect`.
      state: the one that `collect` was given.

    Returns: `Aggregated`. Nothing is checked: the update may be non-finite. Without a usable message it is the
    aggregator's result for no messages (zero for a mean). `close` skips such rounds.

    Guarantees: rounded as in `close` (tests/laws/test_rounding.py::test_nor_does_a_step_alone); an aggregator with
    state sees its own and the model (tests/aggregation/test_gather.py::test_a_rule_with_memory).
    """
    # `reproducible` traces its arguments as arrays: the sizes of messages stay outside, for their bits may exceed an
    # int32.
    gathered = gathered._replace(clients=(), memory=(), up=(), down=())
    return engine.reproducible(partial(_aggregate, star))(key, cohort, gathered, state._replace(clients=(), memory=()))


def _aggregate(star: Star, key: Array, cohort: Cohort, gathered: Gathered, state: FederatedState) -> Aggregated:
    """Computes what `aggregate` returns; traced in `engine.reproducible` by its callers.

    Args:
      star, key, cohort: as for `collect`.
      gathered: of `collect`; `carry`, `means` and `broadcast` are read.
      state: its `transform` and `aggregator` are read.
    """
    aggregator = star.aggregator
    round = Round(cohort, gathered.broadcast, state.aggregator)
    update, aggregator_metrics, *next_state = aggregator.finalize(stream(key, "aggregation"), round, gathered.carry)
    # The model, its norm and its checks read the aggregate. Without the barrier each of them would compute it anew.
    update = jax.lax.optimization_barrier(update)
    client_means, measured = exact_sums.total(gathered.means)
    update, transform_state, transform_metrics = star.transform.on_server(
        stream(key, "transform_server"), cohort, update, state.transform, measured, aggregator.facts.sensitivity
    )
    metrics = {"aggregator": aggregator_metrics, "transform": transform_metrics}
    return Aggregated(
        update=update,
        transform=transform_state,
        aggregator=next_state[0] if next_state else (),
        means=client_means,
        metrics=metrics,
    )


def remember(cohort: Cohort, gathered: Gathered, usable: Array | bool = True) -> tuple[PyTree, PyTree]:
    """Writes the cohort's new states and memories into the stores of all clients.

    Args:
      cohort: the cohort whose messages `gathered` holds.
      gathered: of `collect`.
      usable: [] bool; False keeps every client's state as it was.

    Returns: (per-client state, per-client memory of the transform), leaves [N, ...]. Rows change only for clients whose
    message arrived.

    Guarantees: a skipped round changes no client's state
    (tests/round/test_round.py::test_skipped_rounds_keep_everything); each node's own model is its state in D-PSGD
    (tests/algorithms/hierarchy/test_seams.py::test_dpsgd).
    """
    clients, client_rows = gathered.clients
    memory, memory_rows = gathered.memory
    new_clients = engine.put(clients, cohort.ids, client_rows, gathered.arrived & usable)
    return new_clients, engine.put(memory, cohort.ids, memory_rows, gathered.arrived & usable)


def close(
    star: Star, key: Array, cohort: Cohort, gathered: Gathered, state: FederatedState, *, usable: Array | bool = True
) -> tuple[FederatedState, dict[str, Any]]:
    """Takes the server's step with the gathered messages, and returns the next state and the round's info.

    Args:
      star, key, cohort: as for `collect`.
      gathered: of `collect`.
      state: the one that `collect` was given, with the sampler's next state.
      usable: [] bool; False skips the round.

    A round is also skipped where no usable message arrived, where fewer messages arrived than a distributed noise
    assumes (all slots, if it states no number), and where the aggregate or the server's step is not finite. A skipped
    round leaves the model, the clients' states and memories, and the aggregator's state as they were.

    Returns: (the next state, info): info has scalars and `Count`s by name, as `federated` lists them.

    Raises: ValueError for an aggregate of other shapes than the server takes, and for two parts whose metrics have the
    same name (tests/laws/test_facts.py::test_names_that_are_taken).

    Guarantees: a round in which every client's update overflows leaves the clients' and the aggregator's states as they
    were (tests/round/test_round.py::test_skipped_rounds_keep_everything); a server step that diverges is skipped and
    counted (tests/laws/test_nonfinite.py::test_diverging_server_step); missing shares of noise release nothing
    (::test_missing_shares_of_noise_release_nothing).
    """

    def stepped(key, cohort, carry, state):
        sums, means, num_arrived, _ = carry
        aggregated = _aggregate(star, key, cohort, gathered._replace(carry=sums, means=means), state)
        check_aggregate(aggregated.update, star.server, tree.spec(star.server.params(state.server)))
        new_server = star.server.apply(stream(key, "server"), aggregated.update, state.server)
        releases_when_empty = star.transform.facts.releases_when_empty
        noise = star.transform.facts.noise
        is_used = (num_arrived > 0) | releases_when_empty
        if noise is not None and noise.place == "distributed":
            num_shares = noise.named_details.get("cohort_size", star.sampler.num_slots)
            is_used = num_arrived >= num_shares  # fewer messages hold less noise: nothing is released
        is_used = is_used if usable is True else is_used & usable
        # The aggregate is checked beside the server's step, which may turn NaN into numbers: optax.zero_nans does.
        new_params = star.server.params(new_server)
        is_used &= engine.all_finite(tree.packed((aggregated.update, new_params)))
        is_used &= stays_finite(state.server, new_server, finite=new_params)
        # Noise was released even if the step is discarded, so the transform's state goes on.
        noise_released = releases_when_empty & engine.all_finite(aggregated.transform)
        new_server = tree.where(is_used, new_server, state.server)
        client_metrics = {name: mean.total / mean.weight for name, mean in aggregated.means.items()}
        with jax.numpy_dtype_promotion("standard"):  # optax adds the squares of leaves of different dtypes
            # Squares of small changes are 0 in float16, and those of large ones infinite.
            change = tree.widened(tree.subtract(star.server.params(new_server), star.server.params(state.server)))
            # Integers, such as symbols that a statistic found, have no distance.
            update_norm = optax.tree.norm([x for x in jax.tree.leaves(change) if jnp.issubdtype(x.dtype, jnp.inexact)])
        transform_state = tree.where(is_used | noise_released, aggregated.transform, state.transform)
        metrics = {"client": client_metrics} | aggregated.metrics
        return is_used, transform_state, new_server, update_norm, metrics, aggregated.aggregator

    carry = gathered.carry, gathered.means, gathered.num_arrived, gathered.num_dropped
    # Without the per-client rows: a program that reads these late holds the old rows beside the new ones.
    server_side_state = state._replace(clients=(), memory=())
    is_used, transform, server, update_norm, metrics, new_aggregator = engine.reproducible(stepped)(
        key, cohort, carry, server_side_state
    )
    round = state.round + 1
    sampler = state.sampler
    clients, memory = remember(cohort, gathered, is_used)
    if star.sampler.observe is not None:
        if gathered.losses is None:
            hint = "Collect with the star that closes the round, which keeps them."
            validate.fail("gathered.losses", "the clients' losses, for the sampler observes them", None, hint)
        outcome = Outcome(gathered.arrived, gathered.losses)
        sampler = engine.reproducible(star.sampler.observe)(sampler, cohort, outcome)
    aggregator = tree.where(is_used, new_aggregator, state.aggregator)
    next_state = FederatedState(
        round=round,
        sampler=sampler,
        clients=clients,
        memory=memory,
        transform=transform,
        server=server,
        aggregator=aggregator,
    )
    info = traffic(cohort, gathered.up, gathered.down, gathered.by_invited)
    info |= unusable(star, cohort, gathered.dropped, gathered.num_dropped)
    info |= engine.reproducible(spending_metrics)(cohort)
    info |= {
        "clients_invited": info["downlink_bytes"].number,
        "clients_reported": gathered.num_arrived,
        "skipped_rounds": (~is_used).astype(jnp.int32),
        "update_norm": update_norm,
    }
    counts = {name: Count(jnp.ones((), jnp.int32), x) for name, x in words_by_name(gathered.counts).items()}
    return next_state, _joined_info(info, sampler=cohort.metrics, **metrics, counts=counts)


def _joined_info(round_info: dict, **parts: dict) -> dict:
    """Joins the round's own numbers and the metrics of its parts, which must not use the same names."""
    metrics = tree.joined_metrics(parts)
    for name in ("round", "epsilon", *round_info):
        if name in metrics:
            validate.fail("metrics", "names that no other part uses", name, "Rename it in the loss or the part.")
    return metrics | round_info


def observe(algorithm: Algorithm, key: Array, state: PyTree, population: Population) -> Observed:
    """Replays the round that `algorithm.step(key, state, population)` makes, and returns what the server saw in it.

    Args:
      algorithm: any algorithm that can replay its rounds, such as one made by `federated`.
      key: of that round; `run` gives round t the key fold_in(key, t), so a replay of round t needs that key.
      state: before the round.
      population: all clients, as in the round.

    Returns: `Observed`: the broadcast, the messages as they arrived [m, ...], their weights, and the clients' ids.
    Under `secure_sum` the messages are masked. A plain `modular_sum` only states how integers are added, so there the
    messages are shown.

    Raises: ValueError for an algorithm that has no `observe` of its own.

    Guarantees: the mean of the messages is the round's update
    (tests/round/test_round.py::test_observe_is_the_round); both messages of a Mime client are seen
    (::test_mime_is_observed_in_both_passes).
    """
    if algorithm.observe is None:
        validate.fail(
            "algorithm", "one that can replay its rounds", None, "Give it `observe`, or build it from a Star."
        )
    return algorithm.observe(key, state, population)
