"""SplitGNN: split learning of one graph network over parties that hold one graph together.

Notation: party p holds V nodes. Other parties need some of them (its boundary), and it needs H nodes of other parties
(its halo). The parties compute the first layers, the server the other layers. A round is one step on the loss of all
labelled nodes, and gradients are sent back the way that embeddings came.
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
from fedjax_sim.round.levels import without_empty_places
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

METRICS = (
    *ROUND_METRICS,
    Metric("boundary_bytes", "for cut edges: embeddings and gradients, both ways", "bytes"),
    Metric("activation_bytes", "between parties' layers and the server's, both ways", "bytes"),
    Metric("cut_edges_used", "cut edges along which embeddings went", "count", pooled="last"),
)
# The client of the star, which carries facts alone: a round of SplitGNN is one joint step, and no client trains alone.
NO_CLIENT = ClientUpdate(lambda params: (), None, ClientFacts(helped=True))  # type: ignore[arg-type]


class SplitState(NamedTuple):
    """The state between two rounds."""

    round: Array  # [] int32
    sampler: PyTree
    server: PyTree  # the whole model, and the state of its optimiser


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
    """Makes SplitGNN: parties compute the first layers on their nodes, and the server the other layers on all nodes.

    Parties hold one graph together (`population.node_data`). In each of the parties' layers a node needs messages of
    its neighbours, also of neighbours at other parties. The server relays these (halo embeddings), or such edges are
    dropped. The server's layers use every edge. Gradients are sent back the same ways. All parties have the same
    weights: the gradient of a weight is the sum of the parties' gradients. A round is one step.

    Args:
      model: a graph network (`models.gcn`, ...) for nodes.
      sampler: draws the parties that take part; edges to other parties are dropped for the round.
      optimizer: of the whole model, at the server.
      client_layers: in [1, number of layers], the number of layers that the parties compute. If they compute all,
        labels stay with the parties; otherwise the server has the labels.
      cut_edges: what happens to edges between parties in the parties' layers: "exchange" or "drop".
      graph_at: "clients": parties sum over neighbours in all their layers. "server": in the last of their layers they
        only multiply their features by the weights, and the server, which holds the graph, sums over neighbours (for
        models that sum what was sent: `gcn`, `gat`).
      weight_decay: >= 0; adds weight_decay / 2 times the squared norm of the first layer to the loss.
      link: the link that embeddings and their gradients pass, where a node's row is a message (`network.link`). None:
        they arrive as they are. A halo embedding passes it once, at its owner, and its gradient once, at the party that
        needed it. What the link adds to a batch, as encryption does, is sent with each party's rows of a layer, in each
        direction.

    Returns: an Algorithm. Its info holds
      `local_loss` and `local_accuracy`: over all labelled nodes, in training;
      `uplink_bytes` and `downlink_bytes`: exact, of all messages up and down;
      `activation_bytes`: of these, an embedding of each node to the server's layers and its gradient back;
      `boundary_bytes`: of these, an embedding of each boundary node up and of each halo node down, and gradients the
      other way. The other bytes are the parties' weights down and their gradients up;
      `cut_edges_used`: edges between parties along which embeddings were sent.
    Labels, which are sent once, are not counted. A step that is not finite, or without a labelled node, is skipped, and
    its loss is NaN. Evaluations use the model by itself, without the link: on `test` with all edges of the graph, on
    `local_test` without edges between parties. Where edges are dropped in the parties' layers alone, the predictions of
    the federation itself are neither of these.

    Raises: ValueError for models without layers or with a readout, and for samplers that may draw a party twice, draw
    some parties more often, have late clients or partial work, or take simulated time.

    Guarantees: with exchanged edges it is training on the whole graph, for any partition, dropout included
    (tests/algorithms/split/test_splitgnn.py::test_exchange_is_the_whole_graph), and so are a server that holds the
    graph (::test_a_server_with_the_graph) and a second graph layer at the server (::test_two_graph_layers); dropped
    edges give the results of a computation by hand (::test_path_by_hand), one hop beyond the boundary too; bytes are
    those of the arrays that are sent (::test_bytes), of wider numbers too (::test_bytes_of_wider_numbers); a round
    without parties has no loss (::test_an_empty_cohort).

    References: Kipf and Welling 2017; Gupta and Raskar 2018.
    """
    places = _checked_places(
        model, sampler, client_layers=client_layers, cut_edges=cut_edges, graph_at=graph_at, link=link
    )
    validate.optax_transformation("optimizer", optimizer)
    model_server = server.optimizer(optimizer)
    client = NO_CLIENT.stating(noise=noise_of([places.link]))
    star = Star(sampler, client, None, model_server, identity())  # type: ignore[arg-type]  # nothing is aggregated
    party_layers = [layer.name for layer in places.layers[:client_layers]]

    def init(key: Array | None, params: PyTree, population: Population) -> SplitState:
        _check_start(places, sampler, params, population)
        state = SplitState(jnp.zeros((), jnp.int32), sampler.init(), model_server.init(params))
        return jax.tree.map(jnp.asarray, state)

    def inside(key: Array, state: SplitState, population: Population) -> tuple[SplitState, Inside]:
        cohort, sampler_state, joint = cohort_and_graphs(key, state, population)
        take_step = engine.reproducible(partial(_take_step, places, model_server, weight_decay=weight_decay))
        server_state, is_finite, sums, num_labelled, info = take_step(key, joint, state.server)
        is_used = (num_labelled > 0) & is_finite
        info |= counts(places, cohort, joint, model_server.params(state.server))
        info |= {"skipped_rounds": (~is_used).astype(jnp.int32)}
        info = tree.joined_metrics({"sampler": cohort.metrics, "own": info})
        means = {
            f"local_{name}": Mean(*(jnp.where(is_used, x, 0) for x in (total, num_labelled)))
            for name, total in sums.items()
        }
        next_state = SplitState(state.round + 1, sampler_state, server_state)
        return next_state, Inside(info, means, {}, num_labelled, ~is_finite)

    def step(key: Array, state: SplitState, population: Population) -> tuple[SplitState, dict]:
        state, result = inside(key, state, population)

        def divided(means):
            return {name: total / weight for name, (total, weight) in means.items()}

        return state, tree.joined_metrics({"own": result.info, "local": engine.reproducible(divided)(result.means)})

    def cohort_and_graphs(key: Array, state: SplitState, population: Population) -> tuple[Cohort, PyTree, Joint]:
        cohort, sampler_state = invite(star, key, state)  # type: ignore[arg-type]
        cohort = in_order(without_empty_places(cohort, population))
        joint = joint_of(cohort, population)
        params = model_server.params(state.server)
        outputs = jax.eval_shape(lambda: model.apply(params, (), joint.graphs, None, False)[0])
        if outputs.shape[:2] != joint.labels.shape:
            validate.fail("model", "outputs for each node", outputs.shape, "Whole graphs (readout) take FedAvg.")
        return cohort, sampler_state, joint

    def observe(key: Array, state: SplitState, population: Population) -> Observed:
        cohort, _, joint = cohort_and_graphs(key, state, population)
        params = model_server.params(state.server)
        return _seen_by_server(places, key, params, cohort, joint, party_layers=party_layers)

    def params_of(state: SplitState) -> PyTree:
        return model_server.params(state.server)

    level = Level(star, lambda params, population: init(None, params, population), inside, METRICS)
    kind = model_server.params_kind
    return Algorithm(init, step, params_of, None, observe, metrics=METRICS, level=level, params_kind=kind)


def _take_step(
    places: LayerPlaces, model_server: ServerUpdate, key: Array, joint: Joint, state: PyTree, *, weight_decay: float
) -> tuple:
    """Takes one step on the loss of all labelled nodes.

    Args:
      places: where layers are computed.
      model_server: holds the whole model and its optimiser.
      key: of the step.
      joint: the parties' graphs.
      state: of `model_server`.
      weight_decay: as in `split_gnn`.

    Returns: (the next state, whether the step is finite, sums by metric, number of labelled nodes, info).
    """
    params = model_server.params(state)
    validate.floating_parameters(params)
    (loss, (sums, num_labelled)), gradient = jax.value_and_grad(
        lambda params: regularized_node_loss(places, weight_decay, params, joint, stream(key, "loss")), has_aux=True
    )(params)
    update = jax.tree.map(jnp.negative, gradient)
    new_state = model_server.apply(stream(key, "server"), update, state)
    is_finite = engine.all_finite((loss, update, new_state))
    new_state = tree.where((num_labelled > 0) & is_finite, new_state, state)
    update_norm = optax.tree.norm(tree.widened(tree.subtract(model_server.params(new_state), params)))
    return new_state, is_finite, sums, num_labelled, {"update_norm": update_norm}


def _check_start(places: LayerPlaces, sampler: Sampler, params: PyTree, population: Population) -> None:
    """Raises ValueError for a population of another size than the sampler's, and for parameters of another model."""
    if sampler.design.population_size != population.size:
        rule = f"a design for the population's {population.size} parties"
        validate.fail("sampler", rule, sampler.design.population_size, "In a hierarchy: group_size.")
    names = sorted(layer.name for layer in places.layers)
    is_dict = isinstance(params, Mapping)
    if not is_dict or set(names) != set(params):
        hint = f"They differ in {sorted(set(names) ^ set(params))}." if is_dict else f"A dict with {names}."
        validate.fail("params", "those of the model", sorted(params) if is_dict else type(params).__name__, hint)


def _checked_places(
    model: Model, sampler: Sampler, *, client_layers: int, cut_edges: str, graph_at: str, link: Link | None
) -> LayerPlaces:
    """Checks the options of `split_gnn`, and says where each layer is computed.

    Args:
      model: L graph layers.
      sampler: draws all parties with equal chances, each at most once in a round.
      client_layers: in [1, L], the number of layers that parties compute; the server computes the others.
      cut_edges: "exchange" or "drop".
      graph_at: "clients" or "server".
      link: between parties and server; None = embeddings are sent as they are.

    Raises: ValueError, TypeError for all other values.
    """
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


def _seen_by_server(
    places: LayerPlaces, key: Array, params: PyTree, cohort: Cohort, joint: Joint, *, party_layers: list[str]
) -> Observed:
    """Returns what the server receives in the round of this key, a row for each party.

    Args:
      places: where layers are computed.
      key: of the round.
      params: of the whole model.
      cohort: of `in_order`.
      joint: the parties' graphs.
      party_layers: names of the layers that the parties compute.
    """
    num_slots = joint.labels.shape[0]
    # Each party has a copy of its layers' weights, so that the gradient by a copy is that party's message.
    copies = {
        name: jax.tree.map(lambda x: jnp.broadcast_to(x[None], (num_slots, *x.shape)), params[name])
        if name in party_layers
        else params[name]
        for name in params
    }

    def loss(copies, added):
        taps = {"added": added, "seen": {}}
        value, _ = regularized_node_loss(places, 0.0, copies, joint, stream(key, "loss"), taps=taps)
        return value, taps["seen"]

    # Zeros are added to all embeddings that pass the server. The gradients by the zeros at a boundary are the messages
    # that parties send back to it.
    spec = jax.eval_shape(lambda: loss(copies, {})[1])
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in spec.items()}
    (copy_gradients, message_gradients), seen = jax.grad(loss, (0, 1), has_aux=True)(copies, zeros)
    messages = dict(seen) | {"gradients": {name: copy_gradients[name] for name in party_layers}}
    is_known = joint.known[..., None]
    messages |= {
        f"{name}_gradients": jnp.where(is_known, x, 0) for name, x in message_gradients.items() if name != "embeddings"
    }
    has_nodes = (joint.graphs.ids >= 0).any(1)
    broadcast = {name: params[name] for name in party_layers}
    return Observed(broadcast, messages, jnp.asarray(has_nodes, jnp.float32), cohort.ids)
