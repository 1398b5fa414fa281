"""Forecasts for absent accelerators: seconds by hand, refusals, and the vendors' compilers where they are installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from typer.testing import CliRunner

from fedjax_sim import algorithms, engine, sampling
from fedjax_sim.command.app import app
from fedjax_sim.instruments import chips
from fedjax_sim.instruments.compiled import Collective, CompiledProgram, Kernel
from fedjax_sim.instruments.target_forecast import _refusal, forecast_on, least_seconds
from tests.laws import problems as p

CHIP = chips.Chip(
    title="toy",
    platform="cuda",
    memory_bytes=1000,
    bytes_per_second=100.0,
    flops_per_second={"float32": 50.0, "bfloat16": 500.0},
    link_bytes_per_second=10.0,
    launch_seconds=0.5,
    topology="",
)


def test_seconds_by_hand():
    """Faults: bytes and products of a kernel added where they overlap, a loop's turns forgotten, a fast precision at
    the speed of a slow one, an all-reduce that passes its bytes on once, a scattered sum that is taken for its
    result, one device's share of it."""
    kernels = (
        # 2 s each
        Kernel(name="copy", opcode="copy", source="", times=3, memory_bytes=200.0, flops=()),
        # 1 s of bytes under 5 s of products
        Kernel(name="dot", opcode="dot", source="", times=1, memory_bytes=100.0, flops=(("float32", 250.0),)),
        # half a second of products under 1 s of bytes
        Kernel(name="fast", opcode="dot", source="", times=1, memory_bytes=100.0, flops=(("bfloat16", 250.0),)),
        # 1 s at least, as float32
        Kernel(name="wide", opcode="dot", source="", times=1, memory_bytes=0.0, flops=(("float64", 50.0),)),
    )
    exchanges = (Collective("all-reduce", 2, 40.0), Collective("all-gather", 1, 40.0))
    seconds = least_seconds(CompiledProgram(kernels, exchanges, (), 0), CHIP, 4)
    assert seconds["memory"] == 3 * 2.0 + 1.0
    assert seconds["matrix products"] == 5.0 + 1.0
    assert seconds["launches"] == 6 * 0.5
    # A ring of four: each device sends 3/4 of the bytes twice, or once.
    assert seconds["exchanges"] == pytest.approx((2 * 2 * 0.75 * 40 + 0.75 * 40) / 10)
    # An all-reduce of 160 bytes is a reduce-scatter to shares of 40 bytes, and an all-gather of 160 bytes.
    of_each = [
        least_seconds(CompiledProgram((), (Collective(*exchange),), (), 0), CHIP, 4)["exchanges"]
        for exchange in (("reduce-scatter", 1, 40.0), ("all-gather", 1, 160.0), ("all-reduce", 1, 160.0))
    ]
    assert of_each == pytest.approx([3 * 40 / 10, 0.75 * 160 / 10, 2 * 0.75 * 160 / 10])
    assert of_each[0] + of_each[1] == pytest.approx(of_each[2])


def test_refusals_of_compilers():
    """Fault: a program that is too large, and one without kernels, that end in a traceback or as the same thing."""
    too_large = _refusal(CHIP, RuntimeError("RESOURCE_EXHAUSTED: Used 19.07G of 15.75G hbm.\nmore"))
    assert isinstance(too_large, MemoryError) and str(too_large).endswith("15.75G hbm.")
    assert isinstance(_refusal(CHIP, RuntimeError("INTERNAL: no supported kernel")), NotImplementedError)


@pytest.mark.full
def test_memory_is_of_a_device_on_many_hosts():
    """Fault: the bytes of one host's devices, divided by the number of all devices."""
    if hint := chips.missing_compiler(chips.CHIPS["v5e"]):
        pytest.skip(f"needs the compiler for v5e: {hint}")
    code = """if True:
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec
        from fedjax_sim import engine
        from fedjax_sim.instruments.chips import CHIPS, chip_devices
        for number in (4, 8):
            mesh = jax.sharding.Mesh(chip_devices(CHIPS["v5e"], number), "x")
            x = jax.ShapeDtypeStruct((number << 20,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("x")))
            compiled = jax.jit(lambda x: x * 2).trace(x).lower(lowering_platforms=("tpu",)).compile()
            print(engine.needs_of_a_device(compiled).total)
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["8388608"] * 2, done.stderr[-2000:]


def test_memory_on_disk_is_planned_without_calls(tmp_path):
    """Calls of the host are replaced, and counted. Faults: a traceback of the compiler; a plan that has no calls."""
    device = jax.devices()[0]
    with engine.client_memory("disk", tmp_path), engine.compiling_for("cpu", [device], 1 << 30):
        sampler = sampling.uniform(p.NUM_CLIENTS, 4)
        made = algorithms.scaffold(p.linear_loss, sampler, optax.sgd(0.1), weighting="uniform", num_steps=1)
        run = {"key": jax.random.key(0), "params": jnp.zeros(3), "population": p.ragged()}
        found = forecast_on(CHIP._replace(platform="cpu"), [device], made, **run)
    assert found.program.num_host_calls == 2  # states of clients are read, and written


def test_pods():
    """Fault: a pod of another number of devices than was asked for."""
    for chip in chips.CHIPS.values():
        if chip.platform == "tpu":
            for doublings in range(9):
                sides = chips._pod_shape(chip, 2**doublings)
                cores = 2 if chip.topology == "v4" else 1
                assert sides[0] * sides[1] * (sides[2] if len(sides) == 3 else 1) * cores >= 2**doublings


@pytest.mark.parametrize(
    "options, words",
    [
        (["--target", "h10"], r"--target: expected one of a100, .*, got 'h10'. Did you mean 'h100'\?"),
        (
            ["--target", "h100", "--devices", "3"],
            "--devices: expected a power of two, at most 8 of NVIDIA H100 80GB, got 3",
        ),
        (["--target", "h100", "--devices", "16"], "at most 8 of NVIDIA H100"),
        (["--target", "v5e", "--targets"], "--targets: expected no --target beside it, got .v5e."),
        (["--devices", "2"], "--devices: expected a --target that they are of, got 2. Here: run.devices."),
        (["--target", "v5e", "--set", "run.plan=trial"], "run.plan: expected \"auto\" with --target, got 'trial'"),
    ],
)
def test_refused(options, words, monkeypatch):
    """Faults: another chip than the one that was meant; an option that is taken and has no effect."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    done = CliRunner().invoke(app, ["plan", *options])
    assert done.exit_code == 2
    assert re.search(words, done.output), done.output


def test_a_missing_compiler_is_named(monkeypatch):
    """Fault: a traceback of JAX where a word on what to install is due."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(chips, "missing_compiler", lambda chip: f"pip install 'fedjax_sim[{chip.platform}]'")
    done = CliRunner().invoke(app, ["plan", "--target", "v5e"])
    assert done.exit_code == 1
    assert "TPU v5e: its compiler is not installed. pip install 'fedjax_sim[tpu]'" in done.output


def test_memory_is_the_chips(monkeypatch):
    """Fault: client memory that is held against this machine's memory, and not against the chip's."""
    devices = jax.devices()[:1]
    with engine.compiling_for("tpu", devices, 1000):
        assert engine.memory_limit() == 500
        assert engine.visible_devices() == devices
    assert engine.memory_limit() > 1000


@pytest.mark.full
@pytest.mark.parametrize("name", ["h100", "v5e"])
def test_plan_for_a_chip(name):
    """As somebody who thinks of renting one. Fault: a forecast without what they need to know."""
    if hint := chips.missing_compiler(chips.CHIPS[name]):
        pytest.skip(f"needs the compiler for {name}: {hint}")
    small = ["data.name=mean_estimation", "data.num_clients=400", "model.name=linear", "sampler.cohort_size=20"]
    options = [x for s in small for x in ("--set", s)]
    # In a process of its own: here JAX has looked for accelerators already.
    command = [sys.executable, "-m", "fedjax_sim", "plan", "--target", name, "--devices", "2", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for words in (
        f"devices +2 of {re.escape(chips.CHIPS[name].title)}",
        r"clients at once +\d+ on each device",
        "cohorts that fit, at least up to +400",
        r"waits for the host +never",
        r"exchanges +1, ",
        r"a round, at least +[\d.]+ [um]s",
        r"clients/s, at most +[\d,]+",
    ):
        assert re.search(words, done.stdout), (words, done.stdout)
