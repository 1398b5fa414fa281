"""LiRA: the ratio of two normal densities, its worth where scores are normal, and what it needs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedjax_sim import adversary


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
    assert adversary.auc(observed[inside], observed[~inside]) == pytest.approx(0.5, abs=0.03)


def test_memberships():
    """Catches candidates in more models than others, and models whose candidates are the same."""
    drawn = adversary.shadow_memberships(10, 4000, seed=1)
    assert (drawn.sum(0) == 5).all()
    together = (drawn[0] & drawn[1]).mean()  # both of a pair: 5/10 * 4/9
    assert together == pytest.approx(2 / 9, abs=5 * np.sqrt(2 / 9 * 7 / 9 / 4000))
    assert not (drawn == adversary.shadow_memberships(10, 4000, seed=2)).all()


def test_confidence():
    """Catches a loss of 0 that is infinite, and small losses that lose their digits."""
    losses = np.array([0.0, 1e-12, 0.3, 5.0, 1000.0])
    found = adversary.confidence_logit(losses)
    assert found[0] == 80 and found[4] == -80 and found[1] == pytest.approx(np.log(1e12), rel=1e-6)
    p = np.exp(-losses[2:4])
    np.testing.assert_allclose(found[2:4], np.log(p / (1 - p)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"observed": [np.nan, 0.0]}, "observed: expected finite numbers"),
        ({"shadow_scores": np.zeros((4, 3))}, "shadow_scores: expected"),
        ({"is_member": np.ones((4, 2), bool)}, "is_member: expected two models with and two without"),
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
    with pytest.raises(ValueError, match="num_models: expected an even number, got 5"):
        adversary.shadow_memberships(5, 2)
