"""Messages of few bits: quantisation errors of single rounds, and floors of compressors with and without memory."""

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

__all__ = ["FEEDBACK_ROUNDS", "GRID_NAMES", "conditions_of", "feedback_floors", "single_releases"]

GRID_NAMES = {False: "textbook grid", True: "grid with zero"}  # by `keeps_zeros`
POSITIONS = (0.1, 0.3, 0.5)  # between two levels, of numbers that all clients share
BLOCK = 24  # numbers of an update in each part of a single round
SMALL = 0.01  # standard deviation of numbers that are nearly zero, in ranges of the quantiser
KEPT, CLIENTS = 4, 16  # of the BLOCK numbers by top-k; clients of the sparsifiers' runs
FEEDBACK_ROUNDS = 1200


def conditions_of(
    part: str, compressor: str, *, bits: int | None = None, cohort_size: int | None = None, **others: Any
):
    """The conditions of a comparison of `bits`, the same ones for all."""
    return {"part": part, "messages": compressor, "bits": bits, "cohort_size": cohort_size, **others}


def single_releases(key: Array, cohorts: Sequence[int], num_releases: int, seed: int) -> Iterator[Comparison]:
    """Errors of single rounds of two-bit messages, and the cohort size from which stochastic rounding beats nearest.

    The numbers stand at positions that all clients share, at positions of each client's own, and close to zero.
    """
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
        clients, options = Vectors(values[:m]), {"rounding": rounding, "keeps_zeros": keeps_zeros}

        def squares(params, clients=clients):
            errors = (params["w"] - jnp.asarray(clients.mean, jnp.float32)) ** 2
            return {"error": errors.reshape(-1, BLOCK).mean(-1)}

        one = theory.quantization_error(clients.values, 2, range=1.0, **options)
        predicted = (one.bias.mean(0) ** 2 + one.variance.sum(0) / m**2).reshape(-1, BLOCK).mean(-1)
        errors = independent_runs(
            stream(key, f"release {rounding} {keeps_zeros} {m}"),
            clients.algorithm(transform.quantize(2, range=1.0, **options)), clients.zero, clients.population,
            1 if rounding == "nearest" else num_releases, evaluation=squares,
        )["error"]  # fmt: skip
        for i, name in enumerate(names):
            conditions = conditions_of(name, f"{rounding}, {GRID_NAMES[keeps_zeros]}", bits=2, cohort_size=m)
            yield (found := measured(conditions, "mean squared error", errors[:, i], predicted[i], resolution=1e-6))
            if m == 1 and not keeps_zeros:
                first[rounding, i] = found
    for i, u in enumerate(POSITIONS):
        stochastic, nearest = first["stochastic", i], first["nearest", i].measured
        conditions = conditions_of("crossover", f"alike, at {u:g}", bits=2)
        yield Comparison(conditions, "cohort size", stochastic.measured / nearest, stochastic.standard_error / nearest,
                         stochastic.degrees, theory.crossover_cohort_size(u), "exact", 1e-4)  # fmt: skip


def feedback_floors(key: Array, step_sizes: Sequence[float], seed: int) -> Iterator[Comparison]:
    """Squared distances after runs with constant steps. Clients differ in their optima and all take part in each round:
    only the clients are random."""
    clients = Vectors(np.random.default_rng([seed, 3]).normal(size=(CLIENTS, BLOCK)) * np.geomspace(3, 0.3, BLOCK))
    top_k = transform.top_k(count=KEPT)
    compressors = {
        "top-k": top_k,
        "top-k, error feedback": transform.error_feedback(top_k),
        "top-k, EF21": transform.ef21(top_k, CLIENTS),
        "sign": transform.scaled_sign(),
        "sign, error feedback": transform.error_feedback(transform.scaled_sign()),
    }
    for name, one in compressors.items():
        algorithm = side_by_side(lambda step_size, one=one: clients.algorithm(one, step_size=step_size),
                                 {"step_size": step_sizes})  # fmt: skip
        errors = clients.errors(stream(key, name), algorithm, 1, FEEDBACK_ROUNDS, start=clients.mean + 1)
        for step_size, error in zip(step_sizes, errors[0], strict=True):
            conditions = conditions_of("feedback", name, cohort_size=CLIENTS, step_size=step_size)
            predicted = 0.0 if name.endswith("EF21") else None
            yield measured(conditions, "squared distance", error, predicted, resolution=1e-8)
