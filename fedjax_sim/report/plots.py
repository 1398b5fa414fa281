"""Draws the figures of a run from its records. Host code; matplotlib is imported when a figure is drawn.

A record is a line of `metrics.jsonl` as a dict. A curve has a gap and a cross where a number is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import charts
from fedjax_sim.report.axes import GREY, legend as legend, style as style, to_svg as to_svg
from fedjax_sim.report.numbers import recorded_number as recorded_number, scaled_bytes as scaled_bytes, scaled_seconds
from fedjax_sim.text.printable import printable_line
from fedjax_sim.validate import one_of

MOST_POINTS = 400  # points of a curve: a longer one shows the means of blocks of rounds
MOST_CLIENTS = 40  # clients that the mix of labels shows
MOST_LABELS = 40  # labels that it shows
# beginning of a metric's name -> its curve
CURVES = {"test_": "test", "held_out_": "held-out", "train_": "train", "local_": "local", "owner_": "owners"}
QUANTILES = ("5 %", "25 %", "median", "75 %", "95 %")  # of clients, as records have them
# part of a variance -> its name
CAUSES = {"client_sampling": "client sampling", "minibatch": "minibatches", "quantization": "quantisation",
          "privacy_noise": "privacy noise"}  # fmt: skip

Row = charts.Row


@style()
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
    losses, names = _curves(records, positions, {f"{prefix}loss": name for prefix, name in CURVES.items()})
    shares = {f"{prefix}accuracy": name for prefix, name in CURVES.items()} | {"attack_success": "attack success"}
    accuracies, share_names = _curves(records, positions, shares, factor=100.0)
    is_attacked = any("attack_success" in record for record in records)
    shown = [("Loss", losses, names)]
    # A task without classes, such as a regression, has a loss alone.
    if any(math.isfinite(row["value"]) for row in accuracies):
        words = "Accuracy, attack success (%)" if is_attacked else "Accuracy (%)"
        shown.append((words, accuracies, share_names))
    figure, row = charts.panels(1, len(shown), height=2.75)
    for panel, (words, rows, names) in zip(row, shown, strict=True):
        log = "y" if rows is losses and _falls_tenfold(rows) else ""
        # The curve of local training is noisy and lies beneath the others, without markers.
        for is_local in (True, False):
            part = [row for row in rows if row["curve"].startswith(CURVES["local_"]) == is_local]
            charts.lines(panel, part, "at", "value", by="curve", series=names, log=log, band=is_local,
                         cross="not finite", xlabel=label, ylabel=words)  # fmt: skip
    legend(figure, row)
    return figure


def _falls_tenfold(rows: Sequence[Row]) -> bool:
    """Returns whether the finite values of curves are positive, and the largest ten times the smallest or more."""
    values = [row["value"] for row in rows if math.isfinite(row["value"])]
    return bool(values) and min(values) > 0 and max(values) >= 10 * min(values)


@style()
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
    for metric, factor, label in (("loss", 1.0, "Held-out loss"), ("accuracy", 100.0, "Held-out accuracy (%)")):
        name = f"{place}_{metric}_quantiles"
        rows = [
            {"round": recorded_number(record.get("round"))}
            | {share: factor * recorded_number(value) for share, value in zip(QUANTILES, record[name], strict=True)}
            for record in records
            if _is_row(record.get(name), len(QUANTILES))
        ]
        if rows:
            shown.append((label, rows[:: math.ceil(len(rows) / MOST_POINTS)]))
    figure, row = charts.panels(1, max(len(shown), 1), height=2.75)
    for panel, (label, rows) in zip(row, shown, strict=False):
        for low, high in (("5 %", "95 %"), ("25 %", "75 %")):
            intervals = [quantiles | {"low": quantiles[low], "high": quantiles[high]} for quantiles in rows]
            charts.lines(panel, intervals, "round", "median", band=True, xlabel="Round", ylabel=label)
        charts.lines(panel, rows, "round", "median", xlabel="Round", ylabel=label)
        panel.set_title("Median client, in bands of 50 % and 90 % of the clients")
    return figure


@style()
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
    # Clients and labels are numbers until the end, since names may be alike.
    cells = [
        {"label": label, "client": client, "percent": percent[client, label]}
        for client, label in np.ndindex(percent.shape)
    ]
    height = 1.0 + 0.19 * len(rows)
    figure, (left, right) = charts.panels(1, 2, height=height, width_ratios=[3.2, 1], sharey=True)
    charts.heat_map(left, cells, "label", "client", "percent", xlabel="Label, in % of the client's examples",
                    ylabel="Client", shown=lambda share: f"{share:.0f}" if share >= 0.5 else "")  # fmt: skip
    # A label that a client lacks is blank, and the smallest share is not.
    left.collections[0].set(array=np.ma.masked_equal(percent, 0), clim=(-15, percent.max()))
    left.set_xticks(range(len(labels)), labels, rotation=90 if sum(map(len, labels)) > 70 else 0)
    left.set_yticks(range(len(rows)), clients)
    right.barh(range(len(rows)), totals, height=0.78, color=GREY)
    right.set(xlabel="Examples")
    right.grid(False, axis="y")
    return figure


@style()
def client_sizes(population: Mapping[str, Any]) -> Any:
    """Draws how many clients have how many examples.

    Args:
      population: "examples_histogram": {"edges": [bins + 1], "clients": [bins]}; a bin has its lower edge.

    Returns: a matplotlib Figure.
    """
    histogram = population["examples_histogram"]
    edges, clients = ([recorded_number(x) for x in histogram[name]] for name in ("edges", "clients"))
    rows = [
        {"low": low, "high": high, "clients": number}
        for low, high, number in zip(edges[:-1], edges[1:], clients, strict=True)
    ]
    figure, (panel,) = charts.panels(1, 1, height=1.9)
    charts.histogram(panel, rows, "clients", xlabel="Examples of a client", ylabel="Clients")
    return figure


@style()
def participation_by_round(records: Sequence[Mapping[str, Any]]) -> Any:
    """Draws, round by round, clients invited and clients that reported; updates dropped and rounds skipped, if any.

    Args:
      records: of the log, one a round.

    Returns: a matplotlib Figure.
    """
    # Round 0 is the evaluation before training.
    records = [record for record in records if record.get("round") != 0]
    shown = {"Clients": {"clients_invited": "invited", "clients_reported": "reported"}}
    for metric, words in (("dropped_clients", "Dropped clients"), ("skipped_rounds", "Skipped rounds")):
        if (_series(records, metric) > 0).any():
            shown[words] = {metric: words.lower()}
    curves = [_curves(records, _series(records, "round"), names) for names in shown.values()]
    series = [name for _, names in curves for name in names]
    figure, row = charts.panels(1, len(shown), height=2.3)
    for panel, label, (rows, _) in zip(row, shown, curves, strict=True):
        charts.lines(panel, rows, "at", "value", by="curve", series=series, xlabel="Round", ylabel=label)
        panel.set_ylim(bottom=0)
    legend(figure, row)
    return figure


@style()
def variance_parts(records: Sequence[Mapping[str, Any]]) -> Any:
    """Draws the parts of the variance of a round's aggregate, in rounds with a variance probe, and their shares.

    Args:
      records: of the log, one a round; those with `variance_total` are drawn.

    Returns: a matplotlib Figure.
    """
    rounds, totals = _series(records, "round"), _series(records, "variance_total")
    rows = []
    for cause, name in CAUSES.items():
        values = _series(records, f"variance_{cause}")
        if not (values[np.isfinite(values)] != 0).any():
            continue
        rows += [
            {"round": at, "cause": name, "variance": value, "share": 100 * value / total if total else math.nan}
            for at, total, value in zip(rounds, totals, values, strict=True)
            if math.isfinite(value)
        ]
    figure, (left, right) = charts.panels(1, 2, height=2.6)
    of_causes: dict[str, Any] = {"by": "cause", "series": list(CAUSES.values()), "xlabel": "Round"}
    # A logarithmic axis shows no estimate below zero.
    charts.lines(left, rows, "round", "variance", log="y", ylabel="Variance of the aggregate", **of_causes)
    charts.lines(right, rows, "round", "share", ylabel="Share (%)", **of_causes)
    legend(figure, (left, right))
    return figure


def _curves(
    records: Sequence[Mapping[str, Any]], positions: np.ndarray, names: Mapping[str, str], factor: float = 1.0
) -> tuple[list[Row], list[str]]:
    """Returns curves as rows for `charts.lines`.

    Args:
      records: one a round.
      positions: [T] their places on the horizontal axis.
      names: metric -> the name of its curve.
      factor: of the values.

    Returns: (rows, names): rows with the columns "at", "value" and "curve", for each record that has the metric, or for
      each block of records; and the names of all curves, each with the length of its blocks.
    """
    rows: list[Row] = []
    shown = []
    for metric, name in names.items():
        is_recorded = np.array([metric in record for record in records], bool)
        at, values, block_length = _thin(positions[is_recorded], factor * _series(records, metric)[is_recorded])
        shown.append(f"{name} (mean of {block_length})" if block_length > 1 else name)
        rows += [{"at": x, "value": y, "curve": shown[-1]} for x, y in zip(at, values, strict=True)]
    return rows, shown


def _series(records: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Returns a metric of all records as float64; NaN where it is absent or not finite."""
    values = np.array([recorded_number(record.get(name)) for record in records], np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the points of a curve; for a long run, the means of blocks of points.

    Args:
      x: [T] float64, places on the horizontal axis.
      y: [T] float64; NaN where it is not finite.

    Returns: (x [n], y [n], block length), with n at most `MOST_POINTS`. A block length of 1 leaves points as they are.
      The mean of a block with a NaN is NaN, so that a curve shows its gaps.
    """
    is_placed = np.isfinite(x)
    x = x[is_placed]
    y = y[is_placed]
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
