"""Makes the page of a sweep or of compared runs: what differs for certain, the figures, the table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedjax_sim.report.charts import LOOKS
from fedjax_sim.report.html import choice, escape, figure, html_table, page, table_of_rows
from fedjax_sim.report.numbers import recorded_number
from fedjax_sim.report.plots import scaled_bytes
from fedjax_sim.sweeps.curves import curves_figure
from fedjax_sim.sweeps.dots import MOST_COMBINATIONS, dots_figure
from fedjax_sim.sweeps.figure import are_numbers, sweep_figure
from fedjax_sim.sweeps.heat_map import map_axes, sweep_heat_map
from fedjax_sim.sweeps.results import Sweep
from fedjax_sim.sweeps.table import sweep_comparison, words_on_own_models, words_on_ties

MOST_NAMED = 5  # combinations that the reading names


def comparison_page(
    found: Sweep,
    metric: str,
    *,
    title: str,
    lead: str,
    differing: Mapping[str, Sequence[Any]] | None = None,
    ending: Iterable[str] = (),
) -> str:
    """Returns the page, as HTML without scripts.

    Args:
      found: a sweep, or compared runs.
      metric: the metric that is compared, as one of its rows.
      title, lead: the heading, and a line under it.
      differing: options that differ between combinations and are none of the grid's: path -> one value a combination.
        None: no option.
      ending: HTML of further sections, such as how the sweep is repeated.

    Guarantees: every combination is on the page, and every differing option
    (tests/sweeps/test_pages.py::test_the_page_has_every_row).
    """
    header, rows = _with_bytes(found, *sweep_comparison(found, metric).texts())
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(lead)}</p>',
        *(f"<p>{escape(sentence)}</p>" for sentence in in_words(found, metric)),
        choice("figures", list(_views(found, metric))),
        table_of_rows(header, rows),
        f'<p class="muted">After {found.last_round:,} rounds. {_on_intervals(found)}</p>',
    ]
    if differing:
        parts += ["<h2>What else differs</h2>", html_table(_differing_rows(found, differing))]
    return page(f"{title} · fedjax_sim", [*parts, *ending])


def _with_bytes(found: Sweep, header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Returns a table with the mean bytes that a combination sent up, if every row has them."""
    sent: dict[tuple, list[float]] = {}
    for row in found.rows:
        if row["round"] == found.last_round:
            number = recorded_number(row.get("uplink_bytes_so_far", "nan"))
            sent.setdefault(tuple(row[name] for name in found.names), []).append(number)
    means = [sum(numbers) / len(numbers) for numbers in sent.values()]
    if not all(math.isfinite(mean) for mean in means):
        return header, rows
    unit, name = scaled_bytes(max(means))
    texts = [f"{mean / unit:.4g}" for mean in means]
    return [*header, f"sent up ({name})"], [[*row, text] for row, text in zip(rows, texts, strict=True)]


def _views(found: Sweep, metric: str) -> Iterable[tuple[str, str]]:
    """Yields (name, HTML) of the figures that fit the sweep.

    Args:
      found: a sweep, or compared runs.
      metric: the metric that is drawn, as one of its rows.
    """
    combinations = list(dict.fromkeys(tuple(row[name] for name in found.names) for row in found.rows))
    if found.names and len(combinations) <= MOST_COMBINATIONS:
        yield "Differences", figure("dots", dots_figure, f"Means and differences of {metric}.", found, metric)
    if len({row["round"] for row in found.rows}) > 1 and len(combinations) <= len(LOOKS):
        yield "Curves", figure("curves", curves_figure, f"{metric} over rounds.", found, metric)
    if map_axes(found) is not None:
        yield "Map", figure("map", sweep_heat_map, f"Means of {metric}.", found, metric)
    # Lines need an axis of numbers, and few enough combinations of the other options.
    numeric = [name for name in found.names if are_numbers(list({row[name] for row in found.rows}))]
    for name in [name for name in numeric if len({row[name] for row in found.rows}) > 1][:1]:
        num_values = len({row[name] for row in found.rows})
        if len(combinations) <= num_values * len(LOOKS):
            yield f"Over {name.rpartition('.')[2]}", figure("line", sweep_figure, f"{metric}.", found, metric)


def _on_intervals(found: Sweep) -> str:
    """Returns what a reader of the table needs to know of its intervals."""
    if len(found.seeds) == 1:
        return "One seed: no intervals."
    return (
        "Bands and ±: 95 % intervals over seeds. Differences and their p-values are paired, seed by seed, and not "
        "corrected for the number of comparisons."
    )


def in_words(found: Sweep, metric: str, confidence: float = 0.95) -> Iterable[str]:
    """Yields sentences: which combinations differ from the first by their intervals, and what was lost.

    Each interval holds at its own level; none is widened for the number of combinations.

    Args:
      found, metric: as for `comparison_page`.
      confidence: the level of the intervals.

    Guarantees: a combination is counted if its interval leaves out 0, and not otherwise; the first `MOST_NAMED` of
    these are named (tests/sweeps/test_pages.py::test_words_name_what_differs).
    """
    # A combination that others are compared with has no gap.
    gaps = [gap for gap in found.difference_of_each(metric, confidence=confidence) if gap is not None]
    # A combination that diverged, or shares fewer than two seeds with the first, has no finite interval.
    known = [gap for gap in gaps if math.isfinite(gap["low"])]
    if gaps and len(found.seeds) == 1:
        yield "One seed gives no interval: no difference can be told from chance."
    elif known:
        different = [gap for gap in known if gap["low"] > 0 or gap["high"] < 0]
        level = f"{confidence:.0%}".replace("%", " %")
        if not different:
            yield (
                f"None can be told apart from the first in {metric} with {len(found.seeds)} seeds: every {level} "
                "interval of a paired difference holds 0."
            )
        else:
            labels = found.row_labels()
            names = [
                f"{labels[tuple(gap[name] for name in found.names)]} "
                f"({gap['difference']:+.3g}, {gap['low']:+.3g} to {gap['high']:+.3g})"
                for gap in different
            ]
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            yield (
                f"{len(different)} of {len(known)} combinations differ from the first in {metric}, with {level} "
                f"intervals that leave out 0: {'; '.join(names[:MOST_NAMED])}{more}."
            )
    yield from words_on_own_models(found, metric)
    if len(found.seeds) > 1 and (ties := words_on_ties(found, metric)):
        yield ties
    num_diverged = sum(bool(cell["diverged"]) for cell in found.summary(metric))
    if num_diverged:
        yield f"Seeds of {num_diverged} combinations diverged."
    if lossy := found.lossy():
        yield f"{len(lossy)} points dropped non-finite updates or skipped rounds: see results.csv."


def _differing_rows(found: Sweep, differing: Mapping[str, Sequence[Any]]) -> Iterable[tuple[str, str]]:
    """Yields an option and its values, with the combinations that have them."""
    labels = found.row_labels().values()
    for path, values in differing.items():
        owners: dict[str, list[str]] = {}
        for value, label in zip(values, labels, strict=True):
            text = "none" if value is None else str(value)
            owners.setdefault(text, []).append(label)
        yield path, "; ".join(f"{text} ({', '.join(names)})" for text, names in owners.items())
