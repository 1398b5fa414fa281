"""Was this example used? Scores from what a server holds, and what a score is worth.

An attacker has candidates, and asks of each whether a client trained on it. Scores are high for members; `auc`,
`tpr_at_fpr` and `advantage` judge scores of members and of others, on the host. What noise allows at most is
`privacy.Claim.advantage`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.adversary.curious import View
from fedjax_sim.models import per_example
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import Positive, ShareBelowOne

__all__ = [
    "advantage",
    "alignment_score",
    "auc",
    "calibrated_score",
    "loss_threshold_score",
    "property_score",
    "tpr_at_fpr",
]


def _losses(loss_fn: Callable, params: PyTree, examples: PyTree) -> Array:
    return per_example(loss_fn(params, examples, None))["loss"]


def _mean_gradient(loss_fn: Callable, params: PyTree, examples: PyTree) -> PyTree:
    return jax.grad(lambda params: _losses(loss_fn, params, examples).mean())(params)


@jax.jit
def _products(messages: PyTree, gradients: PyTree) -> Array:
    """[m, n] inner products of messages [m, ...] and gradients [n, ...]."""
    pairs = zip(jax.tree.leaves(messages), jax.tree.leaves(gradients), strict=True)
    rows = ((x.reshape(x.shape[0], -1), y.reshape(y.shape[0], -1)) for x, y in pairs)
    return sum(jnp.matmul(x, y.T, precision="highest") for x, y in rows)


@validate.named_arguments
def alignment_score(view: View, loss_fn: Callable, candidates: PyTree, learning_rate: Positive = 1.0) -> Array:
    """-<u_i, gradient of a candidate's loss at the broadcast model> / learning rate: high for members.

    An update points against the mean gradient of its B examples, so a member's inner product with it is negative: its
    own |g|^2 / B, times -rate. Among isotropic gradients of dimension d members score d / B on average, others 0.

    Args:
      view: what the attacker holds.
      loss_fn: (params, examples, key) -> losses [n], or a dict that holds "loss" [n].
      candidates: leaves [n, ...], the examples that are asked about.
      learning_rate: of the clients' steps; it scales all scores alike.

    Returns: [m, n]: each message against each candidate.

    Guarantees: mean d / B and AUC Phi(sqrt(d / 2B)) among Gaussian gradients; the sign
    (tests/adversary/test_membership.py::test_alignment).

    References: Nasr, Shokri and Houmansadr 2019; Li et al. 2023, section 4.
    """
    validate.part("view", view, View)
    validate.loss_function(loss_fn)

    def gradient(one):
        return _mean_gradient(loss_fn, view.broadcast, jax.tree.map(lambda x: x[None], one))

    return -_products(view.messages, jax.vmap(gradient)(candidates)) / learning_rate


def loss_threshold_score(params: PyTree, loss_fn: Callable, candidates: PyTree) -> Array:
    """Minus the loss of each candidate at a released model: [n]. It feeds on overfitting.

    Guarantees: AUC 1/2 at an untrained model, above 0.9 at one that knows its examples by heart
    (tests/adversary/test_membership.py::test_loss_threshold).

    References: Yeom et al. 2018, section 3.2.
    """
    validate.loss_function(loss_fn)
    return -_losses(loss_fn, params, candidates)


def calibrated_score(scores: Array) -> np.ndarray:
    """Scores in standard deviations from what the same candidate scores against the other messages, without shadows.

    A candidate with a large gradient scores high against everybody's message; what others' messages make of it takes
    the place of the shadow models that were trained without it.

    Args:
      scores: [m, n] of m >= 3 messages, of `alignment_score`; in columns, a candidate is in few of the messages.

    Returns: [m, n] float64 on the host, (score - mean of the others) / std of the others.

    Guarantees: the leave-one-out mean and deviation; a higher AUC where candidates differ in scale
    (tests/adversary/test_membership.py::test_calibration).

    References: Carlini et al. 2022 (LiRA), section 5, its offline form.

    >>> import jax.numpy as jnp
    >>> round(float(calibrated_score(jnp.array([[3.0], [0.0], [2.0]]))[0, 0]), 4)
    1.4142
    """
    scores = np.asarray(scores, np.float64)  # sums of squares, of which the largest is taken off again
    if scores.ndim != 2 or len(scores) < 3:
        validate.fail("scores", "rows of at least three messages", scores.shape)
    m = len(scores)
    moved = scores - scores.mean(0)[None]  # the others' mean is -moved / (m - 1)
    others = -moved / (m - 1)
    squares = (moved**2).sum(0)[None] - moved**2 - (m - 1) * others**2
    return (moved - others) / np.sqrt(np.maximum(squares / (m - 2), 1e-30))


def property_score(view: View, loss_fn: Callable, having: PyTree, lacking: PyTree) -> Array:
    """Whether a client's data have a property: the message along what tells the attacker's own examples apart.

    Minus the message's inner product with (mean gradient of examples that have it - of those that lack it), both at
    the broadcast model, over that difference's length.

    Args:
      view, loss_fn: as in `alignment_score`.
      having, lacking: leaves [n, ...], examples of the attacker's own.

    Returns: [m], rising with the share of the property in a client's data.

    Guarantees: tests/adversary/test_membership.py::test_property.

    References: Melis et al. 2019, section 4.3.
    """
    validate.part("view", view, View)
    validate.loss_function(loss_fn)
    sides = (_mean_gradient(loss_fn, view.broadcast, examples) for examples in (having, lacking))
    way = jax.tree.map(lambda x, y: (x - y)[None], *sides)
    length = jnp.sqrt(_products(way, way)[0, 0])
    return -_products(view.messages, way)[:, 0] / jnp.maximum(length, 1e-30)


# ---- what scores are worth


def _samples(members: Array, others: Array) -> tuple[np.ndarray, np.ndarray]:
    found = np.asarray(members, np.float64).reshape(-1), np.asarray(others, np.float64).reshape(-1)
    for name, x in zip(("members", "others"), found, strict=True):
        if not x.size or not np.isfinite(x).all():
            validate.fail(name, "finite scores", f"{x.size}, of which {(~np.isfinite(x)).sum()} are not")
    return found


def auc(members: Array, others: Array) -> float:
    """The chance that a member scores above another, ties counted half (Mann and Whitney).

    Guarantees: the count of all pairs (tests/adversary/test_membership.py::test_what_scores_are_worth).

    >>> auc([2.0, 1.0], [1.0, 0.0])
    0.875
    """
    inside, outside = _samples(members, others)
    ordered = np.sort(outside)
    below, upto = (np.searchsorted(ordered, inside, side).mean() for side in ("left", "right"))
    return float((below + upto) / 2 / outside.size)


@validate.named_arguments
def tpr_at_fpr(members: Array, others: Array, false_positive_rate: ShareBelowOne = 0.01) -> float:
    """The share of members found by the lowest threshold that takes at most this share of others for members.

    Args:
      false_positive_rate: in [0, 1); at least 1 / (number of others) to say more than "above all others".

    Guarantees: tests/adversary/test_membership.py::test_what_scores_are_worth.

    References: Carlini et al. 2022, section 4.

    >>> tpr_at_fpr([4.0, 2.5, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0], 0.25)
    0.5
    """
    inside, outside = _samples(members, others)
    ordered = np.sort(outside)[::-1]
    return float((inside > ordered[int(false_positive_rate * outside.size + 1e-9)]).mean())


def advantage(members: Array, others: Array) -> tuple[float, float]:
    """(true - false positive rate, its standard error) at a threshold that was chosen on other scores.

    The best threshold of each half of the scores is counted on the other half: chosen and counted on the same ones it
    would show an advantage where there is none.

    Args:
      members, others: [n] scores each, at least four, in an order that does not depend on them.

    Guarantees: zero on average for equal laws, with this error
    (tests/adversary/test_membership.py::test_no_advantage_where_there_is_none); reaches the bound of a Gaussian release
    and does not pass it by more than chance (::test_noise_bounds_the_advantage).

    References: Yeom et al. 2018, definition 4.
    """
    found = _samples(members, others)
    if min(x.size for x in found) < 4:
        validate.fail("members, others", "at least four scores each", tuple(x.size for x in found))
    differences, rates = [], []
    for first in (0, 1):
        chosen, counted = ([x[half::2] for x in found] for half in (first, 1 - first))
        at = np.unique(np.concatenate(chosen))
        above = [1 - np.searchsorted(np.sort(x), at, "left") / x.size for x in chosen]
        threshold = at[np.argmax(above[0] - above[1])]
        shares = [(x >= threshold).mean() for x in counted]
        differences.append(shares[0] - shares[1])
        rates.append(shares)
    p = np.mean(rates, axis=0)
    error = np.sqrt(sum(share * (1 - share) / x.size for share, x in zip(p, found, strict=True)))
    return float(np.mean(differences)), float(error)
