"""Bundled real data: who holds which row, and how skewed."""

import jax
import numpy as np
import pytest
from scipy import stats

from fedjax_sim.population.datasets.sklearn import breast_cancer, digits, digits_partition
from tests.calls import calls

clients_of = jax.jit(lambda population, ids: jax.vmap(population.client)(ids))


def clients(population, ids):
    data = clients_of(population, np.asarray(ids, np.int32))
    return {name: np.asarray(leaf) for name, leaf in data.examples.items()}, np.asarray(data.mask)


def keys(x):
    return {row.tobytes() for row in np.ascontiguousarray(x)}


@pytest.fixture(scope="module")
def small():
    return digits(num_clients=2000, seed=4)


def test_digits_clients(small):
    # Faults: test rows in training clients, sizes out of range, one Dirichlet draw for all clients, another alpha.
    examples, mask = clients(small.train, np.arange(2000))
    sizes = mask.sum(axis=1)
    assert sizes.min() == 20 and sizes.max() == 60  # each end is missed with p = (40/41)^2000 < 1e-21
    assert abs(sizes.mean() - 40) < 6 * 11.83 / np.sqrt(2000)
    held, held_mask = clients(small.held_out, np.arange(small.held_out.size))
    assert small.held_out.size == 200
    train_rows, test_rows = keys(examples["x"][mask]), keys(small.test["x"])
    assert not (train_rows & test_rows)
    assert keys(held["x"][held_mask]) <= test_rows
    # E[sum_c s_c^2] = (alpha + 1) / (10 alpha + 1) = 0.325 for alpha = 0.3; unbiased from n draws of labels.
    counts = np.stack([((examples["y"] == c) & mask).sum(axis=1) for c in range(10)], axis=1)
    agreement = (counts * (counts - 1)).sum(axis=1) / (sizes * (sizes - 1))
    error = agreement.std() / np.sqrt(2000)
    assert abs(agreement.mean() - 1.3 / 4) < 6 * error  # false alarms < 2e-9
    assert all(abs(agreement.mean() - (a + 1) / (10 * a + 1)) > 6 * error for a in (0.25, 0.36))


def test_digits_are_the_real_table(small):
    # Faults: pixels not scaled, labels against the wrong rows, a split that is not stratified.
    from sklearn.datasets import load_digits

    source = load_digits()
    label_of = {row.tobytes(): y for row, y in zip((source.data / 16).astype(np.float32), source.target, strict=True)}
    examples, mask = clients(small.train, np.arange(50))
    for x, y in zip(examples["x"][mask][:300], examples["y"][mask][:300], strict=True):
        assert label_of[x.tobytes()] == y
    np.testing.assert_allclose(np.bincount(small.test["y"]) / np.bincount(source.target), 0.2, atol=0.01)
    assert small.test["x"].dtype == np.float32 and small.test["y"].dtype == np.int32 and small.test["x"].max() <= 1


def test_digits_seed():
    # Fault: a seed that is ignored, or that only moves the split.
    first, again, other = (clients(digits(num_clients=50, seed=s).train, np.arange(50))[0]["x"] for s in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert first.shape != other.shape or not np.array_equal(first, other)


def test_a_hundred_thousand_clients_without_a_loop():
    # Fault: a Python loop over clients, seen by its calls.
    digits(num_clients=50)  # imports are calls too
    number, data = calls(lambda: digits(held_out_clients=0))
    assert number < 50_000 and data.train.size == 100_000 and data.held_out is None


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("partition", ["dirichlet", "iid", "shards"])
def test_partitions_hold_every_row_once(partition):
    # Faults: a row lost, twice, or in training and test.
    data = digits_partition(num_clients=20, partition=partition, held_out_clients=4, seed=1)
    examples, mask = clients(data.train, np.arange(20))
    held, held_mask = clients(data.held_out, np.arange(4))
    parts = np.concatenate([examples["x"][mask], held["x"][held_mask]])
    from sklearn.datasets import load_digits

    expected = sorted(row.tobytes() for row in (load_digits().data / 16).astype(np.float32))
    assert sorted(row.tobytes() for row in parts) == expected
    assert held_mask.sum() == len(data.test["y"])


def test_partition_option_changes_the_skew():
    # Fault: `partition` ignored: 2 shards give few labels per client, iid nearly all.
    labels = {}
    for partition in ("iid", "shards"):
        examples, mask = clients(digits_partition(num_clients=20, partition=partition).train, np.arange(20))
        rows = zip(examples["y"], mask, strict=True)
        labels[partition] = np.mean([len(np.unique(y[kept])) for y, kept in rows])
    assert labels["iid"] > 9 and labels["shards"] <= 4


def test_breast_cancer_is_the_real_table():
    # Faults: columns under other names, labels the other way round, a row lost.
    from sklearn.datasets import load_breast_cancer

    source = load_breast_cancer()
    data = breast_cancer(num_clients=1, held_out_clients=0, standardise=False)
    assert data.feature_names == tuple(source.feature_names) and data.label_names == tuple(source.target_names)
    examples, mask = clients(data.train, [0])
    rows = [(examples["x"][mask], examples["y"][mask]), (data.test["x"], data.test["y"])]
    found = sorted((x.tobytes(), int(y)) for part in rows for x, y in zip(*part, strict=True))
    table = zip(source.data.astype(np.float32), source.target, strict=True)
    assert found == sorted((x.tobytes(), int(y)) for x, y in table)


def test_breast_cancer_is_standardised():
    # Faults: statistics of all rows (then test and training rows together would have mean 0), or none.
    data = breast_cancer(num_clients=5, seed=2)
    examples, mask = clients(data.train, np.arange(5))
    x = examples["x"][mask].astype(np.float64)
    np.testing.assert_allclose(x.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(axis=0), 1, atol=1e-5)
    assert len(x) + len(data.test["y"]) == 569 and np.abs(data.test["x"].mean(axis=0)).max() > 1e-3
    low, high = stats.binom.ppf([1e-9, 1 - 1e-9], 569, 0.2)
    assert low <= len(data.test["y"]) <= high and data.input_shape == (30,)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: digits(num_clients=0), "num_clients"),
        (lambda: digits(alpha=0.0, num_clients=2), "alpha"),
        (lambda: digits(min_examples=5, max_examples=4, num_clients=2), "_examples"),
        (lambda: digits(test_fraction=1.0), "test_fraction"),
        (lambda: digits(test_fraction=1e-9), "test_fraction"),
        (lambda: digits_partition(partition="dirichlit"), "Did you mean 'dirichlet'"),
        (lambda: digits_partition(num_clients=0), "num_clients"),
        (lambda: breast_cancer(seed=-1), "seed"),
    ],
)
def test_wrong_input(build, message):
    # Fault: an option out of range that builds all the same.
    with pytest.raises((ValueError, TypeError), match=message):
        build()
