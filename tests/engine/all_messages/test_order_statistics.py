"""Order statistics and largest entries by radix order_statistics, against NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedjax_sim.engine import median, order_statistic, top_k, top_k_mask, trimmed_mean
from fedjax_sim.engine.all_messages import order_statistics
from tests.laws import cases

pytestmark = pytest.mark.optimised(False)  # these laws do not depend on the compiler

TYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
ordered = jax.jit(order_statistic)
middle = jax.jit(median)
trimmed = jax.jit(trimmed_mean)


def messages(m: int, d: int, dtype=jnp.float32, seed: int = 0) -> np.ndarray:
    """Columns in turn: normal numbers, many ties, zeros of both signs, tiny and subnormal numbers, infinities."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((m, d))
    x[:, 1::5] = np.round(x[:, 1::5])
    x[:, 2::5] = np.where(generator.random((m, d))[:, 2::5] < 0.5, -0.0, 0.0)
    x[:, 3::5] *= 1e-39 if dtype != jnp.float16 else 1e-6
    x[0, 4::5], x[1, 4::5] = np.inf, -np.inf
    return np.asarray(jnp.asarray(x, dtype))


def sorted_rows(x: np.ndarray) -> np.ndarray:
    """Rows in order of value, -0.0 below +0.0."""
    wide = x.astype(np.float64)
    order = np.lexsort((~np.signbit(wide), wide), axis=0)
    return np.take_along_axis(x, order, axis=0)


def same_bits(a, b) -> bool:
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("dtype", cases.rows(TYPES, TYPES[:2]))
def test_order_statistics_equal_numpy(dtype):
    """Catches a wrong byte, a wrong sign order, ties and zeros mixed up, a flush of subnormal numbers.

    Every rank of 11 messages, one rank for each column, and ranks out of range, which are NaN.
    """
    x = messages(11, 40, dtype)
    expected = sorted_rows(x)
    for rank in range(11):
        assert same_bits(ordered(x, rank), expected[rank])
    ranks = np.arange(40) % 11
    assert same_bits(ordered(x, ranks), expected[ranks, np.arange(40)])
    assert np.isnan(np.asarray(ordered(x, -1), np.float64)).all()
    assert np.isnan(np.asarray(ordered(x, 11), np.float64)).all()


def test_many_messages():
    """Catches a byte counter that overflows: more than 255 messages, all of them equal in the first byte or wholly."""
    x = messages(1000, 15).copy()
    x[:, 5], x[:, 6] = 2.5, 1 + np.arange(1000) / 4096
    expected = sorted_rows(x)
    for rank in (0, 1, 255, 256, 499, 998, 999):
        assert same_bits(ordered(x, rank), expected[rank])


@pytest.mark.full
def test_double_precision():
    """Catches a select that finds four bytes of eight."""
    with jax.enable_x64(True):
        x = np.random.default_rng(1).standard_normal((10, 8))
        x[2] = np.nextafter(x[1], 9)
        x[0] = 0.1  # a first number whose lower half is not zero
        for first in (1, 0):  # an odd number, and an even one
            valid, some = np.arange(10) >= first, x[first:]
            assert same_bits(ordered(x, 4, valid), np.sort(some, axis=0)[4])
            assert same_bits(middle(x, valid), np.median(some, axis=0))
            assert np.allclose(trimmed(x, 2, valid), np.sort(some, axis=0)[2:-2].mean(0), rtol=1e-15, atol=1e-16)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(width=32, allow_nan=False), st.booleans()), min_size=12, max_size=12))
def test_any_messages_and_masks(rows):
    """Catches absent messages that count: any floats, any messages absent, which then hold NaN."""
    x, valid = np.array([r[0] for r in rows], np.float32), np.array([r[1] for r in rows])
    present = sorted_rows(x[valid, None])
    x = np.where(valid, x, np.nan).astype(np.float32)[:, None]
    for rank in (0, valid.sum() // 2, 11):
        got = ordered(x, int(rank), valid)
        if rank < valid.sum():
            assert same_bits(got, present[rank])
        else:
            assert np.isnan(got).all()


def test_median_equals_numpy():
    """Odd and even numbers of messages, absent ones, none at all. Catches the lower middle one taken alone."""
    for m, absent in ((11, 0), (11, 1), (11, 2), (11, 10), (11, 11)):
        x = messages(m, 40)[:, [j for j in range(40) if j % 5 < 3]]
        valid = np.random.default_rng(m + absent).permutation(m) >= absent
        got = middle(np.where(valid[:, None], x, np.nan), valid)
        if absent == m:
            assert np.isnan(got).all()
        else:
            assert np.array_equal(got, np.median(x[valid], axis=0))
    big = np.full((12, 40), 3e38, np.float32)
    big[6:] = 3.1e38
    assert np.allclose(middle(big[1:], np.arange(11) < 10), 3.05e38), "the sum of the two middle ones overflows"


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("dtype", cases.rows(TYPES, TYPES[:2]))
def test_trimmed_mean_equals_numpy(dtype):
    """Ties at the cut, absent messages, a trim for each column. Catches ties that are dropped, or all kept."""
    x = messages(41, 40, dtype)
    valid = np.arange(41) % 7 != 3
    trim = 1 + np.arange(40) % 5
    got = np.asarray(trimmed(np.where(valid[:, None], x, np.asarray(np.nan, x.dtype)), trim, valid), np.float64)
    present = sorted_rows(x[valid]).astype(np.float64)
    unit, tiny = float(jnp.finfo(dtype).eps), max(1e-37, float(jnp.finfo(dtype).smallest_subnormal))
    for j in range(40):
        kept = present[trim[j] : valid.sum() - trim[j], j]
        assert abs(got[j] - kept.mean()) <= 2 * unit * abs(kept.mean()) + 2.0**-28 * np.abs(kept).max() + tiny, j
    for wrong in (18, -1):
        assert np.isnan(np.asarray(trimmed(x, np.full(40, wrong), valid), np.float64)).all()


def test_trimmed_mean_ignores_what_it_trims():
    """Catches a sum that loses digits to the trimmed messages: 1e30 and infinity beside ones."""
    x = np.ones((12, 3), np.float32)
    x[:4] = [[1e30], [-1e30], [np.inf], [-np.inf]]
    x[4] = 1.5
    assert np.allclose(trimmed(x, 2), 1 + 0.5 / 8, rtol=1e-7)


RULES = {
    "order_statistic": functools.partial(order_statistic, rank=7),
    "median": median,
    "trimmed_mean": functools.partial(trimmed_mean, trim=6),
}


@pytest.mark.parametrize("name", cases.rows(RULES, ["trimmed_mean"]))
def test_order_padding_and_blocks_change_no_bit(name, monkeypatch):
    """Catches float sums in the order of arrival, and a last block of columns that is left out."""
    x = messages(41, 1000)[:, [j for j in range(1000) if j % 5 != 4]]
    order = np.random.default_rng(3).permutation(41)
    padded = np.concatenate([x[order], np.full((9, x.shape[1]), np.nan, np.float32)])
    there = np.arange(50) < 41
    fn = RULES[name]
    plain = np.asarray(jax.jit(fn)(x))
    monkeypatch.setattr(order_statistics, "_BLOCK_BYTES", 50 * 64)
    assert same_bits(jax.jit(lambda x, valid: fn(x, valid=valid))(padded, there), plain)


@pytest.mark.full
@pytest.mark.parametrize("name", cases.rows(RULES, ["trimmed_mean"]))
def test_columns_on_two_devices(name):
    """Catches anything that crosses columns: a device for each half of the coordinates gives the same bits."""
    from jax.sharding import AxisType, PartitionSpec

    mesh = jax.make_mesh((2,), ("columns",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = messages(41, 40)[:, [j for j in range(40) if j % 5 != 4]]
    fn, whole, parts = RULES[name], PartitionSpec(None, "columns"), PartitionSpec("columns")
    halves = jax.shard_map(fn, mesh=mesh, in_specs=whole, out_specs=parts, check_vma=False)
    assert same_bits(jax.jit(halves)(x), jax.jit(fn)(x))


def test_messages_of_any_shape():
    """Catches a wrong reshape."""
    x = np.random.default_rng(0).standard_normal((5, 2, 3)).astype(np.float32)
    assert same_bits(middle(x), np.median(x, axis=0))
    assert middle(x[:, :, :0]).shape == (2, 0)
    assert float(middle(x[:, 0, 0])) == np.median(x[:, 0, 0])


def test_wrong_input_is_refused():
    """Catches integers read as floats, and masks that broadcast."""
    x = jnp.ones((3, 2))
    with pytest.raises(ValueError, match="values: expected floats"):
        median(jnp.ones((3, 2), jnp.int32))
    with pytest.raises(ValueError, match="valid: expected"):
        median(x, jnp.ones((3, 2), bool))
    with pytest.raises(ValueError, match="rank: expected integers"):
        order_statistic(x, jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="x: expected a vector"):
        top_k(x, 1)
    with pytest.raises(ValueError, match="k: expected an integer"):
        top_k_mask(x[0], 3)


def vectors(d: int, dtype) -> list[np.ndarray]:
    generator = np.random.default_rng(d)
    plain = 100 * generator.standard_normal(d)
    return [np.asarray(jnp.asarray(x).astype(dtype)) for x in (plain, np.round(plain / 50), np.zeros(d))]


@functools.partial(jax.jit, static_argnums=1)
def largest(x, k):
    return *top_k(x, k), top_k_mask(x, k)


FEW, MANY = (7, (3,)), (20_011, (20, 5_000))
DTYPES = (*TYPES, jnp.int32, jnp.int8, jnp.uint8)
CASES = {f"{dtype.__name__}-{size[0]}": (dtype, *size) for dtype in DTYPES for size in (FEW, MANY)}


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("name", cases.rows(CASES, ["bfloat16-7", "float32-20011", "int32-7", "int8-7"]))
def test_top_k_equals_a_stable_sort(name):
    """Catches ties broken by anything but the lowest index, a k that is off by one, a magnitude of the wrong dtype.

    20,011 entries take both roads on CPU: `lax.top_k` for 20 of them and radix select for 5,000.
    """
    dtype, d, ks = CASES[name]
    for k in ks:
        for x in vectors(d, dtype):
            expected = np.sort(np.argsort(-np.abs(x.astype(np.float64)), kind="stable")[:k])
            values, indices, mask = largest(x, k)
            assert np.array_equal(indices, expected) and same_bits(values, x[expected])
            assert np.array_equal(np.flatnonzero(mask), expected)


def test_the_largest_negative_integer_is_the_largest_magnitude():
    """Catches |-2^31| = -2^31."""
    x = jnp.array([2**31 - 1] * 5 + [-(2**31), 5], jnp.int32)
    assert largest(x, 3)[1].tolist() == [0, 1, 5]


def repeated(x, weights):
    """Each message as often as it counts."""
    return np.repeat(x, weights, axis=0)


def test_weights_are_copies():
    """Catches weights of another message, absent ones that count, and a cut that does not divide a message."""
    x = messages(23, 40)[:, [j for j in range(40) if j % 5 < 3]]
    weights = np.random.default_rng(4).integers(1, 400, 23).astype(np.int32)
    for valid in (np.ones(23, bool), np.arange(23) % 4 != 1):
        copies = repeated(x[valid], weights[valid])
        got = jax.jit(median)(np.where(valid[:, None], x, np.nan), valid, weights)
        assert np.array_equal(got, np.median(copies, axis=0))
        trim = len(copies) // 3
        got = jax.jit(trimmed_mean)(np.where(valid[:, None], x, np.nan), trim, valid, weights)
        kept = np.sort(copies.astype(np.float64), axis=0)[trim : len(copies) - trim]
        np.testing.assert_allclose(got, kept.mean(0), rtol=1e-6, atol=1e-6)
