"""FCUBE against its description."""

import numpy as np
from scipy import stats

from fedjax_sim import population


def test_clients_have_opposite_parts():
    """Catches a part at two clients, a client with one label, and test rows of the client next door."""
    data = population.fcube(examples_per_client=500, test_examples=4000, seed=3)
    parts = []
    for id in range(4):
        client = data.train.client(id)
        x, y = (np.asarray(client.examples[leaf])[np.asarray(client.mask)] for leaf in ("x", "y"))
        signs = {tuple(row) for row in np.sign(x).tolist()}
        assert len(x) == 500 and y.sum() == 250 and len(signs) == 2
        assert {tuple(-np.array(row)) for row in signs} == signs
        np.testing.assert_array_equal(y, x[:, 0] < 0)
        assert stats.kstest(np.abs(x).reshape(-1), "uniform").pvalue > 1e-4
        parts.append(signs)
        held_out = data.held_out.client(id)
        assert {tuple(row) for row in np.sign(held_out.examples["x"][held_out.mask]).tolist()} == signs
    assert len(set().union(*parts)) == 8
    assert len(data.test["x"]) == 4000
    for column in data.test["x"].T:
        assert stats.kstest((column + 1) / 2, "uniform").pvalue > 1e-4
    again = population.fcube(examples_per_client=500, test_examples=4000, seed=3)
    np.testing.assert_array_equal(again.test["x"], data.test["x"])
    assert (population.fcube(examples_per_client=500, seed=4).test["x"] != data.test["x"][:1000]).any()
