"""One table with many clients: rows keep their owners, and statistics their place."""

import jax
import numpy as np
import pytest

from fedjax_sim import population
from fedjax_sim.population import partitioners
from tests.refusals import refused

RNG = np.random.default_rng(0)
NUM_ROWS = 90
COLUMNS = {
    "row": np.arange(NUM_ROWS, dtype=float),  # tells rows apart in what is read
    "height": RNG.normal(170, 10, NUM_ROWS).round(3),
    "town": RNG.choice(["Ghent", "Lille", "Turin"], NUM_ROWS).astype(object),
    "user": RNG.choice(["u9", "u10", "u2"], NUM_ROWS, p=[0.6, 0.3, 0.1]).astype(object),
    "grade": RNG.choice(["low", "mid", "top"], NUM_ROWS).astype(object),
}


def csv_text(columns, delimiter=","):
    lines = [columns.keys(), *zip(*columns.values(), strict=True)]
    return "\n".join(delimiter.join(map(str, line)) for line in lines) + "\n"


client_of = jax.jit(lambda population, id: population.client(id))


def rows_of(data, id):
    """Returns the original numbers of client `id`'s rows, from the feature "row" that is not standardised."""
    client = client_of(data.train, np.int32(id))
    return np.asarray(client.examples["x"])[np.asarray(client.mask), 0].astype(int)


def test_rows_keep_their_clients():
    """Catches a row at another client, in both parts or in none, a test share of all rows, and a lost client."""
    data = population.from_table(
        COLUMNS, client="user", label="grade", features=["row"], standardise=False, test_fraction=0.3, seed=5
    )
    ids = sorted(set(COLUMNS["user"]))
    assert data.train.size == 3 and data.label_names == ("low", "mid", "top") and data.num_outputs == 3
    seen = []
    for id, name in enumerate(ids):
        rows = rows_of(data, id)
        assert (COLUMNS["user"][rows] == name).all()
        client = client_of(data.train, np.int32(id))
        labels = np.asarray(client.examples["y"])[np.asarray(client.mask)]
        np.testing.assert_array_equal(np.array(data.label_names)[labels], COLUMNS["grade"][rows].astype(str))
        # A share of each label of this client is its test part.
        for label in set(COLUMNS["grade"]):
            total = int(((COLUMNS["user"] == name) & (COLUMNS["grade"] == label)).sum())
            assert abs((COLUMNS["grade"][rows] == label).sum() - 0.7 * total) < 1
        held_out = client_of(data.held_out, np.int32(id))
        test_rows = np.asarray(held_out.examples["x"])[np.asarray(held_out.mask), 0].astype(int)
        assert (COLUMNS["user"][test_rows] == name).all()
        seen += [*rows, *test_rows]
    assert sorted(seen) == list(range(NUM_ROWS))
    assert len(data.test["y"]) + sum(len(rows_of(data, id)) for id in range(3)) == NUM_ROWS


def test_a_client_with_test_rows_alone_stays():
    """Catches clients that are renumbered when one of them has no training row."""
    columns = {"id": [1, 2, 2, 2], "x": [0.0, 1.0, 2.0, 3.0], "y": [0, 1, 0, 1]}
    data = population.from_table(columns, client="id", label="y", task="binary", test_fraction=0.6)
    assert data.train.size == 2 and data.train.count(0) == 0


def test_clients_of_test_rows_alone_are_held_out():
    """Catches users of a published test split who become clients without rows."""
    train = {"id": ["b", "a", "b"], "x": [1.0, 2.0, 3.0], "y": [0, 1, 1]}
    test = {"id": ["c", "a", "c"], "x": [4.0, 5.0, 6.0], "y": [1, 0, 0]}
    data = population.from_table(train, test=test, client="id", label="y", task="binary", standardise=False)
    assert data.train.size == 2 and np.asarray(data.train.sizes).tolist() == [1, 2]
    assert data.held_out.size == 2 and np.asarray(data.held_out.sizes).tolist() == [1, 2]


def test_statistics_come_from_training_rows():
    """Catches statistics, medians and categories that look at test rows, and an indicator that is lost."""
    train = {"u": ["a"] * 4, "x": ["1", "3", "?", "5"], "c": ["r", "s", "r", "r"], "y": [0, 1, 0, 1]}
    test = {"u": ["a"] * 3, "x": ["100", "?", "3"], "c": ["t", "s", "r"], "y": [1, 1, 0]}
    data = population.from_table(
        train, test=test, client="u", label="y", task="binary", categories=["c"], missing=["?"]
    )
    values = np.array([1.0, 3.0, 3.0, 5.0])  # the median of 1, 3, 5 stands for the missing one
    scale = (np.array([100.0, 3.0, 3.0]) - values.mean()) / values.std()
    expected = np.stack([scale, [0, 1, 0], [0, 0, 1], [0, 1, 0]], axis=1)  # x, x is missing, c is r, c is s
    np.testing.assert_allclose(data.test["x"], expected, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(data.train.client(0).examples["x"])[:4, 1], [0, 0, 1, 0])


def test_the_same_table_in_many_forms(tmp_path):
    """Catches a form whose columns are read in another order, or whose numbers or texts are read otherwise."""
    pandas = pytest.importorskip("pandas", reason="the extra `data` is not installed")
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    datasets = pytest.importorskip("datasets", reason="the extra `data` is not installed")
    path = tmp_path / "people.csv"
    path.write_text(csv_text(COLUMNS, ";"), encoding="utf-8")
    options = {"client": "user", "label": "grade", "categories": ["town"], "seed": 3}
    plain = population.from_table(COLUMNS, **options)
    as_lists = {name: values.tolist() for name, values in COLUMNS.items()}
    forms = [
        population.from_table(pandas.DataFrame(COLUMNS), **options),
        population.from_table(pyarrow.table(as_lists), **options),
        population.from_table(datasets.Dataset.from_dict(as_lists), **options),
        population.table(file=path, **options),
    ]
    for data in forms:
        assert data.label_names == plain.label_names and data.train.size == 3
        for leaf in ("x", "y"):
            np.testing.assert_array_equal(data.test[leaf], plain.test[leaf])
            for id in range(3):
                np.testing.assert_array_equal(
                    data.train.client(id).examples[leaf], plain.train.client(id).examples[leaf]
                )


def test_images_in_a_column():
    """Catches images whose bytes are not scaled, and a shape that is flattened."""
    images = RNG.integers(0, 256, (40, 5, 4), dtype=np.uint8)
    partition = partitioners.iid(num_clients=4)
    for column in (images, [image.tolist() for image in images], list(images)):
        data = population.from_table(
            {"image": column, "label": np.arange(40) % 2}, partition=partition, label="label", seed=1
        )
        assert data.input_shape == (5, 4) and data.train.size == 4
        are_bytes = getattr(column, "dtype", None) == np.uint8 or isinstance(column[0], np.ndarray)
        assert (data.test["x"].max() <= 1) == are_bytes == bool(data.notes)


def test_partitions_divide_training_rows():
    """Catches a partition of test rows too, a row lost, and one that ignores its options."""
    partition = partitioners.pathological(num_clients=9, classes_per_client=1, seed=2)
    data = population.from_table(
        COLUMNS, partition=partition, label="grade", features=["row"], standardise=False, seed=4
    )
    rows = [rows_of(data, id) for id in range(9)]
    assert all(len(set(COLUMNS["grade"][part])) == 1 for part in rows)
    everything = np.concatenate([*rows, data.test["x"][:, 0].astype(int)])
    assert sorted(everything) == list(range(NUM_ROWS)) and data.held_out is None


@pytest.mark.parametrize(
    "labels, task, classes, names",
    [
        ([0, 2, 1, 2], "classification", 3, None),
        ([-1, 1, 1, -1], "binary", 1, ("-1", "1")),
        (["10", "9", "10", "9"], "classification", 2, ("9", "10")),  # in the order of numbers
        ([3, 5, 3, 5], "classification", 2, ("3", "5")),
        (["yes", "no", "no", "yes"], "binary", 1, ("no", "yes")),
    ],
)
def test_labels(labels, task, classes, names):
    """Catches labels that are renumbered without a word, and texts in the order of nothing."""
    columns = {"x": [0.0, 1.0, 2.0, 3.0], "y": labels}
    data = population.from_table(columns, test=columns, partition=partitioners.iid(num_clients=2), label="y", task=task)
    assert (data.num_outputs, data.label_names) == (classes, names) and bool(data.notes) == (names is not None)
    if names is not None:
        assert [names[y] for y in data.test["y"]] == list(map(str, labels))


REFUSED = {
    "both": ({"client": "user", "partition": partitioners.iid(num_clients=2)}, "client: expected either"),
    "neither": ({}, "client: expected either client or partition, got 'neither'"),
    "unknown": ({"client": "usr"}, "client: expected one of .* got 'usr'. Did you mean 'user'"),
    "label is a feature": ({"client": "user", "features": ["grade"]}, "features: expected no label column"),
    "words": ({"client": "user"}, "people.csv:2 town: expected a finite number, got .* categories"),
    "classes": ({"client": "user", "num_classes": 2, "categories": ["town"]}, "label: expected 2 distinct labels"),
    "regression": ({"client": "user", "task": "regression", "categories": ["town"]}, "people.csv:2 grade: expected"),
    "category": ({"client": "user", "features": ["row"], "categories": ["town"]}, "categories: .*not among"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_their_place(name, tmp_path):
    options, words = REFUSED[name]
    path = tmp_path / "people.csv"
    path.write_text(csv_text(COLUMNS), encoding="utf-8")
    with pytest.raises((ValueError, TypeError), match=words):
        population.table(file=path, label="grade", **options)


@pytest.mark.parametrize(
    "changed, options, words",
    [
        ({"u": ["a", None, "a"] * 4}, {}, "source row 1 u: expected a client id"),
        ({"y": ["n", "?", "y"] * 4}, {"missing": ["?"]}, "source row 1 y: expected a label"),
        (
            {"x": [1.0, np.nan, 3.0] * 4},
            {},
            r"source row 1 x: expected a finite number, got nan.*missing = \[\"nan\"\]",
        ),
    ],
)
def test_missing_values_are_refused(changed, options, words):
    """Catches a client named "", a class of missing labels, and NaN that trains."""
    columns = {"u": ["a", "b", "a"] * 4, "x": [1.0, 2.0, 3.0] * 4, "y": [0, 1, 0] * 4}
    with pytest.raises(ValueError, match=words):
        population.from_table(columns | changed, client="u", label="y", **options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"test_fraction": 0.2}, "test_fraction: expected none beside a table of test rows, got 0.2"),
        ({"task": "binary", "num_classes": 2}, "num_classes: expected none with task = 'binary', got 2"),
    ],
)
def test_options_that_others_switch_off(options, words):
    """Catches a share of test rows, or a number of classes, that changes nothing."""
    columns = {"u": ["a"] * 4, "x": [1.0, 2.0, 3.0, 4.0], "y": [0, 1, 0, 1]}
    with pytest.raises(ValueError, match=words):
        population.from_table(columns, test=columns, client="u", label="y", **options)


def test_a_partition_by_labels_of_a_regression_is_refused_with_its_reason():
    """Catches words about one-hot labels for targets that are measured."""
    columns = {"x": [1.0, 2.0] * 9, "y": [0.5, 1.5, 2.5] * 6}
    parts = partitioners.dirichlet(num_clients=2, alpha=1.0)
    with refused("labels", hint="measured have no classes: iid"):
        population.from_table(columns, partition=parts, label="y", task="regression")


def test_nan_may_stand_for_a_missing_value():
    columns = {"u": ["a"] * 8, "x": [1.0, np.nan] * 4, "y": [0, 1] * 4}
    data = population.from_table(columns, test=columns, client="u", label="y", missing=["nan"])
    np.testing.assert_array_equal(data.test["x"][:, 1], [0, 1] * 4)
