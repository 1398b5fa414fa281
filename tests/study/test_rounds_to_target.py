"""The study of rounds to a target: exact counts, exact means under noise, and fewer rounds on IID data."""

import functools

import pytest

from fedjax_sim.report.charts import LOOKS
from fedjax_sim.study.findings import measured, rows_of
from fedjax_sim.study.rounds_to_target.claims import rounds_to_target_claims
from fedjax_sim.study.rounds_to_target.figure import rounds_to_target_figure
from fedjax_sim.study.rounds_to_target.question import rounds_to_target

LATE = "loss after the last round / target"
SMALL = {
    "num_clients": 6, "dimension": 8, "heterogeneity": 2.0, "step_size": 0.05, "num_steps": (1, 4, 40),
    "max_rounds": 80, "gradient_noise": 3.0, "batch_sizes": (1, 16), "num_runs": 250, "model_clients": 20,
    "alphas": (100.0, 0.1), "num_epochs": (1,), "model_batch_sizes": (0, 10), "model_rounds": 90, "model_runs": 2,
    "model_target": 0.8,
}  # fmt: skip


@functools.cache
def findings():
    return rounds_to_target(**SMALL)


def rows(part, quantity="rounds to target"):
    return [row for row in findings().rows() if row["part"] == part and row["quantity"] == quantity]


@pytest.mark.full
def test_predictions_hold():
    """Fault: a path, a floor or a count of rounds that is off."""
    predicted = [row for row in findings().rows() if row["predicted"] is not None]
    assert [row for row in predicted if row["holds"] is not True] == []
    assert {row["part"] for row in predicted} == {"one curvature", "one optimum", "heterogeneous", "batches"}
    assert len(rows("one curvature")) == 3 and len(predicted) == 3 * 3 + 2
    assert {row["quantity"] for row in predicted if "loss" not in row["quantity"]} == {"rounds to target"}


@pytest.mark.full
def test_it_can_tell_another_round():
    """Fault: a resolution in which a round more or less would hold as well, or noise that hides 30 % of the loss."""
    found = findings()
    for change in (1, -1):
        wrong = [one._replace(predicted=one.predicted + change) for one in found.comparisons
                 if one.quantity == "rounds to target" and one.predicted]  # fmt: skip
        assert wrong and not any(row["holds"] for row in found._replace(comparisons=wrong).rows())
    noisy = [one for one in found.comparisons if one.conditions["part"] == "batches"]
    wrong = [one._replace(predicted=1.3 * one.predicted) for one in noisy if one.conditions["batch_size"] == 16]
    assert wrong and not any(row["holds"] for row in found._replace(comparisons=wrong).rows())


@pytest.mark.full
def test_drift_ends_what_local_work_saves():
    """Fault: a study in which more local work always helps: on these clients forty steps never arrive."""
    assert [row["local_steps"] for row in rows("heterogeneous")] == [1, 4]
    (late,) = rows("heterogeneous", LATE)
    assert late["local_steps"] == 40 and late["measured"] > 1
    (drift,) = (claim for claim in findings().claims if claim.words.startswith("Where drift's floor"))
    assert drift.holds and "local steps 40" in drift.numbers


@pytest.mark.parametrize("target, never", [(0.5, None), (1e-4, True)])
def test_too_few_rounds_are_not_drift(target, never):
    """Fault: a setting whose rounds were too few is said never to arrive, or the other way round."""
    found = [measured({"part": "heterogeneous", "local_steps": 40, "batch_size": None}, LATE, 59.9),
             measured({"part": "batches", "local_steps": 40, "batch_size": 16}, LATE, 59.9)]  # fmt: skip
    claims = rounds_to_target_claims(rows_of(found), SMALL | {"target": target, "seed": 0})
    assert [claim.holds for claim in claims if "floor" in claim.words] == [never, never]


@pytest.mark.full
def test_rounds_fall_on_iid_digits():
    """McMahan et al. 2017, table 2. Fault: local work that saves no rounds."""
    iid = {row["local_steps"]: row["measured"] for row in rows("digits MLP") if row["alpha"] == 100.0}
    assert set(iid) == {1, 4} and iid[4] < 0.6 * iid[1]
    assert all(row["high"] - row["low"] >= 1 for row in rows("digits MLP"))  # whole rounds, if all runs took as many


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_steps": ()}, "num_steps: expected"),
        ({"target": 1.0}, "target: expected"),
        ({"step_size": 0.9}, "step_size: expected"),
        ({"batch_sizes": (0,)}, "batch_sizes: expected"),
        ({"model_clients": 5}, "model_clients: expected"),
        ({"learning_rate": float("nan")}, "learning_rate: expected"),
        ({"learning_rate": 1e30}, "learning_rate: expected"),
        ({"heterogeneity": 1e30}, "heterogeneity: expected"),
        ({"num_runs": 249}, "num_runs: expected"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot."""
    with pytest.raises(ValueError, match=words):
        rounds_to_target(**SMALL | options)


@pytest.mark.full
def test_claims_and_figure():
    """Fault: claims or a figure that cannot be made of what was found; two runs on the digits are too few."""
    *claims, of_digits = findings().claims
    assert [claim.words for claim in claims if claim.holds is not True] == [] and of_digits.holds is False
    assert len(findings().figure().axes) == 4


def test_more_series_than_looks():
    """Fault: a figure that is refused after the study has run."""
    many = list(range(1, 10))
    found = [measured({"part": "batches", "local_steps": 4, "batch_size": size}, LATE, [2.0, 3.0]) for size in many]
    found += [
        measured({"part": "digits MLP", "local_steps": 1, "alpha": float(alpha)}, "rounds to target", [2.0, 3.0])
        for alpha in many
    ]
    options = SMALL | {"batch_sizes": many, "alphas": [float(alpha) for alpha in many], "target": 0.01, "seed": 0}
    _, _, paths, digits = rounds_to_target_figure(rows_of(found), options).axes
    assert [len(axes.containers) for axes in (paths, digits)] == [len(LOOKS)] * 2
