"""A model of digits under edges: its distance from flat FedAvg, accuracy, and what reaches the cloud."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import algorithms, metrics, models, population, sampling, tree
from fedjax_sim.study.findings import Comparison, few, measured
from fedjax_sim.types import Algorithm, Count, Population, PyTree

__all__ = ["digits_rows"]

WORK = {"num_steps": 5, "batch_size": None, "mesh": None}
RATE, ALPHA = 0.5, 0.1
ROWS = 40  # of each client: runs and groupings then have the same shapes, and share the programs
WAYS = ("labels", "random")


class _Run(NamedTuple):
    """One partition of the digits among clients."""

    clients: Population
    groups: dict[str, Population]  # the same clients under edges, by the way they are grouped
    test: PyTree


def digits_rows(
    num_clients: int, num_edges: int, edge_rounds: Sequence[int], num_rounds: int, num_runs: int, seed: int
) -> Iterator[Comparison]:
    """Softmax regression, everybody taking part with full batches; runs differ in their clients' data."""
    data = [_digits(num_clients, seed + run) for run in range(num_runs)]
    model = models.linear(input_shape=data[0].input_shape, num_outputs=data[0].num_outputs)
    loss, start = models.supervised(model, models.default_loss(data[0].task)), model.init(jax.random.key(seed))[0]
    runs = _runs(data, num_edges, seed)
    judge = jax.jit(partial(metrics.pooled, loss))
    flat = _training(algorithms.fedavg(loss, sampling.full(num_clients), optax.sgd(RATE), **WORK), start, num_rounds)
    ends = {("flat", 1): [flat(run.clients) for run in runs]}
    size = runs[0].groups[WAYS[0]].group_size
    for kappa in edge_rounds:
        made = algorithms.hierarchical_fedavg(
            loss, sampling.full(num_edges), optax.sgd(RATE), edge_rounds=kappa, group_size=size, **WORK
        )
        train = _training(made, start, num_rounds)
        ends |= {(way, kappa): [train(run.groups[way]) for run in runs] for way in WAYS}
    for way in WAYS:
        pairs = zip(ends[way, 1], ends["flat", 1], strict=True)
        away = max(_length(found, expected) / _length(expected, start) for (found, _), (expected, _) in pairs)
        conditions: dict[str, Any] = {"part": "one edge round", "groups": way, "edge_rounds": 1}
        yield measured(conditions, "distance from flat FedAvg, of the way", away, 0.0, resolution=1e-4)
    for (way, kappa), found in ends.items():
        conditions = {"part": "digits", "groups": way, "edge_rounds": kappa, "cloud_bytes": found[0][1]}
        shares = [float(judge(end, run.test)["accuracy"]) for (end, _), run in zip(found, runs, strict=True)]
        yield few(conditions, "test accuracy", shares)


def _digits(num_clients: int, seed: int) -> population.FederatedData:
    rows = {"min_examples": ROWS, "max_examples": ROWS, "held_out_clients": 0}
    return population.digits(num_clients=num_clients, alpha=ALPHA, seed=seed, **rows)


def _runs(data: Sequence[population.FederatedData], num_edges: int, seed: int) -> list[_Run]:
    """The partitions, with groups that are told to be as large as the largest of all: empty places are skipped."""
    grouped = [
        {way: population.with_groups(one, num_groups=num_edges, by=way, seed=seed + run).train for way in WAYS}
        for run, one in enumerate(data)
    ]
    most = max(groups.group_size for ways in grouped for groups in ways.values())

    def padded(ways):
        return {way: dataclasses.replace(groups, group_size=most, ragged=True) for way, groups in ways.items()}

    return [_Run(one.train, padded(ways), one.test) for one, ways in zip(data, grouped, strict=True)]


def _training(made: Algorithm, start: PyTree, num_rounds: int) -> Callable[[Population], tuple[PyTree, int]]:
    """(people) -> (the model after all rounds, the bytes that reached the cloud); one program for all people."""

    @jax.jit
    def rounds(state, people):
        def one(state, t):
            state, info = made.step(jax.random.fold_in(jax.random.key(0), t), state, people)
            return state, info["uplink_bytes"]

        return jax.lax.scan(one, state, jnp.arange(num_rounds))

    def train(people):
        state, sent = rounds(made.init(jax.random.key(0), start, people), people)
        counts = [Count(number, unit) for number, unit in zip(sent.number, sent.unit, strict=True)]
        return made.params(state), sum(count.total() for count in counts)

    return train


def _length(a: PyTree, b: PyTree) -> float:
    return float(optax.tree.norm(tree.subtract(a, b)))
