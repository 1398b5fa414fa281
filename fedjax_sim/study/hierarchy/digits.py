"""This module trains a model of digits under edge servers and measures accuracy and cloud traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, metrics, models, population, sampling, tree
from fedjax_sim.running import kept_results
from fedjax_sim.study.findings import Comparison, few, measured
from fedjax_sim.types import Algorithm, Count, Population, PyTree

WORK = {"num_steps": 5, "batch_size": None, "mesh": None}  # local training, with full batches
LEARNING_RATE = 0.5
ALPHA = 0.1  # of the clients' Dirichlet label shares
ROWS = 40  # examples of each client; equal shapes let all runs and groupings share their programs
WAYS: tuple[Literal["labels", "random"], ...] = ("labels", "random")  # how clients are grouped under edges


class _Run(NamedTuple):
    """A `_Run` is a partition of the digits among clients.

    Fields:
      clients: without edges.
      groups: the same clients under edges, by the way in which they are grouped.
      test: held-out examples.
    """

    clients: Population
    groups: dict[str, population.Grouped]
    test: PyTree


def digits_rows(
    num_clients: int, num_edges: int, edge_rounds: Sequence[int], *, num_rounds: int, num_runs: int, seed: int
) -> Iterator[Comparison]:
    """Measures softmax regression on digits under edges, beside flat FedAvg.

    All clients take part with full batches. Runs differ in their clients' data.

    Args:
      num_clients: N.
      num_edges: G.
      edge_rounds: kappa, edge rounds in a cloud round.
      num_rounds: cloud rounds.
      num_runs: partitions of the digits.
      seed: decides everything.

    Yields: for each grouping how far one edge round ends from flat FedAvg, as a share of the way; then for flat FedAvg,
      and for each grouping and kappa, the test accuracy in [0, 1]; then for each grouping and kappa above one its gain
      over one edge round on the same partitions.
    """
    datasets = [_digits(num_clients, seed + run) for run in range(num_runs)]
    model = models.linear(input_shape=datasets[0].input_shape, num_outputs=datasets[0].num_outputs)
    loss = models.supervised(model, models.default_loss(datasets[0].task))
    start = model.init(jax.random.key(seed))[0]
    runs = _runs(datasets, num_edges, seed)
    evaluate = jax.jit(partial(metrics.pooled, loss))
    fedavg = algorithms.fedavg(loss, sampling.full(num_clients), optax.sgd(LEARNING_RATE), **WORK)
    train_flat = _training(fedavg, start, num_rounds)
    # (final model, bytes to the cloud) of each run, by grouping and kappa.
    results = {("flat", 1): [train_flat(run.clients) for run in runs]}
    group_size = runs[0].groups[WAYS[0]].group_size
    for kappa in edge_rounds:
        hierarchical = algorithms.hierarchical_fedavg(
            loss, sampling.full(num_edges), optax.sgd(LEARNING_RATE), edge_rounds=kappa, group_size=group_size, **WORK
        )
        train = _training(hierarchical, start, num_rounds)
        results |= {(way, kappa): [train(run.groups[way]) for run in runs] for way in WAYS}
    # With one edge round in a cloud round, a hierarchy is flat FedAvg whatever the groups.
    for way in WAYS:
        pairs = zip(results[way, 1], results["flat", 1], strict=True)
        largest_ratio = max(_distance(end, flat_end) / _distance(flat_end, start) for (end, _), (flat_end, _) in pairs)
        conditions: dict[str, Any] = {"part": "one edge round", "groups": way, "edge_rounds": 1}
        yield measured(conditions, "distance from flat FedAvg, of the way", largest_ratio, 0.0, resolution=1e-4)
    accuracies = {
        way_and_kappa: np.array([evaluate(end, run.test)["accuracy"] for (end, _), run in zip(ends, runs, strict=True)])
        for way_and_kappa, ends in results.items()
    }
    for (way, kappa), of_runs in accuracies.items():
        _, cloud_bytes = results[way, kappa][0]  # the same in every run
        conditions = {"part": "digits", "groups": way, "edge_rounds": kappa, "cloud_bytes": cloud_bytes}
        yield few(conditions, "test accuracy", of_runs)
    for (way, kappa), of_runs in accuracies.items():
        if kappa > 1:
            conditions = {"part": "gain", "groups": way, "edge_rounds": kappa}
            yield measured(conditions, "gain over one edge round", of_runs - accuracies[way, 1])


def _digits(num_clients: int, seed: int) -> population.FederatedData:
    """Makes a partition of the digits in which every client has ROWS examples."""
    return population.digits(
        num_clients=num_clients, alpha=ALPHA, min_examples=ROWS, max_examples=ROWS, held_out_clients=0, seed=seed
    )


def _grouped(
    data: population.FederatedData, way: Literal["labels", "random"], num_edges: int, seed: int
) -> population.Grouped:
    """Groups the clients of a partition under edges."""
    groups = population.with_groups(data, num_groups=num_edges, by=way, seed=seed).train
    assert isinstance(groups, population.Grouped), "`with_groups` makes them"
    return groups


def _runs(datasets: Sequence[population.FederatedData], num_edges: int, seed: int) -> list[_Run]:
    """Groups the clients of each partition under edges.

    All groups are padded to the size of the largest, so that one program serves all of them. Empty places are skipped.

    Args:
      datasets: [R] partitions of the digits among N clients.
      num_edges: G.
      seed: run r groups with seed + r.

    Returns: [R] runs, each with its clients grouped in every way of `WAYS`.
    """
    grouped = [{way: _grouped(data, way, num_edges, seed + run) for way in WAYS} for run, data in enumerate(datasets)]
    largest_group = max(groups.group_size for groups_by_way in grouped for groups in groups_by_way.values())

    def padded(groups_by_way):
        return {
            way: dataclasses.replace(groups, group_size=largest_group, ragged=True)
            for way, groups in groups_by_way.items()
        }

    return [
        _Run(data.train, padded(groups_by_way), data.test)
        for data, groups_by_way in zip(datasets, grouped, strict=True)
    ]


def _training(algorithm: Algorithm, start: PyTree, num_rounds: int) -> Callable[[Population], tuple[PyTree, int]]:
    """Returns a function population -> (model after all rounds, bytes that reached the cloud).

    The population is an argument of the compiled program, so all partitions share it.

    Args:
      algorithm: with edges or without; its info counts the bytes that the cloud receives, as `uplink_bytes`.
      start: the first model.
      num_rounds: T cloud rounds.

    Returns: the function; its bytes are a Python int, the sum over all T rounds.
    """

    @jax.jit
    def run_rounds(state, people):
        def round_step(state, t):
            state, info = algorithm.step(jax.random.fold_in(jax.random.key(0), t), state, people)
            return state, info["uplink_bytes"]

        return jax.lax.scan(round_step, state, jnp.arange(num_rounds))

    def train(people):
        state, uplink = kept_results.call(run_rounds, algorithm.init(jax.random.key(0), start, people), people)
        # Totals are computed on the host, since the bytes of all rounds may exceed int32.
        counts = [Count(number, unit) for number, unit in zip(uplink.number, uplink.unit, strict=True)]
        return algorithm.params(state), sum(count.total() for count in counts)

    return train


def _distance(a: PyTree, b: PyTree) -> float:
    """Returns the Euclidean distance of two models."""
    return float(optax.tree.norm(tree.subtract(a, b)))
