"""This module draws the figure of `error_floor`: the path to the floor, its causes, its cost in rounds, and bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, DOTTED, chart, points, rows_of
from fedjax_sim.study.findings import Comparison
from fedjax_sim.theory import Budget


def error_floor_figure(
    found: Sequence[Comparison], base: Any, budget: Callable[[Any], Budget], *, start: np.ndarray, num_clients: int
) -> Any:
    """Draws four panels, with theory as lines and measurements as points.

    Args:
      found: the comparisons of the study.
      base: the base setting, a NamedTuple.
      budget: setting -> its budget.
      start: [d] the first model of all runs.
      num_clients: N.

    Returns: a matplotlib Figure.
    """
    figure, (path, causes, trade, bits) = chart(2, 2)
    _path(path, rows_of(found, part="all together"), base, budget, start)
    _causes(causes, rows_of(found, part="each alone"))

    def rounds(setting) -> int:
        return budget(setting).rounds_to_floor(start)

    etas = np.geomspace(base.step_size / 4, min(base.step_size * 3, 1.0), 24)  # the study takes no steps above 1
    # A smaller step has a lower floor and takes more rounds, so each cohort size is a curve along the step size.
    styles = (("-", plots.BLUE), (DASHED, plots.BLACK))
    for cohort, (line, colour) in zip(sorted({base.cohort_size, num_clients}), styles, strict=False):
        settings = [base._replace(step_size=eta, cohort_size=cohort) for eta in etas]
        totals = [budget(setting).total for setting in settings]
        trade.plot(list(map(rounds, settings)), totals, color=colour, linestyle=line, linewidth=1.3,
                   label=f"theory, m = {cohort}")  # fmt: skip
    steps = rows_of(found, part="step_size")
    points(
        trade,
        steps,
        lambda row: rounds(base._replace(step_size=row["value"])),
        colour=plots.BLUE,
        marker="o",
        label="measured",
    )
    trade.set(xlabel="Rounds until the floor", ylabel="Error floor: excess loss")
    plots.logarithmic(trade, "xy")
    trade.legend(fontsize=7.5)

    grid = np.arange(2, 11)
    # With many bits the floor is that of the other causes.
    budgets = [budget(base._replace(bits=int(num_bits))) for num_bits in grid]
    floors = [budget_of_bits.total for budget_of_bits in budgets]
    quantisation = [budget_of_bits.losses["quantization"] for budget_of_bits in budgets]
    bits.plot(grid, floors, color=plots.BLUE, linewidth=1.3, label="theory: all causes")
    bits.plot(grid, quantisation, color=plots.ORANGE, linewidth=1.1, linestyle=DASHED,
              label="theory: quantisation alone")  # fmt: skip
    points(bits, rows_of(found, part="bits"), "value", colour=plots.BLUE, marker="o", label="measured")
    bits.set(xlabel="Bits a number", ylabel="Error floor: excess loss")
    plots.logarithmic(bits, "y")
    bits.legend(fontsize=7.5)
    return figure


def _path(axes, rows: list[dict[str, Any]], base, budget, start) -> None:
    """Draws the expected loss against rounds, for the base step and half of it, with their floors dotted."""
    last_round = max(row["rounds"] for row in rows)
    for eta, line, colour in ((base.step_size, "-", plots.BLUE), (base.step_size / 2, DASHED, plots.ORANGE)):
        budget_of_step = budget(base._replace(step_size=eta))
        rounds = np.arange(2 * last_round + 1)  # a run with half of the step needs twice the rounds
        expected_losses = budget_of_step.expected_loss(2 * last_round, start=start)
        axes.plot(rounds, expected_losses, color=colour, linestyle=line, linewidth=1.3, label=f"theory, step {eta:g}")
        axes.axhline(budget_of_step.total, color=colour, linewidth=0.7, linestyle=DOTTED)
    points(axes, rows, "rounds", colour=plots.BLUE, marker="o", label="measured")
    axes.set(xlabel="Round", ylabel="Expected excess loss")
    plots.logarithmic(axes, "y")
    axes.legend(fontsize=7.5)


def _causes(axes, rows: list[dict[str, Any]]) -> None:
    """Draws the floor with each cause alone: theory as bars, measurements as points with intervals."""
    axes.barh(range(len(rows)), [row["predicted"] for row in rows], height=0.6, color=plots.GREY, label="theory")
    for i, row in enumerate(rows):
        axes.plot([row["low"], row["high"]], [i, i], color=plots.BLUE, linewidth=1.4)
        axes.plot([row["measured"]], [i], "o", color=plots.BLUE, markersize=5, markeredgecolor="white",
                  label=None if i else "measured")  # fmt: skip
    axes.set_yticks(range(len(rows)), [row["value"] for row in rows])
    axes.set(xlabel="Error floor with this cause alone", ylim=(len(rows) - 0.4, -0.6))
    axes.grid(False, axis="y")
    axes.legend(fontsize=7.5)
