"""Findings: intervals that cover, verdicts that can fail, pages that load nothing."""

import json

import numpy as np
import pytest

from fedjax_sim.study import findings as module
from fedjax_sim.study.findings import Claim, Comparison, Findings, few, least_runs, measured
from fedjax_sim.study.page import table, write_findings


def found(comparisons, claims=()):
    def figure():
        from matplotlib.figure import Figure

        figure = Figure()
        figure.subplots().plot([1, 2])
        return figure

    return Findings(
        name="trial",
        question="Is it <so>?",
        comparisons=comparisons,
        claims=claims,
        figure=figure,
        options={"seed": 0},
    )


@pytest.mark.slow
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
    assert module.critical_value(29, 1) < module.critical_value(29, 20)


@pytest.mark.full
def test_squares():
    """Fault: studies with so few runs that skewed means miss far more often than 1 %: at 20 runs it is one in three.

    500 studies of 20 comparisons, chi-square with one degree of freedom, at the least size that is allowed: 1.4 % miss
    (60,000 means); more than 16 of 500 has a chance of 1e-3, and at 400 runs, where 4 % miss, fewer have one of 0.2.
    """
    lost = {}
    for size in (20, least_runs(1)):
        rng, lost[size] = np.random.default_rng(1), 0
        for _ in range(500):
            result = found([measured({}, "square", x, 1.0) for x in rng.standard_normal((20, size), np.float32) ** 2])
            lost[size] += not all(row["holds"] for row in result.rows())
    assert lost[least_runs(1)] <= 16 and lost[20] > 100
    assert least_runs(7) * 7 >= least_runs(1) > (least_runs(7) - 1) * 7


def test_a_number_without_an_interval(tmp_path):
    """Fault: a random number without samples shown as certain; NaN in the JSON."""
    result = found([Comparison({}, "rank", 0.5, np.nan), measured({}, "mean", [1.0, 2.0])])
    assert [row["low"] is None for row in result.rows()] == [True, False]
    assert [line[-2] == "\N{EN DASH}" for line in table(result)[1]] == [True, False]
    write_findings(result, tmp_path / "new")


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


@pytest.mark.parametrize("samples", [[], [1.0], [1.0, np.nan]])
def test_wrong_runs_are_refused(samples):
    """Fault: a diverged run among few that is found when the JSON is written, after hours."""
    with pytest.raises(ValueError, match="samples: expected"):
        few({}, "loss", samples)


def test_lists_have_no_column(tmp_path):
    """Fault: pictures that fill a page's table, or that the file a figure is drawn from lacks."""
    result = found([measured({"sampler": s, "pictures": [s]}, "loss", [1.0, 1.1, 1.2]) for s in ("a", "b")])
    write_findings(result, tmp_path)
    assert table(result)[0][:2] == ["sampler", "quantity"]
    assert (tmp_path / "table.csv").read_text().startswith("sampler,quantity,")
    assert json.loads((tmp_path / "findings.json").read_text())["rows"][1]["pictures"] == ["b"]


def test_page(tmp_path):
    """Fault: a string that is not escaped, a condition that is lost, a page that loads something, NaN in the JSON."""
    rows = [measured({"sampler": s, "seed": 1}, "<b>", [1.0, 1.1, 1.2], p) for s, p in (("a", 1.1), ("b", 9.0))]
    result = found(rows, [Claim("<script>alert(1)</script>", False, "1 < 2"), Claim("Others.", None)])
    columns, lines = table(result)
    assert columns[:2] == ["sampler", "quantity"] and "seed" not in columns  # it never changes
    assert [line[-1] for line in lines] == ["", "OUTSIDE"]
    page = write_findings(result, tmp_path / "new").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "&lt;b&gt;" in page and "http://" not in page
    assert "Does not hold here: &lt;script" in page and "Not measured here: Others." in page
    content = json.loads((tmp_path / "new" / "findings.json").read_text(), parse_constant=pytest.fail)
    assert content["claims"][0] == {"words": "<script>alert(1)</script>", "holds": False, "numbers": "1 < 2"}
    assert content["rows"][1]["holds"] is False and content["options"] == {"seed": 0}
    assert (tmp_path / "new" / "table.csv").read_text().count("\n") == 3
    assert (tmp_path / "new" / "figure.png").read_bytes()[:4] == b"\x89PNG"
    assert module.CONFIDENCE == 0.99
