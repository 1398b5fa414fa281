"""A graph network over parties that hold one graph together: which layer is whose, what crosses, and what it costs.

The parties of a cohort are a batch of graphs, in the order of their ids. The notation is that of `split_graph`.
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
from fedjax_sim.types import Array, Cohort, Count, GraphData, Population, PyTree

__all__ = ["Joint", "LayerPlaces", "counts", "in_order", "joint_of", "regularized_node_loss"]


class Joint(NamedTuple):
    """The parties of a cohort as one batch of m graphs."""

    graphs: GraphData  # leaves [m, ...]; absent parties have no nodes
    labels: Array  # [m, V] int32, -1 without
    halo: Array  # [m, H] int32: slot * V + place of each halo node
    known: Array  # [m, H] bool; its party is there


def in_order(cohort: Cohort) -> Cohort:
    """The cohort by id, those who do not report last: float sums over parties then do not depend on slots."""
    last = jnp.iinfo(jnp.int32).max
    order = jnp.argsort(jnp.where(cohort.reported, cohort.ids, last), stable=True)
    return Cohort(cohort.ids[order], cohort.invited[order], cohort.reported[order], cohort.metrics)


def joint_of(cohort: Cohort, population: Population) -> Joint:
    """What the parties of a cohort in order hold; in a group of parties, edges to others' nodes have nobody there."""
    if not hasattr(population, "place") and hasattr(population, "group"):
        hint = "Groups of parties take hierarchical_split_gnn, or as_client_update(split_gnn(...))."
        validate.fail("population", "parties", "groups of parties", hint)
    data = jax.vmap(population.client)(cohort.ids)
    examples = data.examples
    if not isinstance(examples, dict) or not {"x", "halo", "y"} <= set(examples):
        shown = sorted(examples) if isinstance(examples, dict) else type(examples).__name__
        validate.fail("population", 'examples "x", "halo" and "y" (population.node_data)', shown)
    if data.mask.shape[1] != 1 or examples["y"].ndim != 3:
        hint = "Whole graphs are classified by FedAvg."
        validate.fail("population", "one graph a party, with a label a node", examples["y"].shape[1:], hint)
    there = cohort.reported & data.mask[:, 0]
    graphs, halo, labels = jax.tree.map(lambda x: x[:, 0], (examples["x"], examples["halo"], examples["y"]))
    size, (slots, width) = population.size, labels.shape
    slot = jnp.full(size, -1, jnp.int32)
    slot = slot.at[jnp.where(there, cohort.ids, size)].set(jnp.arange(slots, dtype=jnp.int32), mode="drop")
    party = jnp.where(halo >= 0, halo // width, -1)
    party = population.place(party) if hasattr(population, "place") else jnp.where(party < size, party, -1)
    holder = slot[jnp.clip(party, 0, size - 1)]
    known = (party >= 0) & (holder >= 0) & there[:, None]
    ids = jnp.where(there[:, None], graphs.ids, -1)
    address = jnp.where(known, holder * width + halo % width, slots * width)
    known &= ids.reshape(-1).at[address].get(mode="fill", fill_value=-1) >= 0
    return Joint(graphs._replace(ids=ids), jnp.where(ids >= 0, labels, -1), address, known)


class LayerPlaces(NamedTuple):
    """Which of a network's layers are computed where."""

    layers: tuple[GraphLayer, ...]
    at_clients: int
    exchange: bool  # embeddings along cut edges, in the parties' layers
    server_graph: bool  # the server sums neighbours in the last of the parties' layers
    link: Link

    def through_server(self, i: int) -> bool:
        """Whether the server sums the neighbours of layer i: it knows all edges."""
        return i >= self.at_clients or (self.server_graph and i == self.at_clients - 1)

    def exchanged(self) -> list[GraphLayer]:
        """The layers before which parties exchange embeddings."""
        own = self.layers[: self.at_clients - self.server_graph]
        return [layer for layer in own if layer.send is not None] if self.exchange else []

    def cut_width(self) -> int:
        """Numbers of a node that its party sends to the server's layers; 0 without such."""
        last = self.layers[self.at_clients - 1]
        if self.server_graph:
            return last.width
        return last.num_outputs if self.at_clients < len(self.layers) else 0

    def outputs(self, params: PyTree, joint: Joint, key: Array | None, taps: dict | None = None) -> Array:
        """[m, V, C]; `taps` holds numbers to be added to what the server receives, and gets what it receives."""
        there, slots = joint.graphs.ids >= 0, len(joint.labels)
        known = jax.vmap(known_edges)(joint.graphs, joint.known)
        own = jax.vmap(known_edges)(joint.graphs, jnp.zeros_like(joint.known))
        h = jnp.where(there[..., None], joint.graphs.nodes, 0).astype(jnp.float32)

        def sent_by(link, name, x):
            """x [m, n, d] as it arrives: a node's row is a message."""
            return send(link, key, x.reshape(-1, x.shape[-1]), name).reshape(x.shape)

        def tap(name, x, rows):
            if taps is None:
                return x
            x = x + taps["added"].get(name, jnp.zeros_like(x))
            taps["seen"][name] = jnp.where(rows[..., None], x, 0)
            return x

        def arrives(x):
            return tap("embeddings", sent_by(self.link, "embeddings", x), there)

        for i, layer in enumerate(self.layers):
            server, stacked = self.through_server(i), taps is not None and i < self.at_clients

            def exchange(sent, layer=layer, server=server, i=i):
                own_sent = sent
                if server and i < self.at_clients:
                    sent = arrives(sent)
                if not server:  # up from the boundary; gradients come from each halo by itself
                    sent = sent_by(self.link._replace(backward=None), f"{layer.name}_up", sent)
                rows = sent.reshape(slots * sent.shape[1], -1).at[joint.halo].get(mode="fill", fill_value=0)
                rows = jnp.where(joint.known[..., None], rows, 0)
                if server:
                    return sent, rows
                rows = sent_by(self.link._replace(forward=None), f"{layer.name}_down", rows)
                return own_sent, tap(f"boundary_{layer.name}", rows, joint.known)

            if i == self.at_clients and not self.server_graph:
                h = arrives(h)
            joined = server or self.exchange
            entries = params[layer.name]
            h = apply_layer(
                layer, entries, known if joined else own, h, key, exchange if joined else None, stacked=stacked
            )
        return h


def regularized_node_loss(
    places: LayerPlaces, decay: float, params: PyTree, joint: Joint, key: Array, taps: dict | None = None
) -> tuple[Array, tuple[dict[str, Array], Array]]:
    """(mean loss of all labelled nodes + decay / 2 |first layer|^2, (sums by metric, number of labelled nodes))."""
    values = node_cross_entropy(places.outputs(params, joint, key, taps), joint.labels)
    count = values.pop("weight")
    sums = {name: (x * count).sum() for name, x in values.items()}
    total = jnp.maximum(count.sum(), 1)
    first = jax.tree.leaves(params[places.layers[0].name])
    if taps is not None:
        first = [x[0] for x in first]  # every party has the same
    squares = sum((x * x).sum() for x in first) if decay > 0 else 0.0
    return sums["loss"] / total + decay / 2 * squares, (sums, count.sum())


def counts(places: LayerPlaces, cohort: Cohort, joint: Joint, params: PyTree) -> dict:
    """What a step sends, and who sent it."""
    names = [layer.name for layer in places.layers]
    weights = tree.num_bytes([params[name] for name in names[: places.at_clients]])

    def row_bytes(layer: GraphLayer, width: int) -> tuple[int, int]:
        """Bytes of a node's embedding, and of its gradient, as they are sent around this layer."""
        known = [params[name] for name in names[: names.index(layer.name) + 1]]
        row = jax.ShapeDtypeStruct((width,), tree.common_dtype(jnp.float32, *jax.tree.leaves(known)))
        there, back = wires(places.link, row)
        return -(-there.bits // 8), -(-back.bits // 8)

    slots, width = joint.labels.shape
    used = jnp.where(joint.known, joint.halo, slots * width)
    asked = jnp.zeros(slots * width, bool).at[used.reshape(-1)].set(True, mode="drop").reshape(slots, width)
    rows = (asked, joint.known, joint.graphs.ids >= 0)
    boundary, halo, nodes = (x.sum(dtype=jnp.int32) for x in rows)
    owners, askers, present = (x.any(1).sum(dtype=jnp.int32) for x in rows)  # parties, each of which sends one batch
    invited, reported = (x.sum(dtype=jnp.int32) for x in (cohort.invited, cohort.reported))
    across = [row_bytes(layer, layer.width) for layer in places.exchanged()]
    there, back = (sum(ways[i] for ways in across) for i in (0, 1))
    last = places.layers[places.at_clients - 1]
    ahead, behind = row_bytes(last, places.cut_width()) if places.cut_width() else (0, 0)
    header = -(-places.link.batch_bits // 8)
    headers, own = header * len(across), header * bool(places.cut_width())
    most = joint.halo.size * 2 * (there + back) + slots * (width * (ahead + behind) + weights + 2 * headers + own)
    validate.integer("bytes that a round may send each way", most, 0, hint="Counts are exact up to 2^31.")
    beside, activations = (owners + askers) * headers, present * own
    up, down = boundary * there + halo * back + beside, halo * there + boundary * back + beside
    both = jax.vmap(known_edges)(joint.graphs, joint.known)
    outside = (both.senders >= width) & (both.receivers < width)
    found = {
        "uplink_bytes": up + nodes * ahead + activations + reported * weights,
        "downlink_bytes": down + nodes * behind + activations + invited * weights,
        "boundary_bytes": up + down,
        "activation_bytes": nodes * (ahead + behind) + 2 * activations,
    }
    return {name: Count.of(number, 1) for name, number in found.items()} | {
        "clients_invited": invited,
        "clients_reported": reported,
        "dropped_clients": jnp.zeros((), jnp.int32),
        "cut_edges_used": outside.sum(dtype=jnp.int32) * (1 if places.exchanged() else 0),
    }
