"""This module draws the figure of `staleness`: the limit, FedAsync, floors, stale gradients, weights, and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, DOTTED, MARKERS, chart, points, rows_of
from fedjax_sim.study.findings import Comparison
from fedjax_sim.study.staleness.delays import DIMENSION, MIXING, STEP, stale_prediction

LOOKS = ((plots.BLUE, "o", "-"), (plots.ORANGE, "s", DASHED), (plots.BLACK, "^", DOTTED))


def staleness_figure(found: Sequence[Comparison], step: float, noise: float) -> Any:
    """Draws six panels, with theory as lines and measurements as points.

    Args:
      found: the comparisons of the study.
      step: the step size at which floors are measured.
      noise: standard deviation of a gradient's coordinates.

    Returns: a matplotlib Figure.
    """
    figure, (limit, mixing, floor, error, weights, buffers) = chart(3, 2)
    _limit(limit, rows_of(found, part="limit"))
    _same_step(mixing, rows_of(found, part="same step", quantity="factor per step"))
    _floor(floor, found, step, noise)
    _error(error, rows_of(found, part="error"), step)
    _weights(weights, found)
    _buffers(buffers, rows_of(found, part="buffers"))
    return figure


def _limit(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draws the factor of the error against the step over its limit, for up to three delays.

    A line is lambda^(2 tau + 1). For curvature 1, lambda is the largest modulus of a root of
    lambda^(tau + 1) = lambda^tau - eta.

    Args:
      axes: the panel to draw on.
      rows: those of the part "limit", with "delay" (tau, versions) and "step_over_limit"; the measured number is
        lambda.
    """
    if not rows:
        return
    delays = sorted({row["delay"] for row in rows})
    shown_delays = sorted({delays[0], delays[len(delays) // 2], delays[-1]})
    shares = np.linspace(0.9, 1.06, 33)
    for delay, (colour, marker, line) in zip(shown_delays, LOOKS, strict=False):
        limit = theory.delayed_step_limit(delay)
        curve = [theory.delayed_contraction(1.0, delay, step_size=share * limit) for share in shares]
        # A longer delay acts on a longer time scale, so factors of 2 tau + 1 steps are shown.
        exponent = 2 * delay + 1
        axes.plot(shares, np.power(curve, exponent), color=colour, linestyle=line, linewidth=1.2)
        delay_rows = [row for row in rows if row["delay"] == delay]
        measured_shares = [row["step_over_limit"] for row in delay_rows]
        factors = [row["measured"] ** exponent for row in delay_rows]
        axes.plot(measured_shares, factors, marker, color=colour, label=f"delay {delay}", **MARKERS)
    axes.axhline(1, color=plots.GREY, linewidth=0.8)
    axes.set(xlabel="Step / its limit at this delay", ylabel="Factor of the error in 2 delay + 1 steps")
    axes.legend(fontsize=7.5)


def _same_step(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draws the factor per step of FedBuff and FedAsync against the delay.

    Args:
      axes: the panel to draw on.
      rows: those of the part "same step" with the quantity "factor per step": both algorithms at an effective step of
        STEP, for each "delay" (tau, versions).
    """
    if not rows:
        return
    grid = range(max(row["delay"] for row in rows) + 1)
    lines = {
        "fedbuff": [theory.delayed_contraction(1.0, t, step_size=STEP) for t in grid],
        "fedasync": [theory.fedasync_contraction(1.0, t, mixing_rate=MIXING, step_size=STEP / MIXING) for t in grid],
    }
    for (name, line), (colour, marker, style) in zip(lines.items(), LOOKS, strict=False):
        axes.plot(grid, line, color=colour, linestyle=style, linewidth=1.2)
        algorithm_rows = [row for row in rows if row["algorithm"] == name]
        points(
            axes,
            algorithm_rows,
            "delay",
            colour=colour,
            marker=marker,
            label={"fedbuff": "FedBuff", "fedasync": "FedAsync"}[name],
        )
    axes.axhline(1, color=plots.GREY, linewidth=0.8)
    axes.set(xlabel=f"Delay, versions; step {STEP:g}", ylabel="Factor of the error per step")
    axes.legend(fontsize=7.5)


def _floor(axes: Any, comparisons: Sequence[Comparison], step: float, noise: float) -> None:
    """Draws the error floor against the delay, at one step and at 3/4 of the limit.

    Args:
      axes: the panel to draw on.
      comparisons: the comparisons of the study. Those of the part "floor" have E |w - w*|^2 for each delay and step.
      step: eta of the first line; the second has 3/4 of the limit at each delay.
      noise: sigma, standard deviation of a coordinate of a gradient.
    """
    rows = rows_of(comparisons, part="floor")
    if not rows:
        return
    eye = np.eye(DIMENSION)
    grid = range(max(row["delay"] for row in rows) + 1)
    for (name, step_at), (colour, marker, style) in zip(
        ((f"step {step:.3g}", lambda t: step), ("3/4 of the limit", lambda t: 0.75 * theory.delayed_step_limit(t))),
        LOOKS,
        strict=False,
    ):
        curve = [theory.delayed_floor(eye, t, step_size=step_at(t), noise=noise) for t in grid]
        axes.plot(grid, curve, color=colour, linestyle=style, linewidth=1.2)
        step_rows = [
            row
            for row in rows
            if np.isclose(row["step_over_limit"] * theory.delayed_step_limit(row["delay"]), step_at(row["delay"]))
        ]
        points(axes, step_rows, "delay", colour=colour, marker=marker, label=name)
    axes.set(xlabel="Delay, versions", ylabel="Floor: squared distance")
    plots.logarithmic(axes, "y")
    axes.legend(fontsize=7.5)


def _error(axes: Any, rows: list[dict[str, Any]], step: float) -> None:
    """Draws the error of a stale gradient, with its bound, against the delay."""
    grid = range(max((row["delay"] for row in rows), default=0) + 1)
    # The two fields of a prediction: the exact error, and its bound.
    lines = np.array([stale_prediction(delay, step) for delay in grid])
    for line, style, label in zip(lines.T, ("-", DASHED), ("theory", "bound: L times the distance"), strict=True):
        axes.plot(grid, line, color=plots.BLUE, linestyle=style, linewidth=1.2, label=label)
    exact = [row for row in rows if row["kind"] == "exact"]
    axes.plot(
        [row["delay"] for row in exact], [row["measured"] for row in exact], "o", color=plots.BLUE, label="measured",
        **MARKERS,
    )  # fmt: skip
    axes.set(xlabel="Delay, versions", ylabel="Error of a stale gradient")
    axes.legend(fontsize=7.5)


def _weights(axes: Any, comparisons: Sequence[Comparison]) -> None:
    """Draws the noise of each weight by staleness, as its floor, against its bias, as the weight of slow clients.

    Args:
      axes: the panel to draw on.
      comparisons: the comparisons of the study. The floor E |w - w*|^2 is that at the longest delay and the smaller
        step. The weight of the slow half, in [0, 1], is of the part "speeds"; 0.5 is fair.
    """
    shares = {row["weights"]: row for row in rows_of(comparisons, part="speeds")}
    # Weights were measured at the longest delay. The floor of constant weights is in another part, at the same step.
    longest = max((comparison.conditions.get("delay", 0) for comparison in comparisons), default=0)
    floors = {row["weights"]: row for part in ("floor", "weights")
              for row in rows_of(comparisons, part=part, delay=longest, quantity="squared distance")
              if row["step_over_limit"] < 0.7}  # fmt: skip
    for name, row in shares.items():
        if name not in floors:
            continue
        x, y = floors[name]["predicted"], row["predicted"]
        axes.plot([x], [y], "o", color="none", markeredgecolor=plots.BLACK, markersize=9)
        axes.plot([floors[name]["measured"]], [row["measured"]], "o", color=plots.BLUE, **MARKERS)
        axes.annotate(
            name,
            (x, y),
            textcoords="offset points",
            xytext=(0, -17 if name == "polynomial 1" else 9),
            fontsize=7.5,
            ha="center",
        )
    plots.logarithmic(axes, "x")
    axes.set(xlabel=f"Floor at delay {longest} (circles: theory)", ylabel="Weight of the slow half")
    axes.margins(0.25)


def _buffers(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draws staleness and delay against the buffer size.

    With C clients in flight and buffers of K, the lines are (C - 1) / K versions, and (K - 1) / (2 C) seconds.

    Args:
      axes: the panel to draw on.
      rows: those of the part "buffers", with "concurrency" (C) and "buffer_size" (K).
    """
    if not rows:
        return
    # With C clients in flight and buffers of K: staleness (C - 1) / K, and a mean wait of (K - 1) / 2C.
    concurrency = rows[0]["concurrency"]
    sizes = np.arange(1, max(row["buffer_size"] for row in rows) + 1)
    lines = {"staleness, versions": (concurrency - 1) / sizes, "delay, seconds": (sizes - 1) / (2 * concurrency)}
    for (name, line), (colour, marker, style) in zip(lines.items(), LOOKS, strict=False):
        quantity_rows = [row for row in rows if row["quantity"] == name]
        axes.plot(sizes, line, color=colour, linestyle=style, linewidth=1.2)
        measured_sizes = [row["buffer_size"] for row in quantity_rows]
        values = [row["measured"] for row in quantity_rows]
        axes.plot(measured_sizes, values, marker, color=colour, label=name, **MARKERS)
    axes.set(xlabel=f"Size of the buffer, {concurrency} clients in flight", ylabel="Staleness; delay")
    axes.legend(fontsize=7.5)
