"""Raises errors for refused arguments, in one format: `name: expected RULE, got VALUE. HINT`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NoReturn

from fedjax_sim.text.printable import printable_line

# The types whose values a refusal takes along to another process. They are small, and every process can read them.
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes)


class InvalidArgument(ValueError):
    """An argument that is refused. Any other error is a bug of the package, or of a function that it was given.

    Attributes:
      argument: the argument's name, such as "cohort_size" or "transforms[1]".
      value: the value that was found. Some refusals describe it in words, such as "a modular sum".
      rule: the values that are expected, such as "a number in [0, 1]".
      hint: what to do about it, as sentences; "" for none.

    All four are None in an error that was raised with a message alone.

    Guarantees:
      The message is `argument: expected rule, got repr(value). hint`. The text of the value is cut to 120 characters,
      and control characters are escaped (tests/test_refusals.py::test_the_message_says_the_fields).
      The error is a ValueError, and `InvalidType` is a TypeError, too (tests/test_refusals.py::test_classes).
      The error can be pickled whatever the value is. A number, a text, True, False and None stay themselves
      (tests/test_refusals.py::test_another_process_reads_the_fields). Any other value arrives as its text
      (tests/test_refusals.py::test_a_value_that_cannot_travel_arrives_as_its_text).

    >>> try:
    ...     fail("share", "a number in [0, 1]", 1.5, "Percentages are not shares.")
    ... except InvalidArgument as error:
    ...     print(error.argument, error.value, error.rule, error.hint, sep=" | ")
    share | 1.5 | a number in [0, 1] | Percentages are not shares.
    """

    __module__ = "fedjax_sim"  # the module that users import it from

    argument: str | None
    value: Any
    rule: str | None
    hint: str | None

    def __init__(
        self,
        *message: object,
        argument: str | None = None,
        value: Any = None,
        rule: str | None = None,
        hint: str | None = None,
    ):
        super().__init__(*message)
        self.argument, self.value, self.rule, self.hint = argument, value, rule, hint

    def __reduce__(self) -> tuple[type[InvalidArgument], tuple, dict[str, Any]]:
        """Returns the class, the message and the attributes, from which pickle makes the error again."""
        attributes = dict(self.__dict__)
        if type(self.value) not in PLAIN_TYPES:
            # An array can be large, and a function or a traced value cannot be pickled at all.
            attributes["value"] = printable_line(_shown(self.value))
        return type(self), self.args, attributes


class InvalidType(InvalidArgument, TypeError):
    """An argument of another type than is expected. It has the attributes of `InvalidArgument`."""

    __module__ = "fedjax_sim"


# Built-in class of an error -> the class that is raised.
CLASSES: dict[type[Exception], type[InvalidArgument]] = {ValueError: InvalidArgument, TypeError: InvalidType}


def fail(name: str, rule: str, value: Any, hint: str = "", error: type[Exception] = ValueError) -> NoReturn:
    """Raises an error with a message `name: expected RULE, got VALUE. HINT`; long values are cut to 120 characters.

    Args:
      name: the argument's name.
      rule: the values that are expected, such as "a number in [0, 1]".
      value: the value that was given.
      hint: what to do about it, as sentences; "" for none.
      error: the kind of the error: ValueError raises `InvalidArgument`, TypeError raises `InvalidType`, and both keep
        the four values above as attributes. Other classes are raised themselves, with the message alone.

    >>> fail("rate", "a number", "fast", error=TypeError)
    Traceback (most recent call last):
        ...
    fedjax_sim.InvalidType: rate: expected a number, got 'fast'.
    """
    message = printable_line(f"{name}: expected {rule}, got {_shown(value)}.{' ' + hint if hint else ''}")
    kind = CLASSES.get(error, error)
    if issubclass(kind, InvalidArgument):
        raise kind(message, argument=name, value=value, rule=rule, hint=hint)
    raise kind(message)


def nearest(word: str, options: Iterable[str]) -> str:
    """Returns `Did you mean 'x'?` for the most similar option, or an empty string if none is similar.

    >>> nearest("unifrom", ["uniform", "poisson"])
    "Did you mean 'uniform'?"
    """
    similar = difflib.get_close_matches(str(word), list(options), n=1, cutoff=0.5)
    return f"Did you mean {similar[0]!r}?" if similar else ""


def _shown(value: Any) -> str:
    """Returns a value as errors show it: its `repr`, of at most 120 characters."""
    try:
        shown = repr(value)
    except RecursionError:
        shown = f"a {type(value).__name__} with too many levels"
    return shown if len(shown) <= 120 else shown[:117] + "..."
