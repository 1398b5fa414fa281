"""Asynchronous gossip: nodes wake up one at a time and average with one neighbour."""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, engine, server, tree, validate
from fedjax_sim.algorithms.gossip.dpsgd import from_model, trained
from fedjax_sim.algorithms.gossip.state import NodesState
from fedjax_sim.network import Graph
from fedjax_sim.network.devices import MOST_TICKS
from fedjax_sim.network.mixing import tables_of
from fedjax_sim.network.topology import check_connected
from fedjax_sim.prng import stream
from fedjax_sim.round.costs import ROUND_METRICS, spending_metrics, unusable, work_of
from fedjax_sim.round.options import ExecutionOptions
from fedjax_sim.round.round import aggregate, collect, initial_state, invite, invite_together
from fedjax_sim.sampling.time.cut import priced_by_part
from fedjax_sim.sampling.time.round_cost import More, Price
from fedjax_sim.transform import identity
from fedjax_sim.types import (
    Algorithm,
    Array,
    Cohort,
    Count,
    Devices,
    Evaluated,
    Execution,
    Load,
    Metric,
    PyTree,
    Sampler,
    Star,
)
from fedjax_sim.validate import LossFn

__all__ = ["averaged", "first_places", "meetings", "pairwise_gossip", "price_of_meetings"]


class PairwiseOptions(client.LocalSteps, ExecutionOptions, total=False):
    """The options of `client.work` without a weight, and how a round is carried out."""


@validate.named_arguments
def pairwise_gossip(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    graph: Graph,
    **options: Unpack[PairwiseOptions],
) -> Algorithm:
    """Nodes wake up in a random order; each averages with a random neighbour, and then adds its local steps.

    x_i, x_j <- (x_i + x_j) / 2, then x_i <- x_i + u_i, with u_i from the model that node i had when the round began: it
    worked while others averaged. A round is m such events one after the other, at a cost of O(m) whatever N.

    Args:
      sampler: who wakes up in a round, without replacement; `sampling.uniform(N, m)`. With m = 1 this is the algorithm
        with Poisson clocks. All nodes wake up equally often, or those who do it more would count more.
      graph: undirected, and connected unless it says otherwise (`Graph.in_parts`); a node without neighbours trains
        alone.
      optimizer, num_steps, num_epochs, batch_size, shuffle, nonfinite, plan, mesh: as in `dpsgd`.

    Returns: an Algorithm as of `dpsgd`; without `consensus_distance`, which would cost O(N). `edges` counts meetings,
    in each of which two models are sent.

    Under a sampler with a clock a node's round is its local work and, for each of its meetings, a model each way; a
    node that only others meet pays for those. A meeting is over when both of its nodes have sent and received all, so a
    round lasts as long as its busiest node. Joules are those of both nodes, and both models take a place on a radio
    channel. Devices that are not always there are refused, for a partner is met whenever it is drawn.

    Guarantees: NumPy's models, meeting by meeting (tests/algorithms/gossip/test_pairwise.py::test_numpy); meetings keep
    the average (::test_meetings_keep_the_average); each neighbour is as likely (::test_partners); nodes of unequal size
    count alike (::test_unequal_nodes).

    References: Boyd, Ghosh, Prabhakar and Shah 2006, section 2 (asynchronous gossip); Lian et al. 2018 (AD-PSGD),
    algorithm 1.
    """
    validate.part("sampler", sampler, Sampler)
    validate.part("graph", graph, Graph)
    if graph.directed:
        validate.fail("graph", "an undirected graph", "a directed one", "Two nodes take the same mean.")
    check_connected("graph", graph)
    if not getattr(sampler.design, "equal_chances", False):
        hint = "Nodes that wake up more often count more in what all agree on: take sampling.uniform."
        validate.fail("sampler", "one that wakes all nodes equally often", sampler.design.scheme, hint)
    _check_presence(sampler)
    local, execution = trained(loss_fn, optimizer, options)
    parts = (aggregation.total(), server.replacement(), identity())
    star = Star(sampler, from_model(local), *parts, Execution(**execution))
    host = {"neighbours": tables_of(graph, 1.0)["neighbours"][0], "degrees": graph.in_degrees.astype("int32")}
    size = graph.population_size

    def init(key, params, population):
        state = initial_state(star, params, population)
        if sampler.tell is not None:  # the star's message stands for the model that a meeting moves each way
            model = tree.num_bytes(tree.spec(params))
            work = work_of(star, params, population)._replace(bytes_up=model, bytes_down=model)
            state = state._replace(sampler=jax.tree.map(jnp.asarray, sampler.tell(sampler.init(), work)))
        return NodesState(state, jax.tree.map(jnp.asarray, host), ())

    def invited(key, state):
        if sampler.devices is None:
            return invite(star, key, state.star)

        def priced(drawn_with, cohort, price):
            partners, _ = meetings(key, cohort.ids, state.tables)
            return price_of_meetings(sampler.devices, drawn_with, cohort, partners, price)

        return invite_together(star, key, state.star, priced)

    def step(key, state, population):
        inner = state.star
        cohort, woken = invited(key, state)
        gathered = collect(star, key, cohort, inner, population)
        found = aggregate(star, key, cohort, gathered, inner)
        memory, after = gathered.clients
        partners, order = engine.steady(meetings)(key, cohort.ids, state.tables)
        nodes = jnp.concatenate([cohort.ids, partners])
        rows, memory = engine.take(memory, nodes)

        def met(nodes, rows, after, arrived, reported, means):
            before = jax.tree.map(lambda x: x[: arrived.shape[0]], rows)
            moved = tree.where(arrived, tree.subtract(after, before), tree.zeros_like(before))
            first = first_places(nodes)
            new = averaged(rows, moved, first, order, reported)
            fit = tree.all_finite(new)
            pooled = {name: mean.total / mean.weight for name, mean in means.items()}
            return tree.where(fit, new, rows), first == jnp.arange(first.shape[0]), fit, pooled

        given = nodes, rows, after, gathered.arrived, cohort.reported, found.means
        rows, own, fit, pooled = engine.steady(met)(*given)
        clients = engine.put(memory, nodes, rows, own)
        meets = partners != cohort.ids
        info = {"clients_invited": cohort.invited.sum(dtype=jnp.int32), "clients_reported": gathered.num_arrived}
        info["skipped_rounds"] = (~fit).astype(jnp.int32)
        info["edges"] = (cohort.reported & meets).sum(dtype=jnp.int32)
        info |= _bytes(cohort, meets, tree.num_bytes(tree.spec(inner.server))) | cohort.metrics | pooled
        info |= unusable(star, cohort, gathered.dropped, gathered.num_dropped)
        info |= engine.steady(spending_metrics)(cohort)
        inner = inner._replace(round=inner.round + 1, sampler=woken, clients=clients)
        return state._replace(star=inner), info

    def personal(state, ids):
        return engine.take(state.star.clients, ids)[0]["model"]

    def params(state):
        mean = engine.steady(lambda models: jax.tree.map(lambda x: x.mean(0), models))
        return mean(personal(state, jnp.arange(size, dtype=jnp.int32)))

    metrics = (*ROUND_METRICS, Metric("edges", "meetings of two nodes", "count"), *sampler.metrics)
    return Algorithm(init, step, params, evaluated=Evaluated(personal=personal), metrics=metrics)


def _check_presence(sampler: Sampler) -> None:
    if sampler.devices is not None and sampler.devices.availability is not None:
        hint = "A partner is met whether or not it is there. For nodes that are away: network.with_node_failures."
        validate.fail("sampler", "a clock of devices that are always there", "devices with an availability", hint)


def _bytes(cohort: Cohort, meets: Array, num_bytes: int) -> dict[str, Count]:
    """Both models of each meeting, those that were sent too late included."""
    sent = cohort.reported if cohort.timing.sent is None else cohort.timing.sent
    number = 2 * (sent & meets).sum(dtype=jnp.int32)
    if cohort.timing.sent is None:
        return {"uplink_bytes": Count.of(number, num_bytes)}
    late = 2 * (sent & ~cohort.reported & meets).sum(dtype=jnp.int32)
    return {"uplink_bytes": Count.of(number, num_bytes), "wasted_bytes": Count.of(late, num_bytes)}


def price_of_meetings(devices: Devices, key: Array, cohort: Cohort, partners: Array, price: Price) -> Price:
    """The price of a cohort whose nodes send a model to, and receive one from, each node that they meet.

    Both go over the links after the local work: who leaves, or has no place on the channel, before has paid for
    neither.

    Args:
      key: that the cohort was drawn with.
      partners: [m] int32, of `meetings`.
      price: of one meeting and the local work.
    """
    size = partners.shape[0]
    meets = cohort.invited & (partners != cohort.ids)
    nodes, first = jnp.concatenate([cohort.ids, partners]), first_places(jnp.concatenate([cohort.ids, partners]))
    times = jnp.zeros_like(nodes).at[first].add(jnp.tile(meets, 2).astype(jnp.int32))[first]  # meetings of each node
    model = Load(*(jnp.broadcast_to(x, nodes.shape) for x in (jnp.float32(0), price.bytes_down, price.bytes_up)))
    (down, _, up), (received, _, sent) = priced_by_part(devices, key, nodes, (model,))

    def together(ticks, times):
        return jnp.where(ticks > MOST_TICKS // jnp.maximum(times, 1), MOST_TICKS, ticks * times)

    def at_both_ends(joules):
        return jnp.where(meets, joules[:size] + joules[size:], 0)

    # The price has one download before the work and one message after it, also where a node meets nobody.
    exchanged = jnp.minimum(together(down, times) + together(up, times), MOST_TICKS)[:size]
    ticks = -down[:size], jnp.zeros_like(partners), exchanged - up[:size]
    radio = at_both_ends(received) + at_both_ends(sent)
    joules = -received[:size], jnp.zeros(size, jnp.float32), radio - sent[:size]
    least = (together(down, times) + together(up, times))[size:]
    airtime = jnp.where(meets, jnp.minimum(up[:size] + up[size:], MOST_TICKS), 0)
    return price._replace(more=More(ticks, joules, least, price.bytes_up, airtime, meets))


def meetings(key: Array, ids: Array, tables: dict[str, Array]) -> tuple[Array, Array]:
    """Whom each node meets, [m] int32 (itself without neighbours), and the order of slots in which they wake up."""
    draws = engine.client_keys(stream(key, "meetings"), ids)
    degrees = tables["degrees"][ids]
    luck = (draws[:, 0] >> 8).astype(jnp.float32) * 2.0**-24
    place = jnp.minimum((luck * degrees.astype(jnp.float32)).astype(jnp.int32), degrees - 1)
    chosen = jnp.take_along_axis(tables["neighbours"][ids], jnp.maximum(place, 0)[:, None], 1)[:, 0]
    return jnp.where(degrees > 0, chosen, ids), jax.lax.sort((draws[:, 1], ids, jnp.arange(ids.shape[0])), num_keys=2)[
        2
    ]


def first_places(nodes: Array) -> Array:
    """[n] int32: for each entry the first place at which the same node stands.

    >>> first_places(jnp.array([4, 2, 4, 2, 0])).tolist()
    [0, 1, 0, 1, 4]
    """
    order = jnp.argsort(nodes, stable=True)
    ordered, places = nodes[order], jnp.arange(nodes.shape[0])
    starts = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    return jnp.zeros_like(order).at[order].set(order[jax.lax.cummax(jnp.where(starts, places, 0))])


def averaged(rows: PyTree, moved: PyTree, first: Array, order: Array, reported: Array) -> PyTree:
    """The rows after all meetings, one after the other; [2m, ...], each node's at its first place."""
    number = order.shape[0]

    def meet(turn, rows):
        slot = order[turn]
        one, other, there = first[slot], first[number + slot], reported[slot]

        def leaf(x, u):
            half = jnp.where(there, (x[other] - x[one]) / 2, 0).astype(x.dtype)
            x = x.at[other].set(x[other] - half)
            return x.at[one].add(jnp.where(there, half + u[slot], 0).astype(x.dtype))

        return jax.tree.map(leaf, rows, moved)

    return jax.lax.fori_loop(0, number, meet, rows)
