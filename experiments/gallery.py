"""Runs the studies as they are published, and keeps each one's question, verdict, reading and figure for the gallery.

`python experiments/gallery.py` runs all, `python experiments/gallery.py drift bits` some. What it writes into
`experiments/studies/results` is on the site's gallery.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
import time

from PIL import Image

STUDIES = pathlib.Path(__file__).resolve().parent / "studies"
WIDTH = 1200  # pixels of a kept figure
COLORS = 96  # of a figure's palette: lines and letters need few


def main(names: list[str]) -> None:
    """Runs the named studies, or all of them."""
    for path in sorted(STUDIES.glob("*.toml")):
        if names and path.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            command = [sys.executable, "-m", "fedjax_sim", "study", str(path), "--out", folder]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - started
            keep(path.stem, pathlib.Path(folder), seconds)
        print(f"{path.stem}: {seconds:.0f} s", flush=True)


def keep(name: str, folder: pathlib.Path, seconds: float) -> None:
    """Keeps a study's words and its figure."""
    findings = json.loads((folder / "findings.json").read_text(encoding="utf-8"))
    kept = {key: findings[key] for key in ("question", "verdict", "reading", "options")} | {"seconds": round(seconds)}
    results = STUDIES / "results"
    results.mkdir(exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    with Image.open(folder / "figure.png") as image:
        size = (WIDTH, round(image.height * WIDTH / image.width))
        small = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        small.quantize(COLORS, dither=Image.Dither.NONE).save(results / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
