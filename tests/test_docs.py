"""Docstrings and docs/: their examples run, every test that they name exists, and so does every page that they link."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import pathlib
import re
import sys
import types

import pytest

from fedjax_sim.config.signatures import public_names

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted(page for folder in (".", "extend", "how_to", "wings") for page in (ROOT / "docs" / folder).glob("*.md"))
RUN_ELSEWHERE = {"your_own_data.md": "tests/test_readme.py::test_your_own_data"}  # with a file and results to look at
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "fedjax_sim").rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
)
# Examples that take a third of a second or more.
COMPILED = {
    f"fedjax_sim.{name}"
    for name in (
        "adversary.smashed",
        "aggregation.secure.shamir",
        "algorithms.hierarchy.federated_splitgnn",
        "algorithms.hierarchy.hierfavg",
        "engine.all_messages.order_statistics",
        "engine.all_messages.top_k",
        "experiment.train",
        "instruments.hypergradient",
        "metrics.drift",
        "metrics.heterogeneity",
        "models.attention",
        "models.feedforward",
        "models.losses",
        "models.recurrent",
        "models.vertical",
        "network.distributions",
        "population.datasets.images",
        "population.datasets.synthetic",
        "population.poisoned.backdoors",
        "population.poisoned.labels",
        "population.poisoned.poisoning",
        "privacy.audit",
        "round.round",
        "sampling.work",
        "study.problems",
        "sweeps.sweep",
    )
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in COMPILED else name for name in MODULES]
)
def test_doctests(name):
    """Catches examples that no longer run."""
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


@functools.cache
def defined(path: str) -> set[str]:
    """Names of the functions and methods in a test file."""
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def docstrings(path: pathlib.Path) -> str:
    """All docstrings of a file, one after the other."""
    nodes = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return "\n\n".join(ast.get_docstring(node) or "" for node in nodes)


def named_tests(text: str) -> list[tuple[str, str | None]]:
    """(file, test or None) for each reference; a bare `test_x` or `::test_x` belongs to the file named before it.

    >>> named_tests("(tests/a/test_b.py::test_c); so (::test_d), test_e; (tests/test_f.py::\\n  test_g).")[1:]
    [('tests/a/test_b.py', 'test_d'), ('tests/a/test_b.py', 'test_e'), ('tests/test_f.py', 'test_g')]
    """
    found = []
    for paragraph in text.split("\n\n"):
        file = None
        for match in re.finditer(
            r"(tests/[\w/]+\.py)(?:::\s*(test_\w+))?|(?:::\s*)?\b(test_\w+)\b(?!\.py|/)", paragraph
        ):
            if match[1]:
                file = match[1]
                found.append((file, match[2]))
            elif file is not None:
                found.append((file, match[3]))
    return found


def test_every_named_test_exists():
    """Catches a guarantee whose test was renamed, or never written."""
    missing, count = [], 0
    for path in sorted((ROOT / "fedjax_sim").rglob("*.py")):
        if "tests/" not in path.read_text(encoding="utf-8"):
            continue
        for file, test in named_tests(docstrings(path)):
            count += 1
            if not (ROOT / file).is_file() or (test is not None and test not in defined(file)):
                missing.append(f"{path.relative_to(ROOT)}: {file}{'::' + test if test else ''}")
    assert count > 50, "the search itself is broken"
    assert not missing, "\n".join(missing)


LONG = 15  # lines; functions of this length and more state their arguments


def stated_arguments(doc: str) -> dict[str, str]:
    """The names that the section `Args:` of a docstring explains, and how it explains each.

    >>> stated_arguments("Adds.\\n\\nArgs:\\n  a, b: [d].\\n    c: goes on.\\n  *d: more.\\n\\nReturns: e: f")
    {'a': ' [d]. c: goes on.', 'b': ' [d]. c: goes on.', 'd': ' more.'}
    """
    section = re.search(r"^Args:\n((?:[ ]+.*\n|\n)*)", doc + "\n", re.M)
    if section is None:
        return {}
    # Lines that are indented further than the first entry go on with an entry.
    indent = re.match(r" *", section[1])[0]
    entry = rf"^{indent}(\*{{0,2}}\w+(?:, \*{{0,2}}\w+)*):(.*\n(?:{indent} .*\n)*)"
    found = [(names, re.sub(r"\s+", " ", text).rstrip()) for names, text in re.findall(entry, section[1], re.M)]
    return {name.lstrip("*"): text for names, text in found for name in names.split(", ")}


def unstated_arguments(source: str) -> list[str]:
    """What the long functions of a source leave unexplained: line, function, and arguments.

    A function whose arguments are those of another says so: "Args: as for `other`". Not searched are public functions
    inside of others, whose arguments are those of a part; commands of Typer, whose options have a `help`; and
    `**options: Unpack[...]`, in whose place a signature has the options themselves.

    >>> body = "  x\\n" * LONG
    >>> unstated_arguments("def _f(self, a, *b, c, **d):\\n  'Adds.\\\\n\\\\nArgs:\\\\n  a: [d].'\\n" + body)
    ['1: _f: b, c, d']
    >>> unstated_arguments("def f(a, **b: Unpack[B]):\\n" + body)
    ['1: f: a']
    >>> starts = ("def _f():\\n", "def __init__(self, a):\\n", "def f(a: Annotated[int, typer.Option()]):\\n")
    >>> [unstated_arguments(start + body) for start in (*starts, "def f():\\n def g(a):\\n")]
    [[], [], [], []]
    """
    missing = []
    functions = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {x for function in functions for x in ast.walk(function) if x is not function}
    for node in functions:
        docstring = ast.get_docstring(node) or ""
        is_short = node.end_lineno - node.lineno + 1 < LONG
        if is_short or node.name.startswith("__") or "Args: as for `" in docstring:
            continue
        is_public = not node.name.startswith("_")
        if is_public and (node in inner or re.search(r"\btyper\.|\bRunFolder\b", ast.unparse(node.args))):
            continue
        own = [*node.args.posonlyargs, *node.args.args, node.args.vararg, *node.args.kwonlyargs, node.args.kwarg]
        arguments = [x.arg for x in own if x is not None and "Unpack[" not in ast.unparse(x)]
        named = stated_arguments(docstring)
        unstated = [name for name in arguments if name not in ("self", "cls", *named)]
        if unstated:
            missing.append(f"{node.lineno}: {node.name}: {', '.join(unstated)}")
    return missing


def test_long_functions_state_their_arguments():
    """Catches mathematics whose shapes and units a reader would have to guess."""
    paths = sorted((ROOT / "fedjax_sim").rglob("*.py"))
    missing = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in paths
        for line in unstated_arguments(path.read_text(encoding="utf-8"))
    ]
    assert len(paths) > 300, "the search itself is broken"
    assert not missing, f"{len(missing)} functions without `Args:` for:\n" + "\n".join(missing)


# Words that tell what None does. "as in", "as for" and "of `other`" send the reader to another docstring.
TELLS_NONE = re.compile(r"\bNone\b|[Dd]efault|without|\bas in\b|\bas for\b|\bof `")


def may_be_none(annotation: ast.expr | None) -> bool:
    """Whether an annotation is None, a union with it, or `Annotated` of such a union.

    >>> texts = ("int | None", "Annotated[int | None, x]", "Callable[[], None]")
    >>> [may_be_none(ast.parse(text).body[0].value) for text in texts]
    [True, True, False]
    """
    if isinstance(annotation, ast.BinOp):
        return may_be_none(annotation.left) or may_be_none(annotation.right)
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        return may_be_none(annotation.slice.elts[0])
    return isinstance(annotation, ast.Constant) and annotation.value is None


def untold_none(source: str) -> list[str]:
    """Arguments that may be None, and whose explanation does not say what None does: line, function, and arguments.

    >>> docstring = "'Adds.\\\\n\\\\nArgs:\\\\n  a: [d].\\\\n  b: [d]; None: zeros.\\\\n  c: [d].'"
    >>> untold_none("def f(a: int | None, b: int | None, c: int):\\n  " + docstring)
    ['1: f: a']
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stated = stated_arguments(ast.get_docstring(node) or "")
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untold = [x.arg for x in arguments if may_be_none(x.annotation) and x.arg in stated]
            untold = [name for name in untold if not TELLS_NONE.search(stated[name])]
            if untold:
                found.append(f"{node.lineno}: {node.name}: {', '.join(untold)}")
    return found


def test_arguments_that_may_be_none_say_what_none_does():
    """Catches an option whose default a reader would have to look up in the code."""
    folder = ROOT / "fedjax_sim"
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*.py"))}
    sources = {name: path.read_text(encoding="utf-8") for name, path in paths.items() if "examples" not in path.parts}
    untold = [f"{name}:{line}" for name, source in sources.items() for line in untold_none(source)]
    assert len(sources) > 300, "the search itself is broken"
    assert not untold, f"{len(untold)} functions do not say what None does:\n" + "\n".join(untold)


def python_blocks(path: pathlib.Path) -> list[str]:
    """The Python blocks of a page, in their order."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.S | re.M)


def written_files(path: pathlib.Path) -> dict[str, str]:
    """The files that a page writes out in full, by their paths: blocks whose first line is a comment with the path.

    >>> sorted(written_files(ROOT / "docs" / "extend" / "sampler.md"))
    ['fedjax_sim/sampling/alternating.py', 'tests/sampling/test_alternating.py']
    """
    blocks = ((re.match(r"# (\S+/\w+\.py)\n", block), block) for block in python_blocks(path))
    return {first_line[1]: block for first_line, block in blocks if first_line}


def pages_to_run() -> list[pathlib.Path]:
    """Pages with Python blocks that no test of their own runs."""
    return [path for path in PAGES if path.name not in RUN_ELSEWHERE and python_blocks(path)]


RESULTS = {
    "asynchronous_variant.md": lambda names: names["stale_record"]["staleness"] > 0,
    "client_update.md": lambda names: names["losses"][-1] < names["losses"][0],
    "data_set.md": lambda names: abs(float(names["fit"].params(names["state"])) - 2) < 0.2,
    "model.md": lambda names: names["losses"][-1] < names["losses"][0],
    "personal_model.md": lambda names: 0 < names["personal_record"]["personal_accuracy"] <= 1,
    "server_update.md": lambda names: abs(names["judged"] - 4.5) < abs(names["last"] - 4.5),
    "study.md": lambda names: all(row["holds"] for row in names["findings"].rows()),
}


@pytest.mark.default_rows("gossip", "hierarchy", "sampler", "server_update", "split", "train_a_model_of_your_own")
@pytest.mark.parametrize("path", pages_to_run(), ids=lambda path: path.stem)
def test_pages_run(path, tmp_path, monkeypatch):
    """Catches an example on a page that no longer fits the library; blocks run in order, as one program.

    A block that is a file becomes a module, whose doctest and tests run.
    """
    monkeypatch.chdir(tmp_path)
    names, file_of = {"__name__": path.stem}, {block: file for file, block in written_files(path).items()}
    for i, block in enumerate(python_blocks(path), 1):
        assert max(map(len, block.splitlines())) <= 120
        code = compile(block, f"{path.name}, block {i}", "exec", dont_inherit=True)
        if block not in file_of:
            exec(code, names)
            continue
        module = types.ModuleType(file_of[block].removesuffix(".py").replace("/", "."))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(code, vars(module))
        assert doctest.testmod(module).failed == 0
        for name, value in list(vars(module).items()):
            if name.startswith("test_"):
                value()
        names |= {name: value for name, value in vars(module).items() if not name.startswith("_")}
    assert RESULTS.get(path.name, lambda names: True)(names)


def test_every_page_is_run_or_says_where():
    """Catches a page that is left out of `test_pages_run`, and whose own test is gone."""
    assert {"sampler.md", *RESULTS} <= {path.name for path in pages_to_run()}
    for page, test in RUN_ELSEWHERE.items():
        ((file, name),) = named_tests(test)
        assert (ROOT / "docs" / page).is_file() and name in defined(file)


@pytest.mark.parametrize("path", [ROOT / "README.md", *PAGES], ids=lambda path: path.stem)
def test_pages_name_what_is_there(path):
    """Catches a promise whose test was renamed, and a link to a page, a heading or a picture that is gone."""
    text, own = path.read_text(encoding="utf-8"), written_files(path)
    for file, test in named_tests(text):
        if file in own:
            assert test is None or f"def {test}(" in own[file], (file, test)
        else:
            assert (ROOT / file).is_file() and (test is None or test in defined(file)), (file, test)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in link:
            continue
        page, _, heading = link.partition("#")
        target = (path.parent / page).resolve() if page else path
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


def anchors(path: pathlib.Path) -> set[str]:
    """The names by which links reach a page's headings, as GitHub makes them.

    >>> sorted(anchors(ROOT / "docs" / "your_own_data.md"))[:2]
    ['a-table-with-an-id-column', 'arrays-and-ids']
    """
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_search_finds_all_forms():
    """Guards the search for names, and for modules with examples."""
    assert COMPILED < set(MODULES) and len(MODULES) > 200
    assert doctest.testmod(importlib.import_module(__name__)).failed == 0


@pytest.mark.parametrize("subpackage", ["network", "sampling", "transform", "aggregation"])
def test_every_part_states_its_guarantees(subpackage):
    """Catches a part that promises nothing."""
    module = importlib.import_module(f"fedjax_sim.{subpackage}")
    parts = [name for name in public_names(module.__name__) if not isinstance(getattr(module, name), type)]
    silent = [name for name in parts if "Guarantees:" not in (getattr(module, name).__doc__ or "")]
    assert not silent
