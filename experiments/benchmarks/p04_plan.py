"""The automatic plan against a full sweep.

Every workload of this suite runs its rounds under the automatic plan, and under a sweep of lanes (clients under
one vmap) and chunks (messages summed at once), in turns. The smallest of many noisy medians flatters the sweep, so its
two best plans are then compared with the automatic one again, with more repeats, and that comparison counts. One vmap
over the cohort, which is what a first program does, is written by hand: float sums, no checks, one device or all of
them.
"""

from __future__ import annotations

import jax

from experiments.benchmarks import baselines, harness
from experiments.benchmarks.workloads import algorithm, rounds_program, workload
from fedjax_sim import engine

SWEEPS = {  # title: workload, rounds a call, cohort, lanes
    "mlp": ("mlp", 8, None, (1, 2, 4, 8, 16, 32)),
    "tiny": ("tiny", 6, None, (8, 16, 32, 64, 128, 256)),
    "logistic": ("logistic", 3, None, (1, 2, 4, 8)),
    "large_mlp": ("large_mlp", 2, 50, (1, 2, 4)),
    "femnist_cnn": ("femnist_cnn", 1, 4, (1, 2)),
    "gru": ("gru", 1, 50, (1, 2, 5, 10, 25)),
    "softmax, m = 100": ("softmax", 40, 100, (10, 20, 25, 34, 50)),
    "softmax, m = 50": ("softmax", 80, 50, (10, 13, 17, 25)),
    "cnn_12k, m = 20": ("cnn_12k", 4, 20, (1, 2, 4, 5)),
    "mlp, m = 50": ("mlp", 40, 50, (2, 4, 5, 9, 13)),
}
AUTOMATIC = "automatic"


def measure(quick: bool = False) -> dict:
    """Seconds a round under each plan."""
    rows, ratios = [], []
    for name, (which, rounds, cohort, lanes) in SWEEPS.items():
        if quick and name not in ("mlp",):
            continue
        work = workload(which, cohort_size=32 if quick else cohort)
        found, against_best, against_vmap = _sweep(work, name, 1 if quick else rounds, lanes[:2] if quick else lanes)
        rows += found
        ratios += [
            harness.ratio(f"{name}: automatic against the best of the sweep", against_best, at_most=1.05),
            harness.ratio(f"{name}: speed against one vmap", against_vmap, at_least=2.0),
        ]
    goal = "within 1.05 of the best of the sweep, and at least 2 times one vmap, on every workload."
    return harness.result("P4", "plans", goal=goal, rows=rows, ratios=ratios)


def _sweep(work, name: str, rounds: int, lanes: tuple[int, ...]) -> tuple[list[dict], float, float]:
    """Measures rounds with the automatic plan, with other plans, and with one vmap over the cohort.

    Args:
      work: the workload, with m clients a round.
      name: of the workload, which begins the rows' names.
      rounds: T rounds of a program.
      lanes: clients at once on a device; chunks are as large, or four times as large.

    Returns: (rows in clients a second; seconds with the automatic plan over those with the best of the others; seconds
      of the best single vmap over those with the automatic plan).
    """
    cores = len(jax.devices())
    most = work.cohort_size // cores
    plans = [engine.Plan(c, chunk) for c in lanes for chunk in (c, 4 * c) if chunk <= most]
    programs = {AUTOMATIC: rounds_program(algorithm(work), work.params, work.data, rounds)}
    for plan in plans:
        made = algorithm(work, plan=plan)
        programs[f"lanes {plan.lanes}, chunk {plan.chunk}"] = rounds_program(made, work.params, work.data, rounds)
    coarse = harness.interleaved(programs, repeats=3, budget_seconds=10)
    swept = sorted((x for x in programs if x != AUTOMATIC), key=lambda x: coarse[x].median)
    final = {AUTOMATIC: programs[AUTOMATIC]} | {x: programs[x] for x in swept[:2]}
    fine = harness.interleaved(final, repeats=9, budget_seconds=10)
    vmaps = _one_vmap(work, rounds)
    whole = harness.interleaved(vmaps, repeats=3, budget_seconds=5)
    seconds = coarse | fine | whole
    rows = [
        harness.row(f"{name}: {x}", seconds[x], "clients/s", per=rounds * work.cohort_size, ours=x not in vmaps,
                    cores=1 if "1 device" in x else cores)
        for x in seconds
    ]  # fmt: skip
    automatic = fine[AUTOMATIC].median
    best = min(fine[x].median for x in swept[:2])
    return rows, automatic / best, min(timing.median for timing in whole.values()) / automatic


def _one_vmap(work, rounds: int) -> dict:
    key, data, ids = jax.random.key(1), baselines.dense_clients(work), baselines.cohorts(work, rounds)
    client, programs = baselines.equal_client(work), {}
    for devices in sorted({1, len(jax.devices())}):
        if work.cohort_size % devices:
            continue
        loop = baselines.hand_written(client, lanes=1, devices=devices, num_rounds=rounds, one_vmap=True)
        name = f"one vmap, {devices} device{'s' * (devices > 1)}"
        programs[name] = lambda loop=loop: loop(key, work.params, data, ids)
    return programs


def plot(axes, result: dict) -> None:
    """Speed of each plan relative to the automatic one."""
    from experiments.benchmarks.report import OURS, THEIRS

    speeds: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        name, plan = row["name"].split(": ")
        speeds.setdefault(name, {})[plan] = row["value"]
    for i, plans in enumerate(speeds.values()):
        base = plans[AUTOMATIC]
        swept = [value / base for plan, value in plans.items() if plan.startswith("lanes")]
        whole = [value / base for plan, value in plans.items() if plan.startswith("one vmap")]
        axes.plot(swept, [i] * len(swept), "o", color=OURS, alpha=0.5, label="a plan of the sweep" if not i else None)
        axes.plot(whole, [i] * len(whole), "x", color=THEIRS, label="one vmap" if not i else None)
    axes.set_yticks(range(len(speeds)), list(speeds))
    axes.axvline(1.0, color="black", linewidth=1, label="automatic")
    axes.figure.set_size_inches(8, 3.5)
    axes.set_xlabel("speed relative to the automatic plan")
    axes.legend(fontsize=8)
