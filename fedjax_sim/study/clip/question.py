"""At which norm should updates be clipped? What clipping biases, against the noise that it saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import sampling, theory, transform, validate
from fedjax_sim.prng import stream
from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, DOTTED, chart, points, rows_of
from fedjax_sim.study.findings import FEW, Comparison, Findings, least_runs, measured
from fedjax_sim.study.problems import Vectors, side_by_side
from fedjax_sim.theory.clipping import ClippedMean

__all__ = ["clip"]

QUESTION = "At which norm should updates be clipped?"
FLOOR_ROUNDS = 100
AROUND = (1 / 3, 1.0, 3.0)  # of the best clip norm
PERSONAL = "personal, no epsilon"


def clip(
    *,
    num_clients: int = 200,
    dimension: int = 10,
    spread: float = 1.0,
    cohort_size: int = 20,
    clip_norms: Sequence[float] = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
    noise_multipliers: Sequence[float] = (0.3, 1.0, 3.0),
    factors: Sequence[float] = (0.02, 0.05, 0.1, 0.2, 0.5),
    step_size: float = 0.5,
    num_rounds: int = 4000,
    seed: int = 0,
) -> Findings:
    """At which norm should updates be clipped? Error of the released mean against the clip norm: bias, sampling, noise.

    Clients hold updates of unequal norms, with median 1; a uniform cohort's are clipped and summed, and Gaussian noise
    is added once (`gaussian_mechanism`).

    Args:
      num_clients: N. dimension: d. spread: standard deviation of the log norms. cohort_size: m.
      clip_norms: C, rising.
      noise_multipliers: z; the middle one is held fixed along C, and the best C is sought for each.
      factors: of personal thresholds C_i = factor |u_i|, a study without any epsilon.
      step_size: eta of the runs to the floor.
      num_rounds: independent rounds behind each error; a sixteenth of them (or `least_runs`) are runs to the floor.
      seed: decides everything.

    Returns: `Findings`: E |release - mean u_i|^2 by part, and E |w - w*|^2 at rest.

    Guarantees: every prediction lies in its interval and the optimum is interior
    (tests/study/test_clip.py::test_predictions_hold, ::test_interior_optimum), and a total without one of its parts is
    refused (::test_it_notices_what_is_left_out).

    References: `theory.clipped_mean_error`; McMahan et al. 2018 (DP-FedAvg), section 2; Andrew et al. 2021, section 1.
    """
    _check(locals())
    problem, key = _Clients(num_clients, dimension, spread, cohort_size, seed), jax.random.key(seed)
    multiplier = noise_multipliers[len(noise_multipliers) // 2]
    best = {z: theory.best_clip_norm(problem.values, noise_multiplier=z, cohort_size=cohort_size)
            for z in noise_multipliers}  # fmt: skip
    settings = [("clip norm", C, multiplier, 1.0) for C in clip_norms]
    settings += [("around the best", share * best[z], z, 1.0) for z in noise_multipliers for share in AROUND]
    settings += [(PERSONAL, factor * problem.longest, multiplier, factor) for factor in factors]
    found = list(problem.releases(key, settings, num_rounds))
    found += problem.biases(key, clip_norms)
    found += problem.floors(key, clip_norms, multiplier, step_size, max(100, least_runs(dimension), num_rounds // 16))
    options = {
        "num_clients": num_clients, "dimension": dimension, "spread": spread, "cohort_size": cohort_size,
        "clip_norms": list(clip_norms), "noise_multipliers": list(noise_multipliers), "factors": list(factors),
        "step_size": step_size, "num_rounds": num_rounds, "seed": seed,
    }  # fmt: skip
    reading = list(_reading(problem, best, multiplier, found))
    draw = partial(_figure, problem, best, multiplier, step_size, found)
    return Findings("clip", QUESTION, found, reading, draw, options)


def _check(options: dict[str, Any]) -> None:
    for name in ("clip_norms", "noise_multipliers", "factors"):
        validate.sequence(name, options[name])
        for value in options[name]:
            validate.in_range(name, value, 1e-3, 1 if name == "factors" else 1e3)
    validate.integer("num_clients", options["num_clients"], 2, 100_000)
    validate.integer("dimension", options["dimension"], 1, 1000)
    validate.in_range("spread", options["spread"], 0, 3)
    validate.integer("cohort_size", options["cohort_size"], 2, options["num_clients"])
    validate.in_range("step_size", options["step_size"], 0.2, 1, hint="Runs have 100 rounds to their floor.")
    validate.integer("num_rounds", options["num_rounds"], max(100, least_runs(options["dimension"])), hint=FEW)
    validate.integer("seed", options["seed"], 0)


class _Clients(Vectors):
    """Unequal updates that agree in part, and what their clipped and noisy means are off by."""

    def __init__(self, size: int, dimension: int, spread: float, cohort_size: int, seed: int):
        rng = np.random.default_rng([seed, size])
        values = rng.normal(size=(size, dimension)) / np.sqrt(dimension) + 0.5 / np.sqrt(dimension)
        values *= np.exp(spread * rng.normal(size=(size, 1)))
        super().__init__(values / np.median(np.linalg.norm(values, axis=1)))
        self.norms = np.linalg.norm(self.values, axis=1)
        self.longest = float(self.norms.max()) * 1.0001  # room for rounding
        self.unclipped = 1.5 * np.linalg.norm(self.values - self.mean, axis=1).max()  # no letter at rest is as long
        self.sampler, self.cohort_size = sampling.uniform(size, cohort_size), cohort_size

    def parts(self, clip_norm: float, multiplier: float, factor: float = 1.0) -> ClippedMean:
        """The error around the mean of the updates times the factor."""
        settings = {"clip_norm": clip_norm, "noise_multiplier": multiplier, "cohort_size": self.cohort_size}
        return theory.clipped_mean_error(factor * self.values.astype(np.float64), **settings)

    def error(self, clip_norm: float, multiplier: float, factor: float = 1.0) -> float:
        """With thresholds of their own for all letters, factor |u_i| <= C, also what a shorter mean is off by."""
        shorter = transform.personal_clip(factor).squared_error(jnp.asarray(self.mean, jnp.float32))
        return self.parts(clip_norm, multiplier, factor).total + float(shorter)

    def releases(self, key, settings: Sequence[tuple], num_runs: int) -> Iterator[Comparison]:
        """One round each; a factor of 1 leaves the letters as they are."""

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
        """Everybody, without noise: nothing is left but the bias."""
        algorithm = side_by_side(lambda clip_norm: self.algorithm(transform.clip(clip_norm)), {"clip_norm": norms})
        errors = self.errors(stream(key, "biases"), algorithm, 1)
        for clip_norm, error in zip(norms, errors[0], strict=True):
            predicted = self.parts(clip_norm, 0.0).bias
            conditions = {"part": "bias alone", "clip_norm": clip_norm, "noise_multiplier": 0.0}
            yield measured(conditions, "squared error", error, predicted, resolution=1e-5 * predicted + 1e-10)

    def floors(self, key, norms: Sequence[float], multiplier: float, step_size: float, num_runs: int):
        """Letters of step size eta, clipped to eta C. Only where nothing is clipped is there a closed form."""

        def make(clip_norm):
            letters = transform.gaussian_mechanism(clip_norm, multiplier)
            return self.algorithm(letters, sampler=self.sampler, step_size=step_size)

        algorithm = side_by_side(make, {"clip_norm": [step_size * C for C in norms]})
        errors = self.errors(stream(key, "floors"), algorithm, num_runs, FLOOR_ROUNDS)
        for i, clip_norm in enumerate(norms):
            predicted = self.floor(clip_norm, multiplier, step_size)
            conditions = {"part": "floor", "clip_norm": clip_norm, "noise_multiplier": multiplier}
            exact = predicted if clip_norm > self.unclipped else None
            yield measured(conditions, "squared distance", errors[:, i], exact, resolution=1e-6 * predicted)

    def floor(self, clip_norm: float, multiplier: float, step_size: float) -> float:
        """E |w - w*|^2 at rest while no letter is clipped: twice the excess loss of unit curvatures."""
        variance = theory.noise_variance(multiplier, step_size * clip_norm, self.cohort_size, num_values=self.dimension)
        spread = ((self.values - self.mean) ** 2).sum(1).mean()
        cohort = step_size**2 * theory.cohort_mean_variance(spread, self.size, self.cohort_size)
        return theory.noise_floor(variance + cohort, 1 - step_size)


def _reading(
    problem: _Clients, best: dict[float, float], multiplier: float, found: Sequence[Comparison]
) -> Iterator[str]:
    clip_norm = best[multiplier]
    at, low, high = (problem.parts(C, multiplier) for C in (clip_norm, clip_norm / 4, clip_norm * 4))
    cut = float((problem.norms > clip_norm).mean())
    yield (
        "The released mean is off by what clipping takes from it (a bias), by who was sampled, and by noise of "
        f"variance d (z C / m)^2. For z = {multiplier:g} their sum is least at C = {clip_norm:.3g} median norms, where "
        f"{cut:.0%} of the clients are clipped: bias {at.bias / at.total:.0%}, sampling {at.sampling / at.total:.0%}, "
        f"noise {at.noise / at.total:.0%} of {at.total:.3g}. A quarter of that C costs {low.total / at.total:.2f} "
        f"times as much, {low.bias / low.total:.0%} of it bias; four times that C costs {high.total / at.total:.2f} "
        f"times as much, {high.noise / high.total:.0%} of it noise."
    )
    norms = ", ".join(f"{C:.3g} at z = {z:g}" for z, C in best.items())
    yield (
        f"The best C falls as noise grows: {norms}. All of these were read off the clients' data, which a private run "
        "must not do: it pays for a private quantile (adaptive_clip) or takes C from elsewhere. Clipping is no "
        "scaling: letters shorter than C stay as they are."
    )
    yield (
        "A clip that follows each client's own norm keeps every direction and scales the mean alike, and no epsilon "
        "may be stated for it: its sensitivity is the factor times the longest letter that any possible client could "
        "send, which nobody knows beforehand, and the norms themselves leak. Its rows carry noise for the longest "
        "letter that is there, and are here for comparison alone."
    )
    least = min(rows_of(found, part="floor"), key=lambda row: row["measured"])
    yield (
        "Runs to the floor see the same two ends, with another balance: the least squared distance, "
        f"{least['measured']:.3g}, was at C = {least['clip_norm']:g}. Clipped letters no longer add up to zero at the "
        "optimum, so a small C moves the point where training comes to rest; that has no closed form here. Where no "
        "letter is clipped the floor is that of sampling and noise, (eta^2 variance of the cohort's mean + "
        "d (z eta C / m)^2) / (1 - r^2) with r = 1 - eta: it is a property of constant steps."
    )


def _figure(
    problem: _Clients, best: dict[float, float], multiplier: float, step_size: float, found: Sequence[Comparison]
) -> Any:
    figure, panels = chart(2, 2)
    parts, around, floor, personal = panels
    norms = [one.conditions["clip_norm"] for one in found if one.conditions["part"] == "clip norm"]
    grid = np.geomspace(min(norms) / 1.2, max(norms) * 1.2, 200)
    errors = [problem.parts(C, multiplier) for C in grid]
    for name, label, colour, line in (
        ("total", "theory", plots.BLUE, "-"),
        ("bias", "its bias", plots.BLACK, DASHED),
        ("sampling", "its sampling", plots.GREY, "-"),
        ("noise", "its noise", plots.ORANGE, DOTTED),
    ):
        parts.plot(grid, [getattr(error, name) for error in errors], color=colour, linestyle=line, label=label,
                   linewidth=1.4 if name == "total" else 1.1)  # fmt: skip
    points(parts, rows_of(found, part="clip norm"), "clip_norm", plots.BLUE, "o", "measured")
    points(parts, rows_of(found, part="bias alone"), "clip_norm", plots.BLACK, "s", "measured, all, no noise")
    totals = [error.total for error in errors]
    parts.set(ylim=(min(totals) / 100, 2 * max(totals)), title=f"One release, z = {multiplier:g}")
    looks = ((plots.BLUE, "o", "-"), (plots.BLACK, "s", DASHED), (plots.ORANGE, "^", DOTTED))
    for (z, C), (colour, marker, line) in zip(best.items(), looks * 9, strict=False):
        around.plot(grid, [problem.parts(x, z).total for x in grid], color=colour, linestyle=line, linewidth=1.3)
        rows = rows_of(found, part="around the best", noise_multiplier=z)
        points(around, rows, "clip_norm", colour, marker, f"z = {z:g}, best C = {C:.2g}")
    around.set(title="The best C, a third and three times of it")
    ends = grid[grid >= problem.unclipped]
    floor.plot(ends, [problem.floor(C, multiplier, step_size) for C in ends], color=plots.BLUE, linewidth=1.3,
               label="theory where nothing is clipped")  # fmt: skip
    points(floor, rows_of(found, part="floor"), "clip_norm", plots.BLUE, "o", "measured")
    floor.set(title=f"Runs to the floor, z = {multiplier:g}")
    personal.plot(grid, totals, color=plots.BLUE, linewidth=1.3, label="one C for all: theory")
    inside = grid[grid <= problem.longest]
    own = [problem.error(C, multiplier, C / problem.longest) for C in inside]
    personal.plot(inside, own, color=plots.BLACK, linewidth=1.1, linestyle=DASHED, label="own thresholds, NO epsilon")
    points(personal, rows_of(found, part=PERSONAL), "clip_norm", plots.BLACK, "s", "measured")
    personal.set(title="Thresholds in proportion to each norm")
    for axes in panels:
        error = "Squared distance at rest" if axes is floor else "Squared error of the mean"
        axes.set(xlabel="Longest letter C (median norms)", ylabel=error)
        plots.logarithmic(axes)
        axes.legend(fontsize=7.5)
    return figure
