"""The study of breakdown: points and bounds hold, and others would not."""

import functools

import pytest

from fedjax_sim.study.breakdown.question import breakdown

SMALL = {"num_messages": 15, "num_byzantine": 4, "attackers": (2, 5), "dimension": 6, "num_draws": 20}


@functools.cache
def findings():
    return breakdown(**SMALL)


@pytest.mark.full
def test_predictions_hold():
    """Catches a rule that breaks earlier or later than its closed form, and an attack past a proven bound."""
    rows = findings().rows()
    assert [row for row in rows if row["holds"] is not True] == []
    points = {row["rule"]: row["measured"] for row in rows if row["part"] == "far messages"}
    assert len(points) == 8 and (points["mean"], points["trimmed mean"], points["median"]) == (1, 5, 8)
    assert points["multi-Krum"] == 7 and points["centred clipping"] == 15  # 9 are taken; none breaks it
    assert len(rows) == 8 + 5 * 2


@pytest.mark.full
def test_it_can_tell_another_point():
    """Catches intervals that would hold any breakdown point, and attacks that do nothing."""
    found = findings()
    points = [one for one in found.comparisons if one.conditions["part"] == "far messages"]
    wrong = [one._replace(predicted=one.predicted + 1) for one in points]
    assert not any(row["holds"] for row in found._replace(comparisons=wrong).rows())
    shifts = {(one.conditions["rule"], one.conditions["attackers"]): one.measured for one in found.comparisons}
    for rule in ("median", "Krum", "trimmed mean", "geometric median"):
        assert shifts[rule, 5] > 1.5 * shifts[rule, 2] > 0.05
    assert len(found.figure().axes) == 2
    # At most 5 of 15 attack near; in the first part all conclusions hold for any m and f.
    assert [claim.holds for claim in found.claims[:6]] == [True] * 6


@pytest.mark.parametrize(
    "options, told",
    [
        ({"num_messages": 14}, "num_messages: expected an odd number"),
        ({"num_byzantine": 7}, "num_byzantine: expected"),
        ({"attackers": (5, 2)}, "attackers: expected rising"),
        ({"attackers": ()}, "attackers: expected"),
        ({"num_draws": 1}, "num_draws: expected"),
    ],
)
def test_wrong_options(options, told):
    """Catches a study that runs for minutes before it finds that it cannot."""
    with pytest.raises(ValueError, match=told):
        breakdown(**SMALL | options)
