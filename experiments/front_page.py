"""README's first screen, from files: `python -m experiments.front_page [FOLDER]`.

Writes README's tables of speeds from the committed results of the benchmarks and, given the FOLDER of
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
from fedjax_sim.report import charts
from fedjax_sim.study.findings import Findings

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "benchmarks" / "results"
CARD = ROOT / "experiments" / "accelerators" / "h100.json"
FIGURE = ROOT / "docs" / "participation.png"
LOOP = "the best hand-written loop"
OTHERS = (LOOP, "FedJAX", "pfl-research", "DrJAX", "Flower")
PLAIN = (("automatic", None), ("automatic", "automatic"))  # (lanes, variant) of rounds as a user has them
ON_A_CARD = {  # workload -> its name in README
    "mlp": "MLP 60-128-10",
    "large_mlp": "MLP 784-200-200-62",
    "softmax": "softmax 60-10",
    "massive": "softmax 784-10",
    "femnist_cnn": "FEMNIST CNN",
    "cifar_cnn": "CIFAR CNN",
    "lstm": "LSTM 128",
}


def speed_table(results: pathlib.Path = RESULTS) -> str:
    """Clients a second, and times as fast as the others on the same arrays, a Markdown table; slower is bold."""
    found = json.loads((results / "rivals.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in found["rows"]}
    ratios = {ratio["name"]: ratio["value"] for ratio in found["ratios"]}
    versions = {row["version"].split()[0]: row["version"].split(" on ")[0] for row in rows.values() if "version" in row}

    def cell(job: str, name: str) -> str:
        """Empty if not measured; other clients than the row's are named."""
        model, ending = f"{job.split(', ')[0]}, ", f": speed against {name}"
        seen = [x for x in ratios if x.startswith(model) and x.endswith(ending)]
        if not seen:
            return ""
        where = job + ending if job + ending in seen else seen[0]
        text = f"{number(ratios[where])}×"
        text = f"**{text}**" if ratios[where] < 1 else text
        return text if where == job + ending else f"{text} ({where[len(model) : -len(ending)]})"

    def first(job: str) -> str:
        seen = [rows.get(f"{job}: {name}") for name in ("fedjax_sim.run", LOOP.removeprefix("the "), *OTHERS[1:-1])]
        return " / ".join(number(row["first_call_seconds"]) if row else "–" for row in seen)

    head = [f"on {found['machine']['cores']} CPU cores", "clients/s", f"speed beside {LOOP}"]
    head += [versions.get(name, name) for name in OTHERS[1:]]
    lines = [[*head, "first round, s: ours / loop / FedJAX / pfl-research / DrJAX"], ["---"] * (len(head) + 1)]
    for job in [name.removesuffix(f": speed against {LOOP}") for name in ratios if name.endswith(LOOP)]:
        speed = number(rows[f"{job}: fedjax_sim.run"]["value"])
        lines.append([job, speed, *(cell(job, name) for name in OTHERS), first(job)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def card_table(path: pathlib.Path = CARD) -> str:
    """Clients a second on the card of `path`, and the speed beside the hand-written loop there, a Markdown table.

    Of a workload that was measured several times, the last session's first reading in turns counts.
    """
    sessions = json.loads(path.read_text(encoding="utf-8"))["sessions"]
    seconds: dict[tuple, float] = {}  # (workload, clients, who) -> seconds a round
    for session in reversed(sessions):
        for row in session.get("side_by_side", []) + session["speed"]:
            is_its_code = row.get("commit", session["commit"]) == session["commit"]
            is_plain = row["who"] == "hand" or (row["lanes"], row.get("variant")) in PLAIN
            if is_its_code and is_plain:
                seconds.setdefault((row["name"], row["m"], row["who"]), row["round_ms"] / 1e3)
    lines = [[f"on one {sessions[-1]['card']}", "clients/s", "speed beside the hand-written loop"], ["---"] * 3]
    for (name, clients, who), ours in sorted(seconds.items(), key=lambda row: list(ON_A_CARD).index(row[0][0])):
        if who == "fedjax_sim":
            text = f"{number(seconds[name, clients, 'hand'] / ours)}×"
            text = f"**{text}**" if seconds[name, clients, "hand"] < ours else text
            lines.append([f"{ON_A_CARD[name]}, {clients:,} clients", number(clients / ours), text])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_speeds(readme: str) -> str:
    """README's text with the tables of the committed results between its two marks."""
    table = f"<!-- speed -->\n\n{speed_table()}\n\n{card_table()}\n\n<!-- end -->"
    return re.sub(r"<!-- speed -->.*<!-- end -->", lambda _: table, readme, flags=re.S)


def participation_figure(rows: list[dict[str, Any]]) -> Any:
    """Variance of a cohort's mean, and the excess loss at a constant step, against the participation rate.

    Args:
      rows: `rows` of the study's findings.json.

    Returns: a matplotlib Figure; lines are closed forms, points measurements with intervals that hold together at 99 %.
    """
    figure, (variance, floor) = charts.panels(1, 2)
    laws = [(variance, "variance", "Variance of a cohort's mean"),
            (floor, "final loss", "Error floor: excess loss at a constant step")]  # fmt: skip
    for panel, part, title in laws:
        # Everybody has no variance, and no place on a logarithmic axis.
        shown = [
            row | {"rate": row["cohort_size"] / row["population_size"], "population": f"N = {row['population_size']:,}"}
            for row in rows
            if row["part"] == part and row["cohort_size"] < row["population_size"]
        ]
        law = []
        for i, name in enumerate(dict.fromkeys(row["population"] for row in shown)):
            finite, infinite = _laws([row for row in shown if row["population"] == name])
            law += finite
            rates, without_correction = ([point[key] for point in infinite] for key in ("rate", "predicted"))
            label = None if i else "as if N were infinite"
            panel.plot(rates, without_correction, color=charts.GREY, linewidth=0.9, linestyle="dotted", label=label)
        charts.lines(panel, shown, "rate", by="population", theory=law, log="xy", line="closed form",
                     xlabel="Participation rate m / N", ylabel=title)  # fmt: skip
    return figure


def _laws(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """c (N - m) / (N - 1) / m through the predictions of one population, and c / m, as rows of theory."""
    first = rows[0]
    size, cohort = first["population_size"], first["cohort_size"]
    scale = first["predicted"] * cohort * (size - 1) / (size - cohort)
    cohorts = np.geomspace(cohort, 0.985 * size, 200).tolist()
    infinite = [{"population": first["population"], "rate": m / size, "predicted": scale / m} for m in cohorts]
    corrections = [(size - m) / (size - 1) for m in cohorts]
    finite = [row | {"predicted": row["predicted"] * share} for row, share in zip(infinite, corrections, strict=True)]
    return finite, infinite


def main(arguments: list[str]) -> None:
    """Writes README's tables and, given a folder, its figure."""
    readme = ROOT / "README.md"
    readme.write_text(with_speeds(readme.read_text(encoding="utf-8")), encoding="utf-8")
    for folder in arguments:
        rows = json.loads((pathlib.Path(folder) / "findings.json").read_text(encoding="utf-8"))["rows"]
        drawn = Findings(
            name="",
            question="",
            comparisons=(),
            figure=lambda rows=rows: participation_figure(rows),
            options={},
        ).draw()
        drawn.savefig(FIGURE, dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    main(sys.argv[1:])
