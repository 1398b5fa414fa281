"""The site builds without a warning, and can be read where there is no network; what its pages name is there."""

import importlib.util
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

from fedjax_sim import sampling, transform
from fedjax_sim.config.signatures import public_names

ROOT = pathlib.Path(__file__).resolve().parents[1]


def places(nav):
    """The pages in a navigation, or in a part of one."""
    if isinstance(nav, str):
        yield nav
        return
    for inside in nav.values() if isinstance(nav, dict) else nav:
        yield from places(inside)


def test_what_the_site_names_is_there():
    """Catches a page of the navigation, a module of the API, a notebook, or the target of a link, that is gone, and a
    page of docs/ that no reader finds; without a build, which finds more."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    spec.loader.exec_module(hooks := importlib.util.module_from_spec(spec))
    config = SimpleNamespace(nav=yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    named = set(places(hooks.on_config(config).nav))
    modules = [name for topic in hooks.API.values() for name in topic]
    made = {"gallery.md", *hooks.NOTEBOOKS, *(f"api/{name}.md" for name in modules)}
    assert made <= named
    assert {place for place in named if not (ROOT / place).is_file()} == made
    assert all("\n::: fedjax_sim." in hooks._api_page(name) for name in modules)
    assert all((ROOT / "notebooks" / f"{name}.ipynb").is_file() for name in hooks.NOTEBOOKS.values())
    pages = {page for pattern in hooks.PAGES for page in ROOT.glob(pattern)}
    assert {page for page in pages if page.parent == ROOT / "docs"} <= {ROOT / place for place in named}
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
        targets = [target for target, _ in hooks.LINK.findall(text) if "://" not in target]
        assert not [target for target in targets if not (page.parent / target).exists()], page


@pytest.mark.full  # a quarter of a minute; by default its navigation and links are read, above
def test_the_site_builds(tmp_path):
    """Catches a link to a page that is gone, a page that no reader finds, and a page that loads from elsewhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {"index.html", "docs/faq.html", "gallery.html", "api/sampling.html", "DESIGN.html"} <= pages
    for subpackage in (sampling, transform):
        name = subpackage.__name__.rpartition(".")[2]
        text = (site / f"api/{name}.html").read_text(encoding="utf-8")
        entries = set(re.findall(r'<h2 id="[\w.]+\.(\w+)"', text))
        assert set(public_names(subpackage.__name__)) <= entries, name
    for page in pages:
        text = (site / page).read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', text)
        assert not [address for address in loaded if "canonical" not in address], (page, loaded[:3])
