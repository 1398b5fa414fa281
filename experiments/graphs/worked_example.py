"""SplitGNN worked out: a client computes a graph layer 16 -> 32 on 100 nodes, the server a dense head 32 -> 7.

    python experiments/graphs/worked_example.py

200 random directed edges: those from a node to itself are left out, doubles count once, and a node is normalised by the
edges that it receives and itself. The training nodes, about 30 of 100, are drawn once. 30 steps of Adam at 0.005. The
loss starts near ln 7 = 1.946, for labels are random; what the training learns of them is by heart.
"""

from __future__ import annotations

import jax
import numpy as np
import optax

from fedjax_sim import algorithms, models, population, sampling


def main() -> dict[str, float]:
    """Parameters, floats that cross each way and back, and the first and last loss."""
    rng = np.random.default_rng(0)
    graph = population.graph_data(rng.normal(size=(100, 16)), rng.integers(0, 100, (200, 2)), directed=True)
    labels, train = rng.integers(0, 7, 100), np.flatnonzero(rng.random(100) > 0.7)
    rest = np.setdiff1d(np.arange(100), train)
    data = population.node_data(graph, labels, train, rest, name="worked", partition="random")
    model = models.gcn(16, 7, hidden=(32,), output="dense", dropout=0.0)
    made = algorithms.split_gnn(model, sampling.full(1), optax.adam(0.005))
    key, step, losses, floats = jax.random.key(0), jax.jit(made.step), [], 0
    params, _ = model.init(key)
    state = made.init(key, params, data.train)
    for t in range(30):
        state, info = step(jax.random.fold_in(key, t), state, data.train)
        losses.append(float(info["local_loss"]))
        floats += info["activation_bytes"].total() // 4
    sizes = {name: sum(leaf.size for leaf in jax.tree.leaves(params[name])) for name in ("graph_0", "output")}
    found = {"client": sizes["graph_0"], "server": sizes["output"], "floats": floats, "first": losses[0]}
    found["last"] = losses[-1]
    print(f"parameters: {found['client']} at the client, {found['server']} at the server; {floats} floats in 30 steps, "
          f"{floats // 30} a step; loss {losses[0]:.4f} to {losses[-1]:.4f}")  # fmt: skip
    return found


if __name__ == "__main__":
    main()
