"""LiRA: the ratio of two normal densities, its worth where scores are normal, and what it needs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from fedjax_sim import adversary, models
from tests.refusals import refused


def test_ratio_of_densities():
    """Catches members taken for others, variances that divide by n, and variances of the wrong group."""
    rng = np.random.default_rng(0)
    is_member = adversary.shadow_memberships(8, 5, seed=2)
    shadow, observed = rng.normal(size=(8, 5)) + 2 * is_member, rng.normal(size=5)
    for pooled in (False, True):
        found = adversary.likelihood_ratio_score(observed, shadow, is_member, pooled_variance=pooled)
        laws = []
        for chosen in (is_member, ~is_member):
            groups = [shadow[chosen[:, i], i] for i in range(5)]
            variance = np.mean([group.var(ddof=1) for group in groups])  # all groups are of one size
            laws.append([
                stats.norm.logpdf(observed[i], group.mean(), np.sqrt(variance) if pooled else group.std(ddof=1))
                for i, group in enumerate(groups)
            ])  # fmt: skip
        np.testing.assert_allclose(found, np.subtract(*laws), rtol=1e-9)


def test_it_is_the_best_test():
    """Candidates of unlike difficulty, members one deviation higher: AUC Phi(1 / sqrt(2)) = .7602 +- .004 (3 errors).

    A threshold on the score itself is near chance, since difficulty hides membership. Catches scores that are compared
    between candidates.
    """
    rng, n, shadows = np.random.default_rng(1), 20_000, 128
    difficulty, scale = rng.normal(scale=20, size=n), rng.uniform(0.5, 2, size=n)
    is_member = adversary.shadow_memberships(shadows, n, seed=3)

    def scores(member):
        return difficulty + scale * (rng.normal(size=member.shape) + member)

    inside = rng.random(n) < 0.5
    observed = scores(inside)
    found = adversary.likelihood_ratio_score(observed, scores(is_member), is_member)
    assert adversary.auc(found[inside], found[~inside]) == pytest.approx(0.7602, abs=0.012)
    offline = adversary.offline_likelihood_score(observed, scores(np.zeros((shadows, n), bool)))
    assert adversary.auc(offline[inside], offline[~inside]) == pytest.approx(0.7602, abs=0.012)
    assert adversary.auc(observed[inside], observed[~inside]) == pytest.approx(0.5, abs=0.03)


def test_memberships():
    """Catches candidates in more models than others, and models whose candidates are the same."""
    drawn = adversary.shadow_memberships(10, 4000, seed=1)
    assert (drawn.sum(0) == 5).all()
    together = (drawn[0] & drawn[1]).mean()  # both of a pair: 5/10 * 4/9
    assert together == pytest.approx(2 / 9, abs=5 * np.sqrt(2 / 9 * 7 / 9 / 4000))
    assert not (drawn == adversary.shadow_memberships(10, 4000, seed=2)).all()


def test_confidence():
    """Catches another class's logit, a sum over the label too, and large logits that overflow or lose their digits."""
    rng = np.random.default_rng(4)
    outputs, labels = rng.normal(scale=3, size=(50, 5)), rng.integers(0, 5, 50)
    p = np.take_along_axis(special.softmax(outputs, -1), labels[:, None], -1)[:, 0]
    np.testing.assert_allclose(adversary.confidence_logit(outputs, labels), np.log(p / (1 - p)), rtol=1e-9)
    np.testing.assert_allclose(
        adversary.confidence_logit_of_losses(-np.log(p)), adversary.confidence_logit(outputs, labels), rtol=1e-9
    )
    large = np.array([[1000.0, 0.0, 0.0], [0.0, 1000.0, 0.0]], np.float32)
    np.testing.assert_allclose(adversary.confidence_logit(large, [0, 0]), [1000 - np.log(2), -1000])
    one = np.array([[3.0], [-20.0]])
    np.testing.assert_allclose(adversary.confidence_logit(one, [1, 0]), [3.0, 20.0])
    np.testing.assert_allclose(adversary.confidence_logit(np.c_[np.zeros(2), one], [1, 0]), [3.0, 20.0])


def test_confident_models_are_told_apart():
    """Candidates at a mean logit of 17, by a model's float32 outputs: LiRA is as strong as from float64 scores.

    From the float32 losses of the same outputs it was near chance at 1 %, since most of them are 0: they are refused.
    """
    rng, n, shadows = np.random.default_rng(7), 2000, 16
    difficulty = 17 + rng.normal(size=n)
    is_member = adversary.shadow_memberships(shadows, n, seed=1)
    inside = rng.random(n) < 0.5

    def scores(member):
        return difficulty + rng.normal(size=member.shape) + 1.5 * member

    def outputs(scores):
        labels = np.arange(n) % 3
        others = np.float32([0.3, -0.2])
        of_others = np.log(np.exp(others.astype(np.float64)).sum())
        rows = np.zeros((*scores.shape, 3), np.float32)
        rows[..., np.arange(n), labels] = (scores + of_others).astype(np.float32)
        for shift in (1, 2):
            rows[..., np.arange(n), (labels + shift) % 3] = others[shift - 1]
        return rows, np.broadcast_to(labels, scores.shape)

    observed, shadow = scores(inside), scores(is_member)
    through = adversary.confidence_logit(*outputs(observed)), adversary.confidence_logit(*outputs(shadow))
    for score in (adversary.likelihood_ratio_score, adversary.offline_likelihood_score):
        best, found = (score(*pair, is_member, pooled_variance=True) for pair in ((observed, shadow), through))
        of_best, of_found = (adversary.auc(x[inside], x[~inside]) for x in (best, found))
        assert of_best > 0.8 and of_found == pytest.approx(of_best, abs=1e-3)
        rates = [adversary.tpr_at_fpr(x[inside], x[~inside], 0.01) for x in (best, found)]
        assert rates[0] > 0.1 and rates[1] == pytest.approx(rates[0], abs=0.01)
    losses = np.asarray(models.softmax_cross_entropy(*map(jnp.asarray, outputs(observed)))["loss"])
    with refused("losses", rule="> 0", hint="confidence_logit(outputs, labels)"):
        adversary.confidence_logit_of_losses(losses)


@pytest.mark.parametrize(
    ("outputs", "labels", "words"),
    [
        ([[0.0, np.inf]], [0], "outputs: expected finite numbers"),
        ([[0.0, 1.0]], [2], r"labels: expected integers in \[0, 2\)"),
        ([[0.0, 1.0]], [0.0], "labels: expected integers of shape"),
        ([[0.0, 1.0]], [[0]], "labels: expected integers of shape"),
    ],
)
def test_wrong_outputs(outputs, labels, words):
    with pytest.raises(ValueError, match=words):
        adversary.confidence_logit(outputs, labels)


def test_offline_is_the_survival_function():
    """Catches models that saw a candidate, the wrong tail, and scores that saturate far in the tail."""
    rng = np.random.default_rng(0)
    is_member = adversary.shadow_memberships(8, 5, seed=2)
    shadow, observed = rng.normal(size=(8, 5)), np.array([-1.0, 0.0, 3.0, 30.0, 100.0])
    for chosen in (is_member, None):
        outside = np.ones((8, 5), bool) if chosen is None else ~chosen
        groups = [shadow[outside[:, i], i] for i in range(5)]
        pooled = np.sqrt(np.mean([group.var(ddof=1) for group in groups]))
        for is_pooled in (False, True):
            expected = [
                -stats.norm.logsf(observed[i], group.mean(), pooled if is_pooled else group.std(ddof=1))
                for i, group in enumerate(groups)
            ]
            found = adversary.offline_likelihood_score(observed, shadow, chosen, pooled_variance=is_pooled)
            np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"observed": [np.nan, 0.0]}, "observed: expected finite numbers"),
        ({"shadow_scores": np.zeros((4, 3))}, "shadow_scores: expected"),
        ({"is_member": np.ones((4, 2), bool)}, "is_member: expected two models for each candidate"),
        ({"is_member": np.ones((4, 2))}, "is_member: expected"),
    ],
)
def test_wrong_input(change, words):
    right = {
        "observed": np.zeros(2),
        "shadow_scores": np.zeros((4, 2)),
        "is_member": adversary.shadow_memberships(4, 2),
    }
    with pytest.raises(ValueError, match=words):
        adversary.likelihood_ratio_score(**right | change)
    with pytest.raises(ValueError, match=words):
        adversary.offline_likelihood_score(**right | change)
    with refused("num_models", value=5, rule="even"):
        adversary.shadow_memberships(5, 2)
