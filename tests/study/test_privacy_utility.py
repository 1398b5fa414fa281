"""The study of privacy's price: predicted errors and floors hold, and epsilons are the accountant's."""

import functools

import pytest

from fedjax_sim import privacy, theory
from fedjax_sim.study.findings import rows_of
from fedjax_sim.study.privacy_utility.question import privacy_utility
from fedjax_sim.study.privacy_utility.spending import NUM_ROUNDS

SMALL = {
    "num_clients": 40, "dimension": 16, "noise_multipliers": (1.0, 2.0), "epsilons": (8.0,), "num_releases": 3000,
    "num_runs": 500, "digits_clients": 100, "digits_rounds": 2, "digits_runs": 2,
}  # fmt: skip


@functools.cache
def findings():
    return privacy_utility(**SMALL)


@pytest.mark.full
def test_predictions_hold():
    """Fault: noise of z C / sqrt(m), a floor without 1 / (1 - r^2), updates that were clipped after all."""
    rows = findings().rows()
    assert [row for row in rows if row["holds"] is False] == []
    assert [row["quantity"] for row in rows if row["holds"]] == ["squared error"] * 3 + ["floor"] * 3
    assert all(row["ratio_high"] - row["ratio_low"] < 0.3 for row in rows if row["ratio"])


@pytest.mark.full
def test_it_can_tell_another_noise():
    """Fault: intervals so wide that 5 % more noise, or the noise of one client less, would be right too."""
    for row in rows_of(findings().comparisons, quantity="squared error"):
        for factor in (1.05**2, (40 / 39) ** 2):
            assert not row["low"] <= factor * row["predicted"] <= row["high"]


@pytest.mark.full
def test_epsilons_are_those_of_the_accountant():
    """Fault: a multiplier of one round, an epsilon of another delta, a digits' run calibrated without its sampling."""
    release = {"population_size": 40, "cohort_size": 40, "scheme": "full"}
    (row,) = rows_of(findings().comparisons, part="epsilon", quantity="floor")
    assert row["noise_multiplier"] == privacy.calibrate(8.0, 1e-5, NUM_ROUNDS, **release).noise_multiplier
    first = rows_of(findings().comparisons, part="noise multiplier", quantity="floor")[0]
    mechanism = privacy.written_down(noise_multiplier=1.0, **release)
    assert first["epsilon"] == privacy.account(mechanism, NUM_ROUNDS, 1e-5).epsilon
    none, digits = rows_of(findings().comparisons, part="digits MLP", quantity="test accuracy")
    options = {"population_size": 100, "cohort_size": 10, "scheme": "truncated_poisson", "num_slots": 29}
    assert digits["noise_multiplier"] == privacy.calibrate(8.0, 1e-5, 2, **options).noise_multiplier
    assert none["noise_multiplier"] == 0 and none["predicted"] is None and 0 <= none["measured"] <= 1


@pytest.mark.full
def test_floor_is_theorys():
    """Fault: a prediction made from what was measured."""
    row = rows_of(findings().comparisons, part="noise multiplier", quantity="floor")[1]
    assert row["predicted"] == pytest.approx(theory.noise_floor(16 * (2.0 / 40) ** 2, 0.5))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"noise_multipliers": ()}, "noise_multipliers: expected"),
        ({"epsilons": (0.0,)}, "epsilons: expected"),
        ({"delta": 0.0}, "delta: expected"),
        ({"digits_clients": 7}, "digits_clients: expected"),
        ({"noise_multipliers": (50.0,)}, "noise that keeps updates below the clip norm"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot; floors predicted under clipping."""
    with pytest.raises(ValueError, match=words):
        privacy_utility(**SMALL | options)


@pytest.mark.full
def test_claims_and_figure():
    """Fault: claims of noise that do not hold, or of one epsilon; a figure that cannot be drawn from what was found."""
    assert [claim.holds for claim in findings().claims][:3] == [True, True, None]
    figure = findings().figure()
    assert len(figure.axes) == 4 and all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
