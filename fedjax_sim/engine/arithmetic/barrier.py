"""Barriers against the compiler: a value is rounded here, or computed once, in every program that contains it.

A round is compiled anew for each number of devices. XLA decides by the operations around a value how the value is
rounded and how often it is computed. So the last bits could change with the number of devices.

Parts of a round need nothing from this module. They run inside of `engine.reproducible`, which rounds products,
quotients and elementary functions where they stand, and gives `jax.lax.optimization_barrier` its effect. `engine.fold`
computes messages once before they are summed. In the engine itself three kinds of values need a barrier:

1. A product, or a float that was cast to a narrower type, to which code then adds something. Fused into one
   multiply-add, the product would not be rounded. Such values are `rounded_here`. Code that `engine.reproducible`
   traces needs this only if fast arithmetic needs it too. Examples are a scale that is applied twice, whose square
   would underflow; a cast to 16 bits and back, which a compiler may leave out; and x + magic - magic.
2. A value with several readers: an update, which is read by its norm and by the update scaled with that norm; random
   draws; an order of examples. XLA:CPU computes such a value anew in the fusion of each reader, and may round it
   differently there. `computed_once` prevents this with a loop that never turns. A loop costs more than a few
   operations on numbers, so it is too expensive for each coordinate.
3. A float that is kept or sent, and may be a zero of either sign. Compilers turn the sign of x + 0 or of a sum of
   products, so the sign of a zero has no meaning: `unsigned_zeros`.

XLA:CPU drops `jax.lax.optimization_barrier` before it fuses. So the first two barriers are made of a hidden zero
instead: a number that is 0 at run time, which the compiler cannot know. It is made from a `source`: any arrays that
come from outside of the program, or are computed from such arrays. A constant, a loop's counter or an empty array makes
no barrier, because compilers know everything about it. Under `vmap`, choose a source that all clients share (the
parameters), else a key: a batched zero batches the loop. If one source serves many barriers, make its `hidden_zero`
once and pass that.

Not covered are matrix products, convolutions and cumulative sums, which are left to the compiler; complex numbers; and
floats of 8 bits. A derivative is that of the same program without the barrier.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from fedjax_sim.engine.jaxpr import jaxpr_and_constants
from fedjax_sim.engine.platform import target
from fedjax_sim.types import Array, PyTree


class HiddenZero(NamedTuple):
    """A number that is 0 at run time, and that the compiler cannot know to be 0."""

    value: Array  # int32, []; or of a shape that broadcasts to the values that it guards


def hidden_zero(source: PyTree | HiddenZero) -> HiddenZero:
    """Returns a zero that the compiler cannot know, made from the first numbers of the source's first three leaves.

    Let n be the exclusive or of the bits of these numbers. Bits 0 and 2 of n^2 are never both set, because an odd
    square is 1 modulo 8. No compiler is known to see that, while each of them sees that the minimum of 0 and an
    unsigned number is 0. A compiler does see it for an n that it knows, such as a loop's counter. At least one leaf
    must therefore come from outside of the program.

    Args:
      source: arrays or keys; a `HiddenZero` is returned as it is.

    Guarantees:
      The value is 0 for every value of every dtype
      (tests/engine/arithmetic/test_barrier.py::test_hidden_zero_is_zero), and for keys (::test_a_source_may_be_a_key).
      Products are rounded before they are added
      (tests/engine/arithmetic/test_rewriter.py::test_products_are_not_fused).

    >>> hidden_zero({"w": jnp.array([0.3, 0.1])}).value.item()
    0
    """
    if isinstance(source, HiddenZero):
        return source
    leaves = [x for x in jax.tree.leaves(source) if x.size][:3]
    return HiddenZero(_zero([jax.random.key_data(x) if _is_key(x) else x for x in leaves]))


@functools.partial(jax.jit, inline=True)  # traced once for all rounds of these shapes
def _zero(leaves: list[Array]) -> Array:
    """Returns the logical and of bits 0 and 2 of n^2, which is always 0; see `hidden_zero`."""
    bits = jnp.zeros((), jnp.uint32)
    for x in leaves:
        first = x.reshape(-1)[0]
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        first = first if x.dtype == bool else jax.lax.bitcast_convert_type(first, unsigned)
        bits ^= first.astype(jnp.uint32)
    # An odd square is 1 modulo 8, so of a square's bits 0 and 2 one is 0. The product may wrap: it is modulo 2^32.
    square = bits * bits
    return ((square >> 2) & square & 1).astype(jnp.int32)


def rounded_here(values: PyTree, source: PyTree | HiddenZero) -> PyTree:
    """Returns the same values, rounded at this point of the program in every program.

    Compilers fuse a product into the addition that follows, or turn a division into a product. Whether they do depends
    on the rest of the program, and so on the number of devices. Therefore -0.0 is added to each float: a product that
    is fused into that addition is rounded all the same. Floats of 16 bits may be added, and kept, in a wider type, so
    they pass through their bits instead. Integers stay as they are.

    Args:
      values: pytree of arrays of any dtype.
      source: arrays to make the hidden zero from, or that zero. The added -0.0 is made from it, so that the compiler
        cannot drop the addition.

    Guarantees:
      Products are not fused (tests/engine/arithmetic/test_rewriter.py::test_products_are_not_fused).
      Every bit stays (tests/engine/arithmetic/test_barrier.py::test_rounded_here_keeps_every_bit).
    """
    return rounding_here(source)(values)


def rounding_here(source: PyTree | HiddenZero) -> Callable[[PyTree], PyTree]:
    """Returns `rounded_here` with this source, for many values: the -0.0 that it adds to them is made once.

    Args:
      source: as in `rounded_here`.
    """
    zero = hidden_zero(source).value

    @functools.cache
    def minus_zero(dtype):
        # The hidden zero, with the sign bit set, read as a float.
        bits = {4: jnp.int32, 8: jnp.int64}[dtype.itemsize]
        return jax.lax.bitcast_convert_type(zero.astype(bits) ^ jnp.iinfo(bits).min, dtype)

    @functools.cache
    def minus_zeros(dtype, shape):
        return jnp.broadcast_to(minus_zero(dtype), shape)

    def rounded_leaf(x):
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 1:
            return x  # floats of 8 bits are stored, and computed with as wider ones
        if x.dtype.itemsize == 2:
            return _through_bits(x, zero)
        # Wider floats do not pass through their bits: XLA then fused differently on one device and on two.
        return jax.lax.add(x, minus_zeros(x.dtype, x.shape))

    return lambda values: jax.tree.map(rounded_leaf, values)


@jax.custom_jvp
def _through_bits(x: Array, zero: Array) -> Array:
    """Returns 16-bit floats unchanged; as integers in between, they cannot have more than 16 bits."""
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.int16) ^ zero.astype(jnp.int16), x.dtype)


@_through_bits.defjvp
def _(primals, tangents):
    # Bits have no derivative, but the values have: the function is the identity.
    return _through_bits(*primals), tangents[0]


def computed_once(values: PyTree, source: PyTree | HiddenZero) -> PyTree:
    """Returns the same values, computed once at this point: their readers neither recompute nor round them again.

    XLA:CPU drops optimisation barriers before it fuses, and then computes a value anew for each reader. It fuses
    nothing through a loop, even through a loop that never turns. On other backends a loop would synchronise with the
    host, so the values are `rounded_here` instead.

    Args:
      values: pytree of arrays of any dtype, and of keys.
      source: arrays to make the hidden zero from, or that zero. The zero is the loop's number of turns. It is a scalar,
        and `vmap` should not batch it.

    Guarantees:
      Every bit stays, and the compiled program has the loop
      (tests/engine/arithmetic/test_barrier.py::test_computed_once_keeps_every_bit_and_its_loop).
    """
    return _computed_once(values, hidden_zero(source).value)


@jax.custom_jvp
def _computed_once(values: PyTree, zero: Array) -> PyTree:
    """Returns the values behind a loop of `zero` turns. `engine.flops` knows this function by its name."""
    if target() != "cpu":
        return rounded_here(values, HiddenZero(zero))

    # XLA takes what a body leaves as it is out of its loop. It does not see through optimisation barriers, which it
    # drops later, before it fuses. Then neither test nor body has an operation to compile. Each leaf has a barrier of
    # its own: behind a common one, a leaf that nothing reads would be computed for the others.
    held_back = lambda carry: jax.tree.map(jax.lax.optimization_barrier, carry)  # noqa: E731
    return jax.lax.while_loop(lambda carry: carry[0], held_back, (zero != 0, values))[1]


def is_computed_once(equation: core.JaxprEqn) -> bool:
    """Returns whether an equation is the loop of `computed_once`: its body only holds values back."""
    if equation.primitive.name != "while":
        return False
    test, body = (jaxpr_and_constants(equation.params[key])[0] for key in ("cond_jaxpr", "body_jaxpr"))
    return not test.eqns and all(x.primitive.name == "optimization_barrier" for x in body.eqns)


@_computed_once.defjvp
def _(primals, tangents):
    return _computed_once(*primals), tangents[0]


def unsigned_zeros(values: PyTree) -> PyTree:
    """Returns the same numbers with every -0.0 replaced by 0.0.

    Compilers may turn the sign of a zero that is x + 0 or a sum of products, so the sign has no meaning. Without it,
    values that are kept or sent have the same bits in every program.

    Args:
      values: leaves of any dtype; those that are no floats stay as they are.

    >>> import jax.numpy as jnp
    >>> unsigned_zeros(jnp.array([-0.0, 1.0])).tolist()
    [0.0, 1.0]
    """

    def unsigned_leaf(x):
        x = jnp.asarray(x)
        return jnp.where(x == 0, jnp.zeros_like(x), x) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(unsigned_leaf, values)


def _is_key(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
