"""Integer noise: the tables' laws, the rounding's bound, and sums that decode exactly."""

from __future__ import annotations

import importlib
import math
from decimal import Context, Decimal, localcontext
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import InvalidType, aggregation, engine, prng
from fedjax_sim.transform import chain, discrete_gaussian_mechanism, identity, skellam_mechanism
from fedjax_sim.transform.alias import alias_table, draw_integers, tail_of
from fedjax_sim.transform.chain import wire_of
from fedjax_sim.transform.discrete import IntegerNoise
from fedjax_sim.types import Received, Wire
from tests.laws import cases, laws, problems as p
from tests.refusals import refused
from tests.transform.test_gaussian import check_level

discrete = importlib.import_module("fedjax_sim.transform.discrete")
KEY = jax.random.key(0)
MAKE = {"discrete_gaussian": discrete_gaussian_mechanism, "skellam": skellam_mechanism}


def pmf(law: str, std: float, k):
    """The law at integers k, in float64."""
    if law == "skellam":
        return stats.skellam.pmf(k, std**2 / 2, std**2 / 2)
    reach = math.ceil(40 * std) + 5
    total = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * std**2)).sum()
    return np.exp(-(np.asarray(k, np.float64) ** 2) / (2 * std**2)) / total


def chi_square(draws, law: str, std: float) -> float:
    """The p-value of the draws under the law; cells of fewer than 50 expected draws are pooled."""
    draws = np.asarray(draws).ravel()
    edge = int(8 * std) + 4
    k = np.arange(-edge, edge + 1)
    expected = draws.size * pmf(law, std, k)
    seen = np.bincount(np.clip(draws, -edge, edge) + edge, minlength=k.size)
    rare = expected < 50
    expected = np.append(expected[~rare], expected[rare].sum() + 1e-9)
    seen = np.append(seen[~rare], seen[rare].sum())
    keep = expected > 5
    return float(stats.chi2.sf(((seen - expected)[keep] ** 2 / expected[keep]).sum(), keep.sum() - 1))


@pytest.mark.default_rows("0.7")
@pytest.mark.parametrize("std", [0.7, 3.0, 40.0])
@pytest.mark.parametrize("law", cases.rows(MAKE, ["skellam"]))
def test_draws_follow_their_law(law, std):
    """2^20 draws against the exact masses: the law is accepted at 1e-7, one of 1 % more or less std rejected at 1e-7.

    Catches a table off by one cell, an alias that loses its own share, and words used twice.
    """
    table = alias_table(law, std)
    draws = np.asarray(jax.jit(lambda key: draw_integers(key, jnp.zeros(1 << 20), table))(KEY))
    assert draws.dtype == np.int32 and np.abs(draws).max() <= tail_of(law, std)
    assert chi_square(draws, law, std) > 1e-7
    assert chi_square(draws, law, 1.01 * std) < 1e-7 and chi_square(draws, law, 0.99 * std) < 1e-7
    x = draws.astype(np.float64)
    for lag in (1, 2, 1024):
        assert abs(np.corrcoef(x[lag:], x[:-lag])[0, 1]) < 7 / 1024


def exact_masses(law: str, std: Fraction, reach: int) -> list[Decimal]:
    """P(X = k) for k = 0 ... reach from the definitions: no recurrence, no Bessel function."""
    variance = Decimal(std.numerator) ** 2 / Decimal(std.denominator) ** 2
    if law == "discrete_gaussian":
        masses = [(-Decimal(k * k) / (2 * variance)).exp() for k in range(3 * reach)]
        total = 2 * sum(masses) - masses[0]
        return [x / total for x in masses[: reach + 1]]
    poisson, rate = [(-variance / 2).exp()], variance / 2
    for k in range(1, 4 * reach + 200):
        poisson.append(poisson[-1] * rate / k)
    return [sum(poisson[j] * poisson[j + k] for j in range(len(poisson) - k)) for k in range(reach + 1)]


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("std", [Fraction(3, 4), Fraction(3)])
@pytest.mark.parametrize("law", MAKE)
def test_tables_are_exact(law, std):
    """Total variation from 50 digits of the law is within the stated 2^-63. Catches float64 masses and cut tails."""
    high, low, alias = (row.tolist() for row in alias_table(law, float(std)))
    number, masses = len(alias), [0] * len(alias)
    for j in range(number):
        kept = (high[j] << 32) | low[j]
        masses[j] += kept
        masses[alias[j]] += 2**64 - kept
    assert sum(masses) == number * 2**64
    with localcontext(Context(prec=60)):
        reach = number // 2
        exact = exact_masses(law, std, reach)
        inside = [exact[abs(j - reach)] for j in range(number)]
        distance = sum(abs(Decimal(x) / (number * 2**64) - y) for x, y in zip(masses, inside, strict=True))
        distance += 1 - sum(inside)
        assert distance / 2 < Decimal(2) ** -63
        assert distance > 0


def details(*, units: float, beta: float = 0.6065) -> IntegerNoise:
    return discrete_gaussian_mechanism(units, 1.0, 1, granularity=1.0, beta=beta).facts.noise.details


@pytest.mark.full
def test_rounding_cannot_lengthen():
    """10^4 messages. Plain rounding takes an update from norm 16 to 22.6, and past D(d) in 2 % of the draws;
    conditional rounding never does, and its mean is still the update. Catches a bound that is only likely."""
    d = 1024
    noise, update = details(units=16.0), jnp.full(d, 0.5)  # every fraction 1/2: the longest
    bound = noise.rounded_norm(d)
    assert bound == math.sqrt(256 + 256 + math.sqrt(2 * math.log(1 / 0.6065)) * 32)
    keys = jax.random.split(KEY, 10_000)
    plain = np.asarray(jax.jit(jax.vmap(lambda key: jnp.sum(prng.stochastic_round(key, update))))(keys))
    assert np.sqrt(plain).min() > 1.2 * 16
    assert 0.005 < (np.sqrt(plain) > bound).mean() < 0.06

    @jax.jit
    @jax.vmap
    def conditional(key):
        rounded, tries = discrete._rounded(key, {"a": update[:1000], "b": update[1000:]}, noise)
        return jnp.concatenate([rounded["a"], rounded["b"]]), tries

    rounded, tries = (np.asarray(x) for x in conditional(keys))
    lengths = np.sqrt((rounded.astype(np.int64) ** 2).sum(1))
    assert lengths.max() <= bound and lengths.max() > 0.99 * bound
    assert 1.005 < tries.mean() < 1.06
    assert abs(rounded.mean() - 0.5) < 0.01


@pytest.mark.parametrize("d", [300, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("units", cases.rows([0.3, 5.0, 1000.0], [0.3]))
def test_no_rounded_message_passes_its_bound(units, d):
    """Updates of every kind and many dimensions, clipped and rounded by the whole mechanism, its noise taken off.

    Catches a bound that forgets a leaf, a clip in other units, and bfloat16 leaves.
    """
    member = skellam_mechanism(2.0, max(1.0, 0.5 / units), 1, granularity=2.0 / units)
    rng = np.random.default_rng(1)
    kinds = [rng.normal(size=(60, d)) * 10.0 ** rng.uniform(-3, 20, (60, 1)), np.full((20, d), 2.0 / math.sqrt(d))]
    rows = jnp.asarray(np.concatenate([*kinds, np.zeros((2, d))]), jnp.float32)

    @jax.jit
    @jax.vmap
    def rounded(key, row):
        update = {"a": row, "b": row[:1].astype(jnp.bfloat16)}
        message, _, _ = member.on_client(key, update, (), ())
        drawn = draw_integers(
            prng.stream(key, "noise"), message, alias_table("skellam", member.facts.noise.details.message_std)
        )
        return jax.tree.map(jnp.subtract, message, drawn), message

    found, messages = rounded(jax.random.split(KEY, len(rows)), rows)
    assert found["a"].dtype == jnp.int32
    found = np.concatenate([np.asarray(found["a"], np.int64), np.asarray(found["b"], np.int64)], axis=1)
    assert np.sqrt((found**2).sum(1)).max() <= member.facts.noise.details.rounded_norm(d + 1)
    assert np.abs(found).sum(1).max() <= member.facts.noise.details.rounded_l1(d + 1)
    assert not found[-2:].any()
    most = member.facts.integer_range[1]
    assert all(np.abs(np.asarray(x, np.int64)).max() <= most for x in messages.values())


def test_rounding_falls_back_towards_zero():
    """Catches a message that is sent although no try met its bound."""
    noise = details(units=16.0)._replace(clip_units=0.1, beta=0.999)
    update = jnp.array([1.5, -2.5, 0.5, 3.0] * 20)
    rounded, tries = jax.jit(lambda: discrete._rounded(KEY, update, noise))()
    assert tries == discrete.TRIES and rounded.tolist() == [1, -2, 0, 3] * 20


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("law", MAKE)
def test_modular_sums_decode_exactly(law):
    """The sum modulo 2^bits of 16 messages is the sum of what each rounded to, and of its noise, to the unit.

    And the noise in the decoded sum has std z C. Catches a sign lost in the ring, and noise in another unit.
    """
    size, width, clip_norm = 16, 1 << 15, 3.0
    member = MAKE[law](clip_norm, 2.0, size, bits=16)
    known = member.facts.noise.details
    scale = jnp.asarray(np.random.default_rng(0).normal(size=(size, 1)), jnp.float32)

    @jax.jit
    @jax.vmap
    def drawn(key):
        message = jnp.zeros(width, jnp.int32)
        return draw_integers(prng.stream(key, "noise"), message, alias_table(law, known.message_std))

    keys = jax.random.split(KEY, size)
    messages = jax.jit(jax.vmap(lambda key, scale: member.on_client(key, jnp.ones(width) * scale, (), ())[0]))(
        keys, scale[:, 0]
    )
    noise = drawn(keys)
    aggregator = aggregation.modular_sum(1.0, modulus_bits=16)
    carry = aggregator.init(jax.ShapeDtypeStruct((width,), jnp.int32), size)
    here = jnp.arange(size)
    one = jnp.ones(size)
    carry = jax.jit(lambda x: aggregator.accumulate(KEY, None, carry, Received(x, one, here, here)))(messages)
    total, _ = aggregator.finalize(KEY, None, carry)
    messages, noise = np.asarray(messages, np.int64), np.asarray(noise, np.int64)
    rounded = messages - noise
    assert np.abs(rounded).max() <= 1 + clip_norm / known.granularity / math.sqrt(width)
    assert np.asarray(total, np.int64).tolist() == (rounded.sum(0) + noise.sum(0)).tolist()
    decoded, _, metrics = member.on_server(KEY, None, total, (), _measured(), 1.0)
    np.testing.assert_allclose(decoded, messages.sum(0) * known.granularity, rtol=1e-6)
    assert metrics["rounding_tries"] == 1
    more = np.concatenate([np.asarray(drawn(jax.random.split(jax.random.key(i), size))).sum(0) for i in range(32)])
    check_level(more * known.granularity, 6.0)


def _measured():
    _, _, measured = jax.eval_shape(lambda: details_member().on_client(KEY, jnp.ones(3), (), ()))
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), measured)


def details_member():
    return discrete_gaussian_mechanism(1.0, 1.0, 2)


@pytest.mark.full
@pytest.mark.optimised
@pytest.mark.parametrize("devices", cases.rows([1, 2], [1]))  # two: as all rows of tests/laws/test_compositions.py
def test_rounds_under_a_modular_sum(devices):
    """A federation: the same bits on one device and two; a modulus that could wrap, and too few slots, are refused.

    Catches integers that the engine takes for floats, and messages decoded twice.
    """
    member = discrete_gaussian_mechanism(50.0, 1e-4, 10, granularity=1e-3)
    parts = {"transform": chain(identity(), member), "aggregator": aggregation.modular_sum(10.0)}
    one = p.Federation(**parts).run(p.COHORT, num_rounds=1)
    if devices == 2:
        two = p.Federation(**parts, plan=engine.Plan(2, 2), mesh=engine.device_mesh(2)).run(p.COHORT, num_rounds=1)
        laws.check_equal_bits(p.outcome(*one), p.outcome(*two), "two devices")
    updates = [
        laws.numpy_local_sgd(p.START, id, jax.random.fold_in(jax.random.key(1), 0), size=p.SIZES[id]) for id in p.COHORT
    ]
    np.testing.assert_allclose(one[0].server.params, p.START + np.mean(updates, axis=0), atol=3e-3)
    assert one[1][0]["uplink_bytes"].total() == 10 * 12
    with pytest.raises(ValueError, match=r"aggregator\.modulus: expected more than"):
        p.Federation(**parts | {"aggregator": aggregation.modular_sum(10.0, modulus_bits=16)})
    with refused("cohort_size", rule="10 slots"):
        p.Federation(**parts | {"transform": discrete_gaussian_mechanism(50.0, 1.0, 11)}).run(p.COHORT)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("law", MAKE)
def test_facts(law):
    """Catches an error below the real one, a multiplier above what rounding leaves, and wires in floats."""
    member = MAKE[law](1.0, 1.0, 16, granularity=0.05)
    known, d = member.facts.noise.details, 200
    assert member.facts.noise[:4] == (law, "distributed", 1.0, 1.0) and member.facts.l2_bound is None
    assert (known.clip_units, known.message_std, known.cohort_size, known.sum_std) == (20.0, 5.0, 16, 20.0)
    assert 0.9 < known.multiplier(d) < 1 and known.multiplier(10 * d) < known.multiplier(d)
    assert known.sum_error(d) == d * 16 * 2.0**-63 and known.sum_error(d, 3) == d * 3 * 2.0**-63
    update = jnp.asarray(np.random.default_rng(0).normal(size=d) * 0.1, jnp.float32)
    send = jax.jit(jax.vmap(lambda key: member.on_client(key, update, (), ())[0]))
    errors = ((np.asarray(send(jax.random.split(KEY, 2000))) * 0.05 - np.asarray(update)) ** 2).sum(1)
    declared = float(jax.jit(member.squared_error)(update))
    assert 0.7 * declared < errors.mean() < declared
    spec = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    assert wire_of(MAKE[law](1.0, 1.0, 16, bits=20), spec) == Wire(12, 240)


@pytest.mark.parametrize("bits", [16, 20, 32])
@pytest.mark.parametrize("size", [10, 100])
def test_the_default_grid_fits(bits, size):
    """Catches a default for which twice the cohort could wrap, or whose table is too long."""
    for make in MAKE.values():
        for multiplier in (0.3, 1.0, 10.0):
            member = make(0.1, multiplier, size, bits=bits)
            assert 2 * size * member.facts.integer_range[1] < 2 ** (bits - 1)
            known = member.facts.noise.details
            assert known.message_std <= 1024.001 and known.clip_units <= 2**20 + 1


@pytest.mark.parametrize("make", MAKE.values())
def test_wrong_options_are_refused(make):
    """Catches grids on which the noise is no noise, tables that do not fit, and rounding that never ends."""
    for options, wrong in (
        ({"granularity": 1.0}, "granularity: expected a grid with noise of 0.5"),
        ({"granularity": 1e-6}, "granularity: expected a grid"),
        ({"granularity": -1.0}, "granularity"),
        ({"bits": 8}, "bits: expected a modulus"),
        ({"bits": 33}, "bits"),
        ({"beta": 0.0}, "beta"),
        ({"beta": 1.0}, "beta"),
        ({"cohort_size": 0}, "cohort_size"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"clip_norm": float("nan")}, "clip_norm"),
    ):
        with pytest.raises((ValueError, TypeError), match=wrong):
            make(**{"clip_norm": 1.0, "noise_multiplier": 1.0, "cohort_size": 100} | options)
    with refused("noise_multiplier", rule="Python number", kind=InvalidType):
        jax.jit(lambda z: make(1.0, z, 100).facts.noise.multiplier)(1.0)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("law", MAKE)
def test_an_update_that_is_not_finite_shows(law, bad):
    """Catches integers made of an infinite update, with which the client would count."""
    member = MAKE[law](1.0, 1.0, 10, granularity=0.1)
    for scale in (1.0, 3e38):
        update = jnp.array([scale, bad, 0.0], jnp.float32)
        *_, measured = member.on_client(KEY, update, member.init(update), member.init_client(update))
        assert not engine.all_finite(measured)
        finite = jnp.array([scale, -scale, 0.0], jnp.float32)
        *_, measured = member.on_client(KEY, finite, member.init(finite), member.init_client(finite))
        assert engine.all_finite(measured)
