"""What does more local work save? Rounds, bytes and gradients until a target loss, against local steps and batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, metrics, models, population, sampling, theory, tree, validate
from fedjax_sim.instruments.traced_runs import stacked, traced_runs
from fedjax_sim.prng import normal, stream
from fedjax_sim.study.findings import FEW, Comparison, Findings, least_runs, measured
from fedjax_sim.study.quadratic_settings import LARGEST_CURVATURE, Problem, quadratic_clients
from fedjax_sim.study.rounds_to_target.figure import target_figure
from fedjax_sim.study.rounds_to_target.reading import target_reading
from fedjax_sim.validate import Positive

__all__ = ["rounds_to_target"]

QUESTION = "How many rounds, and how many bytes, does local work save on the way to a target loss?"
EXAMPLES = 40  # of a client of the digits
HIDDEN = 32


@validate.named_arguments
def rounds_to_target(
    *,
    num_clients: int = 20,
    dimension: int = 4,
    heterogeneity: float = 2.0,
    step_size: float = 0.02,
    num_steps: Sequence[int] = (1, 2, 5, 10, 20, 50),
    target: float = 0.01,
    max_rounds: int = 150,
    gradient_noise: float = 6.0,
    batch_sizes: Sequence[int] = (1, 4, 16),
    num_runs: int = 500,
    model_clients: int = 1000,
    alphas: Sequence[float] = (100.0, 0.1),
    num_epochs: Sequence[int] = (1, 5),
    model_batch_sizes: Sequence[int] = (0, 10),
    learning_rate: Positive = 0.3,
    model_target: float = 0.6,
    model_rounds: int = 100,
    model_runs: int = 4,
    seed: int = 0,
) -> Findings:
    """How many rounds does local work save? Rounds, bytes and gradients until a target loss, against K and batches.

    FedAvg on quadratic clients, whose whole path to the target has a closed form: with one curvature, with one optimum
    and Hessians that differ, and with optima that differ too; then with noisy gradients, in batches. Then the digits'
    MLP, whose rounds are counted and not predicted.

    Args:
      num_clients: N. dimension: d. heterogeneity: spread of the optima in the third population.
      step_size: eta of local steps, at most 0.5. num_steps: K.
      target: excess loss, as a share of the start's. max_rounds: T; no run has more.
      gradient_noise: standard deviation of one example's gradient, a coordinate. batch_sizes: B. num_runs: with noise.
      model_clients: N of the digits, ten a round; 0 leaves them out. alphas: of their Dirichlet label shares, from
        IID to skewed.
      num_epochs, model_batch_sizes: E and B of local work on 40 examples; B = 0 for all at once.
      learning_rate, model_target, model_rounds, model_runs: of those runs; the target is a test loss.
      seed: decides everything.

    Returns: `Findings`.

    Guarantees: every prediction lies in its interval (tests/study/test_rounds_to_target.py::test_predictions_hold), and
    a round more or less does not (::test_it_can_tell_another_round).

    References: McMahan et al. 2017, section 3 and table 2.
    """
    options = dict(locals())
    _check(options)
    data = quadratic_clients(num_clients, dimension, heterogeneity, seed)
    problems = {
        "one curvature": Problem(np.broadcast_to(np.eye(dimension), data.hessians.shape), np.zeros_like(data.centers)),
        "one optimum": Problem(data.hessians, np.zeros_like(data.centers)),
        "heterogeneous": data,
    }
    key, steps = jax.random.key(seed), sorted({*num_steps})
    found = [*_quadratics(key, problems, step_size, steps, target, max_rounds)]
    middle = steps[len(steps) // 2]
    noise = {size: gradient_noise**2 / size for size in sorted({*batch_sizes})}
    found += _noisy(key, data, step_size, middle, target, max_rounds, noise, num_runs)
    if model_clients:
        found += _digits(key, options)
    options = {name: list(value) if isinstance(value, Sequence) else value for name, value in options.items()}

    def floor(one: Comparison) -> float:
        k, variance = one.conditions["local_steps"], noise.get(one.conditions["batch_size"], 0.0)
        total = theory.budget(*data, step_size=step_size, num_steps=k, gradient_noise=variance).total
        return total / (target * _start_loss(data))

    reading = list(target_reading(options, found, floor))
    figure = {"problems": problems, "noise": noise, "middle": middle}
    return Findings(
        "rounds_to_target", QUESTION, found, reading, lambda: target_figure(options, found, **figure), options
    )


def _check(options: dict[str, Any]) -> None:
    for name in ("num_steps", "batch_sizes", "alphas", "num_epochs", "model_batch_sizes"):
        validate.sequence(name, options[name])
    validate.integer("num_clients", options["num_clients"], 2)
    validate.integer("dimension", options["dimension"], 1, 40)
    validate.in_range(
        "step_size",
        options["step_size"],
        1e-3,
        1 / LARGEST_CURVATURE,
        hint=f"Curvatures go up to {LARGEST_CURVATURE:g}.",
    )
    validate.in_range("target", options["target"], 1e-4, 1, open_high=True, hint="A share of the start's excess loss.")
    for name in ("heterogeneity", "gradient_noise"):
        validate.in_range(name, options[name], 0, 100)
    for name in ("learning_rate", "model_target"):
        validate.in_range(name, options[name], 0, 10, open_low=True)
    for alpha in options["alphas"]:
        validate.positive("alphas", alpha)
    lows = {"num_steps": 1, "batch_sizes": 1, "num_epochs": 1, "model_batch_sizes": 0}
    for name, low in lows.items():
        for value in options[name]:
            validate.integer(name, value, low, 1000)
    for name, low in (("max_rounds", 1), ("model_rounds", 1), ("model_runs", 2), ("seed", 0)):
        validate.integer(name, options[name], low)
    validate.integer("num_runs", options["num_runs"], max(50, least_runs(options["dimension"])), hint=FEW)
    validate.integer("model_clients", options["model_clients"], 0)
    if 0 < options["model_clients"] < 10:
        validate.fail("model_clients", "0, or at least 10", options["model_clients"], "Ten take part in a round.")


def _loss(noise: Any):
    def loss(params, examples, key):
        tilt = noise * normal(key, params["w"].shape)
        return {"loss": population.quadratic_loss(params, examples)["loss"] + tilt @ params["w"]}

    return loss


def _excess(params: Any, target: Any) -> dict[str, Any]:
    away = params["w"] - target["optimum"]
    return {"loss": away @ target["hessian"] @ away / 2}


def _runs(problem: Problem):
    everybody = sampling.full(len(problem.centers))

    def make(eta, noise):
        return algorithms.fedavg(
            _loss(noise), everybody, optax.sgd(eta), num_epochs=1, batch_size=1, weighting="uniform", mesh=None
        )

    return traced_runs(make, _excess)


def _settings(rows: Sequence[tuple[Problem, int, float, float]], most: int) -> tuple:
    """What `traced_runs` takes between keys and rounds, for each (problem, K, eta, noise)."""
    problems, steps, etas, noises = zip(*rows, strict=True)
    starts = {"w": jnp.asarray(np.stack([one.start for one in problems]), jnp.float32)}
    goals = stacked([
        {"optimum": jnp.asarray(one.optimum, jnp.float32), "hessian": jnp.asarray(one.hessians.mean(0), jnp.float32)}
        for one in problems
    ])  # fmt: skip
    clients = stacked([one.clients(k, most) for one, k in zip(problems, steps, strict=True)])
    return starts, clients, (jnp.asarray(etas, jnp.float32), jnp.asarray(noises, jnp.float32)), goals


def _quadratics(
    key: Any, problems: dict[str, Problem], eta: float, steps: Sequence[int], share: float, max_rounds: int
) -> Iterator[Comparison]:
    """Without noise: rounds, gradients and bytes, or the floor that is above the target."""
    rows = [(problem, k, eta, 0.0) for problem in problems.values() for k in steps]
    size, dimension = problems["heterogeneous"].centers.shape
    starts, clients, values, goals = _settings(rows, steps[-1])
    looks = np.arange(1, max_rounds + 1)
    runs = _runs(problems["heterogeneous"])
    paths = runs(jax.random.split(key, len(rows)), starts, clients, values, goals, looks)["loss"]
    sent = 2 * 4 * dimension * size  # bytes of a round: float32 down and up
    for (name, k), path in zip([(name, k) for name in problems for k in steps], paths, strict=True):
        budget = theory.budget(*problems[name], step_size=eta, num_steps=k)
        expected = budget.expected_loss(max_rounds, start=problems[name].start)
        target = share * expected[0]
        conditions = {"part": name, "local_steps": k, "step_size": eta, "batch_size": None}
        wanted = metrics.rounds_to_target(expected[1:], target)
        if name == "one curvature":  # every round shortens the distance by the same factor
            rate = theory.fedavg_contraction(*problems[name], num_steps=k, step_size=eta)
            wanted = theory.rounds_until(rate**2, expected[0], target)
        if not math.isfinite(wanted) or wanted > max_rounds:
            left = expected[-1]
            yield measured(
                conditions, "loss after the last round / target", path[-1:] / target, left / target, resolution=1e-4
            )
            continue
        rounds = metrics.rounds_to_target(path, target)
        unsure = int((np.abs(expected[1:] / target - 1) < 1e-5).sum())  # rounds whose loss is the target up to rounding
        rounds = rounds if math.isfinite(rounds) else float(max_rounds + 1)
        yield measured(conditions, "rounds to target", [rounds], wanted, resolution=unsure)
        yield measured(conditions, "local steps to target, counted", [rounds * k])
        yield measured(conditions, "kilobytes to target, counted", [rounds * sent / 1e3])


def _noisy(
    key: Any,
    problem: Problem,
    eta: float,
    k: int,
    share: float,
    max_rounds: int,
    noise: dict[int, float],
    num_runs: int,
) -> Iterator[Comparison]:
    """With noisy gradients: the mean loss in the round that the budget names, of runs in batches of B."""
    budgets = {b: theory.budget(*problem, step_size=eta, num_steps=k, gradient_noise=v) for b, v in noise.items()}
    paths = {b: one.expected_loss(max_rounds, start=problem.start) for b, one in budgets.items()}
    goal = share * _start_loss(problem)
    rounds = {b: metrics.rounds_to_target(path[1:], goal) for b, path in paths.items()}
    looks = [[int(t) if math.isfinite(t) else max_rounds] for t in rounds.values() for _ in range(num_runs)]
    rows = [(problem, k, eta, math.sqrt(v)) for v in noise.values() for _ in range(num_runs)]
    starts, clients, values, goals = _settings(rows, k)
    keys = jax.random.split(stream(key, "batches"), len(rows))
    losses = _runs(problem)(keys, starts, clients, values, goals, looks)["loss"].reshape(len(noise), num_runs)
    for (b, t), seen in zip(rounds.items(), losses, strict=True):
        conditions = {"part": "batches", "local_steps": k, "step_size": eta, "batch_size": b}
        at = int(t) if math.isfinite(t) else max_rounds
        words = "loss in the round of the target / target" if math.isfinite(t) else "loss after the last round / target"
        yield measured(conditions, words, seen / goal, paths[b][at] / goal, resolution=1e-4)


def _start_loss(problem: Problem) -> float:
    """The excess loss of the start."""
    away = problem.start - problem.optimum
    return float(away @ problem.hessians.mean(0) @ away) / 2


def _digits(key: Any, options: dict[str, Any]) -> Iterator[Comparison]:
    """The digits' MLP: rounds, bytes and gradients until a test loss, counted."""
    size, runs, last = options["model_clients"], options["model_runs"], options["model_rounds"]
    fields = {alpha: population.digits(
        num_clients=size, alpha=alpha, min_examples=EXAMPLES, max_examples=EXAMPLES, held_out_clients=0,
        seed=options["seed"]) for alpha in options["alphas"]}  # fmt: skip
    data = next(iter(fields.values()))
    model = models.mlp(input_shape=data.input_shape, num_outputs=data.num_outputs, hidden=(HIDDEN,))
    loss_fn = models.supervised(model, models.default_loss(data.task))
    params = model.init(stream(key, "model"))[0]
    count, cohort = runs * len(fields), 10
    clients = stacked([one.train for one in fields.values() for _ in range(runs)])
    keys = jnp.concatenate([jax.random.split(stream(key, "digits"), runs)] * len(fields))  # the same cohorts for all
    test = jax.tree.map(jnp.asarray, data.test)

    def evaluation(params, test):
        return {"loss": metrics.pooled(loss_fn, params, test)["loss"]}

    for epochs in sorted({*options["num_epochs"]}):
        for batch in options["model_batch_sizes"]:

            def make(rate, epochs=epochs, batch=batch):
                return algorithms.fedavg(loss_fn, sampling.uniform(size, cohort), optax.sgd(rate), num_epochs=epochs,
                                         batch_size=batch or None, mesh=None)  # fmt: skip

            rates = (jnp.full(count, options["learning_rate"]),)
            seen = traced_runs(make, evaluation)(
                keys, stacked([params] * count), clients, rates, stacked([test] * count), np.arange(1, last + 1)
            )["loss"]
            for alpha, paths in zip(fields, seen.reshape(len(fields), runs, last), strict=True):
                steps = epochs * (-(-EXAMPLES // batch) if batch else 1)
                conditions = {"part": "digits MLP", "local_steps": steps, "step_size": options["learning_rate"],
                              "batch_size": batch or EXAMPLES, "alpha": alpha}  # fmt: skip
                rounds = np.array([metrics.rounds_to_target(path, options["model_target"]) for path in paths])
                if not np.isfinite(rounds).all():
                    yield measured(conditions, "loss after the last round", paths[:, -1])
                    continue
                megabytes = 2 * 4 * tree.num_values(params) * cohort / 1e6
                for words, each in (("rounds to target", 1.0), ("megabytes to target, counted", megabytes),
                                    ("gradients to target, thousands", cohort * epochs * EXAMPLES / 1e3)):  # fmt: skip
                    yield measured(conditions, words, rounds * each, resolution=0.5 * each)  # rounds are whole
