"""This module draws the figure of `privacy_utility`: errors and floors by noise and epsilon, and digits' accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, chart, points, rows_of
from fedjax_sim.study.findings import Comparison
from fedjax_sim.study.privacy_utility.spending import NUM_ROUNDS, STEP_SIZE, epsilon_of


def privacy_utility_figure(release: dict[str, Any], options: dict[str, Any], found: Sequence[Comparison]) -> Any:
    """Draws four panels, with theory as lines and measurements as points.

    Args:
      release: a round without its noise multiplier, as `spending.epsilon_of` takes it.
      options: the study's options.
      found: the comparisons of the study.
    """
    figure, panels = chart(2, 2)
    by_multiplier, floor, by_epsilon, digits = panels
    rows = [row for row in rows_of(found) if row["part"] != "digits MLP"]
    smallest = min(row["noise_multiplier"] for row in rows)
    largest = max(row["noise_multiplier"] for row in rows)
    grid = np.geomspace(smallest / 1.3, largest * 1.3, 40).tolist()  # a little beyond the measured points
    variances = [
        theory.noise_variance(z, options["clip_norm"], options["num_clients"], num_values=options["dimension"])
        for z in grid
    ]
    floors = [theory.noise_floor(variance, 1 - STEP_SIZE) for variance in variances]
    epsilons = [epsilon_of(z, options["delta"], release) for z in grid]
    for axes, quantity, predictions in ((by_multiplier, "squared error", variances), (floor, "floor", floors)):
        axes.plot(grid, predictions, color=plots.BLUE, linewidth=1.3, label="theory")
        for part, colour, marker, name in (("noise multiplier", plots.BLUE, "o", "measured"),
                                           ("epsilon", plots.ORANGE, "^", "measured, z from epsilon")):  # fmt: skip
            points(
                axes,
                rows_of(found, part=part, quantity=quantity),
                "noise_multiplier",
                colour=colour,
                marker=marker,
                label=name,
            )
        axes.set(xlabel="Noise multiplier z")
    by_multiplier.set(title="One release", ylabel="Squared error of the mean")
    floor.set(title="Runs to the floor", ylabel="Error floor: squared distance")
    # The price of privacy: the same predictions against the epsilon that each multiplier spends.
    for quantity, predictions, colour, marker, line in (
        ("floor", floors, plots.BLACK, "s", DASHED),
        ("squared error", variances, plots.BLUE, "o", "-"),
    ):
        by_epsilon.plot(epsilons, predictions, color=colour, linestyle=line, linewidth=1.3, label=f"{quantity}: theory")
        points(
            by_epsilon,
            [row for row in rows if row["quantity"] == quantity],
            "epsilon",
            colour=colour,
            marker=marker,
            label="measured",
        )
    by_epsilon.set(
        title="The same, by what it spends", xlabel=f"Epsilon of {NUM_ROUNDS} rounds", ylabel="Squared error"
    )
    for axes in (by_multiplier, floor, by_epsilon):
        plots.logarithmic(axes)
        axes.legend(fontsize=7.5)
    accuracies = rows_of(found, part="digits MLP", quantity="test accuracy")
    if accuracies:
        digits.axhline(
            accuracies[0]["measured"], color=plots.BLACK, linestyle=DASHED, linewidth=1.1, label="without noise"
        )
        points(digits, accuracies[1:], "epsilon", colour=plots.BLUE, marker="o", label="measured")
        digits.set(title="Digits, MLP", xlabel=f"Epsilon of {options['digits_rounds']} rounds", ylabel="Test accuracy",
                   ylim=(0, 1.02))  # fmt: skip
        plots.logarithmic(digits, "x")
        digits.legend(fontsize=7.5, loc="lower right")
    else:
        digits.set_visible(False)
    return figure
