"""This module draws the conclusions of `breakdown` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, is_within, selected, shown


def breakdown_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about attackers who break a rule, and about attackers who move it.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    m, f = options["num_messages"], options["num_byzantine"]
    points = {row["rule"]: row for row in selected(rows, part="far messages")}

    def of(*rules: str) -> list[Row]:
        return [points[rule] for rule in rules]

    yield Claim(
        "One attacker breaks the mean.", every(is_within(row, 1, 1) for row in of("mean")), shown(of("mean"), "rule")
    )
    trimmed = of("trimmed mean", "mixing, trimmed mean")
    yield Claim(
        f"The trimmed mean withstands the {f} attackers that it is told, and not one more.",
        every(is_within(row, f + 1, f + 1) for row in trimmed),
        shown(trimmed, "rule"),
    )
    choosing = of("Krum", "multi-Krum")
    yield Claim(
        f"Rules that choose whole messages break later than they promise, which is at {f + 1}.",
        every(is_below(f + 1, row) for row in choosing),
        shown(choosing, "rule"),
    )
    majority = of("median", "Krum", "geometric median")
    yield Claim(
        f"Median, Krum and geometric median break when attackers are most of the {m} clients, and not before.",
        every(is_within(row, (m + 1) // 2, (m + 1) // 2) for row in majority),
        shown(majority, "rule"),
    )
    yield Claim(
        "No number of attackers breaks centred clipping.",
        every(is_below(m - 1, row) for row in of("centred clipping")),
        shown(of("centred clipping"), "rule"),
    )
    yield from _shifts(rows, options["attackers"])


def _shifts(rows: Sequence[Row], attackers: Sequence[int]) -> Iterator[Claim]:
    """Yields claims about attackers who stay near, and move rules without breaking them.

    Args:
      rows: the rows of the study.
      attackers: numbers of attackers f, rising.
    """
    fewest, most = (selected(rows, part="worst attack", attackers=f) for f in (attackers[0], attackers[-1]))
    by_rule = {row["rule"]: row for row in fewest}
    yield Claim(
        f"{attackers[-1]} attackers move every rule further than {attackers[0]}.",
        every(is_below(by_rule[row["rule"]], row) for row in most) if len(attackers) > 1 else None,
        shown([*fewest, *most], "rule", "attackers"),
    )
    yield Claim(
        f"The worst attack of {attackers[-1]} attackers does less than a quarter of what the bounds allow.",
        every(is_below(row, row["predicted"], 0.25) for row in most),
        "; ".join(f"{shown([row], 'rule')} of at most {row['predicted']:.3g}" for row in most),
    )
    krum = selected(most, rule="Krum")
    yield Claim(
        f"{attackers[-1]} attackers move Krum further than every other rule.",
        every(is_below(row, krum[0]) for row in most if row not in krum),
        shown(most, "rule"),
    )
