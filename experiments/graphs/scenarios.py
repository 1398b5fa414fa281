"""Three graphs that nobody holds alone: roads, molecules, acquaintances.

    python experiments/graphs/scenarios.py

*Roads.* Junctions of a town in six districts, each with the counters on its own roads. Whether a junction is congested
follows from the traffic around it, so a junction at a border is read wrongly where the roads across are not known.
*Acquaintances.* People with accounts at five providers; whom somebody knows tells more than what he says of himself.
*Molecules.* Laboratories with graphs of their own: no edge is cut, and FedAvg loses little. Without a message along
bonds a network sees which atoms there are, and not which are neighbours.
"""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, models, population, sampling

HERE = pathlib.Path(__file__).parent / "results"
KEY = jax.random.key(0)


def roads(side: int = 24, districts: int = 6) -> population.FederatedData:
    """Junctions on a grid, a tenth of its roads closed; congested where the mean demand within two roads is high."""
    rng = np.random.default_rng(0)
    at = np.arange(side * side).reshape(side, side)
    every = np.concatenate([
        np.stack([at[:, :-1].ravel(), at[:, 1:].ravel()], 1), np.stack([at[:-1].ravel(), at[1:].ravel()], 1)
    ])  # fmt: skip
    edges, size = every[rng.random(len(every)) > 0.1], side * side
    near = np.eye(size)
    near[edges[:, 0], edges[:, 1]] = near[edges[:, 1], edges[:, 0]] = 1
    demand = rng.normal(size=size)
    load = (near @ near @ demand) / (near @ near).sum(1)
    counters = np.stack([demand + 0.3 * rng.normal(size=size), near.sum(1) - 1], 1)
    order = rng.permutation(size)
    options = {"num_clients": districts, "name": "roads", "partition": "community"}
    graph, labels = population.graph_data(counters, edges), (load > np.median(load)).astype(int)
    return population.node_data(graph, labels, order[: size // 2], order[size // 2 :], **options)


def accuracy(loss_fn, params, examples) -> float:
    values = loss_fn(params, jax.tree.map(jnp.asarray, examples), None)
    weight = np.asarray(values.get("weight", np.ones(len(values["loss"]))))
    return float((np.asarray(values["accuracy"]) * weight).sum() / weight.sum())


def trained(made, params, train, rounds: int):
    state, _ = jax.jit(
        lambda state, train: jax.lax.scan(
            lambda state, i: (made.step(jax.random.fold_in(KEY, i), state, train)[0], None), state, jnp.arange(rounds)
        )
    )(made.init(KEY, params, train), train)
    return made.params(state)


def of_nodes(data: population.FederatedData, rounds: int = 300) -> dict[str, float]:
    """Test accuracies of SplitGNN with and without cut edges, of FedAvg, and without any edge."""
    parties, model = data.train.size, models.graph_sage(data.input_shape[0], data.num_outputs, dropout=0.0)
    loss_fn, params = models.supervised(model, models.node_cross_entropy), model.init(KEY)[0]
    everybody, found = sampling.full(parties), {}
    for cut_edges in ("exchange", "drop"):
        options = {"client_layers": 2, "cut_edges": cut_edges}
        made = algorithms.split_gnn(model, everybody, optax.adam(0.01), **options)
        rows = data.test if cut_edges == "exchange" else data.local_test.examples
        found[cut_edges] = accuracy(loss_fn, trained(made, params, data.train, rounds), rows)
    fedavg = algorithms.fedavg(loss_fn, everybody, optax.adam(0.01), num_steps=5, mesh=None)
    found["FedAvg"] = accuracy(loss_fn, trained(fedavg, params, data.train, rounds // 5), data.local_test.examples)

    def apart(examples):
        x = examples["x"]
        return examples | {"x": x._replace(senders=-jnp.ones_like(jnp.asarray(x.senders)))}

    lonely = population.stored(apart(data.train.examples), np.arange(parties + 1))
    made = algorithms.split_gnn(model, everybody, optax.adam(0.01), client_layers=2, cut_edges="drop")
    found["no edges"] = accuracy(loss_fn, trained(made, params, lonely, rounds), apart(data.test))
    return found


def of_molecules(rounds: int = 80) -> dict[str, float]:
    """Test accuracies of FedAvg, of one laboratory with all molecules, and without bonds."""
    found = {}
    for name in ("one laboratory", "FedAvg", "no edges"):
        data = population.molecules(alpha=3.0)
        graphs, train = data.test["x"], data.train
        if name == "no edges":
            blank = -jnp.ones_like(train.examples["x"].senders)
            x = train.examples["x"]._replace(senders=blank)
            train = population.stored(train.examples | {"x": x}, train.offsets)
            graphs = graphs._replace(senders=-np.ones_like(graphs.senders))
        if name == "one laboratory":
            train = population.stored(train.examples, [0, int(train.offsets[-1])])
        model = models.graph_sage(4, 2, hidden=(32, 32), output="dense", dropout=0.0, readout="sum")
        loss_fn = models.supervised(model, models.softmax_cross_entropy)
        options = {"num_steps": 6 if train.size > 1 else 60, "batch_size": 10, "mesh": None}
        made = algorithms.fedavg(loss_fn, sampling.full(train.size), optax.adam(0.005), **options)
        rows = data.test | {"x": graphs}
        found[name] = accuracy(loss_fn, trained(made, model.init(KEY)[0], train, rounds), rows)
    return found


def main() -> None:
    """Prints the accuracies and draws them."""
    social = population.stochastic_blocks(num_clients=5, num_nodes=1000, num_classes=5, labelled_share=0.1)
    found = {"roads": of_nodes(roads()), "acquaintances": of_nodes(social), "molecules": of_molecules()}
    for name, values in found.items():
        print(f"{name}: " + ", ".join(f"{what} {value:.3f}" for what, value in values.items()))
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.8), layout="constrained")
    for axes, (name, values) in zip(figure.subplots(1, 3), found.items(), strict=True):
        axes.barh(list(values)[::-1], list(values.values())[::-1], color="C0")
        axes.set(title=name, xlabel="test accuracy", xlim=(0, 1))
    figure.savefig(HERE / "scenarios.png", dpi=110)


if __name__ == "__main__":
    main()
