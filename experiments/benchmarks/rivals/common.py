"""What every rival's script shares: arrays, answer. NumPy alone; run by path, not as a module."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

BEGAN = time.perf_counter()


class Job(NamedTuple):
    """A model and FedAvg with everybody in each round, the clients being equal."""

    kind: str  # "mlp", "cnn_12k", "small_cnn" or "lstm", as in jax_models and torch_models
    x: np.ndarray  # [m, n, ...] float32, images with channels last; tokens int32
    y: np.ndarray  # [m, n, ...] int32
    params: dict  # {layer: {part: array}}, the initial weights
    rate: float
    batch_size: int  # n / batch_size local steps: one epoch
    rounds: int  # of them the first warms up


def write(path: Any, params: dict, **more: Any) -> None:
    """Weights as an npz with the names LAYER.PART; `more` beside them."""
    flat = {f"{layer}.{part}": np.asarray(a) for layer, parts in params.items() for part, a in parts.items()}
    np.savez(path, **flat, **more)


def load(path: Any) -> tuple[dict, dict]:
    """The weights of such a file, and what is beside them."""
    params, more = {}, {}
    with np.load(path, allow_pickle=False) as file:
        for name in file.files:
            layer, _, part = name.partition(".")
            (params.setdefault(layer, {}) if part else more)[part or name] = file[name]
    return params, more


def read() -> Job:
    """The job named on the command line: ARRAYS.npz ROUNDS OUT.npz."""
    params, held = load(sys.argv[1])
    kind, rate, batch_size = str(held["kind"]), float(held["rate"]), int(held["batch_size"])
    return Job(
        kind=kind, x=held["x"], y=held["y"], params=params, rate=rate, batch_size=batch_size, rounds=int(sys.argv[2])
    )


def dense_layers(params: dict) -> list:
    """[(kernel [in, out], bias [out]), ...] of a dense network, in order."""
    return [(params[name]["kernel"], params[name]["bias"]) for name in sorted(params)]  # hidden_0, ..., output


def mean_loss(logits: Callable, x: np.ndarray, y: np.ndarray, rows: int = 500) -> float:
    """Cross entropy over all examples [N, ...] (and tokens), the logits taken of `rows` examples at a time."""
    total = 0.0
    for start in range(0, len(x), rows):
        z = np.asarray(logits(x[start : start + rows]), np.float64)
        z -= z.max(-1, keepdims=True)
        chosen = np.take_along_axis(z, y[start : start + rows, ..., None], -1)[..., 0]
        total += (np.log(np.exp(z).sum(-1)) - chosen).sum()
    return float(total / y.size)


def answer(job: Job, stamps: list[float], params: dict, logits: Callable, *, version: str, form: str) -> None:
    """Prints the result and writes the trained weights, with logits of the initial ones, to OUT.npz.

    Args:
      job: what was trained.
      stamps: clock readings before the first round and after each.
      params: {layer: {part: array}} after the last round.
      logits: rows x [b, ...] -> logits of the *initial* weights, by the model that was trained.
      version: the framework, and what it runs on.
      form: how it ran, in words.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    write(sys.argv[3], params, initial_logits=np.asarray(logits(job.x[0])))
    rounds = list(np.diff(stamps))
    found = {
        "version": version,
        "form": form,
        "startup_seconds": stamps[0] - BEGAN,
        "first_round_seconds": rounds[0],
        "round_seconds": rounds[1:],
        "initial_loss": mean_loss(logits, *(a.reshape(-1, *a.shape[2:]) for a in (job.x, job.y))),
    }
    print("\n" + json.dumps(found), flush=True)
