"""Rows of the server's own, and FLTrust on them, from a config."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_sim import aggregation, population
from fedjax_sim.aggregation.robust import reference_data
from fedjax_sim.config.build import build
from fedjax_sim.config.document import ConfigError, load
from fedjax_sim.population.describe import digest

SMALL = {"num_clients": 40, "alpha": 100.0, "held_out_clients": 3}
TRUST = """
[data]
name = "digits"
num_clients = 40
alpha = 100.0
[data.with_server_rows]
examples = 100
[model]
name = "linear"
[sampler]
name = "uniform"
cohort_size = 20
[algorithm]
name = "fedavg"
num_steps = 5
batch_size = 10
[aggregator]
name = "fltrust"
[aggregator.corrupted]
attack = {name = "scaled", factor = -3.0}
who = {name = "share_of_clients", share = 0.6}
[run]
rounds = 12
evaluate_every = 12
devices = 1
"""


def test_rows_are_moved():
    """Catches a row that is lost, or in both; labels that leave their pixels; the same rows for every seed."""
    whole = population.digits(**SMALL)
    one, other = (population.with_server_rows(whole, examples=60, seed=seed) for seed in (0, 1))
    for data in (one, other):
        both = {leaf: np.concatenate([data.server[leaf], data.test[leaf]]) for leaf in whole.test}
        assert len(data.server["y"]) == 60 and data.held_out is None

        def table(rows):
            joined = np.concatenate([rows["x"], rows["y"][:, None]], axis=1)
            return joined[np.lexsort(joined.T)]

        np.testing.assert_array_equal(table(both), table(whole.test))
    assert not np.array_equal(one.server["x"], other.server["x"])
    assert len({digest(whole), digest(one), digest(other)}) == 3


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda data: population.with_server_rows(data.train), "data: expected a FederatedData"),
        (lambda data: population.with_server_rows(data, examples=360), r"examples: expected .*\[1, 358\].*359 rows"),
        (lambda data: population.with_server_rows(population.with_server_rows(data)), "server holds nothing"),
        (
            lambda data: population.with_server_rows(
                population.backdoor(data, trigger=population.pixels([0]), target=7, clients=[0], rows=0.5)
            ),
            "without a backdoor",
        ),
    ],
)
def test_wrong_data(make, told):
    """Catches rows that the server would share with a test set, and numbers that no set holds."""
    with pytest.raises((TypeError, ValueError), match=told):
        make(population.digits(**SMALL))


def after(rounds, settings, tmp_path):
    (tmp_path / "run.toml").write_text(TRUST)
    made = build(load(tmp_path / "run.toml", settings))
    state = made.algorithm.init(made.key, made.params, made.data.train)
    step = jax.jit(made.algorithm.step)
    for _ in range(rounds):
        state, info = step(made.key, state, made.data.train)
    return made, info, made.evaluation(made.algorithm.params(state))


@pytest.mark.full
def test_fltrust_from_a_config(tmp_path):
    """Three fifths of the clients send -3 times their update. Catches rows other than the server's, a server that does
    not train or trains otherwise than clients, and attackers that are trusted."""
    made, info, found = after(15, [], tmp_path)
    own = made.algorithm.parts.aggregator.start(None)
    np.testing.assert_array_equal(own.examples["x"], made.data.server["x"])
    assert own.mask.all() and info["attackers_share"] > 0.4
    assert info["trusted_share"] <= 1 - info["attackers_share"]
    _, _, mean = after(15, ["aggregator.name=mean"], tmp_path)
    assert found["test_accuracy"] > 0.85 and mean["test_accuracy"] < 0.3


def test_without_rows_it_is_refused():
    """Catches a server that trusts nobody since it has no data."""
    with pytest.raises(ConfigError, match=r"server_data: .*got None.*with_server"):
        build(load(None, ["data.num_clients=40", "sampler.cohort_size=10", "aggregator.name=fltrust"]))


def test_the_server_works_as_clients_do(monkeypatch):
    """Catches local work that is not the algorithm's, and a refusal of a sampler that FLTrust suits."""
    found = []

    def seen(server_work, server_data):
        found.append(server_work.facts.all_steps)
        return aggregation.fltrust(server_work, server_data)

    monkeypatch.setattr(reference_data, "fltrust", seen)
    rows = ["data.num_clients=40", "sampler.cohort_size=10", "aggregator.name=fltrust", "data.with_server_rows={}"]
    build(load(None, [*rows, "algorithm.name=fedprox", "algorithm.num_steps=7"]))
    build(load(None, [*rows, "sampler.name=weighted"]))
    assert found == [7, 5]
