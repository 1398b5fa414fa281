"""This module measures the error floor of logistic regression and predicts it by a local quadratic model.

The model needs three matrices at the optimum: the Hessian, the covariance of the clients' gradients, and the covariance
of a minibatch's gradient.
"""

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

DIMENSION = 4
EXAMPLES = 32  # that each client has
REGULARISER = 0.1  # curvature of the squared norm in every client's loss: the Hessian is far from singular
BATCH_SIZE = 8


def _loss(params, examples, key):
    """Returns the regularised cross-entropy of each example."""
    score = examples["x"] @ params["w"]
    entropy = jnp.logaddexp(0, score) - examples["y"] * score
    return {"loss": entropy + REGULARISER / 2 * jnp.sum(params["w"] ** 2)}


def logistic_floor(key: Array, size: int, num_runs: int, seed: int) -> Iterator[Comparison]:
    """Measures the excess loss at the floor of one-step FedAvg with minibatches, for several step sizes and cohorts.

    Args:
      key: the random key of all runs.
      size: N.
      num_runs: independent runs behind each floor.
      seed: decides the clients' data.

    Yields: a comparison for each step size and cohort. The loss is that of the local quadratic model.
    """
    rng = np.random.default_rng([seed, size])
    # Each client labels its examples by a weight vector of its own, near a common one.
    teachers = rng.normal(size=DIMENSION) + 0.3 * rng.normal(size=(size, DIMENSION))
    x = rng.normal(size=(size, EXAMPLES, DIMENSION))
    y = (rng.uniform(size=(size, EXAMPLES)) < 1 / (1 + np.exp(-np.einsum("ned,nd->ne", x, teachers)))).astype(float)
    data = population.from_clients([{"x": np.float32(a), "y": np.float32(b)} for a, b in zip(x, y, strict=True)])
    optimum = np.zeros(DIMENSION)
    for _ in range(50):  # Newton's method
        gradients, hessian = _derivatives(x, y, optimum)
        optimum -= np.linalg.solve(hessian, gradients.mean((0, 1)))
    gradients, hessian = _derivatives(x, y, optimum)
    client_gradients = gradients.mean(1)
    deviations = gradients - client_gradients[:, None]
    example_covariance = np.einsum("nea,neb->ab", deviations, deviations) / (size * EXAMPLES)
    moments = {
        # The mean gradient is zero at the optimum, so second moments are covariances.
        "client_covariance": client_gradients.T @ client_gradients / size,
        # A batch is drawn without replacement from the client's examples.
        "minibatch_covariance": example_covariance * (EXAMPLES - BATCH_SIZE) / (BATCH_SIZE * (EXAMPLES - 1)),
    }
    optimum_32 = jnp.asarray(optimum, jnp.float32)
    half_hessian = jnp.asarray(hessian / 2, jnp.float32)
    for step_size, cohort in ((0.1, size // 4), (0.2, size // 4), (0.2, size)):
        sampler = sampling.uniform(size, cohort)
        work = client.local_sgd(
            _loss, optax.sgd(step_size), client.work(num_steps=1, batch_size=BATCH_SIZE, weighting="uniform")
        )
        aggregator = aggregation.mean(weighting="uniform")
        server_step = server.optimizer(optax.sgd(1.0))
        floor = theory.budget_from_moments(hessian, step_size=step_size, design=sampler.design, **moments)
        # Runs start at the optimum. After 6 time constants of the slowest direction the variance has settled.
        smallest_curvature = np.linalg.eigvalsh(hessian)[0]
        rounds = int(np.ceil(6 / (step_size * smallest_curvature)))

        def quadratic(params):
            distance = params["w"] - optimum_32
            return {"excess_loss": distance @ half_hessian @ distance}

        results = independent_runs(
            stream(key, f"{step_size} {cohort}"), federated(sampler, work, aggregator, server_step, mesh=None),
            {"w": optimum_32}, data, num_runs, evaluation=quadratic, rounds=rounds, batch=100,
        )  # fmt: skip
        conditions = {"part": "logistic regression", "value": f"step {step_size:g}, m = {cohort}", "rounds": rounds}
        yield measured(conditions, "excess loss", results["excess_loss"], floor.total, kind="leading order")


def _derivatives(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the gradient of every example, [N, n, d], and the Hessian of the global risk, [d, d]."""
    probability = 1 / (1 + np.exp(-x @ w))
    gradients = (probability - y)[..., None] * x + REGULARISER * w
    variance = probability * (1 - probability)
    hessian = np.einsum("ne,nea,neb->ab", variance, x, x) / y.size + REGULARISER * np.eye(len(w))
    return gradients, hessian
