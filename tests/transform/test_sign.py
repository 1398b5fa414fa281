"""Signs, exponents and narrower floats."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fedjax_sim.transform import cast, chain, natural_compression, scaled_sign, stateless
from fedjax_sim.transform.chain import wire_of
from fedjax_sim.types import Wire
from tests.refusals import refused
from tests.transform import statistics as s

KEY = jax.random.key(0)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("scope", ["vector", "leaf"])
def test_sign_contracts_as_declared(scope):
    """|x|^2 - |x|_1^2 / d, never above (1 - 1/d) |x|^2, and reached by a single number. Catches a scale by the norm, a
    mean over leaves for one over the update, and zeros that are left out of the mean."""
    member = scaled_sign(scope=scope)
    assert not member.facts.unbiased and not member.facts.nonexpansive and member.facts.exact_error
    send = jax.jit(lambda update: member.on_client(KEY, update, (), ())[0])
    rows = s.updates() | {"one": np.eye(1, 64, 50)[0].astype(np.float32), "tiny": np.full(64, 1e-37, np.float32)}
    for x in rows.values():
        sent = s.joined(send(s.split(jnp.asarray(x))))
        x = x.astype(np.float64)
        parts = [slice(0, 64)] if scope == "vector" else [slice(0, 48), slice(48, 64)]
        expected = sum(x[i] @ x[i] - np.abs(x[i]).sum() ** 2 / x[i].size for i in parts)
        assert member.squared_error(s.split(x)) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert np.square(sent - x).sum() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert expected <= (1 - 1 / 64) * (x @ x) * (1 + 1e-9)
        assert sent @ sent <= x @ x * (1 + 1e-5) and ((sent < 0) == (x < 0))[np.abs(sent) > 1e-30].all()
    assert (s.joined(send(s.split(jnp.zeros(64)))) == 0).all()
    assert not np.isfinite(s.joined(send(s.split(jnp.zeros(64).at[3].set(jnp.nan))))[:48]).any()


@pytest.mark.optimised
def test_natural_compression_is_unbiased():
    """Means and errors of five updates, and of numbers below 2^-126. Catches the exponent rounded to the nearest, a
    coin of fewer bits than the mantissa has, and smallest numbers that vanish."""
    member = natural_compression()
    assert member.facts.unbiased and member.facts.exact_error
    error = jax.jit(member.squared_error)
    for kind, sent in s.draws(member).items():
        update = s.updates()[kind].astype(np.float64)
        s.check_mean(sent, update)
        declared = member.squared_error(s.split(update))
        s.check_error(sent, update, declared)
        assert declared <= update @ update / 8
        assert error(s.split(jnp.float32(update))) == pytest.approx(declared, rel=1e-5)
    wrong = member.squared_error(s.split(update)) * 1.03
    with pytest.raises(AssertionError):
        s.check_error(sent, update, wrong)
    assert member.squared_error(np.array([1.5])) == 0.25  # the worst: 1.5^2 / 9, below 1 / 8
    assert member.squared_error(np.array([4 / 3])) == pytest.approx((4 / 3) ** 2 / 8)
    tiny = np.frombuffer(np.uint32([0x00200000, 0x80600000]).tobytes(), np.float32)  # a quarter, -3/4 of 2^-126
    send = jax.jit(jax.vmap(lambda key, x: member.on_client(key, x, (), ())[0], (0, None)))
    bits = np.asarray(send(jax.random.split(KEY, 10_000), tiny)).view(np.uint32)
    assert set(np.unique(bits)) == {0, 0x00800000, 0x80000000, 0x80800000}
    np.testing.assert_allclose((bits & 0x7FFFFFFF > 0).mean(0), [0.25, 0.75], atol=6 * 0.0044)


@pytest.mark.optimised
def test_powers_of_two_stay():
    """Every exponent of float32; past the last power, that one; NaN and infinity as they are; no limit of float16."""
    send = jax.jit(lambda update: natural_compression().on_client(KEY, update, (), ())[0])
    powers = np.ldexp(np.float32(1), np.arange(-126, 128))
    update = np.concatenate([powers, -powers, [0.0, -0.0]]).astype(np.float32)
    sent = np.asarray(send(jnp.asarray(update)))
    assert sent.tobytes() == update.tobytes()
    odd = jnp.array([3e38, -3e38, np.inf, -np.inf, np.nan], jnp.float32)
    np.testing.assert_array_equal(send(odd), np.float32([2.0**127, -(2.0**127), np.inf, -np.inf, np.nan]))
    assert set(send(jnp.full(40, 60_000, jnp.float16)).tolist()) == {2**15, 2**16}


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.optimised
def test_cast_is_the_nearest_number(name):
    """Against NumPy's own conversion, bit for bit, inside a compiled program too. Catches truncation, infinities past
    the range, small numbers flushed to zero, and a round trip that the compiler removes."""
    member, narrow = cast(name), np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else np.float16)
    rng = np.random.default_rng(4)
    x = (rng.normal(size=5000) * 10.0 ** rng.uniform(-9, 4, 5000)).astype(np.float32)
    update = {"plain": jnp.asarray(x), "empty": jnp.zeros(0), "half": jnp.ones(3, jnp.bfloat16)}
    sent, _, measured = jax.jit(member.on_client)(KEY, update, (), ())
    limit = float(jnp.finfo(narrow).max)
    expected = np.clip(x, -limit, limit).astype(narrow).astype(np.float32)
    assert np.asarray(sent["plain"]).tobytes() == expected.tobytes() != x.tobytes()
    assert sent["half"].dtype == narrow
    if name == "float16":
        assert measured["clipped_share"].total == (np.abs(x) > limit).sum()
        big = member.on_client(KEY, jnp.array([1e6, -1e30, np.inf, np.nan]), (), ())[0]
        np.testing.assert_array_equal(big, np.float32([65504, -65504, np.inf, np.nan]))


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_cast_error_is_exact(name):
    """Of float32 and of float64 updates, compiled. Catches the error of a conversion that a compiler skipped: zero."""
    member = cast(name)
    x = s.updates()["gaussian"]
    sent = s.joined(member.on_client(KEY, s.split(jnp.asarray(x)), (), ())[0])
    expected = np.square(sent - x.astype(np.float64)).sum()
    assert expected > 0 and not member.facts.unbiased
    assert member.squared_error(s.split(x.astype(np.float64))) == pytest.approx(expected, rel=1e-9)
    assert jax.jit(member.squared_error)(s.split(jnp.asarray(x))) == pytest.approx(expected, rel=1e-5)


def test_wire_bits():
    """Exact integers; what comes in sparse stays sparse where zeros do. Catches signs that pay for few numbers only."""
    spec = {"a": jnp.zeros((8, 6)), "b": jnp.zeros(16), "none": jnp.zeros((0, 3))}
    sparse = stateless(lambda key, x: x, wire=lambda spec, wire: Wire(10, 320, 60))
    for member, wire in (
        (scaled_sign(), Wire(64, 64, 32)),
        (scaled_sign(scope="leaf"), Wire(64, 64, 64)),
        (natural_compression(), Wire(64, 576)),
        (cast(), Wire(64, 1024)),
        (chain(sparse, scaled_sign()), Wire(64, 64, 32)),
        (chain(sparse, natural_compression()), Wire(10, 90, 60)),
        (chain(sparse, cast("float16")), Wire(10, 160, 60)),
        (chain(natural_compression(), cast()), Wire(64, 576)),
    ):
        assert wire_of(member, spec) == wire


def test_wrong_options_are_refused():
    """Catches names that mean nothing."""
    with refused("dtype", value="float32", rule="'bfloat16'"):
        cast("float32")
    with pytest.raises(ValueError, match="scope: expected one of 'vector', 'leaf'"):
        scaled_sign(scope="block")
