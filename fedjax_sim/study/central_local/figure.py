"""This module draws the figure of `central_local`: variances and ratios at one multiplier, and at one budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected


def central_local_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws variances and ratios against the cohort size, and variances and multipliers at one epsilon.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, (variance, ratio, budget, multipliers) = charts.panels(2, 2)
    at_one_multiplier = selected(rows, part="equal multiplier")
    # Points of distributed noise stand beside those of central noise, which has the same variance.
    beside = [row | {"cohort_size": 1.15 * row["cohort_size"]} if row["place"] == "distributed" else row
              for row in at_one_multiplier]  # fmt: skip
    charts.lines(variance, beside, "cohort_size", by="place", theory=at_one_multiplier, log="xy",
                 xlabel="Cohort size m", ylabel="Variance of a coordinate of the mean")  # fmt: skip
    variance.set(title=f"At equal noise multiplier z = {options['noise_multiplier']:g}")
    ratios = selected(rows, part="ratio")
    charts.lines(ratio, ratios, "cohort_size", by="place", theory=ratios, line="m and 4 m", log="xy",
                 xlabel="Cohort size m", ylabel="Variance, local / central")  # fmt: skip

    at_one_epsilon = [row | {"cohort": f"m = {row['cohort_size']:,}"} for row in selected(rows, part="equal epsilon")]
    charts.dots(budget, at_one_epsilon, "cohort", by="place", label="Variance of a coordinate of the mean", log=True)
    budget.set(title="At equal epsilon and delta")
    calibrated = [row | {"low": None, "high": None, "predicted": None} for row in at_one_epsilon]
    charts.dots(multipliers, calibrated, "cohort", "noise_multiplier", by="place",
                label="Calibrated noise multiplier z", log=True)  # fmt: skip
    multipliers.set(title="What equal epsilon asks for")
    return figure
