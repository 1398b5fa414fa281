"""Tables of sites: nothing lost, nothing leaked, and errors that name file and line."""

import jax
import numpy as np
import pytest

from fedjax_sim import InvalidType
from fedjax_sim.population.datasets.csv_sites import HOSPITALS, csv_sites, heart_disease
from tests.refusals import refused

client_of = jax.jit(lambda population, id: population.client(id))


def rows(population, id):
    data = client_of(population, np.int32(id))
    return {name: np.asarray(leaf)[np.asarray(data.mask)] for name, leaf in data.examples.items()}


def write_hospitals(folder, num=40, seed=0):
    rng = np.random.default_rng(seed)
    for k, name in enumerate(HOSPITALS):
        lines = []
        for i in range(num):
            cells = [40 + i, i % 2, 1 + i % 4, 120 + i, 200 + 10 * k, i % 2, i % 3, 150, 0, 1.5, 1 + i % 3, 0, 3, i % 5]
            cells = [str(cell) for cell in cells]
            for column in (3, 4, 5, 11, 12):
                cells[column] = "?" if rng.uniform() < 0.2 else cells[column]
            lines.append(",".join(cells))
        (folder / f"processed.{name}.data").write_text("\n".join(lines) + "\n")


def test_heart_disease_from_tiny_files(tmp_path):
    # Faults: hospitals out of order, a patient lost or in both parts, a one-hot column that is not one-hot.
    write_hospitals(tmp_path)
    data = heart_disease(directory=str(tmp_path))
    assert data.train.size == data.held_out.size == 4 and data.input_shape == (29,) and data.num_outputs == 1
    for i in range(4):
        train, test = rows(data.train, i), rows(data.held_out, i)
        ages = np.concatenate([train["x"][:, 0], test["x"][:, 0]])
        assert len(ages) == len(np.unique(ages)) == 40  # every patient of these files has another age
        assert abs(len(test["y"]) - 10) <= 1 and (train["y"].sum() + test["y"].sum()) == 32
        x = train["x"]
        for first, last in ((9, 13), (13, 16), (16, 19)):
            assert (x[:, first:last].sum(axis=1) == 1).all()
        assert set(np.unique(x[:, 19:22].sum(axis=1))) == {0, 1}  # thal is missing at times
        assert set(np.unique(x[:, 22:])) <= {0, 1}


def test_heart_disease_statistics_come_from_training_rows(tmp_path):
    # Fault: test rows that leak into median, mean or deviation: an outlier among them would move the training features.
    write_hospitals(tmp_path)
    before = heart_disease(directory=str(tmp_path))
    age = rows(before.train, 0)["x"][:, 0]
    ages = {i: (40 + i) for i in range(40)}
    pooled = np.concatenate([rows(before.train, i)["x"][:, :6] for i in range(4)])
    np.testing.assert_allclose(pooled[:, [0, 1, 2]].mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(pooled[:, [0, 1, 2]].std(axis=0), 1, atol=1e-5)
    order = np.argsort(np.concatenate([age, rows(before.held_out, 0)["x"][:, 0]]))
    tested = [i for i, position in enumerate(order) if position >= len(age)]  # sorted by age = by line
    path = tmp_path / "processed.cleveland.data"
    lines = path.read_text().splitlines()
    for i in tested:
        lines[i] = lines[i].replace(str(ages[i]), "900", 1)
    path.write_text("\n".join(lines))
    np.testing.assert_array_equal(rows(heart_disease(directory=str(tmp_path)).train, 0)["x"][:, 0], age)


def test_heart_disease_missing_values(tmp_path):
    # Faults: a cholesterol of 0 taken for a measurement; an indicator in the wrong column; a median per hospital.
    write_hospitals(tmp_path)
    path = tmp_path / "processed.va.data"
    cells = [line.split(",") for line in path.read_text().splitlines()]
    path.write_text("\n".join(",".join([*row[:4], "0", *row[5:]]) for row in cells))
    x = rows(heart_disease(directory=str(tmp_path)).train, 3)["x"]
    assert (x[:, 23] == 1).all()  # indicators: trestbps, chol, ...
    assert len(np.unique(x[:, 2])) == 1  # all imputed by one median
    assert 0 < (x[:, 22] == 1).mean() < 0.5
    before = [rows(heart_disease(directory=str(tmp_path)).train, i)["x"] for i in range(4)]
    for file in tmp_path.iterdir():  # the other code for a missing value
        file.write_text(file.read_text().replace("?", "-9.0"))
    for i in range(4):
        np.testing.assert_array_equal(rows(heart_disease(directory=str(tmp_path)).train, i)["x"], before[i])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,2,3", r"processed.hungarian.data:3: expected 14 columns, got 3"),
        (
            "40,1,1,120,200,0,0,150,0,x,1,0,3,0",
            r"processed.hungarian.data:3: expected a finite number or '\?' or '-9', got 'x'",
        ),
        ("40,1,1,120,200,0,0,150,0,nan,1,0,3,0", "finite number"),
        ("40,1,9,120,200,0,0,150,0,1,1,0,3,0", r"processed.hungarian.data:3 cp: expected one of"),
        ("40,1,1,120,200,0,0,150,0,1,1,0,3,7", "3 num: expected one of"),
        ("40,1,1,120,200,0,0,150,0,1,1,0,3,?", "3 num: expected one of"),
    ],
)
def test_heart_disease_errors_name_file_and_line(tmp_path, line, message):
    # Fault: a broken line that becomes a patient.
    write_hospitals(tmp_path)
    path = tmp_path / "processed.hungarian.data"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[3:]]))
    with pytest.raises(ValueError, match=message):
        heart_disease(directory=str(tmp_path))


def test_heart_disease_published_files(shared_data):
    # Fault: rows dropped because a value is missing: 920 patients, 509 with the disease.
    data = heart_disease(directory=str(shared_data / "heart_disease"))
    counts = [len(rows(data.train, i)["y"]) + len(rows(data.held_out, i)["y"]) for i in range(4)]
    positive = sum(rows(p, i)["y"].sum() for p in (data.train, data.held_out) for i in range(4))
    assert counts == [303, 294, 123, 200] and positive == 509


def write_sites(folder):
    for k, name in enumerate(("north", "south")):
        lines = ["age,outcome,dose"] + [f"{20 + i},{i % 3},{k + 0.1 * i}" for i in range(30)]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


def test_csv_sites(tmp_path):
    # Faults: the label left among the features, sites in the folder's order, rows lost, statistics per site.
    write_sites(tmp_path)
    data = csv_sites(directory=str(tmp_path), label="outcome")
    assert (data.train.size, data.input_shape, data.num_outputs) == (2, (2,), 3)
    pooled = np.concatenate([rows(data.train, i)["x"] for i in range(2)])
    np.testing.assert_allclose(pooled.mean(axis=0), 0, atol=1e-5)
    assert sum(len(rows(p, i)["y"]) for p in (data.train, data.held_out) for i in range(2)) == 60
    raw = csv_sites(directory=str(tmp_path), label="dose", task="regression", standardise=False)
    first = rows(raw.train, 0)
    np.testing.assert_allclose(first["y"][:, 0], 0.1 * (first["x"][:, 0] - 20), atol=1e-6)
    assert rows(raw.train, 1)["y"].min() >= 1


@pytest.mark.parametrize("mark, start", [(";", b""), ("\t", b""), ("|", b""), (" ", b""), (",", b"\xef\xbb\xbf")])
def test_csv_sites_in_other_styles(tmp_path, mark, start):
    """Faults: a delimiter, a byte order mark or a comment that becomes a part of the first column's name."""
    folder = tmp_path / "sites"
    folder.mkdir()
    write_sites(folder)
    plain = csv_sites(directory=str(folder), label="outcome")
    options = {"delimiter": {"|": "|", " ": "space"}.get(mark, "auto")}
    for path in folder.iterdir():
        lines = path.read_text().replace(",", mark * (1 + (mark == " "))).splitlines()
        path.write_bytes(start + "\r\n".join(["// of a ward, 2024", *lines[:3], "", " // again", *lines[3:]]).encode())
    data = csv_sites(directory=str(folder), label="outcome", comment="//", **options)
    for population, other in ((data.train, plain.train), (data.held_out, plain.held_out)):
        for i in range(2):
            for leaf, values in rows(other, i).items():
                np.testing.assert_array_equal(rows(population, i)[leaf], values)
    if mark == "|":
        with refused("label", hint="delimiter = '|'"):
            csv_sites(directory=str(folder), label="outcome", comment="//")


def test_missing_features(tmp_path):
    """By hand: one median and one indicator a column, of training rows. Faults: a code that is a number, -9 written as
    -9.0, a test row in the median, an indicator in another place, a missing label that is one."""
    lines = [f"{'?' if i % 5 == 0 else i};{i % 2};{-9.0 if i % 7 == 0 else 10 * i};{i}" for i in range(1, 41)]
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("\n".join(["age;sick;dose;row", *lines]))
    data = csv_sites(directory=str(tmp_path), label="sick", missing=["?", "-9"], standardise=False, task="binary")
    train = np.concatenate([rows(data.train, i)["x"] for i in range(2)])
    tested = np.concatenate([rows(data.held_out, i)["x"] for i in range(2)])
    assert data.input_shape == (5,) and len(train) + len(tested) == 80
    # Of 40 rows at each of two sites, 8 have no age and 5 no dose.
    assert data.notes == ("missing values, the median of training rows in their place: 16 of age, 10 of dose",)
    no_age, no_dose = (np.isin(train[:, 2] % every, 0) for every in (5, 7))
    medians = np.median(train[~no_age, 2]), np.median(10 * train[~no_dose, 2])
    for x in (train, tested):
        no_age, no_dose = (x[:, 2] % every == 0 for every in (5, 7))
        np.testing.assert_array_equal(x[:, 0], np.where(no_age, medians[0], x[:, 2]))
        np.testing.assert_array_equal(x[:, 1], np.where(no_dose, medians[1], 10 * x[:, 2]))
        np.testing.assert_array_equal(x[:, 3:], np.stack([no_age, no_dose], 1))
    with refused("a.csv:6", value="?", hint='missing = ["?"]'):
        csv_sites(directory=str(tmp_path), label="sick")
    with pytest.raises(ValueError, match="comment: expected the text"):
        csv_sites(directory=str(tmp_path), label="sick", comment="")
    with refused("missing", value="x", kind=InvalidType):
        csv_sites(directory=str(tmp_path), label="sick", missing="x")
    for code in ("-9", "?"):  # no label either
        (tmp_path / "c.csv").write_text(f"age;sick;dose;row\n1;4;2;3\n2;{code};2;3\n")
        with refused("c.csv:3 sick", value="none", rule="a label"):
            csv_sites(directory=str(tmp_path), label="sick", missing=["?", "-9"], task="regression")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age,outcome,dose\n1,0\n", "a_broken.csv:2: expected 3 columns"),
        ("age,outcome,dose\n1,0,\n", "a_broken.csv:2: expected a finite number"),
        ("age,outcome,dose\n1,0,inf\n", "a_broken.csv:2: expected a finite number"),
        ("age,outcome\n1,0\n", "north.csv:1: expected the header"),
        ("age,age,outcome\n1,0,1\n", "distinct, named columns"),
        ("age,outcome,dose\n", "a header and at least one row"),
        ("age,outcome,dose\n1,0.5,2\n", "integer label"),
        ("age,outcome,dose\n1,-1,2\n", "integer label"),
    ],
)
def test_broken_csv(tmp_path, text, message):
    # Fault: a cell that is silently imputed or dropped.
    write_sites(tmp_path)
    (tmp_path / "a_broken.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        csv_sites(directory=str(tmp_path), label="outcome")


def test_csv_folder_errors(tmp_path):
    # Fault: an empty federation, or a label that is not there.
    with pytest.raises(ValueError, match=r"folder with \.csv files"):
        csv_sites(directory=str(tmp_path), label="outcome")
    write_sites(tmp_path)
    with pytest.raises(ValueError, match="Did you mean 'outcome'"):
        csv_sites(directory=str(tmp_path), label="outcom")
    with pytest.raises(ValueError, match="existing folder"):
        csv_sites(directory=str(tmp_path / "none"), label="outcome")
