"""Loaders of local files: nothing lost, nothing leaked, and errors that name file and line."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.population.federated_data import from_sites
from fedjax_sim.population.loaders import leaf, tff_hdf5
from fedjax_sim.population.tabular import HOSPITALS, csv_sites, heart_disease
from fedjax_sim.population.text import shakespeare, speeches


def rows(population, id):
    data = population.client(jnp.int32(id))
    return {name: np.asarray(leaf)[np.asarray(data.mask)] for name, leaf in data.examples.items()}


# Sites ----------------------------------------------------------------------------------------------------------------


def site(n, first=0.0):
    return {"x": first + np.arange(2.0 * n).reshape(n, 2), "y": np.arange(n) % 2}


def test_sites_keep_rows():
    # Faults: offsets off by one, rows of neighbours, an empty client that shifts the others.
    sizes = {"a": 2, "b": 0, "c": 5}
    train = {id: site(n, 100 * i) for i, (id, n) in enumerate(sizes.items())}
    data = from_sites(train, {"a": site(0), "c": site(3)}, task="binary", num_outputs=1, name="toy")
    for i, id in enumerate(sizes):
        np.testing.assert_array_equal(rows(data.train, i)["x"], train[id]["x"])
    assert data.held_out.size == 1 and len(data.test["y"]) == 3
    assert data.test["x"].dtype == np.float32 and data.test["y"].dtype == np.int32


@pytest.mark.parametrize(
    ("client", "options", "message"),
    [
        ({"x": np.ones((2, 2)), "y": [0, 2]}, {}, r"train\['a'\].y\[1\]: expected an integer label in \[0, 1\]"),
        ({"x": np.ones((2, 2)), "y": [0, 0.5]}, {}, "integer label"),
        ({"x": np.ones((2, 2)), "y": [0, np.nan]}, {}, "integer label"),
        ({"x": np.array([[1, 2], [3, np.nan]]), "y": [0, 1]}, {}, r"train\['a'\].x\[1, 1\]: expected a finite number"),
        ({"x": np.full((2, 2), 1e300), "y": [0, 1]}, {}, "finite number"),
        ({"x": np.ones((3, 2)), "y": [0, 1]}, {}, "as many labels as examples"),
        ({"x": np.array(["a", "b"]), "y": [0, 1]}, {}, "numbers in rows"),
        ({"x": np.ones((2, 2)), "y": [-1, 1]}, {"task": "classification", "num_outputs": 2}, "integer label"),
        ({"x": np.ones((2, 2)), "y": np.ones((2, 3))}, {"task": "regression"}, "1 targets"),
        ({"x": np.array([[1, 9]]), "y": [[1, 2]]}, {"task": "next_token", "num_outputs": 3}, "integer label"),
        ({"x": np.ones((2, 2)), "y": [0, 1]}, {"task": "binery"}, "Did you mean 'binary'"),
    ],
)
def test_broken_examples_are_refused(client, options, message):
    # Fault: a wrong number that looks right: labels out of range train without a word.
    good = {"x": np.asarray(client["x"])[:1], "y": np.asarray(client["y"])[:1]}
    with pytest.raises((ValueError, TypeError), match=message):
        from_sites({"a": client}, {"a": good}, **{"task": "binary", "num_outputs": 1, "name": "toy", **options})


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ({}, {"a": site(1)}, "at least one client"),
        ({"a": site(1)}, {"a": site(0)}, "at least one test row"),
        ({"../a": site(1)}, {"a": site(1)}, "no path"),
        ({"a": site(1), "b": {"x": np.ones((1, 3)), "y": [0]}}, {"a": site(1)}, r"train\['b'\].x: expected examples of"),
    ],
)
def test_broken_sites_are_refused(train, test, message):
    # Fault: an empty or ragged federation that fails later, inside a compiled round.
    with pytest.raises((ValueError, TypeError), match=message):
        from_sites(train, test, task="binary", num_outputs=1, name="toy")


# Heart disease --------------------------------------------------------------------------------------------------------


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
    # Faults: a cholesterol of 0 taken for a measurement; an indicator in the wrong column; a median that sees test rows.
    write_hospitals(tmp_path)
    path = tmp_path / "processed.va.data"
    cells = [line.split(",") for line in path.read_text().splitlines()]
    path.write_text("\n".join(",".join([*row[:4], "0", *row[5:]]) for row in cells))
    x = rows(heart_disease(directory=str(tmp_path)).train, 3)["x"]
    assert (x[:, 23] == 1).all()  # indicators: trestbps, chol, ...
    assert len(np.unique(x[:, 2])) == 1  # all imputed by one median
    assert 0 < (x[:, 22] == 1).mean() < 0.5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,2,3", r"processed.hungarian.data:3: expected 14 columns, got 3"),
        ("40,1,1,120,200,0,0,150,0,x,1,0,3,0", r"processed.hungarian.data:3: expected a finite number or '\?', got 'x'"),
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


# CSV ------------------------------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="folder with .csv files"):
        csv_sites(directory=str(tmp_path), label="outcome")
    write_sites(tmp_path)
    with pytest.raises(ValueError, match="Did you mean 'outcome'"):
        csv_sites(directory=str(tmp_path), label="outcom")
    with pytest.raises(ValueError, match="existing folder"):
        csv_sites(directory=str(tmp_path / "none"), label="outcome")


# Text -----------------------------------------------------------------------------------------------------------------

PLAY = "Ann:\nHello there,\nfriend.\n\nBob:\n\nCat:\nWho: is it\n\nstill me.\n\nAnn:\nBye!\n\nDan:\nx\n"


def text_of(data, i, parts):
    """A role's text: its first character, then every target that is no padding."""
    first = data.vocabulary[rows(data.train, i)["x"][0, 0]]
    targets = np.concatenate([part["y"].reshape(-1) for part in parts])
    return first + "".join(data.vocabulary[code] for code in targets if code >= 0)


def check_roles(data, roles):
    """Every role's text from training and held-out windows, and inputs that are the targets one step earlier."""
    held = 0
    for i, text in enumerate(roles.values()):
        train = rows(data.train, i)
        parts = [train]
        if len(text) - max(len(text) - int(0.2 * len(text)), 2):
            parts.append(rows(data.held_out, held))
            held += 1
        assert text_of(data, i, parts) == text
        x, y = train["x"].reshape(-1), train["y"].reshape(-1)
        valid = (y >= 0).sum()
        assert (y[valid:] == -1).all() and (x[valid:] == 0).all() and (x[:valid] > 0).all()
        np.testing.assert_array_equal(x[1:valid], y[: valid - 1])
    assert data.held_out.size == held


def test_no_character_is_lost(tmp_path):
    # Faults: the last partial window dropped, a window boundary that skips a target, a colon or an empty line inside a
    # speech taken for a role, the first test character never predicted.
    roles = speeches(PLAY)
    assert roles == {"Ann": "Hello there,\nfriend.\nBye!\n", "Cat": "Who: is it\nstill me.\n", "Dan": "x\n"}
    (tmp_path / "input.txt").write_text(PLAY)
    for length in (1, 4, 7, 100):
        data = shakespeare(directory=str(tmp_path), sequence_length=length)
        assert data.input_shape == (length,) and data.num_outputs == len(data.vocabulary)
        check_roles(data, roles)
    assert shakespeare(directory=str(tmp_path), min_characters=20).train.size == 2


def test_published_shakespeare_is_complete(shared_data):
    # Fault: as above, on the real text, whose roles sum to its length less headings and empty lines.
    folder = shared_data / "shakespeare"
    roles = speeches((folder / "input.txt").read_text())
    data = shakespeare(directory=str(folder))
    sample = {name: text for name, text in roles.items()}
    assert data.train.size == len(sample) > 200
    train, test = np.asarray(data.train.examples["y"]), data.test["y"]
    assert (train >= 0).sum() + (test >= 0).sum() == sum(len(text) - 1 for text in roles.values())
    offsets = np.asarray(data.train.offsets)
    y = train[offsets[0] : offsets[1]].reshape(-1)
    text = next(iter(roles.values()))
    assert "".join(data.vocabulary[c] for c in y if c >= 0) == text[1 : len(text) - int(0.2 * len(text))]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("No role here\n", {}, "line 1: expected a role"),
        ("", {}, "a role with at least"),
        (PLAY, {"min_characters": 1000}, "a role with at least 1000"),
        (PLAY, {"sequence_length": 0}, "sequence_length"),
        (PLAY, {"test_fraction": 0.0}, "test_fraction"),
        (None, {}, "existing file"),
    ],
)
def test_broken_text(tmp_path, text, options, message):
    # Fault: text without a speaker that goes to nobody.
    if text is not None:
        (tmp_path / "input.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        shakespeare(directory=str(tmp_path), **options)


# LEAF -----------------------------------------------------------------------------------------------------------------


def write_leaf(folder, users, split="train", /, **changes):
    content = {"users": list(users), "num_samples": [len(u["y"]) for u in users.values()], "user_data": users, **changes}
    (folder / split).mkdir(exist_ok=True)
    (folder / split / "data.json").write_text(json.dumps(content))


USERS = {"u1": {"x": [[0.0, 1.0], [2.0, 3.0]], "y": [0, 2]}, "u2": {"x": [[4.0, 5.0]], "y": [1]}}


def test_leaf(tmp_path):
    # Faults: users out of order, several files of which one is read, test users in training.
    write_leaf(tmp_path, USERS)
    (tmp_path / "train" / "more.json").write_text(
        json.dumps({"users": ["u3"], "num_samples": [1], "user_data": {"u3": {"x": [[6.0, 7.0]], "y": [2]}}})
    )
    write_leaf(tmp_path, {"u9": {"x": [[8.0, 9.0]], "y": [0]}}, "test")
    data = leaf(directory=str(tmp_path))
    assert (data.train.size, data.num_outputs, data.held_out.size, data.input_shape) == (3, 3, 1, (2,))
    np.testing.assert_array_equal(rows(data.train, 0)["x"], USERS["u1"]["x"])
    np.testing.assert_array_equal(rows(data.train, 2)["x"], [[6.0, 7.0]])
    np.testing.assert_array_equal(data.test["x"], [[8.0, 9.0]])


def test_leaf_text(tmp_path):
    # Faults: characters of the test split missing from the vocabulary; targets other than the given label.
    write_leaf(tmp_path, {"R_A": {"x": ["abc", "bca"], "y": ["d", "a"]}})
    write_leaf(tmp_path, {"R_A": {"x": ["xyz"], "y": ["!"]}}, "test")
    data = leaf(directory=str(tmp_path))
    assert data.task == "next_token" and set("abcdxyz!") < set(data.vocabulary)
    client = rows(data.train, 0)
    assert ["".join(data.vocabulary[c] for c in text) for text in client["x"]] == ["abc", "bca"]
    assert (client["y"][:, :-1] == -1).all()
    assert [data.vocabulary[c] for c in client["y"][:, -1]] == ["d", "a"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"users": ["u1", "u1"]}, "distinct client ids, got 'u1'"),
        ({"users": ["u1"]}, "the same users"),
        ({"num_samples": [2, 7]}, "train/data.json 'u2': expected 7 examples"),
        ({"users": ["../u", "u2"], "user_data": {"../u": USERS["u1"], "u2": USERS["u2"]}}, "no path"),
        ({"users": [1, 2]}, "strings"),
        ({"user_data": {"u1": {"x": [[0.0], [2.0, 3.0]], "y": [0, 2]}, "u2": USERS["u2"]}}, "rows of equal length"),
        ({"user_data": {**USERS, "u2": {"x": [[4.0, 5.0]], "y": [0.5]}}}, "integer label"),
        ({"user_data": {**USERS, "u2": {"x": [[4.0, float("nan")]], "y": [1]}}}, "finite number"),
        ({"user_data": {**USERS, "u2": {"x": [[4.0, 5.0]]}}}, "an object with x and y"),
        ({"user_data": {**USERS, "u2": {"x": ["ab"], "y": ["c"]}}}, "text|numbers"),
    ],
)
def test_broken_leaf(tmp_path, changes, message):
    # Fault: users counted twice, rows without a user, ids that lead out of a folder.
    write_leaf(tmp_path, USERS, **changes)
    write_leaf(tmp_path, {"u1": {"x": [[8.0, 9.0]], "y": [0]}}, "test")
    with pytest.raises((ValueError, TypeError), match=message):
        leaf(directory=str(tmp_path))


def test_leaf_files(tmp_path):
    # Faults: a truncated file, a key that is there twice (the standard library keeps the last), a missing split.
    write_leaf(tmp_path, USERS)
    with pytest.raises(ValueError, match=r"existing folder.*test"):
        leaf(directory=str(tmp_path))
    write_leaf(tmp_path, USERS, "test")
    path = tmp_path / "train" / "data.json"
    text = path.read_text()
    path.write_text(text[:-5])
    with pytest.raises(ValueError, match=r"train/data.json: expected JSON text"):
        leaf(directory=str(tmp_path))
    path.write_text(text.replace('"u2": {', '"u1": {'))
    with pytest.raises(ValueError, match=r"train/data.json: .*distinct keys, got 'u1'"):
        leaf(directory=str(tmp_path))
    write_leaf(tmp_path, USERS)
    (tmp_path / "train" / "again.json").write_text(text)
    with pytest.raises(ValueError, match="Another file"):
        leaf(directory=str(tmp_path))


# TFF ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hdf5(tmp_path):
    h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
    path = tmp_path / "emnist_train.h5"
    with h5py.File(path, "w") as file:
        for k in range(3):
            group = file.create_group(f"examples/f{k}")
            group["pixels"] = np.full((10, 2, 2), k, np.float32) + np.arange(10, dtype=np.float32)[:, None, None] / 10
            group["label"] = np.arange(10, dtype=np.int32)
    return path


def test_tff_hdf5(hdf5):
    # Faults: pixels and labels shuffled apart, a row in both parts.
    data = tff_hdf5(path=str(hdf5))
    assert (data.train.size, data.input_shape, data.num_outputs) == (3, (2, 2), 10)
    for k in range(3):
        parts = [rows(data.train, k), rows(data.held_out, k)]
        assert [len(part["y"]) for part in parts] == [8, 2]
        labels = np.concatenate([part["y"] for part in parts])
        x = np.concatenate([part["x"] for part in parts])
        assert sorted(labels) == list(range(10))
        np.testing.assert_allclose(x[:, 0, 0], k + labels / 10, rtol=1e-6)
    both = tff_hdf5(path=str(hdf5), test_path=str(hdf5))
    assert both.held_out.size == 3 and len(both.test["y"]) == 30


def test_tff_hdf5_needs_its_extra(hdf5, monkeypatch):
    # Fault: a bare ModuleNotFoundError that does not say what to install.
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"fedjax_sim\[hdf5\]"):
        tff_hdf5(path=str(hdf5))


def test_broken_tff_hdf5(hdf5, tmp_path):
    # Faults: links that read other files, declared sizes that exhaust memory, text features, a file that is no HDF5.
    import h5py

    with pytest.raises(ValueError, match="Did you mean 'pixels'"):
        tff_hdf5(path=str(hdf5), features="pixel")
    with pytest.raises(MemoryError, match="max_bytes"):
        tff_hdf5(path=str(hdf5), max_bytes=100)
    (tmp_path / "text.h5").write_text("hello")
    with pytest.raises(ValueError, match="an HDF5 file"):
        tff_hdf5(path=str(tmp_path / "text.h5"))
    with h5py.File(tmp_path / "bad.h5", "w") as file:
        group = file.create_group("examples/a")
        group["pixels"], group["label"] = np.ones((2, 2)), np.zeros(2, int)
        file["examples/b"] = h5py.ExternalLink(str(hdf5), "/examples/f0")
    with pytest.raises(ValueError, match="a link"):
        tff_hdf5(path=str(tmp_path / "bad.h5"))
    with h5py.File(tmp_path / "words.h5", "w") as file:
        group = file.create_group("examples/a")
        group["pixels"], group["label"] = ["one", "two"], np.zeros(2, int)
    with pytest.raises(TypeError, match="array of numbers"):
        tff_hdf5(path=str(tmp_path / "words.h5"))
