"""The names of clients stay with their rows, in every data set that has names and in every wrapper around it."""

from __future__ import annotations

import csv
import json

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import population
from fedjax_sim.population.describe import describe
from tests.refusals import refused

# The hospital of a row is in its only feature too, so that a client's rows say who it is.
HOSPITALS = ("Ghent", "Aalst", "Bruges", "Leuven", "Mons")


def patients(rows_per_hospital=8):
    names = np.repeat(np.array(HOSPITALS, object), rows_per_hospital)
    number = np.array([HOSPITALS.index(name) for name in names], float)
    return {"hospital": names, "site": number, "ill": np.arange(len(names)) % 2}


def read_table(**options):
    return population.from_table(patients(), client="hospital", label="ill", standardise=False, **options)


def named_by_rows(clients):
    """Returns the name of each client as its rows say, None for one without rows."""
    found = []
    for id in range(clients.size):
        client = clients.client(jnp.int32(id))
        numbers = set(np.asarray(client.examples["x"])[np.asarray(client.mask)].reshape(-1).tolist())
        assert len(numbers) <= 1
        found.append(HOSPITALS[int(numbers.pop())] if numbers else None)
    return tuple(found)


def check(data):
    assert named_by_rows(data.train) == data.client_names
    if data.held_out is not None:
        assert named_by_rows(data.held_out) == data.held_out_names
    if data.local_test is not None:
        assert named_by_rows(data.local_test) == data.client_names


def test_names_of_a_table():
    """Catches names in the order of the file, and names of clients without test rows kept for held-out clients."""
    check(data := read_table())
    assert data.client_names == tuple(sorted(HOSPITALS))
    assert describe(data)["client_names"] == sorted(HOSPITALS)
    test = {name: values[-12:] for name, values in patients().items()}
    check(data := read_table(test=test))
    assert data.held_out_names == ("Leuven", "Mons")
    numbers = {**patients(), "hospital": patients()["site"].astype(int) + 10}
    data = population.from_table(numbers, client="hospital", label="ill")
    assert data.client_names == data.held_out_names == ("10", "11", "12", "13", "14")
    simulated = population.partitioners.iid(num_clients=3)
    data = population.from_table(patients(), partition=simulated, features=["site"], label="ill")
    assert data.client_names is data.held_out_names is None


def test_names_of_sites(tmp_path):
    """Catches a held-out client named as the client of its number, where one before it has no test rows."""
    rows = {"x": np.ones((2, 1)), "y": np.array([0, 1])}
    none = {"x": [], "y": []}
    options = {"task": "binary", "num_outputs": 1, "name": "toy"}
    data = population.from_sites({"b": rows, "a": none, "c": rows}, {"b": none, "c": rows, "new": rows}, **options)
    assert (data.client_names, data.held_out_names) == (("b", "a", "c"), ("c", "new"))
    for name in HOSPITALS:
        with open(tmp_path / f"{name}.csv", "w", newline="") as file:
            table = csv.writer(file)
            table.writerows([["site", "ill"], *([HOSPITALS.index(name), i % 2] for i in range(8))])
    check(population.csv_sites(directory=str(tmp_path), label="ill", task="binary", standardise=False))
    generated = population.synthetic(num_clients=3, max_examples=60)
    assert generated.client_names is generated.held_out_names is None


@pytest.mark.parametrize(
    "wrap",
    [
        lambda data: population.with_local_test(data, fraction=0.4),
        lambda data: population.label_flip(population.with_local_test(data, fraction=0.4), share=0.4),
        lambda data: population.with_server_rows(data, examples=2),
        lambda data: population.with_permuted_labels(data),
        lambda data: population.with_private_labels(data, epsilon=1.0),
        lambda data: data._replace(train=population.without_clients(data.train, [])),
    ],
    ids=["local_test", "poisoned", "server_rows", "concepts", "private_labels", "left"],
)
def test_names_stay_in_wrappers(wrap):
    """Catches a wrapper that drops names, or that leaves the names of held-out clients that it takes away."""
    check(data := wrap(read_table()))
    assert data.client_names == tuple(sorted(HOSPITALS))
    assert (data.held_out is None) == (data.held_out_names is None)


def test_names_of_groups():
    """Catches clients' names for groups, names of another group, and a list of all names of a large group."""
    data = population.with_groups(read_table(), groups=[1, 0, 1, 0, 1])
    assert data.client_names == ("Bruges + Leuven", "Aalst + Ghent + Mons")
    assert data.held_out_names == tuple(sorted(HOSPITALS))
    data = population.with_groups(read_table(), num_groups=1)
    assert data.client_names == ("Aalst + Bruges + Ghent + 2 more",)
    assert population.with_groups(population.digits(num_clients=4), num_groups=2).client_names is None


def test_names_in_a_folder(tmp_path):
    """Catches names that a native folder loses, those of other clients, and a folder of an earlier version refused."""
    population.write_native(tmp_path / "hospitals", read_table())
    check(population.native(directory=str(tmp_path / "hospitals")))
    info = tmp_path / "hospitals" / "info.json"
    content = json.loads(info.read_text())
    info.write_text(json.dumps({**content, "client_names": ["Ghent"]}))
    with refused("info.client_names", rule="each client"):
        population.native(directory=str(tmp_path / "hospitals"))
    del content["client_names"], content["held_out_names"]
    info.write_text(json.dumps(content))
    assert population.native(directory=str(tmp_path / "hospitals")).client_names is None
