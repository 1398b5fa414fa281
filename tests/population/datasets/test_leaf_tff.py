"""Sites, LEAF and TFF files: nothing lost, and errors that name file and user."""

import json
import sys

import jax
import numpy as np
import pytest

from fedjax_sim.population.datasets.leaf_tff import leaf, tff_hdf5
from fedjax_sim.population.describe import describe
from fedjax_sim.population.federated_data import from_sites
from tests.refusals import refused

client_of = jax.jit(lambda population, id: population.client(id))


def rows(population, id):
    data = client_of(population, np.int32(id))
    return {name: np.asarray(leaf)[np.asarray(data.mask)] for name, leaf in data.examples.items()}


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


@pytest.mark.parametrize("task", ["binary", "classification", "regression"])
def test_clients_without_rows(task):
    # Faults: an empty first client whose shape is everybody's, and one that stops the data set.
    empty = [{"x": [], "y": []}, {"x": np.zeros((0, 5), int), "y": np.zeros((0, 1))}, {"x": np.zeros((0, 2)), "y": []}]
    empty += [{leaf: np.array([], dtype) for leaf in ("x", "y")} for dtype in (object, str, np.uint8)]
    for nobody in empty:
        train = {"none": nobody, "a": site(2), "b": site(3, 100)}
        data = from_sites(train, {"none": nobody, "a": site(1)}, task=task, num_outputs=2 - (task != "classification"),
                          name="toy")  # fmt: skip
        assert data.train.size == 3 and data.input_shape == (2,) and data.held_out.size == 1
        assert [len(rows(data.train, i)["y"]) for i in range(3)] == [0, 2, 3]
        np.testing.assert_array_equal(rows(data.train, 2)["x"], train["b"]["x"])
    flat, column = site(4), site(4) | {"y": site(4)["y"][:, None]}  # [n, 1] is [n]
    for y in (flat, column):
        data = from_sites(
            {"a": flat, "b": y}, {"a": y}, task=task, num_outputs=2 - (task != "classification"), name="t"
        )
        np.testing.assert_array_equal(rows(data.train, 1)["y"].reshape(-1), flat["y"])


def test_bytes_are_scaled():
    # Faults: images of 0 to 255 that reach the model, bytes scaled at some clients only, tokens divided.
    def site(dtype, n=2):
        return {"x": np.array([[0, 51], [255, 102]], dtype)[:n], "y": np.array([0, 1])[:n]}

    options = {"task": "binary", "num_outputs": 1, "name": "images"}
    image, nobody = site(np.uint8), site(float, 0)
    data = from_sites({"none": nobody, "a": image}, {"a": image}, **options)
    want = np.float32([[0, 0.2], [1, 0.4]])
    for x in (rows(data.train, 1)["x"], data.test["x"], rows(data.held_out, 0)["x"]):
        np.testing.assert_array_equal(x, want)
    assert describe(data)["notes"] == ["features of one byte, 0 to 255, are divided by 255"]

    kept = from_sites({"a": image}, {"a": image}, scale_bytes=False, **options)
    np.testing.assert_array_equal(kept.test["x"], image["x"])
    counts = from_sites({"a": site(int)}, {"a": site(int)}, **options)
    np.testing.assert_array_equal(counts.test["x"], image["x"])
    assert kept.notes == counts.notes == ()

    with refused("x", value="uint8 at train['a'] and float64 at test['a']", rule="uint8 everywhere"):
        from_sites({"a": image}, {"a": site(float)}, **options)
    tokens = {"x": np.uint8([[1, 2]]), "y": np.uint8([[2, 3]])}
    text = from_sites({"a": tokens}, {"a": tokens}, task="next_token", num_outputs=4, name="text")
    np.testing.assert_array_equal(text.test["x"], tokens["x"])


@pytest.mark.parametrize(
    ("client", "options", "message"),
    [
        ({"features": np.ones((2, 2)), "x": [1, 2], "label": [0, 1]}, {}, r"train\['a'\]: expected a dict of x and y"),
        (
            {"x": np.ones((2, 2)), "y": np.eye(2)},
            {},
            r"train\['a'\].y: expected one label per example, got 'shape \(2, 2",
        ),
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
        (
            {"x": np.ones((2, 2)), "y": [0, 1], "weight": [1, 2]},
            {},
            r"train\['a'\]: expected x and y alone, got 'weight'",
        ),
        ({"x": None, "y": None}, {}, r"train\['a'\].x: .*object'. A client without rows has \[\]"),
        ({"x": [[1], [1, 2]], "y": [0, 1]}, {}, r"train\['a'\].x: expected numbers in rows of equal length"),
    ],
)
def test_broken_examples_are_refused(client, options, message):
    # Fault: a wrong number that looks right: labels out of range train without a word.
    good = {"x": np.ones((1, 2)), "y": [0]}
    with pytest.raises((ValueError, TypeError), match=message):
        from_sites({"a": client}, {"a": good}, **{"task": "binary", "num_outputs": 1, "name": "toy", **options})


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ({}, {"a": site(1)}, "at least one client"),
        ({"a": site(1)}, {"a": site(0)}, "at least one test row"),
        ({"../a": site(1)}, {"a": site(1)}, "no path"),
        (
            {"a": tuple(site(1).values())},
            {"a": site(1)},
            r"train\['a'\]: expected {.x.: features, .*, got 'tuple'",
        ),
        ({"a": site(1)}, {"a": [site(1)]}, r"test\['a'\]: expected {.x.: features, .*, got 'list'"),
        (
            [site(1)],
            {"a": site(1)},
            'train: expected a dict from client id to {"x": features, "y": labels}, got \'list\'',
        ),
        (
            {"a": site(1)},
            None,
            'test: expected a dict from client id to {"x": features, "y": labels}, got \'NoneType\'',
        ),
        (
            {"a": site(1), "b": {"x": np.ones((1, 3)), "y": [0]}},
            {"a": site(1)},
            r"train\['b'\].x: expected examples of shape \(2,\), as those of 'a'",
        ),
    ],
)
def test_broken_sites_are_refused(train, test, message):
    # Fault: an empty or ragged federation that fails later, inside a compiled round.
    with pytest.raises((ValueError, TypeError), match=message):
        from_sites(train, test, task="binary", num_outputs=1, name="toy")


def write_leaf(folder, users, split="train", /, **changes):
    content = {
        "users": list(users),
        "num_samples": [len(u["y"]) for u in users.values()],
        "user_data": users,
        **changes,
    }
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


def test_leaf_with_byte_order_marks(tmp_path):
    """Fault: a file that an editor of Windows wrote, refused at its first character."""
    for split in ("train", "test"):
        write_leaf(tmp_path, USERS, split)
        path = tmp_path / split / "data.json"
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert leaf(directory=str(tmp_path)).train.size == 2
    path.write_bytes(b"\x80\x04\x95")
    with refused("test/data.json", rule="UTF-8", hint="pickle"):
        leaf(directory=str(tmp_path))


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
    with pytest.raises(ValueError, match=r"train/data.json: .*keys, got 'u1'"):
        leaf(directory=str(tmp_path))
    write_leaf(tmp_path, USERS)
    (tmp_path / "train" / "again.json").write_text(text)
    with pytest.raises(ValueError, match="Another file"):
        leaf(directory=str(tmp_path))


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


def test_bytes_of_a_file_are_scaled(tmp_path):
    # Fault: CIFAR-100 in TFF's layout trains on 0 to 255.
    h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
    path = tmp_path / "cifar.h5"
    images = np.arange(48, dtype=np.uint8).reshape(4, 2, 2, 3) * 5
    with h5py.File(path, "w") as file:
        file["examples/0/image"], file["examples/0/label"] = images, np.arange(4)
    options = {"path": str(path), "test_path": str(path), "features": "image"}
    np.testing.assert_array_equal(tff_hdf5(**options).test["x"], images / np.float32(255))
    np.testing.assert_array_equal(tff_hdf5(**options, scale_bytes=False).test["x"], images)
