"""This module draws the figure of `bits`: floors against bytes and bits, two roundings, and error feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import charts
from fedjax_sim.study.bits.clients import MEASURED_ROUNDS, QuantizedClients
from fedjax_sim.study.bits.messages import GRID_NAMES
from fedjax_sim.study.claims import Row, selected

MIN_SHOWN_DISTANCE = 1e-5  # squared distance of the last panel; EF21's are nothing but rounding


def bits_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws four panels: distances against bytes, floors against bits, errors of two roundings, and error feedback.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, (by_bytes, by_bits, rounding, feedback) = charts.panels(2, 2)
    clients = QuantizedClients(options["num_clients"], options["dimension"])
    bits = options["bits"]
    sent = [row for row in selected(rows, messages=GRID_NAMES[False]) if row["part"] in ("path", "floor")]
    charts.lines(by_bytes, sent, "bytes_sent", by="bits", theory=_paths(clients, bits),
                 xlabel="Bytes sent by a client", ylabel="Squared distance from the optimum", log="xy")  # fmt: skip
    # Floats reach the optimum itself; the panel ends a little below the lowest floor.
    by_bytes.set_ylim(min(clients.floor(b) for b in bits) / 4, 20)

    # The closed form holds for even numbers of bits.
    grid = range(bits[0], bits[-1] + 1, 2)
    floors = {False: clients.floor, True: clients.floor_with_zero}
    theory = [{"bits": b, "messages": GRID_NAMES[keeps_zeros], "predicted": floor(b)}
              for keeps_zeros, floor in floors.items() for b in grid]  # fmt: skip
    charts.lines(by_bits, selected(rows, part="floor"), "bits", by="messages", theory=theory,
                 xlabel="Bits a number", ylabel="Error floor: squared distance", log="y")  # fmt: skip

    errors = [row | {"series": f"{row['messages'].split(',')[0]}, {row['part']}"}
              for part in ("alike, at 0.3", "spread") for row in selected(rows, part=part)
              if row["messages"].endswith(GRID_NAMES[False])]  # fmt: skip
    # The spread updates differ for each m, so no single curve predicts them.
    alike = selected(errors, part="alike, at 0.3")
    charts.lines(rounding, errors, "cohort_size", by="series", theory=alike,
                 xlabel="Cohort size m", ylabel="Squared error of a mean's number", log="xy")  # fmt: skip

    names = ("measured", "low", "high")
    ends = [
        row | {name: max(row[name], MIN_SHOWN_DISTANCE) for name in names} for row in selected(rows, part="feedback")
    ]
    charts.lines(feedback, ends, "step_size", by="messages", log="xy", xlabel="Step size",
                 ylabel=f"Squared distance ({MIN_SHOWN_DISTANCE:g} or more)")  # fmt: skip
    return figure


def _paths(clients: QuantizedClients, bits: Sequence[int]) -> list[Row]:
    """Returns the expected distance after each round for each number of bits and for floats, as rows of theory."""
    bytes_of: dict[int | str, float] = {b: clients.bytes(clients.quantizer(b)) for b in bits}
    expected: dict[int | str, np.ndarray] = {b: clients.expected(b, MEASURED_ROUNDS[-1]) for b in bits}
    bytes_of["floats"], expected["floats"] = 4 * clients.dimension, clients.expected(0, MEASURED_ROUNDS[-1])
    return [
        {"bits": name, "bytes_sent": t * bytes_of[name], "predicted": float(path[t])}
        for name, path in expected.items()
        for t in range(1, len(path))
    ]
