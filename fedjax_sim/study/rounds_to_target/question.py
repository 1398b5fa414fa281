"""This study counts rounds, bytes and gradients until a target loss, against local steps and batch sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, metrics, models, population, sampling, theory, tree, validate
from fedjax_sim.instruments.traced_runs import stacked, traced_runs
from fedjax_sim.prng import normal, stream
from fedjax_sim.study.findings import FEW, Comparison, Findings, least_runs, measured, rows_of
from fedjax_sim.study.quadratic_settings import LARGEST_CURVATURE, QuadraticProblem
from fedjax_sim.study.rounds_to_target.claims import rounds_to_target_claims
from fedjax_sim.study.rounds_to_target.figure import rounds_to_target_figure
from fedjax_sim.study.rounds_to_target.setting import gradient_variances, middle_steps, problems_of, start_loss
from fedjax_sim.validate import Positive

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
    """How many rounds does local work save? Counts rounds, bytes and gradients until a target loss, against K and B.

    K is the number of local steps, and B is the batch size.

    FedAvg runs on three populations of quadratic clients, whose whole path to the target has a closed form. In the
    first population all clients have one curvature and the same optimum. In the second, Hessians differ. In the
    third, Hessians and optima differ. The third is also run with noisy gradients in batches. Then an MLP is trained on
    digits; its rounds are counted and not predicted.

    Args:
      num_clients: N of the quadratics.
      dimension: d of the quadratics.
      heterogeneity: spread of the optima in the third population.
      step_size: eta of local steps, at most 0.5.
      num_steps: K.
      target: excess loss, as a share of the start's excess loss.
      max_rounds: T; no run on quadratics has more.
      gradient_noise: standard deviation of a coordinate of one example's gradient.
      batch_sizes: B of the runs with noise.
      num_runs: runs with noise for each B.
      model_clients: N of the digits, ten a round; 0 leaves them out.
      alphas: parameters of the digits' Dirichlet label shares, from IID to skewed.
      num_epochs: E of local work on the digits, where each client has 40 examples.
      model_batch_sizes: B of local work on the digits; 0 takes all examples at once.
      learning_rate: the learning rate of local steps on the digits.
      model_target: the test loss at which the count of rounds on the digits ends.
      model_rounds: rounds of each run on the digits.
      model_runs: runs of each setting on the digits.
      seed: of the populations and of all runs.

    Returns: `Findings`.

    Guarantees: every prediction lies in its interval (tests/study/test_rounds_to_target.py::test_predictions_hold). A
    prediction that is off by one round does not (::test_it_can_tell_another_round).

    References: McMahan et al. 2017, section 3 and table 2.
    """
    options = dict(locals())
    _check(options)
    problems = problems_of(options)
    key = jax.random.key(seed)
    steps = sorted({*num_steps})
    comparisons = [*_quadratics(key, problems, step_size, steps, share=target, max_rounds=max_rounds)]
    comparisons += _noisy(
        key,
        problems["heterogeneous"],
        eta=step_size,
        k=middle_steps(options),
        share=target,
        max_rounds=max_rounds,
        noise=gradient_variances(options),
        num_runs=num_runs,
    )
    if model_clients:
        comparisons += _digits(key, options)
    options = {name: list(value) if isinstance(value, Sequence) else value for name, value in options.items()}
    rows = rows_of(comparisons)
    return Findings(
        name="rounds_to_target",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(rounds_to_target_claims(rows, options)),
        figure=partial(rounds_to_target_figure, rows, options),
        options=options,
    )


def _check(options: dict[str, Any]) -> None:
    """Raises an error that names the first option that is out of range.

    Args:
      options: the arguments of `rounds_to_target`, by name.
    """
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
    """Returns a quadratic loss whose gradient has independent normal noise in every step."""

    def loss(params, examples, key):
        # The gradient of noise . w is the noise.
        tilt = noise * normal(key, params["w"].shape)
        return {"loss": population.quadratic_loss(params, examples)["loss"] + tilt @ params["w"]}

    return loss


def _excess(params: Any, target: Any) -> dict[str, Any]:
    """Returns the excess loss of a model, as an evaluation of `traced_runs`."""
    distance = params["w"] - target["optimum"]
    return {"loss": distance @ target["hessian"] @ distance / 2}


def _runs(problem: QuadraticProblem):
    """Makes the runs of FedAvg with everybody in each round; step size and noise are traced."""
    everybody = sampling.full(len(problem.centers))

    def make(eta, noise):
        # One epoch over K copies of the quadratic is K local steps (`Problem.clients`).
        return algorithms.fedavg(
            _loss(noise), everybody, optax.sgd(eta), num_epochs=1, batch_size=1, weighting="uniform", mesh=None
        )

    return traced_runs(make, _excess)


def _settings(rows: Sequence[tuple[QuadraticProblem, int, float, float]], largest_num_steps: int) -> tuple:
    """Returns the arguments of `traced_runs` between keys and rounds: starts, clients, numbers and targets.

    Args:
      rows: (problem, K, eta, noise) of each run.
      largest_num_steps: the largest K, which decides the shapes of the arrays.
    """
    problems, steps, etas, noises = zip(*rows, strict=True)
    starts = {"w": jnp.asarray(np.stack([problem.start for problem in problems]), jnp.float32)}
    targets = stacked([
        {
            "optimum": jnp.asarray(problem.optimum, jnp.float32),
            "hessian": jnp.asarray(problem.hessians.mean(0), jnp.float32),
        }
        for problem in problems
    ])  # fmt: skip
    clients = stacked([problem.clients(k, largest_num_steps) for problem, k in zip(problems, steps, strict=True)])
    return starts, clients, (jnp.asarray(etas, jnp.float32), jnp.asarray(noises, jnp.float32)), targets


def _quadratics(
    key: Any, problems: dict[str, QuadraticProblem], eta: float, steps: Sequence[int], *, share: float, max_rounds: int
) -> Iterator[Comparison]:
    """Measures rounds, gradients and bytes to the target without noise.

    The rounds are the first t with F(w_t) - F* <= share (F(w_0) - F*), for t up to `max_rounds`. Where the target is
    not reached, the loss after the last round is compared instead.

    Args:
      key: the random key of all runs; nothing depends on it, since everybody takes part with full batches.
      problems: N quadratic clients in d dimensions, by the name of their part.
      eta: the size of local steps.
      steps: K, rising.
      share: the target's excess loss over that of the start, in (0, 1).
      max_rounds: T.

    Yields: for each problem and K three comparisons: rounds, local steps (rounds times K) and kilobytes of all clients,
      both ways; or one, of the last loss over the target's.
    """
    rows = [(problem, k, eta, 0.0) for problem in problems.values() for k in steps]
    size, dimension = problems["heterogeneous"].centers.shape
    starts, clients, values, targets = _settings(rows, steps[-1])
    evaluated_rounds = np.arange(1, max_rounds + 1)
    runs = _runs(problems["heterogeneous"])
    keys = jax.random.split(key, len(rows))
    paths = runs(keys, starts, clients, values, targets, rounds=evaluated_rounds)["loss"]
    bytes_per_round = 2 * 4 * dimension * size  # float32, down and up
    for (name, k), path in zip([(name, k) for name in problems for k in steps], paths, strict=True):
        budget = theory.budget(*problems[name], step_size=eta, num_steps=k)
        expected = budget.expected_loss(max_rounds, start=problems[name].start)
        target = share * expected[0]
        conditions = {"part": name, "local_steps": k, "step_size": eta, "batch_size": None}
        predicted_rounds = metrics.rounds_to_target(expected[1:], target)
        if name == "one curvature":  # every round shortens the distance by the same factor
            rate = theory.fedavg_contraction(*problems[name], num_steps=k, step_size=eta)
            predicted_rounds = theory.rounds_until(rate**2, expected[0], target)
        if not math.isfinite(predicted_rounds) or predicted_rounds > max_rounds:
            final_ratio = expected[-1] / target
            yield measured(
                conditions, "loss after the last round / target", path[-1:] / target, final_ratio, resolution=1e-4
            )
            continue
        rounds = metrics.rounds_to_target(path, target)
        # In rounds whose loss is the target up to rounding, a run in float32 may be on either side of it.
        num_unsure_rounds = int((np.abs(expected[1:] / target - 1) < 1e-5).sum())
        rounds = rounds if math.isfinite(rounds) else float(max_rounds + 1)
        yield measured(conditions, "rounds to target", [rounds], predicted_rounds, resolution=num_unsure_rounds)
        yield measured(conditions, "local steps to target, counted", [rounds * k])
        yield measured(conditions, "kilobytes to target, counted", [rounds * bytes_per_round / 1e3])


def _noisy(
    key: Any,
    problem: QuadraticProblem,
    *,
    eta: float,
    k: int,
    share: float,
    max_rounds: int,
    noise: dict[int, float],
    num_runs: int,
) -> Iterator[Comparison]:
    """Measures the mean loss of runs with noisy gradients in the round in which the budget reaches the target.

    A single noisy run may reach the target earlier or later, so rounds themselves have no closed form. The mean loss in
    a fixed round has. Without such a round the loss after the last round is compared.

    Args:
      key: the random key of all runs.
      problem: the quadratic clients.
      eta: the size of local steps.
      k: K.
      share: the target's excess loss over that of the start, in (0, 1).
      max_rounds: T.
      noise: sigma^2 / B, the variance of a coordinate of a batch's mean gradient, by batch size B.
      num_runs: R independent runs for each B.

    Yields: for each B a comparison of R losses over the target's.
    """
    budgets = {b: theory.budget(*problem, step_size=eta, num_steps=k, gradient_noise=v) for b, v in noise.items()}
    expected_losses = {b: budget.expected_loss(max_rounds, start=problem.start) for b, budget in budgets.items()}
    target = share * start_loss(problem)
    rounds = {b: metrics.rounds_to_target(losses[1:], target) for b, losses in expected_losses.items()}
    evaluated_rounds = [[int(t) if math.isfinite(t) else max_rounds] for t in rounds.values() for _ in range(num_runs)]
    rows = [(problem, k, eta, math.sqrt(v)) for v in noise.values() for _ in range(num_runs)]
    starts, clients, values, targets = _settings(rows, k)
    keys = jax.random.split(stream(key, "batches"), len(rows))
    final_losses = _runs(problem)(keys, starts, clients, values, targets, rounds=evaluated_rounds)["loss"]
    for (b, t), losses in zip(rounds.items(), final_losses.reshape(len(noise), num_runs), strict=True):
        conditions = {"part": "batches", "local_steps": k, "step_size": eta, "batch_size": b}
        is_reached = math.isfinite(t)
        round_number = int(t) if is_reached else max_rounds
        quantity = "loss in the round of the target / target" if is_reached else "loss after the last round / target"
        predicted = expected_losses[b][round_number] / target
        yield measured(conditions, quantity, losses / target, predicted, resolution=1e-4)


def _digits(key: Any, options: dict[str, Any]) -> Iterator[Comparison]:
    """Counts rounds, bytes and gradients until a test loss, for an MLP on digits.

    Args:
      key: the random key of model and runs.
      options: the study's options. `model_clients` is N, `model_rounds` T and `model_runs` R.

    Yields: for each E, B and alpha three comparisons without prediction: rounds, megabytes of the ten clients of each
      round, both ways, and thousands of gradients. If a run did not reach the target, there is one, the test loss after
      T rounds.
    """
    size = options["model_clients"]
    num_runs = options["model_runs"]
    last_round = options["model_rounds"]
    data_by_alpha = {
        alpha: population.digits(
            num_clients=size,
            alpha=alpha,
            min_examples=EXAMPLES,
            max_examples=EXAMPLES,
            held_out_clients=0,
            seed=options["seed"],
        )
        for alpha in options["alphas"]
    }
    data = next(iter(data_by_alpha.values()))  # model and test set are the same for every alpha
    model = models.mlp(input_shape=data.input_shape, num_outputs=data.num_outputs, hidden=(HIDDEN,))
    loss_fn = models.supervised(model, models.default_loss(data.task))
    params = model.init(stream(key, "model"))[0]
    total_runs = num_runs * len(data_by_alpha)
    cohort = 10
    clients = stacked([alpha_data.train for alpha_data in data_by_alpha.values() for _ in range(num_runs)])
    # Run r draws the same cohorts for every alpha.
    keys = jnp.concatenate([jax.random.split(stream(key, "digits"), num_runs)] * len(data_by_alpha))
    test = jax.tree.map(jnp.asarray, data.test)

    def evaluation(params, test):
        return {"loss": metrics.pooled(loss_fn, params, test)["loss"]}

    for epochs in sorted({*options["num_epochs"]}):
        for batch in options["model_batch_sizes"]:

            def make(rate, epochs=epochs, batch=batch):
                return algorithms.fedavg(loss_fn, sampling.uniform(size, cohort), optax.sgd(rate), num_epochs=epochs,
                                         batch_size=batch or None, mesh=None)  # fmt: skip

            rates = (jnp.full(total_runs, options["learning_rate"]),)
            starts = stacked([params] * total_runs)
            tests = stacked([test] * total_runs)
            evaluated_rounds = np.arange(1, last_round + 1)
            runs = traced_runs(make, evaluation)
            losses = runs(keys, starts, clients, rates, tests, rounds=evaluated_rounds)["loss"]
            losses_by_alpha = losses.reshape(len(data_by_alpha), num_runs, last_round)
            for alpha, paths in zip(data_by_alpha, losses_by_alpha, strict=True):
                steps = epochs * (-(-EXAMPLES // batch) if batch else 1)
                conditions = {"part": "digits MLP", "local_steps": steps, "step_size": options["learning_rate"],
                              "batch_size": batch or EXAMPLES, "alpha": alpha}  # fmt: skip
                rounds = np.array([metrics.rounds_to_target(path, options["model_target"]) for path in paths])
                if not np.isfinite(rounds).all():
                    yield measured(conditions, "loss after the last round", paths[:, -1])
                    continue
                megabytes_per_round = 2 * 4 * tree.num_values(params) * cohort / 1e6
                for quantity, amount_per_round in (
                    ("rounds to target", 1.0),
                    ("megabytes to target, counted", megabytes_per_round),
                    ("gradients to target, thousands", cohort * epochs * EXAMPLES / 1e3),
                ):
                    # Rounds are whole numbers, known to half a round.
                    yield measured(conditions, quantity, rounds * amount_per_round, resolution=0.5 * amount_per_round)
