"""`fedjax-sim study`: what a person types, sees and finds in the folder."""

import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedjax_sim.command.app import app
from fedjax_sim.command.study import _show, load_study
from fedjax_sim.config.document import ConfigError
from fedjax_sim.config.registry import studies
from fedjax_sim.study.findings import Findings, measured
from fedjax_sim.study.page import table

STUDIES = Path(__file__).parents[2] / "experiments" / "studies"
TINY = ["num_clients=10", "neighbours=4", "dropouts=[0.05]", "num_rounds=250"]


def call(*arguments):
    return CliRunner().invoke(app, ["study", *map(str, arguments)])


@pytest.mark.full  # by default tests/study/test_kept.py calls one twice
def test_a_study_from_the_command_line(tmp_path):
    """Fault: an answer without its table, verdict, page or figure; a folder that is written over."""
    settings = [word for setting in TINY for word in ("--set", setting)]
    result = call("dropout", *settings, "--out", tmp_path / "found")
    assert result.exit_code == 0, result.output
    assert "predictions lie within" in result.output and "How often" in result.output
    names = {path.name for path in (tmp_path / "found").iterdir()} - {".lock"}
    assert names == {"findings.json", "table.csv", "figure.png", "figure.svg", "report.html", "study.json", "kept"}
    assert json.loads((tmp_path / "found" / "findings.json").read_text())["options"]["dropouts"] == [0.05]
    again = call("dropout", *settings, "--out", tmp_path / "found")
    assert again.exit_code == 2 and "--out: expected" in again.output and "Add --resume" in again.output


def test_a_narrow_terminal_cuts_no_number(monkeypatch, capsys):
    """Fault: the end of a number, of a word or of the page's path that an ellipsis or a line break takes away."""
    monkeypatch.setenv("COLUMNS", "40")
    conditions = [{"population_size": size, "estimator": f"mean by examples of {size}"} for size in (1_000_000, 7)]
    found = [measured(one, "variance", [1.23e-4, 4.56e-5], 3.21e-4) for one in conditions]
    _show(Findings(name="narrow", question="Is it cut?", comparisons=found, figure=lambda: None, options={}))
    printed = capsys.readouterr().out
    _, rows = table(Findings(name="narrow", question="", comparisons=found, figure=lambda: None, options={}))
    assert all(cell in printed for row in rows for cell in row)


def test_the_list():
    """Fault: a study that nobody finds, an option that is not shown."""
    result = call()
    assert result.exit_code == 0
    for name, part in studies().items():
        assert name.replace("_", "-") in result.output
        assert not part.others, f"{name}: options that a config cannot give"
        assert all(option in result.output for option in part.options)
        assert load_study(name.replace("_", "-"), []) == load_study(name, [])


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_file_loads(path):
    """Fault: a file in experiments/studies with an option that is gone."""
    part, options = load_study(str(path), [])
    assert part.name == path.stem and options


def test_every_study_has_a_file():
    """Fault: a study without an example to copy."""
    assert {path.stem for path in STUDIES.glob("*.toml")} == set(studies())


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["particpation"], "study.name: expected one of"),
        (["participation", "--set", "seeed=3"], "study.seeed: expected one of"),
        (["participation", "--set", "seed=yes"], "study.seed: expected an integer"),
        (["participation", "--set", "num_rounds=nan"], "study.num_rounds: expected an integer"),
        (["participation", "--set", "num_rounds=7"], "num_rounds: expected"),
        (["nowhere.toml"], "nowhere.toml: expected a TOML file"),
    ],
)
def test_wrong_input(arguments, words):
    """Fault: a typing error that runs the study with its defaults, or ends in a traceback."""
    result = call(*arguments)
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output


@pytest.mark.parametrize("error", [FloatingPointError, OverflowError])
def test_numbers_that_run_away(monkeypatch, error):
    """Fault: a traceback where the study says what to lower."""

    def diverges(**options):
        raise error("Lower the step.")

    monkeypatch.setattr(importlib.import_module("fedjax_sim.study.drift.question"), "drift", diverges)
    result = call("drift")
    assert result.exit_code == 1 and f"{error.__name__}: Lower the step." in result.output


_PARTS = sorted(studies().items())
_LISTS = [(name, option) for name, part in _PARTS for option, (_, x) in part.options.items() if type(x) is list]


@pytest.mark.parametrize(("name", "option"), _LISTS)
def test_one_number_for_a_list(name, option):
    """Fault: "object of type 'int' has no len()"."""
    part = studies()[name]
    with pytest.raises(TypeError, match=f"{option}: expected a list"):
        getattr(importlib.import_module(part.module), part.name)(**{option: 3})


def test_a_file_of_something_else(tmp_path):
    """Fault: a run's config taken for a study's."""
    path = tmp_path / "run.toml"
    path.write_text('seed = 1\n[data]\nname = "digits"\n')
    with pytest.raises(ConfigError, match=r"expected one table \[study\]"):
        load_study(str(path), [])
