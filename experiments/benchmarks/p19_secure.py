"""Secure sums in a round: what the protocol costs beside the training of 10,000 clients.

Whole rounds of a softmax regression 60-10 (d = 610), 2 steps of 10, with 8-bit messages: the modular sum alone, the
secure sum of a circle with 100 neighbours each, where clients leave at every step and nothing is drawn for masks that
cancel, and the same on a complete graph. Beside them rounds of 200 clients with every mask drawn, added and taken off.
"""

from __future__ import annotations

import statistics

import optax

from experiments.benchmarks import harness
from experiments.benchmarks.workloads import rounds_program, workload
from fedjax_sim import aggregation, algorithms, client, sampling, server, transform

PLAIN, CIRCLE, WHOLE, DRAWN = "modular sum", "circle of 100", "complete graph", "circle of 20, masks drawn"


def rounds(job, aggregator):
    """() -> what one compiled round of all clients returns."""
    how = {"num_steps": job.num_steps, "batch_size": job.batch_size}
    work = client.local_sgd(job.loss_fn, optax.sgd(job.learning_rate), client.work(weighting="uniform", **how))
    parts = sampling.full(job.data.size), work, aggregator, server.optimizer(optax.sgd(1.0))
    algorithm = algorithms.federated(*parts, transform=transform.quantize(8, range=1.0, integers=True))
    return rounds_program(algorithm, job.params, job.data, 1)


def measure(quick: bool = False) -> dict:
    """Seconds a round, each way."""
    many, some = (200, 40) if quick else (10_000, 200)
    plain = aggregation.modular_sum(None)
    jobs = {}
    for size in (many, some):
        job, k = workload("softmax", cohort_size=size, num_clients=size), 10 if quick else 100
        ways = {PLAIN: plain}
        if size == many:
            ways[CIRCLE] = aggregation.secure_sum(plain, k // 2 + 1, neighbours=k, dropout=0.01)
            ways[WHOLE] = aggregation.secure_sum(plain, size // 2, dropout=0.01)
        else:
            ways[DRAWN] = aggregation.secure_sum(plain, 11, neighbours=20, dropout=0.01, masks=True)
        jobs[size] = {way: rounds(job, rule) for way, rule in ways.items()}
    rows, ratios = [], []
    for size, work in jobs.items():
        found = harness.interleaved(work, repeats=3 if quick else 15, budget_seconds=90)
        rows += [harness.row(f"round of {size:,}: {way}", t, ours=True) for way, t in found.items()]
        for way in found:
            if way == PLAIN:
                continue
            pairs = zip(found[way].seconds, found[PLAIN].seconds, strict=True)
            times = statistics.median(a / b for a, b in pairs)
            goal = {"at_most": 1.05} if way != DRAWN else {}
            ratios.append(harness.ratio(f"round of {size:,}: {way} / {PLAIN}", times, **goal))
    notes = [
        "A ratio is the median over interleaved repeats. Masks that are not drawn cancel by the ring's arithmetic."
    ]
    goal = "the protocol of 10,000 clients on a sparse graph costs at most 5 % of a round."
    return harness.result("P19", "Secure sums in a round", goal=goal, rows=rows, ratios=ratios, notes=notes)
