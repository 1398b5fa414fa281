"""Charts: looks follow the order of series, and what is drawn are the numbers of the rows."""

import math

import numpy as np
import pytest

from fedjax_sim.report import axes, charts

ROWS = [
    {"rule": rule, "attackers": f, "measured": scale * f, "low": scale * f - 1, "high": scale * f + 1,
     "predicted": 3.0 * scale * f}
    for rule, scale in (("mean", 1.0), ("median", 10.0)) for f in (3, 1, 2)
]  # fmt: skip


@pytest.fixture
def panel():
    return charts.panels(1, 1)[1][0]


def points(panel):
    """Drawn points with markers as {(x, y): (colour, marker)}."""
    return {
        (float(x), float(y)): (line.get_color(), line.get_marker())
        for line in panel.lines
        if line.get_marker() in [look.marker for look in charts.LOOKS]
        for x, y in line.get_xydata()
    }


def test_lines(panel):
    """Fault: points of another row, intervals of another width, theory at other places, looks by name."""
    charts.lines(panel, ROWS, "attackers", by="rule", theory=ROWS, line="bounds", log="y")
    drawn = points(panel)
    assert set(drawn) == {(row["attackers"], row["measured"]) for row in ROWS}
    assert {drawn[row["attackers"], row["measured"]] for row in ROWS[:3]} == {charts.LOOKS[0][:2]}
    assert {drawn[row["attackers"], row["measured"]] for row in ROWS[3:]} == {charts.LOOKS[1][:2]}
    curves = [line for line in panel.lines if line.get_marker() in ("None", "")]
    assert [line.get_ydata().tolist() for line in curves] == [[3, 6, 9], [30, 60, 90]]
    ends = [segment for bars in panel.collections for segment in bars.get_segments()]
    assert {(x, round(float(b - a), 9)) for (x, a), (_, b) in ends[1:3]} == {(2.0, 2.0), (3.0, 2.0)}
    assert ends[0][0][1] == pytest.approx(1e-3)  # an interval that reaches zero ends above it on a logarithmic axis
    legend = panel.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["mean", "median"]
    assert legend.get_title().get_text() == "points: measured, lines: bounds" and panel.get_yscale() == "log"


def test_lines_without_a_number(panel):
    """Fault: a number that was not reached at the height of another, a zero on a logarithmic axis, a lost tick."""
    rows = [{"x": x, "measured": y} for x, y in ((0, 2.0), (1, None), (10, math.inf), (100, 4.0))]
    charts.lines(panel, rows, "x", log="x")
    (crosses,) = [line for line in panel.lines if line.get_marker() == "x"]
    assert crosses.get_xdata().tolist() == [1, 10] and set(crosses.get_ydata()) == {0.03}
    assert set(points(panel)) >= {(0, 2.0), (100, 4.0)} and panel.get_xscale() == "symlog"
    assert panel.get_xticks().tolist() == [0, 1, 10, 100] and panel.get_legend() is None


def test_a_place_for_zero_has_plain_ticks(panel):
    """Fault: ticks in matplotlib's own mathematical text on an axis with a zero, and a power that loses its sign."""
    charts.lines(panel, [{"x": x, "measured": 1.0} for x in (0, 0.00123456, 12.3456, 1.23456e6)], "x", log="x")
    ticks = [text.get_text() for text in panel.get_xticklabels()]
    assert {"0", "1", "10\N{SUPERSCRIPT SIX}"} <= set(ticks) and not [text for text in ticks if "$" in text]
    axes.logarithmic(panel, "y", linear_below=0.1)
    assert panel.yaxis.get_major_formatter()(-1e7, 0) == "-10\N{SUPERSCRIPT SEVEN}"


def test_ticks_of_measured_numbers(panel):
    """Fault: an axis that is labelled with the digits of measured numbers."""
    charts.lines(panel, [{"x": x, "measured": 1.0} for x in (0.00080295, 0.117157, 1.0)], "x", log="x")
    assert not {0.00080295, 0.117157} & set(panel.get_xticks().tolist())


def test_many_points_are_a_band(panel):
    """Fault: hundreds of markers that hide their curve."""
    rows = [{"x": x, "measured": x, "low": x - 1, "high": x + 1} for x in range(charts.MOST_MARKERS + 1)]
    charts.lines(panel, rows, "x")
    assert points(panel) == {} and len(panel.collections) == 1


def test_too_many_series(panel):
    """Fault: two series of one look."""
    with pytest.raises(ValueError, match="by: expected a column of at most 8 values"):
        charts.lines(panel, [{"x": 1, "measured": 1, "rule": i} for i in range(9)], "x", by="rule")


def test_too_many_levels(panel):
    """Fault: a level that nobody sees."""
    with pytest.raises(ValueError, match="levels: expected at most 8, got 9"):
        charts.lines(panel, ROWS, "attackers", levels={str(i): float(i) for i in range(9)})


def test_looks_in_a_stated_order(panel):
    """Fault: a look that depends on which series a panel has, and a name in the legend for a series without rows."""
    charts.lines(panel, ROWS[3:], "attackers", by="rule", series=("mean", "median"))
    assert set(points(panel).values()) == {charts.LOOKS[1][:2]}
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["median"]


def test_a_band_at_any_length(panel):
    """Fault: bars of intervals over each other, where a band was asked for."""
    charts.lines(panel, ROWS, "attackers", by="rule", band=True)
    assert points(panel) == {} and len(panel.collections) == 2
    assert not any(hasattr(drawn, "get_segments") for drawn in panel.collections)


def test_series_beside_each_other(panel):
    """Fault: intervals over each other, or beside their points; numbers that are moved too."""
    rows = [{"x": x, "measured": 1.0, "low": 0.0, "high": 2.0, "by": by} for by in "ab" for x in (1.0, 2.0)]
    charts.lines(panel, rows, "x", by="by", apart=True)
    markers = [line for line in panel.lines if line.get_marker() in "os"]
    assert [line.get_xdata().tolist() for line in markers] == [[1, 2], [1, 2]]
    # In pixels there are two places: one for the points and intervals of each series.
    drawn = (*panel.lines, *panel.collections)
    left, right = sorted({round(float(artist.get_transform().transform((1.0, 1.0))[0]), 6) for artist in drawn})
    assert right - left == pytest.approx(charts.APART * panel.figure.dpi / 72)


def test_a_number_without_interval(panel):
    """Fault: a bar of no width, which reads as a number that is known for certain."""
    rows = [{"x": 1, "measured": 1.0, "low": None, "high": None}, {"x": 2, "measured": 1.0, "low": 0.5, "high": 2.0}]
    charts.lines(panel, rows, "x")
    ends = [segment.tolist() for bars in panel.collections for segment in bars.get_segments() if len(segment)]
    assert ends == [[[2, 0.5], [2, 2.0]]]


def test_crosses_are_named_once():
    """Fault: a cross that nobody explains, two of them at one place, and names that stand in each panel's legend."""
    figure, panels = charts.panels(1, 2)
    rows = [{"x": x, "measured": y, "by": by} for by in "ab" for x, y in ((1, 1.0), (2, None))]
    for panel in panels:
        charts.lines(panel, rows, "x", by="by", cross="diverged")
    crosses = [line.get_xydata().tolist() for line in panels[0].lines if line.get_marker() == "x"]
    assert crosses == [[[2, 0.03]], [[2, 0.06]]]
    assert [text.get_text() for text in panels[0].get_legend().get_texts()] == ["a", "b", "diverged"]
    axes.legend(figure, panels)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "diverged"]
    assert [panel.get_legend() for panel in panels] == [None, None]


def test_dots(panel):
    """Fault: a dot beside another name, an interval or a tick of another row."""
    rows = [
        {"rule": name, "measured": x, "low": x - 1, "high": x + 1, "predicted": x + 2}
        for name, x in (("a", 3.0), ("b", 5.0))
    ]
    charts.dots(panel, rows, "rule", label="broken by")
    assert set(points(panel)) == {(3.0, 0.0), (5.0, 1.0)}
    ticks = [line.get_xydata().tolist()[0] for line in panel.lines if line.get_marker() == "|"]
    assert ticks == [[5.0, 0.0], [7.0, 1.0]]
    assert all(float(place).is_integer() for place in panel.get_xticks())  # whole numbers have whole ticks
    assert [text.get_text() for text in panel.get_yticklabels()] == ["a", "b"] and panel.yaxis_inverted()
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["measured", "theory"]


def test_dots_of_two_series(panel):
    """Fault: dots of two series over each other."""
    rows = [{"rule": "a", "measured": 1.0, "part": part} for part in ("x", "y")]
    charts.dots(panel, rows, "rule", by="part", levels={"zero": 0.0})
    assert set(points(panel)) == {(1.0, -0.15), (1.0, 0.15)}
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["x", "y", "zero"]


def test_open_dots_and_crosses(panel):
    """Fault: an open dot that is filled, and a number that is missing without a trace."""
    rows = [{"rule": rule, "measured": x, "sure": rule == "a"} for rule, x in (("a", 1.0), ("b", 2.0), ("c", None))]
    charts.dots(panel, rows, "rule", filled="sure", cross="diverged")
    filled, hollow, cross = panel.lines
    assert filled.get_markerfacecolor() == charts.LOOKS[0].color and hollow.get_markerfacecolor() == "white"
    assert hollow.get_markeredgecolor() == charts.LOOKS[0].color
    assert (cross.get_marker(), cross.get_ydata().tolist()) == ("x", [2])
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["diverged"]


def test_heat_map(panel):
    """Fault: numbers in each other's cells, a missing one as zero, dark letters on dark cells."""
    rows = [{"x": x, "y": y, "measured": 10.0 * x + y, "best": x == 2 and y == 1} for x in (1, 2) for y in (0, 1)]
    charts.heat_map(panel, [*rows[:-1], rows[-1] | {"measured": None}], "x", "y", marked="best")
    assert {text.get_position(): text.get_text() for text in panel.texts} == {
        (0, 0): "10", (0, 1): "11", (1, 0): "20", (1, 1): "×"}  # fmt: skip
    assert [patch.get_xy() for patch in panel.patches] == [(0.5, 0.5)]
    (mesh,) = panel.collections
    assert np.ma.filled(mesh.get_array(), -1).reshape(2, 2).tolist() == [[10, 20], [11, -1]]


def test_histogram(panel):
    """Fault: a count in the next bin, a series of another's colour."""
    rows = [
        row
        for name, values in (("a", [0.1, 0.6, 0.7]), ("b", [0.2]))
        for row in charts.bins(values, [0, 0.5, 1], who=name)
    ]
    charts.histogram(panel, rows, by="who")
    outlines = [patch for patch in panel.patches if not patch.get_fill()]
    assert [patch.get_data().values.tolist() for patch in outlines] == [[1, 2], [1, 0]]
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["a", "b"]


def test_timeline(panel):
    """Fault: a bar that begins at zero, an event in another client's line."""
    rows = [
        {"client": c, "what": what, "begin": b, "end": e}
        for c, what, b, e in ((7, "download", 0, 2), (7, "train", 2, 5), (9, "train", 1, 3))
    ]
    charts.timeline(panel, rows, "client", by="what", events=[{"client": 9, "what": "left", "at": 3}])
    bars = {(bar.get_x(), bar.get_width(), round(bar.get_y() + bar.get_height() / 2)) for bar in panel.patches}
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["download", "train", "left"]
    assert bars == {(0, 2, 0), (2, 3, 0), (1, 2, 1)} and set(points(panel)) == {(3.0, 1.0)}
    assert [text.get_text() for text in panel.get_yticklabels()] == ["7", "9"]
