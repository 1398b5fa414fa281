"""The figures of sweeps: nothing is cut or lies on another thing, and equal rows give equal files."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.text import Text

from fedjax_sim.report import axes
from fedjax_sim.report.numbers import in_percent
from fedjax_sim.sweeps.drawing import KINDS, Drawing, draw, figure_files
from fedjax_sim.sweeps.heat_map import map_axes
from fedjax_sim.sweeps.labels import Labels
from fedjax_sim.sweeps.results import Sweep
from tests.refusals import refused

ERROR_FEEDBACK = "{error_feedback = {quantize = {bits = 8}}}"


def made(names, points, metric="test_accuracy", seeds=3, rounds=4, diverged=(), mean=0.9):
    """A sweep whose rows have bytes and simulated time; of `diverged` combinations the first seed is not finite."""
    rng = np.random.default_rng(0)
    rows = []
    for i, point in enumerate(points):
        for seed, round in itertools.product(range(seeds), range(1, rounds + 1)):
            number = min(mean + 0.01 * i - 0.3 / round + 0.02 * rng.normal(), 1.0)
            rows.append(
                {"seed": seed, **dict(zip(names, point, strict=True)), "round": round}
                | {metric: "nan" if i in diverged and not seed else number}
                | {"uplink_bytes_so_far": 10**6 * round * (i + 1), "downlink_bytes_so_far": 2 * 10**6 * round}
                | {"round_seconds_so_far": 40.0 * round}
            )
    return Sweep(rows, tuple(names), list(range(seeds)), 1, True)


SKEW = itertools.product(["fedavg", "fedprox", "scaffold"], [0.1, 1.0])
SWEEPS = {
    "two options": made(("algorithm.name", "data.alpha"), list(SKEW), diverged=(3,)),
    "tables": made(("transform", "downlink"), [(ERROR_FEEDBACK, "none"), ("none", ERROR_FEEDBACK), ("{}", "none")]),
    "a single point": made(("client_optimizer.learning_rate",), [(0.1,)], "test_loss"),
    "one value beside": made(("sampler.cohort_size", "algorithm.num_steps"), [(10, 1), (10, 5)], seeds=2),
    "all diverged": made(("algorithm.name",), [("fedavg",), ("fedprox",)], diverged=(0, 1)),
    "one seed": made(("algorithm.name",), [("fedavg",), ("fedprox",)], seeds=1, rounds=1),
    "seeds alone": made((), [()]),
    "rates": made(("a.rate", "b.rate"), list(itertools.product([0.01, 0.1, 1.0], [1, 5, 20])), "test_loss", mean=9.0),
    "many points": made(("sampler.cohort_size",), [(i,) for i in range(1, 80)], seeds=2, rounds=1),
    "many rows": made(("algorithm.name",), [(f"algorithm number {i}",) for i in range(40)], seeds=2, rounds=1),
    "at the end": made(("algorithm.name",), [("fedavg",), ("fedprox",)], mean=1.4, seeds=2),
}
DRAWN = [
    (name, kind, style)
    for name, found in SWEEPS.items()
    for kind in KINDS
    for style in axes.STYLES
    if kind != "map" or map_axes(found)
]
ALWAYS = {("tables", "dots"), ("two options", "line"), ("tables", "curves"), ("all diverged", "dots")}


def shown_texts(figure):
    """The texts that are visible in a figure, with the rectangles in which they stand."""
    outside = set()
    for panel in figure.axes:
        for axis in (panel.xaxis, panel.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks() + axis.get_minor_ticks():
                if not low - 1e-9 <= tick.get_loc() <= high + 1e-9:
                    outside |= {tick.label1, tick.label2}
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [(text.get_text(), text.get_window_extent()) for text in texts if text not in outside]


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("name", "kind", "style"),
    [pytest.param(*each, marks=[] if each[:2] in ALWAYS else pytest.mark.full) for each in DRAWN],
)
@pytest.mark.parametrize("is_reversed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_law_of_figures(name, kind, style, is_reversed):
    """Faults: a text that is cut or that lies on another one, a panel without room, a row without its mark, an axis
    that goes on beyond what its numbers can be."""
    found = SWEEPS[name]
    if is_reversed:
        found = found._replace(rows=found.rows[::-1])
    metric = next(name for name in ("test_accuracy", "test_loss") if name in found.rows[0])
    refusals = [("many points", "curves"), ("many rows", "curves"), ("many points", "dots"), ("seeds alone", "line")]
    if (name, kind) in [*refusals, ("rates", "curves")]:
        with pytest.raises(ValueError, match="expected"):
            draw(found, metric, Drawing(kind=kind, style=style))
        return
    figure = draw(found, metric, Drawing(kind=kind, style=style))
    figure.set_dpi(100)
    figure.draw_without_rendering()
    texts = shown_texts(figure)
    room = figure.bbox
    for text, box in texts:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= room.x1 + 1 and box.y1 <= room.y1 + 1, (text, box)
    for (one, a), (other, b) in itertools.combinations(texts, 2):
        across, up = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or up <= 1, (one, other)
    for panel in figure.axes:
        box = panel.get_window_extent()
        assert box.width > 50 and box.height > 40
        assert panel.has_data()
    if metric == "test_accuracy" and kind != "map":
        of_metric = figure.axes[0].get_xlim() if kind == "dots" else None
        if kind == "curves":
            of_metric = figure.axes[0].get_ylim()
        if of_metric and name != "all diverged":
            factor, _ = in_percent(metric)
            assert 0 <= min(of_metric) and max(of_metric) <= factor
    assert figure.get_figwidth() == axes.STYLES[style][0]


def test_curves_are_means_over_what_was_sent():
    """Fault: a curve at the place of another one, bytes of one way alone, a mean of another round."""
    found = SWEEPS["two options"]
    (panel,) = draw(found, "test_accuracy", Drawing(kind="curves", x="bytes", style="paper")).axes
    assert panel.get_xlabel() == "MB sent, up and down"
    labels = found.row_labels()
    curves = {line.get_label(): line.get_xydata() for line in panel.lines if len(line.get_xdata()) == 4}
    for i, (point, label) in enumerate(labels.items()):
        if i == 3:
            continue  # a seed diverged
        means = [
            100 * cell["mean"] for round in range(1, 5) for cell in found.summary("test_accuracy", round=round)
            if tuple(cell[name] for name in found.names) == point
        ]  # fmt: skip
        places = [(i + 1 + 2) * round for round in range(1, 5)]
        np.testing.assert_allclose(curves[label], np.transpose([places, means]))
    bare = found._replace(rows=[{k: v for k, v in row.items() if not k.endswith("so_far")} for row in found.rows])
    with refused("x", value="bytes"):
        draw(bare, "test_accuracy", Drawing(kind="curves", x="bytes"))


def test_wishes():
    """Fault: a title, a word of an axis, a width or a label that is not drawn."""
    found = SWEEPS["two options"]._replace(labels=Labels(metrics={"test_accuracy": "Accuracy"}))
    figure = draw(found, "test_accuracy", Drawing(kind="dots", width=5.0, title="A title", ylabel="Algorithm"))
    left = figure.axes[0]
    assert left.get_title(loc="left") == "A title" and left.get_ylabel() == "Algorithm" and figure.get_figwidth() == 5.0
    assert left.get_xlabel().startswith("Accuracy (%)")
    assert draw(found, "test_accuracy", Drawing(xlabel="Skew")).axes[0].get_xlabel() == "Skew"
    outside = [math.nan, 90.0]
    rows = [row | {"test_accuracy": outside[row["seed"] % 2] if row["seed"] else 0.9} for row in found.rows]
    _, high = draw(found._replace(rows=rows), "test_accuracy", Drawing(kind="curves")).axes[0].get_ylim()
    assert high > 9000  # a number beyond an accuracy's shows that the metric is none


DIGESTS = """
import hashlib
from tests.sweeps.test_drawing import digests
print(digests())
"""


def digests():
    """The SHA-256 of each file of a figure."""
    files = figure_files(SWEEPS["tables"], "test_accuracy", Drawing(style="paper"))
    return {form: hashlib.sha256(content).hexdigest() for form, content in files.items()}


@pytest.mark.pictures
def test_files_have_the_same_bytes():
    """Faults: a date, a random name or an order of a hash in a file; letters of a PDF that are no TrueType."""
    here = digests()
    environment = {"PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "1000000000"}
    done = subprocess.run([sys.executable, "-c", DIGESTS], capture_output=True, text=True, check=True,
                          env=os.environ | environment)  # fmt: skip
    assert done.stdout.strip() == str(here)
    files = figure_files(SWEEPS["tables"], "test_accuracy", Drawing(style="paper"))
    assert b"/FontFile2" in files["pdf"] and b"/Type3" not in files["pdf"] and b"/CreationDate" not in files["pdf"]
    assert b"matplotlib" not in files["png"].lower() and b"<dc:date>" not in files["svg"]
