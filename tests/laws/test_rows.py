"""No row is left out: a law meets all of its rows, each in the default run or under `pytest -m full`."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import typing

import pytest

from tests.laws import cases, test_aggregators, test_compositions, test_members
from tests.laws.row import Row

TABLES = [*cases.CASES.values(), test_compositions.MEMBERS, test_compositions.NEEDS_A_BOUND, cases.SUBPACKAGES]
TABLES.append(test_members.RECIPES)


def parameters():
    """(test, its parameters) for each law over rows; a module's fixture counts as one."""
    for module in (test_members, test_compositions):
        for name, function in vars(module).items():
            for mark in getattr(function, "pytestmark", []) if name.startswith("test_") else []:
                if mark.name == "parametrize":
                    yield f"{module.__name__}.{name}", list(mark.args[1])
    yield test_aggregators.aggregator.name, list(test_aggregators.aggregator._fixture_function_marker.params)


def test_every_row_is_compiled_or_waits_for_full():
    """Fault: a row that neither `pytest` nor `pytest -m full` compiles."""
    found = dict(parameters())
    assert len(found) >= 11, "the walk itself is broken"
    for law, values in found.items():
        marked = {x.values[0]: {mark.name for mark in x.marks} for x in values if not isinstance(x, str)}
        names = [x for x in values if isinstance(x, str)]
        assert names, f"{law}: nothing in the default run"
        assert all(marks == {"full"} for marks in marked.values()), f"{law}: {marked}"
        assert {*names, *marked} in [set(table) for table in TABLES], f"{law}: rows are missing"


def test_rows_that_do_not_exist_are_seen():
    """Fault: a renamed row that leaves the default run without its family."""
    with pytest.raises(AssertionError):
        cases.rows(["one", "two"], ["three"])


def misplaced(row: Row, subpackage: str) -> list[str]:
    """The facts that a row states, and that no law reads in a row of its subpackage."""
    hints = typing.get_type_hints(Row, include_extras=True)
    usual = Row(row.make)
    stated = [x.name for x in dataclasses.fields(Row) if getattr(row, x.name) != getattr(usual, x.name)]
    return [name for name in stated if subpackage not in hints[name].__metadata__]


@pytest.mark.every_row
def test_a_fact_stands_where_a_law_reads_it():
    """Fault: a fact in a row of another subpackage, where it says something that nobody checks."""
    wrong = {
        f"{subpackage}.{name}": found
        for subpackage, rows in cases.CASES.items()
        for name, row in rows.items()
        if (found := misplaced(row, subpackage))
    }
    assert not wrong
    assert misplaced(Row(int, about_origin=True, compiled=True), "transform") == ["about_origin"]


def test_every_fact_is_read():
    """Fault: a field that no law reads any more."""
    tests = pathlib.Path(__file__).parents[1]
    without = ("row.py", pathlib.Path(__file__).name)
    text = "".join(path.read_text(encoding="utf-8") for path in tests.rglob("*.py") if path.name not in without)
    fields = [x.name for x in dataclasses.fields(Row)]
    assert not [name for name in fields if not re.search(rf"(\brow|\])\.{name}\b", text)]
    assert not re.search(r"(\brow|\])\.no_such_fact\b", text)
