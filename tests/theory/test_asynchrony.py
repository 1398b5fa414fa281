"""FedAsync under delay and clients of different speed: closed forms against Lyapunov equations and an event loop."""

import numpy as np
import pytest
from scipy.linalg import solve_discrete_lyapunov

from fedjax_sim import theory
from fedjax_sim.server.staleness import hinge, polynomial
from tests.refusals import refused


def test_mixing_contracts():
    """Catches a delay that is one off, and mixing that diverges where SGD with delay does."""
    for delay in (0, 1, 5, 40):
        factor = theory.fedasync_contraction([[0.5, 0], [0, 1.9]], delay, mixing_rate=0.9, step_size=1.0)
        assert (0 < factor < 1 and factor ** (delay + 1) >= 0.9 * 0.9 - 1e-9) or delay == 0
    assert theory.fedasync_contraction(1.0, 0, mixing_rate=0.5, step_size=0.5) == pytest.approx(0.75)
    unstable = theory.fedasync_contraction(2.1, 1, mixing_rate=1.0, step_size=1.0)
    assert unstable == pytest.approx(np.sqrt(1.1))
    with refused("step_size", rule="every mode shrinks"):
        theory.fedasync_floor(2.1, 1, mixing_rate=1.0, step_size=1.0)


@pytest.mark.parametrize("delay", [0, 1, 2, 7])
def test_floor_solves_lyapunov(delay):
    """P = A P A^T + B of the companion matrix. Catches a lag that is one off."""
    for mixing, rate in ((0.6, 0.5), (1.0, 0.3), (0.2, 1.7)):
        expected = 0.0
        for curvature in (0.4, 1.0):
            companion = np.eye(delay + 1, k=-1)
            companion[0, 0] += 1 - mixing
            companion[0, delay] += mixing * (1 - rate * curvature)
            source = np.zeros_like(companion)
            source[0, 0] = (mixing * rate * 0.7) ** 2
            expected += solve_discrete_lyapunov(companion, source)[0, 0]
        floor = theory.fedasync_floor(np.diag([0.4, 1.0]), delay, mixing_rate=mixing, step_size=rate, noise=0.7)
        assert floor == pytest.approx(expected, rel=1e-9)


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("weigh", [None, polynomial(1.0), hinge(1.0, 2)])
def test_weights_of_arrivals(weigh):
    """An event loop in NumPy, its mean within five standard errors and the optimum of equal weights far outside.
    Catches weights by shares of arrivals alone, and small-step weights at a large step."""
    rates, eta, runs, steps = np.array([1.0, 1.0, 4.0, 4.0]), 0.5, 4000, 400
    centers, rng = np.array([0.0, 0.0, 1.0, 1.0]), np.random.default_rng(0)
    sent, version = np.zeros((runs, 4)), np.zeros((runs, 4), int)
    model, tail, every = np.zeros(runs), np.zeros(runs), np.arange(runs)
    for t in range(steps):
        who = rng.choice(4, runs, p=rates / rates.sum())
        gap = t - version[every, who]
        factor = np.ones(runs) if weigh is None else np.asarray(weigh(gap), np.float64)
        model = model - eta * factor * (sent[every, who] - centers[who])
        sent[every, who], version[every, who] = model, t + 1
        tail += model * (t >= steps // 2) / (steps - steps // 2)
    error = tail.std() / np.sqrt(runs)
    predicted = theory.arrival_weights(rates, weigh, step_size=eta) @ centers
    small = theory.arrival_weights(rates, weigh) @ centers
    assert abs(tail.mean() - predicted) < 5 * error < abs(predicted - 0.5) / 10
    assert (abs(small - predicted) > 10 * error) == (weigh is not None)  # equal factors: the step cancels
    with pytest.raises(ValueError, match="rates: expected"):
        theory.arrival_weights([1.0, float("nan")])
