"""The figure of `error_floor`: the way to the floor, its causes, its price in rounds, and its bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, DOTTED, chart, points, rows_of
from fedjax_sim.study.findings import Comparison
from fedjax_sim.theory import Budget

__all__ = ["error_floor_figure"]


def error_floor_figure(
    found: Sequence[Comparison], base: Any, budget: Callable[[Any], Budget], start: np.ndarray, num_clients: int
) -> Any:
    """Four panels; theory as lines, measurement as points.

    Args:
      found: what the study compared.
      base: its base setting, a NamedTuple. budget: setting -> its budget.
      start: [d] the model that runs start at. num_clients: N.

    Returns: a matplotlib Figure.
    """
    figure, (path, causes, trade, bits) = chart(2, 2)
    _path(path, rows_of(found, part="all together"), base, budget, start)
    _causes(causes, rows_of(found, part="each alone"))

    def rounds(setting) -> int:
        return budget(setting).rounds_to_floor(start)

    etas = np.geomspace(base.step_size / 4, min(base.step_size * 3, 1.0), 24)  # a study's steps end at 1
    looks = (("-", plots.BLUE), (DASHED, plots.BLACK))
    for cohort, (line, colour) in zip(sorted({base.cohort_size, num_clients}), looks, strict=False):
        settings = [base._replace(step_size=eta, cohort_size=cohort) for eta in etas]
        totals = [budget(setting).total for setting in settings]
        trade.plot(list(map(rounds, settings)), totals, color=colour, linestyle=line, linewidth=1.3,
                   label=f"theory, m = {cohort}")  # fmt: skip
    steps = rows_of(found, part="step_size")
    points(trade, steps, lambda row: rounds(base._replace(step_size=row["value"])), plots.BLUE, "o", "measured")
    trade.set(xlabel="Rounds until the floor", ylabel="Error floor: excess loss")
    plots.logarithmic(trade, "xy")
    trade.legend(fontsize=7.5)

    grid = np.arange(2, 11)
    budgets = [budget(base._replace(bits=int(b))) for b in grid]
    bits.plot(grid, [b.total for b in budgets], color=plots.BLUE, linewidth=1.3, label="theory: all causes")
    bits.plot(grid, [b.losses["quantization"] for b in budgets], color=plots.ORANGE, linewidth=1.1, linestyle=DASHED,
              label="theory: quantisation alone")  # fmt: skip
    points(bits, rows_of(found, part="bits"), "value", plots.BLUE, "o", "measured")
    bits.set(xlabel="Bits a number", ylabel="Error floor: excess loss")
    plots.logarithmic(bits, "y")
    bits.legend(fontsize=7.5)
    return figure


def _path(axes, rows: list[dict[str, Any]], base, budget, start) -> None:
    end = max(row["rounds"] for row in rows)
    for eta, line, colour in ((base.step_size, "-", plots.BLUE), (base.step_size / 2, DASHED, plots.ORANGE)):
        one = budget(base._replace(step_size=eta))
        rounds = np.arange(2 * end + 1)
        axes.plot(rounds, one.expected_loss(2 * end, start=start), color=colour, linestyle=line, linewidth=1.3,
                  label=f"theory, step {eta:g}")  # fmt: skip
        axes.axhline(one.total, color=colour, linewidth=0.7, linestyle=DOTTED)
    points(axes, rows, "rounds", plots.BLUE, "o", "measured")
    axes.set(xlabel="Round", ylabel="Expected excess loss")
    plots.logarithmic(axes, "y")
    axes.legend(fontsize=7.5)


def _causes(axes, rows: list[dict[str, Any]]) -> None:
    axes.barh(range(len(rows)), [row["predicted"] for row in rows], height=0.6, color=plots.GREY, label="theory")
    for i, row in enumerate(rows):
        axes.plot([row["low"], row["high"]], [i, i], color=plots.BLUE, linewidth=1.4)
        axes.plot([row["measured"]], [i], "o", color=plots.BLUE, markersize=5, markeredgecolor="white",
                  label=None if i else "measured")  # fmt: skip
    axes.set_yticks(range(len(rows)), [row["value"] for row in rows])
    axes.set(xlabel="Error floor with this cause alone", ylim=(len(rows) - 0.4, -0.6))
    axes.grid(False, axis="y")
    axes.legend(fontsize=7.5)
