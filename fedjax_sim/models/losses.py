"""This module has losses `(outputs, targets) -> dict` of per-example values. They are stable for any finite outputs.

A target outside its range gives a NaN loss instead of a plausible number, since traced code cannot raise an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fedjax_sim import tree
from fedjax_sim.types import Array
from fedjax_sim.validate import fail, one_of


def _labels(targets: Array, shape: tuple[int, ...]) -> Array:
    """Returns integer class labels as int32, after a check of their type and shape."""
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        fail("targets", "integer class labels", targets.dtype, "Cast them: y.astype('int32').", TypeError)
    if targets.shape != shape:
        fail(
            "targets", f"labels of shape {shape}", targets.shape, "One integer per row of logits, not one-hot vectors."
        )
    return targets.astype(jnp.int32)


def _wide(x: Array) -> Array:
    """Casts `x` to float32 at least."""
    return x.astype(tree.at_least_float32(x.dtype))


def _cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Computes the loss log sum_c exp(z_c) - z_y over the last axis, and whether the prediction is correct.

    The prediction is the first of the largest logits. If a logit is NaN or infinity, the loss is NaN and the prediction
    is not correct.

    Args:
      logits: z, [..., C], of any floating dtype.
      labels: y, [...] int32. A label outside of [0, C) has a NaN loss, and its prediction is not correct.

    Returns: the loss [...] in nats, and [...] 1 for a correct prediction and 0 for another one. Both are float32, or
      wider if the logits are.
    """
    logits = _wide(logits)
    # A comparison with iota, not a gather: its transpose is a multiplication, where a gather's is a scatter.
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    places = labels[..., None]
    label_logit = jnp.where(classes == places, logits, 0).sum(axis=-1)
    # XLA:CPU does not vectorise argmax. So correct means: the label's logit is above all before it, and not below any
    # behind it. A test of equality with the largest logit would not do, as compilers compute logits anew for each
    # reader, and round them in several ways: a product is fused into a subtraction that follows.
    fixed = jax.lax.stop_gradient(logits)
    largest_before = jnp.where(classes < places, fixed, -jnp.inf).max(axis=-1)
    largest_behind = jnp.where(classes > places, fixed, -jnp.inf).max(axis=-1)
    # The loss does not depend on the shift, so the shift needs no gradient. It keeps exp from overflowing.
    peak = jnp.maximum(jnp.maximum(largest_before, largest_behind), jax.lax.stop_gradient(label_logit))
    loss = jnp.log(jnp.exp(logits - peak[..., None]).sum(axis=-1)) - (label_logit - peak)
    in_range = (labels >= 0) & (labels < logits.shape[-1])
    # The maximum over many rows drops NaN, but the loss of such a row is NaN.
    correct = in_range & (largest_before < label_logit) & (largest_behind <= label_logit) & (loss == loss)
    return jnp.where(in_range, loss, jnp.nan), correct.astype(loss.dtype)


def softmax_cross_entropy(outputs: Array, targets: Array) -> dict[str, Array]:
    """Computes the multi-class cross entropy: loss_i = log sum_c exp(z_ic) - z_i,y_i.

    Args:
      outputs: [n, C] logits.
      targets: [n] integer labels in [0, C). Other labels give a NaN loss.

    Returns: "loss" [n] in nats, and "accuracy" [n]. The accuracy is 1 if the first largest logit is the label, and no
    logit is NaN or infinity.

    Guarantees: equals a float64 oracle, with gradient softmax - onehot, at logits up to 1e30
    (tests/models/test_losses.py::test_softmax_cross_entropy_against_float64).

    >>> import jax, jax.numpy as jnp
    >>> jax.jit(softmax_cross_entropy)(jnp.array([[0.0, 0.0], [1e30, 0.0]]), jnp.array([1, 0]))["accuracy"].tolist()
    [0.0, 1.0]
    """
    if outputs.ndim != 2:
        fail("outputs", "logits [n, classes]", outputs.shape)
    loss, accuracy = _cross_entropy(outputs, _labels(targets, outputs.shape[:1]))
    return {"loss": loss, "accuracy": accuracy}


def sigmoid_cross_entropy(outputs: Array, targets: Array) -> dict[str, Array]:
    """Computes the binary cross entropy of one logit: loss_i = log(1 + exp(-s_i z_i)), with s_i = 2 y_i - 1.

    Args:
      outputs: [n] or [n, 1] logits of label 1.
      targets: [n] or [n, 1] labels 0 or 1, of any dtype. Other labels give a NaN loss.

    Returns: "loss" [n] in nats, and "accuracy" [n]. A logit of exactly 0 predicts label 0.

    Guarantees: equals a float64 oracle at logits up to 1e30
    (tests/models/test_losses.py::test_sigmoid_cross_entropy_against_float64).

    >>> import jax, jax.numpy as jnp
    >>> jax.jit(sigmoid_cross_entropy)(jnp.array([1e30, -1e30]), jnp.array([1, 0]))["loss"].tolist()
    [0.0, 0.0]
    """
    logits = _column("outputs", outputs)
    labels = _column("targets", targets)
    if labels.shape != logits.shape:
        fail("targets", f"labels of shape {logits.shape}", targets.shape)
    is_positive = labels == 1
    loss = jax.nn.softplus(jnp.where(is_positive, -logits, logits))
    accuracy = ((logits > 0) == is_positive).astype(loss.dtype)
    return {"loss": jnp.where(is_positive | (labels == 0), loss, jnp.nan), "accuracy": accuracy}


def taylor_cross_entropy(outputs: Array, targets: Array) -> dict[str, Array]:
    """Computes a second-order approximation of the binary cross entropy: log 2 - s_i z_i / 2 + z_i^2 / 8.

    It is the Taylor polynomial around a logit of 0, with s_i = 2 y_i - 1. Its derivative z_i / 4 - s_i / 2 is linear in
    the logit z_i, so parties who can only add encrypted scores can compute it.

    Args:
      outputs, targets: as in `sigmoid_cross_entropy`.

    Returns: "loss" [n] and "accuracy" [n], as in `sigmoid_cross_entropy`.

    Guarantees: it has value, slope and curvature of `sigmoid_cross_entropy` at 0, and differs by at most z^4 / 192
    (tests/models/test_vertical.py::test_taylor).

    References: Hardy et al. 2017, section 4.1.

    >>> import jax.numpy as jnp
    >>> [round(float(x), 4) for x in taylor_cross_entropy(jnp.array([0.0, 1.0]), jnp.array([0, 1]))["loss"]]
    [0.6931, 0.3181]
    """
    exact = sigmoid_cross_entropy(outputs, targets)
    logits = _column("outputs", outputs)
    labels = _column("targets", targets)
    loss = jnp.log(2.0).astype(logits.dtype) - jnp.where(labels == 1, logits, -logits) / 2 + jnp.square(logits) / 8
    return {"loss": jnp.where((labels == 1) | (labels == 0), loss, jnp.nan), "accuracy": exact["accuracy"]}


def _column(name: str, x: Array) -> Array:
    """Returns `x` [n] or [n, 1] as [n], in float32 at least."""
    if x.ndim not in (1, 2) or x.shape[1:] not in ((), (1,)):
        fail(name, "shape [n] or [n, 1]", x.shape, "A binary model has num_outputs=1.")
    return _wide(x).reshape(-1)


def squared_error(outputs: Array, targets: Array) -> dict[str, Array]:
    """Computes the squared error of each example, averaged over its output coordinates and without a factor 1/2.

    Args:
      outputs: [n, ...], or [n, 1] for scalar targets.
      targets: the same shape, or [n], of any real dtype.

    Returns: "loss" [n], in squared units of the target.

    Guarantees: equals a float64 oracle, and never broadcasts [n, 1] against [n]
    (tests/models/test_losses.py::test_squared_error_against_float64).

    >>> import jax.numpy as jnp
    >>> squared_error(jnp.array([[1.0], [2.0]]), jnp.array([0.0, 4.0]))["loss"].tolist()
    [1.0, 4.0]
    """
    if outputs.ndim == 0 or outputs.shape not in (targets.shape, targets.shape + (1,)):
        fail("targets", f"the outputs' shape {outputs.shape}", targets.shape, "One target per output coordinate.")
    error = _wide(outputs) - _wide(targets).reshape(outputs.shape)
    return {"loss": jnp.square(error).reshape(error.shape[0], -1).mean(axis=1)}


def next_token_cross_entropy(outputs: Array, targets: Array, *, special_tokens: Sequence[int] = ()) -> dict[str, Array]:
    """Computes the cross entropy of each sequence, averaged over its valid tokens.

    Args:
      outputs: [n, L, V] logits.
      targets: [n, L] integer tokens in [0, V), or -1 for padding. Other tokens give a NaN loss.
      special_tokens: tokens that stand for no word, such as an unknown word or an end (`FederatedData.special_tokens`).
        The accuracy leaves them out as targets, as a model that always says "unknown" predicts no word. As predictions
        of words they are wrong.

    Returns: "loss" [n] in nats per token, "accuracy" [n], and "weight" [n], the number of valid tokens. All are 0 for a
    sequence of padding only. With special tokens also "accuracy_weight" [n], the number of words, and
    "accuracy_all_tokens" [n], over all valid tokens. The loss is over all valid tokens in any case.

    Guarantees: padding, whatever its logits, changes neither values nor gradients, and a sequence of padding has zeros
    (tests/models/test_losses.py::test_next_token_padding_changes_nothing). Special tokens are no words
    (tests/models/test_losses.py::test_special_tokens_are_no_words).

    References: Reddi et al., Adaptive federated optimization, 2021, appendix C (accuracy without out-of-vocabulary and
      end tokens).

    >>> import jax, jax.numpy as jnp
    >>> values = jax.jit(next_token_cross_entropy)(jnp.zeros((2, 3, 4)), jnp.array([[0, 1, -1], [-1, -1, -1]]))
    >>> [round(float(v), 4) for v in values["loss"]], values["weight"].tolist()
    ([1.3863, 0.0], [2.0, 0.0])
    """
    if outputs.ndim != 3:
        fail("outputs", "logits [n, length, vocabulary]", outputs.shape)
    targets = _labels(targets, outputs.shape[:2])
    valid = targets != -1
    # The logits of padding are replaced too. A NaN among them would reach the gradient as 0 * NaN.
    loss, correct = _cross_entropy(jnp.where(valid[..., None], outputs, 0), jnp.where(valid, targets, 0))
    weight = valid.sum(axis=1).astype(loss.dtype)

    def mean(x: Array) -> Array:
        # A sequence of padding only divides 0 by 1.
        return jnp.where(valid, x, 0).sum(axis=1) / jnp.maximum(weight, 1)

    values = {"loss": mean(loss), "accuracy": mean(correct), "weight": weight}
    if not special_tokens:
        return values
    is_word = valid & ~jnp.isin(targets, jnp.asarray(special_tokens, targets.dtype))
    num_words = is_word.sum(axis=1).astype(loss.dtype)
    of_words = jnp.where(is_word, correct, 0).sum(axis=1) / jnp.maximum(num_words, 1)
    return values | {"accuracy": of_words, "accuracy_weight": num_words, "accuracy_all_tokens": values["accuracy"]}


def node_cross_entropy(outputs: Array, targets: Array) -> dict[str, Array]:
    """Computes the cross entropy of each graph, averaged over its labelled nodes.

    It is `next_token_cross_entropy` with nodes instead of tokens.

    Args:
      outputs: [n, V, C] logits.
      targets: [n, V] integers in [0, C), or -1 for a node without a label. Other labels give a NaN loss.

    Returns: "loss" [n] in nats per node, "accuracy" [n], and "weight" [n], the number of labelled nodes. All are 0 for
    a graph without labels.

    Guarantees: nodes without labels, whatever their logits, change neither values nor gradients, since tokens of
    padding in `next_token_cross_entropy` do not (tests/models/test_losses.py::test_next_token_padding_changes_nothing).

    >>> import jax, jax.numpy as jnp
    >>> jax.jit(node_cross_entropy)(jnp.zeros((1, 3, 4)), jnp.array([[0, 1, -1]]))["weight"].tolist()
    [2.0]
    """
    return next_token_cross_entropy(outputs, targets)


def default_loss(task: str, *, special_tokens: Sequence[int] = ()) -> Callable:
    """Returns the usual loss for the task of a data set.

    Args:
      task: "classification", "binary", "regression", "next_token", "node_classification" or "graph_classification".
      special_tokens: as in `next_token_cross_entropy`; () for other tasks.

    Raises: ValueError for another task. The error names the most similar task.

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
    if not special_tokens:
        return losses[task]
    if task != "next_token":
        fail("special_tokens", "() for a task without tokens", special_tokens)
    return functools.partial(next_token_cross_entropy, special_tokens=tuple(special_tokens))
