"""Sums of encrypted messages (CKKS): the server adds ciphertexts, and only clients, who share a key, can decrypt.

TenSEAL draws its randomness from the operating system, so a round that called TenSEAL could not be replayed, resumed or
repeated to the same bits. `homomorphic_mean` therefore draws the error of encryption from its distribution, in the
compiled round. `run_homomorphic_sum` runs the real scheme on the host; tests compare the distribution with it.

The distribution: a fresh ciphertext of ring degree N holds its numbers times 2^scale_bits, plus a rounding error
r_0 + r_1 s and the rounding of the encoder. Here r is uniform in [-1/2, 1/2), and s is the ternary secret key. At a
slot the error is a complex normal number times the value of the key at this slot, which is also complex normal. The
result is a Laplace law with standard deviation sqrt(N (N + 3)) / 6 / 2^scale_bits. For m ciphertexts under one key the
standard deviation is sqrt(m) times that. This is the rounding noise of Cheon et al. 2017, section 3.2; SEAL 4 divides
the rest of the encryption noise by a prime that is dropped.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import prng, validate
from fedjax_sim.aggregation.linear import fixed_mean, mean
from fedjax_sim.aggregation.secure.ring import Ring
from fedjax_sim.tree import num_values
from fedjax_sim.types import Aggregator, Array, Metric, PyTree, Wire

LIMITS = {4096: 109, 8192: 218, 16384: 438, 32768: 881}  # bits of all primes for 128-bit security (HE standard, 2018)
HEADER_BYTES = 192  # at most, of a ciphertext in SEAL's and TenSEAL's formats
MARGIN_BITS = 2  # bits between the largest sum and where it would wrap around; half of the modulus is for the sign


def homomorphic_mean(
    denominator: float | None = None,
    *,
    weighting: str = "examples",
    degree: int = 8192,
    modulus_bits: int = 60,
    scale_bits: int = 40,
) -> Aggregator:
    """The aggregate is the mean of encrypted messages: the exact mean, plus the error that CKKS would make.

    It is for a few silos. Clients encrypt w_i u_i under a key that they share and the server does not have; the server
    adds ciphertexts. A single client that colludes with the server can open all messages. The error is drawn anew in
    each round, and ciphertexts are only counted, as bytes.

    Args:
      denominator: of the sum, as in `fixed_mean`; None: the sum of the weights, as in `mean`.
      weighting: "examples" (the weight that each client reports) or "uniform".
      degree: N, of the ring: 4096, 8192, 16384 or 32768. A ciphertext holds N / 2 numbers.
      modulus_bits: the bits of the prime modulus of ciphertexts, in [30, 60].
      scale_bits: numbers are held in units of 2^-scale_bits. Sums must stay below 2^(modulus_bits - scale_bits - 2). A
        round in which a sum could wrap around is skipped, and counted in `overflowed_rounds`.

    Returns: an Aggregator with the metrics `encryption_error`, the standard deviation of the error of a number of the
    mean, and `overflowed_rounds`.

    `observe` shows uniform elements in place of ciphertexts, one array [m, ciphertexts, 2, N, words] uint32. A message
    costs two words of 64 bits for each of the N coefficients of a ciphertext; an entropy code needs at least
    `modulus_bits` for each.

    The broadcast is encrypted too, since the server has no key, and is counted so. A downlink that compresses the
    broadcast is refused, as is such a server inside of a hierarchy. The server's step is computed on plain numbers. On
    ciphertexts SGD would be possible, with momentum or without, and Adam would not; this is not checked.

    Raises: ValueError for parameters that do not fit together, or are not secure.

    Guarantees:
      - error and bytes are those of TenSEAL
        (tests/aggregation/secure/test_homomorphic.py::test_the_law_of_the_error, ::test_bytes)
      - apart from the error it is the plain mean (::test_the_mean_plus_its_error)
      - no sum wraps around (::test_sums_past_the_range)

    References: Cheon, Kim, Kim and Song 2017; Zhang et al. 2020 (BatchCrypt), section 3, for silos with one key.

    >>> encrypted_mean = homomorphic_mean()
    >>> encrypted_mean.facts.wire(jax.ShapeDtypeStruct((4096,), jnp.float32), None, 10).bits // 8
    131264
    """
    plain = mean(weighting=weighting) if denominator is None else fixed_mean(denominator, weighting=weighting)
    _check_parameters(degree, modulus_bits, scale_bits)
    std = homomorphic_std(degree, scale_bits)
    largest_sum = 2.0 ** (modulus_bits - scale_bits - MARGIN_BITS)

    def init(update_spec, num_slots):
        return {"sum": plain.init(update_spec, num_slots), "messages": jnp.zeros((), jnp.int32)}

    def accumulate(key, round, carry, received):
        num_messages = carry["messages"] + (received.weights > 0).sum(dtype=jnp.int32)
        return {"sum": plain.accumulate(key, round, carry["sum"], received), "messages": num_messages}

    def finalize(key, round, carry):
        update, metrics = plain.finalize(key, round, carry["sum"])
        # The error of a sum of m ciphertexts grows with sqrt(m); the mean divides it like the sum.
        divisor = jnp.maximum(metrics["total_weight"], 1e-30) if denominator is None else jnp.float32(denominator)
        error = (std * jnp.sqrt(carry["messages"].astype(jnp.float32))) / divisor
        peak = jnp.stack([jnp.max(jnp.abs(x), initial=0).astype(jnp.float32) for x in jax.tree.leaves(update)]).max()
        could_wrap = peak * divisor >= largest_sum
        noisy = _with_error(prng.stream(key, "ckks"), update, error)
        update = jax.tree.map(lambda x: jnp.where(could_wrap, jnp.nan, x), noisy)  # NaN skips the round
        return update, metrics | {"encryption_error": error, "overflowed_rounds": could_wrap.astype(jnp.int32)}

    def view(key, round, received):
        num_messages = received.weights.shape[0]
        dimension = sum(x[0].size for x in jax.tree.leaves(received.updates))
        shape = (num_messages, _num_ciphertexts(dimension, degree), 2, degree)
        # To the server, who has no key, ciphertexts look like uniform elements.
        words = jnp.stack(Ring(modulus_bits).draw(prng.stream(key, "ciphertexts"), shape), axis=-1)
        has_arrived = (received.weights > 0).reshape(-1, 1, 1, 1, 1)
        return jnp.where(has_arrived, words, 0), received.weights

    def wire_of_ciphertexts(num_numbers):
        num_ciphertexts = _num_ciphertexts(num_numbers, degree)
        least_bits = num_ciphertexts * (2 * degree * modulus_bits + 8 * HEADER_BYTES)
        return Wire(num_numbers, num_ciphertexts * 2 * degree * 64, num_ciphertexts * 8 * HEADER_BYTES, least_bits)

    def wire(update_spec, wire, num_slots):
        return wire_of_ciphertexts(num_values(update_spec))

    def wire_down(update_spec, wire, num_slots):
        return wire_of_ciphertexts(wire.values)  # the server has no key, so it sends the model as ciphertexts

    own_metrics = (
        Metric("encryption_error", "standard deviation of encryption's error", pooled="mean"),
        Metric("overflowed_rounds", "rounds whose encrypted sum could wrap around", "count"),
    )
    encrypted = plain._replace(init=init, accumulate=accumulate, finalize=finalize, view=view)
    metrics = plain.facts.metrics + own_metrics
    return encrypted.stating(homogeneous=False, metrics=metrics, keyless=True, wire=wire, wire_down=wire_down)


def _with_error(key: Array, update: PyTree, std: Array) -> PyTree:
    """Adds a Laplace error of this standard deviation to each number.

    With four standard normal numbers, (a b + c d) / sqrt(2) has a Laplace law of standard deviation 1.
    """
    leaves, structure = jax.tree.flatten(update)
    drawn = [prng.normal(prng.fold_in(key, i), (4, *x.shape)) for i, x in enumerate(leaves)]
    products = [(x[0] * x[1], x[2] * x[3]) for x in drawn]
    errors = [(x + y) * (std * 0.5**0.5) for x, y in products]
    return structure.unflatten([x + error.astype(x.dtype) for x, error in zip(leaves, errors, strict=True)])


def homomorphic_std(degree: int, scale_bits: int, num_clients: int = 1) -> float:
    """Computes the standard deviation of the error of a decrypted sum: sqrt(m N (N + 3)) / 6 / 2^scale_bits.

    Args:
      degree: N, as in `homomorphic_mean`.
      scale_bits: as in `homomorphic_mean`.
      num_clients: m, the ciphertexts in the sum.

    Guarantees: the errors of TenSEAL's sums of 8 messages have this standard deviation within 5 %, at degrees 4096 and
    8192 (tests/aggregation/secure/test_homomorphic.py::test_the_law_of_the_error).

    >>> round(homomorphic_std(8192, 40, 4) * 1e9, 2)
    2.48
    """
    return math.sqrt(num_clients * degree * (degree + 3)) / 6 / 2.0**scale_bits


def ciphertext_bytes(dimension: int, degree: int = 8192) -> int:
    """Computes an upper bound on the bytes of a message's ciphertexts.

    A ciphertext has two words of 64 bits for each coefficient, and a header.

    Args:
      dimension: d, the numbers in a message.
      degree: N, as in `homomorphic_mean`.

    Guarantees: TenSEAL's ciphertexts of a message take at most this number of bytes, at degrees 4096 and 8192
    (tests/aggregation/secure/test_homomorphic.py::test_bytes).
    """
    return _num_ciphertexts(dimension, degree) * (16 * degree + HEADER_BYTES)


class EncryptedSum(NamedTuple):
    """An `EncryptedSum` is a sum of messages that TenSEAL encrypted, added and decrypted."""

    sum: np.ndarray  # [d] float64
    error: np.ndarray  # [d] float64, the decrypted sum minus the plain sum
    std: float  # the standard deviation of the error, from `homomorphic_std`
    bound: float  # with probability 1 - 1e-9, no number's error is larger
    bytes_up: np.ndarray  # [m] int64, the bytes of each client's ciphertexts
    bytes_down: int  # the bytes of the encrypted sum, for each client that decrypts it
    expansion: float  # bytes up over the bytes of float32 messages


def run_homomorphic_sum(
    messages: np.ndarray, *, degree: int = 8192, modulus_bits: int = 60, scale_bits: int = 40
) -> EncryptedSum:
    """Encrypts, adds and decrypts messages with TenSEAL; the server adds without the secret key.

    Args:
      messages: [m, d] floats.
      degree: as in `homomorphic_mean`.
      modulus_bits: as in `homomorphic_mean`.
      scale_bits: as in `homomorphic_mean`.

    Returns: an `EncryptedSum`. Its bound is that of a Laplace law: std / sqrt(2) ln(d / 1e-9).

    Raises: ImportError without `tenseal`, naming the extra; ValueError for messages whose sum could wrap.

    Guarantees: the plain sum within the bound (tests/aggregation/secure/test_homomorphic.py::test_the_sum_is_right).
    """
    _check_parameters(degree, modulus_bits, scale_bits)
    messages = np.asarray(messages, np.float64)
    if messages.ndim != 2 or not np.isfinite(messages).all() or not messages.size:
        validate.fail("messages", "finite numbers [clients, numbers]", list(messages.shape))
    largest_sum = 2.0 ** (modulus_bits - scale_bits - MARGIN_BITS)
    peak = np.abs(messages).sum(0).max()
    if peak >= largest_sum:
        hint = "Shorter messages, fewer scale_bits or more modulus_bits."
        validate.fail("messages", f"sums below {largest_sum:g}, or they could wrap around", float(peak), hint)
    try:
        import tenseal
    except ImportError as missing:
        hint = "pip install 'fedjax_sim[homomorphic]'; homomorphic_mean needs no such package."
        raise ImportError(f"tenseal: expected to be installed. {hint}") from missing
    # SEAL encrypts modulo a second prime, which is dropped; both primes together have at most LIMITS[degree] bits.
    special_prime_bits = min(60, LIMITS[degree] - modulus_bits)
    client_context = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS, poly_modulus_degree=degree, coeff_mod_bit_sizes=[modulus_bits, special_prime_bits]
    )
    client_context.global_scale = 2.0**scale_bits
    server_context = tenseal.context_from(client_context.serialize(save_secret_key=False))
    num_clients, dimension = messages.shape
    bytes_up = np.zeros(num_clients, np.int64)
    bytes_down = 0
    decrypted_blocks = []
    block_size = degree // 2  # the numbers in a ciphertext
    for start in range(0, dimension, block_size):
        sent = [tenseal.ckks_vector(client_context, x[start : start + block_size]).serialize() for x in messages]
        bytes_up += [len(ciphertext) for ciphertext in sent]
        received = (tenseal.ckks_vector_from(server_context, ciphertext) for ciphertext in sent)
        encrypted_sum = reduce(lambda total, ciphertext: total + ciphertext, received).serialize()
        bytes_down += len(encrypted_sum)
        decrypted_blocks.append(np.asarray(tenseal.ckks_vector_from(client_context, encrypted_sum).decrypt()))
    decrypted = np.concatenate(decrypted_blocks)
    std = homomorphic_std(degree, scale_bits, num_clients)
    bound = std / math.sqrt(2) * math.log(dimension / 1e-9)
    expansion = float(bytes_up.mean() / (4 * dimension))
    return EncryptedSum(
        sum=decrypted,
        error=decrypted - messages.sum(0),
        std=std,
        bound=bound,
        bytes_up=bytes_up,
        bytes_down=bytes_down,
        expansion=expansion,
    )


def _num_ciphertexts(dimension: int, degree: int) -> int:
    """Returns the number of ciphertexts of a message, each of N / 2 numbers."""
    return -(-dimension // (degree // 2))


def _check_parameters(degree: int, modulus_bits: int, scale_bits: int) -> None:
    validate.one_of("degree", degree, LIMITS)
    validate.integer("modulus_bits", modulus_bits, 30, 60, hint="Its prime fits a word of 64 bits.")
    hint = f"At least {MARGIN_BITS + 1} bits are left for a sum."
    validate.integer("scale_bits", scale_bits, 10, modulus_bits - MARGIN_BITS - 1, hint=hint)
