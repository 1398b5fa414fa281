"""A GRU over characters.

Sequences of 80 characters out of 80 (random text: only the time matters), embedding 8, one GRU layer of 128 units,
logits at every position, 2 local steps of 4 sequences, 50 clients a round. The recurrence is 80 small dependent matrix
products; the loops get the library's own GRU layer, so that the difference is what is around it.
"""

from __future__ import annotations

from experiments.benchmarks import harness, side_by_side
from experiments.benchmarks.workloads import workload


def measure(quick: bool = False) -> dict:
    """Client updates a second, ours and the loops'."""
    work = workload("gru", **({"cohort_size": 8, "num_clients": 16} if quick else {}))
    rounds, passes, lanes = (1, 3, (4,)) if quick else (2, 7, (1, 2, 4, 8))
    rows, ours, theirs, _ = side_by_side.against_loops(work, rounds=rounds, passes=passes, lanes=lanes)
    mine = ours.median / rounds
    per_call = min(seconds for name, seconds in theirs.items() if name.startswith("Python"))
    bare = min(seconds for name, seconds in theirs.items() if name.startswith("bare"))
    flops = work.client_flops * work.cohort_size / mine
    ratios = [
        harness.ratio("speed against the best Python loop", per_call / mine),
        harness.ratio("time against the best bare loop", mine / bare, at_most=1.1),
        harness.ratio("GFLOP/s", flops / 1e9),
    ]
    goal = "client updates/s against the loops; within 1.10 of the best bare loop, as in P0."
    notes = [f"d = {work.num_params:,}; {work.client_flops / 1e6:,.0f} MFLOP a client; {work.cohort_size} a round."]
    return harness.result("P15", work.title, goal=goal, rows=rows, ratios=ratios, notes=notes)
