"""Robust rules that look at each coordinate by itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import adversary
from fedjax_sim.aggregation import mean_around_median, median, sign_majority, trimmed_mean
from tests.aggregation.robust.problems import adversaries, applied
from tests.refusals import refused

RNG = np.random.default_rng(0)
M, F = 11, 3
UPDATES = {"a": RNG.normal(size=(M, 2, 3)).astype(np.float32), "b": RNG.integers(-2, 3, (M, 4)).astype(np.float32)}
WEIGHTS = np.array([3, 1, 0, 7, 2, 2, 5, 1, 4, 0, 6], np.float32)


def flat(tree, rows=True):
    leading = (M,) if rows else ()
    return np.concatenate([np.reshape(tree[name], (*leading, -1)) for name in "ab"], axis=-1)


def copies(x, weights):
    return np.repeat(x, weights.astype(int), axis=0)


def around(x, kept):
    """Mean of the `kept` values nearest to the median; those at equal distances in equal parts."""
    centre, found = np.median(x, axis=0), np.zeros(x.shape[1])
    for j, column in enumerate(x.T):
        apart = np.abs(column - centre[j])
        cut = np.sort(apart)[kept - 1]
        inside, ties = column[apart < cut], column[apart == cut]
        found[j] = (inside.sum() + (kept - len(inside)) * ties.mean()) / kept
    return found


def sorted_mean(x, cut):
    return np.sort(x, axis=0)[cut : len(x) - cut].mean(0)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("present", ["some", "all"])
def test_rules_are_numpys(present, trusted):
    """Catches absent messages that count, weights that are trusted or not, and leaves of several shapes."""
    weights = np.ones(M, np.float32) if present == "all" else WEIGHTS
    x, there = flat(UPDATES).astype(np.float64), weights > 0
    some, n = x[there], int(there.sum())
    copied = copies(x, weights)
    if trusted:
        expected = {
            median(trust_weights=True): np.median(copied, axis=0),
            trimmed_mean(F, trust_weights=True): None,
            sign_majority(trust_weights=True): np.sign((np.sign(x) * weights[:, None]).sum(0)),
        }
    else:
        expected = {
            median(): np.median(some, axis=0),
            trimmed_mean(F): sorted_mean(some, F),
            mean_around_median(F): around(some, n - F),
            sign_majority(): np.sign(np.sign(some).sum(0)),
        }
    if present == "all":
        expected[trimmed_mean(0)] = some.mean(0)
    for rule, value in expected.items():
        got, _ = applied(rule, UPDATES, weights)
        if value is None:  # the share F / n of all the weight is taken off at each side
            fine = copies(x, weights * 1000)
            value = sorted_mean(fine, len(fine) * F // n)
            np.testing.assert_allclose(flat(got, rows=False), value, atol=2e-3)
        else:
            np.testing.assert_allclose(flat(got, rows=False), value, rtol=1e-6, atol=1e-6)


@pytest.mark.full
def test_breakdown_points():
    """10,000 draws of attackers: inside the honest range up to f of them, and outside with one more.

    Catches a rule that one attacker more than it says, or one fewer, can move anywhere.
    """
    rng, draws = np.random.default_rng(1), 3400  # for each rule; all far away, on one side, is the optimal attack
    for rule, most in ((median(), 5), (trimmed_mean(F), F), (mean_around_median(F), F)):
        run = jax.jit(jax.vmap(lambda x, rule=rule: _messages(rule, x)))
        honest = rng.normal(size=(draws, M - most, 5)).astype(np.float32)
        sent = np.stack([adversaries(rng, x, most).astype(np.float32) for x in honest])
        got = np.asarray(run(jnp.concatenate([honest, sent], axis=1)))
        low, high = honest.min(1), honest.max(1)
        slack = high - low if rule.rule.__qualname__.startswith("mean_around") else 1e-6
        assert (got >= low - slack).all() and (got <= high + slack).all()
        one_more = np.concatenate([honest[:, 1:], np.full((draws, most + 1, 5), 2.0**99, np.float32)], axis=1)
        assert (np.asarray(run(jnp.asarray(one_more))) > 2.0**90).all()
    votes = np.where(np.arange(M)[:, None] < 7, 1.0, -9.0) * np.ones(3)
    assert (applied(sign_majority(), {"a": votes.astype(np.float32)})[0]["a"] == 1).all()
    votes[6] = -1
    votes[5] = -1
    assert (applied(sign_majority(), {"a": votes.astype(np.float32)})[0]["a"] == -1).all()


@pytest.mark.parametrize(
    ("size", "most", "attackers"), [(23, 7, 7), *(pytest.param(*row, marks=pytest.mark.full) for row in [(47, 2, 1)])]
)
def test_attackers_at_the_trimmed_share(size, most, attackers):
    """Attackers who have exactly f / n of the trusted weight, alone or alike. Catches a unit of theirs that stays."""
    weights = np.ones(size, np.float32)
    weights[:attackers] = most / attackers
    weights[attackers:] *= (size - most) / (size - attackers)
    x = np.arange(size, dtype=np.float32)[:, None]
    x[:attackers] = 2.0**90
    found, _ = applied(trimmed_mean(most, trust_weights=True), x, weights)
    assert attackers <= found.item() <= size - 1


def _messages(rule, x):
    from fedjax_sim.types import Received

    m = x.shape[0]
    carry = rule.init(jax.ShapeDtypeStruct(x.shape[1:], x.dtype), m)
    slots = jnp.arange(m)
    carry = rule.accumulate(None, None, carry, Received(x, jnp.ones(m), slots, slots))
    return rule.finalize(None, None, carry)[0]


def test_too_many_attackers_are_refused():
    """Catches a cohort that the rule is not defined for, when built and when too few messages arrive."""
    for rule in (trimmed_mean, mean_around_median):
        with refused("num_byzantine", value=6, rule="[0, 5]"):
            applied(rule(6), UPDATES)
        few, made = np.where(np.arange(M) < 2 * F, 1, 0), rule(F)
        assert np.isnan(flat(applied(made, UPDATES, few)[0], rows=False)).all()
        enough = np.where(np.arange(M) < 2 * F + 1, 1, 0)
        assert np.isfinite(flat(applied(made, UPDATES, enough)[0], rows=False)).all()


def test_weights_count_in_any_unit():
    """Tiny and large weights, and messages of 16 bits. Catches votes that are rounded to a message's dtype, where 257
    is 256 and 70,000 is infinite, and weights below 2^-60 that all count alike."""
    values = np.array([[1.0], [-1.0], [-1.0], [5.0]])
    weights = np.array([257, 256, 0.5, 0], np.float32)
    majority, middle = sign_majority(trust_weights=True), median(trust_weights=True)
    for dtype in (jnp.bfloat16, jnp.float16):
        x = np.asarray(jnp.asarray(values, dtype))
        assert applied(majority, x, weights)[0].tolist() == [1]
        assert applied(majority, x, 1000 * weights)[0].tolist() == [1]
    for unit in (1e-34, 1e-18, 1.0, 2.0**90):
        got, _ = applied(middle, values.astype(np.float32), weights * np.float32(unit))
        assert got.tolist() == [1]


@pytest.mark.full
def test_cohorts_of_100_000():
    """More messages than are added at once, a quarter of them far away. Catches rules that refuse them, and halves of
    sums that wrap."""
    m, f = 100_000, 30_000
    x = np.random.default_rng(5).uniform(0.9, 1, (m, 1)).astype(np.float32)
    x[: m // 4] *= 1000
    exact = x.astype(np.float64)
    expected = {
        trimmed_mean(0): exact.mean(0),
        trimmed_mean(f): sorted_mean(exact, f),
        trimmed_mean(f, trust_weights=True): sorted_mean(exact, f),
        mean_around_median(f): around(exact, m - f),
    }
    for rule, value in expected.items():
        np.testing.assert_allclose(applied(rule, x)[0], value, rtol=1e-6)
    attack = adversary.corrupted(median(), adversary.alie(0.0), adversary.clients(range(f)))
    sent = np.where(np.arange(m)[:, None] < f, exact[f:].mean(0), exact)
    np.testing.assert_allclose(applied(attack, x)[0], np.median(sent, axis=0), rtol=1e-6)
