"""Makes the headline figures at the top of a run's page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedjax_sim.report.html import escape
from fedjax_sim.report.numbers import NOTHING, count, percent, real, seconds, shown_with_unit, size
from fedjax_sim.round.costs import ROUND_METRICS
from fedjax_sim.sampling.visits import DISTINCT
from fedjax_sim.text.bounds import shown_up
from fedjax_sim.types import ParamsKind

WORDS_OF_METRICS = {metric.name: metric.words for metric in (*ROUND_METRICS, DISTINCT)}
# Each: (name in the summary, label on the page, how its value is shown).
RESULT_TILES = (
    ("test_accuracy", "test accuracy", percent),
    ("test_loss", "test loss", real),
    ("owner_accuracy", "accuracy of the models that owners use", percent),
    ("owner_loss", "loss of the models that owners use", real),
    ("personal_accuracy", "accuracy of clients' own models", percent),
    ("personal_loss", "loss of clients' own models", real),
    ("newcomer_accuracy", "accuracy at clients that have not trained", percent),
)
FEDERATION_TILES = (
    ("rounds", "rounds", count),
    ("client_visits", "client visits", count),
    ("distinct_clients", WORDS_OF_METRICS["distinct_clients"], count),
    *(
        (name, WORDS_OF_METRICS[name], size)
        for name in ("uplink_bytes", "wasted_bytes", "uplink_coded_bytes", "downlink_bytes")
    ),
)
SIMULATOR_TILES = (
    ("rounds_seconds", "in rounds", seconds),
    ("clients_per_second", "client visits per second", count),
    ("compile_seconds", "in compilation", seconds),
    ("peak_memory_bytes", "peak memory", size),
)
TILES = RESULT_TILES + FEDERATION_TILES + SIMULATOR_TILES
# Headline figures that only some runs have.
OPTIONAL = ("distinct_clients", "wasted_bytes", "uplink_coded_bytes")
OPTIONAL += tuple(name for name, _, _ in RESULT_TILES[2:])


def own_metrics(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields (name, words, value as text) of the numbers that the run's own parts state, from a summary."""
    stated = values.get("metrics")
    for name, description in stated.items() if isinstance(stated, dict) else ():
        if name in values and isinstance(description, dict):
            text = shown_with_unit(values[name], str(description.get("unit", "")))
            yield name, str(description.get("words", name)), text


def params_kind_of(values: Mapping[str, Any]) -> ParamsKind:
    """Returns what the params of a run are, from its summary; `UNSTATED` for a summary that does not say it.

    >>> params_kind_of({"params_kind": "one_of"}).name, params_kind_of({}).name
    ('ONE_OF', 'UNSTATED')
    """
    return ParamsKind.__members__.get(str(values.get("params_kind")).upper(), ParamsKind.UNSTATED)


def besides(values: Mapping[str, Any]) -> list[str]:
    """Returns the names of bytes that were sent besides those up and down (`Metric.besides`), from a summary.

    >>> besides({"metrics": {"peer_bytes": {"besides": True}, "wasted_bytes": {}}, "peer_bytes": 8})
    ['peer_bytes']
    """
    stated = values.get("metrics")
    entries = stated.items() if isinstance(stated, dict) else ()
    descriptions = {name: description for name, description in entries if isinstance(description, dict)}
    return [name for name, entry in descriptions.items() if name in values and entry.get("besides") is True]


def more_tests(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (name, words) of further measurements on the test set, and of an attack's success.

    Loss and accuracy are left out, since they have tiles of their own.

    >>> list(more_tests({"test_loss": 1.0, "test_overshoot": 0.2, "attack_success": 0.9}))
    [('attack_success', 'attack success'), ('test_overshoot', 'test overshoot')]
    """
    for name in sorted(values):
        if name == "attack_success" or (name.startswith("test_") and name not in ("test_accuracy", "test_loss")):
            yield name, name.replace("_", " ")


def tiles(values: Mapping[str, Any]) -> str:
    """Returns rows of tiles: what was learned, what the federation did and sent, and what the simulator took.

    Numbers that a part states follow those of the federation. Figures that only some runs have are left out where
    `values` lacks them.

    Args:
      values: a run's summary, or the totals of its log.

    >>> "<b>1.985</b><span>epsilon at delta 1e-05" in tiles({"privacy": {"epsilon": 1.98401, "delta": 1e-5}})
    True
    >>> "<b>none</b><span>epsilon: why is under" in tiles({"privacy": {"refused": "noise that nobody accounts for"}})
    True
    """
    rows = []
    # A task without classes, such as a regression, has a loss alone. Params that are no model have no test.
    optional = (*OPTIONAL, *(["test_accuracy"] if values.get("test_loss") is not None else []))
    if not params_kind_of(values).is_judged:
        optional += ("test_accuracy", "test_loss")
    for kind, described in (("tile main", RESULT_TILES), ("tile", FEDERATION_TILES), ("tile", SIMULATOR_TILES)):
        shown = [entry for entry in described if entry[0] not in optional or values.get(entry[0]) is not None]
        rows.append([_tile(show(values.get(key)), label, kind) for key, label, show in shown])
    spent = values.get("privacy")
    if isinstance(spent, Mapping):
        rows[0].append(_privacy_tile(spent))
    for name, words in more_tests(values):
        rows[0].append(_tile((percent if name == "attack_success" else real)(values[name]), words))
    rows[1] += [_tile(text, words) for _, words, text in own_metrics(values)]
    return "\n".join(f'<div class="tiles">{"".join(row)}</div>' for row in rows)


def _privacy_tile(spent: Mapping[str, Any]) -> str:
    """Returns the tile of what a private run has spent, or of the epsilon that it does not have."""
    if "epsilon" not in spent:
        return _tile("none", "epsilon: why is under Privacy", "tile main")
    delta = shown_up(spent["delta"]) if "delta" in spent else NOTHING
    return _tile(shown_up(spent["epsilon"]), f"epsilon at delta {delta}", "tile main")


def _tile(text: str, label: str, kind: str = "tile") -> str:
    return f'<div class="{kind}"><b>{escape(text)}</b><span>{escape(label)}</span></div>'
