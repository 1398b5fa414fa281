"""Rounds until a target."""

import math

import numpy as np
import pytest

from fedjax_sim import theory
from fedjax_sim.metrics import rounds_to_target


def test_first_crossing():
    """Fault: the last crossing, one past it, or a NaN that counts as reached."""
    assert rounds_to_target([3.0, 1.0, 2.0, 0.5], 1.0) == 2
    assert rounds_to_target([math.nan, 3.0, math.nan, 0.5], 1.0) == 4
    assert rounds_to_target([math.nan, math.inf], 1.0) == math.inf
    assert rounds_to_target([3.0, 1.0], 1.0, rounds=[0, 25]) == 25


def test_directions():
    """Fault: an accuracy read as a loss."""
    accuracy = np.array([0.2, 0.7, 0.6, 0.9])
    for target in (0.1, 0.65, 0.8, 0.95):
        assert rounds_to_target(accuracy, target, rising=True) == rounds_to_target(1 - accuracy, 1 - target)


def test_interpolation():
    """Fault: a line through the raw values, where the best so far was meant, or through the wrong pair."""
    assert rounds_to_target([4.0, 2.0, 3.0, 1.0], 1.5, interpolate=True) == 3.5
    assert rounds_to_target([1.0, 2.0], 1.5, rounds=[5, 6], interpolate=True) == 5
    assert rounds_to_target([math.inf, 1.0], 1.5, interpolate=True) == 2


def test_geometric_decay():
    """Fault: another count of rounds than theory's."""
    losses = 8.0 * 0.81 ** np.arange(1, 60)
    for target in (5.0, 0.3, 1e-4):
        assert rounds_to_target(losses, target) == theory.rounds_until(0.81, 8.0, target)


@pytest.mark.parametrize(
    "values, options, words",
    [
        ([], {}, "values: expected"),
        ([[1.0]], {}, "values: expected"),
        ([1.0, 2.0], {"rounds": [2, 1]}, "rounds: expected"),
        ([1.0], {"rounds": [1, 2]}, "rounds: expected"),
    ],
)
def test_wrong_input(values, options, words):
    """Fault: a number of rounds read off nothing."""
    with pytest.raises(ValueError, match=words):
        rounds_to_target(values, 1.0, **options)
    with pytest.raises(ValueError, match="target: expected"):
        rounds_to_target([1.0], math.nan)
