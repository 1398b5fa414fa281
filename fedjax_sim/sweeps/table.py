"""Makes tables of a sweep's last round: means over seeds, and paired differences from the first row."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

from fedjax_sim.files.text_files import csv_text
from fedjax_sim.sweeps.labels import short_names, shown_value
from fedjax_sim.sweeps.results import OWN_MODELS, Sweep
from fedjax_sim.text.bounds import shown_up
from fedjax_sim.text.printable import printable_line

UPPER_BOUNDS = ("epsilon",)  # metrics of which no less may be shown than holds


class ComparisonTable(NamedTuple):
    """A row for each combination of the grid; numbers are means over seeds, and intervals Student's."""

    names: tuple[str, ...]  # the options that differ
    metric: str
    rows: list[dict[str, Any]]

    def texts(self) -> tuple[list[str], list[list[str]]]:
        """Returns (header, rows) as a reader wants them: a mean with half of its interval's width."""
        names = short_names(self.names)
        header = [*map(printable_line, names), "seeds", printable_line(self.metric), "minus the first", "p", "diverged"]
        rows = []
        for row in self.rows:
            has_difference = row["difference"] is not None and not math.isnan(row["difference"])
            rows.append([
                *(printable_line(shown_value(row[name])) for name in self.names), str(row["seeds"]),
                shown_number(shown_metric(self.metric, row["mean"], 5), row["low"], row["high"]),
                shown_number(f"{row['difference']:.4g}", row["difference_low"], row["difference_high"])
                if has_difference else "",
                f"{row['p_value']:.2g}" if has_difference and not math.isnan(row["p_value"]) else "",
                str(row["diverged"] or ""),
            ])  # fmt: skip
        # A column that says nothing in any row is left out.
        kept = [i for i in range(len(header)) if i < len(names) + 2 or any(row[i] for row in rows)]
        return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def sweep_comparison(found: Sweep, metric: str, *, confidence: float = 0.95) -> ComparisonTable:
    """Returns the table of a metric: `summary` and `differences` of the last round, side by side.

    Seeds at which one of two rows diverged are left out of their difference, and counted in "diverged".

    Args:
      found: the sweep.
      metric: of its rows.
      confidence: of the intervals, in (0, 1).

    Guarantees: the numbers are those of `Sweep.summary` and `Sweep.differences`
      (tests/sweeps/test_runs.py::test_tables_hold_the_numbers).
    """
    rows = []
    for cell, gap in zip(
        found.summary(metric, confidence=confidence),
        found.difference_of_each(metric, confidence=confidence),
        strict=True,
    ):
        differences = {
            "difference": None if gap is None else gap["difference"],
            "difference_low": math.nan if gap is None else gap["low"],
            "difference_high": math.nan if gap is None else gap["high"],
            "p_value": math.nan if gap is None else gap["p_value"],
        }
        kept = ("seeds", "diverged", "mean", "low", "high")
        rows.append({name: cell[name] for name in (*found.names, *kept)} | differences)
    return ComparisonTable(found.names, metric, rows)


def words_on_ties(found: Sweep, metric: str) -> str:
    """Returns a sentence on the combinations that equal the first at every seed; "" if there is none."""
    gaps = [gap for gap in found.difference_of_each(metric) if gap is not None]
    num_ties = sum(gap["difference"] == gap["low"] == gap["high"] == 0 for gap in gaps)
    if not num_ties:
        return ""
    own_loss = metric.removesuffix("accuracy") + "loss"
    names = dict.fromkeys(name for row in found.rows for name in (own_loss, "test_loss", *row) if name in row)
    losses = [name for name in names if name.endswith("loss") and name not in found.names]
    loss = losses[0] if losses and not metric.endswith("loss") else None
    advice = f" A loss may tell them apart: {loss}." if loss else ""
    return f"0 ± 0: {num_ties} of {len(gaps)} combinations have the first's {metric} at every seed.{advice}"


def shown_metric(metric: str, number: float, digits: int) -> str:
    """Shows a number of a metric in significant digits; a bound from above, such as epsilon, is rounded up.

    >>> shown_metric("epsilon", 2.0002, 4), shown_metric("test_loss", 2.0002, 4)
    ('2.001', '2')
    """
    if metric not in UPPER_BOUNDS:
        return f"{number:.{digits}g}"
    return shown_up(float(f"{number:.12g}"), digits)  # a mean of equal numbers may differ from them in its last digits


def words_on_own_models(found: Sweep, metric: str) -> list[str]:
    """Returns sentences on what a metric judges where clients of some combinations have models of their own.

    Args:
      found: the sweep.
      metric: of its rows.
    """
    rows = [row for row in found.rows if row["round"] == found.last_round and OWN_MODELS in row]
    combinations = {tuple(row[name] for name in found.names): row[OWN_MODELS] for row in rows}
    if not combinations:
        return []
    sentences = []
    if metric.startswith("owner_"):
        sentences.append(f"{metric}: of the model that each client would use, on the rows that it keeps from training.")
    num_unjudged = sum(not number for number in combinations.values())
    if num_unjudged:
        reason = "no client keeps rows for it: [data.with_local_test]"
        sentences.append(f"Clients' own models of {num_unjudged} combinations are not judged, since {reason}.")
    elif not metric.startswith(("owner_", "personal_", "newcomer_")):
        sentences.append(f"{metric} is not of the clients' own models of {len(combinations)} combinations.")
    return sentences


def shown_number(mean: str, low: float, high: float) -> str:
    """Returns a mean over seeds as text, with half of its interval's width; NaN ends mean that there is no interval."""
    if math.isnan(low):
        return mean
    half_width = (high - low) / 2
    # Equal numbers differ by the rounding of their mean alone.
    return f"{mean} ± {0 if half_width < 1e-12 * abs(high + low) else half_width:.2g}"


class RunsTable(Protocol):
    """A table of runs: a `ComparisonTable`, or that of their clients."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are labels."""
        ...

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The numbers in full, by column."""
        ...

    def texts(self) -> tuple[list[str], list[list[str]]]:
        """Returns (header, rows) as a reader wants them."""
        ...


def as_csv(table: RunsTable) -> str:
    """Returns the numbers of a table in full; the cell of a number that does not exist is empty."""
    present = ({name: value for name, value in row.items() if value == value} for row in table.rows)
    return csv_text(list(table.rows[0]), present)


def as_markdown(table: RunsTable) -> str:
    """Returns the table for a README."""
    header, rows = table.texts()
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def as_latex(table: RunsTable) -> str:
    r"""Returns the table for a paper, with the rules of the package `booktabs` and heads in words.

    >>> from fedjax_sim.sweeps.results import Sweep
    >>> rows = [{"seed": s, "round": 1, "rate_a": a, "loss": a + s / 10} for a in (1, 2) for s in (0, 1)]
    >>> print(as_latex(sweep_comparison(Sweep(rows, ("rate_a",), [0, 1], 1, True), "loss")).splitlines()[2])
    rate a & seeds & loss & minus the first & p \\
    """
    names, rows = table.texts()
    header = [name.replace("_", " ") for name in names]
    lines = [r"\begin{tabular}{" + "l" * len(table.names) + "r" * (len(header) - len(table.names)) + "}", r"\toprule"]
    lines += [_latex_row(header), r"\midrule", *map(_latex_row, rows), r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _latex_row(cells: list[str]) -> str:
    """Returns a line of a LaTeX table."""
    return " & ".join(map(latex_text, cells)) + r" \\"


def latex_text(text: str) -> str:
    r"""Returns a text as LaTeX shows it.

    >>> print(latex_text("50% of a_b"))
    50\% of a\_b
    """
    special = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {character: f"\\{character}" for character in "&%$#_{}"}
    return "".join(special.get(character, character) for character in text)


FORMATS = {"csv": as_csv, "latex": as_latex, "markdown": as_markdown}
