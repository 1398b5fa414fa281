"""Five charts that studies, sweeps and pages share: lines, dots, heat map, histogram and timeline.

A chart takes rows (dicts) and the names of their columns. Colour, marker and line of a series follow from its place
among the series, so all figures look alike. A column that the rows lack is added to them first:
`[row | {"rate": row["cohort_size"] / size} for row in rows]`. Host code; matplotlib is imported when a figure is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedjax_sim import validate
from fedjax_sim.report.axes import BLACK, BLUE, GREY, INK, ORANGE, logarithmic, width

Row: TypeAlias = dict[str, Any]


class Look(NamedTuple):
    """How a series is drawn; the fields are arguments of matplotlib's `plot`."""

    color: str
    marker: str
    linestyle: Any


LOOKS = (
    Look(BLUE, "o", "-"),
    Look(ORANGE, "s", (0, (4, 1.6))),
    Look(BLACK, "^", (0, (1.5, 1.5))),
    Look(GREY, "D", "-"),
    Look("#009E73", "v", (0, (6, 1.5, 1.2, 1.5))),
    Look("#CC79A7", "P", (0, (3, 1, 1, 1, 1, 1))),
    Look("#56B4E9", "X", (0, (8, 2))),
    Look("#B08900", "*", (0, (2, 2))),
)
MARKER_STYLE = {"markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 3}
OPEN = {"markerfacecolor": "white", "markeredgewidth": 1.3}
LEGEND_FONT_SIZE = 7.5  # points of a legend's letters
MOST_MARKERS = 60  # a series of more points is a line with a band
APART = 5.0  # points between series that stand beside each other
LEAST_GAP = 1 / 15  # of a logarithmic axis: with ticks closer than this its values have no ticks of their own
MOST_LETTERS = 6  # of a tick; a longer number was measured or computed, and a logarithmic axis has its usual ticks
MOST_NUMBERED = 16  # columns of a map up to which each cell has its number


def panels(rows: int, columns: int, height: float = 3.1, **grid: Any) -> tuple[Any, list[Any]]:
    """Makes a figure as wide as the style says, with a grid of panels.

    Args:
      rows: panels from top to bottom.
      columns: panels from left to right.
      height: of a panel, in inches.
      **grid: options of matplotlib's `subplots`, such as `width_ratios` and `sharey`.

    Returns: (figure, panels): the matplotlib Figure, and its rows x columns axes in row-major order.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width(), height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **grid).flat)


def lines(
    panel: Any,
    rows: Sequence[Row],
    x: str,
    y: str = "measured",
    *,
    by: str | None = None,
    theory: Sequence[Row] | None = None,
    levels: Mapping[str, float] | None = None,
    text: str | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    log: str = "",
    line: str = "theory",
    series: Sequence[Any] = (),
    band: bool = False,
    apart: bool = False,
    cross: str | None = None,
) -> None:
    """Draws measured numbers as points with their intervals, and lines of theory through them or beside them.

    Args:
      panel: the matplotlib axes to draw on.
      rows: a point each. The columns "low" and "high", where a row has them, are the ends of its interval. A row whose
        y is missing or not finite is a cross at the bottom. On a logarithmic axis, numbers below zero are left out.
      x, y: the columns of the two places.
      by: the column whose values are the series; None draws one.
      theory: rows with the columns `x`, `by` and "predicted", which lie on a line for each series; the same rows where
        the prediction is joined between measurements. A series may be of theory alone. None joins the measured points.
      levels: heights of horizontal lines, by what they are; None draws none.
      text: a column that is written beside each point; None writes nothing.
      xlabel, ylabel: the axes' labels; by default the columns' names.
      log: the logarithmic axes: "", "x", "y" or "xy". An x of zero has a place on them too.
      line: what the lines are, in the legend.
      series: values of `by` in the order of their looks, whether or not rows have them; others follow.
      band: says whether intervals are a band around a line without markers, as those of many points always are.
      apart: says whether series stand a little beside each other, so that intervals do not hide each other.
      cross: what crosses are, in the legend; None leaves them out of it.

    Raises: ValueError for more series, or levels, than there are looks.

    Guarantees: the looks of series follow their order, points are the rows' numbers (tests/report/test_charts.py).
    """
    names = _series([*rows, *(theory or ())], by, series)
    shown = []
    for i, (look, name) in enumerate(zip(LOOKS, names, strict=False)):
        points = sorted(_of(rows, by, name), key=lambda row: _number(row[x]))
        curve = sorted(_of(theory or (), by, name), key=lambda row: _number(row[x]))
        is_line = _draw_curve(panel, curve, look, x, log)
        label = _label(name, by, bool(points), line)
        is_joined = theory is None
        if band or len(points) > MOST_MARKERS:
            look, is_joined = look._replace(marker=""), True
        drawn = _draw_points(panel, points, look, label if by else None, x=x, y=y, log=log, joined=is_joined)
        missing = [_number(row[x]) for row in points if not math.isfinite(_number(row[y]))]
        if missing:
            # A number that was not reached has no height: its cross stands at the bottom, a later series' one higher.
            bottom = {"transform": panel.get_xaxis_transform(), "clip_on": False}
            drawn += panel.plot(missing, [0.03 * (i + 1)] * len(missing), "x", color=look.color, label=cross, **bottom)
        if text is not None:
            for row in points:
                place = _number(row[x]), _number(row[y])
                offset = {"xytext": (5, 4), "textcoords": "offset points"}
                panel.annotate(str(row[text]), place, **offset, fontsize=LEGEND_FONT_SIZE)
        if apart:
            _shift(panel, drawn, APART * (i - (len(names) - 1) / 2))
        shown.append((label, look, bool(drawn), is_line or (is_joined and bool(drawn))))
    _draw_levels(panel, levels, "h")
    panel.set(xlabel=xlabel or _words(x), ylabel=ylabel or _words(y))
    _scale(panel, [_number(row[x]) for row in rows], log)
    if by is None and theory:
        shown = [("measured", LOOKS[0], True, False), (line, LOOKS[0], False, True)]
    _legend(panel, shown if by or theory else [], f"points: measured, lines: {line}" if by and theory else None)


def dots(
    panel: Any,
    rows: Sequence[Row],
    names: str,
    value: str = "measured",
    *,
    by: str | None = None,
    levels: Mapping[str, float] | None = None,
    label: str | None = None,
    log: bool = False,
    line: str = "theory",
    filled: str | None = None,
    cross: str | None = None,
) -> None:
    """Draws a line of text for each name with a dot on its interval, and a tick where theory expects it.

    Args:
      panel: the matplotlib axes to draw on.
      rows: a dot each, in order from above. "low" and "high" are the ends of an interval, "predicted" is the tick, and
        any of the three may be missing. A row whose value is missing or not finite is a cross at the left.
      names: the column of the names at the left.
      value: the column of the dots' places.
      by: the column whose values are the series, which lie close together under one name; None draws one.
      levels: places of vertical lines, by what they are; None draws none.
      label: the horizontal axis' label; by default the column's name.
      log: says whether the horizontal axis is logarithmic.
      line: what the ticks are, in the legend.
      filled: a column of truth values: dots where it is false are open; None fills all.
      cross: what crosses are, in the legend; None leaves them out of it.

    Guarantees: each dot stands in the line of its name (tests/report/test_charts.py::test_dots).
    """
    series = _series(rows, by)
    places = {name: i for i, name in enumerate(dict.fromkeys(row[names] for row in rows))}
    shown = []
    is_empty = True
    for i, (look, name) in enumerate(zip(LOOKS, series, strict=False)):
        # The dots of one name share 0.6 of its line.
        shift = 0.6 * ((i + 0.5) / len(series) - 0.5)
        for row in _of(rows, by, name):
            height = places[row[names]] + shift
            low, middle, high, predicted = (_number(row.get(key)) for key in ("low", value, "high", "predicted"))
            if low < high:
                panel.hlines(height, low, high, color=look.color, linewidth=1.4)
            if math.isfinite(middle):
                is_open = filled is not None and not row[filled]
                form = MARKER_STYLE | (OPEN | {"markeredgecolor": look.color} if is_open else {})
                panel.plot(middle, height, look.marker, color=look.color, **form)
                is_empty = False
            else:
                left = {"transform": panel.get_yaxis_transform(), "clip_on": False}
                panel.plot(0.02, height, "x", color=look.color, label=cross, **left)
            if math.isfinite(predicted):
                panel.plot(predicted, height, "|", color=INK, markersize=11, markeredgewidth=1.6, zorder=4)
        shown.append((_label(name, by, True, ""), look, True, False))
    if any(math.isfinite(_number(row.get("predicted"))) for row in rows):
        shown.append((line, Look(INK, "|", "none"), True, False))
    _draw_levels(panel, levels, "v")
    panel.set_yticks(range(len(places)), [str(name) for name in places], fontsize=LEGEND_FONT_SIZE)
    panel.set(xlabel=label or _words(value), ylim=(len(places) - 0.4, -0.6))
    panel.grid(False, axis="y")
    _scale(panel, [_number(row[value]) for row in rows], "x" * log)
    if is_empty:
        panel.set_xticks([])  # no number, no scale
    _legend(panel, shown if len(shown) > 1 else [])


def heat_map(
    panel: Any,
    rows: Sequence[Row],
    x: str,
    y: str,
    value: str = "measured",
    *,
    marked: str | None = None,
    less_is_darker: bool = False,
    shown: Callable[[float], str] = "{:.3g}".format,
    xlabel: str | None = None,
    ylabel: str | None = None,
) -> None:
    """Draws a cell for each pair of values of two columns, darker where its number is larger.

    Args:
      panel: the matplotlib axes to draw on.
      rows: a cell each. A number that is missing or not finite is a cross.
      x, y: the columns of a cell's two places, which stand in the order of the rows, from above.
      value: the column of the numbers.
      marked: a column of truth values: cells where it is true have a frame; None frames none.
      less_is_darker: says whether smaller numbers are darker.
      shown: number -> its text.
      xlabel, ylabel: the axes' labels; by default the columns' names.

    Guarantees: each cell has the number of its own pair (tests/report/test_charts.py::test_heat_map).
    """
    across, down = (list(dict.fromkeys(row[name] for row in rows)) for name in (x, y))
    table = np.full((len(down), len(across)), np.nan)
    for row in rows:
        table[down.index(row[y]), across.index(row[x])] = _number(row[value])
    drawn = np.ma.masked_invalid(-table if less_is_darker else table)
    edges = np.arange(len(across) + 1) - 0.5, np.arange(len(down) + 1) - 0.5
    mesh = panel.pcolormesh(*edges, drawn, cmap="Blues", edgecolor="white", linewidth=0.6)
    low, high = mesh.get_clim() if drawn.count() else (0.0, 1.0)
    for place in np.ndindex(table.shape):
        is_known = math.isfinite(table[place])
        if len(across) <= MOST_NUMBERED or not is_known:
            is_dark = is_known and drawn[place] > low + 0.6 * (high - low)
            words = shown(float(table[place])) if is_known else "\N{MULTIPLICATION SIGN}"
            colour = "white" if is_dark else INK
            panel.text(*place[::-1], words, ha="center", va="center", fontsize=8, color=colour)
    for row in rows:
        if marked and row[marked]:
            corner = across.index(row[x]) - 0.5, down.index(row[y]) - 0.5
            panel.add_patch(_frame(corner))
    panel.set_xticks(range(len(across)), [_short(label) for label in across])
    panel.set_yticks(range(len(down)), [_short(label) for label in down])
    panel.set(xlabel=xlabel or _words(x), ylabel=ylabel or _words(y), ylim=(len(down) - 0.5, -0.5))
    panel.grid(False)


def histogram(
    panel: Any,
    rows: Sequence[Row],
    value: str = "count",
    *,
    by: str | None = None,
    levels: Mapping[str, float] | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
) -> None:
    """Draws counts, or shares, in bins.

    Args:
      panel: the matplotlib axes to draw on.
      rows: a bin each, from "low" to "high" (`bins` makes them); the bins of a series follow each other.
      value: the column of the counts.
      by: the column whose values are the series; None draws one.
      levels: places of vertical lines, by what they are; None draws none.
      xlabel, ylabel: the axes' labels; `ylabel` is by default the column's name.

    Guarantees: a bin is as high as its number (tests/report/test_charts.py::test_histogram).
    """
    shown = []
    for look, name in zip(LOOKS, _series(rows, by), strict=False):
        bins_of_series = _of(rows, by, name)
        edges = [bins_of_series[0]["low"], *(row["high"] for row in bins_of_series)]
        counts = np.nan_to_num([_number(row[value]) for row in bins_of_series])
        panel.stairs(counts, edges, fill=True, color=look.color, alpha=0.3)
        panel.stairs(counts, edges, color=look.color, linestyle=look.linestyle, linewidth=1.3)
        shown.append((_label(name, by, True, ""), look, False, True))
    _draw_levels(panel, levels, "v")
    panel.set(xlabel=xlabel or "", ylabel=ylabel or _words(value))
    panel.set_ylim(bottom=0)
    panel.margins(x=0.02)
    _legend(panel, shown if by else [])


def bins(values: Any, edges: Any, **columns: Any) -> list[dict[str, Any]]:
    """Counts values in bins, as rows for `histogram`.

    Args:
      values: [n] numbers.
      edges: [B + 1] rising.
      **columns: further columns of the rows, such as the series.

    >>> [row["share"] for row in bins([0.1, 0.2, 0.9, 0.3], [0.0, 0.5, 1.0])]
    [0.75, 0.25]
    """
    values = np.asarray(values, np.float64)
    counts = np.histogram(values, edges)[0].tolist()
    return [
        columns | {"low": low, "high": high, "count": count, "share": count / max(values.size, 1)}
        for low, high, count in zip(list(edges)[:-1], list(edges)[1:], counts, strict=True)
    ]


def timeline(
    panel: Any,
    rows: Sequence[Row],
    names: str,
    *,
    by: str,
    events: Sequence[Row] = (),
    series: Sequence[Any] = (),
    xlabel: str | None = None,
    ylabel: str | None = None,
) -> None:
    """Draws what happened to each name, as bars over time.

    Args:
      panel: the matplotlib axes to draw on.
      rows: a bar each, from "begin" to "end".
      names: the column of the names at the left, which stand in the order of the rows, from above.
      by: the column of what a bar or an event is: the series.
      events: rows with `names`, `by` and "at": a marker each.
      series: values of `by` in the order of their looks, whether or not rows have them; others follow.
      xlabel, ylabel: the axes' labels; by default "time" and the column's name.

    Guarantees: bars begin and end where the rows say (tests/report/test_charts.py::test_timeline).
    """
    places = {name: i for i, name in enumerate(dict.fromkeys(row[names] for row in (*rows, *events)))}
    looks = dict(zip(_series([*rows, *events], by, series), LOOKS, strict=False))
    handles: list[Any] = []
    for name, look in looks.items():
        own, marks = _of(rows, by, name), _of(events, by, name)
        if own:
            begins = np.array([_number(row["begin"]) for row in own])
            widths = np.array([_number(row["end"]) for row in own]) - begins
            heights = [places[row[names]] for row in own]
            handles.append(panel.barh(heights, widths, left=begins, height=0.72, color=look.color, label=_short(name)))
        if marks:
            at = [_number(row["at"]) for row in marks]
            heights = [places[row[names]] for row in marks]
            form = {"color": look.color, "label": _short(name), "clip_on": False}
            handles += panel.plot(at, heights, look.marker, **form, **MARKER_STYLE)
    panel.set_yticks(range(len(places)), [_short(name) for name in places], fontsize=6.5)
    panel.set(xlabel=xlabel or "time", ylabel=ylabel or _words(names), ylim=(len(places) - 0.3, -0.7))
    panel.set_xlim(left=0)
    panel.grid(False, axis="y")
    panel.legend(handles=handles, fontsize=LEGEND_FONT_SIZE)


def _series(rows: Sequence[Row], by: str | None, first: Sequence[Any] = ()) -> list[Any]:
    """Returns the names of the series: the first ones, then others in order of appearance; [None] without a column."""
    names = list(dict.fromkeys([*first, *(row[by] for row in rows)])) if by else [None]
    if len(names) > len(LOOKS):
        validate.fail("by", f"a column of at most {len(LOOKS)} values", f"{len(names)} of {by}", "Draw parts.")
    return names


def _of(rows: Sequence[Row], by: str | None, name: Any) -> list[Row]:
    """Returns the rows of a series."""
    return [row for row in rows if by is None or row[by] == name]


def _draw_curve(panel: Any, rows: Sequence[Row], look: Look, x: str, log: str) -> bool:
    """Draws the predictions of a series as a line, and returns whether there are any."""
    heights = _places(rows, "predicted", "y" in log)
    if not np.isfinite(heights).any():
        return False
    places = _places(rows, x, False)
    panel.plot(places, heights, color=look.color, linestyle=look.linestyle, linewidth=1.2)
    return True


def _draw_points(
    panel: Any, rows: Sequence[Row], look: Look, label: str | None, *, x: str, y: str, log: str, joined: bool
) -> list[Any]:
    """Draws the measured numbers of a series with their intervals.

    Args:
      panel: the matplotlib axes to draw on.
      rows: in the order of x; "low" and "high" are the ends of intervals.
      look: of the series; without a marker, intervals are a band.
      label: the series' name; None for a series without one.
      x, y: the columns of the two places.
      log: the logarithmic axes.
      joined: says whether points are joined by a line.

    Returns: what was drawn, as matplotlib's artists.
    """
    places, heights = _places(rows, x, False), _places(rows, y, "y" in log)
    if not np.isfinite(heights).any():
        return []
    form = {"color": look.color, "marker": look.marker, "linestyle": look.linestyle if joined else "none"}
    drawn = panel.plot(places, heights, linewidth=1.2, label=label, **form, **MARKER_STYLE)
    low, high = (np.array([_number(row.get(name)) for row in rows]) for name in ("low", "high"))
    # Lower ends stay above zero on a logarithmic axis.
    low = np.maximum(low, 1e-3 * heights) if "y" in log else low
    errors = np.stack([heights - low, high - heights]).clip(0)
    if look.marker and np.isfinite(errors).any():
        bars = panel.errorbar(places, heights, errors, fmt="none", ecolor=look.color, capsize=2, elinewidth=1)
        drawn += bars.get_children()
    elif np.isfinite(errors).any():
        drawn.append(panel.fill_between(places, heights - errors[0], heights + errors[1], color=look.color, alpha=0.15,
                                        linewidth=0))  # fmt: skip
    return drawn


def _shift(panel: Any, drawn: Sequence[Any], points: float) -> None:
    """Moves artists to the right by a number of points."""
    from matplotlib.transforms import ScaledTranslation

    right = ScaledTranslation(points / 72, 0, panel.figure.dpi_scale_trans)
    for artist in drawn:
        artist.set_transform(artist.get_transform() + right)


def _draw_levels(panel: Any, levels: Mapping[str, float] | None, way: str) -> None:
    """Draws a grey line across the panel for each level, "h" horizontal or "v" vertical."""
    levels = levels or {}
    if len(levels) > len(LOOKS):
        validate.fail("levels", f"at most {len(LOOKS)}", len(levels), "Draw parts.")
    draw = panel.axhline if way == "h" else panel.axvline
    for (name, place), look in zip(levels.items(), LOOKS, strict=False):
        draw(place, color=INK, linewidth=0.9, linestyle=look.linestyle, label=name, zorder=1)


def _scale(panel: Any, places: Sequence[float], log: str) -> None:
    """Makes axes logarithmic, with a place for zero and with few values as ticks on the x axis.

    Args:
      panel: the matplotlib axes.
      places: x of the points.
      log: the logarithmic axes.
    """
    values = sorted({place for place in places if math.isfinite(place)})
    if "y" in log:
        logarithmic(panel, "y")
    if "x" not in log:
        if values and all(value.is_integer() for value in values):
            panel.xaxis.get_major_locator().set_params(integer=True)
        return
    positive = [value for value in values if value > 0]
    has_zero = len(positive) < len(values)
    logarithmic(panel, "x", linear_below=positive[0] if has_zero and positive else None)
    gaps = np.diff(np.log(positive)) / max(math.log(positive[-1] / positive[0]), 1e-9) if positive else np.ones(0)
    names = [_short(place) for place in values]
    if positive and gaps.min(initial=1) >= LEAST_GAP and max(map(len, names)) <= MOST_LETTERS:
        panel.set_xticks(values, names)
        panel.minorticks_off()


def _legend(panel: Any, shown: Sequence[tuple[str, Look, bool, bool]], title: str | None = None) -> None:
    """Names the series, and the levels that are already labelled, in the panel's legend.

    Args:
      panel: the matplotlib axes.
      shown: for each series its name, its look, and whether it has points and a line.
      title: stands above the names; None for no title.
    """
    from matplotlib.lines import Line2D

    by_name = {
        name: Line2D([], [], color=look.color, marker=look.marker if is_points else "",
                     linestyle=look.linestyle if is_line else "none", linewidth=1.2, label=name,
                     **(MARKER_STYLE if look.marker != "|" else {"markersize": 9, "markeredgewidth": 1.6}))
        for name, look, is_points, is_line in shown
        if is_points or is_line
    }  # fmt: skip
    for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
        by_name.setdefault(name, handle)
    if by_name:
        handles = list(by_name.values())
        panel.legend(
            handles=handles, fontsize=LEGEND_FONT_SIZE, title=title, title_fontsize=LEGEND_FONT_SIZE, alignment="left"
        )


def _label(name: Any, by: str | None, is_points: bool, line: str) -> str:
    """Returns a series' name for the legend: a number stands behind its column's name."""
    if by is None:
        return "measured" if is_points else line
    return f"{_words(by)} {_short(name)}" if _is_number(name) else str(name)


def _frame(corner: tuple[float, float]) -> Any:
    """Returns a frame around a cell whose upper left corner is given."""
    from matplotlib.patches import Rectangle

    return Rectangle(corner, 1, 1, fill=False, edgecolor=ORANGE, linewidth=2.2)


def _places(rows: Sequence[Row], name: str, positive: bool) -> np.ndarray:
    """Returns a column as float64, [n]; NaN where a number is missing, or is not positive where it has to be."""
    values = np.array([_number(row[name]) for row in rows], np.float64).reshape(-1)
    return np.where(np.isfinite(values) & ((values > 0) | (not positive)), values, np.nan)


def _number(cell: Any) -> float:
    """Returns a number as float; NaN for anything else."""
    return float(cell) if _is_number(cell) else math.nan


def _is_number(cell: Any) -> bool:
    """Returns whether a value is a number; truth values are not."""
    return isinstance(cell, (int, float, np.number)) and not isinstance(cell, bool)


def _short(cell: Any) -> str:
    """Returns a value as a short text."""
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def _words(name: str) -> str:
    """Returns a column's name as words."""
    return name.replace("_", " ")
