"""The same bits on any number of devices and processes, and what exact sums cost.

MLP 60-128-10, 1,000 clients a round. A process for each of 1, 2, 4 and 8 virtual CPU devices, taking turns: SHA-256 of
the model and of the losses after 5 rounds, with exact sums and with an aggregator written here that adds floats. The
cost of exactness is the ratio of their times on as many devices as there are cores; more devices than cores only show
that the bits stay. Two processes: `fedjax-sim launch -n 2 -- run` against `fedjax-sim run`, by the SHA-256 of their
logs, in which every round's loss and update norm stand with all their digits.
"""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import command_line, harness
from experiments.benchmarks.processes import workers
from experiments.benchmarks.workloads import algorithm, rounds_program, workload
from fedjax_sim.types import Aggregator

DEVICES = (1, 2, 4, 8)


def float_mean() -> Aggregator:
    """The mean by examples with plain float sums: fast, and other bits for another number of devices."""

    def init(spec, num_slots):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), spec), jnp.zeros(())

    def accumulate(key, cohort, carry, received):
        total, weight = carry
        added = jax.tree.map(lambda t, u: t + jnp.tensordot(received.weights, u, 1), total, received.updates)
        return added, weight + received.weights.sum()

    def finalize(key, cohort, carry):
        total, weight = carry
        return jax.tree.map(lambda x: x / weight, total), {}

    return Aggregator(init, accumulate, finalize)


def federation(cohort_size: int, rounds: int) -> dict:
    """For a worker: times and digests of both aggregators."""
    work = workload("mlp", cohort_size=cohort_size, num_clients=2 * cohort_size)
    functions = {}
    for name, options in (("exact", {}), ("float", {"aggregator": float_mean()})):
        program = rounds_program(algorithm(work, **options), work.params, work.data, rounds)
        functions[name] = lambda program=program: harness.timed(program)
        functions[f"{name} digest"] = lambda program=program: _digest(program())
    return functions


def _digest(outcome) -> str:
    state, losses = outcome
    leaves = [np.asarray(x) for x in jax.tree.leaves((state.server, losses))]
    return hashlib.sha256(b"".join(x.tobytes() for x in leaves)).hexdigest()


def measure(quick: bool = False) -> dict:
    """Times, digests, and two processes."""
    counts, passes = ((1, 2), 2) if quick else (DEVICES, 11)
    arguments = {"cohort_size": 40 if quick else 1000, "rounds": 5}
    starts = {str(n): {"function": federation, "arguments": arguments, "devices": n} for n in counts}
    with workers(**starts) as made:
        kinds = ("exact", "float")
        first = {(n, kind): worker.call(kind) for n, worker in made.items() for kind in kinds}
        seconds = {pair: [] for pair in first}
        for _ in range(passes):
            for n, kind in seconds:
                seconds[n, kind].append(made[n].call(kind))
        digests = {(n, kind): made[n].call(f"{kind} digest") for n, kind in seconds}
    timings = {pair: harness.Timing(first[pair], tuple(seconds[pair])) for pair in seconds}
    cores = harness.machine()["cores"]
    rows = [
        harness.row(f"{kind} sums, {n} devices", timing, "clients/s", per=5 * arguments["cohort_size"],
                    ours=kind == "exact", cores=min(int(n), cores), digest=digests[n, kind][:16])
        for (n, kind), timing in timings.items()
    ]  # fmt: skip
    both = str(max(int(n) for n in starts if int(n) <= max(cores, 1)))
    # Pairs of neighbouring calls: what slows the machine down slows both of a pair.
    pairs = np.array(seconds[both, "exact"]) / np.array(seconds[both, "float"])
    different = {kind: len({digests[n, kind] for n in starts}) for kind in kinds}
    ratios = [
        harness.ratio("different models over device counts, exact sums", different["exact"], at_most=1),
        harness.ratio("different models over device counts, float sums", different["float"]),
        harness.ratio(f"time of exact sums / float sums, {both} devices", float(np.median(pairs)), at_most=1.05),
    ]
    processes, notes = _two_processes(quick)
    goal = "the same bits everywhere, at most 5 % slower than float sums."
    return harness.result("P11", "devices and exact sums", goal=goal, rows=rows, ratios=ratios + processes, notes=notes)


def _two_processes(quick: bool) -> tuple[list[dict], list[str]]:
    settings = command_line.small_job(rounds=3 if quick else 20, cohort=40 if quick else 1000)
    try:
        one = command_line.train(settings, devices=2)
        two = command_line.train(settings, devices=1, processes=2)
    except command_line.Unavailable as error:
        return [], [f"Two processes: not measured. {error}"]
    logs = {hashlib.sha256(found.metrics).hexdigest() for found in (one, two)}
    return [harness.ratio("different logs, one process and two", len(logs), at_most=1)], []
