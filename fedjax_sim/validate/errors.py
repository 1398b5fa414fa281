"""Refused arguments: their class, and one format for all of them: `name: expected RULE, got VALUE. HINT`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = ["InvalidArgument", "InvalidType", "fail", "nearest"]


class InvalidArgument(ValueError):
    """An argument that is refused; all other errors are bugs of the package, or of a function that it was given."""

    __module__ = "fedjax_sim"  # where users import it from


class InvalidType(InvalidArgument, TypeError):
    """An argument of another type than is expected."""

    __module__ = "fedjax_sim"


CLASSES: dict[type[Exception], type[Exception]] = {ValueError: InvalidArgument, TypeError: InvalidType}


def fail(name: str, rule: str, value: Any, hint: str = "", error: type[Exception] = ValueError) -> None:
    """Raises an error with a message in the format above; long values are cut to 120 characters.

    Args:
      error: `InvalidArgument` for ValueError, `InvalidType` for TypeError; other classes as they are.

    >>> fail("rate", "a number", "fast", error=TypeError)
    Traceback (most recent call last):
        ...
    fedjax_sim.InvalidType: rate: expected a number, got 'fast'.
    """
    shown = repr(value)
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    raise CLASSES.get(error, error)(f"{name}: expected {rule}, got {shown}.{' ' + hint if hint else ''}")


def nearest(word: str, options: Iterable[str]) -> str:
    """`Did you mean 'x'?`, or an empty string."""
    close = difflib.get_close_matches(str(word), list(options), n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else ""
