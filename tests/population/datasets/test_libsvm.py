"""Files of LIBSVM: every number is where the file says, and lines that say something else are named."""

import jax
import numpy as np
import pytest

from fedjax_sim.population.datasets.libsvm import libsvm

ROWS = """# four features
-1 1:0.5 3:-2 4:1e1 # a comment
+1 2:1
1  1:7   4:.25

-1
"""


client_of = jax.jit(lambda population, id: population.client(id))


def rows(population, id):
    data = client_of(population, np.int32(id))
    return {name: np.asarray(leaf)[np.asarray(data.mask)] for name, leaf in data.examples.items()}


def everybody(population):
    parts = [rows(population, i) for i in range(population.size)]
    return {leaf: np.concatenate([part[leaf] for part in parts]) for leaf in ("x", "y")}


def test_rows_and_labels(tmp_path):
    """By hand. Faults: features off by one, a row without features that is lost, labels -1 that are refused or swapped,
    test features of another width, a row at two clients."""
    path, test_path = tmp_path / "tiny.libsvm", tmp_path / "tiny.t"
    path.write_bytes(b"\xef\xbb\xbf" + ROWS.replace("\n", "\r\n").encode())
    test_path.write_text("1 2:3\n-1 5:1\n")
    options = {"path": str(path), "test_path": str(test_path), "num_clients": 2, "held_out_clients": 1}
    data = libsvm(**options)
    expected = {(0.5, 0, -2, 10, 0): 0, (0, 1, 0, 0, 0): 1, (7, 0, 0, 0.25, 0): 1, (0, 0, 0, 0, 0): 0}
    found = everybody(data.train)
    assert {tuple(x): y for x, y in zip(found["x"].tolist(), found["y"].tolist(), strict=True)} == expected
    assert (data.task, data.num_outputs, data.label_names, data.name) == ("binary", 1, ("-1", "1"), "tiny")
    assert data.test["x"].tolist() == [[0, 3, 0, 0, 0], [0, 0, 0, 0, 1]] and data.test["y"].tolist() == [1, 0]
    assert libsvm(**options, num_features=2).input_shape == (2,)
    assert libsvm(**options, first_index=0).input_shape == (6,)
    lines = [f"{2 + i % 3} 1:{i} 2:{-i}" for i in range(60)]
    path.write_text("\n".join(lines))
    data = libsvm(path=str(path), task="classification", num_clients=3, held_out_clients=2, partition="dirichlet")
    found = {leaf: np.concatenate([everybody(data.train)[leaf], data.test[leaf]]) for leaf in ("x", "y")}
    assert sorted(found["x"][:, 0].tolist()) == list(range(60)) and len(data.test["y"]) == 12
    np.testing.assert_array_equal(found["y"], found["x"][:, 0] % 3)
    assert data.label_names == ("2", "3", "4") and data.num_outputs == 3
    data = libsvm(path=str(path), task="regression", num_clients=3, held_out_clients=2)
    np.testing.assert_array_equal(data.test["y"][:, 0], 2 + data.test["x"][:, 0] % 3)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("1 1:1\n-1 2\n", {}, "bad.txt:2: expected index:value after the label, got '2'"),
        ("1 qid:3 1:1\n", {}, "files? with qid|Files with qid"),
        ("1 0:1\n", {}, "rising indices, from 1, got '0:1'. .* first_index = 0"),
        ("1 2:1 2:1\n", {}, "bad.txt:1: expected rising indices"),
        ("1 1:nan\n", {}, "bad.txt:1: expected a finite number, got 'nan'"),
        ("1 1:1e60\n-1 1:1\n", {"test_fraction": 0.5}, "finite number"),
        ("1,2 1:1\n", {}, "bad.txt:1: expected a finite number, got '1,2'"),
        ("1 1:1\n2 1:1\n3 1:1\n", {}, r"two labels, got \[1.0, 2.0, 3.0\]. Of more labels, task = 'classification'"),
        ("# nothing\n", {}, "bad.txt: expected at least one row"),
        ("1 1:1\n-1 1:1\n", {"task": "regression", "partition": "shards"}, "partition: expected one of 'iid'"),
        ("1 1:1\n-1 999999:1\n", {"max_bytes": 1000}, "path: expected at most 1,000 bytes.* max_bytes"),
        ("1 1:1\n-1 999999999:1\n", {}, "num_features: expected an integer"),
    ],
)
def test_broken_lines(tmp_path, text, options, message):
    """Faults: a number that is guessed, a feature that is there twice, a table that exhausts the memory."""
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises((ValueError, MemoryError), match=message):
        libsvm(path=str(path), **{"num_clients": 1, "held_out_clients": 0, "test_fraction": 0.4} | options)
