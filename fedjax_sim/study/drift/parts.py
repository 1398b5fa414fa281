"""Parts of the drift study: FedProx, the bias of the end-point gradient on quadratics, and that of a model."""

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
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.study.quadratic_settings import LARGEST_CURVATURE, Base, Problem, distance_to, two_kinds

__all__ = ["BIAS_PARTS", "PAIR", "bias_rows", "model_drift_rows", "proximal_rows", "proximal_theory"]

SOLVE_STEPS = 200  # of gradient descent on a local problem: exact to float32
PAIR = (1.0, 10.0)  # curvatures of two kinds of clients, the optima of one at 0, of the other at 1
TRAINED_ROUNDS = 30  # before the model's drift is measured
BIAS_PARTS = {  # field of a drift: quantity of this study
    "bias": "drift bias",
    "curvature": "curvature part",
    "heterogeneity": "heterogeneity part",
    "leading_term": "leading term",
}


def proximal_theory(problem: Problem, weight: float) -> dict[str, float]:
    """FedProx with exact local solutions: its fixed point's distance to the optimum, and its contraction."""
    where = theory.fedprox_fixed_point(*problem, proximal_weight=weight)
    return {
        "distance to the optimum": float(np.linalg.norm(where - problem.optimum)),
        "contraction of a round": theory.fedprox_contraction(*problem, proximal_weight=weight),
    }


def proximal_rows(base: Base, weights: Sequence[float]) -> Iterator[Comparison]:
    """FedProx with exact local solutions: its fixed point, its contraction, and how far its clients drift."""
    size = len(base.problem.centers)
    pair = two_kinds(base.problem, PAIR)
    everybody = sampling.full(size)

    def make(eta, weight):
        return algorithms.fedprox(
            population.quadratic_loss, everybody, optax.sgd(eta), coefficient=weight, num_steps=SOLVE_STEPS,
            weighting="uniform", mesh=None,
        )  # fmt: skip

    where = [theory.fedprox_fixed_point(*pair, proximal_weight=weight) for weight in weights]
    known = [proximal_theory(pair, weight) for weight in weights]
    rates = [one["contraction of a round"] for one in known]
    count = 2 * len(weights)
    starts = jnp.broadcast_to(jnp.asarray(pair.start, jnp.float32), (count, len(pair.start)))
    values = tuple(jnp.asarray(x * 2, jnp.float32) for x in ([1 / (10 + w) for w in weights], list(weights)))
    targets = jnp.asarray(np.stack([pair.optimum] * len(weights) + where), jnp.float32)
    last = [5 + math.ceil(math.log(1e-8) / math.log(max(rate, 1e-4))) for rate in rates]
    looks = [[rounds] for rounds in last + [1] * len(weights)]
    runs = traced_runs(make, distance_to)
    clients = stacked([pair.clients()] * count)
    away = runs(jax.random.split(jax.random.key(0), count), {"w": starts}, clients, values, targets, looks)["distance"]
    rounding = 2.0**-21 * (1 + float(np.abs(pair.start).max()))
    for i, (weight, point, rate) in enumerate(zip(weights, where, rates, strict=True)):
        conditions = {"part": "FedProx", "algorithm": "FedProx", "proximal_weight": weight}
        far = float(np.linalg.norm(pair.start - point))
        measures = away[i], away[len(weights) + i] / far
        for (name, wanted), value, unit in zip(known[i].items(), measures, (max(1 - rate, 1e-3), far), strict=True):
            yield measured(conditions, name, value, wanted, resolution=rounding / unit)
    yield from _solutions(base, weights)


def _solutions(base: Base, weights: Sequence[float]) -> Iterator[Comparison]:
    """The clients' exact solutions against the minimum of F + (lambda / 2) |w - w_t|^2, and the bound."""
    clients, start = base.problem.clients(), {"w": jnp.asarray(base.problem.start, jnp.float32)}

    @jax.jit
    def solve(start, clients, eta, weight):
        work = client.proximal(population.quadratic_loss, optax.sgd(eta), weight, client.work(num_steps=SOLVE_STEPS))

        def one(id):
            return work.apply(jax.random.key(0), start, (), clients.client(id))[0].update["w"] + start["w"]

        return jax.vmap(one)(jnp.arange(clients.size))

    for weight in weights:
        known = theory.proximal_drift(*base.problem, anchor=base.problem.start, proximal_weight=weight)
        ends = np.asarray(
            solve(start, clients, jnp.float32(1 / (LARGEST_CURVATURE + weight)), jnp.float32(weight)), np.float64
        )
        farthest = np.linalg.norm(ends - known.center, axis=1).max()
        conditions = {"part": "FedProx's drift", "algorithm": "FedProx", "proximal_weight": weight}
        rounding = 2.0**-20 * (1 + float(np.abs(ends).max()))
        exact = float(known.distances.max())
        yield measured(conditions, "largest drift", [farthest], exact, resolution=rounding)
        yield measured(conditions, "largest drift", [farthest], known.bound, kind="upper bound", resolution=rounding)


def bias_rows(base: Base, steps: Sequence[int]) -> Iterator[Comparison]:
    """The bias of the gradients at the end of local work, its parts and its leading term."""
    size = len(base.problem.centers)
    same = Problem(*(np.repeat(x[:1], size, 0) for x in base.problem))

    def parts(name: str, problem: Problem, point: np.ndarray, num_steps: int, eta: float) -> Iterator[Comparison]:
        known = theory.quadratic_drift(*problem, point=point, num_steps=num_steps, step_size=eta)
        params = {"w": jnp.asarray(point, jnp.float32)}
        seen = metrics.drift(population.quadratic_loss, params, problem.clients(), step_size=eta, num_steps=num_steps)
        conditions = {"part": name, "algorithm": "FedAvg", "local_steps": num_steps, "step_size": eta}
        rounding = 2.0**-20 * (1 + float(np.abs(point).max())) * LARGEST_CURVATURE
        for field, quantity in BIAS_PARTS.items():
            value = np.linalg.norm(np.asarray(getattr(seen, field)["w"], np.float64))
            wanted = np.linalg.norm(getattr(known, field))
            yield measured(conditions, quantity, [value], wanted, resolution=rounding)
        left = np.asarray(seen.bias["w"], np.float64) - np.asarray(seen.leading_term["w"])
        rest = [float(np.linalg.norm(one)) for one in (left, known.bias - known.leading_term)]
        yield measured(conditions, "bias less leading term", rest[:1], rest[1], resolution=2 * rounding)

    for k in steps:
        yield from parts("drift bias", base.problem, base.problem.start, k, base.step_size)
    yield from parts("drift bias, half the step", base.problem, base.problem.start, base.num_steps, base.step_size / 2)
    yield from parts("identical clients", same, same.start, base.num_steps, base.step_size)


def _norm(x: Any) -> float:
    return math.sqrt(sum(float(np.sum(np.asarray(leaf, np.float64) ** 2)) for leaf in jax.tree.leaves(x)))


def model_drift_rows(size: int, alpha: float, steps: Sequence[int], seed: int) -> Iterator[Comparison]:
    """Logistic regression: the drift's bias, its parts, and the bias less its leading term."""
    data = population.digits_partition(num_clients=size, alpha=alpha, held_out_clients=0, seed=seed)
    model = models.linear(input_shape=data.input_shape, num_outputs=data.num_outputs)
    loss_fn = models.supervised(model, models.default_loss(data.task))
    params = model.init(jax.random.key(seed))[0]
    descent = algorithms.fedsgd(loss_fn, sampling.full(size), optax.sgd(0.5), mesh=None)
    runs = traced_runs(lambda: descent, lambda params, target: params)
    keys = jax.random.split(jax.random.key(seed), 1)
    trained = runs(keys, stacked([params]), stacked([data.train]), (), jnp.zeros(1), [TRAINED_ROUNDS])
    params = {name: jnp.asarray(x[0, 0], jnp.float32) for name, x in trained.items()}
    for k in sorted({steps[0], steps[len(steps) // 2], steps[-1]}):
        for eta in (0.4, 0.2, 0.1, 0.05, 0.025):
            seen = metrics.drift(loss_fn, params, data.train, step_size=eta, num_steps=k)
            rest = jax.tree.map(lambda x, y: np.asarray(x, np.float64) - y, seen.bias, seen.leading_term)
            conditions = {"part": "logistic regression", "algorithm": "FedAvg", "local_steps": k, "step_size": eta}
            for name, value in (
                ("drift bias", seen.bias), ("curvature part", seen.curvature),
                ("heterogeneity part", seen.heterogeneity), ("leading term", seen.leading_term),
                ("bias less leading term", rest),
            ):  # fmt: skip
                yield measured(conditions, name, [_norm(value)])
