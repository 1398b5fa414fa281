"""Draws the figure of a sweep as it is wished for, and writes it as the bytes of files."""

from __future__ import annotations

from typing import Any, NamedTuple

from fedjax_sim import validate
from fedjax_sim.report import axes, charts
from fedjax_sim.sweeps.curves import curves_figure
from fedjax_sim.sweeps.dots import MOST_COMBINATIONS, dots_figure
from fedjax_sim.sweeps.figure import are_numbers, sweep_figure
from fedjax_sim.sweeps.heat_map import sweep_heat_map
from fedjax_sim.sweeps.results import Sweep

FORMS = ("pdf", "png", "svg")
KINDS = ("dots", "curves", "line", "map")
LEAST_WIDTH, MOST_WIDTH = 2.0, 40.0  # inches


class Drawing(NamedTuple):
    """How the figure of a sweep is drawn: the options of `[sweep.figure]`."""

    kind: str | None = None  # one of `KINDS`; None: a line over an option of numbers, and else dots
    x: str | None = None  # of curves "rounds", "bytes" or "seconds", of a line an option's path
    style: str = "page"  # one of `axes.STYLES`
    width: float | None = None  # inches; None: the style's
    title: str | None = None  # above the figure; None: what it draws by itself
    xlabel: str | None = None  # of the first panel; None: the words of what it draws
    ylabel: str | None = None


def check_drawing(drawing: Drawing, argument: str = "drawing") -> None:
    """Raises ValueError or TypeError for a drawing that cannot be made, whatever the sweep.

    Args:
      drawing: the wishes.
      argument: what an error calls them, with the field behind it.
    """
    if drawing.kind is not None:
        validate.one_of(f"{argument}.kind", drawing.kind, KINDS)
    validate.one_of(f"{argument}.style", drawing.style, tuple(axes.STYLES))
    for name in ("x", "title", "xlabel", "ylabel"):
        if not isinstance(getattr(drawing, name), str | None):
            validate.fail(f"{argument}.{name}", "a text", getattr(drawing, name), error=TypeError)
    if drawing.x is not None and drawing.kind not in ("curves", "line"):
        hint = 'Leave it out, or set kind to "curves" or to "line".'
        validate.fail(f"{argument}.x", "none beside figures that have no such axis", drawing.x, hint)
    if drawing.width is not None:
        validate.in_range(f"{argument}.width", drawing.width, LEAST_WIDTH, MOST_WIDTH)


def draw(found: Sweep, metric: str, drawing: Drawing | None = None) -> Any:
    """Draws a sweep.

    Args:
      found: a sweep, or compared runs.
      metric: a metric of its rows.
      drawing: how; None draws it for a page.

    Returns: a matplotlib Figure.

    Raises: ValueError or TypeError for a drawing that does not fit the sweep; ImportError without matplotlib.

    Guarantees: no text is cut or lies on another one, whatever the sweep
    (tests/sweeps/test_drawing.py::test_the_law_of_figures).
    """
    drawing = drawing or Drawing()
    check_drawing(drawing)
    kind = drawing.kind or kind_of(found)
    with axes.chosen_style(drawing.style, drawing.width):
        if kind == "line":
            figure = sweep_figure(found, metric, x=drawing.x)
        elif kind == "curves":
            narrow = "rounds" if axes.width() < 5 else None
            figure = curves_figure(found, metric, x=drawing.x or narrow)
        else:
            figure = (dots_figure if kind == "dots" else sweep_heat_map)(found, metric)
        first = figure.axes[0]
        with axes.style():
            if drawing.title is not None:
                first.set_title(axes.fitted(drawing.title, 0.6 * axes.width()))
            if drawing.xlabel is not None:
                first.set_xlabel(axes.fitted(drawing.xlabel, axes.width() / len(figure.axes)))
            if drawing.ylabel is not None:
                first.set_ylabel(axes.fitted(drawing.ylabel, 0.8 * figure.get_figheight()))
    return figure


def kind_of(found: Sweep) -> str:
    """Returns the kind of figure that fits a sweep: a line over its first option of numbers, or else dots."""
    combinations = len({tuple(row[name] for name in found.names) for row in found.rows})
    for name in found.names:
        values = list(dict.fromkeys(row[name] for row in found.rows))
        if len(values) > 1 and are_numbers(values):
            fits = combinations <= len(values) * len(charts.LOOKS)
            return "line" if fits or combinations > MOST_COMBINATIONS else "dots"
    return "dots"


def figure_files(found: Sweep, metric: str, drawing: Drawing | None = None) -> dict[str, bytes]:
    """Returns the figure of a sweep as files: form -> bytes, of "pdf", "png" and "svg".

    Args:
      found, metric, drawing: as for `draw`.

    Guarantees: equal rows give equal bytes, in every process; letters of a PDF are TrueType
    (tests/sweeps/test_drawing.py::test_files_have_the_same_bytes).
    """
    figure = draw(found, metric, drawing)
    style = (drawing or Drawing()).style
    with axes.chosen_style(style):
        return {form: axes.image(figure, form) for form in FORMS}
