"""The site builds without a warning, and can be read where there is no network."""

import pathlib
import re
import subprocess
import sys

from fedjax_sim import sampling, transform

ROOT = pathlib.Path(__file__).resolve().parents[1]


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
        assert set(subpackage.__all__) <= entries, name
    for page in pages:
        text = (site / page).read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', text)
        assert not [address for address in loaded if "canonical" not in address], (page, loaded[:3])
