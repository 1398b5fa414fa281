"""This module draws the figure of `staleness`: the limit, FedAsync, floors, stale gradients, weights, and buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected
from fedjax_sim.study.staleness.delays import DIMENSION, MIXING, STEP, floor_step, stale_prediction

DELAY = "Delay, versions"


def staleness_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws six panels, with theory as lines and measurements as points.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, (limit, mixing, floor, error, weights, buffers) = charts.panels(3, 2)
    delays = sorted(options["delays"])
    grid = range(delays[-1] + 1)
    step = floor_step(delays)
    shown_delays = sorted({delays[0], delays[len(delays) // 2], delays[-1]})
    factors = [_over_its_time(row, "measured", "low", "high")
               for row in selected(rows, part="limit") if row["delay"] in shown_delays]  # fmt: skip
    charts.lines(limit, factors, "step_over_limit", by="delay", theory=_contractions(shown_delays),
                 levels={"no change": 1.0}, xlabel="Step / its limit at this delay",
                 ylabel="Factor of the error in 2 delay + 1 steps")  # fmt: skip

    charts.lines(mixing, selected(rows, part="same step", quantity="factor per step"), "delay", by="algorithm",
                 theory=_same_step(grid), levels={"no change": 1.0}, xlabel=f"{DELAY}; step {STEP:g}",
                 ylabel="Factor of the error per step")  # fmt: skip

    names = f"step {step:.3g}", "3/4 of the limit"
    floors = [row | {"step": names[row["step_over_limit"] > 0.7]} for row in selected(rows, part="floor")]
    predictions = [
        {"delay": delay, "step": name, "predicted": theory.delayed_floor(
            np.eye(DIMENSION), delay, step_size=one, noise=options["noise"])}
        for delay in grid
        for name, one in zip(names, (step, 0.75 * theory.delayed_step_limit(delay)), strict=True)
    ]  # fmt: skip
    charts.lines(floor, floors, "delay", by="step", theory=predictions, log="y", xlabel=DELAY,
                 ylabel="Floor: squared distance")  # fmt: skip

    errors = [row | {"line": "error"} for row in selected(rows, part="error", kind="exact")]
    # The two fields of a prediction: the exact error, and its bound.
    bounds = [{"delay": delay, "line": name, "predicted": predicted} for delay in grid
              for name, predicted in zip(("error", "bound: L times the distance"), stale_prediction(delay, step),
                                         strict=True)]  # fmt: skip
    charts.lines(error, errors, "delay", by="line", theory=bounds, xlabel=DELAY, ylabel="Error of a stale gradient")

    charts.lines(weights, _noise_and_bias(rows, delays[-1]), "floor", theory=[], text="weights", log="x",
                 xlabel=f"Floor at delay {delays[-1]}", ylabel="Weight of the slow half")  # fmt: skip
    weights.margins(0.3)  # room for names

    in_buffers = [row for row in selected(rows, part="buffers") if row["quantity"] != "seconds a version"]
    charts.lines(buffers, in_buffers, "buffer_size", by="quantity", theory=_waits(options),
                 xlabel=f"Size of the buffer, {options['concurrency']} clients in flight",
                 ylabel="Staleness; delay")  # fmt: skip
    return figure


def _over_its_time(row: Row, *columns: str) -> dict[str, Any]:
    """Returns a row whose factors of one step are those of 2 tau + 1 steps: a longer delay acts on a longer time scale.

    Args:
      row: it has "delay" (tau, versions).
      *columns: the columns of factors.
    """
    return {**row, **{name: row[name] ** (2 * row["delay"] + 1) for name in columns}}


def _contractions(delays: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the factors of the error around the limit, with curvature 1, as rows of theory.

    A factor is lambda^(2 tau + 1), with lambda the largest modulus of a root of lambda^(tau + 1) = lambda^tau - eta.

    Args:
      delays: tau, in versions.
    """
    return [
        _over_its_time({"delay": delay, "step_over_limit": share, "predicted": theory.delayed_contraction(
            1.0, delay, step_size=share * theory.delayed_step_limit(delay))}, "predicted")
        for delay in delays
        for share in np.linspace(0.9, 1.06, 33).tolist()
    ]  # fmt: skip


def _same_step(delays: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the factors per step of FedBuff and FedAsync at an effective step of STEP, as rows of theory."""
    return [
        {"delay": delay, "algorithm": name, "predicted": predicted}
        for delay in delays
        for name, predicted in (
            ("fedbuff", theory.delayed_contraction(1.0, delay, step_size=STEP)),
            ("fedasync", theory.fedasync_contraction(1.0, delay, mixing_rate=MIXING, step_size=STEP / MIXING)),
        )
    ]


def _noise_and_bias(rows: Sequence[Row], longest: int) -> list[dict[str, Any]]:
    """Returns the weight of the slow half for each weight by staleness, beside the floor that it has.

    Args:
      rows: the rows of the study.
      longest: the longest delay, at which weights are measured.
    """
    # The floor of constant weights is in another part, at the same step.
    floors = {row["weights"]: row["measured"] for part in ("floor", "weights")
              for row in selected(rows, part=part, delay=longest, quantity="squared distance")
              if row["step_over_limit"] < 0.7}  # fmt: skip
    return [{**row, "floor": floors[row["weights"]]} for row in selected(rows, part="speeds")]


def _waits(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns staleness (C - 1) / K and mean delay (K - 1) / (2 C), for C clients in flight, as rows of theory."""
    concurrency = options["concurrency"]
    return [
        {"buffer_size": size, "quantity": name, "predicted": predicted}
        for size in range(1, max(options["buffer_sizes"]) + 1)
        for name, predicted in (
            ("staleness, versions", (concurrency - 1) / size),
            ("delay, seconds", (size - 1) / (2 * concurrency)),
        )
    ]
