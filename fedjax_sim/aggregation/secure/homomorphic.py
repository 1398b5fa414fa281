"""Sums of encrypted messages (CKKS): the server adds ciphertexts, and only clients, who share a key, can decrypt.

TenSEAL draws its randomness from the operating system, so a round that called it could not be replayed, resumed or run
to the same bits. `homomorphic_mean` therefore adds the error that encryption makes, by its law, in the compiled round;
`run_homomorphic_sum` runs the real scheme on the host, and is what that law is tested against.

The law: a fresh ciphertext of ring degree N holds its numbers times 2^scale_bits plus a rounding error r_0 + r_1 s, r
uniform in [-1/2, 1/2) and s the ternary secret key, and the encoder's rounding. In a slot that is a complex normal
number times the key's own value there, which is one: a Laplace law of standard deviation sqrt(N (N + 3)) / 6 /
2^scale_bits, and sqrt(m) times that for m ciphertexts under one key (rounding noise of Cheon et al. 2017, section 3.2;
SEAL 4 divides the rest of the encryption noise by a prime that is dropped).
"""

from __future__ import annotations

import math
import operator
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, prng, validate
from fedjax_sim.aggregation.linear import fixed_mean, mean
from fedjax_sim.aggregation.secure.ring import Ring
from fedjax_sim.tree import num_values
from fedjax_sim.types import Aggregator, Array, Metric, PyTree, Wire

__all__ = ["EncryptedSum", "ciphertext_bytes", "homomorphic_mean", "homomorphic_std", "run_homomorphic_sum"]

LIMITS = {4096: 109, 8192: 218, 16384: 438, 32768: 881}  # bits of all primes for 128-bit security (HE standard, 2018)
HEADER_BYTES = 192  # of a ciphertext in SEAL's and TenSEAL's formats, at most
MARGIN = 2  # bits between the largest sum and where it would wrap: half a modulus is its sign


def homomorphic_mean(
    denominator: float | None = None,
    *,
    weighting: str = "examples",
    degree: int = 8192,
    modulus_bits: int = 60,
    scale_bits: int = 40,
) -> Aggregator:
    """The mean of encrypted messages, for a few silos: exact sums plus the error of CKKS, and the bytes of ciphertexts.

    Clients encrypt w_i u_i under a key that they share and the server has not; the server adds ciphertexts. One client
    that colludes with the server opens all messages. The error is drawn anew in each round.

    Args:
      denominator: of the sum, as in `fixed_mean`; None: the sum of the weights, as in `mean`.
      weighting: "examples" (the weight each client reports) or "uniform".
      degree: N, of the ring; a ciphertext holds N / 2 numbers. One of 4096, 8192, 16384, 32768.
      modulus_bits: of the prime that ciphertexts are modulo, in [30, 60].
      scale_bits: numbers are held in units of 2^-scale_bits. Sums must stay below 2^(modulus_bits - scale_bits - 2); a
        round in which one does not is skipped, and counted as `overflowed_rounds`, for it could wrap around.

    Returns: an Aggregator with the metrics `encryption_error`, the standard deviation of the error of a number of the
    mean, and `overflowed_rounds`. `observe` shows uniform elements in place of ciphertexts, one array [m, ciphertexts,
    2, N, words] uint32. A message costs two words of 64 bits for each of N coefficients; an entropy code gets no lower
    than `modulus_bits` for each. The broadcast is encrypted too, for the server has no key, and counted as that;
    a downlink that compresses it is refused, and such a server inside of a hierarchy. The server's step is computed in
    the clear. On ciphertexts SGD could be taken, with momentum or without, and Adam could not; this is not checked.

    Raises: ValueError for parameters that do not fit together, or are not secure.

    Guarantees: error and bytes are those of TenSEAL
    (tests/aggregation/secure/test_homomorphic.py::test_the_law_of_the_error, ::test_bytes); nothing else is changed
    (::test_the_mean_plus_its_error); no sum wraps (::test_sums_past_the_range).

    References: Cheon, Kim, Kim and Song 2017; Zhang et al. 2020 (BatchCrypt), section 3, for silos with one key.

    >>> made = homomorphic_mean()
    >>> made.facts.wire(jax.ShapeDtypeStruct((4096,), jnp.float32), None, 10).bits // 8
    131264
    """
    made = mean(weighting=weighting) if denominator is None else fixed_mean(denominator, weighting=weighting)
    _check(degree, modulus_bits, scale_bits)
    std, largest = homomorphic_std(degree, scale_bits), 2.0 ** (modulus_bits - scale_bits - MARGIN)

    def init(update_spec, num_slots):
        return {"sum": made.init(update_spec, num_slots), "messages": jnp.zeros((), jnp.int32)}

    def accumulate(key, round, carry, received):
        number = carry["messages"] + (received.weights > 0).sum(dtype=jnp.int32)
        return {"sum": made.accumulate(key, round, carry["sum"], received), "messages": number}

    def finalize(key, round, carry):
        update, metrics = made.finalize(key, round, carry["sum"])
        divisor = jnp.maximum(metrics["total_weight"], 1e-30) if denominator is None else jnp.float32(denominator)
        error = engine.divide(std * jnp.sqrt(carry["messages"].astype(jnp.float32)), divisor)
        peak = jnp.stack([jnp.max(jnp.abs(x), initial=0).astype(jnp.float32) for x in jax.tree.leaves(update)]).max()
        wraps = peak * divisor >= largest
        noisy = _with_error(prng.stream(key, "ckks"), update, error)
        update = jax.tree.map(lambda x: jnp.where(wraps, jnp.nan, x), noisy)
        return update, metrics | {"encryption_error": error, "overflowed_rounds": wraps.astype(jnp.int32)}

    def view(key, round, received):
        number = received.weights.shape[0]
        some = sum(x[0].size for x in jax.tree.leaves(received.updates))
        shape = (number, _ciphertexts(some, degree), 2, degree)
        words = jnp.stack(Ring(modulus_bits).draw(prng.stream(key, "ciphertexts"), shape), axis=-1)
        there = (received.weights > 0).reshape(-1, 1, 1, 1, 1)
        return jnp.where(there, words, 0), received.weights

    def encrypted(values):
        blocks = _ciphertexts(values, degree)
        least = blocks * (2 * degree * modulus_bits + 8 * HEADER_BYTES)
        return Wire(values, blocks * 2 * degree * 64, blocks * 8 * HEADER_BYTES, least)

    def wire(update_spec, wire, num_slots):
        return encrypted(num_values(update_spec))

    def wire_down(update_spec, wire, num_slots):
        return encrypted(wire.values)  # the server has no key: what it sends is as encrypted as what it holds

    stated = (
        Metric("encryption_error", "standard deviation of encryption's error", pooled="mean"),
        Metric("overflowed_rounds", "rounds whose encrypted sum could wrap around", "count"),
    )
    made_here = made._replace(init=init, accumulate=accumulate, finalize=finalize, view=view)
    metrics = made.facts.metrics + stated
    return made_here.stating(homogeneous=False, metrics=metrics, keyless=True, wire=wire, wire_down=wire_down)


def _with_error(key: Array, update: PyTree, std: Array) -> PyTree:
    """A Laplace error of this standard deviation on each number: (a b + c d) / sqrt(2), of four normal numbers."""
    leaves, structure = jax.tree.flatten(update)
    drawn = [prng.normal(jax.random.fold_in(key, i), (4, *x.shape)) for i, x in enumerate(leaves)]
    drawn = engine.computed_once(drawn, key)
    products = engine.rounded_here([(x[0] * x[1], x[2] * x[3]) for x in drawn], key)
    errors = engine.rounded_here([(x + y) * (std * 0.5**0.5) for x, y in products], key)
    return structure.unflatten([x + error.astype(x.dtype) for x, error in zip(leaves, errors, strict=True)])


def homomorphic_std(degree: int, scale_bits: int, num_clients: int = 1) -> float:
    """The standard deviation of a number in the decrypted sum of m ciphertexts: sqrt(m N (N + 3)) / 6 / 2^scale_bits.

    Guarantees: TenSEAL's within 5 % (tests/aggregation/secure/test_homomorphic.py::test_the_law_of_the_error).

    >>> round(homomorphic_std(8192, 40, 4) * 1e9, 2)
    2.48
    """
    return math.sqrt(num_clients * degree * (degree + 3)) / 6 / 2.0**scale_bits


def ciphertext_bytes(dimension: int, degree: int = 8192) -> int:
    """At most this many bytes are the ciphertexts of a message: two words of 64 bits for each coefficient, and headers.

    Guarantees: tests/aggregation/secure/test_homomorphic.py::test_bytes.
    """
    return _ciphertexts(dimension, degree) * (16 * degree + HEADER_BYTES)


class EncryptedSum(NamedTuple):
    """A sum of messages that TenSEAL encrypted, added and decrypted."""

    sum: np.ndarray  # [d] float64
    error: np.ndarray  # [d] float64, of the sum
    std: float  # of the error, as `homomorphic_std` says
    bound: float  # no number is further off, with probability 1 - 1e-9
    bytes_up: np.ndarray  # [m] int64 of each client's ciphertexts
    bytes_down: int  # of the sum's, for each client that decrypts it
    expansion: float  # bytes up over those of float32


def run_homomorphic_sum(
    messages: np.ndarray, *, degree: int = 8192, modulus_bits: int = 60, scale_bits: int = 40
) -> EncryptedSum:
    """Encrypts, adds and decrypts messages [m, d] of floats with TenSEAL; the server's half has no secret key.

    Args:
      degree, modulus_bits, scale_bits: as for `homomorphic_mean`.

    Returns: `EncryptedSum`. Its bound is that of a Laplace law: std / sqrt(2) ln(d / 1e-9).

    Raises: ImportError without `tenseal`, naming the extra; ValueError for messages whose sum could wrap.

    Guarantees: the plain sum within the bound (tests/aggregation/secure/test_homomorphic.py::test_the_sum_is_right).
    """
    _check(degree, modulus_bits, scale_bits)
    messages = np.asarray(messages, np.float64)
    if messages.ndim != 2 or not np.isfinite(messages).all() or not messages.size:
        validate.fail("messages", "finite numbers [clients, numbers]", list(messages.shape))
    largest = 2.0 ** (modulus_bits - scale_bits - MARGIN)
    peak = np.abs(messages).sum(0).max()
    if peak >= largest:
        hint = "Shorter messages, fewer scale_bits or more modulus_bits."
        validate.fail("messages", f"sums below {largest:g}, or they could wrap around", float(peak), hint)
    try:
        import tenseal
    except ImportError as missing:
        hint = "pip install 'fedjax_sim[homomorphic]'; homomorphic_mean needs no such package."
        raise ImportError(f"tenseal: expected to be installed. {hint}") from missing
    special = min(60, LIMITS[degree] - modulus_bits)
    clients = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS, poly_modulus_degree=degree, coeff_mod_bit_sizes=[modulus_bits, special]
    )
    clients.global_scale = 2.0**scale_bits
    server = tenseal.context_from(clients.serialize(save_secret_key=False))
    number, size = messages.shape
    bytes_up, bytes_down, found = np.zeros(number, np.int64), 0, []
    for start in range(0, size, degree // 2):
        blocks = [tenseal.ckks_vector(clients, x[start : start + degree // 2]).serialize() for x in messages]
        bytes_up += [len(sent) for sent in blocks]
        sent = reduce(operator.add, (tenseal.ckks_vector_from(server, sent) for sent in blocks)).serialize()
        bytes_down += len(sent)
        found.append(np.asarray(tenseal.ckks_vector_from(clients, sent).decrypt()))
    result, std = np.concatenate(found), homomorphic_std(degree, scale_bits, number)
    bound = std / math.sqrt(2) * math.log(size / 1e-9)
    expansion = float(bytes_up.mean() / (4 * size))
    return EncryptedSum(result, result - messages.sum(0), std, bound, bytes_up, bytes_down, expansion)


def _ciphertexts(dimension: int, degree: int) -> int:
    return -(-dimension // (degree // 2))


def _check(degree: int, modulus_bits: int, scale_bits: int) -> None:
    validate.one_of("degree", degree, LIMITS)
    validate.integer("modulus_bits", modulus_bits, 30, 60, hint="Its prime fits a word of 64 bits.")
    hint = f"At least {MARGIN + 1} bits are left for a sum."
    validate.integer("scale_bits", scale_bits, 10, modulus_bits - MARGIN - 1, hint=hint)
