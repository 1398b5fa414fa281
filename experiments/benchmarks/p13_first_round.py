"""Seconds until the first round.

`fedjax-sim run` without a config, as a user starts it: from the start of the process until the first round stands in
its log. That includes Python, imports, making the data, tracing, compiling, round 0's checkpoint and the round. Cold:
an empty compilation cache; warm: the cache that the cold run left. Each has a cache folder of its own; they take turns.
The second figure counts from the call of `run` on, when imports and data are there.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

from experiments.benchmarks import command_line, harness
from experiments.benchmarks.processes import ROOT


def measure(quick: bool = False) -> dict:
    """Cold and warm, in turns; and what the imports alone take."""
    settings = ["run.rounds=2"] + (["data.num_clients=400", "sampler.cohort_size=40"] if quick else [])
    seconds: dict[str, list[float]] = {name: [] for name in ("cold", "warm", "cold, inside", "warm, inside", "imports")}
    for _ in range(1 if quick else 4):
        with tempfile.TemporaryDirectory() as cache:
            cached = {"XDG_CACHE_HOME": cache, "FEDJAX_SIM_CACHE": "on"}
            for name in ("cold", "warm"):
                found = command_line.train(settings, environment=cached)
                seconds[name].append(found.first_round_seconds)
                seconds[f"{name}, inside"].append(found.inside_seconds)
        seconds["imports"].append(_imports())
    timings = {name: harness.Timing(0.0, tuple(values)) for name, values in seconds.items()}
    titles = {
        "cold": "cold cache, from the start of the process", "warm": "warm cache, from the start of the process",
        "cold, inside": "cold cache, from the call of run", "warm, inside": "warm cache, from the call of run",
        "imports": "Python with jax and fedjax_sim imported, nothing done",
    }  # fmt: skip
    rows = [harness.row(title, timings[name], "s", ours=name != "imports") for name, title in titles.items()]
    ratios = [
        harness.ratio("seconds, cold", timings["cold"].median, at_most=4),
        harness.ratio("seconds, warm", timings["warm"].median, at_most=1.2),
        harness.ratio("seconds from the call of run, warm", timings["warm, inside"].median),
    ]
    goal = "at most 4 s cold, 1.2 s warm, for the main job."
    return harness.result("P13", "first round", goal=goal, rows=rows, ratios=ratios)


def _imports() -> float:
    before = time.perf_counter()
    code = "import jax, fedjax_sim.command.run; jax.devices()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    return time.perf_counter() - before
