"""Draws the figures of simulated time: rounds and energy over a run, and the clients of one round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import charts
from fedjax_sim.report.axes import legend, style
from fedjax_sim.report.numbers import count, recorded_number, scaled_joules, scaled_seconds

# field of a client in a timeline -> what the client does
ACTIVITIES = {"download": "receives the model", "training": "trains", "sending": "sends"}
# how a client's round ended -> its words
ENDS = {"reported": "arrived", "cut off": "cut off", "left": "left before", "silent": "did not report"}
LOOKED = ("trains", "sends", "arrived", "receives the model")  # the order of their looks: no bar is black


@style()
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
    x = now / time_unit
    lengths = [{"now": at, "length": value} for at, value in zip(x, length / length_unit, strict=True)]
    energies = [
        {"now": at, "whose": whose, "energy": value}
        for whose, values in (("all clients", joules), ("for nothing", wasted))
        for at, value in zip(x, values / energy_unit, strict=True)
    ]
    figure, (left, right) = charts.panels(1, 2, height=2.3)
    label = f"Simulated time ({time_name})"
    charts.lines(left, lengths, "now", "length", theory=[], xlabel=label, ylabel=f"Length of the round ({length_name})")
    charts.lines(right, energies, "now", "energy", by="whose", xlabel=label, ylabel=f"Energy so far ({energy_name})")
    for panel in (left, right):
        panel.set_ylim(bottom=0)
    legend(figure, (left, right))
    return figure


@style()
def picture(timeline: Mapping[str, Any]) -> Any:
    """Draws the clients of one round as bars over time.

    Args:
      timeline: as `instruments.timeline` returns it, or JSON of it.

    Returns: a matplotlib Figure.
    """
    clients = [client for client in timeline["clients"] if isinstance(client, Mapping)]
    times = np.array([[recorded_number(client.get(name)) for name in ACTIVITIES] for client in clients]).reshape(-1, 3)
    times = np.nan_to_num(times, posinf=0.0, neginf=0.0)
    unit, name = scaled_seconds(float(times.sum(1).max(initial=0)))
    # Each part begins when the parts before it have ended.
    ends = np.cumsum(times, 1) / unit
    begins = ends - times / unit
    ids = [count(client.get("id")) for client in clients]
    bars = [
        {"client": ids[i], "what": words, "begin": begins[i, j], "end": ends[i, j]}
        for j, words in enumerate(ACTIVITIES.values())
        for i in range(len(clients))
    ]
    arrivals = [
        {"client": ids[i], "what": words, "at": ends[i, -1]}
        for end, words in ENDS.items()
        for i, client in enumerate(clients)
        if client.get("end") == end
    ]
    figure, (panel,) = charts.panels(1, 1, height=1.1 + 0.125 * max(len(clients), 6))
    charts.timeline(panel, bars, "client", by="what", events=arrivals, series=(*LOOKED, *ENDS.values()),
                    xlabel=f"Time since the invitation ({name})", ylabel="Client")  # fmt: skip
    legend(figure, [panel])
    return figure
