"""The notebooks run, and what is committed is what their scripts say."""

from __future__ import annotations

import base64
import os
import pathlib
import re
import struct
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
LEAST_PICTURES = {"01_first_federation": 9, "02_participation": 1, "03_error_floor": 2}
MOST_BYTES = 600_000
QUICK_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:\w[\w.+-]*/)+\w|[A-Za-z]:\\\w|file://")


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.stem)
def script(request) -> pathlib.Path:
    return request.param


@pytest.fixture
def notebook(script):
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(script.with_suffix(".ipynb"), as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(output):
    """Everything of an output that a reader could see as text."""
    data = output.get("data", {})
    return [output.get("text", ""), *(value for kind, value in data.items() if not kind.startswith("image/"))]


def test_there_are_notebooks():
    """Fault: a renamed folder leaves the tests below without a case, and they pass."""
    assert {script.stem for script in SCRIPTS} == set(LEAST_PICTURES)


@pytest.mark.full  # by default tests/test_types.py looks at what they call
def test_script_runs(script, tmp_path):
    """Fault: the public API moved on and a cell fails, warns of a user's mistake, or loses its bits between devices."""
    pytest.importorskip("matplotlib")
    environment = {
        **os.environ,
        "FEDJAX_SIM_NOTEBOOK_FAST": "1",
        "JAX_PLATFORMS": "cpu",
        "MPLBACKEND": "agg",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "XLA_FLAGS": QUICK_COMPILATION,
    }
    command = [sys.executable, "-W", "error::UserWarning", str(script)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    claims = re.findall(r"same bits: (\w+)", done.stdout)
    assert claims and set(claims) == {"True"}, done.stdout
    assert list(tmp_path.iterdir()) == [], "a notebook leaves no files behind"


def test_notebook_is_its_script(script, notebook):
    """Fault: the script was edited and the notebook not executed again, or the other way round."""
    jupytext = pytest.importorskip("jupytext")
    expected = [(cell.cell_type, cell.source) for cell in jupytext.read(script).cells]
    found = [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert found == expected, "run: python notebooks/regenerate.py"


def test_notebook_is_executed(script, notebook):
    """Fault: outputs were stripped, a cell failed, cells ran out of order, a picture got lost."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    pictures = [base64.b64decode(o.data["image/png"]) for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) >= LEAST_PICTURES[script.stem]
    for picture in pictures:
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", picture[16:24])
        assert 400 <= width <= 1200 and 150 <= height <= 1200
    claims = re.findall(r"same bits: (\w+)", "".join(text for output in outputs for text in texts(output)))
    assert claims and set(claims) == {"True"}


def test_notebook_tells_nothing_of_its_machine(script, notebook):
    """Fault: an absolute path, a time, a kernel's version or a widget's state in the file: every run then differs."""
    shown = [text for cell in code_cells(notebook) for output in cell.outputs for text in texts(output)]
    assert not [text for text in shown if MACHINE_PATH.search(text) or re.search(r" at 0x[0-9a-f]+", text)]
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert dict(notebook.metadata.language_info) == {"name": "python"}
    assert all(not cell.metadata for cell in notebook.cells)
    assert [cell.id for cell in notebook.cells] == [f"cell-{i:02}" for i in range(len(notebook.cells))]
    assert script.with_suffix(".ipynb").stat().st_size < MOST_BYTES


@pytest.mark.parametrize("text", ["/home/someone/x.py", "see C:\\Users\\x", "file:///tmp/x", "'/tmp/x'"])
def test_machine_paths_are_seen(text):
    """Fault: a pattern that matches nothing proves nothing."""
    assert MACHINE_PATH.search(text)
    assert not MACHINE_PATH.search("loss/accuracy at 1/2 of the rounds, 3 rounds/s, https://example.org/a/b")
