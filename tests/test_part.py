"""What `python -m tests.part` says of a part, and which tests it runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import part
from tests.laws import cases
from tests.laws.row import Row


def test_what_a_new_part_lacks(monkeypatch):
    """Faults: a part without a row, without guarantees or without a test of its own, of which nothing is said."""
    home = SimpleNamespace(unheard_of=lambda: None)
    monkeypatch.setitem(cases.SUBPACKAGES, "transform", home)
    words = [line.split()[:2] for line in part.lacking("unheard_of", "transform")]
    assert words == [["a", "row:"], ["`Guarantees:`", "in"], ["a", "test"]]
    monkeypatch.setitem(cases.CASES["transform"], "unheard_of", Row(lambda: None))
    home.unheard_of.__doc__ = "Nothing.\n\nGuarantees: none."
    assert len(list(part.lacking("unheard_of", "transform"))) == 1


def test_the_packages_own_parts_lack_nothing():
    """Catches a check that finds fault with every part."""
    for name, subpackage in (("krum", "aggregation"), ("top_k", "transform"), ("scaffold", "algorithms")):
        assert subpackage in part.homes(name) and not list(part.lacking(name, subpackage))
    assert part.homes("work") == [] == part.homes("unheard_of")


def test_a_name_that_is_no_part(capsys):
    """Fault: a typing error that passes for a part without a failing law."""
    assert part.main(["top_q"]) == 2
    assert "got 'top_q'. Did you mean 'top_k'?" in capsys.readouterr().out


def test_tests_of_one_part():
    """Faults: a test of another part, one whose name only begins alike, one without parameters; a law of every row that
    is left out."""

    def item(marks=(), **params):
        marked = {"get_closest_marker": lambda name: name if name in marks else None}
        return SimpleNamespace(callspec=SimpleNamespace(params=params), **marked)

    every = item(marks=["every_row"], subpackage="server")
    about = [item(name="krum"), item(kind="aggregation", name="krum"), every]
    others = [item(name="multi-krum"), item(kind="aggregation", name="mean"), item(number=3), item()]
    found, gone = [*others, *about], []
    plugin = part.OnePart("krum")
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: gone.extend(items)))
    steps = plugin.pytest_collection_modifyitems(config, found)
    next(steps)
    found.remove(about[1])  # as pytest takes out those that wait
    with pytest.raises(StopIteration):
        next(steps)
    assert (found, gone) == ([about[0], every], others) and (plugin.known, plugin.kept) == (2, 1)


def test_every_law_outside_of_the_folder_is_there():
    """Catches a file that was moved, and whose laws are left out without a word."""
    assert all((part.FOLDER / path).is_file() for paths in part.ELSEWHERE.values() for path in paths)
