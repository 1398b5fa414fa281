"""The table of a sweep for a paper: its numbers, its digits, what is bold and what is marked."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from fedjax_sim.sweeps.labels import Labels
from fedjax_sim.sweeps.paper_table import TableOptions, by_uncertainty, paper_latex, paper_markdown, paper_table
from fedjax_sim.sweeps.results import Sweep
from tests.refusals import refused


def made(values, apart=(), names=("algorithm.name",), metric="test_accuracy"):
    """A sweep of one round, from {combination: a number for each seed}."""
    rows = [
        {"seed": seed, **dict(zip(names, point, strict=True)), "round": 3, metric: number}
        for point, numbers in values.items() for seed, number in enumerate(numbers)
    ]  # fmt: skip
    return Sweep(rows, names, list(range(len(next(iter(values.values()))))), 1, True, apart=apart)


def marks(table, column=0):
    """For each row "best", "marked" or ""."""
    return ["best" if row[column].is_best else "marked" * row[column].is_marked for row in table.cells]


@pytest.mark.parametrize("metric", ["test_accuracy", "test_loss"])
def test_marks_are_of_the_paired_test(metric):
    """Faults: a test that is not paired, one against the first row, a best of the wrong direction, another level."""
    rng = np.random.default_rng(3)
    shared = rng.normal(size=6)
    values = {(name,): 0.5 + 0.1 * shared + mean + 0.01 * rng.normal(size=6)
              for name, mean in zip("abcdef", (0.0, 0.004, 0.012, 0.05, 0.006, -0.05), strict=True)}  # fmt: skip
    table = paper_table(made(values, metric=metric), metric)
    sign = 1 if metric == "test_accuracy" else -1
    means = {point: sign * np.mean(numbers) for point, numbers in values.items()}
    best = max(means, key=means.get)
    expected = []
    for point, numbers in values.items():
        p_value = 1.0 if point == best else stats.ttest_rel(numbers, values[best]).pvalue
        expected.append("best" if point == best else "marked" * bool(p_value >= 0.05))
    assert marks(table) == expected and set(expected) >= {"best", ""}
    factor = 100 if metric == "test_accuracy" else 1
    for row, numbers in zip(table.cells, values.values(), strict=True):
        low, high = stats.t.interval(0.95, 5, np.mean(numbers), stats.sem(numbers))
        assert row[0].mean == pytest.approx(factor * np.mean(numbers))
        assert row[0].spread == pytest.approx(factor * (high - low) / 2)
    deviations = paper_table(made(values, metric=metric), metric, TableOptions(spread="std")).cells
    for row, numbers in zip(deviations, values.values(), strict=True):
        assert row[0].spread == pytest.approx(factor * np.std(numbers, ddof=1))


def test_what_is_not_known_is_marked_or_not_bold():
    """Faults: one seed that tells rows apart, a row that diverged among the best, a best of a metric without direction,
    rows over other data that are compared, two equal rows of which one is better."""
    one = paper_table(made({("a",): [0.5], ("b",): [0.6]}), "test_accuracy")
    assert marks(one) == ["marked", "best"] and "±" not in one.note
    lost = paper_table(made({("a",): [0.5, 0.52], ("b",): ["nan", 0.9]}), "test_accuracy")
    assert marks(lost) == ["best", ""] and "diverged" in paper_markdown(lost)
    sent = made({("a",): [5, 6], ("b",): [7, 8]}, metric="uplink_bytes")
    assert marks(paper_table(sent, "uplink_bytes")) == ["", ""]
    assert "Bold" not in paper_table(sent, "uplink_bytes").note
    least = TableOptions(best={"uplink_bytes": "lowest"})
    assert marks(paper_table(sent, "uplink_bytes", least)) == ["best", ""]
    pairs = itertools.product("ab", (0.1, 1.0))
    over = {point: [0.5 + 0.1 * i, 0.5 + 0.1 * i + 1e-3] for i, point in enumerate(pairs)}
    data = made(over, ("data.alpha",), ("algorithm.name", "data.alpha"))
    assert marks(paper_table(data, "test_accuracy")) == ["", "", "best", "best"]
    equal = made({("a",): [0.5, 0.6], ("b",): [0.5, 0.6]})
    assert marks(paper_table(equal, "test_accuracy")) == ["best", "best"]


@pytest.mark.parametrize(
    ("mean", "spread", "is_bound", "texts"),
    [
        (0.123456, 0.00961, False, ("0.1235", "0.0096")),
        (0.123456, 0.00996, False, ("0.123", "0.010")),
        (99.95, 0.051, False, ("99.950", "0.051")),
        (123456.7, 890.0, False, ("123457", "890")),
        (-0.001, 0.5, False, ("0.00", "0.50")),
        (1e-9, 2e-10, False, ("0.00000000100", "0.00000000020")),
        (0.3, 0.0, False, ("0.3", "0")),
        (0.0, 0.0, False, ("0", "0")),
        (1.0001, 0.0, True, ("1.001", "0")),
        (1.231, 0.1, True, ("1.24", "0.10")),
        (math.inf, math.nan, False, ("diverged", "")),
    ],
)
def test_digits_follow_the_spread(mean, spread, is_bound, texts):
    """Faults: digits that mean nothing, digits that are lost, a bound from above that is rounded down, -0."""
    assert by_uncertainty(mean, spread, is_bound) == texts


def test_the_texts():
    """Faults: a name that LaTeX reads as a command, a column of what all rows share, a label at another row."""
    values = {("50%_a", 1, 8): [0.5, 0.52], ("b|c", 1, 8): [0.9, 0.93], ("d", 1, "none"): [0.91, 0.92]}
    found = made(values, names=("algorithm.name", "data.alpha", "transform.bits"))
    options = TableOptions(caption="Rates & means", label="tab:a")
    table = paper_table(found._replace(labels=Labels(options={"transform.bits": "Bits"})), "test_accuracy", options)
    assert table.header == ["algorithm", "Bits", "test accuracy (%)"]
    lines = paper_latex(table).splitlines()
    assert lines[0] == r"\begin{table}" and r"\caption{Rates \& means Mean over 2 seeds" in lines[2]
    assert lines[3] == r"\label{tab:a}" and r"50\%\_a & 8 & $51 \pm 13$ \\" in lines
    assert r"d & none & $91.5 \pm 6.4^{\dagger}$ \\" in lines or r"d & none & $\mathbf{91.5 \pm 6.4}$ \\" in lines
    text = paper_markdown(table)
    assert text.startswith("Rates & means\n\n| algorithm | Bits |") and r"| b\|c | 8 |" in text
    bare = paper_latex(paper_table(found, "test_accuracy")).splitlines()
    assert bare[0].startswith("% Mean over 2 seeds after 3 rounds") and bare[1] == r"\begin{tabular}{llr}"
    rows = {point: name for point, name in zip(values, ("one", "two", "three"), strict=True)}
    stated = paper_table(found._replace(labels=Labels(rows=rows)), "test_accuracy")
    assert stated.labels == [["one"], ["two"], ["three"]]
    with refused("metric", value="test_los"):
        paper_table(found, "test_accuracy", TableOptions(metrics=("test_los",)))
