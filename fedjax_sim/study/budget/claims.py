"""This module draws the conclusions of `budget` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.study.budget.sensors import UNITS
from fedjax_sim.study.claims import Claim, Row, every, is_below, selected, shown

CHOICE = ("cohort_size", "deadline", "bits")  # the columns of a choice


def budget_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about the predicted choices, and about cohorts, deadlines and bits.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    errors = {unit: selected(rows, part=unit, quantity="squared distance") for unit in UNITS}
    for unit in UNITS:
        (regret,) = selected(rows, part=unit, quantity="regret")
        (predicted,) = selected(errors[unit], **{name: regret[name] for name in CHOICE})
        others = sorted((row for row in errors[unit] if row is not predicted), key=lambda row: row["measured"])
        yield Claim(
            f"Within {options[unit]:,.5g} {unit}, the predicted choice's error is at most a quarter above that of any "
            "other choice.",
            every(is_below(predicted, row, 1.25) for row in others),
            f"predicted choice: {_shown([predicted])}; best of the others: {_shown(others[:1])}",
        )
    yield _cohorts(errors, options["cohort_sizes"])
    yield from _deadlines(errors, options["cohort_sizes"])
    yield _bits(errors["bytes"], max(options["cohort_sizes"]))


def _cohorts(errors: Mapping[str, Sequence[Row]], cohort_sizes: Sequence[int]) -> Claim:
    """Returns the claim that few clients reach a high floor, and many do not reach a low one.

    Args:
      errors: the rows of squared distances, by the unit of the budget.
      cohort_sizes: m, in any order.
    """
    ends = min(cohort_sizes), max(cohort_sizes)
    all_best, tests = [], []
    for unit in ("bytes", "joules"):
        between = [row for row in errors[unit] if row["cohort_size"] not in ends]
        best = sorted(between, key=lambda row: row["measured"])[:1]  # of no cohorts between there is none
        tests.append([is_below(middle, row) for middle in best for row in errors[unit] if row["cohort_size"] in ends])
        all_best += best
    return Claim(
        "Bytes and energy are best spent on a cohort between the smallest and the largest.",
        every(*tests),
        _shown(all_best),
    )


def _deadlines(errors: Mapping[str, Sequence[Row]], cohort_sizes: Sequence[int]) -> Iterator[Claim]:
    """Yields claims about where a deadline helps, and where the bias of late clients costs more than it saves.

    Args:
      errors: the rows of squared distances, by the unit of the budget.
      cohort_sizes: m, in any order.
    """
    pairs = {}
    for unit, cohort_size in (("seconds", max(cohort_sizes)), ("bytes", min(cohort_sizes))):
        found = selected(errors[unit], cohort_size=cohort_size)
        with_deadline = {row["bits"]: row for row in found if row["deadline"] is not None}
        without = {row["bits"]: row for row in found if row["deadline"] is None}
        pairs[unit] = [(without[bits], with_deadline[bits]) for bits in without if bits in with_deadline]
    yield Claim(
        "Within the seconds, a deadline more than halves the error of the largest cohort, which makes few rounds.",
        every(is_below(late, patient, 0.5) for patient, late in pairs["seconds"]),
        _shown([row for pair in pairs["seconds"] for row in pair]),
    )
    yield Claim(
        "Within the bytes, a deadline raises the error of the smallest cohort, which makes the most rounds.",
        every(is_below(patient, late) for patient, late in pairs["bytes"]),
        _shown([row for pair in pairs["bytes"] for row in pair]),
    )


def _bits(errors: Sequence[Row], cohort_size: int) -> Claim:
    """Returns the claim that fewer bits buy rounds, where rounds are few."""
    found = sorted(selected(errors, cohort_size=cohort_size), key=lambda row: row["bits"])
    fewest, most = (selected(found, bits=found[end]["bits"]) if found else [] for end in (0, -1))
    pairs = [(few, many) for few in fewest for many in most if few["deadline"] == many["deadline"] and few is not many]
    return Claim(
        "Within the bytes, the fewest bits leave the largest cohort less than half of the error of the most bits.",
        every(is_below(few, many, 0.5) for few, many in pairs),
        _shown([row for pair in pairs for row in pair]),
    )


def _shown(rows: Sequence[Row]) -> str:
    """Returns measured errors as text, behind what was chosen."""
    named = [row | {"deadline": "no deadline" if row["deadline"] is None else f"{row['deadline']:g} s"} for row in rows]
    return shown(named, *CHOICE, "rounds")
