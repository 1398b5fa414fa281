"""Barriers against the compiler: a value is rounded here, or computed once, in every program that holds it.

A round is compiled anew for each number of devices, and XLA decides by what stands around a value how it is rounded and
how often it is computed. Parts of a round need nothing from here: they run inside of `engine.reproducible`, which
rounds products, quotients and elementary functions where they stand, and gives `jax.lax.optimization_barrier` its
effect. `engine.fold` computes messages once before they are summed. In the engine three kinds of values need a barrier:

1. A product, or a float that was cast to a narrower type, which code then adds to something. Fused into one
   multiply-add, the product is not rounded: `rounded_here`. Where `engine.reproducible` traces the code, this is needed
   only if fast arithmetic needs it too: for a scale that is applied twice, or x + magic - magic.
2. A value that several others read: an update, its norm and the update scaled by that norm; random draws; an order of
   examples. XLA:CPU computes it anew in the fusion of each reader, and may round it otherwise there: `computed_once`,
   which is a loop that never turns. A loop costs more than a few operations on numbers: not for each coordinate.
3. A float that is kept or sent, and may be a zero of either sign, since compilers turn the sign of x + 0 or of a sum of
   products: `unsigned_zeros`.

XLA:CPU drops `jax.lax.optimization_barrier` before it fuses. So the first two are made of a hidden zero instead: a
number that is 0 at run time, which the compiler cannot know. It is read off a `source`: any arrays that come from
outside of the program, or are computed from such. A constant, a loop's counter or an empty array makes no barrier.
Under `vmap` choose a source that all clients share (the parameters), else a key: a batched zero batches the loop. Where
one source serves many barriers, make its `hidden_zero` once and pass that.

Not covered: products of matrices, convolutions and cumulative sums, which are the compiler's; complex numbers and
floats of 8 bits. A derivative passes as if there were no barrier.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.engine.platform import target
from fedjax_sim.types import Array, PyTree

__all__ = ["HiddenZero", "computed_once", "hidden_zero", "rounded_here", "rounding_here", "unsigned_zeros"]


class HiddenZero(NamedTuple):
    """A zero that the compiler does not know to be one."""

    value: Array  # int32, [] or as broadcasts to what it guards; 0 at run time


def hidden_zero(source: PyTree | HiddenZero) -> HiddenZero:
    """A zero that the compiler does not know, from the first numbers of the source's first three leaves.

    With n their bits, one over the other, bits 0 and 2 of n^2 are never both set, for an odd square is 1 modulo 8. No
    compiler is known to see that, while each sees that the least of 0 and a number without sign is 0. It does see it of
    an n that it knows, such as a loop's counter: one leaf at least must come from outside of the program.

    Args:
      source: arrays or keys; a `HiddenZero` is returned as it is.

    Guarantees: 0 for every value of every dtype (tests/engine/arithmetic/test_barrier.py::test_hidden_zero_is_zero),
    and of keys (::test_a_source_may_be_a_key); products are rounded before they are added
    (tests/engine/arithmetic/test_rewriter.py::test_products_are_not_fused).
    """
    if isinstance(source, HiddenZero):
        return source
    leaves = [x for x in jax.tree.leaves(source) if x.size][:3]
    return HiddenZero(_zero([jax.random.key_data(x) if _is_key(x) else x for x in leaves]))


@functools.partial(jax.jit, inline=True)  # traced once for all rounds of these shapes
def _zero(leaves: list[Array]) -> Array:
    bits = jnp.zeros((), jnp.uint32)
    for x in leaves:
        first, unsigned = x.reshape(-1)[0], jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        first = first if x.dtype == bool else jax.lax.bitcast_convert_type(first, unsigned)
        bits ^= first.astype(jnp.uint32)
    square = bits * bits
    return ((square >> 2) & square & 1).astype(jnp.int32)


def rounded_here(values: PyTree, source: PyTree | HiddenZero) -> PyTree:
    """The same values, rounded here and nowhere else.

    Compilers fuse a product into the addition that follows, or turn a division into a product, and whether they do
    depends on the rest of the program: on the number of devices, for one. So -0.0 is added to each float: a product
    that is fused into that addition is rounded all the same. Floats of 16 bits, whose sums are taken, and may be kept,
    in more, pass through their bits instead. Integers stay as they are.

    Args:
      source: of the hidden zero that -0.0 is made of, or that zero.

    Guarantees: products are not fused (tests/engine/arithmetic/test_rewriter.py::test_products_are_not_fused);
    every bit stays (tests/engine/arithmetic/test_barrier.py::test_rounded_here_keeps_every_bit).
    """
    return rounding_here(source)(values)


def rounding_here(source: PyTree | HiddenZero) -> Callable[[PyTree], PyTree]:
    """`rounded_here` with this source, for many values: what it adds to them is made once."""
    zero = hidden_zero(source).value

    @functools.cache
    def minus_zero(dtype):
        bits = {4: jnp.int32, 8: jnp.int64}[dtype.itemsize]
        return jax.lax.bitcast_convert_type(zero.astype(bits) ^ jnp.iinfo(bits).min, dtype)

    @functools.cache
    def minus_zeros(dtype, shape):
        return jnp.broadcast_to(minus_zero(dtype), shape)

    def leaf(x):
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 1:
            return x  # floats of 8 bits are stored, and computed with as wider ones
        if x.dtype.itemsize == 2:
            return _through_bits(x, zero)
        return jax.lax.add(x, minus_zeros(x.dtype, x.shape))

    return lambda values: jax.tree.map(leaf, values)


@jax.custom_jvp
def _through_bits(x: Array, zero: Array) -> Array:
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.int16) ^ zero.astype(jnp.int16), x.dtype)


@_through_bits.defjvp
def _(primals, tangents):
    return _through_bits(*primals), tangents[0]  # bits have no derivative, the values have


def computed_once(values: PyTree, source: PyTree | HiddenZero) -> PyTree:
    """The same values, computed here once: what uses them neither recomputes them nor changes their rounding.

    XLA:CPU fuses nothing through a loop, even one that never turns. On other backends a loop would synchronise with the
    host, so the values are `rounded_here` instead.

    Args:
      values: arrays of any dtype, keys too.
      source: of the hidden zero that ends the loop, or that zero: a scalar, which `vmap` should not batch.

    Guarantees: every bit stays, and the compiled program has the loop
    (tests/engine/arithmetic/test_barrier.py::test_computed_once_keeps_every_bit_and_its_loop).
    """
    return _computed_once(values, hidden_zero(source).value)


@jax.custom_jvp
def _computed_once(values: PyTree, zero: Array) -> PyTree:
    if target() != "cpu":
        return rounded_here(values, HiddenZero(zero))

    def other(x):
        if _is_key(x):
            return x
        return ~x if x.dtype == bool else -x

    def never(carry):
        turns, values = carry
        return turns + 1, jax.tree.map(other, values)

    return jax.lax.while_loop(lambda carry: carry[0] < zero, never, (jnp.zeros((), jnp.int32), values))[1]


@_computed_once.defjvp
def _(primals, tangents):
    return _computed_once(*primals), tangents[0]


def unsigned_zeros(values: PyTree) -> PyTree:
    """The same numbers, each zero without its sign, which a compiler may turn: of x + 0, or of a sum of products.

    >>> import jax.numpy as jnp
    >>> unsigned_zeros(jnp.array([-0.0, 1.0])).tolist()
    [0.0, 1.0]
    """

    def leaf(x):
        x = jnp.asarray(x)
        return jnp.where(x == 0, jnp.zeros_like(x), x) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(leaf, values)


def _is_key(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
