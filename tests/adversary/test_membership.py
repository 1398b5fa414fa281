"""Membership: the sign and law of scores, what they are worth, and the bound that noise puts on them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from fedjax_sim import adversary, client, models, privacy, theory
from fedjax_sim.adversary import View
from fedjax_sim.types import ClientData
from tests.refusals import refused


def linear_loss(params, examples, key):
    """The gradient of an example's loss is the example itself."""
    return (examples["g"] * params["w"][None]).sum(-1)


def released(messages, dimension):
    m = messages.shape[0]
    return View({"w": jnp.zeros(dimension)}, {"w": jnp.asarray(messages)}, jnp.ones(m), jnp.arange(m))


def test_alignment():
    """J6: mean d / B and AUC Phi(sqrt(d / 2B)) = .8413 at d = 100, B = 50, for 400 messages of 50 Gaussian gradients.

    The AUC of 20,000 members has a standard error of about .003. Catches the sign (T23), by which it is .16.
    """
    rng, d, batch, rate = np.random.default_rng(0), 100, 50, 0.3
    inside, outside = [], []

    @jax.jit
    def score(messages, g):
        return adversary.alignment_score(released(messages, d), linear_loss, {"g": g}, rate)[0]

    for _ in range(400):
        g = rng.normal(size=(2 * batch, d)).astype(np.float32)
        scores = np.asarray(score(-rate * g[:batch].mean(0, keepdims=True), g))
        inside.append(scores[:batch])
        outside.append(scores[batch:])
    inside, outside = np.ravel(inside), np.ravel(outside)
    assert inside.mean() == pytest.approx(d / batch, rel=0.02) and abs(outside.mean()) < 0.05
    found = adversary.auc(inside, outside)
    assert found == pytest.approx(0.8413, abs=0.012)
    assert theory.alignment_auc(d, batch) == pytest.approx(0.8413, abs=1e-4)


def test_the_score_of_a_client():
    """Through the package's own client. Catches the rate left in, and candidates that share one gradient."""
    model = models.mlp(input_shape=(6,), num_outputs=3, hidden=(8,))
    params, loss_fn = model.init(jax.random.key(0))[0], models.supervised(model, models.softmax_cross_entropy)
    rng = np.random.default_rng(3)
    examples = {"x": np.asarray(rng.normal(size=(4, 6)), np.float32), "y": np.array([0, 1, 2, 0], np.int32)}
    gradients = jax.jit(jax.jacobian(lambda params: loss_fn(params, examples, None)["loss"]))(params)
    rate = 0.1

    @jax.jit
    def score(params, examples):
        work = client.local_sgd(loss_fn, optax.sgd(rate), client.work(num_steps=1))
        update = work.apply(jax.random.key(1), params, (), ClientData(examples, jnp.ones(4, bool)))[0].update
        view = View(params, jax.tree.map(lambda x: x[None], update), jnp.ones(1), jnp.zeros(1, jnp.int32))
        return adversary.alignment_score(view, loss_fn, examples, rate)

    flat = np.concatenate([np.reshape(x, (4, -1)) for x in jax.tree.leaves(gradients)], axis=1)
    np.testing.assert_allclose(score(params, examples)[0], flat @ np.mean(flat, 0), rtol=1e-3, atol=1e-6)


def test_loss_threshold():
    """J7: half at an untrained model, .5 +- .02 (6 sigma of 20,000), above .9 at one that learned its rows by heart.

    Catches the sign, by which it is below .1.
    """
    rng = np.random.default_rng(1)

    def rows(n):
        return {"x": np.asarray(rng.normal(size=(n, 60)), np.float32), "y": np.asarray(rng.integers(0, 2, n), np.int32)}

    model = models.mlp(input_shape=(60,), num_outputs=2, hidden=(64,))
    params, loss_fn = model.init(jax.random.key(0))[0], models.supervised(model, models.softmax_cross_entropy)
    score = jax.jit(lambda params, examples: adversary.loss_threshold_score(params, loss_fn, examples))
    inside, outside = (score(params, rows(20_000)) for _ in range(2))
    assert adversary.auc(inside, outside) == pytest.approx(0.5, abs=0.02)
    known, unknown = rows(20), rows(400)
    gradient = jax.grad(lambda p: loss_fn(p, known, None)["loss"].mean())
    params = jax.lax.fori_loop(0, 300, lambda _, p: jax.tree.map(lambda x, g: x - 0.3 * g, p, gradient(p)), params)
    scores = (score(params, x) for x in (known, unknown))
    assert adversary.auc(*scores) > 0.9


@pytest.mark.parametrize("ratio", [1.5, 3.0])
def test_overfitting_advantage(ratio):
    """J7: the best threshold on Gaussian errors of two spreads, 50,000 each, 5 standard errors; no threshold is better.

    Catches another threshold, which costs little and is then no bound.
    """
    at = np.linspace(0, 10, 200_001)
    best = (2 * stats.norm.cdf(at) - 2 * stats.norm.cdf(at / ratio)).max()
    assert theory.overfitting_advantage(ratio) == pytest.approx(best, rel=1e-7)
    rng = np.random.default_rng(2)
    inside, outside = -(rng.normal(size=50_000) ** 2), -((ratio * rng.normal(size=50_000)) ** 2)
    found, error = adversary.advantage(inside, outside)
    assert found == pytest.approx(theory.overfitting_advantage(ratio), abs=5 * error) and error < 0.005


def test_a_bounded_loss():
    """J7: with losses of 0 or 1 the advantage of "loss 0" is the generalisation gap. Catches ties counted as above."""
    inside, outside = -np.repeat([0.0, 1.0], [95, 5]), -np.repeat([0.0, 1.0], [80, 20])
    rng = np.random.default_rng(0)
    found, _ = adversary.advantage(rng.permutation(np.tile(inside, 100)), rng.permutation(np.tile(outside, 100)))
    assert found == pytest.approx(0.15, abs=1e-9)
    assert adversary.auc(inside, outside) == pytest.approx(0.5 + 0.15 / 2)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("multiplier, bound", [(0.5, 0.6827), (1.0, 0.3829), (2.0, 0.1974), (4.0, 0.0995)])
def test_noise_bounds_the_advantage(multiplier, bound):
    """J8: a release of one clipped gradient, or of none, and the best score there is: at the bound, never above it.

    20,000 releases each. Catches a multiplier of another sensitivity, and thresholds counted where they were chosen.
    """
    assert privacy.gaussian_claim(multiplier).advantage == pytest.approx(bound, abs=5e-5)
    rng, d = np.random.default_rng(7), 20
    g = rng.normal(size=d)
    g /= np.linalg.norm(g)
    noise = multiplier * rng.normal(size=(2, 20_000, d))
    with_it, without = (
        np.asarray(adversary.alignment_score(released(x.astype(np.float32), d), linear_loss, {"g": g[None]}))[:, 0]
        for x in (noise[0] - g[None], noise[1])
    )
    found, error = adversary.advantage(with_it, without)
    assert bound - 4 * error < found < bound + 3 * error
    wrong = privacy.gaussian_claim(1.3 * multiplier).advantage
    assert found > wrong + 3 * error
    nothing, error = adversary.advantage(noise[0, :, 0], noise[1, :, 0])
    assert abs(nothing) < 4 * error


def test_claims_of_several_rounds():
    """T rounds are one with multiplier z / sqrt(T); subsampling scales the advantage by the rate."""
    assert privacy.gaussian_claim(2.0, num_rounds=4).advantage == pytest.approx(privacy.gaussian_claim(1.0).advantage)
    amplified = privacy.gaussian_claim(1.0, sampling_rate=0.1).advantage
    assert amplified == pytest.approx(0.1 * privacy.gaussian_claim(1.0).advantage, rel=1e-6)


def test_calibration():
    """Leave-one-out mean and deviation, by NumPy. Catches a row that calibrates itself; no gain from hard candidates.

    Scales of candidates that differ a hundredfold hide members of small gradients until they are calibrated.
    """
    rng = np.random.default_rng(4)
    scores = rng.normal(size=(6, 5)) + 3
    found = np.asarray(adversary.calibrated_score(jnp.asarray(scores)))
    for i in range(6):
        others = np.delete(scores, i, 0)
        np.testing.assert_allclose(found[i], (scores[i] - others.mean(0)) / others.std(0, ddof=1), rtol=1e-4)
    scores = rng.normal(size=(50, 3)).astype(np.float32)
    scores[0] += 1e5  # a member whose own message says much: in float32 the others' deviation cancelled
    expected = (scores[0] - scores[1:].mean(0, np.float64)) / scores[1:].std(0, np.float64, ddof=1)
    np.testing.assert_allclose(adversary.calibrated_score(jnp.asarray(scores))[0], expected, rtol=1e-4)
    m = 200
    scores = rng.normal(size=(m, 2 * m))
    scores[np.arange(m), np.arange(m)] += 2
    scores = scores * np.exp(rng.uniform(0, 4.6, 2 * m))[None] + rng.normal(size=2 * m)[None] * 50
    aucs = []
    for x in (scores, adversary.calibrated_score(jnp.asarray(scores))):
        x = np.asarray(x)
        aucs.append(adversary.auc(np.diag(x[:, :m]), np.diag(x[:, m:])))
    assert aucs[0] < 0.7 and aucs[1] == pytest.approx(stats.norm.cdf(2 / 2**0.5), abs=0.05)
    with refused("scores", rule="at least three"):
        adversary.calibrated_score(jnp.zeros((2, 4)))


def test_no_advantage_where_there_is_none():
    """Of 2,000 pairs of samples of one law, 20 scores each: zero on average, with the stated error (5 sigma of each).

    Catches a threshold that is counted on the scores that chose it: .2 on average.
    """
    rng = np.random.default_rng(9)
    found = np.array([adversary.advantage(*rng.normal(size=(2, 20))) for _ in range(2000)])
    assert abs(found[:, 0].mean()) < 5 * found[:, 0].std() / 2000**0.5
    assert found[:, 0].std() == pytest.approx(found[:, 1].mean(), rel=0.25)


def test_property():
    """Which clients hold the property, from one message each. Catches the sign, and sides that are exchanged."""
    rng, d = np.random.default_rng(6), 30
    way = rng.normal(size=d)

    def rows(n, having):
        return rng.normal(size=(n, d)) + (1.0 if having else -1.0) * way[None] / np.linalg.norm(way)

    shares = np.linspace(0, 1, 21)
    messages = [-0.1 * np.concatenate([rows(round(20 * s), True), rows(20 - round(20 * s), False)]).mean(0)
                for s in shares]  # fmt: skip
    sides = ({"g": jnp.asarray(rows(300, having), jnp.float32)} for having in (True, False))
    found = adversary.property_score(released(np.array(messages, np.float32), d), linear_loss, *sides)
    assert stats.spearmanr(found, shares).statistic > 0.9


def test_what_scores_are_worth():
    """Against counts of all pairs. Catches thresholds that let one more through, and ties counted once."""
    rng = np.random.default_rng(8)
    samples = (rng.integers(0, 6, 40) + 1.0, rng.integers(0, 6, 50) * 1.0), (rng.normal(size=40), rng.normal(size=50))
    for inside, outside in samples:
        pairs = inside[:, None] - outside[None]
        assert adversary.auc(inside, outside) == pytest.approx((pairs > 0).mean() + (pairs == 0).mean() / 2)
        for rate in (0.0, 0.02, 0.1, 0.5):
            allowed = [(inside > t).mean() for t in outside if (outside > t).mean() <= rate]
            assert adversary.tpr_at_fpr(inside, outside, rate) == pytest.approx(max(allowed))
    with pytest.raises(ValueError, match="members: expected finite scores"):
        adversary.auc([np.nan], [0.0])
    with pytest.raises(ValueError, match="at least four scores"):
        adversary.advantage([1.0, 2.0], [0.0, 1.0, 2.0, 3.0])
