"""This module draws the figure of `stragglers`: losses, their variances on all data sets, and the map of FedProx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected
from fedjax_sim.study.stragglers.proximal_map import MAP, best_weights
from fedjax_sim.study.stragglers.training import data_set


def stragglers_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws losses against the share of stragglers, variances of all data sets, and two maps.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, (losses, variances, gaps, contractions) = charts.panels(2, 2, height=3.4)
    part = data_set(options["heterogeneities"][-1])
    charts.lines(losses, selected(rows, part=part, quantity="training loss"), "stragglers", by="algorithm",
                 xlabel="Share of stragglers", ylabel=f"Training loss, {part}")  # fmt: skip

    settings = [
        row | {"setting": f"{row['part'].removeprefix('Synthetic')}, {row['stragglers']:.0%}"}
        for share in options["shares"]
        for row in selected(rows, quantity="variance of the loss", stragglers=share)
    ]
    charts.dots(variances, settings, "setting", by="algorithm", label="Variance of the loss over rounds", log=True)

    best = best_weights(rows)
    pairs = [
        # Pairs that diverge are crosses.
        row | {"gap": row["measured"], "is_best": row is best[row["step_size"]]} if row["contraction"] < 1
        else row | {"gap": None, "contraction": None, "is_best": False}
        for row in selected(rows, part=MAP)
    ]  # fmt: skip
    labels: dict[str, Any] = {"xlabel": "Local step (frame: its best weight)",
                              "ylabel": "Proximal weight \N{GREEK SMALL LETTER LAMDA}"}  # fmt: skip
    for panel, value, title in ((gaps, "gap", f"Distance, {options['map_rounds']} rounds, measured"),
                                (contractions, "contraction", "Contraction a round, theory")):  # fmt: skip
        charts.heat_map(panel, pairs, "step_size", "proximal_weight", value, marked="is_best", shown="{:.2f}".format,
                        **labels)  # fmt: skip
        panel.set_title(title)
    return figure
