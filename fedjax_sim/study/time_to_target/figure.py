"""This module draws the figure of `time_to_target`: seconds, bytes and joules to the target, and round times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_sim.report import charts
from fedjax_sim.study.claims import Row, selected


def time_to_target_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws what each server spends until the target, and the seconds of a round beside the order statistics.

    Args:
      rows: the rows of the study. A server that does not always reach the target has no place there.
      options: the study's options.
    """
    figure, (seconds, megabytes, joules, rounds) = charts.panels(2, 2, height=2.6)
    to_target = f"to accuracy {options['target']:g}"
    charts.dots(seconds, selected(rows, quantity="seconds to target"), "server", line="updates times their time",
                label=f"Simulated seconds {to_target}", log=True)  # fmt: skip
    charts.dots(megabytes, selected(rows, quantity="megabytes to target"), "server",
                label=f"Megabytes {to_target}, both ways")  # fmt: skip
    charts.dots(joules, selected(rows, quantity="joules to target"), "server", label=f"Joules {to_target}")
    charts.dots(rounds, selected(rows, quantity="seconds a round"), "server", label="Seconds a round")
    rounds.set_xlim(left=0)
    return figure
