"""Renyi curves of integer noise against exact divergences, and of samples against dp-accounting."""

from __future__ import annotations

import math
from decimal import Context, Decimal, localcontext

import dp_accounting as dp
import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

from fedjax_sim.privacy import Mechanism, account, calibrate
from fedjax_sim.privacy.renyi import (
    all_orders,
    curve,
    discrete_gaussian_curve,
    pure_curve,
    sampled_curve,
    skellam_curve,
)

ORDERS = all_orders()


def exact(log_mass, shift, orders):
    """Renyi divergences of a law on the integers from itself, shifted."""
    p, q = log_mass[:-shift], log_mass[shift:]
    return np.array([logsumexp(a * p + (1 - a) * q) / (a - 1) for a in orders])


@pytest.mark.parametrize(("rate", "z"), [(1e-9, 1e3), (1e-3, 1e6), (0.5, 1e6)])
def test_tiny_divergences_are_rounded_up(rate, z):
    """Catches a float64 sum near one that loses them, or makes them negative: an epsilon of zero, for nothing."""
    size = 10**9
    made = Mechanism(
        noise_multiplier=z, scheme="poisson", population_size=size, cohort_size=rate * size, num_slots=size
    )
    orders = (2, 60)
    found = curve(made)
    with localcontext(Context(prec=60)):
        q, exponent = Decimal(rate), 1 / Decimal(z) ** 2
        for order in orders:
            terms = (math.comb(order, k) * (1 - q) ** (order - k) * q**k * ((k * k - k) * exponent / 2).exp()
                     for k in range(order + 1))  # fmt: skip
            truth = sum(terms).ln() / (order - 1)
            assert Decimal(float(found[ORDERS == order][0])) >= truth
    assert (found > 0).all() and found[ORDERS == 60] < 1e-9
    assert account(made, 10, 1e-14).epsilon > 0 and account(made, 1000, 1e-14).epsilon > 0


@pytest.mark.parametrize("shift", [1, 3])
def test_integer_curves_bound_the_exact_divergence(shift):
    """Catches a bound without tau (a sum of discrete Gaussians is none), and one that is loose where it need not be."""
    orders = np.array([2.0, 4.0])
    for message_std, num_messages in ((0.5, 2), (0.5, 8), (2.0, 6)):
        reach = np.arange(-60, 61)
        one = np.exp(-(reach**2) / (2 * message_std**2))
        law = one / one.sum()
        for _ in range(num_messages - 1):
            law = np.convolve(law, one / one.sum())
        truth = exact(np.log(law[law > 1e-290]), shift, orders)
        sizes = {"l2": float(shift), "l1": float(shift), "dimension": 1}
        bound = discrete_gaussian_curve(orders, message_std=message_std, num_messages=num_messages, **sizes)
        assert (bound >= truth * (1 - 1e-9)).all()
        assert message_std < 1 or (bound <= truth * 1.001).all()
    for std in (2.0, 6.0):
        reach = np.arange(-80 - int(20 * std), 81 + int(20 * std))
        law = stats.skellam.pmf(reach, std**2 / 2, std**2 / 2)
        truth = exact(np.log(law[law > 1e-290]), shift, orders)
        bound = skellam_curve(orders, l2=float(shift), l1=float(shift), variance=std**2)
        assert (bound >= truth * (1 - 1e-9)).all() and (std < 6 or (bound <= truth * 1.3).all())


def test_tau_counts_every_message():
    """Catches a sum over messages that stops early, or a share of the noise in place of the sum's."""
    few = discrete_gaussian_curve(np.array([2.0]), l2=1.0, l1=1.0, message_std=0.5, num_messages=10_000, dimension=100)
    many = discrete_gaussian_curve(np.array([2.0]), l2=1.0, l1=1.0, message_std=0.5, num_messages=40_000, dimension=100)
    plain = 1 / (0.25 * 10_000)
    assert few[0] > plain and many[0] > plain / 4
    fine = discrete_gaussian_curve(
        np.array([2.0]), l2=40.0, l1=400.0, message_std=4.0, num_messages=100, dimension=10**6
    )
    assert fine[0] == pytest.approx(40.0**2 / 1600, rel=1e-9)


def integers(kind, z=2.0, scheme="full", granularity=0.01, **changes):
    """A mechanism of integer shares, for 100 of 100 (or of 1,000) clients in 50 dimensions."""
    c, d, size = 1 / granularity, 50, 100 if scheme == "full" else 1000
    norm = c + math.sqrt(d)
    details = {"clip_units": c, "cohort_size": 100, "dimension": d, "l1_units": math.sqrt(d) * norm, "l2_units": norm}
    sizes = {"population_size": size, "cohort_size": 100, "num_slots": 100}
    details |= {"table_error": 2.0**-63}
    return Mechanism(
        noise_multiplier=z, scheme=scheme, kind=kind, place="distributed", details=details, **sizes, **changes
    )


@pytest.mark.parametrize("kind", ["discrete_gaussian", "skellam"])
def test_fine_grids_are_gaussian(kind):
    """Catches units: on a fine grid, integer noise spends what a Gaussian does, and on a coarse one more."""
    orders = (ORDERS >= 2) & (ORDERS <= 64) & (np.floor(ORDERS) == ORDERS)
    whole = {"population_size": 100, "cohort_size": 100, "num_slots": 100, "scheme": "full", "place": "distributed"}
    gaussian = Mechanism(noise_multiplier=20.0, **whole)
    fine, coarse = (integers(kind, 20.0, granularity=g) for g in (1e-5, 0.1))
    np.testing.assert_allclose(curve(fine)[orders], curve(gaussian)[orders], rtol=2e-3)
    epsilon = account(gaussian, 5, 1e-5, accountant="rdp").epsilon
    assert epsilon <= account(fine, 5, 1e-5).epsilon <= 1.01 * epsilon < account(coarse, 5, 1e-5).epsilon
    found = calibrate(1.0, 1e-5, 5, fine)
    assert 0.99 < found.spent.epsilon <= 1.0


def test_errors_of_the_tables_are_charged():
    """Catches a total variation that is left out of delta, and one that is larger than all of it."""
    clean = integers("skellam", 20.0)
    wrong = dict(clean.details) | {"table_error": 1e-10}
    off = Mechanism.from_dict({**clean.as_dict(), "details": wrong})
    charged = account(off, 1, 1e-5).epsilon
    kept = 1e-5 - (1 + math.exp(charged)) * 1e-10 * 50 * 100
    assert charged == pytest.approx(account(clean, 1, kept).epsilon, rel=2e-4)
    assert charged > account(clean, 1, 1e-5).epsilon
    assert account(off, 1, 1e-7).epsilon == math.inf


def test_sampling_amplifies():
    """Catches a sample that costs more than everybody, and one that costs nothing."""
    for kind in ("discrete_gaussian", "skellam"):
        some, everybody = integers(kind, 10.0, "uniform_without_replacement"), integers(kind, 10.0)
        low, high = account(some, 20, 1e-5).epsilon, account(everybody, 20, 1e-5).epsilon
        assert 0.05 * high < low < high


def test_sampled_curve_is_the_general_bound():
    """Catches a wrong term: dp-accounting's bound knows the noise is Gaussian, so it is the lower one, but close."""
    orders = np.arange(2, 17)
    z, rate = 4.0, 0.05
    ours = sampled_curve(np.arange(17) / (2 * z**2), rate)[2:]
    event = dp.SampledWithoutReplacementDpEvent(1000, 50, dp.GaussianDpEvent(z))
    theirs = dp.rdp.RdpAccountant(orders, dp.NeighboringRelation.REPLACE_ONE).compose(event).rdp
    assert (ours >= theirs * (1 - 1e-9)).all() and ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert (ours <= orders / (2 * z**2)).all()


@pytest.mark.parametrize("epsilon", [1e-4, 0.5, 3.0, 20.0])
def test_pure_privacy_is_randomised_response(epsilon):
    """Catches a divergence above epsilon, below that of two answers, or with the orders swapped."""
    with localcontext(Context(prec=60)):
        ratio = Decimal(epsilon).exp()
        q = 1 / (1 + ratio)
        p = ratio * q
        for order in (2, 32, 512):
            truth = (p**order * q ** (1 - order) + q**order * p ** (1 - order)).ln() / (order - 1)
            found = pure_curve(np.array([float(order)]), epsilon)[0]
            assert float(truth) <= found <= min(epsilon, float(truth) * (1 + 1e-6) + 1e-13)
