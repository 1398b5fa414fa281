"""Clients with updates of unequal norms, and the errors of their clipped and noisy means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from fedjax_sim import sampling, theory, transform
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.study.problems import Vectors, side_by_side
from fedjax_sim.theory.clipping import ClippedMean

__all__ = ["UnequalClients"]

FLOOR_ROUNDS = 100


class UnequalClients(Vectors):
    """Updates of unequal norms with a common part, and the errors of their clipped and noisy means."""

    def __init__(self, size: int, dimension: int, spread: float, cohort_size: int, seed: int):
        rng = np.random.default_rng([seed, size])
        values = rng.normal(size=(size, dimension)) / np.sqrt(dimension) + 0.5 / np.sqrt(dimension)
        values *= np.exp(spread * rng.normal(size=(size, 1)))
        super().__init__(values / np.median(np.linalg.norm(values, axis=1)))
        self.norms = np.linalg.norm(self.values, axis=1)
        self.longest = float(self.norms.max()) * 1.0001  # room for rounding
        self.unclipped = 1.5 * np.linalg.norm(self.values - self.mean, axis=1).max()  # above all updates at the floor
        self.sampler, self.cohort_size = sampling.uniform(size, cohort_size), cohort_size

    def parts(self, clip_norm: float, multiplier: float, factor: float = 1.0) -> ClippedMean:
        """The error around the mean of the updates times the factor."""
        settings = {"clip_norm": clip_norm, "noise_multiplier": multiplier, "cohort_size": self.cohort_size}
        return theory.clipped_mean_error(factor * self.values.astype(np.float64), **settings)

    def error(self, clip_norm: float, multiplier: float, factor: float = 1.0) -> float:
        """The expected squared error of a release; personal thresholds, factor |u_i| <= C, add the bias of scaling."""
        shorter = transform.personal_clip(factor).squared_error(jnp.asarray(self.mean, jnp.float32))
        return self.parts(clip_norm, multiplier, factor).total + float(shorter)

    def releases(self, key, settings: Sequence[tuple], num_runs: int) -> Iterator[Comparison]:
        """Errors of single rounds; a factor of 1 leaves the updates as they are."""

        def make(clip_norm, multiplier, factor):
            noise = transform.gaussian_mechanism(clip_norm, multiplier)
            return self.algorithm(transform.chain(transform.personal_clip(factor), noise), sampler=self.sampler)

        names = ("clip_norm", "multiplier", "factor")
        values = dict(zip(names, list(zip(*settings, strict=True))[1:], strict=True))
        errors = self.errors(stream(key, "releases"), side_by_side(make, values), num_runs)
        for i, (part, clip_norm, multiplier, factor) in enumerate(settings):
            conditions = {"part": part, "clip_norm": clip_norm, "noise_multiplier": multiplier}
            predicted = self.error(clip_norm, multiplier, factor)
            yield measured(conditions, "squared error", errors[:, i], predicted, resolution=1e-6 * predicted)

    def biases(self, key, norms: Sequence[float]) -> Iterator[Comparison]:
        """All clients, without noise: only the bias is left."""
        algorithm = side_by_side(lambda clip_norm: self.algorithm(transform.clip(clip_norm)), {"clip_norm": norms})
        errors = self.errors(stream(key, "biases"), algorithm, 1)
        for clip_norm, error in zip(norms, errors[0], strict=True):
            predicted = self.parts(clip_norm, 0.0).bias
            conditions = {"part": "bias alone", "clip_norm": clip_norm, "noise_multiplier": 0.0}
            yield measured(conditions, "squared error", error, predicted, resolution=1e-5 * predicted + 1e-10)

    def floors(self, key, norms: Sequence[float], multiplier: float, step_size: float, num_runs: int):
        """Errors of runs to the floor, updates eta (u_i - w) clipped to eta C; predicted where none is clipped."""

        def make(clip_norm):
            mechanism = transform.gaussian_mechanism(clip_norm, multiplier)
            return self.algorithm(mechanism, sampler=self.sampler, step_size=step_size)

        algorithm = side_by_side(make, {"clip_norm": [step_size * C for C in norms]})
        errors = self.errors(stream(key, "floors"), algorithm, num_runs, FLOOR_ROUNDS)
        for i, clip_norm in enumerate(norms):
            predicted = self.floor(clip_norm, multiplier, step_size)
            conditions = {"part": "floor", "clip_norm": clip_norm, "noise_multiplier": multiplier}
            exact = predicted if clip_norm > self.unclipped else None
            yield measured(conditions, "squared distance", errors[:, i], exact, resolution=1e-6 * predicted)

    def floor(self, clip_norm: float, multiplier: float, step_size: float) -> float:
        """E |w - w*|^2 in steady state where no update is clipped: twice the excess loss of unit curvatures."""
        variance = theory.noise_variance(multiplier, step_size * clip_norm, self.cohort_size, num_values=self.dimension)
        spread = ((self.values - self.mean) ** 2).sum(1).mean()
        cohort = step_size**2 * theory.cohort_mean_variance(spread, self.size, self.cohort_size)
        return theory.noise_floor(variance + cohort, 1 - step_size)
