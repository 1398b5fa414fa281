"""What all federated statistics refuse."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_sim import sampling
from tests.algorithms.analytics import problem as p
from tests.laws import cases

STATISTICS = ("boosted_trees", "gaussian_mixture", "heavy_hitters", "histogram", "kmeans", "quantiles")


@pytest.mark.parametrize("name", STATISTICS)
def test_clients_are_drawn_alike(name, monkeypatch):
    """Catches rows that count twice because their clients are drawn twice as often."""
    monkeypatch.setattr(cases, "SAMPLER", sampling.weighted(np.ones(p.NUM_CLIENTS), 5))
    cases.CASES["algorithms"][name]()
    monkeypatch.setattr(cases, "SAMPLER", sampling.weighted(np.arange(1.0, 1 + p.NUM_CLIENTS), 5))
    with pytest.raises(ValueError, match="sampler: expected one that draws all clients alike"):
        cases.CASES["algorithms"][name]()
