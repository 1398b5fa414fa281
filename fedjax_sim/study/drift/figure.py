"""This module draws the figure of `drift`: fixed points, FedProx, the parts of the bias, and a model's bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected
from fedjax_sim.study.drift.base import base_setting
from fedjax_sim.study.drift.parts import BIAS_PARTS, PAIR, proximal_theory
from fedjax_sim.study.quadratic_settings import Base, two_kinds


def drift_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws four panels: fixed points against K, FedProx against lambda, the bias's parts, and the model's bias.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, (fixed, proximal, parts, model) = charts.panels(2, 2)
    base = base_setting(options)
    etas = sorted(options["step_sizes"])
    shown_etas = sorted({etas[0], base.step_size, etas[-1]})
    steps = np.unique(np.geomspace(1, max(*options["num_steps"], 2), 60).astype(int)).tolist()
    distances = [
        row | {"series": _fedavg_with(row["step_size"]) if row["algorithm"] == "FedAvg" else row["algorithm"]}
        for row in selected(rows, part="fixed point")
        if row["step_size"] in shown_etas
    ]
    biases = [
        {"local_steps": k, "series": _fedavg_with(eta), "predicted": base.problem.bias(num_steps=k, step_size=eta)}
        for eta in shown_etas
        for k in steps
    ]
    charts.lines(fixed, distances, "local_steps", by="series", theory=biases, xlabel="Local steps K",
                 ylabel="Distance of the fixed point to the optimum", log="x")  # fmt: skip

    of_fedprox = selected(rows, part="FedProx")
    pair = two_kinds(base.problem, PAIR)
    weights = [0.0, *np.geomspace(0.02, max(*options["proximal_weights"], 0.1), 60).tolist()]
    predictions = [{"proximal_weight": weight, "quantity": quantity, "predicted": predicted}
                   for weight in weights for quantity, predicted in proximal_theory(pair, weight).items()]  # fmt: skip
    charts.lines(proximal, of_fedprox, "proximal_weight", by="quantity", theory=predictions,
                 xlabel="Proximal weight \N{GREEK SMALL LETTER LAMDA} of FedProx", ylabel="Bias, and contraction",
                 log="x")  # fmt: skip

    lengths = [row for row in selected(rows, part="drift bias") if row["quantity"] in BIAS_PARTS.values()]
    gradient = theory.quadratic_drift(*base.problem, point=base.problem.start, num_steps=1, step_size=1.0).gradient
    # A bias of this length is as large as the gradient itself.
    scale = {"length of the gradient": float(np.linalg.norm(gradient))}
    charts.lines(parts, lengths, "local_steps", by="quantity", theory=_parts(base, steps), levels=scale,
                 xlabel=f"Local steps K (step {base.step_size:g})", ylabel="Length, at the start",
                 log="xy")  # fmt: skip

    remainders, of_model = (
        selected(rows, part="logistic regression", quantity=quantity)
        for quantity in ("bias less leading term", "drift bias")
    )
    shares = [remainder | {"share": remainder["measured"] / bias["measured"], "low": None, "high": None}
              for remainder, bias in zip(remainders, of_model, strict=True)]  # fmt: skip
    charts.lines(model, shares, "step_size", "share", by="local_steps", log="xy",
                 xlabel="Step size, logistic regression on digits",
                 ylabel="(bias \N{MINUS SIGN} leading term) / bias")  # fmt: skip
    return figure


def _fedavg_with(step_size: float) -> str:
    """Returns the name of FedAvg's series with a step size."""
    return f"FedAvg, step {step_size:g}"


def _parts(base: Base, steps: Sequence[int]) -> list[Row]:
    """Returns the lengths of the drift bias and of its parts for each K, at the start, as rows of theory."""
    drifts = {
        k: theory.quadratic_drift(*base.problem, point=base.problem.start, num_steps=k, step_size=base.step_size)
        for k in steps
    }
    return [
        {"local_steps": k, "quantity": name, "predicted": float(np.linalg.norm(getattr(drift, field)))}
        for k, drift in drifts.items()
        for field, name in BIAS_PARTS.items()
    ]
