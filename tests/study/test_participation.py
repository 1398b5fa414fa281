"""The participation study: its predictions hold, and it would notice if they did not."""

import functools

import pytest

from fedjax_sim import theory
from fedjax_sim.report import charts
from fedjax_sim.study.findings import measured, rows_of
from fedjax_sim.study.participation.claims import participation_claims
from fedjax_sim.study.participation.figure import participation_figure
from fedjax_sim.study.participation.question import participation

SMALL = {"population_sizes": (60,), "rates": (0.5, 1.0), "num_rounds": 1500, "compare_samplers": False}


@functools.cache
def findings(model_clients):
    return participation(**SMALL, model_clients=model_clients, model_rounds=60)


@pytest.mark.full
@pytest.mark.parametrize("model_clients", [0, 90])
def test_predictions_hold(model_clients):
    """Fault: any theory, sampler or aggregator that is off by more than the intervals, all of them together at 99 %."""
    rows = findings(model_clients).rows()
    assert [row for row in rows if row["holds"] is not True] == []
    parts = {row["part"] for row in rows}
    assert parts == {"variance", "tolerance", "final loss"} | ({"digits MLP"} if model_clients else set())
    assert all(row["ratio_high"] - row["ratio_low"] < 0.8 for row in rows if row["kind"] != "upper bound")


@pytest.mark.slow
def test_defaults():
    """Fault: a sampler or an aggregator with another variance than predicted; predictions off at default options."""
    rows = participation().rows()
    assert [row for row in rows if row["holds"] is not True] == []
    assert sum(row["part"] == "designs" for row in rows) == 6


@pytest.mark.full
def test_everybody_leaves_no_variance():
    """Fault: sampling noise at m = N."""
    rows = [row for row in findings(0).rows() if row["cohort_size"] == row["population_size"]]
    assert len(rows) == 2 and all(row["measured"] < 1e-10 for row in rows)


@pytest.mark.full
def test_it_can_tell_a_wrong_formula():
    """Fault: a study that would call 1/m without the finite population right."""
    rows = findings(0).rows()
    half = [row for row in rows if row["part"] == "variance" and row["cohort_size"] * 2 == row["population_size"]]
    for row in half:
        wrong = theory.cohort_mean_variance(4.0, row["population_size"], row["cohort_size"], replacement=True)
        assert not row["low"] <= wrong <= row["high"]
    assert len(half) == 1


def test_no_cohort_is_larger_than_allowed():
    """Fault: a bound on cohorts that some parts of the study do not know."""
    options = {"population_sizes": (60,), "rates": (0.5, 1.0), "largest_cohort": 5, "model_clients": 0}
    found = participation(**options)
    assert found.comparisons == [] and {claim.holds for claim in found.claims} == {None}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"population_sizes": ()}, "population_sizes: expected"),
        ({"rates": (0.0,)}, "rates: expected"),
        ({"rates": (float("nan"),)}, "rates: expected"),
        ({"num_rounds": 249}, "num_rounds: expected"),
        ({"tolerance": 1e300}, "tolerance: expected"),
        ({"compare_samplers": 2}, "compare_samplers: expected"),
        ({"model_clients": -1}, "model_clients: expected"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot."""
    with pytest.raises(ValueError, match=words):
        participation(**SMALL | options)


@pytest.mark.full
def test_claims_and_figure():
    """Fault: claims or a figure that cannot be made of what was found."""
    found = findings(0)
    # No cohort of a tenth of the clients, no samplers, and no digits.
    assert [claim.holds for claim in found.claims] == [None, True, True, True, None, True, None]
    figure = found.figure()
    assert len(figure.axes) == 4 and all(axes.get_xlabel() for axes in figure.axes)


def test_figure_of_few_cohorts():
    """Fault: a population without a cohort that breaks the axes; digits on a scale without their correction."""
    one = {"part": "variance", "population_size": 10, "cohort_size": 9, "sampler": "uniform", "estimator": "mean"}
    digits = one | {"part": "digits MLP", "population_size": 40, "cohort_size": 30}
    rows = rows_of([measured(one, "variance", 0.05, 0.05), measured(digits, "variance", 7.0, 7.0)])
    axes = participation_figure(rows, {"tolerance": 0.05}).axes[0]
    shares = [line.get_ydata()[0] for line in axes.lines if line.get_marker() in [look.marker for look in charts.LOOKS]]
    assert shares == pytest.approx([0.05 * 9 / 4, theory.finite_population_correction(40, 30)])


@pytest.mark.parametrize("variance, holds", [(0.01, True), (0.03, False)])
def test_claim_follows_the_variance(variance, holds):
    """Fault: half of the clients whose variance is said to be small whatever it is; 4 / 100 is the infinite one's."""
    one = {"part": "variance", "population_size": 200, "cohort_size": 100, "sampler": "uniform", "estimator": "mean"}
    claims = participation_claims(rows_of([measured(one, "variance", variance)]), {"tolerance": 0.05})
    assert [claim.holds for claim in claims] == [None, holds, *[None] * 5]
