"""Laws of weighted sampling. False alarms have probability below 1e-6, for fixed keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from fedjax_sim.sampling import importance, weighted, weighted_without_replacement
from fedjax_sim.sampling.importance import _alias_table, _units

ALPHA = 1e-6


def table_law(threshold, alias):
    """Exact units of 2^-32/N that a table gives each client."""
    size = len(alias)
    full = alias == np.arange(size)
    keep = np.where(full, 2**32, threshold.astype(np.int64))
    law = keep.copy()
    np.add.at(law, alias, 2**32 - keep)
    return law


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1e12), st.integers(1, 5).map(float)), min_size=1, max_size=40))
def test_table_holds_the_weights(weights):
    """Catches every slip of Vose's construction: the table's law is the weights, in whole units, without a loss."""
    weights = np.array(weights)
    if not weights.any():
        weights[0] = 1
    units = _units(weights)
    assert units.sum() == len(weights) * 2**32 and (units >= 0).all() and not units[weights == 0].any()
    exact = weights / weights.max() / (weights / weights.max()).sum()
    assert np.abs(units / (len(weights) * 2.0**32) - exact).max() <= 2.0**-32 / len(weights) + 2.0**-50
    np.testing.assert_array_equal(table_law(*_alias_table(units)), units)


def test_large_table():
    """Catches cost and rounding that grow with N: 300,000 heavy-tailed weights, exact in whole units."""
    weights = np.random.default_rng(0).pareto(1.0, 300_000)
    units = _units(weights)
    np.testing.assert_array_equal(table_law(*_alias_table(units)), units)
    assert np.abs(units / (300_000 * 2.0**32) - weights / weights.sum()).max() < 1e-14


def draws(weights, num_slots=10, num_trials=20_000):
    sampler = weighted(weights, num_slots)
    state = sampler.init()
    keys = jax.random.split(jax.random.key(6), num_trials)
    return np.asarray(jax.jit(jax.vmap(lambda key, state: sampler.sample(key, state)[0].ids, (0, None)))(keys, state))


def test_draws_follow_the_weights():
    """Accepts the weights and rejects a single one that is 5 % off; slots are independent of each other."""
    weights = np.array([5.0, 1, 1, 0.5, 10, 3, 0.2])
    ids = draws(weights)
    counts = np.bincount(ids.ravel(), minlength=7)
    assert stats.chisquare(counts, weights / weights.sum() * counts.sum()).pvalue > ALPHA
    wrong = weights * np.where(np.arange(7) == 5, 1.05, 1)
    assert stats.chisquare(counts, wrong / wrong.sum() * counts.sum()).pvalue < ALPHA
    p = weights / weights.sum()
    pairs = np.bincount(ids[:, 0] * 7 + ids[:, 1], minlength=49)
    assert stats.chisquare(pairs, np.outer(p, p).ravel() * pairs.sum()).pvalue > ALPHA


def test_zero_weights_are_never_drawn():
    """Catches `<=` for `<` at a threshold of 0, and a zero that is somebody's alias."""
    weights = np.where(np.arange(50) % 7 == 3, 1.0 + np.arange(50), 0.0)
    assert set(np.unique(draws(weights))) == set(range(3, 50, 7))
    assert set(np.unique(draws([0, 0, 1e-300], num_trials=10))) == {2}


@pytest.mark.full
def test_plain_mean_is_unbiased():
    """n = (1, 9), g = (0, 1), m = 1: the plain mean over slots is .9, where a uniform cohort would give .5."""
    mean = np.array([0.0, 1.0])[draws([1, 9], num_slots=1, num_trials=100_000)].mean()
    assert abs(mean - 0.9) < 5 * np.sqrt(0.09 / 100_000)
    assert weighted([1, 9], 1).design.draw_probabilities @ [0, 1] == pytest.approx(0.9, abs=1e-9)


def test_table_travels_as_state():
    """Catches a big table captured as a constant of the compiled round."""
    sampler = weighted(np.arange(1.0, 200_001), 4)
    state = sampler.init()
    assert [x.shape for x in state] == [(200_000,)] * 2
    jaxpr = jax.make_jaxpr(sampler.sample)(jax.random.key(0), state)
    assert sum(np.size(c) for c in jaxpr.consts) < 100
    _, after = jax.jit(sampler.sample)(jax.random.key(0), state)
    np.testing.assert_array_equal(after.alias, state.alias)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ([], "weights: expected a 1-dimensional array"),
        ([[1.0, 2.0]], "weights: expected a 1-dimensional array"),
        (3.0, "weights: expected a 1-dimensional array"),
        ([0, 0], "At least one client must have"),
        ([1, -1], r"weights\[1\]: expected a finite number >= 0, got -1.0"),
        ([1, 2, float("nan")], r"weights\[2\]: expected a finite number >= 0, got nan"),
        ([float("inf"), 1], r"weights\[0\]: expected a finite number >= 0, got inf"),
        ([True, False], "The dtype is bool"),
        (["1", "2"], "weights: expected"),
        (None, "weights: expected"),
        ([1j], "The dtype is complex128"),
    ],
)
def test_bad_weights(weights, text):
    with pytest.raises((ValueError, TypeError), match=text):
        weighted(weights, 1)


def test_bad_cohort_and_traced_weights():
    for bad in (0, -1, 2.0, True, 2**31):
        with pytest.raises((ValueError, TypeError), match="cohort_size: expected an integer"):
            weighted([1, 2], bad)
    with pytest.raises(TypeError, match="made on the host"):
        jax.jit(lambda w: weighted(w, 1).sample(jax.random.key(0), ())[0].ids)(jnp.ones(3))


def successive_law(weights, count):
    """The probability of each ordered choice of `count` clients, by enumeration."""
    law = {(): 1.0}
    for _ in range(count):
        law = {
            (*drawn, i): chance * weights[i] / (sum(weights) - sum(weights[j] for j in drawn))
            for drawn, chance in law.items()
            for i in range(len(weights))
            if i not in drawn and weights[i] > 0
        }
    return law


@pytest.mark.full
@pytest.mark.parametrize("raced", [True, False])
def test_successive_draws(raced, monkeypatch):
    """40,000 ordered draws of 2 of 5 clients against all 12 outcomes: chi-square above 1e-6, by both ways; a table that
    is off by 8 % in one weight is rejected. Catches draws in proportion to the weights of all, and repeated clients."""
    weights = [1.0, 2.0, 0.0, 4.0, 8.0]
    if not raced:
        monkeypatch.setattr(importance, "_RACED", 0)
        monkeypatch.setattr(importance, "_draws_needed", lambda chances, count: 200)
    sampler = weighted_without_replacement(weights, 2)
    state, keys = sampler.init(), jax.random.split(jax.random.key(4), 40_000)
    cohort = jax.device_get(jax.jit(jax.vmap(lambda key: sampler.sample(key, state)[0]))(keys))
    assert cohort.invited.all()
    codes = cohort.ids @ [5, 1]

    def chi_square(weights):
        law = successive_law(weights, 2)
        found = np.array([(codes == 5 * i + j).sum() for i, j in law])
        return stats.chisquare(found, np.array(list(law.values())) * len(keys)).pvalue

    assert chi_square(weights) > ALPHA > chi_square([1.0, 2.0, 0.0, 4.3, 8.0])


def test_many_clients_are_drawn_at_the_cost_of_few():
    """100,000 clients of unequal weights: different ones, all places filled, no array of N numbers; and refusals."""
    weights = np.random.default_rng(0).lognormal(0.0, 1.0, 100_000)
    sampler = weighted_without_replacement(weights, 50)
    state = sampler.init()
    cohort, _ = jax.jit(sampler.sample)(jax.random.key(0), state)
    assert cohort.invited.all() and len(set(cohort.ids.tolist())) == 50
    jaxpr = jax.make_jaxpr(sampler.sample)(jax.random.key(0), state)
    sizes = [x.aval.size for eqn in jaxpr.eqns for x in eqn.outvars]
    assert max(sizes) < 10_000
    with pytest.raises(ValueError, match="different clients"):
        weighted_without_replacement(np.append(1e9, np.ones(100_000)), 50)
    with pytest.raises(ValueError, match="positive weight"):
        weighted_without_replacement([1, 0, 0], 2)
