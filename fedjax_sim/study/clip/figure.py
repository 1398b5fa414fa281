"""This module draws the figure of `clip`: errors of a release, error floors and personal thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected
from fedjax_sim.study.clip.clients import UnequalClients

PERSONAL = "personal, no epsilon"
OWN_THRESHOLDS = "own thresholds, NO epsilon"


def clip_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws four panels against the clip norm, with theory as lines and measurements as points.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, (parts, around, floor, personal) = charts.panels(2, 2)
    problem = UnequalClients(*(options[name] for name in ("num_clients", "dimension", "spread", "cohort_size", "seed")))
    multiplier = fixed_multiplier(options["noise_multipliers"])
    norms = options["clip_norms"]
    grid = np.geomspace(min(norms) / 1.2, max(norms) * 1.2, 200).tolist()
    axes: dict[str, Any] = {"log": "xy", "xlabel": "Clip norm C (median norms)", "ylabel": "Squared error of the mean"}

    # Bias, sampling and noise add up to the total.
    errors = {C: problem.parts(C, multiplier) for C in grid}
    of_parts = [{"clip_norm": C, "series": name, "predicted": getattr(error, name)}
                for name in ("total", "bias", "sampling", "noise") for C, error in errors.items()]  # fmt: skip
    series = {"clip norm": "total", "bias alone": "bias"}
    releases = [row | {"series": series[row["part"]]} for part in series for row in selected(rows, part=part)]
    charts.lines(parts, releases, "clip_norm", by="series", theory=of_parts, **axes)
    totals = [error.total for error in errors.values()]
    # Bias and noise fall without end on one side of the panel; only what matters beside the total is shown.
    parts.set(ylim=(min(totals) / 100, 2 * max(totals)), title=f"One release, z = {multiplier:g}")

    multipliers = options["noise_multipliers"][: len(charts.LOOKS)]
    near_best = [row for row in selected(rows, part="around the best") if row["noise_multiplier"] in multipliers]
    of_multipliers = [{"clip_norm": C, "noise_multiplier": z, "predicted": problem.parts(C, z).total}
                      for z in multipliers for C in grid]  # fmt: skip
    charts.lines(around, near_best, "clip_norm", by="noise_multiplier", theory=of_multipliers, **axes)
    around.set(title="The best C, a third and three times of it")

    # The floor has no closed form where updates are clipped.
    floors = [{"clip_norm": C, "predicted": problem.floor(C, multiplier, options["step_size"])}
              for C in grid if problem.unclipped <= C]  # fmt: skip
    charts.lines(floor, selected(rows, part="floor"), "clip_norm", theory=floors,
                 line="theory where nothing is clipped", **axes)  # fmt: skip
    floor.set(ylabel="Error floor: squared distance", title=f"Runs to the floor, z = {multiplier:g}")

    # With personal thresholds the noise is that of the longest update: C = factor * longest.
    own = [{"clip_norm": C, "series": OWN_THRESHOLDS, "predicted": problem.error(C, multiplier, C / problem.longest)}
           for C in grid if problem.longest >= C]  # fmt: skip
    for_all = [row | {"series": "one C for all"} for row in selected(of_parts, series="total")]
    measured = [row | {"series": OWN_THRESHOLDS} for row in selected(rows, part=PERSONAL)]
    charts.lines(personal, measured, "clip_norm", by="series", theory=[*own, *for_all], **axes)
    personal.set(title="Thresholds in proportion to each norm")
    return figure


def fixed_multiplier(values: Sequence[float]) -> float:
    """Returns the noise multiplier that is held fixed along the clip norms, the middle one."""
    return values[len(values) // 2]
