"""This module draws the figure of `stragglers`: a run's losses, variances of all data sets, and the map of FedProx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, DOTTED, MARKERS, rows_of
from fedjax_sim.study.findings import Comparison, comparisons_of
from fedjax_sim.study.stragglers.proximal_map import MAP, best_weights
from fedjax_sim.study.stragglers.training import FEDAVG, FEDPROX, PARTIAL, Paths

LOOKS = {
    FEDAVG: (plots.ORANGE, DASHED, "s", "FedAvg: drops stragglers"),
    PARTIAL: (plots.BLACK, DOTTED, "^", "mu = 0: keeps their work"),
    FEDPROX: (plots.BLUE, "-", "o", "FedProx: keeps it, best mu"),
}
WIDTH = 6.8  # inches: less than other figures, so that words are legible in a small picture


def stragglers_figure(
    found: Sequence[Comparison], options: dict[str, Any], paths: Mapping[tuple[float, float], Paths]
) -> Any:
    """Draws the first run's loss for each share of stragglers, variances of all data sets, and two maps.

    Args:
      found: the comparisons of the study.
      options: the study's options.
      paths: of `training.paths_of`.
    """
    from matplotlib.figure import Figure

    shares = options["shares"]
    num_panels = len(shares) + 1
    rows = -(-num_panels // 2)
    heights = [2.2 * rows + 0.5, 2.8]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=heights)
    panels = list(upper.subplots(rows, 2, squeeze=False).flat)
    heterogeneity = options["heterogeneities"][-1]
    highest = max(paths[heterogeneity, share].loss[name][0].max() for share in shares for name in LOOKS)
    for axes, share in zip(panels, shares, strict=False):
        for name, (colour, line, _, _) in LOOKS.items():
            loss = paths[heterogeneity, share].loss[name][0]
            axes.plot(np.arange(1, len(loss) + 1), loss, color=colour, linestyle=line, linewidth=1.4)
        axes.set(title=f"{100 * share:g} % stragglers, Synthetic({heterogeneity:g}, {heterogeneity:g})")
        axes.set(xlabel="Round", ylabel="Training loss", ylim=(0, 1.05 * highest))
    _variances(panels[len(shares)], found, options)
    for axes in panels[num_panels:]:
        axes.set_axis_off()
    # Below the panels, since curves lie everywhere in them.
    handles = [panels[0].plot([], [], color=c, linestyle=s, marker=m)[0] for c, s, m, _ in LOOKS.values()]
    upper.legend(handles, [look[3] for look in LOOKS.values()], loc="outside lower center", ncols=2)
    gaps, contractions = lower.subplots(1, 2)
    pairs = comparisons_of(found, MAP)
    diverges = np.array([pair.conditions["contraction"] >= 1 for pair in pairs])
    measured_gaps = np.where(diverges, np.nan, [pair.measured for pair in pairs])
    _map(gaps, f"Distance, {options['map_rounds']} rounds, measured", measured_gaps, found, options)
    theory = np.array([pair.conditions["contraction"] for pair in pairs])
    _map(contractions, "Contraction a round, theory", np.where(diverges, np.nan, theory), found, options)
    return figure


def _variances(axes: Any, found: Sequence[Comparison], options: dict[str, Any]) -> None:
    """Draws the variance of the loss over rounds, for each data set and share of stragglers.

    Args:
      axes: the panel to draw on.
      found: the comparisons of the study. The variance is over the second half of a run's rounds, as a mean over runs.
      options: the study's options. `heterogeneities` name the data sets, and `shares` group them from left to right.
    """
    parts = [f"Synthetic({value:g}, {value:g})" for value in options["heterogeneities"]]
    places = {(part, share): place for place, (part, share) in
              enumerate((part, share) for share in options["shares"] for part in parts)}  # fmt: skip
    for shift, (name, (colour, _, marker, _)) in zip((-0.2, 0.0, 0.2), LOOKS.items(), strict=True):
        rows = [row for part in parts for row in rows_of(found, part=part, quantity="variance of the loss")]
        rows = [row for row in rows if row["algorithm"] == name]
        axes.plot(
            [places[row["part"], row["stragglers"]] + shift for row in rows], [row["measured"] for row in rows], marker,
            color=colour, linestyle="none", **MARKERS,
        )  # fmt: skip
    labels = [part.removeprefix("Synthetic") for _ in options["shares"] for part in parts]
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=8)
    for i, share in enumerate(options["shares"]):
        middle = (i + 0.5) * len(parts) - 0.5
        axes.annotate(f"{100 * share:g} %", (middle, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom")
        axes.axvline((i + 1) * len(parts) - 0.5, color=plots.GREY, linewidth=0.5)
    axes.set(ylabel="Variance of the loss", xlim=(-0.5, len(labels) - 0.5))
    plots.logarithmic(axes, "y")


def _map(axes: Any, title: str, values: np.ndarray, found: Sequence[Comparison], options: dict[str, Any]) -> None:
    """Draws a map with its numbers; pairs that diverge are empty, and the best weight of a step has a frame.

    Args:
      axes: the panel to draw on.
      title: of the panel.
      values: [L E] the number of each pair of L proximal weights and E steps, all steps of the first weight first; NaN
        for a pair that diverges.
      found: the comparisons of the study, which give the best weights.
      options: the study's options; `proximal_weights` and `step_sizes` are rising.
    """
    from matplotlib.patches import Rectangle

    weights = options["proximal_weights"]
    steps = options["step_sizes"]
    table = values.reshape(len(weights), len(steps))
    axes.imshow(table, cmap="Blues", origin="lower", aspect="auto", vmin=0, vmax=1.6 * np.nanmax(table))
    for (row, column), value in np.ndenumerate(table):
        text = "\N{INFINITY}" if np.isnan(value) else f"{value:.2f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=9, color=plots.INK)
    for step, best in best_weights(found).items():
        corner = steps.index(step) - 0.5, weights.index(best.conditions["proximal_weight"]) - 0.5
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=plots.ORANGE, linewidth=2.2))
    axes.set_xticks(range(len(steps)), [f"{step:g}" for step in steps])
    axes.set_yticks(range(len(weights)), [f"{weight:g}" for weight in weights])
    axes.grid(visible=False)
    axes.set(
        title=title, xlabel="Local step (frame: its best weight)", ylabel="Proximal weight \N{GREEK SMALL LETTER LAMDA}"
    )
