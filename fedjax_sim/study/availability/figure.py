"""This module draws the figure of `availability`: bias and excess loss by correlation, by persistence, over a day."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import plots
from fedjax_sim.study.availability import laws
from fedjax_sim.study.availability.clients import DAYS, QuadraticFedAvg, correlated, day, rates_of
from fedjax_sim.study.charts import DASHED, MARKERS, chart
from fedjax_sim.study.findings import Comparison, comparisons_of

LOOKS = {"mean": (plots.BLUE, "o", "-"), "corrected": (plots.ORANGE, "s", DASHED)}
WORDS = {"mean": "mean of those who are there", "corrected": "weighted by 1 / response rate"}


def availability_figure(found: Sequence[Comparison], options: dict[str, Any]) -> Any:
    """Draws four panels, with theory as lines and measurements as points.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    figure, (bias, excess, stays, hours) = chart(2, 2)
    size, dimension, seed = (options[name] for name in ("num_clients", "dimension", "seed"))
    work = QuadraticFedAvg(options["num_steps"], options["step_size"])
    rates = rates_of(size, seed)
    grid = np.linspace(0, 1, 21)
    for way, law in (("mean", laws.naive), ("corrected", laws.corrected)):
        colour, marker, line = LOOKS[way]
        # (moments of the model, optimum) at each correlation of the grid.
        predictions = [
            (law(centers, rates, work.s), centers.mean(0))
            for centers in (correlated(rates, correlation, dimension, seed) for correlation in grid)
        ]
        style = {"color": colour, "linestyle": line, "linewidth": 1.3, "label": WORDS[way]}
        bias.plot(grid, [(moments.mean - optimum)[0] for moments, optimum in predictions], **style)
        excess.plot(grid, [moments.excess(optimum) for moments, optimum in predictions], **style)
        for axes, quantity in ((bias, "bias"), (excess, "excess loss")):
            comparisons = comparisons_of(found, "by client", quantity, aggregate=way)
            correlations = [comparison.conditions["correlation"] for comparison in comparisons]
            values = [comparison.measured for comparison in comparisons]
            axes.plot(correlations, values, marker, color=colour, **MARKERS)
    bias.set(xlabel="Correlation of data and response rate", ylabel="Bias of the model, first coordinate")
    excess.set(xlabel="Correlation of data and response rate", ylabel="Excess loss", ylim=(0, None))
    for axes in (bias, excess):
        axes.legend(fontsize=7.5)
    comparisons = comparisons_of(found, "for a while", "excess loss")
    measured_stays = [comparison.conditions["stay"] for comparison in comparisons]
    centers = correlated(rates, 0.0, dimension, seed)
    grid = np.geomspace(2, max(max(measured_stays), 2.5), 12)
    curve = [laws.persistent(centers, 1 / stay, 1 / stay, work.s).excess(centers.mean(0)) for stay in grid]
    stays.plot(grid, curve, color=plots.BLUE, linewidth=1.3, label="theory")
    measured_losses = [comparison.measured for comparison in comparisons]
    stays.plot(measured_stays, measured_losses, "o", color=plots.BLUE, **MARKERS)
    stays.set(xlabel="Rounds that a client stays, or is away", ylabel="Excess loss", ylim=(0, None))
    _day(hours, found, options)
    return figure


def _day(axes: Any, all_comparisons: Sequence[Comparison], options: dict[str, Any]) -> None:
    """Draws the distance of the model to the optimum over a day, for each step size and for one round a day.

    A line is |w_h - w*|, with w_h the model before the round of hour h (`laws.daily`) and w* the mean of the optima.

    Args:
      axes: the panel to draw on.
      all_comparisons: the comparisons of the study; those of the part "by hour" are the points.
      options: the study's options. `zone_clients` (N), `share`, `num_steps` (K) and `seed` decide the lines.
    """
    _, is_available, centers = day(options["zone_clients"], options["share"], options["seed"])
    by_hour = comparisons_of(all_comparisons, "by hour")
    step_sizes = sorted({comparison.conditions["step_size"] for comparison in by_hour}, reverse=True)
    for step_size, (colour, marker, line) in zip(step_sizes, LOOKS.values(), strict=True):
        path = laws.daily(centers, is_available, QuadraticFedAvg(options["num_steps"], step_size).s, DAYS)
        distances = np.linalg.norm(path - centers.mean(0), axis=1)
        label = f"around the clock, step {step_size:g}"
        axes.plot(range(24), distances, color=colour, linestyle=line, linewidth=1.3, label=label)
        comparisons = comparisons_of(all_comparisons, "by hour", training="around the clock", step_size=step_size)
        hours = [comparison.conditions["hour"] for comparison in comparisons]
        axes.plot(hours, [comparison.measured for comparison in comparisons], marker, color=colour, **MARKERS)
    at_one_hour = comparisons_of(all_comparisons, "by hour", training="at one hour")
    axes.plot([0], [at_one_hour[0].measured], "^", color=plots.BLACK, label="one round a day, at hour 0", **MARKERS)
    axes.set(xlabel="Hour of the day", ylabel="Distance to the optimum", ylim=(0, None))
    axes.legend(fontsize=7.5)
