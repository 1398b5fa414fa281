"""Weak scaling, and the collectives of a round.

Twice the cores with twice the cohort should take the same time. Inside a process: 1 virtual device with 500 clients a
round against 2 devices with 1,000, taking turns. Over processes: `fedjax-sim run` held on one core with 500 clients
against `fedjax-sim launch -n 2 -- run` with 1,000, by the runs' own round times (the later half of the rounds). The
collectives are counted in the compiled text of one round on two devices.
"""

from __future__ import annotations

import re
from collections import Counter

import jax

from experiments.benchmarks import command_line, harness
from experiments.benchmarks.processes import workers
from experiments.benchmarks.workloads import algorithm, rounds_program, workload

COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def federation(cohort_size: int, rounds: int) -> dict:
    """For a worker: times of rounds, and the collectives in one round's program."""
    work = workload("mlp", cohort_size=cohort_size, num_clients=2 * cohort_size)
    made = algorithm(work)
    program = rounds_program(made, work.params, work.data, rounds)

    def collectives() -> dict[str, int]:
        key = jax.random.key(0)
        state = made.init(key, work.params, work.data)
        text = jax.jit(made.step).lower(key, state, work.data).compile().as_text()
        return dict(Counter(COLLECTIVE.findall(text)))

    return {"run": lambda: harness.timed(program), "collectives": collectives}


def measure(quick: bool = False) -> dict:
    """Efficiency in a process and over processes."""
    m, rounds, passes = (20, 2, 2) if quick else (500, 10, 9)
    starts = {
        str(n): {"function": federation, "arguments": {"cohort_size": n * m, "rounds": rounds}, "devices": n}
        for n in (1, 2)
    }
    with workers(**starts) as made:
        first = {n: worker.call() for n, worker in made.items()}
        seconds = {n: [] for n in made}
        for _ in range(passes):
            for n, worker in made.items():
                seconds[n].append(worker.call())
        collectives = made["2"].call("collectives")
    timings = {n: harness.Timing(first[n], tuple(seconds[n])) for n in made}
    rows = [
        harness.row(f"1 process, {n} device{'s' * (n > '1')}, cohort {int(n) * m:,}", timing, "clients/s",
                    per=int(n) * m * rounds, ours=True, cores=int(n))
        for n, timing in timings.items()
    ]  # fmt: skip
    ratios = [
        harness.ratio("efficiency of 2 devices", timings["1"].median / timings["2"].median, at_least=0.9),
        harness.ratio("collectives in a round", sum(collectives.values()), at_most=1),
    ]
    notes = [f"Collectives: {', '.join(f'{n} {kind}' for kind, n in sorted(collectives.items())) or 'none'}."]
    found, efficiency, why = _processes(m, quick)
    goal = "at least 0.9, and exactly one collective."
    result = harness.result("P12", "weak scaling", goal=goal, rows=rows + found, ratios=ratios + efficiency,
                            notes=notes + why)  # fmt: skip
    return result | ({"reached": None} if why and result["reached"] else {})


def _processes(m: int, quick: bool) -> tuple[list[dict], list[dict], list[str]]:
    """Measures rounds of the command line in one process and in two, with m clients a process.

    Args:
      m: clients of a process in a round.
      quick: few rounds and one pass, to see that everything runs.

    Returns: (rows in clients a second, ratios, notes). The efficiency is the seconds of a round with one process over
      those with two. Where processes cannot be launched there is a note alone.
    """
    rounds, passes = (4, 1) if quick else (80, 3)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    try:
        for _ in range(passes):
            for n in seconds:
                settings = command_line.small_job(rounds=rounds, cohort=n * m)
                found = command_line.train(settings, processes=n, devices=1, cores={0} if n == 1 else None)
                half = next(x for x in found.seconds if x[0] >= rounds // 2)
                last = found.seconds[-1]
                seconds[n].append((last[1] - half[1]) / max(last[0] - half[0], 1))
    except command_line.Unavailable as error:
        return [], [], [f"Two processes: not measured. {error}"]
    timings = {n: harness.Timing(0.0, tuple(values)) for n, values in seconds.items()}
    rows = [
        harness.row(f"{n} process{'es' * (n > 1)}, 1 device each, cohort {n * m:,}", timings[n], "clients/s",
                    per=n * m, ours=True, cores=n)
        for n in seconds
    ]  # fmt: skip
    return rows, [harness.ratio("efficiency of 2 processes", timings[1].median / timings[2].median, at_least=0.9)], []
