"""Small grey pictures drawn as shapes, so that a page needs to load no image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import plots

__all__ = ["strips"]

LEVELS, GAP = 16, 0.1


def strips(axes: Any, rows: Sequence[tuple[str, np.ndarray, str]], side: int) -> None:
    """Draws rows of pictures [n, side x side] in [0, 1], each with a text before and one behind it."""
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path

    corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1], [0, 0]]) / side
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    count = max(len(images) for _, images, _ in rows)
    places: dict[int, list[np.ndarray]] = {}
    for i, (before, images, behind) in enumerate(rows):
        top = i * (1 + GAP)
        axes.text(-0.15, top + 0.5, before, ha="right", va="center", fontsize=8)
        axes.text(count * (1 + GAP) + 0.05, top + 0.5, behind, ha="left", va="center", fontsize=8, color=plots.INK)
        for j, image in enumerate(images):
            left = j * (1 + GAP)
            axes.add_patch(Rectangle((left, top), 1, 1, facecolor="black", linewidth=0))
            levels = np.rint(np.clip(image, 0, 1) * (LEVELS - 1)).astype(int)
            for pixel in np.flatnonzero(levels):
                corner = np.array([left + pixel % side / side, top + pixel // side / side])
                places.setdefault(int(levels[pixel]), []).append(corner + corners)
    for level in sorted(places):
        grey = str(level / (LEVELS - 1))
        path = Path(np.concatenate(places[level]), codes * len(places[level]))
        axes.add_patch(PathPatch(path, facecolor=grey, edgecolor=grey, linewidth=0.15))
    axes.set(xlim=(0, count * (1 + GAP)), ylim=(len(rows) * (1 + GAP), -GAP), aspect="equal")
    axes.set_axis_off()
