"""The command line, as a user meets it: folders, exit codes, words."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from fedjax_sim import cli, folders, registry
from fedjax_sim import run as train
from fedjax_sim.config import ConfigError, load
from fedjax_sim.environment import prepare
from fedjax_sim.experiment import build

ROOT = Path(__file__).parents[1]
TINY = ["data.num_clients=200", "data.held_out_clients=5", "sampler.cohort_size=20", "model.hidden=[8]"]
TINY += ["run.rounds=3", "run.evaluate_every=2", "run.checkpoint_every=2"]
FILES = {"config.toml", "env.json", "metrics.jsonl", "population.json", "report.html", "summary.json", "timing.jsonl"}
SUMMARY = "test_accuracy test_loss rounds clients_trained rounds_seconds compile_seconds clients_per_second " + (
    "peak_memory_bytes uplink_bytes downlink_bytes skipped_rounds dropped_clients baseline_accuracy baseline_loss name"
)


def sets(*texts):
    return [word for text in texts for word in ("--set", text)]


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """Each test in a folder of its own, JAX's settings as before, nothing left in the user's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDJAX_SIM_CACHE", "off")
    before = jax.config.jax_default_matmul_precision
    yield
    jax.config.update("jax_default_matmul_precision", before)


def call(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished tiny run."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDJAX_SIM_CACHE", "off")
        result = call("run", *sets(*TINY), "--out", folder)
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_a_run_leaves_everything(done):
    """Fault: a file, or a figure of the summary, that a reader of the run misses."""
    folder, output = done
    assert {path.name for path in folder.iterdir()} >= FILES | {"checkpoints"}
    summary = json.loads((folder / "summary.json").read_text())
    assert not set(SUMMARY.split()) - summary.keys() and summary["rounds"] == 3 and summary["finished"]
    assert summary["clients_trained"] == 60 and 0.1 <= summary["baseline_accuracy"] <= 0.11
    env = json.loads((folder / "env.json").read_text())
    assert env["matmul_precision"] == "highest" and env["versions"]["jax"] == jax.__version__
    assert (
        env["command"].startswith("fedjax-sim run --set data.num_clients=200 --set") and "--out" not in env["command"]
    )
    population = json.loads((folder / "population.json").read_text())
    assert population["num_clients"] == 200 and len(population["label_counts"]) == 24
    assert 20 <= min(map(sum, population["label_counts"])) <= max(map(sum, population["label_counts"])) <= 60
    assert tomllib.loads((folder / "config.toml").read_text())["run"]["rounds"] == 3
    for words in ("test accuracy", "guessing: 0.10", "rounds", "clients trained", "not finite", "report.html"):
        assert words in output


def test_a_start_over_a_run_is_refused(done):
    """Fault: results overwritten by a second start."""
    folder, _ = done
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    result = call("run", *sets(*TINY), "--out", folder)
    assert result.exit_code == 2 and "--resume" in result.output and "another --out" in result.output
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_resume_goes_on_to_the_same_bits(done, tmp_path):
    """Fault: a resumed run that repeats, skips or changes a round, or one that forgets its config."""
    folder, _ = done
    short = tmp_path / "short"
    assert call("run", *sets(*TINY[:-3], "run.rounds=2", *TINY[-2:]), "--out", short, "--quiet").output == ""
    result = call("run", "--resume", "--out", short, *sets("run.rounds=3"))
    assert result.exit_code == 0, result.output
    assert (short / "metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    assert (short / "config.toml").read_bytes() == (folder / "config.toml").read_bytes()
    assert json.loads((short / "summary.json").read_text())["rounds"] == 3


def test_resume_refuses(done, tmp_path):
    """Fault: --resume that starts afresh, goes on with another config, or does nothing in silence."""
    folder, _ = done
    nothing = call("run", "--resume", "--out", tmp_path / "nothing")
    assert nothing.exit_code == 2 and "Nothing to resume there" in nothing.output
    anywhere = call("run", "--resume")
    assert anywhere.exit_code == 2 and "expected a run with a checkpoint in runs/" in anywhere.output
    finished = call("run", "--resume", "--out", folder)
    assert finished.exit_code == 2 and "has all of its rounds" in finished.output
    copy = shutil.copytree(folder, tmp_path / "copy")
    other = call("run", "--resume", "--out", copy, *sets("run.rounds=4", "client_optimizer.learning_rate=0.2"))
    assert other.exit_code == 1 and "client_optimizer.learning_rate: 0.5 in the checkpoint, 0.2 now" in other.output
    checkpoint = max((copy / "checkpoints").glob("*.ckpt"))
    checkpoint.write_bytes(checkpoint.read_bytes()[:-5])
    damaged = call("run", "--resume", "--out", copy, *sets("run.rounds=4"))
    assert damaged.exit_code == 1 and "damaged" in damaged.output


def test_failures_are_told_in_a_line(tmp_path, done):
    """Fault: a traceback in place of words, or exit code 0 for a run that failed."""
    from fedjax_sim.checkpoint import lock

    copy = shutil.copytree(done[0], tmp_path / "copy")
    with lock(copy):
        held = call("run", "--resume", "--out", copy, *sets("run.rounds=4"))
    assert held.exit_code == 1 and "RunLocked" in held.output
    (tmp_path / "file").write_text("")
    assert call("run", *sets(*TINY), "--out", tmp_path / "file").exit_code == 2
    beneath = call("run", *sets(*TINY), "--out", tmp_path / "file" / "run")
    assert beneath.exit_code == 2 and "Not a directory" in beneath.output
    diverging = ["client_optimizer.learning_rate=1e30", "run.nonfinite=error"]
    broken = call("run", *sets(*TINY, *diverging), "--out", tmp_path / "broken")
    assert broken.exit_code == 1 and "FloatingPointError: round" in broken.output and "Traceback" not in broken.output


def test_wrong_input_exits_with_two():
    """Fault: wrong input that looks like a failure of the program."""
    result = call("run", *sets("run.rounds=0", "model.name=mpl"))
    assert result.exit_code == 2 and "run.rounds: expected" in result.output and "Did you mean 'mlp'?" in result.output
    built = call("run", *sets(*TINY, "sampler.with_dropout.rate=2"))
    assert built.exit_code == 2 and "sampler.with_dropout.rate: expected" in built.output
    assert call("run", "nowhere.toml").exit_code == 2
    assert call("run", "--sett", "a.b=c").exit_code == 2
    assert not list(Path().iterdir())  # nothing is written for a refused config


def test_runs_are_numbered():
    """Fault: a second default run in the first one's folder."""
    assert [folders.next_folder(Path("runs/a")).name for _ in range(3)] == ["a-001", "a-002", "a-003"]


def test_list_shows_every_part():
    """Fault: a public part that `list` leaves out, or one without a meaning."""
    output = call("list").output
    for room in registry.ROOMS:
        assert all(
            f"{name} " in output or f"{name}*" in output or f".{name}]*" in output for name in registry.parts(room)
        ), room
    sampler = call("list", "sampler").output
    assert "cohort_size = (required)" in sampler and "[sampler] in a config" in sampler
    assert call("list", "sampler").output == call("list", "sampling").output
    wrong = call("list", "samplers")
    assert wrong.exit_code == 2 and "Did you mean" not in wrong.output.split("expected")[0]


def test_help_and_version():
    """Fault: help that waits for JAX."""
    assert call("--version").output.startswith("fedjax_sim ")
    assert "CONFIG.toml" in call("run", "--help").output and "list" in call("--help").output
    code = (
        "import sys, fedjax_sim, fedjax_sim.cli; print(any(m in sys.modules for m in ('jax', 'numpy', 'rich.console')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False\n", done.stdout + done.stderr


def test_the_package_is_its_rooms():
    """Fault: `fedjax_sim.run` that turns from the function into the module of that name."""
    import fedjax_sim.run

    assert callable(fedjax_sim.run) and fedjax_sim.run is sys.modules["fedjax_sim.run"].run
    assert fedjax_sim.sampling.uniform(10, 2).num_slots == 2
    assert all(getattr(fedjax_sim, name) is not None for name in fedjax_sim.__all__)
    assert set(fedjax_sim.__all__) <= set(dir(fedjax_sim))
    with pytest.raises(AttributeError, match="no attribute 'ran'"):
        _ = fedjax_sim.ran


def test_interrupted_run_can_go_on(tmp_path):
    """Fault: Ctrl-C that loses the rounds done, the report, or the way to go on."""
    command = [
        sys.executable,
        "-m",
        "fedjax_sim",
        "run",
        *sets(*TINY[:-3]),
        *sets("run.rounds=1000000"),
        "--out",
        tmp_path / "r",
    ]
    options = sets("run.evaluate_every=50", "run.devices=1", "run.progress=false")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*map(str, command), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("r/checkpoints/*.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "is safe. Go on with: fedjax-sim run --resume --out" in errors and "Traceback" not in errors
    assert (tmp_path / "r" / "report.html").exists()


def test_compilation_cache_is_private(tmp_path, monkeypatch):
    """Fault: programs of another user, run as ours."""
    monkeypatch.delenv("FEDJAX_SIM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        folder = tmp_path / "fedjax_sim" / "xla"
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        prepare()
        assert jax.config.jax_compilation_cache_dir is None
        folder.rmdir()
        prepare()
        assert jax.config.jax_compilation_cache_dir == str(folder) and folder.stat().st_mode & 0o777 == 0o700
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


def test_other_data_are_refused(tmp_path):
    """Fault: a run that goes on over data that changed on the disk."""
    sites = tmp_path / "sites"
    sites.mkdir()
    for name in "ab":
        rows = "".join(f"{i % 7},{i % 5},{i % 2}\n" for i in range(40 if name == "a" else 30))
        (sites / f"{name}.csv").write_text("one,two,label\n" + rows)
    options = ["data.name=csv_sites", f"data.directory={sites}", "data.label=label", "model.name=logistic"]
    options += ["sampler.name=full", "run.evaluate_every=1", "client_optimizer.learning_rate=0.05"]
    run = call("run", *sets(*options, "run.rounds=1"), "--out", tmp_path / "r", "--quiet")
    assert run.exit_code == 0, run.output
    (sites / "b.csv").write_text("one,two,label\n" + "1,2,0\n2,1,1\n" * 10)
    again = call("run", "--resume", "--out", tmp_path / "r", *sets("run.rounds=2"))
    assert again.exit_code == 1 and "data_sha256" in again.output, again.output


@pytest.mark.parametrize("aggregator", ["horvitz_thompson", "keep_old", "li_scheme_two"])
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_total_weight_is_that_of_the_reported_weights(aggregator, weighting):
    """Fault: letters that weigh 1 divided by the number of examples: an update 38 times too small."""
    options = ["data.num_clients=10", "data.held_out_clients=0", "model.name=linear", "run.devices=1"]
    options += [f"algorithm.weighting={weighting}", "sampler.cohort_size=10"]

    def norm(name):
        experiment = build(load(None, [*options, f"aggregator.name={name}"]))
        _, history = train(experiment.key, experiment.algorithm, experiment.params, experiment.data.train, 1)
        return history.records[0]["update_norm"]

    assert norm(aggregator) == pytest.approx(norm("mean"), rel=1e-5)


def test_weights_that_count_twice_are_refused():
    """Fault: clients drawn in proportion to their examples, then weighed by them again."""
    options = ["data.num_clients=10", "model.name=linear", "sampler.name=weighted", "sampler.cohort_size=5"]
    with pytest.raises(
        ConfigError, match=r"aggregator\.name: expected li_scheme_one with sampler\.weighted, got 'mean'"
    ):
        build(load(None, options))
    build(load(None, [*options, "aggregator.name=li_scheme_one"]))
