"""Labels of rows: no two alike, and those that a config states beside what they are of."""

from __future__ import annotations

import itertools

import pytest

from fedjax_sim.config.document import ConfigError
from fedjax_sim.sweeps.config import load_sweep
from fedjax_sim.sweeps.dots import dots_figure
from fedjax_sim.sweeps.figure import sweep_figure
from fedjax_sim.sweeps.labels import Labels, labels_of
from fedjax_sim.sweeps.results import Sweep

GRID = ['sweep.grid.algorithm.name=["fedavg", "fedprox"]', "sweep.grid.client_optimizer.learning_rate=[0.1, 0.2]"]
TABLE = "{quantize = {bits = 8}}"


@pytest.mark.parametrize(
    ("names", "values", "stated"),
    [
        (("up.bits", "down.bits"), (1, 2, "none"), None),
        (("up.name", "down.name"), ("a", "b", "none"), None),
        (("transform", "downlink"), (TABLE, "{}", "none"), None),
        (("a.x", "b.y"), ("1, y = 2", 1, "1", 2), None),
        (("a.rate", "b.rate"), (0.1, 0.1000000001, "0.1"), None),
        (("a.name", "b.name"), ("x", "y"), Labels(values={"a.name": {"x": "same"}, "b.name": {"y": "same"}})),
        (("a.x", "b.y"), (1, 2), Labels(options={"a.x": "size", "b.y": "size"})),
        (("a.x", "b.y"), (1, 2), Labels(rows={(1, 1): "x = 1, y = 2"})),
        (("a.rate",), (0.1, "0.1", 2), Labels(rows={(2,): "a.rate = 0.1"})),
    ],
)
def test_rows_never_share_a_label(names, values, stated):
    """Fault: two rows of a figure under one label, as with two options whose last words are equal and whose values are
    swapped."""
    points = list(itertools.product(values, repeat=len(names)))
    labels = labels_of(names, points, stated)
    assert list(labels) == points and len(set(labels.values())) == len(points)


def test_what_all_rows_share_is_no_label():
    """Fault: a label with an option that tells nothing apart; rows without any label."""
    names = ("algorithm.name", "data.alpha")
    assert list(labels_of(names, [("fedavg", 0.1), ("fedprox", 0.1)]).values()) == ["fedavg", "fedprox"]
    assert labels_of(names, [("fedavg", 0.1)]) == {("fedavg", 0.1): "fedavg, alpha = 0.1"}
    assert labels_of((), [()]) == {(): "all seeds"}
    assert labels_of(("sampler.with_dropout.rate",), [("none",), (0.5,)])[("none",)] == "no rate"


def test_swapped_options_are_two_lines():
    """Fault: two rows that are one line of a figure, or one dot upon another."""
    names = ("transform", "downlink", "rate")
    rows = [
        {"seed": seed, "round": 1, "transform": up, "downlink": down, "rate": rate, "loss": rate + i + seed / 10}
        for i, (up, down) in enumerate([(TABLE, "none"), ("none", TABLE)]) for rate in (1, 2) for seed in (0, 1)
    ]  # fmt: skip
    found = Sweep(rows, names, [0, 1], 1, True)
    figure = sweep_figure(found, "loss")
    assert len([line for line in figure.axes[0].lines if len(line.get_xdata()) == 2 and line.get_marker() in "os"]) == 2
    assert len({text.get_text() for text in figure.legends[0].get_texts()}) == 2
    left = dots_figure(found, "loss").axes[0]
    assert {line.get_ydata()[0] for line in left.lines} == {0, 1, 2, 3}
    assert len({text.get_text() for text in left.get_yticklabels()}) == 4


def test_stated_labels():
    """Fault: a label beside another value, a label that is lost when a part of the sweep is drawn."""
    stated = ['sweep.labels.algorithm.name=["FedAvg", "FedProx"]', 'sweep.labels.client_optimizer.learning_rate="rate"']
    loaded = load_sweep(None, [*GRID, *stated])
    points = [tuple(point.values()) for point in loaded.combinations]
    names = tuple(loaded.combinations[0])
    assert list(labels_of(names, points, loaded.presentation.labels).values()) == [
        "FedAvg, rate = 0.1", "FedAvg, rate = 0.2", "FedProx, rate = 0.1", "FedProx, rate = 0.2",
    ]  # fmt: skip
    part = loaded.only(loaded.combinations[2:])
    assert list(labels_of(names, points[2:], part.presentation.labels).values()) == ["rate = 0.1", "rate = 0.2"]
    rows = load_sweep(None, [*GRID, 'sweep.labels.rows=["a", "b", "c", "d"]', "sweep.metric=test_loss",
                             'sweep.labels.metric="Loss"'])  # fmt: skip
    assert list(labels_of(names, points, rows.presentation.labels).values()) == ["a", "b", "c", "d"]
    assert rows.presentation.labels.metrics == {"test_loss": "Loss"} and rows.presentation.metric == "test_loss"
    tables = load_sweep(None, ["sweep.grid.transform=[{}, {quantize={bits=8}}]", 'sweep.labels.transform=["-", "8"]'])
    assert list(tables.presentation.labels.values["transform"].values()) == ["-", "8"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ('sweep.labels.algorithm.name=["FedAvg"]', r"sweep\.labels\.algorithm\.name: expected a text for the option"),
        ('sweep.labels.algorithm.name=["FedAvg", "FedAvg"]', "2 different texts"),
        ('sweep.labels.algorithm.nam=["FedAvg", "FedProx"]', "algorithm.name"),
        ('sweep.labels.rows=["a", "b"]', "4 different texts"),
        ('sweep.labels.rows=["a", "b", "c", "c"]', "4 different texts"),
        ('sweep.labels.algorithm.name=""', "a text for the option"),
        ('sweep.labels.metric="Loss"', r"sweep\.metric: expected the name"),
        ("sweep.labels=3", "a table"),
        ("sweep.metric=3", r"sweep\.metric"),
        ("sweep.metric=test_los", "one of sweep.metrics"),
        ('sweep.table.metrics=["test_los"]', "one of sweep.metrics"),
        ("sweep.figure.kind=dot", r"sweep\.figure\.kind"),
        ("sweep.figure.styl=paper", "Did you mean 'style'"),
        ("sweep.figure.style=papers", r"sweep\.figure\.style"),
        ("sweep.figure.width=0.5", r"sweep\.figure\.width"),
        ("sweep.figure.width=nan", r"sweep\.figure\.width"),
        ("sweep.figure.x=rounds", "such axis"),
        ('sweep.figure={kind="line", x="sampler.cohort_size"}', r"sweep\.figure\.x: expected an option of the grid"),
        ("sweep.table.spread=error", r"sweep\.table\.spread"),
        ("sweep.table.metrics=test_loss", r"sweep\.table\.metrics"),
        ('sweep.table.best={epsilon="least"}', r"sweep\.table\.best\.epsilon"),
        ('sweep.table.label="a}b"', r"sweep\.table\.label"),
    ],
)
def test_wrong_presentations(setting, words):
    """Fault: a wish that is passed over in silence, and found after a night of training."""
    with pytest.raises(ConfigError, match=words):
        load_sweep(None, [*GRID, 'sweep.metrics=["test_loss"]', setting])
