"""Other frameworks, and the best hand-written loop, on identical arrays.

FedJAX, pfl-research (PyTorch) and DrJAX train six models from the same arrays and the same initial weights: everybody
in each round, equal clients, one epoch of local SGD in batches; FedJAX also those of P1 and P2. Each framework runs in
a process and a virtual environment of its own, with fedjax_sim's process before and after it; the hand-written loops
take turns with `run` inside of that process, and the fastest of several layouts counts. Flower (Ray) is measured on the
MLP with 100 clients a round, and fedjax_sim beside it with the same 100: small rounds suit neither. Start-up is apart,
and so is the first round, which compiles. A rival counts if its logits and its loss at the initial weights are ours.
The final losses, over all examples, are computed by one function; they differ by the order of the minibatches alone.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.benchmarks import harness, side_by_side
from experiments.benchmarks.processes import ROOT, workers
from experiments.benchmarks.rivals import common
from experiments.benchmarks.rivals.setup import python_of
from experiments.benchmarks.workloads import WORKLOADS, Workload, algorithm, workload
from fedjax_sim import run, sampling

HERE = pathlib.Path(__file__).resolve().parent
TITLES = {"fedjax": "FedJAX", "pfl": "pfl-research", "drjax": "DrJAX", "flower": "Flower"}
KINDS = {"cnn_12k": "cnn_12k", "femnist_cnn": "small_cnn", "cifar_cnn": "small_cnn", "lstm": "lstm"}  # else "mlp"
TIME_LIMIT = 900  # seconds of a rival


class Job(NamedTuple):
    """A workload of `workloads`, and what is beside fedjax_sim on it."""

    workload: str
    clients: int  # m = N
    rounds: int  # that each trains; the rivals' speed is that of all but the first
    turn: int  # rounds of `run`, and of a hand-written loop, in a turn
    rivals: dict  # name -> required factor of speed, or None
    lanes: tuple[int, ...] = ()  # layouts of the hand-written loop; empty for none
    loop: float | None = None  # required factor of speed against the best of them


EVERY = {"fedjax": None, "pfl": None, "drjax": None}
JOBS = {
    "softmax 60-10, 100 clients": Job("softmax", 100, 11, turn=50, rivals=EVERY, lanes=(1, 2, 4, 9, 20, 50), loop=0.95),
    "MLP 60-128-10, 1,000 clients": Job(
        "mlp", 1000, 6, turn=10, rivals=EVERY | {"fedjax": 20, "pfl": 40}, lanes=(1, 2, 4, 9, 20, 50), loop=0.95
    ),
    "MLP 60-128-10, 100 clients": Job("mlp", 100, 6, turn=10, rivals={"flower": 1000}),
    "CNN of 12,810 parameters, 20 clients": Job("cnn_12k", 20, 6, turn=10, rivals=EVERY, lanes=(1, 2, 4, 9), loop=0.95),
    "FEMNIST CNN, 10 clients": Job("femnist_cnn", 10, 4, turn=1, rivals=EVERY, lanes=(1, 2, 4), loop=1.0),
    "CIFAR CNN, 50 clients": Job("cifar_cnn", 50, 4, turn=1, rivals=EVERY, lanes=(1, 2, 4), loop=1.0),
    "LSTM 128, 50 clients": Job("lstm", 50, 4, turn=2, rivals=EVERY, lanes=(1, 2, 4, 9, 20)),
    "P1 MLP 32-32-10": Job("tiny", 1000, 3, turn=10, rivals={"fedjax": None}),
    "P2 logistic 784-62": Job("logistic", 200, 4, turn=10, rivals={"fedjax": 1.8}),
    "P2 MLP 784-200-200-62": Job("large_mlp", 100, 4, turn=10, rivals={"fedjax": 1.8}),
}


def write_arrays(path: pathlib.Path, work: Workload) -> None:
    """The job's arrays for every framework."""
    x, y = (np.asarray(a).reshape(work.cohort_size, -1, *a.shape[1:]) for a in work.arrays)
    kind = KINDS.get(work.name, "mlp")
    common.write(path, work.params, kind=kind, x=x, y=y, rate=work.learning_rate, batch_size=work.batch_size)


def ours(name: str, clients: int, rounds: int, *, turn: int, passes: int, lanes: list[int], out: str) -> dict:
    """For a worker: the first round, the weights after `rounds` rounds (to `out`), and seconds a round in turns."""
    work = workload(name, cohort_size=clients, num_clients=clients)
    made = algorithm(work, sampler=sampling.full(clients))
    first = harness.timed(lambda: run(jax.random.key(0), made, work.params, work.data, 1)[0])
    loops = side_by_side.loops(work, rounds=turn, lanes=tuple(lanes), dispatch=False, vmap=False) if lanes else {}

    def train():
        state, _ = run(jax.random.key(0), made, work.params, work.data, rounds)
        common.write(out, jax.device_get(made.params(state)))
        return first

    def speed(others):
        timing, theirs, _ = side_by_side.take_turns(made, work.params, work.data, others, rounds=turn, passes=passes)
        found = {which: [x.first, *x.seconds] for which, x in theirs.items()}
        return {"ours": [x / turn for x in timing.seconds], "loops": found}

    return {"train": train, "run": lambda: speed({}), "loops": lambda: speed(loops)}


def rival(name: str, venvs: pathlib.Path, arrays: pathlib.Path, rounds: int, out: pathlib.Path) -> dict:
    """A rival's answer, or {"failed": why}; on a CPU DrJAX's faster one, on one device or on one a core."""
    cores = harness.machine()["cores"]
    answers = []
    for devices in sorted({1, cores}) if name == "drjax" and jax.default_backend() == "cpu" else (None,):
        path = out.with_name(f"{out.stem}-{devices}.npz")
        answers.append(_answer(name, venvs, [str(arrays), str(rounds), str(path)], devices) | {"params": path})
    return min(answers, key=lambda found: np.median(found.get("round_seconds", np.inf)))


def _answer(name: str, venvs: pathlib.Path, arguments: list[str], devices: int | None) -> dict:
    """Runs a rival's script in its own environment.

    Args:
      name: the rival, a key of `TITLES`.
      venvs: the folder of the virtual environments.
      arguments: of the script: the file of arrays, rounds and the file of the result.
      devices: virtual CPU devices of JAX; None leaves that to the rival.

    Returns: what the script printed as JSON, or {"failed": why}.
    """
    if not python_of(name, venvs).is_file():
        return {"failed": "no environment: run python -m experiments.benchmarks.rivals.setup"}
    command = [str(python_of(name, venvs)), str(HERE / f"{name}_job.py"), *arguments]
    if name == "pfl" and jax.default_backend() == "cpu":  # its own way to use every core
        command[1:1] = ["-m", "torch.distributed.run", f"--nproc_per_node={harness.machine()['cores']}"]
    ours_alone = ("PYTHONPATH", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "NPROC")
    variables = {key: value for key, value in os.environ.items() if key not in ours_alone}
    variables |= {"JAX_NUM_CPU_DEVICES": str(devices)} if devices else {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {TIME_LIMIT} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"version"')]
    if lines:
        return json.loads(lines[-1])
    words = done.stderr.replace(str(venvs), "VENVS").replace(str(ROOT), ".").split()
    return {"failed": " ".join(words)[-300:] or f"ended with {done.returncode} without output"}


def _logits(work: Workload, params: Any) -> Callable:
    """x -> logits, with our model."""
    model, *_ = WORKLOADS[work.name][1]()
    return partial(jax.jit(lambda params, x: model.apply(params, (), x, None, False)[0]), params)


def _mean_loss(work: Workload, params: Any) -> float:
    """Over all examples, with our model."""
    return common.mean_loss(_logits(work, params), *map(np.asarray, work.arrays))


def differs(work: Workload, found: dict) -> str:
    """How the rival's model differs from ours at the initial weights, or ""."""
    theirs = common.load(found["params"])[1]["initial_logits"]
    gap = float(np.abs(_logits(work, work.params)(work.arrays[0][: len(theirs)]) - theirs).max())
    other = abs(_mean_loss(work, work.params) - found["initial_loss"])
    return "" if gap < 1e-4 and other < 1e-3 else f"Its initial logits are {gap:.2g} from ours, its loss {other:.2g}."


def _one(title: str, job: Job, venvs: pathlib.Path, folder: pathlib.Path, quick: bool) -> tuple[list, list, list]:
    """Measures one job: ours, the best hand-written loop and the rivals.

    Args:
      title: of the job, which begins the names of rows and ratios.
      job: the workload, its rounds, the loops' layouts and the rivals.
      venvs: the folder of the rivals' virtual environments.
      folder: for arrays and trained weights.
      quick: few clients and rounds, to see that everything runs.

    Returns: (rows in clients a second, ratios, notes). A rival whose model differs from ours has a note alone.
    """
    cores = harness.machine()["cores"]
    m = (4 * cores if job.clients > 20 else 2 * cores) if quick else job.clients
    rounds, turn, passes = (2, 1, 1) if quick else (job.rounds, job.turn, 5)
    work = workload(job.workload, cohort_size=m, num_clients=m)
    arrays, trained = folder / "arrays.npz", folder / "ours.npz"
    write_arrays(arrays, work)
    lanes = [c for c in job.lanes if c <= (min(2, m) if quick else max(1, m // cores))]
    start = {"name": job.workload, "clients": m, "rounds": rounds, "turn": turn, "passes": passes, "lanes": lanes}
    with workers(ours={"function": ours, "arguments": start | {"out": str(trained)}}) as made:
        first = made["ours"].call("train")
        beside = made["ours"].call("loops")
        mine, theirs = [*beside["ours"]], {}
        for which in job.rivals:
            theirs[which] = rival(which, venvs, arrays, rounds, folder / f"{which}.npz")
            mine += made["ours"].call()["ours"]
    timing, loss = harness.Timing(first, tuple(mine)), _mean_loss(work, common.load(trained)[0])
    line = {"per": m, "cores": cores}
    rows = [harness.row(f"{title}: fedjax_sim.run", timing, "clients/s", ours=True, final_loss=loss, **line)]
    ratios, notes = [], []
    if beside["loops"]:
        name, best = _best(beside["loops"], turn)
        rows.append(harness.row(f"{title}: best hand-written loop", best, "clients/s", form=name, **line))
        factor = best.median / float(np.median(beside["ours"]))
        what = f"{title}: speed against the best hand-written loop"
        ratios.append(harness.ratio(what, factor, at_least=job.loop))
        notes.append(f"{title}: the best of {len(beside['loops'])} hand-written loops is the {name}.")
    for which, required in job.rivals.items():
        found, name = theirs[which], TITLES[which]
        failed = found.get("failed") or differs(work, found)
        if failed:
            notes.append(f"{title}: {name} was not measured. {failed}")
            continue
        other = harness.Timing(found["first_round_seconds"], tuple(found["round_seconds"]))
        final = _mean_loss(work, common.load(found["params"])[0])
        more = {key: found[key] for key in ("startup_seconds", "version", "form")}
        rows.append(harness.row(f"{title}: {name}", other, "clients/s", final_loss=final, **line, **more))
        ratios += [
            harness.ratio(f"{title}: speed against {name}", other.median / timing.median, at_least=required),
            harness.ratio(f"{title}: final loss, fedjax_sim / {name}", loss / final, at_least=0.97, at_most=1.03),
        ]
    return rows, ratios, notes


def _best(loops: dict[str, list[float]], turn: int) -> tuple[str, harness.Timing]:
    """The fastest loop in seconds a round; its first call counts as compilation and one round."""
    timings = {name: harness.Timing(first, tuple(seconds)) for name, (first, *seconds) in loops.items()}
    name = min(timings, key=lambda name: timings[name].median)
    best = timings[name]
    return name, harness.Timing(best.first - best.median * (1 - 1 / turn), tuple(x / turn for x in best.seconds))


def measure(venvs: pathlib.Path, quick: bool = False) -> dict:
    """All jobs."""
    rows, ratios, notes = [], [], []
    for title, job in JOBS.items():
        with tempfile.TemporaryDirectory() as folder:
            parts = _one(title, job, venvs, pathlib.Path(folder), quick)
        for whole, part in zip((rows, ratios, notes), parts, strict=True):
            whole += part
        print(f"{title}: measured", flush=True)
    missing = any("was not measured" in note for note in notes)
    forms = sorted({f"{row['version']}: {row['form']}." for row in rows if "version" in row})
    goal = (
        "20 times FedJAX, 40 times pfl-research and 1,000 times Flower on the MLP; 1.8 times FedJAX on P2; 0.95 times "
        "the best hand-written loop on softmax, MLP and the small CNN, and no slower on FEMNIST and CIFAR."
    )
    result = harness.result("Rivals", "other frameworks, identical arrays", goal=goal, rows=rows, ratios=ratios,
                            notes=[*forms, *notes])  # fmt: skip
    return result | ({"reached": None} if missing and result["reached"] else {})
