"""The headline figures at the top of a run's page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fedjax_sim.report.numbers import count, percent, real, seconds, shown_with_unit, size
from fedjax_sim.round.costs import ROUND_METRICS
from fedjax_sim.sampling.visits import DISTINCT

__all__ = ["TILES", "besides", "more_tests", "own_metrics", "tiles"]

WORDS = {metric.name: metric.words for metric in (*ROUND_METRICS, DISTINCT)}
TILES = (
    ("test_accuracy", "test accuracy", percent),
    ("test_loss", "test loss", real),
    ("rounds", "rounds", count),
    ("client_visits", "client visits", count),
    ("clients_count", "clients count", str),
    ("distinct_clients", WORDS["distinct_clients"], count),
    ("clients_per_second", "client visits per second", count),
    ("rounds_seconds", "in rounds", seconds),
    ("compile_seconds", "in compilation", seconds),
    ("peak_memory_bytes", "peak memory", size),
    *((name, WORDS[name], size) for name in ("uplink_bytes", "wasted_bytes", "uplink_coded_bytes", "downlink_bytes")),
)
OPTIONAL = ("clients_count", "distinct_clients", "wasted_bytes", "uplink_coded_bytes")  # that only some runs have


def own_metrics(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(name, words, value as text) of what the run's parts state about numbers of their own, in a summary."""
    stated = values.get("metrics")
    for name, about in stated.items() if isinstance(stated, dict) else ():
        if name in values and isinstance(about, dict):
            yield name, str(about.get("words", name)), shown_with_unit(values[name], str(about.get("unit", "")))


def besides(values: Mapping[str, Any]) -> list[str]:
    """Names of bytes that were sent besides those up and down (`Metric.besides`), in a summary.

    >>> besides({"metrics": {"peer_bytes": {"besides": True}, "wasted_bytes": {}}, "peer_bytes": 8})
    ['peer_bytes']
    """
    stated = values.get("metrics")
    found = {name: x for name, x in stated.items() if isinstance(x, dict)} if isinstance(stated, dict) else {}
    return [name for name, about in found.items() if name in values and about.get("besides") is True]


def more_tests(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, words) of what an evaluation measured on the test set beside loss and accuracy, as an overshoot, and of an
    attack's success.

    >>> list(more_tests({"test_loss": 1.0, "test_overshoot": 0.2, "attack_success": 0.9}))
    [('attack_success', 'attack success'), ('test_overshoot', 'test overshoot')]
    """
    for name in sorted(values):
        if name == "attack_success" or (name.startswith("test_") and name not in ("test_accuracy", "test_loss")):
            yield name, escape(name.replace("_", " "))


def tiles(values: Mapping[str, Any]) -> str:
    """One tile for each headline figure and each number that a part states; figures that only some runs have are left
    out where `values` lacks them."""
    found = []
    for key, label, show in TILES:
        if key in OPTIONAL and key not in values:
            continue
        kind = "tile main" if key in ("test_accuracy", "test_loss") else "tile"
        found.append(f'<div class="{kind}"><b>{escape(show(values.get(key)))}</b><span>{label}</span></div>')
    for name, words in more_tests(values):
        show = percent if name == "attack_success" else real
        found.append(f'<div class="tile"><b>{escape(show(values[name]))}</b><span>{words}</span></div>')
    for _, words, text in own_metrics(values):
        found.append(f'<div class="tile"><b>{escape(text)}</b><span>{escape(words)}</span></div>')
    return f'<div class="tiles">{"".join(found)}</div>'
