"""Split learning of one graph network over parties that hold one graph together.

Notation: party p holds V nodes, of which others need some (its boundary), and needs H nodes of others (its halo). The
first layers are computed by the parties, the others by the server; one step of a round is a step on the loss of all
labelled nodes, and its gradient goes back the way that embeddings came.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import engine, server, tree, validate
from fedjax_sim.algorithms.split.graph_parties import (
    Joint,
    LayerPlaces,
    counts,
    in_order,
    joint_of,
    regularized_node_loss,
)
from fedjax_sim.models import Model
from fedjax_sim.models.graph_layers import GraphLayer
from fedjax_sim.network import Link
from fedjax_sim.network.link import noise_of
from fedjax_sim.prng import stream
from fedjax_sim.round.compatibility import check_distinct
from fedjax_sim.round.costs import ROUND_METRICS
from fedjax_sim.round.levels import existing
from fedjax_sim.round.round import invite
from fedjax_sim.transform import identity
from fedjax_sim.types import (
    Algorithm,
    Array,
    ClientFacts,
    ClientUpdate,
    Cohort,
    Inside,
    Level,
    Mean,
    Metric,
    Observed,
    Population,
    PyTree,
    Sampler,
    ServerUpdate,
    Star,
)
from fedjax_sim.validate import NonNegative

__all__ = ["split_gnn"]

METRICS = (
    *ROUND_METRICS,
    Metric("boundary_bytes", "for cut edges: embeddings and gradients, both ways", "bytes"),
    Metric("activation_bytes", "between parties' layers and the server's, both ways", "bytes"),
    Metric("cut_edges_used", "cut edges along which embeddings went", "count", pooled="last"),
)
NO_CLIENT = ClientUpdate(lambda params: (), None, ClientFacts(helped=True))  # type: ignore[arg-type]  # facts alone


class SplitState(NamedTuple):
    """The state between two rounds."""

    round: Array  # [] int32
    sampler: PyTree
    server: PyTree  # the whole model, and its optimiser


@validate.named_arguments
def split_gnn(
    model: Model,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    client_layers: int = 1,
    cut_edges: str = "exchange",
    graph_at: str = "clients",
    weight_decay: NonNegative = 0.0,
    link: Link | None = None,
) -> Algorithm:
    """SplitGNN: parties compute the first layers on their nodes, the server the others on all; one step a round.

    Parties hold one graph together (`population.node_data`). In each of their layers a node needs what its neighbours
    send, also neighbours at other parties: the server relays it (halo embeddings), or such edges are dropped. The
    server's layers use every edge. Gradients go back the same ways; the parties' weights are averaged in each round, as
    the sum of their gradients.

    Args:
      model: a graph network (`models.gcn`, ...) for nodes.
      sampler: which parties take part; edges to those that do not are dropped for the round.
      optimizer: of the whole model, at the server.
      client_layers: in [1, number of layers], how many the parties compute. If all, labels stay with the parties;
        otherwise the server has them.
      cut_edges: in the parties' layers: "exchange" or "drop".
      graph_at: "server": in the last of the parties' layers they only multiply their features by the weights, and the
        server, which holds the graph, sums over neighbours (models that sum what was sent: `gcn`, `gat`).
      weight_decay: of the first layer, >= 0: adds weight_decay / 2 times its squared norm to the loss.
      link: what embeddings and their gradients go through, a node's row a message (`network.link`): a halo embedding
        once, at its owner, and its gradient at the party that needed it. What it adds to a batch, as encryption does,
        is sent with each party's rows of a layer and way.

    Returns: an Algorithm. Its info holds `local_loss` and `local_accuracy` over all labelled nodes, in training; exact
    `uplink_bytes` and `downlink_bytes`: the parties' weights down and their gradients up, an embedding of each node to
    the server's layers and its gradient back (`activation_bytes`), and of each boundary node up and each halo node
    down, with gradients the other way (`boundary_bytes`); `cut_edges_used`. Labels, which are sent once, are not
    counted. A step that is not finite, or without a labelled node, is skipped, its loss NaN. Evaluations judge the
    model by itself, without the link: on `test` with all edges of the graph, on `local_test` with none that is cut.
    Where edges are dropped in the parties' layers alone, the federation's own predictions are neither.

    Raises: ValueError for models without layers or with a readout, samplers that may draw a party twice, draw some more
    often, have late clients or partial work, or take simulated time.

    Guarantees: with exchanged edges it is training on the whole graph, for any partition, dropout included
    (tests/algorithms/split/test_splitgnn.py::test_exchange_is_the_whole_graph), and so are a server that holds the
    graph (::test_a_server_with_the_graph) and a second graph layer at the server (::test_two_graph_layers); dropped
    edges give what is computed by hand (::test_path_by_hand), one hop beyond the boundary too; bytes are counted arrays
    (::test_bytes), of wider numbers too (::test_bytes_of_wider_numbers); nobody's round has no loss
    (::test_an_empty_cohort).

    References: Kipf and Welling 2017; Gupta and Raskar 2018.
    """
    places = _checked(model, sampler, client_layers, cut_edges, graph_at, link)
    validate.optax_transformation("optimizer", optimizer)
    whole = server.optimizer(optimizer)
    client = NO_CLIENT.stating(noise=noise_of([places.link]))
    star = Star(sampler, client, None, whole, identity())  # type: ignore[arg-type]  # nothing is aggregated
    names = [layer.name for layer in places.layers[:client_layers]]

    def init(key: Array | None, params: PyTree, population: Population) -> SplitState:
        _check_start(places, sampler, params, population)
        state = SplitState(jnp.zeros((), jnp.int32), sampler.init(), whole.init(params))
        return jax.tree.map(jnp.asarray, state)

    def inside(key: Array, state: SplitState, population: Population) -> tuple[SplitState, Inside]:
        cohort, next_sampler, joint = taking_part(key, state, population)
        stepped = engine.steady(partial(_stepped, places, whole, weight_decay))
        moved, finite, sums, count, info = stepped(key, joint, state.server)
        fit = (count > 0) & finite
        info |= counts(places, cohort, joint, whole.params(state.server)) | {"skipped_rounds": (~fit).astype(jnp.int32)}
        info = tree.joined_metrics({"sampler": cohort.metrics, "own": info})
        means = {f"local_{name}": Mean(*(jnp.where(fit, x, 0) for x in (total, count))) for name, total in sums.items()}
        return SplitState(state.round + 1, next_sampler, moved), Inside(info, means, {}, count, ~finite)

    def step(key: Array, state: SplitState, population: Population) -> tuple[SplitState, dict]:
        state, told = inside(key, state, population)

        def divided(means):
            return {name: total / weight for name, (total, weight) in means.items()}

        return state, tree.joined_metrics({"own": told.info, "local": engine.steady(divided)(told.means)})

    def taking_part(key: Array, state: SplitState, population: Population) -> tuple[Cohort, PyTree, Joint]:
        cohort, next_sampler = invite(star, key, state)  # type: ignore[arg-type]
        cohort = in_order(existing(cohort, population))
        joint = joint_of(cohort, population)
        params = whole.params(state.server)
        outputs = jax.eval_shape(lambda: model.apply(params, (), joint.graphs, None, False)[0])
        if outputs.shape[:2] != joint.labels.shape:
            validate.fail("model", "outputs for each node", outputs.shape, "Whole graphs (readout) take FedAvg.")
        return cohort, next_sampler, joint

    def observe(key: Array, state: SplitState, population: Population) -> Observed:
        cohort, _, joint = taking_part(key, state, population)
        return _seen(places, key, whole.params(state.server), cohort, joint, names)

    level = Level(star, lambda params, population: init(None, params, population), inside, METRICS)
    return Algorithm(init, step, lambda state: whole.params(state.server), None, observe, metrics=METRICS, level=level)


def _stepped(
    places: LayerPlaces, whole: ServerUpdate, weight_decay: float, key: Array, joint: Joint, held: PyTree
) -> tuple:
    """One step from the state `held`: (the next one, whether it is finite, sums by metric, labelled nodes, info)."""
    params = whole.params(held)
    validate.floating_parameters(params)
    found, gradient = jax.value_and_grad(
        lambda params: regularized_node_loss(places, weight_decay, params, joint, stream(key, "loss")), has_aux=True
    )(params)
    sums, count = found[1]
    update = jax.tree.map(jnp.negative, gradient)
    moved = whole.apply(stream(key, "server"), update, held)
    finite = tree.all_finite((found[0], update, moved))
    moved = tree.where((count > 0) & finite, moved, held)
    length = optax.tree.norm(tree.subtract(whole.params(moved), params))
    return moved, finite, sums, count, {"update_norm": length}


def _check_start(places: LayerPlaces, sampler: Sampler, params: PyTree, population: Population) -> None:
    if sampler.design.population_size != population.size:
        rule, hint = f"a design for the population's {population.size} parties", "In a hierarchy: group_size."
        validate.fail("sampler", rule, sampler.design.population_size, hint)
    names, known = sorted(layer.name for layer in places.layers), isinstance(params, Mapping)
    if not known or set(names) != set(params):
        hint = f"They differ in {sorted(set(names) ^ set(params))}." if known else f"A dict with {names}."
        validate.fail("params", "those of the model", sorted(params) if known else type(params).__name__, hint)


def _checked(
    model: Model, sampler: Sampler, client_layers: int, cut_edges: str, graph_at: str, link: Link | None
) -> LayerPlaces:
    if link is not None:
        validate.part("link", link, Link)
    validate.part("model", model, Model)
    validate.part("sampler", sampler, Sampler)
    if not model.layers or not all(isinstance(layer, GraphLayer) for layer in model.layers):
        validate.fail("model", "a network of graph layers", len(model.layers), "Take models.gcn, say.")
    validate.integer("client_layers", client_layers, 1, len(model.layers))
    validate.one_of("cut_edges", cut_edges, ("exchange", "drop"))
    validate.one_of("graph_at", graph_at, ("clients", "server"))
    last = model.layers[client_layers - 1]
    if graph_at == "server" and (last.send is None or not last.from_sent):
        hint = "Its own part needs the node's inputs, which the parties keep."
        validate.fail("graph_at", f'"clients" with the layer {last.name!r}', graph_at, hint)
    check_distinct(sampler, "A party holds its nodes once.")
    if not getattr(sampler.design, "equal_chances", False):
        hint = "The loss counts labelled nodes alike."
        validate.fail("sampler", "one that draws all parties alike", sampler.design, hint)
    cohort, _ = jax.eval_shape(lambda: sampler.sample(jax.random.key(0), sampler.init()))
    if cohort.timing.sent is not None or cohort.work is not None:
        hint = "What late parties send would not be counted, and a step has no parts."
        validate.fail("sampler", "one whose parties do whole steps, in time", "one with late clients or work", hint)
    if sampler.devices is not None or sampler.tell is not None or sampler.observe is not None:
        hint = "Take full, uniform or poisson, without devices."
        validate.fail("sampler", "one that neither takes time nor learns", "another", hint)
    return LayerPlaces(
        tuple(model.layers), client_layers, cut_edges == "exchange", graph_at == "server", link or Link()
    )


def _seen(places: LayerPlaces, key: Array, params: PyTree, cohort: Cohort, joint: Joint, names: list[str]) -> Observed:
    """What the server receives in the round of this key, a row for each party."""
    slots = joint.labels.shape[0]
    copies = {
        name: jax.tree.map(lambda x: jnp.broadcast_to(x[None], (slots, *x.shape)), params[name])
        if name in names
        else params[name]
        for name in params
    }

    def loss(copies, added):
        taps = {"added": added, "seen": {}}
        value, _ = regularized_node_loss(places, 0.0, copies, joint, stream(key, "loss"), taps)
        return value, taps["seen"]

    spec = jax.eval_shape(lambda: loss(copies, {})[1])
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in spec.items()}
    (by_weights, back), seen = jax.grad(loss, (0, 1), has_aux=True)(copies, zeros)
    messages = dict(seen) | {"gradients": {name: by_weights[name] for name in names}}
    known = joint.known[..., None]
    messages |= {f"{name}_gradients": jnp.where(known, x, 0) for name, x in back.items() if name != "embeddings"}
    there = (joint.graphs.ids >= 0).any(1)
    return Observed({name: params[name] for name in names}, messages, there.astype(jnp.float32), cohort.ids)
