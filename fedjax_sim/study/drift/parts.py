"""This module has three parts of the drift study: FedProx, drift bias on quadratics, and drift bias of a model.

The drift bias is the mean of the clients' gradients at the end of local work, minus the gradient at the start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, client, metrics, models, population, sampling, theory
from fedjax_sim.instruments.traced_runs import stacked, traced_runs
from fedjax_sim.running import kept_results
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.study.quadratic_settings import LARGEST_CURVATURE, Base, QuadraticProblem, distance_to, two_kinds

SOLVE_STEPS = 200  # of gradient descent on a local problem, which solve it up to rounding in float32
PAIR = (1.0, 10.0)  # curvatures of two kinds of clients, the optima of one at 0, of the other at 1
TRAINED_ROUNDS = 30  # before the model's drift is measured
# Fields of `metrics.drift` and `theory.quadratic_drift`, with the quantities of this study.
BIAS_PARTS = {
    "bias": "drift bias",
    "curvature": "curvature part",
    "heterogeneity": "heterogeneity part",
    "leading_term": "leading term",
}


def proximal_theory(problem: QuadraticProblem, weight: float) -> dict[str, float]:
    """Predicts the distance of FedProx's fixed point to the optimum, and the contraction of a round.

    Local problems are solved exactly.

    Args:
      problem: the clients.
      weight: lambda.

    Returns: the two numbers, by quantity.
    """
    fixed_point = theory.fedprox_fixed_point(*problem, proximal_weight=weight)
    return {
        "distance to the optimum": float(np.linalg.norm(fixed_point - problem.optimum)),
        "contraction of a round": theory.fedprox_contraction(*problem, proximal_weight=weight),
    }


def proximal_rows(base: Base, weights: Sequence[float]) -> Iterator[Comparison]:
    """Measures FedProx with exact local solutions: its fixed point, its contraction, and how far its clients drift.

    Args:
      base: the base setting of the study.
      weights: lambda.

    Yields: for each weight the distance of the fixed point to the optimum and the contraction of a round, then how far
      clients drift.
    """
    size = len(base.problem.centers)
    pair = two_kinds(base.problem, PAIR)
    everybody = sampling.full(size)

    def make(eta, weight):
        return algorithms.fedprox(
            population.quadratic_loss, everybody, optax.sgd(eta), coefficient=weight, num_steps=SOLVE_STEPS,
            weighting="uniform", mesh=None,
        )  # fmt: skip

    fixed_points = [theory.fedprox_fixed_point(*pair, proximal_weight=weight) for weight in weights]
    predictions = [proximal_theory(pair, weight) for weight in weights]
    contractions = [prediction["contraction of a round"] for prediction in predictions]
    # Each weight has two runs in one program: to the fixed point, measured from the optimum, and of a single round,
    # measured from the fixed point.
    num_runs = 2 * len(weights)
    starts = jnp.broadcast_to(jnp.asarray(pair.start, jnp.float32), (num_runs, len(pair.start)))
    # The local problem's largest curvature is 10 + lambda, and its inverse is a stable step.
    local_steps = [1 / (10 + weight) for weight in weights]
    values = tuple(jnp.asarray(x * 2, jnp.float32) for x in (local_steps, list(weights)))
    targets = jnp.asarray(np.stack([pair.optimum] * len(weights) + fixed_points), jnp.float32)
    rounds_to_converge = [
        5 + math.ceil(math.log(1e-8) / math.log(max(contraction, 1e-4))) for contraction in contractions
    ]
    evaluated_rounds = [[rounds] for rounds in rounds_to_converge + [1] * len(weights)]
    runs = traced_runs(make, distance_to)
    clients = stacked([pair.clients()] * num_runs)
    keys = jax.random.split(jax.random.key(0), num_runs)
    distances = runs(keys, {"w": starts}, clients, values, targets, rounds=evaluated_rounds)["distance"]
    rounding = 2.0**-21 * (1 + float(np.abs(pair.start).max()))
    for i, (weight, fixed_point, contraction) in enumerate(zip(weights, fixed_points, contractions, strict=True)):
        conditions = {"part": "FedProx", "algorithm": "FedProx", "proximal_weight": weight}
        start_distance = float(np.linalg.norm(pair.start - fixed_point))
        measurements = distances[i], distances[len(weights) + i] / start_distance
        # Rounding errors of many rounds add up geometrically; that of one round is divided by the start's distance.
        units = (max(1 - contraction, 1e-3), start_distance)
        for (name, predicted), value, unit in zip(predictions[i].items(), measurements, units, strict=True):
            yield measured(conditions, name, value, predicted, resolution=rounding / unit)
    yield from _solutions(base, weights)


def _solutions(base: Base, weights: Sequence[float]) -> Iterator[Comparison]:
    """Measures how far the clients' exact solutions lie from the minimum of F + (lambda / 2) |w - w_t|^2.

    Client i solves for w_i*, the minimum of f_i + (lambda / 2) |w - w_t|^2. The largest distance |w_i* - w_bar*| from
    the minimum w_bar* above is compared with its exact value, and with its bound G / (mu + lambda) of
    `theory.proximal_drift`.

    Args:
      base: the base setting; w_t is the start of its problem.
      weights: lambda >= 0.

    Yields: two comparisons for each lambda, without randomness.
    """
    clients = base.problem.clients()
    start = {"w": jnp.asarray(base.problem.start, jnp.float32)}

    @jax.jit
    def solve(start, clients, eta, weight):
        work = client.proximal(population.quadratic_loss, optax.sgd(eta), weight, client.work(num_steps=SOLVE_STEPS))

        def solution(id):
            return work.apply(jax.random.key(0), start, (), clients.client(id))[0].update["w"] + start["w"]

        return jax.vmap(solution)(jnp.arange(clients.size))

    for weight in weights:
        predicted = theory.proximal_drift(*base.problem, anchor=base.problem.start, proximal_weight=weight)
        local_step = jnp.float32(1 / (LARGEST_CURVATURE + weight))
        solutions = np.asarray(kept_results.call(solve, start, clients, local_step, jnp.float32(weight)), np.float64)
        farthest = np.linalg.norm(solutions - predicted.center, axis=1).max()
        conditions = {"part": "FedProx's drift", "algorithm": "FedProx", "proximal_weight": weight}
        rounding = 2.0**-20 * (1 + float(np.abs(solutions).max()))
        exact = float(predicted.distances.max())
        yield measured(conditions, "largest drift", [farthest], exact, resolution=rounding)
        yield measured(
            conditions, "largest drift", [farthest], predicted.bound, kind="upper bound", resolution=rounding
        )


def bias_rows(base: Base, steps: Sequence[int]) -> Iterator[Comparison]:
    """Measures the drift bias on quadratics, its parts and its leading term.

    Args:
      base: the base setting of the study.
      steps: K.

    Yields: for each setting the norms of the bias, of its parts, of its leading term, and of the bias less this term.
    """
    size = len(base.problem.centers)
    identical_clients = QuadraticProblem(*(np.repeat(x[:1], size, 0) for x in base.problem))

    def parts(
        name: str, problem: QuadraticProblem, point: np.ndarray, num_steps: int, eta: float
    ) -> Iterator[Comparison]:
        predicted = theory.quadratic_drift(*problem, point=point, num_steps=num_steps, step_size=eta)
        params = {"w": jnp.asarray(point, jnp.float32)}
        drift = metrics.drift(population.quadratic_loss, params, problem.clients(), step_size=eta, num_steps=num_steps)
        conditions = {"part": name, "algorithm": "FedAvg", "local_steps": num_steps, "step_size": eta}
        rounding = 2.0**-20 * (1 + float(np.abs(point).max())) * LARGEST_CURVATURE
        for field, quantity in BIAS_PARTS.items():
            value = np.linalg.norm(np.asarray(getattr(drift, field)["w"], np.float64))
            predicted_value = float(np.linalg.norm(getattr(predicted, field)))
            yield measured(conditions, quantity, [value], predicted_value, resolution=rounding)
        difference = np.asarray(drift.bias["w"], np.float64) - np.asarray(drift.leading_term["w"])
        lengths = [float(np.linalg.norm(x)) for x in (difference, predicted.bias - predicted.leading_term)]
        yield measured(conditions, "bias less leading term", lengths[:1], lengths[1], resolution=2 * rounding)

    for k in steps:
        yield from parts("drift bias", base.problem, base.problem.start, k, base.step_size)
    yield from parts("drift bias, half the step", base.problem, base.problem.start, base.num_steps, base.step_size / 2)
    yield from parts("identical clients", identical_clients, identical_clients.start, base.num_steps, base.step_size)


def _norm(x: Any) -> float:
    """Returns the Euclidean norm of a pytree, summed in float64."""
    return math.sqrt(sum(float(np.sum(np.asarray(leaf, np.float64) ** 2)) for leaf in jax.tree.leaves(x)))


def model_drift_rows(size: int, alpha: float, steps: Sequence[int], seed: int) -> Iterator[Comparison]:
    """Measures the drift bias of logistic regression, its parts, and the bias less its leading term.

    Args:
      size: N.
      alpha: the parameter of the clients' Dirichlet label shares; small values give unlike clients.
      steps: K, rising; the first, the middle and the last are used.
      seed: decides data and model.

    Yields: for each K and step size the norms of these vectors, without predictions.
    """
    data = population.digits_partition(num_clients=size, alpha=alpha, held_out_clients=0, seed=seed)
    model = models.linear(input_shape=data.input_shape, num_outputs=data.num_outputs)
    loss_fn = models.supervised(model, models.default_loss(data.task))
    params = model.init(jax.random.key(seed))[0]
    # The drift is measured at a model that gradient descent has reached after some rounds.
    descent = algorithms.fedsgd(loss_fn, sampling.full(size), optax.sgd(0.5), mesh=None)
    runs = traced_runs(lambda: descent, lambda params, target: params)
    keys = jax.random.split(jax.random.key(seed), 1)
    trained = runs(keys, stacked([params]), stacked([data.train]), (), jnp.zeros(1), rounds=[TRAINED_ROUNDS])
    params = {name: jnp.asarray(x[0, 0], jnp.float32) for name, x in trained.items()}
    for k in sorted({steps[0], steps[len(steps) // 2], steps[-1]}):
        for eta in (0.4, 0.2, 0.1, 0.05, 0.025):
            drift = metrics.drift(loss_fn, params, data.train, step_size=eta, num_steps=k)
            difference = jax.tree.map(lambda x, y: np.asarray(x, np.float64) - y, drift.bias, drift.leading_term)
            conditions = {"part": "logistic regression", "algorithm": "FedAvg", "local_steps": k, "step_size": eta}
            for quantity, value in (
                ("drift bias", drift.bias),
                ("curvature part", drift.curvature),
                ("heterogeneity part", drift.heterogeneity),
                ("leading term", drift.leading_term),
                ("bias less leading term", difference),
            ):
                yield measured(conditions, quantity, [_norm(value)])
