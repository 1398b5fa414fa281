"""Clients of 1 to 700 examples: order and devices change no bit, classes and packing no more than rounding."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, client, engine, population, server
from fedjax_sim.algorithms import federated
from tests.laws import laws, problems as p

SIZES = np.array([3, 700, 40, 50, 1, 300, 64, 12, 60, 5, 8, 260, 30])
SLOTS = len(SIZES)


def data():
    rng = np.random.default_rng(0)
    examples = {
        "x": rng.normal(size=(SIZES.sum(), p.WIDTH)).astype(np.float32),
        "y": rng.normal(size=SIZES.sum()).astype(np.float32),
    }
    return population.stored(examples, np.concatenate([[0], np.cumsum(SIZES)]))


@functools.cache
def compiled(packed: bool, num_devices: int):
    """An algorithm of two epochs in batches of 16, and its step."""
    work = client.local_sgd(p.mlp_loss, optax.sgd(0.1), client.work(num_epochs=2, batch_size=16))
    work = work if packed else work.stating(num_steps=None)
    parts = {"client": work, "aggregator": aggregation.mean(), "server": server.optimizer(optax.sgd(1.0))}
    mesh = engine.device_mesh(num_devices) if num_devices > 1 else None
    algorithm = federated(p.given(SLOTS, num_clients=SLOTS), **parts, plan=engine.Plan(4, 4), mesh=mesh)
    return algorithm, jax.jit(algorithm.step)


def model(packed: bool = True, num_devices: int = 1, ids=range(SLOTS), reported=True, everyone=None):
    """Parameters and info after a round."""
    algorithm, step = compiled(packed, num_devices)
    everyone = data() if everyone is None else everyone
    state = algorithm.init(jax.random.key(0), p.mlp_params(), everyone)
    state = state._replace(sampler=p.cohort(ids, reported=reported))
    state, info = step(jax.random.key(1), state, everyone)
    return algorithm.params(state), info


def test_classes_of_the_population():
    """Guards the tests below: there are two classes, and one whose clients go alone."""
    assert data().capacities == (64, 700)
    assert [int(data().count(i)) for i in (0, 1, -1, 99)] == [3, 700, 0, 0]


@pytest.mark.full
def test_order_and_devices_change_no_bit():
    """Catches results that depend on the other clients of a batch, on size classes or slots; also with lost reports."""
    expected = model()
    laws.check_equal_bits(expected, model(ids=np.arange(SLOTS)[::-1]), "order")
    laws.check_equal_bits(expected, model(num_devices=2), "two devices")
    there = np.arange(SLOTS) % 3 > 0
    some = model(reported=there)
    laws.check_equal_bits(some, model(reported=there, num_devices=2), "two devices, some lost")
    assert (
        int(some[1]["clients_reported"]) == there.sum() and some[0]["second"].tolist() != expected[0]["second"].tolist()
    )


@pytest.mark.full
def test_packing_changes_no_more_than_rounding():
    """Catches steps that are lost or done twice, and orders that depend on the class."""
    packed, plain = model(), model(packed=False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), packed[0], plain[0])
    assert float(packed[1]["local_steps"]) == pytest.approx(2 * np.mean(-(-SIZES // 16)))
    assert float(packed[1]["total_weight"]) == SIZES.sum() == float(plain[1]["total_weight"])


def on_disk(path):
    """The population in a store of its own, opened anew at each call."""
    if not path.exists():
        rows = data()
        population.write_store(path, jax.tree.map(np.asarray, rows.examples), np.asarray(rows.offsets))
    return population.host_store(path)


@pytest.mark.full
@pytest.mark.optimised(False)
def test_clients_on_disk_are_packed_too(tmp_path):
    """Catches a chunk that reads the longest client's rows for each, and rows lost where a class caps them."""
    host = on_disk(tmp_path / "unequal")
    read, real = set(), host.source.gather
    host.source.gather = lambda ids, most: read.add((ids.size, most)) or real(ids, most)
    expected, found = model(), model(everyone=host)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), expected[0], found[0])
    assert read == {(4, 64), (1, 700)}


@pytest.mark.full
def test_clients_on_disk_have_the_same_bits_on_two_devices(tmp_path):
    """Catches rows that a device reads for another, and classes that follow the mesh."""
    one = model(everyone=on_disk(tmp_path / "unequal"))
    two = model(everyone=on_disk(tmp_path / "unequal"), num_devices=2)
    laws.check_equal_bits(one, two, "two devices")
