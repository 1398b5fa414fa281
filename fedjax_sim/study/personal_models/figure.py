"""This module draws the figure of `personal_models`: methods by accuracy, with the lowest tenth, for each data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected
from fedjax_sim.study.personal_models.methods import BASELINE

SERIES = {"accuracy": "all owners' rows", "lowest tenth": "lowest tenth of the clients"}


def personal_models_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws a panel for each data set: methods from the best down, accuracies with one deviation over runs.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    parts = list(dict.fromkeys(row["part"] for row in rows))
    figure, panels = charts.panels(len(parts), 1, height=0.24 * len(options["methods"]) + 0.9)
    for panel, part in zip(panels, parts, strict=True):
        accuracies = [
            row | {"series": SERIES[row["quantity"]], "low": row["measured"] - row["standard_deviation"],
                   "high": row["measured"] + row["standard_deviation"]}
            for row in selected(rows, part=part) if row["quantity"] in SERIES
        ]  # fmt: skip
        # Methods stand in the order of the series that comes first.
        accuracies.sort(key=lambda row: (row["quantity"] != "accuracy", -row["measured"]))
        (baseline,) = selected(accuracies, quantity="accuracy", method=BASELINE)
        charts.dots(panel, accuracies, "method", by="series", levels={BASELINE: baseline["measured"]},
                    label=f"Accuracy on owners' unseen rows, {part}")  # fmt: skip
    return figure
