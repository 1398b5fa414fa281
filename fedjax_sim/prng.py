"""Derives keys by name and by identity: random bits are addressed by (seed, round, stage name, client id)."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import Array
from fedjax_sim.validate import PositiveInt

DITHER = zlib.crc32(b"dither")


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf of a pytree is a typed PRNG key, or the spec of one."""
    dtype = getattr(leaf, "dtype", None)  # None: a number of Python's own
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def stream(key: Array, name: str) -> Array:
    """Returns the key of a stage of a round, by the stage's name.

    Guarantees: stages named differently share no stream (tests/test_prng.py::test_stage_names_do_not_collide).

    >>> import jax
    >>> key = jax.random.key(0)
    >>> bool((stream(key, "sampling") == stream(key, "client")).all())
    False
    """
    return fold_in(key, zlib.crc32(name.encode()))


def init_key(key: Array) -> Array:
    """Returns the key of an algorithm's `init` in a run with this key.

    Round t has fold_in(key, t), and no run reaches the round whose number is taken here, 2^31 - 1.

    Guarantees: no round has this key, because a run of so many rounds is refused
    (tests/test_prng.py::test_no_round_has_the_key_of_init).
    """
    return jax.random.fold_in(key, 2**31 - 1)


def client_key(key: Array, id: Array) -> Array:
    """Returns the key of client `id` in a stage; for an array of clients, their keys.

    A key does not depend on chunk, slot, padding, device or the other clients of a batch.

    Args:
      key: the key of the stage.
      id: integers, the clients' ids; [] for one client.

    Returns: keys in the shape of `id`.

    Raises: ValueError for generators whose bits under vmap come from the first key of the batch (rbg, unsafe_rbg)
    (tests/test_prng.py::test_generators_that_mix_clients_are_refused).
    """
    if jax.random.key_impl(key) in ("rbg", "unsafe_rbg"):
        hint = "Under vmap a client's draws depend on the others: use jax.random.key(seed, impl='threefry2x32')."
        validate.fail("key", "a threefry key", jax.random.key_impl(key), hint)
    return fold_in(key, id)


def fold_in(key: Array, numbers: Array | int) -> Array:
    """Returns the keys that `jax.random.fold_in` derives from a key and numbers, all at once.

    Args:
      key: one key.
      numbers: integers of any shape, [] for a single key; their 32 lowest bits count.

    Returns: keys in the shape of `numbers`.

    Guarantees: the keys are those of `jax.random.fold_in` (tests/test_prng.py::test_threefry_is_that_of_jax).

    >>> import jax, jax.numpy as jnp
    >>> fold_in(jax.random.key(0), jnp.arange(3)).shape
    (3,)
    """
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed or jax.random.key_impl(key) != "threefry2x32":
        fold = functools.partial(jax.random.fold_in, key)
        return jax.vmap(fold)(numbers) if jnp.ndim(numbers) else fold(numbers)
    words = threefry(jax.random.key_data(key), jnp.uint32(0), jnp.uint32(numbers))
    return jax.random.wrap_key_data(jnp.stack(words, axis=-1), impl="threefry2x32")


@jax.jit  # traced once for all keys of a round
def threefry(words: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Returns the Threefry-2x32 blocks of counters under a key, as `jax.random` computes them.

    JAX rolls the twenty rounds of the generator into a loop on a CPU. A loop is a dozen kernels. A few hundred blocks
    take three to ten times as long as here.

    Args:
      words: [2] uint32, the data of a threefry2x32 key.
      high, low: uint32 words of the counters, of shapes that broadcast.

    Guarantees: the bits are those of `jax.random.fold_in` and `jax.random.bits`
    (tests/test_prng.py::test_threefry_is_that_of_jax).

    References: Salmon, Moraes, Dror and Shaw 2011 (Parallel random numbers: as easy as 1, 2, 3), section 4.2.
    """
    keys = words[0], words[1], words[0] ^ words[1] ^ jnp.uint32(0x1BD11BDA)
    x = high + keys[0]
    y = low + keys[1]
    for turn in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[turn % 2]:
            x = x + y
            y = x ^ ((y << distance) | (y >> (32 - distance)))
        x = x + keys[(turn + 1) % 3]
        y = y + keys[(turn + 2) % 3] + jnp.uint32(turn + 1)
    return x, y


def random_bits(key: Array, count: int) -> Array:
    """Returns [count] uint32 random bits: the bits of `jax.random.bits`, computed faster for a few on a CPU."""
    if jax.random.key_impl(key) != "threefry2x32" or not jax.threefry_partitionable.value:
        return jax.random.bits(key, (count,), jnp.uint32)
    high, low = threefry(jax.random.key_data(key), jnp.uint32(0), jnp.arange(count, dtype=jnp.uint32))
    return high ^ low


@validate.named_arguments
def below(key: Array, n: PositiveInt, shape: tuple[int, ...] = ()) -> Array:
    """Draws integers uniformly from [0, n): floor(U n / 2^64) of 64 random bits U each.

    `jax.random.randint` takes 32 bits modulo n. It draws the integers below 2^32 mod n more often than the others:
    1.0023 times as often at n = 10^7, 1.5 times at 2 x 10^9.

    Args:
      key: a key that is used for no other draws.
      n: a Python integer in [1, 2^31 - 1].
      shape: shape of the result.

    Returns: int32 of that shape.

    Raises: TypeError for an n that is no integer; ValueError for an integer out of range.

    Guarantees:
      The result is the product of the 64 bits, exactly (tests/test_prng.py::test_below_is_the_product_of_64_bits). So
      the probability of each integer is 1 / n to a relative n / 2^64 < 2^-33.
      Draws are uniform where draws from 32 bits are not (tests/test_prng.py::test_draws_among_many_are_uniform).

    References: Lemire 2019 (Fast random integer generation in an interval), section 2, without rejection.

    >>> import jax
    >>> below(jax.random.key(0), 1, (3,)).tolist()
    [0, 0, 0]
    """
    high, low = jax.random.bits(key, (2, *shape), jnp.uint32)
    # The high word of the 96-bit product of U and n: U's high word times n, and the carry from its low word.
    top, low_word = _product(high, n)
    carry = low_word + _product(low, n)[0] < low_word
    return (top + carry.astype(jnp.uint32)).astype(jnp.int32)


def _product(x: Array, n: int) -> tuple[Array, Array]:
    """Returns the high and low words of the 64-bit product of uint32 `x` and n < 2^32."""
    # Long multiplication with digits of 16 bits.
    x_high = x >> 16
    x_low = x & 0xFFFF
    n_high = jnp.uint32(n >> 16)
    n_low = jnp.uint32(n & 0xFFFF)
    # No carry is lost: both sums stay below 2^32, since a product of digits is at most (2^16 - 1)^2.
    middle = (x_low * n_low >> 16) + x_low * n_high
    second_middle = (middle & 0xFFFF) + x_high * n_low
    return x_high * n_high + (middle >> 16) + (second_middle >> 16), x * jnp.uint32(n)


def counter_bits(key: Array, counters: Array) -> Array:
    """Returns 32 hashed bits for each counter: as fast as arithmetic, for orders and dither; not for privacy noise.

    Args:
      key: any key.
      counters: uint32 of any shape; for one key, distinct counters give distinct words.

    Returns: uint32 in the shape of `counters`.

    Guarantees: bits are uniform, and uncorrelated between counters, bits and keys
    (tests/test_prng.py::test_counter_bits_are_uniform).

    References: Appleby 2011 (MurmurHash3, the finaliser); applied twice, after adding 32 bits of the key each time.
    """
    words = jax.random.key_data(key).astype(jnp.uint32)
    # A key of threefry4x32 has four words, which are folded into two.
    return hashed(words[:2] if words.shape[0] == 2 else words[:2] ^ words[2:], counters.astype(jnp.uint32))


@functools.partial(jax.jit, inline=True)
def hashed(words: Array, x: Array) -> Array:
    """Returns uint32 `x` hashed by two MurmurHash3 finalisers, each keyed by one of two uint32 `words`: a bijection."""
    for word in (words[0], words[1]):
        x = (x + word) * jnp.uint32(0x9E3779B1)
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        x = x ^ (x >> 16)
    return x


def dither(key: Array, shape: tuple[int, ...]) -> Array:
    """Returns uint32 words for stochastic rounding, as fast as arithmetic; not for privacy noise or masks.

    A counter times the golden ratio goes through one MurmurHash3 finaliser, keyed by 64 bits that hash the key. Two
    arrays of one client need two keys (fold in the leaf's number).

    Args:
      key: the key of a client and an array.
      shape: the shape of the result.

    Guarantees:
      Bytes are uniform, and neighbours and clients with neighbouring ids are uncorrelated
      (tests/test_prng.py::test_dither_is_uniform_and_uncorrelated).
      A flipped bit of the key flips half of the words' bits (tests/test_prng.py::test_dither_avalanche).
      A client's words do not depend on other clients
      (tests/test_prng.py::test_fast_draws_are_independent_of_batch_and_devices).
    """
    counters = jnp.zeros(shape, jnp.uint32)
    stride = 1
    # The sum of iotas and no reshaped iota, which would divide where a layout is transposed.
    for axis in reversed(range(len(shape))):
        counters += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        stride *= shape[axis]
    # The key is mixed here once, and not again for each counter.
    words = counter_bits(key, jnp.uint32(DITHER) + jnp.arange(2, dtype=jnp.uint32))
    x = (counters * jnp.uint32(0x9E3779B1)) ^ words[0]
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B) + words[1]
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def stochastic_round(key: Array, x: Array) -> Array:
    """Rounds each entry to a neighbouring integer at random, with the entry as its mean.

    The result is floor(x), or one more with probability x - floor(x), kept to 24 bits and rounded up. Integers stay as
    they are.

    Args:
      key: the key of a client, not used for another array.
      x: float32 (or narrower, which is widened) of any shape, |x| < 2^24.

    Returns: float32 integers, shaped like x; cast them to the wire's type.

    Guarantees: rounding is unbiased, leaves integers fixed, and has variance f(1 - f) at a fraction f
    (tests/test_prng.py::test_stochastic_round_is_unbiased).

    >>> import jax, jax.numpy as jnp
    >>> stochastic_round(jax.random.key(0), jnp.array([-3.0, 0.0, 127.0])).tolist()
    [-3.0, 0.0, 127.0]
    """
    x = x.astype(jnp.float32)
    low = jnp.floor(x)
    # Signed integers are faster to turn into floats.
    draw = jax.lax.bitcast_convert_type(dither(key, x.shape) >> 8, jnp.int32)
    up = draw.astype(jnp.float32) < (x - low) * 2.0**24
    return low + up.astype(jnp.float32)


def fast(key: Array) -> Array:
    """Returns the threefry4x32 key of a threefry2x32 key, whose draws are 3 to 4 times faster in bulk on a CPU.

    Both are cryptographic generators. The key's 64 bits are kept as they are, with 64 constant bits behind them, so
    distinct keys stay distinct. Fold and split the usual key first, and draw from the result of this function. A
    threefry4x32 key is returned as it is.

    Args:
      key: a key of either generator, of any shape.

    Raises: ValueError for generators that mix clients under vmap.

    Guarantees:
      Draws are the same bits one client at a time, under vmap and on any number of devices
      (tests/test_prng.py::test_fast_draws_are_independent_of_batch_and_devices).
      Keys stay distinct (tests/test_prng.py::test_fast_keys_keep_every_bit).

    References: Salmon, Moraes, Dror and Shaw 2011, section 4.2.
    """
    kind = str(jax.random.key_impl(key))
    if kind == "threefry4x32":
        return key
    if kind != "threefry2x32":
        hint = "Use jax.random.key(seed, impl='threefry2x32')."
        validate.fail("key", "a threefry key", kind, hint)
    words = jax.random.key_data(key)
    constants = jnp.broadcast_to(jnp.array([0x66656461, 0x78347833], jnp.uint32), words.shape)
    return jax.random.wrap_key_data(jnp.concatenate([words, constants], axis=-1), impl="threefry4x32")


def normal(key: Array, shape: tuple[int, ...] = (), dtype=jnp.float32) -> Array:
    """Returns standard normal draws from `fast(key)` by inversion; also used for privacy noise.

    Inversion is 3 to 15 times faster on a CPU than Box-Muller from the same bits. Float32 draws come from 23 bits: no
    draw lies beyond 5.5, where the normal distribution has probability 4e-8. A proof of privacy for floating-point
    noise needs a discrete mechanism instead (Mironov 2012).

    Args:
      key: a threefry key that is used for no other draws.
      shape: the shape of the result.
      dtype: a floating-point type.

    Guarantees: draws have the moments and tails of the normal distribution, and pass a chi-square test over 64 equally
    likely cells at 10^6 draws (tests/test_prng.py::test_normal_draws; slow: 10^7 draws, ::test_many_normal_draws).

    >>> import jax
    >>> normal(jax.random.key(0), (2, 3)).shape
    (2, 3)
    """
    return jax.random.normal(fast(key), shape, dtype)
