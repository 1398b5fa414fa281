"""The same bits on any devices and visible cores and in any order, for every row, on problems that are no toys."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import optax
import pytest

from fedjax_sim import aggregation, algorithms, engine, models, population, sampling
from tests.laws import device_rows, problems as p

KEY = jax.random.key(4)
ROOT = pathlib.Path(__file__).resolve().parents[2]
EVERY = {
    ("algorithms", "1,2,-3,8", "mlp", "full"),
    ("algorithms", "1,-3", "tanh", "steps"),
    ("algorithms", "1,2", "softmax", "one"),
    ("algorithms", "1,3", "mlp", "steps"),
    ("transform", "1,2,-3,8", "tanh", "steps"),
    ("transform", "1,-3", "softmax", "full"),
    ("aggregation", "1,2,-3,8", "softmax", "full"),
    ("aggregation", "1,-3", "tanh", "one"),
    ("sampling", "1,2,-3,8", "softmax", "steps"),
    ("transform", "1,-3", "mlp", "steps"),
    ("transform", "1,-3", "short", "steps"),
    ("algorithms", "1,3", "short", "steps"),
    ("aggregation", "1,-3", "mlp", "full"),
    ("sampling", "1,-3", "mlp", "one"),
}


def python(*arguments: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    known = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "NPROC")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=known | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def equal_digests(kind: str, *options: str) -> list[str]:
    """The rows that were run; each has one digest, or one for each order of the cohort if its algorithm says so."""
    found = [json.loads(line) for line in python("-m", "tests.laws.device_rows", kind, *options).splitlines()]
    differing = [row for row in found if not row["equal"]]
    assert not differing, differing
    return [row["row"] for row in found]


@pytest.mark.full
def test_a_row_of_many_parts():
    """States of clients, two aggregates, full batches. Catches divisions that are left to the compiler, and an order of
    the cohort that counts, which is backwards on three."""
    assert equal_digests("algorithms", "1,-3", "tanh", "full", "scaffold") == ["scaffold"]


@pytest.mark.full
def test_a_row_of_short_floats():
    """A model in bfloat16, whose clients remember in float32. Catches updates that are rounded to 16 bits on one device
    and not on three."""
    assert equal_digests("transform", "1,3", "short", "steps", "client_momentum") == ["client_momentum"]


def with_momentum(loss_fn, mesh):
    sampler, step = sampling.uniform(30, 6), optax.sgd(0.23, momentum=0.73)
    parts = {"weighting": "uniform", "aggregator": aggregation.fixed_mean(6.0), "mesh": mesh}
    return algorithms.fedprox(loss_fn, sampler, step, coefficient=0.23, num_steps=3, batch_size=4, **parts)


def with_variates(loss_fn, mesh):
    work = {"num_epochs": 1, "batch_size": 10, "weighting": "uniform", "mesh": mesh}
    return algorithms.scaffold(loss_fn, sampling.uniform(30, 6), optax.sgd(0.23), **work)


@pytest.mark.full
@pytest.mark.parametrize("make", [with_momentum, with_variates], ids=["momentum", "variates"])
def test_pixels_that_are_never_on(make):
    """A linear model of digits. Catches products that are fused on one device alone, where the fusions around them
    differ, and signs of zeros in what clients keep."""
    data = population.digits(num_clients=30)
    model = models.linear(input_shape=data.input_shape, num_outputs=data.num_outputs)
    loss_fn, found = models.supervised(model, models.default_loss(data.task)), []
    for mesh in (None, engine.device_mesh(2)):
        made = make(loss_fn, mesh)
        state, step, infos = made.init(KEY, model.init(KEY)[0], data.train), jax.jit(made.step), []
        for i in range(3):
            state, info = step(jax.random.fold_in(KEY, i), state, data.train)
            infos.append(info)
        found.append(p.digest(jax.device_get((state, infos))))
    assert found[0] == found[1]


@pytest.mark.full
@pytest.mark.parametrize("options", sorted(EVERY), ids=" ".join)
def test_every_row(options):
    """Whole logs and states of five rounds. Catches a row whose last bits follow the devices, at odd shapes too."""
    assert equal_digests(*options) == device_rows.names(options[0])


CAN_HIDE_A_CORE = hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1
PROBE = """
import os, sys
os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # as a user starts it, and not these tests
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
from fedjax_sim.running.environment import host_threads, prepare
prepare()
import jax, jax.numpy as jnp, numpy as np
x = jnp.asarray(np.random.default_rng(0).normal(size=(4096, 64)), jnp.float32)
found = jax.jit(lambda x: (x.T @ x, x.sum()))(x)
pool = [x for x in os.listdir("/proc/self/task") if "XLAEigen" in open(f"/proc/self/task/{x}/comm").read()]
assert len(pool) == host_threads() and {os.sched_getscheduler(int(x)) for x in pool} == {os.SCHED_BATCH}
print(host_threads(), [np.asarray(y).tobytes().hex()[:4000] for y in found])
"""


@pytest.mark.full
@pytest.mark.skipif(not CAN_HIDE_A_CORE, reason="needs two cores, and a system that can hide one from a process")
@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="reads the threads' policies as Linux has them")
def test_visible_cores():
    """Long products and sums as `prepare` sets JAX up. Catches a thread pool whose size follows the machine, and one
    whose threads take a core from each other.

    Without it, the last bits of the same two operations differ on one core and on two: the test can fail.
    """
    assert python("-c", PROBE, "1") == python("-c", PROBE, "2")
    one, two = (python("-c", PROBE, cores, NPROC=cores, JAX_NUM_CPU_DEVICES="1") for cores in ("1", "2"))
    assert one.startswith("1 ") and two.startswith("2 ") and one[2:] != two[2:]


COMMAND = """
import os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv.pop(1))])
from fedjax_sim.command.app import main
main()
"""
LONG = """data.name=logistic_teacher data.dimension=64 data.num_clients=20 data.examples_per_client=2000
 model.name=linear algorithm.name=fedavg algorithm.num_steps=2 algorithm.batch_size=none
 client_optimizer.learning_rate=0.23 sampler.cohort_size=6 run.rounds=5 run.evaluate_every=2 run.evaluate_train=all"""


@pytest.mark.full
@pytest.mark.skipif(not CAN_HIDE_A_CORE, reason="needs two cores, and a system that can hide one from a process")
def test_long_clients_on_visible_cores(tmp_path):
    """Whole logs of the command line over 2,000 rows a step, evaluations too, on one core and two, one device to three.

    Catches products past the length where XLA splits them, whose parts follow the cores or the devices.
    """
    settings = [x for setting in LONG.split() for x in ("--set", setting)]
    for cores, devices in (("1", "1"), ("2", "1"), ("2", "3"), ("1", "2")):
        out = tmp_path / (cores + devices)
        chosen = [*settings, "--set", f"run.devices={devices}"]
        python("-c", COMMAND, cores, "run", "--quiet", "--out", str(out), *chosen, JAX_NUM_CPU_DEVICES=devices)
    logs = {(path / "metrics.jsonl").read_bytes() for path in tmp_path.iterdir()}
    assert len(logs) == 1 and len(logs.pop().splitlines()) == 6
