"""Mechanisms of local privacy without a delta: their distributions, their means, and their epsilon."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import aggregation, algorithms, privacy, sampling, transform
from fedjax_sim.transform.chain import wire_of
from fedjax_sim.transform.local import _chance, _clipped_l1, privunit_parameters
from tests.algorithms.analytics import problem
from tests.refusals import refused

DRAWS = 20_000


def messages(member, update, draws=DRAWS):
    """What clients with this update send, [draws, ...]."""

    @jax.jit
    def sent(keys, update):
        return jax.lax.map(lambda key: member.on_client(key, update, (), ())[0], keys, batch_size=1000)

    return jax.device_get(sent(jax.random.split(jax.random.key(3), draws), jax.tree.map(jnp.asarray, update)))


def check_mean(found, expected):
    """Each coordinate within 5 standard errors: fails by chance in one coordinate of 10^6."""
    error = np.abs(found.mean(0) - expected) / (found.std(0) / math.sqrt(len(found)) + 1e-12)
    assert error.max() < 5, error


def test_laplace_noise_follows_its_law():
    """Scale 2 C / epsilon on every number, and independent. Catches C / epsilon, a variance for a scale, one draw for
    all. The test of Kolmogorov and Smirnov fails by chance in one run of 10^6."""
    member = transform.local_laplace(1.5, 0.5)
    update = {"a": np.array([0.5, -0.25], np.float32), "b": np.zeros(1, np.float32)}
    sent = messages(member, update)
    noise = np.concatenate([sent["a"] - update["a"], sent["b"]], 1)
    for column in noise.T:
        assert stats.kstest(column, "laplace", args=(0, 6.0)).pvalue > 1e-6
    assert np.abs(np.corrcoef(noise.T) - np.eye(3)).max() < 5 / math.sqrt(DRAWS)
    error = member.squared_error({name: jnp.array(x) for name, x in update.items()})
    assert float(error) == pytest.approx(3 * 2 * 6.0**2, rel=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e20, 1e38])
def test_no_clipped_update_is_longer(scale):
    """In L1. Catches an L2 clip, and sums that overflow."""
    update = {"w": np.float32(scale) * np.linspace(-1, 1, 100, dtype=np.float32)}
    short = np.asarray(_clipped_l1(jax.tree.map(jnp.asarray, update), 2.0)["w"], np.float64)
    norm = np.abs(np.float64(update["w"])).sum()
    assert np.abs(short).sum() <= 2.0
    np.testing.assert_allclose(short, update["w"] * min(1, 2 / norm if norm else 1), rtol=1e-4)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("size", [1, 513, 1 << 20, pytest.param((1 << 24) + 100, marks=pytest.mark.full)])
def test_long_updates_are_clipped_by_little_more(size):
    """Catches an allowance for rounding that grows with the number of entries: a sign that turns, and a short clip."""
    update = np.random.default_rng(0).normal(size=size).astype(np.float32)
    short = np.asarray(_clipped_l1({"w": jnp.asarray(update)}, 2.0)["w"], np.float64)
    norm = np.abs(short).sum()
    assert 2 * (1 - 2e-4) <= norm <= 2 or norm == pytest.approx(abs(update).sum())
    assert (np.sign(short) == np.sign(update))[np.abs(short) > 1e-37].all()


@pytest.mark.parametrize("probability", [0.0, 1e-12, 2**-40, 0.3, 1 - 2**-50, 1.0])
def test_rare_answers_can_be_drawn(probability, monkeypatch):
    """The share of 64-bit words below the threshold is the probability to 2^-60. Catches a draw in float32, by which
    answers rarer than 2^-24 never come, so that a finite epsilon would be false."""
    count = math.ceil(probability * 2**64)  # words that say True

    def drawn(word):
        words = jnp.array([word >> 32, word % 2**32], jnp.uint32)
        monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: words)
        return bool(_chance(jax.random.key(0), probability))

    assert abs(count / 2**64 - probability) <= 2**-52
    assert count == 0 or (drawn(0) and drawn(min(count, 2**64 - 1) - 1))
    assert count == 2**64 or (not drawn(count) and not drawn(2**64 - 1))


@pytest.mark.parametrize("update", [[0.5, -0.5, 0.0], [1.0, 1.0, 0.0], [-1.0, 0.0, 0.0]])
def test_what_is_no_symbol_is_no_message(update):
    """Catches sums that are taken for the symbol of their largest number."""
    sent = messages(transform.randomized_response(1.0), np.array(update, np.float32), 3)
    assert np.isnan(sent).all()


def answers(epsilon, symbol, places=4):
    """How often each of the places + 1 answers is given; the last one is nothing."""
    update = np.zeros((2, places // 2), np.float32)
    if symbol < places:
        update.flat[symbol] = 1
    sent = messages(transform.randomized_response(epsilon), {"votes": update})["votes"].reshape(DRAWS, places)
    is_answer = sent > 0
    return np.append(is_answer.sum(0), DRAWS - is_answer.any(1).sum())


@pytest.mark.default_rows("0", "4")
@pytest.mark.parametrize("symbol", [0, 3, 4])
def test_answers_have_their_probabilities(symbol):
    """A chi-square test, which fails by chance in one run of 10^6; the ratio of two probabilities is e^epsilon.

    Catches the true symbol among the others, "nothing" that is always kept, and an epsilon of twice the size.
    """
    epsilon = 1.2
    p, q = (x / (math.exp(epsilon) + 4) for x in (math.exp(epsilon), 1))
    expected = np.full(5, q)
    expected[symbol] = p
    assert expected.sum() == pytest.approx(1)
    assert stats.chisquare(answers(epsilon, symbol), DRAWS * expected).pvalue > 1e-6


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("symbol", [1, 4])
def test_counts_are_unbiased(symbol):
    """The mean message is the client's own. Catches a correction for another number of symbols."""
    update = (np.arange(4) == symbol).astype(np.float32)
    check_mean(messages(transform.randomized_response(0.8), update), update)


def test_a_vote_takes_few_bits():
    """The place of one of d + 1 symbols."""
    member = transform.randomized_response(1.0)
    sizes = {1: 1, 3: 2, 4: 3, 7: 3, 8: 4, 1000: 10}
    for size, bits in sizes.items():
        assert wire_of(member, jax.ShapeDtypeStruct((size,), jnp.float32)).bits == bits


UPDATES = {
    "long": np.array([3.0, -4.0, 0.0, 0.0, 0.0], np.float32),
    "short": np.array([0.2, 0.1, -0.3, 0.0, 0.1], np.float32),
    "zero": np.zeros(5, np.float32),
    "tiny": np.array([2e-19, 1e-19, 1e-19, 1e-19, 1e-19], np.float32),  # squares vanish in float32
}


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", UPDATES)
def test_privunit_is_unbiased(name):
    """The mean is the clipped update, and the squared error is the stated one within 5 standard errors. Catches
    directions without a norm, zeros that always point one way, and an m of another law."""
    update = UPDATES[name]
    norm = np.linalg.norm(update)
    member = transform.privunit(2.0, 3.0)
    sent = messages(member, update)
    check_mean(sent, update * min(1, 2 / norm if norm else 1))
    errors = np.square(sent - update).sum(1)
    stated = float(member.squared_error(jnp.array(update)))
    assert abs(errors.mean() - stated) < 5 * errors.std() / math.sqrt(DRAWS)


@pytest.mark.default_rows("5")
@pytest.mark.parametrize("dimension, epsilon", [(1, 1.0), (5, 3.0), (300, 6.0)])
def test_privunit_draws_its_half_space(dimension, epsilon):
    """The share in the half-space is p (binomial, 5 standard errors), inner products are truncated normal on both sides
    of the threshold, and densities inside and outside have the ratio e^epsilon. Catches a half-space of another size,
    or one drawn by the wrong probability, and noise that is longer along the update than across."""
    found = privunit_parameters(epsilon)
    ratio = found.probability / found.measure * (1 - found.measure) / (1 - found.probability)
    assert ratio == pytest.approx(math.exp(epsilon), rel=1e-9)
    assert stats.norm.sf(found.threshold) == pytest.approx(found.measure, rel=1e-9)
    update = np.zeros(dimension, np.float32)
    update[-1] = 1
    sent = messages(transform.privunit(1.0, epsilon), update) * found.mean
    inner = sent[:, -1]
    is_inside = inner >= found.threshold
    deviation = math.sqrt(found.probability * (1 - found.probability) / DRAWS)
    assert abs(is_inside.mean() - found.probability) < 5 * deviation + 1e-3  # of the threshold's rounding
    inside = stats.norm.sf(inner[is_inside]) / found.measure
    outside = stats.norm.cdf(inner[~is_inside]) / (1 - found.measure)
    for quantiles in (inside, outside):
        assert stats.kstest(np.clip(quantiles, 0, 1), "uniform").pvalue > 1e-6
    if dimension > 1:
        assert stats.kstest(sent[:, 0], "norm").pvalue > 1e-6


@pytest.mark.full
def test_privunit_is_shorter_than_laplace():
    """For a unit vector in 100 dimensions at epsilon 4, beside a clip in L1 that loses nothing. And m rises with
    epsilon."""
    unit = jnp.zeros(100).at[0].set(1.0)
    squared = [float(x.squared_error(unit)) for x in (transform.privunit(1.0, 4.0), transform.local_laplace(10.0, 4.0))]
    assert squared[0] < squared[1] / 10
    means = [privunit_parameters(epsilon).mean for epsilon in (0.1, 1.0, 4.0, 16.0)]
    assert means == sorted(means)


MEMBERS = {
    "laplace": lambda: transform.local_laplace(1.0, 2.0),
    "privunit": lambda: transform.privunit(1.0, 2.0),
    "randomized_response": lambda: transform.randomized_response(2.0),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_the_accountant_knows_it(name):
    """One round costs epsilon, many rounds at most their sum, and less by Renyi divergence; sampling gains nothing.

    Catches a multiplier that is read as a Gaussian's, and a place that is not local.
    """
    rule = aggregation.mean(weighting="uniform")
    sampler = sampling.uniform(problem.NUM_CLIENTS, 10)
    made = algorithms.histogram(sampler, num_categories=4, transform=MEMBERS[name](), aggregator=rule, rows="one")
    mechanism = privacy.mechanism_of(made)
    assert (mechanism.kind, mechanism.place, mechanism.law) == (name, "local", "always")
    spent = [privacy.account(mechanism, rounds, 1e-5).epsilon for rounds in (1, 2, 50)]
    assert spent[0] == pytest.approx(2.0, rel=1e-4) and spent[1] <= 4.0001 and spent[2] < 100
    assert spent[2] == privacy.account(mechanism, 50, 1e-5, accountant="rdp").epsilon
    assert "epsilon 2 and no delta in every message" in privacy.explain(mechanism)
    with pytest.raises(ValueError, match="accountant: expected 'rdp'"):
        privacy.account(mechanism, 1, 1e-5, accountant="pld")
    with pytest.raises(ValueError, match="place: expected 'local'"):
        privacy.Mechanism(**{**mechanism.__dict__, "place": "central", "adjacency": None})
    weighted = made.parts._replace(aggregator=aggregation.mean())
    with refused("aggregator", rule="no weights"):
        privacy.mechanism_of(weighted)


@pytest.mark.parametrize("name", MEMBERS)
def test_an_update_that_is_not_finite_sends_nothing_usable(name):
    """Catches a client whose infinity becomes an answer like any other."""
    message, _, _ = MEMBERS[name]().on_client(jax.random.key(0), jnp.array([0.0, np.inf, 0.0]), (), ())
    assert not np.isfinite(message).any()


def test_what_is_refused():
    """Options out of range, and integers."""
    makers = [functools.partial(make, 1.0) for make in (transform.local_laplace, transform.privunit)]
    for make in (*makers, transform.randomized_response):
        for wrong in (0.0, 31.0, math.nan):
            with pytest.raises(ValueError, match="epsilon: expected a number in"):
                make(wrong)
    for make in MEMBERS.values():
        with pytest.raises(TypeError, match="update: expected leaves of floats"):
            make().on_client(jax.random.key(0), jnp.zeros(3, jnp.int32), (), ())


@pytest.mark.full
def test_counts_of_everybody_are_found():
    """A histogram by randomised response is unbiased over runs. Catches a client without rows that answers as one of
    the categories does."""
    rule = aggregation.fixed_mean(float(problem.NUM_CLIENTS), weighting="uniform")
    made = algorithms.histogram(
        problem.EVERYBODY, num_categories=4, transform=transform.randomized_response(2.0), aggregator=rule, rows="one"
    )
    found = problem.repeated(made, 1, 2000, data=problem.people())["counts"]
    own = [np.bincount(problem.Y[i][problem.MASK[i]], minlength=4) / max(problem.SIZES[i], 1) for i in range(30)]
    check_mean(found, np.mean(own, 0))
