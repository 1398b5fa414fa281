"""This module draws the figure of `price_of_robustness`: variances on normal messages, and accuracy lost on digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected


def price_of_robustness_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws a panel for normal messages and a panel for each alpha of the digits, by rule and bucket size.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    alphas = options["alphas"] if options["num_clients"] else []
    figure, (variances, *panels) = charts.panels(1 + len(alphas), 1, height=2.4)
    shown_sizes = options["bucket_sizes"][: len(charts.LOOKS)]
    named = [row | {"messages": "every message" if row["bucket_size"] == 1 else f"buckets of {row['bucket_size']}"}
             for row in rows]  # fmt: skip
    normal = [row for row in selected(named, part="normal messages") if row["bucket_size"] in shown_sizes]
    charts.dots(variances, normal, "rule", by="messages",
                levels={"that of the mean": 1.0}, label="Variance / the mean's", log=True,
                line="closed form")  # fmt: skip
    for panel, alpha in zip(panels, alphas, strict=True):
        losses = [row | {"points": 100 * row["measured"]}
                  for row in selected(named, part="digits", quantity="loss against the mean", alpha=alpha)]  # fmt: skip
        charts.dots(panel, losses, "rule", "points", by="messages", label=f"Points of accuracy lost, alpha = {alpha:g}")
    return figure
