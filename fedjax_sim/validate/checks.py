"""Checks single arguments.

Comparisons are written `not (low <= x <= high)` so that NaN fails them. Traced values pass: a sweep may vmap over a
hyper-parameter, whose range the caller then checks.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from fedjax_sim.validate.errors import fail, nearest

INT32_MAX = 2**31 - 1
MOST_STEPS = 1 << 24  # local steps of a client in a round: beyond it float32 cannot count them
LARGEST, SMALLEST = (float(x) for x in (np.finfo(np.float32).max, np.finfo(np.float32).tiny))


def _number(name: str, value: Any, rule: str, hint: str) -> bool:
    """Returns True for a concrete value, which must be checked; raises TypeError for a value that is no real number."""
    if isinstance(value, Tracer):
        return False
    if isinstance(value, (np.ndarray, jax.Array)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        fail(name, rule, value, hint, TypeError)
    return True


def in_range(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    hint: str = "",
    wide: bool = False,
) -> None:
    """Refuses all but a real number between `low` and `high` that float32 can hold; with `wide`, float64 (on the host).

    Args:
      name: the argument's name, for the error.
      value: its value.
      low, high: the ends of the range.
      open_low, open_high: exclude that end.
      hint: appended to the error.
      wide: whether the number may be larger than float32 holds.

    Raises: TypeError for a value that is no number, ValueError for a number out of range.

    >>> in_range("share", 1.5, 0, 1)
    Traceback (most recent call last):
        ...
    fedjax_sim.InvalidArgument: share: expected a number in [0, 1], got 1.5.
    """
    rule = f"a number in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    if math.isinf(high):
        rule = f"a finite number {'>' if open_low else '>='} {low:g}" if low > -math.inf else "a finite number"
    if not _number(name, value, rule, hint):
        return
    if (
        not (low <= value <= high)
        or abs(value) == math.inf
        or (open_low and value == low)
        or (open_high and value == high)
    ):
        fail(name, rule, value, hint)
    if abs(value) > LARGEST and not wide:
        fail(name, rule, value, f"float32 holds at most 3.4e+38. {hint}".strip())


def positive(name: str, value: Any, *, hint: str = "", wide: bool = False) -> None:
    """Refuses all but a real number above zero that does not vanish in float32; with `wide`, float64 (on the host)."""
    in_range(name, value, 0, open_low=True, hint=hint, wide=wide)
    if not wide and not isinstance(value, Tracer) and value < SMALLEST:
        fail(name, "a finite number > 0", value, f"float32 takes it for 0. {hint}".strip())


def integer(name: str, value: Any, low: int = 1, high: int = INT32_MAX, *, hint: str = "") -> None:
    """Refuses all but an integer (not a bool) in [low, high]: Python's, or NumPy's int64, so products do not wrap.

    Args:
      name: the argument's name, for the error.
      value: the value to be checked.
      low, high: the range, both ends included.
      hint: what to do about an error.

    >>> integer("num_rounds", 0)
    Traceback (most recent call last):
        ...
    fedjax_sim.InvalidArgument: num_rounds: expected an integer in [1, 2147483647], got 0.
    """
    rule = f"an integer in [{low}, {high}]"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        fail(name, rule, value, hint, TypeError)
    if isinstance(value, np.integer) and value.dtype != np.int64:
        fail(name, rule, value, f"Products of NumPy's {value.dtype} may wrap around: write int({name}).", TypeError)
    if not (low <= int(value) <= high):
        fail(name, rule, value, hint)


def steps(name: str, value: Any) -> None:
    """Refuses all but a number of local steps or epochs of a client in a round: an integer in [1, 2^24]."""
    integer(name, value, 1, MOST_STEPS)


def truth(name: str, value: Any) -> None:
    """Refuses all but True and False, Python's or NumPy's; 1 and 0 are numbers."""
    if not isinstance(value, (bool, np.bool_)):
        fail(name, "True or False", value, error=TypeError)


def as_written(value: float | Fraction) -> Fraction:
    """Returns a number as its decimals read, for products that are rounded to integers.

    In floats 1.001 * 1000 is below 1001, and would be rounded down to 1000.

    Args:
      value: a finite number of Python or NumPy.

    >>> as_written(1.001) * 1000
    Fraction(1001, 1)
    >>> as_written(np.float32(2.007)) * 1000, as_written(np.int16(100)) * 1000
    (Fraction(2007, 1), Fraction(100000, 1))
    """
    # NumPy's integers would wrap in products of fractions.
    if isinstance(value, numbers.Rational):
        return Fraction(int(value.numerator), int(value.denominator))
    # The text of NumPy's float32, too, has the decimals that the number was written with.
    return Fraction(str(value))


def decimal(text: str) -> float:
    """Returns the number in a text that is written in the digits 0 to 9; NaN for any other text.

    Python's float() takes "1_0" for 10, and takes digits of other scripts.

    >>> decimal("-2.5e3"), decimal("1_0")
    (-2500.0, nan)
    """
    return float(text) if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text) else math.nan


def function(name: str, value: Any, arguments: str, *, hint: str = "") -> None:
    """Refuses all but a function that takes these arguments by position.

    Args:
      name: the argument's name, for the error.
      value: its value.
      arguments: the names of the function's arguments, as a text such as "params, key".
      hint: appended to the error.

    Raises: TypeError for a value that cannot be called, or not with these arguments.
    """
    rule = f"a function ({arguments})"
    if not callable(value):
        fail(name, rule, value, hint, TypeError)
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        # Some built-in functions have no signature.
        return
    try:
        signature.bind(*arguments.split(", "))
    except TypeError:
        fail(name, rule, value, f"It takes {signature}. {hint}".strip(), TypeError)


def loss_function(value: Any) -> None:
    """Refuses all but a loss function: (params, examples, key) -> one number per example."""
    hint = "Of a model, make one: models.supervised(model, loss)."
    function("loss_fn", value, "params, examples, key", hint=hint)


def optax_transformation(name: str, value: Any) -> None:
    """Refuses all but an optax transformation: a pair of functions `init` and `update`."""
    if not isinstance(value, optax.GradientTransformation):
        fail(name, "an optax transformation", value, "Call its factory: optax.sgd(0.1), say.", TypeError)


def floating_parameters(params: Any) -> None:
    """Refuses parameters if a leaf holds no floating-point numbers, because no gradient exists for such a leaf.

    Raises: TypeError for a leaf of integers or booleans, which the error names.

    Guarantees: every recipe names the leaf (tests/laws/test_pytrees.py::test_an_integer_leaf_is_named).
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            hint = "Keep constants in the loss function and counters in a client's state, or make it a float."
            rule = "floating-point numbers, by which a loss has a gradient"
            fail(f"params{jax.tree_util.keystr(path)}", rule, str(dtype), hint, TypeError)


def part(name: str, value: Any, kind: type) -> None:
    """Refuses all but a part of this kind, such as a `Sampler`; a factory that was not called is the usual mistake."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        fail(name, f"{article} {kind.__name__}", type(value).__name__, "Call the factory.", TypeError)


def one_of(name: str, value: Any, options: Iterable[Any], *, hint: str = "") -> None:
    """Refuses all but one of a closed set of values; the error names the nearest.

    >>> one_of("form", "meen", ["mean", "median"])
    Traceback (most recent call last):
        ...
    fedjax_sim.InvalidArgument: form: expected one of 'mean', 'median', got 'meen'. Did you mean 'mean'?
    """
    options = list(options)
    # Types are compared too, since 1 == True.
    if not any(value is option or (type(value) is type(option) and value == option) for option in options):
        words = [option for option in options if isinstance(option, str)]
        suggestion = nearest(value, words) if isinstance(value, str) else ""
        fail(name, "one of " + ", ".join(map(repr, options)), value, " ".join(filter(None, (suggestion, hint))))


def sequence(name: str, values: Any, *, least: int = 1) -> None:
    """Refuses all but a list, tuple or array of at least `least` values; the caller checks each value."""
    if not isinstance(values, (list, tuple, np.ndarray)) or (isinstance(values, np.ndarray) and not values.ndim):
        fail(name, "a list of numbers", values, f"Write [{values}] for one alone.", TypeError)
    if len(values) < least:
        fail(name, f"at least {'one number' if least == 1 else f'{least} numbers'}", list(values))


def fits_in_memory(name: str, num_bytes: int, limit: int, *, hint: str = "") -> None:
    """Refuses an allocation of `num_bytes` above `limit` bytes, with a MemoryError that states both."""
    if not (num_bytes <= limit):
        fail(name, f"at most {limit:,} bytes", f"{num_bytes:,} bytes", hint, MemoryError)
