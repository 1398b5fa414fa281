"""This module measures the error floor of a small network on digits and estimates it from matrices at a minimum.

The matrices are the Hessian, the covariance of the clients' gradients, and the covariance of a minibatch's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from fedjax_sim import aggregation, client, metrics, models, population, sampling, server, theory
from fedjax_sim.algorithms import federated
from fedjax_sim.instruments.runs import independent_runs
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.types import Array

REGULARISER = 0.02  # half of this times the squared parameters is added to the loss, so that no direction is flat
EXAMPLES = 40  # that each client has
BATCH_SIZE = 8
ROUNDS = 100


def model_floor(key: Array, size: int, num_runs: int, seed: int) -> Iterator[Comparison]:
    """Measures the excess training loss of FedAvg after `ROUNDS` rounds from a minimum, over step sizes and cohorts.

    Args:
      key: the random key of model and runs.
      size: N.
      num_runs: independent runs of each setting.
      seed: decides the clients' data.

    Yields: for each step size and cohort the excess loss, beside the estimate from the minimum's moments.
    """
    from scipy.optimize import minimize

    data = population.digits(num_clients=size, min_examples=EXAMPLES, max_examples=EXAMPLES, alpha=1.0, seed=seed)
    model = models.mlp(input_shape=data.input_shape, num_outputs=data.num_outputs, hidden=(6,))
    unregularised_loss = models.supervised(model, models.default_loss(data.task))

    def loss_fn(params, examples, key):
        squares = sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
        return unregularised_loss(params, examples, key) | {
            "loss": unregularised_loss(params, examples, key)["loss"] + REGULARISER / 2 * squares
        }

    all_examples = population.pooled(data.train).examples

    def risk(params):
        return loss_fn(params, all_examples, key)["loss"].mean()

    flat_params, unravel = ravel_pytree(model.init(stream(key, "init"))[0])
    value_and_gradient = jax.jit(jax.value_and_grad(lambda x: risk(unravel(x))))
    options = {"maxiter": 3000, "maxfun": 6000, "ftol": 1e-12, "gtol": 1e-7}
    # The estimate holds around a minimum, so runs must start at one: L-BFGS finds it, with losses in float32.
    minimum = minimize(
        lambda x: tuple(np.asarray(v, np.float64) for v in value_and_gradient(jnp.asarray(x, jnp.float32))),
        np.asarray(flat_params, np.float64), jac=True, method="L-BFGS-B", options=options,
    )  # fmt: skip
    start = unravel(jnp.asarray(minimum.x, jnp.float32))
    lowest_risk = float(minimum.fun)
    moments = metrics.gradient_moments(loss_fn, start, data.train, weighting="uniform")
    hessian = _above_zero(moments.hessian)  # directions of negative curvature count as flat
    # The variance of a batch's mean, drawn without replacement, over the variance of an example.
    batch_factor = (EXAMPLES - BATCH_SIZE) / (BATCH_SIZE * (EXAMPLES - 1))
    for step_size, cohort in ((0.05, size // 10), (0.2, size // 10), (0.2, size)):
        sampler = sampling.uniform(size, cohort)
        work = client.local_sgd(
            loss_fn, optax.sgd(step_size), client.work(num_steps=1, batch_size=BATCH_SIZE, weighting="uniform")
        )
        aggregator = aggregation.mean(weighting="uniform")
        server_step = server.optimizer(optax.sgd(1.0))
        estimate = theory.budget_from_moments(
            hessian,
            step_size=step_size,
            design=sampler.design,
            client_covariance=_above_zero(moments.client_covariance),
            minibatch_covariance=batch_factor * _above_zero(moments.example_covariance),
            num_rounds=ROUNDS,
        )
        results = independent_runs(
            stream(key, f"{step_size} {cohort}"), federated(sampler, work, aggregator, server_step, mesh=None), start,
            data.train, num_runs, evaluation=lambda params: {"risk": risk(params)}, rounds=ROUNDS, batch=4,
        )  # fmt: skip
        conditions = {"part": "digits MLP", "value": f"step {step_size:g}, m = {cohort}", "rounds": ROUNDS}
        samples = results["risk"] - lowest_risk
        yield measured(conditions, "excess loss", samples, estimate.total, kind="estimate", resolution=2e-6)


def _above_zero(matrix: np.ndarray) -> np.ndarray:
    """Returns the nearest matrix without negative eigenvalues; sums in float32 leave a few."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.maximum(values, 0)) @ vectors.T
