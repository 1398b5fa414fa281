"""Draws the figures of simulated time: rounds and energy over a run, and the clients of one round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report.axes import BLACK, BLUE, GREEN, GREY, ORANGE, legend, panels, style
from fedjax_sim.report.numbers import count, recorded_number, scaled_joules, scaled_seconds

# (field of a client in a timeline, label, colour)
ACTIVITIES = (("download", "receives the model", GREY), ("training", "trains", BLUE), ("sending", "sends", GREEN))
# (how a client's round ended, label, marker, colour)
ENDS = (
    ("reported", "arrived", "o", BLACK), ("cut off", "cut off", "X", ORANGE), ("left", "left before", "v", ORANGE),
    ("silent", "did not report", "D", ORANGE),
)  # fmt: skip


def rounds_and_energy(records: Sequence[Mapping[str, Any]]) -> Any:
    """Draws how long rounds took, and the energy of clients so far, by simulated time.

    Args:
      records: one a round, with "simulated_seconds", "round_seconds", "joules" and "wasted_joules".

    Returns: a matplotlib Figure.
    """
    names = ("simulated_seconds", "round_seconds", "joules", "wasted_joules")
    rows = [[recorded_number(record.get(name)) for name in names] for record in records]
    rows = np.array([row for row in rows if np.isfinite(row[0])]).reshape(-1, 4)
    now = rows[:, 0]
    length = rows[:, 1]
    joules = np.nancumsum(rows[:, 2])
    wasted = np.nancumsum(rows[:, 3])
    time_unit, time_name = scaled_seconds(float(now.max(initial=0)))
    length_unit, length_name = scaled_seconds(float(np.nanmax(length, initial=0)))
    energy_unit, energy_name = scaled_joules(float(joules.max(initial=0)))
    with style():
        figure, (lengths, energies) = panels(2, 2.3)
        lengths.plot(now / time_unit, length / length_unit, ".", color=BLUE, markersize=4)
        lengths.set(xlabel=f"Simulated time ({time_name})", ylabel=f"Length of the round ({length_name})")
        x = now / time_unit
        energies.fill_between(x, joules / energy_unit, color=BLUE, alpha=0.28, linewidth=0, label="all clients")
        energies.fill_between(x, wasted / energy_unit, color=ORANGE, alpha=0.6, linewidth=0, label="for nothing")
        energies.set(xlabel=f"Simulated time ({time_name})", ylabel=f"Energy so far ({energy_name})")
        for axes in (lengths, energies):
            axes.set_ylim(bottom=0)
            axes.margins(x=0.02)
        legend(figure, (lengths, energies))
    return figure


def picture(timeline: Mapping[str, Any]) -> Any:
    """Draws the clients of one round as bars over time.

    Args:
      timeline: as `instruments.timeline` returns it, or JSON of it.

    Returns: a matplotlib Figure.
    """
    clients = [client for client in timeline["clients"] if isinstance(client, Mapping)]
    times = np.array([[recorded_number(client.get(name)) for name, _, _ in ACTIVITIES] for client in clients]).reshape(
        -1, 3
    )
    times = np.nan_to_num(times, posinf=0.0, neginf=0.0)
    unit, name = scaled_seconds(float(times.sum(1).max(initial=0)))
    rows = np.arange(len(clients))
    # Each part begins when the parts before it have ended.
    starts = np.cumsum(times, 1) - times
    with style():
        figure, axes = panels(1, 1.1 + 0.125 * max(len(clients), 6))
        for i, (_, words, color) in enumerate(ACTIVITIES):
            axes.barh(rows, times[:, i] / unit, left=starts[:, i] / unit, height=0.72, color=color, label=words)
        for end, words, marker, color in ENDS:
            ended_so = np.array([client.get("end") == end for client in clients], bool)
            if ended_so.any():
                x = times.sum(1)[ended_so] / unit
                axes.plot(x, rows[ended_so], marker, color=color, markersize=4.5, label=words, clip_on=False, zorder=3)
        axes.set(xlabel=f"Time since the invitation ({name})", ylabel="Client", yticks=rows, xlim=(0, None))
        axes.set_yticklabels([count(client.get("id")) for client in clients], fontsize=6.5)
        axes.set_ylim(len(rows) - 0.3, -0.7)
        axes.grid(False, axis="y")
        handles, names = axes.get_legend_handles_labels()
        # Matplotlib names markers first; the legend begins with the bars.
        num_bars = len(ACTIVITIES)
        handles = handles[-num_bars:] + handles[:-num_bars]
        names = names[-num_bars:] + names[:-num_bars]
        figure.legend(handles, names, loc="outside upper left", ncols=6, columnspacing=1.6)
    return figure
