"""This module draws the figure of `participation`: variance, designs, required participation, and error floors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, DOTTED, chart, points, rows_of
from fedjax_sim.study.findings import Comparison

LOOKS = [(plots.BLUE, "o"), (plots.ORANGE, "s"), (plots.BLACK, "^"), (plots.GREY, "D"), ("#009E73", "v")]


def participation_figure(
    found: Sequence[Comparison], tolerance: float, *, signal: float, spread: float, step_size: float
) -> Any:
    """Draws four panels, with theory as lines and measurements as points.

    Args:
      found: the comparisons of the study.
      tolerance: alpha of the study.
      signal: the norm of the mean of the clients' values.
      spread: sigma of the clients' values.
      step_size: the step size of the runs to the floor.

    Returns: a matplotlib Figure.
    """
    figure, (variance, designs, required, floor) = chart(2, 2)
    _variance(variance, found, spread)
    _designs(designs, rows_of(found, part="designs"))
    _required(required, tolerance, signal, spread)
    _floor(floor, rows_of(found, part="final loss"), spread, step_size)
    return figure


def _rate(row: dict[str, Any]) -> float:
    """Returns the participation rate m / N of a row."""
    return row["cohort_size"] / row["population_size"]


def _above_rounding(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leaves out rows whose variance is zero up to rounding, as with everybody in the cohort."""
    return [row for row in rows if row["measured"] > 1e-9]


def _variance(axes, comparisons: Sequence[Comparison], spread: float) -> None:
    """Draws the variance of the cohort's mean against the participation rate, for each population size.

    A line is (sigma^2 / m) (N - m) / (N - 1), and dotted sigma^2 / m, against m / N.

    Args:
      axes: the panel to draw on.
      comparisons: the comparisons of the study; the parts "variance" and "digits MLP" are the points.
      spread: sigma, the root of the trace of the population's covariance (divisor N).
    """
    all_rows = rows_of(comparisons, part="variance")
    sizes = dict.fromkeys(row["population_size"] for row in all_rows)
    for size, (colour, marker) in zip(sizes, LOOKS * (1 + len(sizes)), strict=False):
        rows = [row for row in all_rows if row["population_size"] == size]
        _laws(axes, size, min(map(_rate, rows)), spread, colour)
        points(axes, _above_rounding(rows), _rate, colour=colour, marker=marker, label=f"N = {size:,}")
    digits = rows_of(comparisons, part="digits MLP")
    if digits:
        size, cohort = (digits[0][name] for name in ("population_size", "cohort_size"))
        correction = theory.finite_population_correction(size, cohort)
        # The digits have another sigma; they are scaled as if it were `spread`, so that one panel can show both.
        scale = spread**2 * correction / (digits[0]["predicted"] * cohort)
        _laws(axes, size, min(map(_rate, digits)), spread, plots.INK)
        points(
            axes, digits, _rate, colour=plots.INK, marker="P", label=f"digits MLP, N = {size:,}, scaled", scale=scale
        )
    axes.plot([], [], color=plots.INK, linewidth=1.3, label="theory")
    axes.plot([], [], color=plots.INK, linewidth=0.9, linestyle=DOTTED, label="without the correction")
    axes.set(xlabel="Participation rate m / N", ylabel="Variance of the cohort's mean")
    plots.logarithmic(axes)
    axes.legend(fontsize=7.5, handlelength=1.6)


def _laws(axes, size: int, lowest_rate: float, spread: float, colour: str) -> None:
    """Draws the variance by theory from `lowest_rate` on: of a finite population, and of an infinite one, dotted."""
    rates = np.geomspace(lowest_rate, max(0.985, lowest_rate), 200)
    infinite_population = spread**2 / (rates * size)
    axes.plot(rates, infinite_population * (1 - rates) * size / (size - 1), color=colour, linewidth=1.3)
    axes.plot(rates, infinite_population, color=colour, linewidth=0.9, linestyle=DOTTED)


def _designs(axes, rows: list[dict[str, Any]]) -> None:
    """Draws measured / predicted variances, one line for each sampler and aggregator."""
    # Ratios have one scale for all samplers and aggregators; their variances differ by orders of magnitude.
    for i, row in enumerate(rows):
        error = [[row["ratio"] - row["ratio_low"]], [row["ratio_high"] - row["ratio"]]]
        axes.errorbar(row["ratio"], i, xerr=error, fmt="o", color=plots.BLUE, markersize=4.5, capsize=2)
    names = [f"{row['sampler']}\n{row['estimator']}, N = {row['population_size']:,}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=6.5)
    axes.axvline(1, color=plots.BLACK, linewidth=0.9)
    axes.set(xlabel="Variance, measured / predicted", ylim=(len(rows) - 0.4, -0.6))
    axes.grid(False, axis="y")


def _required(axes, tolerance: float, signal: float, spread: float) -> None:
    """Draws the required participation in per cent against the population size, for three tolerances."""
    sizes = np.unique(np.geomspace(2, 1e6, 120).astype(int))
    for alpha, line in ((tolerance / 2, DASHED), (tolerance, "-"), (tolerance * 2, DOTTED)):
        ratio = theory.noise_to_signal_ratio(spread**2, signal, alpha)
        rates = [100 * theory.required_cohort_size(int(size), ratio) / size for size in sizes]
        axes.plot(sizes, rates, color=plots.BLUE, linestyle=line, label=f"tolerance {alpha:g}")
    axes.set(xlabel="Population size N", ylabel="Participation required (%)", ylim=(0, 103))
    plots.logarithmic(axes, "x")
    axes.legend(fontsize=7.5)


def _floor(axes, rows: list[dict[str, Any]], spread: float, step_size: float) -> None:
    """Draws the error floor against the participation rate."""
    if not rows:
        return
    size = rows[0]["population_size"]
    # At m = N the variance is zero, which has no place on a logarithmic axis.
    cohorts = np.geomspace(1, size * 0.985, 200)
    infinite_population = step_size / (2 - step_size) / 2 * spread**2 / cohorts
    axes.plot(cohorts / size, infinite_population * (size - cohorts) / (size - 1), color=plots.BLUE, label="theory")
    points(axes, _above_rounding(rows), _rate, colour=plots.BLUE, marker="o", label="measured")
    axes.set(xlabel=f"Participation rate m / N, N = {size:,}", ylabel="Error floor: excess loss")
    plots.logarithmic(axes)
    axes.legend(fontsize=7.5)
