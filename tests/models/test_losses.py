"""Losses against float64 oracles."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from fedjax_sim.models import (
    default_loss,
    next_token_cross_entropy,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
    squared_error,
)
from tests.refusals import refused

RNG = np.random.default_rng(0)
SCALES = np.array([1e-3, 1.0, 30.0, 1e4, 1e30, 1.0])[:, None]
LOGITS = np.float32(RNG.normal(size=(6, 5)) * SCALES)
LABELS = np.array([0, 4, 2, 1, 3, 2])


def compiled(loss, outputs, targets):
    return jax.jit(loss)(outputs, targets)


def gradient(loss, outputs, targets):
    return jax.jit(jax.grad(lambda z, y: loss(z, y)["loss"].sum()))(outputs, targets)


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_softmax_cross_entropy_against_float64(dtype):
    """Catches exp overflow, cancellation of lse - z_y at large logits, and labels of another dtype misread."""
    labels = LABELS.astype(dtype)
    z = LOGITS.astype(np.float64)
    got = compiled(softmax_cross_entropy, LOGITS, labels)
    np.testing.assert_allclose(got["loss"], -log_softmax(z, axis=1)[np.arange(6), LABELS], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(got["accuracy"], z.argmax(1) == LABELS)
    expected = softmax(z, axis=1) - np.eye(5)[LABELS]
    np.testing.assert_allclose(gradient(softmax_cross_entropy, LOGITS, jnp.asarray(labels)), expected, atol=1e-6)


def test_softmax_cross_entropy_of_shifted_logits():
    """Catches a loss that loses its digits where all logits are large."""
    z = np.float32(RNG.integers(-3, 3, (6, 5)))
    shifted = compiled(softmax_cross_entropy, z + np.float32(2**20), LABELS)["loss"]
    np.testing.assert_allclose(shifted, compiled(softmax_cross_entropy, z, LABELS)["loss"], rtol=1e-6)


@pytest.mark.optimised
@pytest.mark.parametrize("label_smaller", [False, True])
def test_accuracy_of_products(label_smaller):
    """Fault: logits that the compiler fuses with what follows and compares with logits that it rounded; every
    prediction of a model that ends with a product was counted as wrong."""
    rng = np.random.default_rng(0)
    x, scale = rng.normal(size=(64, 5)).astype(np.float32), rng.normal(size=5).astype(np.float32)
    products = x * scale
    labels = products.argmin(1) if label_smaller else products.argmax(1)
    found = jax.jit(lambda x, scale, y: softmax_cross_entropy(x * scale[None], y))(x, scale, labels)
    assert found["accuracy"].tolist() == [float(not label_smaller)] * 64


def test_accuracy_of_equal_logits_is_that_of_one_guess():
    """Catches ties counted as correct: an untrained zero model would look perfect."""
    accuracy = compiled(softmax_cross_entropy, np.zeros((5, 5), np.float32), np.arange(5))["accuracy"]
    assert accuracy.tolist() == [1, 0, 0, 0, 0]
    assert compiled(sigmoid_cross_entropy, np.zeros(2, np.float32), np.arange(2))["accuracy"].tolist() == [1, 0]


def test_sigmoid_cross_entropy_against_float64():
    """Catches overflow, a swapped label sign, and a wrong gradient at exactly 0."""
    z = np.float32([0.0, 0.0, 2.5, -2.5, 1e30, 1e30, -1e30, -1e30, 1e-8, -80.0])
    y = np.array([0, 1, 0, 1, 0, 1, 0, 1, 1, 0])
    expected = np.logaddexp(0, -(2.0 * y - 1) * z.astype(np.float64))
    sigmoid = 1 / (1 + np.exp(-np.clip(z.astype(np.float64), -700, 700)))
    for dtype in (np.int32, np.uint8, np.float32, np.bool_):
        got = sigmoid_cross_entropy(jnp.asarray(z)[:, None], jnp.asarray(y.astype(dtype)))
        np.testing.assert_allclose(got["loss"], expected, rtol=1e-6)
    np.testing.assert_array_equal(got["accuracy"], (z > 0) == (y == 1))
    np.testing.assert_allclose(gradient(sigmoid_cross_entropy, jnp.asarray(z), jnp.asarray(y)), sigmoid - y, atol=1e-7)


def test_squared_error_against_float64():
    """Catches [n, 1] - [n] broadcast to [n, n], a sum for a mean, and integer targets that wrap."""
    z, y = np.float32(RNG.normal(size=(6, 5))), np.float32(RNG.normal(size=(6, 5)))
    np.testing.assert_allclose(squared_error(jnp.asarray(z), jnp.asarray(y))["loss"], ((z - y) ** 2).mean(1), rtol=1e-6)
    column = squared_error(jnp.asarray(z[:, :1]), jnp.arange(6, dtype=jnp.uint8))["loss"]
    np.testing.assert_allclose(column, (z[:, 0] - np.arange(6)) ** 2, rtol=1e-6)
    with refused("targets", value=(6,), rule="(6, 5)"):
        squared_error(jnp.asarray(z), jnp.zeros(6))


TOKENS = np.array([[1, 3, -1, -1], [4, -1, 0, 2], [-1, -1, -1, -1]])
SEQUENCES = np.float32(RNG.normal(size=(3, 4, 5)) * 3)


def test_next_token_cross_entropy_against_float64():
    """Catches a mean over all L positions, and a weight that is not the number of valid tokens."""
    got = jax.device_get(compiled(next_token_cross_entropy, SEQUENCES, TOKENS))
    losses, hits = [], []
    for z, y in zip(SEQUENCES.astype(np.float64)[:2], TOKENS[:2], strict=True):
        valid = y != -1
        losses.append(-log_softmax(z[valid], axis=1)[np.arange(valid.sum()), y[valid]].mean())
        hits.append((z[valid].argmax(1) == y[valid]).mean())
    np.testing.assert_allclose(got["loss"], [*losses, 0], rtol=1e-6)
    np.testing.assert_allclose(got["accuracy"], [*hits, 0], rtol=1e-6)
    assert got["weight"].tolist() == [2, 3, 0]
    # Pooled by its weights, a metric is the mean over tokens.
    valid = TOKENS != -1
    pooled = (got["accuracy"] * got["weight"]).sum() / got["weight"].sum()
    np.testing.assert_allclose(pooled, (SEQUENCES.argmax(2) == TOKENS)[valid].mean(), rtol=1e-6)


@pytest.mark.parametrize("junk", [np.nan, np.inf, 1e30])
def test_next_token_padding_changes_nothing(junk):
    """Catches 0 * NaN at padded positions, in values and in gradients."""
    padded = TOKENS == -1
    dirty = np.where(padded[..., None], np.float32(junk), SEQUENCES)
    tokens = jnp.asarray(TOKENS)
    clean = compiled(next_token_cross_entropy, SEQUENCES, tokens)
    for name, value in compiled(next_token_cross_entropy, dirty, tokens).items():
        np.testing.assert_array_equal(value, clean[name])
    g = np.asarray(gradient(next_token_cross_entropy, jnp.asarray(dirty), tokens))
    np.testing.assert_array_equal(g, gradient(next_token_cross_entropy, jnp.asarray(SEQUENCES), tokens))
    assert (g[padded] == 0).all() and (g[~padded] != 0).any(axis=-1).all()


def test_special_tokens_are_no_words():
    """A model that always says "unknown" predicts no word. Catches an accuracy of 2/3 for it, special tokens that are
    right answers, special predictions that are left out of the count, and a loss that changes."""
    unknown, end, word = 3, 2, 4
    targets = np.array([[unknown, unknown, word, end], [word, 5, end, -1], [unknown, end, -1, -1]])
    special = (0, 1, end, unknown)

    def says(token):
        return np.zeros((3, 4, 6), np.float32) + 5 * (np.arange(6) == token).astype(np.float32)

    for token, correct, of_all in ((unknown, [0, 0, 0], [0.5, 0, 0.5]), (word, [1, 0.5, 0], [0.25, 1 / 3, 0])):
        values = compiled(partial(next_token_cross_entropy, special_tokens=special), says(token), targets)
        np.testing.assert_allclose(values["accuracy"], correct)
        np.testing.assert_allclose(values["accuracy_weight"], [1, 2, 0])
        np.testing.assert_allclose(values["accuracy_all_tokens"], of_all)
        plain = compiled(next_token_cross_entropy, says(token), targets)
        np.testing.assert_array_equal(values["loss"], plain["loss"])
        np.testing.assert_array_equal(values["weight"], plain["weight"])
        np.testing.assert_array_equal(values["accuracy_all_tokens"], plain["accuracy"])
    with refused("special_tokens", rule="without tokens"):
        default_loss("classification", special_tokens=(0,))


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (softmax_cross_entropy, (3, 4), [0, 4, -1]),
        (sigmoid_cross_entropy, (3,), [1, 2, -1]),
        (next_token_cross_entropy, (3, 1, 4), [[0], [4], [-2]]),
    ],
)
def test_targets_out_of_range_give_nan(loss, outputs, targets):
    """Catches a plausible number for a label that does not exist; the example beside it keeps its loss."""
    found = compiled(loss, np.zeros(outputs, np.float32), np.array(targets))
    assert np.isnan(found["loss"]).tolist() == [False, True, True]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_wrong(place, value):
    """Catches a diverged model that seems to learn: an argmax takes the first NaN for the largest logit."""
    z = np.float32([[0, 1, 2], [0, 1, 2]])
    z[1, place] = value
    for label in range(3):
        found = compiled(softmax_cross_entropy, z, np.full(2, label))
        assert np.isnan(found["loss"]).tolist() == [False, True]
        assert found["accuracy"].tolist() == [float(label == 2), 0]


@pytest.mark.optimised
def test_no_nan_among_many_rows_counts_as_right():
    """Catches the maximum of XLA:CPU over the last axis of many rows, which drops NaN."""
    z = np.tile(np.float32([1, np.nan]), (4_000, 1))
    found = jax.jit(softmax_cross_entropy)(z, jnp.zeros(4_000, jnp.int32))
    assert np.isnan(found["loss"]).all() and not found["accuracy"].any()


@pytest.mark.parametrize("task", ["classification", "binary", "regression", "next_token"])
def test_half_precision_outputs_give_float32_losses(task):
    """Catches log-sum-exp in bfloat16, which has three digits."""
    shape = {"classification": (6, 5), "binary": (6,), "regression": (6, 5), "next_token": (3, 2, 5)}[task]
    targets = np.zeros(shape if task == "regression" else shape[: 2 if task == "next_token" else 1], np.int32)
    outputs = LOGITS[[0, 1, 2, 3, 5, 5]].ravel()[: np.prod(shape)].reshape(shape).astype(jnp.bfloat16)
    loss = default_loss(task)
    got, wide = (compiled(loss, z, targets)["loss"] for z in (outputs, outputs.astype(np.float32)))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, wide)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: softmax_cross_entropy(jnp.zeros((2, 3)), jnp.zeros(2)), "targets: expected integer class labels"),
        (lambda: softmax_cross_entropy(jnp.zeros((2, 3)), jnp.zeros((2, 3), int)), "not one-hot"),
        (lambda: softmax_cross_entropy(jnp.zeros(2), jnp.zeros(2, int)), r"outputs: expected logits \[n, classes\]"),
        (lambda: sigmoid_cross_entropy(jnp.zeros((2, 3)), jnp.zeros(2)), "num_outputs=1"),
        (lambda: sigmoid_cross_entropy(jnp.zeros(2), jnp.zeros(3)), r"labels of shape \(2,\)"),
        (lambda: next_token_cross_entropy(jnp.zeros((2, 3)), jnp.zeros(2, int)), "vocabulary"),
        (lambda: default_loss("clasification"), "Did you mean 'classification'"),
    ],
)
def test_error_texts(call, message):
    """Catches shapes that would broadcast into a wrong number."""
    with pytest.raises((ValueError, TypeError), match=message):
        call()
