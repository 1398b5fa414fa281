"""This module draws the figure of `price_of_robustness`: variances on normal messages, and accuracy lost on digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedjax_sim.report import plots
from fedjax_sim.study.charts import chart
from fedjax_sim.study.findings import Comparison, comparisons_of
from fedjax_sim.study.robust_digits import RULES

COLOURS = (plots.BLUE, plots.ORANGE, plots.BLACK, plots.GREY)


def price_figure(found: Sequence[Comparison], options: dict[str, Any]) -> Any:
    """Draws a panel for normal messages and a panel for each alpha of the digits, with bars by rule and bucket size.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    alphas = options["alphas"] if options["num_clients"] else []
    figure, (variances, *panels) = chart(1, 1 + len(alphas))
    names = list(RULES)
    _bars(variances, comparisons_of(found, "normal messages"), 1.0, names)
    variances.set(xlabel="Variance / the mean's (lines: closed form)", xscale="log")
    for axes, alpha in zip(panels, alphas, strict=True):
        _bars(axes, comparisons_of(found, "digits", "loss against the mean", alpha=alpha), 100.0, names)
        axes.set(xlabel=f"Points of accuracy lost, alpha = {alpha:g}")
        axes.set_yticklabels([])
    return figure


def _bars(axes: Any, comparisons: Sequence[Comparison], scale: float, names: Sequence[str]) -> None:
    """Draws the measured numbers as bars, with predictions as ticks.

    Args:
      axes: the panel to draw on.
      comparisons: those of the panel, with a rule and a bucket size each.
      scale: multiplies the measured numbers; 100 makes points of accuracy of shares. Predictions are drawn as they are.
      names: the rules from top to bottom.
    """
    sizes = list(dict.fromkeys(comparison.conditions["bucket_size"] for comparison in comparisons))
    height = 0.8 / len(sizes)
    for i, (size, colour) in enumerate(zip(sizes, COLOURS * len(sizes), strict=False)):
        bars = [comparison for comparison in comparisons if comparison.conditions["bucket_size"] == size]
        # The bars of one rule lie side by side, centred at its place.
        offset = (i - (len(sizes) - 1) / 2) * height
        places = [names.index(bar.conditions["rule"]) + offset for bar in bars]
        label = "every message" if size == 1 else f"buckets of {size}"
        axes.barh(places, [scale * bar.measured for bar in bars], height=height, color=colour, label=label)
        ticks = [(place, bar.predicted) for place, bar in zip(places, bars, strict=True) if bar.predicted is not None]
        axes.plot([x for _, x in ticks], [y for y, _ in ticks], "|", color=plots.INK, markersize=9, markeredgewidth=1.6)
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.invert_yaxis()
    axes.axvline(0, color=plots.INK, linewidth=0.8)
    axes.legend(fontsize=7)
