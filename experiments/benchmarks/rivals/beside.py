"""Other frameworks on identical arrays.

FedJAX, pfl-research (PyTorch) and Flower (Ray) train the MLP of P0, and FedJAX the models of P1 and P2, from the same
arrays and the same initial weights: everybody in each round, equal clients, one epoch of local SGD in batches. Each
framework runs in a process and a virtual environment of its own, with fedjax_sim's process before and after it.
Start-up and the first round, which compiles, are apart. Flower is measured with 100 clients a round, and fedjax_sim
beside it with the same 100: small rounds suit neither. The final losses, over all examples in float64 NumPy, differ by
the order of the minibatches alone.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from experiments.benchmarks import harness
from experiments.benchmarks.processes import ROOT, workers
from experiments.benchmarks.rivals.setup import python_of
from experiments.benchmarks.workloads import workload

__all__ = ["measure", "ours", "rival", "write_arrays"]

HERE = pathlib.Path(__file__).resolve().parent
# job: workload, clients a round, rounds, {rival: required factor}
JOBS = {
    "P0 MLP 60-128-10, 1,000 clients": ("mlp", 1000, 6, {"fedjax": 20, "pfl": 40}),
    "P0 MLP 60-128-10, 100 clients": ("mlp", 100, 6, {"flower": 1000}),
    "P1 MLP 32-32-10": ("tiny", 1000, 3, {"fedjax": None}),
    "P2 logistic 784-62": ("logistic", 200, 4, {"fedjax": 1.8}),
    "P2 MLP 784-200-200-62": ("large_mlp", 100, 4, {"fedjax": 1.8}),
}
TITLES = {"fedjax": "FedJAX", "pfl": "pfl-research", "flower": "Flower"}


def write_arrays(path: pathlib.Path, name: str, clients: int) -> None:
    """The job's arrays for every framework."""
    work = workload(name, cohort_size=clients, num_clients=clients)
    x, y = (np.asarray(a).reshape(clients, -1, *a.shape[1:]) for a in work.arrays)
    layers = {}
    for i, key in enumerate([*sorted(key for key in work.params if key != "output"), "output"]):
        layers |= {f"{part}_{i}": np.asarray(value) for part, value in work.params[key].items()}
    np.savez(path, x=x, y=y, rate=work.learning_rate, batch_size=work.batch_size, **layers)


def ours(path: str, rounds: int, passes: int) -> dict:
    """For a worker: fedjax_sim on those arrays; losses after `rounds` rounds, and seconds a round of a longer run."""
    import jax
    import optax

    from experiments.benchmarks.rivals import common
    from experiments.benchmarks.side_by_side import take_turns
    from fedjax_sim import algorithms, models, population, run, sampling

    sys.argv = ["ours", path, str(rounds)]
    job = common.read()
    m, n, features = job.x.shape
    data = population.stored({"x": job.x.reshape(-1, features), "y": job.y.reshape(-1)}, np.arange(0, m * n + 1, n))
    widths = [kernel.shape[1] for kernel, _ in job.layers]
    model = models.mlp(input_shape=(features,), num_outputs=widths[-1], hidden=tuple(widths[:-1]))
    loss_fn = models.supervised(model, models.softmax_cross_entropy)
    names = [*(f"hidden_{i}" for i in range(len(widths) - 1)), "output"]
    params = {key: {"kernel": w, "bias": b} for key, (w, b) in zip(names, job.layers, strict=True)}
    made = algorithms.fedavg(
        loss_fn, sampling.full(m), optax.sgd(job.rate), num_steps=n // job.batch_size, batch_size=job.batch_size
    )

    def final_loss():
        state, _ = run(jax.random.key(0), made, params, data, rounds)
        trained = jax.device_get(made.params(state))
        return common.mean_loss(job, [(trained[key]["kernel"], trained[key]["bias"]) for key in names])

    def speed():
        timing, _, _ = take_turns(made, params, data, {}, rounds=10, passes=passes)
        return {"seconds": [x / 10 for x in timing.seconds], "compile": timing.first}

    return {"loss": final_loss, "run": speed}


def rival(name: str, venvs: pathlib.Path, arrays: pathlib.Path, rounds: int) -> dict:
    """A rival's answer, or {"failed": why}."""
    if not python_of(name, venvs).is_file():
        return {"failed": "no environment: run python -m experiments.benchmarks.rivals.setup"}
    command = [str(python_of(name, venvs)), str(HERE / f"{name}_job.py"), str(arrays), str(rounds)]
    if name == "pfl":  # its own way to use every core
        command[1:1] = ["-m", "torch.distributed.run", f"--nproc_per_node={harness.machine()['cores']}"]
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "JAX_NUM_CPU_DEVICES")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=400)
    except subprocess.TimeoutExpired:
        return {"failed": "no answer within 400 s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"version"')]
    if lines:
        return json.loads(lines[-1])
    words = done.stderr.replace(str(venvs), "VENVS").replace(str(ROOT), ".").split()
    return {"failed": " ".join(words)[-300:] or f"ended with {done.returncode} without output"}


def measure(venvs: pathlib.Path, quick: bool = False) -> dict:
    """All jobs."""
    rows, ratios, notes, versions = [], [], [], set()
    cores = harness.machine()["cores"]
    with tempfile.TemporaryDirectory() as folder:
        for title, (name, clients, rounds, rivals) in JOBS.items():
            clients = 10 if quick else clients
            arrays = pathlib.Path(folder) / f"{name}-{clients}.npz"
            write_arrays(arrays, name, clients)
            start = {"path": str(arrays), "rounds": rounds, "passes": 2 if quick else 5}
            with workers(ours={"function": ours, "arguments": start}) as made:
                loss, mine, theirs = made["ours"].call("loss"), [], {}
                for which in rivals:
                    mine += (speed := made["ours"].call())["seconds"]
                    theirs[which] = rival(which, venvs, arrays, rounds)
                mine += made["ours"].call()["seconds"]
            timing = harness.Timing(speed["compile"], tuple(mine))
            mine_row = {"per": clients, "ours": True, "cores": cores, "final_loss": loss}
            rows.append(harness.row(f"{title}: fedjax_sim.run", timing, "clients/s", **mine_row))
            for which, factor in rivals.items():
                found = theirs[which]
                if "failed" in found:
                    notes.append(f"{title}: {TITLES[which]} was not measured. {found['failed']}")
                    continue
                other = harness.Timing(found["first_round_seconds"], tuple(found["round_seconds"]))
                rows.append(
                    harness.row(f"{title}: {TITLES[which]}", other, "clients/s", per=clients, cores=cores,
                                final_loss=found["final_loss"], startup_seconds=found["startup_seconds"])
                )  # fmt: skip
                versions.add(f"{found['version']}: {found['form']}.")
                speed_ratio = other.median / timing.median
                ratios.append(harness.ratio(f"{title}: speed against {TITLES[which]}", speed_ratio, at_least=factor))
                ratios.append(
                    harness.ratio(f"{title}: final loss, fedjax_sim / {TITLES[which]}", loss / found["final_loss"],
                                  at_least=0.97, at_most=1.03)
                )  # fmt: skip
    goal = "20 times FedJAX, 40 times pfl-research and 1,000 times Flower on P0's MLP; 1.8 times FedJAX on P2."
    result = harness.result("Rivals", "other frameworks, identical arrays", goal=goal, rows=rows, ratios=ratios,
                            notes=[*sorted(versions), *notes])  # fmt: skip
    return result | ({"reached": None} if notes and result["reached"] else {})
