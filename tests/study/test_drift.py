"""The drift study: its predictions hold, it would notice if they did not, and the counter-cases are there."""

import functools
import importlib
import math

import pytest

from fedjax_sim import theory
from fedjax_sim.study.drift.claims import drift_claims
from fedjax_sim.study.drift.figure import drift_figure
from fedjax_sim.study.drift.fixed_points import fixed_point_rows
from fedjax_sim.study.drift.question import drift
from fedjax_sim.study.findings import Findings
from fedjax_sim.study.quadratic_settings import SMALLEST_CURVATURE, Base, quadratic_clients

SMALL = {
    "num_clients": 6, "dimension": 2, "heterogeneities": (0.0, 1.0, 2.0), "step_sizes": (0.05, 0.2),
    "num_steps": (1, 3, 10), "proximal_weights": (0.0, 1.0, 100.0),
    "model_clients": 4,
}  # fmt: skip


@functools.cache
def findings():
    return drift(**SMALL)


def rows(part, quantity, **conditions):
    found = [row for row in findings().rows() if row["part"] == part and row["quantity"] == quantity]
    return [row for row in found if all(row[name] == value for name, value in conditions.items())]


@pytest.mark.full
def test_predictions_hold():
    """Fault: any closed form, algorithm or drift metric that is off."""
    predicted = [row for row in findings().rows() if row["predicted"] is not None]
    assert [row for row in predicted if row["holds"] is not True] == []
    assert len(predicted) > 60
    assert {row["part"] for row in predicted} == {
        "fixed point", "heterogeneity", "equal Hessians", "two curvatures", "one round", "unequal steps", "FedProx",
        "FedProx's drift", "drift bias", "drift bias, half the step", "identical clients",
    }  # fmt: skip


@pytest.mark.full
def test_it_can_tell_a_wrong_formula():
    """Fault: a resolution so generous that a prediction 5 % off would hold."""
    found = findings()
    wrong = [one._replace(predicted=1.05 * one.predicted) for one in found.comparisons if one.predicted]
    wrong = [one for one in wrong if one.kind == "exact" and one.predicted > 1e-2]
    assert len(wrong) > 30
    assert not any(row["holds"] for row in found._replace(comparisons=wrong).rows())


@pytest.mark.full
def test_corrected_algorithms_reach_the_optimum():
    """Fault: control variates that leave drift in, for some K; a FedAvg without drift would show the test blind."""
    for name in ("SCAFFOLD", "FedDyn", "Mime"):
        there = rows("fixed point", "distance to the optimum", algorithm=name)
        assert {row["local_steps"] for row in there} == {1, 3, 10}
        assert all(row["measured"] < 1e-5 for row in there)
    away = rows("fixed point", "distance to the optimum", algorithm="FedAvg")
    assert all((row["measured"] > 1e-3) == (row["local_steps"] > 1) for row in away)


def test_small_steps_get_their_rounds(monkeypatch):
    """Fault: control variates that had not converged, taken for rounding."""
    module, asked = importlib.import_module("fedjax_sim.study.drift.fixed_points"), []
    monkeypatch.setattr(module, "run_settings", lambda make, settings, rounds=math.inf: asked.append(rounds) or [])
    base = Base(quadratic_clients(4, 2, 1.0, 0), 1, 0.005, 1.0)
    assert not list(fixed_point_rows(base, {1.0: base.problem}, [1], [0.005]))
    assert len(asked) == 6 and all((1 - 0.005 * SMALLEST_CURVATURE) ** rounds < 1.1e-8 for rounds in asked[3:])


@pytest.mark.full
def test_one_step_has_no_error_of_its_leading_term():
    """Fault: a claim about the ratio of two rests that are zero."""
    claims = list(drift_claims(findings().rows(), {**findings().options, "num_steps": [1]}))
    (on_quadratics,) = (claim for claim in claims if claim.words.startswith("Half the step divides"))
    (of_model,) = (claim for claim in claims if "with the fewest local steps, half the step divides" in claim.words)
    assert on_quadratics.holds is None and of_model.holds is True  # the model's is not zero


@pytest.mark.full
def test_counter_cases():
    """Fault: the textbook claim that drift is there because data are not IID, taken for a law."""
    (bias,) = rows("identical clients", "drift bias")
    (part,) = rows("identical clients", "heterogeneity part")
    (equal,) = rows("equal Hessians", "distance to the optimum")
    assert bias["measured"] > 0.1 and part["measured"] < 1e-6 and equal["measured"] < 1e-5


@pytest.mark.full
def test_known_numbers():
    """Fault: other conventions of the proximal term (Li et al. 2020), unequal steps (Wang et al. 2020), contraction."""
    unequal = rows("unequal steps", "distance to the optimum", algorithm="FedAvg")
    ends = [0.5 + row["measured"] / 2**0.5 for row in unequal]  # two coordinates alike
    assert ends == pytest.approx([0.866901, 0.905319], abs=1e-5)
    contractions = [row["measured"] for row in rows("FedProx", "contraction of a round")]
    assert contractions == pytest.approx([0.0, 0.2955, 0.9496], abs=1e-4)
    twice = theory.fedavg_contraction([1.0, 10.0], [0.0, 1.0], num_steps=3, step_size=0.05)
    (seen,) = rows("two curvatures", "contraction of a round", local_steps=3)
    assert seen["measured"] == pytest.approx(twice, abs=1e-5)


@pytest.mark.full
def test_leading_term_of_a_model():
    """Fault: a Hessian-vector product that is wrong for a model: the rest would not fall with the step's square."""
    rest = [row["measured"] for row in rows("logistic regression", "bias less leading term", local_steps=1)]
    assert rest[-2] / rest[-1] == pytest.approx(4, abs=0.3)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"step_sizes": ()}, "step_sizes: expected"),
        ({"step_sizes": 0.1}, "step_sizes: expected a list"),
        ({"step_sizes": (0.6,)}, "step_sizes: expected"),
        ({"num_steps": (0,)}, "num_steps: expected"),
        ({"num_clients": 5}, "num_clients: expected an even number"),
        ({"heterogeneities": (float("nan"),)}, "heterogeneities: expected"),
        ({"proximal_weights": (-1.0,)}, "proximal_weights: expected"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot."""
    with pytest.raises((TypeError, ValueError), match=words):
        drift(**SMALL | options)


@pytest.mark.full
def test_claims_and_figure():
    """Fault: conclusions that need many settings; claims or a figure that cannot be made without the model."""
    found = findings()
    assert isinstance(found, Findings) and [claim.words for claim in found.claims if claim.holds is not True] == []
    rows = [row for row in found.rows() if row["part"] != "logistic regression"]
    assert [claim.holds for claim in drift_claims(rows, found.options)].count(None) == 1
    assert len(found.figure().axes) == len(drift_figure(rows, found.options).axes) == 4
