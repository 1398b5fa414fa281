"""The availability study: its predictions hold, and it would notice if they did not."""

import functools

import numpy as np
import pytest

from fedjax_sim.study.availability import laws
from fedjax_sim.study.availability.clients import QuadraticFedAvg, correlated, rates_of
from fedjax_sim.study.availability.question import availability

SMALL = {"num_clients": 6, "correlations": (0.0, 1.0), "stays": (4.0,), "num_looks": 500, "zone_clients": 48}


@functools.cache
def findings():
    return availability(**SMALL)


def by_hand(rows, centers, rates, s, *, rounds, corrected, seed=0):
    """[runs, d] models after so many rounds, in NumPy."""
    rng, models = np.random.default_rng(seed), np.zeros((rows, centers.shape[1]))
    for _ in range(rounds):
        there = rng.random((rows, len(rates))) < rates
        weights = there / (len(rates) * rates) if corrected else there / np.maximum(there.sum(1, keepdims=True), 1)
        models += s * (weights @ centers - weights.sum(1, keepdims=True) * models)
    return models


@pytest.mark.parametrize("corrected", [False, True])
def test_laws(corrected):
    """Mean and variance of 40,000 runs in NumPy, five standard errors. Catches a law that leaves out who else is there,
    or that weights do not sum to one."""
    rates, s = np.array([0.15, 0.4, 0.7, 0.9]), 0.6
    centers = np.array([[2.0, 0.0], [1.0, -1.0], [0.0, 3.0], [-1.0, 0.5]])
    law = (laws.corrected if corrected else laws.naive)(centers, rates, s)
    models = by_hand(40_000, centers, rates, s, rounds=30, corrected=corrected)
    squares = ((models - law.mean) ** 2).sum(1)
    assert (abs(models.mean(0) - law.mean) < 5 * models.std(0) / 200).all()
    assert abs(squares.mean() - law.variance) < 5 * squares.std() / 200
    if corrected:
        np.testing.assert_allclose(law.mean, centers.mean(0))


def test_a_chain_without_memory_is_chance():
    """leaves + comes = 1: each round is drawn anew. Catches other transitions, or a chain of one client."""
    centers = np.random.default_rng(0).normal(size=(5, 2))
    chain, chance = laws.persistent(centers, 0.4, 0.6, 0.5), laws.naive(centers, np.full(5, 0.6), 0.5)
    np.testing.assert_allclose(chain.mean, chance.mean, atol=1e-12)
    assert chain.variance == pytest.approx(chance.variance, rel=0.01)  # but for rounds without anybody
    longer = [laws.persistent(centers, 1 / x, 1 / x, 0.5).variance for x in (2, 4, 8)]
    assert longer[0] < longer[1] < longer[2]


@pytest.mark.full
def test_predictions_hold():
    """Fault: a round that asks who is there at another time, an average or a correction that is off."""
    rows = findings().rows()
    assert [row for row in rows if row["holds"] is not True] == []
    assert {row["part"] for row in rows} == {"by client", "for a while", "by hour"} and len(rows) == 2 * 4 + 2 + 14


@pytest.mark.full
def test_it_can_tell_other_laws():
    """Fault: intervals so wide that no bias, shares in proportion to rates, or rounds drawn anew would hold as well."""
    rows, work = findings().rows(), QuadraticFedAvg(5, 0.2)
    rates = rates_of(6, 0)
    centers = correlated(rates, 1.0, 4, 0)
    assert np.corrcoef(rates, centers[:, 0])[0, 1] == pytest.approx(1)
    one = {(row["quantity"], row.get("aggregate")): row for row in rows if row.get("correlation") == 1.0}
    assert one["bias", "mean"]["low"] > 0.1 and abs(one["bias", "corrected"]["measured"]) < 0.05
    (slow,) = (row for row in rows if row["part"] == "for a while" and row["quantity"] == "excess loss")
    fresh = laws.persistent(correlated(rates, 0.0, 4, 0), 0.5, 0.5, work.s).variance / 2
    assert not slow["low"] <= fresh <= slow["high"]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_clients": 13}, "num_clients: expected an integer in"),
        ({"correlations": (0.5, 1.2)}, r"correlations.1.: expected a number in"),
        ({"stays": (1.0,)}, r"stays.0.: expected a number in"),
        ({"num_looks": 10}, "num_looks: expected an integer in"),
        ({"share": float("nan")}, "share: expected"),
        ({"step_size": 0.0}, "step_size: expected"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot."""
    with pytest.raises(ValueError, match=words):
        availability(**SMALL | options)


@pytest.mark.full
def test_claims_and_figure():
    """Fault: a bias that few looks do not show, a figure that cannot be drawn from what was found."""
    holds = [claim.holds for claim in findings().claims]
    assert holds[0] is True
    assert [i for i, value in enumerate(holds) if value is None] == [4]  # there is one length of stays
    figure = findings().figure()
    assert len(figure.axes) == 4 and all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)


def test_nothing_remains_after_many_local_steps():
    """Fault: the logarithm of zero, where (1 - eta)^K is rounded away."""
    work = QuadraticFedAvg(100, 0.9)
    assert work.s == 1.0 and work.between == 1
    law = laws.persistent(np.array([[2.0], [1.0], [0.0]]), 0.5, 0.5, work.s)
    assert np.isfinite(law.mean).all() and np.isfinite(law.variance)
