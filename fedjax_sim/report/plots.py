"""Draws the figures of a run from its records. Host code; matplotlib is imported when a figure is drawn.

A record is a line of `metrics.jsonl` as a dict. A value that is absent or not finite leaves a gap in its curve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report.axes import (
    BLACK as BLACK,
    BLUE as BLUE,
    GREEN,
    GREY as GREY,
    INK as INK,
    ORANGE as ORANGE,
    WIDTH as WIDTH,
    legend as legend,
    logarithmic as logarithmic,
    panels as panels,
    style as style,
    to_svg as to_svg,
)
from fedjax_sim.report.numbers import recorded_number as recorded_number, scaled_bytes as scaled_bytes, scaled_seconds
from fedjax_sim.text.printable import printable_line
from fedjax_sim.validate import one_of

# `axes` is public here too: figures of studies, sweeps and audits are drawn with its parts.

MOST_POINTS = 400  # points of a curve: a longer one shows the means of blocks of rounds
MOST_CLIENTS = 40  # clients that the mix of labels shows
MOST_LABELS = 40  # labels that it shows
MOST_NUMBERS = 12  # labels up to which its cells have numbers


def learning_curves(records: Sequence[Mapping[str, Any]], x: str = "rounds", besides: Sequence[str] = ()) -> Any:
    """Draws loss and accuracy during local training, and of the server's model on training, test and held-out data.

    Args:
      records: one a round; for x="seconds" each carries the cumulative "seconds" of its round.
      x: the horizontal axis: "rounds", "bytes" (sent so far, up and down), "simulated" (time), "epsilon" (spent so far)
        or "seconds" (wall time of rounds without compilation).
      besides: names of bytes that were sent besides those up and down (`Metric.besides`).

    Returns: a matplotlib Figure.

    Raises: ValueError for an x that is none of these five; ImportError without matplotlib.
    """
    one_of("x", x, ("rounds", "bytes", "simulated", "epsilon", "seconds"))
    if x == "bytes":
        directions = ("uplink_bytes", "downlink_bytes", *besides)
        sent = np.cumsum(sum(np.nan_to_num(_series(records, name)) for name in directions))
        unit, name = scaled_bytes(float(sent[-1]) if len(sent) else 0.0)
        positions = sent / unit
        label = f"Sent so far, {'all ways' if besides else 'up and down'} ({name})"
    elif x == "simulated":
        now = _series(records, "simulated_seconds")
        # The evaluation before training happens at time zero.
        now = np.where(_series(records, "round") == 0, 0.0, now)
        unit, name = scaled_seconds(float(np.nanmax(now, initial=0)))
        positions = now / unit
        label = f"Simulated time ({name})"
    elif x == "epsilon":
        # The model before training has told nothing.
        positions = np.where(_series(records, "round") == 0, 0.0, _series(records, "epsilon"))
        label = "Epsilon spent so far"
    elif x == "seconds":
        positions = _series(records, "seconds")
        label = "Wall time of the rounds, without compilation (s)"
    else:
        positions = _series(records, "round")
        label = "Round"
    curves = (
        ("local_", "local", {"color": GREY, "linewidth": 1.1}),
        ("train_", "train", {"color": GREEN, "linestyle": (0, (1, 1.2)), "marker": "^", "markersize": 3.8}),
        ("test_", "test", {"color": BLUE, "marker": "o", "markersize": 4.2}),
        # Often equal to the test curve: dashes over it, and open squares around its points, show both.
        ("held_out_", "held-out", {"color": ORANGE, "linestyle": (0, (4, 1.6)), "marker": "s", "markersize": 6.5}
         | {"markerfacecolor": "none", "markeredgecolor": ORANGE, "markeredgewidth": 1.1, "linewidth": 1.2}),
        ("owner_", "owners", {"color": BLACK, "linestyle": "-.", "marker": "D", "markersize": 3.4}),
    )  # fmt: skip
    # A task without classes, such as a regression, has a loss alone.
    shares = [*(f"{prefix}accuracy" for prefix, _, _ in curves), "attack_success"]
    has_shares = any(np.isfinite(_series(records, name)).any() for name in shares)
    metrics = [("loss", 1.0), ("accuracy", 100.0)][: 1 + has_shares]
    with style():
        figure, row = panels(len(metrics), 2.75)
        row = np.atleast_1d(row)
        for axes, (metric, factor) in zip(row, metrics, strict=True):
            for prefix, name, curve_style in curves:
                x_values, values, block_length = _thin(positions, factor * _series(records, prefix + metric))
                if len(values):
                    # Many markers would hide the curve.
                    curve_style = {**curve_style, "marker": ""} if len(values) > 60 else curve_style
                    shown = f"{name} (mean of {block_length})" if block_length > 1 else name
                    edges = {"markeredgecolor": "white", "markeredgewidth": 0.6}
                    axes.plot(x_values, values, label=shown, **(edges | curve_style))
            axes.set(xlabel=label, ylabel="Loss" if metric == "loss" else "Accuracy (%)")
            if metric == "loss" and _falls_tenfold(axes):
                logarithmic(axes, "y")
            axes.margins(x=0.02)
        x_values, values, _ = _thin(positions, 100 * _series(records, "attack_success"))
        if len(values):
            last = row[-1]
            last.plot(x_values, values, label="attack success", color=BLACK, linestyle="--", marker="x", markersize=4)
            last.set(ylabel="Accuracy, attack success (%)")
        legend(figure, row)
    return figure


def _falls_tenfold(axes: Any) -> bool:
    """Returns whether the curves of a panel are positive, and their largest value is ten times the smallest or more."""
    values = np.concatenate([line.get_ydata() for line in axes.lines] or [np.ones(1)])
    values = values[np.isfinite(values)]
    return bool(len(values) and values.min() > 0 and values.max() >= 10 * values.min())


def client_spread(records: Sequence[Mapping[str, Any]]) -> Any:
    """Draws the spread between clients: quantiles of their held-out loss and accuracy, over the rounds.

    Without held-out clients they are those of owners: of the model that each client would use, on the rows it keeps.

    Args:
      records: of the log, one a round; of each, five quantiles `held_out_loss_quantiles` and the like are read.

    Returns: a matplotlib Figure.
    """
    shown = []
    has_held_out = any(name.startswith("held_out_") for record in records for name in record)
    place = "held_out" if has_held_out else "owner"
    for metric, factor in (("loss", 1.0), ("accuracy", 100.0)):
        name = f"{place}_{metric}_quantiles"
        rows = [
            (recorded_number(record.get("round")), *map(recorded_number, record[name]))
            for record in records
            if _is_row(record.get(name), 5)
        ]
        if rows:
            shown.append((metric, factor, rows))
    with style():
        figure, row = panels(max(len(shown), 1), 2.75)
        row = np.atleast_1d(row)
        for axes, (metric, factor, rows) in zip(row, shown, strict=False):
            rows = rows[:: math.ceil(len(rows) / MOST_POINTS) or 1]
            # The factor makes percent of all columns, so it is taken out of the rounds again.
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
    """Draws the labels that some clients hold, in percent of each client's examples, and how many examples these are.

    Args:
      population: "client_ids", "client_names" where clients have names, "label_names" and "label_counts" (a row of
        counts for each of those clients). Of more than 40 labels the most frequent ones are drawn, and the others
        together.

    Returns: a matplotlib Figure.
    """
    # A file may hold anything: a count that is no finite number counts as zero.
    rows = [list(map(recorded_number, row)) for row in population["label_counts"][:MOST_CLIENTS]]
    counts = np.nan_to_num(np.array(rows).reshape(len(rows), -1), posinf=0.0, neginf=0.0)
    ids = population.get("client_ids", range(len(rows)))
    clients = [_text(client, 16) for client in population.get("client_names") or ids][: len(rows)]
    # A file may name too few labels, or too many.
    names = list(population.get("label_names", ()))[: counts.shape[1]]
    labels = [_text(name, 24) for name in [*names, *range(len(names), counts.shape[1])]]
    if counts.shape[1] > MOST_LABELS:
        most_frequent = np.sort(np.argsort(-counts.sum(axis=0), kind="stable")[: MOST_LABELS - 1])
        others = np.delete(counts, most_frequent, axis=1).sum(axis=1, keepdims=True)
        counts = np.concatenate([counts[:, most_frequent], others], axis=1)
        labels = [*(labels[i] for i in most_frequent), "others"]
    totals = counts.sum(axis=1)
    percent = 100 * counts / np.maximum(totals, 1)[:, None]
    num_labels = counts.shape[1]
    positions = np.arange(len(rows))
    with style():
        height = 1.0 + 0.19 * len(rows)
        figure, (shares, sizes) = panels(2, height, width_ratios=[3.2, 1], sharey=True)
        edges = np.arange(num_labels + 1) - 0.5, np.arange(len(rows) + 1) - 0.5
        shown = np.ma.masked_equal(percent, 0)
        shares.pcolormesh(*edges, shown, cmap="Blues", vmin=-15, vmax=100, edgecolor="white", linewidth=0.4)
        if num_labels <= MOST_NUMBERS:
            for client, label in np.argwhere(percent >= 0.5):
                color = "white" if percent[client, label] > 55 else INK
                text = f"{percent[client, label]:.0f}"
                shares.text(label, client, text, ha="center", va="center", fontsize=6.5, color=color)
        is_crowded = sum(map(len, labels)) > 70
        shares.set_xticks(np.arange(num_labels), labels, rotation=90 if is_crowded else 0)
        shares.set(xlabel="Label, in % of the client's examples", ylabel="Client", yticks=positions)
        shares.set_yticklabels(clients)
        shares.set_ylim(len(rows) - 0.4, -0.6)
        sizes.barh(positions, totals, height=0.78, color=GREY)
        sizes.set(xlabel="Examples")
        shares.grid(False)
        sizes.grid(False, axis="y")
    return figure


def client_sizes(population: Mapping[str, Any]) -> Any:
    """Draws how many clients have how many examples.

    Args:
      population: "examples_histogram": {"edges": [bins + 1], "clients": [bins]}; a bin has its lower edge.

    Returns: a matplotlib Figure.
    """
    histogram = population["examples_histogram"]
    edges, clients = (np.array([recorded_number(x) for x in histogram[name]]) for name in ("edges", "clients"))
    with style():
        figure, axes = panels(1, 1.9)
        axes.stairs(np.nan_to_num(clients), edges, fill=True, color=BLUE, alpha=0.75)
        axes.set(xlabel="Examples of a client", ylabel="Clients")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.02)
    return figure


def participation_by_round(records: Sequence[Mapping[str, Any]]) -> Any:
    """Draws, round by round, clients invited and clients that reported; updates dropped and rounds skipped, if any.

    Args:
      records: of the log, one a round.

    Returns: a matplotlib Figure.
    """
    # Round 0 is the evaluation before training.
    records = [record for record in records if record.get("round") != 0]
    rounds = _series(records, "round")
    x_values, dropped, _ = _thin(rounds, np.nan_to_num(_series(records, "dropped_clients")))
    _, skipped, block_length = _thin(rounds, np.nan_to_num(_series(records, "skipped_rounds")))
    has_dropped = dropped > 0
    has_skipped = skipped > 0
    is_any_left_out = has_dropped.any() or has_skipped.any()
    mean_of = f" (mean of {block_length} rounds)" if block_length > 1 else ""
    with style():
        figure, row = panels(2, 2.3) if is_any_left_out else panels(1, 2.0)
        participation, *others = row if is_any_left_out else [row]
        invited_rounds, invited, _ = _thin(rounds, _series(records, "clients_invited"))
        participation.step(
            invited_rounds, invited, where="mid", color=INK, linewidth=1.1, linestyle=(0, (1.5, 1.5)), label="invited"
        )
        reported_rounds, reported, _ = _thin(rounds, _series(records, "clients_reported"))
        participation.fill_between(reported_rounds, reported, step="mid", color=BLUE, alpha=0.28, linewidth=0)
        participation.step(reported_rounds, reported, where="mid", color=BLUE, linewidth=1.1, label="reported")
        participation.set(xlabel="Round", ylabel="Clients" + mean_of)
        participation.set_ylim(bottom=0, top=1.1 * float(np.nanmax(np.concatenate([invited, reported, [1.0]]))))
        for right in others:
            if has_dropped.any():
                right.vlines(
                    x_values[has_dropped], 0, dropped[has_dropped], color=ORANGE, linewidth=2.2, label="dropped clients"
                )
            if has_skipped.any():
                zeros = np.zeros(has_skipped.sum())
                right.plot(x_values[has_skipped], zeros, "v", color=BLACK, markersize=5, label="skipped rounds")
            right.set(xlabel="Round", ylabel="Updates left out" + mean_of)
            most = float(np.nanmax(np.append(dropped, 1.0)))
            # Room below zero, because the markers of skipped rounds stand on the zero line.
            right.set_ylim(-0.08 * most, 1.1 * most)
        for axes in (participation, *others):
            if np.isfinite(rounds).any():
                axes.set_xlim(np.nanmin(rounds) - 0.5, np.nanmax(rounds) + 0.5)
            axes.yaxis.get_major_locator().set_params(integer=block_length == 1)
        legend(figure, (participation, *others))
    return figure


def variance_parts(records: Sequence[Mapping[str, Any]]) -> Any:
    """Draws the parts of the variance of a round's aggregate, in rounds with a variance probe, and their shares.

    Args:
      records: of the log, one a round; those with `variance_total` are drawn.

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
        figure, (variances, shares) = panels(2, 2.6)
        for name, label, look in causes:
            values = _series(records, f"variance_{name}")
            is_measured = np.isfinite(values)
            if not (values[is_measured] != 0).any():
                continue
            look = {"markersize": 4, "markeredgecolor": "white", "markeredgewidth": 0.5, **look}
            # A logarithmic axis shows no estimate below zero.
            variances.plot(rounds[is_measured], np.where(values > 0, values, np.nan)[is_measured], label=label, **look)
            shares.plot(rounds[is_measured], (100 * values / np.where(total == 0, np.nan, total))[is_measured], **look)
        variances.set(xlabel="Round", ylabel="Variance of the aggregate")
        logarithmic(variances, "y")
        shares.set(xlabel="Round", ylabel="Share (%)")
        legend(figure, (variances, shares))
    return figure


def _series(records: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Returns a metric of all records as float64; NaN where it is absent or not finite."""
    values = np.array([recorded_number(record.get(name)) for record in records], np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the points of a curve; for a long run, the means of blocks of points.

    Args:
      x: [T] float64, places on the horizontal axis.
      y: [T] float64; NaN where nothing was recorded.

    Returns: (x [n], y [n], block length), with n at most `MOST_POINTS`. The block length counts recorded points; 1
      leaves them as they are. NaN stays where most rounds have a value, so that a curve shows its gaps.
    """
    if not np.isfinite(y).any():
        return x[:0], y[:0], 1
    # A curve with a value in most rounds shows its gaps; a curve of evaluations connects its points.
    dense = np.isfinite(y).mean() > 0.5
    keep = np.isfinite(x) & (np.isfinite(y) | dense)
    x = x[keep]
    y = y[keep]
    block_length = max(1, math.ceil(len(x) / MOST_POINTS))
    if block_length > 1:
        starts = np.arange(0, len(x), block_length)
        sizes = np.diff(np.append(starts, len(x)))
        x, y = (np.add.reduceat(values, starts) / sizes for values in (x, y))
    return x, y, block_length


def _text(name: Any, most: int) -> str:
    """Returns a name as a printable line of at most `most` characters."""
    return printable_line(name)[:most]


def _is_row(recorded: Any, length: int) -> bool:
    """Returns whether a recorded value is a list of this length."""
    return isinstance(recorded, (list, tuple)) and len(recorded) == length
