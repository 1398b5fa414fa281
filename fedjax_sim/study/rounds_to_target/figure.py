"""The picture and the reading of `rounds_to_target`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fedjax_sim import metrics, theory
from fedjax_sim.report import plots
from fedjax_sim.study.findings import Comparison, Findings

__all__ = ["target_figure", "target_reading"]

LOOKS = (("-", plots.BLUE, "o"), ((0, (4, 1.6)), plots.ORANGE, "s"), ((0, (1.5, 1.5)), plots.BLACK, "^"))
LOOK = {"markersize": 5, "capsize": 2, "markeredgecolor": "white", "zorder": 3}
QUADRATICS = ("one curvature", "one optimum", "heterogeneous")


def _of(found: Sequence[Comparison], part: str, quantity: str) -> list[Comparison]:
    return [one for one in found if one.conditions["part"] == part and one.quantity == quantity]


def target_reading(
    options: dict[str, Any], found: Sequence[Comparison], floor: Callable[[Comparison], float]
) -> Iterator[str]:
    """Paragraphs, from the numbers that were found; `floor` says where a setting rests, in targets."""
    same = _of(found, "one curvature", "rounds to target")
    if len(same) > 1:
        few, many = same[0], same[-1]
        yield (
            f"Where all clients agree, local work replaces rounds: {few.measured:g} rounds with "
            f"K = {few.conditions['local_steps']} and {many.measured:g} with K = {many.conditions['local_steps']}. "
            "With one curvature the loss falls by (1 - eta h)^(2K) a round, so rounds times K stays the same, up to "
            "whole rounds: the same gradients, fewer letters."
        )
    late = _of(found, "heterogeneous", "loss after the last round / target")
    there = _of(found, "heterogeneous", "rounds to target")
    never = [one for one in late if floor(one) > 1]
    words = ["With optima and Hessians that differ"]
    if never:
        words.append(
            ", more local work is faster only until its drift is above the target: at step "
            f"{options['step_size']:g} K = {never[0].conditions['local_steps']} comes to rest at {floor(never[0]):.3g} "
            "times the target and never gets there. That is a property of the constant step: with steps that fall over "
            "the rounds the floor falls with them."
        )
    else:
        words.append(" drift stays below this target for every K that was tried.")
    slow = [str(one.conditions["local_steps"]) for one in late if one not in never]
    if slow:
        words.append(f" K = {', '.join(slow)} had too few rounds: not there after {options['max_rounds']}.")
    if there:
        best = min(there, key=lambda one: one.measured)
        words.append(f" The fewest rounds are {best.measured:g}, at K = {best.conditions['local_steps']}.")
    yield "".join(words)
    batches = [one for one in found if one.conditions["part"] == "batches"]
    if batches:
        lost = [one for one in batches if one.quantity.startswith("loss after")]
        slow = [one for one in lost if floor(one) <= 1]
        yield (
            "Noisy gradients add a floor of their own, in proportion to eta / B and divided by how many take part. "
            + _batches([one for one in lost if one not in slow], "never have a mean loss below the target")
            + _batches(slow, f"do not have one after {options['max_rounds']} rounds")
            + _batches([one for one in batches if one not in lost], "do, in the round that the budget names")
            + "What is compared is the mean loss of many runs in the round that the budget names, or in the last one."
        )
    model = _of(found, "digits MLP", "rounds to target")
    if model:
        alphas = list(dict.fromkeys(one.conditions["alpha"] for one in model))
        words = []
        for alpha in alphas:
            ones = sorted((one for one in model if one.conditions["alpha"] == alpha),
                          key=lambda one: one.conditions["local_steps"])  # fmt: skip
            shown = ", ".join(f"{one.measured:.3g} at {one.conditions['local_steps']}" for one in ones)
            words.append(f"with alpha = {alpha:g}, {shown}")
        yield (
            f"On the digits' MLP, rounds to a test loss of {options['model_target']:g} against local steps a round: "
            f"{'; '.join(words)}. All at the same learning rate of {options['learning_rate']:g}; McMahan et al. tuned "
            "it for each setting, and have E epochs of batches of B: E n / B steps. There is no closed form here, and "
            f"a setting that is missing did not reach the target in {options['model_rounds']} rounds. Bytes are rounds "
            "times what a round sends, so they fall as the rounds do; gradients need not."
        )


def _batches(found: Sequence[Comparison], words: str) -> str:
    sizes = ", ".join(str(one.conditions["batch_size"]) for one in found)
    return f"Batches of {sizes} {words}. " if sizes else ""


def target_figure(
    options: dict[str, Any], found: Sequence[Comparison], *, problems: Any, noise: dict[int, float], middle: int
) -> Any:
    """Rounds against K, gradients against rounds, noisy paths to the target, and the digits."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(plots.WIDTH, 6.2), layout="constrained")
    (rounds, work), (paths, digits) = figure.subplots(2, 2)
    rows = Findings("", "", found, (), lambda: None, {}).rows()
    eta, last, share = options["step_size"], options["max_rounds"], options["target"]
    steps = sorted({*options["num_steps"]})
    grid = np.unique(np.geomspace(1, steps[-1], 40).astype(int))

    for name, (line, colour, marker) in zip(QUADRATICS, LOOKS, strict=True):
        curve = []
        for k in grid:
            losses = theory.budget(*problems[name], step_size=eta, num_steps=int(k)).expected_loss(
                last, start=problems[name].start
            )
            curve.append(metrics.rounds_to_target(losses[1:], share * losses[0]))
        curve = np.where(np.isfinite(curve), curve, np.nan)
        ones = _of(found, name, "rounds to target")
        at = np.array([one.conditions["local_steps"] for one in ones])
        values = np.array([one.measured for one in ones])
        rounds.plot(grid, curve, color=colour, linestyle=line, linewidth=1.3, label=f"{name}: theory")
        work.plot(curve, curve * grid, color=colour, linestyle=line, linewidth=1.3, label=f"{name}: theory")
        look = {"color": colour, "markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 3}
        rounds.plot(at, values, marker, **look)
        work.plot(values, values * at, marker, **look)
        missing = [k for k in steps if k not in at]
        rounds.plot(missing, np.full(len(missing), steps[-1]), "x", color=colour, markersize=7)
    rounds.set(xlabel=f"Local steps K (step {eta:g}; x: not in {last})", ylabel=f"Rounds to {share:g} of the loss")
    plots.logarithmic(rounds)
    rounds.set_xticks(steps, [str(k) for k in steps])
    rounds.minorticks_off()
    rounds.legend(fontsize=7.5)
    work.set(xlabel="Rounds to the target", ylabel="Local steps to the target")
    plots.logarithmic(work, "x")
    work.legend(fontsize=7.5)

    problem = problems["heterogeneous"]
    for (size, variance), (line, colour, marker) in zip(noise.items(), LOOKS * 9, strict=False):
        budget = theory.budget(*problem, step_size=eta, num_steps=middle, gradient_noise=variance)
        expected = budget.expected_loss(last, start=problem.start)
        name, curve = f"batches of {size}: theory", expected[1:] / expected[0] / share
        paths.plot(np.arange(1, last + 1), curve, color=colour, linestyle=line, linewidth=1.3, label=name)
        for row in (row for row in rows if row["part"] == "batches" and row["batch_size"] == size):
            reach = metrics.rounds_to_target(expected[1:], share * expected[0])
            at = min(reach, last)
            spread = [[row["measured"] - row["low"]], [row["high"] - row["measured"]]]
            paths.errorbar(at, row["measured"], spread, fmt=marker, color=colour, **LOOK)
    paths.axhline(1, color=plots.INK, linewidth=0.8)
    paths.set(xlabel=f"Round, K = {middle}", ylabel="Expected loss / target")
    plots.logarithmic(paths)
    paths.legend(fontsize=7.5)

    shown = [row for row in rows if row["part"] == "digits MLP" and row["quantity"] == "rounds to target"]
    shown.sort(key=lambda row: row["local_steps"])
    for alpha, (line, colour, marker) in zip(dict.fromkeys(row["alpha"] for row in shown), LOOKS * 9, strict=False):
        ones = [row for row in shown if row["alpha"] == alpha]
        middles = np.array([row["measured"] for row in ones])
        spread = [[row["measured"] - max(row["low"], 0.5) for row in ones], [row["high"] for row in ones] - middles]
        at, name = [row["local_steps"] for row in ones], f"alpha = {alpha:g}"
        digits.errorbar(
            at, middles, spread, fmt=marker, linestyle=line, color=colour, linewidth=1.0, label=name, **LOOK
        )
    digits.set(xlabel="Local steps E n / B, digits MLP", ylabel=f"Rounds to test loss {options['model_target']:g}")
    if shown:
        plots.logarithmic(digits)
        digits.legend(fontsize=7.5)
    return figure
