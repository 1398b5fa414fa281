"""What every rival's script shares: arrays, final loss, answer. NumPy alone; run by path, not as a module."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, NamedTuple

import numpy as np

BEGAN = time.perf_counter()


class Job(NamedTuple):
    """A dense network with ReLU and FedAvg with everybody in each round, the clients being equal."""

    x: np.ndarray  # [m, n, features] float32
    y: np.ndarray  # [m, n] int32
    layers: list  # [(kernel [in, out], bias [out]), ...]
    rate: float
    batch_size: int  # n / batch_size local steps: one epoch
    rounds: int  # of them the first warms up


def read() -> Job:
    """The job named on the command line: ARRAYS.npz ROUNDS."""
    with np.load(sys.argv[1], allow_pickle=False) as file:
        held = {name: file[name] for name in file.files}
    count = sum(name.startswith("kernel_") for name in held)
    layers = [(held[f"kernel_{i}"], held[f"bias_{i}"]) for i in range(count)]
    rate, batch_size = float(held["rate"]), int(held["batch_size"])
    return Job(held["x"], held["y"], layers, rate, batch_size, int(sys.argv[2]))


def mean_loss(job: Job, layers: list) -> float:
    """Cross entropy over every example of every client, in float64."""
    h = job.x.reshape(-1, job.x.shape[-1]).astype(np.float64)
    for i, (kernel, bias) in enumerate(layers):
        h = h @ np.asarray(kernel, np.float64) + np.asarray(bias, np.float64)
        h = np.maximum(h, 0) if i < len(layers) - 1 else h
    h -= h.max(1, keepdims=True)
    return float((np.log(np.exp(h).sum(1)) - h[np.arange(len(h)), job.y.reshape(-1)]).mean())


def answer(job: Job, stamps: list[float], layers: list, *, version: str, **more: Any) -> None:
    """Prints the result; `stamps` are clock readings before the first round and after each."""
    rounds = list(np.diff(stamps))
    found = {
        "version": version,
        "startup_seconds": stamps[0] - BEGAN,
        "first_round_seconds": rounds[0],
        "round_seconds": rounds[1:],
        "clients": len(job.x),
        "final_loss": mean_loss(job, layers),
    }
    print("\n" + json.dumps(found | more), flush=True)
