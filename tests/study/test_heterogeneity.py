"""The heterogeneity study: exact where there is a closed form, and a fair comparison where there is none."""

import functools

import numpy as np
import pytest

from fedjax_sim import population
from fedjax_sim.study.heterogeneity import _digits, heterogeneity

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


def test_predictions_hold():
    """Fault: rounds of the best step, or gaps of optima, that are off."""
    predicted = [row for row in findings().rows() if row["predicted"] is not None]
    assert [row for row in predicted if row["holds"] is not True] == []
    assert len(predicted) == 4 + 3


def test_it_can_tell_another_round():
    """Fault: a resolution in which a round more or less, or a gap 5 % off, would hold as well."""
    found = findings()
    exact = [one for one in found.comparisons if one.predicted and one.kind == "exact"]
    for change in (1, -1):
        wrong = [one._replace(predicted=one.predicted + change * max(1, round(0.05 * one.predicted))) for one in exact]
        assert wrong and not any(row["holds"] for row in found._replace(comparisons=wrong).rows())


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


def test_shuffled_clients_hold_the_same_examples():
    """Fault: a comparison with other examples or sizes, or with clients that were not dealt anew."""
    field = _digits(12, 0.05, 3)
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
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot."""
    with pytest.raises(ValueError, match=words):
        heterogeneity(**SMALL | options)


def test_figure_and_reading():
    """Fault: a figure or a reading that cannot be made of what was found."""
    assert len(findings().figure().axes) == 4 and len(findings().reading) >= 5
