"""Reads what a sweep's config states about its figure and its tables: the metric, labels, drawing and table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_sim.config.value_kinds import Words, nearest_word, problem
from fedjax_sim.sweeps.drawing import Drawing, check_drawing
from fedjax_sim.sweeps.labels import Labels
from fedjax_sim.sweeps.paper_table import TableOptions, check_table
from fedjax_sim.text.printable import printable_line

OPTIONS = ("metric", "labels", "figure", "table")


class Presentation(NamedTuple):
    """How the results of a sweep are shown; no number depends on it."""

    metric: str | None = None  # in figure and tables; None: what `shown_by_default` names
    labels: Labels = Labels()
    drawing: Drawing = Drawing()
    table: TableOptions = TableOptions()


def presentation_of(
    stated: Mapping[str, Any],
    axes: Mapping[str, Sequence[Any]],
    combinations: Sequence[Mapping[str, Any]],
    problems: list[str],
) -> Presentation:
    """Returns what the table `[sweep]` states about what is shown.

    Args:
      stated: the table `[sweep]`.
      axes: values by the path of an axis of the grid.
      combinations: of the grid, in its order.
      problems: a list to which what is wrong is appended.

    Returns: defaults in place of what is wrong.

    Guarantees: labels are of the values beside which they stand, and what no axis has is refused
    (tests/sweeps/test_labels.py::test_stated_labels, ::test_wrong_presentations).
    """
    halving = stated.get("halving")
    metric = stated.get("metric", halving.get("metric") if isinstance(halving, dict) else None)
    kept = stated.get("metrics")
    if metric is not None and not isinstance(metric, str):
        problems.append(problem("sweep.metric", "the name of a metric, such as test_loss", metric))
        metric = None
    drawing = _made(Drawing, check_drawing, "sweep.figure", stated.get("figure", {}), problems)
    if drawing.kind == "line" and drawing.x is not None and drawing.x not in axes:
        rule = "an option of the grid: " + ", ".join(axes)
        problems.append(problem("sweep.figure.x", rule, drawing.x, nearest_word(drawing.x, axes)))
    table = _made(TableOptions, check_table, "sweep.table", stated.get("table", {}), problems)
    table = table._replace(metrics=tuple(table.metrics))
    for place, name in (("metric", metric), *(("table.metrics", name) for name in table.metrics)):
        if name is not None and isinstance(kept, list) and name not in kept:
            rule = "one of sweep.metrics, which rows keep: " + ", ".join(map(str, kept))
            problems.append(problem(f"sweep.{place}", rule, name, nearest_word(name, list(map(str, kept)))))
    labels = _labels(stated.get("labels", {}), axes, combinations, metric, problems)
    return Presentation(metric, labels, drawing, table)


def _made(kind: Any, check: Callable, place: str, table: Any, problems: list[str]) -> Any:
    """Returns the options of a table of the config as their NamedTuple, or its defaults for wrong ones.

    Args:
      kind: the NamedTuple, whose fields are the options.
      check: (options, their name) -> None, which raises for wrong ones.
      place: the table's path.
      table: as the document has it.
      problems: a list to which what is wrong is appended.
    """
    if not isinstance(table, dict):
        problems.append(problem(place, "a table", table))
        return kind()
    unknown = [name for name in table if name not in kind._fields]
    problems += [
        problem(f"{place}.{name}", "one of " + ", ".join(kind._fields), Words("an unknown key"),
                nearest_word(name, kind._fields))
        for name in unknown
    ]  # fmt: skip
    made = kind(**{name: value for name, value in table.items() if name not in unknown})
    try:
        check(made, place)
    except (TypeError, ValueError) as error:
        problems.append(str(error))
        return kind()
    return made


def _labels(
    table: Any,
    axes: Mapping[str, Sequence[Any]],
    combinations: Sequence[Mapping[str, Any]],
    metric: str | None,
    problems: list[str],
) -> Labels:
    """Returns the labels that `[sweep.labels]` states.

    Args:
      table: as the document has it: by the path of an axis its words, or a list of words for its values; `rows`, a list
        of words for the combinations; `metric`, the words for the metric that is shown.
      axes, combinations: as for `presentation_of`.
      metric: the name of the metric that is shown; None if the sweep does not state it.
      problems: a list to which what is wrong is appended.
    """
    from fedjax_sim.tree import dotted

    if not isinstance(table, dict):
        problems.append(problem("sweep.labels", "a table", table))
        return Labels()
    options, values, rows, metrics = {}, {}, {}, {}

    def is_label(text: Any) -> bool:
        return isinstance(text, str) and bool(text.strip()) and printable_line(text) == text

    def is_list(texts: Any, count: int) -> bool:
        return isinstance(texts, list) and all(map(is_label, texts)) and len(set(texts)) == len(texts) == count

    for name, stated in dotted(table).items():
        place = f"sweep.labels.{name}"
        if name == "metric":
            if metric is None:
                problems.append(problem("sweep.metric", "the name of the metric that has a label", Words("none")))
            elif is_label(stated):
                metrics[metric] = stated
            else:
                problems.append(problem(place, "a text in one line", stated))
        elif name == "rows":
            if is_list(stated, len(combinations)):
                rows = dict(zip((tuple(point.values()) for point in combinations), stated, strict=True))
            else:
                problems.append(problem(place, f"{len(combinations)} different texts, one a row", stated))
        elif name not in axes:
            known = [*axes, "rows", "metric"]
            problems.append(problem(place, "one of " + ", ".join(known), Words("another name"),
                                    nearest_word(name, known)))  # fmt: skip
        elif is_label(stated):
            options[name] = stated
        elif is_list(stated, len(axes[name])):
            values[name] = dict(zip(axes[name], stated, strict=True))
        else:
            rule = f"a text for the option, or {len(axes[name])} different texts for its values"
            problems.append(problem(place, rule, stated))
    return Labels(options, values, rows, metrics)
