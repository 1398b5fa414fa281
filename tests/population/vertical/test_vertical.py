"""Columns split over parties: whole rows, missing ones, and errors."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_sim import population
from fedjax_sim.population import align_exact, breast_cancer, from_sites, joined, with_parties
from tests.refusals import refused


def _data(num_clients=2, rows=40, width=5):
    """Row r of client i holds (1000 i + r) in all columns, and its label follows from it."""

    def client(i):
        numbers = 1000.0 * i + np.arange(rows)
        return {"x": np.repeat(numbers[:, None], width, 1) + np.arange(width) / 8, "y": numbers.astype(int) % 2}

    train = {f"site {i}": client(i) for i in range(num_clients)}
    return from_sites(train, {"site 0": client(0)}, task="binary", num_outputs=1, name="numbers")


client_of = jax.jit(lambda population, id: population.client(id))


def _rows(data, id):
    held = client_of(data.train, np.int32(id))
    return {name: np.asarray(leaf)[np.asarray(held.mask)] for name, leaf in held.examples.items()}


def test_joined():
    """Catches rows of one party beside another individual's, and labels of another order."""
    found = align_exact([["a", "b", "c", "d"], ["d", "x", "b"], ["b", "d", "a"]])
    features = [np.array([[1.0], [2], [3], [4]]), np.array([[40.0], [0], [20]]), np.array([[200.0], [400], [100]])]
    rows = joined(features, np.array([1, 2, 3, 4]), found)
    assert [part[:, 0].tolist() for part in rows["x"]] == [[2, 4], [20, 40], [200, 400]] and rows["y"].tolist() == [
        2,
        4,
    ]
    with pytest.raises(ValueError, match=r"features\[1\]"):
        joined([features[0], features[1][:1], features[2]], np.arange(4), found)
    with pytest.raises(ValueError, match=r"features\[1\]: expected a table"):  # one column [n] became [n, n]
        joined([features[0], features[1][:, 0], features[2]], np.arange(4), found)
    with refused("features[0]", rule="4 rows"):
        joined([np.ones((5, 1)), *features[1:]], np.arange(4), found)
    for wrong, words in ((np.array([["a"]] * 4), "numbers, got 'str32'"), (np.full((4, 1), np.nan), "finite")):
        with pytest.raises(ValueError, match=rf"features\[0\]: expected {words}"):
            joined([wrong, *features[1:]], np.arange(4), found)
    with pytest.raises(TypeError, match="features: expected a list of tables"):
        joined(None, np.arange(4), found)
    with pytest.raises(TypeError, match="alignment: expected an Alignment"):
        joined(features, np.arange(4), found.links)
    with pytest.raises(ValueError, match="y: expected the 4 rows"):
        joined(features, None, found)
    with pytest.raises(ValueError, match="y: expected the 4 rows"):
        joined(features, np.arange(9), found)
    with pytest.raises(ValueError, match="each of 3 parties"):
        joined(features[:2], np.arange(4), found)


def test_missing_overlap():
    """Catches a fill with somebody else's row (an index of -1 is the last one)."""
    found = align_exact([["a", "b"], ["b", "x"]])
    rows = joined([np.array([[1.0], [2]]), np.array([[20.0], [99]])], np.array([5, 6]), found, missing="zeros")
    assert [part[:, 0].tolist() for part in rows["x"]] == [[1, 2], [0, 20]] and rows["y"].tolist() == [5, 6]


@pytest.mark.parametrize("alignment", ["exact", "keyed", "diffie_hellman", "similar"])
def test_rows_stay_whole(alignment):
    """Every row's columns and label are one individual's, and as many as all parties know."""
    if alignment == "diffie_hellman":
        pytest.importorskip("cryptography", reason="an extra: secagg")
    data = _data()
    split = with_parties(data, num_parties=3, overlap=0.6, alignment=alignment)
    assert split.columns == (2, 2, 1) and split.input_shape == (5,) and split.train.size == 2
    for id in range(2):
        rows = _rows(split, id)
        numbers = rows["x"][:, 0]
        np.testing.assert_array_equal(rows["x"], numbers[:, None] + np.arange(5, dtype=np.float32) / 8)
        np.testing.assert_array_equal(rows["y"], numbers.astype(int) % 2)
        assert len(set(numbers)) == len(numbers) and 40 - 2 * 16 <= len(numbers) <= 24
    everybody = with_parties(data, widths=[4, 1], overlap=0.5, missing="zeros")
    rows = _rows(everybody, 1)
    assert everybody.columns == (4, 1) and len(rows["y"]) == 40 and (rows["x"][:, 4] == 0).sum() == 20


def test_typing_errors_cost_rows():
    """With errors in every name a strict threshold finds few, and a lenient one nearly all."""
    data = _data(1)
    full = with_parties(data, alignment="similar", typo_rate=0.5, threshold=0.75, seed=3)
    some = with_parties(data, alignment="similar", typo_rate=0.5, threshold=0.99, seed=3)
    assert len(_rows(full, 0)["y"]) == 40 and 10 <= len(_rows(some, 0)["y"]) <= 30


def test_what_cannot_be_split_is_refused():
    data = _data()
    for options, name in (
        ({"num_parties": 6}, "num_parties"),
        ({"widths": [2, 2]}, "widths"),
        ({"widths": [5, 0]}, "widths"),
        ({"overlap": 0.0}, "overlap"),
        ({"alignment": "guess"}, "alignment"),
        ({"missing": "mean"}, "missing"),
        ({"typo_rate": 0.1}, "typo_rate"),
    ):
        with pytest.raises(ValueError, match=name):
            with_parties(data, **options)
    with pytest.raises(TypeError, match="FederatedData"):
        with_parties(data.train)
    with pytest.raises(ValueError, match="nobody split"):
        with_parties(with_parties(data))
    images = population.synthetic_images(num_clients=3, examples_per_client=4)
    if len(images.input_shape) > 1:
        with pytest.raises(ValueError, match="in columns"):
            with_parties(images)


def test_real_columns():
    """Breast cancer over three parties: the rows of the data set itself."""
    plain = breast_cancer(num_clients=1, partition="iid")
    split = with_parties(plain, num_parties=3)
    one, other = _rows(plain, 0), _rows(split, 0)
    np.testing.assert_array_equal(np.sort(one["x"][:, 0]), np.sort(other["x"][:, 0]))
    assert split.columns == (10, 10, 10) and len(one["y"]) == len(other["y"])
