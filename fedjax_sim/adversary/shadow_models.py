"""LiRA: membership inference by the likelihood of a confidence under models trained with and without a candidate."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim import validate
from fedjax_sim.validate import Integer, NonNegativeInt, PositiveInt

LEAST_VARIANCE = 1e-12


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


def confidence_logit(outputs: ArrayLike, labels: ArrayLike) -> np.ndarray:
    """Computes log(p / (1 - p)) of the probability p of the true label, which is nearly normal over models.

        phi = z_y - log sum_{c != y} exp(z_c)

    It is computed from a model's outputs and not from losses: a float32 loss is 0 above phi = 16, where candidates that
    a model fits well could no longer be told apart.

    Args:
      outputs: [..., C] logits z of C >= 2 classes, as `model.apply(params, state, x, None, False)[0]` returns them; or
        [..., 1], the logit of label 1 of two labels.
      labels: [...] integers in [0, C), or in [0, 2) for a single output.

    Returns: [...] float64.

    Raises: ValueError for outputs that are not finite, labels out of range, and shapes that do not fit.

    Guarantees: it is the logit of p, and keeps its digits however large it is
    (tests/adversary/test_shadow_models.py::test_confidence, ::test_confident_models_are_told_apart).

    References: Carlini, Chien, Nasr, Song, Terzis, Tramer 2022 (LiRA), section V and appendix VI-A.

    >>> confidence_logit([[0.0, 0.0], [40.0, 1.0]], [0, 0]).tolist(), confidence_logit([[2.5]], [0]).tolist()
    ([0.0, 39.0], [-2.5])
    """
    outputs, labels = np.asarray(outputs, np.float64), np.asarray(labels)
    _check_finite("outputs", outputs)
    if labels.dtype.kind not in "iu" or labels.shape != outputs.shape[:-1] or not outputs.shape[-1:] > (0,):
        rule = f"integers of shape {outputs.shape[:-1]}, one for each row of outputs"
        validate.fail("labels", rule, f"{labels.dtype} of shape {labels.shape}")
    if outputs.shape[-1] == 1:
        outputs = np.concatenate([np.zeros_like(outputs), outputs], -1)
    num_classes = outputs.shape[-1]
    if not ((labels >= 0) & (labels < num_classes)).all():
        validate.fail("labels", f"integers in [0, {num_classes})", labels)
    is_label = np.arange(num_classes) == labels[..., None]
    others = np.where(is_label, -np.inf, outputs)
    peak = others.max(-1, keepdims=True)
    of_others = peak[..., 0] + np.log(np.exp(others - peak).sum(-1))
    return np.where(is_label, outputs, 0).sum(-1) - of_others


def confidence_logit_of_losses(losses: ArrayLike) -> np.ndarray:
    """Computes log(p / (1 - p)) of the probability p = exp(-loss) of the true label, where outputs are not at hand.

    Of float32 losses, large logits have few digits: 0.01 at a logit of 12, and 1 at 16. `confidence_logit` has all.

    Args:
      losses: cross-entropies > 0 in nats, of any shape.

    Returns: float64 of that shape.

    Raises: ValueError for losses that are not finite or below 0, and for losses of 0, whose logit was rounded away.

    >>> confidence_logit_of_losses(np.log(np.array([2.0, 4.0]))).round(4).tolist()
    [0.0, -1.0986]
    """
    losses = np.asarray(losses, np.float64)
    if not ((losses >= 0) & np.isfinite(losses)).all():
        validate.fail("losses", "finite cross-entropies >= 0", losses)
    if num_zeros := int((losses == 0).sum()):
        hint = "Their logits were rounded away, above 16 in float32: take confidence_logit(outputs, labels)."
        validate.fail("losses", "cross-entropies > 0", f"{num_zeros} of 0", hint)
    return -losses - np.log(-np.expm1(-losses))


@validate.named_arguments
def likelihood_ratio_score(
    observed: ArrayLike, shadow_scores: ArrayLike, is_member: ArrayLike, *, pooled_variance: bool = False
) -> np.ndarray:
    """Scores candidates by the log likelihood ratio of what the attacked model says: trained with or without them.

    For each candidate, shadow models that were trained with it give a normal law of its score, and those without it
    another one.

    Args:
      observed: [n] a number of each candidate at the attacked model, such as its `confidence_logit` there.
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
    _check_scores(observed, shadow_scores, is_member)
    log_densities = []
    for chosen in (is_member, ~is_member):
        hint = "Train each candidate in half of the shadow models: shadow_memberships. Or offline_likelihood_score."
        means, variances = _normal_laws(shadow_scores, chosen, pooled_variance, hint)
        log_densities.append(-0.5 * (np.square(observed - means) / variances + np.log(2 * np.pi * variances)))
    return log_densities[0] - log_densities[1]


@validate.named_arguments
def offline_likelihood_score(
    observed: ArrayLike, shadow_scores: ArrayLike, is_member: ArrayLike | None = None, *, pooled_variance: bool = False
) -> np.ndarray:
    """Scores candidates by how unlikely the attacked model's answer is for a model that was trained without them.

        score_i = -log P(Z > observed_i),   Z ~ N(mean_i, variance_i) of the shadow models without candidate i

    No shadow model is trained on a candidate, so that the models serve for candidates that come later.

    Args:
      observed: [n] a number of each candidate at the attacked model, such as its `confidence_logit`, high for members.
      shadow_scores: [S, n] the same number at S shadow models.
      is_member: [S, n] bool, the candidates that a shadow model was trained on, and which are left out; None for none.
      pooled_variance: one variance for all candidates, for few shadow models; by default each candidate has its own.

    Returns: [n] float64 >= 0, high for members.

    Raises: as `likelihood_ratio_score`, but candidates need only two shadow models without them.

    Guarantees: it is SciPy's log survival function, and where members' scores are shifted its AUC is that of the best
    test (tests/adversary/test_shadow_models.py::test_offline_is_the_survival_function, ::test_it_is_the_best_test).

    References: Carlini, Chien, Nasr, Song, Terzis, Tramer 2022 (LiRA), section V and algorithm 1, offline.
    """
    from scipy.special import log_ndtr  # imported here, because it takes a fifth of a second of each start

    observed, shadow_scores = np.asarray(observed, np.float64), np.asarray(shadow_scores, np.float64)
    is_member = np.zeros(shadow_scores.shape, bool) if is_member is None else np.asarray(is_member)
    _check_scores(observed, shadow_scores, is_member)
    means, variances = _normal_laws(shadow_scores, ~is_member, pooled_variance, "Train more shadow models.")
    return -log_ndtr((means - observed) / np.sqrt(variances))


def _check_finite(name: str, values: np.ndarray) -> None:
    """Raises ValueError for numbers that are not finite."""
    if not np.isfinite(values).all():
        validate.fail(name, "finite numbers", f"{(~np.isfinite(values)).sum()} that are not")


def _check_scores(observed: np.ndarray, shadow_scores: np.ndarray, is_member: np.ndarray) -> None:
    """Raises ValueError for scores that are not finite, and for shapes that do not fit."""
    _check_finite("observed", observed)
    _check_finite("shadow_scores", shadow_scores)
    if observed.ndim != 1 or shadow_scores.ndim != 2 or shadow_scores.shape[1:] != observed.shape:
        rule = f"[S, {observed.size}], a row for each shadow model"
        validate.fail("shadow_scores", rule, shadow_scores.shape)
    if is_member.dtype != bool or is_member.shape != shadow_scores.shape:
        validate.fail("is_member", f"{shadow_scores.shape} of bool", f"{is_member.shape} of {is_member.dtype}")


def _normal_laws(
    shadow_scores: np.ndarray, chosen: np.ndarray, pooled_variance: bool, hint: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (means [n], variances [n]) of each candidate's scores at the chosen shadow models.

    Args:
      shadow_scores: [S, n].
      chosen: [S, n] bool, the models that count for a candidate.
      pooled_variance: whether all candidates share one variance.
      hint: what to do where a candidate has fewer than two models.
    """
    counts = chosen.sum(0)
    if counts.min(initial=2) < 2:
        validate.fail("is_member", "two models for each candidate and case", int(counts.min()), hint)
    means = np.where(chosen, shadow_scores, 0).sum(0) / counts
    squares = np.where(chosen, np.square(shadow_scores - means[None]), 0).sum(0)
    variances = squares / (counts - 1)
    if pooled_variance:
        variances = np.full_like(variances, squares.sum() / (counts - 1).sum())
    return means, np.maximum(variances, LEAST_VARIANCE)
