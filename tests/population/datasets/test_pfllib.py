"""Folders of PFLlib, against its layout."""

import json
import pickle

import numpy as np
import pytest

from fedjax_sim import InvalidArgument, InvalidType, population
from tests.files.test_pickled_arrays import HOSTILE
from tests.refusals import refused

RNG = np.random.default_rng(0)


def write(folder, splits, num_classes=3):
    """As PFLlib's scripts do."""
    for split, clients in splits.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        for i, client in enumerate(clients):
            with open(folder / split / f"{i}.npz", "wb") as file:
                np.savez_compressed(file, data=client)
    config = {"num_clients": len(splits["train"]), "num_classes": num_classes, "alpha": 0.1}
    (folder / "config.json").write_text(json.dumps(config))


def rows(n, shape=(3, 4, 5)):
    return {"x": RNG.standard_normal((n, *shape)).astype(np.float32), "y": RNG.integers(0, 3, n)}


@pytest.mark.parametrize("channels", ["first", "last"])
def test_clients_have_their_rows(channels, tmp_path):
    """Catches clients in the order of texts (10 before 2), and colours that stay before height and width."""
    splits = {"train": [rows(1 + i % 3) for i in range(12)], "test": [rows(2) for _ in range(12)]}
    write(tmp_path, splits)
    data = population.pfllib(directory=str(tmp_path), num_classes=3, channels=channels)
    x = np.concatenate([client["x"] for client in splits["train"]])
    expected = x.transpose(0, 2, 3, 1) if channels == "first" else x
    np.testing.assert_array_equal(population.pooled(data.train).examples["x"], expected)
    assert data.client_names == tuple(map(str, range(12))) and data.num_outputs == 3 and data.learned is None
    assert [int(data.train.count(i)) for i in range(4)] == [1, 2, 3, 1]
    np.testing.assert_array_equal(data.test["y"], np.concatenate([client["y"] for client in splits["test"]]))
    assert data.input_shape == expected.shape[1:]


def test_hostile_archives(tmp_path):
    """Catches an object that is run, a size that is believed, and files that are left out silently."""
    write(tmp_path, {"train": [rows(2), rows(2)], "test": [rows(1), rows(1)]})
    path = tmp_path / "train" / "1.npz"
    good = path.read_bytes()

    def refuses(argument, **options):
        with refused(argument, kind=(InvalidArgument, InvalidType)):
            population.pfllib(directory=str(tmp_path), num_classes=3, **options)

    class Loaded:
        def __reduce__(self):
            return pickle.loads, (b"N.",)

    ragged = np.empty(2, object)
    ragged[:] = [[1], [1, 2]]
    for values, argument in (
        (Loaded(), "train/1.npz"),
        ({"x": rows(1)["x"], "y": Loaded()}, "train/1.npz"),
        (np.arange(3), "train/1.npz"),
        (ragged, "train/1.npz"),
        ({"x": rows(1)["x"]}, "train/1.npz"),
        ({"x": [[1, 2]], "y": np.array([1])}, "train/1.npz x"),
        ({"x": np.ones((1, 2)), "y": np.array(["a"], "S1")}, "train/1.npz y"),
        ({"x": rows(2)["x"], "y": np.array([0, 3])}, "train['1'].y[1]"),
    ):
        np.savez_compressed(path, data=values)
        refuses(argument)
    np.savez_compressed(path, other=np.array({}, object))
    refuses("train/1.npz")
    for content in (b"", good[:-30], HOSTILE["a call"][0]):
        path.write_bytes(content)
        refuses("train/1.npz")
    path.write_bytes(good)
    with pytest.raises(MemoryError):
        population.pfllib(directory=str(tmp_path), num_classes=3, max_bytes=1000)
    path.rename(tmp_path / "train" / "2.npz")
    refuses("directory")
    for text, argument in (
        ("[", "config.json"),
        ("[]", "config.json num_clients"),
        ('{"num_clients": 0}', "config.json num_clients"),
        ('{"num_clients": 2, "num_classes": 4}', "num_classes"),
    ):
        (tmp_path / "config.json").write_text(text)
        refuses(argument)
    (tmp_path / "config.json").unlink()
    refuses("directory")
