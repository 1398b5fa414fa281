"""Coordinate-wise median and trimmed mean of 1,000 updates of 100,000 coordinates.

`engine.median` and `engine.trimmed_mean` (radix select in blocks that stay in cache) on one device and with the columns
split over all of them, against `jnp.median`, a trimmed mean by `jnp.sort`, and NumPy (introselect; one core). Medians
are compared with NumPy's bit for bit, trimmed means with a float64 mean. Second, the k largest of a vector:
`engine.top_k` against `lax.top_k`, for float32 and int32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from experiments.benchmarks import harness
from fedjax_sim import engine


def _split(fn):
    mesh = jax.make_mesh((len(jax.devices()),), ("columns",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": PartitionSpec(None, "columns"), "out_specs": PartitionSpec("columns")}
    return jax.jit(jax.shard_map(fn, mesh=mesh, check_vma=False, **specs)), mesh, specs["in_specs"]


def measure(quick: bool = False) -> dict:
    """Seconds a call, ratios, and whether the answers agree."""
    m, d, trim = (50, 2_000, 5) if quick else (1000, 100_000, 100)
    host = np.random.default_rng(0).standard_normal((m, d), dtype=np.float32)
    x, cores = jnp.asarray(host), len(jax.devices())
    trimmed = functools.partial(engine.trimmed_mean, trim=trim)
    split_median, mesh, spec = _split(engine.median)
    split_trimmed, _, _ = _split(trimmed)
    columns = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    median, trimmed = jax.jit(engine.median), jax.jit(trimmed)
    plain_median = jax.jit(lambda x: jnp.median(x, axis=0))
    plain_trimmed = jax.jit(lambda x: jnp.sort(x, axis=0)[trim : m - trim].mean(0))

    def numpy_trimmed():
        return np.partition(host, (trim, m - 1 - trim), axis=0)[trim : m - trim].mean(0)

    fast = {
        f"median: engine.median, {cores} devices": lambda: split_median(columns),
        "median: engine.median, 1 device": lambda: median(x),
        f"trimmed mean: engine.trimmed_mean, {cores} devices": lambda: split_trimmed(columns),
        "trimmed mean: engine.trimmed_mean, 1 device": lambda: trimmed(x),
        "median: numpy.median": lambda: np.median(host, axis=0),
        "trimmed mean: numpy.partition": numpy_trimmed,
    }
    slow = {
        "median: jnp.median": lambda: plain_median(x),
        "trimmed mean: jnp.sort": lambda: plain_trimmed(x),
    }
    timings = harness.interleaved(fast | slow, repeats=3)
    rows = [
        harness.row(name, t, ours="engine" in name, cores=cores if f"{cores} devices" in name else None)
        for name, t in timings.items()
    ]
    seconds = {name: t.median for name, t in timings.items()}
    mine = {kind: seconds[f"{kind}: engine.{fn}, {cores} devices"] for kind, fn in
            (("median", "median"), ("trimmed mean", "trimmed_mean"))}  # fmt: skip
    expected = np.median(host, axis=0)
    same = all(np.array_equal(np.asarray(found), expected) for found in (median(x), split_median(columns)))
    exact = np.sort(host, axis=0)[trim : m - trim].mean(0, dtype=np.float64)
    error = {name: float(np.abs(np.asarray(found) - exact).max()) for name, found in
             (("ours", trimmed(x)), ("jnp.sort", plain_trimmed(x)))}  # fmt: skip
    ratios = [
        harness.ratio("median: speed against jnp.median", seconds["median: jnp.median"] / mine["median"], at_least=5),
        harness.ratio("median: the same on one device", seconds["median: jnp.median"]
                      / seconds["median: engine.median, 1 device"], at_least=5),
        harness.ratio("median: speed against numpy.median", seconds["median: numpy.median"] / mine["median"]),
        harness.ratio("trimmed mean: speed against jnp.sort",
                      seconds["trimmed mean: jnp.sort"] / mine["trimmed mean"], at_least=5),
        harness.ratio("trimmed mean: speed against numpy.partition",
                      seconds["trimmed mean: numpy.partition"] / mine["trimmed mean"]),
    ]  # fmt: skip
    top_rows, top_ratios = _largest(quick)
    notes = [
        f"{m:,} x {d:,} float32, trim {trim} at each end. Medians equal NumPy's bit for bit: {same}.",
        f"Largest error of a trimmed mean against float64: {error['ours']:.1e}; by jnp.sort {error['jnp.sort']:.1e}.",
    ]
    goal = "at least 5 times jnp.median."
    return harness.result("P10", "order statistics", goal=goal, rows=rows + top_rows, ratios=ratios + top_ratios,
                          notes=notes)  # fmt: skip


def _largest(quick: bool) -> tuple[list[dict], list[dict]]:
    """Measures `engine.top_k` beside `lax.top_k` on arrays of d numbers, for shares of 0.1, 1 and 10 %.

    Args:
      quick: only d = 10^4, to see that everything runs.

    Returns: (rows in seconds, ratios of speed).
    """
    rows, ratios = [], []
    for d in (10**4,) if quick else (10**4, 10**5, 10**6, 10**7):
        x = np.random.default_rng(d).standard_normal(d, dtype=np.float32)
        kinds = {"float32": jnp.asarray(x), "int32": jnp.asarray((x * 2.0**24).astype(np.int32))}
        for kind, values in kinds.items():
            if kind == "int32" and d > 10**6:
                continue
            for per_mille in (1, 10, 100):
                k = d * per_mille // 1000
                ours = jax.jit(functools.partial(engine.top_k, k=k))
                theirs = jax.jit(lambda x, k=k: jax.lax.top_k(jnp.abs(x), k))
                work = {"engine": lambda f=ours, x=values: f(x), "lax": lambda f=theirs, x=values: f(x)}
                timings = harness.interleaved(work, repeats=9, budget_seconds=4)
                title = f"top {per_mille / 10:g} % of 10^{len(str(d)) - 1} {kind}"
                rows += [harness.row(f"{title}: {name}.top_k", t, ours=name == "engine") for name, t in timings.items()]
                speed = timings["lax"].median / timings["engine"].median
                ratios.append(harness.ratio(f"{title}: speed against lax.top_k", speed))
    return rows, ratios


def plot(axes, result: dict) -> None:
    """Seconds of medians and trimmed means."""
    from experiments.benchmarks.report import OURS, THEIRS

    rows = [row for row in result["rows"] if not row["name"].startswith("top")][::-1]
    axes.barh([row["name"] for row in rows], [row["value"] for row in rows],
              color=[OURS if row["ours"] else THEIRS for row in rows])  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("seconds, 1,000 x 100,000")
