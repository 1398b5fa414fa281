"""Asynchronous simulation: what an update costs beside one of a synchronous round of as many clients.

The same clients, on one device: a step of FedBuff with a buffer of 100 and 1,000 in flight beside a round of FedAvg
with 100 clients; a step of FedAsync with 1,000 in flight and up to 128 arrivals, which ends where a model made in it
arrives, beside a round of 128. The two take turns in a process of their own, whose ratio is the median of its repeats;
told is the median of several processes, which differ more than repeats do.
Beside them what it takes to find the next 1,000 arrivals of 100,000 clients in flight; and FLGo's FedAsync (PyTorch),
where `python -m experiments.benchmarks.rivals.setup flgo` made its environment, on as many equal clients.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import tempfile
from operator import truediv

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks import harness
from experiments.benchmarks.processes import once
from experiments.benchmarks.rivals.beside import write_arrays
from experiments.benchmarks.rivals.setup import VENVS, python_of
from experiments.benchmarks.workloads import workload
from fedjax_sim import algorithms, engine, network, sampling
from fedjax_sim.algorithms.asynchronous.arrivals import next_arrivals, take_off
from fedjax_sim.algorithms.asynchronous.in_flight import Traffic
from fedjax_sim.types import Load

TIME_LIMIT = 900  # seconds for FLGo
MODELS, ROUNDS, BLOCK, PROCESSES = ("softmax", "mlp"), 20, 128, 7
BESIDE = {"FedBuff": "FedAvg", "FedAsync": "FedAvg, a round as large as a block"}


def devices(size: int):
    """Phones of unequal speed, always there."""
    speed = network.lognormal(1e6, 0.8)
    return network.heterogeneous(size, speed=speed, bandwidth_down=1e7, bandwidth_up=1e6)


def pair(name: str, way: str, quick: bool) -> dict:
    """{"run": () -> {program: [seconds of the first call, seconds an update in each later one]}}, the two in turns."""
    buffer, flying = (10, 40) if quick else (100, 1000)
    block = 4 if quick else BLOCK
    job = workload(name, cohort_size=buffer, num_clients=200 if quick else 4000)
    how = {"num_steps": job.num_steps, "batch_size": job.batch_size, "mesh": None}
    traffic = {"population_size": job.data.size, "concurrency": flying} | how
    loss, rate, phones = job.loss_fn, optax.sgd(job.learning_rate), devices(job.data.size)
    if way == "FedBuff":
        size, made = buffer, algorithms.fedbuff(loss, phones, rate, buffer_size=buffer, **traffic)
    else:
        size = block
        made = algorithms.fedasync(loss, phones, rate, arrivals_per_step=block, max_staleness=4000, **traffic)
    sampler = sampling.uniform(job.data.size, size)
    rounds = algorithms.fedavg(loss, sampler, rate, weighting="uniform", **how)
    counts = {BESIDE[way]: [], way: []}
    loops = {BESIDE[way]: loop(rounds, job, counts[BESIDE[way]]), way: loop(made, job, counts[way])}

    def run():
        found = harness.interleaved(loops, repeats=3 if quick else 31)
        updates = {key: np.array(calls).sum(1)[1:] for key, calls in counts.items()}
        return {key: [t.first, *(np.array(t.seconds) / updates[key]).tolist()] for key, t in found.items()}

    return {"run": run}


def loop(algorithm, job, counted):
    """() -> updates in each of some rounds, as `run` makes them: the state's buffers are given to the program.

    `counted` has those of each call, for blocks are cut.
    """
    state = [jax.jit(algorithm.init)(jax.random.key(5), job.params, job.data)]

    def rounds(state, data):
        def one(state, i):
            state, info = algorithm.step(jax.random.fold_in(jax.random.key(5), i), state, data)
            return state, info["clients_reported"]

        return jax.lax.scan(one, state, jnp.arange(ROUNDS))

    program = jax.jit(rounds, donate_argnums=0, compiler_options=engine.compiler_options())

    def call():
        state[0], counts = program(state[0], job.data)
        counted.append(counts)
        return counts

    return call


def search(quick: bool):
    """() -> one step of the events alone: the next arrivals of many in flight, and who is sent work after them."""
    size, flying, buffer = (5000, 1000, 100) if quick else (1_000_000, 100_000, 1000)
    traffic = Traffic(
        devices=devices(size), concurrency=flying, block=buffer, buffer_size=buffer, max_staleness=1000, refill="other"
    )
    load = lambda ids: Load(*(jnp.full(ids.shape, x) for x in (1e6, 1e4, 1e4)))  # noqa: E731
    flights = jax.jit(lambda: take_off(jax.random.key(0), traffic, load))()
    step = jax.jit(lambda key, flights: next_arrivals(key, traffic, flights, load))
    return lambda: step(jax.random.key(1), flights)


def race(name: str, quick: bool) -> tuple[list, list, list]:
    """Rows, ratios and notes: FedAsync with 100 of 400 clients in flight, here and in FLGo, evaluating nothing."""
    python = python_of("flgo", pathlib.Path(os.environ.get("RIVALS_VENVS", VENVS)))
    if quick or not python.is_file():
        return [], [], [f"{name}: FLGo was not measured."]
    job, counts = workload(name, cohort_size=400, num_clients=400), []
    how = {"num_steps": job.num_steps, "batch_size": job.batch_size, "mesh": None, "arrivals_per_step": 16}
    made = algorithms.fedasync(
        job.loss_fn, devices(400), optax.sgd(job.learning_rate), population_size=400, concurrency=100, **how
    )
    call = loop(made, job, counts)
    mine = [harness.timed(call) for _ in range(11)]
    with tempfile.TemporaryDirectory() as folder:
        arrays = pathlib.Path(folder) / "arrays.npz"
        write_arrays(arrays, job)
        command = [
            str(python),
            str(pathlib.Path(__file__).parent / "rivals" / "flgo_job.py"),
            str(arrays),
            "100",
            "1000",
        ]
        variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "NPROC")}
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=TIME_LIMIT)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"version"')]
    if not lines:
        return [], [], [f"{name}: FLGo failed: {' '.join(done.stderr.split())[-200:]}"]
    mine += [harness.timed(call) for _ in range(10)]
    found, updates = json.loads(lines[-1]), np.array(counts).sum(1)
    timing = harness.Timing(mine[0] / updates[0], tuple(np.array(mine[1:]) / updates[1:]))
    theirs = found["update_seconds"]
    rows = [
        harness.row(f"{name}, 100 of 400 in flight: FedAsync", timing, "s/update", ours=True),
        harness.row(f"{name}, 100 of 400 in flight: FLGo's FedAsync", theirs, "s/update"),
    ]
    note = f"{name}: {found['version']}, {found['form']}."
    return rows, [harness.ratio(f"{name}: speed against FLGo", theirs / timing.median)], [note]


def measure(quick: bool = False) -> dict:
    """Seconds an update, each way, and seconds of a search."""
    rows, ratios, notes = [], [], []
    for name in MODELS:
        for way, beside in BESIDE.items():
            arguments = {"name": name, "way": way, "quick": quick}
            found = [once(pair, arguments) for _ in range(1 if quick else PROCESSES)]
            for key in (beside, way):
                seconds = [x for process in found for x in process[key][1:]]
                timing = harness.Timing(found[0][key][0], tuple(seconds))
                rows.append(harness.row(f"{name}: {key}", timing, "s/update", ours=True))
            seen = [statistics.median(map(truediv, process[way][1:], process[beside][1:])) for process in found]
            ratios.append(
                harness.ratio(f"{name}: an update of {way} / of FedAvg", statistics.median(seen), at_most=1.3)
            )
            notes.append(f"{name}, {way}: ratios of the processes {', '.join(f'{x:.2f}' for x in sorted(seen))}.")
    events = harness.interleaved({"events": search(quick)}, repeats=3 if quick else 15)["events"]
    rows.append(harness.row("next 1,000 of 100,000 in flight", events, "s", ours=True))
    parts = [race(name, quick) for name in MODELS]
    rows += [row for part in parts for row in part[0]]
    ratios += [ratio for part in parts for ratio in part[1]]
    notes += [note for part in parts for note in part[2]]
    goal = "an update of an asynchronous simulation takes at most 1.3 times as long as one of a synchronous round."
    return harness.result("P20", "Asynchronous simulation", goal=goal, rows=rows, ratios=ratios, notes=notes)
