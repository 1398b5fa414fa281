"""This module draws the figure of `rounds_to_target`: rounds and gradients to the target, noisy paths, and digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim import metrics, theory
from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected
from fedjax_sim.study.rounds_to_target.setting import gradient_variances, middle_steps, problems_of


def rounds_to_target_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws four panels: rounds against K, gradients against rounds, noisy paths to the target, and the digits.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, (rounds, work, paths, digits) = charts.panels(2, 2)
    target, max_rounds = options["target"], options["max_rounds"]
    of_quadratics = [row for part in problems_of(options) for row in selected(rows, part=part)]
    # A K that did not reach the target has no rounds: it is a cross.
    counts = [row if row["quantity"] == "rounds to target" else row | {"measured": None}
              for row in of_quadratics if "counted" not in row["quantity"]]  # fmt: skip
    curves = _rounds(options)
    charts.lines(rounds, counts, "local_steps", by="part", theory=curves, log="xy",
                 xlabel=f"Local steps K (step {options['step_size']:g}; x: not in {max_rounds} rounds)",
                 ylabel=f"Rounds to {target:g} of the loss")  # fmt: skip

    steps = [row | {"rounds": row["measured"] / row["local_steps"]}
             for row in selected(of_quadratics, quantity="local steps to target, counted")]  # fmt: skip
    # Rounds rise, so K falls: the same rounds have several K, which are joined in this order.
    all_steps = [row | {"rounds": row["predicted"], "predicted": row["predicted"] * row["local_steps"]}
                 for row in reversed(curves)]  # fmt: skip
    charts.lines(work, steps, "rounds", by="part", theory=all_steps, log="x", xlabel="Rounds to the target",
                 ylabel="Local steps to the target")  # fmt: skip

    losses, measured_rounds = _noisy_paths(options)
    batches = [row | {"round": measured_rounds[row["batch_size"]]} for row in selected(rows, part="batches")]
    batches, losses = (
        [row for row in found if row["batch_size"] in list(measured_rounds)[: len(charts.LOOKS)]]
        for found in (batches, losses)
    )
    charts.lines(paths, batches, "round", by="batch_size", theory=losses, levels={"target": 1.0}, log="xy",
                 xlabel=f"Round, K = {middle_steps(options)}", ylabel="Expected loss / target")  # fmt: skip

    # Rounds are known to half a round, and lower ends stay above zero.
    of_digits = [row | {"low": max(row["low"], 0.5)}
                 for row in selected(rows, part="digits MLP", quantity="rounds to target")
                 if row["alpha"] in options["alphas"][: len(charts.LOOKS)]]  # fmt: skip
    charts.lines(digits, of_digits, "local_steps", by="alpha", log="xy",
                 xlabel="Local steps E n / B, digits MLP",
                 ylabel=f"Rounds to test loss {options['model_target']:g}")  # fmt: skip
    return figure


def _rounds(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rounds to the target for many K, as rows of theory; a K for which T are too few is left out."""
    found = []
    for name, problem in problems_of(options).items():
        for k in np.unique(np.geomspace(1, max(options["num_steps"]), 40).astype(int)).tolist():
            budget = theory.budget(*problem, step_size=options["step_size"], num_steps=k)
            losses = budget.expected_loss(options["max_rounds"], start=problem.start)
            rounds = metrics.rounds_to_target(losses[1:], options["target"] * losses[0])
            found.append({"part": name, "local_steps": k, "predicted": rounds})
    return [row for row in found if np.isfinite(row["predicted"])]


def _noisy_paths(options: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """Computes expected losses with noisy gradients.

    Args:
      options: the study's options.

    Returns: (losses, rounds): losses over the target for each batch size and round, as rows of theory; and the round in
      which each batch size is measured: the one that reaches the target, or the last.
    """
    problem = problems_of(options)["heterogeneous"]
    work: dict[str, Any] = {"step_size": options["step_size"], "num_steps": middle_steps(options)}
    losses, rounds = [], {}
    for size, variance in gradient_variances(options).items():
        budget = theory.budget(*problem, **work, gradient_noise=variance)
        expected = budget.expected_loss(options["max_rounds"], start=problem.start)
        target = options["target"] * expected[0]
        losses += [{"batch_size": size, "round": t, "predicted": float(loss / target)}
                   for t, loss in enumerate(expected[1:], 1)]  # fmt: skip
        rounds[size] = int(min(metrics.rounds_to_target(expected[1:], target), options["max_rounds"]))
    return losses, rounds
