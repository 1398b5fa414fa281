"""This module writes the reading of `price_of_robustness`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim.study.findings import Comparison, comparisons_of


def price_reading(found: Sequence[Comparison], options: dict[str, Any]) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    for size in options["bucket_sizes"]:
        variances = comparisons_of(found, "normal messages", bucket_size=size)
        numbers = ", ".join(f"{variance.conditions['rule']} {variance.measured:.3g}" for variance in variances)
        buckets = "" if size == 1 else f" of the means of buckets of {size}"
        yield f"Variance{buckets} over that of the mean, {options['num_messages']} normal messages: {numbers}."
    if not options["num_clients"]:
        return
    for alpha in options["alphas"]:
        losses = []
        for unbucketed in comparisons_of(found, "digits", "loss against the mean", alpha=alpha, bucket_size=1):
            name = unbucketed.conditions["rule"]
            # One comparison, or none for the mean.
            bucketed = comparisons_of(found, "digits", "loss against the mean", alpha=alpha, rule=name,
                                      bucket_size=options["digits_bucket"])  # fmt: skip
            losses += [
                f"{name} {100 * unbucketed.measured:.1f} ({100 * comparison.measured:.1f})" for comparison in bucketed
            ]
        yield (
            f"Digits, alpha = {alpha:g}, nobody attacks: points of test accuracy lost against the mean, and in "
            f"brackets with buckets of {options['digits_bucket']}: {'; '.join(losses)}."
        )
    yield (
        "On normal messages the price is variance, which more clients pay. Where clients are unlike it is a bias: "
        "rules that take few messages, or their middle, leave out who has rare labels, and more rounds do not bring "
        "that back. Buckets make messages alike, and an attacker then spoils a whole bucket: the rule must withstand "
        "as many attackers among fewer messages."
    )
