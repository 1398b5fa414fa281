"""The figure of `availability`: bias and excess loss by correlation, by persistence, and over a day."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import plots
from fedjax_sim.study.availability import laws
from fedjax_sim.study.availability.clients import DAYS, QuadraticFedAvg, correlated, day, rates_of
from fedjax_sim.study.charts import DASHED, MARKERS, chart
from fedjax_sim.study.findings import Comparison, comparisons_of

__all__ = ["availability_figure"]

LOOKS = {"mean": (plots.BLUE, "o", "-"), "corrected": (plots.ORANGE, "s", DASHED)}
WORDS = {"mean": "mean of those who are there", "corrected": "weighted by 1 / response rate"}


def availability_figure(found: Sequence[Comparison], options: dict[str, Any]) -> Any:
    """Four panels; theory as lines, measurement as points."""
    figure, (bias, excess, stays, hours) = chart(2, 2)
    size, dimension, seed = (options[name] for name in ("num_clients", "dimension", "seed"))
    work, rates = QuadraticFedAvg(options["num_steps"], options["step_size"]), rates_of(size, seed)
    grid = np.linspace(0, 1, 21)
    for way, law in (("mean", laws.naive), ("corrected", laws.corrected)):
        colour, marker, line = LOOKS[way]
        every = [(law(centers, rates, work.s), centers.mean(0))
                 for centers in (correlated(rates, x, dimension, seed) for x in grid)]  # fmt: skip
        look = {"color": colour, "linestyle": line, "linewidth": 1.3, "label": WORDS[way]}
        bias.plot(grid, [(made.mean - optimum)[0] for made, optimum in every], **look)
        excess.plot(grid, [made.excess(optimum) for made, optimum in every], **look)
        for axes, quantity in ((bias, "bias"), (excess, "excess loss")):
            ones = comparisons_of(found, "by client", quantity, aggregate=way)
            at = [one.conditions["correlation"] for one in ones]
            axes.plot(at, [one.measured for one in ones], marker, color=colour, **MARKERS)
    bias.set(xlabel="Correlation of data and response rate", ylabel="Bias of the model, first coordinate")
    excess.set(xlabel="Correlation of data and response rate", ylabel="Excess loss", ylim=(0, None))
    for axes in (bias, excess):
        axes.legend(fontsize=7.5)
    ones = comparisons_of(found, "for a while", "excess loss")
    most = max(one.conditions["stay"] for one in ones)
    centers, grid = correlated(rates, 0.0, dimension, seed), np.geomspace(2, max(most, 2.5), 12)
    curve = [laws.persistent(centers, 1 / x, 1 / x, work.s).excess(centers.mean(0)) for x in grid]
    stays.plot(grid, curve, color=plots.BLUE, linewidth=1.3, label="theory")
    stays.plot(
        [one.conditions["stay"] for one in ones], [one.measured for one in ones], "o", color=plots.BLUE, **MARKERS
    )
    stays.set(xlabel="Rounds that a client stays, or is away", ylabel="Excess loss", ylim=(0, None))
    _day(hours, found, options)
    return figure


def _day(axes: Any, found: Sequence[Comparison], options: dict[str, Any]) -> None:
    _, there, centers = day(options["zone_clients"], options["share"], options["seed"])
    sizes = sorted({one.conditions["step_size"] for one in comparisons_of(found, "by hour")}, reverse=True)
    for step_size, (colour, marker, line) in zip(sizes, LOOKS.values(), strict=True):
        path = laws.daily(centers, there, QuadraticFedAvg(options["num_steps"], step_size).s, DAYS)
        away = np.linalg.norm(path - centers.mean(0), axis=1)
        label = f"around the clock, step {step_size:g}"
        axes.plot(range(24), away, color=colour, linestyle=line, linewidth=1.3, label=label)
        ones = comparisons_of(found, "by hour", training="around the clock", step_size=step_size)
        axes.plot([one.conditions["hour"] for one in ones], [one.measured for one in ones], marker, color=colour,
                  **MARKERS)  # fmt: skip
    once = comparisons_of(found, "by hour", training="at one hour")
    axes.plot([0], [once[0].measured], "^", color=plots.BLACK, label="one round a day, at hour 0", **MARKERS)
    axes.set(xlabel="Hour of the day", ylabel="Distance to the optimum", ylim=(0, None))
    axes.legend(fontsize=7.5)
