"""The README's Python runs as printed, in order, and does what the text says."""

import pathlib
import re

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"


def test_readme_python_runs():
    """Fault: an example that no longer fits the library, or a new part that does not learn."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 3
    names = {}
    exec(compile(blocks[0].replace("100_000", "5_000"), "README.md, block 1", "exec"), names)
    assert names["history"].summary["test_accuracy"] > 0.8
    names = {}
    for i, block in enumerate(blocks[1:], 2):
        exec(compile(block, f"README.md, block {i}", "exec"), names)
    losses = [record["loss"] for record in names["history"].records]
    assert losses[-1] < 0.75 * losses[0]
    code = [line for line in blocks[1].splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(code) <= 15  # a new model and a new client update in 15 lines
