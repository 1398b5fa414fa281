"""Stated constants for columns of quantities: those that do not fit the columns are refused."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_sim.population.datasets.quantities import quantities

ROWS = np.array([[1.0, np.nan], [3.0, 4.0]])


@pytest.mark.parametrize(
    ("constants", "error", "words"),
    [
        ({"standardise": "yes"}, TypeError, "standardise: expected true, false, or a table"),
        ({"standardise": {"mean": [0, 0]}}, TypeError, r"standardise: expected .*, got \['mean'\]"),
        (
            {"standardise": {"mean": 0, "deviation": 1}},
            TypeError,
            "standardise.mean: expected a list of numbers, got 0",
        ),
        ({"standardise": {"mean": [0], "deviation": [1, 1]}}, ValueError, "standardise.mean: expected 2 numbers"),
        ({"standardise": {"mean": [0, np.nan], "deviation": [1, 1]}}, ValueError, "standardise.mean: expected"),
        ({"standardise": {"mean": [0, 0], "deviation": [1, 0]}}, ValueError, "standardise.deviation: .* that of b"),
        ({"fill": 3.0}, TypeError, "fill: expected a table"),
        ({"fill": {"c": 1.0}}, ValueError, "fill: expected .*'c'"),
        ({"fill": {"b": np.inf}}, ValueError, "fill.b: expected"),
        ({"fill": {"a": 1.0}}, ValueError, "fill: expected a number for b"),
    ],
)
def test_constants_that_do_not_fit(constants, error, words):
    """Catches constants of other columns, a number in place of a list, and a deviation of 0."""
    with pytest.raises(error, match=words):
        quantities(ROWS, ["a", "b"], **constants).prepared(ROWS)
