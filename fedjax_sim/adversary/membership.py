"""Membership inference: scores of candidate examples from what a server holds, and measures of the scores.

An attacker has candidate examples, and asks for each whether a client trained on it. Scores are high for members.
`auc`, `tpr_at_fpr` and `advantage` compare the scores of members and of other examples, on the host. The largest
advantage that noise allows is `privacy.Claim.advantage`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim import validate
from fedjax_sim.adversary.curious import View
from fedjax_sim.models import per_example
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import Positive, ShareBelowOne


def _losses(loss_fn: Callable, params: PyTree, examples: PyTree) -> Array:
    """Computes the losses of examples, [n]."""
    return per_example(loss_fn(params, examples, None))["loss"]


def _mean_gradient(loss_fn: Callable, params: PyTree, examples: PyTree) -> PyTree:
    """The gradient of the mean loss of examples."""
    return jax.grad(lambda params: _losses(loss_fn, params, examples).mean())(params)


@jax.jit
def _products(messages: PyTree, gradients: PyTree) -> Array:
    """Computes the inner products of messages [m, ...] and gradients [n, ...], [m, n]."""
    pairs = zip(jax.tree.leaves(messages), jax.tree.leaves(gradients), strict=True)
    rows = ((x.reshape(x.shape[0], -1), y.reshape(y.shape[0], -1)) for x, y in pairs)
    return jnp.asarray(sum(jnp.matmul(x, y.T, precision="highest") for x, y in rows))


@validate.named_arguments
def alignment_score(view: View, loss_fn: Callable, candidates: PyTree, learning_rate: Positive = 1.0) -> Array:
    """Scores candidates by -<u_i, g> / learning rate, with an update u_i and the candidate's gradient g.

    g is the gradient of the candidate's loss at the broadcast model. An update points against the mean gradient of its
    B examples. So its inner product with the gradient of a member has a term -rate |g|^2 / B, and the score is high.
    Among isotropic gradients of dimension d, members score d / B on average, and others 0.

    Args:
      view: what the attacker holds.
      loss_fn: (params, examples, key) -> losses [n], or a dict that holds "loss" [n].
      candidates: leaves [n, ...], the candidate examples.
      learning_rate: of the clients' steps; it scales all scores by the same factor.

    Returns: [m, n], the score of each candidate for each message.

    Guarantees: among Gaussian gradients the mean is d / B and the AUC is Phi(sqrt(d / 2B)), and members have the larger
    scores (tests/adversary/test_membership.py::test_alignment).

    References: Nasr, Shokri and Houmansadr 2019; Li et al. 2023, section 4.
    """
    validate.part("view", view, View)
    validate.loss_function(loss_fn)

    def gradient(candidate):
        return _mean_gradient(loss_fn, view.broadcast, jax.tree.map(lambda x: x[None], candidate))

    return -_products(view.messages, jax.vmap(gradient)(candidates)) / learning_rate


def loss_threshold_score(params: PyTree, loss_fn: Callable, candidates: PyTree) -> Array:
    """Scores candidates by minus their loss at a released model, which is high for members if the model overfits.

    Candidates that the model fits well tie: a float32 cross-entropy is 0 above a logit of 16. `confidence_logit` of the
    model's outputs orders candidates of two classes in the same way, and tells these apart.

    Args:
      params: the released model.
      loss_fn: as in `alignment_score`.
      candidates: leaves [n, ...].

    Returns: [n].

    Guarantees: AUC 1/2 at an untrained model, above 0.9 at a model that has memorised its examples
    (tests/adversary/test_membership.py::test_loss_threshold).

    References: Yeom et al. 2018, section 3.2.
    """
    validate.loss_function(loss_fn)
    return -_losses(loss_fn, params, candidates)


def calibrated_score(scores: ArrayLike) -> np.ndarray:
    """Standardises each score by the scores of the same candidate for the other messages.

    A candidate with a large gradient scores high for every message. Its scores for the other messages take the place of
    shadow models that were trained without the candidate.

    Args:
      scores: [m, n] from `alignment_score`, of m >= 3 messages; each candidate should be a member of few messages.

    Returns: [m, n] float64 on the host: (score - mean of the other scores) / standard deviation of the other scores.

    Raises: ValueError for fewer than three messages.

    Guarantees: the leave-one-out mean and deviation; a higher AUC if candidates differ in scale
    (tests/adversary/test_membership.py::test_calibration).

    References: Carlini et al. 2022 (LiRA), section 5, whose shadow models take the place of other messages
    (`likelihood_ratio_score`, `offline_likelihood_score`).

    >>> import jax.numpy as jnp
    >>> round(float(calibrated_score(jnp.array([[3.0], [0.0], [2.0]]))[0, 0]), 4)
    1.4142
    """
    # In float64, since the largest square is subtracted from a sum of squares again.
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 2 or len(scores) < 3:
        validate.fail("scores", "rows of at least three messages", scores.shape)
    m = len(scores)
    # Deviations from the mean of all m scores add up to zero, so those of the other scores have mean -deviation/(m -
    # 1).
    deviations = scores - scores.mean(0)[None]
    other_means = -deviations / (m - 1)
    other_squares = (deviations**2).sum(0)[None] - deviations**2 - (m - 1) * other_means**2
    return (deviations - other_means) / np.sqrt(np.maximum(other_squares / (m - 2), 1e-30))


def property_score(view: View, loss_fn: Callable, having: PyTree, lacking: PyTree) -> Array:
    """Scores whether a client's data have a property, with the attacker's own examples with and without it.

    Let w be the mean gradient of examples with the property minus that of examples without it, both at the broadcast
    model. The score is minus the inner product of the message with w / |w|.

    Args:
      view: what the attacker holds.
      loss_fn: as in `alignment_score`.
      having: leaves [n, ...], the attacker's examples with the property.
      lacking: leaves [n, ...], the attacker's examples without the property.

    Returns: [m], larger for clients with a larger share of examples with the property.

    Guarantees: under a linear loss, the scores of 21 clients and their shares of examples with the property have a rank
    correlation above 0.9 (tests/adversary/test_membership.py::test_property).

    References: Melis et al. 2019, section 4.3.
    """
    validate.part("view", view, View)
    validate.loss_function(loss_fn)
    gradients = (_mean_gradient(loss_fn, view.broadcast, examples) for examples in (having, lacking))
    direction = jax.tree.map(lambda x, y: (x - y)[None], *gradients)
    norm = jnp.sqrt(_products(direction, direction)[0, 0])
    return -_products(view.messages, direction)[:, 0] / jnp.maximum(norm, 1e-30)


# ---- measures of scores


def _checked_scores(members: ArrayLike, others: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """The scores of members and of others, as float64 vectors; refuses scores that are not finite."""
    samples = np.asarray(members, np.float64).reshape(-1), np.asarray(others, np.float64).reshape(-1)
    for name, scores in zip(("members", "others"), samples, strict=True):
        if not scores.size or not np.isfinite(scores).all():
            validate.fail(name, "finite scores", f"{scores.size}, of which {(~np.isfinite(scores)).sum()} are not")
    return samples


def auc(members: ArrayLike, others: ArrayLike) -> float:
    """Computes the chance that a member scores above a non-member, with ties counted half (Mann and Whitney).

    Args:
      members: [n] finite scores of members.
      others: [k] finite scores of other examples.

    Guarantees: the count of all pairs (tests/adversary/test_membership.py::test_what_scores_are_worth).

    >>> auc([2.0, 1.0], [1.0, 0.0])
    0.875
    """
    member_scores, other_scores = _checked_scores(members, others)
    sorted_scores = np.sort(other_scores)
    # The mean numbers of other scores below a member's, and at or below it.
    below, at_or_below = (np.searchsorted(sorted_scores, member_scores, side).mean() for side in ("left", "right"))
    return float((below + at_or_below) / 2 / other_scores.size)


@validate.named_arguments
def tpr_at_fpr(members: ArrayLike, others: ArrayLike, false_positive_rate: ShareBelowOne = 0.01) -> float:
    """Computes the true positive rate at a given false positive rate.

    The threshold is the lowest at which at most the share `false_positive_rate` of the other examples is taken for
    members. The result is the share of members above it.

    Args:
      members: [n] finite scores of members.
      others: [k] finite scores of other examples.
      false_positive_rate: in [0, 1). Below 1/k the result is the share of members that score above all others.

    Guarantees: the result is the largest share of members above a threshold among the other scores that at most the
    allowed share of other scores exceeds, ties included
    (tests/adversary/test_membership.py::test_what_scores_are_worth).

    References: Carlini et al. 2022, section 4.

    >>> tpr_at_fpr([4.0, 2.5, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0], 0.25)
    0.5
    """
    member_scores, other_scores = _checked_scores(members, others)
    sorted_scores = np.sort(other_scores)[::-1]
    num_false_positives = math.floor(validate.as_written(false_positive_rate) * other_scores.size)
    return float((member_scores > sorted_scores[num_false_positives]).mean())


def advantage(members: ArrayLike, others: ArrayLike) -> tuple[float, float]:
    """Estimates the membership advantage: the true minus the false positive rate at the best threshold.

    The best threshold of each half of the scores is evaluated on the other half. A threshold chosen and evaluated on
    the same scores would show an advantage where there is none.

    Args:
      members: [n] scores of members, at least four, in an order that does not depend on the scores.
      others: [k] scores of other examples, at least four, in such an order.

    Returns: (advantage, its standard error).

    Raises: ValueError for fewer scores, and for scores that are not finite.

    Guarantees:
      - zero on average for equal distributions, with the stated error
        (tests/adversary/test_membership.py::test_no_advantage_where_there_is_none)
      - it reaches the bound of a Gaussian release, and exceeds it by chance only (::test_noise_bounds_the_advantage)

    References: Yeom et al. 2018, definition 4.
    """
    samples = _checked_scores(members, others)
    if min(x.size for x in samples) < 4:
        validate.fail("members, others", "at least four scores each", tuple(x.size for x in samples))
    differences = []
    rates = []
    for first in (0, 1):
        choosing, evaluating = ([x[half::2] for x in samples] for half in (first, 1 - first))
        thresholds = np.unique(np.concatenate(choosing))
        # The shares of members and of others at or above each threshold.
        shares_above = [1 - np.searchsorted(np.sort(x), thresholds, "left") / x.size for x in choosing]
        best_threshold = thresholds[np.argmax(shares_above[0] - shares_above[1])]
        shares = [(x >= best_threshold).mean() for x in evaluating]
        differences.append(shares[0] - shares[1])
        rates.append(shares)
    mean_rates = np.mean(rates, axis=0)
    error = np.sqrt(sum(rate * (1 - rate) / x.size for rate, x in zip(mean_rates, samples, strict=True)))
    return float(np.mean(differences)), float(error)
