"""This module names the ways to a model for each client that the study compares, each made from one problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optax

from fedjax_sim import algorithms, models, sampling
from fedjax_sim.models import Model
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.types import Algorithm


class Problem(NamedTuple):
    """What every method is given."""

    model: Model
    data: FederatedData
    rate: float  # learning rate of local steps
    work: Mapping[str, Any]  # options of `client.work`
    personal_steps: int  # local steps before a fine-tuned model is judged

    @property
    def loss_fn(self) -> Callable:
        """The loss of the model on the data's rows."""
        return models.supervised(self.model, models.default_loss(self.data.task))


def _recipe(make: Callable[..., Algorithm], **options: Any) -> Callable[[Problem], Algorithm]:
    """Returns the method of a recipe; all clients take part in every round."""

    def method(problem: Problem) -> Algorithm:
        sampler = sampling.full(problem.data.train.size)
        return make(problem.loss_fn, sampler, optax.sgd(problem.rate), **problem.work, **options)

    return method


def _recipe_of_model(make: Callable[..., Algorithm], *needed: str) -> Callable[[Problem], Algorithm]:
    """Returns the method of a recipe that takes the model itself; `needed` are facts of the data that it takes."""

    def method(problem: Problem) -> Algorithm:
        sampler = sampling.full(problem.data.train.size)
        facts = {name: getattr(problem.data, name) for name in needed}
        loss = models.default_loss(problem.data.task)
        return make(problem.model, loss, sampler, optax.sgd(problem.rate), **facts, **problem.work)

    return method


def _fine_tuned(make: Callable[..., Algorithm], **options: Any) -> Callable[[Problem], Algorithm]:
    """Returns the method that fine-tunes each client's model before it is judged."""

    def method(problem: Problem) -> Algorithm:
        steps = {"num_steps": problem.personal_steps, "batch_size": problem.work["batch_size"]}
        trained = _recipe(make, **options)(problem)
        return algorithms.fine_tuned(trained, problem.loss_fn, optax.sgd(problem.rate), **steps)

    return method


BASELINE = "FedAvg, fine-tuned"
METHODS: Mapping[str, Callable[[Problem], Algorithm]] = {
    "FedAvg": _recipe(algorithms.fedavg),
    BASELINE: _fine_tuned(algorithms.fedavg),
    "FedProx, fine-tuned": _fine_tuned(algorithms.fedprox, coefficient=0.1),
    "own rows alone": _recipe(algorithms.ditto, coefficient=0.0),  # Ditto's own models without their pull
    "Ditto": _recipe(algorithms.ditto, coefficient=0.1),
    "FedPer": _recipe(algorithms.fedper, own=["output"]),
    "LG-FedAvg": _recipe(algorithms.fedper, own=["hidden_0"]),
    "FedRep": _recipe(algorithms.fedrep, own=["output"]),
    "FedBABU": _fine_tuned(algorithms.fedbabu, own=["output"]),
    "APFL": _recipe(algorithms.apfl),
    "pFedMe": _recipe(algorithms.pfedme),
    "Per-FedAvg": _recipe(algorithms.per_fedavg),
    "IFCA": _recipe(algorithms.ifca, num_clusters=4),
    "CFL": _recipe(algorithms.clustered_by_updates),
    "FedEM": _recipe_of_model(algorithms.fedem, "task"),
    "FedProto": _recipe_of_model(algorithms.fedproto, "input_shape"),
    "q-FedAvg": _recipe(algorithms.qfedavg, exponent=1.0),
    "TERM": _recipe(algorithms.term, tilt=1.0),
}
