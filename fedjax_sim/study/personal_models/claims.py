"""This module draws the conclusions of `personal_models` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, rising, selected, shown, with_spread
from fedjax_sim.study.personal_models.methods import BASELINE

# Methods that the claims compare with the baseline, by what they have in common.
FAMILIES = {
    "a shared model that is not fine-tuned is": ("FedAvg",),
    "a model of a client's own rows alone is": ("own rows alone",),
    "models of which each client owns one layer are": ("FedPer", "LG-FedAvg", "FedRep", "FedBABU"),
    "clusters and mixtures of shared models are": ("IFCA", "CFL", "FedEM"),
    "shared models that are fair to the worst clients are": ("q-FedAvg", "TERM"),
}


def personal_models_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about gains over a fine-tuned shared model, and about the lowest tenth.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    gains = selected(rows, part="digits", quantity="gain")
    largest = sorted(gains, key=lambda row: row["measured"])[-3:]
    yield Claim(
        f"On digits, no method is better than {BASELINE} by three points or more.",
        every(is_below(row, 0.03) for row in gains),
        f"largest: {shown(largest, 'method')}",
    )
    for words, names in FAMILIES.items():
        found = [row for row in gains if row["method"] in names]
        yield Claim(
            f"On digits, {words} less accurate than {BASELINE}, beyond the spread of the runs.",
            every(is_below(row, 0.0) for row in found),
            shown(found, "method"),
        )
    # Runs are few, so the difference is larger than their spread.
    all_rows, lowest = (
        [with_spread(row) for row in rising(rows, "method", part="digits", quantity=quantity)]
        for quantity in ("accuracy", "lowest tenth")
    )
    yield Claim(
        "On digits, the tenth of the clients with the lowest accuracy has a lower accuracy than all, whatever the "
        "method.",
        every(is_below(few, everybody) for few, everybody in zip(lowest, all_rows, strict=True)),
        shown(lowest, "method"),
    )
