"""Sparse messages against NumPy, their laws and their bits."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine
from fedjax_sim.transform import block_k, cast, chain, low_rank, random_k, threshold, top_k
from fedjax_sim.transform.chain import wire_of
from fedjax_sim.types import Mean, Wire
from tests.laws import problems as p
from tests.refusals import refused

KEY = jax.random.key(0)
NUMBERS = np.array([3.0, -1.0, 0.5, 2.0])
SCOPES = ["vector", "leaf"]


def sent(transform, update, key=KEY):
    return transform.on_client(key, update, transform.init(update), transform.init_client(update))[0]


def mixed(rng):
    """An empty leaf, a scalar, a bfloat16 leaf and small integers with many ties, zeros of both signs among them."""
    draw = lambda *shape: jnp.array(rng.integers(-3, 4, shape), jnp.float32)  # noqa: E731
    return {"a": draw(3, 0), "b": draw(), "c": draw(5, 13).astype(jnp.bfloat16), "d": draw(150) * jnp.float32(-0.5)}


def test_errors_by_hand():
    """Catches magnitudes compared with their signs, and a variance of d/k instead of d/k - 1."""
    message = np.asarray(sent(top_k(count=2), jnp.array(NUMBERS, jnp.float32)))
    assert message.tolist() == [3, 0, 0, 2] == np.asarray(sent(top_k(0.5), jnp.array(NUMBERS, jnp.float32))).tolist()
    error = ((message - NUMBERS) ** 2).sum()
    assert error == top_k(count=2).squared_error(NUMBERS) == 1.25 <= 7.125 == (NUMBERS**2).sum() / 2
    assert random_k(count=2).squared_error(NUMBERS) == 14.25
    assert random_k(count=2, scaled=False).squared_error(NUMBERS) == 7.125
    exact = NUMBERS + 1e-9  # float64 in, float64 out
    assert top_k(count=2).squared_error(exact) == ((exact**2)[[1, 2]]).sum()


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("count", [1, 3, 60])
@pytest.mark.parametrize("scope", SCOPES)
def test_largest_entries_survive_unchanged(scope, count):
    """A stable argsort of -|x|, over the update and over each leaf, by either algorithm of the engine, one client at a
    time and vmapped. Catches ties broken at random, dtypes lost, and leaves that are compared with the wrong ones."""
    updates = [mixed(np.random.default_rng(seed)) for seed in range(4)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *updates)
    member = top_k(count=count, scope=scope)
    messages = jax.jit(jax.vmap(lambda update: sent(member, update)))(stacked)
    for i, update in enumerate(updates):
        leaves = [np.asarray(x, np.float64).reshape(-1) for x in jax.tree.leaves(update)]
        groups = [np.concatenate(leaves)] if scope == "vector" else leaves
        expected = []
        for x in groups:
            y = np.zeros_like(x)
            best = np.argsort(-np.abs(x), kind="stable")[:count]
            y[best] = x[best]
            expected.append(y)
        got = jax.tree.map(lambda x, i=i: x[i], messages)
        assert np.concatenate(expected).tolist() == p.flat(got).tolist()
        assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(update)]


@pytest.mark.full
def test_contraction():
    """|x - T x|^2 <= (1 - k/d) |x|^2 for Gaussian, sparse, heavy and constant updates, where it is an equality; the
    declared error is the error itself. Catches k rounded down."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 96)).astype(np.float32)
    x[1, 4:] = 0
    x[2] = np.sign(x[2])
    x[3] = x[3] ** 5 * 1e6
    x[4] *= 1e-18
    for member, kept in ((top_k(0.11), 11 / 96), (block_k(0.3, block_size=8), 4 / 12), (block_k(count=5), 1.0)):
        if kept == 1.0:
            with refused("count", value=5, rule="2 blocks"):
                sent(member, jnp.array(x[0]))
            continue
        messages = np.asarray(jax.jit(jax.vmap(lambda u, member=member: sent(member, u)))(x), np.float64)
        errors, squares = ((messages - x) ** 2).sum(1), (x.astype(np.float64) ** 2).sum(1)
        assert (errors <= (1 - kept) * squares * (1 + 1e-6)).all()
        assert np.isclose(errors[2], (1 - kept) * squares[2], rtol=1e-6)
        declared = [float(member.squared_error(u.astype(np.float64))) for u in x]
        np.testing.assert_allclose(declared, errors, rtol=1e-6)
        assert member.facts.exact_error and member.facts.nonexpansive and not member.facts.unbiased


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(
    "size, number",
    [
        pytest.param(7, 3, id="pairs"),
        pytest.param(80, 20, id="network"),
        pytest.param(80, 30, id="hashes"),
    ],
)
def test_random_positions_are_uniform(size, number):
    """Chi-squares over entries and over pairs at each distance, within 6 deviations of their mean: a false alarm in
    10^8 runs. 4 % more for a tenth of the entries shifts the first by more than that (checked below)."""
    draws = 60_000 if size < 10 else 30_000
    member = random_k(count=number, scaled=False)
    masks = jax.jit(jax.vmap(lambda key: sent(member, jnp.ones(size), key) != 0))(jax.random.split(KEY, draws))
    masks = np.asarray(masks)
    assert (masks.sum(1) == number).all()
    share = number / size
    counts = masks.sum(0)

    def excess(counts):  # of the chi-square over entries, in deviations
        chi = ((counts - draws * share) ** 2).sum() / (draws * share * (1 - share)) * (size - 1) / size
        return (chi - (size - 1)) / math.sqrt(2 * (size - 1))

    assert excess(counts) < 6
    heavy = counts * np.where(np.arange(size) < max(size // 10, 1), 1.04, 1.0)
    assert excess(heavy) > 6
    pairs = share * (number - 1) / (size - 1)
    side = math.isqrt(size - 1) + 1
    for distance in {1, 2, side, min(2 * side, size - 1)}:
        together = (masks & np.roll(masks, distance, axis=1)).sum(1)
        expected, deviation = size * pairs, together.std() / math.sqrt(draws)
        assert abs(together.mean() - expected) < 6 * deviation


def test_random_k_is_unbiased_with_its_variance():
    """k = 1 of 4, 120,000 draws, 6 deviations (1.2 %): accepts 3 |x|^2 and rejects 4 |x|^2. Catches a missing d/k, and
    a scale of the update where the leaf's is meant."""
    update = {"a": jnp.array(NUMBERS[:1], jnp.float32), "b": jnp.array(NUMBERS[1:], jnp.float32)}
    keys = jax.random.split(KEY, 120_000)
    for member in (random_k(count=1), random_k(count=1, scope="leaf"), random_k(0.25, scaled=False)):
        messages = jax.jit(jax.vmap(lambda key, member=member: sent(member, update, key)))(keys)
        messages = np.concatenate([messages["a"], messages["b"]], axis=1).astype(np.float64)
        errors = ((messages - NUMBERS) ** 2).sum(1)
        declared = float(member.squared_error({"a": NUMBERS[:1], "b": NUMBERS[1:]}))
        assert abs(errors.mean() - declared) < 6 * errors.std() / math.sqrt(len(keys)) < 0.02 * declared
        off = np.abs(messages.mean(0) - NUMBERS) / (messages.std(0) / math.sqrt(len(keys)) + 1e-9)
        assert member.facts.unbiased == (off < 6).all() and member.facts.exact_error
        assert member.facts.nonexpansive != member.facts.unbiased
    assert float(random_k(count=1).squared_error(NUMBERS)) == 3 * 14.25


@pytest.mark.full
def test_clients_choose_independently():
    """The error of a mean of m messages falls as 1/m: 14.25 / 16, to 4 %; and so do leaves, which agree in one of ten.
    Catches one key for a whole cohort, or for all leaves."""
    keys = jax.vmap(lambda id: jax.random.fold_in(KEY, id))(jnp.arange(16 * 6000))
    member = random_k(count=2)
    messages = jax.jit(jax.vmap(lambda key: sent(member, jnp.array(NUMBERS, jnp.float32), key)))(keys)
    means = np.asarray(messages, np.float64).reshape(6000, 16, 4).mean(1)
    assert abs(((means - NUMBERS) ** 2).sum(1).mean() / (14.25 / 16) - 1) < 0.04
    leaves = {"a": jnp.ones(10), "b": jnp.ones(10)}
    member = random_k(count=1, scope="leaf")
    messages = jax.jit(jax.vmap(lambda key: sent(member, leaves, key)))(keys[:10_000])
    same = np.asarray((messages["a"] == messages["b"]).all(1))
    assert abs(same.mean() - 0.1) < 6 * 0.003


def test_threshold_sends_and_counts():
    """Catches > for >=, and a metric that is no mean over messages."""
    member = threshold(0.5)
    update = {"w": jnp.array([0.5, -0.5, 0.49999, 3.0, 0.0]), "b": jnp.array([0.5], jnp.bfloat16)}
    message, _, measured = member.on_client(KEY, update, (), ())
    assert message["w"].tolist() == [0.5, -0.5, 0, 3, 0] and message["b"].tolist() == [0.5]
    assert measured["sent_values"] == Mean(4, 1)
    pooled = {"sent_values": Mean(jnp.float32(12), jnp.float32(3))}
    assert float(member.on_server(KEY, None, message, (), pooled, None)[2]["sent_values"]) == 4
    assert np.isclose(float(member.squared_error(update)), 0.49999**2)


@pytest.mark.full
def test_messages_that_arrived_are_counted():
    """Catches a metric that counts slots."""
    reported = np.arange(p.SLOTS) < 7
    _, infos = p.Federation(transform=threshold(0.2)).run(p.cohort(p.COHORT, reported=reported), num_rounds=1)
    work = infos[0]["sent_values"] * 7
    assert 0 < work < 21 and abs(work - np.round(work)) < 1e-4


def test_blocks_of_largest_norm_survive():
    """A NumPy oracle over scales. Catches squares that overflow or vanish, and a last short block read past its end."""
    rng = np.random.default_rng(1)
    member = block_k(count=2, block_size=5)
    for scale in (1e-38, 1e-20, 1.0, 1e20, 1e30):
        x = (scale * rng.normal(size=23)).astype(np.float32)
        message = np.asarray(sent(member, jnp.array(x)))
        norms = np.add.reduceat(np.float64(x) ** 2, np.arange(0, 23, 5))
        chosen = np.repeat(np.isin(np.arange(5), np.argsort(-norms, kind="stable")[:2]), 5)[:23]
        assert message.tolist() == np.where(chosen, x, 0).tolist()
    assert np.asarray(sent(member, jnp.zeros(23))).tolist() == [0] * 23


@pytest.mark.default_rows("leaf")
@pytest.mark.parametrize("scope", SCOPES)
def test_blocks_of_one_are_top_k(scope):
    """Catches blocks that are cut across leaves where they must not be."""
    update = mixed(np.random.default_rng(2))
    ways = ((block_k, {"block_size": 1}), (top_k, {}))
    one, other = jax.jit(lambda update: [sent(make(count=9, scope=scope, **kw), update) for make, kw in ways])(update)
    assert p.flat(one).tolist() == p.flat(other).tolist()


def test_wire_is_counted_exactly():
    """Catches indices of floor(log2 d) bits, widths of another dtype, a seed that is forgotten, shares rounded down."""
    spec = jax.ShapeDtypeStruct((1000,), jnp.float32)
    half = jax.ShapeDtypeStruct((1000,), jnp.bfloat16)
    leaves = {"w": jax.ShapeDtypeStruct((30, 30), jnp.float32), "b": jax.ShapeDtypeStruct((100,), jnp.float32)}
    coded = math.ceil(math.log2(math.comb(1000, 10)))
    assert wire_of(top_k(0.01), spec) == Wire(10, 320, 100, 320 + coded)
    assert wire_of(top_k(count=10), half) == Wire(10, 160, 100, 160 + coded)
    assert wire_of(chain(cast("bfloat16"), top_k(count=10)), spec) == Wire(10, 160, 100, 160 + coded)
    assert wire_of(top_k(count=10, scope="leaf"), leaves).side_bits == 10 * 10 + 10 * 7
    assert wire_of(top_k(0.1, scope="leaf"), leaves).values == 90 + 10
    assert wire_of(random_k(0.01), spec) == Wire(10, 320, 64)
    assert wire_of(chain(top_k(0.1), top_k(0.01)), spec).values == wire_of(chain(top_k(0.01), top_k(0.1)), spec).values
    assert wire_of(threshold(0.1), spec) == Wire(1000, 32_000, 1000)
    blocks = wire_of(block_k(count=3, block_size=64), spec)
    assert blocks == Wire(192, 192 * 32, 3 * 4, 192 * 32 + math.ceil(math.log2(math.comb(16, 3))))
    assert wire_of(top_k(0.07), jnp.zeros(100)).values == 7  # in floats 0.07 * 100 > 7
    assert wire_of(top_k(0.3), jnp.zeros(10)).values == 3 and wire_of(top_k(1e-9), jnp.zeros(10)).values == 1
    assert wire_of(top_k(0.7), jnp.zeros(1)) == Wire(1, 32, 0, 32)
    assert wire_of(top_k(0.5, scope="leaf"), {"e": jnp.zeros((0, 3)), "f": jnp.zeros(2)}) == Wire(1, 32, 1, 33)
    large = wire_of(top_k(0.01), jax.ShapeDtypeStruct((10**6,), jnp.float32))
    exact = (math.comb(10**6, 10**4) - 1).bit_length()
    assert exact <= large.coded_bits - large.payload_bits <= exact + 2 < large.side_bits == 10**4 * 20
    assert wire_of(chain(low_rank(1), top_k(0.01)), jnp.zeros((50, 50))).values == 25


MEMBERS = {
    "top_k": top_k(count=1),
    "many of top_k": top_k(0.5, scope="leaf"),
    "random_k": random_k(count=1),
    "threshold": threshold(100.0),
    "block_k": block_k(count=1, block_size=2),
}


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("name", MEMBERS)
def test_broken_updates_are_seen(name):
    """NaN and infinity at every place. Catches a client whose NaN is among what is not sent, and who then counts."""

    def finite(update):
        return engine.all_finite(sent(MEMBERS[name], update))

    updates = {"w": jnp.tile(jnp.arange(1.0, 7.0), (12, 1)), "b": jnp.ones((12, 1), jnp.bfloat16)}
    place = jnp.arange(6)
    updates["w"] = updates["w"].at[place, place].set(jnp.nan).at[place + 6, place].set(-jnp.inf)
    assert not np.asarray(jax.jit(jax.vmap(finite))(updates)).any()
    assert bool(jax.jit(finite)({"w": jnp.arange(6.0), "b": jnp.ones(1, jnp.bfloat16)}))


@pytest.mark.parametrize("make", [top_k, random_k, block_k])
@pytest.mark.parametrize(
    "kwargs, error, name",
    [
        ({}, ValueError, "share, count: expected exactly one"),
        ({"share": 0.1, "count": 3}, ValueError, "share, count: expected exactly one"),
        ({"share": 0.0}, ValueError, "share"),
        ({"share": 1.1}, ValueError, "share"),
        ({"share": float("nan")}, ValueError, "share"),
        ({"share": True}, TypeError, "share"),
        ({"count": 0}, ValueError, "count"),
        ({"count": 2.0}, TypeError, "count"),
        ({"count": True}, TypeError, "count"),
        ({"count": 1, "scope": "leaves"}, ValueError, "scope: .*Did you mean 'leaf'"),
    ],
)
def test_wrong_amounts(make, kwargs, error, name):
    """Catches shares of nothing, booleans for numbers, two answers to one question."""
    with pytest.raises(error, match=f"^{name}"):
        make(**kwargs)


def test_other_wrong_arguments():
    """Catches a count past the update, thresholds that mean nothing, blocks of no entries."""
    for make in (top_k, random_k):
        with refused("count", value=5, rule="4 entries"):
            sent(make(count=5), jnp.ones(4))
        with refused("count", value=5, rule="4 entries"):
            wire_of(make(count=5), jnp.ones(4))
        assert np.asarray(sent(make(count=5, scope="leaf"), jnp.ones(4))).tolist() == [1] * 4
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="value: "):
            threshold(value)
    with pytest.raises(ValueError, match="block_size: "):
        block_k(count=1, block_size=0)
    with pytest.raises(ValueError, match="scaled: "):
        random_k(0.1, scaled=None)
