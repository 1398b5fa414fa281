"""`fedjax_sim.run` with everything on, taking turns with other loops over the same rounds."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from experiments.benchmarks import baselines
from experiments.benchmarks.harness import Timing, row, timed
from experiments.benchmarks.workloads import Workload, algorithm
from fedjax_sim import run

WARM_UP = 2  # passes of a run that find the length of its blocks


class Other(NamedTuple):
    """A baseline: a function without arguments, the rounds that one call trains, and the cores that it can use."""

    call: Callable
    rounds: int
    cores: int


def take_turns(
    algorithm: Any, params: Any, data: Any, others: dict[str, Other], *, rounds: int, passes: int
) -> tuple[Timing, dict[str, Timing], dict]:
    """Times `rounds` rounds inside one long `run`, then each of the others, then the next rounds, and so on.

    The run samples, sums exactly, keeps metrics, writes its log and commits a checkpoint after every pass; all of that
    is inside its time. `Timing.first` of the run is what it took to compile.

    Returns: timings of ours and of the others (a call each), and the run's summary.
    """
    first = {name: timed(other.call) for name, other in others.items()}
    ours: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in others}
    last = [time.perf_counter()]

    def turn(round, state, record):
        ours.append(time.perf_counter() - last[0])
        if len(ours) > WARM_UP:
            for name, other in others.items():
                theirs[name].append(timed(other.call))
        last[0] = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        _, history = run(
            jax.random.key(0), algorithm, params, data, rounds * (passes + WARM_UP),
            evaluate_every=rounds, directory=folder, callbacks=[turn],
        )  # fmt: skip
    found = Timing(history.summary["compile_seconds"], tuple(ours[WARM_UP:]))
    return found, {name: Timing(first[name], tuple(theirs[name])) for name in others}, _ends(history)


def _ends(history: Any) -> dict:
    return {"last_loss": history.records[-1]["local_loss"], "summary": history.summary}


def loops(
    work: Workload,
    *,
    rounds: int,
    lanes: tuple[int, ...],
    dispatch: bool = True,
    vmap: bool = True,
    single: bool = True,
) -> dict:
    """The hand-written loops over the workload's rounds: one program for each layout, and loops in Python.

    Args:
      work: what they train.
      rounds: in one call of a program; loops in Python and a vmap over the cohort train one.
      lanes: clients under one vmap, for each program.
      dispatch, vmap, single: whether loops in Python, one vmap over the cohort, and a program that trains one client
        after the other on one device are among them.
    """
    key, data = jax.random.key(1), baselines.dense_clients(work)
    cores = len(jax.devices())
    ids, one = baselines.cohorts(work, rounds), baselines.cohorts(work, 1)
    client, others = baselines.equal_client(work), {}

    def program(name, used, **options):
        loop = baselines.hand_written(client, devices=used, num_rounds=rounds, **options)
        others[name] = Other(lambda: loop(key, work.params, data, ids), rounds, used)

    for c in lanes:
        shape = "one client at a time" if c == 1 else f"vmap of {c}"
        program(f"bare jitted loop, {shape}, {cores} devices", cores, lanes=c)
    if single:
        program("bare jitted loop, one client at a time, 1 device", 1, lanes=1)
    for used in sorted({1, cores}) if vmap else ():
        once = baselines.hand_written(client, lanes=1, devices=used, one_vmap=True)
        name = f"one vmap over the cohort, {used} device{'s' * (used > 1)}"
        others[name] = Other(lambda once=once: once(key, work.params, data, one), 1, used)
    for per_step in (False, True) if dispatch else ():
        loop = baselines.dispatched(work, per_step=per_step)
        name = "Python loop, a jitted call for each " + ("local step" if per_step else "client")
        others[name] = Other(lambda loop=loop: loop(key, work.params, *data, one[0]), 1, cores)
    return others


def best(timings: dict[str, Timing], others: dict[str, Other], having: str = "") -> float:
    """Seconds a round of the fastest of the others whose name holds `having`."""
    return min(timings[name].median / other.rounds for name, other in others.items() if having in name)


def against_loops(
    work: Workload,
    *,
    rounds: int,
    passes: int,
    lanes: tuple[int, ...],
    extra: dict[str, Other] | None = None,
    title: str = "",
    **options: Any,
) -> tuple[list[dict], Timing, dict[str, float], dict]:
    """Rows of ours and of every loop in clients/s; also our timing, seconds a round of each loop, and how it ended."""
    others = loops(work, rounds=rounds, lanes=lanes, **options) | (extra or {})
    ours, theirs, ends = take_turns(algorithm(work), work.params, work.data, others, rounds=rounds, passes=passes)
    m, before = work.cohort_size, f"{title}: " if title else ""
    cores = len(jax.devices())
    rows = [row(f"{before}fedjax_sim.run", ours, "clients/s", per=m * rounds, ours=True, cores=cores)]
    for name, other in others.items():
        rows.append(row(before + name, theirs[name], "clients/s", per=m * other.rounds, cores=other.cores))
    return rows, ours, {name: theirs[name].median / other.rounds for name, other in others.items()}, ends
