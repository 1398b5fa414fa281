"""This module draws the figure of `leakage`: rebuilt digits beside the originals, and how well attacks succeed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, points, rows_of
from fedjax_sim.study.findings import Comparison
from fedjax_sim.study.leakage.attacks import INVERSION_ATTACKS, LARGEST_BATCH, MOST_DECIBELS, Picture
from fedjax_sim.study.leakage.defences import SIDE, allowed_advantage, multiplier
from fedjax_sim.study.leakage.pictures import strips

LOOKS = ((INVERSION_ATTACKS[0], plots.BLUE, "o"), (INVERSION_ATTACKS[1], plots.ORANGE, "^"))


def leakage_figure(found: Sequence[Comparison], pictures: Sequence[Picture], options: dict[str, Any]) -> Any:
    """Draws pictures on the left and four panels on the right.

    Args:
      found: the comparisons of the study.
      pictures: the digits as each attack rebuilt them; the originals come first.
      options: the study's options.
    """
    from matplotlib.figure import Figure

    rows = list(_strips(pictures))
    figure = Figure(figsize=(plots.WIDTH * 1.25, 0.52 * len(rows)), layout="constrained")
    left, right = np.asarray(figure.subfigures(1, 2, width_ratios=[1.55, 1])).tolist()
    axes = left.subplots()
    axes.set_title("Digits that a curious server rebuilds from one round's messages: nearest match", loc="center")
    strips(axes, rows, SIDE)
    by_batch, labels_by_batch, by_epsilon, labels_by_epsilon = right.subplots(4, 1)
    _quality(by_batch, found, "batch size", "batch_size")
    _quality(by_epsilon, found, "local noise", "epsilon")
    _batches(labels_by_batch, found)
    _bounded(labels_by_epsilon, found, options)
    # Two panels share the axis of batch sizes, two the axis of epsilons.
    for panel in (by_batch, labels_by_batch):
        sizes = options["batch_sizes"]
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.set(xlabel="Examples in a message")
    for panel in (by_epsilon, labels_by_epsilon):
        plots.logarithmic(panel, "x")
        panel.set(xlabel="Epsilon of local noise on a message of one example")
    for panel in (by_batch, labels_by_batch, by_epsilon, labels_by_epsilon):
        panel.legend(fontsize=7.5)
    return figure


def _strips(pictures: Sequence[Picture]) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yields the rows of pictures: the originals, then for each defence the attack that comes nearer to them.

    For the largest batch that is optimised both attacks are shown, so that they can be compared.
    """
    names = dict.fromkeys(picture.defence for picture in pictures)
    for name in names:
        defence_pictures = [picture for picture in pictures if picture.defence == name]
        if name != f"batch of {LARGEST_BATCH}":
            # The originals have no PSNR.
            defence_pictures = [max(defence_pictures, key=lambda picture: np.nan_to_num(picture.decibels).mean())]
        for picture in defence_pictures:
            note = f"{picture.decibels.mean():.0f} dB, {picture.attack}" if picture.attack else "row's PSNR, attack"
            yield name, picture.images, note


def _quality(axes: Any, comparisons: Sequence[Comparison], part: str, x: str) -> None:
    """Draws the PSNR of both attacks against batch size or epsilon.

    Args:
      axes: the panel to draw on.
      comparisons: the comparisons of the study. PSNR is in decibels, at most `MOST_DECIBELS`.
      part: the part of the study that is drawn.
      x: the condition on the horizontal axis, "batch_size" or "epsilon".
    """
    for attack, colour, marker in LOOKS:
        points(
            axes,
            rows_of(comparisons, part=part, quantity=f"PSNR, {attack} (dB)"),
            x,
            colour=colour,
            marker=marker,
            label=attack,
        )
    yardstick = rows_of(comparisons, part="yardstick")[0]["measured"]
    axes.axhline(yardstick, color=plots.BLACK, linestyle=DASHED, linewidth=1.1, label="the mean digit")
    # The axis ends a little above the highest interval, and at most above the cap of PSNR.
    highest = max(row["high"] for row in rows_of(comparisons, part=part) if row["quantity"].startswith("PSNR"))
    axes.set(title=f"Pictures: {part}", ylabel="PSNR (dB)", ylim=(0, 1.1 * min(highest, MOST_DECIBELS)))


def _batches(axes: Any, comparisons: Sequence[Comparison]) -> None:
    """Draws labels recovered and members found against the batch size.

    Args:
      axes: the panel to draw on.
      comparisons: the comparisons of the study; those of the part "batch size" are drawn, all of them in [0, 1].
    """
    for quantity, colour, marker in (("labels recovered", plots.BLACK, "s"), ("membership AUC", plots.BLUE, "o")):
        points(
            axes,
            rows_of(comparisons, part="batch size", quantity=quantity),
            "batch_size",
            colour=colour,
            marker=marker,
            label=quantity,
        )
    rows = rows_of(comparisons, part="batch size", quantity="TPR at FPR 1 %")
    axes.plot([row["batch_size"] for row in rows], [row["measured"] for row in rows], color=plots.ORANGE, marker="^",
              linestyle="none", markersize=5, label="members found at FPR 1 %")  # fmt: skip
    axes.set(title="Labels and members: batch size", ylabel="Share, or AUC", ylim=(0, 1.05))


def _bounded(axes: Any, comparisons: Sequence[Comparison], options: dict[str, Any]) -> None:
    """Draws labels recovered and the membership advantage, with its bound, against epsilon."""
    rows = rows_of(comparisons, part="local noise", quantity="membership advantage")
    points(axes, rows, "epsilon", colour=plots.BLUE, marker="o", label="membership advantage")
    grid = np.geomspace(options["epsilons"][0], options["epsilons"][-1], 25).tolist()
    line = [allowed_advantage(multiplier(epsilon, options)) for epsilon in grid]
    axes.plot(grid, line, color=plots.BLUE, linestyle=DASHED, linewidth=1.3, label="what the noise allows at most")
    labels = rows_of(comparisons, part="local noise", quantity="labels recovered")
    points(axes, labels, "epsilon", colour=plots.BLACK, marker="s", label="labels recovered")
    axes.set(title="Labels and members: local noise", ylabel="Share, or TPR - FPR", ylim=(0, 1.08))
