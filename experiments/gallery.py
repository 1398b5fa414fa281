"""Runs the studies as they are published, and keeps each one's numbers, claims and figure for the gallery.

`python experiments/gallery.py` runs all, `python experiments/gallery.py drift bits` some. With `--again` it draws
figures and claims again from the numbers that are kept, without a run. The site's gallery
shows what it writes into `experiments/studies/results`, and the prose beside it, `NAME.md`, which is written by hand.
"""

from __future__ import annotations

import importlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from PIL import Image

from fedjax_sim.report import axes

STUDIES = pathlib.Path(__file__).resolve().parent / "studies"
RESULTS = STUDIES / "results"
WIDTH = 1200  # pixels of a kept figure
COLORS = 256  # of a figure's palette


def main(arguments: list[str]) -> None:
    """Runs the named studies, or all of them; with `--again`, reads what is kept of them in place of a run."""
    names = [name for name in arguments if name != "--again"]
    for path in sorted(STUDIES.glob("*.toml")):
        if names and path.stem not in names:
            continue
        if "--again" in arguments:
            again(path.stem)
            continue
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            command = [sys.executable, "-m", "fedjax_sim", "study", str(path), "--out", folder]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - started
            keep(path.stem, pathlib.Path(folder), seconds)
        print(f"{path.stem}: {seconds:.0f} s", flush=True)


def keep(name: str, folder: pathlib.Path, seconds: float) -> None:
    """Keeps a study's words, numbers and figure."""
    findings = json.loads((folder / "findings.json").read_text(encoding="utf-8"))
    names = ("question", "verdict", "claims", "options", "rows")
    _write(name, {key: findings[key] for key in names} | {"seconds": round(seconds)})
    _write_figure(name, (folder / "figure.png").read_bytes())


def again(name: str) -> None:
    """Draws the claims and the figure of a study again, from the rows and options that are kept."""
    kept = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    claims, figure = (
        getattr(importlib.import_module(f"fedjax_sim.study.{name}.{part}"), f"{name}_{part}")
        for part in ("claims", "figure")
    )
    kept["claims"] = [claim._asdict() for claim in claims(kept["rows"], kept["options"])]
    _write(name, kept)
    with axes.style():
        _write_figure(name, axes.image(figure(kept["rows"], kept["options"]), "png", bbox_inches="tight"))


def _write(name: str, kept: dict[str, Any]) -> None:
    """Writes what is kept of a study, with a line for each row."""
    rows = ",\n    ".join(json.dumps(row, ensure_ascii=False) for row in kept["rows"])
    text = json.dumps(kept | {"rows": []}, indent=2, ensure_ascii=False)
    RESULTS.mkdir(exist_ok=True)
    text = text.replace('"rows": []', f'"rows": [\n    {rows}\n  ]')
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _write_figure(name: str, image_bytes: bytes) -> None:
    """Writes a figure with few pixels and colours."""
    with Image.open(io.BytesIO(image_bytes)) as image:
        size = (WIDTH, round(image.height * WIDTH / image.width))
        small = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        small.quantize(COLORS, dither=Image.Dither.NONE).save(RESULTS / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
