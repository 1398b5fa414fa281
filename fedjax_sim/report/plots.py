"""Figures of a run, from its records. Host code; matplotlib is imported when a figure is drawn.

A record is a line of `metrics.jsonl` as a dict; what is absent or not finite leaves a gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report.axes import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    WIDTH,
    legend,
    logarithmic,
    panels,
    style,
    to_svg,
)
from fedjax_sim.report.numbers import recorded_number, scaled_bytes, scaled_seconds
from fedjax_sim.validate import one_of

__all__ = [  # with the parts of `axes` that figures of studies, sweeps and audits are drawn with
    "BLACK",
    "BLUE",
    "GREY",
    "INK",
    "ORANGE",
    "WIDTH",
    "client_spread",
    "label_mix",
    "learning_curves",
    "legend",
    "logarithmic",
    "panels",
    "participation_by_round",
    "recorded_number",
    "scaled_bytes",
    "style",
    "to_svg",
    "variance_parts",
]

MOST_POINTS = 400
MOST_CLIENTS = 40


def learning_curves(records: Sequence[Mapping[str, Any]], x: str = "rounds", besides: Sequence[str] = ()) -> Any:
    """Loss and accuracy during local training, and of the server's model on training, test and held-out data.

    Args:
      records: one a round; for x="seconds" each carries the cumulative "seconds" of its round.
      x: "rounds", "bytes" (sent so far, up and down), "simulated" (time) or "seconds" (wall time of rounds without
        compilation).
      besides: names of bytes that were sent besides those (`Metric.besides`).

    Returns: a matplotlib Figure.
    Raises: ValueError for another x; ImportError without matplotlib.
    """
    one_of("x", x, ("rounds", "bytes", "simulated", "seconds"))
    if x == "bytes":
        ways = ("uplink_bytes", "downlink_bytes", *besides)
        sent = np.cumsum(sum(np.nan_to_num(_series(records, name)) for name in ways))
        unit, name = scaled_bytes(float(sent[-1]) if len(sent) else 0.0)
        along = sent / unit
        label = f"Sent so far, {'all ways' if besides else 'up and down'} ({name})"
    elif x == "simulated":
        now = _series(records, "simulated_seconds")
        now = np.where(_series(records, "round") == 0, 0.0, now)
        unit, name = scaled_seconds(float(np.nanmax(now, initial=0)))
        along = now / unit
        label = f"Simulated time ({name})"
    elif x == "seconds":
        along = _series(records, "seconds")
        label = "Wall time of the rounds, without compilation (s)"
    else:
        along = _series(records, "round")
        label = "Round"
    curves = (
        ("local_", "local", {"color": GREY, "linewidth": 1.1}),
        ("train_", "train", {"color": GREEN, "linestyle": (0, (1, 1.2)), "marker": "^", "markersize": 3.8}),
        ("held_out_", "held-out", {"color": ORANGE, "linestyle": (0, (4, 1.6)), "marker": "s", "markersize": 3.4}),
        ("test_", "test", {"color": BLUE, "marker": "o", "markersize": 4.2}),
    )
    with style():
        figure, row = panels(2, 2.75)
        for axes, metric, factor in zip(row, ("loss", "accuracy"), (1.0, 100.0), strict=True):
            for prefix, name, look in curves:
                at, values, blocks = _thin(along, factor * _series(records, prefix + metric))
                if len(values):
                    look = {**look, "marker": ""} if len(values) > 60 else look
                    shown = f"{name} (mean of {blocks})" if blocks > 1 else name
                    axes.plot(at, values, label=shown, markeredgecolor="white", markeredgewidth=0.6, **look)
            axes.set(xlabel=label, ylabel="Loss" if metric == "loss" else "Accuracy (%)")
            axes.margins(x=0.02)
        at, values, _ = _thin(along, 100 * _series(records, "attack_success"))
        if len(values):
            axes.plot(at, values, label="attack success", color=BLACK, linestyle="--", marker="x", markersize=4)
            axes.set(ylabel="Accuracy, attack success (%)")
        legend(figure, row)
    return figure


def client_spread(records: Sequence[Mapping[str, Any]]) -> Any:
    """The spread between clients: quantiles of their held-out loss and accuracy, over the rounds.

    Returns: a matplotlib Figure.
    """
    with style():
        figure, row = panels(2, 2.75)
        for axes, metric, factor in zip(row, ("loss", "accuracy"), (1.0, 100.0), strict=True):
            name = f"held_out_{metric}_quantiles"
            rows = [
                (recorded_number(r.get("round")), *map(recorded_number, r[name]))
                for r in records
                if _is_row(r.get(name), 5)
            ]
            rows = rows[:: math.ceil(len(rows) / MOST_POINTS) or 1]
            rounds, q05, q25, q50, q75, q95 = factor * np.array(rows).reshape(-1, 6).T
            rounds = rounds / factor
            axes.fill_between(rounds, q05, q95, color=BLUE, alpha=0.14, linewidth=0, label="5 to 95 % of clients")
            axes.fill_between(rounds, q25, q75, color=BLUE, alpha=0.32, linewidth=0, label="25 to 75 %")
            axes.plot(
                rounds, q50, color=BLUE, label="median client", marker="o" if len(rows) <= 60 else "", markersize=3
            )
            axes.set(xlabel="Round", ylabel="Held-out loss" if metric == "loss" else "Held-out accuracy (%)")
            axes.margins(x=0.02)
        legend(figure, row)
    return figure


def label_mix(population: Mapping[str, Any]) -> Any:
    """Which labels some clients hold, as shares, and how many examples they have.

    Args:
      population: "client_ids", "label_names" and "label_counts" (a row of counts for each of those clients).

    Returns: a matplotlib Figure.
    """
    rows = [list(map(recorded_number, row)) for row in population["label_counts"][:MOST_CLIENTS]]
    counts = np.nan_to_num(np.array(rows).reshape(len(rows), -1), posinf=0.0, neginf=0.0)
    clients = [_text(id, 16) for id in population.get("client_ids", range(len(rows)))][: len(rows)]
    labels = [_text(name, 24) for name in population.get("label_names", range(counts.shape[1]))]
    totals = counts.sum(axis=1)
    shares = 100 * counts / np.maximum(totals, 1)[:, None]
    with style():
        import matplotlib

        figure, (left, right) = panels(2, 0.95 + 0.19 * len(rows), width_ratios=[3.2, 1], sharey=True)
        colors = matplotlib.colormaps["viridis"](np.linspace(0.02, 0.97, counts.shape[1]))
        start = np.zeros(len(rows))
        at = np.arange(len(rows))
        for i, color in enumerate(colors):
            has = shares[:, i] > 0
            left.barh(
                at[has], shares[has, i], left=start[has], height=0.78, color=color, edgecolor="white", linewidth=0.4
            )
            start += shares[:, i]
        shown = range(len(labels)) if len(labels) <= 12 else np.unique(np.linspace(0, len(labels) - 1, 8).astype(int))
        handles = [matplotlib.patches.Patch(color=colors[i], label=labels[i]) for i in shown if i < len(colors)]
        figure.legend(handles=handles, loc="outside upper left", ncols=12, handlelength=0.9, columnspacing=1.1)
        right.barh(at, totals, height=0.78, color=GREY)
        left.set(xlabel="Share of the client's examples (%)", ylabel="Client", xlim=(0, 100), yticks=at)
        left.set_yticklabels(clients)
        left.set_ylim(len(rows) - 0.4, -0.6)
        right.set(xlabel="Examples")
        for axes in (left, right):
            axes.grid(False, axis="y")
    return figure


def participation_by_round(records: Sequence[Mapping[str, Any]]) -> Any:
    """Round by round: clients invited, clients that reported, updates dropped and rounds skipped.

    Returns: a matplotlib Figure.
    """
    rounds = _series(records, "round")
    with style():
        figure, (left, right) = panels(2, 2.3)
        at, invited, blocks = _thin(rounds, _series(records, "clients_invited"))
        left.step(at, invited, where="mid", color=INK, linewidth=1.1, linestyle=(0, (1.5, 1.5)), label="invited")
        at, reported, blocks = _thin(rounds, _series(records, "clients_reported"))
        left.fill_between(at, reported, step="mid", color=BLUE, alpha=0.28, linewidth=0)
        left.step(at, reported, where="mid", color=BLUE, linewidth=1.1, label="reported")
        per = f" (mean of {blocks} rounds)" if blocks > 1 else ""
        left.set(xlabel="Round", ylabel="Clients" + per)
        at, dropped, _ = _thin(rounds, np.nan_to_num(_series(records, "dropped_clients")))
        _, skipped, blocks = _thin(rounds, np.nan_to_num(_series(records, "skipped_rounds")))
        has = dropped > 0
        lost = skipped > 0
        if has.any():
            right.vlines(at[has], 0, dropped[has], color=ORANGE, linewidth=2.2, label="dropped clients")
        if lost.any():
            right.plot(at[lost], np.zeros(lost.sum()), "v", color=BLACK, markersize=5, label="skipped rounds")
        if not (has.any() or lost.any()):
            right.text(0.5, 0.5, "no update dropped, no round skipped", transform=right.transAxes, ha="center")
        right.set(xlabel="Round", ylabel="Updates left out" + per)
        if np.isfinite(rounds).any():
            for axes in (left, right):
                axes.set_xlim(np.nanmin(rounds) - 1, np.nanmax(rounds) + 1)
        most = float(np.nanmax(np.append(dropped, 1.0)))
        left.set_ylim(bottom=0, top=1.1 * float(np.nanmax(np.concatenate([invited, reported, [1.0]]))))
        right.set_ylim(-0.08 * most, 1.1 * most)  # the markers of skipped rounds are on the zero line
        for axes in (left, right):
            axes.yaxis.get_major_locator().set_params(integer=blocks == 1)
        legend(figure, (left, right))
    return figure


def variance_parts(records: Sequence[Mapping[str, Any]]) -> Any:
    """The parts of the variance of a round's aggregate, in rounds with a variance probe, and their shares of it.

    Returns: a matplotlib Figure.
    """
    causes = (
        ("client_sampling", "client sampling", {"color": BLUE, "marker": "o"}),
        ("minibatch", "minibatches", {"color": ORANGE, "marker": "s", "linestyle": (0, (4, 1.6))}),
        ("quantization", "quantisation", {"color": GREY, "marker": "D", "linestyle": (0, (1.5, 1.5))}),
        ("privacy_noise", "privacy noise", {"color": BLACK, "marker": "^", "linestyle": (0, (6, 1.5, 1.5, 1.5))}),
    )
    rounds = _series(records, "round")
    total = _series(records, "variance_total")
    with style():
        figure, (left, right) = panels(2, 2.6)
        for name, label, look in causes:
            values = _series(records, f"variance_{name}")
            there = np.isfinite(values)
            if not (values[there] != 0).any():
                continue
            look = {"markersize": 4, "markeredgecolor": "white", "markeredgewidth": 0.5, **look}
            left.plot(rounds[there], np.where(values > 0, values, np.nan)[there], label=label, **look)
            right.plot(rounds[there], (100 * values / np.where(total == 0, np.nan, total))[there], **look)
        left.set(xlabel="Round", ylabel="Variance of the aggregate")
        logarithmic(left, "y")
        right.set(xlabel="Round", ylabel="Share (%)")
        legend(figure, (left, right))
    return figure


def _series(records: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    values = np.array([recorded_number(record.get(name)) for record in records], np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """(x, y, block length): the recorded points, or, of a long run, the means of blocks of them."""
    if not np.isfinite(y).any():
        return x[:0], y[:0], 1
    dense = np.isfinite(y).mean() > 0.5  # a curve of every round shows its gaps; one of evaluations does not
    keep = np.isfinite(x) & (np.isfinite(y) | dense)
    x = x[keep]
    y = y[keep]
    blocks = max(1, math.ceil(len(x) / MOST_POINTS))
    if blocks > 1:
        ends = np.arange(0, len(x), blocks)
        sizes = np.diff(np.append(ends, len(x)))
        x, y = (np.add.reduceat(values, ends) / sizes for values in (x, y))
    return x, y, blocks


def _text(value: Any, most: int) -> str:
    """A name as printable text of at most so many characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))[:most]


def _is_row(value: Any, length: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == length
