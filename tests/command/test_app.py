"""The command line, as a user sees it: folders, exit codes, texts."""

import ast
import functools
import importlib
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

from fedjax_sim import engine, types
from fedjax_sim.command import app, folders
from fedjax_sim.command.run import _lanes_in_words
from fedjax_sim.command.summary import show_summary
from fedjax_sim.config import registry
from fedjax_sim.config.build import build
from fedjax_sim.config.document import ConfigError, load
from fedjax_sim.config.run_options import RUN_TABLE
from fedjax_sim.running.environment import prepare
from fedjax_sim.running.files import lock
from tests import compiler, pictures

pytestmark = pytest.mark.optimised(False)  # bits that are compared here are those of one program; the rest is words

ROOT = Path(__file__).parents[2]
TINY = ["data.num_clients=200", "data.held_out_clients=5", "sampler.cohort_size=20", "model.name=logistic"]
TINY += ["algorithm.num_steps=1", "run.evaluate_train=50"]
TINY += ["run.rounds=3", "run.evaluate_every=2", "run.checkpoint_every=2"]
LANES = ["run.lanes=3", "run.chunk=6"]  # that no plan chooses
FILES = {"config.toml", "env.json", "metrics.jsonl", "population.json", "report.html", "summary.json", "timing.jsonl"}
SUMMARY = (
    "test_accuracy test_loss train_loss rounds client_visits distinct_clients rounds_seconds compile_seconds name "
    "clients_per_second peak_memory_bytes uplink_bytes downlink_bytes skipped_rounds dropped_clients "
    "baseline_accuracy baseline_loss"
)


def sets(*texts):
    return [word for text in texts for word in ("--set", text)]


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """Each test in a folder of its own, nothing left in the user's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDJAX_SIM_CACHE", "off")


def call(*arguments):
    return CliRunner().invoke(app.app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished tiny run."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDJAX_SIM_CACHE", "off")
        patch.setattr("fedjax_sim.report.axes.to_svg", pictures.drawn)
        result = call("run", *sets(*TINY, *LANES), "--out", folder)
    assert result.exit_code == 0, result.output
    return folder, result.output


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The folder of its first two rounds, for copies."""
    folder = tmp_path_factory.mktemp("cli") / "short"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDJAX_SIM_CACHE", "off")
        result = call("run", *sets(*TINY[:-3], "run.rounds=2", *TINY[-2:], *LANES), "--out", folder, "--quiet")
    assert (result.exit_code, result.output) == (0, "")
    return folder


def test_a_run_leaves_everything(done):
    """Fault: a file, or a figure of the summary, that a reader of the run misses."""
    folder, output = done
    assert {path.name for path in folder.iterdir()} >= FILES | {"checkpoints"}
    summary = json.loads((folder / "summary.json").read_text())
    assert not set(SUMMARY.split()) - summary.keys() and summary["rounds"] == 3 and summary["finished"]
    assert (
        summary["client_visits"] == 60
        and 20 <= summary["distinct_clients"] <= 60
        and 0.1 <= summary["baseline_accuracy"] <= 0.11
    )
    env = json.loads((folder / "env.json").read_text())
    assert env["matmul_precision"] == "highest" and env["versions"]["jax"] == jax.__version__
    assert (
        env["command"].startswith("fedjax-sim run --set data.num_clients=200 --set") and "--out" not in env["command"]
    )
    start, *rounds = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert start["round"] == 0 and start["train_sample_clients"] == 50 and "local_loss" not in start
    assert "train_loss" in start.keys() & rounds[1].keys() & summary.keys() and "local_accuracy" in rounds[0]
    assert [record["distinct_clients"] for record in rounds] == sorted(record["distinct_clients"] for record in rounds)
    population = json.loads((folder / "population.json").read_text())
    assert population["num_clients"] == 200 and len(population["label_counts"]) == 24
    assert 20 <= min(map(sum, population["label_counts"])) <= max(map(sum, population["label_counts"])) <= 60
    assert tomllib.loads((folder / "config.toml").read_text())["run"]["rounds"] == 3
    for words in (
        "test accuracy",
        "guessing: 0.10",
        "rounds",
        "client visits",
        "different clients",
        "not finite",
        "report.html",
    ):
        assert words in output


def test_advice_for_a_model_that_learned_nothing(done, capsys):
    """Fault: a lower learning rate recommended to who asked for attackers, to whom nobody reported, or after a run
    that was too short."""
    summary = json.loads((done[0] / "summary.json").read_text()) | {"test_loss": 9.0}
    lost = {"rounds": 10, "skipped_rounds": 6}
    lower = "its test loss went from 2.5 to 9, so try a lower learning rate."
    cases = [
        ({}, 2.5, lower),
        ({"attackers_met": 0}, 2.5, lower),
        ({"test_loss": "nan"}, 2.5, "its test loss went from 2.5 to nan, so try a lower learning rate."),
        ({}, 20.0, "its test loss has fallen from 20 to 9, so train for more rounds."),
        ({}, 9.0, "its test loss has not fallen, so look at the curves of the report."),
        ({}, float("nan"), "its test loss has not fallen, so look at the curves of the report."),
        ({"attackers_met": 1234}, 2.5, "1,234 messages were attackers'."),
        (lost, 2.5, "6 of 10 rounds were skipped: no message arrived, or none was usable."),
        (lost | {"skipped_rounds": 5}, 2.5, lower),
        (
            lost | {"dropped_clients": 900, "client_visits": 900},
            2.5,
            "900 updates were not finite, so try a lower learning rate.",
        ),
    ]
    for more, first_loss, advice in cases:
        show_summary(summary | more, first_loss)
        assert capsys.readouterr().out.rpartition("no better than guessing: ")[2].strip() == advice


@pytest.mark.full  # by default the advice is read from made numbers
def test_a_short_run_is_told_to_go_on():
    """Fault: a lower learning rate recommended after three rounds in which the loss fell."""
    result = call("run", *sets(*TINY, "client_optimizer.learning_rate=1e-4"))
    assert "so train for more rounds." in " ".join(result.output.split()), result.output


def test_a_start_over_a_run_is_refused(done):
    """Fault: results overwritten by a second start."""
    folder, _ = done
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    result = call("run", *sets(*TINY), "--out", folder)
    assert result.exit_code == 2 and "--resume" in result.output and "another --out" in result.output
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.default_rows("True")
@pytest.mark.parametrize("config_is_given", [False, True])
def test_resume_goes_on_to_the_same_bits(done, short, tmp_path, config_is_given):
    """Fault: a resumed run that repeats, skips or changes a round, or one that forgets its config; lanes that are
    chosen anew beside a config without them, where the devices decided on them and are others now."""
    folder, copy = done[0], shutil.copytree(short, tmp_path / "copy")
    (tmp_path / "tiny.toml").write_text(load(None, TINY).to_toml(tmp_path))
    asked = [tmp_path / "tiny.toml"] if config_is_given else sets("run.rounds=3")
    result = call("run", "--resume", "--out", copy, *asked)
    assert result.exit_code == 0, result.output
    assert (copy / "metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    assert (copy / "config.toml").read_bytes() == (folder / "config.toml").read_bytes()
    assert json.loads((copy / "summary.json").read_text())["rounds"] == 3


def test_lanes_follow_from_several_accelerators():
    """Faults: three of four accelerators idle, lanes that follow from the cores of a CPU, and from the devices of a
    sweep, which gives whole runs to them."""
    config = load(None, [*(word for word in TINY if "cohort_size" not in word), "sampler.cohort_size=160"])
    on_cpu = build(config).plan
    with engine.assumed_devices(4):
        assert build(config).plan == on_cpu
        with engine.compiling_for("cuda"):
            experiment = build(config)
            assert experiment.plan == engine.Plan(20, 20)
            assert _lanes_in_words(config, experiment.plan).endswith("--set run.lanes=20 gives the same bits.")
            assert build(config.planned(engine.Plan(7, 7))).plan == engine.Plan(7, 7)
    with engine.compiling_for("cuda"), engine.one_device():
        assert build(config).plan == engine.Plan(160, 160)


@pytest.mark.full
def test_the_timeline_of_a_round(done, tmp_path):
    """Fault: another round's clients, a run that is changed by looking, a round or run without one that gets a page,
    and an error of the config that is told as one of --timeline."""
    folder = tmp_path / "timed"
    clock = ["devices.name=cross_device", "sampler.with_clock.num_invited=8", "sampler.with_clock.flops_scale=1e5"]
    clock += ["sampler.with_deadline.seconds=2.0"]
    tiny = [word for word in TINY if "cohort_size" not in word] + ["sampler.cohort_size=150"]
    assert call("run", *sets(*tiny, *clock), "--out", folder, "-q").exit_code == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    record = json.loads((folder / "metrics.jsonl").read_text().splitlines()[2])
    written = call("report", folder, "--timeline", 2)
    assert written.exit_code == 0 and written.output.strip() == str(folder / "timeline_2.html"), written.output
    page = (folder / "timeline_2.html").read_text()
    reported = f"{record['clients_invited']} clients were invited, {record['clients_reported']} reported"
    assert reported in page and "Round 2, replayed" in page and "<svg" in page
    assert before == {path: path.read_bytes() for path in before}
    for which, words, code in (
        ((folder, "--timeline", 4), "one of the rounds in the log, 1 to 3, got 4", 2),
        ((folder, "--timeline", 0), "1 to 3, got 0", 2),
        ((done[0], "--timeline", 1), "a run whose rounds take simulated time", 2),
        ((tmp_path, "--timeline", 1), "expected a run's folder", 2),
    ):
        refused = call("report", *which)
        assert refused.exit_code == code and words in refused.output, refused.output
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("seconds = 2.0", "seconds = 1.0"))
    changed = call("report", folder, "--timeline", 2)
    assert changed.exit_code == 1 and "config.toml" in changed.output
    (folder / "SHA256SUMS").unlink()  # nothing but the log tells
    other = call("report", folder, "--timeline", 2)
    assert other.exit_code == 1 and "is not that of the log: round_seconds is" in other.output, other.output
    (folder / "config.toml").write_text(text.replace("cohort_size = 150", "cohort_size = 999999"))
    wrong = call("report", folder, "--timeline", 2)
    assert wrong.exit_code == 2 and "cohort_size" in wrong.output and "--timeline" not in wrong.output, wrong.output


@pytest.mark.full
@pytest.mark.pictures
def test_a_page_can_be_written_again(done, tmp_path):
    """Fault: a run killed between its summary and its page, for which no command writes one."""
    copy = shutil.copytree(done[0], tmp_path / "copy")
    (copy / "report.html").unlink()
    written = call("report", copy)
    assert written.exit_code == 0 and written.output.strip() == str(copy / "report.html")
    page, before = ((folder / "report.html").read_text() for folder in (copy, done[0]))
    assert page == before and "visits" in page and "fixed sample of 50 clients" in page
    nothing = call("report", tmp_path / "nothing")
    assert nothing.exit_code == 2 and "expected a folder with" in nothing.output
    leftover = copy / ".report.html.1.tmp"
    leftover.touch()  # of a report that was killed
    assert call("report", copy).exit_code == 0 and not leftover.exists()
    with lock(copy):  # a run under way
        assert call("report", copy).exit_code == 0
    log = copy / "metrics.jsonl"
    log.write_text(log.read_text().replace('"clients_reported": 20', '"clients_reported": 29', 1))
    changed = call("report", copy)
    assert changed.exit_code == 1 and "record 2 (line 2) was changed" in changed.output
    config = copy / "config.toml"
    config.write_text(config.read_text().replace("rounds = 3", "rounds = 4"))
    edited = call("run", "--resume", "--out", copy)
    assert edited.exit_code == 2 and "damaged or edited" in edited.output and "--set" in edited.output


@pytest.mark.full  # by default test_a_summary_is_of_all_rounds of tests/running
def test_an_old_summary_does_not_end_a_run(done, tmp_path):
    """Fault: a kill after the last commit of a resumed run, whose summary of its first rounds no command repairs."""
    copy = shutil.copytree(done[0], tmp_path / "copy")
    folders_check = lambda: folders.check_unfinished(copy, 3)  # noqa: E731
    with pytest.raises(ConfigError, match="has all of its rounds"):
        folders_check()
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps(summary | {"rounds": 2}))
    folders_check()
    (copy / "summary.json").unlink()
    mended = call("run", "--resume", "--out", copy, "--quiet")
    assert mended.exit_code == 0 and json.loads((copy / "summary.json").read_text())["rounds"] == 3, mended.output


def test_resume_refuses(done, tmp_path):
    """Fault: --resume that starts afresh, goes on with another config, or does nothing in silence."""
    folder, _ = done
    nothing = call("run", "--resume", "--out", tmp_path / "nothing")
    assert nothing.exit_code == 2 and "Nothing to resume there" in nothing.output
    anywhere = call("run", "--resume")
    assert anywhere.exit_code == 2 and "expected a run with a checkpoint in runs/" in anywhere.output
    finished = call("run", "--resume", "--out", folder)
    assert finished.exit_code == 2 and "has all of its rounds" in finished.output
    assert "fedjax-sim report" in finished.output
    copy = shutil.copytree(folder, tmp_path / "copy")
    other = call("run", "--resume", "--out", copy, *sets("run.rounds=4", "client_optimizer.learning_rate=0.2"))
    assert other.exit_code == 1 and "client_optimizer.learning_rate: 0.5 in the checkpoint, 0.2 now" in other.output
    checkpoint = max((copy / "checkpoints").glob("*.ckpt"))
    checkpoint.write_bytes(checkpoint.read_bytes()[:-5])
    damaged = call("run", "--resume", "--out", copy, *sets("run.rounds=4"))
    assert damaged.exit_code == 1 and "damaged" in damaged.output


@pytest.mark.full
def test_fast_arithmetic_is_another_run(tmp_path):
    """Fault: an option that is read and does nothing, or a run that goes on in the other arithmetic."""
    folder = tmp_path / "run"
    result = call("run", *sets(*TINY), "--set", "run.arithmetic=fast", "--out", folder)
    assert result.exit_code == 0, result.output
    assert json.loads((folder / "env.json").read_text())["arithmetic"] == "fast"
    more = ("--resume", "--set", "run.rounds=4", "--out", folder)
    refused = call("run", "--set", "run.arithmetic=reproducible", *more)
    assert refused.exit_code != 0 and "arithmetic" in refused.output
    assert call("run", *more).exit_code == 0


def test_failures_are_told_in_a_line(tmp_path, done):
    """Fault: a traceback in place of words, or exit code 0 for a run that failed."""

    copy = shutil.copytree(done[0], tmp_path / "copy")
    with lock(copy):
        held = call("run", "--resume", "--out", copy, *sets("run.rounds=4"))
    assert held.exit_code == 1 and "RunLocked" in held.output
    (tmp_path / "file").write_text("")
    assert call("run", *sets(*TINY), "--out", tmp_path / "file").exit_code == 2
    beneath = call("run", *sets(*TINY), "--out", tmp_path / "file" / "run")
    assert beneath.exit_code == 2 and "Not a directory" in beneath.output


@pytest.mark.full  # by default tests/running/test_loop.py raises it, and tests/command/test_hints.py tells of others
def test_divergence_is_told_in_a_line(tmp_path):
    """Fault: a traceback in place of words, or exit code 0 for a run that failed."""
    diverging = ["client_optimizer.learning_rate=1e30", "run.nonfinite=error"]
    broken = call("run", *sets(*TINY, *diverging), "--out", tmp_path / "broken")
    assert broken.exit_code == 1 and "FloatingPointError: round" in broken.output and "Traceback" not in broken.output


def test_wrong_input_exits_with_two():
    """Fault: wrong input that looks like a failure of the program."""
    result = call("run", *sets("run.rounds=0", "model.name=mpl"))
    assert result.exit_code == 2 and "run.rounds: expected" in result.output and "Did you mean 'mlp'?" in result.output
    built = call("run", *sets(*TINY, "sampler.with_dropout.rate=2"), "--out", "a/b")
    assert built.exit_code == 2 and "sampler.with_dropout.rate: expected" in built.output
    assert call("run", "nowhere.toml").exit_code == 2
    nothing = call("run", *sets("transform.terngrad.clip=1.0"))
    assert "transform.terngrad.clip: expected no options, got the unknown key 'clip'" in nothing.output
    swept = call("sweep", *sets("sweep.grid.client_optimizer.learning_rate=[0.1,0.2]", "model.name=gru"))
    assert swept.exit_code == 2 and "model.name: expected one of" in swept.output
    swept = call("sweep", *sets("sweep.grid.client_optimizer.learning_rate=[0.1]", 'sweep.metrics=["test_loss"]'),
                 "--metric", "test_los")  # fmt: skip
    assert swept.exit_code == 2 and "Did you mean 'test_loss'?" in swept.output
    assert call("run", "--sett", "a.b=c").exit_code == 2
    assert not [path for path in Path().rglob("*") if path != Path("runs")]  # nothing is written for a refused config


@pytest.mark.full  # by default tests/running/test_loop.py refuses a run
def test_a_refused_run_leaves_no_folder(monkeypatch):
    """Fault: the empty folder of a run that is refused after its folder has a name."""

    def refuses(needs):
        raise MemoryError("too large")

    monkeypatch.setattr(importlib.import_module("fedjax_sim.running.blocks"), "check_memory", refuses)
    result = call("run", *sets(*TINY, *LANES))  # a program that is compiled already
    assert result.exit_code == 1 and "too large" in result.output
    assert not [path for path in Path().rglob("*") if path != Path("runs")]


def test_runs_are_numbered():
    """Fault: a second default run in the first one's folder."""
    assert [folders.next_folder(Path("runs/a")).name for _ in range(3)] == ["a-001", "a-002", "a-003"]


def test_list_shows_every_part():
    """Fault: a public part that `list` leaves out, or one without a meaning."""
    output = call("list", "--all").output
    for subpackage in registry.SUBPACKAGES:
        assert all(
            f"{name} " in output or f"{name}*" in output or f".{name}]*" in output
            for name in registry.parts(subpackage)
        ), subpackage
    sampler = call("list", "sampler").output
    assert "cohort_size = (required)" in sampler and "[sampler] in a config" in sampler
    assert call("list", "sampler").output == call("list", "sampling").output
    assert "attack = (required), {name" in call("list", "aggregator").output
    assert "positions = (required)" in call("list", "data").output  # of a trigger, which is an option of a data set's
    assert "[transform], [downlink] in a config" in call("list", "transform").output
    one = call("list", "fedbuff").output
    assert "buffer_size = 10" in one and "[algorithm] in a config" in one and "fedasync" not in one
    inside = call("list", "metropolis").output
    assert "graph = (required), {name" in inside and "as {name = ...}" in inside and "[devices]" not in inside
    wrong = call("list", "samplers")
    assert wrong.exit_code == 2 and "Did you mean" not in wrong.output.split("expected")[0]


def test_list_is_what_a_config_can_name():
    """Faults: a type in the list, a line that wraps, an option without a meaning, an option that nobody finds."""
    lines = call("list").output.splitlines()
    assert len(lines) < 400 and max(map(len, lines[:-1])) <= 80
    first_words = {line.split()[0] for line in lines if line.startswith("  ")}
    assert {"fedavg", "digits", "[sampler.with_dropout]", "from_fn"} - first_words == {"from_fn"}
    told = " ".join(call("list", "run").output.split())
    assert "rounds = 100 rounds of training" in told and '"reproducible", "fast"' in told
    assert all(len(meaning) > 10 for *_, meaning in RUN_TABLE.values())
    assert call("list", "personal_steps").output.startswith("[run] personal_steps = none: local steps on its own rows")
    assert call("list", "run.lanes").output.startswith("[run] lanes = none: clients vmapped at once")
    assert "[sampler] cohort_size: an option of" in call("list", "cohort_size").output


def test_help_and_version():
    """Fault: help that waits for JAX."""
    assert call("--version").output.startswith("fedjax_sim ")
    assert "CONFIG.toml" in call("run", "--help").output and "list" in call("--help").output
    code = "import sys, fedjax_sim, fedjax_sim.command.app as a; "
    code += "print(any(m in sys.modules for m in ('jax', 'numpy', 'rich.console')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False\n", done.stdout + done.stderr


def test_the_package_is_its_subpackages():
    """Fault: a public name that is not there, or `fedjax_sim.run` that is another one than the runner."""
    import fedjax_sim
    from fedjax_sim.running import loop

    assert fedjax_sim.run is loop.run and fedjax_sim.Algorithm is types.Algorithm
    assert fedjax_sim.sampling.uniform(10, 2).num_slots == 2
    assert all(getattr(fedjax_sim, name) is not None for name in dir(fedjax_sim))
    assert set(dir(fedjax_sim)) == {*fedjax_sim.HOMES, *fedjax_sim.SUBPACKAGES}
    imports = next(node for node in ast.parse(Path(fedjax_sim.__file__).read_text()).body if isinstance(node, ast.If))
    assert {alias.asname for node in imports.body for alias in node.names} == set(
        fedjax_sim.HOMES
    )  # as checkers see it
    with pytest.raises(AttributeError, match="no attribute 'ran'"):
        _ = fedjax_sim.ran


@pytest.mark.full
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
    quick = " ".join(f"--{name}={value}" for name, value in compiler.known().items())
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {quick}"}
    process = subprocess.Popen(
        [*map(str, command), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("r/checkpoints/*.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "is safe. Continue with: fedjax-sim run --resume --out" in errors and "Traceback" not in errors
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


@pytest.mark.parametrize(("stated", "used"), [(None, "highest"), ("bfloat16", "bfloat16")])
def test_the_precision_of_products_is_kept(monkeypatch, stated, used):
    """Fault: products of full precision for a user who asked JAX for another one; fewer digits where nobody asked."""
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    jax.config.update("jax_default_matmul_precision", stated)
    prepare()
    assert jax.config.jax_default_matmul_precision == used


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


@functools.cache
def first_norm(weighting, aggregator):
    """The norm of the first update; all ten clients take part, so that every aggregator is the mean."""
    options = ["data.num_clients=10", "data.held_out_clients=0", "model.name=linear", "run.devices=1"]
    options += ["algorithm.num_steps=1", "sampler.cohort_size=10", f"algorithm.weighting={weighting}"]
    made = build(load(None, [*options, f"aggregator.name={aggregator}"]))
    state = made.algorithm.init(made.key, made.params, made.data.train)
    return float(jax.jit(made.algorithm.step)(made.key, state, made.data.train)[1]["update_norm"])


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("aggregator", ["horvitz_thompson", "keep_old", "li_scheme_two"])
@pytest.mark.parametrize("weighting", [pytest.param("examples", marks=pytest.mark.full), "uniform"])
def test_total_weight_is_that_of_the_reported_weights(aggregator, weighting):
    """Fault: messages of weight 1 divided by the number of examples: an update 38 times too small."""
    assert first_norm(weighting, aggregator) == pytest.approx(first_norm(weighting, "mean"), rel=1e-5)


def test_weights_that_count_twice_are_refused():
    """Fault: clients drawn in proportion to their examples, then weighted by them again."""
    options = ["data.num_clients=10", "model.name=linear", "sampler.name=weighted", "sampler.cohort_size=5"]
    with pytest.raises(ConfigError, match=r"aggregator: .* counts them twice"):
        build(load(None, options))
    build(load(None, [*options, "aggregator.name=li_scheme_one"]))


def test_a_part_is_explained():
    """Catches a docstring that is cut off, and a table that a config does not take."""
    output = call("list", "with_deadline").output
    assert "Args:" in output and "Guarantees:" in output and "[sampler.with_deadline]" in output
    output = call("list", "uniform").output
    assert "[sampler]" in output and 'name = "uniform"' in output and "cohort_size = ...  # required" in output
