"""Accuracy against simulated time: FedBuff beside a synchronous run of the same phones, as in `asynchronous.toml`.

    python experiments/asynchronous.py [FIGURE]

In the synchronous run (FedAT with one tier) each round waits for the slowest of 500 phones, as many as FedBuff has at
work. Both have the same number of updates.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from fedjax_sim.config.build import build
from fedjax_sim.config.document import Config
from fedjax_sim.config.resolve import resolve
from fedjax_sim.running.loop import run

TARGET = 0.85
FILE = Path(__file__).with_suffix(".toml")


def curve(waits: bool, updates: int) -> tuple[list[float], list[float]]:
    """(Simulated minutes, test accuracies) of a run of so many updates."""
    document = tomllib.loads(FILE.read_text(encoding="utf-8"))
    own = document["algorithm"]
    if waits:
        same = {name: own[name] for name in ("num_steps", "batch_size")}
        document["algorithm"] = {"name": "fedat", "num_tiers": 1, "clients_per_tier": own["concurrency"]} | same
    made = build(Config(resolve(document, [])))
    rounds = updates // (own["concurrency"] if waits else own["buffer_size"])
    every = max(rounds // 40, 1)
    options = {"evaluation": made.evaluation, "evaluate_every": every}
    _, found = run(made.key, made.algorithm, made.params, made.data.train, rounds, **options)
    seen = [record for record in found.records if "test_accuracy" in record and "simulated_seconds" in record]
    return [record["simulated_seconds"] / 60 for record in seen], [record["test_accuracy"] for record in seen]


def main(updates: int = 20_000, figure: str | None = None) -> dict[str, tuple[list[float], list[float]]]:
    """The curves by name."""
    curves = {"FedBuff": curve(False, updates), "synchronous": curve(True, updates)}
    for name, (minutes, accuracy) in curves.items():
        first = next((time for time, value in zip(minutes, accuracy, strict=True) if value >= TARGET), None)
        reached = "not reached" if first is None else f"after {first:.2f} min"
        print(f"{name}: {TARGET:.0%} {reached}; {accuracy[-1]:.3f} after {minutes[-1]:.2f} min")
    if figure is not None:
        from matplotlib.figure import Figure  # an extra

        drawn = Figure(figsize=(5, 3), layout="constrained")
        axes = drawn.subplots()
        for name, (minutes, accuracy) in curves.items():
            axes.plot(minutes, accuracy, label=name)
        axes.set(xlabel="simulated minutes", ylabel="test accuracy")
        axes.legend()
        drawn.savefig(figure)
    return curves


if __name__ == "__main__":
    main(figure=next(iter(sys.argv[1:]), None))
