"""The kinds of values in a config: their check, and the error message for a wrong one."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

__all__ = [
    "FILE",
    "FOLDER",
    "Words",
    "converted_to_kind",
    "integer_kind",
    "nearest_word",
    "number_kind",
    "problem",
    "rule",
]


def problem(path: str, rule: str, value: Any, hint: str = "") -> str:
    """An error message: `path: expected RULE, got VALUE. HINT`; a value's text is cut to 120 characters.

    >>> problem("run.rounds", "an integer", "5", "Leave out the quotes.")
    "run.rounds: expected an integer, got '5'. Leave out the quotes."
    """
    shown = value if isinstance(value, Words) else repr(value)
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    return f"{path}: expected {rule}, got {shown}.{' ' + hint if hint else ''}"


class Words(str):
    """A description of a value, which an error message shows without quotes."""


FILE = Annotated[str, Field(description="the path of a file")]
FOLDER = Annotated[str, Field(description="the path of a folder")]
LARGEST = 2.0**128 - 2.0**104  # the largest float32


def number_kind(low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> Any:
    """The kind of a number in [low, high], without the ends that are open.

    >>> rule(number_kind(0.0, 1.0, open_high=True)), rule(number_kind(0.0, math.inf, open_low=True))
    ('a number in [0, 1)', 'a finite number > 0')
    """
    words = f"a number in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    if math.isinf(high):
        words = f"a finite number {'>' if open_low else '>='} {low:g}" if low > -math.inf else "a finite number"
    bounds = {"gt" if open_low else "ge": low, "lt" if open_high else "le": high}
    return Annotated[float, Field(description=words, **bounds)]


def integer_kind(low: int, high: int) -> Any:
    """The kind of an integer in [low, high]."""
    return Annotated[int, Field(ge=low, le=high, description=f"an integer in [{low}, {high}]")]


def converted_to_kind(path: str, kind: Any, value: Any, problems: list[str]) -> Any:
    """The value, converted to its kind; for a wrong one None, and an error message is added to the problems.

    Args:
      path: of the option, such as "run.rounds".
      kind: a type, a union of types, `list[type]`, a `Literal`, or what `number_kind` and `integer_kind` return.
      value: as TOML has it; "none" stands for None.
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
        options = [word for kind in _union(kind) if get_origin(kind) is Literal for word in get_args(kind)]
        if isinstance(value, str) and _number(value):
            hint = "Leave out the quotes."
        problems.append(problem(path, rule(kind), value, hint or nearest_word(value, options)))
        return None
    if any(isinstance(x, float) and abs(x) > LARGEST for x in (value if isinstance(value, list) else [value])):
        problems.append(problem(path, rule(kind), value, "float32 holds at most 3.4e+38."))
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def _union(kind: Any) -> tuple:
    return get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)


def rule(kind: Any) -> str:
    """A description of the kind for error messages.

    >>> rule(int | None), rule(list[float]), rule(Literal["drop", "error"])
    ('an integer or "none"', 'a list of finite numbers', 'one of "drop", "error"')
    """
    if len(_union(kind)) > 1:
        return " or ".join(rule(inner) for inner in _union(kind))
    if get_origin(kind) is list:
        return {int: "a list of integers", float: "a list of finite numbers"}.get(get_args(kind)[0], "a list of texts")
    if get_origin(kind) is Literal:
        words = [json.dumps(word) for word in get_args(kind)]
        return words[0] if len(words) == 1 else "one of " + ", ".join(words)
    if hasattr(kind, "__metadata__"):
        return kind.__metadata__[0].description
    words = {int: "an integer", float: "a finite number", str: "text", bool: "true or false", NoneType: '"none"'}
    return words[kind]


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def nearest_word(word: Any, options: Iterable[str]) -> str:
    """`Did you mean 'x'?`, or an empty string."""
    close = difflib.get_close_matches(str(word), list(options), n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else ""
