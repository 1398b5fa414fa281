"""The heterogeneity study: exact where there is a closed form, and a fair comparison where there is none."""

import functools

import numpy as np
import pytest

from fedjax_sim import population
from fedjax_sim.study.findings import Findings, measured, rows_of
from fedjax_sim.study.heterogeneity.claims import heterogeneity_claims
from fedjax_sim.study.heterogeneity.figure import heterogeneity_figure
from fedjax_sim.study.heterogeneity.models import digits_population
from fedjax_sim.study.heterogeneity.question import heterogeneity
from fedjax_sim.study.heterogeneity.ranks import MEASURES, rank_correlations
from fedjax_sim.study.page import table

SMALL = {
    "spreads": (0.0, 0.5, 2.0), "num_clients": 6, "dimension": 2, "alphas": (0.05, 100.0), "synthetic": (0.5,),
    "model_clients": 30, "num_rounds": 60, "reference_rounds": 10, "num_runs": 3,
}  # fmt: skip


@functools.cache
def findings():
    return heterogeneity(**SMALL)


def values(part, quantity):
    return {row["population"]: row["measured"] for row in findings().rows()
            if row["part"] == part and row["quantity"] == quantity}  # fmt: skip


@pytest.mark.full
def test_predictions_hold():
    """Fault: rounds of the best step, or gaps of optima, that are off."""
    predicted = [row for row in findings().rows() if row["predicted"] is not None]
    assert [row for row in predicted if row["holds"] is not True] == []
    assert len(predicted) == 4 + 3


@pytest.mark.full
def test_it_can_tell_another_round():
    """Fault: a resolution in which a round more or less, or a gap 5 % off, would hold as well."""
    found = findings()
    exact = [one for one in found.comparisons if one.predicted and one.kind == "exact"]
    for change in (1, -1):
        wrong = [one._replace(predicted=one.predicted + change * max(1, round(0.05 * one.predicted))) for one in exact]
        assert wrong and not any(row["holds"] for row in found._replace(comparisons=wrong).rows())


@pytest.mark.full
def test_more_heterogeneity_takes_more_rounds():
    """Fault: a best step that is not the best, or populations in the wrong order."""
    rounds, spread = values("quadratics", "rounds to target"), values("quadratics", "gradient dissimilarity")
    assert list(rounds.values()) == sorted(rounds.values()) and rounds["spread 2"] > 2 * rounds["spread 0"]
    assert spread["spread 2"] == pytest.approx(16 * spread["spread 0.5"], rel=1e-4)
    assert (
        values("digits MLP", "total variation")["alpha 0.05"] > 2 * values("digits MLP", "total variation")["alpha 100"]
    )
    own, mixed = (values("digits MLP", "gradient dissimilarity" + tail) for tail in ("", ", shuffled"))
    assert own["alpha 0.05"] > 5 * mixed["alpha 0.05"] and own["alpha 100"] < 3 * mixed["alpha 100"]


@pytest.mark.parametrize("rounds, num_steps, holds", [((30, 30), 5, False), ((30, 90), 5, True), ((30, 30), 1, None)])
def test_claim_follows_the_rounds(rounds, num_steps, holds):
    """Fault: a claim that knows what it will find, or one of drift where a single local step has none."""
    found = [measured({"part": "quadratics", "population": f"spread {i}"}, "rounds to target", count)
             for i, count in enumerate(rounds)]  # fmt: skip
    (claim,) = (
        claim
        for claim in heterogeneity_claims(rows_of(found), {"num_steps": num_steps})
        if claim.words.startswith("On quadratics")
    )
    assert claim.holds is holds


@pytest.mark.full
def test_random_ranks_have_no_interval():
    """Fault: a rank correlation of random slowdowns, or a count of whole rounds, with an interval of width zero."""
    found = [measured({"part": "digits MLP", "population": str(i)}, quantity, i**2)
             for i in range(1, 5) for quantity in (*MEASURES, "slowdown")]  # fmt: skip
    ranks = Findings(
        name="ranks",
        question="",
        comparisons=list(rank_correlations(found)),
        figure=lambda: None,
        options={},
    )
    assert len(ranks.rows()) == len(MEASURES)
    assert all(row["measured"] == 1 and row["low"] is row["high"] is row["holds"] is None for row in ranks.rows())
    assert {line[-2] for line in table(ranks)[1]} == {"\N{EN DASH}"}
    slow = [one for one in findings().comparisons if one.quantity == "slowdown"]
    assert slow and all(one.resolution > 0 for one in slow)


def test_shuffled_clients_hold_the_same_examples():
    """Fault: a comparison with other examples or sizes, or clients whose examples were not shuffled."""
    field = digits_population(12, 0.05, 3)
    own, dealt = (population.pooled(side).examples["y"] for side in (field.own, field.shuffled))
    np.testing.assert_array_equal(np.sort(own), np.sort(dealt))
    np.testing.assert_array_equal(field.own.sizes, field.shuffled.sizes)
    assert (np.asarray(own) != np.asarray(dealt)).mean() > 0.5


@pytest.mark.parametrize(
    "options, words",
    [
        ({"spreads": ()}, "spreads: expected"),
        ({"alphas": (0.0,)}, "alphas: expected"),
        ({"synthetic": (float("inf"),)}, "synthetic: expected"),
        ({"model_clients": 3}, "model_clients: expected"),
        ({"num_rounds": 10}, "num_rounds: expected"),
        ({"num_runs": 1}, "num_runs: expected"),
        ({"learning_rate": 1e30}, "learning_rate: expected"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot."""
    with pytest.raises(ValueError, match=words):
        heterogeneity(**SMALL | options)


@pytest.mark.full
def test_claims_and_figure():
    """Fault: claims or a figure that cannot be made of what was found, without the models too."""
    found = findings()
    assert [claim.holds for claim in found.claims[:2]] == [True, True] and len(found.figure().axes) == 4
    rows = [row for row in found.rows() if row["part"] in ("labels 0, 1, 2", "quadratics")]
    without_models = list(heterogeneity_claims(rows, found.options))
    assert [claim.holds for claim in without_models] == [True, True, *[None] * 5]
    assert len(heterogeneity_figure(rows, found.options).axes) == 4
