"""Asynchronous gossip: nodes wake up one at a time and average with one neighbour."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from fedjax_sim import aggregation, engine, server, tree, validate
from fedjax_sim.algorithms.costs import ROUND_METRICS, unusable
from fedjax_sim.algorithms.decentralized import from_model, local_work
from fedjax_sim.algorithms.nodes import NodesState
from fedjax_sim.algorithms.round import aggregate, collect, initial_state, invite
from fedjax_sim.network import Graph
from fedjax_sim.network.mixing import tables_of
from fedjax_sim.prng import stream
from fedjax_sim.transform import identity
from fedjax_sim.types import Algorithm, Array, Count, Metric, PyTree, Sampler, Star

__all__ = ["averaged", "first_places", "meetings", "pairwise_gossip"]


@validate.named_arguments
def pairwise_gossip(
    loss_fn: Callable,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    graph: Graph,
    *,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None = None,
    shuffle: bool = True,
    nonfinite: str = "drop",
    plan: engine.Plan | None = None,
    mesh: Mesh | str | None = "all",
) -> Algorithm:
    """Nodes wake up in a random order; each averages with a random neighbour, and then adds its local steps.

    x_i, x_j <- (x_i + x_j) / 2, then x_i <- x_i + u_i, with u_i from the model that node i had when the round began: it
    worked while others averaged. A round is m such events one after the other, at a cost of O(m) whatever N.

    Args:
      sampler: who wakes up in a round, without replacement; `sampling.uniform(N, m)`. With m = 1 this is the algorithm
        with Poisson clocks. All nodes wake up equally often, or those who do it more would count more.
      graph: undirected. A node without neighbours trains alone.
      optimizer, num_steps, num_epochs, batch_size, shuffle, nonfinite, plan, mesh: as in `dpsgd`.

    Returns: an Algorithm as of `dpsgd`; without `consensus_distance`, which would cost O(N). `edges` counts meetings,
    in each of which two models are sent.

    Guarantees: NumPy's models, meeting by meeting (tests/algorithms/test_pairwise.py::test_numpy); meetings keep the
    average (::test_meetings_keep_the_average); each neighbour is as likely (::test_partners); nodes of unequal size
    count alike (::test_unequal_nodes).

    References: Boyd, Ghosh, Prabhakar and Shah 2006, section 2 (asynchronous gossip); Lian et al. 2018 (AD-PSGD),
    algorithm 1.
    """
    validate.part("sampler", sampler, Sampler)
    validate.part("graph", graph, Graph)
    validate.one_of("nonfinite", nonfinite, ("drop", "error"))
    if graph.directed:
        validate.fail("graph", "an undirected graph", "a directed one", "Two nodes take the same mean.")
    if not getattr(sampler.design, "equal_chances", False):
        hint = "Nodes that wake up more often count more in what all agree on: take sampling.uniform."
        validate.fail("sampler", "one that wakes all nodes equally often", sampler.design.scheme, hint)
    local = local_work(
        loss_fn, optimizer, num_steps=num_steps, num_epochs=num_epochs, batch_size=batch_size, shuffle=shuffle
    )
    parts = (aggregation.total(), server.replacement(), identity())
    star = Star(sampler, from_model(local), *parts, plan, mesh, nonfinite)
    host = {"neighbours": tables_of(graph, 1.0)["neighbours"][0], "degrees": graph.in_degrees.astype("int32")}
    size = graph.population_size

    def init(key, params, population):
        return NodesState(initial_state(star, params, population), jax.tree.map(jnp.asarray, host), ())

    def step(key, state, population):
        inner = state.star
        cohort, woken = invite(star, key, inner)
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
        meeting = (cohort.reported & (partners != cohort.ids)).sum(dtype=jnp.int32)
        num_bytes = tree.num_bytes(tree.spec(inner.server))
        info = {"clients_invited": cohort.invited.sum(dtype=jnp.int32), "clients_reported": gathered.num_arrived}
        info["skipped_rounds"] = (~fit).astype(jnp.int32)
        info |= {"edges": meeting, "uplink_bytes": Count.of(2 * meeting, num_bytes)} | cohort.metrics | pooled
        info |= unusable(star, cohort, gathered.dropped, gathered.num_dropped)
        inner = inner._replace(round=inner.round + 1, sampler=woken, clients=clients)
        return state._replace(star=inner), info

    def personal(state, ids):
        return engine.take(state.star.clients, ids)[0]["model"]

    def params(state):
        mean = engine.steady(lambda models: jax.tree.map(lambda x: x.mean(0), models))
        return mean(personal(state, jnp.arange(size, dtype=jnp.int32)))

    metrics = (*ROUND_METRICS, Metric("edges", "meetings of two nodes", "count"), *sampler.metrics)
    return Algorithm(init, step, params, personal=personal, metrics=metrics)


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
