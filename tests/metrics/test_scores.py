"""Metrics of all scores and labels, against scikit-learn, float64 NumPy and exact integers."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as oracle

from fedjax_sim import metrics
from fedjax_sim.validate import InvalidArgument

PADDING = 7


def rows(kind: str, seed: int = 0, n: int = 400):
    """Returns (logits, labels, mask) of n rows with many ties, and of padding that holds anything, in between."""
    rng = np.random.default_rng(seed)
    classes = {"binary": 2, "two": 2, "several": 5}[kind]
    labels = rng.choice(classes, n, p=np.arange(1, classes + 1) / np.arange(1, classes + 1).sum())
    logits = np.round(rng.normal(size=(n, classes)) + 1.5 * np.eye(classes)[labels], 1).astype(np.float32)
    if kind == "binary":
        logits = logits[:, 1] - 0.3
    places = rng.permutation(n + PADDING)[:n]
    mask = np.zeros(n + PADDING, bool)
    mask[places] = True
    padded = np.full((n + PADDING, *logits.shape[1:]), np.nan, np.float32)
    padded_labels = np.full(n + PADDING, 99)
    padded[mask], padded_labels[mask] = logits, labels
    return (logits, labels), tuple(map(jnp.asarray, (padded, padded_labels, mask)))


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Returns the softmax in float64: [n, C]."""
    z = logits.astype(np.float64)
    z = np.stack([np.zeros_like(z), z], axis=1) if z.ndim == 1 else z
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def mean_over_classes(of_two, p: np.ndarray, labels: np.ndarray) -> float:
    """Returns the mean of a binary metric over classes, each against the rest; of two classes the second one's."""
    classes = [1] if p.shape[1] == 2 else range(p.shape[1])
    return float(np.mean([of_two(labels == c, p[:, c]) for c in classes]))


AGAINST = {
    "roc_auc": (metrics.roc_auc_score, partial(mean_over_classes, oracle.roc_auc_score)),
    "average_precision": (
        metrics.average_precision_score,
        partial(mean_over_classes, oracle.average_precision_score),
    ),
    "balanced_accuracy": (metrics.balanced_accuracy_score, lambda p, y: oracle.balanced_accuracy_score(y, p.argmax(1))),
} | {
    f"{name}_{average}": (
        partial(getattr(metrics, f"{name}_score"), average=average),
        lambda p, y, name=name, average=average: getattr(oracle, f"{name}_score")(
            y, p.argmax(1), average=average, zero_division=0
        ),
    )
    for name in ("f1", "precision", "recall")
    for average in ("macro", "weighted", "micro", None)
}


@pytest.mark.parametrize("kind", ["binary", "several"])
@pytest.mark.parametrize("name", AGAINST)
def test_against_scikit_learn(name, kind):
    compute, expected = AGAINST[name]
    (logits, labels), padded = rows(kind)
    # Rounded logits have ties: scikit-learn gets the same ones in float64.
    np.testing.assert_allclose(jax.jit(compute)(*padded), expected(probabilities(logits), labels), rtol=0, atol=1e-6)


def test_binary_averages_and_top_k_against_scikit_learn():
    (logits, labels), padded = rows("binary")
    for name in ("f1", "precision", "recall"):
        found = getattr(metrics, f"{name}_score")(*padded, average="binary")
        np.testing.assert_allclose(found, getattr(oracle, f"{name}_score")(labels, logits > 0), rtol=0, atol=1e-6)
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(300, 6)).astype(np.float32)
    labels = rng.integers(0, 6, 300)
    for k in (1, 3, 5):
        found = metrics.top_k_accuracy_score(jnp.asarray(scores), jnp.asarray(labels), k=k)
        expected = oracle.top_k_accuracy_score(labels, scores, k=k, labels=range(6))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_classes_that_no_row_has():
    # Class 2 is predicted once and has no row; class 3 is not met at all.
    logits = jnp.asarray(np.eye(4, dtype=np.float32)[[0, 1, 2, 0]])
    labels = np.array([0, 1, 1, 1])
    predictions = np.array([0, 1, 2, 0])
    for name in ("f1", "precision", "recall"):
        found = getattr(metrics, f"{name}_score")(logits, jnp.asarray(labels))
        expected = getattr(oracle, f"{name}_score")(labels, predictions, average="macro", zero_division=0)
        np.testing.assert_allclose(found, expected, atol=1e-6)
    # Recall's mean over classes with rows is another one.
    assert metrics.balanced_accuracy_score(logits, jnp.asarray(labels)) == pytest.approx((1 + 1 / 3) / 2)
    # AUC and average precision are over the classes that have rows, each against the rest.
    p = probabilities(np.asarray(logits))
    expected = np.mean([oracle.roc_auc_score(labels == c, p[:, c]) for c in (0, 1)])
    assert metrics.roc_auc_score(logits, jnp.asarray(labels)) == pytest.approx(expected, abs=1e-6)


def test_shares_of_nothing():
    """Fault: an F1 of 0 for rows of label 0 that are all taken for label 0."""
    logits, labels = jnp.array([-1.0, -2.0]), jnp.array([0, 0])
    scores = (metrics.f1_score, metrics.precision_score, metrics.recall_score)
    assert all(jnp.isnan(score(logits, labels, average="binary")) for score in scores)
    assert [score(logits, labels, average=None).tolist() for score in scores] == [[1.0, 0.0]] * 3
    assert [jnp.isnan(score(-logits, labels, average="binary")).item() for score in scores] == [False, False, True]


def test_confusion_matrix():
    (logits, labels), padded = rows("several")
    expected = oracle.confusion_matrix(labels, logits.argmax(1))
    np.testing.assert_array_equal(metrics.confusion_matrix(*padded), expected)


@pytest.mark.parametrize("kind", ["binary", "several"])
def test_probabilities_against_numpy(kind):
    (logits, labels), padded = rows(kind)
    p = probabilities(logits)
    squared = np.square(p - np.eye(p.shape[1])[labels]).sum(1).mean()
    expected = squared / 2 if kind == "binary" else squared
    np.testing.assert_allclose(metrics.brier_score(*padded), expected, rtol=0, atol=1e-6)
    confidence, right = p.max(1), p.argmax(1) == labels
    bins = np.ceil(confidence * 10) - 1
    gaps = [abs(right[bins == b].mean() - confidence[bins == b].mean()) * (bins == b).mean() for b in np.unique(bins)]
    found = metrics.expected_calibration_error(*padded, num_bins=10)
    np.testing.assert_allclose(found, sum(gaps), rtol=0, atol=1e-6)


def test_ranks_of_a_million_rows():
    # P N = 2.5e11, where int32 wraps, and counts of doubled ranks are beyond 2^24 for three in four rows' sums.
    n = 1_000_000
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, n)
    scores = rng.integers(0, 300_000, n) + 1000 * labels  # many ties
    order = np.sort(scores[labels == 0])
    positive = scores[labels == 1]
    doubled = np.searchsorted(order, positive, "left") + np.searchsorted(order, positive, "right")
    expected = int(doubled.astype(object).sum()) / (2 * len(order) * len(positive))
    padded = jnp.asarray(scores, jnp.float32), jnp.asarray(labels, jnp.int32)
    assert jax.jit(metrics.roc_auc_score)(*padded).item() == pytest.approx(expected, abs=3e-7)
    found = jax.jit(metrics.average_precision_score)(*padded).item()
    assert found == pytest.approx(oracle.average_precision_score(labels, scores), abs=1e-6)


def test_scores_of_clear_rows_are_no_ties():
    # Probabilities of 1 - 1e-9 and 1 - 1e-12 are both 1 in float32.
    logits = jnp.array([[0.0, 20.0], [0.0, 27.0], [0.0, 30.0]])
    assert metrics.roc_auc_score(logits, jnp.array([0, 1, 1])) == 1
    three = jnp.concatenate([logits, jnp.full((3, 1), -30.0)], axis=1)
    assert metrics.roc_auc_score(three, jnp.array([0, 1, 1])) == 1


def test_zeros_of_both_signs_are_equal():
    assert metrics.roc_auc_score(jnp.array([0.0, -0.0]), jnp.array([0, 1])) == 0.5
    assert metrics.roc_auc_score(jnp.array([-0.0, 0.0]), jnp.array([0, 1])) == 0.5


OF_CLASSES = [metrics.roc_auc_score, metrics.average_precision_score, metrics.f1_score]
OF_CLASSES += [metrics.balanced_accuracy_score, metrics.brier_score, metrics.expected_calibration_error]


@pytest.mark.parametrize("compute", OF_CLASSES)
def test_what_is_not_defined_is_nan(compute):
    logits, labels = jnp.array([1.0, -1.0, 2.0]), jnp.array([1, 0, 1])
    assert jnp.isfinite(compute(logits, labels))
    assert jnp.isnan(compute(logits, labels, jnp.zeros(3, bool)))  # no row
    assert jnp.isnan(compute(logits[:0], labels[:0]))
    for wrong in (jnp.nan, jnp.inf):  # of a diverged model
        assert jnp.isnan(compute(logits.at[0].set(wrong), labels))
        # In padding anything may stand.
        here = jnp.array([False, True, True])
        assert jnp.isfinite(compute(logits.at[0].set(wrong), labels, here))
    assert jnp.isnan(compute(logits, jnp.array([1, 0, 2])))  # no label
    assert jnp.isnan(compute(logits, jnp.array([1, 0, 0.5])))
    one_class = compute(logits, jnp.ones(3, int))
    assert jnp.isnan(one_class) == (compute in OF_CLASSES[:2])


def test_numbers_against_scikit_learn():
    rng = np.random.default_rng(0)
    y = rng.normal(size=(500, 3)).astype(np.float32)
    f = (y + rng.normal(size=y.shape) / 2).astype(np.float32)
    mask = np.arange(503) < 500
    f_padded, y_padded = (np.concatenate([x, np.full((3, 3), np.nan, np.float32)]) for x in (f, y))
    padded = tuple(map(jnp.asarray, (f_padded, y_padded, mask)))
    flat = f.ravel().astype(float), y.ravel().astype(float)
    expected = {
        metrics.root_mean_squared_error: oracle.root_mean_squared_error(*flat),
        metrics.mean_absolute_error: oracle.mean_absolute_error(*flat),
        metrics.r2_score: oracle.r2_score(flat[1], flat[0]),
    }
    for compute, value in expected.items():
        np.testing.assert_allclose(jax.jit(compute)(*padded), value, rtol=0, atol=1e-6)
        column = compute(jnp.asarray(f[:, :1]), jnp.asarray(y[:, 0]))
        assert column == compute(jnp.asarray(f[:, 0]), jnp.asarray(y[:, 0]))  # never [n, n]
        assert jnp.isnan(compute(jnp.zeros(0), jnp.zeros(0)))
    assert jnp.isnan(metrics.r2_score(jnp.arange(10.0), jnp.full(10, 0.1)))


def test_r2_far_from_zero():
    rng = np.random.default_rng(0)
    y = (1000 + rng.normal(size=100_000)).astype(np.float32)
    f = (y + rng.normal(size=y.shape) / 2).astype(np.float32)
    expected = oracle.r2_score(y.astype(float), f.astype(float))
    np.testing.assert_allclose(metrics.r2_score(jnp.asarray(f), jnp.asarray(y)), expected, rtol=0, atol=1e-6)


def test_wrong_arrays_are_refused():
    logits, labels = jnp.zeros((4, 3)), jnp.zeros(4, int)
    for argument, call in {
        "targets": lambda: metrics.roc_auc_score(logits, labels[:3]),
        "outputs": lambda: metrics.roc_auc_score(jnp.zeros((2, 2, 2)), labels[:2]),
        "mask": lambda: metrics.f1_score(logits, labels, jnp.ones(4)),
        "average": lambda: metrics.f1_score(logits, labels, average="samples"),
        "k": lambda: metrics.top_k_accuracy_score(logits, labels, k=4),
        "num_bins": lambda: metrics.expected_calibration_error(logits, labels, num_bins=0),
    }.items():
        with pytest.raises(InvalidArgument) as refused:
            call()
        assert refused.value.argument == argument
    with pytest.raises(InvalidArgument):  # of several classes no one is the positive one
        metrics.f1_score(logits, labels, average="binary")
    spec = jax.ShapeDtypeStruct(((1 << 24) + 1,), jnp.float32)
    with pytest.raises(InvalidArgument):
        jax.eval_shape(metrics.roc_auc_score, spec, spec)
