"""A graph network over parties that hold one graph together: where layers are computed, and what is sent.

The parties of a cohort are a batch of graphs, in the order of their ids. The notation is that of
`algorithms.split.splitgnn`: m parties in a cohort, V nodes and H halo nodes of a party.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.models import node_cross_entropy
from fedjax_sim.models.graph import apply_layer
from fedjax_sim.models.graph_layers import GraphLayer, known_edges
from fedjax_sim.network import Link
from fedjax_sim.network.link import send, wires
from fedjax_sim.types import Array, Cohort, Count, GraphData, Groups, Population, PyTree, Subpopulation


class Joint(NamedTuple):
    """A `Joint` holds the parties of a cohort as one batch of m graphs."""

    graphs: GraphData  # leaves [m, ...]; absent parties have no nodes
    labels: Array  # [m, V] int32, -1 for a node without a label
    halo: Array  # [m, H] int32: the address slot * V + place of each halo node in the batch
    known: Array  # [m, H] bool; the party that holds the halo node takes part


def in_order(cohort: Cohort) -> Cohort:
    """Sorts a cohort by id, and puts parties that do not report last.

    The joint loss is a float sum over parties, which then does not depend on their slots.
    """
    last = jnp.iinfo(jnp.int32).max
    order = jnp.argsort(jnp.where(cohort.reported, cohort.ids, last), stable=True)
    return Cohort(cohort.ids[order], cohort.invited[order], cohort.reported[order], cohort.metrics)


def joint_of(cohort: Cohort, population: Population) -> Joint:
    """Puts the graphs of a cohort's parties into one batch.

    Halo nodes that no party of the cohort holds are not known. In a group of parties these include the nodes of all
    other groups.

    Args:
      cohort: of `in_order`.
      population: of parties.

    Raises: ValueError for a population of groups, or whose examples are not graphs with a label for each node.
    """
    is_group = isinstance(population, Subpopulation)
    if isinstance(population, Groups) and not is_group:
        hint = "Groups of parties take hierarchical_split_gnn, or as_client_update(split_gnn(...))."
        validate.fail("population", "parties", "groups of parties", hint)
    data = jax.vmap(population.client)(cohort.ids)
    examples = data.examples
    if not isinstance(examples, dict) or not {"x", "halo", "y"} <= set(examples):
        names = sorted(examples) if isinstance(examples, dict) else type(examples).__name__
        validate.fail("population", 'examples "x", "halo" and "y" (population.node_data)', names)
    if data.mask.shape[1] != 1 or examples["y"].ndim != 3:
        hint = "Whole graphs are classified by FedAvg."
        validate.fail("population", "one graph a party, with a label a node", examples["y"].shape[1:], hint)
    takes_part = cohort.reported & data.mask[:, 0]
    graphs, halo, labels = jax.tree.map(lambda x: x[:, 0], (examples["x"], examples["halo"], examples["y"]))
    size = population.size
    num_slots, num_nodes = labels.shape
    slots = jnp.full(size, -1, jnp.int32)  # the slot of each party; -1 if it does not take part
    slots = slots.at[jnp.where(takes_part, cohort.ids, size)].set(jnp.arange(num_slots, dtype=jnp.int32), mode="drop")
    # A halo node's address in the data is (party in the whole population) * V + place. Here the slot replaces the
    # party.
    party = jnp.where(halo >= 0, halo // num_nodes, -1)
    party = population.place(party) if is_group else jnp.where(party < size, party, -1)
    holder_slot = slots[jnp.clip(party, 0, size - 1)]
    is_known = (party >= 0) & (holder_slot >= 0) & takes_part[:, None]
    ids = jnp.where(takes_part[:, None], graphs.ids, -1)
    address = jnp.where(is_known, holder_slot * num_nodes + halo % num_nodes, num_slots * num_nodes)
    is_known &= ids.reshape(-1).at[address].get(mode="fill", fill_value=-1) >= 0  # -1 is padding at its owner
    return Joint(graphs._replace(ids=ids), jnp.where(ids >= 0, labels, -1), address, is_known)


class LayerPlaces(NamedTuple):
    """Where the layers of a network are computed: the first by the parties, the others by the server."""

    layers: tuple[GraphLayer, ...]
    at_clients: int  # the number of layers that the parties compute
    exchange: bool  # parties exchange embeddings along edges between them; False drops these edges
    server_graph: bool  # the server sums over neighbours in the last of the parties' layers
    link: Link  # that embeddings and their gradients pass

    def through_server(self, i: int) -> bool:
        """Whether the server, which knows all edges, sums over neighbours in layer i."""
        return i >= self.at_clients or (self.server_graph and i == self.at_clients - 1)

    def exchanged(self) -> list[GraphLayer]:
        """The layers in which parties exchange embeddings."""
        party_layers = self.layers[: self.at_clients - self.server_graph]
        return [layer for layer in party_layers if layer.send is not None] if self.exchange else []

    def cut_width(self) -> int:
        """How many numbers a party sends to the server's layers for each node; 0 if the server computes nothing."""
        last = self.layers[self.at_clients - 1]
        if self.server_graph:
            return last.width
        return last.num_outputs if self.at_clients < len(self.layers) else 0

    def outputs(self, params: PyTree, joint: Joint, key: Array | None, taps: dict | None = None) -> Array:
        """Computes the outputs of all nodes, [m, V, C].

        Args:
          params: of the whole model. With `taps`, the entries of the parties' layers have a leading axis [m].
          joint: the parties' graphs.
          key: of the step; None for an evaluation.
          taps: for a replay: {"added": numbers that are added to what the server receives, by name, "seen": a dict that
            is filled with what the server receives}. None otherwise.
        """
        is_node = joint.graphs.ids >= 0
        num_slots = len(joint.labels)
        all_edges = jax.vmap(known_edges)(joint.graphs, joint.known)
        own_edges = jax.vmap(known_edges)(joint.graphs, jnp.zeros_like(joint.known))
        h = jnp.where(is_node[..., None], joint.graphs.nodes, 0).astype(jnp.float32)

        def send_rows(link, name, x):
            """x [m, n, d] as it arrives: a node's row is a message."""
            return send(link, key, x.reshape(-1, x.shape[-1]), name).reshape(x.shape)

        def tap(name, x, is_row):
            if taps is None:
                return x
            x = x + taps["added"].get(name, jnp.zeros_like(x))
            taps["seen"][name] = jnp.where(is_row[..., None], x, 0)
            return x

        def send_to_server(x):
            return tap("embeddings", send_rows(self.link, "embeddings", x), is_node)

        for i, layer in enumerate(self.layers):
            server_sums = self.through_server(i)
            is_stacked = taps is not None and i < self.at_clients

            # Between the two halves of a layer: takes the nodes' messages, returns them and those of halo nodes.
            def exchange(sent, layer=layer, server_sums=server_sums, i=i):
                own_sent = sent
                if server_sums and i < self.at_clients:
                    sent = send_to_server(sent)
                if not server_sums:
                    # A boundary node's embedding is sent up once, whoever needs it. Its gradients come from each halo
                    # by itself, so they pass the link on the way down.
                    sent = send_rows(self.link._replace(backward=None), f"{layer.name}_up", sent)
                halo_rows = sent.reshape(num_slots * sent.shape[1], -1)
                halo_rows = halo_rows.at[joint.halo].get(mode="fill", fill_value=0)
                halo_rows = jnp.where(joint.known[..., None], halo_rows, 0)
                if server_sums:
                    return sent, halo_rows
                halo_rows = send_rows(self.link._replace(forward=None), f"{layer.name}_down", halo_rows)
                return own_sent, tap(f"boundary_{layer.name}", halo_rows, joint.known)

            if i == self.at_clients and not self.server_graph:
                h = send_to_server(h)
            uses_all_edges = server_sums or self.exchange
            edges = all_edges if uses_all_edges else own_edges
            entries = params[layer.name]
            used_exchange = exchange if uses_all_edges else None
            h = apply_layer(layer, entries, edges, h, key, exchange=used_exchange, stacked=is_stacked)
        return h


def regularized_node_loss(
    places: LayerPlaces, decay: float, params: PyTree, joint: Joint, key: Array, *, taps: dict | None = None
) -> tuple[Array, tuple[dict[str, Array], Array]]:
    """Computes the mean loss of all labelled nodes + decay / 2 |first layer|^2.

    Args:
      places: where each layer is computed.
      decay: >= 0.
      params, joint, key, taps: as in `LayerPlaces.outputs`.

    Returns: (the loss, (sums over labelled nodes by metric, number of labelled nodes)).
    """
    values = node_cross_entropy(places.outputs(params, joint, key, taps), joint.labels)
    labelled_by_graph = values.pop("weight")
    sums = {name: (x * labelled_by_graph).sum() for name, x in values.items()}
    num_labelled = jnp.maximum(labelled_by_graph.sum(), 1)
    first_layer = jax.tree.leaves(params[places.layers[0].name])
    if taps is not None:
        first_layer = [x[0] for x in first_layer]  # every party has the same weights
    squares = sum((x * x).sum() for x in first_layer) if decay > 0 else 0.0
    return sums["loss"] / num_labelled + decay / 2 * squares, (sums, labelled_by_graph.sum())


def counts(places: LayerPlaces, cohort: Cohort, joint: Joint, params: PyTree) -> dict:
    """Counts the bytes that a step sends, the parties, and the edges along which embeddings were sent.

    Args:
      places: where layers are computed.
      cohort: of `in_order`.
      joint: the parties' graphs.
      params: of the whole model, for the sizes and dtypes of messages.
    """
    names = [layer.name for layer in places.layers]
    weight_bytes = tree.num_bytes([params[name] for name in names[: places.at_clients]])

    def row_bytes(layer: GraphLayer, width: int) -> tuple[int, int]:
        """Bytes of a node's embedding, and of its gradient, as they are sent around this layer."""
        # An embedding has the widest dtype of the layers so far.
        params_so_far = [params[name] for name in names[: names.index(layer.name) + 1]]
        row = jax.ShapeDtypeStruct((width,), tree.common_dtype(jnp.float32, *jax.tree.leaves(params_so_far)))
        forward, backward = wires(places.link, row)
        return -(-forward.bits // 8), -(-backward.bits // 8)

    num_slots, num_places = joint.labels.shape
    addresses = jnp.where(joint.known, joint.halo, num_slots * num_places)
    is_boundary = jnp.zeros(num_slots * num_places, bool).at[addresses.reshape(-1)].set(True, mode="drop")
    is_boundary = is_boundary.reshape(num_slots, num_places)
    rows = (is_boundary, joint.known, joint.graphs.ids >= 0)
    num_boundary, num_halo, num_nodes = (x.sum(dtype=jnp.int32) for x in rows)
    # Parties with boundary nodes, with halo nodes, and with nodes: each sends or receives one batch.
    num_owners, num_needing, num_present = (x.any(1).sum(dtype=jnp.int32) for x in rows)
    num_invited, num_reported = (x.sum(dtype=jnp.int32) for x in (cohort.invited, cohort.reported))
    exchange_bytes = [row_bytes(layer, layer.width) for layer in places.exchanged()]
    halo_forward, halo_backward = (sum(pair[i] for pair in exchange_bytes) for i in (0, 1))
    last_layer = places.layers[places.at_clients - 1]
    cut_forward, cut_backward = row_bytes(last_layer, places.cut_width()) if places.cut_width() else (0, 0)
    batch_bytes = -(-places.link.batch_bits // 8)
    exchange_batch_bytes = batch_bytes * len(exchange_bytes)
    cut_batch_bytes = batch_bytes * bool(places.cut_width())
    party_bytes = num_places * (cut_forward + cut_backward) + weight_bytes + 2 * exchange_batch_bytes + cut_batch_bytes
    most = joint.halo.size * 2 * (halo_forward + halo_backward) + num_slots * party_bytes
    validate.integer("bytes that a round may send each way", most, 0, hint="Counts are exact up to 2^31.")
    exchange_batches = (num_owners + num_needing) * exchange_batch_bytes
    cut_batches = num_present * cut_batch_bytes
    # Embeddings of boundary nodes go up and those of halo nodes down; gradients go the other way.
    boundary_up = num_boundary * halo_forward + num_halo * halo_backward + exchange_batches
    boundary_down = num_halo * halo_forward + num_boundary * halo_backward + exchange_batches
    edges = jax.vmap(known_edges)(joint.graphs, joint.known)
    is_cut_edge = (edges.senders >= num_places) & (edges.receivers < num_places)
    byte_counts = {
        "uplink_bytes": boundary_up + num_nodes * cut_forward + cut_batches + num_reported * weight_bytes,
        "downlink_bytes": boundary_down + num_nodes * cut_backward + cut_batches + num_invited * weight_bytes,
        "boundary_bytes": boundary_up + boundary_down,
        "activation_bytes": num_nodes * (cut_forward + cut_backward) + 2 * cut_batches,
    }
    return {name: Count.of(number, 1) for name, number in byte_counts.items()} | {
        "clients_invited": num_invited,
        "clients_reported": num_reported,
        "dropped_clients": jnp.zeros((), jnp.int32),
        "cut_edges_used": is_cut_edge.sum(dtype=jnp.int32) * (1 if places.exchanged() else 0),
    }
