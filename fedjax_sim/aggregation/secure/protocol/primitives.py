"""Cryptography of secure aggregation, on the host: key agreement, encryption, signatures, masks, secret sharing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.aggregation.secure.ring import PRIME, Ring

FIELD = 2**256 + 297  # the least prime past 2^256, so that every secret of 256 bits is an element
KEY_BYTES = 32
SHARE_BYTES = 33  # an element of the field has 257 bits
SEAL_BYTES = 16  # that encryption adds to a message
SIGNATURE_BYTES = 64


def check_cryptography_installed() -> None:
    """Checks that the package `cryptography` is installed.

    Raises: ImportError without it, naming the extra.
    """
    try:
        import cryptography  # noqa: F401  (an extra)
    except ImportError as missing:
        hint = "pip install 'fedjax_sim[secagg]'; aggregation.secure_sum simulates the same protocol without it."
        raise ImportError(f"cryptography: expected to be installed. {hint}") from missing


def random_bytes(seed: bytes, label: str, number: int) -> bytes:
    """Derives pseudorandom bytes from a seed and a label, by SHAKE-256.

    Args:
      seed: secret bytes.
      label: the purpose; other labels give independent bytes.
      number: of bytes.
    """
    return hashlib.shake_256(label.encode() + b"\0" + seed).digest(number)


def private_key(raw: bytes) -> Any:
    """Makes an X25519 private key from 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(raw)


def public_key(key: Any) -> bytes:
    """Returns the 32 bytes of the public key of a private key."""
    return key.public_key().public_bytes_raw()


def agreed_secret(key: Any, public: bytes, label: str) -> bytes:
    """Computes the 32 bytes that two parties agree on, by X25519 and then HKDF-SHA256.

    Args:
      key: a private key of one party.
      public: the public key of the other party.
      label: the purpose; other labels give independent bytes.

    Guarantees: both parties compute the same bytes, and nobody else does
    (tests/aggregation/secure/protocol/test_primitives.py::test_two_sides_agree).

    References: RFC 7748; RFC 5869.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = key.exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), KEY_BYTES, None, label.encode()).derive(secret)


def seal(key: bytes, data: bytes) -> bytes:
    """Encrypts data with AES-256-GCM; the result is 16 bytes longer. A key may be used once, since the nonce is 0."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key).encrypt(bytes(12), data, None)


def unseal(key: bytes, sealed: bytes) -> bytes:
    """Decrypts what `seal` encrypted.

    Raises: `cryptography.exceptions.InvalidTag` for another key, and if a bit was changed.

    Guarantees: a changed bit in the first or in the last byte raises `InvalidTag`, and so does another key
    (tests/aggregation/secure/protocol/test_primitives.py::test_seals_break).
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key).decrypt(bytes(12), sealed, None)


def signing_key(raw: bytes) -> Any:
    """Makes an Ed25519 private key from 32 bytes (RFC 8032); `public_key` returns its public key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(raw)


def sign(key: Any, label: str, data: bytes) -> bytes:
    """Signs data for a purpose, the label; returns 64 bytes."""
    return key.sign(label.encode() + b"\0" + data)


def is_signed(public: bytes, label: str, data: bytes, signature: bytes) -> bool:
    """Returns whether the owner of a public key signed exactly this data for this purpose, the label.

    Guarantees: a signature is not valid for another key, label or text, and neither is a signature that is empty or
    whose bytes are reversed (tests/aggregation/secure/protocol/test_primitives.py::test_signatures_break).
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, label.encode() + b"\0" + data)
    except InvalidSignature:
        return False
    return True


def mask(ring: Ring, seed: bytes, size: int) -> np.ndarray:
    """Draws the pseudorandom elements of a mask from a seed: the key stream of AES-256-CTR.

    Args:
      ring: of the elements.
      seed: 32 bytes.
      size: the number of elements.

    Returns: [size] uint64. In the prime field, words that are not below the prime are skipped, so all elements are
    equally likely.

    Guarantees: the highest and the lowest four bits of 20,000 elements pass a chi-square test of uniformity, and a
    shorter mask of the same seed is the beginning of a longer one
    (tests/aggregation/secure/protocol/test_primitives.py::test_masks_are_uniform).
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    dtype = np.dtype("<u4" if ring.words == 1 else "<u8")
    bit_mask = np.uint64((1 << ring.bits) - 1)
    elements = np.zeros(0, np.uint64)
    while elements.size < size:  # more than one turn only where words were skipped
        key_stream = stream.update(bytes((size - elements.size) * dtype.itemsize))
        words = np.frombuffer(key_stream, dtype).astype(np.uint64) & bit_mask
        elements = np.concatenate([elements, words[words != PRIME] if ring.prime else words])
    return elements


def reduced(ring: Ring, numbers: np.ndarray) -> np.ndarray:
    """Converts int64 numbers to elements of the ring, uint64."""
    numbers = np.asarray(numbers, np.int64)
    if ring.prime:
        return (numbers % PRIME).astype(np.uint64)
    return numbers.astype(np.uint64) & np.uint64(ring.modulus - 1)


def signed_sum(ring: Ring, a: np.ndarray, b: np.ndarray, sign: int = 1) -> np.ndarray:
    """Computes a + sign b for elements a and b, with a sign of 1 or -1."""
    q = np.uint64(ring.modulus & (2**64 - 1))  # 0 for the modulus 2^64, where words wrap around by themselves
    total = a + b if sign > 0 else a + (q - b)
    return total % q if ring.prime else total & np.uint64(ring.modulus - 1)


def centered_representatives(ring: Ring, a: np.ndarray) -> np.ndarray:
    """Converts elements to the int64 numbers in [-q/2, q/2) that they represent, where q is the modulus."""
    is_negative = a >= np.uint64((ring.modulus + 1) // 2)
    return np.where(is_negative, a - np.uint64(ring.modulus & (2**64 - 1)), a).astype(np.int64)


def packed_elements(ring: Ring, a: np.ndarray) -> bytes:
    """Packs elements to bytes, `ring.bits` bits each, one after the other.

    Guarantees: `unpacked_elements` returns the elements
    (tests/aggregation/secure/protocol/test_primitives.py::test_packing).
    """
    bits = np.unpackbits(a.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    return np.packbits(bits[:, : ring.bits], bitorder="little").tobytes()


def unpacked_elements(ring: Ring, sent: bytes, size: int) -> np.ndarray:
    """Unpacks the bytes of `packed_elements`: [size] uint64 elements."""
    bits = np.unpackbits(np.frombuffer(sent, np.uint8), count=size * ring.bits, bitorder="little")
    bits_of_words = np.zeros((size, 64), np.uint8)
    bits_of_words[:, : ring.bits] = bits.reshape(size, ring.bits)
    return np.packbits(bits_of_words, axis=1, bitorder="little").view("<u8")[:, 0].astype(np.uint64)


def secret_shares(seed: bytes, secret: bytes, threshold: int, holders: Iterable[int]) -> dict[int, int]:
    """Splits a secret into Shamir's shares, of which any `threshold` shares open it.

    A holder's share is the value at holder + 1 of a polynomial with the secret as its constant. The other coefficients
    are 384 pseudorandom bits modulo p = 2^256 + 297, which are uniform but for 2^-127.

    Args:
      seed: secret bytes, from which the polynomial follows.
      secret: 32 bytes.
      threshold: at least 1.
      holders: integers of at least 0.

    Returns: the shares by holder, integers below p.

    Guarantees: every 3 of 5 holders open the secret, and 2 holders are refused
    (tests/aggregation/secure/protocol/test_primitives.py::test_shares).

    References: Shamir 1979.
    """
    raw = random_bytes(seed, "coefficients", 48 * (threshold - 1))
    coefficients = [int.from_bytes(raw[i : i + 48], "little") % FIELD for i in range(0, len(raw), 48)]
    coefficients.append(int.from_bytes(secret, "little"))  # the constant comes last, as Horner's rule needs it

    def value_at(point):
        value = 0
        for coefficient in coefficients:
            value = (value * point + coefficient) % FIELD
        return value

    return {holder: value_at(holder + 1) for holder in holders}  # not at 0, where the value is the secret


def opened_secret(held: Mapping[int, int], threshold: int) -> bytes:
    """Opens a secret of 32 bytes from its shares.

    Args:
      held: shares by holder; those of the first `threshold` holders are used.
      threshold: as in `secret_shares`.

    Raises: ValueError for fewer shares, and for shares that are not of one secret of 32 bytes.
    """
    if len(held) < threshold:
        validate.fail("held", f"at least {threshold} shares", len(held))
    holders = tuple(sorted(held)[:threshold])
    factors = _lagrange_factors(holders)
    secret = sum(held[holder] * factor for holder, factor in zip(holders, factors, strict=True)) % FIELD
    if secret >> 256:
        validate.fail("held", "shares of one secret", "shares that do not belong together")
    return secret.to_bytes(KEY_BYTES, "little")


@lru_cache(maxsize=512)
def _lagrange_factors(holders: tuple[int, ...]) -> list[int]:
    """Computes the factors of Lagrange interpolation at 0: prod_{j != i} x_j / (x_j - x_i), with x_i = i + 1."""
    factors = []
    for i in holders:
        numerator = denominator = 1
        for j in holders:
            if j != i:
                numerator = numerator * (j + 1) % FIELD
                denominator = denominator * (j - i) % FIELD
        factors.append(numerator * pow(denominator, -1, FIELD) % FIELD)
    return factors
