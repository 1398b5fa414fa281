"""The best choice within a budget: errors by enumeration, laws of the choice, and what is refused."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest

from fedjax_sim import theory
from fedjax_sim.theory.allocation import ErrorPath
from tests.refusals import refused

RNG = np.random.default_rng(0)
PROBLEM = {"population_size": 5, "dimension": 1, "strong_convexity": 0.8, "step_size": 0.5, "num_steps": 2}
COSTS = theory.ClientCosts(4.0, 4.0)
LARGE = {"population_size": 10**7, "dimension": 4, "strong_convexity": 1.0, "step_size": 0.02}


def enumerated(centers, curvatures, start, *, cohort_size, num_in_time, noise=0.0, rounds=6):
    """E |w_t - w*|^2 of each round, [rounds + 1]: the mean over all sets of clients in time, and over all cohorts.

    Coordinates have curvatures of their own; noise is that of one message, in each coordinate.
    """
    size, dimension = centers.shape
    cohorts = [list(c) for c in itertools.combinations(range(size), cohort_size)]
    groups = list(itertools.combinations(range(size), num_in_time))
    r = (1 - 0.5 * curvatures) ** 2
    errors = np.zeros(rounds + 1)
    for group in groups:
        mean, square = start - centers.mean(0), (start - centers.mean(0)) ** 2
        for t in range(rounds + 1):
            errors[t] += square.sum() / len(groups)
            next_mean, next_square = np.zeros(dimension), np.zeros(dimension)
            for cohort in cohorts:
                heard = [i for i in cohort if i in group]
                if not heard:
                    next_mean, next_square = next_mean + mean, next_square + square
                    continue
                target = (1 - r) * (centers[heard].mean(0) - centers.mean(0))
                next_mean = next_mean + r * mean + target
                next_square = next_square + r**2 * square + 2 * r * mean * target + target**2 + noise / len(heard)
            mean, square = next_mean / len(cohorts), next_square / len(cohorts)
    return errors


@pytest.mark.parametrize("cohort_size, num_in_time", [(1, 5), (2, 5), (5, 5), (2, 3), (3, 1), (1, 1)])
def test_the_path_is_the_enumerated_one(cohort_size, num_in_time):
    """Fault: 1/m without the correction, rounds without reports left out, late clients without a bias, bias counted
    twice, noise over m in place of the reports."""
    centers, h = RNG.normal(size=(5, 1)), 0.8
    gradients = h * (centers - centers.mean(0))
    constants = {"start": float((2 - centers.mean()) ** 2), "heterogeneity": float((gradients**2).sum() / 5)}
    problem = theory.SharedQuadratics(**PROBLEM, **constants, gradient_noise=0.3, range=2.0)
    # Two local steps of 0.5, and stochastic rounding to seven levels.
    noise = 0.5**2 * 0.3 * (1 + (1 - 0.5 * h) ** 2) + (4 / 6) ** 2 / 6
    expected = enumerated(centers, np.array([h]), np.array([2.0]), cohort_size=cohort_size, num_in_time=num_in_time,
                          noise=noise)  # fmt: skip
    path = problem.path(cohort_size, num_in_time, 3)
    np.testing.assert_allclose([path.error(t) for t in range(7)], expected, rtol=1e-11)


@pytest.mark.parametrize("num_in_time", [3, 5])
def test_the_path_bounds_other_curvatures(num_in_time):
    """Fault: a bound with the constants of the largest eigenvalue, or a bias of late clients that is subtracted."""
    curvatures = np.array([0.8, 1.4, 2.0])
    for i in range(20):
        # The start decides half of the cases, and the spread of the clients the other half.
        centers, start = RNG.normal(size=(5, 3)), RNG.normal(size=3) * (9.0 if i % 2 else 0.3)
        gradients = curvatures * (centers - centers.mean(0))
        heterogeneity, distance = float((gradients**2).sum() / 5), float(((start - centers.mean(0)) ** 2).sum())
        problem = theory.SharedQuadratics(**PROBLEM | {"dimension": 3}, smoothness=2.0, start=distance,
                                          heterogeneity=heterogeneity)  # fmt: skip
        exact = enumerated(centers, curvatures, start, cohort_size=2, num_in_time=num_in_time)
        bound = [problem.path(2, num_in_time).error(t) for t in range(7)]
        assert (exact <= np.array(bound) * (1 + 1e-12)).all() and exact[-1] > 0.05 * bound[-1]


def test_best_rounds_are_those_of_a_search():
    """Fault: a minimum that is off by one round, rounds after which the error rises again."""
    turns = 0
    for _ in range(300):
        a, b = np.sort(RNG.uniform(0.05, 0.99, 2))
        path = ErrorPath(1.0, RNG.normal(scale=3), a, abs(RNG.normal()) * RNG.integers(2), b)
        for most in (1, 2, 7, 60):
            errors = [path.error(t) for t in range(1, most + 1)]
            rounds = path.best_rounds(most)
            assert 1 <= rounds <= most and path.error(rounds) <= min(errors) + 1e-13
            turns += 1 < rounds < most
    assert turns > 20


def grid(**limits):
    """Allocates over a grid of cohorts, deadlines and bits of ten clients, whose times and energies differ."""
    rng = np.random.default_rng(3)
    seconds, joules = rng.lognormal(size=(2, 3, 10))
    problem = theory.SharedQuadratics(population_size=10, dimension=3, strong_convexity=1.0, step_size=0.2, start=9.0,
                                      heterogeneity=2.0, gradient_noise=0.1, range=1.0)  # fmt: skip
    costs = {bits: theory.ClientCosts(12.0, size, seconds, joules) for bits, size in ((None, 12.0), (4, 1.5), (8, 3))}
    return theory.allocate(problem, costs, cohort_sizes=[1, 3, 10], deadlines=[None, 3.0], **limits)


LIMITS = [{"bytes": 20.0}, {"joules": 9.0}, {"seconds": 8.0}, {"bytes": 40.0, "joules": 30.0, "seconds": 9.0}]


@pytest.mark.default_rows("bytes", "bytes+joules+seconds")
@pytest.mark.parametrize("limits", LIMITS, ids=lambda limits: "+".join(limits))
def test_a_larger_budget_is_never_worse(limits):
    """Fault: more rounds than help, rounds that are rounded to the nearest, a feasible choice that a budget loses."""
    errors, feasible = [], []
    for factor in np.geomspace(1, 300, 80):
        found = grid(**{name: limit * factor for name, limit in limits.items()})
        errors.append(found.best.error)
        feasible.append({choice[:3] for choice in found.choices if choice.feasible})
        for name, limit in limits.items():
            assert all(x.num_rounds * x.costs[name] <= limit * factor * (1 + 1e-6) for x in found.choices)
        assert found.best.error == min(choice.error for choice in found.choices)
    assert (np.diff(errors) <= 1e-12).all() and errors[-1] < 0.5 * errors[0]
    assert all(less <= more for less, more in itertools.pairwise(feasible)) and feasible[0] != feasible[-1]


@pytest.mark.parametrize("limits", LIMITS, ids=lambda limits: "+".join(limits))
def test_the_error_names_the_smallest_feasible_budget(limits):
    """Fault: an error that names a budget too small, or larger than needed, or only one of several limits."""
    tiny = {name: 1e-3 * limit for name, limit in limits.items()}
    with pytest.raises(ValueError, match="a budget of at least one round") as raised:
        grid(**tiny)
    named = {name: float(value) for name, value in re.findall(r"(\w+)=([\d.e-]+)", str(raised.value).split(", got")[0])}
    assert named.keys() == limits.keys() and grid(**named).best.num_rounds == 1
    with pytest.raises(ValueError, match="a budget of at least one round"):
        grid(**{name: max(value * (1 - 1e-6), tiny[name]) for name, value in named.items()})


def test_one_candidate_is_the_choice():
    """Fault: a choice beside the candidates; ties that depend on anything but the spending and the order."""
    problem = theory.SharedQuadratics(**PROBLEM, start=4.0, heterogeneity=1.0)
    single = theory.allocate(problem, {None: COSTS}, cohort_sizes=[3], bytes=100.0)
    assert single.choices == (single.best,) and single.best[:3] == (3, None, None) and single.best.num_rounds == 4
    # Without noise and spread all cohorts end at zero after one exact step: the cheapest one is taken.
    exact = theory.SharedQuadratics(population_size=5, dimension=1, strong_convexity=1.0, step_size=1.0, start=4.0)
    assert theory.allocate(exact, {None: COSTS}, cohort_sizes=[4, 2, 5, 2], bytes=40.0).best.costs["bytes"] == 16
    # A budget of exactly three rounds, whose quotient is below three in float64.
    cost = theory.ClientCosts(0.05, 0.05)
    assert (0.1 + 0.2) / 3 != 0.1 and 0.3 / 0.1 < 3
    assert theory.allocate(problem, {None: cost}, cohort_sizes=[1], bytes=0.3).best.num_rounds == 3


def test_best_cohort_for_bytes():
    """With x = 1/m and T = B x / c, the error V x + E_0 rho^T is least at ln(E_0 T' / V) / T', T' = B ln(1/rho) / c.

    If one round reaches the floor, all bytes belong into it. Fault: bytes of one direction, a contraction of the
    distance in place of its square.
    """
    problem = theory.SharedQuadratics(**LARGE, start=1e6, heterogeneity=9.0, gradient_noise=0.5)
    budget, per_client = 8.0 * 60_000, 8.0
    rho = (1 - 0.02) ** 2
    floor = 0.02**2 * (9.0 + 4 * 0.5) / (1 - rho)  # V: the floor of a cohort of one
    slope = budget / per_client * -math.log(rho)
    closed = 1 / (math.log(1e6 * slope / floor) / slope)
    found = theory.allocate(problem, {None: COSTS}, cohort_sizes=list(range(1, 400)), bytes=budget)
    assert found.best.cohort_size == pytest.approx(closed, rel=0.02) and 50 < closed < 200
    exact = theory.SharedQuadratics(**LARGE | {"step_size": 1.0}, start=1e6, heterogeneity=9.0)
    single = theory.allocate(exact, {None: COSTS}, cohort_sizes=[1, 10, 50, 99, 100, 101], bytes=800.0).best
    assert (single.cohort_size, single.num_rounds) == (100, 1)
    assert single.error == pytest.approx(9.0 / 100 * theory.finite_population_correction(10**7, 100), rel=1e-9)


def test_costs_at_a_deadline():
    """By hand. Fault: energy of late clients that is dropped or counted in full, bytes of messages that never began."""
    seconds = np.array([[1.0, 1.0, 1.0, 0.0], [1.0, 2.0, 5.0, 0.0], [1.0, 4.0, 1.0, 2.0]])  # totals 3, 7, 7 and 2
    joules = np.array([[1.0, 1.0, 1.0, 1.0], [10.0, 10.0, 10.0, 10.0], [100.0, 100.0, 100.0, 100.0]])
    problem = theory.SharedQuadratics(**PROBLEM | {"population_size": 4}, start=1.0, heterogeneity=1.0)
    costs = {None: theory.ClientCosts(6.0, 20.0, seconds, joules, overhead_seconds=0.5)}
    found = theory.allocate(problem, costs, cohort_sizes=[1, 4], deadlines=[4.0, None, 1.5], seconds=100.0)
    at_four, all_at_four, waiting = found.choices[:3]
    assert at_four.reports == 0.5 and all_at_four.reports == 2 and waiting.reports == 1
    assert at_four.costs == pytest.approx({
        "bytes": 6 + 20 * 3 / 4, "seconds": (3 + 4 + 4 + 2) / 4 + 0.5,
        "joules": (111 + (11 + 25) + (1 + 10 * 3 / 5) + 111) / 4,
    })  # fmt: skip
    assert all_at_four.costs["seconds"] == pytest.approx(4.5) and waiting.costs["seconds"] == pytest.approx(5.25)
    assert waiting.costs["joules"] == 111 and waiting.costs["bytes"] == 26
    # At 1.5 seconds nobody has arrived: all clients take longer.
    assert not any(choice.feasible for choice in found.choices[4:]) and found.choices[4].error == math.inf
    with refused("deadlines", value=[1.5], rule="some client meets"):
        theory.allocate(problem, costs, cohort_sizes=[1], deadlines=[1.5], seconds=100.0)


@pytest.mark.parametrize(
    "options, words",
    [
        ({}, "bytes, joules, seconds: expected at least one limit"),
        ({"joules": 1e9}, r"costs_by_bits\[None\].joules: expected numbers for a limit of joules"),
        ({"seconds": 1e9}, r"costs_by_bits\[None\].seconds: expected numbers"),
        ({"bytes": 1e9, "deadlines": [1.0]}, r"costs_by_bits\[None\].seconds: expected numbers"),
        ({"bytes": math.nan}, "bytes: expected"),
        ({"bytes": math.inf}, "bytes: expected"),
        ({"bytes": 1e9, "cohort_sizes": [6]}, "cohort_sizes: expected an integer"),
        ({"bytes": 1e9, "cohort_sizes": []}, "cohort_sizes: expected at least one"),
        ({"bytes": 1e9, "costs_by_bits": {4: COSTS}}, "range: expected a number"),
        ({"bytes": 1e9, "costs_by_bits": {}}, "costs_by_bits: expected"),
        ({"bytes": 1e9, "costs_by_bits": {None: COSTS._replace(bytes_up=0.0)}}, "bytes_up: expected"),
        ({"joules": 1.0, "costs_by_bits": {None: COSTS._replace(joules=np.zeros((3, 5)))}}, "joules: expected more"),
        ({"joules": 1.0, "costs_by_bits": {None: COSTS._replace(joules=np.full((3, 5), math.nan))}}, "joules: expect"),
        ({"seconds": 1.0, "costs_by_bits": {None: COSTS._replace(seconds=np.ones((3, 4)))}}, r"\[3, 5\]"),
    ],
)
def test_what_is_refused(options, words):
    """Fault: an unknown energy that counts as zero, a limit that is ignored, NaN that compares as feasible."""
    problem = theory.SharedQuadratics(**PROBLEM, start=1.0)
    arguments = {"costs_by_bits": {None: COSTS}, "cohort_sizes": [2]} | options
    with pytest.raises((TypeError, ValueError), match=words):
        theory.allocate(problem, arguments.pop("costs_by_bits"), **arguments)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"step_size": 1.3}, "step_size: expected"),
        ({"smoothness": 0.5}, "smoothness: expected"),
        ({"smoothness": 4.0}, "At most 1 / L = 0.25"),
        ({"start": math.nan}, "start: expected"),
        ({"heterogeneity": -1.0}, "heterogeneity: expected"),
        ({"population_size": 0}, "population_size: expected"),
        ({"num_steps": 1.5}, "num_steps: expected"),
        ({"range": 0.0}, "range: expected"),
    ],
)
def test_wrong_problems(options, words):
    """Fault: a step that overshoots, for which the formulas are no bound."""
    with pytest.raises((TypeError, ValueError), match=words):
        theory.SharedQuadratics(**PROBLEM | {"start": 1.0} | options)
