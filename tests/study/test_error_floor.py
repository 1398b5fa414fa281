"""The error-floor study: its predictions hold, and it would notice a budget with a part left out."""

import functools

import numpy as np
import pytest

from fedjax_sim.study.error_floor.figure import error_floor_figure
from fedjax_sim.study.error_floor.quadratics import Quadratics, Setting
from fedjax_sim.study.error_floor.question import error_floor

SMALL = {"num_clients": 12, "dimension": 3, "step_sizes": (0.15,), "cohort_sizes": (4,), "num_steps": (2,)}
SMALL |= {"bits": (4,), "noise_multipliers": (0.01,), "num_runs": 1000, "logistic_clients": 0, "model_clients": 0}


@functools.cache
def findings():
    return error_floor(**SMALL)


@pytest.mark.full
def test_predictions_hold():
    """Fault: a component of the budget, or of the simulator, that is off by more than the intervals."""
    rows = findings().rows()
    assert [row for row in rows if row["holds"] is not True] == []
    assert {row["part"] for row in rows} >= {"each alone", "all together", "step_size", "bits"}
    assert all(row["ratio_high"] - row["ratio_low"] < 0.4 for row in rows if row["measured"] > 1e-6)


@pytest.mark.full
def test_it_notices_what_is_left_out():
    """Fault: a study whose intervals are so wide that a budget without sampling, or without noise, would pass."""
    problem = Quadratics(12, 3, 1.0, 0)
    base = Setting(step_size=0.15, cohort_size=4, num_steps=2, gradient_noise=0.3, bits=4, noise_multiplier=0.01)
    budget = problem.budget(base)
    row = next(row for row in findings().rows() if row["part"] == "step_size")
    for name in ("client_sampling", "privacy_noise"):
        assert not row["low"] <= budget.total - budget.losses[name] <= row["high"]
    np.testing.assert_allclose(sum(budget.losses.values()), budget.total)


def test_how_parts_fall_with_the_cohort():
    """Fault: a budget in which sampling falls as 1/m alone, or privacy noise as 1/m."""
    problem = Quadratics(12, 3, 1.0, 0)
    losses = {
        m: problem.budget(
            Setting(step_size=0.15, cohort_size=m, num_steps=1, gradient_noise=0.3, bits=0, noise_multiplier=0.01)
        ).losses
        for m in (4, 8, 12)
    }
    assert losses[12]["client_sampling"] == pytest.approx(0, abs=1e-12)
    for name, wanted in (("client_sampling", (8 / 4) / (4 / 8)), ("minibatch", 2), ("privacy_noise", 4)):
        assert losses[4][name] / losses[8][name] == pytest.approx(wanted, rel=0.1)


def test_the_text_of_a_setting_is_kept():
    """Fault: a new name or field of `Setting`, which would change the random numbers of every run."""
    text = "Setting(step_size=0.15, cohort_size=4, num_steps=2, gradient_noise=0.3, bits=4, noise_multiplier=0.01)"
    assert (
        str(Setting(step_size=0.15, cohort_size=4, num_steps=2, gradient_noise=0.3, bits=4, noise_multiplier=0.01))
        == text
    )


@pytest.mark.slow
def test_logistic_regression_and_defaults():
    """Fault: a local quadratic model that is wrong; defaults whose predictions do not hold."""
    rows = error_floor().rows()
    assert [row for row in rows if row["holds"] is not True and row["kind"] != "estimate"] == []
    assert all(0.5 < row["ratio"] < 2 for row in rows if row["kind"] == "estimate")
    assert sum(row["part"] == "logistic regression" for row in rows) == 3


@pytest.mark.parametrize(
    "options, words",
    [
        ({"step_sizes": (3.0,)}, "step_sizes: expected"),
        ({"step_sizes": (1e-3,)}, "step_sizes: expected steps that reach their floor"),
        ({"logistic_clients": 3}, "logistic_clients: expected"),
        ({"noise_multipliers": (1e30,)}, "noise_multipliers: expected"),
        ({"heterogeneity": 1e30}, "heterogeneity: expected"),
        ({"num_runs": 600}, "num_runs: expected"),
        ({"cohort_sizes": (13,)}, "cohort_sizes: expected"),
        ({"bits": (1,)}, "bits: expected"),
        ({"noise_multipliers": (float("nan"),)}, "noise_multipliers: expected"),
        ({"num_steps": ()}, "num_steps: expected"),
        ({"num_runs": True}, "num_runs: expected"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for a minute before it finds that it cannot."""
    with pytest.raises((TypeError, ValueError), match=words):
        error_floor(**SMALL | options)


@pytest.mark.full
def test_claims_and_figure():
    """Fault: claims that need a list of several values, a figure that cannot be drawn from what was found."""
    # One value of each option decides nothing about larger and smaller ones.
    assert [claim.holds for claim in findings().claims] == [True, True, None, None, None, None, None, None]
    figure = findings().figure()
    assert len(figure.axes) == 4 and all(axes.get_xlabel() for axes in figure.axes)


@pytest.mark.full
def test_figure_of_the_largest_step():
    """Fault: a study that runs, and then fails where its figure tries a step that diverges."""
    assert error_floor_figure(findings().rows(), {**findings().options, "step_sizes": [1.0]}).axes
