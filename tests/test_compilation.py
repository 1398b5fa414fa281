"""A round is traced and compiled once per shape, however many rounds follow."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, client, engine, population, sampling, server
from fedjax_sim.engine.arithmetic.exact_sum import MAX_JOINED
from tests.laws import cases, problems as p

pytestmark = pytest.mark.optimised
ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.optimised(False)
def test_traced_once_and_compiled_once():
    """Catches Python values in the state (a retrace each round), weak types, shapes that drift."""
    traces = []

    def counted_loss(params, examples, key):
        traces.append(1)
        return p.linear_loss(params, examples, key)

    algorithm = algorithms.fedavg(
        counted_loss,
        sampling.uniform(p.NUM_CLIENTS, 4),
        optax.sgd(0.05),
        server_optimizer=optax.adam(0.01),
        num_steps=1,
        plan=p.PLAN,
        mesh=None,
    )
    data = p.ragged()
    state = algorithm.init(jax.random.key(0), jnp.array(p.START), data)
    before = [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(state)]
    step = jax.jit(algorithm.step)
    counts, params = [], []
    for i in range(8):
        state, _ = step(jax.random.fold_in(jax.random.key(1), i), state, data)
        counts.append(len(traces))
        params.append(np.asarray(algorithm.params(state)).tobytes())
    assert len(set(counts)) == 1, counts
    assert step._cache_size() == 1
    assert len(set(params)) == 8
    assert before == [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(state)]
    other = p.ragged(sizes=np.full(p.NUM_CLIENTS, 2))
    step(jax.random.key(5), state, other)
    assert len(traces) == counts[0], "another population of the same shapes"


def test_a_mesh_needs_no_further_trace():
    """Catches a client's work that is traced anew inside of `shard_map`: a quarter of the time of tracing a round."""
    counts = []
    for mesh in (None, engine.device_mesh(2)):
        traces = []

        def counted_loss(params, examples, key, traces=traces):
            traces.append(1)
            return p.linear_loss(params, examples, key)

        sampler = sampling.uniform(p.NUM_CLIENTS, 4)
        algorithm = algorithms.fedavg(counted_loss, sampler, optax.sgd(0.05), num_steps=2, plan=p.PLAN, mesh=mesh)
        data = p.ragged()
        state = algorithm.init(jax.random.key(0), jnp.array(p.START), data)
        jax.jit(algorithm.step).lower(jax.random.key(1), state, data)
        counts.append(len(traces))
    assert counts[0] == counts[1] > 0


def collectives(text: str) -> list[str]:
    """The collective operations of a compiled program, starts of asynchronous ones included."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    return re.findall(rf"= .*? ({kinds})(?:-start)?\(", text)


def _one_of_many(parameters, id):
    return p.ragged().generate(parameters, id % p.NUM_CLIENTS)


@pytest.mark.parametrize(
    "aggregator, places",
    [
        ("mean", 8),
        pytest.param("mean", 1, marks=pytest.mark.full),
        *(pytest.param(name, 8, marks=pytest.mark.full) for name in ("fixed_mean", "horvitz_thompson", "keep_old")),
    ],
)
def test_one_collective_a_round(aggregator, places, monkeypatch):
    """For linear aggregators, whatever the number of leaves, metrics and counts.

    Catches a maximum of bins beside the sum, counts that are summed on their own, a server step or a sampler that is
    split over the devices and gathered again.
    """
    monkeypatch.setattr(engine.exact_sums, "MOST_PLACES", places)
    sampler, rule = sampling.with_dropout(sampling.uniform(2000, 50), 0.2), cases.CASES["aggregation"][aggregator]()
    algorithm = algorithms.federated(
        sampler,
        client.local_sgd(p.mlp_loss, optax.sgd(0.05), client.work(num_epochs=1, batch_size=p.BATCH)),
        rule if rule.facts.design is None else aggregation.horvitz_thompson(sampler.design, cases.TOTAL),
        server.optimizer(optax.adam(0.01)),
        plan=p.PLAN,
        mesh=engine.device_mesh(2),
    )
    data, key = population.generated(2000, _one_of_many, p.ragged().parameters), jax.random.key(0)
    state = algorithm.init(key, p.mlp_params(), data)
    text = jax.jit(algorithm.step).lower(key, state, data).compile().as_text()
    assert collectives(text) == ["all-reduce"], collectives(text)


@pytest.mark.full
@pytest.mark.parametrize("devices", [1, 2])
def test_the_aggregate_is_computed_once(devices):
    """The words of exact sums become floats in one place. Catches readers that each convert them."""
    size = 2 * MAX_JOINED  # long enough for a sum of its own, so that its shape tells it

    def loss(params, examples, key):
        return p.linear_loss(params[:3], examples, key)

    sampler = sampling.uniform(p.NUM_CLIENTS, 4)
    mesh = engine.device_mesh(devices)
    algorithm = algorithms.fedavg(loss, sampler, optax.sgd(0.05), num_steps=1, plan=p.PLAN, mesh=mesh)
    data, key = p.ragged(), jax.random.key(0)
    state = algorithm.init(key, jnp.zeros(size), data)
    text = jax.jit(algorithm.step).lower(key, state, data).compile().as_text()
    digits_of_two_bins = 3
    assert len(re.findall(rf"= f32\[{size}\]\S* convert\(", text)) == digits_of_two_bins


@pytest.mark.full
def test_clients_states_stay_apart():
    """SCAFFOLD with 38 of 2,000 clients, whose states of 521 numbers lie on two devices.

    Catches a device that gets the states of the whole cohort, a move of states between their coming and their going,
    and a draw of the cohort that is split because the states are.
    """
    sampler, rate = sampling.uniform(2000, 38), optax.sgd(0.05)

    def loss(params, examples, key):
        return jnp.square(params.sum() - examples["x"].sum(-1))

    work = {"num_steps": 1, "batch_size": p.BATCH, "weighting": "uniform"}
    algorithm = algorithms.scaffold(loss, sampler, rate, **work, plan=p.PLAN, mesh=engine.device_mesh(2))
    data, key = population.generated(2000, _one_of_many, p.ragged().parameters), jax.random.key(0)
    state = jax.eval_shape(algorithm.init, key, jnp.zeros(521), data)
    text = jax.jit(algorithm.step).lower(key, state, data).compile().as_text()
    rows = {int(rows) for rows in re.findall(r"f32\[(\d+),521\]", text)}
    assert 1000 in rows and not rows & {38, 40, 2000}, rows
    moved = re.findall(r"= (\S+) (all-gather|all-to-all|collective-permute|reduce-scatter)\(", text)
    assert sum(",521]" in shape for shape, _ in moved) <= 3, moved
    assert [kind for _, kind in moved if kind != "collective-permute"] == ["all-gather"], moved  # of who arrived


ROUNDS = """
import jax, jax.numpy as jnp, optax
from fedjax_sim import algorithms, engine, population, run, sampling
seen, compiled = [], jax.stages.Lowered.compile
jax.stages.Lowered.compile = lambda *args, **options: seen.append(compiled(*args, **options)) or seen[-1]
people = population.quadratic_population([1.0, 1.0], [0.0, 2.0])
made = algorithms.fedavg(population.quadratic_loss, sampling.full(2), optax.sgd(0.5), num_steps=1)
key, params = jax.random.key(0), {"w": jnp.zeros(1 << 16)}
jax.jit(made.step).lower(key, made.init(key, params, people), people).compile()
run(key, made, params, people, 1)
print([program.as_text().count("outer_dimension_partitions") for program in seen])
"""


PREPARED = "from fedjax_sim.running.environment import prepare; prepare()"


@pytest.mark.full
@pytest.mark.parametrize("first", [PREPARED, pytest.param("", marks=pytest.mark.full)])
def test_loops_are_not_cut(first):
    """Into tasks for the threads of a pool: a device has one. Catches a round whose every loop waits for eight threads,
    in `run` from Python and, once the command line has prepared JAX, in every program.

    JAX's own options cut the same round: the test can fail.
    """
    known = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    known |= {"FEDJAX_SIM_CACHE": "off", "NPROC": "8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", f"{first}\n{ROUNDS}"]
    done = subprocess.run(command, cwd=ROOT, env=known, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    bare, ours = json.loads(done.stdout)
    assert ours == 0 and (bare == 0) == bool(first)


@pytest.mark.full  # by default tests/test_program_size.py counts their kernels
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the pass is XLA:CPU's")
def test_reductions_are_whole():
    """Catches integers that are reduced in windows of 32 first, and bits that depend on whether they are.

    XLA's own passes reduce the same round in windows: the test can fail. So they do in fast arithmetic.
    """

    def loss(params, examples, key):
        return p.linear_loss(params[:3], examples, key)

    sampler = sampling.uniform(p.NUM_CLIENTS, 4)
    algorithm = algorithms.fedavg(loss, sampler, optax.sgd(0.05), num_steps=1, plan=p.PLAN, mesh=None)
    data, key = p.ragged(), jax.random.key(0)
    state = algorithm.init(key, jnp.ones(100), data)
    with engine.fast_arithmetic():
        options = {"fast": engine.compiler_options()}
    options["reproducible"] = engine.compiler_options()
    lowered = jax.jit(algorithm.step).lower(key, state, data)
    programs = {name: lowered.compile(compiler_options=x) for name, x in options.items()}
    has_windows = {name: " reduce-window(" in program.as_text() for name, program in programs.items()}
    assert has_windows == {"fast": True, "reproducible": False}
    results = [jax.tree.leaves(program(key, state, data)) for program in programs.values()]
    assert [np.asarray(x).tobytes() for x in results[0]] == [np.asarray(x).tobytes() for x in results[1]]


@pytest.mark.full  # by default tests/test_package.py
def test_importing_the_package_initialises_no_backend():
    """Catches arrays made at import: they would pin the devices before a user could choose them."""
    modules = [
        "engine",
        "population",
        "models",
        "sampling",
        "client",
        "transform",
        "aggregation",
        "server",
        "algorithms",
    ]
    code = f"""
import importlib
for name in {modules}: importlib.import_module("fedjax_sim." + name)
from jax._src import xla_bridge
assert not xla_bridge._backends, "a backend was initialised"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
