"""This module draws the figure of `hierarchy`: fixed points, speed and accuracy against edge rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected
from fedjax_sim.study.hierarchy.quadratics import estimated_rounds, groupings
from fedjax_sim.study.quadratic_settings import quadratic_clients

EDGE_ROUNDS = "Edge rounds \N{GREEK SMALL LETTER KAPPA} in a cloud round"
WORDS = {"flat": "flat FedAvg", "labels": "edges by labels", "random": "random edges"}


def hierarchy_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws three panels, with theory as lines and measurements as points.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, (ends, speed, digits) = charts.panels(1, 3)
    predictions = _theory(options)
    for panel, part, line, label in (
        (ends, "fixed point", "theory", "Distance of the fixed point to the optimum"),
        (speed, "speed", "estimate", "Cloud rounds until 1 % of the way is left"),
    ):
        charts.lines(panel, selected(rows, part=part), "edge_rounds", by="groups",
                     theory=selected(predictions, part=part), line=line, xlabel=EDGE_ROUNDS, ylabel=label, log="x",
                     )  # fmt: skip
    # Bars are one standard deviation over runs, and MB are what reaches the cloud.
    accuracies = [
        row | {"series": f"{WORDS[row['groups']]}, {row['cloud_bytes'] / 1e6:.2f} MB",
               "low": row["measured"] - row["standard_deviation"], "high": row["measured"] + row["standard_deviation"]}
        for row in selected(rows, part="digits")
    ]  # fmt: skip
    flat = {row["series"]: row["measured"] for row in accuracies if row["groups"] == "flat"}
    with_edges = [row for row in accuracies if row["groups"] != "flat"]
    charts.lines(digits, with_edges, "edge_rounds", by="series", levels=flat,
                 xlabel=EDGE_ROUNDS, ylabel="Test accuracy on digits, by MB to the cloud", log="x")  # fmt: skip
    return figure


def _theory(options: Mapping[str, Any]) -> list[Row]:
    """Returns the distances of fixed points, and the cloud rounds that the slowest direction takes, as rows.

    Args:
      options: the study's options.
    """
    problem = quadratic_clients(*(options[name] for name in ("num_clients", "dimension", "heterogeneity", "seed")))
    work = {"num_steps": options["num_steps"], "step_size": options["step_size"]}
    edge_rounds = np.unique(np.geomspace(1, max(options["edge_rounds"][-1], 2), 40).round().astype(int)).tolist()
    predictions = []
    for groups, edges in groupings(problem, options["num_edges"]).items():
        for kappa in edge_rounds:
            place = {"groups": groups, "edge_rounds": kappa}
            fixed_point = theory.hierarchy_fixed_point(*problem, edges, edge_rounds=kappa, **work)
            distance = float(np.linalg.norm(fixed_point - problem.optimum))
            contraction = theory.hierarchy_contraction(*problem, edges, edge_rounds=kappa, **work)
            predictions += [
                place | {"part": "fixed point", "predicted": distance},
                place | {"part": "speed", "predicted": estimated_rounds(contraction)},
            ]
    return predictions
