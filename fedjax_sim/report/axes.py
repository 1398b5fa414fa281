"""Holds what all figures share: colours, style, legend, logarithmic axes, and the conversion to SVG.

Host code; matplotlib is imported when a figure is drawn. The colours are Okabe and Ito's, which colour-blind readers
can tell apart. In grey, line styles, markers and lightness tell curves apart.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from fedjax_sim.text.printable import printable

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
BLACK = "#1a1a1a"
GREY = "#9aa5b1"
LIGHT, INK = "#e6e9ed", "#3a4149"
WIDTH = 9.6  # inches; a report shows it 1000 px wide
STYLE: dict[RcKeyType, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#b8c0c8",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9.0,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titlecolor": INK,
    "figure.constrained_layout.w_pad": 0.12,
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "grid.color": LIGHT,
    "grid.linewidth": 0.7,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "lines.linewidth": 1.7,
    "pdf.fonttype": 42,  # TrueType: letters stay letters, as publishers ask
    "ps.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedjax_sim",
    "text.color": INK,
    "text.parse_math": False,  # names of clients and labels are text, never formulas
    "xtick.color": INK,
    "xtick.labelsize": 8.5,
    "xtick.major.size": 0,
    "ytick.color": INK,
    "ytick.labelsize": 8.5,
    "ytick.major.size": 0,
}


PAPER: dict[RcKeyType, Any] = {
    "axes.labelsize": 8.0,
    "axes.titlesize": 8.0,
    "figure.constrained_layout.w_pad": 0.04,
    "font.size": 8.0,
    "legend.fontsize": 7.5,
    "legend.handlelength": 1.8,
    "lines.linewidth": 1.2,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
}
# name -> (inches, settings besides those of all figures)
STYLES: Mapping[str, tuple[float, Mapping[RcKeyType, Any]]] = {"page": (WIDTH, {}), "paper": (3.3, PAPER)}
LETTER = 0.6  # of a font's size: the width that a letter is given
# Bytes of a file follow from the figure alone: no date, and no version of the software.
METADATA: dict[str, dict[str, None]] = {
    "pdf": dict.fromkeys(("CreationDate", "Creator", "Producer")),
    "png": {"Software": None},
    "svg": dict.fromkeys(("Date", "Creator", "Type", "Format")),
}
_chosen: ContextVar[tuple[float, Mapping[RcKeyType, Any]]] = ContextVar("style", default=STYLES["page"])


@contextlib.contextmanager
def chosen_style(name: str, inches: float | None = None) -> Iterator[None]:
    """Gives figures that are drawn while the block runs a style of their own.

    Args:
      name: one of `STYLES`: "page", or "paper", whose figures are 3.3 inches wide with letters of 8 points.
      inches: the width of figures, > 0; None for the style's.
    """
    own_width, settings = STYLES[name]
    token = _chosen.set((own_width if inches is None else inches, settings))
    try:
        yield
    finally:
        _chosen.reset(token)


def width() -> float:
    """Returns the width of figures, in inches."""
    return _chosen.get()[0]


def fitted(text: str, inches: float) -> str:
    """Returns a text in lines that are not wider than a number of inches, in the style's letters.

    Lines break at spaces, but not around "="; a word that is too long also behind a dot and the like.

    Args:
      text: in one line.
      inches: > 0; a line has 8 letters at least.

    >>> fitted("fedprox, alpha = 0.1", 0.9).splitlines()
    ['fedprox,', 'alpha = 0.1']
    >>> fitted("error_feedback.quantize", 0.9).splitlines()
    ['error_', 'feedback.', 'quantize']
    """
    most = max(8, int(72 * inches / (LETTER * _setting("font.size"))))
    lines = [""]
    for word in text.replace(" = ", "\u00a0=\u00a0").split(" "):
        pieces = re.split(r"(?<=[._/\u00a0-])(?!\d)", word) if len(word) > most else [word]
        for i, piece in enumerate(pieces):
            space = " " if i == 0 and lines[-1] else ""
            if len(lines[-1]) + len(space + piece) <= most:
                lines[-1] += space + piece
            else:
                lines += [piece[k : k + most] for k in range(0, len(piece), most)]
    return "\n".join(line.replace("\u00a0", " ").rstrip() for line in (lines if lines[0] else lines[1:]))


def _setting(name: RcKeyType) -> Any:
    """Returns a setting of the style."""
    return {**STYLE, **_chosen.get()[1]}[name]


def keep_within(axes: Any, which: str, low: float, high: float) -> None:
    """Ends an axis, "x" or "y", where the numbers on it do; infinite ends bound nothing.

    Points that lie at such an end are drawn whole.
    """
    place = "xy".index(which)
    ends = (axes.get_xlim, axes.get_ylim)[place]()
    inner = max(ends[0], low), min(ends[1], high)
    (axes.set_xlim, axes.set_ylim)[place](*inner)
    for line in axes.lines if inner != ends else ():
        values = [point[place] for point in line.get_xydata() if math.isfinite(point[place])]
        if line.get_marker() not in ("_", "|") and all(inner[0] <= value <= inner[1] for value in values):
            line.set_clip_on(False)


def few_ticks(axes: Any, inches: float) -> None:
    """Leaves a horizontal axis of numbers as many ticks as have room in its width."""
    from matplotlib.ticker import MaxNLocator

    if isinstance(locator := axes.xaxis.get_major_locator(), MaxNLocator) and inches < 2.5:
        locator.set_params(nbins=max(2, int(2.5 * inches)))


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Applies the figures' style while the block runs, whatever the user's matplotlibrc sets.

    Raises: ImportError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'fedjax_sim[plot]'") from error
    # Settings of the user's machine stay: they are about windows, folders and dates, not about looks.
    machine_settings = ("backend", "date.", "interactive", "savefig.directory", "timezone", "tk.", "toolbar", "webagg.")
    defaults: dict[RcKeyType, Any] = {
        k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith(machine_settings)
    }
    with matplotlib.rc_context({**defaults, **STYLE, **_chosen.get()[1]}):
        yield


def legend(figure: Any, panels: Iterable[Any]) -> None:
    """Puts a legend above the panels, in place of their own; a label that several panels share appears once.

    Args:
      figure: a matplotlib Figure, which grows by the lines of its legend after the first.
      panels: its axes, with what they have drawn.
    """
    handles = {}
    for axes in panels:
        named = list(zip(*axes.get_legend_handles_labels(), strict=True))
        if (own := axes.get_legend()) is not None:
            own.remove()
            named[:0] = zip(own.legend_handles, [text.get_text() for text in own.get_texts()], strict=True)
        for handle, name in named:
            handles.setdefault(name, handle)
    if handles:
        names = [fitted(name, 0.8 * width()) for name in handles]
        heights = [1 + name.count("\n") for name in names]
        letters = max(len(line) for name in names for line in name.split("\n")) + 6  # with the line before a name
        size = _setting("legend.fontsize")
        columns = max(1, min(6, int(72 * figure.get_figwidth() / (LETTER * size * letters))))
        figure.legend(handles.values(), names, loc="outside upper left", ncols=columns, columnspacing=1.6)
        num_lines = sum(heights) / columns
        if num_lines > 1:
            figure.set_figheight(figure.get_figheight() + 1.5 * size / 72 * (num_lines - 1))


def logarithmic(axes: Any, which: str = "xy", linear_below: float | None = None) -> None:
    """Makes axes logarithmic, with ticks as plain text: 0.01, 1, 1,000, 10\N{SUPERSCRIPT SEVEN}.

    It is called last: which ticks are named depends on the range, so on the data, limits and margins of the axes.

    Args:
      axes: a matplotlib Axes.
      which: "x", "y" or "xy".
      linear_below: the axes are linear below this number, so that zero has a place; None for numbers above zero.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    raised = str.maketrans("-0123456789", "\N{SUPERSCRIPT MINUS}⁰¹²³⁴⁵⁶⁷⁸⁹")

    def text(value: float, _: int) -> str:
        power = round(math.log10(abs(value))) if value else 0
        sign = "-" if value < 0 else ""
        return f"{value:,g}" if -3 <= power < 5 else f"{sign}10{str(power).translate(raised)}"

    scale = {"value": "log"} if linear_below is None else {"value": "symlog", "linthresh": linear_below}
    for name in which:
        (axes.set_xscale if name == "x" else axes.set_yscale)(**scale)
        axis = axes.xaxis if name == "x" else axes.yaxis
        if linear_below is None:
            axis.set_major_locator(LogLocator(10.0, numticks=8))
        axis.set_major_formatter(FuncFormatter(text))
        low, high = axis.get_view_interval()
        # An axis of about a decade has too few powers of ten: twos and fives are named as well.
        is_short = 0 < low and high / low < 30
        twos_and_fives = FuncFormatter(lambda v, _: f"{v:g}" if f"{v:e}"[0] in "25" else "")
        axis.set_minor_formatter(twos_and_fives if is_short else NullFormatter())


def to_svg(figure: Any, prefix: str, description: str) -> str:
    """Returns a figure as an `<svg>` element for a page: without script, style sheet and links, with ids of its own.

    Args:
      figure: a matplotlib Figure.
      prefix: the beginning of every id; unique within the page.
      description: the text that a screen reader reads in place of the picture.

    A marker shows its numbers when the pointer rests on it. The background is transparent.

    Guarantees: the same figure gives the same text; ids of figures with different prefixes differ
    (tests/report/test_page.py::test_svg_ids_do_not_collide).
    """
    buffer = io.StringIO()
    numbers = _name_lines(figure)
    with style(), warnings.catch_warnings():
        # A warning about a missing glyph is about matplotlib's font, and the page's font has more glyphs.
        warnings.filterwarnings("ignore", "Glyph")
        metadata = dict.fromkeys(("Date", "Creator", "Type", "Format"))
        _lay_out(figure)
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    # XML has no control characters, so names with some are escaped before it is read.
    root = ElementTree.fromstring(printable(buffer.getvalue()))
    for group in list(root.iter()):
        markers = [element for element in group.iter() if element.tag.endswith("}use")]
        titles = numbers.get(group.get("id", ""), [])
        # Matplotlib leaves out points that lie outside: then it is not known which number is whose.
        if len(titles) == len(markers):
            for marker, title in zip(markers, titles, strict=True):
                ElementTree.SubElement(marker, "title").text = title
    # An id that nothing refers to is left out.
    used_ids = set(re.findall(r'(?:url\(|href=")#([^")]+)', buffer.getvalue()))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith("}metadata") or child.tag.endswith("}style"):
                parent.remove(child)
    for element in root.iter():
        # Names without their XML namespace, since HTML has none.
        element.tag = element.tag.rpartition("}")[2]
        for name, text in list(element.attrib.items()):
            del element.attrib[name]
            name = name.rpartition("}")[2]
            if name == "id":
                if text not in used_ids:
                    continue
                text = f"{prefix}-{text}"
            elif name == "href":
                text = f"#{prefix}-{text[1:]}"
            elif name == "style":
                # The page's own font is used.
                text = re.sub(r"font-family: [^;]*;? ?", "", text)
            element.set(name, re.sub(r"url\(#", f"url(#{prefix}-", re.sub(r"\s*\n\s*", " ", text).strip()))
    # Without a size of its own the picture fills the page's width.
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"role": "img", "aria-label": description, "style": "stroke-linejoin:round;stroke-linecap:butt"}
    return re.sub(r">\s+<", "><", ElementTree.tostring(root, encoding="unicode"))


def _lay_out(figure: Any) -> None:
    """Places the panels of a figure for an SVG, once; `savefig` would go through the whole figure to do it again."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    if (layout := figure.get_layout_engine()) is not None:
        FigureCanvasSVG(figure)  # texts are as wide as an SVG has them
        layout.execute(figure)
        figure.set_layout_engine(None)


def image(figure: Any, form: str, **options: Any) -> bytes:
    """Returns a figure as a file of a form such as "png", "svg" or "pdf"; texts of an SVG are printable.

    Args:
      figure: a matplotlib Figure.
      form: of matplotlib's `savefig`.
      options: further ones of `savefig`.

    Guarantees: the same figure gives the same bytes, in every process
    (tests/sweeps/test_drawing.py::test_files_have_the_same_bytes).
    """
    import matplotlib

    buffer = io.BytesIO()
    # Letters of a file are its own, whatever fonts its reader has.
    with style(), matplotlib.rc_context({"svg.fonttype": "path"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(buffer, format=form, dpi=200, metadata=METADATA.get(form), **options)
    return printable(buffer.getvalue().decode()).encode() if form == "svg" else buffer.getvalue()


def _name_lines(figure: Any) -> dict[str, list[str]]:
    """Gives an id to each line with markers, and returns the numbers of its points, as text, by that id."""
    numbers = {}
    for i, axes in enumerate(figure.axes):
        x_name, y_name = axes.get_xlabel(), axes.get_ylabel()
        for j, line in enumerate(axes.lines):
            if line.get_marker() in ("", " ", "None", None):
                continue
            label = "" if line.get_label().startswith("_") else f"{line.get_label()}: "
            points = [(x, y) for x, y in line.get_xydata().tolist() if math.isfinite(x) and math.isfinite(y)]
            line.set_gid(f"line-{i}-{j}")
            numbers[f"line-{i}-{j}"] = [f"{label}{y_name} {y:.5g}, {x_name} {x:.5g}" for x, y in points]
    return numbers
