"""Expects a refused argument by the fields of its error, so that tests do not depend on how a sentence is worded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fedjax_sim import InvalidArgument

ANY = object()  # stands for every value

Kind = type[InvalidArgument] | tuple[type[InvalidArgument], ...]


@contextmanager
def refused(
    argument: str, *, value: Any = ANY, rule: str = "", hint: str = "", kind: Kind = InvalidArgument
) -> Iterator[pytest.ExceptionInfo]:
    """Expects that the block refuses an argument.

    Args:
      argument: the argument's whole name, such as "cohort_size" or "transforms[1]".
      value: the value that the refusal shows. It is compared as it is shown, so True is not 1, and 1 is not 1.0.
      rule: a telling word or two of the rule. They tell this refusal from others of the same argument.
      hint: a telling word or two of the hint.
      kind: the error's class, and no subclass of it: InvalidType for a wrong type. Several are possible classes.

    >>> from fedjax_sim import InvalidType, validate
    >>> from tests.refusals import refused
    >>> with refused("num_rounds", value=0, rule="integer"):
    ...     validate.integer("num_rounds", 0)
    >>> with refused("num_rounds", value=0.5, kind=InvalidType):
    ...     validate.integer("num_rounds", 0.5)
    """
    with pytest.raises(kind) as raised:
        yield raised
    error = raised.value
    expected = []
    if raised.type not in (kind if isinstance(kind, tuple) else (kind,)):
        expected.append(f"class {kind}, got {raised.type}")
    if error.argument != argument:
        expected.append(f"argument {argument!r}, got {error.argument!r}")
    if value is not ANY and repr(error.value) != repr(value):
        expected.append(f"value {value!r}, got {error.value!r}")
    if rule not in (error.rule or ""):
        expected.append(f"rule with {rule!r}, got {error.rule!r}")
    if hint not in (error.hint or ""):
        expected.append(f"hint with {hint!r}, got {error.hint!r}")
    if expected:
        pytest.fail(f"another refusal: {error}\n  expected " + "\n  expected ".join(expected))
