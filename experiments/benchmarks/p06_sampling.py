"""Drawing 10,000 of 10 million clients.

`sampling.uniform` evaluates a keyed permutation at 10,000 places; `jax.random.choice(replace=False)` sorts the whole
population. Both are compiled, both return distinct int32 ids. NumPy's `Generator.choice`, which also works in O(m), and
its older `permutation` are there to show what a fair rival is.
"""

from __future__ import annotations

import jax
import numpy as np

from experiments.benchmarks import harness
from fedjax_sim import sampling


def measure(quick: bool = False) -> dict:
    """Seconds a draw."""
    size, m, inner = (10**5, 100, 2) if quick else (10**7, 10**4, 100)
    sampler = sampling.uniform(size, m)
    key, rng = jax.random.key(1), np.random.default_rng(1)

    @jax.jit
    def ours(key):
        return sampler.sample(key, sampler.init())[0].ids

    @jax.jit
    def choice(key):
        return jax.random.choice(key, size, (m,), replace=False)

    keys = list(jax.random.split(key, inner))
    work = {
        "sampling.uniform": lambda: [ours(k) for k in keys],
        "jax.random.choice": lambda: choice(key),
        "numpy.random.Generator.choice": lambda: [rng.choice(size, m, replace=False) for _ in keys],
        "numpy.random.Generator.permutation": lambda: rng.permutation(size)[:m],
    }
    distinct = len(np.unique(np.asarray(ours(key)))) == m
    timings = harness.interleaved(work, repeats=3 if quick else 5)
    calls = {name: inner if name in ("sampling.uniform", "numpy.random.Generator.choice") else 1 for name in work}
    timings = {name: harness.Timing(t.first, tuple(s / calls[name] for s in t.seconds)) for name, t in timings.items()}
    rows = [harness.row(name, t, ours=name.startswith("sampling"), ids_a_call=m) for name, t in timings.items()]
    mine = timings["sampling.uniform"].median
    ratios = [
        harness.ratio("speed against jax.random.choice", timings["jax.random.choice"].median / mine, at_least=10_000),
        harness.ratio("speed against NumPy's Generator.choice", timings["numpy.random.Generator.choice"].median / mine),
    ]
    notes = [f"{m:,} of {size:,}; {inner} draws a timed call of the fast ones. All ids distinct: {distinct}."]
    goal = "at least 10,000 times jax.random.choice."
    return harness.result("P6", "sampling a cohort", goal=goal, rows=rows, ratios=ratios, notes=notes)


def plot(axes, result: dict) -> None:
    """Seconds, on a logarithmic axis: five decades lie between them."""
    from experiments.benchmarks.report import OURS, THEIRS

    rows = result["rows"][::-1]
    axes.barh([row["name"] for row in rows], [row["value"] for row in rows],
              color=[OURS if row["ours"] else THEIRS for row in rows])  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("seconds a draw")
