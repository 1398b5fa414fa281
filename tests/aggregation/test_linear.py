"""What the linear aggregators estimate, by enumeration and in float64."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import InvalidType, aggregation, sampling, transform
from fedjax_sim.round.compatibility import check_parts
from fedjax_sim.types import Received
from tests.refusals import refused

RNG = np.random.default_rng(0)
SPEC = {"w": jax.ShapeDtypeStruct((3,), jnp.float32), "b": jax.ShapeDtypeStruct((), jnp.bfloat16)}


def aggregate(aggregator, updates, weights, ids=None):
    """The aggregate of one chunk with all messages."""
    count = len(weights)
    ids = np.arange(count) if ids is None else ids
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), updates)

    @jax.jit
    def run(updates, weights, ids):
        received = Received(updates, weights, ids, jnp.arange(count))
        carry = aggregator.accumulate(jax.random.key(0), None, aggregator.init(spec, count), received)
        return aggregator.finalize(jax.random.key(0), None, carry)

    return run(updates, jnp.array(weights, jnp.float32), jnp.array(ids, jnp.int32))


def expectation(aggregator, cohorts, updates, weights):
    """Mean of the aggregate over cohorts given as (probability, ids), in one program."""
    size = max(len(ids) for _, ids in cohorts)
    padded = np.array([list(ids) + [0] * (size - len(ids)) for _, ids in cohorts])
    valid = np.array([[1] * len(ids) + [0] * (size - len(ids)) for _, ids in cohorts])

    @jax.jit
    @jax.vmap
    def run(ids, weights, messages):
        received = Received(messages, weights, ids, jnp.arange(size))
        carry = aggregator.init(jax.ShapeDtypeStruct((), jnp.float32), size)
        carry = aggregator.accumulate(jax.random.key(0), None, carry, received)
        return aggregator.finalize(jax.random.key(0), None, carry)[0]

    w = np.float32(np.asarray(weights)[padded] * valid)
    u = np.float32(np.asarray(updates)[padded] * valid)
    values = np.asarray(run(jnp.array(padded, jnp.int32), jnp.array(w), jnp.array(u)), np.float64)
    return float(np.dot([p for p, _ in cohorts], values))


@pytest.mark.default_rows("mean", "fixed_mean", "keep_old")
@pytest.mark.parametrize("name", ["mean", "uniform", "fixed_mean", "total", "keep_old"])
def test_matches_a_float64_oracle(name):
    """Catches weights that are squared or forgotten, and sums in float32; 5,000 messages over ten decades."""
    count = 5000
    weights = np.float32(RNG.integers(0, 300, count))
    scale = 10.0 ** RNG.uniform(-5, 5, (count, 1))
    updates = {"w": np.float32(scale * RNG.normal(size=(count, 3)))}
    updates["w"][weights == 0] = 0
    w64, u64, there = weights.astype(np.float64), updates["w"].astype(np.float64), weights > 0
    aggregator, factor, divisor = {
        "mean": (aggregation.mean(), w64, w64.sum()),
        "uniform": (aggregation.mean(weighting="uniform"), there, there.sum()),
        "fixed_mean": (aggregation.fixed_mean(4000.0), there, 4000),
        "total": (aggregation.total(), there, 1),
        "keep_old": (aggregation.keep_old(1e6), w64, 1e6),
    }[name]
    got = np.asarray(aggregate(aggregator, jax.tree.map(jnp.array, updates), weights)[0]["w"], np.float64)
    addends = factor[:, None] * u64 / divisor
    truth = addends.sum(0)
    allowed = 2.0**-23 * count * np.abs(addends).max(0) + 4 * np.spacing(np.abs(truth).astype(np.float32))
    assert (np.abs(got - truth) <= allowed).all()
    assert (np.abs(got - truth) <= 1e-6 * np.abs(addends).sum(0)).all()


def test_bfloat16_messages_are_weighted_exactly():
    """Clients who all hold 301 examples and send the same message. Catches weights rounded to bfloat16 (302)."""
    updates = {"w": jnp.ones((7, 3), jnp.float32), "b": jnp.full(7, 1.5, jnp.bfloat16)}
    result, metrics = aggregate(aggregation.mean(), updates, [301.0] * 7)
    assert float(result["b"]) == 1.5 and result["w"].tolist() == [1, 1, 1]
    assert float(metrics["total_weight"]) == 2107


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("scale", [2.0, 0.25])
@pytest.mark.optimised
def test_weights_may_be_scaled(scale):
    """Catches a divisor that does not scale with the weights. Powers of two change no bit; others 1e-6."""
    updates = {"w": jnp.array(RNG.normal(size=(9, 3)), jnp.float32)}
    weights = RNG.integers(1, 50, 9)
    plain, _ = aggregate(aggregation.mean(), updates, weights)
    scaled, _ = aggregate(aggregation.mean(), updates, weights * scale)
    assert np.asarray(plain["w"]).tobytes() == np.asarray(scaled["w"]).tobytes()


@pytest.mark.default_rows("mean", "keep_old")
@pytest.mark.parametrize("name", ["mean", "fixed_mean", "total", "keep_old"])
def test_empty_cohort_is_zero(name):
    """Catches 0 / 0."""
    aggregator = {"fixed_mean": aggregation.fixed_mean(3), "keep_old": aggregation.keep_old(3)}.get(name)
    aggregator = aggregator or getattr(aggregation, name)()
    result, metrics = aggregate(aggregator, {"w": jnp.zeros((2, 3))}, [0, 0])
    assert result["w"].tolist() == [0, 0, 0] and float(metrics["total_weight"]) == 0


def test_ratio_estimator_is_biased_and_horvitz_thompson_is_not():
    """n = (1, 9), g = (0, 1), m = 1 gives 0.5 for 0.9; then five clients, all ten pairs (Cochran 1977, chapter 6).

    Catches Horvitz-Thompson weights that are normalised by the cohort.
    """
    one = [(0.5, (0,)), (0.5, (1,))]
    design = sampling.uniform(2, 1).design
    assert expectation(aggregation.mean(), one, [0, 1], [1, 9]) == 0.5
    assert abs(expectation(aggregation.horvitz_thompson(design, 10), one, [0, 1], [1, 9]) - 0.9) < 1e-6

    n, g = np.array([1, 2, 5, 10, 50]), np.array([4.0, -3.0, 2.0, 0.5, 1.0])
    pairs = [(0.1, ids) for ids in itertools.combinations(range(5), 2)]
    truth = np.dot(n, g) / n.sum()
    ratio = expectation(aggregation.mean(), pairs, g, n)
    by_hand = np.mean([np.dot(n[list(c)], g[list(c)]) / n[list(c)].sum() for _, c in pairs])
    assert abs(ratio - by_hand) < 1e-5 and abs(ratio - truth) > 0.05
    design = sampling.uniform(5, 2).design
    assert abs(expectation(aggregation.horvitz_thompson(design, n.sum()), pairs, g, n) - truth) < 1e-5


def test_horvitz_thompson_with_unequal_probabilities():
    """Each client's own probability counts. Catches one probability for all; independent inclusion, all 8 cohorts."""

    class Design:
        replacement, scheme = False, "poisson"

        @staticmethod
        def inclusion_probabilities():
            return chances

    chances, g, n = np.array([0.2, 0.5, 0.9]), np.array([1.0, -2.0, 3.0]), np.array([1, 4, 2])
    cohorts = []
    for inside in itertools.product((0, 1), repeat=3):
        inside = np.array(inside)
        cohorts.append((np.prod(np.where(inside, chances, 1 - chances)), tuple(np.flatnonzero(inside))))
    got = expectation(aggregation.horvitz_thompson(Design, n.sum()), cohorts, g, n)
    assert abs(got - np.dot(n, g) / n.sum()) < 1e-5


def test_li_schemes_are_unbiased():
    """Scheme I over all draws with replacement, scheme II over all pairs. Catches them exchanged."""
    n, g = np.array([1, 3, 6]), np.array([2.0, -1.0, 0.5])
    p = n / n.sum()
    truth = np.dot(p, g)
    draws = [(p[i] * p[j], (i, j)) for i in range(3) for j in range(3)]
    assert abs(expectation(aggregation.li_scheme_one(), draws, g, n) - truth) < 1e-6
    pairs = [(1 / 3, ids) for ids in itertools.combinations(range(3), 2)]
    two = aggregation.li_scheme_two(sampling.uniform(3, 2).design, n.sum())
    assert abs(expectation(two, pairs, g, n) - truth) < 1e-6
    assert abs(expectation(aggregation.li_scheme_one(), pairs, g, n) - truth) > 0.1


def test_keep_old_shrinks_by_the_absent_share():
    """Catches a cohort-normalised mean: with 3 of 4 shares absent the update is a quarter."""
    updates = {"w": jnp.ones((4, 3))}
    keep = aggregation.keep_old(40)
    assert aggregate(keep, updates, [10, 10, 10, 10])[0]["w"].tolist() == [1, 1, 1]
    alone = jax.tree.map(lambda x: x.at[1:].set(0), updates)
    np.testing.assert_allclose(aggregate(keep, alone, [10, 0, 0, 0])[0]["w"], 0.25, rtol=1e-6)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: aggregation.fixed_mean(0), ValueError, "denominator: expected a finite number > 0"),
        (lambda: aggregation.fixed_mean(float("nan")), ValueError, "denominator"),
        (lambda: aggregation.fixed_mean(True), TypeError, "denominator"),
        (lambda: aggregation.mean(weighting="exmples"), ValueError, "weighting: .*Did you mean 'examples'"),
        (lambda: aggregation.keep_old(-1), ValueError, "denominator|total_weight"),
        (
            lambda: aggregation.horvitz_thompson(sampling.with_replacement(5, 2).design, 1.0),
            ValueError,
            "design: expected a design without replacement",
        ),
        (lambda: aggregation.horvitz_thompson(sampling.uniform(5, 2).design, 0), ValueError, "total_weight"),
        (
            lambda: aggregation.horvitz_thompson(sampling.uniform(5, 2), 1.0),
            TypeError,
            "a SamplingDesign.*sampler.design",
        ),
        (
            lambda: aggregation.gather(lambda key, updates, weights, ids: updates, sensitivity=-1.0),
            ValueError,
            "sensit",
        ),
        (lambda: aggregation.li_scheme_two(sampling.weighted([1, 2], 2).design, 3), ValueError, "design"),
    ],
)
def test_wrong_input(make, error, message):
    """Catches divisors of zero and estimators for another design."""
    with pytest.raises(error, match=message):
        make()


def test_integers_that_would_be_rounded_are_refused():
    """Catches int32 messages summed as float32: ten of 2^24 + 1 were off by ten. What float32 holds is summed."""
    for dtype in (jnp.int32, jnp.uint32):
        for rule in (aggregation.mean(), aggregation.total()):
            with refused("update['n']", rule="16 bits", kind=InvalidType):
                rule.init({"n": jax.ShapeDtypeStruct((2,), dtype)}, 10)
    whole = aggregate(aggregation.total(), np.full((10, 1), 2**15 - 1, np.int16), np.ones(10))[0]
    assert whole == 10 * (2**15 - 1)
    wide = transform.discrete_gaussian_mechanism(1.0, 1.0, 2, granularity=2.0**-9).stating(integer_range=(0, 2**24 + 1))
    with refused("transform", rule="16777216"):
        check_parts(sampling.uniform(4, 2), None, wide, aggregation.fixed_mean(2.0), None)
