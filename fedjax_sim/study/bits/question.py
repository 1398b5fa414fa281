"""This study measures how few bits suffice: error floors of quantised updates, two roundings, and error feedback."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax

from fedjax_sim import theory, validate
from fedjax_sim.prng import stream
from fedjax_sim.study.bits.claims import bits_claims
from fedjax_sim.study.bits.clients import QuantizedClients
from fedjax_sim.study.bits.figure import bits_figure
from fedjax_sim.study.bits.messages import conditions_of, feedback_floors, single_releases
from fedjax_sim.study.findings import FEW, Comparison, Findings, least_runs, rows_of

QUESTION = "How few bits will do?"


def bits(
    *,
    bits: Sequence[int] = (2, 4, 8),
    num_clients: int = 32,
    dimension: int = 16,
    cohort_sizes: Sequence[int] = (1, 2, 3, 10),
    step_sizes: Sequence[float] = (0.08, 0.04, 0.02),
    num_runs: int = 1500,
    num_releases: int = 2000,
    seed: int = 0,
) -> Findings:
    """How few bits will do? Measures floors against bits and bytes, two roundings, and error feedback.

    Clients hold vectors, and all take part in every round. The study measures floors and bytes, compares nearest with
    stochastic rounding in single rounds, and runs top-k and signs with and without error feedback.

    In the runs to the floor the updates spread evenly over whole cells between the textbook's 2^b levels. Their
    quantisation error is therefore d Delta^2 / 6, where Delta is the distance of two levels.

    Args:
      bits: b for each number, rising and even.
      num_clients: N of the runs to the floor.
      dimension: d of the updates in the runs to the floor.
      cohort_sizes: m of single rounds: 1, and larger ones for the crossover of the two roundings.
      step_sizes: step sizes of the runs with top-k and signs, falling.
      num_runs: runs behind each floor.
      num_releases: rounds behind each error of a single round.
      seed: decides everything.

    Returns: `Findings` with E |w - w*|^2 at the error floor and on the way to it, and mean squared errors of single
      rounds.

    Guarantees: every prediction lies in its interval (tests/study/test_bits.py::test_predictions_hold). The
    intervals tell the floors of different bits apart (::test_it_can_tell_a_bit). Biased compressors stall without error
    feedback and converge with it (::test_feedback).

    References: Suresh et al. 2017, section 2; Alistarh et al. 2017; Karimireddy et al. 2019; Richtarik et al. 2021.
    """
    _check(locals())
    key = jax.random.key(seed)
    clients = QuantizedClients(num_clients, dimension)
    comparisons = [comparison for b in bits for comparison in clients.path(stream(key, f"floor {b}"), b, num_runs)]
    comparisons += _ratios(comparisons, bits)
    # The grid with a zero differs most from the textbook's for the fewest bits.
    comparisons += [clients.with_zero(stream(key, f"zero {b}"), b, num_runs) for b in bits[:1]]
    comparisons += single_releases(key, cohort_sizes, num_releases, seed)
    comparisons += feedback_floors(key, step_sizes, seed)
    options = {
        "bits": list(bits), "num_clients": num_clients, "dimension": dimension, "cohort_sizes": list(cohort_sizes),
        "step_sizes": list(step_sizes), "num_runs": num_runs, "num_releases": num_releases, "seed": seed,
    }  # fmt: skip
    rows = rows_of(comparisons)
    return Findings(
        name="bits",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(bits_claims(rows, options)),
        figure=partial(bits_figure, rows, options),
        options=options,
    )


def _check(options: dict[str, Any]) -> None:
    """Raises an error that names the first option that is out of range.

    Args:
      options: the arguments of `bits`, by name.
    """
    for name, rising in (("bits", True), ("cohort_sizes", True), ("step_sizes", False)):
        validate.sequence(name, options[name])
        values = list(options[name])
        if values != sorted(set(values), reverse=not rising):
            validate.fail(name, f"{'rising' if rising else 'falling'} numbers", values)
    for value in options["bits"]:
        validate.integer("bits", value, 2, 12)
        if value % 2:
            validate.fail("bits", "even numbers", value, "Updates fill whole cells only if the number of bits is even.")
    for value in options["cohort_sizes"]:
        validate.integer("cohort_sizes", value, 1, 10_000)
    validate.integer(
        "cohort_sizes[0]", options["cohort_sizes"][0], 1, 1, hint="The crossover is a ratio to one client."
    )
    for value in options["step_sizes"]:
        validate.in_range("step_sizes", value, 0.01, 0.1, hint="Runs have 1,200 rounds, and larger steps may diverge.")
    validate.integer("num_clients", options["num_clients"], 8, 10_000)
    validate.integer("dimension", options["dimension"], 1, 10_000)
    validate.integer("num_runs", options["num_runs"], max(100, least_runs(options["dimension"])), hint=FEW)
    validate.integer("num_releases", options["num_releases"], 100)
    validate.integer("seed", options["seed"], 0)


def _ratios(comparisons: Sequence[Comparison], bits: Sequence[int]) -> Iterator[Comparison]:
    """Computes the factors by which more bits divide the floor.

    For b < b' the factor is floor_b / floor_b'. Theory gives (Delta_b / Delta_b')^2, where Delta_b = 2 s / (2^b - 1) is
    the distance of two levels of the textbook's grid on [-s, s].

    Args:
      comparisons: those of the runs to the floor. The part "floor" has E |w - w*|^2 once for each b.
      bits: [B] b, rising.

    Yields: B - 1 comparisons, one for each two neighbouring numbers of bits.
    """
    floors = {
        comparison.conditions["bits"]: comparison
        for comparison in comparisons
        if comparison.conditions["part"] == "floor"
    }
    for few, many in pairwise(bits):
        pair = floors[few], floors[many]
        ratio = pair[0].measured / pair[1].measured
        # Relative errors of independent numbers add in squares, to first order.
        error = ratio * math.hypot(*(floor.standard_error / floor.measured for floor in pair))
        distances = [theory.level_distance(b, keeps_zeros=False) for b in (few, many)]
        conditions = conditions_of("ratio of floors", f"{few} and {many} bits")
        yield Comparison(
            conditions=conditions,
            quantity="floor / floor",
            measured=ratio,
            standard_error=error,
            degrees=pair[0].degrees,
            predicted=(distances[0] / distances[1]) ** 2,
            kind="leading order",
        )
