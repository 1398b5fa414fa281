"""Labels inferred from the gradients that a party without labels receives, in vertical and split learning."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import Array

LABEL_ATTACKS = ("norm", "direction")


@validate.named_arguments
def label_scores(gradients: Array, attack: Literal["norm", "direction"] = "norm", known: Array | None = None) -> Array:
    """Scores how much each row's gradient looks like that of a positive label.

    With a single logit z, the gradient at the sent embedding h is (sigmoid(z) - y) dz/dh. So gradients of positive and
    negative rows point in opposite directions. If positives are rare, the model predicts them less well, and their
    gradients are longer. `auc` of the scores of the two classes measures the leak.

    Args:
      gradients: [n, ...], the gradient of each row at what the party sent, as it was returned.
      attack: "norm": the score is the norm of the gradient. "direction": the score is its cosine with the gradient of a
        row whose label is known to be positive.
      known: [...], the gradient of this row, for "direction"; None for other rules.

    Returns: [n], higher for rows that are more likely to be positive; 0 for the cosine of a zero gradient.

    Raises: ValueError for another attack, and for "direction" without `known` or with a `known` of another shape.

    Guarantees:
      - with one number for each row, "direction" finds every label (tests/adversary/test_labels.py::test_direction);
        under noise of standard deviation s beside residuals of one half, its AUC is Phi(1 / (2 s)) (::test_noise)
      - "norm" finds every label of a rare class, and no label of balanced classes at the start of training
        (::test_norm)

    References: Li, Sun, Yang, Bie and Chen 2022, section 3 (norm and direction attacks).

    >>> label_scores(jnp.array([[-3.0, 4.0], [0.3, -0.4]])).tolist()
    [5.0, 0.5]
    """
    rows = gradients.reshape(gradients.shape[0], -1)
    norms = jnp.sqrt(jnp.square(rows).sum(1))
    if attack == "norm":
        return norms
    if known is None or jnp.shape(known) != gradients.shape[1:]:
        shape = None if known is None else jnp.shape(known)
        validate.fail("known", f"the gradient of a positive row, of shape {gradients.shape[1:]}", shape)
    known = jnp.asarray(known).reshape(-1)
    norm_products = norms * jnp.sqrt(jnp.square(known).sum())
    return jnp.where(norm_products > 0, rows @ known / jnp.where(norm_products > 0, norm_products, 1), 0)
