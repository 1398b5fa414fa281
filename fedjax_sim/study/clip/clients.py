"""This module measures and predicts the errors of clipped and noisy means of updates with unequal norms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from fedjax_sim import sampling, theory, transform
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.study.problems import Vectors, side_by_side
from fedjax_sim.theory.clipping import ClippedMean

FLOOR_ROUNDS = 100  # of a run to the floor


class UnequalClients(Vectors):
    """Clients whose updates have a common part and unequal norms, with median 1.

    The clip norms of the study are numbers of median norms, so the median has to stay 1.
    """

    def __init__(self, size: int, dimension: int, spread: float, cohort_size: int, seed: int):
        """Draws the clients.

        Args:
          size: N.
          dimension: d.
          spread: standard deviation of the logarithms of the norms.
          cohort_size: m.
          seed: decides the updates, together with N.
        """
        rng = np.random.default_rng([seed, size])
        # [N, d]. Before the spread, a random part of norm about 1, and a common part of norm 1/2: without it, clipping
        # would have hardly a bias to measure.
        values = rng.normal(size=(size, dimension)) / np.sqrt(dimension) + 0.5 / np.sqrt(dimension)
        values *= np.exp(spread * rng.normal(size=(size, 1)))
        super().__init__(values / np.median(np.linalg.norm(values, axis=1)))
        self.norms = np.linalg.norm(self.values, axis=1)
        # With room for rounding in float32, so that a clip at this norm changes no update.
        self.longest = float(self.norms.max()) * 1.0001
        # A clip norm above this clips no update at the floor, where the model fluctuates around the mean: half of the
        # longest distance is room for the fluctuation.
        self.unclipped = 1.5 * np.linalg.norm(self.values - self.mean, axis=1).max()
        self.sampler = sampling.uniform(size, cohort_size)
        self.cohort_size = cohort_size

    def parts(self, clip_norm: float, multiplier: float, factor: float = 1.0) -> ClippedMean:
        """Predicts bias, sampling variance and noise of a release, around the mean of the scaled updates.

        Args:
          clip_norm: C.
          multiplier: z.
          factor: scales every update before it is clipped.
        """
        settings = {"clip_norm": clip_norm, "noise_multiplier": multiplier, "cohort_size": self.cohort_size}
        return theory.clipped_mean_error(factor * self.values.astype(np.float64), **settings)

    def error(self, clip_norm: float, multiplier: float, factor: float = 1.0) -> float:
        """Predicts the expected squared error of a release, around the mean of the unscaled updates.

        Personal thresholds C_i = factor |u_i| scale every update by the factor, and so add a bias.

        Args:
          clip_norm: C.
          multiplier: z.
          factor: the factor of personal thresholds; 1 is without.
        """
        squared_error = transform.personal_clip(factor).squared_error
        assert squared_error is not None, "a personal clip states it"
        scaling_bias = squared_error(jnp.asarray(self.mean, jnp.float32))
        return self.parts(clip_norm, multiplier, factor).total + float(scaling_bias)

    def releases(self, key, settings: Sequence[tuple], num_runs: int) -> Iterator[Comparison]:
        """Measures errors of single rounds.

        Args:
          key: the random key of all rounds.
          settings: (part, C, z, factor); a factor of 1 leaves the updates as they are.
          num_runs: independent rounds of each setting.

        Yields: for each setting the squared error of a release.
        """

        def make(clip_norm, multiplier, factor):
            noise = transform.gaussian_mechanism(clip_norm, multiplier)
            return self.algorithm(transform.chain(transform.personal_clip(factor), noise), sampler=self.sampler)

        names = ("clip_norm", "multiplier", "factor")
        values: dict[str, Sequence[float]] = dict(zip(names, list(zip(*settings, strict=True))[1:], strict=True))
        errors = self.errors(stream(key, "releases"), side_by_side(make, values), num_runs)
        for i, (part, clip_norm, multiplier, factor) in enumerate(settings):
            conditions = {"part": part, "clip_norm": clip_norm, "noise_multiplier": multiplier}
            predicted = self.error(clip_norm, multiplier, factor)
            yield measured(conditions, "squared error", errors[:, i], predicted, resolution=1e-6 * predicted)

    def biases(self, key, norms: Sequence[float]) -> Iterator[Comparison]:
        """Measures the bias of clipping alone, with all clients and without noise.

        Args:
          key: the random key of the rounds.
          norms: C.

        Yields: for each C the squared error of a release.
        """
        algorithm = side_by_side(lambda clip_norm: self.algorithm(transform.clip(clip_norm)), {"clip_norm": norms})
        errors = self.errors(stream(key, "biases"), algorithm, 1)
        for clip_norm, error in zip(norms, errors[0], strict=True):
            predicted = self.parts(clip_norm, 0.0).bias
            conditions = {"part": "bias alone", "clip_norm": clip_norm, "noise_multiplier": 0.0}
            yield measured(conditions, "squared error", error, predicted, resolution=1e-5 * predicted + 1e-10)

    def floors(self, key, norms: Sequence[float], multiplier: float, step_size: float, num_runs: int):
        """Measures the error floor, and predicts it where no update is clipped.

        Updates eta (u_i - w) are clipped to eta C.

        Args:
          key: the random key of all runs.
          norms: C.
          multiplier: z.
          step_size: eta.
          num_runs: independent runs of each C.

        Yields: for each C the squared distance to the optimum after `FLOOR_ROUNDS` rounds.
        """

        def make(clip_norm):
            mechanism = transform.gaussian_mechanism(clip_norm, multiplier)
            return self.algorithm(mechanism, sampler=self.sampler, step_size=step_size)

        # A local step of size eta scales updates by eta, and the clip norm with them.
        algorithm = side_by_side(make, {"clip_norm": [step_size * C for C in norms]})
        errors = self.errors(stream(key, "floors"), algorithm, num_runs, FLOOR_ROUNDS)
        for i, clip_norm in enumerate(norms):
            predicted = self.floor(clip_norm, multiplier, step_size)
            conditions = {"part": "floor", "clip_norm": clip_norm, "noise_multiplier": multiplier}
            # The closed form holds only where no update is clipped.
            valid_prediction = predicted if clip_norm > self.unclipped else None
            yield measured(conditions, "squared distance", errors[:, i], valid_prediction, resolution=1e-6 * predicted)

    def floor(self, clip_norm: float, multiplier: float, step_size: float) -> float:
        """Predicts E |w - w*|^2 in steady state where no update is clipped.

        Args:
          clip_norm: C.
          multiplier: z.
          step_size: eta.
        """
        noise = theory.noise_variance(multiplier, step_size * clip_norm, self.cohort_size, num_values=self.dimension)
        client_variance = ((self.values - self.mean) ** 2).sum(1).mean()
        sampling_variance = step_size**2 * theory.cohort_mean_variance(client_variance, self.size, self.cohort_size)
        return theory.noise_floor(noise + sampling_variance, 1 - step_size)
