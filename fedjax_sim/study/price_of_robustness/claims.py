"""This module draws the conclusions of `price_of_robustness` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, is_within, selected, shown, with_spread


def price_of_robustness_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about variances on normal messages, and about unlike clients of the digits.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    yield from _variances(rows, options["num_messages"])
    yield from _digits(rows, options)


def _variances(rows: Sequence[Row], num_messages: int) -> Iterator[Claim]:
    """Yields claims about normal messages, where the price is variance.

    Args:
      rows: the rows of the study.
      num_messages: m.
    """
    variances = selected(rows, part="normal messages")
    by_rule = {row["rule"]: row for row in selected(variances, bucket_size=1)}
    medians, cheap = (
        [by_rule[name] for name in names if name in by_rule]
        for names in (("median",), ("trimmed mean", "geometric median", "mixing, trimmed mean"))
    )
    yield Claim(
        "The median has more than one and a half times the variance of the mean.",
        every(is_below(1.5, row) for row in medians),
        shown(medians, "rule"),
    )
    yield Claim(
        "Trimmed mean, geometric median and mixing have less than 1.1 times the variance of the mean.",
        every(is_below(row, 1.1) for row in cheap),
        shown(cheap, "rule"),
    )
    krum = selected(variances, rule="Krum")
    yield Claim(
        "Krum has at least half the variance of a single message, or of the mean of a single bucket, and at most the "
        "whole.",
        every(
            is_within(row, 0.5 * num_messages / row["bucket_size"], num_messages / row["bucket_size"]) for row in krum
        ),
        shown(krum, "bucket_size"),
    )


def _digits(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields claims about digits, where the price is accuracy.

    Args:
      rows: the rows of the study. Runs are few, so differences are larger than the spread of the runs.
      options: the study's options; small alphas give unlike clients.
    """
    losses = [with_spread(row) for row in
              selected(rows, part="digits", quantity="loss against the mean", bucket_size=1)]  # fmt: skip
    alike, unlike = (
        {row["rule"]: row for row in selected(losses, alpha=alpha)}
        for alpha in (max(options["alphas"]), min(options["alphas"]))
    )
    dear = [name for name in ("median", "trimmed mean", "Krum") if name in alike and name in unlike]
    yield Claim(
        "Median, trimmed mean and Krum lose more accuracy against the mean where clients are unlike than where they "
        "are alike.",
        every(is_below(alike[name], unlike[name]) for name in dear),
        shown([by_rule[name] for name in dear for by_rule in (alike, unlike)], "rule", "alpha"),
    )
    steady = [unlike[name] for name in ("geometric median", "centred clipping") if name in unlike]
    krum = [unlike[name] for name in ("Krum",) if name in unlike]
    yield Claim(
        "Where clients are unlike, geometric median and centred clipping lose less than half as much as Krum.",
        every(is_below(row, reference, 0.5) for row in steady for reference in krum),
        shown([*steady, *krum], "rule"),
    )
