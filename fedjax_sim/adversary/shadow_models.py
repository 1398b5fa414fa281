"""LiRA: membership inference by the likelihood of a confidence under models trained with and without a candidate."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fedjax_sim import validate
from fedjax_sim.types import Array
from fedjax_sim.validate import Integer, NonNegativeInt, PositiveInt

__all__ = ["confidence_logit", "likelihood_ratio_score", "shadow_memberships"]

LEAST_VARIANCE = 1e-12
MOST_LOGIT = 80.0  # of a loss below float64's resolution


@validate.named_arguments
def shadow_memberships(
    num_models: Annotated[int, Integer(4)], num_candidates: PositiveInt, seed: NonNegativeInt = 0
) -> np.ndarray:
    """Draws which candidates each shadow model is trained on: every candidate in half of the models, at random.

    Args:
      num_models: S, even.
      num_candidates: n.
      seed: of the draw.

    Returns: [S, n] bool.

    >>> shadow_memberships(4, 3).sum(0).tolist()
    [2, 2, 2]
    """
    if num_models % 2:
        validate.fail("num_models", "an even number", num_models, "Half of them are trained on each candidate.")
    order = np.random.default_rng(seed).random((num_models, num_candidates)).argsort(0)
    return order < num_models // 2


def confidence_logit(losses: Array) -> np.ndarray:
    """Computes log(p / (1 - p)) of the probability p = exp(-loss) of the true label, which is nearly normal.

    Args:
      losses: cross-entropies >= 0 in nats, of any shape.

    Returns: float64 of that shape, at most 80 in size.

    >>> confidence_logit(np.log(np.array([2.0, 4.0]))).round(4).tolist()
    [0.0, -1.0986]
    """
    losses = np.asarray(losses, np.float64)
    if not ((losses >= 0) & np.isfinite(losses)).all():
        validate.fail("losses", "finite cross-entropies >= 0", losses)
    with np.errstate(divide="ignore"):
        return np.clip(-losses - np.log(-np.expm1(-losses)), -MOST_LOGIT, MOST_LOGIT)


@validate.named_arguments
def likelihood_ratio_score(
    observed: Array, shadow_scores: Array, is_member: Array, *, pooled_variance: bool = False
) -> np.ndarray:
    """Scores candidates by the log likelihood ratio of what the attacked model says: trained with or without them.

    For each candidate, shadow models that were trained with it give a normal law of its score, and those without it
    another one.

    Args:
      observed: [n] a number of each candidate at the attacked model, such as `confidence_logit` of its loss there.
      shadow_scores: [S, n] the same number at S shadow models.
      is_member: [S, n] bool, the candidates that each shadow model was trained on (`shadow_memberships`).
      pooled_variance: one variance of members and one of others for all candidates, for few shadow models; by default
        each candidate has its own two.

    Returns: [n] float64, high for members.

    Raises: ValueError for numbers that are not finite, shapes that do not fit, and for a candidate that fewer than two
    shadow models were trained with, or without.

    Guarantees: it is the difference of SciPy's log densities, and where scores are normal its AUC is that of the best
    test (tests/adversary/test_shadow_models.py::test_ratio_of_densities, ::test_it_is_the_best_test).

    References: Carlini, Chien, Nasr, Song, Terzis, Tramer 2022 (LiRA), algorithm 1.
    """
    observed, shadow_scores = np.asarray(observed, np.float64), np.asarray(shadow_scores, np.float64)
    is_member = np.asarray(is_member)
    for name, values in (("observed", observed), ("shadow_scores", shadow_scores)):
        if not np.isfinite(values).all():
            validate.fail(name, "finite numbers", f"{(~np.isfinite(values)).sum()} that are not")
    if observed.ndim != 1 or shadow_scores.ndim != 2 or shadow_scores.shape[1:] != observed.shape:
        rule = f"[S, {observed.size}], a row for each shadow model"
        validate.fail("shadow_scores", rule, shadow_scores.shape)
    if is_member.dtype != bool or is_member.shape != shadow_scores.shape:
        validate.fail("is_member", f"{shadow_scores.shape} of bool", f"{is_member.shape} of {is_member.dtype}")
    log_densities = []
    for chosen in (is_member, ~is_member):
        counts = chosen.sum(0)
        if counts.min() < 2:
            hint = "Train each candidate in half of the shadow models: shadow_memberships."
            validate.fail("is_member", "two models with and two without each candidate", int(counts.min()), hint)
        means = np.where(chosen, shadow_scores, 0).sum(0) / counts
        squares = np.where(chosen, np.square(shadow_scores - means[None]), 0).sum(0)
        variances = squares / (counts - 1)
        if pooled_variance:
            variances = np.full_like(variances, squares.sum() / (counts - 1).sum())
        variances = np.maximum(variances, LEAST_VARIANCE)
        log_densities.append(-0.5 * (np.square(observed - means) / variances + np.log(2 * np.pi * variances)))
    return log_densities[0] - log_densities[1]
