"""README's first screen, from files: `python -m experiments.front_page [FOLDER]`.

Writes README's table of speeds from the committed results of the benchmarks and, given the FOLDER of
`fedjax-sim study participation --set model_clients=0 --set compare_samplers=false --out FOLDER`, the figure above it.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

import numpy as np

from experiments.benchmarks.report import number
from fedjax_sim.report import plots
from fedjax_sim.study.charts import DOTTED, chart, points
from fedjax_sim.study.findings import Findings

__all__ = ["participation_figure", "speed_table", "with_speeds"]

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "benchmarks" / "results"
FIGURE = ROOT / "docs" / "participation.png"
RIVALS = ("FedJAX", "pfl-research", "Flower")
JOBS = {  # what is trained: (result, its ratio of times, ours over the best hand-written loop's; job of the rivals)
    "MLP 60-128-10, 1,000 clients a round": (
        "p00_main_job", "MLP: time against the best bare loop", "P0 MLP 60-128-10, 1,000 clients"),
    "the same, 100 clients a round": (None, None, "P0 MLP 60-128-10, 100 clients"),
    "MLP 64-128-10 (digits), 1,000 clients a round": (
        "p00_main_job", "digits: time against the best bare loop", None),
    "MLP 32-32-10, batches of 1": ("p01_tiny_mlp", "time against the best bare loop", "P1 MLP 32-32-10"),
    "softmax regression 784-62": ("p02_emnist", "logistic: time against the best bare loop", "P2 logistic 784-62"),
    "MLP 784-200-200-62": ("p02_emnist", "MLP: time against the best bare loop", "P2 MLP 784-200-200-62"),
    "CNN of FEMNIST, 1.2 million parameters": ("p03_convolutional", "FEMNIST: time against the best loop", None),
    "CNN of CIFAR, 1.6 million parameters": ("p03_convolutional", "CIFAR: time against the best loop", None),
    "GRU 128 over 80 characters": ("p15_gru", "time against the best bare loop", None),
}  # fmt: skip


def speed_table(results: pathlib.Path = RESULTS) -> str:
    """How many times as fast as the best hand-written loop and the rivals, a Markdown table; slower is bold."""

    def load(stem: str) -> dict[str, Any]:
        return json.loads((results / f"{stem}.json").read_text(encoding="utf-8"))

    def ratios(stem: str) -> dict[str, float]:
        return {ratio["name"]: ratio["value"] for ratio in load(stem)["ratios"]}

    def cell(speed: float | None) -> str:
        text = "" if speed is None else f"{number(speed)}×"
        return f"**{text}**" if text and speed < 1 else text

    versions = {note.split()[0]: note.split(" on ")[0] for note in load("rivals")["notes"]}
    cores = load("rivals")["machine"]["cores"]
    lines = [
        [f"on {cores} CPU cores, as fast as", "the best hand-written JAX loop", *(versions[name] for name in RIVALS)]
    ]
    lines.append(["---"] * len(lines[0]))
    for label, (stem, ratio, job) in JOBS.items():
        hand = 1 / ratios(stem)[ratio] if stem else None
        others = [ratios("rivals").get(f"{job}: speed against {name}") for name in RIVALS]
        lines.append([label, *map(cell, [hand, *others])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_speeds(readme: str) -> str:
    """README's text with the table of today's results between its two marks."""
    table = f"<!-- speed -->\n\n{speed_table()}\n\n<!-- end -->"
    return re.sub(r"<!-- speed -->.*<!-- end -->", lambda _: table, readme, flags=re.S)


def participation_figure(rows: list[dict[str, Any]]) -> Any:
    """Variance of a cohort's mean, and the excess loss at a constant step, against the participation rate.

    Args:
      rows: `rows` of the study's findings.json.

    Returns: a matplotlib Figure; lines are closed forms, points measurements with intervals that hold together at 99 %.
    """
    figure, (variance, floor) = chart(1, 2)
    looks = ((plots.BLUE, "o"), (plots.ORANGE, "s"), (plots.BLACK, "^"), ("#009E73", "v"))
    every = [row for row in rows if row["part"] == "variance"]
    sizes = dict.fromkeys(row["population_size"] for row in every)
    for size, (colour, marker) in zip(sizes, looks, strict=False):
        _law(variance, [row for row in every if row["population_size"] == size], colour, marker, f"N = {size:,}")
    variance.plot([], [], color=plots.INK, linewidth=0.9, linestyle=DOTTED, label="as if N were infinite")
    variance.set(title="Variance of a cohort's mean", xlabel="Participation rate m / N")
    ends = [row for row in rows if row["part"] == "final loss"]
    _law(floor, ends, plots.BLUE, "o", "simulated")
    floor.plot([], [], color=plots.BLUE, linewidth=1.3, label="closed form")
    floor.set(title=f"Error floor: excess loss at a constant step, N = {ends[0]['population_size']:,}",
              xlabel="Participation rate m / N")  # fmt: skip
    for axes in (variance, floor):
        axes.set(xscale="log", yscale="log")
        axes.legend(fontsize=7.5, loc="lower left")
    return figure


def _law(axes: Any, rows: list[dict[str, Any]], colour: str, marker: str, label: str) -> None:
    """c (N - m) / (N - 1) / m through the study's predictions, and c / m; the measurements over them."""
    rows = [row for row in rows if row["cohort_size"] < row["population_size"]]  # everybody: zero, not on this axis
    size, cohort = rows[0]["population_size"], rows[0]["cohort_size"]
    scale = rows[0]["predicted"] * cohort * (size - 1) / (size - cohort)
    cohorts = np.geomspace(cohort, 0.985 * size, 200)
    axes.plot(cohorts / size, scale / cohorts * (size - cohorts) / (size - 1), color=colour, linewidth=1.3)
    axes.plot(cohorts / size, scale / cohorts, color=colour, linewidth=0.9, linestyle=DOTTED)
    points(axes, rows, lambda row: row["cohort_size"] / row["population_size"], colour, marker, label)


def main(arguments: list[str]) -> None:
    """Writes README's table and, given a folder, its figure."""
    readme = ROOT / "README.md"
    readme.write_text(with_speeds(readme.read_text(encoding="utf-8")), encoding="utf-8")
    for folder in arguments:
        rows = json.loads((pathlib.Path(folder) / "findings.json").read_text(encoding="utf-8"))["rows"]
        drawn = Findings("", "", (), (), lambda rows=rows: participation_figure(rows), {}).draw()
        drawn.savefig(FIGURE, dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    main(sys.argv[1:])
