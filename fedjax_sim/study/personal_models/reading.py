"""This module writes the reading of `personal_models`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim.study.charts import rows_of
from fedjax_sim.study.findings import Comparison
from fedjax_sim.study.personal_models.methods import BASELINE


def personal_models_reading(found: Sequence[Comparison], options: dict[str, Any]) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    for part in dict.fromkeys(comparison.conditions["part"] for comparison in found):
        accuracies = sorted(rows_of(found, part=part, quantity="accuracy"), key=lambda row: -row["measured"])
        order = "; ".join(f"{row['method']} {row['measured']:.3f}" for row in accuracies)
        yield f"On {part}, accuracy on owners' unseen rows, best first: {order}."
        gains = rows_of(found, part=part, quantity="gain")
        better = [row["method"] for row in gains if row["low"] > 0]
        worse = [row["method"] for row in gains if row["high"] < 0]
        told_apart = (
            f"Better than {BASELINE} beyond the spread of the runs: {', '.join(better) or 'none'}; "
            f"worse: {', '.join(worse) or 'none'}."
        )
        lowest = sorted(rows_of(found, part=part, quantity="lowest tenth"), key=lambda row: -row["measured"])
        leaders = ", ".join(f"{row['method']} {row['measured']:.3f}" for row in lowest[:3])
        yield f"{told_apart} The tenth of the clients with the lowest accuracy does best with {leaders}."
    yield (
        f"Numbers are means of {options['num_runs']} runs over the same clients, and deviations are over these runs. "
        f"Learning rates were chosen from {', '.join(f'{rate:g}' for rate in options['learning_rates'])} in two "
        "further runs; other options are fixed, so a method may do better with its own options tuned."
    )
