"""Raises errors for refused arguments, in one format: `name: expected RULE, got VALUE. HINT`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from fedjax_sim.text.printable import printable_line


class InvalidArgument(ValueError):
    """An argument that is refused. Any other error is a bug of the package, or of a function that it was given."""

    __module__ = "fedjax_sim"  # the module that users import it from


class InvalidType(InvalidArgument, TypeError):
    """An argument of another type than is expected."""

    __module__ = "fedjax_sim"


# Built-in class of an error -> the class that is raised.
CLASSES: dict[type[Exception], type[Exception]] = {ValueError: InvalidArgument, TypeError: InvalidType}


def fail(name: str, rule: str, value: Any, hint: str = "", error: type[Exception] = ValueError) -> None:
    """Raises an error with a message `name: expected RULE, got VALUE. HINT`; long values are cut to 120 characters.

    Args:
      name: the argument's name.
      rule: the values that are expected, such as "a number in [0, 1]".
      value: the value that was given.
      hint: what to do about it, as sentences; "" for none.
      error: the kind of the error: ValueError raises `InvalidArgument`, TypeError raises `InvalidType`, and other
        classes are raised themselves.

    >>> fail("rate", "a number", "fast", error=TypeError)
    Traceback (most recent call last):
        ...
    fedjax_sim.InvalidType: rate: expected a number, got 'fast'.
    """
    try:
        shown = repr(value)
    except RecursionError:
        shown = f"a {type(value).__name__} with too many levels"
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    message = f"{name}: expected {rule}, got {shown}.{' ' + hint if hint else ''}"
    raise CLASSES.get(error, error)(printable_line(message))


def nearest(word: str, options: Iterable[str]) -> str:
    """Returns `Did you mean 'x'?` for the most similar option, or an empty string if none is similar.

    >>> nearest("unifrom", ["uniform", "poisson"])
    "Did you mean 'uniform'?"
    """
    similar = difflib.get_close_matches(str(word), list(options), n=1, cutoff=0.5)
    return f"Did you mean {similar[0]!r}?" if similar else ""
