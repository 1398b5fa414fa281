"""Results as text, as a plot and as README.md, so that no figure is ever copied by hand."""

from __future__ import annotations

import importlib
import json
import math
import pathlib
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from experiments.benchmarks import harness

HERE = pathlib.Path(__file__).resolve().parent
OURS, THEIRS = "#1f6fb4", "#9aa3ad"


def number(value: Any) -> str:
    """Three significant digits, thousands apart."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    value = float(f"{value:.3g}")
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    if places > 6:
        return f"{value:.2e}"
    return f"{value:,.{places}f}"


def _bound(ratio: dict) -> str:
    words = [f"{sign} {number(ratio[key])}" for key, sign in (("at_least", "≥"), ("at_most", "≤")) if key in ratio]
    return " and ".join(words)


def _verdict(ratio: dict) -> str:
    return {True: "reached", False: "**not reached**", None: ""}[ratio["reached"]]


def as_text(result: dict) -> str:
    """For a terminal."""
    lines = [f"{result['id']} {result['title']} ({result['benchmark_seconds']:.0f} s)"]
    width = max((len(row["name"]) for row in result["rows"]), default=0)
    for row in result["rows"]:
        spread = f"  [{number(row['low'])} .. {number(row['high'])}]" if "low" in row else ""
        lines.append(f"  {row['name']:{width}}  {number(row['value']):>10} {row['unit']}{spread}")
    for ratio in result["ratios"]:
        bound = f"  goal {_bound(ratio)}: {_verdict(ratio).strip('*')}" if _bound(ratio) else ""
        lines.append(f"  = {ratio['name']}: {number(ratio['value'])}{bound}")
    return "\n".join(lines + [f"  - {note}" for note in result["notes"]])


# ---- plots


def bars(axes: Any, rows: Iterable[dict]) -> None:
    """Horizontal bars with quartiles; rows of one unit."""
    rows = [row for row in rows if isinstance(row["value"], (int, float)) and row["value"] > 0][::-1]
    values = [row["value"] for row in rows]
    ends = [[max(0.0, sign * (row["value"] - row.get(end, row["value"]))) for row in rows] for end, sign in
            (("low", 1), ("high", -1))]  # fmt: skip
    colors = [OURS if row["ours"] else THEIRS for row in rows]
    axes.barh([row["name"] for row in rows], values, xerr=ends, color=colors, ecolor="black", capsize=2)
    if values and max(values) > 20 * min(values):
        axes.set_xscale("log")
    for i, (value, end) in enumerate(zip(values, ends[1], strict=True)):
        axes.annotate(number(value), (value + end, i), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.margins(y=0.02)
    if values:  # a quarter of the axis for the labels
        low, most = axes.get_xlim()[0], max(values)
        axes.set_xlim(low, most * (most / low) ** (1 / 3) if axes.get_xscale() == "log" else 4 / 3 * most)
    axes.set_xlabel(rows[0]["unit"] if rows else "")


def draw(module: Any, result: dict, path: pathlib.Path) -> None:
    """One picture of a result: the module's own `plot(axes, result)`, or bars of the rows in its most used unit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, max(2.6, 0.34 * len(result["rows"]) + 1.2)), layout="constrained")
    if hasattr(module, "plot"):
        module.plot(axes, result)
    else:
        units = [row["unit"] for row in result["rows"]]
        unit = max(units, key=units.count)
        bars(axes, [row for row in result["rows"] if row["unit"] == unit])
    axes.set_title(f"{result['id']}: {result['title']}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def run_and_write(module: Any, measure: Callable[[], dict], stem: pathlib.Path, quick: bool) -> None:
    """Measures, and writes STEM.json and STEM.png; a committed result also rewrites README.md."""
    before = time.perf_counter()
    found = measure()
    found |= {"quick": quick, "benchmark_seconds": time.perf_counter() - before, "machine": harness.machine()}
    harness.write_json(stem.with_suffix(".json"), found)
    draw(module, found, stem.with_suffix(".png"))
    print(as_text(found), flush=True)
    if stem.parent.resolve() == HERE / "results":
        write_readme(stem.parent)


# ---- README


def write_readme(results: pathlib.Path, path: pathlib.Path | None = None) -> None:
    """README.md from `intro.md`, the modules' docstrings, the results and `remarks/pNN_name.md`.

    A remark may quote a figure as {{name}}: the ratio, or else the row, of that name in the result beside it.
    """
    path = HERE / "README.md" if path is None else path
    parts = [(HERE / "intro.md").read_text(encoding="utf-8").rstrip()]
    sections, summary = [], ["| id | measured | goal | seen | |", "|---|---|---|---|---|"]
    known = {stem: harness.load(name) for name, stem in harness.modules().items()}
    known["rivals"] = importlib.import_module("experiments.benchmarks.rivals.beside")
    accelerator = importlib.import_module("experiments.benchmarks.accelerator")
    known |= {file.stem: accelerator for file in sorted(results.glob("on_*.json"))}
    for stem, module in known.items():
        file, name = results / f"{stem}.json", stem.split("_")[0]
        if not file.is_file():
            summary.append(f"| {name} | {module.__doc__.splitlines()[0]} | | no result yet | |")
            continue
        result = json.loads(file.read_text(encoding="utf-8"))
        for ratio in (x for x in result["ratios"] if _bound(x)):
            line = (result["id"], ratio["name"], _bound(ratio), number(ratio["value"]), _verdict(ratio))
            summary.append("| " + " | ".join(line) + " |")
        sections.append(_section(module, stem, result))
    path.write_text("\n\n".join([*parts, "\n".join(summary), *sections]) + "\n", encoding="utf-8")


def _section(module: Any, stem: str, result: dict) -> str:
    """Returns the section of a benchmark, as Markdown.

    Args:
      module: the benchmark, whose docstring is the heading and the first paragraph.
      stem: the name of its files of results, remarks and pictures.
      result: as `harness.result` makes it.
    """
    title, _, paragraph = module.__doc__.strip().partition("\n")
    lines = [f"## {result['id']}: {title.rstrip('.')}", "", paragraph.strip(), ""]
    lines += [f"Goal: {result['goal']}", "", "| | value | quartiles | unit | cores |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        spread = f"{number(row['low'])} to {number(row['high'])}" if "low" in row else ""
        name = f"**{row['name']}**" if row["ours"] else row["name"]
        lines.append(f"| {name} | {number(row['value'])} | {spread} | {row['unit']} | {row.get('cores', '')} |")
    if result["ratios"]:
        lines += ["", "| ratio | seen | goal | |", "|---|---|---|---|"]
        lines += [f"| {x['name']} | {number(x['value'])} | {_bound(x)} | {_verdict(x)} |" for x in result["ratios"]]
    lines += ["", *(f"* {note}" for note in result["notes"])]
    remark = HERE / "remarks" / f"{stem}.md"
    if remark.is_file():
        lines += ["", _quoted(remark.read_text(encoding="utf-8").strip(), result)]
    lines += ["", f"![{result['id']}](results/{stem}.png)", "", _where(result)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _quoted(text: str, result: dict) -> str:
    known = {x["name"]: x["value"] for x in [*result["rows"], *result["ratios"]]}

    def figure(match: re.Match) -> str:
        name = " ".join(match[1].split())
        if name not in known:
            raise KeyError(f"remark on {result['id']}: expected one of {sorted(known)}, got {name!r}")
        return number(known[name])

    return re.sub(r"\{\{(.+?)\}\}", figure, text, flags=re.S)


def _where(result: dict) -> str:
    m = result["machine"]
    seconds = f"{result['benchmark_seconds']:.0f} s"
    words = f"{m['cores']} cores of {m['processor']} ({m['caches']}), {m['memory_gib']} GiB, {m['platform']}"
    backend = m["backend"] if m["backend"] == "cpu" else f"{len(m['devices'])} {m['devices'][0]}"
    return f"<sub>Measured in {seconds} on {words}; jax {m['jax']} on {backend}, Python {m['python']}.</sub>"
