"""All messages side by side: NumPy's numbers, and the same bits on any devices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine
from fedjax_sim.engine.all_messages import messages as all_of
from fedjax_sim.engine.all_messages.rows import Rows
from tests.laws import laws

M, SPARE = 37, 3  # messages, and places without one
SHAPES = {"long": (2, 4999), "short": (10,), "one": (), "none": (0, 3)}
RNG = np.random.default_rng(0)
PLACE = RNG.permutation(M + SPARE)[:M].astype(np.int32)  # of each slot
SLOTS = RNG.permutation(M).astype(np.int32)  # in the order of ids
U = {name: RNG.normal(size=(M, *shape)).astype(np.float32) for name, shape in SHAPES.items()}  # by slot
FLAT = np.concatenate([U[name].reshape(M, -1) for name in sorted(U)], axis=1)[SLOTS].astype(np.float64)
POINT = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
WEIGHTS = np.where(np.arange(M) % 5 == 1, 0, RNG.uniform(0.5, 2, M)).astype(np.float32)
MATRIX = RNG.normal(size=(4, M)).astype(np.float32)
MEMBERS = RNG.integers(0, M, (5, 3)).astype(np.int32)


def rows(devices: int) -> Rows:
    """The messages at their places, which two more for each device make divisible."""
    places = -(-(M + SPARE) // devices) * devices
    values = {name: np.zeros((places, *shape), np.float32) for name, shape in SHAPES.items()}
    for name, x in U.items():
        values[name][PLACE] = x
    return Rows(jax.tree.map(jnp.asarray, values), jnp.asarray(PLACE), engine.device_mesh(devices))


def flat(tree) -> np.ndarray:
    leading = len(jnp.shape(tree["one"]))
    return np.concatenate([np.reshape(tree[name], (*np.shape(tree["one"])[:leading], -1)) for name in sorted(tree)], -1)


def found(work):
    """What becomes of the messages on one device, after the law that it is the same on two."""
    run = lambda rows: work(all_of.messages_of(rows, jnp.asarray(SLOTS)))  # noqa: E731
    one = jax.jit(run)(rows(1))
    laws.check_equal_bits(one, jax.jit(run)(rows(2)), "two devices")
    return jax.tree.map(np.asarray, one)


def test_distances():
    """Catches a leaf or a tile that is left out, rows in another order, and a last block that counts twice."""
    got = found(lambda x: (all_of.squared_distances(x), all_of.squared_distances(x, point=POINT)))
    for away, squares in zip((FLAT, FLAT - flat(POINT)), got, strict=True):
        np.testing.assert_allclose(squares, (away**2).sum(1), rtol=2.0**-20)


@pytest.mark.full
def test_inner_products():
    """Catches a point's leaves in another order."""
    got = found(functools.partial(all_of.inner_products, point=POINT))
    np.testing.assert_allclose(got, FLAT @ flat(POINT), rtol=1e-5, atol=1e-4)


@pytest.mark.full
def test_gaps():
    """Also of messages up to 2^99, in two groups of equal ones. Catches squares that overflow, or become NaN."""
    apart = ((FLAT[:, None] - FLAT[None]) ** 2).sum(-1)
    np.testing.assert_allclose(found(all_of.gaps), apart, rtol=1e-4)
    far = np.float32(2.0) ** np.array([99, 99, -40, -40, 40] + [0] * (M - 5), np.float32)
    same = {name: np.where(np.arange(M).reshape(-1, *[1] * (x.ndim - 1)) < 5, 1, x) for name, x in U.items()}
    huge = {name: (x * far.reshape(-1, *[1] * (x.ndim - 1))).astype(np.float32) for name, x in same.items()}
    by_slot = Rows(jax.tree.map(jnp.asarray, huge), jnp.arange(M, dtype=jnp.int32))
    got = np.asarray(jax.jit(lambda x: all_of.gaps(all_of.messages_of(x, jnp.arange(M))))(by_slot), np.float64)
    numbers = np.concatenate([huge[name].reshape(M, -1) for name in sorted(huge)], axis=1).astype(np.float64)
    with np.errstate(over="ignore"):
        expected = np.float64(np.float32(((numbers[:, None] - numbers[None]) ** 2).sum(-1)))
    assert got[0, 1] == got[2, 3] == 0 and np.isinf(got[0, 2:]).all() and np.isinf(got[4, 0])
    rest = np.ix_(range(2, M), range(2, M))
    np.testing.assert_allclose(got[rest], expected[rest], rtol=1e-4, atol=1e-4)


def test_weighted_sums():
    """Catches a group's padding that counts, and coefficients that belong to another message."""
    got = found(lambda x: all_of.weighted_sum(x, jnp.asarray(WEIGHTS)))
    np.testing.assert_allclose(flat(got), WEIGHTS.astype(np.float64) @ FLAT, rtol=1e-5, atol=1e-5)
    ones = {name: np.ones((M + SPARE, *shape), np.float32) for name, shape in SHAPES.items()}
    huge = Rows(ones | {"one": ones["one"] * 2.0**99}, jnp.asarray(PLACE))
    got = jax.jit(lambda x: all_of.weighted_sum(all_of.messages_of(x, jnp.asarray(SLOTS)), jnp.zeros(M)))(huge)
    assert not flat(got).any()


@pytest.mark.full
def test_a_mean_and_the_distances_from_it():
    """Catches distances from another leaf's mean, from a mean before its division, and a tile's left out."""
    mean, apart = found(functools.partial(all_of.mean_and_distances, weights=WEIGHTS))
    far = found(functools.partial(all_of.squared_distances, point=mean))
    laws.check_equal_bits(found(functools.partial(all_of.weighted_mean_of_messages, weights=WEIGHTS)), mean, "the mean")
    laws.check_equal_bits(far, apart, "the distances")
    np.testing.assert_allclose(apart, ((FLAT - flat(mean)) ** 2).sum(1), rtol=2.0**-20)


@pytest.mark.full
def test_products():
    """Catches a tile that is added twice, and scales on the wrong side; equal messages have equal products."""
    got = found(all_of.gram_matrix)
    np.testing.assert_allclose(got, FLAT @ FLAT.T, rtol=1e-5, atol=2e-3)
    scale = 2.0 ** RNG.integers(-3, 4, M).astype(np.float32)
    scaled = found(lambda x: all_of.gram_matrix(x, jnp.asarray(scale)))
    np.testing.assert_allclose(scaled, got * scale[:, None] * scale[None], rtol=1e-4, atol=1e-2)


@pytest.mark.full
def test_products_of_blocks(monkeypatch):
    """Many messages are taken in four blocks, the last a shorter one: NumPy's products, the same on two devices,
    symmetric to the bit; equal messages in different blocks are at distance 0. Catches a block at another place, or
    that is not turned over."""
    monkeypatch.setattr(all_of, "LEAST", 8)
    got = found(all_of.gram_matrix)
    np.testing.assert_allclose(got, FLAT @ FLAT.T, rtol=1e-5, atol=2e-3)
    assert np.array_equal(got, got.T)
    alike = np.isin(np.arange(M), (0, 13, 35)).reshape(-1, 1)
    same = Rows({"x": jnp.where(alike, U["long"].reshape(M, -1)[:1], U["long"].reshape(M, -1))}, jnp.arange(M))
    apart = np.asarray(jax.jit(lambda x: all_of.gaps(all_of.messages_of(x, jnp.arange(M))))(same))
    assert not apart[np.ix_((0, 13, 35), (0, 13, 35))].any() and apart[0, 1] > 1


def test_columnwise():
    """Catches columns that change places over devices, and values of other messages."""

    def rule(values, weights):
        return jnp.where(weights[:, None] > 0, values, -jnp.inf).max(0)

    got = found(lambda x: all_of.columnwise(x, rule, jnp.asarray(WEIGHTS)))
    assert np.array_equal(flat(got), FLAT[WEIGHTS > 0].max(0))


def test_single_messages_and_peaks():
    """Catches a message of another rank, and padding that has the largest magnitude."""
    one, peaks = found(lambda x: (all_of.one_message(x, jnp.int32(7)), all_of.peaks(x)))
    assert np.array_equal(flat(one), FLAT[7])
    assert np.array_equal(peaks, np.abs(FLAT).max(1).astype(np.float32))
    x = np.ones((M, 70), np.float32)
    x[[3, 36], [5, 69]] = np.nan, -np.inf
    got = jax.jit(lambda x: all_of.peaks(all_of.messages_of(Rows({"x": x}, jnp.arange(M)), jnp.arange(M))))(x)
    assert np.flatnonzero(np.isinf(got)).tolist() == [3, 36]


@pytest.mark.full
@pytest.mark.parametrize("way", ["mixed", "pooled"])
def test_combinations_are_messages(way):
    """Their distances and sums are those of NumPy's. Catches an order of the old messages that is kept."""
    share = RNG.uniform(size=MEMBERS.shape).astype(np.float32)
    if way == "mixed":
        combine, made = lambda x: all_of.linear_combinations(x, jnp.asarray(MATRIX)), MATRIX @ FLAT
    else:
        combine = lambda x: all_of.pooled_messages(x, jnp.asarray(MEMBERS), jnp.asarray(share))  # noqa: E731
        made = np.einsum("ks,ksd->kd", share, FLAT[MEMBERS])
    np.testing.assert_allclose(found(lambda x: all_of.squared_distances(combine(x))), (made**2).sum(1), rtol=1e-4)
    got = found(lambda x: all_of.weighted_sum(combine(x), jnp.arange(len(made), dtype=jnp.float32)))
    np.testing.assert_allclose(flat(got), np.arange(len(made)) @ made, rtol=1e-4, atol=1e-4)
