"""The steps of a round over a `Star`: invite, collect, close; and `observe`, which replays a round.

    cohort, sampler_state = invite(star, key, state)
    gathered = collect(star, key, cohort, state, population)
    state, info = close(star, key, cohort, gathered, state._replace(sampler=sampler_state))

is a round of `federated`. `close` is `aggregate`, the server's step and `remember`; an algorithm that needs them apart
calls them itself, as FedBuff, D-PSGD and a hierarchy do (tests/algorithms/hierarchy/test_seams.py). The clients' half,
`collect` and `seen`, is in `round.collect`.

Two clients with f_i(w) = (w - c_i)^2 / 2, c = (0, 2), one step of rate 1/2 from w = 0:

>>> import jax, jax.numpy as jnp, optax
>>> from fedjax_sim import algorithms, population, sampling
>>> people, start = population.quadratic_population([1.0, 1.0], [0.0, 2.0]), {"w": jnp.zeros(1)}
>>> fedavg = algorithms.fedavg(population.quadratic_loss, sampling.full(2), optax.sgd(0.5), num_steps=1)
>>> star, key = fedavg.parts, jax.random.key(0)
>>> state = initial_state(star, start, people)
>>> cohort, sampler_state = invite(star, key, state)
>>> cohort.ids.tolist(), cohort.reported.tolist()
([0, 1], [True, True])
>>> gathered = collect(star, key, cohort, state, people)
>>> int(gathered.num_arrived), gathered.up.bits  # one float32 a message
(2, 32)
>>> aggregate(star, key, cohort, gathered, state).update["w"].tolist()  # the mean of the updates 0 and 1
[0.5]
>>> remember(cohort, gathered)  # FedAvg's clients, and no transform, keep nothing
((), ())
>>> new, info = close(star, key, cohort, gathered, state._replace(sampler=sampler_state))
>>> star.server.params(new.server)["w"].tolist(), int(info["clients_reported"]), info["uplink_bytes"].total()
([0.5], 2, 8)
>>> observe(fedavg, key, state, people).messages["w"].tolist()
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
from fedjax_sim.round.collect import collect, seen
from fedjax_sim.round.compatibility import check_aggregate
from fedjax_sim.round.costs import spending_metrics, traffic, two_words, unusable
from fedjax_sim.round.inner_time import with_rounds_inside
from fedjax_sim.round.message import stays_finite
from fedjax_sim.round.state import Aggregated, FederatedState, Gathered, initial_state
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

__all__ = [
    "Aggregated",
    "FederatedState",
    "Gathered",
    "aggregate",
    "close",
    "collect",
    "initial_state",
    "invite",
    "invite_together",
    "observe",
    "remember",
    "seen",
]


def invite(star: Star, key: Array, state: FederatedState) -> tuple[Cohort, PyTree]:
    """Draws the cohort of a round.

    Args:
      key: of the round, here and in the other steps; each step derives its own stream from it.
      state: before the round.

    Returns: (`Cohort` of m slots, the sampler's next state). The caller puts the latter into the state, as above, since
    a round that is only observed must not. Where clients are federations and rounds take time, the cohort's times are
    those of the rounds that these clients will make.

    Guarantees: two steps of a round share no random stream (tests/test_prng.py::test_stage_names_do_not_collide).
    """
    if star.sampler.devices is None or star.client.time_inside is None:
        return _drawn(star, key, state.sampler)

    def priced(_, cohort, price):
        return with_rounds_inside(star.client.time_inside, key, cohort, price)

    return invite_together(star, key, state, priced)


def _drawn(star: Star, key: Array, sampler_state: PyTree) -> tuple[Cohort, PyTree]:
    return engine.steady(star.sampler.sample)(stream(key, "sampling"), sampler_state)


def invite_together(star: Star, key: Array, state: FederatedState, priced: Callable) -> tuple[Cohort, PyTree]:
    """`invite` where rounds take time, and what a client spends follows from the round's key or from the other clients.

    The cohort is drawn twice: to learn who is invited, in which slots, which follows from no price; and at its price.

    Args:
      priced: (key that the cohort is drawn with, Cohort, `Price`) -> `Price` of this cohort.

    Guarantees: the price is that of the cohort that is drawn, in gossip
    (tests/algorithms/gossip/test_pairwise_time.py::test_each_meeting_is_paid_for_at_both_ends) and inside of edges
    (tests/round/test_inner_time.py::test_rounds_inside_by_hand).
    """
    price = price_in(state.sampler)
    cohort, _ = _drawn(star, key, repriced(state.sampler, price._replace(more=NOTHING_MORE)))
    cohort_price = engine.steady(priced)(stream(key, "sampling"), cohort, price)
    cohort, sampler = _drawn(star, key, repriced(state.sampler, cohort_price))
    return cohort, repriced(sampler, price)


def aggregate(star: Star, key: Array, cohort: Cohort, gathered: Gathered, state: FederatedState) -> Aggregated:
    """The aggregator's result, after the server's end of the transform.

    Args:
      gathered: of `collect`.
      state: the one that `collect` was given.

    Returns: `Aggregated`. Nothing is checked: without a usable message the update is what the aggregator makes of none
    (zero for a mean), and it may be non-finite; `close` skips such rounds.

    Guarantees: rounded as in `close` (tests/laws/test_rounding.py::test_nor_does_a_step_alone); an aggregator with
    state sees its own and the model (tests/aggregation/test_gather.py::test_a_rule_with_memory).
    """
    gathered = gathered._replace(clients=(), memory=(), up=(), down=())  # bits of a message may exceed an int32
    return engine.steady(partial(_aggregated, star))(key, cohort, gathered, state._replace(clients=(), memory=()))


def _aggregated(star: Star, key: Array, cohort: Cohort, gathered: Gathered, state: FederatedState) -> Aggregated:
    rule, round = star.aggregator, Round(cohort, gathered.broadcast, state.aggregator)
    update, metrics, *kept = rule.finalize(stream(key, "aggregation"), round, gathered.carry)
    found, measured = exact_sums.total(gathered.means)
    update, transform_state, transform_metrics = star.transform.on_server(
        stream(key, "transform_server"), cohort, update, state.transform, measured, rule.facts.sensitivity
    )
    metrics = {"aggregator": metrics, "transform": transform_metrics}
    return Aggregated(update, transform_state, *(kept or [()]), found, metrics)


def remember(cohort: Cohort, gathered: Gathered, usable: Array | bool = True) -> tuple[PyTree, PyTree]:
    """Writes the cohort's new states and memories into the stores of all clients.

    Args:
      cohort: the one that `gathered` is of.
      usable: [] bool; False keeps every client's state as it was.

    Returns: (per-client state, per-client memory of the transform), leaves [N, ...]. Only clients whose message arrived
    are changed.

    Guarantees: a skipped round changes no client's state
    (tests/round/test_round.py::test_skipped_rounds_keep_everything); each node's own model is its state in D-PSGD
    (tests/algorithms/hierarchy/test_seams.py::test_dpsgd).
    """
    (clients, client_rows), (memory, memory_rows) = gathered.clients, gathered.memory
    kept = engine.put(clients, cohort.ids, client_rows, gathered.arrived & usable)
    return kept, engine.put(memory, cohort.ids, memory_rows, gathered.arrived & usable)


def close(
    star: Star, key: Array, cohort: Cohort, gathered: Gathered, state: FederatedState, *, usable: Array | bool = True
) -> tuple[FederatedState, dict[str, Any]]:
    """The server's step on what was gathered, and the round's info.

    Args:
      gathered: of `collect`.
      state: the one that `collect` was given, with the sampler's next state.
      usable: [] bool; False skips the round. It is also skipped where no usable message arrived, where fewer arrived
        than a distributed noise assumes (all slots, if it does not say), and where the aggregate or the server's step
        is not finite. A skipped round leaves the model, the clients' states and memories, and the aggregator's state as
        they were.

    Returns: (the next state, info): info has scalars and `Count`s by name, as `federated` lists them.

    Raises: ValueError for an aggregate of other shapes than the server takes, and for two parts whose metrics have the
    same name (tests/laws/test_facts.py::test_names_that_are_taken).

    Guarantees: tests/round/test_round.py::test_skipped_rounds_keep_everything; a server step that diverges is
    skipped and counted (tests/laws/test_nonfinite.py::test_diverging_server_step); missing shares of noise release
    nothing (::test_missing_shares_of_noise_release_nothing).
    """

    def stepped(key, cohort, carry, state):
        sums, means, arrived, _ = carry
        found = _aggregated(star, key, cohort, gathered._replace(carry=sums, means=means), state)
        check_aggregate(found.update, star.server, tree.spec(star.server.params(state.server)))
        moved = star.server.apply(stream(key, "server"), found.update, state.server)
        released, noise = star.transform.facts.releases_when_empty, star.transform.facts.noise
        fit = (arrived > 0) | released
        if noise is not None and noise.place == "distributed":
            shares = noise.named_details.get("cohort_size", star.sampler.num_slots)
            fit = arrived >= shares  # fewer messages hold less noise: nothing is released
        fit = fit if usable is True else fit & usable
        fit &= tree.all_finite(found.update)  # a server's step may make numbers of NaN: optax.zero_nans
        fit &= tree.all_finite(star.server.params(moved)) & stays_finite(state.server, moved)
        kept = released & tree.all_finite(found.transform)  # noise was released even if the step is discarded
        moved = tree.where(fit, moved, state.server)
        pooled = {name: mean.total / mean.weight for name, mean in found.means.items()}
        with jax.numpy_dtype_promotion("standard"):  # optax adds the squares of leaves of different dtypes
            length = optax.tree.norm(tree.subtract(star.server.params(moved), star.server.params(state.server)))
        transform = tree.where(fit | kept, found.transform, state.transform)
        return fit, transform, moved, length, {"client": pooled} | found.metrics, found.aggregator

    carry = gathered.carry, gathered.means, gathered.num_arrived, gathered.num_dropped
    rest = state._replace(clients=(), memory=())  # what reads them late keeps their old rows: they would be held twice
    fit, transform, server, length, metrics, own = engine.steady(stepped)(key, cohort, carry, rest)
    round, sampler = state.round + 1, state.sampler
    clients, memory = remember(cohort, gathered, fit)
    if star.sampler.observe is not None:
        outcome = Outcome(gathered.arrived, gathered.losses)
        sampler = engine.steady(star.sampler.observe)(sampler, cohort, outcome)
    aggregator = tree.where(fit, own, state.aggregator)
    new = FederatedState(round, sampler, clients, memory, transform, server, aggregator)
    info = traffic(cohort, gathered.up, gathered.down, gathered.by_invited)
    info |= unusable(star, cohort, gathered.dropped, gathered.num_dropped)
    info |= engine.steady(spending_metrics)(cohort)
    info |= {
        "clients_invited": info["downlink_bytes"].number,
        "clients_reported": gathered.num_arrived,
        "skipped_rounds": (~fit).astype(jnp.int32),
        "update_norm": length,
    }
    counts = {name: Count(jnp.ones((), jnp.int32), two_words(x)) for name, x in gathered.counts.items()}
    return new, _info(info, sampler=cohort.metrics, **metrics, counts=counts)


def _info(own: dict, **parts: dict) -> dict:
    """The round's own numbers together with the metrics of its parts, which must not use the same names."""
    metrics = tree.joined_metrics(parts)
    for name in ("round", "epsilon", *own):
        if name in metrics:
            validate.fail("metrics", "names that no other part uses", name, "Rename it in the loss or the part.")
    return metrics | own


def observe(algorithm: Algorithm, key: Array, state: PyTree, population: Population) -> Observed:
    """What the server saw in the round that `algorithm.step(key, state, population)` makes, by replaying it.

    Args:
      key: of that round; `run` gives round t the key fold_in(key, t), so replay with that one.
      state: before the round.

    Returns: `Observed`: the broadcast, the messages as they arrived [m, ...], their weights, and the clients' ids.
    Under `secure_sum` they are masked; a plain `modular_sum` only states how integers are added, so they are shown.

    Raises: ValueError for an algorithm that has no `observe` of its own.

    Guarantees: the mean of the messages is the round's update
    (tests/round/test_round.py::test_observe_is_the_round); Mime's two messages are both seen
    (::test_mime_is_observed_in_both_passes).
    """
    if algorithm.observe is None:
        validate.fail(
            "algorithm", "one that can replay its rounds", None, "Give it `observe`, or build it from a Star."
        )
    return algorithm.observe(key, state, population)
