"""CFL (clustered federated learning) splits clusters of clients whose updates contradict each other."""

from __future__ import annotations

from typing import Annotated, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from fedjax_sim import aggregation, client, tree, validate
from fedjax_sim.client.local_sgd import local_sgd
from fedjax_sim.round.bases import Bases, starting_from
from fedjax_sim.round.compatibility import check_everyone
from fedjax_sim.round.costs import metrics_of
from fedjax_sim.round.options import ExecutionOptions
from fedjax_sim.round.round import close, collect, invite
from fedjax_sim.round.state import initial_state
from fedjax_sim.transform import identity
from fedjax_sim.types import (
    Algorithm,
    Array,
    Evaluated,
    Execution,
    Metric,
    ParamsKind,
    PyTree,
    Round,
    Sampler,
    ServerUpdate,
    Star,
)
from fedjax_sim.validate import Integer, LossFn, Positive, named_arguments


class CFLOptions(client.LocalOptions, ExecutionOptions, total=False):
    """The options of `client.work`, and how a round is computed."""


class Clusters(NamedTuple):
    """The server's clusters, which are the state of its aggregator."""

    members: Array  # [N] int32, the cluster of each client
    # [] int32, how many clusters there are. Checkpoints have it under this name, which hides `tuple.count`.
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]


@named_arguments
def clustered_by_updates(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    max_clusters: Annotated[int, Integer(1, 1000)] = 8,
    mean_norm: Positive = 0.4,
    client_norm: Positive = 1.6,
    **options: Unpack[CFLOptions],
) -> Algorithm:
    """Makes CFL: a cluster is split in two when it is near a stationary point from which its clients pull apart.

    At first all clients are one cluster, with one model. In each round every client trains the model of its cluster. A
    cluster c is split if |mean update of c| < mean_norm and some |update of a client of c| > client_norm. Its two parts
    are those between which the largest cosine similarity of two clients' updates is smallest, which is the cut of
    single-linkage clustering. Then each cluster's model moves by the mean update of its clients.

    The number of clusters is bounded, so that shapes are static. With `max_clusters` clusters no more are split. The
    paper's further test, whether the similarity between the parts is small enough, is left out.

    Args:
      loss_fn, optimizer: as in `fedavg`.
      sampler: one that draws all clients in every round, such as `sampling.full`. A client that does not report, or has
        no rows, stays in its cluster, and in its first part where that is split.
      max_clusters: the most clusters.
      mean_norm: eps_1 in the paper, of a mean by the clients' weights.
      client_norm: eps_2 in the paper, at least eps_1.
      num_steps, num_epochs, batch_size, shuffle, weighting: as in `client.work`. Means are by examples, as in the
        paper.
      nonfinite, plan, mesh: as in `federated`. There is no transform, downlink or other aggregator: the server compares
        all messages as they are, and so sees each of them. No epsilon covers that.

    Returns: an Algorithm. `params` is the model of the first cluster, and a client's own model is that of its cluster.
    The info has `clusters`, how many there are. `state.aggregator.members` has the cluster of each client.

    Raises: ValueError for a sampler that draws fewer clients, and for client_norm < mean_norm.

    Guarantees: two groups of clients with opposite optima are separated, and clients with the same rows never are
    (tests/algorithms/personal/test_clustered_by_updates.py::test_opposite_groups_are_separated,
    ::test_equal_clients_stay_together); the parts are the best of all bipartitions, by trial of all
    (::test_parts_are_the_best); models match NumPy (::test_matches_numpy); one cluster is FedAvg up to rounding
    (::test_one_cluster_is_fedavg); each client is counted one model in both directions (::test_bytes_are_of_one_model).

    References: Sattler, Muller, Samek 2020 (CFL), algorithms 1 and 2, equations 28 and 29.
    """
    check_everyone(sampler, "A cluster is split by the updates of all of its clients.")
    is_known = not any(isinstance(x, Tracer) for x in (mean_norm, client_norm))
    if is_known and client_norm < mean_norm:
        hint = "Else clients that are all alike would be split."
        validate.fail("client_norm", f"at least mean_norm, {mean_norm}", client_norm, hint)
    work, execution = client.local_work(options)
    population_size = sampler.design.population_size

    def start(update_spec: PyTree) -> Clusters:
        return Clusters(jnp.zeros(population_size, jnp.int32), jnp.int32(1))

    def rule(key, updates, weights, ids, round: Round):
        clusters = round.state
        flat = jnp.concatenate([x.reshape(len(ids), -1).astype(jnp.float32) for x in jax.tree.leaves(updates)], 1)
        norms = jnp.sqrt(jnp.square(flat).sum(1))
        directions = flat * (1 / jnp.where(norms > 0, norms, 1))[:, None]
        similarities = directions @ directions.T
        arrived = weights > 0
        # Rows without a message belong to no cluster.
        before = jnp.where(arrived, clusters.members[jnp.maximum(ids, 0)], -1)

        def split(cluster, carry):
            row_clusters, parents, count = carry
            is_member = before == cluster
            mean = _means(jnp.where(is_member, weights, 0)[None], flat)[0]
            pulls_apart = jnp.where(is_member, norms, 0).max() > client_norm
            is_split = (jnp.sqrt(jnp.square(mean).sum()) < mean_norm) & pulls_apart & (count < max_clusters)
            is_new = is_split & second_part(similarities, is_member)
            is_split = is_new.any()
            place = jnp.where(is_split, count, max_clusters)  # outside: nothing is written
            parents = parents.at[place].set(cluster, mode="drop")
            return jnp.where(is_new, count, row_clusters), parents, count + is_split.astype(jnp.int32)

        carry = before, jnp.arange(max_clusters, dtype=jnp.int32), clusters.count
        # A part that was split off in this round has no rows in `before`, and is not split again.
        row_clusters, parents, count = jax.lax.fori_loop(0, max_clusters, split, carry)
        row_weights = jnp.where(row_clusters[None] == jnp.arange(max_clusters)[:, None], weights[None], 0)
        means = jax.tree.map(lambda x: _means(row_weights.astype(x.dtype), x), updates)
        written = jnp.where(arrived, ids, population_size)
        members = clusters.members.at[written].set(row_clusters, mode="drop")
        return {"updates": means, "parents": parents}, Clusters(members, count)

    local = local_sgd(loss_fn, optimizer, work)
    aggregator = aggregation.gather(rule, start=start)
    star = Star(
        sampler=sampler,
        client=local,
        aggregator=aggregator,
        server=_models(max_clusters),
        transform=identity(),
        execution=Execution(**execution),
    )

    def init(key, params, population):
        return initial_state(star, params, population)

    def step(key, state, population):
        cohort, sampler_state = invite(star, key, state)
        bases = Bases(state.server, state.aggregator.members[cohort.ids])
        gathered = collect(star, key, cohort, state, population, extension=starting_from(bases))
        state, info = close(star, key, cohort, gathered, state._replace(sampler=sampler_state))
        return state, info | {"clusters": state.aggregator.count}

    def personal(state, ids):
        return tree.take_rows(state.server, state.aggregator.members[ids])

    metrics = (*metrics_of(star), Metric("clusters", "clusters of clients", "count", "last"))
    params = star.server.params
    return Algorithm(
        init,
        step,
        lambda state: params(state.server),
        star,
        evaluated=Evaluated(personal, models=lambda state: (state.server, state.aggregator.count)),
        metrics=metrics,
        params_kind=star.params_kind,
    )


def _means(weights: Array, rows: Array) -> Array:
    """Returns the weighted means of rows [m, ...] for weights [k, m], leaves [k, ...]; 0 without weight."""
    totals = weights.sum(1)
    shares = weights * jnp.where(totals > 0, 1 / jnp.where(totals > 0, totals, 1), 0)[:, None]
    return (shares @ rows.reshape(rows.shape[0], -1)).reshape(-1, *rows.shape[1:])


def second_part(similarities: Array, is_member: Array) -> Array:
    """Splits members in two so that the largest similarity between a member of each part is smallest.

    The tree that joins all members by their largest similarities is grown from one member (Prim). The members that
    joined before its weakest link are one part. When that link was taken, none of the others was more similar to them.
    And no bipartition does better: some link of the tree crosses it, and none is weaker.

    Args:
      similarities: [m, m].
      is_member: [m] bool.

    Returns: [m] bool, one of the parts; nobody if there are fewer than two members.
    """
    num_rows = is_member.shape[0]
    none = jnp.finfo(similarities.dtype).max

    def join(step, carry):
        joined, nearest, order, links = carry
        candidates = is_member & ~joined
        chosen = jnp.argmax(jnp.where(candidates, nearest, -none))
        is_chosen = candidates & (jnp.arange(num_rows) == chosen)
        links = links.at[step].set(jnp.where(candidates.any(), nearest[chosen], none))
        nearest = jnp.where(is_chosen.any(), jnp.maximum(nearest, similarities[chosen]), nearest)
        return joined | is_chosen, nearest, jnp.where(is_chosen, step, order), links

    first = jnp.argmax(is_member)
    joined = is_member & (jnp.arange(num_rows) == first)
    carry = joined, similarities[first], jnp.zeros(num_rows, jnp.int32), jnp.full(num_rows, none)
    _, _, order, links = jax.lax.fori_loop(1, num_rows, join, carry)
    return is_member & (order >= jnp.argmin(links)) & (is_member.sum() > 1)


def _models(count: int) -> ServerUpdate:
    """Makes a server of models w_c, one for each cluster c, which sends a client one of them (`Bases`).

    A step is w_c <- w_{p(c)} + u_c, where u_c is the mean update of cluster c and p(c) its parent: the cluster that it
    was split from in this round, or c itself.

    Args:
      count: the most clusters. The state has leaves [count, ...]. The aggregate is {"updates": leaves [count, ...],
        "parents": [count] int32 in [0, count)}.

    Returns: a ServerUpdate whose broadcast and `params` are the model of cluster 0.
    """

    def first(models: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x[0], models)

    def apply(key, aggregate, models):
        def moved(x, update):
            return x[aggregate["parents"]] + update.astype(x.dtype)

        return jax.tree.map(moved, models, aggregate["updates"])

    def stacked(params: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.tile(x[None], (count, *(1 for _ in x.shape))), params)

    def takes(params):
        return {"updates": jax.eval_shape(stacked, params), "parents": jax.ShapeDtypeStruct((count,), jnp.int32)}

    return ServerUpdate(stacked, first, apply, first, takes=takes, params_kind=ParamsKind.ONE_OF)
