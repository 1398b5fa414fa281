"""Claims of studies: some numbers refute each, none holds where intervals say nothing, and the published hold."""

import importlib
import inspect
import json
import math
import random
from pathlib import Path

import pytest

from fedjax_sim.config.registry import studies
from fedjax_sim.study.claims import Claim, every, is_below, selected, with_spread
from fedjax_sim.study.error_floor.base import NAMES
from fedjax_sim.study.findings import Findings
from fedjax_sim.study.heterogeneity.ranks import MEASURES

RESULTS = Path(__file__).parents[2] / "experiments" / "studies" / "results"
STUDIES = sorted(studies())


def claims_of(name):
    return getattr(importlib.import_module(f"fedjax_sim.study.{name}.claims"), f"{name}_claims")


def figure_of(name):
    return getattr(importlib.import_module(f"fedjax_sim.study.{name}.figure"), f"{name}_figure")


def kept_of(name):
    """What is published of a study."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


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
    """The words of claims that hold whatever is planted, and of those that hold where nothing is known: where all
    intervals are infinite, or the spread of the few runs of numbers without an interval is."""
    words = [claim.words for claim in claims(rows, options)]
    left = set(words)
    for wrong in plants(rows):
        judged = list(claims(wrong, options))
        assert [claim.words for claim in judged] == words, "the words of a claim follow from what was measured"
        left -= {claim.words for claim in judged if claim.holds is False}
    unknown = [row | {"low": -math.inf, "high": math.inf} for row in rows]
    left |= {claim.words for claim in claims(unknown, options) if claim.holds}
    # What holds at an infinite spread is of other numbers, and does not fall with these.
    spread = [row | {"standard_deviation": math.inf} if row["low"] is None else row for row in rows]
    for factor in (1e-3, 1e3, -1.0):
        wrong = [moved(row, factor * row["measured"]) if row["low"] is None else row for row in spread]
        pairs = zip(claims(spread, options), claims(wrong, options), strict=True)
        left |= {claim.words for claim, moved_claim in pairs if claim.holds and not moved_claim.holds}
    return left


@pytest.mark.parametrize("name", STUDIES)
def test_each_claim_can_fail(name):
    """Fault: a conclusion that is stated whatever was measured, or of a point where its interval leaves it open."""
    assert never_refuted(claims_of(name), *published(name)) == set()


def test_a_claim_that_cannot_fail_is_found():
    """Fault: a law that lets a constant conclusion pass, one of nothing, or one of points."""
    rows = [{"part": "a", "quantity": "x", "measured": x, "low": x - 0.1, "high": x + 0.1} for x in (1.0, 2.0)]
    few = {"part": "few", "low": None, "high": None, "standard_deviation": 0.1}
    rows += [few | {"quantity": "x", "measured": x} for x in (1.0, 2.0)]

    def claims(rows, options):
        yield Claim("It is so.", True)
        yield Claim("Of nothing.", all(is_below(row, 0) for row in selected(rows, part="b")))
        yield Claim("Of points.", rows[0]["measured"] < rows[1]["measured"])
        yield Claim("Of intervals.", every([is_below(*rows[:2])]))
        yield Claim("Of points of few runs.", every([is_below(*rows[2:])]))
        yield Claim("Of the spread of few runs.", every([is_below(*map(with_spread, rows[2:]))]))

    assert never_refuted(claims, rows, {}) == {"It is so.", "Of nothing.", "Of points.", "Of points of few runs."}


@pytest.mark.parametrize("name", STUDIES)
def test_claims_do_not_depend_on_the_order_of_rows(name):
    """Fault: an end of a list that is taken for the smallest or the largest."""
    rows, options = published(name)
    judged = [(claim.words, claim.holds) for claim in claims_of(name)(rows, options)]
    for other in (rows[::-1], random.Random(0).sample(rows, len(rows))):
        assert [(claim.words, claim.holds) for claim in claims_of(name)(other, options)] == judged


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
    drawn = Findings(name, "", (), lambda: figure_of(name)(kept["rows"], kept["options"]), {}).draw()
    assert drawn.axes and all(axes.get_xlabel() or axes.get_title() for axes in drawn.axes if axes.axison)


# Options whose levels rows of another part name: a run with one of them has other rows there.
NAMED_ELSEWHERE = {"budget": ("cohort_sizes", "bits"), "personal_models": ("methods",), "staleness": ("delays",)}


def with_one_level(name, rows, options):
    """Rows and options of a study in which one list of levels, such as `bits`, has its first or its last alone."""
    for option, levels in options.items():
        if not isinstance(levels, list) or len(levels) < 2 or option in NAMED_ELSEWHERE.get(name, ()):
            continue
        column = option.removesuffix("ies") + "y" if option.endswith("ies") else option.removesuffix("s")
        found = {(row.get("part"), row.get(column)) for row in rows}
        # A part with one of the levels does not vary them: its rows stay.
        varied = {part for part, _ in found if sum((part, level) in found for level in levels) > 1}
        for level in (levels[0], levels[-1]) if varied else ():
            few = [row for row in rows if row.get("part") not in varied or row.get(column) in (None, level)]
            yield few, options | {option: [level]}


def without_numbers(rows):
    """The rows of a study whose every run diverged."""
    names = ("measured", "low", "high", "standard_deviation")
    return [row | {name: math.nan for name in names if row.get(name) is not None} for row in rows]


@pytest.mark.parametrize("name", STUDIES)
def test_nothing_holds_of_runs_that_diverged(name):
    """Fault: a claim whose comparison is the denial of another, which NaN makes true."""
    rows, options = published(name)
    assert [claim for claim in claims_of(name)(without_numbers(rows), options) if claim.holds] == []


@pytest.mark.full
@pytest.mark.parametrize("name", STUDIES)
def test_claims_and_figures_of_one_level_and_of_no_number(name):
    """Fault: an option of one level, or runs that diverged, that end in a traceback after minutes of runs."""
    kept = kept_of(name)
    for rows, options in (
        *with_one_level(name, kept["rows"], kept["options"]),
        (without_numbers(kept["rows"]), kept["options"]),
    ):
        list(claims_of(name)(rows, options))
        Findings(name, "", (), lambda rows=rows, options=options: figure_of(name)(rows, options), {}).draw()


def test_the_interface_is_the_same():
    """Fault: claims or a figure that take more than rows and options."""
    for name in STUDIES:
        for function in (claims_of(name), figure_of(name)):
            assert list(inspect.signature(function).parameters) == ["rows", "options"]


def at(measured, width=0.0, quantity="x", **conditions):
    """A row of a study with an interval of half a width, or with a spread of its runs where the width is negative."""
    ends = (measured - width, measured + width) if width >= 0 else (None, None)
    return {"quantity": quantity} | conditions | {"measured": measured, "low": ends[0], "high": ends[1],
                         "standard_deviation": abs(width), "predicted": None, "kind": "exact"}  # fmt: skip


def along(column, values, numbers, width=0.0, **conditions):
    """A row for each value of a column."""
    return [at(x, width, **conditions, **{column: value}) for value, x in zip(values, numbers, strict=True)]


def heterogeneous(slowdowns, alphas=(0.1, 1.0, 10.0), measures=(3.0, 2.0, 1.0), family="digits MLP"):
    """Rows of heterogeneity: populations with measures that fall, and slowdowns by alpha."""
    populations = [f"alpha {alpha:g}" if family == "digits MLP" else f"({alpha:g}, {alpha:g})" for alpha in alphas]
    found = [at(slowdowns[alpha], 0.1, "slowdown", part=family, population=population)
             for alpha, population in zip(alphas, populations, strict=True) if alpha in slowdowns]  # fmt: skip
    return found + [
        at(-x if measure == "labels per client" else x, 0, measure, part=family, population=population)
        for population, x in zip(populations, measures, strict=True)
        for measure in (*MEASURES, "gradient dissimilarity, shuffled")
    ]


def choices(unit, errors):
    """Rows of budget: the error of each cohort size from 1 on, and the regret of the first, which was predicted."""
    found = along("cohort_size", range(1, 1 + len(errors)), errors, quantity="squared distance", part=unit,
                  deadline=None, bits=32, rounds=9)  # fmt: skip
    return [*found, found[0] | {"quantity": "regret"}]


MESSAGES = {"quantity": "messages in a sum", "part": "circle"}
VARIANCE = {"part": "variance", "population_size": 5000}
GAIN = {"part": "digits", "quantity": "loss against the mean", "bucket_size": 1}
WORST = {"part": "worst case", "attackers": 2, "attack": "mimic"}
NO_DIGITS = {"alphas": [], "max_rounds": 9, "batch_sizes": [1], "gradient_noise": 1.0}
ROUNDS = {"part": "digits MLP", "quantity": "rounds to target", "alpha": 1.0}
SMALL_SHARE = {"part": "speeds", "quantity": "weight of the slow half"}
# (study, the start of a claim, options, rows, whether it holds).
CASES = {
    "no cohort between the others for joules": (
        "budget", "Bytes and energy",
        {"bytes": 1.0, "joules": 1.0, "seconds": 1.0, "cohort_sizes": [1, 2, 3]},
        [*choices("bytes", (3.0, 1.0, 2.0)), *choices("joules", (3.0,)), *choices("seconds", (3.0,))], None),
    "no more bits": (
        "error_floor", "With fewer than 8 bits",
        {"step_sizes": [0.1], "cohort_sizes": [4], "num_steps": [1], "bits": [3, 8], "noise_multipliers": [0.0]},
        [*along("value", NAMES.values(), range(5), part="each alone"),
         *along("value", (3, 8), (2.0, 1.0), part="bits")], None),
    "a gain of edge rounds within its interval": (
        "hierarchy", "On digits, the most edge rounds", {},
        [row for way in ("alike", "mixed", "labels", "random")
         for part, widths in (("fixed point", (0.0, 0.0)), ("gain", (0.01, 0.06)))
         for kappa, width in zip((1, 20), widths, strict=True)
         for row in along("edge_rounds", (kappa,), (0.05,), width, part=part, groups=way)], False),
    "graphs of one gap are not ordered by it": (
        "connectivity", "Nodes agree", {}, along("gap", (0.1, 0.6, 0.6 + 1e-12, 1.0), (90.0, 20.0, 20.0, 1.0), 1.0,
                                                 part="agreement", quantity="rounds", graph="a"), True),
    "a torus alone is no ring": (
        "connectivity", "The squared distance", {},
        along("rounds", (1, 100), (1.0, 0.01), part="decay", graph="torus"), None),
    "nobody leaves": (
        "dropout", "A sum holds", {"num_clients": 10}, along("dropout", (0.0, 0.1, 1.0), (10.0, 7.3, 0.0), **MESSAGES),
        True),
    "nearly everybody is not everybody": (
        "participation", "A cohort of everybody", {"tolerance": 1.0},
        along("cohort_size", (4999, 5000), (1e-7, 0.0), **VARIANCE), True),
    "nearly half is not half": (
        "participation", "A cohort of half", {"tolerance": 1.0}, along("cohort_size", (2499,), (1.0,), **VARIANCE),
        None),
    "the smallest alpha has no slowdown": (
        "heterogeneity", "Clients of digits", {"num_steps": 1}, heterogeneous({1.0: 2.0, 10.0: 1.0}), None),
    "slowdowns that are the same up to noise": (
        "heterogeneity", "On digits alone", {"num_steps": 1}, heterogeneous({0.1: 2.0, 1.0: 1.0, 10.0: 1.05}), True),
    "a measure with another order": (
        "heterogeneity", "On digits alone", {"num_steps": 1}, heterogeneous({0.1: 1.5, 1.0: 2.0, 10.0: 1.0}), False),
    "no Synthetic": (
        "heterogeneity", "Over digits and Synthetic", {"num_steps": 1},
        heterogeneous({0.1: 1.5, 1.0: 2.0, 10.0: 1.0}), None),
    "Synthetic without (0, 0)": (
        "heterogeneity", "Every Synthetic", {"num_steps": 1},
        heterogeneous({1.0: 2.0}, (1.0,), (1.0,), "Synthetic"), None),
    "one alpha": (
        "price_of_robustness", "Median, trimmed mean", {"num_messages": 9, "alphas": [1.0]},
        along("rule", ("median", "trimmed mean", "Krum"), (0.1, 0.1, 0.1), alpha=1.0, **GAIN), None),
    "a rule of the sentence is missing": (
        "robustness", "With 2 attackers median and Krum", {"attackers": [2], "num_clients": 9},
        along("rule", ("median", "geometric median", "centred clipping"), (0.5, 0.9, 0.9), -0.01, **WORST), None),
    "the mean alone": (
        "robustness", "With 2 attackers of 9 the mean", {"attackers": [2], "num_clients": 9},
        along("rule", ("mean",), (0.5,), -0.01, **WORST), None),
    "the mean is best": (
        "robustness", "With 2 attackers of 9 the mean", {"attackers": [2], "num_clients": 9},
        along("rule", ("mean", "Krum"), (0.9, 0.5), -0.01, **WORST), False),
    "two batch sizes with as many steps": (
        "rounds_to_target", "On the digits", NO_DIGITS | {"alphas": [1.0]},
        along("batch_size", (40, 80), (20.0, 5.0), local_steps=1, **ROUNDS), None),
    "an alpha without rounds": (
        "rounds_to_target", "On the digits", NO_DIGITS | {"alphas": [1.0, 9.0]},
        along("local_steps", (1, 20), (20.0, 5.0), batch_size=40, **ROUNDS), None),
    "constant weights alone": (
        "staleness", "Clients who take", {"delays": [0]}, along("weights", ("constant",), (0.2,), **SMALL_SHARE), None),
    "accuracies of few runs": (
        "personal_models", "On digits, the tenth", {},
        [at(0.9, -0.001, "accuracy", part="digits", method="a"),
         at(0.7, -0.1, "lowest tenth", part="digits", method="a")], False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_claim_says_what_it_tests(case):
    """Fault: a sentence that is judged by less than it says, or by a number of which it does not speak."""
    name, words, options, rows, holds = CASES[case]
    (claim,) = (claim for claim in claims_of(name)(rows, options) if claim.words.startswith(words))
    assert claim.holds is holds


def test_a_distance_has_no_sign():
    """Fault: biases that come nearer to the optimum from below, called a growing distance."""
    rows, options = published("availability")
    rows = [moved(row, row["measured"] - 0.5) if row["quantity"] == "bias" else row for row in rows]
    (claim,) = (claim for claim in claims_of("availability")(rows, options) if claim.words.startswith("The mean over"))
    assert claim.holds is False


def test_the_best_of_two_ends_is_not_between():
    """Fault: two clip norms, or one, that refute a claim about those between."""
    rows, options = published("clip")
    for norms in ([0.1], [0.1, 32.0]):
        few = [row for row in rows if row["part"] not in ("floor", "clip norm") or row["clip_norm"] in norms]
        (claim,) = (claim for claim in claims_of("clip")(few, options) if claim.words.startswith("Runs to the error"))
        assert claim.holds is None
