"""This module draws the figure of `bits`: floors against bytes and bits, two roundings, and error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import plots
from fedjax_sim.study.bits.clients import LOOKS, QuantizedClients
from fedjax_sim.study.bits.messages import GRID_NAMES
from fedjax_sim.study.charts import DASHED, DOTTED, chart, points, rows_of
from fedjax_sim.study.findings import Comparison

LEAST = 1e-5  # squared distance that the figure shows


def bits_figure(
    clients: QuantizedClients, bits: Sequence[int], cohorts: Sequence[int], found: Sequence[Comparison]
) -> Any:
    """Draws four panels, with theory as lines and measurements as points.

    Args:
      clients: the clients of the runs whose error floor is measured.
      bits: bits for each number.
      cohorts: m of single rounds.
      found: the comparisons of the study.
    """
    figure, panels = chart(2, 2)
    by_bytes, by_bits, rounding, feedback = panels
    styles = ((plots.ORANGE, "^", DOTTED), (plots.BLUE, "o", "-"), (plots.BLACK, "s", DASHED)) * len(bits)
    for b, (colour, marker, line) in zip(bits, styles, strict=False):
        path = clients.expected(b, LOOKS[-1])
        bytes_per_round = clients.bytes(clients.quantizer(b))
        by_bytes.plot(np.arange(1, len(path)) * bytes_per_round, path[1:], color=colour, linestyle=line, linewidth=1.3)
        rows = [row for row in rows_of(found, bits=b, messages=GRID_NAMES[False]) if row["part"] in ("path", "floor")]
        points(by_bytes, rows, "bytes_sent", colour=colour, marker=marker, label=f"{b} bits")
    path = clients.expected(0, LOOKS[-1])
    float_bytes = np.arange(1, len(path)) * (4 * clients.dimension)
    by_bytes.plot(float_bytes, path[1:], color=plots.GREY, linewidth=1.1, label="floats: theory")
    # Floats reach the optimum itself; the panel ends a little below the lowest floor.
    bottom = min(clients.floor(b) for b in bits)
    by_bytes.set(xlabel="Bytes sent by a client", ylabel="Squared distance from the optimum", ylim=(bottom / 4, 20))

    # The closed form holds for even numbers of bits.
    grid = range(bits[0], bits[-1] + 1, 2)
    by_bits.plot(grid, [clients.floor(b) for b in grid], color=plots.BLUE, linewidth=1.3, label="textbook grid: theory")
    by_bits.plot(grid, [clients.floor_with_zero(b) for b in grid], color=plots.BLACK, linewidth=1.1, linestyle=DASHED,
                 label="grid with zero: theory")  # fmt: skip
    for keeps_zeros, colour, marker in ((False, plots.BLUE, "o"), (True, plots.BLACK, "s")):
        points(
            by_bits,
            rows_of(found, part="floor", messages=GRID_NAMES[keeps_zeros]),
            "bits",
            colour=colour,
            marker=marker,
            label="measured",
        )
    by_bits.set(xlabel="Bits a number", ylabel="Error floor: squared distance")

    sizes = np.geomspace(1, cohorts[-1], 60)
    for name, colour, marker, line in (("alike, at 0.3", plots.BLUE, "o", "-"), ("spread", plots.ORANGE, "^", DOTTED)):
        nearest = rows_of(found, part=name, messages=f"nearest, {GRID_NAMES[False]}")
        rows = rows_of(found, part=name, messages=f"stochastic, {GRID_NAMES[False]}")
        # The spread updates differ for each m, so no single curve predicts them.
        if name != "spread":
            rounding.plot(sizes, rows[0]["predicted"] / sizes, color=colour, linestyle=line, linewidth=1.3)
            rounding.axhline(nearest[0]["predicted"], color=plots.BLACK, linewidth=1.1, linestyle=DASHED)
        points(rounding, rows, "cohort_size", colour=colour, marker=marker, label=f"stochastic, {name}")
        points(rounding, nearest, "cohort_size", colour=plots.BLACK if name != "spread" else plots.GREY,
               marker="s" if name != "spread" else "D", label=f"nearest, {name}")  # fmt: skip
    rounding.set(xlabel="Cohort size m", ylabel="Squared error of a mean's number")

    for name, colour, marker, line in (
        ("top-k", plots.BLUE, "o", DASHED), ("sign", plots.BLACK, "s", DASHED),
        ("top-k, error feedback", plots.BLUE, "^", "-"), ("sign, error feedback", plots.BLACK, "v", "-"),
        ("top-k, EF21", plots.ORANGE, "D", "-"),
    ):  # fmt: skip
        rows = rows_of(found, part="feedback", messages=name)
        steps, floors = ([row[name] for row in rows] for name in ("step_size", "measured"))
        feedback.plot(steps, np.maximum(floors, LEAST), color=colour, linestyle=line, marker=marker, markersize=5,
                      markeredgecolor="white", linewidth=1.1,
                      label=name + (f" (below {LEAST:g})" if floors[-1] < LEAST else ""))  # fmt: skip
    feedback.set(xlabel="Step size", ylabel="Error floor: squared distance (measured)")
    for axes in panels:
        plots.logarithmic(axes, "y" if axes is by_bits else "xy")
        axes.legend(fontsize=7.5)
    return figure
