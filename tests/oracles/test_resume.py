"""Algorithms with a state of their own kind, stopped and resumed: memory on disk, and two passes a round."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, engine, sampling, transform
from fedjax_sim.running.loop import run
from tests.laws import cases, problems as p
from tests.laws.laws import check_equal_bits

pytestmark = pytest.mark.optimised(False)  # one program, stopped and started again

KEY, ROUNDS = jax.random.key(3), 5
WORK = {"num_epochs": 2, "batch_size": p.BATCH, "weighting": "uniform"}


def problem(name):
    sampler = sampling.with_dropout(sampling.cyclic(p.NUM_CLIENTS, 8), 0.2)  # a sampler with a state
    sampler = sampling.with_stragglers(sampler, 0.5)
    if name == "feddyn":
        made = algorithms.feddyn(p.linear_loss, sampler, optax.sgd(p.RATE), coefficient=1.0, **WORK)
    else:
        messages = transform.chain(transform.quantize(8), transform.stateless(lambda key, x: x))
        made = algorithms.mime(p.linear_loss, sampler, optax.sgd(0.01), rule="adam", transform=messages, **WORK)
    return made, jax.numpy.array(p.START), p.ragged()


def everything(state):
    rows, _ = engine.take(state.clients, jax.numpy.arange(p.NUM_CLIENTS))
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get((state.server, rows)))]


@pytest.mark.parametrize(
    "name, kind",
    [pytest.param("feddyn", "disk", marks=pytest.mark.slow), pytest.param("mime", "device", marks=pytest.mark.full)],
)
def test_a_resumed_run_has_the_same_bits(tmp_path, name, kind):
    """Catches statistics, a tilt, or a sampler's place that a checkpoint forgets, and a first pass that is replayed."""
    parts, options = problem(name), {"directory": tmp_path, "client_memory": kind}
    straight, history = run(KEY, *parts, ROUNDS)
    run(KEY, *parts, 2, **options)
    resumed, records = run(KEY, *parts, ROUNDS, resume=True, **options)
    assert everything(resumed) == everything(straight) and records.records == history.records
    assert isinstance(resumed.clients, engine.Disk) == (kind == "disk")


ROWS = (
    "choco", "dpsgd", "fedasync", "fedat", "fedbuff", "gradient_tracking", "hierarchical_fedavg", "hierarchical_gossip",
    "hierarchical_split_gnn",
    "pairwise_gossip", "push_sum", "split_client", "split_learning", "splitfed",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", cases.rows(ROWS, ("fedbuff",)))
def test_rows_survive_a_kill(tmp_path, name):
    """Stopped after two steps. Catches a ring of models, places, tiers, nodes' models or a clock that a checkpoint
    forgets, and chains of clients that begin elsewhere."""
    made, start, data = cases.CASES["algorithms"][name](), jax.numpy.array(p.START), p.ragged()
    straight, history = run(KEY, made, start, data, ROUNDS)
    run(KEY, made, start, data, 2, directory=tmp_path)
    resumed, records = run(KEY, made, start, data, ROUNDS, resume=True, directory=tmp_path)
    check_equal_bits(jax.device_get(straight), jax.device_get(resumed), "state")
    assert records.records == history.records
