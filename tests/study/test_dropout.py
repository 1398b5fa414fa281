"""The study of dropouts in secure aggregation: closed forms hold, and others would not."""

import functools

import pytest

from fedjax_sim.study.dropout.figure import dropout_figure
from fedjax_sim.study.dropout.question import GRAPHS, dropout
from fedjax_sim.theory import abort_probability, expected_messages

SMALL = {"num_clients": 30, "neighbours": 8, "dropouts": (0.05, 0.1, 0.14), "num_rounds": 2000}


@functools.cache
def findings():
    return dropout(**SMALL)


def test_predictions_hold():
    """Catches a step that nobody leaves, and an abort that counts other holders."""
    rows = findings().rows()
    assert [row for row in rows if row["holds"] is not True] == [] and len(rows) == 2 * 3 * 2
    shares = [row["measured"] for row in rows if row["part"] == GRAPHS[0] and row["quantity"] == "aborted share"]
    assert shares[0] < 0.05 and shares[2] > 0.4


def test_it_can_tell_another_probability():
    """Catches intervals that would hold any probability: one of steps left with 1.1 times the stated one."""
    found = findings()
    wrong = {0.05: 0.055, 0.1: 0.11, 0.14: 0.154}

    def mistaken(one):
        p = wrong[one.conditions["dropout"]]
        if one.quantity == "messages in a sum":
            return one._replace(predicted=expected_messages(30, p))
        return one._replace(predicted=abort_probability(30, 18, p))

    ones = [mistaken(one) for one in found.comparisons if one.conditions["part"] == GRAPHS[0]]
    rows = found._replace(comparisons=ones).rows()
    held = {(row["quantity"], row["dropout"]): row["holds"] for row in rows}
    assert not any(held["messages in a sum", p] for p in SMALL["dropouts"])
    assert not any(held["aborted share", p] for p in (0.1, 0.14))
    assert len(found.figure().axes) == 2 and [claim.holds for claim in found.claims][:2] == [True, True]


@pytest.mark.parametrize(
    "options, told",
    [
        ({"neighbours": 7}, "neighbours: expected an even number"),
        ({"neighbours": 30}, "neighbours: expected"),
        ({"threshold_share": 0.5}, "threshold_share: expected"),
        ({"dropouts": (0.2, 0.1)}, "dropouts: expected rising"),
        ({"dropouts": (float("nan"),)}, r"dropouts\[0\]: expected"),
        ({"num_rounds": 1}, "num_rounds: expected"),
    ],
)
def test_wrong_options(options, told):
    """Catches a study that runs before it finds that it cannot."""
    with pytest.raises(ValueError, match=told):
        dropout(**SMALL | options)


def test_everybody_leaves():
    """Fault: theory that is drawn at a probability above 1."""
    options = SMALL | {"dropouts": [1.0], "threshold_share": 0.6, "neighbours": 4, "num_clients": 9}
    assert len(dropout_figure([], options).axes) == 2
