"""This module draws the figure of `time_to_target`: accuracy against seconds, bytes and joules, and round times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, DOTTED, MARKERS, chart, rows_of
from fedjax_sim.study.findings import Comparison
from fedjax_sim.study.watched_runs import Watched

LOOKS = (
    (plots.BLACK, "-"), (plots.BLUE, DASHED), (plots.BLUE, DOTTED), (plots.GREY, "-"), (plots.ORANGE, "-"),
    (plots.ORANGE, DASHED), (plots.ORANGE, DOTTED),
)  # fmt: skip
AXES = (("round_seconds", 1.0, "Simulated seconds"), ("bytes", 1e-6, "Megabytes, both ways"), ("joules", 1.0, "Joules"))


def time_figure(found: Sequence[Comparison], curves: Mapping[str, Watched], options: Mapping[str, Any]) -> Any:
    """Draws accuracy against what was spent so far, and the seconds of a round beside the order statistics.

    Args:
      found: the comparisons of the study.
      curves: the runs of each server; accuracies and sums are averaged over the runs.
      options: the study's options.

    Returns: a matplotlib Figure.
    """
    figure, panels = chart(2, 2)
    for axes, (quantity, unit, label) in zip(panels, AXES, strict=False):
        for (name, runs), (colour, line) in zip(curves.items(), LOOKS, strict=False):
            spent = unit * runs.so_far(quantity).mean(0)
            # Before the first step nothing is spent, and zero has no place on a logarithmic axis.
            axes.plot(spent[1:], runs.accuracy.mean(0)[1:], color=colour, linestyle=line, linewidth=1.3, label=name)
        axes.axhline(options["target"], color=plots.GREY, linewidth=0.8)
        axes.set(xlabel=label, ylabel="Test accuracy")
        plots.logarithmic(axes, "x")
    if curves:
        panels[0].legend(fontsize=7.5)
    _rounds(panels[3], found)
    return figure


def _rounds(axes: Any, comparisons: Sequence[Comparison]) -> None:
    """Draws the seconds of a round of each synchronous server, measured and predicted."""
    rows = rows_of(comparisons, part="step", quantity="seconds a round")
    places = range(len(rows))
    if not rows:
        return
    axes.plot([row["predicted"] for row in rows], places, "o", color="none", markeredgecolor=plots.BLACK, markersize=10,
              label="theory")  # fmt: skip
    axes.plot([row["measured"] for row in rows], places, "o", color=plots.BLUE, label="measured", **MARKERS)
    axes.set_yticks(list(places), [row["server"] for row in rows], fontsize=8)
    axes.set(xlabel="Seconds a round", ylim=(len(rows) - 0.5, -0.5))
    axes.set_xlim(left=0)
    axes.legend(fontsize=7.5)
