"""The error floor of logistic regression, predicted by its local quadratic model from three matrices at the optimum."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import aggregation, client, population, sampling, server, theory
from fedjax_sim.algorithms import federated
from fedjax_sim.instruments.runs import independent_runs
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.types import Array

__all__ = ["logistic_floor"]

DIMENSION, EXAMPLES = 4, 32
REGULARISER = 0.1  # curvature of the squared norm in every client's loss: the Hessian is far from singular
BATCH_SIZE = 8


def _loss(params, examples, key):
    score = examples["x"] @ params["w"]
    entropy = jnp.logaddexp(0, score) - examples["y"] * score
    return {"loss": entropy + REGULARISER / 2 * jnp.sum(params["w"] ** 2)}


def logistic_floor(key: Array, size: int, num_runs: int, seed: int) -> Iterator[Comparison]:
    """Excess loss at the floor of one-step FedAvg with minibatches, for several step sizes and cohorts."""
    rng = np.random.default_rng([seed, size])
    teachers = rng.normal(size=DIMENSION) + 0.3 * rng.normal(size=(size, DIMENSION))
    x = rng.normal(size=(size, EXAMPLES, DIMENSION))
    y = (rng.uniform(size=(size, EXAMPLES)) < 1 / (1 + np.exp(-np.einsum("ned,nd->ne", x, teachers)))).astype(float)
    data = population.from_clients([{"x": np.float32(a), "y": np.float32(b)} for a, b in zip(x, y, strict=True)])
    optimum = np.zeros(DIMENSION)
    for _ in range(50):  # Newton
        gradients, hessian = _derivatives(x, y, optimum)
        optimum -= np.linalg.solve(hessian, gradients.mean((0, 1)))
    gradients, hessian = _derivatives(x, y, optimum)
    of_clients = gradients.mean(1)
    within = gradients - of_clients[:, None]
    examples = np.einsum("nea,neb->ab", within, within) / (size * EXAMPLES)
    moments = {
        "client_covariance": of_clients.T @ of_clients / size,
        "minibatch_covariance": examples * (EXAMPLES - BATCH_SIZE) / (BATCH_SIZE * (EXAMPLES - 1)),
    }
    optimum_32 = jnp.asarray(optimum, jnp.float32)
    half_hessian = jnp.asarray(hessian / 2, jnp.float32)
    for step_size, cohort in ((0.1, size // 4), (0.2, size // 4), (0.2, size)):
        sampler = sampling.uniform(size, cohort)
        work = client.local_sgd(
            _loss, optax.sgd(step_size), client.work(num_steps=1, batch_size=BATCH_SIZE, weighting="uniform")
        )
        aggregator, step = aggregation.mean(weighting="uniform"), server.optimizer(optax.sgd(1.0))
        floor = theory.budget_from_moments(hessian, step_size=step_size, design=sampler.design, **moments)
        rounds = int(np.ceil(6 / (step_size * np.linalg.eigvalsh(hessian)[0])))

        def quadratic(params):
            away = params["w"] - optimum_32
            return {"excess_loss": away @ half_hessian @ away}

        seen = independent_runs(
            stream(key, f"{step_size} {cohort}"), federated(sampler, work, aggregator, step, mesh=None),
            {"w": optimum_32}, data, num_runs, evaluation=quadratic, rounds=rounds, batch=100,
        )  # fmt: skip
        conditions = {"part": "logistic regression", "value": f"step {step_size:g}, m = {cohort}", "rounds": rounds}
        yield measured(conditions, "excess loss", seen["excess_loss"], floor.total, kind="leading order")


def _derivatives(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(gradient of every example [N, n, d], Hessian of the global risk [d, d])."""
    chance = 1 / (1 + np.exp(-x @ w))
    gradients = (chance - y)[..., None] * x + REGULARISER * w
    hessian = np.einsum("ne,nea,neb->ab", chance * (1 - chance), x, x) / y.size + REGULARISER * np.eye(len(w))
    return gradients, hessian
