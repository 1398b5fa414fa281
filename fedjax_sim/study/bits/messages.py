"""This module measures quantisation errors of single rounds, and floors of compressors with and without feedback."""

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

GRID_NAMES = {False: "textbook grid", True: "grid with zero"}  # by `keeps_zeros`
POSITIONS = (0.1, 0.3, 0.5)  # between two levels, of numbers that all clients share
BLOCK = 24  # numbers of an update in each part of a single round
NEAR_ZERO_DEVIATION = 0.01  # standard deviation of numbers near zero, as a share of the quantiser's range
NUM_KEPT = 4  # numbers of BLOCK that top-k keeps
CLIENTS = 16  # in the runs with sparsifiers
FEEDBACK_ROUNDS = 1200


def conditions_of(
    part: str, compressor: str, *, bits: int | None = None, cohort_size: int | None = None, **others: Any
):
    """Returns the conditions of a comparison, with the same names for all parts of the study.

    Args:
      part: the part of the study.
      compressor: what messages are made with.
      bits: bits for each number; None where they are no condition.
      cohort_size: m; None where it is no condition.
      **others: further conditions.
    """
    return {"part": part, "messages": compressor, "bits": bits, "cohort_size": cohort_size, **others}


def single_releases(key: Array, cohorts: Sequence[int], num_releases: int, seed: int) -> Iterator[Comparison]:
    """Measures errors of single rounds of two-bit messages.

    An update has five blocks of `BLOCK` numbers: one for each position u of `POSITIONS` between two levels, which all
    clients share; one whose numbers differ over clients; and one near zero. The errors at shared positions give the
    cohort size from which stochastic rounding is better than nearest rounding.

    Args:
      key: the random key of all rounds.
      cohorts: cohort sizes m, rising, the first one 1, for the crossover is a ratio to one client.
      num_releases: rounds behind each error of stochastic rounding. Nearest rounding has no randomness: one round.
      seed: decides the updates, in NumPy.

    Yields: for each rounding, cohort size and block, the mean squared error of the mean of the messages, with levels in
    [-1, 1]. Then for each u the cohort size at which both roundings have the same error.

    Guarantees: errors and crossovers are as theory predicts (tests/study/test_bits.py::test_predictions_hold,
    ::test_roundings).
    """
    rng = np.random.default_rng([seed, 2])
    delta = theory.level_distance(2, keeps_zeros=False)
    # The four levels of two bits are -1, -1/3, 1/3 and 1, so these numbers lie in the middle cell.
    shared_values = np.repeat(-1 / 3 + delta * np.array(POSITIONS), BLOCK)
    largest_cohort = cohorts[-1]
    values = np.concatenate(
        [
            np.broadcast_to(shared_values, (largest_cohort, shared_values.size)),
            rng.uniform(-1, 1, (largest_cohort, BLOCK)),
            NEAR_ZERO_DEVIATION * rng.normal(size=(largest_cohort, BLOCK)),
        ],
        axis=1,
    )
    names = [*(f"alike, at {u:g}" for u in POSITIONS), "spread", "near zero"]
    # The errors of one client, by rounding and block.
    single_client: dict[tuple[str, int], Comparison] = {}
    settings = [("stochastic", False, m) for m in cohorts]
    settings += [("nearest", False, m) for m in sorted({1, largest_cohort})]
    for rounding, keeps_zeros, m in [*settings, ("stochastic", True, 1)]:
        clients = Vectors(values[:m])
        options = {"rounding": rounding, "keeps_zeros": keeps_zeros}

        def squares(params, clients=clients):
            errors = (params["w"] - jnp.asarray(clients.mean, jnp.float32)) ** 2
            return {"error": errors.reshape(-1, BLOCK).mean(-1)}

        error = theory.quantization_error(clients.values, 2, range=1.0, **options)
        # Biases of clients are averaged; variances of independent clients add up.
        predicted = (error.bias.mean(0) ** 2 + error.variance.sum(0) / m**2).reshape(-1, BLOCK).mean(-1)
        errors = independent_runs(
            stream(key, f"release {rounding} {keeps_zeros} {m}"),
            clients.algorithm(transform.quantize(2, range=1.0, **options)), clients.zero, clients.population,
            1 if rounding == "nearest" else num_releases, evaluation=squares,  # nearest rounding is deterministic
        )["error"]  # fmt: skip
        for i, name in enumerate(names):
            conditions = conditions_of(name, f"{rounding}, {GRID_NAMES[keeps_zeros]}", bits=2, cohort_size=m)
            comparison = measured(conditions, "mean squared error", errors[:, i], predicted[i], resolution=1e-6)
            yield comparison
            if m == 1 and not keeps_zeros:
                single_client[rounding, i] = comparison
    # The error of stochastic rounding falls as 1/m and that of nearest rounding at a shared position does not, so the
    # ratio of the two at m = 1 is the cohort size at which they are equal.
    for i, u in enumerate(POSITIONS):
        stochastic = single_client["stochastic", i]
        nearest = single_client["nearest", i].measured
        conditions = conditions_of("crossover", f"alike, at {u:g}", bits=2)
        yield Comparison(
            conditions=conditions,
            quantity="cohort size",
            measured=stochastic.measured / nearest,
            standard_error=stochastic.standard_error / nearest,
            degrees=stochastic.degrees,
            predicted=theory.crossover_cohort_size(u),
            kind="exact",
            resolution=1e-4,
        )


def feedback_floors(key: Array, step_sizes: Sequence[float], seed: int) -> Iterator[Comparison]:
    """Measures squared distances after runs of biased compressors with constant steps, with and without feedback.

    Clients differ in their optima and all take part in each round, so only the clients are random.

    Args:
      key: the random key of all runs.
      step_sizes: sizes of local steps.
      seed: decides the clients.

    Yields: for each compressor and each step size the squared distance to the optimum. Theory predicts it for EF21
      alone.
    """
    # Coordinates of unequal size: top-k without feedback hardly ever sends the small ones.
    clients = Vectors(np.random.default_rng([seed, 3]).normal(size=(CLIENTS, BLOCK)) * np.geomspace(3, 0.3, BLOCK))
    top_k = transform.top_k(count=NUM_KEPT)
    compressors = {
        "top-k": top_k,
        "top-k, error feedback": transform.error_feedback(top_k),
        "top-k, EF21": transform.ef21(top_k, CLIENTS),
        "sign": transform.scaled_sign(),
        "sign, error feedback": transform.error_feedback(transform.scaled_sign()),
    }
    for name, compressor in compressors.items():
        algorithm = side_by_side(
            lambda step_size, compressor=compressor: clients.algorithm(compressor, step_size=step_size),
            {"step_size": step_sizes},
        )
        errors = clients.errors(stream(key, name), algorithm, 1, FEEDBACK_ROUNDS, start=clients.mean + 1)
        for step_size, error in zip(step_sizes, errors[0], strict=True):
            conditions = conditions_of("feedback", name, cohort_size=CLIENTS, step_size=step_size)
            predicted = 0.0 if name.endswith("EF21") else None  # EF21 converges to the optimum
            yield measured(conditions, "squared distance", error, predicted, resolution=1e-8)
