"""Attackers among a cohort's clients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidType, adversary, aggregation, engine, server, transform
from tests.aggregation.robust.problems import applied
from tests.laws import cases, laws, problems as p
from tests.refusals import refused

RNG = np.random.default_rng(0)
M, D = 12, 5
X = RNG.normal(size=(M, D)).astype(np.float32) + 0.5
IDS = RNG.permutation(40)[:M]
WEIGHTS = np.array([3, 1, 0, 7, 2, 2, 5, 1, 4, 1, 6, 2], np.float32)
BAD = IDS[[1, 4, 2]]  # the last of these does not report
HERE = np.isin(IDS, BAD) & (WEIGHTS > 0)
HONEST = ~np.isin(IDS, BAD) & (WEIGHTS > 0)


def numpy_moments():
    honest = X[HONEST].astype(np.float64)
    return honest.mean(0), honest.std(0, ddof=1)


ATTACKS = {
    "scaled": (adversary.scaled(-3.0), lambda x: -3 * x),
    "sign_flip": (adversary.sign_flip(), lambda x: -x),
    "free_rider": (adversary.free_rider(), lambda x: 0 * x),
    "large_value": (adversary.large_value(7.0), lambda x: 0 * x + 7),
    "inner_product": (adversary.inner_product(0.5), lambda x: -0.5 * numpy_moments()[0] + 0 * x),
    "alie": (adversary.alie(1.5), lambda x: numpy_moments()[0] - 1.5 * numpy_moments()[1] + 0 * x),
}


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", ATTACKS)
def test_attackers_are_replaced(name):
    """Under a mean, which takes a stream, and under a median, which sees all messages: NumPy's on what was sent.

    Catches an attacker's honest message that is still there, and honest ones that are changed.
    """
    attack, numpy = ATTACKS[name]
    sent = np.where(HERE[:, None], numpy(X.astype(np.float64)), X)
    expected = {
        "mean": np.average(sent, axis=0, weights=WEIGHTS),
        "median": np.median(sent[WEIGHTS > 0], axis=0),
        "gather": (sent * WEIGHTS[:, None]).sum(0),
    }
    rules = {
        "mean": aggregation.mean(),
        "median": aggregation.median(),
        "gather": aggregation.gather(lambda key, updates, weights, ids: (updates * weights[:, None]).sum(0)),
    }
    for rule, aggregator in rules.items():
        got, metrics = applied(adversary.corrupted(aggregator, attack, adversary.clients(BAD)), X, WEIGHTS, ids=IDS)
        np.testing.assert_allclose(got, expected[rule], rtol=1e-5, atol=1e-5)
        assert (metrics["attackers_met"], metrics["attackers_lost"]) == (2, 0)


@pytest.mark.full
def test_rounds_with_more_attackers_than_the_rule_withstands():
    """Catches a limit of the slots where fewer arrive, of messages where a bucket counts, and lost ones that count.

    A rule that states nothing withstands nobody; a bound on the norm withstands no more than the rule inside, since it
    bounds an attacker's step, and not where all of them lead.
    """
    five = np.arange(len(X)) < 5
    limits = {
        aggregation.mean(): (0, 0),
        aggregation.norm_bounding(aggregation.mean(), 1.0): (0, 0),
        aggregation.norm_bounding(aggregation.trimmed_mean(2), 1.0): (2, 2),
        aggregation.median(): ((len(X) - 1) // 2, 2),
        aggregation.median(trust_weights=True): (0, 0),
        aggregation.trimmed_mean(1): (1, 1),
        aggregation.bucketing(aggregation.median(), 2): ((-(-len(X) // 2) - 1) // 2, 1),
        aggregation.nearest_neighbour_mixing(aggregation.median(), 1): (1, 1),
    }
    for rule, limit in limits.items():
        made = {
            count: adversary.corrupted(rule, adversary.sign_flip(), adversary.clients(sorted(IDS[:count]) or [10**6]))
            for count in range(5)
        }
        assert made[1].facts.withstands is rule.facts.withstands
        for there, most in zip((np.ones(len(X)), five), limit, strict=True):
            counts = [c for c in (most, most + 1) if c < 5]
            found = [applied(made[c], X, there, ids=IDS)[1]["attackers_beyond"] for c in counts]
            assert found == [0, 1][: len(counts)]
    nan = adversary.Alone(lambda key, update, weight: (update + jnp.nan, weight))
    made = adversary.corrupted(aggregation.trimmed_mean(1), nan, adversary.clients(sorted(IDS[:3])))
    assert applied(made, X, ids=IDS)[1]["attackers_beyond"] == 0


@pytest.mark.full
def test_lost_messages():
    """NaN, infinity and 2^100 count as absent, for each kind of attack, as does what messages' dtype does not hold.

    Catches a NaN in an aggregate, and attackers of a sum who send wider numbers than clients can.
    """
    there = HONEST.astype(np.float32) * WEIGHTS
    bad = [jnp.nan, jnp.inf, 2.0**100]
    for value in bad:
        kinds = (
            adversary.Alone(lambda key, update, weight, value=value: (jnp.full_like(update, value), weight)),
            adversary.Together(lambda key, honest, value=value: jnp.full_like(honest.mean, value)),
        )
        for attack in kinds:
            for rule in (aggregation.mean(), aggregation.trimmed_mean(1)):
                made = adversary.corrupted(rule, attack, adversary.clients(BAD))
                got, metrics = applied(made, X, WEIGHTS, ids=IDS)
                expected, _ = applied(rule, X, there, ids=IDS)
                np.testing.assert_allclose(got, expected, rtol=1e-6)
                assert (metrics["attackers_met"], metrics["attackers_lost"]) == (2, 2)
    sent = adversary.Together(lambda key, honest: jnp.full_like(honest.mean, 1e6))  # past float16
    for rule in (aggregation.mean(), aggregation.median()):
        made = adversary.corrupted(rule, sent, adversary.clients(BAD))
        assert applied(made, X.astype(np.float16), WEIGHTS, ids=IDS)[1]["attackers_lost"] == 2
    weight = adversary.forged_weight(2.0**101)
    got, metrics = applied(adversary.corrupted(aggregation.mean(), weight, adversary.clients(BAD)), X, WEIGHTS, ids=IDS)
    assert metrics["attackers_lost"] == 2 and np.isfinite(got).all()


@pytest.mark.full
@pytest.mark.optimised
@pytest.mark.parametrize("kind", cases.rows(["alone", "together", "omniscient"], ["together"]))
def test_a_round_of_lost_messages_is_skipped(kind):
    """Only attackers report, and all that they send is lost: as if nobody had reported, the model stays.

    Catches a zero in the place of nothing, by which a server with momentum moves on, and a round that counts.
    """
    attack = {
        "alone": adversary.forged_weight(2.0**101),
        "together": adversary.Together(lambda key, honest: jnp.full_like(honest.mean, jnp.nan)),
        "omniscient": adversary.fang(),  # without an honest range
    }[kind]
    made = adversary.corrupted(aggregation.mean(), attack, adversary.clients(p.COHORT[:3]))
    step = server.optimizer(optax.sgd(1.0, momentum=0.9))
    federation = p.Federation(aggregator=made, server=step)
    before, _ = federation.run(p.COHORT[3:], num_rounds=1)
    after, (info,) = federation.run(p.COHORT[:3], num_rounds=1, state=before)
    assert (info["attackers_met"], info["attackers_lost"], info["skipped_rounds"]) == (3, 3, 1)
    laws.check_equal_bits(before.server, after.server, "server")


RULES_THAT_CHOOSE = {
    "krum": (aggregation.krum(2), 1),
    "multi-krum": (aggregation.krum(2, 5), 5),
    "minimum diameter": (aggregation.minimum_diameter(3), 8),
    "bulyan": (aggregation.bulyan(2), 7),
}


@pytest.mark.full
@pytest.mark.parametrize("name", RULES_THAT_CHOOSE)
def test_chosen_attackers(name):
    """A coordinate for each message tells which the rule took; attackers, one of them absent, send what is honest.

    Catches a mask in another order than the clients', and absent messages that are counted.
    """
    rule, number = RULES_THAT_CHOOSE[name]
    x = np.concatenate([X, 1e-3 * np.eye(M, dtype=np.float32)], 1)
    update, metrics = applied(rule, x, WEIGHTS, ids=IDS)
    assert "chosen" not in metrics
    taken = update[D:] > 0
    bad = np.append(IDS[[1, 4, 5, 8]] if name == "bulyan" else IDS[taken], IDS[2])  # the last one is absent
    made = adversary.corrupted(rule, adversary.scaled(1.0), adversary.clients(bad))
    _, metrics = applied(made, x, WEIGHTS, ids=IDS)
    met = len(bad) - 1
    assert (metrics["attackers_met"], metrics["messages_chosen"]) == (met, number)
    np.testing.assert_allclose(metrics["attackers_share"], met / 11, rtol=1e-6)
    if name == "bulyan":  # whose second half leaves out coordinates
        assert number - 7 <= metrics["attackers_chosen"] <= 4
    else:
        assert metrics["attackers_chosen"] == taken.sum() == number
    assert {"messages_chosen", "attackers_chosen", "attackers_share"} <= {metric.name for metric in made.facts.metrics}
    wrapped = adversary.corrupted(aggregation.bucketing(rule, 1), adversary.scaled(1.0), adversary.clients(bad))
    assert not wrapped.facts.chooses and "attackers_chosen" not in {metric.name for metric in wrapped.facts.metrics}


def test_forged_weights():
    """Catches weights that no attack can change."""
    attack = adversary.forged_weight(10.0, adversary.sign_flip())
    got, _ = applied(adversary.corrupted(aggregation.mean(), attack, adversary.clients(BAD)), X, WEIGHTS, ids=IDS)
    sent, weights = np.where(HERE[:, None], -X, X), np.where(HERE, 10 * WEIGHTS, WEIGHTS)
    np.testing.assert_allclose(got, np.average(sent, axis=0, weights=weights), rtol=1e-5)


def test_who_attacks():
    """Shares are those of the population, whoever is asked and in whatever order; 2,000 clients, 5 sigma.

    Catches attackers by slot, and the same ones in every round where they are drawn anew.
    """
    ids = jnp.arange(2000)
    fixed, anew = adversary.share_of_clients(0.3, seed=5), adversary.share_of_clients(0.3, each_round=True)
    first, second = jax.random.split(jax.random.key(0))
    for who in (fixed, anew):
        assert abs(who(first, ids).mean() - 0.3) < 5 * np.sqrt(0.21 / 2000)
        assert np.array_equal(who(first, ids)[::-1], who(first, ids[::-1]))
    assert np.array_equal(fixed(first, ids), fixed(second, ids))
    assert (np.asarray(anew(first, ids)) != np.asarray(anew(second, ids))).mean() > 0.3
    for share in (0.0, 1.0):
        assert np.unique(adversary.share_of_clients(share)(first, ids)).tolist() == [bool(share)]


@pytest.mark.optimised
@pytest.mark.parametrize("attack", ["alie", "sign_flip", "stale"])
@pytest.mark.parametrize("rule", ["mean", "bucketing"])
@pytest.mark.full
def test_same_bits_on_two_devices(attack, rule):
    """In a federation, two rounds. Catches moments, and a number of attackers, of one device's clients."""
    rules = {"mean": aggregation.mean(), "bucketing": aggregation.bucketing(aggregation.krum(1), 2)}
    attack = adversary.stale() if attack == "stale" else ATTACKS[attack][0]
    made = adversary.corrupted(rules[rule], attack, adversary.clients(p.COHORT[[0, 3]]))
    found = []
    for devices in (1, 2):
        federation = p.Federation(aggregator=made, mesh=engine.device_mesh(devices))
        found.append(p.outcome(*federation.run(p.COHORT, num_rounds=2)))
    laws.check_equal_bits(*found, "model and metrics")


def test_what_is_refused():
    """Catches attackers of a sum in which nobody sees single messages."""
    with refused("aggregator", value="a modular sum"):
        adversary.corrupted(aggregation.modular_sum(2.0), adversary.sign_flip(), adversary.clients([1]))
    with pytest.raises(ValueError, match="ids: expected clients' ids"):
        adversary.clients([-1])
    with pytest.raises(ValueError, match="share: expected"):
        adversary.share_of_clients(1.5)
    with pytest.raises(ValueError, match="ids: expected clients' ids"):
        adversary.clients([2**32 + 3])  # would be client 3
    with pytest.raises(ValueError, match="z: expected a finite number, got nan"):
        adversary.alie(float("nan"))
    with refused("attack", value="Together", rule="Alone", kind=InvalidType):
        adversary.forged_weight(2.0, adversary.alie())
    made = adversary.corrupted(aggregation.fixed_mean(3.0), adversary.sign_flip(), adversary.clients([1]))
    assert made.facts.sensitivity is None and made.rule is None
    for outer in (  # attackers would be counted twice or not at all, and be mixed as if they were honest
        lambda inner: adversary.corrupted(inner, adversary.free_rider(), adversary.clients([2])),
        lambda inner: aggregation.norm_bounding(inner, 1.0),
        lambda inner: aggregation.bucketing(inner, 2),
        lambda inner: aggregation.nearest_neighbour_mixing(inner, 1),
        lambda inner: aggregation.adaptive_clipping(inner, 1),
        lambda inner: aggregation.norm_bounding(aggregation.by_part({"w": inner, "b": aggregation.mean()}), 1.0),
    ):
        for rule in (aggregation.fixed_mean(3.0), aggregation.median()):
            with refused("aggregator", rule="without attackers"):
                outer(adversary.corrupted(rule, adversary.sign_flip(), adversary.clients([1])))


def test_integers_are_refused():
    """Catches half an integer, which is 0, and -100 of them, which wrap: messages that nobody asked for."""
    made = adversary.corrupted(aggregation.mean(), adversary.scaled(-0.5), adversary.clients(BAD))
    with refused("transform", rule="sends numbers"):
        p.Federation(transform=transform.quantize(4, range=2.0, integers=True), aggregator=made)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("rule", [aggregation.mean(), aggregation.median()], ids=["mean", "median"])
def test_attackers_and_messages_of_another_shape_are_refused(rule):
    """Catches a number for each client that is broadcast along coordinates, a `who` for everybody, and numbers whose
    bits are taken for yes and no: NaN was then a message."""
    some = adversary.clients(BAD)
    answers = (lambda ids: jnp.array(True), lambda ids: (ids < 2).astype(jnp.int32), lambda ids: jnp.ones(1, bool))
    for answer in answers:
        who = lambda key, ids, answer=answer: answer(ids)  # noqa: E731
        for attack in (adversary.sign_flip(), adversary.alie(), adversary.mimic()):
            with refused("who", rule="bool"):
                applied(adversary.corrupted(rule, attack, who), X, WEIGHTS, ids=IDS)
    short = (
        adversary.Alone(lambda key, update, weight: (update[0], weight)),
        adversary.Alone(lambda key, update, weight: (update[:1], weight)),
        adversary.Together(lambda key, honest: honest.mean[:1]),
        adversary.Together(lambda key, honest: jnp.float32(7)),
    )
    for attack in short:
        with pytest.raises(ValueError, match=r"expected .* of shapes"):
            applied(adversary.corrupted(rule, attack, some), X, WEIGHTS, ids=IDS)


def test_a_rule_that_says_it_chooses_must_choose():
    """Faults: an `assert`, or a KeyError in a round, for an aggregator of a user's own that states what it is not."""
    attack, who = adversary.sign_flip(), adversary.clients([0])
    with refused("aggregator", rule="with a `rule`", hint="chooses=False"):
        adversary.corrupted(aggregation.mean().stating(chooses=True), attack, who)
    silent = adversary.corrupted(aggregation.median().stating(chooses=True), attack, who)
    with refused("aggregator", value=[], rule="which messages it chose"):
        applied(silent, np.ones((3, 2), np.float32))
