"""This module draws the conclusions of `robustness` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, selected, shown, with_spread

SINGLE, COMMON = ("median", "Krum"), ("geometric median", "centred clipping")


def robustness_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about worst cases of rules, and about accuracies where nobody attacks.

    Args:
      rows: the rows of the study. Runs are few, so differences are larger than the spread of the runs.
      options: the study's options; numbers of attackers rise.
    """
    fewest, most = ({row["rule"]: with_spread(row) for row in selected(rows, part="worst case", attackers=f)}
                    for f in (options["attackers"][0], options["attackers"][-1]))  # fmt: skip
    best = max(most.values(), key=lambda row: row["measured"])
    yield Claim(
        f"With {options['attackers'][-1]} attackers of {options['num_clients']} the mean keeps less than half the "
        "accuracy of the best rule in the worst case.",
        every(is_below(most[name], best, 0.5) for name in most if name == "mean"),
        shown([*(most[name] for name in most if name == "mean"), best], "rule", "attack"),
    )
    yield Claim(
        "Every rule has a lower worst case with the most attackers than with the fewest.",
        every(is_below(most[rule], fewest[rule]) for rule in most) if len(options["attackers"]) > 1 else None,
        shown([row for rule in most for row in (fewest[rule], most[rule])], "rule", "attackers"),
    )
    single, common = ([fewest[name] for name in names if name in fewest] for names in (SINGLE, COMMON))
    yield Claim(
        f"With {options['attackers'][0]} attackers median and Krum have lower worst cases than geometric median and "
        "centred clipping.",
        every(is_below(row, reference) for row in single for reference in common),
        shown([*single, *common], "rule", "attack"),
    )
    honest = {row["rule"]: with_spread(row) for row in
              selected(rows, part="accuracy", attack="none", attackers=options["attackers"][0])}  # fmt: skip
    dear, mean = ([honest[name] for name in names if name in honest] for names in (SINGLE, ("mean",)))
    yield Claim(
        "Where nobody attacks, median and Krum are less accurate than the mean.",
        every(is_below(row, reference) for row in dear for reference in mean),
        shown([*dear, *mean], "rule"),
    )
