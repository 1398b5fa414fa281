"""The study of what robust rules cost without attackers."""

import functools

import pytest

from fedjax_sim.report.charts import LOOKS
from fedjax_sim.study.findings import comparisons_of, measured, rows_of
from fedjax_sim.study.price_of_robustness.figure import price_of_robustness_figure
from fedjax_sim.study.price_of_robustness.question import price_of_robustness

SMALL = {
    "num_messages": 27, "num_byzantine": 3, "dimension": 200, "num_draws": 300, "num_clients": 14, "tolerated": 2,
    "alphas": (100.0, 0.1), "num_rounds": 40, "num_runs": 2,
}  # fmt: skip


@functools.cache
def findings():
    return price_of_robustness(**SMALL)


@pytest.mark.full
def test_predictions_hold():
    """Catches a median that is another order statistic, or buckets that overlap or leave messages out."""
    rows = findings().rows()
    judged = [row for row in rows if row["holds"] is not None]
    assert len(judged) == 3 and all(row["holds"] for row in judged)
    median = {row["bucket_size"]: row for row in judged if row["rule"] == "median"}
    assert median[1]["predicted"] > 1.5 > median[3]["predicted"]
    for row in median.values():  # many messages' pi / 2, or no price at all
        assert not row["low"] <= 1.0 <= row["high"]
    assert not median[3]["low"] <= 1.5708 <= median[3]["high"]
    krum = {row["bucket_size"]: row["measured"] for row in rows if row["rule"] == "Krum" and row["alpha"] is None}
    assert 15 < krum[1] < 27 and 5 < krum[3] < 9  # a message's variance, or a bucket's


@pytest.mark.full
def test_unlike_clients_pay_more():
    """Karimireddy et al. 2022, table 1. Catches clients that are alike at every alpha, and a loss of the wrong sign."""
    found = findings()
    lost = {(one.conditions["rule"], one.conditions["alpha"], one.conditions["bucket_size"]): one.measured
            for one in comparisons_of(found.comparisons, "digits", "loss against the mean")}  # fmt: skip
    assert lost["mean", 100.0, 1] == 0 and lost["mean", 0.1, 1] == 0
    assert lost["median", 0.1, 1] > lost["median", 100.0, 1] + 0.05
    assert lost["Krum", 0.1, 1] > lost["Krum", 0.1, 2]
    assert [claim.holds for claim in found.claims][:3] == [True] * 3  # two runs on the digits have any spread
    assert len(found.figure().axes) == 3 and len(found.claims) == 5


@pytest.mark.parametrize(
    "options, told",
    [
        ({"bucket_sizes": (1, 2)}, "bucket_sizes: expected sizes that divide"),
        ({"bucket_sizes": (3, 1)}, "bucket_sizes: expected rising"),
        ({"num_byzantine": 4}, "num_byzantine: expected"),
        ({"tolerated": 3}, "tolerated: expected"),
        ({"num_clients": 5}, "num_clients: expected"),
        ({"alphas": ()}, "alphas: expected"),
    ],
)
def test_wrong_options(options, told):
    """Catches a study that runs for minutes before it finds that it cannot."""
    with pytest.raises(ValueError, match=told):
        price_of_robustness(**SMALL | options)


def test_more_buckets_than_looks():
    """Fault: a figure that is refused after the study has run."""
    sizes = [1, 3, 5, 7, 9, 15, 21, 35, 45]
    found = [measured({"part": "normal messages", "rule": "median", "bucket_size": size}, "variance", 1.0)
             for size in sizes]  # fmt: skip
    figure = price_of_robustness_figure(rows_of(found), {"bucket_sizes": sizes, "num_clients": 0})
    assert len(figure.axes) == 1 and len(figure.axes[0].get_legend().get_texts()) == 1 + len(LOOKS)
