"""This module draws the figure of `participation`: variance, designs, required participation, and error floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected
from fedjax_sim.study.participation.clients import FLOOR_STEP_SIZE, SIGNAL, SPREAD

RATE_AXIS = "Participation rate m / N"


def participation_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws four panels, with theory as lines and measurements as points.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, (variance, designs, required, floor) = charts.panels(2, 2)
    shares = _shares(rows)
    # The correction (N - m) / (N - 1) is what is left of the variance of an infinite population.
    charts.lines(variance, shares, "rate", by="series", theory=_corrections(shares),
                 levels={"infinite population": 1.0}, xlabel=RATE_AXIS,
                 ylabel="Variance of the cohort's mean / (sigma² / m)", log="x")  # fmt: skip
    names = [row | {"design": f"{row['sampler']}\n{row['estimator']}"} for row in selected(rows, part="designs")]
    charts.dots(designs, names, "design", label="Variance of the aggregate")
    charts.lines(required, [], "population_size", by="tolerance", theory=_required(options["tolerance"]),
                 xlabel="Population size N", ylabel="Participation required (%)", log="x")  # fmt: skip
    required.set_ylim(0, 103)
    # With everybody in the cohort there is no floor, which has no place on a logarithmic axis.
    floors = [row | {"rate": _rate(row)} for row in selected(rows, part="final loss") if _rate(row) < 1]
    charts.lines(floor, floors, "rate", theory=_floors(floors), xlabel=RATE_AXIS, ylabel="Error floor: excess loss",
                 log="xy")  # fmt: skip
    return figure


def _rate(row: Row) -> float:
    """Returns the participation rate m / N of a row."""
    return row["cohort_size"] / row["population_size"]


def _shares(rows: Sequence[Row]) -> list[Row]:
    """Returns variances as shares of sigma^2 / m, as many series as a chart has looks for.

    Args:
      rows: the rows of the study.
    """
    shares = []
    for row in [*selected(rows, part="variance"), *selected(rows, part="digits MLP")]:
        size, cohort = row["population_size"], row["cohort_size"]
        is_digits = row["part"] == "digits MLP"
        # The digits' sigma follows from their prediction, sigma^2 / m times the correction.
        infinite = (
            row["predicted"] / theory.finite_population_correction(size, cohort) if is_digits else SPREAD**2 / cohort
        )
        series = "digits MLP, " * is_digits + f"N = {size:,}"
        numbers = {name: row[name] / infinite for name in ("measured", "low", "high")}
        shares.append(row | numbers | {"rate": cohort / size, "series": series})
    shown = list(dict.fromkeys(row["series"] for row in shares))[: len(charts.LOOKS)]
    return [row for row in shares if row["series"] in shown]


def _corrections(shares: Sequence[Row]) -> list[Row]:
    """Returns the finite population correction for each series against the participation rate, as rows of theory."""
    sizes = {row["series"]: row["population_size"] for row in shares}
    lowest = {series: min(row["rate"] for row in selected(shares, series=series)) for series in sizes}
    return [
        {"series": series, "rate": rate, "predicted": (1 - rate) * size / (size - 1)}
        for series, size in sizes.items()
        for rate in np.geomspace(lowest[series], 1, 100).tolist()
    ]


def _required(tolerance: float) -> list[Row]:
    """Returns the required participation in per cent for populations of many sizes, as rows of theory."""
    sizes = np.unique(np.geomspace(2, 1e6, 120).astype(int)).tolist()
    ratios = {alpha: theory.noise_to_signal_ratio(SPREAD**2, SIGNAL, alpha)
              for alpha in (tolerance / 2, tolerance, tolerance * 2)}  # fmt: skip
    return [
        {"tolerance": alpha, "population_size": size,
         "predicted": 100 * theory.required_cohort_size(size, ratio) / size}
        for alpha, ratio in ratios.items() for size in sizes
    ]  # fmt: skip


def _floors(rows: Sequence[Row]) -> list[Row]:
    """Returns the error floor against the participation rate, as rows of theory; all rows have one population size."""
    sizes = {row["population_size"] for row in rows}
    return [
        {"rate": cohort / size,
         "predicted": FLOOR_STEP_SIZE / (2 - FLOOR_STEP_SIZE) / 2 * SPREAD**2 / cohort * (size - cohort) / (size - 1)}
        for size in sizes for cohort in np.geomspace(1, size * 0.985, 200).tolist()
    ]  # fmt: skip
