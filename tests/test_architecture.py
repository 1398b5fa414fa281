"""Imports between subpackages, public names and bans, read from the source without running it."""

from __future__ import annotations

import ast
import functools
import importlib
import pathlib
import re
from collections.abc import Callable

from fedjax_sim.config.signatures import public_names

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fedjax_sim"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = (  # a subpackage imports from its own folder and from lower floors; those of `PARTS` not from each other
    ("text",),
    ("types",),
    ("validate",),
    ("files",),
    ("tree",),
    ("prng",),
    ("engine", "population", "models", "network"),
    ("sampling", "client", "transform", "aggregation", "server", "adversary"),
    ("round",),
    ("algorithms",),
    ("running",),
    ("report",),
    ("instruments",),
    ("config",),
    ("experiment",),
    ("sweeps",),
    ("study",),
    ("command",),
    ("__main__",),
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
PARTS = FLOORS[FLOOR["engine"]] + FLOORS[FLOOR["sampling"]]
WINGS = {"hierarchy": ("server", "split")}  # of `algorithms`: the wings that a wing may import; others import none
ROOTS = {"__init__", "__main__", "tree", "prng"}  # modules beside the subpackages
HOST = {"privacy", "theory", "metrics"}  # accounting, closed forms, measures: on text to prng, and on the design
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
BANNED_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BANNED_METHODS = {"extractall", "unsafe_load"}


def name_of(path: pathlib.Path) -> str:
    """Subpackage or top-level module of a file."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0] if parts != ("__init__",) else "fedjax_sim"


def label(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: pathlib.Path) -> list[ast.AST]:
    """All nodes of a file: each law looks at them."""
    return list(ast.walk(parsed(path)))


@functools.cache
def imports(path: pathlib.Path) -> list[tuple[str, ...]]:
    """Dotted names that a file imports, absolute; `from fedjax_sim import a` counts as fedjax_sim.a."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{label(path)}: relative import"
            base = tuple(node.module.split("."))
            found += [(*base, alias.name) if base == ("fedjax_sim",) else base for alias in node.names]
    return found


def check_each(check: Callable[[pathlib.Path], None]) -> None:
    """Runs a check on every file, then reports all that failed: one test for each law, not for each file."""
    wrong = []
    for path in FILES:
        try:
            check(path)
        except (AssertionError, AttributeError) as error:
            wrong.append(f"{label(path)}: {error}")
    assert not wrong, "\n".join(wrong)


def check_arrows(path: pathlib.Path) -> None:
    here = name_of(path)
    assert here in FLOOR or here in HOST or here == "fedjax_sim", "on no floor"
    for target in imports(path):
        if target[0] != "fedjax_sim":
            continue
        there = target[1] if len(target) > 1 else "fedjax_sim"
        if there in ("fedjax_sim", here) or here == "fedjax_sim":
            continue
        arrow = f"{here} -> {'.'.join(target)}"
        if here in HOST:
            design = target[:3] == ("fedjax_sim", "sampling", "design")
            measure = path.name == "evaluation.py" and there == "engine"  # of whole populations, on the device
            assert there in {"text", "types", "tree", "validate", "prng"} | HOST or design or measure, arrow
        elif there in HOST:
            assert FLOOR[here] > FLOOR["algorithms"], arrow
        else:
            assert FLOOR[there] < FLOOR[here], arrow
        assert here != "types", "types imports jax only"


def test_arrows_point_downward():
    """Catches a subpackage that imports its sibling, or anything from above, and a module outside of a subpackage."""
    check_each(check_arrows)
    assert {path.stem for path in PACKAGE.glob("*.py")} == ROOTS


def test_no_circles():
    """Catches two modules that import each other, also inside of functions, and longer circles.

    The package itself imports nothing before it is asked for it.
    """
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    left = {name: set() for name in modules if name != "fedjax_sim"}
    for name in left:
        for node in nodes(modules[name]):
            if isinstance(node, ast.ImportFrom):
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                left[name] |= inner & left.keys() or {node.module} & left.keys()
            elif isinstance(node, ast.Import):
                left[name] |= {alias.name for alias in node.names} & left.keys()
        left[name].discard(name)
    # What imports nothing that is left is in no circle.
    while free := {name for name, imported in left.items() if not imported & left.keys()}:
        left = {name: imported for name, imported in left.items() if name not in free}
    assert not left, {name: sorted(imported & left.keys()) for name, imported in left.items()}


def test_wings_stand_apart():
    """Catches a family of algorithms that imports another one, and one without a folder."""
    wings = {path.name for path in (PACKAGE / "algorithms").iterdir() if (path / "__init__.py").is_file()}
    assert {path.parent.name for path in (PACKAGE / "algorithms").rglob("*.py")} == {"algorithms", *wings}
    assert [path.name for path in (PACKAGE / "algorithms").glob("*.py")] == ["__init__.py"]
    for wing in wings:
        for path in (PACKAGE / "algorithms" / wing).glob("*.py"):
            there = {name[2] for name in imports(path) if name[:2] == ("fedjax_sim", "algorithms") and len(name) > 2}
            assert there <= {wing, *WINGS.get(wing, ())}, label(path)


def test_private_names_stay_at_home():
    """Catches a name with an underscore that another file imports, or reads off a module."""
    wrong = []
    for path in FILES:
        modules = set()
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("fedjax_sim"):
                wrong += [f"{label(path)}: {alias.name}" for alias in node.names if alias.name.startswith("_")]
                modules |= {alias.asname or alias.name for alias in node.names if alias.name.islower()}
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr) and isinstance(node.value, ast.Name):
                if node.value.id in modules and node.attr not in ("_replace", "_asdict", "_fields"):
                    wrong.append(f"{label(path)}:{node.lineno}: {node.value.id}.{node.attr}")
    assert not wrong, wrong


def narrows(node: ast.Assert) -> bool:
    """Whether an assert only tells type checkers what the code around it guarantees, with the reason.

    Users' arguments are refused by `validate`: an assert names no argument, and `python -O` leaves it out.
    """
    facts = node.test.values if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And) else [node.test]
    return node.msg is not None and all(
        isinstance(x, ast.Compare | ast.Call) and re.fullmatch(r".+ is not None|isinstance\(.+\)", ast.unparse(x))
        for x in facts
    )


def check_bans(path: pathlib.Path) -> None:
    for target in imports(path):
        assert target[0] not in BANNED_IMPORTS, target
    for node in nodes(path):
        assert not isinstance(node, ast.Assert) or narrows(node), f"{label(path)}:{node.lineno}: assert"
        if not isinstance(node, ast.Call):
            continue
        where, function = f"{label(path)}:{node.lineno}", node.func
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if isinstance(function, ast.Name):
            assert function.id not in BANNED_CALLS, f"{where}: {function.id}"
        if isinstance(function, ast.Attribute):
            assert function.attr not in BANNED_METHODS, f"{where}: {function.attr}"
            owner = function.value.id if isinstance(function.value, ast.Name) else None
            if owner == "np" and function.attr in ("load", "lib.format.read_array"):
                value = keywords.get("allow_pickle")
                assert isinstance(value, ast.Constant) and value.value is False, f"{where}: np.load"
            if owner == "os":
                assert function.attr not in ("system", "popen"), where
        shell = keywords.get("shell")
        assert not (isinstance(shell, ast.Constant) and shell.value), f"{where}: shell"


def test_nobody_draws_by_modulus():
    """Catches `jax.random.randint` and `choice`: 32 bits modulo n, biased among many. `prng.below` is exact."""
    calls = [(path, node.func) for path in FILES for node in nodes(path) if isinstance(node, ast.Call)]
    named = [(label(path), f) for path, f in calls if isinstance(f, ast.Attribute) and f.attr in ("randint", "choice")]
    assert [(path, f.lineno) for path, f in named if ast.unparse(f.value).endswith("random")] == []


def test_nothing_banned():
    """Catches code that runs what it reads, shells, and asserts for users."""
    check_each(check_bans)


def check_names(path: pathlib.Path) -> None:
    tree = parsed(path)
    if path.name == "__main__.py" or not tree.body:
        return
    assert ast.get_docstring(tree), "no module docstring"
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(dotted)
    for name in public_names(dotted):
        value = getattr(module, name)
        if callable(value) and getattr(value, "__module__", "").startswith("fedjax_sim"):
            assert (value.__doc__ or "").strip(), f"{name}: no docstring"
            if isinstance(value, type):  # NamedTuples and dataclasses are given one that says nothing
                assert not value.__doc__.startswith(f"{name}("), f"{name}: no docstring"


def test_public_names_are_documented():
    """Catches a module without a docstring, and public functions and classes without one."""
    check_each(check_names)


def test_asserts_narrow_types():
    """Fault: a walk that takes any assert for one that narrows, or none."""
    asserts = {
        "assert x.y is not None, 'why'": True,
        "assert isinstance(x, int), 'why'": True,
        "assert x is not None and y is not None, 'why'": True,
        "assert x is not None": False,
        "assert x > 0, 'why'": False,
        "assert y > 0 or x is not None, 'why'": False,
    }
    assert {text: narrows(ast.parse(text).body[0]) for text in asserts} == asserts


def test_the_walk_sees_the_arrows():
    """Guards the walk itself: known imports are found, and subpackages have folders."""
    assert ("fedjax_sim", "validate") in imports(PACKAGE / "engine" / "arithmetic" / "exact_sum.py")
    assert ("fedjax_sim", "aggregation") in imports(PACKAGE / "algorithms" / "server" / "fedavg.py")
    for subpackage in (
        "network",
        "sampling",
        "client",
        "transform",
        "aggregation",
        "server",
        "engine",
        "population",
        "models",
    ):
        assert (PACKAGE / subpackage / "__init__.py").is_file()
