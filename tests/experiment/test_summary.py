"""What a run's summary says beside its rounds. What statistics find is in tests/algorithms/analytics."""

from __future__ import annotations

import optax
import pytest

from fedjax_sim import aggregation, algorithms, sampling
from fedjax_sim.experiment.summary import how_clients_count
from tests.laws import cases, problems


def test_how_clients_count():
    """Of every level, and as far as a rule's facts say. Catches the cloud's words for the devices, and a rule that
    takes one message of many called a mean."""
    step, uniform = {"optimizer": optax.sgd(0.1), "num_steps": 1}, aggregation.fixed_mean(4.0)

    def told(aggregator, **options):
        made = algorithms.fedavg(problems.linear_loss, sampling.full(4), **step, aggregator=aggregator, **options)
        return how_clients_count(made.parts)["clients_count"]

    by_examples = "by the weights that they report, such as their examples"
    assert told(aggregation.mean()) == by_examples
    assert told(aggregation.mean(), weighting="uniform") == told(uniform) == "alike"
    assert told(aggregation.krum(1)) == told(aggregation.median()) == "not by their examples"
    edges = {"group_size": 3, "edge_aggregator": aggregation.median(), **step}
    made = algorithms.hierarchical_fedavg(problems.linear_loss, sampling.full(4), **edges)
    words = how_clients_count(made.parts)["clients_count"]
    assert words == f"{by_examples}; inside of each edge: not by their examples"


@pytest.mark.every_row
def test_every_algorithm_says_how_clients_count():
    """Fault: a run whose summary cannot be written after its last round, as of SplitGNN inside of a federation."""
    stars = {name: make().parts for name, make in cases.CASES["algorithms"].items()}
    words = {name: how_clients_count(star) for name, star in stars.items()}
    assert all(told["clients_count"] for name, told in words.items() if stars[name] is not None)
    assert "inside of each edge: as parts of one step" in words["hierarchical_split_gnn"]["clients_count"]
