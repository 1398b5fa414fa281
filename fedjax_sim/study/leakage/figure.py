"""This module draws the figure of `leakage`: rebuilt digits beside the originals, and how well attacks succeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import axes, charts
from fedjax_sim.study.claims import Row, selected
from fedjax_sim.study.leakage.attacks import INVERSION_ATTACKS, LARGEST_BATCH, MOST_DECIBELS
from fedjax_sim.study.leakage.defences import SIDE, Digits, allowed_advantage, multiplier
from fedjax_sim.study.leakage.pictures import images_of, strips

EXAMPLES_AXIS = "Examples in a message"
EPSILON = "Epsilon of local noise on a message of one example"


def leakage_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws pictures on the left and four panels on the right.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    from matplotlib.figure import Figure

    shown = list(_strips(rows, options["seed"]))
    figure = Figure(figsize=(axes.WIDTH * 1.25, 0.52 * len(shown)), layout="constrained")
    left, right = np.asarray(figure.subfigures(1, 2, width_ratios=[1.55, 1])).tolist()
    pictures = left.subplots()
    pictures.set_title("Digits that a curious server rebuilds from one round's messages: nearest match", loc="center")
    strips(pictures, shown, SIDE)
    by_batch, labels_by_batch, by_epsilon, labels_by_epsilon = right.subplots(4, 1)
    _quality(by_batch, rows, "batch size", "batch_size", EXAMPLES_AXIS)
    _quality(by_epsilon, rows, "local noise", "epsilon", EPSILON)
    quantities = ("labels recovered", "membership AUC", "TPR at FPR 1 %")
    found = [row for name in quantities for row in selected(rows, part="batch size", quantity=name)]
    # An empty theory leaves points that are not joined.
    charts.lines(labels_by_batch, found, "batch_size", by="quantity", theory=[], log="x",
                 xlabel=EXAMPLES_AXIS, ylabel="Share, or AUC")  # fmt: skip
    found = [row for name in ("labels recovered", "membership advantage")
             for row in selected(rows, part="local noise", quantity=name)]  # fmt: skip
    charts.lines(labels_by_epsilon, found, "epsilon", by="quantity", theory=_bound(options), log="x", line="bound",
                 xlabel=EPSILON, ylabel="Share, or TPR - FPR")  # fmt: skip
    labels_by_batch.set(title="Labels and members: batch size", ylim=(0, 1.05))
    labels_by_epsilon.set(title="Labels and members: local noise", ylim=(0, 1.08))
    return figure


def _strips(rows: Sequence[Row], seed: int) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yields the rows of pictures: the originals, then for each defence the attack that comes nearer to them.

    For the largest batch that is optimised both attacks are shown, so that they can be compared.

    Args:
      rows: the rows of the study; those with "pictures" are drawn.
      seed: of the study's digits.
    """
    digits = Digits.load(seed)
    yield "the digits themselves", digits.x[digits.shown], "PSNR of all, attack"
    attacked = [row for row in rows if row.get("pictures")]
    for name in dict.fromkeys(row["defence"] for row in attacked):
        of_defence = selected(attacked, defence=name)
        if name != f"batch of {LARGEST_BATCH}":
            of_defence = [max(of_defence, key=lambda row: row["measured"])]
        for row in of_defence:
            yield name, images_of(row["pictures"]), f"{row['measured']:.0f} dB, {_attack(row)}"


def _attack(row: Row) -> str:
    """Returns the attack of a PSNR, an entry of `INVERSION_ATTACKS`."""
    (attack,) = (attack for attack in INVERSION_ATTACKS if attack in row["quantity"])
    return attack


def _quality(panel: Any, rows: Sequence[Row], part: str, x: str, xlabel: str) -> None:
    """Draws the PSNR of both attacks against batch size or epsilon.

    Args:
      panel: the matplotlib axes to draw on.
      rows: the rows of the study. PSNR is in decibels, at most `MOST_DECIBELS`.
      part: the part of the study that is drawn.
      x: the condition on the horizontal axis, "batch_size" or "epsilon".
      xlabel: its name.
    """
    quality: list[Row] = [row | {"attack": _attack(row)} for row in selected(rows, part=part) if row.get("pictures")]
    quality.sort(key=lambda row: INVERSION_ATTACKS.index(row["attack"]))  # which decides the looks
    (yardstick,) = selected(rows, part="yardstick")
    charts.lines(panel, quality, x, by="attack", theory=[], levels={"the mean digit": yardstick["measured"]}, log="x",
                 xlabel=xlabel, ylabel="PSNR (dB)")  # fmt: skip
    # The axis ends a little above the highest interval, and at most above the cap of PSNR.
    highest = max((row["high"] for row in quality if np.isfinite(row["high"])), default=MOST_DECIBELS)
    panel.set(title=f"Pictures: {part}", ylim=(0, 1.1 * min(highest, MOST_DECIBELS)))


def _bound(options: Mapping[str, Any]) -> list[Row]:
    """Returns the largest advantage that the noise allows against epsilon, as rows of theory."""
    epsilons = np.geomspace(options["epsilons"][0], options["epsilons"][-1], 25).tolist()
    return [
        {"epsilon": epsilon, "quantity": "membership advantage",
         "predicted": allowed_advantage(multiplier(epsilon, options))}
        for epsilon in epsilons
    ]  # fmt: skip
