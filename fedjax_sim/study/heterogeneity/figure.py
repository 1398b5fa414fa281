"""The heterogeneity study's picture and its reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import plots
from fedjax_sim.study.findings import Comparison, Findings

__all__ = ["heterogeneity_figure", "heterogeneity_reading"]

LOOKS = (("-", plots.BLUE, "o"), ((0, (4, 1.6)), plots.ORANGE, "s"), ((0, (1.5, 1.5)), plots.BLACK, "^"))
RANKS = "rank correlation with the slowdown, "
FAMILIES = ("digits MLP", "Synthetic")


def _of(found: Sequence[Comparison], part: str, quantity: str) -> dict[str, Comparison]:
    return {one.conditions["population"]: one for one in found
            if one.conditions["part"] == part and one.quantity == quantity}  # fmt: skip


def heterogeneity_reading(options: dict[str, Any], found: Sequence[Comparison]) -> Iterator[str]:
    """Paragraphs, from the numbers that were found."""
    yield (
        "Distances of label distributions say how far apart what clients want is only through positions: for labels 0, "
        "1, 2 the best constants of (.2, .5, .3) and (.5, .3, .2) are 0.4 apart, which is their earth mover's distance "
        "too, for one dominates the other; (.5, 0, .5) and (0, 1, 0) are 1 apart by it and want the same constant. "
        "Without positions there is total variation, whose double, L1, some papers call the earth mover's distance. "
        "The digits' positions are their values, which means nothing to a classifier: that column is for comparison."
    )
    rounds = _of(found, "quadratics", "rounds to target")
    spread = _of(found, "quadratics", "gradient dissimilarity")
    if len(rounds) > 1:
        (first, least), (last, most) = (list(rounds.items())[i] for i in (0, -1))
        drifts = most.measured > least.measured
        why = "the more clients differ, the smaller the step must be for its fixed point to lie below the target"
        yield (
            f"On quadratics rounds have a closed form. With K = {options['num_steps']} and the best constant step, "
            f"a thousandth of the start's loss takes {least.measured:g} rounds at gradient dissimilarity "
            f"{spread[first].measured:.3g} (at the optimum) and {most.measured:g} at {spread[last].measured:.3g}"
            + (f": {why}." if drifts else ". One local step has no drift: how much clients differ changes nothing.")
        )
    for part in FAMILIES:
        slow, lost = _of(found, part, "slowdown"), _of(found, part, "loss after the last round / target")
        shown = ", ".join(f"{name}: {one.measured:.3g}" for name, one in slow.items())
        words = f"{part}, rounds over those of the same examples dealt at random: {shown}." if slow else f"{part}:"
        if lost:
            words += (
                f" No slowdown can be told for {', '.join(lost)}: some runs did not arrive within the rounds given."
            )
        if slow or lost:
            yield words
    ranks = {one.conditions["part"]: [] for one in found if one.conditions["part"].startswith(RANKS)}
    for one in found:
        if one.conditions["part"] in ranks:
            sign = -1 if one.quantity == "labels per client" else 1  # the only one that falls with heterogeneity
            ranks[one.conditions["part"]].append((sign * one.measured, one))
    for part, ones in ranks.items():
        best, worst = (pick(rank for rank, _ in ones) for pick in (max, min))
        first = ", ".join(one.quantity for rank, one in ones if rank > best - 1e-9)
        last = ", ".join(one.quantity for rank, one in ones if rank < worst + 1e-9)
        least = f"least with {last} ({worst:.2g})"
        words = least if worst < best - 1e-9 else "no measure is better than another"
        yield (
            f"{part[len(RANKS) :].capitalize()}, {ones[0][1].conditions['population']}: the order of the slowdowns "
            f"agrees best with {first} (rank correlation {best:.2g}); {words}. That was measured on a few populations "
            "and is no law, and a rank does not give the number of rounds."
        )
    yield (
        "Gradient dissimilarity is measured at one model, here the first one, and changes as training goes on; "
        "B divides by the common gradient, and so grows without limit towards the optimum. In Synthetic(alpha, beta) "
        "every client has a labelling of its own even at (0, 0), which label shares do not see. Examples are compared "
        "with themselves, dealt at random, which keeps how hard the problem is out of the slowdown."
    )


def heterogeneity_figure(found: Sequence[Comparison], *, spreads: Sequence[float], path: Callable) -> Any:
    """Rounds of quadratics, measures against alpha, slowdowns, rank correlations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(plots.WIDTH, 6.2), layout="constrained")
    (rounds, labels), (slow, ranks) = figure.subplots(2, 2)
    rows = Findings("", "", found, (), lambda: None, {}).rows()
    look = {"markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 3}

    known = _of(found, "quadratics", "gradient dissimilarity")
    unit = next((one.measured / float(name.split()[1]) ** 2 for name, one in known.items() if one.measured > 1e-6), 1.0)
    given = [spread for spread in spreads if spread > 0]
    grid = np.unique([*np.geomspace(max(0.1, min(given, default=0.1)), max([*given, 0.2]), 16), *given])
    rounds.plot(
        unit * grid**2, [path(float(s)) for s in grid], color=plots.BLUE, linewidth=1.3, label="theory, best step"
    )
    ones = _of(found, "quadratics", "rounds to target")
    shown = [(known[name].measured, one.measured) for name, one in ones.items() if known[name].measured > 1e-6]
    if shown:
        rounds.plot(*zip(*shown, strict=True), "o", color=plots.BLUE, label="measured", **look)
    alike = [one.measured for name, one in ones.items() if known[name].measured <= 1e-6]
    if alike:
        rounds.axhline(
            alike[0], color=plots.GREY, linewidth=0.9, linestyle=(0, (4, 1.6)), label="clients with one optimum"
        )
    rounds.set(xlabel="Gradient dissimilarity, quadratics", ylabel="Rounds to the target")
    plots.logarithmic(rounds)
    rounds.legend(fontsize=7.5)

    measures = {"total variation": 1.0, "jensen shannon": 1 / np.log(2), "earth mover distance": 1 / 9}
    titles = ("total variation", "Jensen-Shannon / ln 2", "earth mover's distance / 9")
    for (measure, scale), title, (line, colour, marker) in zip(measures.items(), titles, LOOKS, strict=True):
        ones = _of(found, "digits MLP", measure)
        at = [float(name.split()[1]) for name in ones]
        labels.plot(at, [scale * one.measured for one in ones.values()], marker=marker, linestyle=line, color=colour,
                    linewidth=1.0, label=title, **look)  # fmt: skip
    labels.set(xlabel="Dirichlet alpha of the digits", ylabel="From the pooled labels")
    if _of(found, "digits MLP", "total variation"):
        plots.logarithmic(labels, "x")
        labels.legend(fontsize=7.5)

    for part, (_, colour, marker) in zip(FAMILIES, LOOKS, strict=False):
        ones = [row for row in rows if row["part"] == part and row["quantity"] == "slowdown"]
        at = [_of(found, part, "gradient dissimilarity")[row["population"]].measured for row in ones]
        middle = np.array([row["measured"] for row in ones])
        error = np.array([max(row["high"] - row["measured"], 0) for row in ones])
        if ones:
            spread = [np.minimum(error, middle), error]
            slow.errorbar(at, middle, spread, fmt=marker, color=colour, capsize=2, elinewidth=1, label=part, **look)
            for x, y, row in zip(at, middle, ones, strict=True):
                slow.annotate(row["population"], (x, y), xytext=(5, 3), textcoords="offset points", fontsize=7)
    slow.axhline(1, color=plots.GREY, linewidth=0.8)
    slow.set(xlabel="Gradient dissimilarity at the first model", ylabel="Slowdown")
    if slow.containers:
        plots.logarithmic(slow, "x")
        slow.set_ylim(0)
        slow.legend(fontsize=7.5, loc="upper left")

    parts = list(dict.fromkeys(one.conditions["part"] for one in found if one.conditions["part"].startswith(RANKS)))
    names = list(dict.fromkeys(one.quantity for one in found if one.conditions["part"] in parts))
    for i, (part, (_, colour, _)) in enumerate(zip(parts, LOOKS, strict=False)):
        values = {one.quantity: one.measured for one in found if one.conditions["part"] == part}
        places = [names.index(name) + 0.36 * i - 0.18 for name in values]
        ranks.barh(places, list(values.values()), height=0.34, color=colour, label=part.removeprefix(RANKS),
                   hatch=("", "///")[i], edgecolor="white")  # fmt: skip
    ranks.set_yticks(range(len(names)), names, fontsize=7.5)
    ranks.axvline(0, color=plots.INK, linewidth=0.8)
    ranks.set(xlabel="Rank correlation with the slowdown", xlim=(-1.05, 1.05), ylim=(len(names) - 0.4, -0.6))
    ranks.grid(False, axis="y")
    if names:
        ranks.legend(fontsize=7.5, loc="upper left")
    return figure
