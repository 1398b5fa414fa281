"""The cryptography of secure aggregation: agreement, seals, masks, packing, shares of large secrets."""

from __future__ import annotations

import hmac
import itertools

import numpy as np
import pytest
from scipy import stats

from fedjax_sim.aggregation.secure.protocol import primitives as crypto
from fedjax_sim.aggregation.secure.ring import PRIME, Ring

pytest.importorskip("cryptography", reason="the extra `secagg` is not installed")
RNG = np.random.default_rng(0)
RINGS = [Ring(2), Ring(20), Ring(31), Ring(32), Ring(33), Ring(64), Ring(31, prime=True)]


def keys(name):
    key = crypto.private_key(crypto.random_bytes(b"seed", name, 32))
    return key, crypto.public_key(key)


def test_two_sides_agree():
    """And not with a third, nor for another purpose; RFC 7748's exchange (section 6.1), and RFC 5869's two HMACs.

    Catches an agreement on something public.
    """
    (a, public_a), (b, public_b), (_, public_c) = keys("a"), keys("b"), keys("c")
    assert crypto.agreed_secret(a, public_b, "mask") == crypto.agreed_secret(b, public_a, "mask")
    ways = (a, public_b, "mask"), (a, public_b, "seal"), (a, public_c, "mask"), (b, public_b, "mask")
    assert len({crypto.agreed_secret(*way) for way in ways}) == 4
    bob = crypto.private_key(bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"))
    alice = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    assert crypto.public_key(bob).hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    shared = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    extracted = hmac.digest(bytes(32), shared, "sha256")
    assert crypto.agreed_secret(bob, alice, "mask") == hmac.digest(extracted, b"mask\x01", "sha256")


def test_seals_break():
    """Catches encryption without authentication."""
    from cryptography.exceptions import InvalidTag

    key, data = bytes(range(32)), b"sixty-six bytes of two shares"
    sealed = crypto.seal(key, data)
    assert crypto.unseal(key, sealed) == data and len(sealed) == len(data) + crypto.SEAL_BYTES
    for wrong in (bytes([sealed[0] ^ 1]) + sealed[1:], sealed[:-1] + bytes([sealed[-1] ^ 128])):
        with pytest.raises(InvalidTag):
            crypto.unseal(key, wrong)
    with pytest.raises(InvalidTag):
        crypto.unseal(bytes(32), sealed)


@pytest.mark.parametrize("ring", RINGS)
def test_masks_are_uniform(ring):
    """Chi-square of the top and lowest bits, p > 1e-5; in the ring; another seed gives another mask, a longer
    one begins with a shorter one.

    Catches words that are not cut to the ring.
    """
    found = crypto.mask(ring, bytes(range(32)), 20_000)
    assert found.dtype == np.uint64 and int(found.max()) < ring.modulus
    bits = min(ring.bits, 4)
    for cells in (found >> np.uint64(ring.bits - bits), found & np.uint64(2**bits - 1)):
        assert stats.chisquare(np.bincount(cells.astype(int), minlength=2**bits)).pvalue > 1e-5
    assert (crypto.mask(ring, bytes(32), 20_000) != found).any()
    np.testing.assert_array_equal(crypto.mask(ring, bytes(range(32)), 99), found[:99])


def test_words_past_the_prime_are_passed_over(monkeypatch):
    """With a prime of 3 of 4 values. Catches a remainder, which would make 0 twice as likely."""
    monkeypatch.setattr(crypto, "PRIME", 3)
    found = crypto.mask(Ring(2, prime=True), bytes(range(32)), 9000)
    assert found.size == 9000 and found.max() == 2
    assert stats.chisquare(np.bincount(found.astype(int), minlength=3)).pvalue > 1e-5


@pytest.mark.parametrize("ring", RINGS)
def test_arithmetic(ring):
    """Python's integers. Catches a wrap at 64 bits in place of the modulus."""
    q, edge = ring.modulus, [0, 1, -1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), PRIME, -PRIME]
    x = np.concatenate([RNG.integers(-(2**63), 2**63 - 1, 200), edge])
    y = RNG.permutation(x)
    a, b = crypto.reduced(ring, x), crypto.reduced(ring, y)
    assert [int(i) for i in a] == [int(i) % q for i in x]
    for sign in (1, -1):
        expected = [(int(i) + sign * int(j)) % q for i, j in zip(x, y, strict=True)]
        assert [int(i) for i in crypto.signed_sum(ring, a, b, sign)] == expected
    assert [int(i) for i in crypto.centered_representatives(ring, a)] == [(int(i) + q // 2) % q - q // 2 for i in x]


@pytest.mark.parametrize("ring", RINGS)
def test_packing(ring):
    """Catches bits of one element that run into the next."""
    for size in (1, 7, 100):
        a = crypto.mask(ring, bytes(32), size)
        sent = crypto.packed_elements(ring, a)
        assert len(sent) == -(-size * ring.bits // 8)
        np.testing.assert_array_equal(crypto.unpacked_elements(ring, sent, size), a)


def test_shares():
    """Every 3 of 5 holders open the secret, 2 do not, also where it is the largest; a share fits its bytes; the field
    is one, by Fermat at many bases.

    Catches a field that does not hold 256 bits, and holders that are counted from 0.
    """
    assert all(pow(base, crypto.FIELD - 1, crypto.FIELD) == 1 for base in range(2, 60))
    for secret in (b"\xff" * 32, bytes(32), RNG.bytes(32)):
        held = crypto.secret_shares(b"seed", secret, 3, [0, 1, 5, 6, 300])
        assert max(held.values()).bit_length() <= 8 * crypto.SHARE_BYTES and secret not in held.values()
        for some in itertools.combinations(held, 3):
            assert crypto.opened_secret({holder: held[holder] for holder in some}, 3) == secret
        with pytest.raises(ValueError, match="held: expected at least 3 shares, got 2"):
            crypto.opened_secret({0: held[0], 1: held[1]}, 3)
    assert crypto.opened_secret({0: 2**255, 1: 2**255}, 1) == (2**255).to_bytes(32, "little")
    with pytest.raises(ValueError, match="do not belong together"):
        crypto.opened_secret({0: 2**256 + 1}, 1)


def test_signatures_break():
    """Catches a signature of another key, purpose or text that passes."""
    key, other = (crypto.signing_key(bytes([i]) * 32) for i in (1, 2))
    signature, public = crypto.sign(key, "a", b"text"), crypto.public_key(key)
    assert len(signature) == crypto.SIGNATURE_BYTES and crypto.is_signed(public, "a", b"text", signature)
    wrong = [
        (public, "b", b"text", signature),
        (public, "a", b"texts", signature),
        (public, "a", b"text", signature[::-1]),
        (public, "a", b"text", b""),
        (crypto.public_key(other), "a", b"text", signature),
    ]
    assert not any(crypto.is_signed(*x) for x in wrong)
