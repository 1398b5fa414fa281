"""The first pass: what a user states, layer over layer, whatever the tables mean."""

from __future__ import annotations

import pytest

from fedjax_sim.config.read import read
from fedjax_sim.config.value_kinds import ConfigError

FILE = "[anything]\nkept = 1\nreplaced = 2\n[gone.inner]\nx = 3\n[changed]\nold = 4\n"


def test_layers(tmp_path):
    """`--set` is over `--unset`, and both are over the file. Catches a table that is taken out after it was stated."""
    path = tmp_path / "config.toml"
    path.write_text(FILE)
    document = read(path, ["anything.replaced=text", "changed.new = [1, 2]"], ["gone", "changed"])
    assert document.tables == {"anything": {"kept": 1, "replaced": "text"}, "changed": {"new": [1, 2]}}
    assert document.folder == tmp_path and document.set_here == {"anything.replaced", "changed.new"}
    assert document.problems == []


def test_problems_of_both_layers():
    """Fault: a wrong `--set` that hides a wrong `--unset`, or the other way round."""
    first, second = read(None, ["no_value"], ["nothing"]).problems
    assert first.startswith("--unset nothing:") and second.startswith("--set:")
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        read("nowhere.toml", ["no_value"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (None, "run.rounds=5"),
            r"overrides: expected a list of texts, such as \['run.rounds=5'\], got 'run.rounds=5'",
        ),
        ((None, [5]), "overrides: expected a list of texts"),
        ((None, None), "overrides: expected a list of texts"),
        ((None, (), "downlink"), r"without: expected a list of texts, such as \['downlink'\]"),
        (({"run": {}},), "path: expected a path, an example's name or None, got"),
    ],
)
def test_arguments_of_another_type(arguments, words):
    """Fault: a problem for each letter of a text, or an error of Python."""
    with pytest.raises(ConfigError, match=words):
        read(*arguments)


def test_texts_may_come_one_by_one():
    """Catches an iterator that is read twice."""
    assert read(None, iter(["run.rounds=5"]), iter([])).tables == {"run": {"rounds": 5}}
