"""How long, in simulated seconds, bytes and joules, until a model is good enough?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from fedjax_sim import validate
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import Comparison, Findings, few, measured
from fedjax_sim.study.time_to_target.figure import time_figure
from fedjax_sim.study.time_to_target.reading import time_reading
from fedjax_sim.study.time_to_target.servers import Field, ServerMode, field, servers
from fedjax_sim.study.watched_runs import Watched, watched_runs
from fedjax_sim.types import Array
from fedjax_sim.validate import Positive

__all__ = ["steps_of", "target_of", "time_to_target", "watched"]

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
    """How long until a model is good enough? Synchronous rounds that wait, end early or over-select, and asynchrony.

    Clients of the digits with unlike labels train a linear model on devices of lognormal speed: in rounds that wait for
    all, end at a deadline (late clients dropped, or with the part of their work that arrives in time) or with the first
    of 130 %, and with FedBuff, FedAsync and FedAT (four tiers of like speed, each in rounds of its own) with as many
    clients at work. All make as many updates as `num_rounds` full rounds. A round's seconds are an order statistic of
    the clients' times.

    Args:
      num_clients: N. alpha: of the clients' Dirichlet label shares.
      speed_sigma: of the lognormal law of speeds, whose median client trains for 1 s.
      cohort_size: m clients in a round, or in flight; FedBuff has buffers, and FedAT tiers' cohorts, of m / 4.
      num_steps, learning_rate: of local work, minibatches of 20.
      deadline_share: of the clients, who are done before the deadline.
      target: a test accuracy. num_rounds: T. num_runs: independent runs of each server.
      seed: decides everything.

    Returns: `Findings`. Predictions called estimates are shown and not judged: those of an infinite population, those
      of asynchronous servers' times, and the time to the target, which is steps taken times the time of a step.

    Guarantees: every exact prediction lies in its interval (tests/study/test_time_to_target.py::
    test_predictions_hold), and that of another cohort size does not (::test_it_can_tell_another_cohort).

    References: Bonawitz et al. 2019 (130 %); Nguyen et al. 2022 (FedBuff); Xie, Koyejo and Gupta 2019 (FedAsync);
    Chai et al. 2021 (FedAT).
    """
    options = dict(locals())
    _check(options)
    key, own = jax.random.key(seed), dict(options)
    for name in ("deadline_share", "target", "num_rounds", "num_runs"):
        own.pop(name)
    has = field(stream(key, "model"), sigma=own.pop("speed_sigma"), **own)
    found, curves = list[Comparison](), dict[str, Watched]()
    for name, server in servers(has, deadline_share).items():
        curves[name] = watched(stream(key, "runs"), has, server, num_rounds, num_runs)
        found += steps_of(name, server, curves[name])
        found += target_of(name, server, curves[name], target)
    reading = list(time_reading(found, options))
    return Findings("time_to_target", QUESTION, found, reading, partial(time_figure, found, curves, options), options)


def watched(key: Array, has: Field, server: ServerMode, num_rounds: int, num_runs: int) -> Watched:
    """Runs of as many updates as so many full rounds, with about 40 evaluations."""
    steps = math.ceil(num_rounds * has.cohort_size / server.updates)
    every = max(steps // 40, 1)
    looks = {"num_steps": -(-steps // every) * every, "every": every}
    keys = jax.random.split(key, num_runs)
    return watched_runs(server.algorithm, keys, has.params, has.data.train, has.accuracy, **looks)


def _check(options: dict[str, Any]) -> None:
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
    """What a step takes. Rounds of synchronous servers are independent: each has a cohort of its own."""
    about, steps = {"server": name, "part": "step"}, runs.steps
    seen = {"seconds": steps["round_seconds"], "messages": steps["clients_reported"], "joules": steps["joules"]}
    for quantity, predicted in server.predicted.items():
        yield measured(about, f"{quantity} a round", seen[quantity], predicted, resolution=1e-4 * predicted)
    if server.law is not None:
        yield measured(
            about, "seconds a round, of infinitely many clients", seen["seconds"], server.law, kind="estimate"
        )
    if server.seconds is not None:
        late = slice(seen["seconds"].shape[1] // 2, None)  # not those who were all sent work at once, at the start
        each = seen["seconds"][:, late].sum(1) / seen["messages"][:, late].sum(1)
        yield measured(about, "seconds an update", each, server.seconds, kind="estimate")
        weights = seen["messages"][:, late]
        gaps = (steps["staleness"][:, late] * weights).sum(1) / weights.sum(1)
        yield measured(about, "staleness", gaps, server.staleness, resolution=0.01 * server.staleness)


def target_of(name: str, server: ServerMode, runs: Watched, target: float) -> Iterator[Comparison]:
    """Seconds, megabytes and joules until the target, if all runs reached it."""
    about = {"server": name, "part": "target"}
    seconds = runs.until(target, "round_seconds")
    if not np.isfinite(seconds).all():
        yield measured(about, "accuracy after the last step", runs.accuracy[:, -1])
        return
    rounds = runs.until(target, "clients_reported")
    each = server.seconds or server.predicted["seconds"] / server.predicted["messages"]
    yield measured(about, "seconds to target", seconds, float(rounds.mean()) * each, kind="estimate")
    yield few(about, "updates to target", rounds)
    yield few(about, "megabytes to target", runs.until(target, "bytes") / 1e6)
    yield few(about, "joules to target", runs.until(target, "joules"))
