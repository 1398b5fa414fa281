"""This module draws the figure of `rounds_to_target`: rounds and gradients to the target, noisy paths, and digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim import metrics, theory
from fedjax_sim.report import plots
from fedjax_sim.study.charts import DASHED, DOTTED, MARKERS, chart, rows_of
from fedjax_sim.study.findings import Comparison, comparisons_of
from fedjax_sim.study.quadratic_settings import Problem

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
    """Draws four panels: rounds against K, gradients against rounds, noisy paths to the target, and the digits.

    Args:
      options: the study's options.
      found: the comparisons of the study.
      problems: the quadratic clients, by the name of their part.
      noise: variance of a gradient's coordinate, by batch size.
      middle: K of the noisy runs.
    """
    figure, (rounds, work, paths, digits) = chart(2, 2)
    _quadratics(rounds, work, options, found, problems)
    _paths(paths, options, found, problems["heterogeneous"], noise=noise, middle=middle)
    _digits(digits, options["model_target"], found)
    return figure


def _quadratics(rounds, work, options: dict[str, Any], all_comparisons: Sequence[Comparison], problems: dict) -> None:
    """Draws two panels: rounds against K, and gradients against rounds.

    Args:
      rounds: the panel of rounds against K.
      work: the panel of local steps to the target, rounds times K, against rounds.
      options: the study's options. eta, T (`max_rounds`) and the target, as a share of the first excess loss, decide
        the lines.
      all_comparisons: the comparisons of the study. A K without rounds to the target is a cross.
      problems: the quadratic clients, by the names `QUADRATICS`.
    """
    eta = options["step_size"]
    max_rounds = options["max_rounds"]
    target = options["target"]
    steps = sorted({*options["num_steps"]})
    grid = np.unique(np.geomspace(1, steps[-1], 40).astype(int))
    for name, (line, colour, marker) in zip(QUADRATICS, LOOKS, strict=True):
        curve = _theory(problems[name], eta, grid, max_rounds, target)
        comparisons = comparisons_of(all_comparisons, name, "rounds to target")
        local_steps = np.array([comparison.conditions["local_steps"] for comparison in comparisons])
        measured_rounds = np.array([comparison.measured for comparison in comparisons])
        rounds.plot(grid, curve, color=colour, linestyle=line, linewidth=1.3, label=f"{name}: theory")
        work.plot(curve, curve * grid, color=colour, linestyle=line, linewidth=1.3, label=f"{name}: theory")
        rounds.plot(local_steps, measured_rounds, marker, color=colour, **MARKERS)
        work.plot(measured_rounds, measured_rounds * local_steps, marker, color=colour, **MARKERS)
        # A K that did not reach the target is a cross, at a height that means nothing.
        missing = [k for k in steps if k not in local_steps]
        rounds.plot(missing, np.full(len(missing), steps[-1]), "x", color=colour, markersize=7)
    rounds.set(
        xlabel=f"Local steps K (step {eta:g}; x: not in {max_rounds})", ylabel=f"Rounds to {target:g} of the loss"
    )
    plots.logarithmic(rounds)
    rounds.set_xticks(steps, [str(k) for k in steps])
    rounds.minorticks_off()
    rounds.legend(fontsize=7.5)
    work.set(xlabel="Rounds to the target", ylabel="Local steps to the target")
    plots.logarithmic(work, "x")
    work.legend(fontsize=7.5)


def _theory(problem: Problem, eta: float, grid: np.ndarray, max_rounds: int, target: float) -> np.ndarray:
    """Returns the rounds to the target for each K of the grid; NaN where `max_rounds` are too few."""
    curve = []
    for k in grid:
        budget = theory.budget(*problem, step_size=eta, num_steps=int(k))
        losses = budget.expected_loss(max_rounds, start=problem.start)
        curve.append(metrics.rounds_to_target(losses[1:], target * losses[0]))
    return np.where(np.isfinite(curve), curve, np.nan)


def _paths(
    axes,
    options: dict[str, Any],
    comparisons: Sequence[Comparison],
    problem: Problem,
    *,
    noise: dict[int, float],
    middle: int,
) -> None:
    """Draws the expected loss over the target against rounds, for each batch size, with the measured round.

    Args:
      axes: the panel to draw on.
      options: the study's options. eta, T (`max_rounds`) and the target, as a share of the first excess loss, decide
        the lines.
      comparisons: the comparisons of the study; those of the part "batches" are the points.
      problem: the quadratic clients.
      noise: variance of a coordinate of a batch's mean gradient, by batch size.
      middle: K.
    """
    eta = options["step_size"]
    max_rounds = options["max_rounds"]
    target = options["target"]
    for (size, variance), (line, colour, marker) in zip(noise.items(), LOOKS * 9, strict=False):
        budget = theory.budget(*problem, step_size=eta, num_steps=middle, gradient_noise=variance)
        expected = budget.expected_loss(max_rounds, start=problem.start)
        label = f"batches of {size}: theory"
        curve = expected[1:] / expected[0] / target
        axes.plot(np.arange(1, max_rounds + 1), curve, color=colour, linestyle=line, linewidth=1.3, label=label)
        for row in rows_of(comparisons, part="batches", batch_size=size):
            # The study measures in the predicted round, or in the last round if the target is not reached.
            predicted_round = metrics.rounds_to_target(expected[1:], target * expected[0])
            measured_round = min(predicted_round, max_rounds)
            errors = [[row["measured"] - row["low"]], [row["high"] - row["measured"]]]
            axes.errorbar(measured_round, row["measured"], errors, fmt=marker, color=colour, capsize=2, **MARKERS)
    axes.axhline(1, color=plots.INK, linewidth=0.8)
    axes.set(xlabel=f"Round, K = {middle}", ylabel="Expected loss / target")
    plots.logarithmic(axes)
    axes.legend(fontsize=7.5)


def _digits(axes, target: float, comparisons: Sequence[Comparison]) -> None:
    """Draws the rounds to a test loss on the digits against local steps, for each alpha.

    Args:
      axes: the panel to draw on.
      target: the test loss, for the label.
      comparisons: the comparisons of the study. In the part "digits MLP" a setting that did not reach the target has no
        rounds.
    """
    rows = sorted(
        rows_of(comparisons, part="digits MLP", quantity="rounds to target"), key=lambda row: row["local_steps"]
    )
    for alpha, (line, colour, marker) in zip(dict.fromkeys(row["alpha"] for row in rows), LOOKS * 9, strict=False):
        alpha_rows = [row for row in rows if row["alpha"] == alpha]
        means = np.array([row["measured"] for row in alpha_rows])
        # Lower ends stay above zero, for the axis is logarithmic.
        errors = [
            [row["measured"] - max(row["low"], 0.5) for row in alpha_rows],
            [row["high"] for row in alpha_rows] - means,
        ]
        local_steps = [row["local_steps"] for row in alpha_rows]
        axes.errorbar(local_steps, means, errors, fmt=marker, linestyle=line, color=colour, linewidth=1.0,
                      label=f"alpha = {alpha:g}", capsize=2, **MARKERS)  # fmt: skip
    axes.set(xlabel="Local steps E n / B, digits MLP", ylabel=f"Rounds to test loss {target:g}")
    if rows:
        plots.logarithmic(axes)
        axes.legend(fontsize=7.5)
