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
from fedjax_sim.round.costs import ROUND_METRICS, senders, spending_metrics, unusable, work_of
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
    ParamsKind,
    PyTree,
    Sampler,
    Star,
)
from fedjax_sim.validate import LossFn


class PairwiseOptions(client.LocalSteps, ExecutionOptions, total=False):
    """The options of `client.work` without `weighting`, and the execution options of `federated`."""


@validate.named_arguments
def pairwise_gossip(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    graph: Graph,
    **options: Unpack[PairwiseOptions],
) -> Algorithm:
    """Makes asynchronous gossip: nodes wake up in a random order, and each averages with a random neighbour.

    A node i that wakes up meets a neighbour j: x_i, x_j <- (x_i + x_j) / 2. Then it adds its local update:
    x_i <- x_i + u_i. The update u_i starts from the model that node i had when the round began, as if the node had
    worked while others averaged. A round is m such meetings one after the other. Its cost is O(m), whatever N is.

    Args:
      loss_fn: as in `client.local_sgd`.
      sampler: draws the nodes that wake up in a round, without replacement; `sampling.uniform(N, m)`. With m = 1 this
        is the algorithm with Poisson clocks. All nodes must wake up equally often: a node that wakes up more often
        would count more.
      graph: undirected, and connected unless it says otherwise (`Graph.in_parts`); a node without neighbours trains
        alone.
      optimizer, num_steps, num_epochs, batch_size, shuffle, nonfinite, plan, mesh: as in `dpsgd`.

    Returns: an Algorithm with the info of `dpsgd`, but without `consensus_distance`, which would cost O(N). `edges`
    counts meetings, in each of which two models are sent.

    Under a sampler with a clock a node's round is its local work and, for each of its meetings, a model each way. A
    node that did not wake up pays for the meetings in which others meet it. A meeting is over when both of its nodes
    have sent and received all their models, so a round lasts as long as its busiest node. Joules are those of both
    nodes, and both models take airtime on a radio channel. Devices that are not always there are refused, because a
    partner is met whenever it is drawn.

    Guarantees: the models are those of NumPy, meeting by meeting
    (tests/algorithms/gossip/test_pairwise.py::test_numpy); meetings keep the average
    (::test_meetings_keep_the_average); all neighbours are equally likely (::test_partners); nodes of unequal size count
    alike (::test_unequal_nodes).

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
        if sampler.tell is not None:
            # The star's own message is a placeholder: a meeting moves a model each way.
            model_bytes = tree.num_bytes(tree.spec(params))
            work = work_of(star, params, population)._replace(bytes_up=model_bytes, bytes_down=model_bytes)
            state = state._replace(sampler=jax.tree.map(jnp.asarray, sampler.tell(sampler.init(), work)))
        return NodesState(state, jax.tree.map(jnp.asarray, host), ())

    def invite_nodes(key, state):
        devices = sampler.devices
        if devices is None:
            return invite(star, key, state.star)

        def priced(sampling_key, cohort, price):
            partners, _ = meetings(key, cohort.ids, state.tables)
            return price_of_meetings(devices, sampling_key, cohort, partners, price)

        return invite_together(star, key, state.star, priced)

    def step(key, state, population):
        star_state = state.star
        cohort, sampler_state = invite_nodes(key, state)
        gathered = collect(star, key, cohort, star_state, population)
        aggregated = aggregate(star, key, cohort, gathered, star_state)
        memory, after = gathered.clients
        partners, order = engine.reproducible(meetings)(key, cohort.ids, state.tables)
        # The 2m rows are those of the nodes that wake up, then those of their partners. A node may stand in several of
        # them; the meetings use its first row, and only that row is written back.
        nodes = jnp.concatenate([cohort.ids, partners])
        rows, memory = engine.take(memory, nodes)

        def make_meetings(nodes, rows, after, arrived_and_reported, means):
            arrived, reported = arrived_and_reported
            before = jax.tree.map(lambda x: x[: arrived.shape[0]], rows)
            updates = tree.where(arrived, tree.subtract(after, before), tree.zeros_like(before))
            first = first_places(nodes)
            new_rows = averaged(rows, updates, first, order, reported)
            is_finite = engine.all_finite(new_rows)
            metrics = {name: mean.total / mean.weight for name, mean in means.items()}
            is_first = first == jnp.arange(first.shape[0])
            return tree.where(is_finite, new_rows, rows), is_first, is_finite, metrics

        rows, is_first, is_finite, metrics = engine.reproducible(make_meetings)(
            nodes, rows, after, (gathered.arrived, cohort.reported), aggregated.means
        )
        clients = engine.put(memory, nodes, rows, is_first)
        meets = partners != cohort.ids  # a node without neighbours is its own partner
        info = {"clients_invited": cohort.invited.sum(dtype=jnp.int32), "clients_reported": gathered.num_arrived}
        info["skipped_rounds"] = (~is_finite).astype(jnp.int32)
        info["edges"] = (cohort.reported & meets).sum(dtype=jnp.int32)
        info |= _meeting_bytes(cohort, meets, tree.num_bytes(tree.spec(star_state.server))) | cohort.metrics | metrics
        info |= unusable(star, cohort, gathered.dropped, gathered.num_dropped)
        info |= engine.reproducible(spending_metrics)(cohort)
        star_state = star_state._replace(round=star_state.round + 1, sampler=sampler_state, clients=clients)
        return state._replace(star=star_state), info

    def personal(state, ids):
        return engine.take(state.star.clients, ids)[0]["model"]

    def params(state):
        mean = engine.reproducible(lambda models: jax.tree.map(lambda x: x.mean(0), models))
        return mean(personal(state, jnp.arange(size, dtype=jnp.int32)))

    metrics = (*ROUND_METRICS, Metric("edges", "meetings of two nodes", "count"), *sampler.metrics)
    evaluated = Evaluated(personal=personal)
    return Algorithm(init, step, params, evaluated=evaluated, metrics=metrics, params_kind=ParamsKind.MEAN)


def _check_presence(sampler: Sampler) -> None:
    """Raises ValueError for a clock of devices that are not always there."""
    if sampler.devices is not None and sampler.devices.availability is not None:
        hint = "A partner is met whether or not it is there. For nodes that are away: network.with_node_failures."
        validate.fail("sampler", "a clock of devices that are always there", "devices with an availability", hint)


def _meeting_bytes(cohort: Cohort, meets: Array, num_bytes: int) -> dict[str, Count]:
    """Counts the bytes of both models of each meeting, models that were sent too late included.

    Args:
      meets: [m] bool, the node has a partner.
      num_bytes: of a model.
    """
    sent = senders(cohort)
    num_models = 2 * (sent & meets).sum(dtype=jnp.int32)
    if cohort.timing.sent is None:
        return {"uplink_bytes": Count.of(num_models, num_bytes)}
    num_late = 2 * (sent & ~cohort.reported & meets).sum(dtype=jnp.int32)
    return {"uplink_bytes": Count.of(num_models, num_bytes), "wasted_bytes": Count.of(num_late, num_bytes)}


def price_of_meetings(devices: Devices, key: Array, cohort: Cohort, partners: Array, price: Price) -> Price:
    """Adds to a cohort's price the models that its nodes exchange with all nodes that they meet.

    Models are exchanged after the local work. So a node that leaves earlier, or has no place on the radio channel, has
    paid for neither sending nor receiving.

    Args:
      devices: of all nodes.
      key: the key with which the cohort was drawn.
      cohort: the nodes that wake up.
      partners: [m] int32, of `meetings`.
      price: of one meeting and the local work.
    """
    size = partners.shape[0]
    meets = cohort.invited & (partners != cohort.ids)
    nodes = jnp.concatenate([cohort.ids, partners])
    first = first_places(nodes)
    num_meetings = jnp.zeros_like(nodes).at[first].add(jnp.tile(meets, 2).astype(jnp.int32))[first]  # of each node
    model_load = Load(*(jnp.broadcast_to(x, nodes.shape) for x in (jnp.float32(0), price.bytes_down, price.bytes_up)))
    (down, _, up), (down_joules, _, up_joules) = priced_by_part(devices, key, nodes, (model_load,))

    def saturating_product(ticks, times):
        # Compared by division, since the product may exceed int32.
        return jnp.where(ticks > MOST_TICKS // jnp.maximum(times, 1), MOST_TICKS, ticks * times)

    def at_both_ends(joules):
        return jnp.where(meets, joules[:size] + joules[size:], 0)

    all_exchanges = saturating_product(down, num_meetings) + saturating_product(up, num_meetings)
    # The price has one download before the work and one message after it, also where a node meets nobody. Both are
    # taken off here, and the exchanges of all meetings are added after the work.
    own_exchanges = jnp.minimum(all_exchanges, MOST_TICKS)[:size]
    ticks = -down[:size], jnp.zeros_like(partners), own_exchanges - up[:size]
    radio_joules = at_both_ends(down_joules) + at_both_ends(up_joules)
    joules = -down_joules[:size], jnp.zeros(size, jnp.float32), radio_joules - up_joules[:size]
    least = all_exchanges[size:]  # a node is done no sooner than its partner has had its meetings
    airtime = jnp.where(meets, jnp.minimum(up[:size] + up[size:], MOST_TICKS), 0)
    return price._replace(
        more=More(ticks=ticks, joules=joules, least=least, bytes_up=price.bytes_up, airtime=airtime, sends=meets)
    )


def meetings(key: Array, ids: Array, tables: dict[str, Array]) -> tuple[Array, Array]:
    """Draws the meetings of a round.

    Args:
      key: of the round.
      ids: [m] int32, the nodes that wake up.
      tables: "neighbours" [N, k] and "degrees" [N] of the graph.

    Returns: ([m] int32, the partner of each node, which is the node itself without neighbours; [m] int32, the slots in
    the order in which their nodes wake up).
    """
    # A node's draws follow from its id. The first word gives its partner, the second its place in the order.
    draws = engine.client_keys(stream(key, "meetings"), ids)
    degrees = tables["degrees"][ids]
    uniform = (draws[:, 0] >> 8).astype(jnp.float32) * 2.0**-24  # 24 bits are exact in float32
    place = jnp.minimum((uniform * degrees.astype(jnp.float32)).astype(jnp.int32), degrees - 1)
    neighbour = jnp.take_along_axis(tables["neighbours"][ids], jnp.maximum(place, 0)[:, None], 1)[:, 0]
    partners = jnp.where(degrees > 0, neighbour, ids)
    _, _, order = jax.lax.sort((draws[:, 1], ids, jnp.arange(ids.shape[0])), num_keys=2)
    return partners, order


def first_places(nodes: Array) -> Array:
    """For each entry, the first place at which the same node stands: [n] int32.

    >>> first_places(jnp.array([4, 2, 4, 2, 0])).tolist()
    [0, 1, 0, 1, 4]
    """
    order = jnp.argsort(nodes, stable=True)
    sorted_nodes = nodes[order]
    places = jnp.arange(nodes.shape[0])
    # A stable sort puts equal nodes side by side, the first place in front; the maximum so far is where they start.
    starts_run = jnp.concatenate([jnp.ones(1, bool), sorted_nodes[1:] != sorted_nodes[:-1]])
    run_starts = jax.lax.cummax(jnp.where(starts_run, places, 0))
    return jnp.zeros_like(order).at[order].set(order[run_starts])


def averaged(rows: PyTree, moved: PyTree, first: Array, order: Array, reported: Array) -> PyTree:
    """Makes all meetings of a round, one after the other.

    Args:
      rows: leaves [2m, ...], the models of the nodes that wake up and of their partners.
      moved: leaves [m, ...], the local updates of the nodes that wake up.
      first: [2m] int32, `first_places` of these nodes.
      order: [m] int32, the slots in the order of their meetings.
      reported: [m] bool; False = the meeting does not take place.

    Returns: the rows after all meetings; that of each node is at its first place.
    """
    num_meetings = order.shape[0]

    def meet(turn, rows):
        slot = order[turn]
        node = first[slot]
        partner = first[num_meetings + slot]
        takes_place = reported[slot]

        def leaf(x, u):
            # What one node gains the other loses, so a meeting keeps the average.
            half_difference = jnp.where(takes_place, (x[partner] - x[node]) / 2, 0).astype(x.dtype)
            x = x.at[partner].set(x[partner] - half_difference)
            return x.at[node].add(jnp.where(takes_place, half_difference + u[slot], 0).astype(x.dtype))

        return jax.tree.map(leaf, rows, moved)

    return jax.lax.fori_loop(0, num_meetings, meet, rows)
