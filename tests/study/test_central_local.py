"""The study of where noise is added: powers of the cohort's size, ratios and equal budgets, through real transforms."""

import functools

import numpy as np
import pytest

from fedjax_sim import privacy
from fedjax_sim.study.central_local.question import central_local
from fedjax_sim.study.findings import rows_of

SMALL = {"cohort_sizes": (4, 64), "dimension": 64, "num_releases": 100, "num_clients": 200, "num_rounds": 10}


@functools.cache
def findings():
    return central_local(**SMALL)


@pytest.mark.full
def test_predictions_hold():
    """Fault: central noise of z C / sqrt(m), shares that do not add up, local noise without its 2 C, clips."""
    rows = findings().rows()
    assert [row for row in rows if row["holds"] is not True] == []
    assert {row["part"] for row in rows} == {"equal multiplier", "equal epsilon", "slope", "ratio"}
    assert all(row["ratio_high"] - row["ratio_low"] < 0.4 for row in rows)


@pytest.mark.full
def test_it_can_tell_another_power():
    """Fault: intervals of slopes so wide that -1 and -2, or a ratio of m and one of m/2, could not be told apart."""
    slopes = {row["place"]: row for row in rows_of(findings().comparisons, part="slope")}
    assert slopes["central"]["high"] < -1.9 and slopes["distributed"]["high"] < -1.9
    assert -1.1 < slopes["local"]["low"] and slopes["local"]["high"] < -0.9
    for row in rows_of(findings().comparisons, part="ratio"):
        assert row["predicted"] == row["cohort_size"] * (4 if row["place"] != "local" else 1)
        assert not row["low"] <= row["predicted"] * 1.25 <= row["high"]


@pytest.mark.full
def test_equal_epsilon_is_that_of_privacy_compare():
    """Fault: multipliers of another budget or population, one place's row under another's name."""
    budget = {"epsilon": 2.0, "delta": 1e-6, "rounds": 10, "population_size": 200}
    for size in (4, 64):
        rows = {row["place"]: row for row in rows_of(findings().comparisons, part="equal epsilon", cohort_size=size)}
        for row in privacy.compare(**budget, cohort_size=size):
            assert rows[row.place]["noise_multiplier"] == row.noise_multiplier
            np.testing.assert_allclose(rows[row.place]["predicted"], row.mean_std**2)
        assert rows["local"]["low"] > 2 * size * rows["central, fixed-size"]["high"]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"cohort_sizes": (4,)}, "cohort_sizes: expected"),
        ({"cohort_sizes": (64, 4)}, "cohort_sizes: expected"),
        ({"cohort_sizes": (4, 201)}, "cohort_sizes: expected"),
        ({"epsilon": 0.0}, "epsilon: expected"),
        ({"delta": 1.0}, "delta: expected"),
        ({"num_releases": 10}, "num_releases: expected"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot."""
    with pytest.raises(ValueError, match=words):
        central_local(**SMALL | options)


@pytest.mark.full
def test_claims_and_figure():
    """Fault: conclusions that fewer releases refute, a figure that cannot be drawn from what was found."""
    # The two claims about one epsilon need a large population, in which sampling amplifies much.
    assert [claim.holds for claim in findings().claims[:4]] == [True] * 4
    figure = findings().figure()
    assert len(figure.axes) == 4 and all(axes.get_xlabel() for axes in figure.axes)
