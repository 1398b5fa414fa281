"""This study measures simulated seconds, bytes and joules until a target accuracy, for several kinds of servers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from fedjax_sim import validate
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import Comparison, Findings, few, measured, rows_of
from fedjax_sim.study.time_to_target.claims import time_to_target_claims
from fedjax_sim.study.time_to_target.figure import time_to_target_figure
from fedjax_sim.study.time_to_target.servers import Field, ServerMode, field, servers
from fedjax_sim.study.watched_runs import Watched, watched_runs
from fedjax_sim.types import Array
from fedjax_sim.validate import Positive

QUESTION = "How long, in seconds, bytes and joules, until a model is good enough, if clients differ in speed?"


@validate.named_arguments
def time_to_target(
    *,
    num_clients: int = 1000,
    alpha: float = 0.3,
    speed_sigma: float = 1.0,
    cohort_size: int = 20,
    num_steps: int = 5,
    learning_rate: Positive = 0.1,
    deadline_share: float = 0.8,
    target: float = 0.85,
    num_rounds: int = 100,
    num_runs: int = 10,
    seed: int = 0,
) -> Findings:
    """How long until a model is good enough? Compares rounds that wait, end early or over-select with asynchrony.

    Clients of the digits with unlike labels train a linear model on devices of lognormal speed. Synchronous rounds
    wait for all clients, or end at a deadline, or invite 130 % and end with the first 100 %. At a deadline, late
    clients are dropped, or the part of their work that arrives in time counts. The asynchronous servers are FedBuff,
    FedAsync and FedAT, with as many clients in flight. FedAT has four tiers of clients of similar speed, each with
    rounds of its own.

    All servers receive as many updates as `num_rounds` full rounds make. A synchronous round lasts as long as an order
    statistic of the clients' times.

    Args:
      num_clients: N.
      alpha: the parameter of the clients' Dirichlet label shares; small values give unlike clients.
      speed_sigma: sigma of the lognormal distribution of speeds; the median client trains for 1 s.
      cohort_size: m clients in a round, or in flight. FedBuff's buffer, and the cohort of a tier of FedAT, have m / 4.
      num_steps: local steps, with minibatches of 20.
      learning_rate: the learning rate of local steps.
      deadline_share: the share of the clients that finish before the deadline.
      target: a test accuracy.
      num_rounds: T.
      num_runs: independent runs of each server.
      seed: decides everything.

    Returns: `Findings`. Three kinds of predictions are estimates, which are shown and not judged: times in an infinite
      population, times of asynchronous servers, and the time to the target, which is the number of updates times the
      time of an update.

    Guarantees: every exact prediction lies in its interval (tests/study/test_time_to_target.py::
    test_predictions_hold). A prediction for another cohort size does not (::test_it_can_tell_another_cohort).

    References: Bonawitz et al. 2019 (130 %); Nguyen et al. 2022 (FedBuff); Xie, Koyejo and Gupta 2019 (FedAsync);
    Chai et al. 2021 (FedAT).
    """
    options = dict(locals())
    _check(options)
    key = jax.random.key(seed)
    field_options = dict(options)
    # The other options describe the clients.
    for name in ("deadline_share", "target", "num_rounds", "num_runs"):
        field_options.pop(name)
    clients = field(stream(key, "model"), sigma=field_options.pop("speed_sigma"), **field_options)
    comparisons = list[Comparison]()
    for name, server in servers(clients, deadline_share).items():
        runs = watched(stream(key, "runs"), clients, server, num_rounds, num_runs)
        comparisons += steps_of(name, server, runs)
        comparisons += target_of(name, server, runs, target)
    rows = rows_of(comparisons)
    return Findings(
        name="time_to_target",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(time_to_target_claims(rows, options)),
        figure=partial(time_to_target_figure, rows, options),
        options=options,
    )


def watched(key: Array, has: Field, server: ServerMode, num_rounds: int, num_runs: int) -> Watched:
    """Runs a server until it has received as many updates as full rounds make, with about 40 evaluations.

    Args:
      key: the random key of all runs.
      has: the clients.
      server: how the federation is run.
      num_rounds: full rounds of m updates each. A server whose step takes fewer updates makes more steps.
      num_runs: independent runs.
    """
    steps = math.ceil(num_rounds * has.cohort_size / server.updates)
    every = max(steps // 40, 1)
    # `watched_runs` needs a multiple of `every`, so the number of steps is rounded up.
    schedule = {"num_steps": -(-steps // every) * every, "every": every}
    keys = jax.random.split(key, num_runs)
    return watched_runs(server.algorithm, keys, has.params, has.data.train, has.accuracy, **schedule)


def _check(options: dict[str, Any]) -> None:
    """Raises an error that names the first option that is out of range.

    Args:
      options: the arguments of `time_to_target`, by name.
    """
    validate.integer("num_clients", options["num_clients"], 10, 100_000)
    validate.integer("cohort_size", options["cohort_size"], 4, options["num_clients"] // 2)
    validate.positive("alpha", options["alpha"])
    validate.in_range("speed_sigma", options["speed_sigma"], 0, 2)
    validate.integer("num_steps", options["num_steps"], 1, 100)
    validate.in_range("learning_rate", options["learning_rate"], 0, 10, open_low=True)
    validate.in_range("deadline_share", options["deadline_share"], 0.1, 1)
    validate.in_range("target", options["target"], 0.1, 1)
    validate.integer("num_rounds", options["num_rounds"], 4, 100_000)
    validate.integer("num_runs", options["num_runs"], 2)
    validate.integer("seed", options["seed"], 0)


def steps_of(name: str, server: ServerMode, runs: Watched) -> Iterator[Comparison]:
    """Measures the seconds, messages and joules of a server's step.

    Rounds of a synchronous server are independent samples, since each draws its own cohort.

    Args:
      name: the server's name.
      server: the server with its predictions.
      runs: the server's runs.

    Yields: a comparison for each predicted quantity of a round; further ones where theory has a law of infinitely many
      clients, or of updates and staleness.
    """
    conditions = {"server": name, "part": "step"}
    steps = runs.steps
    numbers = {"seconds": steps["round_seconds"], "messages": steps["clients_reported"], "joules": steps["joules"]}
    for quantity, predicted in server.predicted.items():
        yield measured(conditions, f"{quantity} a round", numbers[quantity], predicted, resolution=1e-4 * predicted)
    if server.law is not None:
        yield measured(
            conditions, "seconds a round, of infinitely many clients", numbers["seconds"], server.law, kind="estimate"
        )
    if server.seconds is not None and server.staleness is not None:
        # At the start all clients are sent work at once. The second half of the steps is stationary.
        second_half = slice(numbers["seconds"].shape[1] // 2, None)
        seconds_per_update = numbers["seconds"][:, second_half].sum(1) / numbers["messages"][:, second_half].sum(1)
        yield measured(conditions, "seconds an update", seconds_per_update, server.seconds, kind="estimate")
        weights = numbers["messages"][:, second_half]
        staleness = (steps["staleness"][:, second_half] * weights).sum(1) / weights.sum(1)
        yield measured(conditions, "staleness", staleness, server.staleness, resolution=0.01 * server.staleness)


def target_of(name: str, server: ServerMode, runs: Watched, target: float) -> Iterator[Comparison]:
    """Measures seconds, updates, megabytes and joules until the target.

    If a run did not reach the target, only the accuracy after the last step is reported.

    Args:
      name: the server's name.
      server: the server with its predictions.
      runs: the server's runs.
      target: a test accuracy.

    Yields: the comparisons of the four, each a mean over runs of a total from the start; or that of the accuracy in
      [0, 1]. The seconds have a prediction: the updates that were needed, times the time of an update.
    """
    conditions = {"server": name, "part": "target"}
    seconds = runs.until(target, "round_seconds")
    if not np.isfinite(seconds).all():
        yield measured(conditions, "accuracy after the last step", runs.accuracy[:, -1])
        return
    updates = runs.until(target, "clients_reported")
    # Asynchronous servers have an estimate of the time of an update, and synchronous ones predictions of a round.
    seconds_per_update = server.seconds
    if seconds_per_update is None:
        seconds_per_update = server.predicted["seconds"] / server.predicted["messages"]
    estimate = float(updates.mean()) * seconds_per_update
    yield measured(conditions, "seconds to target", seconds, estimate, kind="estimate")
    yield few(conditions, "updates to target", updates)
    yield few(conditions, "megabytes to target", runs.until(target, "bytes") / 1e6)
    yield few(conditions, "joules to target", runs.until(target, "joules"))
