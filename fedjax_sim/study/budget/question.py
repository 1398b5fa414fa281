"""This study spends budgets of bytes, joules and seconds on many choices, and compares the errors with predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import jax

from fedjax_sim import theory, validate
from fedjax_sim.prng import stream
from fedjax_sim.study.budget.claims import budget_claims
from fedjax_sim.study.budget.figure import budget_figure
from fedjax_sim.study.budget.sensors import UNITS, Sensors
from fedjax_sim.study.findings import FEW, Comparison, Findings, comparisons_of, least_runs, measured, rows_of
from fedjax_sim.types import Array
from fedjax_sim.validate import Integer, NonNegativeInt, Number, Positive

QUESTION = "On which cohort, deadline and bits is a budget of bytes, energy or time best spent?"
MOST_ROUNDS = 10_000


@validate.named_arguments
def budget(
    *,
    num_clients: Annotated[int, Integer(4, 10_000)] = 100,
    dimension: Annotated[int, Integer(1, 1000)] = 16,
    speed_sigma: Annotated[float, Number(0, 2)] = 1.0,
    cohort_sizes: Sequence[int] = (4, 16, 64),
    bits: Sequence[int] = (4, 0),
    deadline_share: Annotated[float, Number(0.1, 1)] = 0.8,
    bytes: Positive = 30_000.0,
    joules: Positive = 300.0,
    seconds: Positive = 80.0,
    num_runs: int = 300,
    seed: NonNegativeInt = 0,
) -> Findings:
    """How is a budget best spent? Compares cohorts, deadlines and bits within one number of bytes, joules or seconds.

    Sensors of lognormal speed on a slow radio have quadratic risks. Each choice of cohort, deadline and bits makes as
    many rounds as its budget affords on average. The squared distance of its model from the optimum is compared with
    the prediction of `theory.allocate`, and so is what was spent. Devices are dealt to the owners of the data at random
    in every run, since who is late is late in every round.

    Args:
      num_clients: N.
      dimension: d.
      speed_sigma: sigma of the lognormal distribution of speeds; the median client trains for 1 s.
      cohort_sizes: m.
      bits: bits for each number of an update, in [3, 16]; 0 sends floats.
      deadline_share: the share of the clients that finish before the deadline. Each choice is tried without a deadline
        and with this one.
      bytes: a budget of all clients' bytes, both ways.
      joules: a budget of all clients' energy.
      seconds: a budget of simulated time.
      num_runs: independent runs of each choice.
      seed: decides everything.

    Returns: `Findings`. "regret" is the measured error of the predicted choice over the least measured one, minus 1.

    Guarantees: every prediction lies in its interval (tests/study/test_budget.py::test_predictions_hold). One without
    late clients' bias, or without the finite population correction, does not (::test_it_can_tell_a_wrong_formula).

    References: `theory.allocate`.
    """
    options: dict[str, Any] = {
        name: list(value) if isinstance(value, Sequence) else value for name, value in locals().items()
    }
    _check(options)
    sensors = Sensors(num_clients, dimension, speed_sigma, seed)
    deadlines = (None, sensors.deadline(deadline_share))
    costs_by_bits = {b or None: sensors.costs(b) for b in bits}
    allocations = {
        unit: theory.allocate(
            sensors.problem, costs_by_bits, cohort_sizes=cohort_sizes, deadlines=deadlines, **{unit: options[unit]}
        )
        for unit in UNITS
    }
    rounds = max(choice.num_rounds for allocation in allocations.values() for choice in allocation.choices)
    validate.integer("bytes, joules, seconds", rounds, 1, MOST_ROUNDS, hint="Rounds of a choice: take less.")
    comparisons = [*_measured(stream(jax.random.key(seed), "runs"), sensors, allocations, num_runs)]
    comparisons += [_regret(unit, allocation, comparisons) for unit, allocation in allocations.items()]
    rows = rows_of(comparisons)
    return Findings(
        name="budget",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(budget_claims(rows, options)),
        figure=partial(budget_figure, rows, options),
        options=options,
    )


def _check(options: dict[str, Any]) -> None:
    """Raises an error that names the first option that is out of range.

    Args:
      options: the arguments of `budget`, by name.
    """
    for name in ("cohort_sizes", "bits"):
        validate.sequence(name, options[name])
        if len(set(options[name])) < len(options[name]):
            validate.fail(name, "different numbers", options[name])
    for value in options["cohort_sizes"]:
        validate.integer("cohort_sizes", value, 1, options["num_clients"])
    for value in options["bits"]:
        validate.integer("bits", value, 3 if value else 0, 16, hint="0 sends floats; two bits leave cells too wide.")
    validate.integer("num_runs", options["num_runs"], max(50, least_runs(options["dimension"])), hint=FEW)


def _conditions(unit: str, choice: theory.Choice) -> dict[str, Any]:
    """Returns the conditions of a choice."""
    deadline = None if choice.deadline is None else round(choice.deadline, 3)
    return {"part": unit, "cohort_size": choice.cohort_size, "deadline": deadline, "bits": choice.bits or 32,
            "rounds": choice.num_rounds}  # fmt: skip


def _measured(
    key: Array, sensors: Sensors, allocations: dict[str, theory.Allocation], num_runs: int
) -> Iterator[Comparison]:
    """Runs each choice once, for all budgets that afford it, and yields its errors and what it spent.

    Theory predicts E |w_T - w*|^2 after the T rounds that a budget affords, and a spending of T times the mean cost of
    a round.

    Args:
      key: the random key of all runs.
      sensors: the clients and their devices.
      allocations: by unit, an entry of `UNITS`. All of them have the same choices in the same order.
      num_runs: R independent runs of each choice.

    Yields: for each choice and each unit whose budget affords a round two comparisons: the squared distance, and the
      spending in bytes, joules or seconds of simulated time.
    """
    for same_choice in zip(*(allocation.choices for allocation in allocations.values()), strict=True):
        affordable = {unit: choice for unit, choice in zip(allocations, same_choice, strict=True) if choice.feasible}
        if not affordable:
            continue
        rounds = sorted({choice.num_rounds for choice in affordable.values()})
        first = next(iter(affordable.values()))
        # The name of a stream holds what the choice is, so that choices are independent of each other.
        name = f"{(first.cohort_size, first.deadline, first.bits)}"
        measurements = sensors.runs(stream(key, name), first, rounds, num_runs)
        for unit, choice in affordable.items():
            look = rounds.index(choice.num_rounds)
            conditions = _conditions(unit, choice)
            kind = "exact" if choice.bits is None else "leading order"
            squares = measurements["squared_distance"][:, look]
            yield measured(
                conditions, "squared distance", squares, choice.error, kind=kind, resolution=1e-5 * choice.error
            )
            predicted = choice.num_rounds * choice.costs[unit]
            spent = measurements[f"{unit}_spent"][:, look]
            yield measured(conditions, f"{unit} spent", spent, predicted, resolution=1e-4 * predicted)


def _regret(unit: str, allocation: theory.Allocation, comparisons: Sequence[Comparison]) -> Comparison:
    """Compares the measured error of the predicted choice with the least measured error."""
    errors = comparisons_of(comparisons, unit, "squared distance")
    conditions = _conditions(unit, allocation.best)
    (chosen,) = [error.measured for error in errors if error.conditions == conditions]
    least = min(error.measured for error in errors)
    return Comparison(conditions, "regret", chosen / least - 1, math.nan)
