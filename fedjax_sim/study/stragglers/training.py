"""This module trains softmax regressions on Synthetic(alpha, beta) with stragglers, by FedAvg and by FedProx."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, engine, metrics, models, population, sampling
from fedjax_sim.models import Model
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.prng import init_key, stream
from fedjax_sim.running import kept_results
from fedjax_sim.study.findings import Comparison, few, measured
from fedjax_sim.types import Algorithm

FEDAVG = "FedAvg"  # drops stragglers
PARTIAL = "FedProx, mu = 0"  # FedAvg that keeps the partial work of stragglers
FEDPROX = "FedProx"
# Each of these pairs is compared in the same runs.
CONTRASTS = ((PARTIAL, FEDAVG), (FEDPROX, FEDAVG), (FEDPROX, PARTIAL))
QUANTITIES = ("training loss", "variance of the loss", "test accuracy")
TUNING_RUNS = 1  # further runs, which choose FedProx's coefficient
LEAST_VARIANCE = 1e-12  # of a loss whose rounding is 1e-6, so that logarithms are finite


class Paths(NamedTuple):
    """The runs on one data set with one share of stragglers.

    Fields:
      coefficient: mu of FedProx.
      loss: by algorithm, [runs, T] the loss over all training rows after each round.
      accuracy: by algorithm, [runs, T] the accuracy over all test rows after each round.
    """

    coefficient: float
    loss: dict[str, np.ndarray]
    accuracy: dict[str, np.ndarray]

    def number(self, quantity: str, algorithm: str) -> np.ndarray:
        """Returns a number of each run, [runs], over the second half of its rounds.

        Args:
          quantity: an entry of `QUANTITIES`.
          algorithm: a key of `loss`.

        >>> path = np.array([[9.0, 9.0, 1.0, 3.0]])
        >>> paths = Paths(1.0, {"FedAvg": path}, {"FedAvg": path})
        >>> [paths.number(quantity, "FedAvg").tolist() for quantity in QUANTITIES]
        [[2.0], [1.0], [2.0]]
        """
        values = (self.accuracy if quantity == "test accuracy" else self.loss)[algorithm]
        second_half = values[:, values.shape[1] // 2 :]
        return second_half.var(1) if quantity == "variance of the loss" else second_half.mean(1)


def data_set(heterogeneity: float) -> str:
    """Returns the name of a data set, which is the part of its rows."""
    return f"Synthetic({heterogeneity:g}, {heterogeneity:g})"


def paths_of(options: Mapping[str, Any]) -> dict[tuple[float, float], Paths]:
    """Runs all algorithms on all data sets, with each share of stragglers.

    In a run all algorithms have the same first model, cohorts, minibatches and stragglers.

    Args:
      options: the study's options.

    Returns: by (heterogeneity, share).

    Raises: FloatingPointError if an update was not finite.
    """
    data_sets = {
        heterogeneity: population.synthetic(
            alpha=heterogeneity, beta=heterogeneity, num_clients=options["num_clients"],
            max_examples=options["max_examples"], seed=options["seed"],
        )
        for heterogeneity in options["heterogeneities"]
    }  # fmt: skip
    first = next(iter(data_sets.values()))  # data sets of one seed have the same sizes, and share the programs
    model = models.linear(input_shape=first.input_shape, num_outputs=first.num_outputs)
    fedavg, fedprox = (_runs(model, first, options, late) for late in ("dropped", "partial"))
    keys = jax.random.split(stream(jax.random.key(options["seed"]), "runs"), options["num_runs"] + TUNING_RUNS)
    reported_keys = keys[: options["num_runs"]]
    paths = {}
    for heterogeneity, data in data_sets.items():
        # [coefficients]; the mean over all shares of stragglers.
        tuning_losses = sum(
            fedprox(keys[options["num_runs"] :], data, share, options["coefficients"])["loss"].mean((0, 2))
            for share in options["shares"]
        )
        best = options["coefficients"][int(np.argmin(tuning_losses))]
        for share in options["shares"]:
            dropping = fedavg(reported_keys, data, share, [0.0])
            partial = fedprox(reported_keys, data, share, [0.0, best])
            by_algorithm = {
                name: {FEDAVG: dropping[name][:, 0], PARTIAL: partial[name][:, 0], FEDPROX: partial[name][:, 1]}
                for name in ("loss", "accuracy")
            }
            paths[heterogeneity, share] = Paths(best, **by_algorithm)
    return paths


def _runs(
    model: Model, data: FederatedData, options: Mapping[str, Any], late: Literal["partial", "dropped"]
) -> Callable:
    """Makes a function that runs FedProx with several coefficients side by side, or FedAvg, which drops stragglers.

    Args:
      model: the softmax regression.
      data: any of the data sets.
      options: the study's options.
      late: what happens to stragglers, as in `sampling.with_stragglers`.

    Returns: (keys [runs], data, share, coefficients [V]) -> {"loss", "accuracy"}, [runs, V, T] float64. It is compiled
    once for each V.
    """
    loss_fn = models.supervised(model, models.default_loss(data.task))
    sampler = sampling.uniform(options["num_clients"], options["cohort_size"])
    work = {"num_epochs": options["num_epochs"], "batch_size": options["batch_size"]}
    # Clients train one after the other, since their sizes differ; coefficients are what is vmapped.
    work |= {"plan": engine.Plan.checked(lanes=1), "mesh": None}

    def make(share: Any, coefficient: Any) -> Algorithm:
        slow = sampling.with_stragglers(sampler, share, num_parts=options["num_epochs"], late=late)
        if late == "dropped":
            return algorithms.fedavg(loss_fn, slow, optax.sgd(options["learning_rate"]), **work)
        return algorithms.fedprox(loss_fn, slow, optax.sgd(options["learning_rate"]), coefficient=coefficient, **work)

    def one_run(key, clients, test, share, coefficient):
        algorithm = make(share, coefficient)

        def step(state, t):
            state, info = algorithm.step(jax.random.fold_in(key, t), state, clients)
            params = algorithm.params(state)
            loss = metrics.pooled(loss_fn, params, clients.examples)["loss"]
            accuracy = metrics.pooled(loss_fn, params, test)["accuracy"]
            return state, {"loss": loss, "accuracy": accuracy, "lost": info["dropped_clients"]}

        start = model.init(init_key(key))[0]
        state = algorithm.init(init_key(key), start, clients)
        return jax.lax.scan(step, state, jnp.arange(options["num_rounds"]))[1]

    # The coefficient alone has an axis: cohorts and steps are then common to the vmapped runs, and no run waits.
    over_coefficients = jax.jit(jax.vmap(one_run, in_axes=(None, None, None, None, 0)))

    def runs(keys, data: FederatedData, share: float, coefficients: Sequence[float]) -> dict[str, np.ndarray]:
        traced = jnp.float32(share), jnp.asarray(coefficients, jnp.float32)
        arguments = data.train, data.test, *traced
        by_run = [jax.device_get(kept_results.call(over_coefficients, key, *arguments)) for key in keys]
        by_name = {name: np.stack([run[name] for run in by_run]).astype(np.float64) for name in by_run[0]}
        if num_lost := int(by_name.pop("lost").sum()):
            raise FloatingPointError(f"{num_lost} updates were not finite: lower the learning rate.")
        return by_name

    return runs


def training_rows(paths: Mapping[tuple[float, float], Paths]) -> Iterator[Comparison]:
    """Yields each algorithm's numbers, and the paired differences of `CONTRASTS`.

    Args:
      paths: by (alpha = beta of the data, share of stragglers in [0, 1]), as `paths_of` returns them.

    Yields: for each quantity, first the mean over runs of each algorithm. Then for each (algorithm, baseline) of
    `CONTRASTS` the mean over runs of the algorithm's number minus the baseline's. Of variances it is the difference of
    their logarithms to base 10.

    Guarantees: numbers, pairs and signs are those of the paths
    (tests/study/test_stragglers.py::test_findings_are_of_the_paths).
    """
    for (heterogeneity, share), setting_paths in paths.items():
        conditions = {"part": data_set(heterogeneity), "stragglers": share}
        coefficients = {FEDAVG: 0.0, PARTIAL: 0.0, FEDPROX: setting_paths.coefficient}
        for quantity in QUANTITIES:
            for algorithm, coefficient in coefficients.items():
                row = conditions | {"algorithm": algorithm, "coefficient": coefficient}
                yield few(row, quantity, setting_paths.number(quantity, algorithm))
            for algorithm, baseline in CONTRASTS:
                if share == 0 and (algorithm, baseline) == (PARTIAL, FEDAVG):
                    continue  # the same algorithm where nobody straggles
                numbers = [setting_paths.number(quantity, name) for name in (algorithm, baseline)]
                row = conditions | {"algorithm": algorithm, "coefficient": coefficients[algorithm], "minus": baseline}
                if quantity == "variance of the loss":
                    numbers = [np.log10(np.maximum(x, LEAST_VARIANCE)) for x in numbers]
                    yield measured(row, "log10 of the variance, difference", numbers[0] - numbers[1])
                else:
                    yield measured(row, f"{quantity}, difference", numbers[0] - numbers[1])
