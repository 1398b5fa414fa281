"""Losses `(outputs, targets) -> dict` of per-example values, stable for any finite outputs.

A target outside its range gives a NaN loss instead of a plausible number, since traced code cannot raise an error.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim import tree
from fedjax_sim.types import Array
from fedjax_sim.validate import fail, one_of

__all__ = [
    "default_loss",
    "next_token_cross_entropy",
    "node_cross_entropy",
    "sigmoid_cross_entropy",
    "softmax_cross_entropy",
    "squared_error",
    "taylor_cross_entropy",
]


def _labels(targets: Array, shape: tuple[int, ...]) -> Array:
    """Integer class labels of the given shape, as int32."""
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        fail("targets", "integer class labels", targets.dtype, "Cast them: y.astype('int32').", TypeError)
    if targets.shape != shape:
        fail(
            "targets", f"labels of shape {shape}", targets.shape, "One integer per row of logits, not one-hot vectors."
        )
    return targets.astype(jnp.int32)


def _wide(x: Array) -> Array:
    """At least float32."""
    return x.astype(tree.at_least_float32(x.dtype))


def _cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """-log softmax(logits)[label] and whether the first largest logit is the label, over the last axis; NaN and wrong
    where a logit is NaN or infinity."""
    logits = _wide(logits)
    peak = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    shifted = logits - peak
    # A comparison with iota, not a gather: its transpose is a multiplication, where a gather's is a scatter.
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    chosen = jnp.where(classes == labels[..., None], shifted, 0).sum(axis=-1)
    loss = jnp.log(jnp.exp(shifted).sum(axis=-1)) - chosen
    in_range = (labels >= 0) & (labels < logits.shape[-1])
    # Not by argmax, which XLA:CPU does not vectorise: the label's logit is the largest, and none before it is. Its
    # maximum over many rows drops NaN; the loss of such a row is NaN.
    before = jnp.where(classes < labels[..., None], logits, -jnp.inf).max(axis=-1)
    correct = in_range & (chosen == 0) & (before < peak[..., 0]) & (loss == loss)
    return jnp.where(in_range, loss, jnp.nan), correct.astype(loss.dtype)


def softmax_cross_entropy(outputs: Array, targets: Array) -> dict[str, Array]:
    """Multi-class cross entropy: loss_i = log sum_c exp(z_ic) - z_i,y_i.

    Args:
      outputs: [n, C] logits.
      targets: [n] integer labels in [0, C); others give a NaN loss.

    Returns: "loss" [n] in nats, "accuracy" [n] (1 where the first largest logit is the label, and none is NaN or
    infinity).

    Guarantees: equals a float64 oracle, with gradient softmax - onehot, at logits up to 1e30
    (tests/models/test_losses.py::test_softmax_cross_entropy_against_float64).

    >>> import jax.numpy as jnp
    >>> softmax_cross_entropy(jnp.array([[0.0, 0.0], [1e30, 0.0]]), jnp.array([1, 0]))["accuracy"].tolist()
    [0.0, 1.0]
    """
    if outputs.ndim != 2:
        fail("outputs", "logits [n, classes]", outputs.shape)
    loss, accuracy = _cross_entropy(outputs, _labels(targets, outputs.shape[:1]))
    return {"loss": loss, "accuracy": accuracy}


def sigmoid_cross_entropy(outputs: Array, targets: Array) -> dict[str, Array]:
    """Binary cross entropy of one logit: loss_i = log(1 + exp(-s_i z_i)), s_i = 2 y_i - 1.

    Args:
      outputs: [n] or [n, 1] logits of label 1.
      targets: [n] or [n, 1] labels 0 or 1, of any dtype; others give a NaN loss.

    Returns: "loss" [n] in nats, "accuracy" [n] (a logit of exactly 0 predicts label 0).

    Guarantees: equals a float64 oracle at logits up to 1e30
    (tests/models/test_losses.py::test_sigmoid_cross_entropy_against_float64).

    >>> import jax.numpy as jnp
    >>> sigmoid_cross_entropy(jnp.array([1e30, -1e30]), jnp.array([1, 0]))["loss"].tolist()
    [0.0, 0.0]
    """
    logits, labels = _column("outputs", outputs), _column("targets", targets)
    if labels.shape != logits.shape:
        fail("targets", f"labels of shape {logits.shape}", targets.shape)
    positive = labels == 1
    loss = jax.nn.softplus(jnp.where(positive, -logits, logits))
    accuracy = ((logits > 0) == positive).astype(loss.dtype)
    return {"loss": jnp.where(positive | (labels == 0), loss, jnp.nan), "accuracy": accuracy}


def taylor_cross_entropy(outputs: Array, targets: Array) -> dict[str, Array]:
    """Binary cross entropy to second order around a logit of 0: log 2 - s_i z_i / 2 + z_i^2 / 8, s_i = 2 y_i - 1.

    Its derivative z_i / 4 - s_i / 2 is linear in z_i, so that parties who add encrypted scores can compute it.

    Args:
      outputs, targets: as in `sigmoid_cross_entropy`.

    Returns: "loss" [n], "accuracy" [n] as there.

    Guarantees: value, slope and curvature of `sigmoid_cross_entropy` at 0, from which it differs by at most z^4 / 192
    (tests/models/test_vertical.py::test_taylor).

    References: Hardy et al. 2017, section 4.1.

    >>> import jax.numpy as jnp
    >>> [round(float(x), 4) for x in taylor_cross_entropy(jnp.array([0.0, 1.0]), jnp.array([0, 1]))["loss"]]
    [0.6931, 0.3181]
    """
    exact = sigmoid_cross_entropy(outputs, targets)
    logits, labels = _column("outputs", outputs), _column("targets", targets)
    loss = jnp.log(2.0).astype(logits.dtype) - jnp.where(labels == 1, logits, -logits) / 2 + jnp.square(logits) / 8
    return {"loss": jnp.where((labels == 1) | (labels == 0), loss, jnp.nan), "accuracy": exact["accuracy"]}


def _column(name: str, x: Array) -> Array:
    if x.ndim not in (1, 2) or x.shape[1:] not in ((), (1,)):
        fail(name, "shape [n] or [n, 1]", x.shape, "A binary model has num_outputs=1.")
    return _wide(x).reshape(-1)


def squared_error(outputs: Array, targets: Array) -> dict[str, Array]:
    """Squared error, averaged over an example's output coordinates (no factor 1/2).

    Args:
      outputs: [n, ...], or [n, 1] for scalar targets.
      targets: the same shape, or [n]; any real dtype.

    Returns: "loss" [n], in squared units of the target.

    Guarantees: equals a float64 oracle and never broadcasts [n, 1] against [n]
    (tests/models/test_losses.py::test_squared_error_against_float64).

    >>> import jax.numpy as jnp
    >>> squared_error(jnp.array([[1.0], [2.0]]), jnp.array([0.0, 4.0]))["loss"].tolist()
    [1.0, 4.0]
    """
    if outputs.ndim == 0 or outputs.shape not in (targets.shape, targets.shape + (1,)):
        fail("targets", f"the outputs' shape {outputs.shape}", targets.shape, "One target per output coordinate.")
    error = _wide(outputs) - _wide(targets).reshape(outputs.shape)
    return {"loss": jnp.square(error).reshape(error.shape[0], -1).mean(axis=1)}


def next_token_cross_entropy(outputs: Array, targets: Array) -> dict[str, Array]:
    """Cross entropy of a sequence, averaged over its valid tokens.

    Args:
      outputs: [n, L, V] logits.
      targets: [n, L] integer tokens in [0, V); -1 = padding; others give a NaN loss.

    Returns: "loss" [n] in nats per token, "accuracy" [n], "weight" [n] = number of valid tokens; all are 0 for a
    sequence of padding only.

    Guarantees: padding, whatever its logits, changes neither values nor gradients, and all padding gives zeros
    (tests/models/test_losses.py::test_next_token_padding_changes_nothing).

    >>> import jax.numpy as jnp
    >>> values = next_token_cross_entropy(jnp.zeros((2, 3, 4)), jnp.array([[0, 1, -1], [-1, -1, -1]]))
    >>> [round(float(v), 4) for v in values["loss"]], values["weight"].tolist()
    ([1.3863, 0.0], [2.0, 0.0])
    """
    if outputs.ndim != 3:
        fail("outputs", "logits [n, length, vocabulary]", outputs.shape)
    targets = _labels(targets, outputs.shape[:2])
    valid = targets != -1
    # Replace the logits too: a NaN there would reach the gradient as 0 * NaN.
    loss, correct = _cross_entropy(jnp.where(valid[..., None], outputs, 0), jnp.where(valid, targets, 0))
    weight = valid.sum(axis=1).astype(loss.dtype)

    def mean(x: Array) -> Array:
        return jnp.where(valid, x, 0).sum(axis=1) / jnp.maximum(weight, 1)

    return {"loss": mean(loss), "accuracy": mean(correct), "weight": weight}


def node_cross_entropy(outputs: Array, targets: Array) -> dict[str, Array]:
    """Cross entropy of a graph, averaged over its labelled nodes; "weight" is their number.

    Args:
      outputs: [n, V, C] logits.
      targets: [n, V] integers in [0, C); -1 = no label; others give a NaN loss.

    Returns: "loss" [n] in nats a node, "accuracy" [n], "weight" [n]; all are 0 for a graph without labels.

    Guarantees: those of `next_token_cross_entropy`, which it is, with nodes in place of tokens.

    >>> import jax.numpy as jnp
    >>> node_cross_entropy(jnp.zeros((1, 3, 4)), jnp.array([[0, 1, -1]]))["weight"].tolist()
    [2.0]
    """
    return next_token_cross_entropy(outputs, targets)


def default_loss(task: str) -> Callable:
    """The usual loss of a data set's task: "classification", "binary", "regression", "next_token",
    "node_classification" or "graph_classification".

    Raises: ValueError: another task; the error names the nearest.

    >>> default_loss("regression").__name__
    'squared_error'
    """
    losses = {
        "classification": softmax_cross_entropy,
        "binary": sigmoid_cross_entropy,
        "regression": squared_error,
        "next_token": next_token_cross_entropy,
        "node_classification": node_cross_entropy,
        "graph_classification": softmax_cross_entropy,
    }
    one_of("task", task, losses)
    return losses[task]
