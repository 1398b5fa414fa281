"""Findings: intervals that cover, verdicts that can fail, pages that stand alone."""

import json

import numpy as np
import pytest

from fedjax_sim.study import findings as module
from fedjax_sim.study.findings import Findings, measured
from fedjax_sim.study.page import table, write_findings


def found(comparisons, reading=("As predicted.",)):
    def figure():
        from matplotlib.figure import Figure

        figure = Figure()
        figure.subplots().plot([1, 2])
        return figure

    return Findings("trial", "Is it <so>?", comparisons, reading, figure, {"seed": 0})


def test_coverage():
    """Fault: intervals at half the width, or 99 % each instead of together.

    2,000 studies of 20 comparisons of 30 normal samples: an interval misses in 1 % of the studies; 3 % or 0.2 % would
    be off by more than six standard errors (error rate of this test below 1e-8 for the true rate).
    """
    rng = np.random.default_rng(0)
    means = rng.normal(size=(2000, 20, 30))
    lost = 0
    for study in means:
        result = found([measured({}, "mean", samples, 0.0) for samples in study])
        low, high = np.array([(row["low"], row["high"]) for row in result.rows()]).T
        lost += bool(((low > 0) | (high < 0)).any())
    assert 4 <= lost <= 42
    wide = found([measured({}, "mean", means[0, 0], 0.0)])
    assert wide._critical(29) < result._critical(29)


@pytest.mark.parametrize(
    "samples, predicted, kind, holds",
    [
        ([1.0, 1.1, 0.9, 1.0], 1.0, "exact", True),
        ([1.0, 1.1, 0.9, 1.0], 3.0, "exact", False),
        ([1.0, 1.1, 0.9, 1.0], 3.0, "upper bound", True),
        ([1.0, 1.1, 0.9, 1.0], 0.2, "upper bound", False),
        ([0.0], 0.0, "exact", True),
        ([1.0], 1.0, "exact", True),
        ([1.0], 1.0001, "exact", False),
        ([1.0, 2.0], None, "exact", None),
        ([1.0, 1.1, 0.9, 1.0], 3.0, "estimate", None),
    ],
)
def test_verdicts(samples, predicted, kind, holds):
    """Fault: a wrong prediction that counts as right, a bound taken for an equality, a number without noise let off."""
    result = found([measured({"cohort_size": 3}, "variance", samples, predicted, kind=kind)])
    row = result.rows()[0]
    assert row["holds"] is holds
    if predicted:
        assert row["ratio"] == pytest.approx(np.mean(samples) / predicted)
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert ("do not" in result.verdict()) == (holds is False)


@pytest.mark.parametrize(
    "samples, predicted, words",
    [([1.0, np.nan], 1.0, "samples"), ([], 1.0, "samples"), ([1.0], np.inf, "predicted")],
)
def test_wrong_numbers_are_refused(samples, predicted, words):
    """Fault: the mean of a diverged run printed as a result."""
    with pytest.raises(ValueError, match=f"{words}: expected"):
        measured({}, "loss", samples, predicted)


def test_page(tmp_path):
    """Fault: a string that is not escaped, a condition that is lost, a page that loads something, NaN in the JSON."""
    rows = [measured({"sampler": s, "seed": 1}, "<b>", [1.0, 1.1, 1.2], p) for s, p in (("a", 1.1), ("b", 9.0))]
    result = found(rows, ["<script>alert(1)</script>"])
    columns, lines = table(result)
    assert columns[:2] == ["sampler", "quantity"] and "seed" not in columns  # it never changes
    assert [line[-1] for line in lines] == ["", "OUTSIDE"]
    page = write_findings(result, tmp_path / "new").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "&lt;b&gt;" in page and "http://" not in page
    content = json.loads((tmp_path / "new" / "findings.json").read_text(), parse_constant=pytest.fail)
    assert content["rows"][1]["holds"] is False and content["options"] == {"seed": 0}
    assert (tmp_path / "new" / "table.csv").read_text().count("\n") == 3
    assert (tmp_path / "new" / "figure.png").read_bytes()[:4] == b"\x89PNG"
    assert module.CONFIDENCE == 0.99
