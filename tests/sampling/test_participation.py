"""Laws of the wrappers. False alarms have probability below 1e-6, for fixed keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from fedjax_sim import InvalidArgument, InvalidType, aggregation, population, run, server
from fedjax_sim.algorithms import federated
from fedjax_sim.privacy.reading import mechanism_from
from fedjax_sim.sampling import (
    cyclic,
    full,
    poisson,
    uniform,
    with_dropout,
    with_over_invitation,
    with_replacement,
    with_response_rates,
)
from fedjax_sim.transform import top_k
from fedjax_sim.types import ClientData, ClientUpdate, Noise, Report
from tests.refusals import refused

ALPHA, KEY = 1e-6, jax.random.key(3)


def draw(sampler, num_trials=20_000):
    keys = jax.random.split(jax.random.key(7), num_trials)
    return jax.jit(jax.vmap(lambda key: sampler.sample(key, sampler.init())[0]))(keys)


@functools.cache
def fates():
    """[200 rounds, 50 clients]: who reports when half drop out."""
    return np.asarray(draw(with_dropout(full(50), 0.5), 200).reported)


def test_dropout_rate_and_independence():
    """Reports are Binomial(m, 1 - rate): accepts 0.3, rejects 0.31; catches one coin for the whole cohort."""
    cohort = draw(with_dropout(full(40), 0.3), 20_000)
    reports = np.asarray(cohort.reported).sum(axis=1)
    error = np.sqrt(40 * 0.21 / 20_000)
    assert abs(reports.mean() - 28) < 5 * error and abs(reports.mean() - 40 * 0.69) > 10 * error
    assert abs(reports.var() / (40 * 0.21) - 1) < 5 * np.sqrt(2 / 20_000)
    assert stats.chisquare(np.asarray(cohort.reported).sum(axis=0)).pvalue > ALPHA
    np.testing.assert_array_equal(cohort.metrics["dropped"], 40 - reports)
    assert cohort.invited.all()


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("sampler", [uniform(50, 10), poisson(50, 0.2), with_replacement(50, 10)])
def test_dropout_keeps_the_cohort_and_ignores_slots(sampler):
    """Catches a dropout that spends the cohort's key, and one keyed by slot: in one round the same client has the
    same fate in another sampler's slot."""
    plain, thinned = draw(sampler, 200), draw(with_dropout(sampler, 0.5), 200)
    np.testing.assert_array_equal(plain.ids, thinned.ids)
    np.testing.assert_array_equal(plain.invited, thinned.invited)
    assert not (thinned.reported & ~thinned.invited).any()
    expected = np.take_along_axis(fates(), np.asarray(plain.ids), axis=1) & np.asarray(plain.invited)
    np.testing.assert_array_equal(thinned.reported, expected)
    assert set(plain.metrics) < set(thinned.metrics)


@pytest.mark.full
def test_dropouts_nest():
    """Catches unrelated draws at another rate: common random numbers make the higher rate drop a superset."""
    rates = jnp.asarray([0, 0.1, 0.4, 0.999])
    one = lambda rate, key: with_dropout(uniform(90, 30), rate).sample(key, ())[0].reported  # noqa: E731
    keys = jax.random.split(jax.random.key(7), 100)
    reported = np.asarray(jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)))(rates, keys))
    assert reported[0].all() and reported[3].mean() < 0.01
    assert (reported[1] >= reported[2]).all() and (reported[1] > reported[2]).any()


def test_dropout_twice_is_independent():
    """Catches two wrappers that share a stream: the second of equal rate would then drop nobody."""
    sampler = with_dropout(with_dropout(full(40), 0.3), 0.3)
    cohort = draw(sampler, 5000)
    share = np.asarray(cohort.reported).mean()
    assert abs(share - 0.49) < 5 * np.sqrt(0.25 / 200_000) and abs(share - 0.7) > 0.1
    assert sampler.design.response_rate == pytest.approx(0.49)
    np.testing.assert_array_equal(cohort.metrics["dropped"], 40 - np.asarray(cohort.reported).sum(axis=1))


@pytest.mark.full
def test_rate_may_be_swept():
    """Catches a rate that must be a Python number: a sweep agrees with the single runs, bit for bit."""
    key, rates = jax.random.key(3), [0.0, 0.25, 0.5, 0.9]
    swept = jax.vmap(lambda rate: with_dropout(uniform(90, 30), rate).sample(key, ())[0].reported)(jnp.asarray(rates))
    for rate, row in zip(rates, swept, strict=True):
        np.testing.assert_array_equal(
            row, with_dropout(uniform(90, 30), float(np.float32(rate))).sample(key, ())[0].reported
        )


def test_over_invitation_keeps_a_uniform_choice():
    """Catches one that keeps the first slots: client i of a full cohort counts as often as any other."""
    sampler = with_over_invitation(with_dropout(full(13), 0.2), 8)
    cohort = draw(sampler, 20_000)
    before = draw(with_dropout(full(13), 0.2), 20_000)
    reported = np.asarray(cohort.reported)
    np.testing.assert_array_equal(reported.sum(axis=1), np.minimum(np.asarray(before.reported).sum(axis=1), 8))
    np.testing.assert_array_equal(
        cohort.metrics["discarded"], np.asarray(before.reported).sum(axis=1) - reported.sum(axis=1)
    )
    assert not (reported & ~np.asarray(before.reported)).any()
    rate = sampler.design.inclusion_probabilities()
    assert abs(reported.mean() - rate) < 5 * np.sqrt(rate / 20_000 / 13) and rate < 8 / 13
    assert stats.chisquare(reported.sum(axis=0)).pvalue > ALPHA
    assert stats.chisquare((np.cumsum(before.reported, axis=1) <= 8).sum(axis=0)).pvalue < ALPHA
    assert sampler.design.max_reports == 8


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5, float("nan"), float("inf"), True, "0.1", None])
def test_bad_rate(rate):
    with pytest.raises((ValueError, TypeError), match=r"rate: expected a number in \[0, 1\), got"):
        with_dropout(uniform(10, 2), rate)


def counting(num_values, sampler, transform=None):
    """(algorithm, population) of clients that send ones."""

    def one(key, broadcast, state, data):
        return Report(jnp.ones(num_values), jnp.float32(1), {}), state

    client, step = ClientUpdate(lambda params: (), one), server.optimizer(optax.sgd(1.0))
    made = federated(sampler, client, aggregation.mean(), step, transform, mesh=None)
    return made, population.generated(200, lambda parameters, id: ClientData(jnp.zeros(1), jnp.ones(1, bool)), {})


@pytest.mark.full
def test_totals_of_a_run_with_evaluations():
    """Fault: a total of what only some records have, for the record of round 0 has no bytes at all."""
    late = counting(1, with_over_invitation(uniform(200, 130), 100))
    coded = counting(640, uniform(200, 10), top_k(count=64))
    found = [
        run(KEY, made, jnp.zeros(size), data, 2, evaluation=lambda params: {"test_loss": params.sum()})[1]
        for size, (made, data) in ((1, late), (640, coded))
    ]
    assert "test_loss" in found[0].records[0] and "uplink_bytes" not in found[0].records[0]
    assert [found[0].summary[name] for name in ("uplink_bytes", "wasted_bytes")] == [2 * 520, 2 * 120]
    assert found[1].summary["uplink_coded_bytes"] == sum(r["uplink_coded_bytes"] for r in found[1].records[1:]) > 0


@pytest.mark.full
def test_late_messages_are_counted():
    """Fault: 130 invited, 100 kept, one number each: 400 bytes where 520 were sent. Who drops out sends nothing."""
    made, data = counting(1, with_over_invitation(uniform(200, 130), 100))
    info = jax.jit(made.step)(KEY, made.init(KEY, jnp.zeros(1), data), data)[1]
    assert (info["uplink_bytes"].total(), info["wasted_bytes"].total(), int(info["clients_reported"])) == (
        520,
        120,
        100,
    )

    inside = with_over_invitation(with_dropout(uniform(200, 130), 0.1), 100).sample(KEY, ())[0]
    assert inside.timing.sent.sum() == 130 - inside.metrics["dropped"] == 100 + inside.metrics["discarded"] < 130
    outside = with_dropout(with_over_invitation(uniform(200, 130), 100), 0.5).sample(KEY, ())[0]
    sent = outside.timing.sent
    assert not (outside.reported & ~sent).any() and outside.reported.sum() < sent.sum() < 100


def test_bad_over_invitation():
    for bad in (0, 11, True, 2.0):
        with refused("num_reports", value=bad, rule="[1, 10]", kind=(InvalidArgument, InvalidType)):
            with_over_invitation(uniform(90, 10), bad)
    unfit = [poisson(90, 0.1), with_replacement(90, 10), cyclic(90, 20, shuffled=True)]
    for sampler in [*unfit, with_over_invitation(uniform(90, 10), 5)]:
        with refused("sampler", rule="different clients"):
            with_over_invitation(sampler, 2)


@pytest.mark.full
def test_response_rates_of_clients():
    """50,000 cohorts of 6 of 12 clients whose rates are 1, 0.5 and 0.1: each client's frequency, six standard errors,
    and the total of values that fall with the rate, estimated by Horvitz-Thompson.

    Accepts the true total, rejects one 6 % off, and the plain mean is 50 % off. Catches rates of other clients or of
    slots, and a design that forgets them.
    """
    rates = [1.0, 0.5, 0.1]
    sampler = with_dropout(with_response_rates(uniform(12, 6), rates), 0.2)
    cohort = jax.device_get(draw(sampler, 50_000))
    expected = 0.5 * 0.8 * np.resize(rates, 12)
    np.testing.assert_allclose(sampler.design.inclusion_probabilities(), expected)
    found = np.bincount(cohort.ids[cohort.reported], minlength=12) / 50_000
    assert (np.abs(found - expected) < 6 * np.sqrt(expected * (1 - expected) / 50_000)).all()
    np.testing.assert_array_equal(cohort.metrics["silent"] + cohort.metrics["dropped"], 6 - cohort.reported.sum(1))
    values = np.resize([1.0, 3.0, 9.0], 12)
    estimates = np.where(cohort.reported, (values / expected)[cohort.ids], 0).sum(1)
    error = estimates.std() / np.sqrt(50_000)
    assert abs(estimates.mean() - values.sum()) < 6 * error < 0.06 * values.sum()
    plain = values[cohort.ids[cohort.reported]].mean()
    assert abs(plain / values.mean() - 1) > 0.4
    assert aggregation.horvitz_thompson(sampler.design, 12.0).facts.design == sampler.design
    with pytest.raises(ValueError, match="client_rates: expected None"):
        sampler.design.check_known()
    limited = with_over_invitation(sampler, 3).design
    with pytest.raises(ValueError, match="response: expected 'random'"):
        limited.inclusion_probabilities()
    for wrong, told in (
        ([], "rates"),
        ([0.0], r"rates\[0\]"),
        ([float("nan")], r"rates\[0\]"),
        ([1.0] * 13, "at most"),
    ):
        with pytest.raises(ValueError, match=told):
            with_response_rates(uniform(12, 6), wrong)
    with pytest.raises(ValueError, match="respond alike"):
        with_response_rates(sampler, [0.5])


def test_a_place_that_another_client_takes():
    """Everybody is invited, half of the reports count. Catches the epsilon of a sum that moves by one clip norm:
    without a client the report of another one counts, and the sum moves by two."""
    noise = Noise("gaussian", "central", 1.0, 1.0, "client")
    for inner in (full(20), uniform(20, 20)):
        made = mechanism_from(with_over_invitation(inner, 10).design, noise)
        assert (made.scheme, made.adjacency, made.moves) == ("full", "replace_one", 2)
        with pytest.raises(ValueError, match="another one's message counts"):
            mechanism_from(with_over_invitation(inner, 10).design, noise, adjacency="add_or_remove_one")
    assert mechanism_from(full(20).design, noise).moves == 1
