"""This module draws small grey pictures as vector shapes, so that a page needs to load no image.

A study's row holds a picture as text, with a hexadecimal digit for each pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim.report.axes import INK

LEVELS = 16  # of grey: a hexadecimal digit
GAP = 0.1  # between pictures, which have width 1


def texts_of(images: np.ndarray) -> list[str]:
    """Returns pictures as texts of one hexadecimal digit a pixel, "0" black and "f" white.

    Args:
      images: [n, pixels], clipped to [0, 1].

    >>> texts_of(np.array([[0.0, 0.2, 1.0]]))
    ['03f']
    """
    levels = np.rint(np.clip(images, 0, 1) * (LEVELS - 1)).astype(int)
    return ["".join(f"{level:x}" for level in image) for image in levels.tolist()]


def images_of(texts: Sequence[str]) -> np.ndarray:
    """Returns the pictures of texts, [n, pixels] in [0, 1].

    >>> images_of(texts_of(np.array([[0.0, 0.2, 1.0]])))
    array([[0. , 0.2, 1. ]])
    """
    return np.array([[int(digit, LEVELS) for digit in text] for text in texts]) / (LEVELS - 1)


def strips(axes: Any, rows: Sequence[tuple[str, np.ndarray, str]], side: int) -> None:
    """Draws rows of pictures with a text on either side.

    Args:
      axes: the panel to draw on.
      rows: (text on the left, pictures [n, side x side] with pixels in [0, 1], text on the right).
      side: pixels of a picture's side.
    """
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path

    corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1], [0, 0]]) / side
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    count = max(len(images) for _, images, _ in rows)
    # All pixels of one grey level become one path, which keeps the file small. Black is the background.
    squares_by_level: dict[int, list[np.ndarray]] = {}
    for i, (left_text, images, right_text) in enumerate(rows):
        top = i * (1 + GAP)
        axes.text(-0.15, top + 0.5, left_text, ha="right", va="center", fontsize=8)
        axes.text(count * (1 + GAP) + 0.05, top + 0.5, right_text, ha="left", va="center", fontsize=8, color=INK)
        for j, image in enumerate(images):
            picture_left = j * (1 + GAP)
            axes.add_patch(Rectangle((picture_left, top), 1, 1, facecolor="black", linewidth=0))
            levels = np.rint(np.clip(image, 0, 1) * (LEVELS - 1)).astype(int)
            for pixel in np.flatnonzero(levels):
                corner = np.array([picture_left + pixel % side / side, top + pixel // side / side])
                squares_by_level.setdefault(int(levels[pixel]), []).append(corner + corners)
    for level in sorted(squares_by_level):
        grey = str(level / (LEVELS - 1))
        path = Path(np.concatenate(squares_by_level[level]), codes * len(squares_by_level[level]))
        axes.add_patch(PathPatch(path, facecolor=grey, edgecolor=grey, linewidth=0.15))
    axes.set(xlim=(0, count * (1 + GAP)), ylim=(len(rows) * (1 + GAP), -GAP), aspect="equal")
    axes.set_axis_off()
