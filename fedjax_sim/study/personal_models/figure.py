"""This module draws the figure of `personal_models`: methods by accuracy, with the lowest tenth, for each data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedjax_sim.report import plots
from fedjax_sim.study.charts import MARKERS, rows_of
from fedjax_sim.study.findings import Comparison
from fedjax_sim.study.personal_models.methods import BASELINE


def personal_models_figure(found: Sequence[Comparison], options: dict[str, Any]) -> Any:
    """Draws a panel for each data set: methods from the best down, accuracies with one deviation over runs.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    from matplotlib.figure import Figure

    parts = list(dict.fromkeys(comparison.conditions["part"] for comparison in found))
    height = 0.24 * len(options["methods"]) + 0.9
    figure = Figure(figsize=(plots.WIDTH, height * len(parts)), layout="constrained")
    for axes, part in zip(figure.subplots(len(parts), 1, squeeze=False).flat, parts, strict=True):
        rows = sorted(rows_of(found, part=part, quantity="accuracy"), key=lambda row: row["measured"])
        places = {row["method"]: place for place, row in enumerate(rows)}
        series = {
            "accuracy": (plots.BLUE, "o", "all owners' rows", 0.14),
            "lowest tenth": (plots.ORANGE, "^", "the tenth of the clients with the lowest accuracy", -0.14),
        }
        for quantity, (colour, marker, label, shift) in series.items():
            shown = rows_of(found, part=part, quantity=quantity)
            axes.errorbar(
                [100 * row["measured"] for row in shown], [places[row["method"]] + shift for row in shown],
                xerr=[100 * row["standard_deviation"] for row in shown], fmt=marker, color=colour, capsize=2,
                linestyle="none", label=label, **MARKERS,
            )  # fmt: skip
        (baseline,) = rows_of(found, part=part, quantity="accuracy", method=BASELINE)
        axes.axvline(100 * baseline["measured"], color=plots.GREY, linewidth=1, label=BASELINE)
        axes.set_yticks(range(len(rows)), [row["method"] for row in rows], fontsize=8)
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set(title=f"Accuracy on owners' unseen rows in %, {part}")
    # Below the panels, since points lie everywhere in them.
    figure.legend(*axes.get_legend_handles_labels(), fontsize=7.5, loc="outside lower center", ncols=3)
    return figure
