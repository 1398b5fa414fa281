"""docs/extend: each kind of part with rows has a page, whose part passes every law where it is added."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.laws import cases
from tests.test_docs import ROOT, written_files

PAGES = sorted((ROOT / "docs" / "extend").glob("*.md"))
IMPORT = re.compile(r"^from fedjax_sim\.(\w+)\.\S+ import (\w+) as \2$", re.M)


def added_lines(page: pathlib.Path) -> list[str]:
    """What a page adds to files of the package, in the order of the page: the import and the row of its part."""
    return re.findall(r"^```py\n# [^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


# A page's subpackage, part, import and row.
PARTS = {page.stem: (*IMPORT.match(lines[0]).groups(), *lines) for page in PAGES if (lines := added_lines(page))}


def test_every_kind_with_rows_has_a_page():
    """Catches a subpackage without a page, and a page whose import, row and command are of different parts."""
    assert {subpackage for subpackage, *_ in PARTS.values()} == set(cases.SUBPACKAGES)
    for page, (subpackage, part, _, row) in PARTS.items():
        text = (ROOT / "docs" / "extend" / f"{page}.md").read_text(encoding="utf-8")
        assert f'CASES["{subpackage}"]' in text and row.lstrip().startswith(f'"{part}": Row(')
        assert re.search(rf"^python -m tests\.part {part}( --full)?$", text, re.M)


def test_every_page_says_why_and_what():
    """Catches a page without a reason to write such a part, without an example, or without the facts of its kind."""
    for page in PAGES:
        headings = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.M)
        assert headings[0] == "Context" and "Facts" in headings, page.name
        assert any(re.search(r" works?$", heading) for heading in headings), page.name


FIRST = ("sampler", "server_update")  # the others wait for the long tests: each collects all laws


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.full if page in FIRST else pytest.mark.slow) for page in PARTS]
)
def test_a_part_added_by_its_page_passes_every_law(page, tmp_path):
    """Catches a page that leaves something out: its files and lines are all that is added to a copy of the checkout."""
    subpackage, part, imported, row = PARTS[page]
    for folder in ("fedjax_sim", "tests", "experiments", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, text in written_files(ROOT / "docs" / "extend" / f"{page}.md").items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    with (tmp_path / "fedjax_sim" / subpackage / "__init__.py").open("a", encoding="utf-8") as file:
        file.write(imported)
    with (tmp_path / "tests" / "laws" / "cases.py").open("a", encoding="utf-8") as file:
        file.write(f'CASES["{subpackage}"] |= {{\n{row}}}\n')
    command = [sys.executable, "-m", "tests.part", part, "-x", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and " lacks " not in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
