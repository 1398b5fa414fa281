"""One voice for errors: `name: expected RULE, got VALUE. HINT`.

Checks are written `not (low <= x <= high)` so that NaN fails them. Traced values pass: a sweep may vmap over a
hyper-parameter, whose range is then its caller's to check.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

__all__ = [
    "contraction",
    "fail",
    "fits_in_memory",
    "function",
    "in_range",
    "integer",
    "loss_function",
    "named_arguments",
    "nearest",
    "one_of",
    "optimizer",
    "positive",
    "sequence",
    "steps",
]

P = ParamSpec("P")
R = TypeVar("R")
INT32_MAX = 2**31 - 1
MOST_STEPS = 1 << 24  # of one client in a round: past it float32 cannot count them
LARGEST, SMALLEST = (float(x) for x in (np.finfo(np.float32).max, np.finfo(np.float32).tiny))
PROBE = 2.0**10  # size of a probe's numbers: large, lest a fixed range make an error look worse than it stays


def fail(name: str, rule: str, value: Any, hint: str = "", error: type[Exception] = ValueError) -> None:
    """Raises `error` with the house's message."""
    shown = repr(value)
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    raise error(f"{name}: expected {rule}, got {shown}.{' ' + hint if hint else ''}")


def _number(name: str, value: Any, rule: str, hint: str) -> bool:
    """True if `value` is concrete and must be checked; raises if it is no real number."""
    if isinstance(value, jax.core.Tracer):
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
    """A real number in the interval from `low` to `high`, that float32 holds; with `wide`, float64 (on the host)."""
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
    """A real number above zero that float32 holds as such; with `wide`, float64 (on the host)."""
    in_range(name, value, 0, open_low=True, hint=hint, wide=wide)
    if not wide and not isinstance(value, jax.core.Tracer) and value < SMALLEST:
        fail(name, "a finite number > 0", value, f"float32 takes it for 0. {hint}".strip())


def integer(name: str, value: Any, low: int = 1, high: int = INT32_MAX, *, hint: str = "") -> None:
    """A whole number (not a bool) in [low, high]: Python's, or NumPy's int64, for products of it must not wrap."""
    rule = f"an integer in [{low}, {high}]"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        fail(name, rule, value, hint, TypeError)
    if isinstance(value, np.integer) and not isinstance(value, np.int64):
        fail(name, rule, value, f"Products of NumPy's {value.dtype} may wrap around: write int({name}).", TypeError)
    if not (low <= value <= high):
        fail(name, rule, value, hint)


def steps(name: str, value: Any) -> None:
    """A number of local steps or epochs of a client in a round."""
    integer(name, value, 1, MOST_STEPS)


def function(name: str, value: Any, arguments: str, *, hint: str = "") -> None:
    """Something that can be called with these arguments, by position."""
    rule = f"a function ({arguments})"
    if not callable(value):
        fail(name, rule, value, hint, TypeError)
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(*arguments.split(", "))
    except TypeError:
        fail(name, rule, value, f"It takes {signature}. {hint}".strip(), TypeError)


def named_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with an error for an argument that it does not have which names the nearest that it has.

    >>> @named_arguments
    ... def half(*, of: float): return of / 2
    >>> half(off=1.0)
    Traceback (most recent call last):
        ...
    TypeError: half: expected one of its arguments, got 'off'. Did you mean 'of'?
    """
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        for name in options:
            if name not in known:
                hint = nearest(name, known) or f"They are {', '.join(known)}."
                fail(function.__name__, "one of its arguments", name, hint, TypeError)
        return function(*args, **options)

    return checked


def loss_function(value: Any) -> None:
    """A loss of a model: (params, examples, key) -> one number per example."""
    hint = "Of a model, make one: models.supervised(model, loss)."
    function("loss_fn", value, "params, examples, key", hint=hint)


def optimizer(name: str, value: Any) -> None:
    """An optax transformation: a pair of functions `init` and `update`."""
    if not isinstance(value, optax.GradientTransformation):
        fail(name, "an optax transformation", value, "Call its factory: optax.sgd(0.1), say.", TypeError)


def nearest(word: str, options: Iterable[str]) -> str:
    """`Did you mean 'x'?`, or an empty string."""
    close = difflib.get_close_matches(str(word), list(options), n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else ""


def one_of(name: str, value: Any, options: Iterable[Any], *, hint: str = "") -> None:
    """One of a closed set of values; the error names the nearest."""
    options = list(options)
    if not any(value is option or (type(value) is type(option) and value == option) for option in options):
        words = [option for option in options if isinstance(option, str)]
        suggestion = nearest(value, words) if isinstance(value, str) else ""
        fail(name, "one of " + ", ".join(map(repr, options)), value, " ".join(filter(None, (suggestion, hint))))


def sequence(name: str, values: Any, *, least: int = 1) -> None:
    """A list (or tuple, or array) of so many values at least; what they are is checked one by one."""
    if not isinstance(values, (list, tuple, np.ndarray)):
        fail(name, "a list of numbers", values, f"Write [{values}] for one alone.", TypeError)
    if len(values) < least:
        fail(name, f"at least {'one number' if least == 1 else f'{least} numbers'}", list(values))


def fits_in_memory(name: str, num_bytes: int, limit: int, *, hint: str = "") -> None:
    """Refuses an allocation of `num_bytes` above `limit` bytes, with both numbers."""
    if not (num_bytes <= limit):
        fail(name, f"at most {limit:,} bytes", f"{num_bytes:,} bytes", hint, MemoryError)


def contraction(name: str, send: Callable, spec: Any, *, hint: str = "") -> None:
    """A compressor Q with E |Q(x) - x|^2 < |x|^2, tried on equal entries and on normal ones; a traced one passes.

    Args:
      send: (key, x) -> Q(x), of pytrees like `spec`.
    """
    if not any(x.size for x in jax.tree.leaves(spec)):
        return
    rng, draws = np.random.default_rng(0), 8

    def probes(x):  # one beside the other
        return (PROBE * np.stack([np.ones(x.shape), rng.standard_normal(x.shape)])).astype(x.dtype)

    def inner(a, b):
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return sum((y.astype(jnp.float32) * x.astype(jnp.float32)).sum() for y, x in pairs)

    def excess(i, both):  # of |Q - x|^2 over |x|^2: |Q|^2 - 2 <Q, x>, which a small Q does not lose to rounding
        x = jax.tree.map(lambda probe: probe[i % 2], both)
        sent = send(jax.random.fold_in(jax.random.key(0), i), x)
        return inner(sent, jax.tree.map(lambda y, x: y - 2 * x.astype(y.dtype), sent, x)) / inner(x, x)

    with jax.ensure_compile_time_eval():
        tried = jax.jit(lambda both: jax.lax.map(lambda i: excess(i, both), jnp.arange(2 * draws)))
        more = tried(jax.tree.map(probes, spec))
    if not isinstance(more, jax.core.Tracer) and not (more := np.asarray(more).reshape(draws, 2).mean(0).max()) < 0:
        fail(name, "a compressor with E |Q(x) - x|^2 < |x|^2", f"{1 + more:g} |x|^2", hint)
