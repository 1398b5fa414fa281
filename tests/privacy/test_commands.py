"""What the commands print."""

from __future__ import annotations

import json

import pytest

from fedjax_sim.privacy import account, explain, written_down
from fedjax_sim.privacy.commands import account_report, calibrate_report

MILLION = {"population_size": 10**6, "cohort_size": 1000}


@pytest.mark.slow
def test_a_million_clients():
    """Catches a multiplier of a fixed-size cohort that is told as that of a Poisson one, at the size people ask for."""
    poisson = calibrate_report(epsilon=2, delta=1e-6, rounds=1000, **MILLION)
    assert poisson.text.startswith("Noise multiplier 0.60701") and "PoissonSampledDpEvent" in poisson.text
    fixed = calibrate_report(epsilon=2, delta=1e-6, rounds=1000, scheme="uniform", **MILLION)
    assert fixed.fields["noise_multiplier"] > 1.2 and fixed.fields["poisson_noise_multiplier"] < 0.6071
    assert "fixed size" in fixed.text and "0.60701" in fixed.text


def test_accounts_are_explained():
    """Catches a number without its event, or a fixed-size figure without the reason for it."""
    options = {"population_size": 1000, "cohort_size": 20, "noise_multiplier": 2.0, "rounds": 5, "delta": 1e-5}
    plain = account_report(**options)
    assert "PoissonSampledDpEvent" in plain.text and plain.fields["spent"]["accountant"] == "PLD"
    fixed = account_report(scheme="uniform", **options)
    assert fixed.fields["spent"]["epsilon"] > fixed.fields["poisson_epsilon"] and "another client's slot" in fixed.text
    json.dumps([plain.fields, fixed.fields])
    made = written_down(population_size=10, cohort_size=10, scheme="full")
    assert account_report(rounds=2, delta=1e-5, mechanism=made).fields["spent"]["rounds"] == 2


def test_calibrations_are_explained():
    """Catches a table that is not there, and fields that are no JSON."""
    sizes = {"population_size": 10_000, "cohort_size": 100}  # as in test_calibration, whose curves are kept
    answer = calibrate_report(epsilon=1.0, delta=1e-6, rounds=10, table=True, **sizes)
    assert "std on the mean" in answer.text and len(answer.fields["table"]) == 4
    json.dumps(answer.fields)


def test_explanations_leave_nothing_out():
    """Catches a guarantee whose conditions go unsaid."""
    made = written_down(noise_cohort_size=50, population_size=1000, cohort_size=20)
    spent = account(made, 5, 1e-5)
    text = explain(spent)
    for needed in (str(spent), spent.numerics, *spent.assumptions):
        assert needed in text
    assert "Poisson" in explain(made) and "one added or removed" in explain(made)
    nothing = account(made.with_multiplier(0.0), 5, 1e-5)
    assert "no guarantee at all" in explain(nothing)
