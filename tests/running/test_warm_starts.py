"""A run that starts from what an earlier process compiled is the run that it would be if it were traced."""

import hashlib
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

from fedjax_sim import algorithms, metrics, sampling
from fedjax_sim.command import app
from fedjax_sim.population import quadratic_loss
from fedjax_sim.population.population import stored
from fedjax_sim.running import blocks, checkpoint, loop
from fedjax_sim.running.checkpoint import CheckpointError
from fedjax_sim.running.checkpoint_format import read_file
from fedjax_sim.running.loop import run
from tests.running import test_fingerprint as tiny
from tests.running.kept_programs import new_cache

ROOT = pathlib.Path(__file__).resolve().parents[2]
EIGHT = "quickstart compressed_private asynchronous gossip edges split record_private scaffold_million".split()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A folder of compiled programs for each test."""
    with new_cache(tmp_path, monkeypatch) as folder:
        yield folder


@pytest.fixture
def untraced(monkeypatch):
    """Call it where from now on nothing may be traced: neither a round nor, for its noise, a private program."""

    def traced(*_):
        raise AssertionError("a round was traced")

    def begin():
        monkeypatch.setattr(loop, "traced_round", traced)
        monkeypatch.setattr(loop, "program_digest", traced)

    return begin


def what_a_run_leaves(folder):
    """The log, the last state, the program, and what the noise is bound to."""
    newest, meta = checkpoint.newest_meta(folder / "checkpoints")
    _, leaves = read_file(newest)
    ledger = folder / "privacy.json"
    return {
        "log": (folder / "metrics.jsonl").read_bytes(),
        "state": hashlib.sha256(leaves.tobytes()).hexdigest(),
        "program": meta["identity"]["program"],
        "ledger": json.loads(ledger.read_text()) if ledger.exists() else None,
    }


PEOPLE = tiny.people()


def go(folder, num_rounds, algorithm, origin="here", **options):
    """A run whose origin is stated."""
    evaluation = metrics.evaluation(quadratic_loss, train=PEOPLE)
    more = {"evaluation": evaluation, "evaluate_every": 2, "directory": folder, "origin": origin}
    return run(tiny.KEY, algorithm, tiny.START, PEOPLE, num_rounds, **more, **options)


@pytest.mark.parametrize("multiplier", [100.0, pytest.param(None, marks=pytest.mark.full)], ids=["private", "plain"])
def test_the_same_run(tmp_path, untraced, cache, multiplier):
    """Faults: another log, state or program of a run that was not traced; noise that is bound to something else; a
    resume that begins anew; a round of another origin, which must be traced."""
    go(tmp_path / "cold", 3, tiny.private(multiplier=multiplier))
    assert sorted(path.suffix for path in cache.iterdir()) == [".program", ".round"]
    untraced()
    _, history = go(tmp_path / "warm", 3, tiny.private(multiplier=multiplier))
    for num_rounds in (1, 3):
        go(tmp_path / "resumed", num_rounds, tiny.private(multiplier=multiplier), resume=num_rounds > 1)
    cold = what_a_run_leaves(tmp_path / "cold")
    assert (cold["ledger"] is None) == (multiplier is None) and cold["program"]["sha256"]
    assert what_a_run_leaves(tmp_path / "warm") == cold
    resumed = what_a_run_leaves(tmp_path / "resumed")
    assert [resumed[name] for name in ("state", "program")] == [cold[name] for name in ("state", "program")]
    assert 0 < history.summary["compile_seconds"] <= history.summary["seconds"]["compilation"]
    for options in ({"origin": "elsewhere"}, {"origin": None}):
        with pytest.raises(AssertionError, match="was traced"):
            go(tmp_path / "other", 1, tiny.private(multiplier=multiplier), **options)


@pytest.mark.full  # by default tests/running/test_blocks.py has frozen parameters
def test_what_a_round_closes_over(tmp_path, untraced, monkeypatch, cache):
    """Faults: frozen parameters that a start without a trace has not, or that a file holds beyond its bound; a round
    whose tracing warned, which would warn no more."""
    frozen = jnp.asarray(np.random.default_rng(0).normal(size=(130, 130)) / 10, jnp.float32)
    rows = np.random.default_rng(1).normal(size=(12, 130)).astype(np.float32)
    people = stored({"x": rows}, np.arange(0, 13, 3))

    def loss_fn(params, examples, key=None):
        return jnp.square(examples["x"] @ frozen - params[None]).mean(axis=1)

    def once(folder):
        algorithm = algorithms.fedavg(loss_fn, sampling.full(4), optax.sgd(0.1), num_steps=1, mesh=None)
        state, _ = run(tiny.KEY, algorithm, jnp.zeros(130), people, 1, directory=folder, origin="here")
        return np.asarray(algorithm.params(state)).tobytes()

    with monkeypatch.context() as patch:
        patch.setattr("fedjax_sim.running.executables.MOST_CONSTANT_BYTES", frozen.nbytes - 1)
        cold = once(tmp_path / "a")
    assert [path.suffix for path in cache.iterdir()] == [".program"]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "traced_round", lambda *args: blocks.traced_round(*args)._replace(warned=True))
        once(tmp_path / "b")
    assert [path.suffix for path in cache.iterdir()] == [".program"]
    once(tmp_path / "c")
    untraced()
    assert once(tmp_path / "d") == cold


def test_refusals_are_the_same(tmp_path, untraced, monkeypatch):
    """Faults: a resume of another program, or a run that does not fit, that passes where nothing is traced."""
    slow, fast = (tiny.private(rate, multiplier=None) for rate in (0.1, 0.2))
    go(tmp_path / "a", 1, slow)
    go(tmp_path / "b", 1, fast, origin="there")
    untraced()
    with pytest.raises(CheckpointError, match="program: another one"):
        go(tmp_path / "a", 2, fast, origin="there", resume=True)
    monkeypatch.setattr("fedjax_sim.engine.total_memory", lambda: 100)
    with pytest.raises(MemoryError, match="expected at most the 100 bytes"):
        go(tmp_path / "c", 1, slow)
    assert not (tmp_path / "c").exists()


@pytest.mark.full
@pytest.mark.optimised
@pytest.mark.parametrize("name", EIGHT)
def test_configs_start_warm(name, tmp_path, untraced, cache):
    """Faults: a config of the command line that is traced again, or whose log or state is another one; a changed option
    that finds the program of before."""
    # Memory on disk calls the host, and such programs are not stored.
    small = ["data.num_clients=2000", "run.client_memory=device"] if name == "scaffold_million" else []
    words = [word for text in ["run.rounds=2", "run.evaluate_every=2", *small] for word in ("--set", text)]

    def call(folder, *more):
        path = ROOT / "experiments" / f"{name}.toml"
        return CliRunner().invoke(app.app, ["run", str(path), "-q", "--out", str(tmp_path / folder), *words, *more])

    assert call("cold").exit_code == 0
    untraced()
    result = call("warm")
    assert result.exit_code == 0, result.output
    assert what_a_run_leaves(tmp_path / "warm") == what_a_run_leaves(tmp_path / "cold")
    assert isinstance(call("other", "--set", "seed=9").exception, AssertionError)
