"""This module draws the conclusions of `price_of_robustness` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, is_within, named, selected, shown, with_spread


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
    without_buckets = selected(variances, bucket_size=1)
    medians = named(without_buckets, "rule", "median")
    cheap = named(without_buckets, "rule", "trimmed mean", "geometric median", "mixing, trimmed mean")
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
    largest, smallest = max(options["alphas"]), min(options["alphas"])
    alike, unlike = (selected(losses, alpha=alpha) for alpha in (largest, smallest))
    dear = [named(found, "rule", "median", "trimmed mean", "Krum") for found in (alike, unlike)]
    yield Claim(
        "Median, trimmed mean and Krum lose more accuracy against the mean where clients are unlike than where they "
        "are alike.",
        every(is_below(*pair) for pair in zip(*dear, strict=True)) if smallest < largest else None,
        shown([row for found in dear for row in found], "rule", "alpha"),
    )
    steady = named(unlike, "rule", "geometric median", "centred clipping")
    krum = named(unlike, "rule", "Krum")
    yield Claim(
        "Where clients are unlike, geometric median and centred clipping lose less than half as much as Krum.",
        every(is_below(row, reference, 0.5) for row in steady for reference in krum),
        shown([*steady, *krum], "rule"),
    )
