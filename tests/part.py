"""Every law on one part: `python -m tests.part NAME [--full] [pytest options]`.

It says what a new part still lacks, and runs the tests that have the part for a parameter, and those with the mark
`every_row`: by default those that `pytest` runs, with `--full` also those that wait for `-m full`. Other laws that look
at many rows in one test are not among them; `docs/extend.md` names these.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import pathlib
import sys
from collections.abc import Iterator

import pytest

from tests import conftest  # sets JAX up, before anything imports it
from tests.laws import cases

FOLDER = conftest.ROOT / "tests"
# Laws over rows of these subpackages that stand outside of tests/laws.
ELSEWHERE = {
    "network": ("config/test_devices.py",),
    "sampling": ("config/test_document.py",),
    "aggregation": ("config/test_document.py", "population/datasets/test_industrial.py"),
    "transform": ("config/test_document.py",),
    "algorithms": (
        "algorithms/analytics/test_statistic.py",
        "algorithms/hierarchy/test_hierfavg.py",
        "config/test_document.py",
        "config/test_one_word.py",
        "experiment/test_summary.py",
    ),
}


def homes(name: str) -> list[str]:
    """The subpackages that publish a part of this name."""
    return [subpackage for subpackage in cases.SUBPACKAGES if name in cases.members(subpackage)]


def lacking(name: str, subpackage: str) -> Iterator[str]:
    """What a part of this subpackage still needs, one line each."""
    if name not in cases.CASES[subpackage]:
        yield f'a row: add "{name}": Row(lambda: ...) to CASES["{subpackage}"] in tests/laws/cases.py'
    if "Guarantees:" not in (getattr(cases.SUBPACKAGES[subpackage], name).__doc__ or ""):
        yield "`Guarantees:` in its docstring, which name the tests that show them"
    if not any(uses(path, name) for where in (subpackage, "oracles") for path in (FOLDER / where).rglob("test_*.py")):
        yield f"a test of what it computes, in tests/{subpackage}"


def uses(path: pathlib.Path, name: str) -> bool:
    """Whether the code of a file has this name, as a variable, an attribute or an import; words in a text are none."""
    text = path.read_text(encoding="utf-8")
    if name not in text:  # reading the tree of each file takes seconds
        return False
    names = {ast.Name: "id", ast.Attribute: "attr", ast.alias: "name"}
    return any(getattr(x, names.get(type(x), ""), None) == name for x in ast.walk(ast.parse(text)))


class OnePart:
    """A plugin of pytest that keeps the tests about this part, and counts those that have it for a parameter.

    A parameter that is a tuple has the parts in it.
    """

    def __init__(self, name: str) -> None:
        self.name, self.known, self.kept = name, 0, 0

    def _has(self, item: pytest.Item) -> bool:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        words = (word for value in values for word in (value if isinstance(value, tuple) else (value,)))
        return any(isinstance(word, str) and word == self.name for word in words)

    def _is_kept(self, item: pytest.Item) -> bool:
        return self._has(item) or item.get_closest_marker("every_row") is not None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
        self.known = sum(map(self._has, items))
        yield
        others = [item for item in items if not self._is_kept(item)]
        items[:] = [item for item in items if self._is_kept(item)]
        config.hook.pytest_deselected(items=others)
        self.kept = sum(map(self._has, items))


def files(subpackages: list[str]) -> list[pathlib.Path]:
    """The files of laws that parts of these subpackages meet."""
    elsewhere = {FOLDER / path for subpackage in subpackages for path in ELSEWHERE.get(subpackage, ())}
    return [*sorted((FOLDER / "laws").glob("test_*.py")), *sorted(elsewhere)]


def main(arguments: list[str] | None = None) -> int:
    """Prints what the part lacks, runs its laws, and returns 0 if it has a row and nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.part", description=__doc__, allow_abbrev=False)
    parser.add_argument("name", help="a public part, such as `krum`")
    parser.add_argument("--full", action="store_true", help="the laws that wait for `pytest -m full`, too")
    options, rest = parser.parse_known_args(arguments)
    found = homes(options.name)
    if not found:
        known = sorted({name for subpackage in cases.SUBPACKAGES for name in cases.members(subpackage)})
        near = difflib.get_close_matches(options.name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(f"expected a part that a subpackage publishes, got {options.name!r}.{hint}")
        print("A new part needs an import in the `__init__.py` of its subpackage, and a type that it returns.")
        return 2
    for home in found:
        for line in lacking(options.name, home):
            print(f"{home}.{options.name} lacks {line}", flush=True)
    with_row = [home for home in found if options.name in cases.CASES[home]]
    if not with_row:
        return 1
    plugin = OnePart(options.name)
    selected = ["-m", ""] if options.full else []
    status = pytest.main(["-q", *selected, *rest, *map(str, files(with_row))], plugins=[plugin])
    waiting = plugin.known - plugin.kept
    print(f"{plugin.kept} tests have {options.name}" + (f"; {waiting} more with --full" if waiting else ""))
    return int(status) or int(with_row != found)


if __name__ == "__main__":
    sys.exit(main())
