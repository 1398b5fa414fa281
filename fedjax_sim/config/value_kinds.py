"""Checks a config's values against their kinds, and writes the error message for a wrong value."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from fedjax_sim.text.printable import printable, printable_line


def problem(path: str, rule: str, value: Any, hint: str = "") -> str:
    """Returns an error message, `path: expected RULE, got VALUE. HINT`; a value's text is cut to 120 characters.

    Args:
      path: where the value is in the config.
      rule: the values that are expected.
      value: the value; `Words` are shown without quotes.
      hint: what to do about it, as sentences.

    >>> problem("run.rounds", "an integer", "5", "Leave out the quotes.")
    "run.rounds: expected an integer, got '5'. Leave out the quotes."
    """
    shown = value if isinstance(value, Words) else repr(value)
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    return printable_line(f"{path}: expected {rule}, got {shown}.{' ' + hint if hint else ''}")


class ConfigError(ValueError):
    """Wrong input. Its `problems`, and the lines of its text, are one for each problem."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(map(printable, problems))
        super().__init__("\n".join(self.problems))


class Words(str):
    """A description of a value, which an error message shows without quotes."""


FILE = Annotated[str, Field(description="the path of a file")]
FOLDER = Annotated[str, Field(description="the path of a folder")]
# Tables of constants. What else they must obey is checked by the part that takes them.
SCALE = Annotated[dict[str, list[float]], Field(description="a table {mean = [...], deviation = [...]}")]
COLUMN_FILLS = Annotated[dict[str, float], Field(description="a table with a number for each column")]
COLUMN_VALUES = Annotated[
    dict[str, list[str | int | float]], Field(description="a table with a list of values for each column")
]
FLOAT32_MAX = 2.0**128 - 2.0**104  # the largest float32


def number_kind(low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> Any:
    """Returns the kind of a number in [low, high], without the ends that are open.

    >>> rule(number_kind(0.0, 1.0, open_high=True)), rule(number_kind(0.0, math.inf, open_low=True))
    ('a number in [0, 1)', 'a finite number > 0')
    """
    words = f"a number in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    if math.isinf(high):
        words = f"a finite number {'>' if open_low else '>='} {low:g}" if low > -math.inf else "a finite number"
    above, at_least = (low, None) if open_low else (None, low)
    below, at_most = (high, None) if open_high else (None, high)
    return Annotated[float, Field(description=words, gt=above, ge=at_least, lt=below, le=at_most)]


def integer_kind(low: int, high: int) -> Any:
    """Returns the kind of an integer in [low, high]."""
    return Annotated[int, Field(ge=low, le=high, description=f"an integer in [{low}, {high}]")]


def converted_to_kind(path: str, kind: Any, value: Any, problems: list[str]) -> Any:
    """Returns the value, converted to its kind; for a wrong value None, and an error message is added to the problems.

    Args:
      path: the path of the option, such as "run.rounds".
      kind: a type, a union of types, `list[type]`, a `Literal`, or what `number_kind` and `integer_kind` return.
      value: the value as TOML has it; "none" stands for None.
      problems: error messages so far.

    >>> problems = []
    >>> converted_to_kind("run.rounds", int, True, problems), problems
    (None, ['run.rounds: expected an integer, got True.'])
    """
    if value == "none" and NoneType in get_args(kind):
        return None
    hint = ""
    try:
        value = _adapter(kind).validate_python(value)
    except (ValidationError, OverflowError):
        words = [word for inner in _union(kind) if get_origin(inner) is Literal for word in get_args(inner)]
        if isinstance(value, str) and _is_number(value):
            hint = "Leave out the quotes."
        problems.append(problem(path, rule(kind), value, hint or nearest_word(value, words)))
        return None
    # A double may be too large for the float32 that the round computes with.
    numbers = value if isinstance(value, list) else [value]
    if any(isinstance(number, float) and abs(number) > FLOAT32_MAX for number in numbers):
        problems.append(problem(path, rule(kind), value, "float32 holds at most 3.4e+38."))
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter:
    """Returns pydantic's checker of a kind: strict, so that "5" is no number, and without NaN and infinities."""
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def _union(kind: Any) -> tuple:
    """Returns the members of a union; a kind that is no union is its only member."""
    return get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)


def rule(kind: Any) -> str:
    """Describes the kind for error messages.

    Args:
      kind: a type, `Literal`, a list of either, `Annotated` with a range, or a union of these.

    >>> rule(int | None), rule(list[float]), rule(Literal["drop", "error"])
    ('an integer or "none"', 'a list of finite numbers', 'one of "drop", "error"')
    """
    if len(_union(kind)) > 1:
        return " or ".join(rule(inner) for inner in _union(kind))
    if get_origin(kind) is list:
        entry = get_args(kind)[0]
        if get_origin(entry) is Literal:
            return "a list of " + " and ".join(json.dumps(word) for word in get_args(entry))
        return {int: "a list of integers", float: "a list of finite numbers"}.get(entry, "a list of texts")
    if get_origin(kind) is Literal:
        words = [json.dumps(word) for word in get_args(kind)]
        return words[0] if len(words) == 1 else "one of " + ", ".join(words)
    if get_origin(kind) is Annotated:
        return get_args(kind)[1].description
    words = {int: "an integer", float: "a finite number", str: "text", bool: "true or false", NoneType: '"none"'}
    return words[kind]


def _is_number(text: str) -> bool:
    """Returns whether a text reads as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def nearest_word(word: Any, options: Iterable[str]) -> str:
    """Returns `Did you mean 'x'?` for the most similar option, or an empty string if none is similar."""
    similar = difflib.get_close_matches(str(word), list(options), n=1, cutoff=0.5)
    return f"Did you mean {similar[0]!r}?" if similar else ""
