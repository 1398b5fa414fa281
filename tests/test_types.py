"""What type checkers say about the public API: README's program passes, wrong calls do not, nothing is left open."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import pathlib
import re
import subprocess
import sys

import pytest
from mypy import api

import fedjax_sim
from fedjax_sim.config.signatures import public_names
from tests import compiled
from tests.test_docs import written_files

ROOT = pathlib.Path(__file__).resolve().parents[1]
OPTIONS = ["--config-file", str(ROOT / "pyproject.toml"), "--python-executable", sys.executable]
CACHE = compiled.folder().parent / hashlib.sha256(bytes(ROOT)).hexdigest()[:8]  # a clone's own
# What users may write by mistake. Both checkers must find each line that says so, and no other line.
WRONG = """
import jax
import optax
from fedjax_sim import aggregation, algorithms, population, run, sampling, transform

data = population.digits(num_clients=10)
clients, sgd = sampling.full(10), optax.sgd(0.1)

def loss(params, examples, key):
    return (params - examples["x"]) ** 2

sampling.uniform("ten", 2)  # wrong
sampling.uniform(10)  # wrong
sampling.full("ten")  # wrong
transform.clip(norm=1.0)  # wrong
transform.chain(aggregation.mean())  # wrong
transform.top_k(0.1, scope="layer")  # wrong
run(jax.random.key(0), "fedavg", {}, data.train, 5)  # wrong
data.trian  # wrong
algorithm: str = algorithms.fedsgd(loss, clients, sgd)  # wrong
algorithms.fedavg(loss, 10, sgd, num_steps=5)  # wrong
algorithms.fedavg(loss, clients, sgd, num_steps="five")  # wrong
algorithms.fedavg(loss, clients, sgd, steps=5)  # wrong
algorithms.fedavg(loss, clients, sgd, num_steps=5, aggregator=clients)  # wrong
algorithms.fedavg(loss, clients, sgd, num_steps=5, transform=aggregation.mean())  # wrong
algorithms.fedavg(loss, clients, sgd, num_steps=5, aggregator=aggregation.median(), transform=transform.clip(1.0))
"""
# A wrong use of optax's types, which mypy does not read (see pyproject.toml).
WRONG_OF_OTHERS = """
algorithms.fedavg(loss, clients, "sgd", num_steps=5)  # wrong
algorithms.fedavg(loss, clients, sgd, num_steps=5, server_optimizer=transform.clip(1.0))  # wrong
"""
# Notebooks need no types: what these errors are about, a reader sees when a cell runs.
UNTYPED = "arg-type, assignment, index, union-attr"
WRONG_NAMES = """
from fedjax_sim import study, theory
study.nothing()
theory.budget([1.0], [0.0], steps=3)
"""


def program(page: pathlib.Path) -> str:
    """The Python blocks of a page, one after the other; a block that is a file is a part of the program."""
    text = "".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S))
    own = "|".join(["__future__", *(re.escape(file[:-3].replace("/", ".")) for file in written_files(page))])
    return "from __future__ import annotations\n" + re.sub(rf"^from (?:{own}) import .*\n", "", text, flags=re.M)


def marked(text: str) -> set[int]:
    """The numbers of the lines that say that they are wrong."""
    return {number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# wrong")}


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """What mypy says about all programs, in one run: it reads the library's imports once."""
    folder = tmp_path_factory.mktemp("programs")
    notebooks = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob("[0-9]*.py")}
    assert notebooks, "no notebook was found"
    pages = {f"{path.stem}.py": program(path) for path in (ROOT / "docs" / "extend").glob("*.md")}
    untyped = notebooks | pages | {"wrong_names.py": WRONG_NAMES}
    untyped = {name: f'# mypy: disable-error-code="{UNTYPED}"\n{text}' for name, text in untyped.items()}
    programs = {"first.py": program(ROOT / "README.md"), "wrong.py": WRONG} | untyped
    for name, text in programs.items():
        (folder / name).write_text(text, encoding="utf-8")
    files = [str(folder / name) for name in programs]
    out, said, status = api.run([*OPTIONS, "--cache-dir", str(CACHE / "mypy"), *files])
    assert status in (0, 1), out + said
    return [line for line in out.splitlines() if "error:" in line]


def test_mypy_passes_readme_and_finds_wrong_calls(errors):
    """Fault: a signature that refuses README's program, or one so wide that it accepts an aggregator as a transform."""
    found = [re.search(r"(first|wrong)\.py:(\d+): ", line) for line in errors]
    assert {(x[1], int(x[2])) for x in found if x} == {("wrong", number) for number in marked(WRONG)}


def test_pyright_passes_readme_and_finds_wrong_calls(tmp_path):
    """Fault: as above, and a call that leaves no type where an optimizer of optax belongs."""
    (tmp_path / "first.py").write_text(program(ROOT / "README.md"), encoding="utf-8")
    (tmp_path / "wrong.py").write_text(WRONG + WRONG_OF_OTHERS, encoding="utf-8")
    # An editable install is an import hook, which pyright does not run.
    options = {"typeCheckingMode": "standard", "pythonVersion": "3.11", "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", tmp_path]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    found = {(pathlib.Path(x["file"]).stem, x["range"]["start"]["line"] + 1) for x in report["generalDiagnostics"]}
    assert found == {("wrong", number) for number in marked(WRONG + WRONG_OF_OTHERS)}


def test_notebooks_call_what_there_is(errors):
    """Fault: a cell, or a block of docs/extend/, that calls a function, or names an argument, that is gone; names in
    them need no types."""
    assert [line for line in errors if not re.search(r"wrong(_names)?\.py:", line)] == []
    assert len([line for line in errors if "wrong_names.py:" in line]) == 2


def public_functions():
    """(name, function) for everything callable that the public subpackages declare."""
    for subpackage in fedjax_sim.SUBPACKAGES:
        module = importlib.import_module(f"fedjax_sim.{subpackage}")
        for name in public_names(module.__name__):
            if inspect.isfunction(value := getattr(module, name)):
                yield f"{subpackage}.{name}", value


def test_public_functions_are_annotated():
    """Fault: an argument or a result without a type, which a checker takes for anything."""
    found, bare = 0, []
    for name, function in public_functions():
        found += 1
        signature = inspect.signature(function)
        arguments = (x for x in signature.parameters.values() if x.kind != x.VAR_KEYWORD)
        open_ends = [x.name for x in arguments if x.annotation is x.empty]
        open_ends += ["return"] if signature.return_annotation is signature.empty else []
        bare += [f"{name}: {end}" for end in open_ends]
    assert found > 200, "the walk itself is broken"
    assert not bare, "\n".join(bare)
