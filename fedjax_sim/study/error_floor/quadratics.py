"""Quadratic clients with every source of error that the budget knows: simulated floors, and the budget beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import aggregation, client, population, sampling, server, theory, transform, validate
from fedjax_sim.algorithms import federated
from fedjax_sim.instruments.runs import independent_runs
from fedjax_sim.prng import normal, stream
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.theory.quadratic import local_noise, local_progress
from fedjax_sim.types import Algorithm

__all__ = ["Quadratics", "Setting"]

CLIP_NORM = 50.0  # above the norm of any update of this problem
BATCH = 100  # runs under one vmap
MOST_ROUNDS, LEAST_STEP = 2000, 0.015  # curvatures are 0.5 at least, and 0.9925^2000 is negligible


class Setting(NamedTuple):
    """One point of the grid; zero leaves a source of error out. Its text is part of its runs' random numbers."""

    step_size: float
    cohort_size: int
    num_steps: int
    gradient_noise: float  # standard deviation of one local gradient's coordinate
    bits: int
    noise_multiplier: float


def _noisy_loss(noise: float):
    """A quadratic risk plus noise . w: its gradient is that of the risk with independent noise in every step."""

    def loss(params, examples, key):
        risk = population.quadratic_loss(params, examples)["loss"]
        tilt = noise * normal(key, params["w"].shape)
        return {"loss": risk + tilt @ params["w"]}

    return loss


class Quadratics:
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

    def range(self, setting: Setting) -> float:
        """The quantiser's range: above all numbers of updates between start and optimum, with room for the noise."""
        progress = local_progress(self.hessians, setting.num_steps, setting.step_size)
        updates = [np.einsum("nij,nj->ni", progress, self.centers - point) for point in (self.start, self.optimum)]
        noise = setting.gradient_noise * setting.step_size * math.sqrt(setting.num_steps)
        return 1.3 * float(np.abs(updates).max()) + 6 * noise

    def algorithm(self, setting: Setting) -> Algorithm:
        """FedAvg with the setting's sources of error."""
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

    def budget(self, setting: Setting) -> theory.Budget:
        """The budget of a setting.

        The quantiser's error depends on where updates lie between two levels. At the floor they fluctuate with the
        model around their mean, so a first budget gives their spread and a second one the error at that spread.
        """
        if not setting.bits:
            return self._budget(setting, 0.0)
        distance = theory.level_distance(setting.bits, self.range(setting))
        first = self._budget(setting, distance**2 / 6)
        progress = local_progress(self.hessians, setting.num_steps, setting.step_size)
        updates = np.einsum("nij,nj->ni", progress, self.centers - first.fixed_point)
        spread = np.einsum("nij,jk,nik->ni", progress, first.covariance, progress)
        noise = local_noise(self.hessians, setting.gradient_noise**2, setting.num_steps, setting.step_size)
        spread = np.sqrt(spread + np.einsum("nii->ni", noise))
        errors = theory.rounding_variance(updates, spread, distance)
        return self._budget(setting, np.einsum("ni,ij->nij", errors, np.eye(self.dimension)))

    def _budget(self, setting: Setting, quantization_variance: Any) -> theory.Budget:
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

    def losses(self, key, setting: Setting, num_runs: int, rounds: tuple[int, ...]) -> np.ndarray:
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
            stream(key, f"_{setting}"),  # "_Setting(...)": another text is another stream
            self.algorithm(setting), start, self.train, num_runs, evaluation=excess, rounds=rounds, batch=BATCH,
        )  # fmt: skip
        if seen.get("clipped_share", np.zeros(1)).max() > 0:
            raise FloatingPointError("Updates left the quantiser's range: lower steps, noise or heterogeneity.")
        self.known[setting, rounds[-1]] = seen["excess_loss"]
        return seen["excess_loss"]

    def rounds_to_floor(self, setting: Setting, budget: theory.Budget) -> int:
        """Rounds until the expected loss is within a thousandth of the floor."""
        path = budget.expected_loss(MOST_ROUNDS, start=self.start)
        near = np.abs(path - budget.total) < 1e-3 * budget.total + 1e-9
        if not near.any():
            hint = f"From {LEAST_STEP:g} on they do; smaller ones do with more local steps."
            rule = f"steps that reach their floor within {MOST_ROUNDS:,} rounds"
            validate.fail("step_sizes", rule, setting.step_size, hint)
        return int(np.argmax(near))

    def floor(self, key, part: str, value: Any, setting: Setting, num_runs: int) -> Comparison:
        """The excess loss of runs to the floor."""
        budget = self.budget(setting)
        deterministic = setting.cohort_size == self.size and not any(setting[3:])
        rounds = self.rounds_to_floor(setting, budget)
        losses = self.losses(key, setting, 2 if deterministic else num_runs, (rounds,))[:, -1]
        predicted = float(budget.expected_loss(rounds, start=self.start)[-1])
        conditions = {"part": part, "value": value, "rounds": rounds}
        samples = losses[:1] if deterministic else losses
        kind = "leading order" if setting.bits else "exact"  # a quantiser's error depends a little on the model
        return measured(conditions, "excess loss", samples, predicted, kind=kind, resolution=1e-7 + 1e-4 * predicted)

    def path(self, key, setting: Setting, num_runs: int) -> Iterator[Comparison]:
        """Excess losses with all causes together, on the way to the floor."""
        budget = self.budget(setting)
        last = self.rounds_to_floor(setting, budget)
        rounds = tuple(sorted({1, *(max(1, round(last * share)) for share in (0.05, 0.1, 0.2, 0.35, 0.5)), last}))
        losses = self.losses(key, setting, num_runs, rounds)
        expected = budget.expected_loss(last, start=self.start)
        for i, t in enumerate(rounds):
            conditions = {"part": "all together", "value": f"round {t}", "rounds": t}
            yield measured(conditions, "excess loss", losses[:, i], expected[t], kind="leading order", resolution=1e-6)
