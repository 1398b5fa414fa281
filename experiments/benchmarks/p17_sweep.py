"""A sweep of 1,000 points against the same points one by one.

20 seeds x 50 step sizes on quadratics (10 clients of dimension 10, cohorts of 5, 5 local steps), 200 rounds each, one
evaluation: `study.sweep` over all of them, from nothing to rows, against a loop of `run`, of which a sample spread over
the grid is timed before and after the sweep. Every sampled point is compared with its row: the numbers must be equal.
"""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks import harness
from fedjax_sim import algorithms, metrics, population, sampling
from fedjax_sim.running.loop import run
from fedjax_sim.sweeps import sweep

SWEPT, LOOPED = "study.sweep, all points", "loop of run, for as many points"


def measure(quick: bool = False) -> dict:
    """Seconds of the sweep and of the loop."""
    rates, seeds, rounds, sample = (
        (np.geomspace(0.01, 0.5, 3), 2, 3, 2) if quick else (np.geomspace(0.01, 0.5, 50), 20, 200, 10)
    )
    data = population.quadratics(num_clients=10, dimension=10)
    judge = metrics.evaluation(population.quadratic_loss, test=data.test)
    params, count = {"w": jnp.zeros(10)}, len(rates) * seeds

    def make(rate):
        return algorithms.fedavg(population.quadratic_loss, sampling.uniform(10, 5), optax.sgd(rate), num_steps=5)

    def single(point):
        rate, seed = float(rates[point // seeds]), point % seeds
        before = time.perf_counter()
        _, history = run(
            jax.random.key(seed), make(rate), params, data.train, rounds, evaluation=judge, evaluate_every=rounds
        )
        return time.perf_counter() - before, (rate, seed), history.records[-1]

    single(0)  # what a first call of anything costs counts for neither
    points = np.linspace(0, count - 1, sample).astype(int).tolist()
    singles = [single(point) for point in points[::2]]
    before = time.perf_counter()
    found = sweep(make, params, data.train, rounds, grid={"rate": rates}, seeds=seeds, evaluation=judge)
    seconds = time.perf_counter() - before
    singles += [single(point) for point in points[1::2]]
    rows = {(row["rate"], row["seed"]): row for row in found.rows}
    same = sum(all(rows[point][name] == value for name, value in record.items()) for _, point, record in singles)
    each = statistics.median(took for took, _, _ in singles)
    lines = [
        harness.row(SWEPT, seconds, ours=True, points=count, programs=found.num_programs,
                    compile_seconds=found.compile_seconds),
        harness.row(LOOPED, each * count, points=count, sampled=len(singles), seconds_each=each),
    ]  # fmt: skip
    ratios = [
        harness.ratio("loop / sweep", each * count / seconds, at_least=20),
        harness.ratio("share of sampled points with equal numbers", same / len(singles), at_least=1),
    ]
    notes = [
        f"The loop is {count} times the median of {len(singles)} runs, which are spread over the grid.",
        f"A run of the loop compiles its own program; the sweep compiles {found.num_programs} for all of them.",
    ]
    goal = "1,000 points at least 20 times faster than one by one, with the same numbers."
    return harness.result("P17", "a sweep of 1,000 points", goal=goal, rows=lines, ratios=ratios, notes=notes)


def plot(axes, result: dict) -> None:
    """Seconds, on a logarithmic axis."""
    from experiments.benchmarks.report import OURS, THEIRS

    rows = result["rows"][::-1]
    colors = [OURS if row["ours"] else THEIRS for row in rows]
    axes.barh([row["name"] for row in rows], [row["value"] for row in rows], color=colors)
    axes.set_xscale("log")
    axes.set_xlabel("seconds")
