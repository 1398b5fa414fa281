"""This module draws the figure of `error_floor`: the path to the floor, its causes, its cost in rounds, and bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected
from fedjax_sim.study.error_floor.base import base_setting, error_floor_clients
from fedjax_sim.study.error_floor.quadratics import Quadratics, Setting

FLOOR_AXIS = "Error floor: excess loss"


def error_floor_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws four panels, with theory as lines and measurements as points.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, (path, causes, trade, bits) = charts.panels(2, 2)
    problem, base = error_floor_clients(options), base_setting(options)
    on_the_way: list[Row] = [row | {"step_size": base.step_size} for row in selected(rows, part="all together")]
    # A run with half of the step needs twice the rounds.
    last_round = 2 * max(row["rounds"] for row in on_the_way)
    charts.lines(path, on_the_way, "rounds", by="step_size", theory=_paths(problem, base, last_round),
                 xlabel="Round", ylabel="Expected excess loss", log="y")  # fmt: skip
    charts.dots(causes, selected(rows, part="each alone"), "value", label="Error floor with this cause alone", log=True)

    measured = [
        row | {"cohort_size": base.cohort_size,
               "rounds_to_floor": problem.budget(base._replace(step_size=row["value"])).rounds_to_floor(problem.start)}
        for row in selected(rows, part="step_size")
    ]  # fmt: skip
    cohorts = sorted({base.cohort_size, options["num_clients"]})
    charts.lines(trade, measured, "rounds_to_floor", by="cohort_size", theory=_trade(problem, base, cohorts),
                 xlabel="Rounds until the floor", ylabel=FLOOR_AXIS, log="xy")  # fmt: skip

    by_bits = [row | {"causes": "all causes"} for row in selected(rows, part="bits")]
    charts.lines(bits, by_bits, "value", by="causes", theory=_by_bits(problem, base),
                 xlabel="Bits a number", ylabel=FLOOR_AXIS, log="y")  # fmt: skip
    return figure


def _paths(problem: Quadratics, base: Setting, last_round: int) -> list[Row]:
    """Returns the expected loss after each round for the base step and half of it, as rows of theory."""
    return [
        {"step_size": eta, "rounds": t, "predicted": float(loss)}
        for eta in (base.step_size, base.step_size / 2)
        for t, loss in enumerate(
            problem.budget(base._replace(step_size=eta)).expected_loss(last_round, start=problem.start)
        )
    ]


def _trade(problem: Quadratics, base: Setting, cohorts: Sequence[int]) -> list[Row]:
    """Returns floors and the rounds to them for each cohort size, as rows of theory; the step varies along a line."""
    # The study takes no steps above 1. They fall, so that the floors fall among steps of equal rounds too.
    etas = np.geomspace(min(base.step_size * 3, 1.0), base.step_size / 4, 24).tolist()
    budgets = [(m, problem.budget(base._replace(step_size=eta, cohort_size=m))) for m in cohorts for eta in etas]
    return [
        {"cohort_size": m, "rounds_to_floor": budget.rounds_to_floor(problem.start), "predicted": budget.total}
        for m, budget in budgets
    ]


def _by_bits(problem: Quadratics, base: Setting) -> list[Row]:
    """Returns the floor and the quantiser's part of it for 2 to 10 bits, as rows of theory."""
    budgets = {bits: problem.budget(base._replace(bits=bits)) for bits in range(2, 11)}
    return [
        {"value": bits, "causes": causes, "predicted": loss}
        for bits, budget in budgets.items()
        for causes, loss in (("all causes", budget.total), ("quantisation", budget.losses["quantization"]))
    ]
