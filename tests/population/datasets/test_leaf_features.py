"""LEAF's Sent140 and CelebA, in small files of their layout."""

import json
import sys

import jax
import numpy as np
import pytest

from fedjax_sim import InvalidType
from fedjax_sim.population.datasets.leaf_features import celeba, sent140
from fedjax_sim.population.datasets.leaf_tff import leaf
from tests.refusals import refused

client_of = jax.jit(lambda population, id: population.client(id))


def rows(population, id):
    data = client_of(population, np.int32(id))
    return {name: np.asarray(leaf)[np.asarray(data.mask)] for name, leaf in data.examples.items()}


def write(folder, split, users):
    """As LEAF's preprocess/ writes it."""
    (folder / split).mkdir(exist_ok=True, parents=True)
    counts = [len(client["y"]) for client in users.values()]
    content = {"users": list(users), "num_samples": counts, "user_data": users}
    (folder / split / f"all_data_niid_05_keep_1_{split}_9.json").write_text(json.dumps(content))


def tweet(user, text):
    return ["1467810369", "Mon Apr 06 22:19:45 PDT 2009", "NO_QUERY", user, text]


def test_sent140(tmp_path):
    """By hand. Faults: the user's name or the date among the words, a word of the test tweets in the vocabulary, small
    and large letters as two words, a user without tweets that stops the others."""
    anna = {"x": [tweet("anna", "So good, so GOOD!"), tweet("anna", "bad day")], "y": [1, 0]}
    write(
        tmp_path, "train", {"anna": anna, "bob": {"x": [tweet("bob", "good day")], "y": [1]}, "eve": {"x": [], "y": []}}
    )
    write(tmp_path, "test", {"anna": {"x": [tweet("anna", "so new, so good")], "y": [0]}})
    data = sent140(directory=str(tmp_path))
    assert data.vocabulary == ("good", "day", "so", "!", ",", "bad") and data.label_names == ("negative", "positive")
    assert (data.task, data.num_outputs, data.train.size, data.held_out.size) == ("binary", 1, 3, 1)
    assert rows(data.train, 0)["x"].tolist() == [[2, 0, 2, 1, 1, 0], [0, 1, 0, 0, 0, 1]]
    assert rows(data.train, 0)["y"].tolist() == [1, 0] and rows(data.train, 1)["x"].tolist() == [[1, 1, 0, 0, 0, 0]]
    assert data.test["x"].tolist() == [[1, 0, 2, 0, 1, 0]]
    assert sent140(directory=str(tmp_path), num_words=2).vocabulary == ("good", "day")
    with pytest.raises(MemoryError, match="num_words"):
        sent140(directory=str(tmp_path), max_bytes=10)
    with pytest.raises(ValueError, match=r"population\.sent140"):
        leaf(directory=str(tmp_path))
    write(tmp_path, "test", {"anna": {"x": [[0.0, 1.0]], "y": [0]}})
    with refused("test 'anna'.x", rule="tweets", kind=InvalidType):
        sent140(directory=str(tmp_path))


@pytest.fixture
def faces(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs the extra images")
    (tmp_path / "img").mkdir()
    for k in range(3):
        pixels = np.full((218, 178, 3), [10 * k, 255, 0], np.uint8)
        image.fromarray(pixels).save(tmp_path / "img" / f"00000{k}.png")
    write(tmp_path, "train", {"7": {"x": ["000000.png", "000001.png"], "y": [1, 0]}, "9": {"x": [], "y": []}})
    write(tmp_path, "test", {"8": {"x": ["000002.png"], "y": ["1"]}})
    return tmp_path


def test_celeba(faces):
    """Faults: images in another order, bytes that are not scaled, rows and columns that change places."""
    data = celeba(directory=str(faces), images=str(faces / "img"), image_size=4)
    assert (data.task, data.train.size, data.input_shape) == ("binary", 2, (4, 4, 3))
    x = rows(data.train, 0)["x"]
    np.testing.assert_allclose(x[:, 2, 1], [[0, 1, 0], [10 / 255, 1, 0]], rtol=1e-6)
    assert rows(data.train, 0)["y"].tolist() == [1, 0] and data.test["y"].tolist() == [1]


def test_broken_celeba(faces, monkeypatch):
    """Faults: a name that leads out of the folder, a file that is no image, a table that exhausts the memory."""
    options = {"directory": str(faces), "images": str(faces / "img"), "image_size": 4}
    with pytest.raises(MemoryError, match="image_size"):
        celeba(**options, max_bytes=100)
    (faces / "img" / "text.png").write_text("no image")
    for name, told in (("../x.png", "in the folder of images"), ("none.png", "an existing file"),
                       ("text.png", r"test '8'.x: expected a JPEG or PNG image, got 'text.png'")):  # fmt: skip
        write(faces, "test", {"8": {"x": [name], "y": [1]}})
        with pytest.raises(ValueError, match=told):
            celeba(**options)
    with pytest.raises(ValueError, match=r"population\.celeba"):
        leaf(directory=str(faces))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"fedjax_sim\[images\]"):
        celeba(**options)
