"""The study of bits: floors, bytes, two roundings, and compressors with and without a memory."""

import functools

import pytest

from fedjax_sim.study.bits.question import bits
from fedjax_sim.study.findings import rows_of

SMALL = {"bits": (2, 4), "cohort_sizes": (1, 10), "step_sizes": (0.08, 0.02), "num_runs": 600, "num_releases": 1000}


@functools.cache
def findings():
    return bits(**SMALL)


@pytest.mark.full
def test_predictions_hold():
    """Fault: levels at another distance, biased rounding, clients that share random bits, a floor without 1 - r^2."""
    rows = findings().rows()
    assert [row for row in rows if row["holds"] is False] == []
    parts = {row["part"] for row in rows}
    assert parts >= {
        "path",
        "floor",
        "ratio of floors",
        "alike, at 0.3",
        "spread",
        "near zero",
        "crossover",
        "feedback",
    }
    assert all(row["ratio_high"] - row["ratio_low"] < 0.4 for row in rows if row["part"] in ("path", "floor"))


@pytest.mark.full
def test_it_can_tell_a_bit():
    """Suresh et al. 2017, section 2.1. Fault: intervals that also hold the floor of another grid or another b."""
    (ratio,) = rows_of(findings().comparisons, part="ratio of floors")
    assert ratio["predicted"] == pytest.approx(25) and not ratio["low"] <= 7**2 <= ratio["high"]
    (few,) = rows_of(findings().comparisons, part="floor", bits=2, messages="textbook grid")
    for wrong in ((3 / 2) ** 2, 0.5, 0.25):  # the grid with zero, nearest rounding, a floor without 1 / m
        assert not few["low"] <= wrong * few["predicted"] <= few["high"]


@pytest.mark.full
def test_roundings():
    """Suresh et al. 2017, section 2. Fault: nearest rounding that averages out, zeros as costly as other numbers."""
    (crossover,) = [row for row in rows_of(findings().comparisons, part="crossover") if "0.3" in row["messages"]]
    assert crossover["predicted"] == pytest.approx(7 / 3)
    nearest = [row["measured"] for row in rows_of(findings().comparisons, part="alike, at 0.3")
               if row["messages"].startswith("nearest")]  # fmt: skip
    assert nearest[0] == pytest.approx(nearest[1], rel=1e-4) and len(nearest) == 2
    spread = {row["cohort_size"]: row["measured"] for row in rows_of(findings().comparisons, part="spread")
              if row["messages"].startswith("nearest")}  # fmt: skip
    assert spread[10] < 0.3 * spread[1]
    small = {
        row["messages"]: row["measured"] for row in rows_of(findings().comparisons, part="near zero", cohort_size=1)
    }
    formula = (2 / 3) ** 2 / 6
    assert small["stochastic, textbook grid"] == pytest.approx(1.4985 * formula, rel=2e-3)
    assert small["stochastic, grid with zero"] < 0.15 * formula


@pytest.mark.full
def test_feedback():
    """Karimireddy et al. 2019. Fault: a memory that is dropped, of the wrong sign, or kept without feedback."""
    ends = {(row["messages"], row["step_size"]): row["measured"]
            for row in rows_of(findings().comparisons, part="feedback")}  # fmt: skip
    for name in ("top-k", "sign"):
        assert ends[name, 0.02] > 0.5 * ends[name, 0.08] > 0.05
        fed = [ends[f"{name}, error feedback", step] for step in (0.08, 0.02)]
        assert fed[1] < 0.05 * ends[name, 0.02] and fed[1] < 0.25 * fed[0]
    assert ends["top-k, EF21", 0.08] < 1e-8


@pytest.mark.parametrize(
    "options, words",
    [
        ({"bits": ()}, "bits: expected"),
        ({"bits": (4, 2)}, "bits: expected"),
        ({"bits": (1, 2)}, "bits: expected"),
        ({"bits": (2, 3)}, "bits: expected even"),
        ({"cohort_sizes": (2, 4)}, "cohort_sizes"),
        ({"step_sizes": (0.02, 0.04)}, "step_sizes: expected"),
        ({"step_sizes": (1.0,)}, "step_sizes: expected"),
        ({"num_runs": True}, "num_runs: expected"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot."""
    with pytest.raises((TypeError, ValueError), match=words):
        bits(**SMALL | options)


@pytest.mark.full
def test_figure():
    """Fault: a figure that cannot be drawn from what was found, a conclusion that depends on many runs."""
    figure = findings().figure()
    assert [claim.words for claim in findings().claims if claim.holds is not True] == []
    assert len(figure.axes) == 4 and all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
