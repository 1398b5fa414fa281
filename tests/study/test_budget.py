"""The study of budgets: predictions hold, it could tell a wrong one, and what it refuses."""

import functools

import jax
import pytest

from fedjax_sim import theory
from fedjax_sim.study.budget.question import budget
from fedjax_sim.study.budget.sensors import Sensors
from fedjax_sim.study.findings import Findings, measured, rows_of

# Cohorts that are a large share of the population, and a deadline that many miss.
SMALL = {"num_clients": 12, "dimension": 16, "cohort_sizes": (2, 8), "bits": (4,), "deadline_share": 0.5,
         "bytes": 3000.0, "joules": 40.0, "seconds": 60.0, "num_runs": 400}  # fmt: skip


@functools.cache
def findings():
    return budget(**SMALL)


@pytest.mark.full
def test_predictions_hold():
    """Fault: a cost, a bias of late clients, a floor or a contraction that is not that of simulated rounds."""
    rows = findings().rows()
    assert [row for row in rows if row["holds"] is False] == []
    errors = [row for row in rows if row["quantity"] == "squared distance"]
    assert {(row["part"], row["cohort_size"], row["deadline"] is None) for row in errors} == {
        (unit, m, waits) for unit in ("bytes", "joules", "seconds") for m in SMALL["cohort_sizes"] for waits in (0, 1)
    }
    assert all(row["ratio_high"] - row["ratio_low"] < 0.6 for row in errors)
    regrets = [row for row in rows if row["quantity"] == "regret"]
    assert len(regrets) == 3 and all(0 <= row["measured"] < 0.2 for row in regrets)


@pytest.mark.full
def test_it_can_tell_a_wrong_formula():
    """Fault: intervals that hold a mean without the correction, late clients without a bias, or one round less."""
    sensors = Sensors(12, 16, 1.0, 0)
    deadline = sensors.deadline(0.5)
    # Two clients arrive in the very tick of the deadline.
    num_in_time = int((sensors.costs(0).seconds.sum(0) <= deadline + 1e-9).sum())
    for waits, in_time in {None: 12, deadline: num_in_time}.items():
        choice = theory.Choice(
            cohort_size=8, deadline=waits, bits=None, reports=8.0, costs={}, num_rounds=30, error=1.0
        )
        found = sensors.runs(jax.random.key(1), choice, [12, 30], 400)["squared_distance"]
        path = sensors.problem.path(8, in_time)
        wrong = sensors.problem.path(8, 12 if waits else num_in_time)
        endless = theory.SharedQuadratics(**vars(sensors.problem) | {"population_size": 10**6}).path(8)
        claims = [measured({}, "x", found[:, 1], path.error(30)), measured({}, "x", found[:, 1], wrong.error(30)),
                  measured({}, "x", found[:, 1], endless.error(30)), measured({}, "x", found[:, 0], path.error(12)),
                  measured({}, "x", found[:, 0], path.error(11))]  # fmt: skip
        assert [
            row["holds"]
            for row in Findings(name="", question="", comparisons=claims, figure=lambda: None, options={}).rows()
        ] == [1, 0, 0, 1, 0]


@pytest.mark.full
def test_the_claims_and_the_figure():
    """Fault: a claim or a figure that fails, or that names another choice than the predicted one."""
    found = findings()
    for unit, claim in zip(("bytes", "joules", "seconds"), found.claims[:3], strict=True):
        (regret,) = rows_of(found.comparisons, part=unit, quantity="regret")
        assert claim.words.startswith(f"Within {SMALL[unit]:,.5g} {unit}") and claim.holds is True
        assert claim.numbers.startswith(f"predicted choice: cohort size {regret['cohort_size']}")
    # There are two cohorts, and one number of bits.
    assert [claim.holds for claim in found.claims].count(None) == 2
    figure = found.draw()
    assert len(figure.axes) == 3 and all(axes.get_ylabel() and axes.get_title("left") for axes in figure.axes)


def test_half_of_the_devices_meet_the_deadline():
    """Fault: a deadline that the sampler rounds down to a tick before the last client that is meant to be in time."""
    sensors = Sensors(8, 3, 1.0, 0)
    seconds, deadline = sensors.costs(0).seconds.sum(0), sensors.deadline(0.5)
    assert (seconds <= deadline + 1e-9).sum() == 4 and deadline == round(deadline * 1000) / 1000


@pytest.mark.parametrize(
    "options, words",
    [
        ({"cohort_sizes": (13,)}, "cohort_sizes: expected an integer"),
        ({"cohort_sizes": (2, 2)}, "cohort_sizes: expected different"),
        ({"bits": (2,)}, "bits: expected an integer"),
        ({"bits": ()}, "bits: expected at least one"),
        ({"joules": 0.0}, "joules: expected"),
        ({"seconds": float("nan")}, "seconds: expected"),
        ({"num_runs": 20}, "num_runs: expected an integer"),
        ({"deadline_share": 0.0}, "deadline_share: expected"),
        ({"bytes": 1.0}, "bytes: expected a budget of at least one round"),
        ({"seconds": 1e7, "cohort_sizes": (12,)}, "bytes, joules, seconds: expected an integer"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot."""
    with pytest.raises((TypeError, ValueError), match=words):
        budget(**SMALL | options)
