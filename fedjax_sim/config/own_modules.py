"""Takes digests of a user's own modules and of the modules that they import, so that a run does not go on with others.

Sources are read and not run.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from fedjax_sim.files.regular_files import content_of

IMPORTERS = {"__import__", "import_module"}  # functions that import a module by its name
INSTALLED = {"site-packages", "dist-packages"}  # folders of packages that an installer wrote


def digests_of_modules(names: Iterable[str]) -> dict[str, str]:
    """Returns the SHA-256 of the files of modules, and of all modules of the user's that they import.

    Modules of Python, of this package and of installed packages are left out, unless one of `names` is in the package.
    Imports are found wherever they stand in a file, as statements and as calls of `importlib.import_module`; one whose
    name is computed when it runs is not found.

    Args:
      names: dotted names, such as "my_package.rules"; modules that cannot be found are left out.

    Returns: by the dotted names of the modules and of the packages around them, sorted.

    Guarantees: a module that is edited has another digest, at any depth of imports
    (tests/config/test_own_modules.py::test_every_import_counts).
    """
    names = list(names)
    own_packages = {name.partition(".")[0] for name in names}
    digests: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in digests or not _is_users(name, own_packages):
            continue
        spec = _spec(name)
        if spec is None:
            continue
        # Python runs the packages around a module before the module.
        waiting += [name.rpartition(".")[0]] if "." in name else []
        if spec.origin is None or not Path(spec.origin).is_file():
            continue  # a package without a file of its own
        content = content_of(spec.origin)
        digests[name] = f"SHA-256 {hashlib.sha256(content).hexdigest()}"
        if spec.origin.endswith(".py"):
            is_package = spec.submodule_search_locations is not None
            waiting += _imported(content, name if is_package else name.rpartition(".")[0])
    return dict(sorted(digests.items()))


def _is_users(name: str, own_packages: set[str]) -> bool:
    """Returns whether a module is of the user's; `own_packages` are of the user's wherever they are installed."""
    top = name.partition(".")[0]
    if top in own_packages:
        return True
    if not top or top == "fedjax_sim" or top in sys.stdlib_module_names:
        return False
    spec = _spec(top)
    if spec is None:
        return False
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
    return not any(INSTALLED & set(Path(place).parts) for place in places)


def _spec(name: str) -> ModuleSpec | None:
    """Returns where a module is; None if it cannot be found, as a name that `from ... import` takes from a module.

    `importlib.util.find_spec` would run the packages around a module to find it.

    Args:
      name: the module's dotted name, such as "my_package.rules".
    """
    top, *inner = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    inner_name = top
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        inner_name = f"{inner_name}.{part}"
        spec = PathFinder.find_spec(inner_name, spec.submodule_search_locations)
    return spec


def _imported(source: bytes, package: str) -> Iterator[str]:
    """Yields the dotted names that a file imports, each of which may be a module or a name inside of one.

    Args:
      source: the file's text, as bytes.
      package: the dotted name of the package that relative imports start from; "" for a module outside of packages.
    """
    try:
        nodes = ast.walk(ast.parse(source))
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        return  # it cannot be imported either
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            try:
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:
                continue  # it goes beyond the top package
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in IMPORTERS:
            match node.args:
                case [ast.Constant(value=str(name))] | [ast.Constant(value=str(name)), ast.Name()]:
                    start = package  # `__package__` or `__name__`
                case [ast.Constant(value=str(name)), ast.Constant(value=str(start)), *_]:
                    pass
                case _:
                    continue
            with contextlib.suppress(ImportError):  # it is relative to no package
                yield importlib.util.resolve_name(name, start)
