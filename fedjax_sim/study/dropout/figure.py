"""This module draws the figure of `dropout`: aborted rounds and messages against the probability of leaving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, chart, points, rows_of
from fedjax_sim.study.findings import Comparison

LOOKS = {"complete graph": (plots.BLUE, "o", "-", "theory"), "circle": (plots.ORANGE, "s", DASHED, "upper bound")}


def dropout_figure(found: Sequence[Comparison], options: dict[str, Any]) -> Any:
    """Draws simulated rounds as points and closed forms as lines: exact on the complete graph, a bound on the circle.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    figure, (aborts, messages) = chart(1, 2)
    dropouts = np.linspace(0, max(options["dropouts"]) * 1.02, 200)
    m = options["num_clients"]
    for graph, (colour, marker, line, theory_label) in LOOKS.items():
        k = None if graph == "complete graph" else options["neighbours"]
        holders = m if k is None else k
        threshold = int(np.ceil(options["threshold_share"] * holders))
        probabilities = [theory.abort_probability(m, threshold, float(p), neighbours=k) for p in dropouts]
        label = f"{graph}, {threshold} of {holders} holders"
        aborts.plot(dropouts, probabilities, color=colour, linestyle=line, linewidth=1.1, label=f"{theory_label}")
        points(
            aborts,
            rows_of(found, part=graph, quantity="aborted share"),
            "dropout",
            colour=colour,
            marker=marker,
            label=label,
        )
    rows = rows_of(found, part="complete graph", quantity="messages in a sum")
    points(messages, rows, "dropout", colour=plots.BLUE, marker="o", label="simulated")
    messages.plot(dropouts, [theory.expected_messages(m, float(p)) for p in dropouts], color=plots.INK, linewidth=1.1,
                  label="m (1 - p)³", zorder=1)  # fmt: skip
    aborts.set(xlabel="Probability of leaving before a step", ylabel="Share of rounds aborted", ylim=(-0.03, 1.03))
    messages.set(xlabel="Probability of leaving before a step", ylabel="Messages in a sum")
    for axes in (aborts, messages):
        axes.legend(fontsize=7.5)
    return figure
