"""This module simulates the error floor of quadratic clients with all sources of error and predicts it by the budget.

The sources are client drift, client sampling, minibatch noise, quantisation and privacy noise.
"""

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

CLIP_NORM = 50.0  # above the norm of any update of this problem
BATCH = 100  # runs under one vmap
MOST_ROUNDS = 2000  # of a run to the floor
# The smallest step size that reaches its floor in time: curvatures are at least 0.5, and 0.9925^2000 is negligible.
LEAST_STEP = 0.015


class Setting(NamedTuple):
    """One point of the grid; zero leaves a source of error out.

    The text of a setting, as `str` gives it, is part of the key of its runs. Another field or field name would change
    all random numbers.

    Fields:
      step_size: eta of the local steps.
      cohort_size: m.
      num_steps: K local steps a round.
      gradient_noise: standard deviation of a coordinate of a local gradient.
      bits: bits for each number of an update.
      noise_multiplier: z of the Gaussian mechanism.
    """

    step_size: float
    cohort_size: int
    num_steps: int
    gradient_noise: float
    bits: int
    noise_multiplier: float


def _noisy_loss(noise: float):
    """Returns a loss whose gradient is that of the quadratic risk plus independent normal noise in every step.

    Adding noise . w to the risk adds the noise to its gradient.
    """

    def loss(params, examples, key):
        risk = population.quadratic_loss(params, examples)["loss"]
        tilt = noise * normal(key, params["w"].shape)
        return {"loss": risk + tilt @ params["w"]}

    return loss


class Quadratics:
    """Quadratic clients with methods that simulate their error floors and compute the budget."""

    def __init__(self, size: int, dimension: int, heterogeneity: float, seed: int):
        """Draws the clients.

        Args:
          size: N.
          dimension: d.
          heterogeneity: spread of the clients' optima.
          seed: decides Hessians and centers.
        """
        data = population.quadratics(
            num_clients=size, dimension=dimension, smallest_curvature=0.5, largest_curvature=1.5,
            heterogeneity=heterogeneity, seed=seed,
        )  # fmt: skip
        self.size = size
        self.dimension = dimension
        self.train = data.train
        self.hessians, self.centers = (data.test[name].astype(np.float64) for name in ("hessian", "center"))
        self.optimum = theory.quadratic_optimum(self.hessians, self.centers)
        self.start = self.optimum + 2.0 / math.sqrt(dimension)
        # Losses by (setting, last round): the base setting belongs to several parts and is run once. Key and number of
        # runs are those of one study. `path`, which reads more rounds than `floor`, has to come first.
        self.known: dict[tuple, np.ndarray] = {}

    def range(self, setting: Setting) -> float:
        """Returns the quantiser's range, which no number of an update should exceed.

        It lies above all numbers of the updates at the start and at the optimum, with room for six standard deviations
        of the gradient noise.
        """
        progress = local_progress(self.hessians, setting.num_steps, setting.step_size)
        updates = [np.einsum("nij,nj->ni", progress, self.centers - point) for point in (self.start, self.optimum)]
        noise = setting.gradient_noise * setting.step_size * math.sqrt(setting.num_steps)
        return 1.3 * float(np.abs(updates).max()) + 6 * noise

    def algorithm(self, setting: Setting) -> Algorithm:
        """Makes FedAvg with the setting's sources of error.

        Args:
          setting: its zeros leave sources out.
        """
        transforms = [transform.quantize(setting.bits, range=self.range(setting))] if setting.bits else []
        if setting.noise_multiplier:
            transforms.append(transform.gaussian_mechanism(CLIP_NORM, setting.noise_multiplier))
        return federated(
            sampling.uniform(self.size, setting.cohort_size),
            client.local_sgd(
                _noisy_loss(setting.gradient_noise),
                optax.sgd(setting.step_size),
                client.work(num_steps=setting.num_steps, weighting="uniform"),
            ),
            aggregation.fixed_mean(setting.cohort_size),
            server.optimizer(optax.sgd(1.0)),
            transform=transform.chain(*transforms) if transforms else None,
            mesh=None,
        )

    def budget(self, setting: Setting) -> theory.Budget:
        """Computes the error budget of a setting: the expected loss and its split into causes.

        The quantiser's error depends on where updates lie between two levels. At the floor, updates fluctuate with the
        model around their mean. A first budget therefore gives their standard deviation, and a second budget uses the
        quantiser's error for updates with this standard deviation.

        Args:
          setting: what is run; without `bits` its messages are not rounded.
        """
        if not setting.bits:
            return self._budget(setting, 0.0)
        level_distance = theory.level_distance(setting.bits, self.range(setting))
        # Delta^2 / 6 is the variance of stochastic rounding averaged over all positions between two levels.
        first_budget = self._budget(setting, level_distance**2 / 6)
        progress = local_progress(self.hessians, setting.num_steps, setting.step_size)
        updates = np.einsum("nij,nj->ni", progress, self.centers - first_budget.fixed_point)
        # The variance of each number of an update: the model's, mapped through the local steps, plus gradient noise.
        model_variance = np.einsum("nij,jk,nik->ni", progress, first_budget.covariance, progress)
        noise = local_noise(self.hessians, setting.gradient_noise**2, setting.num_steps, setting.step_size)
        standard_deviation = np.sqrt(model_variance + np.einsum("nii->ni", noise))
        rounding_variances = theory.rounding_variance(updates, standard_deviation, level_distance)
        return self._budget(setting, np.einsum("ni,ij->nij", rounding_variances, np.eye(self.dimension)))

    def _budget(self, setting: Setting, quantization_variance: Any) -> theory.Budget:
        """Computes the budget for a given variance of the quantiser: a number, or [N, d, d]."""
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
        """Measures the excess losses of independent runs.

        Args:
          key: the random key of all runs; runs of different settings are independent.
          setting: what is run.
          num_runs: R.
          rounds: when the loss is measured, rising.

        Returns: [R, len(rounds)].

        Raises: FloatingPointError if a number of an update left the quantiser's range.
        """
        if (setting, rounds[-1]) in self.known:
            return self.known[setting, rounds[-1]][:, -len(rounds) :]
        hessian = jnp.asarray(self.hessians.mean(0), jnp.float32)
        optimum = jnp.asarray(self.optimum, jnp.float32)

        def excess(params):
            distance = params["w"] - optimum
            return {"excess_loss": distance @ hessian @ distance / 2}

        start = {"w": jnp.asarray(self.start, jnp.float32)}
        results = independent_runs(
            stream(key, f"_{setting}"),  # "_Setting(...)": another text is another stream
            self.algorithm(setting), start, self.train, num_runs, evaluation=excess, rounds=rounds, batch=BATCH,
        )  # fmt: skip
        # A clipped update is biased, which the budget does not know.
        if results.get("clipped_share", np.zeros(1)).max() > 0:
            raise FloatingPointError("Updates left the quantiser's range: lower steps, noise or heterogeneity.")
        self.known[setting, rounds[-1]] = results["excess_loss"]
        return results["excess_loss"]

    def rounds_to_floor(self, setting: Setting, budget: theory.Budget) -> int:
        """Returns the number of rounds until the expected loss is within a thousandth of the floor.

        Args:
          setting: what is run; named in the error.
          budget: the budget of the setting, which predicts the expected loss.

        Raises: ValueError if MOST_ROUNDS are too few.
        """
        expected_losses = budget.expected_loss(MOST_ROUNDS, start=self.start)
        is_near = np.abs(expected_losses - budget.total) < 1e-3 * budget.total + 1e-9
        if not is_near.any():
            hint = f"From {LEAST_STEP:g} on they do; smaller ones do with more local steps."
            rule = f"steps that reach their floor within {MOST_ROUNDS:,} rounds"
            validate.fail("step_sizes", rule, setting.step_size, hint)
        return int(np.argmax(is_near))

    def floor(self, key, part: str, value: Any, setting: Setting, num_runs: int) -> Comparison:
        """Measures the excess loss at the floor.

        Args:
          key: the random key of all runs.
          part: the part of the study.
          value: what is varied, for the conditions: a number, or the name of a cause.
          setting: what is run.
          num_runs: R. A setting without randomness is run twice, and one of the runs is compared.
        """
        budget = self.budget(setting)
        # Everybody takes part, and the last three fields, which are sources of noise, are zero.
        is_deterministic = setting.cohort_size == self.size and not any(setting[3:])
        rounds = self.rounds_to_floor(setting, budget)
        losses = self.losses(key, setting, 2 if is_deterministic else num_runs, (rounds,))[:, -1]
        predicted = float(budget.expected_loss(rounds, start=self.start)[-1])
        conditions = {"part": part, "value": value, "rounds": rounds}
        samples = losses[:1] if is_deterministic else losses
        kind = "leading order" if setting.bits else "exact"  # a quantiser's error depends a little on the model
        return measured(conditions, "excess loss", samples, predicted, kind=kind, resolution=1e-7 + 1e-4 * predicted)

    def path(self, key, setting: Setting, num_runs: int) -> Iterator[Comparison]:
        """Measures excess losses at several rounds on the way to the floor.

        Args:
          key: the random key of all runs.
          setting: what is run, with all causes together.
          num_runs: R.

        Yields: for each of the rounds, rising, the excess loss. The last one is the floor's, under which `floor` finds
          these runs.
        """
        budget = self.budget(setting)
        last_round = self.rounds_to_floor(setting, budget)
        shares = (0.05, 0.1, 0.2, 0.35, 0.5)
        rounds = tuple(sorted({1, *(max(1, round(last_round * share)) for share in shares), last_round}))
        losses = self.losses(key, setting, num_runs, rounds)
        expected = budget.expected_loss(last_round, start=self.start)
        for i, t in enumerate(rounds):
            conditions = {"part": "all together", "value": f"round {t}", "rounds": t}
            # The resolution is the rounding of a loss in float32.
            yield measured(conditions, "excess loss", losses[:, i], expected[t], kind="leading order", resolution=1e-6)
