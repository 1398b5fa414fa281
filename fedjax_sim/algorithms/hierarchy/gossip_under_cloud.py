"""Edges that gossip under a cloud: each trains a model of its own, and mixes it with its neighbours'."""

from __future__ import annotations

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from fedjax_sim import aggregation, engine, sampling, server, transform, tree, validate
from fedjax_sim.algorithms.hierarchy.hierfavg import as_client_update
from fedjax_sim.network.topology import check_connected, from_edges
from fedjax_sim.round.costs import ROUND_METRICS, two_words, unusable
from fedjax_sim.round.round import aggregate, collect, initial_state, invite
from fedjax_sim.types import Algorithm, Array, Count, Execution, Metric, PyTree, Star
from fedjax_sim.validate import FromData

__all__ = ["hierarchical_gossip"]

MOST_EDGES = 4096  # whose mixing matrix a compiled program holds
METRICS = (
    Metric("gossip_bytes", "sent from edge to edge", "bytes"),
    Metric("consensus_distance", "root mean square distance of an edge's model from their mean", pooled="last"),
)


@validate.named_arguments
def hierarchical_gossip(
    edge: Star,
    mixing: ArrayLike,
    *,
    edge_rounds: int = 1,
    cloud_every: int | None = None,
    nonfinite: Annotated[Literal["drop", "error"], FromData("nonfinite")] = "drop",
    mesh: Annotated[Mesh | str | None, FromData("mesh")] = "all",
) -> Algorithm:
    """Edges make rounds of their own, mix their models over a graph, and now and then a cloud averages them.

    With y_g the model of edge g after its kappa rounds from x_g, and n_g the weights that its clients reported, a round
    is x_g <- sum_h W_gh y_h; in every `cloud_every`-th one then x_g <- sum_h n_h x_h / sum_h n_h.

    Args:
      edge: the parts inside of each edge, as for `as_client_update`; its clients are the groups of the population.
      mixing: W [G, G], numbers in [0, 1] whose rows and columns sum to 1; W_gh > 0 lets h send its model to g. Without
        a cloud, it connects all edges.
      edge_rounds: kappa. cloud_every: rounds between two averages of the cloud; None: there is no cloud.
      nonfinite, mesh: as for `federated`; devices share out edges.

    Returns: an Algorithm. `params` is the plain mean of the edges' models, which are its clients' states. Info holds
    `gossip_bytes`, `consensus_distance`, `uplink_bytes` and `downlink_bytes` of the cloud, and the edges' counts. An
    edge without a usable message mixes the model that it has; where a model is not finite afterwards the round is
    skipped. Its parts are unknown, so no epsilon is stated.

    Raises: ValueError for another matrix, and what `as_client_update` raises.

    Guarantees: NumPy's on a ring (tests/algorithms/hierarchy/test_gossip_under_cloud.py::test_a_ring_under_a_cloud); a
    cloud in each round is HierFAVG, and a matrix of 1/G its equally weighed form (::test_special_cases); a round that
    overflows changes nothing, and is counted (::test_a_round_that_overflows).

    References: Castiglia, Das and Patterson 2021 (multi-level local SGD), algorithm 1.
    """
    matrix = np.asarray(mixing, np.float64)
    size = len(matrix) if matrix.ndim == 2 else 0
    validate.integer("mixing rows", size, 1, MOST_EDGES)
    if matrix.shape != (size, size) or not ((matrix >= 0).all() and np.allclose(matrix.sum(1), 1, rtol=0, atol=1e-5)):
        hint = "Divide each row by its sum."
        validate.fail("mixing", "a square matrix of numbers >= 0 whose rows sum to 1", matrix.tolist(), hint)
    if not np.allclose(matrix.sum(0), 1, rtol=0, atol=1e-5):
        hint = "Edges whose columns sum to more would count more than their share. Take Metropolis weights."
        validate.fail("mixing", "columns that sum to 1", matrix.sum(0).tolist(), hint)
    if cloud_every is None:
        receivers, senders = np.nonzero(matrix)
        others = receivers != senders
        check_connected("mixing", from_edges(size, np.stack([senders, receivers], 1)[others], directed=True))
    else:
        validate.integer("cloud_every", cloud_every)
    links = int(np.count_nonzero(matrix) - np.count_nonzero(np.diag(matrix)))
    columns = matrix.T.astype(np.float32)
    inside = as_client_update(edge, edge_rounds)

    def apply(key, broadcast, own, group):
        return inside.apply(key, own, (), group)[0], own

    def by_edge(key, updates, weights, ids):  # rows without a message are zero: added anywhere they change nothing
        return jax.tree.map(lambda x: jnp.zeros_like(x).at[ids].add(x), (updates, weights))

    nodes = inside._replace(init=lambda params, group: params, apply=apply)
    rule = aggregation.gather(by_edge)
    execution = Execution(mesh=mesh, nonfinite=nonfinite)
    star = Star(sampling.full(size), nodes, rule, server.replacement(), transform.identity(), execution)

    def mixed(before: PyTree, sent: tuple[PyTree, Array], number: Array) -> tuple[PyTree, Array, Array, Array]:
        updates, weights = sent
        models = _combined(jax.tree.map(lambda x, u: x + u.astype(x.dtype), before, updates), columns)
        total = weights.sum()
        clouded = (total > 0) & (number % (cloud_every or 1) == 0) & (cloud_every is not None)
        shares = (weights / jnp.where(total > 0, total, 1))[:, None]
        average = _combined(models, jnp.broadcast_to(shares, (size, size)))
        models = tree.where(clouded, average, models)
        fit = tree.all_finite(models)
        models = tree.where(fit, models, before)
        away = tree.subtract(models, jax.tree.map(lambda x: jnp.broadcast_to(x.mean(0), x.shape), models))
        return models, fit, clouded, optax.tree.norm(away) / np.float32(np.sqrt(size))

    def step(key, state, population):
        cohort, _ = invite(star, key, state)
        gathered = collect(star, key, cohort, state, population)
        found = aggregate(star, key, cohort, gathered, state)
        models, memory = engine.take(state.clients, jnp.arange(size, dtype=jnp.int32))
        models, fit, clouded, distance = engine.steady(mixed)(models, found.update, state.round + 1)
        own = {name: Count(jnp.ones((), jnp.int32), two_words(x)) for name, x in gathered.counts.items()}
        up, down = (Count.of(jnp.where(clouded, size, 0), -(-wire.bits // 8)) for wire in (gathered.up, gathered.down))
        info = {name: engine.divide(mean.total, mean.weight) for name, mean in found.means.items()}
        info |= {"skipped_rounds": (~fit).astype(jnp.int32)}
        info |= {"clients_reported": gathered.num_arrived, "uplink_bytes": up, "downlink_bytes": down}
        info |= {"gossip_bytes": Count.of(jnp.int32(links), -(-gathered.up.bits // 8)), "consensus_distance": distance}
        info |= own | unusable(star, cohort, gathered.dropped, gathered.num_dropped)
        clients = engine.put(memory, cohort.ids, models, jnp.ones(size, bool))
        return state._replace(round=state.round + 1, clients=clients), info

    def params(state):
        return _plain_mean(engine.take(state.clients, jnp.arange(size, dtype=jnp.int32))[0])

    metrics = (*ROUND_METRICS, *inside.facts.metrics, *METRICS)
    return Algorithm(lambda key, *start: initial_state(star, *start), step, params, metrics=metrics)


def _combined(models: PyTree, columns: ArrayLike) -> PyTree:
    """sum_h columns[h, g] x_h for each g: neighbour by neighbour, so that no device adds in another order.

    Args:
      models: leaves [G, ...]. columns: [G, G].
    """

    def add(total, row):
        model, column = row
        return jax.tree.map(lambda t, x: t + jnp.tensordot(column, x.astype(t.dtype), 0), total, model), None

    start = jax.tree.map(lambda x: jnp.zeros(x.shape, tree.at_least_float32(x.dtype)), models)
    total, _ = jax.lax.scan(add, start, (models, jnp.asarray(columns)))
    return jax.tree.map(lambda t, x: t.astype(x.dtype), total, models)


@engine.steady
def _plain_mean(models: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.mean(0), models)
