"""The clip study: bias, sampling and noise add up to what rounds show, and the best threshold lies inside."""

import functools

import numpy as np
import pytest

from fedjax_sim import theory
from fedjax_sim.study.clip.clients import UnequalClients
from fedjax_sim.study.clip.figure import PERSONAL
from fedjax_sim.study.clip.question import clip
from fedjax_sim.study.findings import rows_of

SMALL = {
    "num_clients": 60, "dimension": 5, "cohort_size": 12, "clip_norms": (0.2, 1.0, 4.0, 40.0), "factors": (0.1,),
    "noise_multipliers": (1.0,), "num_rounds": 1500,
}  # fmt: skip


@functools.cache
def findings():
    return clip(**SMALL)


@functools.cache
def clients():
    return UnequalClients(60, 5, 1.0, 12, 0)


@pytest.mark.full
def test_predictions_hold():
    """Fault: noise of z C / sqrt(m), a clip that scales up, a sampler without its finite population, a floor without
    1 / (1 - r^2)."""
    rows = findings().rows()
    assert [row for row in rows if row["holds"] is False] == []
    parts = {row["part"] for row in rows if row["holds"]}
    assert parts == {"clip norm", "around the best", "bias alone", PERSONAL, "floor"}
    assert all(row["ratio_high"] - row["ratio_low"] < 0.6 for row in rows if row["ratio"])
    assert len(rows_of(findings().comparisons, part="floor", predicted=None)) == 3  # where updates are clipped


@pytest.mark.full
def test_interior_optimum():
    """McMahan et al. 2018, section 2. Fault: an error monotone in C; limits other than noise and bias."""
    low, best, high = rows_of(findings().comparisons, part="around the best")
    assert best["high"] < min(low["low"], high["low"])
    ends = [row["clip_norm"] for row in rows_of(findings().comparisons, part="clip norm")]
    first, last = (clients().parts(C, 1.0) for C in (ends[0], ends[-1]))
    assert first.bias > 0.9 * first.total and last.noise > 0.9 * last.total
    assert best["clip_norm"] == theory.best_clip_norm(clients().values, noise_multiplier=1.0, cohort_size=12)


@pytest.mark.full
def test_it_notices_what_is_left_out():
    """Fault: intervals so wide that a total without its bias, sampling or noise would be right too."""
    row = next(row for row in rows_of(findings().comparisons, part="clip norm") if row["clip_norm"] == 1.0)
    parts = clients().parts(1.0, 1.0)
    assert row["low"] <= parts.total <= row["high"]
    for name in ("bias", "sampling", "noise"):
        assert not row["low"] <= parts.total - getattr(parts, name) <= row["high"]


@pytest.mark.full
def test_personal_thresholds_have_no_epsilon():
    """Fault: personal thresholds presented as a private mechanism, though their sensitivity depends on the data."""
    (row,) = rows_of(findings().comparisons, part=PERSONAL)
    assert row["clip_norm"] == pytest.approx(0.1 * np.linalg.norm(clients().values, axis=1).max(), rel=1e-3)
    assert [claim.holds for claim in findings().claims if "for which no epsilon can be stated" in claim.words] == [True]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"clip_norms": ()}, "clip_norms: expected"),
        ({"clip_norms": (0.0,)}, "clip_norms: expected"),
        ({"factors": (2.0,)}, "factors: expected"),
        ({"noise_multipliers": (float("nan"),)}, "noise_multipliers: expected"),
        ({"cohort_size": 61}, "cohort_size: expected"),
        ({"step_size": 0.01}, "step_size: expected"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot."""
    with pytest.raises(ValueError, match=words):
        clip(**SMALL | options)


@pytest.mark.full
def test_claims_and_figure():
    """Fault: conclusions that fewer rounds refute, a figure that cannot be drawn from what was found."""
    # These runs are too few to tell the floors of the two smallest clip norms apart.
    words = [claim.words for claim in findings().claims if claim.holds is not True]
    assert len(words) == 1 and "error floor" in words[0]
    figure = findings().figure()
    assert len(figure.axes) == 4 and all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
