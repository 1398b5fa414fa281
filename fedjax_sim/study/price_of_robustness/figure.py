"""The figure of `price_of_robustness`: variances on normal messages, and accuracies lost on the digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedjax_sim.report import plots
from fedjax_sim.study.charts import chart
from fedjax_sim.study.findings import Comparison, comparisons_of
from fedjax_sim.study.robust_digits import RULES

__all__ = ["price_figure"]

COLOURS = (plots.BLUE, plots.ORANGE, plots.BLACK, plots.GREY)


def price_figure(found: Sequence[Comparison], options: dict[str, Any]) -> Any:
    """Bars for each rule: by bucket size, and for each alpha of the digits a panel of its own."""
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


def _bars(axes: Any, ones: Sequence[Comparison], scale: float, names: Sequence[str]) -> None:
    sizes = list(dict.fromkeys(one.conditions["bucket_size"] for one in ones))
    height = 0.8 / len(sizes)
    for i, (size, colour) in enumerate(zip(sizes, COLOURS * len(sizes), strict=False)):
        rows = [one for one in ones if one.conditions["bucket_size"] == size]
        at = [names.index(one.conditions["rule"]) + (i - (len(sizes) - 1) / 2) * height for one in rows]
        label = "every message" if size == 1 else f"buckets of {size}"
        axes.barh(at, [scale * one.measured for one in rows], height=height, color=colour, label=label)
        known = [(y, one.predicted) for y, one in zip(at, rows, strict=True) if one.predicted is not None]
        axes.plot([x for _, x in known], [y for y, _ in known], "|", color=plots.INK, markersize=9, markeredgewidth=1.6)
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.invert_yaxis()
    axes.axvline(0, color=plots.INK, linewidth=0.8)
    axes.legend(fontsize=7)
