"""This module draws the conclusions of `leakage` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, is_within, selected, shown

CLOSED = "PSNR, closed form (dB)"
LABELS_RECOVERED = "labels recovered"
AUC = "membership AUC"
ADVANTAGE = "membership advantage"


def leakage_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about batches, noise, compression, and secure sums.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    (yardstick,) = selected(rows, part="yardstick")
    yield from _batches(rows, yardstick)
    yield from _noise(rows, yardstick, options)
    yield from _compression(rows, options)
    yield from _sums(rows, options)


def _batches(rows: Sequence[Row], yardstick: Row) -> Iterator[Claim]:
    """Yields claims about messages without noise, of one example and of several.

    Args:
      rows: the rows of the study.
      yardstick: the PSNR of the mean digit.
    """
    pictures, labels = (
        sorted(selected(rows, part="batch size", quantity=quantity), key=lambda row: row["batch_size"])
        for quantity in (CLOSED, LABELS_RECOVERED)
    )
    one, largest = pictures[0], pictures[-1]
    yield Claim(
        "A batch hides pictures, but not at once: with every batch size the rebuilt ones come nearer to the digits "
        "than the mean digit does.",
        every(is_below(yardstick, row) for row in pictures),
        shown([yardstick, *pictures], "defence"),
    )
    yield Claim(
        "The largest batch leaves less than half of the PSNR of a single example.",
        every([is_below(largest, one, 0.5)]),
        shown([one, largest], "defence"),
    )
    yield Claim(
        "Three quarters of the labels or more are recovered with every batch size.",
        every(is_below(0.75, row) for row in labels),
        shown(labels, "defence"),
    )


def _noise(rows: Sequence[Row], yardstick: Row, options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields claims about clipping and central noise, and about local noise and shares of noise.

    Args:
      rows: the rows of the study.
      yardstick: the PSNR of the mean digit.
      options: the study's options; the first of `epsilons` is that of central noise.
    """
    epsilon = f"{options['epsilons'][0]:g}"
    open_books = [
        row
        for name in (f"clipping to {options['clip_norm']:g}", f"central noise, epsilon {epsilon}: the server")
        for row in selected(rows, defence=name, quantity=CLOSED)
    ]
    yield Claim(
        "Clipping, and noise that the server adds itself, hide nothing from the server: it rebuilds single examples to "
        "59 dB or more.",
        every(is_below(59, row) for row in open_books),
        shown(open_books, "defence"),
    )
    much_noise = [row for row in selected(rows, part="local noise") if row["epsilon"] <= 100]
    pictures = [row for row in much_noise if row["quantity"].startswith("PSNR")]
    yield Claim(
        "With local noise of epsilon 100 or less, rebuilt pictures are further from the digits than the mean digit.",
        every(is_below(row, yardstick) for row in pictures),
        shown([yardstick, *pictures], "defence"),
    )
    members = selected(much_noise, quantity=ADVANTAGE)
    least_noise = max((row["epsilon"] for row in members), default=None)
    yield Claim(
        "Local noise hides members last: the largest epsilon up to 100 leaves a membership advantage above a half.",
        every(is_below(0.5, row) for row in selected(members, epsilon=least_noise)),
        shown(members, "defence"),
    )
    single_shares = selected(rows, defence=f"shares of noise, epsilon {epsilon} of the sum", quantity=ADVANTAGE)
    yield Claim(
        "Shares of noise that suffice for the sum do not hide a single message: the advantage is above a half.",
        every(is_below(0.5, row) for row in single_shares),
        shown(single_shares),
    )


def _compression(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields a claim about every quantiser and every top-k of the study.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    names = [
        *(f"quantisation, {bits} bits" for bits in options["bits"]),
        *(f"top-k, {100 * share:g} %" for share in options["shares"]),
    ]
    found = [
        row
        for name in names
        for quantity in (LABELS_RECOVERED, AUC)
        for row in selected(rows, defence=name, quantity=quantity)
    ]
    yield Claim(
        "Compression is no defence: with every number of bits and every share of the numbers, more than nine tenths of "
        "the labels are recovered, and the membership AUC is above 0.9.",
        every(is_below(0.9, row) for row in found),
        shown(found, "defence", "quantity"),
    )


def _sums(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields claims about a masked message of a secure sum, and about the sum.

    A masked message is uniform, so one guessed label in ten is right, and the AUC is 1/2 in expectation. That of a sum
    lies near it. The limits leave room for chance: with 100 clients, the fewest that the study takes, the standard
    error of a blind AUC is 0.04.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    # The names are those of `defences`.
    masked = "secure sum: a masked message"
    labels = selected(rows, defence=masked, quantity=LABELS_RECOVERED)
    yield Claim(
        "Labels of a masked message are guesses: fewer than a quarter are right.",
        every(is_below(row, 0.25) for row in labels),
        shown(labels),
    )
    names = (masked, f"secure sum: the sum of {options['num_clients']:,}")
    members = [row for name in names for row in selected(rows, defence=name, quantity=AUC)]
    yield Claim(
        "A secure sum hides members: the AUC lies between 0.3 and 0.7, for a masked message and for the sum.",
        every(is_within(row, 0.3, 0.7) for row in members),
        shown(members, "defence"),
    )
