"""Robust rules that choose messages by their distances."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import adversary
from fedjax_sim.aggregation import bulyan, krum, minimum_diameter
from fedjax_sim.aggregation.robust.distance import _scores
from tests.aggregation.robust.problems import adversaries, applied
from tests.aggregation.robust.test_coordinate import _messages, around
from tests.refusals import refused

RNG = np.random.default_rng(0)
D = 12


def numpy_scores(x, alive, f):
    """Krum's scores among the messages that are left."""
    apart = ((x[:, None].astype(np.float64) - x[None]) ** 2).sum(-1)
    scores = np.full(len(x), np.inf)
    for i in alive:
        others = sorted(apart[i, j] for j in alive if j != i)
        scores[i] = sum(others[: max(len(alive) - f - 2, 0)])
    return scores


def numpy_krum(x, present, f, chosen):
    best = np.argsort(numpy_scores(x, present, f), kind="stable")[:chosen]
    return x[best].mean(0)


def numpy_bulyan(x, present, f):
    alive, chosen = list(present), []
    for _ in range(len(present) - 2 * f):
        best = int(np.argmin(numpy_scores(x, alive, f)))
        chosen.append(best)
        alive.remove(best)
    return around(x[chosen].astype(np.float64), len(present) - 4 * f)


def numpy_minimum_diameter(x, present, f):
    size = len(present) - f
    apart = ((x[:, None].astype(np.float64) - x[None]) ** 2).sum(-1)
    subsets = itertools.combinations(present, size)
    return x[list(min(subsets, key=lambda s: apart[np.ix_(s, s)].max()))].mean(0)


def cohorts(m, num=12):
    """Updates [m, D] of honest clients and attackers, some integers with ties; who is present."""
    for i in range(num):
        x = RNG.normal(size=(m, D)).astype(np.float32)
        if i % 3 == 1:
            x = RNG.integers(0, 3, (m, D)).astype(np.float32)
        if i % 3 == 2:
            x[:2] = adversaries(RNG, x[2:], 2)
            x = np.clip(x, -(2.0**40), 2.0**40)
        yield x, np.ones(m, bool) if i % 2 else np.arange(m) != 4


@pytest.mark.default_rows("3")
@pytest.mark.parametrize("chosen", [1, 3])
def test_krum_is_numpys(chosen):
    """Catches a wrong number of neighbours, the message itself among them, ties by anything but id, absent ones."""
    rule = krum(3, chosen)
    for x, there in cohorts(11):
        got, _ = applied(rule, x, there)
        np.testing.assert_allclose(got, numpy_krum(x, np.flatnonzero(there), 3, chosen), rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_equal_distances_in_another_order_are_equal_scores():
    """Bit for bit, so that ties go by id. Catches float sums in the order of rows, and an infinite distance counted."""
    m, nearest = 40, 23
    apart = RNG.uniform(1, 2, (m, m)).astype(np.float32)
    apart = np.maximum(apart, apart.T)
    apart[3, 5] = apart[5, 3] = np.inf
    apart[7, :20] = apart[:20, 7] = 2.0**-30
    there, order = np.arange(m) % 9 != 4, RNG.permutation(m)
    first = np.asarray(_scores(jnp.asarray(apart), jnp.asarray(there), jnp.int32(nearest)))
    other = _scores(jnp.asarray(apart[order][:, order]), jnp.asarray(there[order]), jnp.int32(nearest))
    np.testing.assert_array_equal(np.asarray(other), first[order])
    for i in range(m):
        others = sorted(float(apart[i, j]) for j in range(m) if j != i and there[j])
        np.testing.assert_allclose(first[i], sum(others[:nearest]) if there[i] else np.inf, rtol=1e-6)
    few = np.asarray(_scores(jnp.asarray(apart), jnp.asarray(there), jnp.int32(there.sum() - 1)))
    assert np.isinf(few[[3, 5]]).all() and np.isfinite(few[0])


def test_bulyan_is_numpys():
    """Catches neighbours that count after they were chosen, and a number of neighbours that does not fall."""
    rule = bulyan(2)
    for x, there in cohorts(16, 24):
        got, _ = applied(rule, x, there)
        np.testing.assert_allclose(got, numpy_bulyan(x, np.flatnonzero(there), 2), rtol=1e-4, atol=1e-4)


def test_minimum_diameter_is_numpys():
    """Catches a subset that is left out, and absent messages that are taken, or for which it discards fewer."""
    rule = minimum_diameter(3)
    for x, there in cohorts(9):
        got, _ = applied(rule, x, there)
        np.testing.assert_allclose(got, numpy_minimum_diameter(x, np.flatnonzero(there), 3), rtol=1e-5, atol=1e-5)
    for number in range(7, 10):  # of nine slots: two messages are missing, one, none
        x, there = RNG.normal(size=(9, D)).astype(np.float32), np.arange(9) < number
        x[:3] = 1e6 * (1 + x[:3])  # three attackers, as many as it withstands
        got, _ = applied(rule, x, there)
        np.testing.assert_allclose(got, numpy_minimum_diameter(x, np.flatnonzero(there), 3), rtol=1e-5, atol=1e-5)
        assert np.abs(got).max() < 10
    assert np.isnan(applied(rule, x, np.arange(9) < 6)[0]).all()  # three of six are no minority
    with pytest.raises(ValueError, match="at most 200,000 subsets of 40 messages"):
        applied(minimum_diameter(15), np.zeros((40, 2), np.float32))


@pytest.mark.full
def test_attackers_are_not_chosen():
    """Krum's choice is an honest message, or one among them; Bulyan stays near the honest range.

    Of the values that Bulyan keeps around an honest median none is further from it than an honest one that it could
    have kept: outside of the honest range, as 16 of these draws are, but by no more than its width.

    Catches a rule that f attackers move: 10,000 draws each, among them messages of 2^99.
    """
    rng, draws = np.random.default_rng(2), 10_000
    for f, m, rule in ((3, 11, krum(3)), (2, 11, bulyan(2))):
        honest = rng.normal(size=(draws, m - f, D)).astype(np.float32)
        sent = np.stack([adversaries(rng, x, f).astype(np.float32) for x in honest])
        got = np.asarray(jax.jit(jax.vmap(partial(_messages, rule)))(np.concatenate([honest, sent], axis=1)))
        if f == 2:
            low, high = honest.min(1), honest.max(1)
            assert (got >= low - (high - low)).all() and (got <= high + (high - low)).all()
        else:
            reach = ((honest[:, :, None] - honest[:, None]) ** 2).sum(-1).max((1, 2))
            assert (((got[:, None] - honest) ** 2).sum(-1).min(1) <= m * reach).all()


@pytest.mark.full
@pytest.mark.parametrize("rule", [krum(2), krum(2, 3), bulyan(1), minimum_diameter(2)],
                         ids=["krum", "multi-krum", "bulyan", "minimum diameter"])  # fmt: skip
def test_distances_that_are_infinite(rule):
    """Messages 1e25 apart are told apart by nothing: the round is skipped, and nobody is chosen.

    Catches the first message by id, an attacker's as well as another's, taken for the best of all.
    """
    x = RNG.normal(size=(9, D)).astype(np.float32)
    assert np.isfinite(applied(rule, x)[0]).all()
    assert np.isnan(applied(rule, x * np.float32(1e25))[0]).all()
    who = adversary.corrupted(rule, adversary.sign_flip(), adversary.clients([0]))
    assert applied(who, x * np.float32(1e25))[1]["messages_chosen"] == 0


@pytest.mark.full
@pytest.mark.parametrize(("rule", "least"), [(krum, 2 * 5 + 3), (bulyan, 4 * 5 + 3)])
def test_cohorts_that_are_too_small(rule, least):
    """Catches a choice among too few messages."""
    x, made = RNG.normal(size=(least, D)).astype(np.float32), rule(5)
    assert np.isfinite(applied(made, x)[0]).all()
    assert np.isnan(applied(made, x, np.arange(least) > 0)[0]).all()
    with refused("num_byzantine", value=5, rule="[0, 4]"):
        applied(made, x[1:])
    with refused("num_chosen", value=7, rule="[1, 6]"):
        applied(krum(3, 7), x[:11])
