"""Rows of the laws as whole runs that are killed, and go on with another number of devices."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine
from fedjax_sim.running.loop import run
from tests.laws import cases, problems as p
from tests.laws.laws import check_equal_bits

pytestmark = pytest.mark.optimised

KEY, ROUNDS = jax.random.key(5), 40
ROWS = ["hierarchical_split_gnn", "split_client", "split_gnn", "split_learning", "splitfed", "vertical"]
ROWS += ["dpsgd", "fedat", "fedbuff", "hierarchical_fedavg"]
PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
from tests import conftest
from tests.running import test_killed_rows as here
state, _ = here.run(
    here.KEY, *here.problem({name!r}), here.ROUNDS, directory=sys.argv[1], resume=sys.argv[2] == "resume",
    evaluate_every=2, checkpoint_every=3, callbacks=[lambda *a: time.sleep(0.02)],
)
print(here.numbers(state))
"""


def problem(name):
    """A row over all devices."""
    before = dict(cases.RUN)
    cases.RUN.update(mesh="all")
    try:
        return cases.CASES["algorithms"][name](), jnp.array(p.START), p.ragged()
    finally:
        cases.RUN.update(before)


def numbers(state):
    """As checkpoints have them: without the rows that fill up client memory, which follow the number of devices."""
    return [np.asarray(x).tolist() for x in jax.tree.leaves(engine.gathered(state))]


@pytest.mark.full
def test_rows_that_fill_up_client_memory_reach_nothing():
    """Five edges with own optimisers, in six rows over two devices. Fault: a row of no client that is read."""
    (made, start, data), found = problem("hierarchical_split_gnn"), []
    for fill in (0, np.nan):
        state, step, infos = made.init(KEY, start, data), jax.jit(made.step), []
        memory = state.clients
        assert memory.size < memory.rows[0].shape[0]

        def filled(x, fill=fill, size=memory.size):
            return x.at[size:].set(fill if jnp.issubdtype(x.dtype, jnp.floating) else 0 if fill == 0 else 7)

        rows = jax.tree.map(filled, memory.rows)
        state = state._replace(clients=dataclasses.replace(memory, rows=rows))
        for i in range(4):
            state, info = step(jax.random.fold_in(KEY, i), state, data)
            infos.append(info)
        found.append((engine.gathered(state), infos))
    check_equal_bits(*jax.device_get(found), "whatever fills up")


@pytest.mark.full
@pytest.mark.parametrize("name", ROWS)
def test_kill_and_resume_gives_the_same_bits(name, tmp_path):
    """Fault: a turn, a copy, a count or a flight that a checkpoint forgets, and bits that follow a start's devices."""
    code = PROGRAM.format(root=str(pathlib.Path(__file__).parents[2]), name=name)

    def start(mode, devices):
        command = [sys.executable, "-c", code, tmp_path / "victim", mode]
        env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)

    victim, log, deadline = start("fresh", 1), tmp_path / "victim" / "metrics.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and log.read_text().count("\n") >= 9):
        time.sleep(0.005)
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate()
    assert 9 <= log.read_text().count("\n") < ROUNDS
    resumed, _ = start("resume", 3).communicate()
    whole, _ = run(KEY, *problem(name), ROUNDS, directory=tmp_path / "whole", evaluate_every=2)
    assert jax.device_count() > 1 and resumed == f"{numbers(whole)}\n"
    assert log.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
