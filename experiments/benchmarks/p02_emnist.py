"""EMNIST-like logistic regression and MLP.

784 features, 62 classes: softmax regression (d = 48,670) and 784-200-200-62 (d = 209,662), 5 local steps of 20. With
weights of its own each client moves 16 to 24 bytes a parameter and step for 6 b FLOPs, so these models are bound by the
caches (that traffic is set against a copy in memory); what they lose against one centralised model is the price of
having many. Centralised SGD takes the same examples in batches of 1,000: as many FLOPs in far fewer steps.
"""

from __future__ import annotations

import jax

from experiments.benchmarks import baselines, harness, side_by_side
from experiments.benchmarks.workloads import workload


def measure(quick: bool = False) -> dict:
    """Client updates a second of both models, ours and the loops'."""
    rows, ratios, notes = [], [], []
    copies, copying = memory_copy(quick)
    for name, title in (("logistic", "logistic"), ("large_mlp", "MLP")):
        work = workload(name, **({"cohort_size": 8, "num_clients": 16} if quick else {}))
        rounds, passes, lanes = (1, 3, (1,)) if quick else (4, 7, (1, 2, 4))
        extra = one_model(work, 100 if quick else 1000)
        found, ours, theirs, _ = side_by_side.against_loops(
            work, rounds=rounds, passes=passes, lanes=lanes, title=title, extra=extra
        )
        rows += found
        mine = ours.median / rounds
        bare = min(seconds for what, seconds in theirs.items() if what.startswith("bare"))
        calls = min(seconds for what, seconds in theirs.items() if what.startswith("Python"))
        moved = 16 * work.num_params * work.num_steps * work.cohort_size / mine / 1e9
        central = min(seconds for what, seconds in theirs.items() if what.startswith("centralised"))
        ratios += [
            harness.ratio(f"{title}: time against the best bare loop", mine / bare, at_most=1.1),
            harness.ratio(f"{title}: speed against the best Python loop", calls / mine),
            harness.ratio(f"{title}: time against centralised SGD of equal FLOPs", mine / central),
            harness.ratio(f"{title}: GFLOP/s", work.client_flops * work.cohort_size / mine / 1e9),
            harness.ratio(f"{title}: weight traffic, 16 bytes a parameter and step, / copy in memory", moved / copying),
        ]
        notes.append(f"{title}: d = {work.num_params:,}, {work.client_flops / 1e6:.0f} MFLOP a client.")
    goal = "at least 1.8 times FedJAX (see `rivals.json`), and within 1.10 of the best bare loop."
    return harness.result("P2", "logistic 784-62 and MLP 784-200-200-62", goal=goal, rows=rows + copies,
                          ratios=ratios, notes=notes)  # fmt: skip


def memory_copy(quick: bool) -> tuple[list[dict], float]:
    """Rows and the largest of the machine's speeds of copying, in GB/s read and written."""
    size = 16 if quick else 512
    timings = harness.interleaved(baselines.copy_peak(size), repeats=5)
    lines = [
        harness.row(
            f"copy in memory, {name}",
            timing,
            "GB/s",
            per=2 * size * 2**20 / 1e9,
            cores=1 if "one core" in name else len(jax.devices()),
        )
        for name, timing in timings.items()
    ]
    return lines, max(line["value"] for line in lines)


def one_model(work, batch: int, loss_fn=None) -> dict:
    """Centralised SGD over a round's examples, on one device and on all of them."""
    rows = work.cohort_size * work.num_steps * work.batch_size // batch * batch
    x, y = (a[:rows] for a in work.arrays)
    share = work.cohort_size * work.num_steps * work.batch_size
    if rows != share:
        raise ValueError(f"batch: expected a divisor of the round's {share} examples, got {batch}")
    extra = {}
    for devices in sorted({1, len(jax.devices())}):
        step = baselines.centralised(work, loss_fn or work.loss_fn, batch, devices=devices)
        batches = step.batches(x, y)
        cores = len(jax.devices())  # with one device, XLA may still split a layer over the cores
        name = f"centralised SGD, batch {batch:,}, {devices} device{'s' * (devices > 1)}"
        extra[name] = side_by_side.Other(lambda s=step, b=batches: s(work.params, b), 1, cores)
    return extra
