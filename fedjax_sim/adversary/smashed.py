"""Attacks on split learning: labels inferred from gradients at the cut, and examples rebuilt from smashed data."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import Array
from fedjax_sim.validate import Positive


def labels_of_logits(gradients: Array) -> Array:
    """Reads labels off the gradients of a softmax cross entropy at the logits.

    The gradient p - onehot(label) has a single negative entry, that of the label.

    Args:
      gradients: [n, classes], as a party received them.

    Returns: [n] int32 labels.

    Raises: ValueError for gradients of another rank.

    Guarantees: without noise every label is found (tests/adversary/test_smashed.py::test_labels_at_the_logits); under
    strong noise labels are found at chance level (::test_noise_hides_labels).

    References: Zhao, Mopuri and Bilen 2020 (iDLG), section 3.

    >>> labels_of_logits(jnp.array([[0.2, -0.9, 0.7]])).tolist()
    [1]
    """
    if gradients.ndim != 2:
        validate.fail("gradients", "[n, classes]", gradients.shape)
    return gradients.argmin(1).astype(jnp.int32)


def labels_by_direction(gradients: Array, known: Array, labels: Array) -> Array:
    """Guesses the label of each row: that of the known example whose gradient is most similar in direction.

    Gradients at a cut point in a direction that depends on the class. So a few examples with known labels reveal the
    labels of all rows.

    Args:
      gradients: [n, ...], the gradients at what was sent, as a party received them.
      known: [k, ...], the gradients of examples whose labels the party knows.
      labels: [k] integers, the labels of these examples.

    Returns: [n] labels.

    Raises: ValueError for known gradients of another shape, and for another number of labels.

    Guarantees: above chance level through a U-shaped cut, and at chance level under noise
    (tests/adversary/test_smashed.py::test_labels_through_the_middle).

    References: Li, Sun, Yang, Bie and Chen 2022, section 3 (direction attack, for two classes).

    >>> import jax
    >>> jax.jit(labels_by_direction)(jnp.array([[2.0, 0.1]]), jnp.eye(2), jnp.array([7, 8])).tolist()
    [7]
    """
    if known.shape[1:] != gradients.shape[1:] or labels.shape != known.shape[:1]:
        validate.fail("known", f"rows of shape {gradients.shape[1:]} with a label each", (known.shape, labels.shape))

    def unit(rows):
        rows = rows.reshape(rows.shape[0], -1)
        norms = jnp.sqrt(jnp.square(rows).sum(1, keepdims=True))
        return rows / jnp.where(norms > 0, norms, 1)

    return labels[(unit(gradients) @ unit(known).T).argmax(1)]


@validate.named_arguments
def invert_smashed(smashed: Array, known: Array, examples: Array, *, ridge: Positive = 1e-3) -> Array:
    """Rebuilds examples from their smashed data, with a decoder fitted to the attacker's own examples.

    The decoder is affine, and minimises the squared error plus ridge times its squared norm. Other decoders may rebuild
    more, so the result is a lower bound on the leak.

    Args:
      smashed: [n, ...], the smashed data that the server received.
      known: [k, ...], the smashed data of `examples`. The attacker may query the client's layers, or be a client
        itself.
      examples: [k, ...], the attacker's own examples.
      ridge: positive, relative to the mean square of a column.

    Returns: [n, ...] in the shape of examples.

    Raises: ValueError for smashed data and examples of shapes that do not match.

    Guarantees: exact behind an invertible affine layer, and no better than the mean if nothing was learnt
    (tests/adversary/test_smashed.py::test_inversion).

    References: He, Zhang and Lee 2019, section 4.3 (query-based inversion with a decoder).

    >>> import jax
    >>> x = jnp.array([[0.0], [1.0], [2.0]])
    >>> jnp.round(jax.jit(invert_smashed)(3 * x[1:2] + 1, 3 * x + 1, x, ridge=1e-6), 3).tolist()
    [[1.0]]
    """
    if known.shape[:1] != examples.shape[:1] or known.shape[1:] != smashed.shape[1:]:
        validate.fail("known", f"smashed data of {len(examples)} examples, of shape {smashed.shape[1:]}", known.shape)
    inputs, known_inputs = (x.reshape(x.shape[0], -1) for x in (smashed, known))
    targets = examples.reshape(examples.shape[0], -1)
    input_mean = known_inputs.mean(0)
    target_mean = targets.mean(0)
    known_inputs = known_inputs - input_mean[None]
    inputs = inputs - input_mean[None]
    # Ridge regression of the centred examples on their centred smashed data.
    gram = known_inputs.T @ known_inputs
    scale = jnp.trace(gram) / gram.shape[0]
    penalty = ridge * jnp.where(scale > 0, scale, 1) * jnp.eye(gram.shape[0])
    decoder = jnp.linalg.solve(gram + penalty, known_inputs.T @ (targets - target_mean[None]))
    return (target_mean[None] + inputs @ decoder).reshape(smashed.shape[0], *examples.shape[1:])


def inversion_error(guess: Array, examples: Array) -> Array:
    """Computes the squared error of rebuilt examples over that of the mean example, [].

    0 means that the examples leak completely, and 1 that the guess is no better than the mean example.

    Args:
      guess: [n, ...], the rebuilt examples.
      examples: [n, ...], the true examples.

    >>> float(inversion_error(jnp.array([1.0, 1.0]), jnp.array([0.0, 2.0])))
    1.0
    """
    centred = examples - examples.mean(0)[None] if examples.ndim > 1 else examples - examples.mean()
    return jnp.square(guess - examples).sum() / jnp.square(centred).sum()
