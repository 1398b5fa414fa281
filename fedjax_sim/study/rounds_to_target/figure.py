"""The figure of `rounds_to_target`: rounds and gradients to the target, noisy paths to it, and the digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim import metrics, theory
from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, DOTTED, MARKERS, chart, rows_of
from fedjax_sim.study.findings import Comparison, comparisons_of
from fedjax_sim.study.quadratic_settings import Problem

__all__ = ["target_figure"]

LOOKS = (("-", plots.BLUE, "o"), (DASHED, plots.ORANGE, "s"), (DOTTED, plots.BLACK, "^"))
QUADRATICS = ("one curvature", "one optimum", "heterogeneous")


def target_figure(
    options: dict[str, Any],
    found: Sequence[Comparison],
    *,
    problems: dict[str, Problem],
    noise: dict[int, float],
    middle: int,
) -> Any:
    """Rounds against K, gradients against rounds, noisy paths to the target, and the digits.

    Args:
      options: of the study. found: what it compared.
      problems: the quadratic clients by their part's name.
      noise: variance of a gradient's coordinate, by batch size. middle: K of the noisy runs.
    """
    figure, (rounds, work, paths, digits) = chart(2, 2)
    _quadratics(rounds, work, options, found, problems)
    _paths(paths, options, found, problems["heterogeneous"], noise, middle)
    _digits(digits, options["model_target"], found)
    return figure


def _quadratics(rounds, work, options: dict[str, Any], found: Sequence[Comparison], problems: dict) -> None:
    """Two panels: rounds against K, and gradients against rounds."""
    eta, last, share = options["step_size"], options["max_rounds"], options["target"]
    steps = sorted({*options["num_steps"]})
    grid = np.unique(np.geomspace(1, steps[-1], 40).astype(int))
    for name, (line, colour, marker) in zip(QUADRATICS, LOOKS, strict=True):
        curve = _theory(problems[name], eta, grid, last, share)
        ones = comparisons_of(found, name, "rounds to target")
        at = np.array([one.conditions["local_steps"] for one in ones])
        values = np.array([one.measured for one in ones])
        rounds.plot(grid, curve, color=colour, linestyle=line, linewidth=1.3, label=f"{name}: theory")
        work.plot(curve, curve * grid, color=colour, linestyle=line, linewidth=1.3, label=f"{name}: theory")
        rounds.plot(at, values, marker, color=colour, **MARKERS)
        work.plot(values, values * at, marker, color=colour, **MARKERS)
        missing = [k for k in steps if k not in at]
        rounds.plot(missing, np.full(len(missing), steps[-1]), "x", color=colour, markersize=7)
    rounds.set(xlabel=f"Local steps K (step {eta:g}; x: not in {last})", ylabel=f"Rounds to {share:g} of the loss")
    plots.logarithmic(rounds)
    rounds.set_xticks(steps, [str(k) for k in steps])
    rounds.minorticks_off()
    rounds.legend(fontsize=7.5)
    work.set(xlabel="Rounds to the target", ylabel="Local steps to the target")
    plots.logarithmic(work, "x")
    work.legend(fontsize=7.5)


def _theory(problem: Problem, eta: float, grid: np.ndarray, last: int, share: float) -> np.ndarray:
    """Rounds to the target for each K of the grid; NaN where `last` rounds are too few."""
    curve = []
    for k in grid:
        losses = theory.budget(*problem, step_size=eta, num_steps=int(k)).expected_loss(last, start=problem.start)
        curve.append(metrics.rounds_to_target(losses[1:], share * losses[0]))
    return np.where(np.isfinite(curve), curve, np.nan)


def _paths(
    axes, options: dict[str, Any], found: Sequence[Comparison], problem: Problem, noise: dict[int, float], middle: int
) -> None:
    eta, last, share = options["step_size"], options["max_rounds"], options["target"]
    for (size, variance), (line, colour, marker) in zip(noise.items(), LOOKS * 9, strict=False):
        budget = theory.budget(*problem, step_size=eta, num_steps=middle, gradient_noise=variance)
        expected = budget.expected_loss(last, start=problem.start)
        name, curve = f"batches of {size}: theory", expected[1:] / expected[0] / share
        axes.plot(np.arange(1, last + 1), curve, color=colour, linestyle=line, linewidth=1.3, label=name)
        for row in rows_of(found, part="batches", batch_size=size):
            reach = metrics.rounds_to_target(expected[1:], share * expected[0])
            at = min(reach, last)
            spread = [[row["measured"] - row["low"]], [row["high"] - row["measured"]]]
            axes.errorbar(at, row["measured"], spread, fmt=marker, color=colour, capsize=2, **MARKERS)
    axes.axhline(1, color=plots.INK, linewidth=0.8)
    axes.set(xlabel=f"Round, K = {middle}", ylabel="Expected loss / target")
    plots.logarithmic(axes)
    axes.legend(fontsize=7.5)


def _digits(axes, target: float, found: Sequence[Comparison]) -> None:
    shown = sorted(rows_of(found, part="digits MLP", quantity="rounds to target"), key=lambda row: row["local_steps"])
    for alpha, (line, colour, marker) in zip(dict.fromkeys(row["alpha"] for row in shown), LOOKS * 9, strict=False):
        ones = [row for row in shown if row["alpha"] == alpha]
        middles = np.array([row["measured"] for row in ones])
        spread = [[row["measured"] - max(row["low"], 0.5) for row in ones], [row["high"] for row in ones] - middles]
        at, name = [row["local_steps"] for row in ones], f"alpha = {alpha:g}"
        axes.errorbar(at, middles, spread, fmt=marker, linestyle=line, color=colour, linewidth=1.0, label=name,
                      capsize=2, **MARKERS)  # fmt: skip
    axes.set(xlabel="Local steps E n / B, digits MLP", ylabel=f"Rounds to test loss {target:g}")
    if shown:
        plots.logarithmic(axes)
        axes.legend(fontsize=7.5)
