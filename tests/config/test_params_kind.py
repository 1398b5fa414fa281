"""A config's evaluation judges what the algorithm has: a model, or clients' own models."""

from __future__ import annotations

import pytest

from fedjax_sim.config.build import build
from fedjax_sim.config.document import load
from fedjax_sim.running.arguments import num_arguments

SMALL = ["data={name='digits_partition', num_clients=4}", "model.hidden=[4]", "sampler.cohort_size=2", "run.devices=1"]
SMALL += ["run.evaluate_train=all"]
NO_MODEL = ("fedproto", "ifca", "fedper", "fedbabu", "local", "per_fedavg", "fedem")


def judged(*settings):
    """The names of an evaluation's record before the first round."""
    experiment = build(load(None, [*SMALL, *settings]))
    state = experiment.algorithm.init(experiment.key, experiment.params, experiment.data.train)
    arguments = (experiment.algorithm.params(state), state)
    return experiment.evaluation(*arguments[: num_arguments(experiment.evaluation)])


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", NO_MODEL)
def test_what_is_no_model_has_no_test_metrics(name):
    """Catches a test loss of FedProto's start, or of the first of IFCA's models, in the log of a run."""
    record = judged(f"algorithm.name={name}", "data.with_local_test={}")
    assert "owner_loss" in record and "personal_clients" in record
    assert all(metric.startswith(("owner_", "personal_", "newcomer_")) for metric in record)
    assert judged(f"algorithm.name={name}") == {"personal_clients": 0}


@pytest.mark.full  # by default tests/metrics/test_owners.py has the law
@pytest.mark.parametrize("name", ["ditto", "fedavg", "apfl", "heterofl", "pfedme"])
def test_a_model_is_tested(name):
    """Catches a shared model that is no longer tested beside clients' own ones."""
    record = judged(f"algorithm.name={name}", "data.with_local_test={}")
    assert {"test_loss", "train_loss", "local_test_loss", "owner_loss"} <= record.keys()
    assert ("personal_clients" in record) == (name != "fedavg")
    assert "test_loss" in judged(f"algorithm.name={name}")
