"""What a partition of a graph costs before anything is trained: by nodes, by edges, or by neighbourhoods.

    python experiments/graphs/partitions.py

Five parties of a graph of four communities, each with its own part alone. A partition by nodes cuts edges; one by edges
keeps them all, and holds nodes several times, each time with a part of its neighbours; neighbourhoods hold nodes
several times with all that is near, and leave out what is far from every centre. The error is that of one graph
convolution (Kipf and Welling): the squared difference of a node's sum over neighbours from that on the whole graph,
over all nodes that somebody holds (the mean over holders), relative to the sums' mean square.
"""

from __future__ import annotations

import jax
import numpy as np

from fedjax_sim import population
from fedjax_sim.types import GraphData

PARTIES = 5


def summed(senders: np.ndarray, receivers: np.ndarray, x: np.ndarray) -> np.ndarray:
    """[V, F]: the symmetrically normalised sums over neighbours, self-loops included."""
    size = len(x)
    near = np.eye(size)
    near[receivers, senders] = 1
    root = np.sqrt(near.sum(1))
    return near / root[:, None] / root[None] @ x


def cost(graph: GraphData, parties: population.Parties) -> dict[str, float]:
    """Edges that are cut and edges that are held (with copies), of the graph's; nodes that somebody holds, parties a
    node, and the error."""
    wanted, x = summed(graph.senders, graph.receivers, graph.nodes), graph.nodes
    errors, holders, kept = np.zeros(len(x)), np.zeros(len(x)), 0
    for p in range(len(parties.graphs.ids)):
        own = jax.tree.map(lambda leaf, p=p: leaf[p], parties.graphs)
        real = (own.receivers >= 0) & (own.senders < len(own.ids))
        ids, held = own.ids[own.ids >= 0], own.ids >= 0
        found = summed(own.senders[real], own.receivers[real], own.nodes)[held]
        errors[ids] += np.square(found - wanted[ids]).sum(1)
        holders[ids] += 1
        kept += len(set(zip(own.ids[own.senders[real]].tolist(), own.ids[own.receivers[real]].tolist(), strict=True)))
    there = holders > 0
    return {
        "cut": parties.cut_edges / len(graph.senders),
        "copies": kept / len(graph.senders),
        "nodes": there.mean(),
        "holders": holders[there].mean(),
        "error": float((errors[there] / holders[there]).mean() / np.square(wanted[there]).sum(1).mean()),
    }


def main() -> dict[str, dict[str, float]]:
    """The costs of each partition."""
    graph = jax.tree.map(lambda x: np.asarray(x[0]), population.stochastic_blocks(num_clients=1).test["x"])
    real = graph.receivers >= 0
    graph = graph._replace(senders=graph.senders[real], receivers=graph.receivers[real])
    ways = {
        f"nodes, {by}": {"node_owner": population.node_owners(graph, PARTIES, by=by)} for by in ("community", "random")
    }
    ways["edges, random"] = {"edge_owner": population.edge_owners(graph, PARTIES)}
    for hops in (1, 2):
        held = population.neighbourhoods(graph, PARTIES, hops=hops, num_centres=10)
        ways[f"within {hops} of ten centres"] = {"held": held}
    found = {name: cost(graph, population.parties_of(graph, **way)) for name, way in ways.items()}
    print("| partition | edges cut | edges held, with copies | nodes held | parties a node | error |")
    print("|---|---|---|---|---|---|")
    for name, row in found.items():
        shares = " | ".join(f"{row[key]:.0%}" for key in ("cut", "copies", "nodes"))
        print(f"| {name} | {shares} | {row['holders']:.2f} | {row['error']:.2f} |")
    return found


if __name__ == "__main__":
    main()
