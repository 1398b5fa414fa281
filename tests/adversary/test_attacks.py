"""Published attacks against their papers' formulas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import adversary, aggregation
from fedjax_sim.types import Cohort, Round
from tests.aggregation.robust.problems import applied
from tests.laws import cases

RNG = np.random.default_rng(0)


def message_of(attack, honest, number):
    """What `number` attackers send beside honest messages: all the same, the last rows of a gathered cohort."""
    m = len(honest) + number
    x = np.concatenate([honest, RNG.normal(size=(number, honest.shape[1])).astype(np.float32)])
    seen = aggregation.gather(lambda key, updates, weights, ids: {"all": updates})
    got, _ = applied(adversary.corrupted(seen, attack, adversary.clients(range(len(honest), m))), x)
    rows = got["all"]
    assert np.array_equal(rows[: len(honest)], honest)
    assert all(np.array_equal(row, rows[-1]) for row in rows[len(honest) :])
    return rows[-1].astype(np.float64)


@pytest.mark.full
def test_alie():
    """z of the paper's equation 1. Catches a share that counts the attackers' own messages."""
    honest = RNG.normal(size=(38, 6)).astype(np.float32) * 2 + 1
    mean, std = honest.mean(0, dtype=np.float64), honest.std(0, ddof=1, dtype=np.float64)
    for number, won in ((12, 14), (5, 17)):
        n = 38 + number
        assert won == n // 2 + 1 - number
        z = stats.norm.ppf((n - number - won) / (n - number))
        np.testing.assert_allclose(message_of(adversary.alie(), honest, number), mean - z * std, rtol=1e-4, atol=1e-5)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("direction", ["unit", "sign", "std"])
@pytest.mark.parametrize("kind", ["max", "sum"])
def test_min_max_and_min_sum(kind, direction):
    """The bound holds, and no longer a thousandth further out. Catches a bisection that ends early."""
    honest = RNG.normal(size=(9, 6)).astype(np.float32) + 1
    attack = (adversary.min_max if kind == "max" else adversary.min_sum)(direction)
    sent, mean = message_of(attack, honest, 3), honest.mean(0, dtype=np.float64)
    ways = {"unit": mean / np.linalg.norm(mean), "sign": np.sign(mean), "std": honest.std(0, ddof=1)}
    gamma = (mean - sent) @ ways[direction] / (ways[direction] @ ways[direction])
    np.testing.assert_allclose(sent, mean - gamma * ways[direction], atol=1e-4)
    apart = ((honest[:, None].astype(np.float64) - honest[None]) ** 2).sum(-1)

    def excess(gamma):
        own = ((mean - gamma * ways[direction] - honest) ** 2).sum(1)
        return own.max() - apart.max() if kind == "max" else own.sum() - apart.sum(1).max()

    assert gamma > 0 and excess(gamma * 0.9999) <= 0 < excess(gamma * 1.001)


@pytest.mark.full
@pytest.mark.parametrize("attack", [adversary.min_max(), adversary.min_sum()], ids=["max", "sum"])
def test_half_precision_hides_as_well(attack):
    """Messages of bfloat16: the step of the same numbers in float32, to a two-hundredth, and a message in their dtype.
    Catches a mean, and inner products with it, that are added up in bfloat16."""
    honest = jnp.asarray(RNG.normal(size=(7, 3000)) + 1, jnp.bfloat16)
    seen = aggregation.gather(lambda key, updates, weights, ids: {"all": updates})
    made, away = adversary.corrupted(seen, attack, adversary.clients([7, 8])), []
    for dtype in (jnp.float32, jnp.bfloat16):
        x = np.asarray(jnp.concatenate([honest, honest[:2]]).astype(dtype))
        rows = applied(made, x)[0]["all"]
        assert rows.dtype == x.dtype
        rows = rows.astype(np.float64)
        away.append(np.linalg.norm(rows[-1] - rows[:7].mean(0)))
    np.testing.assert_allclose(away[1], away[0], rtol=5e-3)


EVERY = {
    "adaptive": adversary.adaptive(4),
    "alie": adversary.alie(),
    "fang": adversary.fang(),
    "forged_weight": adversary.forged_weight(3.0),
    "gaussian_noise": adversary.gaussian_noise(2.0),
    "inner_product": adversary.inner_product(0.3),
    "large_value": adversary.large_value(7.1),
    "mimic": adversary.mimic(),
    "model_replacement": adversary.model_replacement(9.1),
    "scaled": adversary.scaled(-0.3),
    "scaled_to": adversary.scaled_to(2.0),
    "stale": adversary.stale(),
}


@pytest.mark.full
@pytest.mark.parametrize("name", cases.rows(EVERY, ["fang"]))
def test_half_precision_is_attacked_alike(name):
    """Messages of bfloat16, before a rule and before a sum: what the same numbers in float32 bring, to a hundredth.

    Catches an attack that knows float32 alone, and steps that are rounded to a message's dtype.
    """
    honest = jnp.asarray(RNG.normal(size=(9, 40)) + 1, jnp.bfloat16)
    for rule in (aggregation.krum(2, 4), aggregation.mean()):
        made, found = adversary.corrupted(rule, EVERY[name], adversary.clients([7, 8])), []
        for dtype in (jnp.float32, jnp.bfloat16):
            x = np.asarray(honest.astype(dtype))
            spec = jax.ShapeDtypeStruct((40,), dtype)
            state = None if made.start is None else made.start(spec)
            slots, everyone = jnp.arange(9), jnp.ones(9, bool)
            round = Round(Cohort(slots, everyone, everyone), state=state)
            found.append(applied(made, x, np.arange(1, 10), round=round)[0].astype(np.float64))
        assert np.linalg.norm(found[1] - found[0]) < 0.01 * np.linalg.norm(found[0])


@pytest.mark.full
def test_gaussian_noise():
    """Another draw for each attacker; mean and deviation of 20,000, 5 sigma. Catches one draw for all."""
    m = 40
    seen = aggregation.gather(lambda key, updates, weights, ids: {"all": updates})
    made = adversary.corrupted(seen, adversary.gaussian_noise(3.0), adversary.share_of_clients(1.0))
    rows = applied(made, np.zeros((m, 500), np.float32))[0]["all"]
    assert abs(rows.mean()) < 5 * 3 / np.sqrt(rows.size) and abs(rows.std() / 3 - 1) < 5 / np.sqrt(2 * rows.size)
    assert len(np.unique(rows[:, 0])) == m and abs(jnp.corrcoef(rows[0], rows[1])[0, 1]) < 0.25


def test_fang():
    """Catches the wrong side, and honest values of the other sign."""
    honest = RNG.normal(size=(9, 40)).astype(np.float32) + np.linspace(-4, 4, 40, dtype=np.float32)
    sent, low, high, mean = message_of(adversary.fang(2.0), honest, 3), honest.min(0), honest.max(0), honest.mean(0)
    down = mean > 0
    assert (sent[down] <= low[down] * (1 + 1e-6 * np.sign(low[down]))).all()
    assert (sent[~down] >= high[~down] * (1 - 1e-6 * np.sign(high[~down]))).all()
    factor = np.where(down, sent / low, sent / high)
    assert (factor <= 2.0001).all() and (factor >= 0.4999).all() and np.ptp(factor) > 0.5


@pytest.mark.full
def test_mimic():
    """Catches another client's message, and an attacker's own."""
    honest = RNG.normal(size=(9, 6)).astype(np.float32)
    assert np.array_equal(message_of(adversary.mimic(4), honest, 3), honest[4])
    assert np.array_equal(message_of(adversary.mimic(10), honest, 3), honest[0])


@pytest.mark.full
def test_adaptive():
    """At least as far from the honest mean as each of its trials. Catches the least harmful one, and a rule unseen."""
    honest = RNG.normal(size=(9, 6)).astype(np.float32) + 1
    x = np.concatenate([honest, np.zeros((3, 6), np.float32)])
    mean, who = honest.mean(0, dtype=np.float64), adversary.clients(range(9, 12))
    spread = np.sqrt(((honest - mean) ** 2).sum(1).mean())
    ways = (mean / np.linalg.norm(mean), np.sign(mean), honest.std(0, ddof=1))
    for rule in (aggregation.trimmed_mean(3), aggregation.krum(3), aggregation.mean()):
        got = applied(adversary.corrupted(rule, adversary.adaptive(8, 0), who), x)[0]
        tried = []
        for way in ways:
            for scale in 2.0 ** np.arange(-4, 4):
                x[9:] = mean - spread * scale / np.linalg.norm(way) * way
                tried.append(np.linalg.norm(applied(rule, x)[0] - mean))
        np.testing.assert_allclose(np.linalg.norm(got - mean), max(tried), rtol=1e-4)


@pytest.mark.full
def test_adaptive_where_honest_messages_agree():
    """Three equal messages and one attacker: the mean moves by a quarter of the largest step, 2^3 |mean|. Catches steps
    in proportion to a deviation of 0, with which the attacker sends the mean."""
    x = np.full((4, 2), 0.5, np.float32)
    rule = adversary.corrupted(aggregation.mean(), adversary.adaptive(8, 0), adversary.clients([3]))
    moved = np.linalg.norm(applied(rule, x)[0] - x[0])
    np.testing.assert_allclose(moved, 8 * np.linalg.norm(x[0]) / 4, rtol=1e-5)


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize(("rule", "gain"), [(aggregation.geometric_median(), 1.1), (aggregation.krum(3), 1.02)],
                         ids=["geometric median", "krum"])  # fmt: skip
def test_ascent(rule, gain):
    """Twenty cohorts: never less harm than the lines' best, and more on average.

    Catches an ascent that goes down, one that stays where it is (gain 1), and one whose best message is not sent.
    """
    x = np.random.default_rng(3).normal(size=(20, 16, 30)).astype(np.float32) * np.float32(2) ** np.arange(
        -3, 3
    ).repeat(5)
    x[:, 13:], mean = 0, x[:, :13].mean(1, dtype=np.float64)

    def harm(num_ascents):
        made = adversary.corrupted(rule, adversary.adaptive(16, num_ascents), adversary.clients([13, 14, 15]))
        return np.array([np.linalg.norm(applied(made, each)[0] - m) for each, m in zip(x, mean, strict=True)])

    lines, ascended = harm(0), harm(16)
    assert (ascended >= lines * (1 - 1e-5)).all() and (ascended / lines).mean() > gain


@pytest.mark.default_rows("mean")
@pytest.mark.parametrize("delay", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("rule", [aggregation.mean(), aggregation.median(), aggregation.centered_clipping(1.0)],
                         ids=["mean", "median", "centred clipping"])  # fmt: skip
def test_stale(rule, delay):
    """Five rounds under a sum, a rule, and a rule with a state of its own: NumPy's.

    Catches a memory of the aggregate or of all messages in the place of the honest ones, one of another age, and a
    rule's state that the attackers' memory replaces.
    """
    x = np.random.default_rng(2).normal(size=(5, 7, 4)).astype(np.float32)
    made = adversary.corrupted(rule, adversary.stale(delay), adversary.clients([0, 5]))
    slots, everyone = jnp.arange(7), jnp.ones(7, bool)
    state, means, kept = made.start(jax.ShapeDtypeStruct((4,), np.float32)), [], np.zeros(4)
    for t in range(5):
        update, metrics, state = applied(made, x[t], round=Round(Cohort(slots, everyone, everyone), state=state))
        sent = x[t].astype(np.float64)
        means.append(np.delete(sent, [0, 5], 0).mean(0))
        sent[[0, 5]] = means[t - delay] if t >= delay else 0
        expected = np.median(sent, 0) if rule.rule else sent.mean(0)
        if rule.start is not None:
            away = sent - kept
            kept = kept + (away * np.minimum(1, 1 / np.maximum(np.linalg.norm(away, axis=1), 1e-30))[:, None]).mean(0)
            expected = kept
        np.testing.assert_allclose(update, expected, rtol=1e-4, atol=1e-5)
        assert metrics["attackers_met"] == 2
