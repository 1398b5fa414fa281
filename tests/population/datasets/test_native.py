"""Whole data sets in native stores."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.population import with_groups, with_parties, with_private_labels, with_server_rows
from fedjax_sim.population.datasets import native as module
from fedjax_sim.population.datasets.native import native, write_native
from fedjax_sim.population.federated_data import from_sites
from fedjax_sim.population.own_test_rows import with_local_test
from fedjax_sim.population.poisoned.labels import label_flip
from fedjax_sim.population.store import write_store
from tests.refusals import refused


@pytest.fixture
def data():
    def client(n, first):
        return {"x": np.arange(2 * n).reshape(n, 2) + first, "y": np.arange(n) % 3}

    train, test = {"a": client(2, 0), "b": client(3, 10)}, {"a": client(1, 20), "b": client(2, 30)}
    return from_sites(train, test, task="classification", num_outputs=3, label_names=("p", "q", "r"), name="toy")


client_of = jax.jit(lambda population, id: population.client(id))


def read(population, id):
    data = client_of(population, np.int32(id))
    return {name: np.asarray(leaf)[np.asarray(data.mask)] for name, leaf in data.examples.items()}


@pytest.mark.parametrize("host", [False, True])
def test_round_trip(tmp_path, data, host):
    # Faults: clients exchanged, test rows in training, facts lost on the way.
    write_native(tmp_path / "toy", data)
    found = native(directory=str(tmp_path / "toy"), host=host)
    assert found[3:] == data[3:]
    for before, after in ((data.train, found.train), (data.held_out, found.held_out)):
        assert before.size == after.size
        for id in range(before.size):
            jax.tree.map(np.testing.assert_array_equal, read(before, id), read(after, id))
    jax.tree.map(np.testing.assert_array_equal, data.test, found.test)


def test_a_failed_write_leaves_nothing(tmp_path, data, monkeypatch):
    # Fault: a half-written folder that reads as a data set; an existing one overwritten.
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError):
        write_native(tmp_path / "there", data)
    monkeypatch.setattr(module.json, "dump", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_native(tmp_path / "new", data)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_what_a_folder_cannot_hold_is_refused(tmp_path, data):
    # Faults: poisoned clients that are read as clean ones, a backdoor without its test rows, a local test that is lost,
    # a server without its rows, parties that become one, groups that become clients, random labels that seem true.
    told = data._replace(measure=lambda outputs, examples: {})
    private = with_private_labels(data, epsilon=1.0)
    for made, what in (
        (label_flip(data, clients=[0]), "poisons"),
        (with_local_test(data), "local_test"),
        (told, "measure"),
        (with_server_rows(data, examples=1), "server"),
        (with_parties(data, num_parties=2), "columns"),
        (with_groups(data, num_groups=2), "groups"),
        (private, "private labels"),
        (private._replace(train=module.ScaledBytes(private.train)), "private labels"),
    ):
        with refused("data", value="toy", rule=f"without {what}", hint="write the plain"):
            write_native(tmp_path / "toy", made)
        assert not list(tmp_path.iterdir())


def test_test_set_from_held_out(tmp_path, data):
    # Fault: an optional test/ that is not optional.
    write_native(tmp_path / "toy", data)
    (tmp_path / "toy" / "test").rename(tmp_path / "elsewhere")
    jax.tree.map(np.testing.assert_array_equal, native(directory=str(tmp_path / "toy")).test, data.test)
    (tmp_path / "toy" / "held_out").rename(tmp_path / "elsewhere too")
    with pytest.raises(ValueError, match="test/ or held_out/"):
        native(directory=str(tmp_path / "toy"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "clasification"}, "Did you mean 'classification'"),
        ({"num_outputs": 2}, "label in"),
        ({"num_outputs": True}, "num_outputs"),
        ({"input_shape": [3]}, "shape"),
        ({"schema": 2}, "schema"),
        ({"vocabulary": "abc"}, "vocabulary"),
        ({"extra": 1}, "an object with"),
    ],
)
def test_contradictions_are_refused(tmp_path, data, change, message):
    # Fault: facts of info.json believed although the stores say otherwise.
    write_native(tmp_path / "toy", data)
    path = tmp_path / "toy" / "info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises((ValueError, TypeError), match=message):
        native(directory=str(tmp_path / "toy"))


@pytest.mark.parametrize("host", [False, True])
def test_a_store_of_bytes(tmp_path, data, host):
    # Faults: bytes that reach the model as 0 to 255; a test set on another scale than the clients'; floats in memory.
    write_native(tmp_path / "toy", data)
    images = {"x": np.uint8([[0, 51], [255, 102], [153, 204]]), "y": np.array([0, 1, 2])}
    for split in ("train", "test", "held_out"):
        shutil.rmtree(tmp_path / "toy" / split)
        write_store(tmp_path / "toy" / split, images, [0, 1, 3])
    want = np.float32([[0, 0.2], [1, 0.4], [0.6, 0.8]])
    found = native(directory=str(tmp_path / "toy"), host=host)
    np.testing.assert_array_equal(found.test["x"], want)
    for population in (found.train, found.held_out):
        assert population.size == 2 and population.sizes.tolist() == [1, 2]
        np.testing.assert_allclose(read(population, 0)["x"], want[:1], rtol=1e-7)
        np.testing.assert_allclose(read(population, 1)["x"], want[1:], rtol=1e-7)
        assert not any(leaf.dtype == np.float32 for leaf in jax.tree.leaves(population))
    assert found.notes
    kept = native(directory=str(tmp_path / "toy"), host=host, scale_bytes=False)
    np.testing.assert_array_equal(read(kept.train, 1)["x"], images["x"][1:])

    shutil.rmtree(tmp_path / "toy" / "test")
    write_store(tmp_path / "toy" / "test", images | {"x": want}, [0, 3])
    with refused("x", value="uint8 at train and float32 at test"):
        native(directory=str(tmp_path / "toy"), host=host)


@pytest.mark.parametrize("host", [False, True])
def test_every_byte_has_one_quotient(tmp_path, data, host):
    # Fault: x / 255 inside a program, where XLA multiplies: clients' images beside a test set with other last bits.
    write_native(tmp_path / "toy", data._replace(client_names=None, held_out_names=None))
    images = {"x": np.arange(256, dtype=np.uint8).reshape(128, 2), "y": np.zeros(128, int)}
    for split in ("train", "test", "held_out"):
        shutil.rmtree(tmp_path / "toy" / split)
        write_store(tmp_path / "toy" / split, images, [0, 128])
    found = native(directory=str(tmp_path / "toy"), host=host)
    site = {"a": images}
    sites = from_sites(site, site, task="classification", num_outputs=3, name="toy")
    want = images["x"] / np.float32(255)
    assert want.dtype == np.float32
    for x in (found.test["x"], sites.test["x"], read(sites.train, 0)["x"], read(found.held_out, 0)["x"]):
        np.testing.assert_array_equal(x, want)
    for client in (found.train.client, jax.jit(found.train.client)):
        np.testing.assert_array_equal(client(jnp.int32(0)).examples["x"], want)
