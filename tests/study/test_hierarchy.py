"""The hierarchy study: its predictions hold, and it would notice if they did not."""

import functools

import pytest

from fedjax_sim import theory
from fedjax_sim.study.hierarchy.quadratics import estimated_rounds, groupings
from fedjax_sim.study.hierarchy.question import hierarchy
from fedjax_sim.study.quadratic_settings import quadratic_clients

SMALL = {"num_clients": 6, "num_edges": 2, "edge_rounds": (1, 4)}


@functools.cache
def findings(model_clients):
    return hierarchy(**SMALL, model_clients=model_clients, model_rounds=2, num_runs=2)


@pytest.mark.full
@pytest.mark.parametrize("model_clients", [0, 9])
def test_predictions_hold(model_clients):
    """Fault: a hierarchy or a closed form that is off; one edge round that is not flat FedAvg."""
    rows = [row for row in findings(model_clients).rows() if row["predicted"] is not None]
    assert [row for row in rows if row["kind"] == "exact" and row["holds"] is not True] == []
    assert {row["part"] for row in rows} == {"fixed point", "speed"} | ({"one edge round"} if model_clients else set())
    for row in rows:
        if row["part"] == "speed":
            assert abs(row["measured"] - row["predicted"]) < 1 + 0.3 * row["predicted"]


@pytest.mark.full
def test_it_can_tell_another_number_of_edge_rounds():
    """Fault: a resolution so generous that one round more would hold, or groups that make no difference."""
    problem = quadratic_clients(6, 2, 2.0, 0)
    found = {(row["groups"], row["edge_rounds"]): row for row in findings(0).rows() if row["part"] == "fixed point"}
    for name, edges in groupings(problem, 2).items():
        wrong = theory.hierarchy_fixed_point(*problem, edges, edge_rounds=5, num_steps=5, step_size=0.1)
        distance = float(((wrong - problem.optimum) ** 2).sum() ** 0.5)
        assert not found[name, 4]["low"] <= distance <= found[name, 4]["high"]
    assert found["alike", 4]["low"] > found["mixed", 4]["high"]
    assert abs(found["alike", 1]["measured"] - found["mixed", 1]["measured"]) < 1e-5


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_edges": 4}, "num_edges: expected a divisor of 6"),
        ({"edge_rounds": (2, 4)}, "edge_rounds: expected rising numbers from 1"),
        ({"edge_rounds": ()}, "edge_rounds: expected"),
        ({"step_size": float("nan")}, "step_size: expected"),
        ({"model_clients": 1}, "model_clients: expected"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot."""
    with pytest.raises(ValueError, match=words):
        hierarchy(**SMALL | options)


@pytest.mark.full
def test_claims_and_figure():
    """Fault: claims or a figure that cannot be made of what was found, or that need the model."""
    decided = [claim.holds for claim in findings(0).claims]
    assert decided[:5] == [True] * 5 and decided[5:] == [None, None]  # the last two are about the model
    figure = findings(0).figure()
    assert len(figure.axes) == 3 and all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)


def test_a_cloud_round_may_take_the_whole_way():
    """Fault: the logarithm of zero, to which many edge rounds of many local steps underflow."""
    assert 0 < estimated_rounds(0.0) < estimated_rounds(0.01) == 1.0
