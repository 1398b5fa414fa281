"""Cryptography of secure aggregation, on the host: key agreement, seals, signatures, masks, shares of secrets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.aggregation.secure.ring import PRIME, Ring

__all__ = [
    "FIELD",
    "KEY_BYTES",
    "SEAL_BYTES",
    "SHARE_BYTES",
    "SIGNATURE_BYTES",
    "agreed_secret",
    "centered_representatives",
    "check_installed",
    "is_signed",
    "mask",
    "opened_secret",
    "packed",
    "private_key",
    "public_key",
    "random_bytes",
    "reduced",
    "seal",
    "secret_shares",
    "sign",
    "signed_sum",
    "signing_key",
    "unpacked",
    "unseal",
]

FIELD = 2**256 + 297  # the least prime past 2^256: secrets of 256 bits are below it
KEY_BYTES, SHARE_BYTES, SEAL_BYTES = 32, 33, 16  # of a key, of a share, and what a seal adds
SIGNATURE_BYTES = 64


def check_installed() -> None:
    """Raises ImportError without the package `cryptography`, naming the extra."""
    try:
        import cryptography  # noqa: F401  (an extra)
    except ImportError as missing:
        hint = "pip install 'fedjax_sim[secagg]'; aggregation.secure_sum simulates the same protocol without it."
        raise ImportError(f"cryptography: expected to be installed. {hint}") from missing


def random_bytes(seed: bytes, label: str, number: int) -> bytes:
    """Bytes that look random to whoever does not know the seed: SHAKE-256 of label and seed."""
    return hashlib.shake_256(label.encode() + b"\0" + seed).digest(number)


def private_key(raw: bytes) -> Any:
    """An X25519 private key of 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(raw)


def public_key(key: Any) -> bytes:
    """The 32 bytes of a private key's public half."""
    return key.public_key().public_bytes_raw()


def agreed_secret(key: Any, public: bytes, label: str) -> bytes:
    """The 32 bytes that a private key and somebody's public one agree on for a purpose: X25519, then HKDF-SHA256.

    Guarantees: both sides agree, and nobody else
    (tests/aggregation/secure/protocol/test_primitives.py::test_two_sides_agree).

    References: RFC 7748; RFC 5869.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = key.exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), KEY_BYTES, None, label.encode()).derive(secret)


def seal(key: bytes, data: bytes) -> bytes:
    """AES-256-GCM, 16 bytes longer than the data; a key may seal once, for the nonce is 0."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key).encrypt(bytes(12), data, None)


def unseal(key: bytes, sealed: bytes) -> bytes:
    """What was sealed.

    Raises: `cryptography.exceptions.InvalidTag` for another key, and if a bit was changed.

    Guarantees: tests/aggregation/secure/protocol/test_primitives.py::test_seals_break.
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key).decrypt(bytes(12), sealed, None)


def signing_key(raw: bytes) -> Any:
    """An Ed25519 private key of 32 bytes (RFC 8032); `public_key` has its public half."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(raw)


def sign(key: Any, label: str, data: bytes) -> bytes:
    """The 64 bytes by which the owner of a key stands for data, said for a purpose."""
    return key.sign(label.encode() + b"\0" + data)


def is_signed(public: bytes, label: str, data: bytes, signature: bytes) -> bool:
    """Whether the owner of a public key signed just this data for this purpose.

    Guarantees: tests/aggregation/secure/protocol/test_primitives.py::test_signatures_break.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, label.encode() + b"\0" + data)
    except InvalidSignature:
        return False
    return True


def mask(ring: Ring, seed: bytes, size: int) -> np.ndarray:
    """[size] uint64 pseudorandom elements of a ring, from 32 bytes: the key stream of AES-256-CTR.

    In the prime field words that are not below the prime are passed over, so all elements are equally likely.

    Guarantees: uniform (tests/aggregation/secure/protocol/test_primitives.py::test_masks_are_uniform).
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    dtype = np.dtype("<u4" if ring.words == 1 else "<u8")
    top = np.uint64((1 << ring.bits) - 1)
    found = np.zeros(0, np.uint64)
    while found.size < size:
        drawn = np.frombuffer(stream.update(bytes((size - found.size) * dtype.itemsize)), dtype).astype(np.uint64) & top
        found = np.concatenate([found, drawn[drawn != PRIME] if ring.prime else drawn])
    return found


def reduced(ring: Ring, numbers: np.ndarray) -> np.ndarray:
    """uint64: the elements of int64 numbers."""
    numbers = np.asarray(numbers, np.int64)
    if ring.prime:
        return (numbers % PRIME).astype(np.uint64)
    return numbers.astype(np.uint64) & np.uint64(ring.modulus - 1)


def signed_sum(ring: Ring, a: np.ndarray, b: np.ndarray, sign: int = 1) -> np.ndarray:
    """a + sign b, for elements and a sign of 1 or -1."""
    q = np.uint64(ring.modulus & (2**64 - 1))  # 0 for 2^64, where words wrap by themselves
    total = a + b if sign > 0 else a + (q - b)
    return total % q if ring.prime else total & np.uint64(ring.modulus - 1)


def centered_representatives(ring: Ring, a: np.ndarray) -> np.ndarray:
    """int64 numbers in [-q/2, q/2) whose elements these are, q the modulus."""
    above = a >= np.uint64((ring.modulus + 1) // 2)
    return np.where(above, a - np.uint64(ring.modulus & (2**64 - 1)), a).astype(np.int64)


def packed(ring: Ring, a: np.ndarray) -> bytes:
    """Elements as they are sent: `ring.bits` bits each, one after the other.

    Guarantees: `unpacked` gives them back (tests/aggregation/secure/protocol/test_primitives.py::test_packing).
    """
    bits = np.unpackbits(a.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    return np.packbits(bits[:, : ring.bits], bitorder="little").tobytes()


def unpacked(ring: Ring, sent: bytes, size: int) -> np.ndarray:
    """[size] uint64: the elements of `packed`."""
    bits = np.unpackbits(np.frombuffer(sent, np.uint8), count=size * ring.bits, bitorder="little")
    whole = np.zeros((size, 64), np.uint8)
    whole[:, : ring.bits] = bits.reshape(size, ring.bits)
    return np.packbits(whole, axis=1, bitorder="little").view("<u8")[:, 0].astype(np.uint64)


def secret_shares(seed: bytes, secret: bytes, threshold: int, holders: Iterable[int]) -> dict[int, int]:
    """Shamir's shares of a secret of 32 bytes, by holder >= 0; any `threshold` of them open it.

    A holder's share is the value at holder + 1 of a polynomial whose other coefficients are 384 pseudorandom bits
    modulo p = 2^256 + 297 (uniform but for 2^-127).

    Guarantees: all subsets of a small case (tests/aggregation/secure/protocol/test_primitives.py::test_shares).

    References: Shamir 1979.
    """
    drawn = random_bytes(seed, "coefficients", 48 * (threshold - 1))
    coefficients = [int.from_bytes(drawn[i : i + 48], "little") % FIELD for i in range(0, len(drawn), 48)]
    coefficients.append(int.from_bytes(secret, "little"))

    def at(point):
        value = 0
        for x in coefficients:
            value = (value * point + x) % FIELD
        return value

    return {holder: at(holder + 1) for holder in holders}


def opened_secret(held: Mapping[int, int], threshold: int) -> bytes:
    """The 32 bytes of a secret, from the shares of at least `threshold` holders.

    Raises: ValueError for fewer shares, and for shares of no secret of 32 bytes.
    """
    if len(held) < threshold:
        validate.fail("held", f"at least {threshold} shares", len(held))
    first = tuple(sorted(held)[:threshold])
    secret = sum(held[holder] * factor for holder, factor in zip(first, _factors(first), strict=True)) % FIELD
    if secret >> 256:
        validate.fail("held", "shares of one secret", "shares that do not belong together")
    return secret.to_bytes(KEY_BYTES, "little")


@lru_cache(maxsize=512)
def _factors(holders: tuple[int, ...]) -> list[int]:
    """Lagrange's at 0: prod_{j != i} x_j / (x_j - x_i)."""
    factors = []
    for i in holders:
        above = below = 1
        for j in holders:
            if j != i:
                above, below = above * (j + 1) % FIELD, below * (j - i) % FIELD
        factors.append(above * pow(below, -1, FIELD) % FIELD)
    return factors
