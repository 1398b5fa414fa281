"""Clients of 1 to 700 examples: order and devices change no bit, classes and packing no more than rounding."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, client, engine, population, server
from fedjax_sim.algorithms import federated
from tests.laws import laws
from tests.laws import problems as p

SIZES = np.array([3, 700, 40, 65, 1, 300, 64, 12, 90, 5, 8, 260, 30])
SLOTS = len(SIZES)


def data():
    rng = np.random.default_rng(0)
    examples = {
        "x": rng.normal(size=(SIZES.sum(), p.WIDTH)).astype(np.float32),
        "y": rng.normal(size=SIZES.sum()).astype(np.float32),
    }
    return population.stored(examples, np.concatenate([[0], np.cumsum(SIZES)]))


def model(packed: bool = True, mesh=None, ids=range(SLOTS), reported=True, everyone=None):
    """Parameters and info after a round of two epochs in batches of 16."""
    work = client.local_sgd(p.mlp_loss, optax.sgd(0.1), num_epochs=2, batch_size=16)
    work = work if packed else work._replace(num_steps=None)
    parts = {"client": work, "aggregator": aggregation.mean(), "server": server.optimizer(optax.sgd(1.0))}
    algorithm = federated(p.given(SLOTS, num_clients=SLOTS), **parts, plan=engine.Plan(4, 4), mesh=mesh)
    everyone = data() if everyone is None else everyone
    state = algorithm.init(jax.random.key(0), p.mlp_params(), everyone)
    state = state._replace(sampler=p.cohort(ids, reported=reported))
    state, info = jax.jit(algorithm.step)(jax.random.key(1), state, everyone)
    return algorithm.params(state), info


def test_classes_of_the_population():
    """Guards the tests below: there are four classes, and one whose clients go alone."""
    assert data().capacities == (64, 256, 700)
    assert [int(data().count(i)) for i in (0, 1, -1, 99)] == [3, 700, 0, 0]


def test_order_and_devices_change_no_bit():
    """Catches batch mates, classes or places that leave a trace; lost reports are of this kind, too."""
    expected = model()
    laws.check_equal_bits(expected, model(ids=np.arange(SLOTS)[::-1]), "order")
    laws.check_equal_bits(expected, model(mesh=engine.device_mesh(2)), "two devices")
    there = np.arange(SLOTS) % 3 > 0
    some = model(reported=there)
    laws.check_equal_bits(some, model(reported=there, mesh=engine.device_mesh(2)), "two devices, some lost")
    assert (
        int(some[1]["clients_reported"]) == there.sum() and some[0]["second"].tolist() != expected[0]["second"].tolist()
    )


def test_packing_changes_no_more_than_rounding():
    """Catches steps that are lost or done twice, and orders that depend on the class."""
    packed, plain = model(), model(packed=False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), packed[0], plain[0])
    assert float(packed[1]["local_steps"]) == pytest.approx(2 * np.mean(-(-SIZES // 16)))
    assert float(packed[1]["total_weight"]) == SIZES.sum() == float(plain[1]["total_weight"])


def test_clients_on_disk_are_packed_too(tmp_path):
    """Catches a chunk that reads the longest client's rows for each, and rows lost where a class caps them."""
    rows = data()
    population.write_store(tmp_path / "unequal", jax.tree.map(np.asarray, rows.examples), np.asarray(rows.offsets))
    host = population.host_store(tmp_path / "unequal")
    read, real = set(), host.source.gather
    host.source.gather = lambda ids, most: read.add((ids.size, most)) or real(ids, most)
    expected, found = model(), model(everyone=host)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), expected[0], found[0])
    assert read == {(4, 64), (4, 256), (1, 700)}
    host = population.host_store(tmp_path / "unequal")
    laws.check_equal_bits(found, model(everyone=host, mesh=engine.device_mesh(2)), "two devices")
