"""Hooks of MkDocs: the site's pages are the repository's own files at their own paths, so that every link holds.

`docs/site` holds the pages that are only on the site. The hooks add README, DESIGN, CHANGELOG, `docs/`, the readings in
`experiments/`, the notebooks with their outputs, a gallery of the studies, and a page of the API for each subpackage.
"""

from __future__ import annotations

import ast
import base64
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from fedjax_sim.config.signatures import public_names
from fedjax_sim.study.claims import Claim

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "DESIGN.md",
    "CHANGELOG.md",
    "docs/*.md",
    "docs/extend/*.md",
    "docs/how_to/*.md",
    "docs/wings/*.md",
    "docs/design/*.md",
    "experiments/**/README.md",
)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
# A reader looks for a topic, so subpackages are grouped by it.
API = {
    "Data and models": ("population", "population.partitioners", "models", "models.augmentations", "network"),
    "A round": ("sampling", "client", "client.optimizers", "transform", "aggregation", "server", "adversary"),
    "Algorithms and runs": ("algorithms", "round", "running.loop", "experiment", "sweeps", "engine"),
    "Theory and accounting": ("theory", "privacy", "metrics", "instruments"),
}
NOTEBOOKS = {
    "tutorials/first_federation.md": "01_first_federation",
    "tutorials/participation.md": "02_participation",
    "tutorials/error_floor.md": "03_error_floor",
}


def on_config(config: Any) -> Any:
    """Puts the pages of the API, and those of folders, into the navigation."""
    # Docstrings have no cross-references, and arrays such as [0][1] look like some.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("mkdocs.plugins.mkdocs_autorefs"):
            logging.getLogger(name).setLevel(logging.ERROR)
    for entry in config.nav:
        for title, place in entry.items() if isinstance(entry, dict) else ():
            if place == "api/":
                entry[title] = [{topic: [f"api/{name}.md" for name in names]} for topic, names in API.items()]
            elif isinstance(place, str) and place.endswith("/"):
                entry[title] = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / place).glob("*.md"))]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the repository's pages, and whatever file they show or link."""
    repository_pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    for path in repository_pages:
        files.append(_repository_file(path, config))
    linked = {target for path in repository_pages for target in _linked(path) if target not in repository_pages}
    for path in sorted(linked):
        files.append(_repository_file(path, config))
    for topic in API.values():
        for name in topic:
            files.append(File.generated(config, f"api/{name}.md", content=_api_page(name)))
    files.append(File.generated(config, "gallery.md", content=_gallery()))
    for folder in ("experiments/studies/results", "experiments/figures"):
        for picture in sorted((ROOT / folder).glob("*.png")):
            if picture not in linked:
                files.append(_repository_file(picture, config))
    for page, notebook in NOTEBOOKS.items():
        for file in _notebook_files(config, page, notebook):
            files.append(file)
    return files


def _repository_file(path: Path, config: Any) -> File:
    """Returns a file of the repository as one of the site, at the same path."""
    name = path.relative_to(ROOT).as_posix()
    return File(name, str(ROOT), config.site_dir, config.use_directory_urls)


def _linked(page: Path) -> Iterator[Path]:
    """Yields the files of the repository to which a page links."""
    for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        if "://" not in target and path.is_file() and path.is_relative_to(ROOT):
            yield path


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Makes a link to a folder one to the first of its pages, since a built site has no listings."""

    def folder_link(match: re.Match) -> str:
        folder = (ROOT / page.file.src_uri).parent / match[1]
        if "://" in match[1] or not folder.is_dir():
            return match[0]
        inside = sorted(file.src_uri for file in files if (ROOT / file.src_uri).parent == folder.resolve())
        if not inside:
            return match[0]
        return match[0].replace(match[1], f"{match[1].rstrip('/')}/{Path(inside[0]).name}")

    return LINK.sub(folder_link, markdown)


def _api_page(name: str) -> str:
    """Returns the page of a subpackage or module: its description, and every public name from its docstring.

    A name may also be that of its module, so it is looked up where it is defined.
    """
    path = ROOT / "fedjax_sim" / name.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    tree = ast.parse(source)
    blocks = [f"::: {definition}\n" for definition in public_names(f"fedjax_sim.{name}").values()]
    return "\n".join([f"# {name}\n", f"{ast.get_docstring(tree)}\n", *blocks])


def _gallery() -> str:
    """Returns the page of the studies, each with its question, its conclusions and its command."""
    lines = [
        "# Gallery\n",
        "Every study answers a question by measurements beside closed forms, and writes a page with its figure. The",
        "command runs the study as it is published.\n",
    ]
    results = ROOT / "experiments/studies/results"
    for path in sorted((ROOT / "experiments/studies").glob("*.toml")):
        result = results / f"{path.stem}.json"
        if not result.is_file():
            continue  # `python experiments/gallery.py` runs it
        kept = json.loads(result.read_text(encoding="utf-8"))
        title = path.stem.replace("_", " ").capitalize()
        lines += [f"## {title}\n", f"**{kept['question']}** {kept['verdict']}\n"]
        lines += [f"![{title}](experiments/studies/results/{path.stem}.png)\n"]
        lines += [*(f"- {Claim(**claim)}" for claim in kept["claims"]), ""]
        prose = results / f"{path.stem}.md"
        lines += [prose.read_text(encoding="utf-8")] if prose.is_file() else []
        command = f"fedjax-sim study experiments/studies/{path.name}"
        lines += [f"```bash\n{command}   # {kept['seconds']} s on two cores\n```\n"]
    for picture in sorted((ROOT / "experiments/figures").glob("*.png")):
        script = ROOT / "experiments" / f"{picture.stem}.py"
        meaning = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
        title = picture.stem.replace("_", " ").capitalize()
        lines += [f"## {title}\n", f"{meaning}\n", f"![{title}](experiments/figures/{picture.name})\n"]
        lines += [f"```bash\npython experiments/{script.name}\n```\n"]
    return "\n".join(lines)


def _notebook_files(config: Any, page: str, notebook: str) -> Iterator[File]:
    """Yields a notebook's page, with its outputs, and the pictures in it."""
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    parts = []
    num_pictures = 0
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"tutorials/{notebook}_{num_pictures}.png"
                num_pictures += 1
                yield File.generated(config, picture, content=base64.b64decode("".join(data["image/png"])))
                parts.append(f"![Output of the cell above]({Path(picture).name})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(f"```text\n{text.rstrip()}\n```")
    text = "\n\n".join(parts) + "\n"
    for other_page, other in NOTEBOOKS.items():
        text = text.replace(f"({other}.ipynb)", f"({Path(other_page).name})")
    yield File.generated(config, page, content=text)
