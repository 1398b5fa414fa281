"""No row is left out: a law meets all of its rows, each in the default run or under `pytest -m full`."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import pathlib
import re
import sys
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


@pytest.mark.every_row
def test_a_part_stands_in_a_federation_or_in_a_recipe():
    """Fault: a client or a server that is lowered in no program."""
    for kind in ("client", "server"):
        assert cases.named(kind, lambda row: not row.alone and not row.in_recipes) == []


@pytest.mark.every_row
def test_recipes_have_the_parts_that_say_so():
    """Fault: a row that says that some algorithm has its client or server, where none has it and no law traces it."""
    parts = [(kind, name) for kind in ("client", "server") for name in cases.CASES[kind]]
    code = {inspect.unwrap(getattr(cases.SUBPACKAGES[kind], name)).__code__: (kind, name) for kind, name in parts}
    called = set()

    def note(frame, event, argument):
        called.add(code.get(frame.f_code))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for row in cases.CASES["algorithms"].values():
            row()
    finally:
        sys.setprofile(before)
    assert {part for part in parts if part in called} == {
        (kind, name) for kind, name in parts if cases.CASES[kind][name].in_recipes
    }


def places() -> dict[str, list[str]]:
    """Each fact, with the files and the functions of `cases.py` that its comment in `row.py` names."""
    found, comment = {}, ""
    for line in inspect.getsource(Row).splitlines():
        field = re.match(r"    (\w+): Annotated", line)
        if field is not None:
            found[field[1]] = re.findall(r"(?:\w+/)*\btest_\w+|\bdevice_rows\b|\bcases\.\w+", comment)
        comment = f"{comment} {line.strip(' #')}" if line.startswith("    # ") else ""
    return found


def reads(node: ast.AST, name: str) -> bool:
    """Whether the fact of this name is read there, of a `row` or of a row in a table of them."""

    def is_row(value):
        while isinstance(value, ast.Subscript):
            value = value.value
        return ast.unparse(value) in ("row", "cases.CASES", "MEMBERS")

    return any(isinstance(x, ast.Attribute) and x.attr == name and is_row(x.value) for x in ast.walk(node))


@functools.cache
def tree_of(place: str) -> ast.AST:
    tests = pathlib.Path(__file__).parents[1]
    path = tests / f"{place}.py" if "/" in place else tests / "laws" / f"{place}.py"
    return ast.parse(path.read_text(encoding="utf-8"))


def is_called(function: str) -> bool:
    """Whether a law calls this function of `cases.py`."""
    laws = (path.stem for path in pathlib.Path(__file__).parent.glob("test_*.py"))
    calls = (x.func for law in laws for x in ast.walk(tree_of(law)) if isinstance(x, ast.Call))
    return any(ast.unparse(x) == function for x in calls)


FACTS = [x.name for x in dataclasses.fields(Row) if x.name != "make"]


def unread(fact: str, place: str) -> bool:
    """Whether a place that the comment of a fact names does not read it."""
    if not place.startswith("cases."):
        return not reads(tree_of(place), fact)
    (function,) = (x for x in tree_of("cases").body if getattr(x, "name", "") == place.removeprefix("cases."))
    return not reads(function, fact) or not is_called(place)


def test_every_fact_is_read():
    """Fault: a fact that no law reads any more, or another law than its comment names."""
    named = places()
    assert [fact for fact in FACTS if not named[fact]] == [], "the comment names no file that reads it"
    assert [(fact, place) for fact in FACTS for place in named[fact] if unread(fact, place)] == []


def test_a_fact_of_something_else_is_none():
    """Guards the law above. Fault: an attribute of another object that counts as the fact of its name."""
    facts = ["row.clock", 'cases.CASES["algorithms"][name].clock']
    others = ["sampler.clock", "design.row.clock", "clock", 'cases.CASES["sampling"][name]().clock']
    assert [text for text in facts + others if reads(ast.parse(text), "clock")] == facts
    assert not is_called("cases.no_such_rows") and set(places()) == {"make", *FACTS}
