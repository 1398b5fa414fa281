"""Claims of studies: some numbers refute each, none holds where intervals say nothing, and the published hold."""

import importlib
import inspect
import json
import math
from pathlib import Path

import pytest

from fedjax_sim.config.registry import studies
from fedjax_sim.study.claims import Claim, every, is_below, selected
from fedjax_sim.study.findings import Findings

RESULTS = Path(__file__).parents[2] / "experiments" / "studies" / "results"
STUDIES = sorted(studies())


def claims_of(name):
    return getattr(importlib.import_module(f"fedjax_sim.study.{name}.claims"), f"{name}_claims")


def kept_of(name):
    """What is published of a study."""
    kept = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    if "rows" not in kept:
        pytest.skip(f"python experiments/gallery.py {name} has not been run since rows are kept")
    return kept


def published(name):
    """The rows of a published study without the columns that the verdict judges, and its options."""
    kept = kept_of(name)
    judged = ("ratio", "ratio_low", "ratio_high", "holds")
    rows = [{key: value for key, value in row.items() if key not in judged} for row in kept["rows"]]
    return rows, kept["options"]


def moved(row, value):
    """The row with another measured number, and its interval moved with it."""
    shift = value - row["measured"]
    ends = {} if row["low"] is None else {"low": row["low"] + shift, "high": row["high"] + shift}
    return row | {"measured": value} | ends


def plants(rows):
    """Rows with wrong numbers: all of them, and those of one part and quantity, are reversed, equal, zero or scaled."""
    groups = {(row.get("part"), row["quantity"]) for row in rows}
    chosen = [lambda row: True]
    chosen += [
        lambda row, group=group: (row.get("part"), row["quantity"]) == group for group in sorted(groups, key=str)
    ]
    for is_chosen in chosen:
        values = [row["measured"] for row in rows if is_chosen(row)]
        for wrong in (values[::-1], [values[0]] * len(values), [0.0] * len(values)):
            wrong = iter(wrong)
            yield [moved(row, next(wrong)) if is_chosen(row) else row for row in rows]
        for factor in (1e-3, 1e3):
            yield [moved(row, factor * row["measured"]) if is_chosen(row) else row for row in rows]
    # Each number alone, for claims about one row among its like.
    for i, row in enumerate(rows):
        for factor in (1e-3, 1e3):
            yield [*rows[:i], moved(row, factor * row["measured"]), *rows[i + 1 :]]


def never_refuted(claims, rows, options):
    """The words of claims that hold whatever is planted, and of those that hold where intervals are infinite."""
    words = [claim.words for claim in claims(rows, options)]
    left = set(words)
    for wrong in plants(rows):
        judged = list(claims(wrong, options))
        assert [claim.words for claim in judged] == words, "the words of a claim follow from what was measured"
        left -= {claim.words for claim in judged if claim.holds is False}
    unknown = [row | {"low": -math.inf, "high": math.inf} for row in rows]
    return left | {claim.words for claim in claims(unknown, options) if claim.holds}


@pytest.mark.parametrize("name", STUDIES)
def test_each_claim_can_fail(name):
    """Fault: a conclusion that is stated whatever was measured, or of a point where its interval leaves it open."""
    assert never_refuted(claims_of(name), *published(name)) == set()


def test_a_claim_that_cannot_fail_is_found():
    """Fault: a law that lets a constant conclusion pass, one of nothing, or one of points."""
    rows = [{"part": "a", "quantity": "x", "measured": x, "low": x - 0.1, "high": x + 0.1} for x in (1.0, 2.0)]

    def claims(rows, options):
        yield Claim("It is so.", True)
        yield Claim("Of nothing.", all(is_below(row, 0) for row in selected(rows, part="b")))
        yield Claim("Of points.", rows[0]["measured"] < rows[1]["measured"])
        yield Claim("Of intervals.", every([is_below(*rows)]))

    assert never_refuted(claims, rows, {}) == {"It is so.", "Of nothing.", "Of points."}


@pytest.mark.parametrize("name", STUDIES)
def test_published_claims_hold(name):
    """Fault: a conclusion that the published numbers refute or leave open; a page that was not written again."""
    kept = kept_of(name)
    found = list(claims_of(name)(kept["rows"], kept["options"]))
    assert [claim for claim in found if claim.holds is not True] == [] and len(found) > 1
    assert kept["claims"] == [claim._asdict() for claim in found], f"python experiments/gallery.py --again {name}"


@pytest.mark.parametrize("name", STUDIES)
def test_published_studies_have_their_prose(name):
    """Fault: an explanation that was lost when its study's sentences became claims."""
    assert len((RESULTS / f"{name}.md").read_text(encoding="utf-8").split()) > 40


@pytest.mark.parametrize("name", STUDIES)
def test_figures_are_drawn_from_rows(name):
    """Fault: a figure that needs more than the published numbers, a panel without labels."""
    kept = kept_of(name)
    figure = getattr(importlib.import_module(f"fedjax_sim.study.{name}.figure"), f"{name}_figure")
    drawn = Findings(name, "", (), lambda: figure(kept["rows"], kept["options"]), {}).draw()
    assert drawn.axes and all(axes.get_xlabel() or axes.get_title() for axes in drawn.axes if axes.axison)


def test_the_interface_is_the_same():
    """Fault: claims or a figure that take more than rows and options."""
    for name in STUDIES:
        module = importlib.import_module(f"fedjax_sim.study.{name}.figure")
        for function in (claims_of(name), getattr(module, f"{name}_figure")):
            assert list(inspect.signature(function).parameters) == ["rows", "options"]
