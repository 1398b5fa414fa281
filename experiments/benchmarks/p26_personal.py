"""Personal models: rounds of Ditto, FedPer, APFL, pFedMe, Per-FedAvg and IFCA beside rounds of FedAvg.

A hundred of 1,000 clients in each round train an MLP 64-128-10 on the digits, five local steps of ten rows. All
programs are compiled loops of ten rounds over the same population, timed in turns in one process. Own models are in
memory, and each call goes on where the one before ended, as in `run`.

PFLlib (PyTorch) has its Ditto beside ours on the same arrays, 100 of 1,000 equal clients a round, where PFLLIB is the
`system` folder of its checkout and `python -m experiments.benchmarks.rivals.setup pfllib` made its environment.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import tempfile

import jax
import optax

from experiments.benchmarks import harness
from experiments.benchmarks.rivals.beside import write_arrays
from experiments.benchmarks.rivals.setup import VENVS, python_of
from experiments.benchmarks.workloads import chained_rounds, workload
from fedjax_sim import algorithms, models, population, sampling

PLAIN = "FedAvg"
MADE = {
    PLAIN: (algorithms.fedavg, {}),
    "Ditto": (algorithms.ditto, {}),
    "FedPer": (algorithms.fedper, {}),
    "APFL": (algorithms.apfl, {}),
    "pFedMe": (algorithms.pfedme, {}),
    "Per-FedAvg": (algorithms.per_fedavg, {}),
    "IFCA, 4 clusters": (algorithms.ifca, {"num_clusters": 4}),
}
GOAL = 2.1  # Ditto trains two models
TIME_LIMIT = 900  # seconds for PFLlib


def measure(quick: bool = False) -> dict:
    """Clients a second of each algorithm, and the time of its rounds against FedAvg's."""
    num_clients, cohort_size, num_rounds = (20, 4, 2) if quick else (1000, 100, 10)
    data = population.digits(num_clients=num_clients, held_out_clients=0)
    model = models.mlp(input_shape=data.input_shape, num_outputs=data.num_outputs, hidden=(128,))
    loss_fn = models.supervised(model, models.default_loss(data.task))
    params, _ = model.init(jax.random.key(3))
    programs = {}
    for name, (make, options) in MADE.items():
        sampler = sampling.uniform(num_clients, cohort_size)
        made = make(loss_fn, sampler, optax.sgd(0.1), num_steps=5, batch_size=10, **options)
        programs[name] = chained_rounds(made, params, data.train, num_rounds)
    timings = harness.interleaved(programs, repeats=3 if quick else 9)
    trained = num_rounds * cohort_size
    rows = [harness.row(name, timing, "clients/s", per=trained, ours=True) for name, timing in timings.items()]
    plain = timings[PLAIN].median
    ratios = [
        harness.ratio(
            f"time of {name} against {PLAIN}", timing.median / plain, at_most=GOAL if name == "Ditto" else None
        )
        for name, timing in timings.items()
        if name != PLAIN
    ]
    goal = f"A round of Ditto, which trains two models, takes at most {GOAL} times that of FedAvg."
    more_rows, more_ratios, notes = _race(quick)
    return harness.result(
        "P26", "personal models", goal=goal, rows=rows + more_rows, ratios=ratios + more_ratios, notes=notes
    )


def _race(quick: bool) -> tuple[list, list, list]:
    """Measures Ditto with 100 of 1,000 clients a round, here and in PFLlib, evaluating nothing.

    Args:
      quick: leaves PFLlib out.

    Returns: (rows in clients a second, ratios, notes). There is a note alone where PFLlib is not installed.
    """
    python = python_of("pfllib", pathlib.Path(os.environ.get("RIVALS_VENVS", VENVS)))
    checkout = os.environ.get("PFLLIB")
    if quick or checkout is None or not python.is_file():
        return [], [], ["PFLlib was not measured."]
    cohort_size, num_rounds = 100, 5
    job = workload("mlp", cohort_size=1000, num_clients=1000)
    how = {"num_steps": job.num_steps, "batch_size": job.batch_size}
    made = algorithms.ditto(
        job.loss_fn, sampling.uniform(1000, cohort_size), optax.sgd(job.learning_rate), coefficient=0.1, **how
    )
    program = chained_rounds(made, job.params, job.data, num_rounds)
    before = [harness.timed(program) / num_rounds for _ in range(6)]
    with tempfile.TemporaryDirectory() as folder:
        arrays = pathlib.Path(folder) / "arrays.npz"
        write_arrays(arrays, job)
        script = pathlib.Path(__file__).parent / "rivals" / "pfllib_job.py"
        command = [str(python), str(script), str(arrays), checkout, str(cohort_size), str(num_rounds)]
        variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "NPROC")}
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=TIME_LIMIT)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"version"')]
    if not lines:
        return [], [], [f"PFLlib failed: {' '.join(done.stderr.split())[-200:]}"]
    after = [harness.timed(program) / num_rounds for _ in range(5)]
    found = json.loads(lines[-1])
    first, *theirs = found["round_seconds"]
    ours = harness.Timing(before[0], (*before[1:], *after))
    others = harness.Timing(first, tuple(theirs))
    rows = [
        harness.row("Ditto, MLP 60-128-10, 100 of 1,000 clients", ours, "clients/s", per=cohort_size, ours=True),
        harness.row("PFLlib's Ditto, the same arrays", others, "clients/s", per=cohort_size),
    ]
    ratio = harness.ratio("speed of Ditto against PFLlib's", others.median / ours.median)
    return rows, [ratio], [f"{found['version']}, {found['form']}."]
