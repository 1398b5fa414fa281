"""What the parties of split learning infer: labels from gradients at the cut, examples from smashed data."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import Array
from fedjax_sim.validate import Positive

__all__ = ["inversion_error", "invert_smashed", "labels_by_direction", "labels_of_logits"]


def labels_of_logits(gradients: Array) -> Array:
    """The labels of a softmax cross entropy whose gradient at the logits came back: p - onehot has one negative entry.

    Args:
      gradients: [n, classes].

    Returns: [n] int32.

    Guarantees: every label, at any model (tests/adversary/test_smashed.py::test_labels_at_the_logits), and chance under
    strong noise (::test_noise_hides_labels).

    References: Zhao, Mopuri and Bilen 2020 (iDLG), section 3.

    >>> labels_of_logits(jnp.array([[0.2, -0.9, 0.7]])).tolist()
    [1]
    """
    if gradients.ndim != 2:
        validate.fail("gradients", "[n, classes]", gradients.shape)
    return gradients.argmin(1).astype(jnp.int32)


def labels_by_direction(gradients: Array, known: Array, labels: Array) -> Array:
    """The label of the known example whose gradient points most like a row's own.

    Gradients at a cut before one class's logit share a direction, and other classes have others: a few examples whose
    labels the attacker knows tell those of all.

    Args:
      gradients: [n, ...] at what was sent, as a party saw them.
      known: [k, ...], those of examples whose labels it knows. labels: [k] integers.

    Returns: [n] labels.

    Guarantees: above chance through a U-shaped cut, and chance under noise
    (tests/adversary/test_smashed.py::test_labels_through_the_middle).

    References: Li, Sun, Yang, Bie and Chen 2022, section 3 (direction attack, for two classes).

    >>> labels_by_direction(jnp.array([[2.0, 0.1]]), jnp.eye(2), jnp.array([7, 8])).tolist()
    [7]
    """
    if known.shape[1:] != gradients.shape[1:] or labels.shape != known.shape[:1]:
        validate.fail("known", f"rows of shape {gradients.shape[1:]} with a label each", (known.shape, labels.shape))

    def unit(rows):
        rows = rows.reshape(rows.shape[0], -1)
        length = jnp.sqrt(jnp.square(rows).sum(1, keepdims=True))
        return rows / jnp.where(length > 0, length, 1)

    return labels[(unit(gradients) @ unit(known).T).argmax(1)]


@validate.named_arguments
def invert_smashed(smashed: Array, known: Array, examples: Array, *, ridge: Positive = 1e-3) -> Array:
    """Examples rebuilt from their smashed data, by a decoder that is fitted to examples of the attacker's own.

    The decoder is affine, the best one in squared error plus ridge times its squared norm: a lower bound on what leaks.

    Args:
      smashed: [n, ...], seen by the server.
      known: [k, ...], smashed data of `examples` [k, ...], which the attacker has: it may ask the client's layers, or
        be a client itself.
      ridge: > 0, relative to the mean square of a column.

    Returns: [n, ...], shaped as examples.

    Guarantees: exact behind an invertible affine layer, and no better than the mean where nothing was learnt
    (tests/adversary/test_smashed.py::test_inversion).

    References: He, Zhang and Lee 2019, section 4.3 (query-based inversion with a decoder).

    >>> x = jnp.array([[0.0], [1.0], [2.0]])
    >>> jnp.round(invert_smashed(3 * x[1:2] + 1, 3 * x + 1, x, ridge=1e-6), 3).tolist()
    [[1.0]]
    """
    if known.shape[:1] != examples.shape[:1] or known.shape[1:] != smashed.shape[1:]:
        validate.fail("known", f"smashed data of {len(examples)} examples, of shape {smashed.shape[1:]}", known.shape)
    seen, own = (x.reshape(x.shape[0], -1) for x in (smashed, known))
    wanted = examples.reshape(examples.shape[0], -1)
    middle, mean = own.mean(0), wanted.mean(0)
    own, seen = own - middle[None], seen - middle[None]
    square = own.T @ own
    scale = jnp.trace(square) / square.shape[0]
    lift = ridge * jnp.where(scale > 0, scale, 1) * jnp.eye(square.shape[0])
    decoder = jnp.linalg.solve(square + lift, own.T @ (wanted - mean[None]))
    return (mean[None] + seen @ decoder).reshape(smashed.shape[0], *examples.shape[1:])


def inversion_error(guess: Array, examples: Array) -> Array:
    """[] the squared error of rebuilt examples, over that of their mean: 0 is a leak of all, 1 of nothing.

    >>> float(inversion_error(jnp.array([1.0, 1.0]), jnp.array([0.0, 2.0])))
    1.0
    """
    centred = examples - examples.mean(0)[None] if examples.ndim > 1 else examples - examples.mean()
    return jnp.square(guess - examples).sum() / jnp.square(centred).sum()
