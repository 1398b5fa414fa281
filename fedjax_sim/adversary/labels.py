"""Labels guessed from the gradients that a party without labels gets back: the leak of vertical and split learning."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import Array

__all__ = ["label_scores"]

ATTACKS = ("norm", "direction")


@validate.named_arguments
def label_scores(gradients: Array, attack: Literal["norm", "direction"] = "norm", known: Array | None = None) -> Array:
    """How much each row's gradient looks like that of a positive label; `auc` of the two classes says how well.

    With one logit z the gradient at what was sent is (sigmoid(z) - y) dz/dh: positive and negative rows point in
    opposite ways, and where positives are rare the model is less sure of them, so theirs is longer.

    Args:
      gradients: [n, ...], a row's gradient at what the party sent, as it came back.
      attack: "norm", its length; "direction", its cosine with that of a row whose label is known to be positive.
      known: [...], that row's gradient, for "direction".

    Returns: [n], higher for rows that are thought to be positive; 0 for the cosine of a zero gradient.

    Raises: ValueError for another attack, for "direction" without `known` or one of another shape.

    Guarantees: with one number a row direction finds every label, and under noise of std s beside residuals of one half
    its AUC is Phi(1 / (2 s)) (tests/adversary/test_labels.py::test_direction, ::test_noise); the norm finds every label
    of a rare class, and none of an even one at the start (::test_norm).

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
    lengths = norms * jnp.sqrt(jnp.square(known).sum())
    return jnp.where(lengths > 0, rows @ known / jnp.where(lengths > 0, lengths, 1), 0)
