"""This module draws the figure of `privacy_utility`: errors and floors by noise and epsilon, and digits' accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected
from fedjax_sim.study.privacy_utility.spending import NUM_ROUNDS, STEP_SIZE, epsilon_of, release_of

GIVEN, CALIBRATED = "z given", "z from epsilon"


def privacy_utility_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws four panels, with theory as lines and measurements as points.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, (by_multiplier, floor, by_epsilon, digits) = charts.panels(2, 2)
    measured: list[Row] = [row | {"from": GIVEN if row["part"] == "noise multiplier" else CALIBRATED}
                for row in rows if row["part"] != "digits MLP"]  # fmt: skip
    predictions = _predictions([row["noise_multiplier"] for row in measured], options)
    for panel, quantity, title, label in (
        (by_multiplier, "squared error", "One release", "Squared error of the mean"),
        (floor, "floor", "Runs to the floor", "Error floor: squared distance"),
    ):
        charts.lines(panel, selected(measured, quantity=quantity), "noise_multiplier", by="from",
                     theory=selected(predictions, quantity=quantity), xlabel="Noise multiplier z", ylabel=label,
                     log="xy")  # fmt: skip
        panel.set_title(title)
    # The price of privacy: the same predictions against the epsilon that each multiplier spends.
    charts.lines(by_epsilon, measured, "epsilon", by="quantity", theory=predictions, ylabel="Squared error",
                 xlabel=f"Epsilon of {NUM_ROUNDS} rounds", log="xy")  # fmt: skip
    by_epsilon.set_title("The same, by what it spends")

    accuracies = selected(rows, part="digits MLP", quantity="test accuracy")
    noiseless = selected(accuracies, noise_multiplier=0.0)
    noisy = [row for row in accuracies if row not in noiseless]
    levels = {"without noise": noiseless[0]["measured"]} if noiseless else {}
    charts.lines(digits, noisy, "epsilon", levels=levels, log="x", ylabel="Test accuracy",
                 xlabel=f"Epsilon of {options['digits_rounds']} rounds")  # fmt: skip
    digits.set_title("Digits, MLP")
    digits.set_visible(bool(accuracies))
    return figure


def _predictions(multipliers: Sequence[float], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns squared errors and floors for many multipliers with the epsilon that each spends, as rows of theory.

    Args:
      multipliers: z of the measurements; theory goes a little beyond them.
      options: the study's options.
    """
    found = []
    for z in np.geomspace(min(multipliers) / 1.3, max(multipliers) * 1.3, 40).tolist():
        variance = theory.noise_variance(
            z, options["clip_norm"], options["num_clients"], num_values=options["dimension"]
        )
        epsilon = epsilon_of(z, options["delta"], release_of(options))
        for quantity, predicted in (
            ("squared error", variance),
            ("floor", theory.noise_floor(variance, 1 - STEP_SIZE)),
        ):
            found.append({"noise_multiplier": z, "epsilon": epsilon, "from": GIVEN, "quantity": quantity,
                          "predicted": predicted})  # fmt: skip
    return found
