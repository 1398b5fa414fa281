"""The laws on an accelerator, for one row of each family; `pytest -m accelerator` where JAX sees one."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments.benchmarks.workloads import algorithm, massive, workload
from fedjax_sim import engine, tree
from fedjax_sim.config.build import build
from fedjax_sim.config.document import load
from fedjax_sim.engine import exact_sums
from tests.laws import laws, problems as p

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.optimised,
    pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs an accelerator, and JAX sees none here"),
]

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS = (
    ("algorithms", "fedavg"),
    ("algorithms", "scaffold"),
    ("algorithms", "record_private_fedavg"),
    ("algorithms", "fedbuff"),
    ("algorithms", "dpsgd"),
    ("algorithms", "hierarchical_fedavg"),
    ("algorithms", "splitfed"),
    ("algorithms", "vertical"),
    ("algorithms", "split_gnn"),
    ("aggregation", "krum"),
    ("aggregation", "trimmed_mean"),
    ("transform", "quantize integers"),
    ("transform", "top_k"),
    ("sampling", "poisson"),
)
# Largest distance of the models' changes on a CPU and on an accelerator, as a share of their norm.
FULL_PRECISION = {"mlp": 1e-5, "softmax": 1e-5, "cnn_12k": 1e-4, "lstm": 1e-4}


def python(*arguments: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    known = os.environ | {"PYTHONPATH": path} | environment
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=known, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def digests(kind: str, name: str, counts: str) -> dict:
    """Of states and logs after five rounds, in the order of the cohort (1) and backwards (-1), compiled anew."""
    options = kind, counts, "mlp", "steps", name
    row = json.loads(python("-m", "tests.laws.device_rows", *options, JAX_ENABLE_COMPILATION_CACHE="false"))
    assert row["equal"], row
    return row["digests"]


@pytest.mark.parametrize("kind, name", ROWS)
def test_rows_repeat(kind, name):
    """A program, its cohort backwards, and the program compiled anew. Catches atomic additions of floats, and kernels
    that are chosen by their measured time and round differently.

    FedBuff, gossip and hierarchies draw their cohorts themselves: there "backwards" is the same program once more.
    """
    assert digests(kind, name, "1,-1")["1"] == digests(kind, name, "1")["1"]


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two accelerators")
def test_every_device_has_work(recwarn):
    """Catches lanes that leave accelerators idle, of a config that states none."""
    experiment = build(load(None, ["data.num_clients=5000", "sampler.cohort_size=4096"]))
    start = experiment.key, experiment.params, experiment.data.train
    state = jax.eval_shape(experiment.algorithm.init, *start)
    jax.eval_shape(experiment.algorithm.step, experiment.key, state, experiment.data.train)
    assert not [warning for warning in recwarn if "empty" in str(warning.message)]
    assert -(-4096 // experiment.plan.lanes) >= 2 * len(jax.devices())


@pytest.mark.parametrize("law", ["order_is_irrelevant", "padding_is_irrelevant", "chunk_is_irrelevant"])
def test_laws_of_a_round(law):
    getattr(laws, law)()


def test_exact_sums():
    """Of 10,000 messages in any order and chunks. Catches digits that a compiler rounds away, or wrong carries."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(10_000, 67)) * 10.0 ** rng.integers(-12, 12, (10_000, 67))).astype(np.float32)
    x[:, 3] = 0
    total = jax.jit(lambda *chunks: exact_sums.total(_added(chunks)))
    whole, order = total(x), rng.permutation(len(x))
    for chunks in ([x[order]], np.split(x, [4_000, 4_100, 9_000]), np.split(x[order], 100)):
        np.testing.assert_array_equal(whole, total(*chunks))
    exact = np.array([math.fsum(column) for column in x.astype(np.float64).T])
    assert (np.abs(whole - exact) <= len(x) * 2.0**-24 * np.abs(x).max(0)).all()
    for where, bad in ((0, np.nan), (5_001, np.inf), (9_999, -np.nan)):
        spoilt = x.copy()
        spoilt[where, 5] = bad
        assert (np.flatnonzero(np.isnan(total(spoilt))) == [5]).all()


def _added(chunks):
    sums = exact_sums.zeros(chunks[0][0])
    for chunk in chunks:
        sums = exact_sums.add(sums, chunk)
    return sums


@pytest.mark.parametrize("size", [1, 63, 64, 1_000, 9_610])
def test_no_nan_is_lost(size):
    """Of the largest magnitudes of many arrays. Catches a maximum that drops NaN."""
    x = np.random.default_rng(0).normal(size=(100, size)).astype(np.float32)
    places = np.random.default_rng(1).integers(0, size, 100)
    largest = jax.jit(jax.vmap(engine.largest_magnitude))
    np.testing.assert_array_equal(largest(x), np.abs(x).max(1))
    x[np.arange(100), places] = np.nan
    assert np.isnan(largest(x)).all()


def change(name: str, platform: str) -> np.ndarray:
    """Of a model in three rounds of a workload, as a run computes it."""
    with jax.default_device(jax.devices(platform)[0]), engine.compiling_for({"gpu": "cuda"}.get(platform, platform)):
        work = workload(name, cohort_size=32)
        made, key = algorithm(work, mesh=None), jax.random.key(5)
        state = made.init(key, work.params, work.data)
        with jax.default_matmul_precision("highest"):
            step = jax.jit(made.step)
            for i in range(3):
                state, _ = step(jax.random.fold_in(key, i), state, work.data)
        return p.flat(made.params(state)) - p.flat(work.params)


@pytest.mark.parametrize("name", FULL_PRECISION)
def test_a_cpu_agrees(name):
    """Catches another cohort, another order of examples, or an operation that an accelerator computes carelessly."""
    expected, found = change(name, "cpu"), change(name, jax.default_backend())
    distance = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert distance < FULL_PRECISION[name]


def run(out: pathlib.Path, rounds: int, *options: str) -> bytes:
    """The log of a run by the command line."""
    chosen = ["--quiet", "--out", str(out), "--set", f"run.rounds={rounds}", "--set", "run.evaluate_every=2", *options]
    python("-m", "fedjax_sim", "run", *([] if "--resume" in options else ["quickstart"]), *chosen)
    return (out / "metrics.jsonl").read_bytes()


def test_a_run_resumes(tmp_path):
    """To the same log. Catches a state that comes back from disk to another place, or in other bits."""
    straight = run(tmp_path / "straight", 4)
    run(tmp_path / "resumed", 2)
    assert run(tmp_path / "resumed", 4, "--resume") == straight


def test_devices_of_a_run(tmp_path):
    """`run.devices`: one device gives the log of all that there are, and one more is refused by name."""
    number = len(jax.devices())
    logs = {run(tmp_path / str(n), 2, "--set", f"run.devices={n}") for n in {1, number}}
    assert len(logs) == 1
    with pytest.raises(AssertionError, match=r"run\.devices: expected"):
        run(tmp_path / "more", 2, "--set", f"run.devices={number + 1}")


def test_memory_is_flat():
    """In the cohort, and over rounds. Catches messages of all clients at once, and arrays that rounds leave behind."""
    temporary = {}
    for cohort_size in (20_000, 80_000):
        job = massive(100_000, cohort_size)
        key = jax.random.key(0)
        state = job.algorithm.init(key, job.params, job.data)
        step = jax.jit(job.algorithm.step).lower(key, state, job.data).compile()
        temporary[cohort_size] = step.memory_analysis().temp_size_in_bytes
    assert temporary[80_000] - temporary[20_000] < 60_000 * 256, temporary
    used = []
    for i in range(8):
        state, _ = step(jax.random.fold_in(key, i), state, job.data)
        jax.block_until_ready(state)
        used.append(jax.devices()[0].memory_stats()["bytes_in_use"])
    assert used[-1] - used[1] < tree.num_bytes(job.params), used  # eight rounds
