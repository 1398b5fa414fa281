"""The headline figures at the top of a run's page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from fedjax_sim.report.numbers import count, percent, real, seconds, size
from fedjax_sim.running.log import SOME_TOTALS

__all__ = ["TILES", "tiles"]

TILES = (
    ("test_accuracy", "test accuracy", percent),
    ("test_loss", "test loss", real),
    ("rounds", "rounds", count),
    ("client_visits", "client visits", count),
    ("distinct_clients", "different clients took part", count),
    ("clients_per_second", "client visits per second", count),
    ("rounds_seconds", "in rounds", seconds),
    ("compile_seconds", "in compilation", seconds),
    ("peak_memory_bytes", "peak memory", size),
    ("uplink_bytes", "sent up by clients", size),
    ("wasted_bytes", "of them too late to count", size),
    ("uplink_coded_bytes", "the same under an entropy code, at most", size),
    ("downlink_bytes", "sent down to clients", size),
)


def tiles(values: Mapping[str, Any]) -> str:
    """One tile for each headline figure; those that only some runs have are left out where `values` lacks them."""
    found = []
    for key, label, show in TILES:
        if key in (*SOME_TOTALS, "distinct_clients") and key not in values:
            continue
        kind = "tile main" if key in ("test_accuracy", "test_loss") else "tile"
        found.append(f'<div class="{kind}"><b>{escape(show(values.get(key)))}</b><span>{label}</span></div>')
    return f'<div class="tiles">{"".join(found)}</div>'
