"""The figure of `dropout`: aborted rounds and messages in a sum against the probability of leaving a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, chart, points, rows_of
from fedjax_sim.study.findings import Comparison

__all__ = ["dropout_figure"]

LOOKS = {"complete graph": (plots.BLUE, "o", "-", "theory"), "circle": (plots.ORANGE, "s", DASHED, "upper bound")}


def dropout_figure(found: Sequence[Comparison], options: dict[str, Any]) -> Any:
    """Points are simulated rounds, lines are closed forms: exact on the complete graph, a bound on the circle."""
    figure, (aborts, messages) = chart(1, 2)
    ps = np.linspace(0, max(options["dropouts"]) * 1.02, 200)
    m = options["num_clients"]
    for graph, (colour, marker, line, word) in LOOKS.items():
        k = None if graph == "complete graph" else options["neighbours"]
        holders = m if k is None else k
        threshold = int(np.ceil(options["threshold_share"] * holders))
        chances = [theory.abort_probability(m, threshold, float(p), neighbours=k) for p in ps]
        label = f"{graph}, {threshold} of {holders} holders"
        aborts.plot(ps, chances, color=colour, linestyle=line, linewidth=1.1, label=f"{word}")
        points(aborts, rows_of(found, part=graph, quantity="aborted share"), "dropout", colour, marker, label)
    rows = rows_of(found, part="complete graph", quantity="messages in a sum")
    points(messages, rows, "dropout", plots.BLUE, "o", "simulated")
    messages.plot(ps, [theory.expected_messages(m, float(p)) for p in ps], color=plots.INK, linewidth=1.1,
                  label="m (1 - p)³", zorder=1)  # fmt: skip
    aborts.set(xlabel="Probability of leaving before a step", ylabel="Share of rounds aborted", ylim=(-0.03, 1.03))
    messages.set(xlabel="Probability of leaving before a step", ylabel="Messages in a sum")
    for axes in (aborts, messages):
        axes.legend(fontsize=7.5)
    return figure
