"""Where does training come to rest, and what keeps it there? Floors, their components, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import aggregation, client, population, sampling, server, theory, transform, validate
from fedjax_sim.algorithms import federated
from fedjax_sim.instruments.runs import independent_runs
from fedjax_sim.prng import normal, stream
from fedjax_sim.study.error_floor.figure import error_floor_figure
from fedjax_sim.study.error_floor.logistic import logistic_floor
from fedjax_sim.study.error_floor.model import model_floor
from fedjax_sim.study.findings import FEW, Comparison, Findings, least_runs, measured
from fedjax_sim.theory.quadratic import local_noise, local_progress
from fedjax_sim.types import Algorithm

__all__ = ["error_floor"]

QUESTION = "Where does training come to rest, and what keeps it there?"
CLIP_NORM = 50.0  # no letter of this problem is as long
NAMES = {
    "drift": "client drift",
    "client_sampling": "client sampling",
    "minibatch": "minibatches",
    "quantization": "quantisation",
    "privacy_noise": "privacy noise",
}
BATCH = 100  # runs under one vmap
MOST_ROUNDS, LEAST_STEP = 2000, 0.015  # curvatures are 0.5 at least, and 0.9925^2000 is nothing


class _Setting(NamedTuple):
    """One point of the grid; zero leaves a source out."""

    step_size: float
    cohort_size: int
    num_steps: int
    gradient_noise: float  # standard deviation of one local gradient's coordinate
    bits: int
    noise_multiplier: float


def error_floor(
    *,
    num_clients: int = 40,
    dimension: int = 4,
    heterogeneity: float = 1.0,
    step_sizes: Sequence[float] = (0.05, 0.1, 0.2),
    cohort_sizes: Sequence[int] = (4, 10, 40),
    num_steps: Sequence[int] = (1, 4, 12),
    bits: Sequence[int] = (3, 4, 8),
    noise_multipliers: Sequence[float] = (0.003, 0.01),
    num_runs: int = 2000,
    logistic_clients: int = 60,
    model_clients: int = 100,
    seed: int = 0,
) -> Findings:
    """Where does training come to rest? The loss floor of FedAvg against the budget of its causes.

    Quadratic clients f_i = (w - a_i)^T H_i (w - a_i) / 2, with noise on every local gradient, uniform cohorts,
    stochastic quantisation of the letters and Gaussian noise on their mean. The middle value of each list is the base;
    each other value is tried alone. Then each cause alone, and all together; then logistic regression, through its
    local quadratic model.

    Args:
      num_clients: N. dimension: d. heterogeneity: spread of the clients' optima.
      step_sizes: eta. cohort_sizes: m. num_steps: K.
      bits: of a letter's numbers. noise_multipliers: z, with a clip norm that no letter reaches.
      num_runs: independent runs behind each floor.
      logistic_clients: clients of the logistic regression; 0 leaves it out.
      model_clients: clients of the digits, for a small network beside its estimate; 0 leaves it out.
      seed: decides everything.

    Returns: `Findings`: expected excess losses F(w_T) - F* at rest, and on the way there.

    Guarantees: every prediction lies in its interval (tests/study/test_error_floor.py::test_predictions_hold), and one
    without a component does not (::test_it_notices_what_is_left_out).

    References: `theory.budget`; Suresh et al. 2017 for the quantiser; Mandt, Hoffman and Blei 2017 for floors of SGD.
    """
    options = {name: list(value) if isinstance(value, Sequence) else value for name, value in locals().items()}
    _check(options)
    base = _Setting(*(given[len(given) // 2] for given in (step_sizes, cohort_sizes, num_steps)), 0.3,
                    bits[len(bits) // 2], noise_multipliers[(len(noise_multipliers) - 1) // 2])  # fmt: skip
    problem = _Quadratics(num_clients, dimension, heterogeneity, seed)
    key = jax.random.key(seed)
    nothing = base._replace(cohort_size=num_clients, gradient_noise=0.0, bits=0, noise_multiplier=0.0)
    alone = {
        "drift": nothing,
        "client_sampling": nothing._replace(cohort_size=base.cohort_size),
        "minibatch": nothing._replace(gradient_noise=base.gradient_noise),
        "quantization": nothing._replace(bits=base.bits),
        "privacy_noise": nothing._replace(noise_multiplier=base.noise_multiplier),
    }
    tried = [("each alone", NAMES[name], setting) for name, setting in alone.items()]
    for name, values in (("step_size", step_sizes), ("cohort_size", cohort_sizes), ("num_steps", num_steps),
                         ("bits", bits), ("noise_multiplier", noise_multipliers)):  # fmt: skip
        tried += [(name, value, base._replace(**{name: value})) for value in values]
    for *_, setting in tried:
        problem.rounds_to_rest(setting, problem.budget(setting))  # refuses before anything has run
    found = [*problem.path(key, base, num_runs), *(problem.floor(key, *one, num_runs) for one in tried)]
    if logistic_clients:
        found += logistic_floor(stream(key, "logistic"), logistic_clients, min(max(num_runs, 500), 1000), seed)
    if model_clients:
        found += model_floor(stream(key, "model"), model_clients, min(num_runs, 60), seed)
    reading = list(_reading(problem, base, found))
    figure = partial(error_floor_figure, found, base, problem.budget, problem.start, num_clients)
    return Findings("error_floor", QUESTION, found, reading, figure, options)


def _check(options: dict[str, Any]) -> None:
    for name in ("step_sizes", "cohort_sizes", "num_steps", "bits", "noise_multipliers"):
        validate.sequence(name, options[name])
    validate.integer("num_clients", options["num_clients"], 2)
    validate.integer("dimension", options["dimension"], 1, 20)
    validate.in_range("heterogeneity", options["heterogeneity"], 0, 100)
    for value in options["step_sizes"]:
        validate.in_range("step_sizes", value, 0, 1, open_low=True, hint="Curvatures go up to 1.5.")
    for value in options["cohort_sizes"]:
        validate.integer("cohort_sizes", value, 1, options["num_clients"])
    for value in options["num_steps"]:
        validate.integer("num_steps", value)
    for value in options["bits"]:
        validate.integer("bits", value, 2, 16)
    for value in options["noise_multipliers"]:
        validate.in_range("noise_multipliers", value, 0, 10)
    validate.integer("num_runs", options["num_runs"], max(100, least_runs(options["dimension"])), hint=FEW)
    for name, least in (("logistic_clients", 4), ("model_clients", 20)):
        validate.integer(name, options[name], least if options[name] else 0, hint="Or 0, to leave it out.")
    validate.integer("seed", options["seed"], 0)


def _noisy_loss(noise: float):
    """A quadratic risk plus noise . w, whose gradient is that of the risk with fresh noise in every step."""

    def loss(params, examples, key):
        risk = population.quadratic_loss(params, examples)["loss"]
        tilt = noise * normal(key, params["w"].shape)
        return {"loss": risk + tilt @ params["w"]}

    return loss


class _Quadratics:
    """The clients, their simulated floors and their budget."""

    def __init__(self, size: int, dimension: int, heterogeneity: float, seed: int):
        data = population.quadratics(
            num_clients=size, dimension=dimension, smallest_curvature=0.5, largest_curvature=1.5,
            heterogeneity=heterogeneity, seed=seed,
        )  # fmt: skip
        self.size, self.dimension, self.train = size, dimension, data.train
        self.hessians, self.centers = (data.test[name].astype(np.float64) for name in ("hessian", "center"))
        self.optimum = theory.quadratic_optimum(self.hessians, self.centers)
        self.start = self.optimum + 2.0 / math.sqrt(dimension)
        self.known: dict[tuple, np.ndarray] = {}

    def range(self, setting: _Setting) -> float:
        """Of the quantiser: no number of a letter is as large, from the start to the optimum, whatever the noise."""
        progress = local_progress(self.hessians, setting.num_steps, setting.step_size)
        letters = [np.einsum("nij,nj->ni", progress, self.centers - point) for point in (self.start, self.optimum)]
        noise = setting.gradient_noise * setting.step_size * math.sqrt(setting.num_steps)
        return 1.3 * float(np.abs(letters).max()) + 6 * noise

    def algorithm(self, setting: _Setting) -> Algorithm:
        parts = [transform.quantize(setting.bits, range=self.range(setting))] if setting.bits else []
        if setting.noise_multiplier:
            parts.append(transform.gaussian_mechanism(CLIP_NORM, setting.noise_multiplier))
        return federated(
            sampling.uniform(self.size, setting.cohort_size),
            client.local_sgd(
                _noisy_loss(setting.gradient_noise),
                optax.sgd(setting.step_size),
                client.work(num_steps=setting.num_steps, weighting="uniform"),
            ),
            aggregation.fixed_mean(setting.cohort_size),
            server.optimizer(optax.sgd(1.0)),
            transform=transform.chain(*parts) if parts else None,
            mesh=None,
        )

    def budget(self, setting: _Setting) -> theory.Budget:
        """With the quantiser's error where letters really lie: they fluctuate with the model around their mean."""
        if not setting.bits:
            return self._budget(setting, 0.0)
        distance = theory.level_distance(setting.bits, self.range(setting))
        first = self._budget(setting, distance**2 / 6)
        progress = local_progress(self.hessians, setting.num_steps, setting.step_size)
        letters = np.einsum("nij,nj->ni", progress, self.centers - first.fixed_point)
        spread = np.einsum("nij,jk,nik->ni", progress, first.covariance, progress)
        noise = local_noise(self.hessians, setting.gradient_noise**2, setting.num_steps, setting.step_size)
        spread = np.sqrt(spread + np.einsum("nii->ni", noise))
        errors = theory.rounding_variance(letters, spread, distance)
        return self._budget(setting, np.einsum("ni,ij->nij", errors, np.eye(self.dimension)))

    def _budget(self, setting: _Setting, quantization_variance: Any) -> theory.Budget:
        return theory.budget(
            self.hessians,
            self.centers,
            step_size=setting.step_size,
            num_steps=setting.num_steps,
            design=sampling.uniform(self.size, setting.cohort_size).design,
            gradient_noise=setting.gradient_noise**2,
            quantization_variance=quantization_variance,
            privacy_variance=(setting.noise_multiplier * CLIP_NORM / setting.cohort_size) ** 2,
        )

    def losses(self, key, setting: _Setting, num_runs: int, rounds: tuple[int, ...]) -> np.ndarray:
        """[R, rounds] excess losses of independent runs."""
        if (setting, rounds[-1]) in self.known:
            return self.known[setting, rounds[-1]][:, -len(rounds) :]
        hessian = jnp.asarray(self.hessians.mean(0), jnp.float32)
        optimum = jnp.asarray(self.optimum, jnp.float32)

        def excess(params):
            away = params["w"] - optimum
            return {"excess_loss": away @ hessian @ away / 2}

        start = {"w": jnp.asarray(self.start, jnp.float32)}
        seen = independent_runs(
            stream(key, str(setting)), self.algorithm(setting), start, self.train, num_runs,
            evaluation=excess, rounds=rounds, batch=BATCH,
        )  # fmt: skip
        if seen.get("clipped_share", np.zeros(1)).max() > 0:
            raise FloatingPointError("Letters left the quantiser's range: lower steps, noise or heterogeneity.")
        self.known[setting, rounds[-1]] = seen["excess_loss"]
        return seen["excess_loss"]

    def rounds_to_rest(self, setting: _Setting, budget: theory.Budget) -> int:
        """Until what is left of the start's loss is a thousandth of the floor."""
        path = budget.expected_loss(MOST_ROUNDS, start=self.start)
        near = np.abs(path - budget.total) < 1e-3 * budget.total + 1e-9
        if not near.any():
            hint = f"From {LEAST_STEP:g} on they are; smaller ones are with more local steps."
            rule = f"steps that are at rest after {MOST_ROUNDS:,} rounds"
            validate.fail("step_sizes", rule, setting.step_size, hint)
        return int(np.argmax(near))

    def floor(self, key, part: str, value: Any, setting: _Setting, num_runs: int) -> Comparison:
        budget = self.budget(setting)
        deterministic = setting.cohort_size == self.size and not any(setting[3:])
        rounds = self.rounds_to_rest(setting, budget)
        losses = self.losses(key, setting, 2 if deterministic else num_runs, (rounds,))[:, -1]
        predicted = float(budget.expected_loss(rounds, start=self.start)[-1])
        conditions = {"part": part, "value": value, "rounds": rounds}
        samples = losses[:1] if deterministic else losses
        kind = "leading order" if setting.bits else "exact"  # a quantiser's error depends on the model, if little
        return measured(conditions, "excess loss", samples, predicted, kind=kind, resolution=1e-7 + 1e-4 * predicted)

    def path(self, key, setting: _Setting, num_runs: int) -> Iterator[Comparison]:
        """All causes together, on the way to the floor."""
        budget = self.budget(setting)
        rest = self.rounds_to_rest(setting, budget)
        rounds = tuple(sorted({1, *(max(1, round(rest * share)) for share in (0.05, 0.1, 0.2, 0.35, 0.5)), rest}))
        losses = self.losses(key, setting, num_runs, rounds)
        expected = budget.expected_loss(rest, start=self.start)
        for i, t in enumerate(rounds):
            conditions = {"part": "all together", "value": f"round {t}", "rounds": t}
            yield measured(conditions, "excess loss", losses[:, i], expected[t], kind="leading order", resolution=1e-6)


def _reading(problem: _Quadratics, base: _Setting, found: Sequence[Comparison]) -> Iterator[str]:
    budget = problem.budget(base)
    parts = ", ".join(f"{NAMES[name]} {budget.losses[name] / budget.total:.0%}" for name in NAMES)
    yield (
        f"With a constant step a run does not reach the optimum: it comes to rest {budget.total:.3g} above it, after "
        f"about {budget.rounds_to_floor(problem.start)} rounds. The floor is a sum: {parts}. Drift is a bias that no "
        "averaging over cohorts removes; the others vary. Client sampling falls as (1/m) (N - m) / (N - 1) and "
        "vanishes at m = N; minibatches and quantisation fall as 1/m, privacy noise as 1/m^2."
    )
    slow, fast = (problem.budget(base._replace(step_size=eta)) for eta in (base.step_size / 2, base.step_size))
    yield (
        f"Speed is paid for with the floor: half of the step size takes the floor from {fast.total:.3g} to "
        f"{slow.total:.3g}, and the rounds to it from {fast.rounds_to_floor(problem.start)} to "
        f"{slow.rounds_to_floor(problem.start)}. What comes through the gradients shrinks with the step; privacy noise "
        "is added to what is sent, whatever the step, and a slower run piles more of it up "
        f"({fast.losses['privacy_noise']:.2g} to {slow.losses['privacy_noise']:.2g}), so that some step is best. An "
        "error floor is not a worse final accuracy: with steps that decay as 1/t it vanishes; compare at equal "
        "cohorts, and say which schedule."
    )
    yield (
        "Each bit more divides the quantiser's part by ((2^(b+1) - 2) / (2^b - 2))^2, about four for many bits and "
        "more for few, since its variance is Delta^2 / 6 a number with Delta = 2 s / (2^b - 2) as long as letters "
        "spread over a level or more; with fewer bits it depends on where they lie, which the prediction knows. An "
        "unbiased quantiser whose error grows with the letter (QSGD) also lowers the largest stable step: keep "
        "eta L (1 + omega / m) < 2."
    )
    if any(one.conditions["part"] == "logistic regression" for one in found):
        yield (
            "For logistic regression the budget uses three matrices at the optimum: the Hessian, the covariance of the "
            "clients' gradients and that of one minibatch. It is the leading order of a local quadratic model: right "
            "to a few per cent while the run stays near the optimum, and no more than that."
        )
    network = [one for one in found if one.conditions["part"] == "digits MLP"]
    if network:
        ratios = ", ".join(f"{one.measured / one.predicted:.2f}" for one in network)
        yield (
            "A network has no closed form. The same three matrices at a minimum give an estimate of how far rounds "
            f"with a constant step drive it away; measured over estimated is {ratios}. It is shown and not judged: "
            "curvature changes along the way."
        )
