"""Cohorts that fill an accelerator: `fedjax_sim.run` beside hand-written loops, DrJAX and pfl-research on one card.

Everything is on, as in P0, P2, P3 and P15: sampling, exact sums, checks, metrics, log and checkpoints. The hand-written
loops take turns with it. They train a cohort in one `vmap` or in groups, and the fastest counts. DrJAX and pfl-research
(PyTorch) train from the same arrays and weights, with everybody in each round, in processes of their own while nothing
else runs. A rival counts if its logits and its loss at the initial weights are ours. The million clients are P14's. The
CIFAR10 benchmark of pfl-research is timed whole: 1,500 rounds of 50 of 1,000 users, with compilation, on arrays of its
shape. For pfl-research it is 1,500 times its median round.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from typing import Any, NamedTuple

import jax

from experiments.benchmarks import harness, side_by_side
from experiments.benchmarks.rivals import beside
from experiments.benchmarks.workloads import Workload, algorithm, massive, rounds_program, workload
from fedjax_sim import run

PASSES = 5
RIVALS_ROUNDS = 6  # the first compiles or warms up
WHOLE_ROUNDS = 1_500


class Job(NamedTuple):
    """A workload of `workloads`, and what is beside fedjax_sim on it."""

    workload: str
    clients: int  # a round
    rounds: int  # of `run`, and of a hand-written loop, in a turn
    lanes: tuple[int, ...]  # groups of the hand-written loop, besides one vmap over the cohort
    rivals: dict[str, float | None] = {}  # name -> required factor of speed
    loop: float | None = None  # required factor of speed against the best loop


JOBS = {
    "MLP 60-128-10, 4,096 clients": Job("mlp", 4_096, 50, (512,), {"drjax": None}, loop=0.95),
    "MLP 60-128-10, 100,000 clients": Job("mlp", 100_000, 4, (4_000,), loop=0.95),
    "CIFAR CNN, 50 clients": Job("cifar_cnn", 50, 10, (10, 25), {"pfl": 8.0, "drjax": None}),
    "FEMNIST CNN, 100 clients": Job("femnist_cnn", 100, 10, (20, 50), {"pfl": 1.0, "drjax": None}, loop=1.0),
    "LSTM 128, 500 clients": Job("lstm", 500, 10, (250,), {"pfl": 1.0}, loop=1.0),
    "MLP 784-200-200-62, 1,000 clients": Job("large_mlp", 1_000, 10, (200,)),
    "logistic 784-62, 1,000 clients": Job("logistic", 1_000, 20, (200,)),
}


def measure(venvs: pathlib.Path, quick: bool = False) -> dict:
    """All jobs."""
    rows: list[dict] = []
    ratios: list[dict] = []
    notes: list[str] = []
    for title, job in JOBS.items():
        work = workload(job.workload, cohort_size=(size := 4 if quick else job.clients), num_clients=size)
        ours = _beside_loops(title, job, work, quick=quick, rows=rows, ratios=ratios, notes=notes)
        for name, factor in job.rivals.items():
            theirs = _rival(title, name, work, venvs, quick=quick, rows=rows, notes=notes)
            if theirs is not None:
                ratios.append(harness.ratio(f"{title}: speed against {_named(name)}", theirs / ours, at_least=factor))
                if job.workload == "cifar_cnn" and name == "pfl":
                    _whole_job(theirs, quick, rows, ratios)
        print(f"{title}: measured", flush=True)
    _million(quick, rows, ratios)
    goal = (
        "0.95 of the best loop on the MLP; 8 times pfl-research on its CIFAR10 benchmark, whole in 60 s; ahead of "
        "pfl-research and the loops on FEMNIST and the LSTM; 10^6 clients in 0.5 s."
    )
    title = f"cohorts of {len(jax.devices())} {jax.devices()[0].device_kind}"
    return harness.result("Accelerator", title, goal=goal, rows=rows, ratios=ratios, notes=notes)


def _beside_loops(title: str, job: Job, work: Workload, *, quick: bool, rows: list, ratios: list, notes: list) -> float:
    """Adds rows of `run` and of the best loop; returns the seconds of a round of ours.

    Args:
      title: of the job, which begins the names of rows and ratios.
      job: its rounds, the loops' layouts and the factor of speed that is required.
      work: the workload, with m clients a round.
      quick: one round and one pass, to see that everything runs.
      rows, ratios, notes: the lists to which results are added.
    """
    devices = len(jax.devices())
    rounds, passes, lanes = (1, 1, (2,)) if quick else (job.rounds, PASSES, job.lanes)
    others = side_by_side.loops(work, rounds=rounds, lanes=lanes, dispatch=False, single=False)
    ours, theirs, _ = side_by_side.take_turns(
        algorithm(work), work.params, work.data, others, rounds=rounds, passes=passes
    )
    best = min(others, key=lambda name: theirs[name].median / others[name].rounds)
    for name, timing, count in (("fedjax_sim.run", ours, rounds), ("best loop", theirs[best], others[best].rounds)):
        clients = work.cohort_size * count
        is_ours = timing is ours
        rows.append(harness.row(f"{title}: {name}", timing, "clients/s", per=clients, ours=is_ours, cores=devices))
    notes.append(f"{title}: the best of {len(others)} loops is the {best}.")
    seconds = ours.median / rounds
    factor = theirs[best].median / others[best].rounds / seconds
    ratios.append(harness.ratio(f"{title}: speed against the best loop", factor, at_least=job.loop))
    return seconds


def _rival(
    title: str, name: str, work: Workload, venvs: pathlib.Path, *, quick: bool, rows: list, notes: list
) -> float | None:
    """Adds a row of another framework.

    Args:
      title: of the job, which begins the row's name.
      name: the framework, a key of `beside.TITLES`.
      work: the workload, with m clients a round.
      venvs: the folder of the frameworks' virtual environments.
      quick: two rounds, to see that everything runs.
      rows, notes: the lists to which results are added.

    Returns: the seconds of its round; None if it was not measured, with a note that says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        arrays = pathlib.Path(folder) / "arrays.npz"
        beside.write_arrays(arrays, work)
        out = arrays.with_name("trained.npz")
        found = beside.rival(name, venvs, arrays, 2 if quick else RIVALS_ROUNDS, out)
        if failed := found.get("failed") or beside.differs(work, found):
            notes.append(f"{title}: {_named(name)} was not measured. {failed}")
            return None
    timing = harness.Timing(found["first_round_seconds"], tuple(found["round_seconds"]))
    more: dict[str, Any] = {key: found[key] for key in ("startup_seconds", "version", "form")}
    per = work.cohort_size
    rows.append(harness.row(f"{title}: {_named(name)}", timing, "clients/s", per=per, cores=len(jax.devices()), **more))
    return timing.median


def _named(rival: str) -> str:
    return beside.TITLES[rival]


def _whole_job(pfl_seconds: float, quick: bool, rows: list, ratios: list) -> None:
    """Adds the whole CIFAR10 benchmark of pfl-research, beside as many of its rounds."""
    work = workload("cifar_cnn", cohort_size=4, num_clients=8) if quick else workload("cifar_cnn")
    rounds = 4 if quick else WHOLE_ROUNDS
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run(jax.random.key(0), algorithm(work), work.params, work.data, rounds, directory=folder)
    seconds = time.perf_counter() - began
    rows.append(harness.row(f"CIFAR10 benchmark, {rounds:,} rounds: fedjax_sim.run", seconds, "s", ours=True))
    rows.append(harness.row(f"CIFAR10 benchmark, {rounds:,} rounds: pfl-research", rounds * pfl_seconds, "s"))
    ratios += [
        harness.ratio("CIFAR10 benchmark: seconds", seconds, at_most=60.0),
        harness.ratio("CIFAR10 benchmark: speed against pfl-research", rounds * pfl_seconds / seconds, at_least=8.0),
    ]


def _million(quick: bool, rows: list, ratios: list) -> None:
    """Adds a round of 10^6 clients (softmax 784-10)."""
    num_clients = 1_000 if quick else 1_000_000
    job = massive(num_clients, num_clients)
    program = rounds_program(job.algorithm, job.params, job.data, 1)
    timing = harness.interleaved({"round": program}, repeats=3)["round"]
    rows.append(harness.row(f"softmax 784-10, {num_clients:,} clients a round: fedjax_sim", timing, "s", ours=True))
    ratios.append(harness.ratio(f"softmax 784-10, {num_clients:,} clients: seconds", timing.median, at_most=0.5))
