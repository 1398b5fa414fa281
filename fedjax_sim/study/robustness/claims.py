"""This module draws the conclusions of `robustness` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, named, rising, selected, shown, with_spread

SINGLE, COMMON = ("median", "Krum"), ("geometric median", "centred clipping")


def robustness_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about worst cases of rules, and about accuracies where nobody attacks.

    Args:
      rows: the rows of the study. Runs are few, so differences are larger than the spread of the runs.
      options: the study's options; numbers of attackers rise.
    """
    fewest, most = ([with_spread(row) for row in rising(rows, "rule", part="worst case", attackers=f)]
                    for f in (options["attackers"][0], options["attackers"][-1]))  # fmt: skip
    mean = named(most, "rule", "mean")
    best = sorted((row for row in most if row not in mean), key=lambda row: row["measured"])[-1:]
    yield Claim(
        f"With {options['attackers'][-1]} attackers of {options['num_clients']} the mean keeps less than half the "
        "accuracy of the best rule in the worst case.",
        every(is_below(row, reference, 0.5) for row in mean for reference in best),
        shown([*mean, *best], "rule", "attack"),
    )
    few, many = (named(found, "rule", "mean", *COMMON) for found in (fewest, most))
    yield Claim(
        "The mean, geometric median and centred clipping have lower worst cases with the most attackers than with the "
        "fewest.",
        every(is_below(row, reference) for reference, row in zip(few, many, strict=True))
        if len(options["attackers"]) > 1
        else None,
        shown([row for pair in zip(few, many, strict=True) for row in pair], "rule", "attackers"),
    )
    single, common = (named(fewest, "rule", *names) for names in (SINGLE, COMMON))
    yield Claim(
        f"With {options['attackers'][0]} attackers median and Krum have lower worst cases than geometric median and "
        "centred clipping.",
        every(is_below(row, reference) for row in single for reference in common),
        shown([*single, *common], "rule", "attack"),
    )
    honest = [with_spread(row) for row in
              selected(rows, part="accuracy", attack="none", attackers=options["attackers"][0])]  # fmt: skip
    dear, mean = named(honest, "rule", *SINGLE), named(honest, "rule", "mean")
    yield Claim(
        "Where nobody attacks, median and Krum are less accurate than the mean.",
        every(is_below(row, reference) for row in dear for reference in mean),
        shown([*dear, *mean], "rule"),
    )
