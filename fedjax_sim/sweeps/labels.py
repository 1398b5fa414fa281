"""Names the rows of a sweep for figures, tables and pages, so that no two rows ever have one label."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_sim.files.regular_files import toml_of
from fedjax_sim.report.numbers import in_percent

NONE = "none"  # the value of an option that a combination has not


class Labels(NamedTuple):
    """What `[sweep.labels]` states, and nothing by default."""

    options: Mapping[str, str] = {}  # by the option's path
    values: Mapping[str, Mapping[Any, str]] = {}  # by the option's path, by its value
    rows: Mapping[tuple, str] = {}  # by the values of a combination
    metrics: Mapping[str, str] = {}  # by the metric's name


def labels_of(names: Sequence[str], combinations: Iterable[tuple], stated: Labels | None = None) -> dict[tuple, str]:
    """Returns a label for each combination: its values, with the last word of each option that is no name of a part.

    Options that all combinations share, and those that a combination has not, are left out. Of two options with the
    same last word the whole path is shown. Where two combinations would have one label, all options are shown, and
    where that does not help either, whole paths and exact values.

    Args:
      names: dotted paths of the options, such as "sampler.name".
      combinations: a value for each name, in tuples; "none" where a combination has no such option.
      stated: words in place of these; None states nothing.

    Guarantees: different combinations have different labels
    (tests/sweeps/test_labels.py::test_rows_never_share_a_label).

    >>> names = ("algorithm.name", "transform.quantize.bits")
    >>> list(labels_of(names, [("scaffold", 8), ("fedavg", "none")]).values())
    ['scaffold, bits = 8', 'fedavg']
    >>> list(labels_of(("up", "down"), [("{quantize = {}}", "none"), ("none", "{quantize = {}}")]).values())
    ['up = quantize, down = none', 'up = none, down = quantize']
    """
    stated = stated or Labels()
    points = list(dict.fromkeys(combinations))
    varied = [i for i, values in enumerate(zip(*points, strict=True)) if len(set(values)) > 1]
    shown = varied or range(len(names))
    words = short_names([names[i] for i in shown], keeps_name=True)
    words = [stated.options.get(names[i], word) for i, word in zip(shown, words, strict=True)]

    def text(i: int, word: str, value: Any, is_short: bool) -> str:
        own = stated.values.get(names[i], {}).get(value)
        plain = own or (f"{value:.6g}" if is_short and isinstance(value, float) else shown_value(value))
        is_clear = own or word == "name" or str(value).startswith("{")
        return plain if is_short and is_clear else f"{names[i] if word == 'name' else word} = {plain}"

    def short(point: tuple) -> str:
        texts = [text(i, word, point[i], True) for i, word in zip(shown, words, strict=True)
                 if point[i] != NONE or NONE in stated.values.get(names[i], {})]  # fmt: skip
        return ", ".join(texts) or ", ".join(f"no {word}" for word in words) or "all seeds"

    def long(point: tuple) -> str:
        return ", ".join(text(i, word, point[i], False) for i, word in zip(shown, words, strict=True))

    def exact(point: tuple) -> str:
        return ", ".join(f"{names[i]} = {json.dumps(point[i])}" for i in shown)

    for label in (short, long, exact):
        found = {point: stated.rows.get(point) or label(point) for point in points}
        if len(set(found.values())) == len(points):
            return found
    return {point: exact(point) for point in points}  # a stated label is another row's exact one


def short_names(names: Sequence[str], keeps_name: bool = False) -> list[str]:
    """Returns the last word of each path, and the whole path of two that would be alike.

    Args:
      names: dotted paths of options.
      keeps_name: says whether the word "name" stands for itself, however often it occurs; otherwise the table whose
        part is named stands in its place.

    >>> short_names(["algorithm.name", "data.alpha", "up.bits", "down.bits"])
    ['algorithm', 'alpha', 'up.bits', 'down.bits']
    """
    last_words = [(name if keeps_name else name.removesuffix(".name")).rpartition(".")[2] for name in names]
    return [
        word if last_words.count(word) == 1 or (keeps_name and word == "name") else name
        for name, word in zip(names, last_words, strict=True)
    ]


def metric_words(metric: str, stated: Labels) -> tuple[float, str]:
    """Returns the factor by which a figure draws a metric, and its words on an axis.

    >>> metric_words("test_accuracy", Labels(metrics={"test_accuracy": "Accuracy"}))
    (100.0, 'Accuracy (%)')
    """
    factor, words = in_percent(metric)
    if metric in stated.metrics:
        words = stated.metrics[metric] + (" (%)" if factor == 100 else "")
    return factor, words


def shown_value(value: Any) -> str:
    """Returns a value of a grid as a short text: of a table its options, without braces.

    Args:
      value: a number, a truth value, None, or a text, which may be a table in TOML.

    >>> shown_value("{error_feedback = {quantize = {bits = 8}}}"), shown_value('{name = "fedprox", coefficient = 0.5}')
    ('error_feedback.quantize.bits=8', 'fedprox, coefficient=0.5')
    >>> shown_value("{top_k = {share = 0.1}, clip = {}}"), shown_value("{}"), shown_value(0.1)
    ('top_k.share=0.1, clip', '{}', '0.1')
    """
    text = str(value)
    if not text.startswith("{"):
        return text
    try:
        table = toml_of(f"value = {text}")["value"]
    except ValueError:
        return text  # a text that only begins as a table does
    return ", ".join(_shown_options(table)) or text


def _shown_options(table: dict[str, Any], prefix: str = "") -> list[str]:
    """Returns the options of a table as short texts; a table without options is named."""
    texts = []
    for name, value in table.items():
        if isinstance(value, dict):
            texts += _shown_options(value, f"{prefix}{name}.") or [f"{prefix}{name}"]
        else:
            texts.append(str(value) if prefix + name == "name" else f"{prefix}{name}={value}")
    return texts
