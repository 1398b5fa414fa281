"""Makes the table of a sweep for a paper: means with their spread, the best in bold, and what equals it marked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Decimal
from typing import Any, NamedTuple

from fedjax_sim import validate
from fedjax_sim.report.numbers import is_better_low
from fedjax_sim.sweeps.labels import metric_words, short_names, shown_value
from fedjax_sim.sweeps.results import Sweep
from fedjax_sim.sweeps.table import UPPER_BOUNDS, latex_text
from fedjax_sim.text.printable import printable_line

SPREADS = {
    "interval": "half of a {level} interval over seeds",
    "std": "the standard deviation over seeds",
}
DAGGER = "\N{DAGGER}"  # marks what the paired test does not tell apart from the best
BEST = ("highest", "lowest")


class TableOptions(NamedTuple):
    """How the table of a sweep is written: the options of `[sweep.table]`."""

    metrics: tuple[str, ...] = ()  # columns; none: the metric that is shown
    spread: str = "interval"  # one of `SPREADS`
    best: Mapping[str, str] = {}  # metric -> one of `BEST`; accuracies, losses and perplexities need none
    caption: str | None = None  # of a LaTeX table
    label: str | None = None  # of a LaTeX table, such as "tab:algorithms"


class Cell(NamedTuple):
    """A mean over seeds."""

    mean: float  # accuracies in percent; NaN if a seed diverged
    spread: float  # NaN for one seed
    is_best: bool
    is_marked: bool  # the paired test does not tell it apart from the best
    is_bound: bool = False  # a bound from above, which is rounded up

    def texts(self) -> tuple[str, str]:
        """Returns (mean, spread) with the digits that the spread leaves; "" for no spread."""
        return by_uncertainty(self.mean, self.spread, self.is_bound)


class PaperTable(NamedTuple):
    """A row for each combination: its labels, then a cell for each metric."""

    header: list[str]
    labels: list[list[str]]
    cells: list[list[Cell]]
    note: str  # what ±, bold and the mark mean
    options: TableOptions


def paper_table(
    found: Sweep, metric: str, options: TableOptions | None = None, *, confidence: float = 0.95
) -> PaperTable:
    """Returns the table of the last round for a paper.

    The best mean of a column is bold; where rows have other data or another model, the best of each. A row is marked
    where the interval of its paired difference from the best, at `confidence`, does not leave out 0, or where the two
    share fewer than two seeds. A row of which a seed diverged has no mean, and is neither.

    Args:
      found: a sweep, or compared runs.
      metric: the column of a table whose options name no metrics.
      options: of the table; None states nothing.
      confidence: of the intervals and of the test, in (0, 1).

    Raises: ValueError for a metric that rows do not have, and for options that are none.

    Guarantees: numbers are those of `Sweep.summary`, and marks those of scipy's paired t-test against the best
    (tests/sweeps/test_paper_table.py::test_marks_are_of_the_paired_test).
    """
    options = options or TableOptions()
    check_table(options)
    summaries = {name: found.summary(name, confidence=confidence) for name in options.metrics or (metric,)}
    columns = [_column(found, name, cells, options, confidence) for name, cells in summaries.items()]
    heads, labels = _labels(found)
    heads += [printable_line(metric_words(name, found.labels)[1]) for name in summaries]
    level = f"{confidence:.0%}".replace("%", " %")
    note = f"Mean over {len(found.seeds)} seeds after {found.last_round:,} rounds."
    if len(found.seeds) > 1:
        note = note[:-1] + f" ± {SPREADS[options.spread].format(level=level)}."
    if any(cell.is_best for column in columns for cell in column):
        test = f"a paired t-test at level {1 - confidence:.2g}, not corrected for the number of rows"
        note += f" Bold: the best. {DAGGER}: not told apart from it by {test}."
    return PaperTable(heads, labels, [list(row) for row in zip(*columns, strict=True)], note, options)


def check_table(options: TableOptions, argument: str = "options") -> None:
    """Raises ValueError or TypeError for options that are none, whatever the sweep.

    Args:
      options: of a table.
      argument: what an error calls them, with the field behind it.
    """
    validate.one_of(f"{argument}.spread", options.spread, tuple(SPREADS))
    is_list = isinstance(options.metrics, (list, tuple)) and all(isinstance(name, str) for name in options.metrics)
    if not is_list or len(set(options.metrics)) < len(options.metrics):
        validate.fail(f"{argument}.metrics", "a list of names, each once", options.metrics)
    if not isinstance(options.best, Mapping):
        validate.fail(f"{argument}.best", 'a table such as {epsilon = "lowest"}', options.best, error=TypeError)
    for name, way in options.best.items():
        validate.one_of(f"{argument}.best.{name}", way, BEST)
    caption, label = options.caption, options.label
    if caption is not None and (not isinstance(caption, str) or printable_line(caption) != caption):
        validate.fail(f"{argument}.caption", "a text in one line", caption)
    if label is not None and (not isinstance(label, str) or not re.fullmatch(r"[A-Za-z0-9:._-]+", label)):
        validate.fail(f"{argument}.label", "letters, digits and any of : . _ -, such as tab:algorithms", label)


def by_uncertainty(mean: float, spread: float, is_bound: bool = False) -> tuple[str, str]:
    """Returns a mean and its spread as texts: two digits of the spread, and the mean to the same place.

    Without a spread the mean has four digits. A mean that is a bound from above is rounded up.

    Args:
      mean: finite, or NaN for a row that diverged.
      spread: >= 0, or NaN for none.
      is_bound: says whether the mean is a bound from above.

    >>> by_uncertainty(91.2345, 0.6321), by_uncertainty(1234.6, 45.0), by_uncertainty(0.5, math.nan)
    (('91.23', '0.63'), ('1235', '45'), ('0.5', ''))
    >>> by_uncertainty(2.00021, 0.0, True), by_uncertainty(0.9, 0.0996), by_uncertainty(math.nan, math.nan)
    (('2.001', '0'), ('0.90', '0.10'), ('diverged', ''))
    """
    if not math.isfinite(mean):
        return "diverged", ""
    rounding = ROUND_CEILING if is_bound else ROUND_HALF_EVEN
    number = Decimal(f"{mean:.12g}")  # a mean of equal numbers may differ from them in its last digits
    # Equal numbers differ by the rounding of their mean alone.
    if not spread > 1e-12 * abs(mean):
        place = 3 - (number.adjusted() if number else 0)
        text = f"{number.quantize(Decimal(1).scaleb(-place), rounding).normalize():f}"
        return text, "" if math.isnan(spread) else "0"
    place = max(0, 1 - int(f"{spread:.1e}".partition("e")[2]))
    text = f"{number.quantize(Decimal(1).scaleb(-place), rounding):f}"
    return text.lstrip("-") if float(text) == 0 else text, f"{spread:.{place}f}"


def paper_latex(table: PaperTable) -> str:
    """Returns the table with the rules of the package `booktabs`; with a caption or a label it is a float.

    Args:
      table: from `paper_table`.
    """
    num_labels = len(table.labels[0])
    columns = "l" * num_labels + "r" * (len(table.header) - num_labels)
    rows = [
        [*map(latex_text, labels), *map(_latex_cell, cells)]
        for labels, cells in zip(table.labels, table.cells, strict=True)
    ]
    lines = [[latex_text(name.replace("_", " ")) for name in table.header], *rows]
    texts = [" & ".join(line) + r" \\" for line in lines]
    body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", texts[0], r"\midrule", *texts[1:], r"\bottomrule",
            r"\end{tabular}"]  # fmt: skip
    note = latex_text(table.note).replace(DAGGER, r"$\dagger$")
    options = table.options
    if options.caption is None and options.label is None:
        return "\n".join([f"% {printable_line(table.note)}", *body]) + "\n"
    caption = f"{latex_text(options.caption)} {note}" if options.caption else note
    label = [] if options.label is None else [rf"\label{{{options.label}}}"]
    head = [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", *label]
    return "\n".join([*head, *body, r"\end{table}"]) + "\n"


def paper_markdown(table: PaperTable) -> str:
    """Returns the table for a README, with its caption above and its note below."""
    lines = [table.header, ["---"] * len(table.header)]
    for labels, cells in zip(table.labels, table.cells, strict=True):
        lines.append([*labels, *map(_markdown_cell, cells)])
    text = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
    caption = f"{table.options.caption}\n\n" if table.options.caption else ""
    return f"{caption}{text}\n{table.note}\n"


def _column(found: Sweep, metric: str, cells: Sequence[dict], options: TableOptions, confidence: float) -> list[Cell]:
    """Returns the cells of a metric.

    Args:
      found: the sweep.
      metric: of its rows.
      cells: `found.summary(metric)`.
      options: of the table.
      confidence: of the paired test.
    """
    factor, _ = metric_words(metric, found.labels)
    is_known = is_better_low(metric) or metric.endswith("accuracy")
    way = options.best.get(metric, BEST[is_better_low(metric)] if is_known else None)
    sign = 1.0 if way == "lowest" else -1.0

    def combination(row: Mapping[str, Any]) -> tuple:
        return tuple(row[name] for name in found.names)

    best_means: dict[tuple, float] = {}  # values of `apart` -> the best mean, times the sign
    for cell in cells if way else ():
        if math.isfinite(cell["mean"]):
            group = tuple(cell[name] for name in found.apart)
            best_means[group] = min(sign * cell["mean"], best_means.get(group, math.inf))

    def is_best(cell: Mapping[str, Any]) -> bool:
        return sign * cell["mean"] == best_means.get(tuple(cell[name] for name in found.apart))

    best = {combination(cell) for cell in cells if is_best(cell)}
    # Differences are taken from the first rows, so those of the best come first.
    from_best = found._replace(rows=sorted(found.rows, key=lambda row: combination(row) not in best))
    gaps = from_best.difference_of_each(metric, confidence=confidence)
    told_apart = {combination(gap) for gap in gaps if gap is not None and (gap["low"] > 0 or gap["high"] < 0)}
    column = []
    for cell in cells:
        spread = (cell["high"] - cell["low"]) / 2
        if options.spread == "std":
            spread = cell["standard_error"] * math.sqrt(cell["seeds"])
        point = combination(cell)
        is_marked = bool(best) and math.isfinite(cell["mean"]) and point not in best and point not in told_apart
        column.append(Cell(factor * cell["mean"], factor * spread, point in best, is_marked, metric in UPPER_BOUNDS))
    return column


def _labels(found: Sweep) -> tuple[list[str], list[list[str]]]:
    """Returns (heads, rows) of the labels: a column for each option in which rows differ, or one of stated labels."""
    by_point = found.row_labels()
    varied = [i for i, name in enumerate(found.names) if len({row[name] for row in found.rows}) > 1]
    names = [found.names[i] for i in varied]

    def text(i: int, value: Any) -> str:
        return printable_line(found.labels.values.get(found.names[i], {}).get(value) or shown_value(value))

    rows = [[text(i, point[i]) for i in varied] for point in by_point]
    if not varied or found.labels.rows or len({tuple(row) for row in rows}) < len(rows):
        return [""], [[printable_line(label)] for label in by_point.values()]
    heads = [found.labels.options.get(name, word) for name, word in zip(names, short_names(names), strict=True)]
    return [*map(printable_line, heads)], rows


def _latex_cell(cell: Cell) -> str:
    """Returns a cell as mathematics of LaTeX."""
    mean, spread = cell.texts()
    if not math.isfinite(cell.mean):
        return mean
    text = rf"{mean} \pm {spread}" if spread else mean
    text = rf"\mathbf{{{text}}}" if cell.is_best else text
    mark = r"^{\dagger}" if cell.is_marked else ""
    return f"${text}{mark}$"


def _markdown_cell(cell: Cell) -> str:
    """Returns a cell as Markdown."""
    mean, spread = cell.texts()
    text = f"{mean} ± {spread}" if spread else mean
    return f"**{text}**" if cell.is_best else text + f" {DAGGER}" * cell.is_marked
