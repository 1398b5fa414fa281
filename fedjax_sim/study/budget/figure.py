"""This module draws the figure of `budget`: the error of each choice against the cohort size, for each budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, MARKERS, points, rows_of
from fedjax_sim.study.findings import Comparison
from fedjax_sim.theory import Allocation

# By bits: a colour, and markers without and with a deadline.
LOOKS = ((plots.ORANGE, "^v"), (plots.BLUE, "os"), (plots.BLACK, "Dd"), (plots.GREY, "<>"))


def budget_figure(
    found: Sequence[Comparison], allocations: Mapping[str, Allocation], options: Mapping[str, Any]
) -> Any:
    """Draws a panel for each budget: errors against cohort sizes, theory as lines and measurements as points.

    Args:
      found: the comparisons of the study.
      allocations: the predictions, by unit.
      options: the study's options.

    Returns: a matplotlib Figure. It is narrow, so that it can be read in half of a page.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 8.6), layout="constrained")
    panels = figure.subplots(len(allocations), 1, sharex=True)
    all_choices = [choice for allocation in allocations.values() for choice in allocation.choices]
    # The choice without a deadline is first.
    deadlines = sorted({choice.deadline for choice in all_choices}, key=lambda deadline: deadline is not None)
    for axes, (unit, allocation) in zip(panels, allocations.items(), strict=True):
        rows = rows_of(found, part=unit, quantity="squared distance")
        for bits, (colour, markers) in zip(options["bits"], LOOKS * len(options["bits"]), strict=False):
            for deadline, line, marker in zip(deadlines, ("-", DASHED), markers, strict=False):
                name = f"{bits} bits" if bits else "floats"
                name += "" if deadline is None else f", {deadline:.2g} s"
                choices = sorted(
                    (
                        choice
                        for choice in allocation.choices
                        if choice.feasible and (choice.deadline, choice.bits) == (deadline, bits or None)
                    ),
                    key=lambda choice: choice.cohort_size,
                )
                cohort_sizes = [choice.cohort_size for choice in choices]
                errors = [choice.error for choice in choices]
                label = f"{name}: theory" if axes is panels[0] else None
                axes.plot(cohort_sizes, errors, color=colour, linestyle=line, linewidth=1.2, label=label)
                shown_deadline = None if deadline is None else round(deadline, 3)
                measured_rows = [row for row in rows if (row["deadline"], row["bits"]) == (shown_deadline, bits or 32)]
                points(axes, measured_rows, "cohort_size", colour=colour, marker=marker, label=None)
        best = allocation.best
        is_first = axes is panels[0]
        axes.plot([best.cohort_size], [best.error], "o", color="none", markeredgecolor=plots.INK, markersize=14,
                  label="predicted best" if is_first else None)  # fmt: skip
        axes.plot([], [], "o", color=plots.GREY, label="measured" if is_first else None, **MARKERS)
        axes.set(ylabel="Squared distance", title=f"{options[unit]:,.6g} {unit}")
        plots.logarithmic(axes)
    panels[-1].set_xlabel("Cohort size m")
    sizes = sorted(options["cohort_sizes"])
    panels[-1].set_xticks(sizes, [str(size) for size in sizes])
    panels[-1].minorticks_off()
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure
