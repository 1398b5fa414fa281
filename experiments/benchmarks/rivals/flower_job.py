"""Flower's simulation engine (Ray) with FedAvg on the arrays; its clients train in NumPy, which is generous."""

from __future__ import annotations

import logging
import os
import time
from importlib.metadata import version

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import common
import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

job = common.read()
START = common.dense_layers(job.params)  # it trains the MLP alone
logging.getLogger("flwr").setLevel(logging.ERROR)
client_app, server_app = ClientApp(), ServerApp()


def train(layers, x, y, rng):
    """One epoch of minibatch SGD on one client."""
    layers = [[w.copy(), b.copy()] for w, b in layers]
    order, rate = rng.permutation(len(y)), np.float32(job.rate)
    for start in range(0, len(y), job.batch_size):
        rows = order[start : start + job.batch_size]
        inputs, h = [], x[rows]
        for i, (w, b) in enumerate(layers):
            inputs.append(h)
            h = h @ w + b
            h = np.maximum(h, 0) if i < len(layers) - 1 else h
        p = np.exp(h - h.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(rows)), y[rows]] -= 1
        back = p / np.float32(len(rows))
        for i in reversed(range(len(layers))):
            w, b = layers[i]
            before = (back @ w.T) * (inputs[i] > 0) if i else None
            w -= rate * (inputs[i].T @ back)
            b -= rate * back.sum(0)
            back = before
    return [a for pair in layers for a in pair]


def logits(x):
    """Of the initial weights."""
    for w, b in START[:-1]:
        x = np.maximum(x @ w + b, 0)
    return x @ START[-1][0] + START[-1][1]


@client_app.train()
def on_train(message: Message, context: Context) -> Message:
    client = int(context.node_config["partition-id"])
    arrays = message.content["arrays"].to_numpy_ndarrays()
    layers = list(zip(arrays[::2], arrays[1::2], strict=True))
    trained = train(layers, job.x[client], job.y[client], np.random.default_rng(client))
    metrics = MetricRecord({"num-examples": len(job.y[client])})
    return Message(RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    stamps = []
    start = ArrayRecord([a for pair in START for a in pair])
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=len(job.x))

    def clock(round, arrays):
        stamps.append(time.perf_counter())

    result = strategy.start(grid, start, num_rounds=job.rounds, timeout=500, evaluate_fn=clock)
    arrays = result.arrays.to_numpy_ndarrays()
    trained = {name: {"kernel": w, "bias": b} for name, w, b in zip(
        sorted(job.params), arrays[::2], arrays[1::2], strict=True
    )}  # fmt: skip
    words = f"Flower {version('flwr')} on ray {version('ray')}"
    common.answer(job, stamps, trained, logits, version=words, form="Ray workers on every core, clients in NumPy")


if __name__ == "__main__":
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(server_app, client_app, len(job.x), backend_config={"client_resources": resources})
