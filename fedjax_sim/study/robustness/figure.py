"""This module draws the figure of `robustness`: for each number of attackers a table of accuracies and worst cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected


def robustness_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws a panel for each number of attackers, with rules as rows and attacks as columns, in per cent.

    The last column is the worst case of each rule. The best rule of each column has a frame.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    height = 0.24 * len(options["rules"]) + 0.75
    figure, panels = charts.panels(len(options["attackers"]), 1, height=height)
    for panel, f in zip(panels, options["attackers"], strict=True):
        found = selected(rows, attackers=f)
        table = [*selected(found, part="accuracy"),
                 *(row | {"attack": "worst"} for row in selected(found, part="worst case"))]  # fmt: skip
        best = {row["attack"]: row["measured"] for row in sorted(table, key=lambda row: row["measured"])}
        cells = [row | {"percent": 100 * row["measured"], "is_best": row["measured"] == best[row["attack"]]}
                 for row in table]  # fmt: skip
        charts.heat_map(panel, cells, "attack", "rule", "percent", marked="is_best", shown="{:.1f}".format,
                        xlabel="Attack (frame: its best rule)", ylabel="Rule")  # fmt: skip
        panel.set_title(f"Test accuracy in %, {f} attackers of {options['num_clients']}")
        panel.tick_params(labelsize=charts.LEGEND_FONT_SIZE)
    return figure
