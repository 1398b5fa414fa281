"""Ragged, example-weighted FedAvg against float64 NumPy; only the order of examples comes from the library."""

from __future__ import annotations

import numpy as np
import pytest

from tests.laws import laws, problems as p


@pytest.mark.default_rows("steps")
@pytest.mark.parametrize("epochs", [None, 2], ids=["steps", "epochs"])
def test_matches_numpy(epochs):
    """Catches dropped partial batches, weights by batches, leaking padding, a shuffle with repetition."""
    laws.matches_the_numpy_oracle(epochs=epochs)


def test_oracle_meets_partial_batches_and_a_client_of_one_example():
    """Guards the oracle itself: its cohort must contain what it is there for."""
    sizes = p.SIZES[p.COHORT]
    assert 1 in sizes and (sizes % p.BATCH != 0).sum() >= 3 and len(np.unique(sizes)) >= 4
