"""The study of connectivity: its predictions hold, and it would notice if they did not."""

import jax
import numpy as np
import pytest

from fedjax_sim import theory
from fedjax_sim.study.connectivity import nodes, question
from fedjax_sim.study.connectivity.claims import connectivity_claims
from fedjax_sim.study.connectivity.figure import connectivity_figure
from fedjax_sim.study.findings import Findings, measured, rows_of

SMALL = {"num_nodes": 100, "rounds": (1, 4, 16), "dimension": 1000, "few_nodes": 16}


@pytest.fixture(scope="module")
def some():
    """The study on two of its graphs, so that few programs are compiled."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, graphs in (
            (question, "DECAYING", ("torus", "random")),
            (question, "SMALL", ("ring",)),
            (nodes, "SMALL", ("ring",)),
        ):
            patch.setattr(module, name, graphs)
        return question.connectivity(**SMALL)  # the other tests of this file see all graphs again


@pytest.mark.full
def test_predictions_hold(some):
    """Fault: a spectrum, a mixing matrix or a floor that is off by more than the intervals, together at 99 %."""
    rows = some.rows()
    assert [row for row in rows if row["holds"] is False] == [] and sum(row["holds"] is True for row in rows) == 6
    assert {row["part"] for row in rows} == {"decay", "agreement", "floor"}
    assert all(row["ratio_high"] - row["ratio_low"] < 0.2 for row in rows if row["part"] == "decay")
    assert all(abs(row["ratio"] - 1) < 0.1 for row in rows if row["graph"] == "random" and row["rounds"] == 1)
    assert type(rows[0]["holds"]) is bool


@pytest.mark.slow
def test_defaults():
    """Fault: predictions off at default options."""
    assert [row for row in question.connectivity().rows() if row["holds"] is False] == []


@pytest.mark.full
def test_all_graphs():
    """Fault: a graph whose spectrum is another's."""
    rows = question.connectivity(**SMALL).rows()
    assert [row for row in rows if row["holds"] is False] == []
    assert {row["graph"] for row in rows} == {*nodes.DECAYING, *nodes.SMALL}


@pytest.mark.full
def test_it_can_tell_a_wrong_rate(some):
    """Fault: a study that would call the second eigenvalue's decay right from the first round on."""
    rows = [row for row in some.rows() if row["part"] == "decay" and row["graph"] == "torus"]
    values, kind = nodes.eigenvalues_of("torus", 100)
    start, second = theory.consensus_error(values, 0), np.sort(np.abs(values))[-2]
    assert kind == "exact" and len(rows) == 3
    for row in rows:
        assert not row["low"] <= start * second ** (2 * row["rounds"]) <= row["high"]


def test_decay_ends_where_float32_does():
    """Fault: noise of rounding compared with a prediction of 1e-30."""
    found = list(nodes.decay(jax.random.key(0), "exponential", 16, 8, marks=[1, 2, 1000], seed=0))
    assert [one.conditions["rounds"] for one in found] == [1, 2]


@pytest.mark.full
def test_the_claims_and_the_figure(some):
    """Fault: a figure or a claim that fails where a graph or a part is missing, or that cannot be drawn."""
    # Between some of the graphs no more can be told than these two, and with one row nothing.
    assert [claim.holds is not None for claim in some.claims] == [True, False, False, False, False, True]
    figure = some.draw()
    assert len(figure.axes) == 4 and all(axes.get_xlabel() for axes in figure.axes)
    one = measured({"part": "decay", "graph": "ring", "nodes": 16, "rounds": 3}, "squared distance", [0.1, 0.2], 0.15)
    assert connectivity_figure(rows_of([one]), some.options).axes
    assert {claim.holds for claim in connectivity_claims(rows_of([one]), some.options)} == {None}
    found = Findings(name="connectivity", question="", comparisons=[one], figure=lambda: None, options={})
    assert found.rows()[0]["holds"]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_nodes": 10}, "num_nodes: expected an integer"),
        ({"rounds": ()}, "rounds: expected at least one number"),
        ({"rounds": (0,)}, "rounds: expected an integer"),
        ({"few_nodes": 8}, "few_nodes: expected a power of 4"),
        ({"num_runs": 100}, "num_runs: expected an integer"),
        ({"dimension": 2}, "dimension: expected an integer"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot."""
    with pytest.raises(ValueError, match=words):
        question.connectivity(**SMALL | options)
