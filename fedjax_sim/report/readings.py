"""Says in a sentence what each figure of a run's page shows, as plain text; "" where the numbers are not there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report.numbers import count, percent, real, recorded_number, seconds

# (metric, its name, how a value is shown); the first that a run has is read.
METRICS = (
    ("test_accuracy", "test accuracy", percent),
    ("held_out_accuracy", "held-out accuracy", percent),
    ("test_loss", "test loss", real),
    ("held_out_loss", "held-out loss", real),
    ("train_loss", "training loss", real),
    ("local_loss", "loss of local training", real),
)


# Read first where clients have models of their own.
OWNERS = (
    ("owner_accuracy", "accuracy of the models that owners use", percent),
    ("owner_loss", "loss of the models that owners use", real),
)


def learning_in_words(records: Sequence[Mapping[str, Any]]) -> str:
    """Says how far the main metric came, and when it had come half of the way.

    >>> rows = [{"round": 0, "test_accuracy": 0.1}, {"round": 5, "test_accuracy": 0.6}]
    >>> learning_in_words([*rows, {"round": 9, "test_accuracy": 0.7}])
    'The test accuracy rose from 10.00 % before training to 70.00 % after round 9. Half of the way was done by round 5.'
    """
    has_own = any("personal_clients" in record for record in records)
    for metric, name, show in OWNERS + METRICS if has_own else METRICS:
        points = _points(records, metric)
        if len(points) >= 2:
            return _course(name, show, points)
    return ""


def _points(records: Sequence[Mapping[str, Any]], metric: str) -> list[tuple[float, float]]:
    """Returns (round, value) of the records in which both are finite."""
    pairs = [(recorded_number(record.get("round")), recorded_number(record.get(metric))) for record in records]
    return [(round, number) for round, number in pairs if math.isfinite(round) and math.isfinite(number)]


def _course(name: str, show: Callable[[Any], str], points: list[tuple[float, float]]) -> str:
    """Says where a metric began and ended, and if it got better, when it had first come half of the way."""
    (first_round, first), (last_round, last) = points[0], points[-1]
    since = "before training" if first_round == 0 else f"after round {count(first_round)}"
    if first == last:
        return f"The {name} is {show(last)}, {since} and after round {count(last_round)}."
    verb = "rose" if last > first else "fell"
    course = f"The {name} {verb} from {show(first)} {since} to {show(last)} after round {count(last_round)}."
    if (verb == "rose") == ("loss" in name):
        return course  # a metric that got worse has no way to go
    half = (first + last) / 2
    sign = 1 if last > first else -1
    half_round = next(round for round, number in points if sign * (number - half) >= 0)
    return f"{course} Half of the way was done by round {count(half_round)}."


def spread_in_words(records: Sequence[Mapping[str, Any]]) -> str:
    """Says what the median client has in the end, and what the worst twentieth has.

    Args:
      records: of the log, one a round. The last one with quantiles counts; without any the text is empty.

    >>> spread_in_words([{"round": 4, "held_out_loss_quantiles": [0.1, 0.2, 0.3, 0.4, 0.9]}])
    'After round 4 the median client has a loss of 0.3, and one client in twenty has more than 0.9.'
    """
    for metric, name, show, worst, words in (
        ("held_out_accuracy_quantiles", "an accuracy", percent, 0, "less"),
        ("held_out_loss_quantiles", "a loss", real, 4, "more"),
        ("owner_accuracy_quantiles", "an accuracy", percent, 0, "less"),
        ("owner_loss_quantiles", "a loss", real, 4, "more"),
    ):
        for record in reversed(records):
            row = record.get(metric)
            quantiles = [recorded_number(quantile) for quantile in row] if isinstance(row, (list, tuple)) else []
            if len(quantiles) == 5 and all(map(math.isfinite, quantiles)):
                return (
                    f"After round {count(record.get('round'))} the median client has {name} of {show(quantiles[2])}, "
                    f"and one client in twenty has {words} than {show(quantiles[worst])}."
                )
    return ""


def labels_in_words(population: Mapping[str, Any]) -> str:
    """Says how one-sided the clients' labels are, beside those of all of them together.

    Args:
      population: the table of population.json. If its "label_counts" are missing or malformed, the text is empty.

    >>> labels_in_words({"label_counts": [[8, 2], [2, 8], [5, 5]]})
    'Half of these clients have one label in 80 % of their examples or more. Of all examples, 50 % have one label.'
    """
    try:
        rows = [[recorded_number(entry) for entry in row] for row in population["label_counts"]]
        counts = np.nan_to_num(np.array(rows, float), posinf=0.0, neginf=0.0)
        counts = counts[counts.sum(axis=1) > 0]
        shares = counts.max(axis=1) / counts.sum(axis=1)
        together = counts.sum(axis=0).max() / counts.sum()
    except (KeyError, TypeError, ValueError):
        return ""
    if not len(shares):
        return ""
    most = f"{100 * np.median(shares):.0f} % of their examples or more"
    if np.median(shares) == 1:
        most = "all of their examples"
    return f"Half of these clients have one label in {most}. Of all examples, {100 * together:.0f} % have one label."


def sizes_in_words(population: Mapping[str, Any]) -> str:
    """Says between which sizes most clients lie.

    Args:
      population: the table of population.json. Without "examples_quantiles" the text is empty.

    >>> sizes_in_words({"examples_quantiles": {"min": 4, "q25": 41, "median": 68, "q75": 97, "max": 160}})
    'Half of the clients have 41 to 97 examples; the smallest has 4, the largest 160.'
    """
    quantiles = population.get("examples_quantiles")
    if not isinstance(quantiles, Mapping) or not {"min", "q25", "q75", "max"} <= quantiles.keys():
        return ""
    shown = {name: count(quantiles[name]) for name in ("min", "q25", "q75", "max")}
    if shown["min"] == shown["max"]:
        return f"Every client has {shown['min']} example{'' if shown['min'] == '1' else 's'}."
    return (
        f"Half of the clients have {shown['q25']} to {shown['q75']} examples; "
        f"the smallest has {shown['min']}, the largest {shown['max']}."
    )


def time_in_words(records: Sequence[Mapping[str, Any]]) -> str:
    """Says how long rounds took, and how much energy was spent for nothing.

    Args:
      records: of the log, one a round. Without `round_seconds` in any the text is empty.

    >>> time_in_words([{"round": 1, "round_seconds": 60.0, "joules": 10.0, "wasted_joules": 1.0}])
    'A round took 60 s at the median and 60 s at most. 10 % of the energy went into work that was lost.'
    """
    lengths = [length for _, length in _points(records, "round_seconds")]
    joules = sum(spent for _, spent in _points(records, "joules"))
    wasted = sum(spent for _, spent in _points(records, "wasted_joules"))
    if not lengths:
        return ""
    words = f"A round took {seconds(float(np.median(lengths)))} at the median and {seconds(max(lengths))} at most."
    if joules <= 0:
        return words
    return f"{words} {100 * wasted / joules:.0f} % of the energy went into work that was lost."
