"""Sums over clients that do not depend on order, chunk, padding or device count.

A float is cut into integer digits on an absolute grid: bin t covers the magnitudes [2^(23t-148), 2^(23t-125)), and a
value's digit in a bin is what rounding to that bin's grid, the multiples of 2^(23t-147), leaves; at most 2^22, so that
digits of some hundred letters fit an int32. Digits are integers, so their sums are associative. Only the top bins below
the largest magnitude met at a coordinate are kept; when a larger value arrives, the lowest bins fall out. A kept digit
depends on its value alone, so the kept sums are those that knowing the largest magnitude beforehand would have given
(Demmel and Nguyen, 2015, reproduce float sums the same way; here digits are integers and sums are two int32 words).

A digit is read off the bits of a float: adding 1.5 * 2^23 to a value in units of the grid rounds it to an integer, and
leaves that integer in the low bits. A letter costs seven operations a coordinate and touches three words; the high
words, and carries into them, wait for a few hundred letters.

Error: each value is represented to half a unit of the last kept digit, at most 2^-23 of the largest magnitude met at
that coordinate for float32 (2 bins) and 2^-69 for float64 (4 bins); the sum of the digits is exact, and `total` rounds
it to the nearest float within 2 units in the last place. Below 2^-126 values count as zero.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator
from functools import partial, reduce

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.types import Array, PyTree

__all__ = [
    "MAX_CHUNK",
    "MAX_CLIENTS",
    "MAX_DEVICES",
    "ExactSum",
    "add",
    "combine",
    "differentiable",
    "merge",
    "power_of_two",
    "total",
    "zeros",
]

BITS = 23  # of a digit
LOW_BITS = 20  # of a normal sum's low word
LOW_MASK = (1 << LOW_BITS) - 1
MIN_BIN, MAX_BIN = 1, 11  # every exponent of a float32
POISONED = MAX_BIN + 1  # a value that is not finite, or 2^128 and above, was added: the total is NaN
MAX_CLIENTS = 1 << 26  # before a high word could overflow
MAX_DEVICES = 1 << 10  # before a sum of low words could
MAX_CHUNK = 1 << 16  # letters added at once
PENDING = 480  # letters whose digits a low word can take
UNROLLED = 64  # letters that are added one by one: compilers vectorise that, and not a reduction over rows
_plain: contextvars.ContextVar = contextvars.ContextVar("plain", default=False)
SMALL = 1 << 9  # coordinates of a leaf that shares its sum with others
PLACES = 8  # devices with a place each in a sum of words; with more, words spread over every bin are less to send


@partial(jax.tree_util.register_dataclass, meta_fields=["shape"], data_fields=["top", "low", "base", "high", "pending"])
@dataclasses.dataclass(frozen=True)
class ExactSum:
    """A sum over clients at each coordinate; a kept bin, highest first, holds high * 2^20 + low in units of its grid.

    Words are flat: XLA:CPU vectorises the last axis of what it writes, and that of a leaf may be short.
    """

    top: Array  # [d] int32: every magnitude met at this coordinate is below 2^(23 top - 125)
    low: tuple[Array, ...]  # one per kept bin, [d] int32
    base: Array  # [d] int32: `top` when carries last moved; the high words stand there
    high: tuple[Array, ...]  # [d] int32
    pending: Array  # [] int32 letters since carries last moved
    shape: tuple[int, ...]  # of what is summed


@partial(jax.tree_util.register_dataclass, meta_fields=["spec", "structure"], data_fields=["parts"])
@dataclasses.dataclass(frozen=True)
class ExactSums:
    """The sums of a tree's leaves. Small leaves share one `ExactSum`: the program is shorter, and compiles sooner.

    Guarantees: each leaf has the bits that it has alone (tests/engine/test_exact.py::test_leaves_that_share_a_sum).
    """

    parts: tuple[ExactSum | Array, ...]  # one a group, see `_groups`
    spec: tuple[jax.ShapeDtypeStruct, ...]  # of the leaves
    structure: jax.tree_util.PyTreeDef


def _groups(spec: tuple[jax.ShapeDtypeStruct, ...]) -> list[list[int]]:
    """Places of the leaves that share a sum."""
    together: dict = {}
    for place, x in enumerate(spec):
        shared = math.prod(x.shape) <= SMALL
        together.setdefault(jnp.promote_types(x.dtype, jnp.float32) if shared else place, []).append(place)
    return list(together.values())


def _is_sum(x) -> bool:
    return isinstance(x, ExactSum)


def _type(acc: ExactSum):
    return jnp.float64 if len(acc.low) == 4 else jnp.float32


@contextlib.contextmanager
def differentiable() -> Iterator[None]:
    """Sums over clients are plain float sums inside the block, with derivatives: integers have none.

    They are then rounded as any float sum is, and depend on order. Outside, a derivative through a sum over clients is
    an error: it would be zero. What is traced inside must not have been traced by `jax.jit` outside.

    Guarantees: tests/engine/test_exact.py::test_derivatives.
    """
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


@jax.custom_jvp
def _no_derivative(x: Array) -> Array:
    return x


@_no_derivative.defjvp
def _(primals, tangents):
    hint = "Trace what you differentiate inside `with engine.differentiable():`, anew; or use study.hypergradient."
    validate.fail("derivative", "none through an exact sum over clients", "one", hint, TypeError)


def zeros(spec: PyTree) -> ExactSums:
    """Empty sums for leaves of these shapes; float64 leaves keep four bins, others two."""

    def part(shape, dtype):
        if _plain.get():
            return jnp.zeros(shape, jnp.promote_types(dtype, jnp.float32))
        bins, size = 4 if dtype == jnp.float64 else 2, math.prod(shape)
        words = tuple(jnp.zeros(size, jnp.int32) for _ in range(bins))
        lowest = jnp.full(size, MIN_BIN, jnp.int32)
        return ExactSum(lowest, words, lowest, words, jnp.zeros((), jnp.int32), shape)

    leaves, structure = jax.tree.flatten(spec)
    leaves = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    groups = [[leaves[place] for place in places] for places in _groups(leaves)]
    shapes = [group[0].shape if len(group) == 1 else (sum(math.prod(x.shape) for x in group),) for group in groups]
    parts = tuple(part(tuple(shape), group[0].dtype) for shape, group in zip(shapes, groups, strict=True))
    return ExactSums(parts, leaves, structure)


def power_of_two(exponent: Array, dtype) -> Array:
    """2^exponent, exactly, for normal float32 (float64) results."""
    if dtype == jnp.float64:
        return jax.lax.bitcast_convert_type((exponent.astype(jnp.int64) + 1023) << 52, jnp.float64)
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _moved(words: tuple[Array, ...], shift: Array) -> tuple[Array, ...]:
    """Words of bins seen from `shift` bins higher: the lowest fall out."""
    kept = []
    for bin in range(len(words)):
        word = jnp.zeros_like(words[0])
        for source in range(bin + 1):
            word = jnp.where(shift == bin - source, words[source], word)
        kept.append(word)
    return tuple(kept)


def _normal(acc: ExactSum) -> ExactSum:
    """Carries moved out of the low words."""
    high = _moved(acc.high, acc.top - acc.base)
    high = tuple(h + (low >> LOW_BITS) for h, low in zip(high, acc.low, strict=True))
    low = tuple(low & LOW_MASK for low in acc.low)
    return ExactSum(acc.top, low, acc.top, high, jnp.zeros_like(acc.pending), acc.shape)


def _raised(acc: ExactSum, top: Array) -> ExactSum:
    """A normal sum seen from a higher bin."""
    shift = top - acc.top
    return ExactSum(top, _moved(acc.low, shift), top, _moved(acc.high, shift), acc.pending, acc.shape)


def _bin(magnitude: Array) -> Array:
    """The bin of a magnitude given by its bits; POISONED past the largest."""
    if magnitude.dtype == jnp.int64:
        exponent = jnp.clip((magnitude >> 52) - 896, 1, 255).astype(jnp.int32)
    else:
        exponent = magnitude >> 23
    return ((exponent + 21) * 357) >> 13  # ceil((exponent - 1) / 23); zero is below every bin


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int64 if x.dtype == jnp.float64 else jnp.int32)


def _digits(value: Array, scale: Array, magic: Array, bins: int) -> list[Array]:
    """A letter's digits in the kept bins."""
    leading = (None,) * (value.ndim - 1)
    scale, magic = scale[leading], magic[leading]
    rest, digits = value * scale, []
    for _ in range(bins):
        rounded = rest + magic
        digits.append((_bits(rounded) - _bits(magic)).astype(jnp.int32))
        rest = (rest - (rounded - magic)) * 2.0**BITS
    return digits


def _add(acc: ExactSum | Array, values: Array) -> ExactSum | Array:
    if not _is_sum(acc):
        return acc + values.astype(acc.dtype).sum(0)
    values = _no_derivative(values)
    count, dtype = values.shape[0], _type(acc)
    validate.integer("letters added at once", count, 1, MAX_CHUNK)
    many = count > UNROLLED
    if jax.default_backend() != "cpu":  # where a loop may wait for the host, and reductions over rows are fast
        acc = _normal(acc)
    elif many:
        blocks = jnp.pad(values, [(0, -count % UNROLLED)] + [(0, 0)] * (values.ndim - 1))
        blocks = blocks.reshape(-1, UNROLLED, *values.shape[1:])
        return jax.lax.scan(lambda acc, block: (_add(acc, block), None), acc, blocks)[0]
    else:  # a loop of no or one turn: unlike a condition, it leaves the words where they are
        full = acc.pending + count > PENDING
        acc = jax.lax.while_loop(lambda x: x[0], lambda x: (jnp.zeros_like(x[0]), _normal(x[1])), (full, acc))[1]

    values = values.reshape(count, -1).astype(dtype)
    magnitudes = _bits(values)
    magnitudes &= jnp.iinfo(magnitudes.dtype).max
    peak = magnitudes.max(0) if many else reduce(jnp.maximum, magnitudes)
    top = jnp.maximum(acc.top, _bin(peak))
    magic = jnp.full_like(top, 1.5 * 2.0 ** jnp.finfo(dtype).nmant, dtype)
    magic = tree.pinned(magic, jnp.minimum(top, 0))  # or a compiler cancels (x + magic) - magic
    scale = power_of_two(147 - BITS * top, dtype)
    low, high = _moved(acc.low, top - acc.top), acc.high
    if many:
        values = jnp.pad(values, ((0, -count % PENDING), (0, 0))).reshape(-1, PENDING, values.shape[1])
        digits = [x.sum(1, dtype=jnp.int32) for x in _digits(values, scale, magic, len(low))]
        high = _moved(high, top - acc.base)
        high = tuple(x + (digit >> LOW_BITS).sum(0, dtype=jnp.int32) for x, digit in zip(high, digits, strict=True))
        low = tuple(x + (digit & LOW_MASK).sum(0, dtype=jnp.int32) for x, digit in zip(low, digits, strict=True))
        return _normal(ExactSum(top, low, top, high, acc.pending, acc.shape))
    for value in values:
        digits = _digits(value, scale, magic, len(low))
        low = tuple(x + digit for x, digit in zip(low, digits, strict=True))
    return dataclasses.replace(acc, top=top, low=low, pending=acc.pending + count)


def add(acc: ExactSums, values: PyTree) -> ExactSums:
    """Adds a chunk of letters, leaves [c, ...], c <= MAX_CHUNK.

    Letters are products at most: a sum or a difference that is still to be rounded may be fused into what follows, and
    then rounds otherwise in another program. `tree.settled` rounds it; `engine.fold` hands over settled letters.

    Guarantees: any order, chunking or padding with zeros gives the same bits
    (tests/engine/test_exact.py::test_any_order_and_chunking_gives_the_same_bits); a value that is not finite makes
    the total NaN, never a wrong number (::test_non_finite_values_poison).
    """
    leaves, parts = acc.structure.flatten_up_to(values), []
    for part, places in zip(acc.parts, _groups(acc.spec), strict=True):
        group = [leaves[place] for place in places]
        if len(group) > 1:
            dtype = jnp.result_type(jnp.float32, *group)
            group = [jnp.concatenate([x.reshape(x.shape[0], -1).astype(dtype) for x in group], axis=1)]
        parts.append(_add(part, group[0]))
    return dataclasses.replace(acc, parts=tuple(parts))


def merge(a: PyTree, b: PyTree) -> PyTree:
    """The sum of the union of two disjoint sets of letters; leaves that are no exact sums are added."""

    def leaf(x, y):
        if not _is_sum(x):
            return x + y
        x, y = _normal(x), _normal(y)
        top = jnp.maximum(x.top, y.top)
        words = jax.tree.map(jnp.add, _raised(x, top), _raised(y, top))
        return _normal(dataclasses.replace(words, top=top, base=top))

    return jax.tree.map(leaf, a, b, is_leaf=_is_sum)


def combine(carry: PyTree, axis: str) -> PyTree:
    """`merge` over the devices of a mesh axis (at most 1,024), in one collective: a sum of integers.

    Up to eight devices each have their own place in what is summed, and the parts are merged afterwards; more spread
    their words over all bins. Leaves that are no exact sums are summed as they are.

    Guarantees: one collective, whatever the number of leaves (tests/test_compilation.py::test_one_collective_a_round);
    both ways give the bits of one device (tests/engine/test_exact.py::test_devices_combine_to_the_bits_of_one).
    """
    leaves, structure = jax.tree.flatten(carry, is_leaf=_is_sum)
    leaves = [_normal(x) if _is_sum(x) else x for x in leaves]
    number = jax.lax.axis_size(axis)
    apart = [number <= PLACES and (_is_sum(x) or (x.dtype == jnp.int32 and x.ndim == 0)) for x in leaves]
    words = [_packed(x) if _is_sum(x) else (x,) for x, own in zip(leaves, apart, strict=True) if own]
    sent = [_spread(x) if _is_sum(x) else x for x, own in zip(leaves, apart, strict=True) if not own]
    if words:  # one array: a sum over processes takes a turn for each
        flat = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(words)])
        mine = jnp.arange(number) == jax.lax.axis_index(axis)
        flat, sent = jax.lax.psum((jnp.where(mine[:, None], flat[None], 0), sent), axis)
        words = _unpacked(flat, words)
    else:
        sent = jax.lax.psum(sent, axis)
    words, sent = iter(words), iter(sent)
    merged = []
    for like, own in zip(leaves, apart, strict=True):
        x = next(words) if own else next(sent)
        if _is_sum(like):
            merged.append(_merged(x, number, like.shape) if own else _kept(x, like))
        else:
            merged.append(x[0].sum(0) if own else x)
    return structure.unflatten(merged)


def _packed(acc: ExactSum) -> tuple[Array, ...]:
    """The words of a normal sum, its top in the spare bits of the first."""
    return (acc.low[0] | (acc.top << LOW_BITS), *acc.low[1:], *acc.high)


def _unpacked(flat: Array, like: PyTree) -> PyTree:
    """The devices' words [D, ...] from [D, all of them]."""
    leaves, structure = jax.tree.flatten(like)
    parts, start = [], 0
    for x in leaves:
        parts.append(flat[:, start : start + x.size].reshape(-1, *x.shape))
        start += x.size
    return structure.unflatten(parts)


def _merged(words: tuple[Array, ...], number: int, shape: tuple[int, ...]) -> ExactSum:
    """The sum of the devices' packed words [D, ...]."""

    def part(i: int) -> ExactSum:
        first, *rest = (x[i] for x in words)
        top, bins = first >> LOW_BITS, len(words) // 2
        low = (first & LOW_MASK, *rest[: bins - 1])
        return ExactSum(top, low, top, tuple(rest[bins - 1 :]), jnp.zeros((), jnp.int32), shape)

    return reduce(merge, map(part, range(number)))


def _spread(acc: ExactSum) -> tuple[Array, Array, Array]:
    """How many stand at each top, and the words of every bin from POISONED down, [bins, ...]."""
    bins = len(acc.low)
    tops = jnp.stack([acc.top == top for top in range(POISONED, 0, -1)]).astype(jnp.int32)

    def everywhere(words):
        places = range(POISONED, MIN_BIN - bins, -1)
        return jnp.stack([sum(jnp.where(acc.top - i == bin, w, 0) for i, w in enumerate(words)) for bin in places])

    return tops, everywhere(acc.low), everywhere(acc.high)


def _kept(spread: tuple[Array, Array, Array], like: ExactSum) -> ExactSum:
    """The kept bins of sums over every bin."""
    tops, low, high = spread
    first = jnp.argmax(tops > 0, axis=0)
    top = (POISONED - first).astype(jnp.int32)

    def kept(words):
        return tuple(jnp.take_along_axis(words, (first + i)[None], axis=0)[0] for i in range(len(like.low)))

    return _normal(ExactSum(top, kept(low), top, kept(high), like.pending, like.shape))


def total(acc: ExactSums) -> PyTree:
    """The sums as floats (float64 for float64 leaves, else float32); NaN where a poisoned value was added."""

    def value_of(x: ExactSum | Array) -> Array:
        if not _is_sum(x):
            return x
        x = _normal(x)
        bins, dtype = len(x.low), _type(x)
        digits = [jnp.zeros_like(x.low[0]) for _ in range(bins + 1)]  # base 2^23, lowest first
        for bin in range(bins):
            place = bins - 1 - bin
            digits[place] += ((x.high[bin] & 7) << LOW_BITS) | x.low[bin]
            digits[place + 1] += x.high[bin] >> 3
        for place in range(bins):
            digits[place + 1] += digits[place] >> BITS
            digits[place] &= (1 << BITS) - 1
        value = digits[bins].astype(dtype)
        for place in reversed(range(bins)):
            value = value * 2.0**BITS + digits[place].astype(dtype)
        exponent = BITS * (jnp.minimum(x.top, MAX_BIN) - bins + 1) - 147  # of the last digit; in two steps, each normal
        value = value * power_of_two(exponent >> 1, dtype) * power_of_two(exponent - (exponent >> 1), dtype)
        value = tree.pinned(jnp.where(x.top == POISONED, jnp.nan, value), jnp.minimum(x.top, 0))
        return value.reshape(x.shape)

    leaves: list = [None] * len(acc.spec)
    for part, places in zip(acc.parts, _groups(acc.spec), strict=True):
        flat, start = value_of(part).reshape(-1), 0
        for place in places:
            shape = acc.spec[place].shape
            leaves[place] = flat[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
    return acc.structure.unflatten(leaves)
