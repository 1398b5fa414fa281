"""A million distinct clients trained in one round.

N = m = 10^6, softmax regression 784-10 (d = 7,850), 20 rows a client drawn from a shared table by its id, 5 local steps
of 10. A process of its own, so that its peak memory is this round's, compilation included; the first round compiles,
the second is timed.
"""

from __future__ import annotations

import jax

from experiments.benchmarks import harness
from experiments.benchmarks.p02_emnist import memory_copy
from experiments.benchmarks.processes import once, peak_memory_bytes
from experiments.benchmarks.workloads import massive, rounds_program


def everybody(num_clients: int) -> dict:
    """For a worker: one round with all clients, twice."""
    job = massive(num_clients, num_clients)
    program = rounds_program(*job, 1, metric="clients_reported")

    def run():
        first = harness.timed(program)
        answer = {}
        second = harness.timed(lambda: answer.setdefault("it", program()))
        trained, cores = int(answer["it"][1][0]), len(jax.devices())
        return {"first": first, "second": second, "trained": trained, "peak": peak_memory_bytes(), "cores": cores}

    return {"run": run}


def measure(quick: bool = False) -> dict:
    """Seconds and memory of that round."""
    num_clients = 2000 if quick else 10**6
    found = once(everybody, {"num_clients": num_clients})
    if found["trained"] != num_clients:
        raise RuntimeError(f"expected {num_clients:,} clients to report, {found['trained']:,} did")
    copies, copying = memory_copy(quick)
    rows = [
        harness.row("one round", found["second"], "s", ours=True, cores=found["cores"]),
        harness.row("first round, with compilation", found["first"], "s", ours=True, cores=found["cores"]),
        harness.row("client updates", num_clients / found["second"], "clients/s", ours=True, cores=found["cores"]),
        harness.row("peak memory of the process", found["peak"] / 2**30, "GiB", ours=True),
    ]
    flops = num_clients * 5 * 10 * 4 * 7840
    moved = num_clients * 5 * 16 * 7850
    ratios = [
        harness.ratio("seconds", found["second"], at_most=60),
        harness.ratio("GiB", found["peak"] / 2**30, at_most=2),
        harness.ratio("GFLOP/s", flops / found["second"] / 1e9),
        harness.ratio("GB/s of weights, at 16 bytes a parameter and step", moved / found["second"] / 1e9),
        harness.ratio("that traffic / copy in memory", moved / found["second"] / 1e9 / copying),
    ]
    goal = "at most 60 s and 2 GiB."
    return harness.result("P14", f"{num_clients:,} clients in one round", goal=goal, rows=rows + copies, ratios=ratios)
