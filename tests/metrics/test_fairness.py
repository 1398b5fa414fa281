"""Fairness over clients: indices against their double sums, and deciles."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedjax_sim.metrics import fairness, highest_decile, lowest_decile
from tests.refusals import refused

SETS = {
    "equal": np.full(7, 0.3),
    "one has everything": np.eye(9)[0],
    "random": np.random.default_rng(0).lognormal(size=31),
    "none has anything": np.zeros(4),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("unit", [1.0, 1e-200])
def test_indices_are_their_double_sums(name, unit):
    """Catches ranks off by one, a Gini index of N - 1, and squares that vanish."""
    values = SETS[name] * unit
    found = fairness(values)
    num_clients, total = len(values), SETS[name].sum()
    if not total:
        assert (found["jain"], found["gini"]) == (1.0, 0.0)
        return
    scaled = SETS[name]
    gaps = sum(abs(x - y) for x in scaled for y in scaled)
    assert found["gini"] == pytest.approx(gaps / (2 * num_clients * total), abs=1e-12)
    assert found["jain"] == pytest.approx(total**2 / (num_clients * sum(x * x for x in scaled)), rel=1e-12)
    assert found["mean"] == pytest.approx(values.mean()) and found["variance"] == pytest.approx(values.var())


@pytest.mark.parametrize(("num_clients", "num_worst"), [(1, 1), (9, 1), (10, 1), (11, 2), (30, 3)])
def test_deciles(num_clients, num_worst):
    """Catches a decile of no client, a quantile in place of a mean, and the wrong end."""
    values = np.random.default_rng(1).permutation(np.arange(num_clients, dtype=float))
    assert lowest_decile(values) == np.arange(num_worst).mean()
    assert highest_decile(values) == num_clients - 1 - np.arange(num_worst).mean()
    assert math.copysign(1, highest_decile(np.zeros(num_clients))) == 1
    values[0] = math.nan
    assert math.isnan(lowest_decile(values)) and math.isnan(highest_decile(values))


@pytest.mark.parametrize("values", [[], [-0.1, 1.0], [math.nan], [[1.0]]])
def test_wrong_values(values):
    with refused("values", rule=">= 0"):
        fairness(values)


def test_no_clients_have_no_decile():
    """Catches a mean of nothing, which is NaN with a warning."""
    for decile in (lowest_decile, highest_decile):
        with pytest.raises(ValueError, match=r"values: expected \[N\] numbers"):
            decile([])
