"""This module writes the findings of a study: rows as JSON and CSV, the figure as PNG and SVG, and an HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_sim.files.text_files import csv_text
from fedjax_sim.report import axes, html, plots
from fedjax_sim.report.html import escape
from fedjax_sim.running.files import write_atomically
from fedjax_sim.running.kept_files import check_free_of
from fedjax_sim.study.findings import CONFIDENCE, Findings

RESULT_COLUMNS = ("measured", "predicted", "ratio", "interval", "")  # columns of a table after the conditions


def table(findings: Findings) -> tuple[list[str], list[list[str]]]:
    """Returns the findings as a table of text.

    The columns are conditions, quantity, measured, predicted, ratio, the ratio's interval, and a mark. Conditions that
    never change are left out, and so are lists, which only a figure can show. The mark "OUTSIDE" stands beside a
    prediction that lies outside of its interval.

    Args:
      findings: the result of a study.

    Returns: (columns, rows): the names of the columns, and for each comparison one text a column.
    """
    rows = findings.rows()
    conditions = list(dict.fromkeys(name for row in findings.comparisons for name in row.conditions))
    lists = _lists(rows)
    varying = [name for name in conditions if name not in lists and len({str(row.get(name)) for row in rows}) > 1]
    return [name.replace("_", " ") for name in (*varying, "quantity", *RESULT_COLUMNS)], [
        [*(_number(row.get(name)) for name in (*varying, "quantity")), *_result_cells(row)] for row in rows
    ]


def _lists(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Returns the names of the columns that hold lists, such as pictures."""
    return {name for row in rows for name, value in row.items() if isinstance(value, list)}


def _result_cells(row: dict[str, Any]) -> list[str]:
    """Returns the cells of the columns `RESULT_COLUMNS`."""
    predicted = _number(row["predicted"])
    ratio = _number(row["ratio"])
    predicted = {"upper bound": "≤ ", "estimate": "≈ "}.get(row["kind"], "") + predicted
    interval = f"{row['ratio_low']:.4g} … {row['ratio_high']:.4g}" if row["ratio"] is not None else ""
    # Without an interval the cell is a dash; without a prediction it shows the interval of the measured number itself.
    if row["low"] is None:
        interval = _number(None)
    elif row["predicted"] is None:
        interval = f"{row['low']:.4g} … {row['high']:.4g}"
    return [_number(row["measured"]), predicted, ratio, interval, "OUTSIDE" if row["holds"] is False else ""]


def _number(value: Any) -> str:
    """Returns a value as text: integers with thousands separators, other numbers with four digits, None as a dash."""
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def write_findings(findings: Findings, directory: str | Path) -> Path:
    """Writes findings.json, table.csv, figure.png, figure.svg and report.html, each completely or not at all.

    Without matplotlib the two figures are not written, and the page says so.

    Args:
      findings: the result of a study.
      directory: the folder to write to; it is made if it does not exist.

    Returns: the path of report.html.

    Raises: FileExistsError for the folder of a run or a sweep.

    Guarantees: every string is escaped, and the page loads no other file (tests/study/test_findings.py::test_page).
    """
    folder_path = Path(directory)
    check_free_of(folder_path, "a run", "a sweep")
    folder_path.mkdir(parents=True, exist_ok=True)
    rows = findings.rows()
    content = {
        "name": findings.name,
        "question": findings.question,
        "options": dict(findings.options),
        "confidence": CONFIDENCE,
        "verdict": findings.verdict(),
        "claims": [claim._asdict() for claim in findings.claims],
        "rows": rows,
    }
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False, default=list)
    write_atomically(folder_path / "findings.json", [text.encode(), b"\n"])
    # Comparisons of different parts have different conditions: the columns are the union, in order of appearance.
    lists = _lists(rows)
    cells = [{name: value for name, value in row.items() if name not in lists} for row in rows]
    names = list(dict.fromkeys(name for row in cells for name in row))
    write_atomically(folder_path / "table.csv", [csv_text(names, cells).encode()])
    try:
        with plots.style():
            figure = findings.draw()
            for suffix in ("png", "svg"):
                image_bytes = axes.image(figure, suffix, bbox_inches="tight")
                write_atomically(folder_path / f"figure.{suffix}", [image_bytes])
        picture = f"<figure>{plots.to_svg(figure, 'figure', findings.question)}</figure>"
    except ImportError as error:
        picture = html.absent(f"No figure: {error}.")
    return write_atomically(folder_path / "report.html", [_page(findings, picture).encode()])


def _page(findings: Findings, picture: str) -> str:
    """Returns the HTML page; every string of the findings is escaped.

    Args:
      findings: the result of a study.
      picture: the HTML of the figure, or of a note that says why there is none.
    """
    columns, rows = table(findings)
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    parts = [
        f"<h1>{escape(findings.question)}</h1>",
        f'<p class="lead">Study {escape(findings.name)} · {escape(findings.verdict())}</p>',
        picture,
        "<h2>Conclusions</h2>",
        *(f"<p>{escape(str(claim))}</p>" for claim in findings.claims),
        "<h2>Measured and predicted</h2>",
        f'<p class="muted">The ratio is measured / predicted; all intervals hold together with {CONFIDENCE:.0%} '
        "confidence.</p>",
        f'<table class="rows"><tr>{head}</tr>{body}</table>',
        "<h2>How to repeat it</h2>",
        html.html_table((name, json.dumps(value, default=list)) for name, value in findings.options.items()),
    ]
    return html.page(f"{findings.name} · fedjax_sim", parts)
