"""Least squares with two layers' worth of names, small enough for NumPy: clients, the loss, gradients, a loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine
from fedjax_sim.population import from_clients

NUM_CLIENTS, STEPS, RATE, ROUNDS = 5, 3, 0.1, 3
SIZES = (4, 2, 7, 1, 5)
OPTIONS = {"num_steps": STEPS, "plan": engine.Plan(2, 2)}


def rows(seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Clients of several sizes, each with a slope of its own."""
    rng = np.random.default_rng(seed)
    made = []
    for size in SIZES:
        x = rng.normal(size=(size, 2)).astype(np.float32)
        slope = rng.normal(size=2)
        made.append({"x": x, "y": (x @ slope + rng.normal()).astype(np.float32)})
    return made


def population(seed: int = 0):
    return from_clients(rows(seed))


def loss_fn(params, examples, key):
    predicted = examples["x"] @ params["body"]["w"] + params["output"]["b"]
    return {"loss": (predicted - examples["y"]) ** 2 / 2}


def start():
    return {"body": {"w": np.float32([0.3, -0.2])}, "output": {"b": np.full((), 0.1, np.float32)}}


START = np.array([0.3, -0.2, 0.1])  # body.w, output.b
BODY, OUTPUT = slice(0, 2), slice(2, 3)


def vector(params) -> np.ndarray:
    """The parameters as one vector, in the order of START; of several models, a row each."""
    w, b = (np.asarray(x, np.float64) for x in (params["body"]["w"], params["output"]["b"]))
    return np.concatenate([w, b[..., None]], axis=-1)


def gradient(model: np.ndarray, client: dict, chosen=slice(None)) -> np.ndarray:
    """Of the mean loss over a client's rows, or some of them; 0 without rows."""
    x = np.concatenate([client["x"], np.ones((len(client["x"]), 1))], axis=1).astype(np.float64)[chosen]
    y = client["y"].astype(np.float64)[chosen]
    return x.T @ (x @ model - y) / len(x) if len(x) else np.zeros_like(model)


def hessian(client: dict, chosen=slice(None)) -> np.ndarray:
    x = np.concatenate([client["x"], np.ones((len(client["x"]), 1))], axis=1).astype(np.float64)[chosen]
    return x.T @ x / len(x) if len(x) else np.zeros((3, 3))


def loss(model: np.ndarray, client: dict) -> float:
    predicted = client["x"] @ model[BODY] + model[OUTPUT]
    return float(((predicted - client["y"]) ** 2).mean() / 2)


def mean(updates, weights=SIZES) -> np.ndarray:
    """The mean of the clients' updates by their numbers of rows."""
    return np.average(updates, axis=0, weights=weights)


def trained(algorithm, rounds: int = ROUNDS, people=None):
    """(state, info of the last round) after some rounds of an algorithm over the clients."""
    people = population() if people is None else people
    state = algorithm.init(jax.random.key(0), start(), people)
    step, info = jax.jit(algorithm.step), None
    for round in range(rounds):
        state, info = step(jax.random.key(round), state, people)
    return state, info


def own_models(algorithm, state) -> np.ndarray:
    """[clients, 3], each client's own model."""
    return vector(jax.jit(algorithm.evaluated.personal)(state, jnp.arange(NUM_CLIENTS)))
