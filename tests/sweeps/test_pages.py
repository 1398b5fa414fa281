"""The page of a sweep, its dots and its map, against the numbers of `Sweep`."""

import re

import numpy as np
import pytest

from fedjax_sim.sweeps.dots import dots_figure
from fedjax_sim.sweeps.heat_map import map_axes, sweep_heat_map
from fedjax_sim.sweeps.page import MOST_NAMED, comparison_page, in_words
from fedjax_sim.sweeps.results import Sweep

SEEDS = [0, 1, 2, 3]


def sweep(means, names=("algorithm.name",), metric="test_accuracy", spread=0.01, apart=()):
    """A sweep with two evaluated rounds, whose combinations share a spread over seeds and differ by what is given."""
    rng = np.random.default_rng(0)
    shared = spread * rng.normal(size=len(SEEDS))
    rows = []
    for values, mean in means.items():
        values = values if isinstance(values, tuple) else (values,)
        own = 0.05 * spread * rng.normal(size=len(SEEDS))
        for seed in SEEDS:
            for round in (1, 2):
                value = mean + shared[seed] + own[seed] if np.isfinite(mean) else "nan"
                rows.append(dict(zip(names, values, strict=True)) | {"seed": seed, "round": round, metric: value})
    return Sweep(rows, names, SEEDS, 1, True, apart=apart)


def test_dots_are_means_and_differences():
    """Catches a dot in another row, an interval of something else, a difference that is not paired, and shares that
    are called percent."""
    found = sweep({"fedavg": 0.9, "fedprox": 0.9, "scaffold": 0.95})
    left, right = dots_figure(found, "test_accuracy").axes
    means = {line.get_ydata()[0]: line.get_xdata()[0] for line in left.lines}
    cells = found.summary("test_accuracy")
    assert means == {i: pytest.approx(100 * cell["mean"]) for i, cell in enumerate(cells)}
    reach = {c.get_segments()[0][0][1]: c.get_segments()[0][:, 0] for c in left.collections}
    for i, cell in enumerate(cells):
        np.testing.assert_allclose(reach[i], [100 * cell["low"], 100 * cell["high"]])
    gaps = found.differences("test_accuracy")
    dots = [line for line in right.lines if line.get_marker() == "o"]
    assert [dot.get_ydata()[0] for dot in dots] == [0, 1, 2]
    assert [dot.get_xdata()[0] for dot in dots] == [0, *(pytest.approx(100 * gap["difference"]) for gap in gaps)]
    # Only the last one differs for certain.
    assert [dot.get_markerfacecolor() == "white" for dot in dots] == [True, True, False]
    assert [text.get_text() for text in left.get_yticklabels()] == ["fedavg", "fedprox", "scaffold"]
    assert "(%)" in left.get_xlabel() and "points" in right.get_xlabel()


@pytest.mark.parametrize("metric", ["test_loss", "test_perplexity"])
def test_the_map_has_each_mean(metric):
    """Catches a map that is turned around, a loss whose best cell is the lightest, and a hole that nobody sees."""
    values = {(x, y): 1.0 + x + 10 * y for y in (0, 1, 2, 3) for x in (1, 2, 3)}
    values[2, 3] = float("nan")
    found = sweep(values, ("a.rate", "b.rate"), metric)
    assert map_axes(found) == ("a.rate", "b.rate")
    (axes,) = sweep_heat_map(found, metric).axes
    means = {(cell["a.rate"], cell["b.rate"]): cell["mean"] for cell in found.summary(metric)}
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    # The largest y is at the top, which is row 0.
    assert texts.pop((1, 0)) == "×"
    assert texts == {(x - 1, 3 - y): f"{mean:.4g}" for (x, y), mean in means.items() if np.isfinite(mean)}
    colors = axes.collections[0].get_array()
    assert np.unravel_index(np.ma.argmax(colors), colors.shape) == (3, 0)  # the lowest is the darkest
    assert map_axes(sweep({(1, 1): 0.0, (1, 2): 0.0, (1, 3): 0.0}, ("a", "b"))) is None
    with pytest.raises(ValueError, match="two options with three numbers each"):
        sweep_heat_map(sweep({"x": 0.0}), "test_accuracy")


def test_words_name_what_differs():
    """Catches a difference that is named without an interval that leaves out 0, one that is not named, and one of many
    that is not counted."""
    (words,) = in_words(sweep({"fedavg": 0.9, "fedprox": 0.9, "scaffold": 0.95}), "test_accuracy")
    assert "1 of 2 combinations differ" in words and "scaffold (+0.049" in words and "fedprox" not in words
    (words,) = in_words(sweep({"fedavg": 0.9, "fedprox": 0.9}), "test_accuracy")
    assert words.startswith("None can be told apart from the first in test_accuracy with 4 seeds")
    many = sweep({"fedavg": 0.9} | {f"rule {i}": 0.95 for i in range(MOST_NAMED + 2)})
    (words,) = in_words(many, "test_accuracy")
    assert f"{MOST_NAMED + 2} of {MOST_NAMED + 2} combinations differ" in words and words.endswith(" and 2 more.")
    assert all((f"rule {i} (" in words) == (i < MOST_NAMED) for i in range(MOST_NAMED + 2))
    # Fault: ties at every seed that read as a proof of equality.
    tied = sweep({"fedavg": 0.9, "fedprox": 0.9})
    tied = tied._replace(rows=[row | {"test_accuracy": 0.5, "local_loss": 1.0, "test_loss": 1.0} for row in tied.rows])
    _, ties = in_words(tied, "test_accuracy")
    assert ties.startswith("0 ± 0: 1 of 1 combinations have the first's test_accuracy at every seed.")
    assert ties.endswith("A loss may tell them apart: test_loss.")
    words = list(in_words(sweep({"fedavg": 0.9, "fedprox": float("nan")}), "test_accuracy"))
    assert words == ["Seeds of 1 combinations diverged."]
    alone = sweep({"fedavg": 0.9, "fedprox": 0.8})
    alone = alone._replace(rows=[row for row in alone.rows if row["seed"] == 0], seeds=[0])
    assert list(in_words(alone, "test_accuracy")) == [
        "One seed gives no interval: no difference can be told from chance."
    ]


@pytest.mark.pictures
def test_the_page_has_every_row():
    """Catches a combination that is left out, a figure that could not be drawn, an option that differs unseen, and a
    text that is not escaped."""
    means = {("<fedavg>", 1): 0.8, ("<fedavg>", 2): 0.85, ("scaffold", 1): 0.9, ("scaffold", 2): 0.9}
    found = sweep(means, ("algorithm.name", "data.alpha"), apart=("data.alpha",))
    differing = {"algorithm.coefficient": [None, None, 0.1, 0.1]}
    text = comparison_page(found, "test_accuracy", title="a <sweep>", lead="lead", differing=differing)
    assert "could not be drawn" not in text and "<script" not in text and "<fedavg>" not in text
    assert text.count("<tr><td>") == 4 and "a &lt;sweep&gt;" in text
    assert "none (&lt;fedavg&gt;, alpha = 1, &lt;fedavg&gt;, alpha = 2); 0.1 (scaffold" in text
    buttons = re.findall(r'class="pick\d"[^>]*>([^<]+)<', text)
    assert buttons == ["Differences", "Curves", "Over alpha"]
    assert "Bands and ±" in text and "sent up" not in text
    one = found._replace(rows=[row for row in found.rows if row["seed"] == 0], seeds=[0])
    assert "±" not in comparison_page(one, "test_accuracy", title="t", lead="l")
    seeds_alone = sweep({(): 0.5}, ())
    assert "0.5" in comparison_page(seeds_alone, "test_accuracy", title="t", lead="l")
