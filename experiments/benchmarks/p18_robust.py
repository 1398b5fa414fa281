"""Robust rules on 1,000 messages of 100,000 numbers.

Each rule of `fedjax_sim.aggregation` as a round has it: from the cohort's messages, handed over in chunks, to the
update, on one device, the copy into the buffer included (it is also measured alone). The median and the trimmed mean
beside `jnp.median` and `jnp.sort`, Krum beside one product of all messages with all (m x d x m), the geometric median
beside two passes over the messages for each step, its distances and its sum (a pass: the sum of the messages by
weights, `c @ x` on all cores, and the engine's on the one core that the rule has), and all of them beside ByzFL
(PyTorch, all cores) on the same array, where `python -m experiments.benchmarks.rivals.setup byzfl` made its
environment; ours runs before it and after it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import subprocess
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import harness
from experiments.benchmarks.rivals.setup import VENVS, python_of
from fedjax_sim import aggregation, engine
from fedjax_sim.engine.all_messages.all_messages import by_rule
from fedjax_sim.engine.all_messages.messages import messages_of, one_message, weighted_sum
from fedjax_sim.study.single_rounds import released
from fedjax_sim.types import Aggregator

STEPS = 8  # of the geometric median
GATHERED, PASS = "gathering the messages", "pass over the messages, one core"
HERE = pathlib.Path(__file__).resolve().parent
TIME_LIMIT = 1800  # seconds for ByzFL
OTHERWISE = ("multi-Krum",)  # ByzFL's averages one message more


def rules_of(m: int, f: int) -> dict:
    """The rules by name; ByzFL counts a neighbour more than Krum's paper, as f - 1 does here."""
    return {
        "median": aggregation.median(),
        "trimmed mean": aggregation.trimmed_mean(f),
        "mean around median": aggregation.mean_around_median(f),
        "Krum": aggregation.krum(f - 1),
        "multi-Krum": aggregation.krum(f - 1, m - f - 1),
        "Bulyan": aggregation.bulyan((m - 3) // 8),
        "geometric median": aggregation.geometric_median(STEPS, tolerance=0.0),
        "mixing, trimmed mean": aggregation.nearest_neighbour_mixing(aggregation.trimmed_mean(f), f),
    }


def gathered() -> Aggregator:
    """All messages brought together, and the first of them."""
    return by_rule(lambda key, round, cohort: (one_message(cohort.messages, jnp.int32(0)), {}), weighted=False)


def one_pass(x: jax.Array) -> jax.Array:
    """The engine's sum of messages [m, d] by weights."""
    rows = dataclasses.replace(engine.buffer(jax.ShapeDtypeStruct(x.shape[1:], x.dtype), len(x)), values=x)
    return weighted_sum(messages_of(rows, jnp.arange(len(x))), jnp.ones(len(x)) / len(x))


def measure(quick: bool = False) -> dict:
    """Seconds a call, ratios, and how far results are from ByzFL's."""
    m, d, f = (51, 2_000, 5) if quick else (1000, 100_000, 100)
    host = np.random.default_rng(0).standard_normal((m, d), dtype=np.float32)
    x, c = jnp.asarray(host), jnp.ones(m) / m
    exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    compiled = functools.partial(jax.jit, compiler_options=engine.compiler_options())
    key, rules = jax.random.key(0), rules_of(m, f)
    chunk = math.gcd(m, engine.plan_for(jax.ShapeDtypeStruct((d,), x.dtype), num_slots=m).chunk)
    mine = {name: compiled(functools.partial(released, rule, key, chunk=chunk)) for name, rule in rules.items()}
    mine |= {GATHERED: compiled(functools.partial(released, gathered(), key, chunk=chunk)), PASS: compiled(one_pass)}
    plain = {
        "jnp.median": jax.jit(lambda x: jnp.median(x, axis=0)),
        "jnp.sort, mean": jax.jit(lambda x: jnp.sort(x, axis=0)[f : m - f].mean(0)),
        "product of all messages with all": jax.jit(lambda x: exact(x, x.T)),
        "pass over the messages": jax.jit(lambda x: exact(c, x)),
        "copy of the messages": jax.jit(lambda x: x + 1),
    }
    repeats = 1 if quick else 3
    before = harness.interleaved(_calls(mine | plain, x), repeats=repeats)
    theirs, found = _byzfl(host, f, repeats)
    after = harness.interleaved(_calls(mine, x), repeats=repeats)
    timings = {name: harness.Timing(t.first, t.seconds + (after[name].seconds if name in after else ()))
               for name, t in before.items()}  # fmt: skip
    rows = [harness.row(name, t, ours=name in mine) for name, t in timings.items()]
    rivals = {name: harness.Timing(theirs["first_call_seconds"][name], tuple(took))
              for name, took in theirs.get("seconds", {}).items()}  # fmt: skip
    rows += [harness.row(f"ByzFL: {name}", t) for name, t in rivals.items()]
    seconds = {name: t.median for name, t in timings.items()}
    ratios = _ratios(seconds) + [
        harness.ratio(f"{name}: speed against ByzFL", t.median / seconds[name]) for name, t in rivals.items()
    ]
    notes = [f"{m:,} x {d:,} float32; f = {f} attackers; geometric median: {STEPS} steps, for two passes each."]
    if rivals:
        apart = {name: float(np.abs(np.asarray(mine[name](x)) - found[name]).max())
                 for name in found if name not in OTHERWISE}  # fmt: skip
        ratios.append(harness.ratio("largest difference from ByzFL's results", max(apart.values()), at_most=1e-4))
        told = ", ".join(f"{name} {gap:.1e}" for name, gap in apart.items())
        notes.append(f"ByzFL {theirs['version']}. Largest differences: {told}.")
        notes.append(
            "ByzFL's multi-Krum averages one message more, and is not compared; its mixing is left out of large jobs."
        )
        notes += [f"ByzFL's {name} failed: {why}" for name, why in theirs["rules_failed"].items()]
    else:
        notes.append(f"ByzFL was not measured: {theirs['failed']}")
    return harness.result("P18", "robust rules", goal="see the ratios.", rows=rows, ratios=ratios, notes=notes)


def _calls(functions: dict, x: jax.Array) -> dict:
    return {name: functools.partial(call, x) for name, call in functions.items()}


def _ratios(seconds: dict[str, float]) -> list[dict]:
    """Against plain JAX on the same machine."""
    product, passes = seconds["product of all messages with all"], 2 * STEPS * seconds["pass over the messages"]
    return [
        harness.ratio("median: speed against jnp.median", seconds["jnp.median"] / seconds["median"], at_least=5),
        harness.ratio("trimmed mean: speed against jnp.sort", seconds["jnp.sort, mean"] / seconds["trimmed mean"],
                      at_least=5),
        harness.ratio("Krum: time against one product", seconds["Krum"] / product, at_most=1.2),
        harness.ratio("geometric median: time against its passes", seconds["geometric median"] / passes, at_most=1.5),
        harness.ratio("geometric median: time after gathering against its passes, both on one core",
                      (seconds["geometric median"] - seconds[GATHERED]) / (2 * STEPS * seconds[PASS]), at_most=1.5),
    ]  # fmt: skip


def _byzfl(host: np.ndarray, f: int, repeats: int) -> tuple[dict, dict[str, np.ndarray]]:
    """Returns ByzFL's seconds on the same array and its results, or why there are none.

    Args:
      host: [m, d] float32, the messages.
      f: attackers that the rules are told.
      repeats: timed calls of each rule.

    Returns: (what the process printed, or {"failed": why}; [d] the aggregate by rule).
    """
    python = python_of("byzfl", pathlib.Path(os.environ.get("RIVALS_VENVS", VENVS)))
    if not python.is_file():
        return {"failed": "no environment: run python -m experiments.benchmarks.rivals.setup byzfl"}, {}
    with tempfile.TemporaryDirectory() as folder:
        path, out = pathlib.Path(folder) / "messages.npy", pathlib.Path(folder) / "out.npz"
        np.save(path, host)
        command = [str(python), str(HERE / "rivals" / "byzfl_job.py"), str(path), str(f), str(STEPS), str(repeats)]
        variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "NPROC")}
        try:
            done = subprocess.run(
                [*command, str(out)], capture_output=True, text=True, timeout=TIME_LIMIT, env=variables
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"no answer within {TIME_LIMIT} s"}, {}
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"version"')]
        if not lines:
            return {"failed": " ".join(done.stderr.replace(folder, "FOLDER").split())[-300:]}, {}
        with np.load(out, allow_pickle=False) as file:
            return json.loads(lines[-1]), {name: file[name] for name in file.files}


def plot(axes, result: dict) -> None:
    """Seconds of each rule."""
    from experiments.benchmarks.report import OURS, THEIRS

    rows = result["rows"][::-1]
    axes.barh([row["name"] for row in rows], [row["value"] for row in rows],
              color=[OURS if row["ours"] else THEIRS for row in rows])  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("seconds")
