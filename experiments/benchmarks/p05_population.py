"""Round time and memory against the size of the population.

A cohort of 1,000 out of N = 10^4 to 10^8 clients, softmax regression (d = 7,850), 5 steps of 10; a client's data are a
function of its id, so that the population itself costs nothing and what is left is what a round does: drawing the
cohort, keys, training, sums. One process for each N, all alive, taking turns; memory is the most that each process has
ever held, compilation included.
"""

from __future__ import annotations

import jax

from experiments.benchmarks import harness
from experiments.benchmarks.processes import peak_memory_bytes, workers
from experiments.benchmarks.workloads import massive, rounds_program

SIZES = (10**4, 10**5, 10**6, 10**7, 10**8)


def federation(num_clients: int, cohort_size: int, rounds: int) -> dict:
    """For a worker: times of rounds, and memory."""
    job = massive(num_clients, cohort_size)
    program = rounds_program(*job, rounds)
    return {"run": lambda: harness.timed(program), "memory": peak_memory_bytes, "cores": lambda: len(jax.devices())}


def measure(quick: bool = False) -> dict:
    """Seconds a round and peak memory for each N."""
    sizes, cohort, rounds, passes = (SIZES[:2], 50, 1, 3) if quick else (SIZES, 1000, 5, 9)
    arguments = [{"num_clients": n, "cohort_size": cohort, "rounds": rounds} for n in sizes]
    with workers(**{str(a["num_clients"]): {"function": federation, "arguments": a} for a in arguments}) as made:
        first = {name: worker.call() for name, worker in made.items()}
        seconds = {name: [] for name in made}
        for _ in range(passes):
            for name, worker in made.items():
                seconds[name].append(worker.call() / rounds)
        memory = {name: worker.call("memory") for name, worker in made.items()}
        cores = made[str(sizes[0])].call("cores")
    rows = []
    timings = {name: harness.Timing(first[name], tuple(seconds[name])) for name in seconds}
    for name, timing in timings.items():
        rows.append(harness.row(f"round, N = {int(name):,}", timing, "s", ours=True, cores=cores))
    for name in timings:
        rows.append(harness.row(f"peak memory, N = {int(name):,}", memory[name] / 2**20, "MiB", ours=True))
    low, high = str(sizes[0]), str(sizes[-1])
    growth = timings[high].median / timings[low].median
    ratios = [
        harness.ratio("round time, largest N against smallest", growth, at_most=1.05),
        harness.ratio("peak memory, largest N against smallest", memory[high] / memory[low], at_most=1.05),
    ]
    goal = f"both grow by at most 1.05 from N = {sizes[0]:,} to {sizes[-1]:,}."
    return harness.result("P5", "population size", goal=goal, rows=rows, ratios=ratios, sizes=list(sizes))


def plot(axes, result: dict) -> None:
    """Growth of time and memory, relative to the smallest population."""
    from experiments.benchmarks.report import OURS, THEIRS

    sizes = result["sizes"]
    for start, color in (("round", OURS), ("peak memory", THEIRS)):
        values = [row["value"] for row in result["rows"] if row["name"].startswith(start)]
        axes.semilogx(sizes, [value / values[0] for value in values], "o-", color=color, label=start)
    axes.axhline(1.05, color="black", linewidth=0.8, linestyle="--", label="goal")
    axes.set_ylim(0, 1.3)
    axes.set_xlabel("clients in the population")
    axes.set_ylabel("relative to the smallest")
    axes.legend(fontsize=8)
