"""Runs the tests whose imports reach what a change touches: `python -m tests.touched [--since REF] [pytest options]`.

A change is what the working tree and the commits since `REF` (`main`) have over the commit where they parted.
Imports are read from the sources. A name that comes through a subpackage leads to the module that defines it, and a
config leads to the parts that its test names.
"""

from __future__ import annotations

import argparse
import ast
import collections
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "fedjax_sim"
REGISTRY = "fedjax_sim.config.registry"  # imports parts by names that a config has
Use = tuple[str, str | None]  # a module, and a name in it or None for all of it


class Source:
    """What one Python file reads, names and defines.

    Attributes:
        path: from the root of the checkout.
        bound: what each name stands for that the file imports from a module.
        uses: modules and names of modules that the file reads.
        strings: its string constants.
        functions: its public functions.
    """

    def __init__(self, path: pathlib.Path, text: str, modules: Iterable[str], packages: Iterable[str]):
        nodes = list(ast.walk(ast.parse(text)))
        self.path, self.bound, self.uses = path, {}, set()
        self.strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        self.functions = {name for name in functions if not name.startswith("_")}
        for node in nodes:
            if isinstance(node, ast.Import):
                self.uses |= {(alias.name, None) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.bound |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        # Of a subpackage count the attributes that are read, or all where it stands by itself.
        subpackages = {name: ".".join(use) for name, use in self.bound.items() if ".".join(use) in packages}
        self.uses |= {use for name, use in self.bound.items() if name not in subpackages}
        attributes = {id(node.value): node.attr for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            if isinstance(node, ast.Name) and node.id in subpackages:
                self.uses.add((subpackages[node.id], attributes.get(id(node))))
        if self.is_test:  # modules that it starts as processes
            self.uses |= {(string, None) for string in self.strings if string in modules}

    @property
    def is_test(self) -> bool:
        return self.path.name.startswith("test_")


def module_of(path: pathlib.Path) -> str:
    """The dotted name of a file."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(root: pathlib.Path = ROOT) -> dict[str, Source]:
    """The sources of the package and of its tests, by the names of their modules."""
    paths = [path.relative_to(root) for folder in (PACKAGE, "tests") for path in sorted((root / folder).rglob("*.py"))]
    modules = {module_of(path): path for path in paths}
    packages = {name for name, path in modules.items() if path.name == "__init__.py"}
    return {name: Source(path, (root / path).read_text(), modules, packages) for name, path in modules.items()}


def _next(use: Use, known: dict[str, Source]) -> set[Use]:
    """What a module, or one name of a subpackage, leads to."""
    (module, name), source = use, known[use[0]]
    if source.path.name != "__init__.py":
        return source.uses
    if name is None:
        return source.uses | set(source.bound.values())
    if f"{module}.{name}" in known:
        return {(f"{module}.{name}", None)}
    return {source.bound[name]} if name in source.bound else source.uses


def leading_to(modules: Iterable[str], known: dict[str, Source]) -> set[Use]:
    """The modules, and names of subpackages, from which imports lead to one of `modules`."""
    before, seen = collections.defaultdict(set), set()
    waiting: list[Use] = [(name, None) for name in known]
    while waiting:
        use = waiting.pop()
        if use in seen or use[0] not in known:
            continue
        seen.add(use)
        for after in _next(use, known):
            before[after].add(use)
            waiting.append(after)
    found, waiting = set(), [use for use in seen if use[0] in set(modules)]
    while waiting:
        use = waiting.pop()
        if use not in found:
            found.add(use)
            waiting += before[use]
    return found


def reaching(paths: Iterable[pathlib.Path], known: dict[str, Source]) -> list[pathlib.Path]:
    """The test files that reach one of `paths`.

    They do by their imports, by those of a conftest.py above them, and through the registry by the name of a part. A
    file that is no Python source is reached by tests that have its name, its path or its first folder as a string.
    """
    paths = set(paths)
    touched = leading_to({module_of(path) for path in paths}, known)
    configs = leading_to({REGISTRY}, known)
    parts = {name for module, _ in touched if module.startswith(PACKAGE) for name in known[module].functions}
    words = {word for path in paths if path.suffix != ".py" for word in (path.name, str(path), path.parts[0])}
    found = []
    for module, source in known.items():
        if not source.is_test:
            continue
        conftests = {(module_of(folder / "conftest.py"), None) for folder in source.path.parents}
        names_a_part = (module, None) in configs and any(
            parts.intersection(re.findall(r"\w+", string)) for string in source.strings
        )
        if names_a_part or touched & {(module, None), *conftests} or words & source.strings:
            found.append(source.path)
    return found


def changed(since: str, root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """Files of the working tree that differ from where it and `since` parted, and new ones."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout

    base = git("merge-base", since, "HEAD").strip()
    lines = git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")
    return [pathlib.Path(line) for line in lines.splitlines()]


def main() -> int:
    """Prints the files of tests and runs them. What is no option of this command is one of pytest."""
    parser = argparse.ArgumentParser(prog="python -m tests.touched", description=__doc__, allow_abbrev=False)
    parser.add_argument("--since", default="main", help="a commit or branch; without it `main`")
    options, rest = parser.parse_known_args()
    files = [str(path) for path in reaching(changed(options.since), sources())]
    print("\n".join(files) or f"no test reaches what changed since {options.since}", flush=True)
    return int(pytest.main([*rest, *files])) if files else 0


if __name__ == "__main__":
    sys.exit(main())
