"""DESIGN and its pages: the pages, files and names that they tell of are there."""

from __future__ import annotations

import importlib
import pathlib
import re

import fedjax_sim

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fedjax_sim"
ENTRY = ROOT / "DESIGN.md"
PAGES = sorted((ROOT / "docs" / "design").glob("*.md"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in (ENTRY, *PAGES)}
TEXT = "\n".join(TEXTS.values())
HEADINGS = ["Context", "Decision", "What was measured", "What was rejected"]


def test_files_and_names_exist():
    """Catches a file that was moved, and a name that was changed, without its page."""
    paths = set(re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)(?:::\w+)?`", TEXT))
    assert len(paths) > 50
    assert [path for path in sorted(paths) if not any((base / path).exists() for base in (PACKAGE, ROOT))] == []
    files = {path.name for path in PACKAGE.rglob("*.py")}
    alone = set(re.findall(r"`(\w+\.py)`", TEXT))  # a file of the folder that was named before it
    assert alone <= files, alone - files
    modules = [*fedjax_sim.SUBPACKAGES, "prng", "tree", "types", "validate"]
    names = set(re.findall(rf"`({'|'.join(modules)})\.(\w+)", TEXT))
    assert len(names) > 20
    for module, name in sorted(pair for pair in names if pair[1] not in ("json", "jsonl", "py")):  # files
        assert hasattr(importlib.import_module(f"fedjax_sim.{module}"), name), f"{module}.{name}"


def links(path: pathlib.Path) -> list[str]:
    """The pages and files that a page links to, as it writes them."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", TEXTS[path], flags=re.S))
    return [link.partition("#")[0] for link in found if not link.startswith(("http:", "https:", "#"))]


def test_links_resolve():
    """Catches a link to a page that was renamed."""
    assert [(page.name, link) for page in TEXTS for link in links(page) if not (page.parent / link).exists()] == []


def test_every_page_is_in_the_table():
    """Catches a page that nobody finds, and a page that is in the table twice."""
    rows = re.findall(r"^\| \[[^]]+\]\(docs/design/(\w+)\.md\) \| \S", TEXTS[ENTRY], re.M)
    assert sorted(rows) == [path.stem for path in PAGES]


def test_a_page_is_one_decision():
    """Catches a page without a decision or its question, and headings of another kind or order."""
    for path in PAGES:
        text = re.sub(r"```.*?```", "", TEXTS[path], flags=re.S)
        assert text.startswith("# ") and len(re.findall(r"^# ", text, re.M)) == 1, path.name
        headings = re.findall(r"^## (.*)$", text, re.M)
        assert headings[:2] == ["Context", "Decision"], path.name
        assert headings == [heading for heading in HEADINGS if heading in headings], path.name
