"""Comparisons of which some rows have clients' own models: what ranks them, and what is said of the metric."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, engine, metrics, population, sampling
from fedjax_sim.sweeps.results import Sweep, shown_by_default
from fedjax_sim.sweeps.sweep import sweep
from fedjax_sim.sweeps.table import words_on_own_models, words_on_ties
from tests.refusals import refused

SIZES = (2, 6, 4)
CENTERS = (-1.0, 0.5, 2.0)
ROWS = [{"y": np.full(n, center, np.float32)} for n, center in zip(SIZES, CENTERS, strict=True)]
CLIENTS = population.from_clients(ROWS)
WORK = {"num_steps": 60, "plan": engine.Plan(3, 3)}


def loss(params, examples, key):
    return jnp.square(params["w"][None] - examples["y"][:, None]).sum(1)


def make(name):
    options = {"coefficient": 0.0} if name == "ditto" else {}
    return getattr(algorithms, name)(loss, sampling.full(3), optax.sgd(0.1), **WORK, **options)


def judge(algorithm):
    evaluated = algorithm.evaluated
    return metrics.evaluation(
        loss, test=ROWS[1], local_test=CLIENTS, personal=evaluated.personal, has_trained=evaluated.has_trained,
        params_kind=algorithm.params_kind,
    )  # fmt: skip


@pytest.mark.full  # by default made rows are ranked
def test_owners_rank_a_sweep():
    """Catches local training that is shown with FedAvg's number, "0 ± 0", though owners gain everything by it.

    FedAvg ends at the mean of the clients' optima, weighted by rows; a client alone, or Ditto without a pull, at its
    own, whose loss is 0.
    """
    names = ["fedavg", "ditto", "local"]
    found = sweep(make, {"w": jnp.zeros(1)}, CLIENTS, 1, grid={"name": names}, evaluation_of=judge)
    assert shown_by_default(found) == "owner_loss"
    mean = np.average(CENTERS, weights=SIZES)
    spread = np.average(np.square(np.array(CENTERS) - mean), weights=SIZES)
    shown = {row["name"]: row["owner_loss"] for row in found.rows}
    np.testing.assert_allclose([shown[name] for name in names], [spread, 0, 0], rtol=1e-4, atol=1e-6)
    (fedavg, ditto, local) = found.rows
    assert ditto["test_loss"] == fedavg["test_loss"] and "test_loss" not in local
    assert "owner_loss" in words_on_own_models(found, "owner_loss")[0]
    assert words_on_own_models(found, "local_loss") == [
        "local_loss is not of the clients' own models of 2 combinations."
    ]
    with refused("metric", value="test_loss", rule="each row", hint="owner_loss"):
        found.summary("test_loss")


def rows(*entries):
    found = [{"seed": seed, "name": name, "round": 1, **values} for name, values in entries for seed in (0, 1)]
    return Sweep(found, ("name",), [0, 1], 1, True)


SHARED = {"test_accuracy": 0.7, "test_loss": 0.9}


@pytest.mark.parametrize(
    ("own", "shown"),
    [
        ({}, "test_accuracy"),  # nobody has own models: the central test set ranks
        ({"personal_clients": 3, "owner_accuracy": 0.8}, "owner_accuracy"),
        ({"personal_clients": 0}, "test_accuracy"),  # nobody keeps rows apart
    ],
)
def test_the_metric_follows_who_has_own_models(own, shown):
    """Catches owners who rank a sweep of shared models, and shared models that rank one of own models."""
    shared = SHARED | {"owner_accuracy": 0.6} if "owner_accuracy" in own or not own else SHARED
    found = rows(("fedavg", shared), ("ditto", SHARED | own))
    assert shown_by_default(found) == shown
    words = words_on_own_models(found, shown)
    assert bool(words) == bool(own)
    if own.get("personal_clients") == 0:
        assert "own models of 1 combinations are not judged" in words[0] and "with_local_test" in words[0]


def test_ties_name_the_loss_of_the_same_models():
    """Catches advice to look at the shared model's loss where owners' models are compared."""
    owners = {"personal_clients": 3, "owner_accuracy": 1.0, "owner_loss": 0.1}
    found = rows(("ditto", SHARED | owners), ("local", owners))
    assert words_on_ties(found, "owner_accuracy").endswith("A loss may tell them apart: owner_loss.")
