"""Letters of few bits by themselves: errors of one release, and where compressors with and without memory rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_sim import theory, transform
from fedjax_sim.instruments.runs import independent_runs
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.study.problems import Vectors, side_by_side
from fedjax_sim.types import Array

__all__ = ["FEEDBACK_ROUNDS", "GRIDS", "conditions_of", "feedback_floors", "single_releases"]

GRIDS = {False: "textbook grid", True: "grid with zero"}  # by `keeps_zeros`
POSITIONS = (0.1, 0.3, 0.5)  # between two levels, of letters that all clients share
BLOCK = 24  # numbers of a letter in each part of one release
SMALL = 0.01  # standard deviation of numbers that are nearly zero, in ranges of the quantiser
KEPT, CLIENTS = 4, 16  # of the BLOCK numbers by top-k; clients of the sparsifiers' runs
FEEDBACK_ROUNDS = 1200


def conditions_of(part: str, letters: str, *, bits: int | None = None, cohort_size: int | None = None, **others: Any):
    """What every comparison of `bits` says."""
    return {"part": part, "letters": letters, "bits": bits, "cohort_size": cohort_size, **others}


def single_releases(key: Array, cohorts: Sequence[int], num_releases: int, seed: int) -> Iterator[Comparison]:
    """One round of two-bit letters: positions that all clients share, positions that do not, numbers close to zero."""
    rng = np.random.default_rng([seed, 2])
    delta = theory.level_distance(2, keeps_zeros=False)
    alike = np.repeat(-1 / 3 + delta * np.array(POSITIONS), BLOCK)
    most = cohorts[-1]
    values = np.concatenate([np.broadcast_to(alike, (most, alike.size)), rng.uniform(-1, 1, (most, BLOCK)),
                             SMALL * rng.normal(size=(most, BLOCK))], axis=1)  # fmt: skip
    names = [*(f"alike, at {u:g}" for u in POSITIONS), "spread", "near zero"]
    first: dict[str, Comparison] = {}
    settings = [("stochastic", False, m) for m in cohorts] + [("nearest", False, m) for m in sorted({1, most})]
    for rounding, keeps_zeros, m in [*settings, ("stochastic", True, 1)]:
        people, options = Vectors(values[:m]), {"rounding": rounding, "keeps_zeros": keeps_zeros}

        def squares(params, people=people):
            errors = (params["w"] - jnp.asarray(people.mean, jnp.float32)) ** 2
            return {"error": errors.reshape(-1, BLOCK).mean(-1)}

        one = theory.quantization_error(people.values, 2, range=1.0, **options)
        predicted = (one.bias.mean(0) ** 2 + one.variance.sum(0) / m**2).reshape(-1, BLOCK).mean(-1)
        errors = independent_runs(
            stream(key, f"release {rounding} {keeps_zeros} {m}"),
            people.algorithm(transform.quantize(2, range=1.0, **options)), people.zero, people.population,
            1 if rounding == "nearest" else num_releases, evaluation=squares,
        )["error"]  # fmt: skip
        for i, name in enumerate(names):
            conditions = conditions_of(name, f"{rounding}, {GRIDS[keeps_zeros]}", bits=2, cohort_size=m)
            yield (found := measured(conditions, "mean squared error", errors[:, i], predicted[i], resolution=1e-6))
            if m == 1 and not keeps_zeros:
                first[rounding, i] = found
    for i, u in enumerate(POSITIONS):
        stochastic, nearest = first["stochastic", i], first["nearest", i].measured
        conditions = conditions_of("crossover", f"alike, at {u:g}", bits=2)
        yield Comparison(conditions, "cohort size", stochastic.measured / nearest, stochastic.standard_error / nearest,
                         stochastic.degrees, theory.crossover_cohort_size(u), "exact", 1e-4)  # fmt: skip


def feedback_floors(key: Array, step_sizes: Sequence[float], seed: int) -> Iterator[Comparison]:
    """Constant steps on clients who disagree, everybody in each round: without randomness but for the clients'."""
    people = Vectors(np.random.default_rng([seed, 3]).normal(size=(CLIENTS, BLOCK)) * np.geomspace(3, 0.3, BLOCK))
    top_k = transform.top_k(count=KEPT)
    members = {
        "top-k": top_k,
        "top-k, error feedback": transform.error_feedback(top_k),
        "top-k, EF21": transform.ef21(top_k, CLIENTS),
        "sign": transform.scaled_sign(),
        "sign, error feedback": transform.error_feedback(transform.scaled_sign()),
    }
    for name, letters in members.items():
        algorithm = side_by_side(lambda step_size, letters=letters: people.algorithm(letters, step_size=step_size),
                                 {"step_size": step_sizes})  # fmt: skip
        errors = people.errors(stream(key, name), algorithm, 1, FEEDBACK_ROUNDS, start=people.mean + 1)
        for step_size, error in zip(step_sizes, errors[0], strict=True):
            conditions = conditions_of("feedback", name, cohort_size=CLIENTS, step_size=step_size)
            predicted = 0.0 if name.endswith("EF21") else None
            yield measured(conditions, "squared distance", error, predicted, resolution=1e-8)
