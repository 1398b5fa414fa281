"""README and docs/: their Python runs as printed, their command lines parse, their tables are what the files say."""

import pathlib
import pickle
import re
import shlex

import jax
import numpy as np
import pytest
import typer

from experiments.front_page import participation_figure, with_speeds
from fedjax_sim import network, population, theory
from fedjax_sim.command.app import app
from fedjax_sim.command.study import load_study
from fedjax_sim.config.document import load
from fedjax_sim.sweeps.config import load_sweep
from tests.test_docs import PAGES, defined, named_tests

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "your_own_data.md"
COMMANDS = ROOT / "docs" / "command_line.md"


def blocks(path: pathlib.Path, language: str) -> list[str]:
    """The fenced blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.S)


def run_blocks(path: pathlib.Path, found: list[str]) -> dict:
    """Runs the blocks in order; returns their names."""
    names = {"__name__": path.stem}
    for i, block in enumerate(found, 1):
        exec(compile(block, f"{path.name}, block {i}", "exec"), names)
    return names


def test_readme_python_runs():
    """Fault: an example that no longer fits the library, or does not learn."""
    (block,) = blocks(README, "python")
    names = run_blocks(README, [block.replace("100_000", "2_000").replace("1_000", "200")])
    assert names["history"].summary["test_accuracy"] > 0.8


def test_readme_is_short():
    """Fault: a page for a first look that holds what belongs to docs/, or that lacks one of the two commands."""
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
    run, test = blocks(README, "bash")
    assert run.strip().endswith("fedjax-sim run") and "-m pytest" in test


@pytest.mark.full
def test_your_own_data(tmp_path, monkeypatch):
    """Fault: a line of the guide that no longer fits the library, rows that it loses on their way to a run."""
    monkeypatch.chdir(tmp_path)
    (table,) = blocks(GUIDE, "csv")
    pathlib.Path("patients.csv").write_text(table)
    names = run_blocks(GUIDE, blocks(GUIDE, "python"))
    assert names["train"].size == 3 and names["partition"].sizes.tolist() == [4, 4, 2]
    record = names["history"].records[-1]
    assert record["round"] == 20 and record["test_loss"] < 0.2
    jax.eval_shape(names["other"].init, names["key"])  # the other adapter
    read = population.native(directory="patients")
    assert read.train.size == 3 and read.held_out.size == names["data"].held_out.size == 3
    np.testing.assert_array_equal(read.train.examples["x"], names["data"].train.examples["x"])


def test_formats_that_are_read(tmp_path, monkeypatch):
    """Fault: a format that the page says is read, by a part or with a test that is not there; a conversion that gives
    another table."""
    page = GUIDE.read_text(encoding="utf-8")
    table = re.findall(r"^\| .* \| `(\w+)\.(\w+)`.* \| (\S+) \|$", page, re.M)
    assert len(table) > 12
    for subpackage, part, test in table:
        assert hasattr({"network": network, "population": population}[subpackage], part), part
        ((file, name),) = named_tests(test)
        assert name in defined(file), test
    monkeypatch.chdir(tmp_path)
    recorded = {1: {"active": [0, 7200], "inactive": [3600, 9000]}, 2: {"active": [1800], "inactive": [5400]}}
    pathlib.Path("client_behave_trace").write_bytes(pickle.dumps(recorded))
    run_blocks(GUIDE, blocks(GUIDE, "py"))
    layouts = ROOT / "tests" / "network" / "layouts"
    assert pathlib.Path("behaviour.csv").read_text() == (layouts / "fedscale_behaviour.csv").read_text()
    with pytest.raises(ValueError, match="looks like a pickle"):
        network.trace("client_behave_trace")


def parsed(words: list[str]) -> dict:
    """A command's arguments as the command line reads them; what it would load is loaded, nothing runs."""
    command = typer.main.get_command(app).commands[words[0]]
    given = command.make_context(words[0], words[1:]).params
    config, settings = given.get("config"), given.get("settings") or []
    if words[0] == "launch":
        return parsed(list(given["arguments"]))
    if words[0] == "study":
        given["name"] is None or load_study(given["name"], settings)
    elif words[0] == "sweep":
        given.get("resume") or load_sweep(config, settings, given.get("without") or [])  # or it reads its folder's
    elif config or settings:
        given["rounds_asked"] = load(config, settings, given.get("without") or []).resolved()["run"]["rounds"]
    return given


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_command_lines(path):
    """Fault: an option, an example or a study that is gone; a --resume of a run that has all of its rounds."""
    lines = "".join(blocks(path, "bash")).replace("\\\n", " ").splitlines()
    started, count = {}, 0
    for words in (shlex.split(line, comments=True) for line in lines):
        if words[:1] != ["fedjax-sim"] or any(word.endswith(".toml") for word in words):
            continue
        given, count = parsed(words[1:]), count + 1
        if given.get("resume") and words[1] not in ("study", "sweep"):  # these have no rounds of their own
            assert given["rounds_asked"] > started[given["out"]], words
        started[given.get("out")] = given.get("rounds_asked", 100)
    assert count >= {COMMANDS: 30, GUIDE: 1}.get(path, 0)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_configs(path, tmp_path):
    """Fault: a config on a page that is refused."""
    for i, block in enumerate(blocks(path, "toml")):
        file = tmp_path / f"{i}.toml"
        file.write_text(block)
        (load_sweep if "[sweep" in block else load)(file)


def test_speeds_are_the_results():
    """Fault: a speed in README that nobody measured, or one that is out of date."""
    text = README.read_text(encoding="utf-8")
    assert with_speeds(text) == text, "python -m experiments.front_page writes these numbers"
    assert with_speeds(text.replace("×", "0×")) == text


def test_lines_of_the_figure():
    """Fault: a line in README's figure that is not the theory of its points."""
    rows = [
        {"part": part, "population_size": size, "cohort_size": m, "measured": value, "low": value, "high": value}
        | {"predicted": value}
        for part, size in (("variance", 10), ("variance", 1000), ("final loss", 100))
        for m in (1, size // 2, size)
        for value in [theory.cohort_mean_variance(3.0, size, m)]
    ]
    num_checked = 0
    for axes in participation_figure(rows).axes:
        for line, row in ((line, row) for line in axes.lines for row in rows if len(line.get_xdata()) == 200):
            size = row["population_size"]
            if line.get_linestyle() != ":" and np.isclose(line.get_xdata()[0], 1 / size) and row["measured"]:
                at = np.interp(row["cohort_size"] / size, line.get_xdata(), line.get_ydata())
                np.testing.assert_allclose(at, row["predicted"], rtol=5e-3)
                num_checked += 1
    assert num_checked == 6


def test_every_row_of_the_promises_names_its_test():
    """Fault: a promise that nobody checks, or that does not say where it ends. That the tests exist:
    tests/test_docs.py::test_pages_name_what_is_there."""
    text = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    rows = [re.split(r" \| ", line.strip("| \n")) for line in re.findall(r"^\| .*\|$", text, re.M)]
    promises = [row for row in rows if row[0] != "promise" and set(row[0]) != {"-"}]
    assert len(promises) > 30
    for row in promises:
        assert len(row) in (3, 4) and len(named_tests(row[-1])) > 0, row
