"""Uniform quantisers: laws of the mean, the error, the levels and the wire."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.engine import client_keys
from fedjax_sim.transform import chain, qsgd, quantize, stateless, terngrad
from fedjax_sim.transform.chain import wire_of
from fedjax_sim.types import Wire
from tests.laws import cases, laws, problems as p
from tests.transform import statistics as s

KEY = jax.random.key(0)
MEMBERS = {
    "default": quantize(),
    "two levels": quantize(1, range=1.0, keeps_zeros=False),
    "textbook": quantize(3, range=1.0, keeps_zeros=False),
    "range": quantize(4, range=1.0),
    "vector": quantize(3, scope="vector", keeps_zeros=False),
    "block": quantize(4, scope="block", block_size=10, keeps_zeros=False),
    "sixteen bits": quantize(16),
    "nearest": quantize(3, rounding="nearest"),
    "nearest, clipped": quantize(2, range=0.7, rounding="nearest", keeps_zeros=False),
    "qsgd": qsgd(8),
    "qsgd in buckets": qsgd(2, scope="block", block_size=16),
    "terngrad": terngrad(),
}
SOME = ["default", "textbook", "block", "nearest, clipped", "qsgd", "terngrad"]  # the others under `-m full`


CLIPPED = quantize(6, range=0.05, keeps_zeros=False)


@pytest.fixture(scope="module")
def federation():
    """Messages without zero among the levels, often clipped; compiled once."""
    return p.Federation(transform=CLIPPED)


def drawn(member, update, trials: int) -> np.ndarray:
    """[trials, ...] messages of one update."""
    one = jax.vmap(lambda key, update: member.on_client(key, update, (), ())[0], (0, None))
    return jax.jit(one)(jax.random.split(KEY, trials), update)


def range_of(name: str) -> float:
    return 1.0 if name in ("two levels", "textbook", "range") else math.inf


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", cases.rows(MEMBERS, SOME))
def test_mean_and_error_match_the_declared_ones(name):
    """20,000 draws of five updates. Catches the formula for uniform numbers taken for all, clipping left out of the
    error, padding of blocks counted as numbers, a norm taken for a maximum."""
    member = MEMBERS[name]
    assert member.facts.exact_error and member.facts.unbiased == ("nearest" not in name and range_of(name) == math.inf)
    error = jax.jit(member.squared_error)
    for kind, sent in s.draws(member).items():
        update = s.updates()[kind].astype(np.float64)
        if "nearest" not in name:
            s.check_mean(sent, np.clip(update, -range_of(name), range_of(name)))
        declared = member.squared_error(s.split(update))
        assert isinstance(declared, np.float64)
        s.check_error(sent, update, declared)
        single = error(s.split(jnp.float32(update)))
        assert single == pytest.approx(declared, rel=1e-4 if name != "sixteen bits" else 0.1, abs=1e-9)


@pytest.mark.full
def test_the_checks_reject_wrong_quantisers():
    """The power of the test above: nearest for stochastic, an error 3 % off, a level that is 1 % too far."""
    update = s.updates()["uniform"].astype(np.float64)
    right, nearest = s.draws(MEMBERS["textbook"])["uniform"], s.draws(quantize(3, rounding="nearest"))["uniform"]
    declared = MEMBERS["textbook"].squared_error(s.split(update))
    s.check_error(right, update, declared)
    for wrong in (0.97, 1.03):
        with pytest.raises(AssertionError):
            s.check_error(right, update, wrong * declared)
    for sent in (nearest, right * 1.01):
        with pytest.raises(AssertionError):
            s.check_mean(sent, update)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("keeps_zeros", [False, True])
def test_numbers_on_the_grid_stay(keeps_zeros):
    """Levels of an odd range, which floats cannot hold exactly, 50 draws each. Catches a quotient that lands beside its
    level and now and then a level away, and levels past the range."""
    for bits in (1 + keeps_zeros, 3, 8, 16):
        offset = 0.0 if keeps_zeros else 0.5
        top = 2 ** (bits - 1) - 1 + offset
        levels = np.clip(np.linspace(-top - 0.5, top + 0.5, 511).round() + offset, -top, top)
        x = jnp.float32(levels * (0.7 / top))
        for rounding in ("stochastic", "nearest")[: 2 if bits == 8 else 1]:
            member = quantize(bits, range=0.7, keeps_zeros=keeps_zeros, rounding=rounding)
            np.testing.assert_allclose(drawn(member, x, 50), np.broadcast_to(x, (50, 511)), rtol=1e-6)


@pytest.mark.full
def test_textbook_error_of_uniform_numbers():
    """2 / (3 (2^b - 1)^2) a coordinate at s = 1 (Suresh et al. 2017, section 2). Catches 2^b in place of 2^b - 1, and
    Delta / 2 for Delta."""
    x = np.random.default_rng(0).uniform(-1, 1, 1_000_000).astype(np.float32)
    for bits, expected in ((1, 0.666667), (2, 0.0740741), (4, 0.00296296), (8, 1.02525e-5)):
        member = quantize(bits, range=1.0, keeps_zeros=False)
        assert 2 / (3 * (2**bits - 1) ** 2) == pytest.approx(expected, rel=1e-5)
        sent = np.asarray(jax.jit(lambda x, member=member: member.on_client(KEY, x, (), ())[0])(x))
        assert np.square(sent - x).mean() == pytest.approx(expected, rel=5e-3)
        assert member.squared_error(np.float64(x)) / x.size == pytest.approx(expected, rel=5e-3)


def test_error_of_fixed_numbers():
    """By hand, in float64. Without zero among the levels, small numbers cost 1.5 times that of uniform ones."""
    x = np.array([-1, -0.9, -0.5, -0.2, 0, 0.123, 0.7, 1])
    assert quantize(3, range=1.0, keeps_zeros=False).squared_error(x) == pytest.approx(0.0765036531, abs=1e-9)
    small = np.random.default_rng(1).normal(size=200_000) * 0.01
    formula = small.size * 2 / (3 * 3**2)
    textbook = quantize(2, range=1.0, keeps_zeros=False).squared_error(small)
    assert textbook / formula == pytest.approx(1.4985, rel=1e-3)
    assert quantize(2, range=1.0).squared_error(small) < 0.2 * formula
    assert quantize(2, range=1.0).squared_error(np.zeros(9)) == 0


def test_nearest_against_stochastic():
    """At .3 between 0 and 1: bias -.3 without variance, against variance .21 without bias; a mean over m clients errs
    by .09 or .21 / m. Catches a nearest rounding that uses its key."""
    x = np.array([-0.2])  # .3 on {0, 1}, moved to {-.5, .5}
    nearest, stochastic = (quantize(1, range=0.5, keeps_zeros=False, rounding=r) for r in ("nearest", "stochastic"))
    fixed, loose = (np.asarray(drawn(t, jnp.float32(x), 100_000)) for t in (nearest, stochastic))
    assert (fixed == -0.5).all() and nearest.squared_error(x) == pytest.approx(0.09)
    assert stochastic.squared_error(x) == pytest.approx(0.21) and loose.var() == pytest.approx(0.21, rel=0.02)
    assert abs(loose.mean() - x[0]) < 6 * math.sqrt(0.21 / 100_000)
    assert stochastic.squared_error(x) / nearest.squared_error(x) == pytest.approx(2.33, abs=0.005)


def test_number_of_values():
    """At most 2^b values (Suresh et al. 2017, section 2), or one less with zero; the range's ends are among them."""
    x = jnp.concatenate([jnp.linspace(-1, 1, 20_001), jnp.zeros(1)])
    for bits, keeps_zeros, limit in (
        (1, False, None),
        (4, True, None),
        (8, False, 1.0),
    ):
        member = quantize(bits, range=limit, keeps_zeros=keeps_zeros)
        values = np.unique(drawn(member, x, 1))
        assert len(values) <= 2**bits - keeps_zeros and (0 in values) == keeps_zeros
        np.testing.assert_allclose([values[0], values[-1]], [-1, 1], rtol=2.1e-6)


def test_wire_bits():
    """d b + 32 a scale, exactly. Catches a zero-preserving grid after sparsification that pays for all d, one without
    zero that does not, and indices paid by who sends every number."""
    spec = {"a": jnp.zeros((8, 6)), "b": jnp.zeros(16), "none": jnp.zeros((0, 3))}
    sparse = stateless(lambda key, x: x, wire=lambda spec, wire: Wire(10, 320, 60))
    for member, bits, side in (
        (quantize(), 512, 64),
        (quantize(5, scope="vector"), 320, 32),
        (quantize(5, scope="block", block_size=10), 320, 7 * 32),
        (quantize(5, range=1.0), 320, 0),
        (quantize(5, range=1.0, integers=True), 320, 0),
        (terngrad(), 128, 64),
        (qsgd(8), 64 * 5, 32),
        (chain(sparse, quantize()), 80, 60 + 64),
        (chain(sparse, quantize(keeps_zeros=False)), 512, 64),
    ):
        wire = wire_of(member, spec)
        assert (wire.payload_bits, wire.side_bits) == (bits, side) and type(wire.bits) is int
    assert wire_of(terngrad(), spec).coded == math.ceil(64 * math.log2(3)) + 64
    assert wire_of(qsgd(1), {"a": jnp.zeros(10_000)}).coded < 2000 < 20_000


@pytest.mark.full
def test_rounding_is_independent_over_clients():
    """The error of the mean over m clients with one update falls as 1 / m, keys made as a round makes them.

    m = 400, d = 4,000: the ratio has a relative deviation of 2 % at most, so 12 % is six; a dither that clients share
    leaves a ratio of m, and a correlation of 0.001 between any two clients 1.4.
    """
    x = jax.random.normal(KEY, (4000,))
    keys = client_keys(jax.random.key(3), jnp.arange(400))
    for member in (quantize(4), qsgd(16), terngrad()):
        draw = lambda key, member=member: member.on_client(jax.random.wrap_key_data(key), x, (), ())[0]  # noqa: E731
        sent = np.asarray(jax.jit(jax.vmap(draw))(keys), np.float64)
        error = np.square(sent.mean(0) - np.asarray(x)).sum()
        assert 400 * error / float(member.squared_error(x)) == pytest.approx(1, abs=0.12)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("keeps_zeros", [True, False])
def test_integers_decode_to_the_message(keeps_zeros):
    """The same key, as floats and as integers, alone and through a federation. Catches an offset that decoding adds
    once where a sum holds it m times, and a unit off by two."""
    options = {"range": 2.0, "keeps_zeros": keeps_zeros}
    plain, whole = quantize(6, **options), quantize(6, integers=True, **options)
    x = s.split(jnp.float32(s.updates()["out of range"]))
    both = jax.jit(lambda x: (plain.on_client(KEY, x, (), ())[0], whole.on_client(KEY, x, (), ())))
    floats, (sent, _, measured) = both(x)
    low, high = whole.facts.integer_range
    values = np.concatenate([np.asarray(v).ravel() for v in jax.tree.leaves(sent)])
    assert values.dtype == np.int32 and (low, high) == (values.min(), values.max())
    assert keeps_zeros or (values % 2 == 1).all()
    assert (low, high) == ((-31, 31) if keeps_zeros else (-63, 63))
    tripled = jax.tree.map(lambda v: 3 * np.asarray(v), sent)
    back, _, metrics = jax.jit(lambda x, seen: whole.on_server(KEY, None, x, (), seen, None))(tripled, measured)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(floats), strict=True):
        np.testing.assert_allclose(a, 3 * np.asarray(b), rtol=1e-6)
    assert metrics["clipped_share"] > 0


@pytest.mark.full
def test_federations_of_floats_and_integers(federation):
    """Messages of an odd grid, two rounds. Catches a unit that the server forgets, or applies to each message."""
    whole = p.Federation(transform=quantize(6, range=0.05, keeps_zeros=False, integers=True))
    (one, infos), (other, same) = federation.run(p.COHORT), whole.run(p.COHORT)
    np.testing.assert_allclose(one.server.params, other.server.params, rtol=1e-6)
    assert infos[0]["clipped_share"] == same[0]["clipped_share"] > 0
    assert infos[0]["uplink_bytes"].total() == p.SLOTS * 3  # 18 bits


@pytest.mark.full
def test_clipped_share(federation):
    """Clipping is counted over a cohort, and the transform is declared biased. Catches a mean of means."""
    share = federation.run(p.COHORT, num_rounds=1)[1][0]["clipped_share"]
    assert 0 < share < 1 and share * p.SLOTS * 3 == pytest.approx(round(float(share) * p.SLOTS * 3), abs=1e-3)
    member = quantize(range=1.0)
    x = jnp.array([0.5, 1.0, -1.0, 1.0001])
    measured = member.on_client(KEY, x, (), ())[2]["clipped_share"]
    assert (float(measured.total), float(measured.weight)) == (1, 4) and not member.facts.unbiased
    assert quantize().on_client(KEY, x, (), ())[2] == {}


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.optimised
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_updates_are_seen(value, federation):
    """Catches clipping, or a cast to integers, that makes a broken update look sound."""
    x = jnp.array([0.5, value, 0.1])
    for member in (quantize(), quantize(range=1.0), quantize(4, scope="vector"), qsgd(4), terngrad()):
        assert not np.isfinite(member.on_client(KEY, x, (), ())[0]).all()
    sent, _, measured = quantize(range=1.0, integers=True).on_client(KEY, x, (), ())
    assert sent[1] in (0, 127, -127) and np.isnan(measured["clipped_share"].total)
    laws.nonfinite_clients_are_dropped(value, federation)


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("name", ["default", "range", "vector", "block", "qsgd in buckets"])
def test_extreme_and_odd_updates(name):
    """Zeros stay zeros, tiny and huge updates stay finite, empty leaves, scalars and bfloat16 leaves keep their shapes.
    Catches 0 / 0, squares that overflow, a padded block that grows a leaf."""
    member = MEMBERS[name]
    send = jax.jit(lambda update: member.on_client(KEY, update, (), ())[0])
    for scale in (0.0, 1e-38, 1e18):
        update = {
            "empty": jnp.zeros((0, 2)),
            "scalar": jnp.float32(scale),
            "half": jnp.full(5, scale, jnp.bfloat16),
            "zeros": jnp.zeros((3, 1)),
        }
        sent = send(update)
        for leaf, x in zip(jax.tree.leaves(update), jax.tree.leaves(sent), strict=True):
            assert (x.shape, x.dtype) == (leaf.shape, jnp.float32) and np.isfinite(np.float64(x)).all()
        assert name in ("vector", "block") or (np.asarray(sent["zeros"]) == 0).all()
    assert member.on_client(KEY, {}, (), ())[0] == {}


def test_qsgd_error_is_below_the_papers_bound():
    """min(n / s^2, sqrt(n) / s) |x|^2, nearly reached by equal numbers below one level. Catches a max-norm scale."""
    for levels, kind in itertools.product((1, 4, 30), s.updates()):
        x = s.updates()[kind].astype(np.float64)
        assert qsgd(levels).squared_error(x) <= min(64 / levels**2, 8 / levels) * (x @ x) * (1 + 1e-5)
    equal = np.ones(64)
    assert qsgd(1).squared_error(equal) == pytest.approx(7 * 64, rel=1e-5)


@pytest.mark.full
def test_qsgd_coded_bits_bound_a_real_code():
    """Messages written in gamma codes, dense and sparse: the mean length stays below the declared one, and reaches 60 %
    of it. Catches a bound that forgets signs, distances or the norm."""

    def gamma(k):
        return 2 * np.floor(np.log2(k)) + 1

    def length(integers):
        there = np.flatnonzero(integers)
        sizes = np.abs(integers)
        dense = (gamma(sizes + 1) + (sizes > 0)).sum()
        sparse = 32 + (gamma(np.diff(there, prepend=-1)) + 1 + gamma(sizes[there])).sum()
        return min(dense, sparse) + 32

    n, rng = 1024, np.random.default_rng(2)
    for levels in (1, 4, 255):
        best, member = 0.0, qsgd(levels)
        updates = np.stack([rng.normal(size=n), np.ones(n), rng.standard_t(1, size=n), np.eye(1, n)[0]])
        draw = jax.vmap(lambda key, x, member=member: member.on_client(key, x, (), ())[0])
        sent = jax.jit(jax.vmap(draw, (None, 0)))(
            jax.random.split(KEY, 20), jnp.float32(np.tile(updates[:, None], (1, 20, 1)))
        )
        norms = np.linalg.norm(updates, axis=1)[:, None, None] / levels
        for integers in np.round(np.asarray(sent) / norms):
            bits = np.mean([length(row) for row in integers])
            coded = wire_of(member, jnp.zeros(n)).coded_bits
            assert bits <= coded
            best = max(best, bits / coded)
        assert best > 0.6, levels


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "bits: expected an integer in"),
        ({"bits": 17}, "bits: expected an integer in"),
        ({"bits": True}, "bits: expected an integer"),
        ({"bits": 8.0}, "bits: expected an integer"),
        ({"bits": 1}, "bits: expected at least 2 with keeps_zeros=True"),
        ({"range": 0.0}, "range: expected a number"),
        ({"range": -1.0}, "range: expected a number"),
        ({"range": float("nan")}, "range: expected a number"),
        ({"range": float("inf")}, "range: expected a number"),
        ({"range": 1.0, "scope": "vector"}, "scope: expected no scope beside a fixed range"),
        ({"scope": "leef"}, "Did you mean 'leaf'"),
        ({"scope": "block"}, "block_size: expected an integer with scope='block'"),
        ({"block_size": 4}, "block_size: expected None with scope='leaf'"),
        ({"scope": "block", "block_size": 0}, "block_size: expected an integer in"),
        ({"rounding": "up"}, "rounding: expected one of"),
        ({"integers": True}, "range: expected a number with integers=True"),
        ({"integers": 1}, "integers: expected True or False"),
        ({"keeps_zeros": "no"}, "keeps_zeros: expected True or False"),
    ],
)
def test_wrong_options_are_refused(options, message):
    """Catches options out of range or in contradiction that pass in silence."""
    with pytest.raises((ValueError, TypeError), match=message):
        quantize(**options)


@pytest.mark.parametrize("levels", [0, 32768, 2.5, True])
def test_wrong_levels_are_refused(levels):
    """Catches a level count that means nothing."""
    with pytest.raises((ValueError, TypeError), match="levels: expected an integer in"):
        qsgd(levels)


@pytest.mark.optimised
@pytest.mark.full  # test_compositions has a quantiser on two devices in every run
def test_devices_change_no_bit(federation):
    """One device and two, with rounding in between. Catches quotients that two programs round differently."""
    two = p.Federation(transform=CLIPPED, mesh="all")
    laws.check_equal_bits(p.outcome(*federation.run(p.COHORT)), p.outcome(*two.run(p.COHORT)), "devices")
