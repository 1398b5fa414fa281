"""Privacy over a hierarchy: each level is named, and has a statement and a delta of its own."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import jax
import optax
import pytest

from fedjax_sim import aggregation, algorithms, population, sampling, transform
from fedjax_sim.privacy import Mechanism, account, mechanism_of
from fedjax_sim.privacy.commands import account_report, calibrate_report
from fedjax_sim.privacy.words import explain
from fedjax_sim.running import loop
from fedjax_sim.running.privacy_ledger import default_delta
from tests.laws import test_privacy as law
from tests.refusals import refused

KEY = jax.random.key(0)
EDGES = {"noise_multiplier": 1.0, "scheme": "full", "population_size": 20, "cohort_size": 20, "num_slots": 20}
LEVEL = {"level": "edge", "num_members": 1000}


def test_each_level_has_its_own_statement():
    """Twenty rounds over all of 20 edges with 1,000 clients: 17.152 for an edge, 55.065 for a client at that delta.

    Catches the edges' epsilon as the clients', and a delta above one over the number of clients.
    """
    edges = Mechanism(**EDGES, details=LEVEL)
    inside = edges.of_members()
    assert (edges.protected, inside.protected) == ("edge with all its clients", "client of an edge")
    assert (edges.num_units, inside.num_units) == (20, 1000)
    delta = default_delta(20)
    assert account(edges, 20, delta).epsilon == pytest.approx(17.152, abs=1e-3)
    assert account(inside, 20, delta).epsilon == pytest.approx(55.065, abs=1e-3)
    halved = Mechanism(**EDGES | {"noise_multiplier": 0.5})  # the noise of one message that moves by two clip norms
    assert account(inside, 20, delta).epsilon == account(halved, 20, delta).epsilon
    answer = account_report(rounds=20, delta=delta, member_delta=default_delta(1000), mechanism=edges)
    assert answer.fields["members"]["delta"] == pytest.approx(5.0e-4, rel=0.01)
    assert "for each edge with all its clients" in answer.text and "for each client of an edge" in answer.text
    assert "all 20 edges in every round" in answer.text and "20 clients" not in answer.text
    found = calibrate_report(epsilon=2.0, delta=delta, rounds=20, mechanism=edges)
    assert found.fields["members"]["epsilon"] > 2 * found.fields["spent"]["epsilon"]
    assert Mechanism.from_dict(json.loads(json.dumps(inside.as_dict()))) == inside
    assert Mechanism(**EDGES).of_members() is None and Mechanism(**EDGES).protected == "client"


def test_an_unknown_number_of_clients_is_said():
    """Catches a delta that is called small enough for a population that nobody counted."""
    inside = dataclasses.replace(Mechanism(**EDGES), details={"level": "region"}).of_members()
    assert inside.num_units is None and inside.protected == "client of a region"
    assert any("How many clients there are" in sentence for sentence in account(inside, 1, 1e-9).assumptions)


def test_shares_of_noise_that_an_edge_may_not_send():
    """Catches an epsilon for noise in shares of edges, one of which sends nothing where its clients drop out."""
    clients = law.clients(["edge"])
    options = {"group_size": clients.group_size, "num_steps": 1, "edge_weighting": "uniform"}
    options |= {"transform": transform.distributed_gaussian(1.0, 1.0, 10), "aggregator": aggregation.fixed_mean(10.0)}
    build = partial(
        algorithms.hierarchical_fedavg, population.quadratic_loss, sampling.full(10), optax.sgd(0.1), **options
    )
    inside = sampling.full(clients.group_size)
    assert mechanism_of(build(), population=clients).place == "distributed"
    for edge_sampler in (sampling.with_dropout(inside, 0.5), sampling.poisson(clients.group_size, 0.9)):
        with refused("client", rule="in every round"):
            mechanism_of(build(edge_sampler=edge_sampler))


def test_who_adds_the_noise_of_an_edge():
    """Catches noise that is said to be added before anything leaves a client, and below it that it is not."""
    made = Mechanism(**EDGES, place="local", details=LEVEL)
    for subject in (made, made.of_members()):
        words = explain(subject)
        assert "in every message, by its edge" in words and "each edge adds noise to its own message" in words
        assert "leaves the client" not in words and "by its client." not in words


@pytest.mark.full
def test_a_run_states_both(tmp_path):
    """A run over edges, resumed: its summary names edges and clients, each with its own delta.

    Catches a summary that tells the edges' epsilon alone, and a ledger that loses the level.
    """
    algorithm, people = law.made("gaussian_mechanism", ["edge"]), law.clients(["edge"])
    loop.run(KEY, algorithm, law.START, people, 2, directory=tmp_path / "run")
    loop.run(KEY, algorithm, law.START, people, 3, directory=tmp_path / "run", resume=True)
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]
    assert told["unit"] == "edge with all its clients" and told["members"]["unit"] == "client of an edge"
    assert told["delta"] == default_delta(10) and told["members"]["delta"] == default_delta(20)
    assert told["rounds"] == told["members"]["rounds"] == 3
    assert told["members"]["epsilon"] > told["epsilon"]
    for words in ("for each edge with all its clients", "for each client of an edge"):
        assert words in told["statement"] and words in told["explanation"]
