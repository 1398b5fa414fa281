"""No row is left out: a law meets all of its rows, each in the default run or under `pytest -m full`."""

from __future__ import annotations

import pytest

from tests.laws import cases, test_aggregators, test_compositions, test_members

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
