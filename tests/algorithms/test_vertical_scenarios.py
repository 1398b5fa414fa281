"""The scripts of experiments/ over parties: their laws, at a size that a test can pay."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from experiments import banks_and_bureau, industrial_iot, smart_city
from fedjax_sim import population


def test_one_plant_round_is_fedavg_on_the_joint_network():
    """Two rounds of networks cut at the machine and averaged in plants of 3, 4 and 5 machines, against flat FedAvg.

    Faults: plants that weigh alike, a cut that changes a gradient, gateways whose part is not averaged.
    """
    data = industrial_iot.machines()
    plants = population.grouped(data, industrial_iot.PLANT_OF)
    one, records = industrial_iot.trained(industrial_iot.in_plants(1), plants, 2)
    joint, _ = industrial_iot.trained(industrial_iot.flat(), data, 2)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(joint), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    start = industrial_iot.NETWORK.init(jax.random.key(1))[0]
    assert max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(joint), jax.tree.leaves(start), strict=True)) > 0.01
    rows = len(industrial_iot.PLANT_OF) * industrial_iot.ROWS
    assert records[0]["split_up_bytes"] == rows * (12 + 1) * 4 and records[0]["split_down_bytes"] == rows * 12 * 4
    size = sum(leaf.size for leaf in jax.tree.leaves(start))
    assert records[0]["plant_uplink_bytes"] == 12 * 4 * size and records[0]["uplink_bytes"] == 3 * 4 * size


def test_banks_meet_their_own_customers():
    """Rows after alignment are one person's, in every region. Fault: a bureau's row beside another customer."""
    rng = np.random.default_rng(0)
    banks = [banks_and_bureau.people(rng, banks_and_bureau.CUSTOMERS) for _ in range(2)]
    for bank, found in zip(banks, banks_and_bureau.aligned(rng, banks), strict=True):
        assert len(found["y"]) == round(banks_and_bureau.KNOWN * banks_and_bureau.CUSTOMERS)
        whole = {row.tobytes(): i for i, row in enumerate(bank["bank"])}
        places = [whole[row.tobytes()] for row in found["bank"]]
        np.testing.assert_array_equal(found["bureau"], bank["bureau"][places])
        np.testing.assert_array_equal(found["y"], bank["y"][places])


@pytest.mark.full
def test_what_stage_one_brings():
    """On 4,000 new customers (standard error 0.006): a score of the banks' network, or its first layer, brings what raw
    columns do not, and the bureau more than nothing."""
    found = banks_and_bureau.main()
    assert found["score + bureau"] > found["bank columns + bureau"] + 0.03
    assert found["first layer + bureau"] > found["bank columns + bureau"] + 0.03
    assert found["score + bureau"] > found["banks alone"] + 0.05
    assert banks_and_bureau.figure(found).axes


@pytest.mark.full
def test_departments_choose_their_epsilon():
    """More noise, a smaller epsilon and fewer right answers; each department its own."""
    found = smart_city.main()
    free, lenient, strict = found.values()
    assert free["accuracy"] > lenient["accuracy"] > strict["accuracy"] > 0.5
    assert free["health"] == float("inf") > lenient["traffic"] > lenient["health"] > strict["health"] > 0
    assert smart_city.figure(found).axes
