"""Edges that gossip under a cloud: each edge trains a model of its own, and mixes it with those of its neighbours."""

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
from fedjax_sim.round.costs import ROUND_METRICS, unusable
from fedjax_sim.round.counts import words_by_name
from fedjax_sim.round.round import aggregate, collect, initial_state, invite
from fedjax_sim.types import Algorithm, Array, Count, Execution, Mean, Metric, ParamsKind, PyTree, Star
from fedjax_sim.validate import Checked, FromData

MOST_EDGES = 4096  # the compiled program holds the whole mixing matrix as a constant
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
    mesh: Annotated[Mesh | Literal["all"] | None, FromData("mesh"), Checked(engine.check_mesh)] = "all",
) -> Algorithm:
    """Makes edges train with their own clients and mix their models over a graph, while a cloud averages them at times.

    Let y_g be the model of edge g after its kappa rounds from x_g, and n_g the sum of the weights that its clients
    reported. A round is x_g <- sum_h W_gh y_h. In every `cloud_every`-th round the cloud then sets
    x_g <- sum_h n_h x_h / sum_h n_h.

    Args:
      edge: the parts inside of each edge, as for `as_client_update`. The clients of an edge are one group of the
        population.
      mixing: W [G, G], numbers in [0, 1] whose rows and columns sum to 1. Edge h sends its model to edge g where
        W_gh > 0. Without a cloud, W must connect all edges.
      edge_rounds: kappa, the rounds inside of an edge between two mixing steps.
      cloud_every: rounds between two averages of the cloud; None: there is no cloud.
      nonfinite, mesh: as for `federated`; devices share out edges.

    Returns: an Algorithm. `params` is the plain mean of the edges' models, which are its clients' states. Its info
    holds `gossip_bytes`, `consensus_distance`, `uplink_bytes` and `downlink_bytes` of the cloud, and the edges' counts.
    An edge without a usable message mixes the model that it has. If a model is not finite afterwards, the round is
    skipped. The algorithm states no parts, so no epsilon is stated.

    Raises: ValueError for a matrix that is not as above, and the errors of `as_client_update`.

    Guarantees: the models are those of NumPy on a ring
    (tests/algorithms/hierarchy/test_gossip_under_cloud.py::test_a_ring_under_a_cloud); a cloud in each round is
    HierFAVG, and a matrix of 1/G its form with equal weights (::test_special_cases); a round that overflows changes
    nothing, and is counted (::test_a_round_that_overflows).

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
        is_link = receivers != senders
        check_connected("mixing", from_edges(size, np.stack([senders, receivers], 1)[is_link], directed=True))
    else:
        validate.integer("cloud_every", cloud_every)
    num_links = int(np.count_nonzero(matrix) - np.count_nonzero(np.diag(matrix)))
    columns = matrix.T.astype(np.float32)
    inside = as_client_update(edge, edge_rounds)

    def apply(key, broadcast, own_model, group):
        # An edge starts from its own model, and its state stays: the new models are written after the mixing.
        report, _ = inside.apply(key, own_model, (), group)
        return report, own_model

    def by_edge(key, updates, weights, ids):
        # Rows without a message are zero, whatever their id: added anywhere they change nothing.
        return jax.tree.map(lambda x: jnp.zeros_like(x).at[ids].add(x), (updates, weights))

    nodes = inside._replace(init=lambda params, group: params, apply=apply)
    rule = aggregation.gather(by_edge)
    execution = Execution(mesh=mesh, nonfinite=nonfinite)
    star = Star(
        sampler=sampling.full(size),
        client=nodes,
        aggregator=rule,
        server=server.replacement(),
        transform=transform.identity(),
        execution=execution,
    )

    def mixed(before: PyTree, sent: tuple[PyTree, Array], number: Array) -> tuple[PyTree, Array, Array, Array]:
        """The models after a round, whether they are finite, whether the cloud averaged, the consensus distance."""
        updates, weights = sent
        trained_models = jax.tree.map(lambda x, u: x + u.astype(x.dtype), before, updates)
        models = _combined(trained_models, columns)
        total_weight = weights.sum()
        cloud_averages = (total_weight > 0) & (number % (cloud_every or 1) == 0) & (cloud_every is not None)
        shares = (weights / jnp.where(total_weight > 0, total_weight, 1))[:, None]
        average = _combined(models, jnp.broadcast_to(shares, (size, size)))
        models = tree.where(cloud_averages, average, models)
        is_finite = engine.all_finite(models)
        models = tree.where(is_finite, models, before)
        differences = tree.subtract(models, jax.tree.map(lambda x: jnp.broadcast_to(x.mean(0), x.shape), models))
        distance = optax.tree.norm(tree.widened(differences)) / np.float32(np.sqrt(size))
        return models, is_finite, cloud_averages, distance

    def step(key, state, population):
        cohort, _ = invite(star, key, state)
        gathered = collect(star, key, cohort, state, population)
        aggregated = aggregate(star, key, cohort, gathered, state)
        models, memory = engine.take(state.clients, jnp.arange(size, dtype=jnp.int32))
        models, is_finite, cloud_averages, distance = engine.reproducible(mixed)(
            models, aggregated.update, state.round + 1
        )
        edge_counts = {name: Count(jnp.ones((), jnp.int32), x) for name, x in words_by_name(gathered.counts).items()}
        up_bytes, down_bytes = (-(-wire.bits // 8) for wire in (gathered.up, gathered.down))
        uplink, downlink = (Count.of(jnp.where(cloud_averages, size, 0), x) for x in (up_bytes, down_bytes))
        info = engine.reproducible(_values)(aggregated.means)
        info |= {"skipped_rounds": (~is_finite).astype(jnp.int32)}
        info |= {"clients_reported": gathered.num_arrived, "uplink_bytes": uplink, "downlink_bytes": downlink}
        info |= {"gossip_bytes": Count.of(jnp.int32(num_links), up_bytes), "consensus_distance": distance}
        info |= edge_counts | unusable(star, cohort, gathered.dropped, gathered.num_dropped)
        clients = engine.put(memory, cohort.ids, models, jnp.ones(size, bool))
        return state._replace(round=state.round + 1, clients=clients), info

    def params(state):
        return _plain_mean(engine.take(state.clients, jnp.arange(size, dtype=jnp.int32))[0])

    metrics = (*ROUND_METRICS, *inside.facts.metrics, *METRICS)
    # A mean of parts or of starts is one, and no model.
    kind = ParamsKind.MEAN if edge.params_kind is ParamsKind.MODEL else edge.params_kind
    return Algorithm(lambda key, *start: initial_state(star, *start), step, params, metrics=metrics, params_kind=kind)


def _values(means: dict[str, Mean]) -> dict[str, Array]:
    """Divides the total of each metric by its weight."""
    return {name: mean.total / mean.weight for name, mean in means.items()}


def _combined(models: PyTree, columns: ArrayLike) -> PyTree:
    """Combines models linearly: the result for each g is sum_h columns[h, g] x_h.

    Args:
      models: x, leaves [G, ...].
      columns: [G, G].
    """

    # A product of matrices may be split in another way on other devices. Here models are added one after the other, in
    # the same order everywhere.
    def add(total, row):
        model, column = row
        return jax.tree.map(lambda t, x: t + jnp.tensordot(column, x.astype(t.dtype), 0), total, model), None

    start = jax.tree.map(lambda x: jnp.zeros(x.shape, tree.at_least_float32(x.dtype)), models)
    total, _ = jax.lax.scan(add, start, (models, jnp.asarray(columns)))
    return jax.tree.map(lambda t, x: t.astype(x.dtype), total, models)


@engine.reproducible
def _plain_mean(models: PyTree) -> PyTree:
    """The mean of the edges' models, all with the same weight."""
    return jax.tree.map(lambda x: x.mean(0), models)
