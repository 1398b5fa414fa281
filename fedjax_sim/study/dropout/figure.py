"""This module draws the figure of `dropout`: aborted rounds and messages against the probability of leaving."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected


def dropout_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws simulated rounds as points and closed forms as lines: exact on the complete graph, a bound on the circle.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, (aborts, messages) = charts.panels(1, 2)
    dropouts = np.linspace(0, min(max(options["dropouts"]) * 1.02, 1), 200).tolist()
    m = options["num_clients"]
    shares, probabilities = [], []
    for graph, neighbours in (("complete graph", None), ("circle", options["neighbours"])):
        holders = neighbours or m
        threshold = math.ceil(options["threshold_share"] * holders)
        series = {"series": f"{graph}, {threshold} of {holders} holders"}
        shares += [row | series for row in selected(rows, part=graph, quantity="aborted share")]
        probabilities += [
            series | {"dropout": p, "predicted": theory.abort_probability(m, threshold, p, neighbours=neighbours)}
            for p in dropouts
        ]
    charts.lines(aborts, shares, "dropout", by="series", theory=probabilities, line="theory, circle: bound",
                 xlabel="Probability of leaving before a step", ylabel="Share of rounds aborted")  # fmt: skip
    in_sums = selected(rows, part="complete graph", quantity="messages in a sum")
    expected = [{"dropout": p, "predicted": theory.expected_messages(m, p)} for p in dropouts]
    charts.lines(messages, in_sums, "dropout", theory=expected, line="m (1 - p)³",
                 xlabel="Probability of leaving before a step", ylabel="Messages in a sum")  # fmt: skip
    return figure
