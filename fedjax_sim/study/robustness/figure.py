"""This module draws the figure of `robustness`: for each number of attackers a table of accuracies and worst cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import plots
from fedjax_sim.study.findings import Comparison, comparisons_of


def robustness_figure(found: Sequence[Comparison], options: dict[str, Any]) -> Any:
    """Draws a panel for each number of attackers, with rules as rows and attacks as columns, in per cent.

    The last column is the worst case of each rule. The best rule of each column is bold.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    from matplotlib.figure import Figure

    rules = options["rules"]
    attacks = options["attacks"]
    numbers = options["attackers"]
    height = (0.24 * len(rules) + 0.75) * len(numbers)
    figure = Figure(figsize=(plots.WIDTH, height), layout="constrained")
    for axes, f in zip(figure.subplots(len(numbers), 1, squeeze=False).flat, numbers, strict=True):
        cells = {(comparison.conditions["rule"], comparison.conditions["attack"]): comparison.measured
                 for comparison in comparisons_of(found, "accuracy", attackers=f)}  # fmt: skip
        table = np.array([[cells[rule, attack] for attack in attacks] for rule in rules])
        table = 100 * np.concatenate([table, table.min(1, keepdims=True)], axis=1)
        axes.imshow(table, cmap="cividis", vmin=0, vmax=100, aspect="auto")
        best = table.max(0)
        for (row, column), value in np.ndenumerate(table):
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=7.5,
                      color="white" if value < 55 else "black",
                      weight="bold" if value == best[column] else "normal")  # fmt: skip
        axes.set_xticks(range(len(attacks) + 1), [*attacks, "worst"], fontsize=7.5)
        axes.set_yticks(range(len(rules)), rules, fontsize=7.5)
        axes.set_title(f"Test accuracy in %, {f} attackers of {options['num_clients']}", fontsize=8.5, loc="left")
        axes.tick_params(length=0)
        axes.axvline(len(attacks) - 0.5, color="white", linewidth=2)
        axes.grid(False)
    return figure
