"""The study of staleness: its predictions hold, and it would notice if they did not."""

import jax
import numpy as np
import pytest

from fedjax_sim import theory
from fedjax_sim.study.findings import Findings
from fedjax_sim.study.staleness import delays
from fedjax_sim.study.staleness.claims import staleness_claims
from fedjax_sim.study.staleness.figure import staleness_figure
from fedjax_sim.study.staleness.question import staleness

SMALL = {"delays": (1, 5), "weights": ("constant", "hinge"), "concurrency": 4, "buffer_sizes": (2,), "num_runs": 250,
         "speed_runs": 500}  # fmt: skip


OPTIONS = SMALL | {"delays": (5,), "noise": 1.0}


@pytest.fixture(scope="module")
def some():
    """The part of one delay: FedBuff as one program."""
    found = delays.equal_delays(
        jax.random.key(0), 5, floor_step=0.1, noise=1.0, num_runs=250, weights=["constant", "hinge"], mixing=False
    )
    return Findings(name="staleness", question="", comparisons=list(found), figure=lambda: None, options=OPTIONS)


@pytest.mark.full
def test_one_delay_holds(some):
    """0.99 of the limit converges and 1.01 diverges, at the factors of theory; floors, weights and errors hold.
    Fault: a gradient from another version than its staleness says."""
    rows = some.rows()
    assert [row for row in rows if row["holds"] is not True] == [] and len(rows) == 8
    below, above = (row["measured"] for row in rows if row["part"] == "limit")
    assert below < 1 - 1e-4 and above > 1 + 1e-4
    assert {row["part"] for row in rows} == {"limit", "weights", "error", "floor"}


@pytest.mark.full
def test_it_can_tell_another_delay(some):
    """Fault: intervals in which a delay of one version less, or weights that are ignored, would hold as well."""
    for one in some.comparisons:
        step = one.conditions.get("step_over_limit", 0) * theory.delayed_step_limit(5)
        if one.conditions["part"] == "limit":
            wrong = theory.delayed_contraction(1.0, 4, step_size=step)
        elif one.quantity == "squared distance":
            factor = 1.0 if one.conditions["part"] == "weights" else 0.5
            wrong = theory.delayed_floor(np.eye(delays.DIMENSION), 5, step_size=factor * step)
        elif one.conditions["part"] == "error" and one.kind == "exact":
            wrong = delays.stale_prediction(4, 0.1).error
        else:
            continue
        assert not some._replace(comparisons=[one._replace(predicted=wrong)] * len(some.comparisons)).rows()[0]["holds"]


@pytest.mark.full
def test_predictions_hold():
    """Fault: FedAsync's mixing, a fixed point of fast and slow clients, or a time that is off."""
    found = staleness(**SMALL)
    rows = found.rows()
    assert [row for row in rows if row["holds"] is False] == []
    assert {row["part"] for row in rows} == {"limit", "same step", "floor", "error", "weights", "speeds", "buffers"}
    assert {row["algorithm"] for row in rows} == {"fedbuff", "fedasync"}
    slow = {row["weights"]: row for row in rows if row["part"] == "speeds"}
    for name, other in (("constant", "hinge"), ("hinge", "constant")):  # it can tell weights apart
        assert not slow[name]["low"] <= slow[other]["predicted"] <= slow[name]["high"]
    # Buffers of one size and FedAsync at one delay compare nothing.
    assert [claim.holds for claim in found.claims].count(True) == 7 and len(found.draw().axes) == 6
    assert [claim.words for claim in found.claims if claim.holds is False] == []


@pytest.mark.slow
def test_defaults():
    """Fault: predictions off at default options."""
    assert [row for row in staleness().rows() if row["holds"] is False] == []


def test_factors_of_paths():
    """Catches a phase that is taken for growth, and slow roots that are not gone."""
    t = np.arange(900)
    assert delays.factor_of(0.9**t * np.cos(0.3 * t + 1)) == pytest.approx(0.9, abs=1e-9)
    assert delays.factor_of((-1.02) ** t) == pytest.approx(1.02, abs=1e-9)
    assert delays.factor_of(np.minimum(1.2**t, 1e18)) == pytest.approx(1.2, abs=1e-9)  # an overflow stops a run
    assert delays.factor_of(1.2**t + 0.7**t) == pytest.approx(1.2, abs=1e-9)


@pytest.mark.full
def test_claims_and_figure_of_parts(some):
    """Fault: claims or a figure that fail where a part is missing."""
    claims = list(staleness_claims(some.rows(), OPTIONS))
    assert claims[0].holds and "1.01" in claims[0].numbers
    assert [claim.words for claim in claims if claim.holds is False] == []
    for rows in (some.rows(), []):
        assert len(staleness_figure(rows, OPTIONS).axes) == 6
    assert {claim.holds for claim in staleness_claims([], OPTIONS)} == {None}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"delays": ()}, "delays: expected at least one"),
        ({"delays": (13,)}, "delays: expected an integer"),
        ({"weights": ("hinge",)}, "weights: expected different names"),
        ({"weights": ("constant", "linear")}, "weights: expected"),
        ({"concurrency": 5}, "concurrency: expected an even number"),
        ({"buffer_sizes": (5,)}, "buffer_sizes: expected an integer"),
        ({"num_runs": 20}, "num_runs: expected an integer"),
        ({"noise": float("nan")}, "noise: expected"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot."""
    with pytest.raises(ValueError, match=words):
        staleness(**SMALL | options)
