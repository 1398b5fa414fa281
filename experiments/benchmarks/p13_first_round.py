"""Seconds until the first round.

`fedjax-sim run` without a config, as a user starts it: from the start of the process until the first round stands in
its log. That includes Python, imports, making the data, tracing, compiling, round 0's checkpoint and the round. Cold:
an empty compilation cache; warm: the cache that the cold run left. Each has a cache folder of its own; they take turns.
The second figure counts from the call of `run` on, when imports and data are there. The picture takes such runs apart
by JAX's own events.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

from experiments.benchmarks import command_line, harness
from experiments.benchmarks.jax_events import EVENTS_FILE
from experiments.benchmarks.processes import ROOT

PARTS = (  # in the order in which they begin
    "Python and imports",
    "data and the first model",
    "tracing",
    "lowering",
    "compiling, or reading what was compiled",
    "first evaluation, checkpoint and the round",
)


def measure(quick: bool = False) -> dict:
    """Cold and warm, in turns; and what the imports alone take."""
    settings = ["run.rounds=2"] + (["data.num_clients=400", "sampler.cohort_size=40"] if quick else [])
    seconds: dict[str, list[float]] = {name: [] for name in ("cold", "warm", "cold, inside", "warm, inside", "imports")}
    parts: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(1 if quick else 4):
        with tempfile.TemporaryDirectory() as cache:
            cached = {"XDG_CACHE_HOME": cache, "FEDJAX_SIM_CACHE": "on"}
            for name in ("cold", "warm"):
                found = command_line.train(settings, environment=cached)
                seconds[name].append(found.first_round_seconds)
                seconds[f"{name}, inside"].append(found.inside_seconds)
        with tempfile.TemporaryDirectory() as cache:
            for name in parts:
                parts[name].append(_parts(settings, pathlib.Path(cache)))
        seconds["imports"].append(_imports())
    timings = {name: harness.Timing(0.0, tuple(values)) for name, values in seconds.items()}
    titles = {
        "cold": "cold cache, from the start of the process", "warm": "warm cache, from the start of the process",
        "cold, inside": "cold cache, from the call of run", "warm, inside": "warm cache, from the call of run",
        "imports": "Python with jax and fedjax_sim imported, nothing done",
    }  # fmt: skip
    rows = [harness.row(title, timings[name], "s", ours=name != "imports") for name, title in titles.items()]
    rows += [
        harness.row(f"{name}: {part}", float(np.median([found[part] for found in runs])), "s", ours=True)
        for name, runs in parts.items()
        for part in PARTS
    ]
    ratios = [
        harness.ratio("seconds, cold", timings["cold"].median, at_most=4),
        harness.ratio("seconds, warm", timings["warm"].median, at_most=1.2),
        harness.ratio("seconds from the call of run, warm", timings["warm, inside"].median),
    ]
    goal = "at most 4 s cold, 1.2 s warm, for the main job."
    return harness.result("P13", "first round", goal=goal, rows=rows, ratios=ratios)


def _parts(settings: list[str], cache: pathlib.Path) -> dict[str, float]:
    """Returns the seconds of each part of a run, from the start of its process until its first round.

    Args:
      settings: a.b=c overrides of the default config.
      cache: the folder of the caches that the run uses.

    Returns: seconds by name, for the entries of `PARTS`.
    """
    events_file = cache / "events.json"
    environment = {"XDG_CACHE_HOME": str(cache), "FEDJAX_SIM_CACHE": "on", EVENTS_FILE: str(events_file)}
    found = command_line.train(settings, environment=environment, module="experiments.benchmarks.jax_events")
    events = json.loads(events_file.read_text())
    end = found.began + found.first_round_seconds
    called = end - found.inside_seconds
    imported = next(stop for kind, _, stop in events if kind == "import")

    def covered(kinds: str, start: float = found.began, stop: float = end) -> float:
        """Returns the seconds of a stretch in which JAX did any of these; one may lie inside of another."""
        seconds, reached = 0.0, start
        for kind, first, last in sorted(events, key=lambda event: event[1]):
            if kind in kinds.split():
                seconds += max(0.0, min(last, stop) - max(first, reached))
                reached = max(reached, last)
        return seconds

    in_jax = "trace lower compile"
    seconds = (
        imported - found.began,
        called - imported - covered(in_jax, imported, called),
        covered(in_jax) - covered("lower compile"),
        covered("lower compile") - covered("compile"),
        covered("compile"),
        end - called - covered(in_jax, called, end),
    )
    return dict(zip(PARTS, seconds, strict=True))


def _imports() -> float:
    before = time.perf_counter()
    code = "import jax, fedjax_sim.command.run; jax.devices()"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, check=True)
    return time.perf_counter() - before


def plot(axes, result: dict) -> None:
    """A bar for each kind of start, cut into its parts."""
    values = {row["name"]: row["value"] for row in result["rows"]}
    starts = ["warm", "cold"]  # the first is drawn at the bottom
    left = np.zeros(len(starts))
    for part in PARTS:
        seconds = np.array([values[f"{start}: {part}"] for start in starts])
        axes.barh(starts, seconds, left=left, label=part)
        left += seconds
    for i, total in enumerate(left):
        axes.annotate(f"{total:.1f} s", (total, i), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.margins(x=0.1)
    axes.figure.set_size_inches(8, 3.4)
    axes.set_xlabel("seconds from the start of the process until the first round is in the log")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
