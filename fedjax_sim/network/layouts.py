"""This module lists the columns and units of published measurements of networks and phones."""

from __future__ import annotations

from typing import Any

from fedjax_sim import validate

PLAIN = {"speed": "speed", "bandwidth_down": "bandwidth_down", "bandwidth_up": "bandwidth_up", "latency": 0.0}
UNITS = {"speed_unit": "flops/s", "bandwidth_unit": "bytes/s", "latency_unit": "s"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": PLAIN | UNITS,
    # Tiles of Speedtest results: means over the tests of a tile, in kbit/s and ms of a round trip. A tile has a number
    # of `devices`.
    "ookla": UNITS
    | {
        "bandwidth_down": "avg_d_kbps",
        "bandwidth_up": "avg_u_kbps",
        "bandwidth_unit": "kbit/s",
        "latency": "avg_lat_ms",
        "latency_unit": "0.5 ms",
        "row_weight": "devices",
    },
    # NDT tests, `measurement-lab.ndt.unified_downloads`: one a row, in Mbit/s and ms of the least round trip
    "mlab": UNITS
    | {
        "bandwidth_down": "MeanThroughputMbps",
        "bandwidth_unit": "Mbit/s",
        "latency": "MinRTT",
        "latency_unit": "0.5 ms",
    },
    # Device capacities of FedScale: ms of inference on one example, a third of training on it, and kbit/s either way
    "fedscale": UNITS
    | {
        "speed": "computation",
        "speed_unit": "3 ms",
        "bandwidth_down": "communication",
        "bandwidth_up": "communication",
        "bandwidth_unit": "kbit/s",
        "latency": 0.0,
    },
}
# Options that may stay None; every other option needs a value from the user or the layout.
NO_ROW_WEIGHT = {"row_weight": None}


def filled(layout: str, given: dict[str, Any]) -> dict[str, Any]:
    """Completes columns and units that were not given (None) by those of the layout.

    Args:
      layout: a key of `LAYOUTS`.
      given: option -> a number for all, the name of a column, a unit, or None.

    Raises: ValueError for an unknown layout, and for a number that neither gives.

    >>> filled("ookla", {"bandwidth_up": 1e6, "latency": None})
    {'bandwidth_up': 1000000.0, 'latency': 'avg_lat_ms'}
    """
    validate.one_of("layout", layout, LAYOUTS)
    layout_values = NO_ROW_WEIGHT | LAYOUTS[layout]
    for name, value in given.items():
        if value is None and name not in layout_values:
            hint = f"Files of layout {layout!r} have none."
            validate.fail(name, "a number for all, or a column's name", None, hint)
    return {name: layout_values[name] if value is None else value for name, value in given.items()}
