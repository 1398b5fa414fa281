"""A run: its log, its checkpoints, and that looking changes nothing."""

import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidType, metrics, sampling
from fedjax_sim.algorithms import fedavg
from fedjax_sim.population import from_clients
from fedjax_sim.running import checkpoint, checksums, loop
from fedjax_sim.running.log import Log, _same_run, plain
from fedjax_sim.running.loop import run
from fedjax_sim.sweeps import sweep
from tests.refusals import refused

pytestmark = pytest.mark.optimised(False)  # bits that are compared here are those of one program, but for two tests

NUM_CLIENTS, ROUNDS = 40, 24


def loss_fn(params, examples, key):
    return {"loss": (examples["x"] @ params["w"] + params["b"] - examples["y"]) ** 2}


def problem(nonfinite="drop", learning_rate=0.05):
    rng = np.random.default_rng(0)
    clients = [
        {"x": rng.normal(size=(n, 3)).astype(np.float32), "y": rng.normal(size=n).astype(np.float32)}
        for n in rng.integers(1, 9, NUM_CLIENTS)
    ]
    population = from_clients(clients)
    sampler = sampling.with_dropout(sampling.cyclic(NUM_CLIENTS, 7), 0.2)
    algorithm = fedavg(
        loss_fn, sampler, optax.sgd(learning_rate), num_steps=2, batch_size=2, nonfinite=nonfinite,
        server_optimizer=optax.adam(0.01),
    )  # fmt: skip
    return algorithm, {"w": jnp.zeros(3), "b": jnp.zeros(())}, population


@pytest.fixture(scope="module")
def parts():
    algorithm, params, population = problem()
    return algorithm, params, population, metrics.evaluation(loss_fn, held_out=population)


KEY = jax.random.key(5)


def same_bits(a, b):
    one, other = ([np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (a, b))
    return [(x.shape, x.tobytes()) for x in one] == [(x.shape, x.tobytes()) for x in other]


@pytest.fixture(scope="module")
def reference(parts):
    algorithm, params, population, evaluation = parts
    state, history = run(KEY, algorithm, params, population, ROUNDS, evaluation=evaluation, evaluate_every=5)
    return state, history


def test_log_has_every_round_once(parts, reference, tmp_path):
    """Fault: a record doubled at a block's edge, one lost at the end, or a start that nothing is compared with."""
    algorithm, params, population, evaluation = parts
    directory = tmp_path / "run"
    run(KEY, algorithm, params, population, ROUNDS, evaluation=evaluation, evaluate_every=5, directory=directory)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(ROUNDS + 1))
    assert lines == reference[1].records
    rounds, _ = reference[1].column("held_out_loss")
    assert rounds.tolist() == [0, 5, 10, 15, 20, 24] and reference[1].column("local_loss")[0][0] == 1
    assert lines[0] == {"round": 0} | {name: plain(value) for name, value in evaluation(params).items()}
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["finished"] and summary["rounds"] == ROUNDS
    assert summary["client_visits"] == sum(line.get("clients_reported", 0) for line in lines)
    assert summary["uplink_bytes"] == summary["client_visits"] * 16  # 4 float32 each
    assert summary["downlink_bytes"] == ROUNDS * 7 * 16


def test_looking_changes_nothing(parts, reference):
    """Fault: a key or state that depends on where blocks, evaluations or callbacks fall."""
    algorithm, params, population, evaluation = parts
    seen = []
    for options in ({"evaluate_every": 7, "evaluation": evaluation}, {"evaluate_every": 1}, {"evaluate_every": 24}):
        state, _ = run(
            KEY, algorithm, params, population, ROUNDS, callbacks=[lambda *a: seen.append(a[0])], **options
        )  # fmt: skip
        assert same_bits(state, reference[0])
    assert seen == [7, 14, 21, 24, *range(1, 25), 24]


def test_checkpoints_by_default(parts, tmp_path, monkeypatch):
    """After evaluations, no more often than the clock allows; before every callback; at the end.

    Fault: a checkpoint after each of a small model's evaluations, or a callback whose round is not on disk.
    """
    algorithm, params, population, _ = parts
    module = importlib.import_module("fedjax_sim.running.loop")  # the package has a function of this name
    committed, commit = [], Log.commit
    monkeypatch.setattr(Log, "commit", lambda self, round, *rest: (committed.append(round), commit(self, round, *rest)))
    evaluations, callback = [0, 5, 10, 15, 20, 24], [lambda *a: None]
    for seconds, callbacks, expected in [(1e9, [], [0, 24]), (0.0, [], evaluations), (1e9, callback, evaluations)]:
        monkeypatch.setattr(module, "CHECKPOINT_SECONDS", seconds)
        committed.clear()
        folder = tmp_path / f"{seconds}-{len(callbacks)}"
        run(KEY, algorithm, params, population, ROUNDS, evaluate_every=5, directory=folder, callbacks=callbacks)
        assert committed == expected


def test_another_key_gives_another_run(parts, reference):
    """Fault: a key that ignores the seed."""
    algorithm, params, population, _ = parts
    state, _ = run(jax.random.key(6), algorithm, params, population, ROUNDS)
    assert not same_bits(algorithm.params(state), algorithm.params(reference[0]))


FURTHER = [pytest.param(stop, marks=pytest.mark.full) for stop in (1, 5, 23)]


def test_history_as_a_frame(reference):
    """Catches a number in another round, and a metric that a round lacks read as zero."""
    pytest.importorskip("pandas")
    history = reference[1]
    frame = history.to_pandas()
    assert frame.index.name == "round" and frame.index.tolist() == [record["round"] for record in history.records]
    rounds, values = history.column("held_out_loss")
    assert frame["held_out_loss"].dropna().to_dict() == dict(zip(rounds.tolist(), values.tolist(), strict=True))
    assert np.isnan(frame["held_out_loss"][1]) and frame["uplink_bytes"][1] == history.records[1]["uplink_bytes"]


@pytest.mark.parametrize("stop", [13, *FURTHER])
def test_resume_gives_the_same_bits(parts, reference, tmp_path, stop):
    """Fault: a stream replayed, or a state forgotten, at a resume; rounds past the commit are cut from the log."""
    algorithm, params, population, evaluation = parts
    options = {"evaluation": evaluation, "evaluate_every": 5, "checkpoint_every": 1, "directory": tmp_path / "run"}
    run(KEY, algorithm, params, population, stop, **options)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"round": 99, "half a rec')  # written after the commit, then killed
    state, history = run(KEY, algorithm, params, population, ROUNDS, resume=True, **options)
    assert same_bits(state, reference[0])
    expected = [dict(record) for record in reference[1].records]
    for record in history.records:  # the first run also evaluated where it ended
        if record["round"] == stop and stop % 5:
            for name in [name for name in record if name.startswith("held_out_")]:
                record.pop(name)
    assert history.records == expected


PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
from tests import conftest
from tests.running import test_loop as here
here.run(
    here.KEY, *here.problem(), 40, directory=sys.argv[1], checkpoint_every=2, callbacks=[lambda *a: time.sleep(0.02)],
    **here.LOOK,
)
"""
LOOK = {"evaluate_every": 2, "evaluation": lambda params: {"test_b": params["b"]}}


@pytest.mark.optimised
def test_kill_and_resume_gives_the_same_bits(tmp_path):
    """Fault: a checkpoint written in place, a log doubled or lost after a kill -9, bits that depend on the devices."""
    code = PROGRAM.format(root=str(pathlib.Path(__file__).parents[2]))
    command, env = [sys.executable, "-c", code, tmp_path / "victim"], os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    victim = subprocess.Popen(command, env=env)
    log = tmp_path / "victim" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and log.read_text().count("\n") >= 9):
        time.sleep(0.005)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    killed_at = log.read_text().count("\n")
    assert 9 <= killed_at < 40
    parts = problem()  # on two devices
    resumed, _ = run(KEY, *parts, 40, directory=tmp_path / "victim", resume=True, **LOOK)
    whole, _ = run(KEY, *parts, 40, directory=tmp_path / "whole", **LOOK)
    assert jax.device_count() > 1 and same_bits(resumed, whole)
    assert log.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_what_the_folder_holds_is_respected(parts, tmp_path):
    """Fault: a run overwritten by a fresh start, a resume out of nothing, a resume of another run."""
    algorithm, params, population, _ = parts
    directory = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match="expected a checkpoint"):
        run(KEY, algorithm, params, population, 2, directory=directory, resume=True)
    assert not directory.exists()
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    (tmp_path / "other" / "checkpoints" / "of_another_program.ckpt").write_text("weights")
    with pytest.raises(FileNotFoundError, match="expected a checkpoint"):
        run(KEY, algorithm, params, population, 2, directory=tmp_path / "other", resume=True)
    run(KEY, algorithm, params, population, 2, directory=directory, identity={"data": {"alpha": 0.3}})
    before = (directory / "metrics.jsonl").read_bytes()
    with pytest.raises(FileExistsError, match="folder without a run"):
        run(KEY, algorithm, params, population, 2, directory=directory)
    with pytest.raises(checkpoint.CheckpointError, match=r"alpha: 0\.3 in the checkpoint, 0\.5 now"):
        run(KEY, algorithm, params, population, 4, directory=directory, resume=True, identity={"data": {"alpha": 0.5}})
    with pytest.raises(checkpoint.CheckpointError, match="key"):
        run(
            jax.random.key(6), algorithm, params, population, 4, directory=directory, resume=True,
            identity={"data": {"alpha": 0.3}},
        )  # fmt: skip
    assert (directory / "metrics.jsonl").read_bytes() == before
    (directory / "metrics.jsonl").write_bytes(before[:-5])
    with pytest.raises(checkpoint.CheckpointError, match="cut or replaced"):
        run(KEY, algorithm, params, population, 4, directory=directory, resume=True,
            identity={"data": {"alpha": 0.3}})  # fmt: skip


def test_a_callback_may_stop(parts):
    """Fault: a stopped run that calls itself finished."""
    algorithm, params, population, _ = parts
    _, history = run(
        KEY, algorithm, params, population, ROUNDS, evaluate_every=4, callbacks=[lambda round, *_: round == 8]
    )
    assert history.summary["rounds"] == 8 and not history.summary["finished"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_rounds": -1}, "num_rounds: expected an integer in"),
        ({"num_rounds": True}, "num_rounds: expected an integer"),
        ({"num_rounds": 2.0}, "num_rounds: expected an integer"),
        ({"evaluate_every": 0}, "evaluate_every: expected an integer in"),
        ({"checkpoint_every": 0}, "checkpoint_every: expected an integer in"),
        ({"keep_checkpoints": 0}, "keep_checkpoints: expected an integer in"),
        ({"resume": True}, "directory: expected the run directory to resume"),
        ({"callbacks": [print, lambda record: None]}, r"^callbacks\[1\]: expected a function \(round, state, record\)"),
        ({"callbacks": print}, "^callbacks: expected a list of functions"),
        ({"evaluation": lambda a, b, c: {}}, r"^evaluation: expected a function \(params\), got"),
        ({"evaluation": 3}, r"^evaluation: expected a function \(params\), got 3"),
    ],
)
def test_wrong_input(parts, options, words):
    algorithm, params, population, _ = parts
    with pytest.raises((ValueError, TypeError), match=words):
        run(KEY, algorithm, params, population, **({"num_rounds": 2} | options))


def test_callbacks_may_keep_states(parts):
    """Fault: a kept state whose buffers the next block has taken."""
    algorithm, params, population, _ = parts
    kept = []
    run(KEY, algorithm, params, population, 4, evaluate_every=1, callbacks=[lambda r, state, rec: kept.append(state)])
    assert [int(state.round) for state in kept] == [1, 2, 3, 4]
    assert all(np.isfinite(x).all() for state in kept for x in jax.tree.leaves(algorithm.params(state)))
    assert float(params["w"].sum()) == 0  # and the caller's parameters are still the caller's


@pytest.mark.full  # by default a resume goes on after a stop and after a kill
def test_a_failed_evaluation_can_be_resumed(parts, reference, tmp_path):
    """Fault: a folder that neither a fresh start nor a resume accepts."""
    algorithm, params, population, evaluation = parts
    options = {"directory": tmp_path / "run", "evaluate_every": 5}
    with pytest.raises(ZeroDivisionError):
        run(KEY, algorithm, params, population, ROUNDS, evaluation=lambda params: 1 // 0, **options)
    state, history = run(KEY, algorithm, params, population, ROUNDS, evaluation=evaluation, resume=True, **options)
    assert same_bits(state, reference[0]) and history.records == reference[1].records


SCHEDULED = optax.sgd(optax.linear_schedule(0.1, 0.0, 5))


@pytest.mark.full
@pytest.mark.optimised
@pytest.mark.parametrize("optimizer", [optax.adam(0.1), SCHEDULED], ids=["adam", "schedule"])
def test_stateful_client_optimisers_run_on_two_devices(parts, optimizer):
    """Fault: an optimiser state that starts from constants, refused or rounded otherwise under a mesh."""
    _, params, population, _ = parts
    states = [
        run(
            KEY,
            fedavg(loss_fn, sampling.full(NUM_CLIENTS), optimizer, num_epochs=1, batch_size=2, mesh=mesh),
            params,
            population,
            3,
        )[0]
        for mesh in (None, "all")
    ]
    assert jax.device_count() > 1 and same_bits(*states)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"key": 0}, "key: expected one random key"),
        ({"population": "digits"}, "population: expected a Population, got 'str'"),
        ({"algorithm": None}, "algorithm: expected an Algorithm"),
        ({"callbacks": print}, "callbacks: expected a list of functions"),
        ({"evaluation": 3}, "evaluation: expected a function .params., got"),
        ({"directory": 3}, "directory: expected the path of a folder, got 3"),
    ],
)
def test_wrong_kinds(parts, wrong, words):
    algorithm, params, population, _ = parts
    given = {"key": KEY, "algorithm": algorithm, "params": params, "population": population, "num_rounds": 1} | wrong
    with pytest.raises(TypeError, match=words):
        run(**given)


def test_parts_of_a_users_own_algorithm_are_a_star(parts):
    """Fault: an error of Python about a dict without a server, which the accountant raises."""
    algorithm, params, population, _ = parts
    with refused("algorithm.parts", value="dict", rule="Star", kind=InvalidType):
        run(KEY, algorithm._replace(parts=algorithm.parts._asdict()), params, population, 1)


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_is_no_folder(parts, tmp_path, monkeypatch, place):
    """Fault: an error of the system after minutes of compilation."""
    monkeypatch.setattr(loop, "traced_round", lambda *arguments: pytest.fail("it was traced"))
    (tmp_path / "file").write_text("mine")
    algorithm, params, population, _ = parts
    with pytest.raises(NotADirectoryError, match="directory: expected a folder, or a place for one"):
        run(KEY, algorithm, params, population, 1, directory=tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine"


def test_checkpoints_that_vanish_before_they_are_read(tmp_path):
    """Fault: an `assert` where somebody removes a run's checkpoints while its resume begins."""
    with pytest.raises(FileNotFoundError, match="expected a checkpoint"):
        Log(tmp_path).resume({}, {}, False)


def test_a_summary_is_of_all_rounds(parts, tmp_path):
    """Fault: the summary and the page of a run's first rounds, beside the log of many more that a kill ended; a refused
    resume that takes them away; a config that does not know of the rounds to come."""
    algorithm, params, population, _ = parts
    files = {"config.toml": "rounds = 2\n"}
    run(KEY, algorithm, params, population, 2, directory=tmp_path, files=files)
    (tmp_path / "report.html").write_text("after 2 rounds")
    again = {"directory": tmp_path, "resume": True, "files": {"config.toml": "rounds = 4\n"}, "evaluate_every": 1}
    with pytest.raises(checkpoint.CheckpointError, match="another run"):
        run(KEY, algorithm, params, population, 4, identity={"data": 1}, **again)
    assert (tmp_path / "summary.json").exists() and (tmp_path / "config.toml").read_text() == files["config.toml"]

    def dies(round, state, record):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        run(KEY, algorithm, params, population, 4, callbacks=[dies], **again)
    assert (tmp_path / "config.toml").read_text() == "rounds = 4\n"
    assert not {"summary.json", "report.html"} & {path.name for path in tmp_path.iterdir()}
    checksums.check_files(tmp_path, ["config.toml"])
    assert "summary.json" not in (tmp_path / "SHA256SUMS").read_text()


def test_a_refused_run_leaves_nothing(parts, tmp_path, monkeypatch):
    """Fault: a folder with a checkpoint of round 0, which `--resume` takes for the newest, of a run that never fits."""

    def refuses(needs):
        raise MemoryError("too large")

    monkeypatch.setattr(sys.modules["fedjax_sim.running.blocks"], "check_memory", refuses)
    algorithm, params, population, _ = parts
    with pytest.raises(MemoryError):
        run(KEY, algorithm, params, population, 2, directory=tmp_path / "run", files={"config.toml": ""})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_initial_model_that_is_not_finite_is_refused(parts, value):
    """Fault: all clients are dropped in all rounds, and a run or a sweep ends without an error."""
    algorithm, params, population, _ = parts
    model = jax.tree.map(lambda x: np.full(x.shape, value, x.dtype), params)
    words = r"params.*: expected finite numbers, got '\d+ of \d+ that are not'. Look at how"
    with pytest.raises(ValueError, match=words):
        run(KEY, algorithm, model, population, 1)
    with pytest.raises(ValueError, match=words):
        sweep(lambda rate: algorithm, model, population, 1, grid={"rate": [1]})


def test_threads_for_many_devices():
    """Fault: a hint to set NPROC where the devices have a thread each, so that NPROC cannot help."""
    for stored, words in (
        (1, "NPROC=1 and JAX_NUM_CPU_DEVICES=1 or less, for each of the 2 devices"),
        (9, "NPROC=9 in"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=words):
            _same_run({"host_threads": stored}, {"host_threads": 2}, pathlib.Path("x"))


def test_a_start_that_was_stopped_at_once_can_be_started_again(parts, tmp_path):
    """Fault: a folder with empty files that neither a fresh start nor a resume accepts."""
    algorithm, params, population, _ = parts
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "timing.jsonl").touch()
    _, history = run(KEY, algorithm, params, population, 1, directory=tmp_path)
    assert history.summary["rounds"] == 1


@pytest.mark.full  # by default test_nothing_is_logged_after_the_fatal_round
def test_policy_error_names_the_clients(tmp_path):
    """Fault: a diverging client that goes unnoticed."""
    algorithm, params, population = problem(nonfinite="error", learning_rate=1e30)
    with pytest.raises(FloatingPointError, match=r"round 1: \d+ clients .* among them \[\d+"):
        run(KEY, algorithm, params, population, 3, directory=tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1


def test_divergence_is_counted_not_swallowed():
    """Fault: NaN in the model after clients diverge under the policy `drop`."""
    algorithm, params, population = problem(learning_rate=1e30)
    state, history = run(KEY, algorithm, params, population, 3)
    assert same_bits(algorithm.params(state), params)
    assert history.summary["skipped_rounds"] == 3 and history.summary["dropped_clients"] > 0
    reported = sum(record.get("clients_reported", 0) for record in history.records)
    assert history.summary["client_visits"] == reported + history.summary["dropped_clients"]
    assert history.records[0]["local_loss"] == "nan"


def test_names_that_hide_another_are_refused(parts):
    """Fault: a loss's metric called `round` that rewrites the log, an evaluation that replaces what the round says."""
    _, params, population, _ = parts

    def named(params, examples, key):
        return loss_fn(params, examples, key) | {"round": examples["y"]}

    algorithm = fedavg(named, sampling.full(NUM_CLIENTS), optax.sgd(0.1), num_steps=1)
    (record,) = run(KEY, algorithm, params, population, 1)[1].records
    assert record["round"] == 1 and isinstance(record["local_round"], float)
    for name in ("round", "local_loss"):
        with refused("evaluation", value=name, rule="the round does not use"):
            run(KEY, algorithm, params, population, 1, evaluation=lambda params, name=name: {name: np.float32(1)})


def test_nothing_is_logged_after_the_fatal_round(parts, tmp_path):
    """Fault: rounds after the one that ended the run, logged as part of it; diverging clients that are not named."""
    _, params, population, _ = parts

    def fails_later(params, examples, key):
        loss = loss_fn(params, examples, key)["loss"]
        return jnp.where(params["b"] ** 2 + (params["w"] ** 2).sum() > 1e-5, jnp.nan, 1.0) * loss

    algorithm = fedavg(fails_later, sampling.full(NUM_CLIENTS), optax.sgd(0.002), num_steps=1, nonfinite="error")
    words = r"round \d+: \d+ clients sent non-finite updates, among them \[\d+"
    with pytest.raises(FloatingPointError, match=words) as caught:
        run(KEY, algorithm, params, population, 500, evaluate_every=500, directory=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert f"round {lines[-1]['round']}:" in str(caught.value) and 1 < lines[-1]["round"] < 500
    assert lines[-1]["dropped_clients"] and not any("error_ids" in line for line in lines)


@pytest.mark.full
def test_matrix_products_are_exact_unless_asked_otherwise(parts):
    """Fault: results that depend on the batch because an accelerator multiplies with 10 bits by default."""
    algorithm, params, population, _ = parts
    seen = []
    step = lambda *a: (seen.append(jax.config.jax_default_matmul_precision), algorithm.step(*a))[1]  # noqa: E731
    run(KEY, algorithm._replace(step=step), params, population, 1)
    with jax.default_matmul_precision("tensorfloat32"):
        run(KEY, algorithm._replace(step=lambda *a: step(*a)), params, population, 1)
    assert seen[0] == "highest" and seen[-1] == "tensorfloat32"


@pytest.mark.full
def test_programs_are_kept(tmp_path):
    """Fault: every run from Python compiles anew what the last one compiled."""
    code = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parents[2])!r})
from tests.running import test_loop as here
here.run(here.KEY, *here.problem(), 1)
"""
    hidden = ("JAX_COMPILATION", "JAX_PERSISTENT", "FEDJAX_SIM_CACHE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    env |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_NUM_CPU_DEVICES": "1"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, cwd=tmp_path)
    assert list(tmp_path.rglob("fedjax_sim/xla/*-cache"))
