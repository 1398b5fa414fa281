"""A tiny MLP, one example at a time.

d = 1,386 parameters (32-32-10), batches of one example, 10 local steps, 2,000 of 5,000 clients a round. A client is a
few microseconds of arithmetic, so whoever dispatches it from Python measures Python. Loops: one jitted call for each
client, and one for each local step, both with clients dealt to all devices without waiting; hand-written programs over
the whole round as in P0.
"""

from __future__ import annotations

from experiments.benchmarks import harness, side_by_side
from experiments.benchmarks.workloads import workload


def measure(quick: bool = False) -> dict:
    """Client updates a second, ours and the loops'."""
    work = workload("tiny", **({"cohort_size": 64, "num_clients": 128} if quick else {}))
    rounds, passes, lanes = (2, 3, (8,)) if quick else (10, 9, (1, 8, 32, 128))
    rows, ours, theirs, _ = side_by_side.against_loops(work, rounds=rounds, passes=passes, lanes=lanes)
    mine = ours.median / rounds
    calls = {name: seconds for name, seconds in theirs.items() if name.startswith("Python")}
    per_step = next(seconds for name, seconds in calls.items() if name.endswith("local step"))
    bare = min(seconds for name, seconds in theirs.items() if name.startswith("bare"))
    ratios = [
        harness.ratio("speed against one dispatch for each local step", per_step / mine, at_least=100),
        harness.ratio("speed against one dispatch for each client", min(calls.values()) / mine),
        harness.ratio("time against the best bare loop", mine / bare),
    ]
    goal = "at least 100 times a loop that dispatches every local step."
    notes = [f"d = {work.num_params:,}; {work.client_flops / 1e3:,.0f} kFLOP a client; {work.cohort_size:,} a round."]
    return harness.result("P1", work.title, goal=goal, rows=rows, ratios=ratios, notes=notes)
