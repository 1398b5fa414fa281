"""Executes every percent script of this folder into the notebook beside it: python notebooks/regenerate.py [NAME ...]

The same sources on the same machine give the same file: no timings, no random ids, no versions of the kernel.
It needs what `pip install -c constraints.txt -e '.[notebooks]'` installs.
"""

from __future__ import annotations

import os
import pathlib
import sys

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = pathlib.Path(__file__).resolve().parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
TIMEOUT_SECONDS = 600  # for one cell


def read(script: pathlib.Path) -> nbformat.NotebookNode:
    """The notebook that a percent script describes, not executed; cells are named by their position."""
    notebook = jupytext.read(script)
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for position, cell in enumerate(notebook.cells):
        cell.id = f"cell-{position:02}"
        cell.metadata = nbformat.from_dict({})
    return notebook


def joined(outputs: list) -> list:
    """The same outputs with consecutive texts of a stream as one: where the kernel cut them is a matter of time."""
    whole = []
    for output in outputs:
        last = whole[-1] if whole else {}
        if output.output_type == "stream" and output.get("name") == last.get("name"):
            last.text += output.text
        else:
            whole.append(output)
    return whole


def execute(notebook: nbformat.NotebookNode) -> None:
    """Runs the cells in order in a fresh kernel; a cell that fails, or writes to stderr, stops everything."""
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH")]
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "FEDJAX_SIM_NOTEBOOK_FAST": "0"}
    os.environ.pop("MPLBACKEND", None)
    resources = {"metadata": {"path": str(HERE)}}
    client = NotebookClient(
        notebook, kernel_name="python3", timeout=TIMEOUT_SECONDS, record_timing=False, resources=resources
    )
    client.execute()
    number = 0
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type != "code":
            continue
        number += 1
        cell.execution_count = number
        cell.outputs = joined(cell.outputs)
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                raise RuntimeError(f"code cell {number} wrote to stderr:\n{output.text}")
            if output.output_type == "execute_result":
                output.execution_count = number
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})


def main(names: list[str]) -> None:
    """Regenerates the notebooks of these scripts, by default of every numbered script."""
    scripts = [HERE / f"{pathlib.Path(name).stem}.py" for name in names] or sorted(HERE.glob("[0-9]*.py"))
    for script in scripts:
        notebook = read(script)
        execute(notebook)
        nbformat.validate(notebook)
        nbformat.write(notebook, script.with_suffix(".ipynb"))
        print(f"{script.with_suffix('.ipynb').name}: {script.with_suffix('.ipynb').stat().st_size // 1000} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
