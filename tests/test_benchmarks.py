"""The benchmarks' own instruments: turns, medians, results that are whole, words about the machine, the README."""

from __future__ import annotations

import getpass
import json
import os
import pathlib
import platform
import subprocess
import sys

import pytest

from experiments.benchmarks import baselines, harness, processes, report
from experiments.benchmarks.__main__ import main
from experiments.benchmarks.rivals import beside, common, jax_models
from experiments.benchmarks.workloads import WORKLOADS, algorithm, rounds_program, workload
from experiments.front_page import speed_table
from tests import compiler

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture
def no_garbage(monkeypatch):
    """Garbage is looked for between turns, which takes seconds amid all that other tests have made."""
    monkeypatch.setattr(harness.gc, "collect", lambda: 0)


@pytest.mark.usefixtures("no_garbage")
def test_turns_are_taken_in_order():
    """Catches blocks of repeats, which would let a slow moment hit one side, and a first call that counts."""
    seen = []
    timings = harness.interleaved({name: lambda name=name: seen.append(name) for name in "abc"}, repeats=4)
    assert "".join(seen) == "abc" * 5
    assert all(len(timing.seconds) == 4 for timing in timings.values())


@pytest.mark.usefixtures("no_garbage")
def test_a_budget_stops_the_turns_but_not_before_three():
    """Catches a budget that leaves a median of one, or none that is kept."""
    timings = harness.interleaved({"a": lambda: None}, repeats=1000, budget_seconds=0.0)
    assert len(timings["a"].seconds) == 3


def test_medians_and_quartiles():
    """Catches means, which one slow repeat would move, and rates whose quartiles are swapped."""
    timing = harness.Timing(9.0, (1.0, 2.0, 3.0, 4.0, 100.0))
    assert (timing.median, timing.low, timing.high) == (3.0, 2.0, 4.0)
    row = harness.row("x", timing, "clients/s", per=12, ours=True, cores=2)
    assert (row["value"], row["low"], row["high"], row["repeats"]) == (4.0, 3.0, 6.0, 5)
    assert row["first_call_seconds"] == 9.0


def test_goals():
    """Catches a goal that is reached when one of its ratios is not, and NaN that passes."""
    good, bad = harness.ratio("a", 1.05, at_most=1.1), harness.ratio("b", 1.0, at_least=2.0)
    assert good["reached"] and not bad["reached"]
    assert not harness.ratio("c", float("nan"), at_most=1.0)["reached"]
    assert harness.result("P", "t", goal="g", rows=[], ratios=[good, bad])["reached"] is False
    assert harness.result("P", "t", goal="g", rows=[], ratios=[harness.ratio("d", 3.0)])["reached"] is None


def test_json_is_whole_or_absent(tmp_path):
    """Catches a file that is cut by a failure, and NaN in JSON."""
    path = tmp_path / "deep" / "x.json"
    harness.write_json(path, {"a": 1.23456789, "b": [True, None, "c"]})
    assert json.loads(path.read_text()) == {"a": 1.23457, "b": [True, None, "c"]}
    with pytest.raises(ValueError):
        harness.write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text())["a"] == 1.23457
    assert [file.name for file in path.parent.iterdir()] == ["x.json"]


def test_the_machine_has_no_name():
    """Catches host names, users and paths in committed results."""
    said = json.dumps(harness.machine())
    assert platform.node() not in said and str(pathlib.Path.home()) not in said and str(ROOT) not in said
    assert getpass.getuser() == "root" or getpass.getuser() not in said
    assert {"processor", "cores", "memory_gib", "jax", "python", "backend"} <= json.loads(said).keys()


@pytest.mark.full
def test_hand_written_loop_is_the_same_mathematics():
    """Catches a baseline that does less: its losses are ours, up to the order of the minibatches."""
    import jax
    import numpy as np

    work = workload("mlp", cohort_size=64, num_clients=64)
    loop = baselines.hand_written(baselines.equal_client(work), lanes=4, devices=2, num_rounds=4)
    ids = baselines.cohorts(work, 4)
    _, theirs = loop(jax.random.key(0), work.params, baselines.dense_clients(work), ids)
    _, ours = rounds_program(algorithm(work), work.params, work.data, 4)()
    np.testing.assert_allclose(ours, theirs, rtol=0.05)
    assert theirs[-1] < 0.8 * theirs[0]


@pytest.mark.parametrize("name, d", [("tiny", 1386), ("logistic", 48_670), ("large_mlp", 209_662)])
def test_models_have_the_sizes_that_are_claimed(name, d):
    """Catches a workload that is smaller than its paragraph says."""
    assert workload(name, cohort_size=2, num_clients=2).num_params == d


@pytest.mark.parametrize("name, d", [("femnist_cnn", 1_206_590), ("cifar_cnn", 1_626_442)])
def test_networks_have_the_sizes_that_are_claimed(name, d):
    """The same for the convolutional ones, without making their pixels."""
    import jax

    model, macs, input_macs = WORKLOADS[name][1]()
    assert sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: model.init(jax.random.key(0))[0]))) == d
    assert 0 < input_macs < macs


@pytest.mark.full
@pytest.mark.parametrize("name", ["softmax", "mlp", "cnn_12k", "femnist_cnn", "cifar_cnn", "lstm"])
def test_rivals_train_our_models(name, tmp_path):
    """Catches a rival with another model, by its logits at the initial weights; and weights lost on the way."""
    import jax
    import numpy as np

    work = workload(name, cohort_size=1, num_clients=1)
    beside.write_arrays(tmp_path / "job.npz", work)
    params, held = common.load(tmp_path / "job.npz")
    model, *_ = WORKLOADS[name][1]()
    ours, _ = model.apply(work.params, (), work.arrays[0], None, False)
    with jax.numpy_rank_promotion("allow"):  # as users write
        theirs = jax_models.of(str(held["kind"]))(jax.tree.map(jax.numpy.asarray, params), held["x"][0])
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    loss = work.loss_fn(work.params, {"x": work.arrays[0], "y": work.arrays[1]}, None)["loss"].mean()
    assert common.mean_loss(lambda x: ours, held["x"][0], held["y"][0]) == pytest.approx(float(loss), abs=1e-4)


def test_front_page_has_every_framework(tmp_path):
    """Catches a table without a rival that was measured, a slower one that is not bold, and clients left unsaid."""
    job, few = "MLP, 1,000 clients", "MLP, 100 clients"
    rows = [harness.row(f"{job}: {name}", harness.Timing(2.0, (0.5,)), "clients/s", per=1000)
            for name in ("fedjax_sim.run", "best hand-written loop", "DrJAX")]  # fmt: skip
    rows[-1]["version"] = "DrJAX 1.0 on jax 1.0"
    speeds = {f"{job}: speed against the best hand-written loop": 1.5, f"{job}: speed against DrJAX": 0.5,
              f"{few}: speed against Flower": 9.0}  # fmt: skip
    ratios = [harness.ratio(*speed) for speed in speeds.items()]
    found = harness.result("R", "t", goal="g", rows=rows, ratios=ratios) | {"machine": {"cores": 2}}
    harness.write_json(tmp_path / "rivals.json", found)
    head, _, line = speed_table(tmp_path).splitlines()
    assert "DrJAX 1.0" in head
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [job, "2,000", "1.50×", "", "", "**0.500×**", "9.00× (100 clients)",
                     "2.00 / 2.00 / – / – / 2.00"]  # fmt: skip


@pytest.mark.full
def test_workers_answer_and_fail_aloud():
    """Catches a worker that swallows its failure."""
    with processes.workers(it={"function": json_machine, "devices": 1}) as made:
        assert made["it"].call("cores") == 1
        with pytest.raises(RuntimeError, match="ended with code"):
            made["it"].call("nothing")


def json_machine() -> dict:
    """For the test's worker."""
    import jax

    return {"cores": lambda: len(jax.devices())}


@pytest.mark.full
def test_two_benchmarks_run(tmp_path):
    """Catches a benchmark that no longer fits the library; one in this process, one from the command line."""
    found = harness.load("p6").measure(quick=True)
    assert found["id"] == "P6" and all({"name", "unit", "value"} <= row.keys() for row in found["rows"])
    command = [sys.executable, "-m", "experiments.benchmarks", "p14", "--quick", "--out", str(tmp_path)]
    quickly = os.environ | {"XLA_FLAGS": " ".join(f"--{name}={value}" for name, value in compiler.known().items())}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=quickly)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "p14_million.json").read_text())
    assert written["quick"] and written["machine"]["cores"] >= 1 and (tmp_path / "p14_million.png").stat().st_size


def test_readme_is_written_from_the_results(tmp_path):
    """Catches figures that drifted from the JSON."""
    results = report.HERE / "results"
    if not any(results.glob("p*.json")):
        pytest.skip("no committed results yet")
    report.write_readme(results, tmp_path / "README.md")
    assert (tmp_path / "README.md").read_text() == (report.HERE / "README.md").read_text()


def test_a_cards_result_has_a_section(tmp_path):
    """Catches a measurement that nobody reads, and a card that is not named."""
    (ratio,) = ratios = [harness.ratio("MLP: speed against the best loop", 0.9, at_least=0.95)]
    found = harness.result("Accelerator", "cohorts of one H100", goal="0.95", rows=[], ratios=ratios)
    found |= {"benchmark_seconds": 1.0, "machine": harness.machine() | {"backend": "gpu", "devices": ["NVIDIA H100"]}}
    harness.write_json(tmp_path / "on_nvidia_h100.json", found)
    report.write_readme(tmp_path, tmp_path / "README.md")
    text = (tmp_path / "README.md").read_text()
    assert f"| Accelerator | {ratio['name']} |" in text and "on 1 NVIDIA H100, Python" in text


@pytest.mark.parametrize("arguments, words", [([], "or --accelerator alone"), (["p0", "--accelerator"], "alone")])
def test_an_accelerator_has_no_names(arguments, words, capsys):
    """Catches a benchmark of a CPU that is taken for one of the card."""
    with pytest.raises(SystemExit):
        main(arguments)
    assert words in capsys.readouterr().err
    if not arguments:
        with pytest.raises(SystemExit, match="JAX sees no accelerator"):
            main(["--accelerator"])


def test_numbers_for_readers():
    """Catches digits that nobody measured."""
    shown = [report.number(x) for x in (0.00123456, 1.0449, 12.345, 12345.6, 3, "x")]
    assert shown == ["0.00123", "1.04", "12.3", "12,300", "3.00", "x"]
