"""What dropped cut edges cost on Cora, and SplitGNN beside FedAvg and a centralised network.

    python experiments/graphs/cora.py PATH [--seeds 10]     # PATH holds cora.npz

Kipf and Welling's recipe throughout: two convolutions with 16 hidden units, dropout 0.5, weight decay 5e-4 on the first
layer, Adam at 0.01, 200 steps; of FedAvg 200 rounds with five local steps each. Each result is written as it is made to
`results/cora.json`; those that are there already are not made again. The figure is drawn from that file.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, models, population, sampling

HERE = pathlib.Path(__file__).parent / "results"
STEPS, DECAY, RATE, LOCAL = 200, 5e-4, 0.01, 5
PARTIES = (2, 5, 10, 20)
ROWS = [("splitgnn", "exchange", "community", 1)]  # method, cut edges, partition, parties; centralised first
ROWS += [("splitgnn", "drop", "community", parties) for parties in PARTIES]
ROWS += [("splitgnn", "drop", "random", parties) for parties in PARTIES]
ROWS += [("splitgnn", "exchange", "community", 20), ("fedavg", "drop", "community", 5)]
ROWS += [("splitgnn", "exchange", "random", 5), ("fedavg", "drop", "random", 5), ("fedavg", "drop", "community", 20)]


def algorithm(method: str, cut_edges: str, parties: int, model: models.Model, loss_fn):
    """One row's algorithm, and its number of rounds."""
    if method == "splitgnn":
        options = {"client_layers": 2, "cut_edges": cut_edges, "weight_decay": DECAY}
        return algorithms.split_gnn(model, sampling.full(parties), optax.adam(RATE), **options), STEPS

    def decayed(params, examples, key):
        values = loss_fn(params, examples, key)
        squares = sum((x * x).sum() for x in jax.tree.leaves(params["graph_0"]))
        return values | {"loss": values["loss"] + DECAY / 2 * squares}

    made = algorithms.fedavg(decayed, sampling.full(parties), optax.adam(RATE), num_steps=LOCAL, mesh=None)
    return made, STEPS


def measured(row: tuple, directory: str, seeds: int) -> dict:
    """Accuracies of some seeds, and the bytes of one run."""
    method, cut_edges, partition, parties = row
    data = population.cora(directory=directory, num_clients=parties, partition=partition)
    model = models.gcn(1433, 7)
    loss_fn = models.supervised(model, models.node_cross_entropy)
    made, rounds = algorithm(method, cut_edges, parties, model, loss_fn)

    def accuracy(params, examples):
        values = loss_fn(params, examples, None)
        return (values["accuracy"] * values["weight"]).sum() / values["weight"].sum()

    @jax.jit
    def run(key, train, together, alone):
        state = made.init(key, model.init(jax.random.fold_in(key, rounds))[0], train)
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(rounds))
        state, info = jax.lax.scan(lambda state, key: made.step(key, state, train), state, keys)
        last = {name: jax.tree.map(lambda x: x[-1], info[name]) for name in info if name.endswith("bytes")}
        params = made.params(state)
        return accuracy(params, together), accuracy(params, alone), last, info["skipped_rounds"].sum()

    found = []
    for seed in range(seeds):
        found.append(jax.device_get(run(jax.random.key(seed), data.train, data.test, data.local_test.examples)))
        assert found[-1][3] == 0, "a round was skipped"
    ways = ("uplink_bytes", "downlink_bytes")
    return {
        "method": method, "cut_edges": cut_edges, "partition": partition, "parties": parties, "seeds": seeds,
        "together": [float(one[0]) for one in found],  # the model on the whole graph
        "alone": [float(one[1]) for one in found],  # on each party's graph without cut edges
        "bytes": rounds * sum(found[0][2][name].total() for name in ways) if parties > 1 else 0,
        "cut_share": cut_share(data),
    }  # fmt: skip


def cut_share(data: population.FederatedData) -> float:
    """The share of edges that are cut."""
    graphs = jax.device_get(data.train.examples["x"])
    real = graphs.receivers >= 0
    return float((graphs.senders[real] >= graphs.ids.shape[1]).mean())


def used(row: dict) -> list[float]:
    """The accuracies of the graph that a row may use: without cut edges each party predicts alone."""
    return row["together" if row["cut_edges"] == "exchange" else "alone"]


def table(rows: list[dict]) -> str:
    """One line a row, in Markdown."""
    lines = [
        "| method | cut edges | parties | partition | edges cut | test accuracy | bytes of a run |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        scores, name = np.array(used(row)), {"splitgnn": "SplitGNN", "fedavg": "FedAvg-GCN"}[row["method"]]
        error = scores.std(ddof=1) / np.sqrt(len(scores)) if len(scores) > 1 else float("nan")
        alone = row["parties"] == 1
        lines.append(
            f"| {'centralised' if alone else name} | {'none' if alone else row['cut_edges']} | {row['parties']} | "
            f"{'' if alone else row['partition']} | {row['cut_share']:.0%} | {scores.mean():.3f} ± {error:.3f} | "
            f"{row['bytes'] / 1e6:,.0f} MB |"
        )
    return "\n".join(lines)


def figure(rows: list[dict], path: pathlib.Path) -> None:
    """Accuracy against the number of parties."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(5.5, 3.6), layout="constrained")
    axes = drawing.subplots()
    one = [row for row in rows if row["parties"] == 1]
    for partition, colour, how in (("community", "C0", "by community"), ("random", "C3", "at random")):
        some = one + [row for row in rows if (row["cut_edges"], row["partition"]) == ("drop", partition)]
        some = sorted((row for row in some if row["method"] == "splitgnn"), key=lambda row: row["parties"])
        x, y = [row["parties"] for row in some], [np.mean(used(row)) for row in some]
        error = [np.std(used(row), ddof=1) / np.sqrt(len(used(row))) for row in some]
        axes.errorbar(x, y, error, marker="o", color=colour, label=f"dropped, papers divided {how}")
    kept = [row for row in rows if row["cut_edges"] == "exchange" and row["method"] == "splitgnn"]
    axes.plot(
        [row["parties"] for row in kept], [np.mean(used(row)) for row in kept], "s", color="C2", label="exchanged"
    )
    axes.axhline(0.815, color="grey", linewidth=0.8, linestyle="--", label="published, 0.815")
    axes.set(xlabel="parties", ylabel="test accuracy on Cora", xscale="log", xticks=[1, 2, 5, 10, 20])
    axes.set_xticklabels(["1", "2", "5", "10", "20"])
    axes.legend(frameon=False)
    drawing.savefig(path, dpi=110)


def main() -> None:
    """Makes the rows that are missing, prints the table, draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--seeds", type=int, default=10)
    given = parser.parse_args()
    path = HERE / "cora.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    done = {(row["method"], row["cut_edges"], row["partition"], row["parties"]) for row in rows}
    for row in ROWS:
        if row not in done:
            start = time.time()
            rows.append(measured(row, given.directory, given.seeds))
            path.write_text(json.dumps(rows, indent=1) + "\n")
            print(f"{row}: {np.mean(used(rows[-1])):.4f} ({time.time() - start:.0f} s)", flush=True)
    rows.sort(key=lambda row: (row["method"], row["cut_edges"] == "drop", row["partition"], row["parties"]))
    print(table(rows))
    figure(rows, HERE / "cora.png")


if __name__ == "__main__":
    main()
