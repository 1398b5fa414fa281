"""This module defines `Claim`, a conclusion that a study draws from its numbers, and may draw wrongly.

`study/NAME/claims.py` yields the claims of a study from its rows. The words of a claim are fixed before the study runs:
only `holds` and `numbers` follow from what was measured. What is true whatever is measured, such as a derivation, is no
claim and stands in `experiments/studies/results/NAME.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Row: TypeAlias = dict[str, Any]


class Claim(NamedTuple):
    """A conclusion of a study.

    Fields:
      words: a sentence that some numbers would refute, without a measured number in it.
      holds: whether what was measured says so, at the ends of the intervals; None if the options leave out what decides
        it.
      numbers: the measured numbers that decide it.

    Guarantees: each claim of each study is refuted by some numbers, none holds where the intervals say nothing, and
    none depends on the order of rows (tests/study/test_claims.py).
    """

    words: str
    holds: bool | None
    numbers: str = ""

    def __str__(self) -> str:
        """Returns the claim as a line of text.

        >>> print(Claim("More bits have a lower floor.", False, "2 bits: 0.1, 4 bits: 0.3"))
        Does not hold here: More bits have a lower floor. (2 bits: 0.1, 4 bits: 0.3)
        """
        says = {True: "Holds", False: "Does not hold here", None: "Not measured here"}[self.holds]
        return f"{says}: {self.words}" + f" ({self.numbers})" * bool(self.numbers)


def selected(rows: Sequence[Row], **conditions: Any) -> list[Row]:
    """Returns the rows that have the given values, in their order.

    >>> selected([{"bits": 2, "measured": 0.5}, {"bits": 4, "measured": 0.1}], bits=4)
    [{'bits': 4, 'measured': 0.1}]
    """
    return [row for row in rows if all(row.get(name) == value for name, value in conditions.items())]


def rising(rows: Sequence[Row], column: str, **conditions: Any) -> list[Row]:
    """Returns the rows that have the given values, sorted by a column; a claim does not depend on the order of rows.

    >>> rising([{"bits": 4, "part": "floor"}, {"bits": 2, "part": "floor"}, {"part": "path"}], "bits", part="floor")
    [{'bits': 2, 'part': 'floor'}, {'bits': 4, 'part': 'floor'}]
    """
    return sorted(selected(rows, **conditions), key=lambda row: row[column])


def named(rows: Sequence[Row], column: str, *names: str) -> list[Row]:
    """Returns the rows with some names, by name; none if a name is missing, for a claim that names it is not decided.

    >>> rows = [{"rule": "Krum"}, {"rule": "mean"}]
    >>> named(rows, "rule", "mean", "Krum"), named(rows, "rule", "mean", "median")
    ([{'rule': 'mean'}, {'rule': 'Krum'}], [])
    """
    found = [selected(rows, **{column: name}) for name in names]
    return [row for of_name in found for row in of_name] if all(found) else []


def is_below(low: Row | float, high: Row | float, factor: float = 1.0) -> bool:
    """Returns whether one number lies below another, at every point of their intervals.

    Args:
      low: a row, or a number that is known.
      high: likewise.
      factor: > 0, multiplies `high`.

    >>> row = {"measured": 2.0, "low": 1.8, "high": 2.2}
    >>> is_below(row, 2.1), is_below(row, 2.5), is_below(row, 5.0, factor=0.5)
    (False, True, True)
    """
    return interval(low)[1] < factor * interval(high)[0]


def is_within(row: Row, low: float, high: float) -> bool:
    """Returns whether a row's whole interval lies in [low, high].

    >>> is_within({"measured": 2.0, "low": 1.8, "high": 2.2}, 1.5, 2.5)
    True
    """
    ends = interval(row)
    return low <= ends[0] and ends[1] <= high


def every(*parts: Iterable[bool]) -> bool | None:
    """Returns whether all tests pass.

    Args:
      *parts: the tests of each part of a sentence.

    Returns: False if a test fails. Otherwise None if a part has no test, where `all` would say that it passes.

    >>> every([True, False]), every([]), every([True], []), every([False], [])
    (False, None, None, False)
    """
    tests = [list(part) for part in parts]
    if not all(map(all, tests)):
        return False
    return True if all(tests) else None


def interval(row: Row | float) -> tuple[float, float]:
    """Returns the ends of a row's interval; a number without an interval is both."""
    if not isinstance(row, Mapping):
        return row, row
    if row["low"] is None:
        return row["measured"], row["measured"]
    return row["low"], row["high"]


def with_spread(row: Row) -> Row:
    """Returns a row of few runs, which has no interval, with two standard deviations of its runs on either side.

    Args:
      row: a row; one that has an interval keeps it.

    >>> row = {"measured": 0.5, "low": None, "high": None, "standard_deviation": 0.1}
    >>> is_below(0.25, with_spread(row)), is_below(0.35, with_spread(row))
    (True, False)
    """
    if row["low"] is not None:
        return row
    spread = 2 * row["standard_deviation"]
    return {**row, "low": row["measured"] - spread, "high": row["measured"] + spread}


def shown(rows: Sequence[Row], *names: str) -> str:
    """Returns measured numbers as text, with the ends of their intervals, behind the values of some columns.

    Args:
      rows: the rows to show.
      *names: the columns that tell them apart.

    >>> shown([{"rule": "Krum", "measured": 5.9, "low": 5.5, "high": 6.25}], "rule")
    'Krum: 5.9 (5.5 … 6.25)'
    """
    conditions = [", ".join(_named(row, name) for name in names) for row in rows]
    return "; ".join(
        f"{text}: {_ends(row)}" if text else _ends(row) for text, row in zip(conditions, rows, strict=True)
    )


def _named(row: Row, name: str) -> str:
    """Returns a condition as text; a number stands behind its column's name."""
    value = row[name]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{name.replace('_', ' ')} {value:g}" if is_number else str(value)


def _ends(row: Row) -> str:
    """Returns a measured number with its interval as text; an interval narrower than the text shows is left out."""
    low, middle, high = (f"{number:.3g}" for number in (interval(row)[0], row["measured"], interval(row)[1]))
    return middle if low == high else f"{middle} ({low} … {high})"
