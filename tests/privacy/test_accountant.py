"""Epsilons against dp-accounting called by hand, closed forms, and each other."""

from __future__ import annotations

import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings, strategies as st
from scipy import stats

from fedjax_sim.privacy import Mechanism, PrivacySpent, account, compose
from fedjax_sim.privacy.accountant import round_up
from fedjax_sim.privacy.loss import poisson_loss
from fedjax_sim.privacy.renyi import all_orders

RELATION = {
    "add_or_remove_one": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": dp.NeighboringRelation.REPLACE_ONE,
    "zero_out": dp.NeighboringRelation.REPLACE_SPECIAL,
}


def poisson(z=1.0, q=0.02, size=1000, slots=None, **changes):
    """A mechanism on a Poisson sample."""
    scheme = "poisson" if slots is None else "truncated_poisson"
    sizes = {"population_size": size, "cohort_size": q * size, "num_slots": slots or size}
    return Mechanism(noise_multiplier=z, scheme=scheme, **sizes, **changes)


def fixed(z=1.0, m=20, size=1000, **changes):
    """One on a cohort of fixed size."""
    sizes = {"population_size": size, "cohort_size": m, "num_slots": m}
    return Mechanism(noise_multiplier=z, scheme="uniform_without_replacement", **sizes, **changes)


def full(z=1.0, size=1000, **changes):
    """One with everybody."""
    sizes = {"population_size": size, "cohort_size": size, "num_slots": size}
    return Mechanism(noise_multiplier=z, scheme="full", **sizes, **changes)


def by_hand(mechanism, rounds, delta):
    """dp-accounting's own accountants."""
    relation = RELATION[mechanism.adjacency]
    if mechanism.law == "without_replacement":
        accountant = dp.rdp.RdpAccountant(all_orders(), relation)
    else:
        accountant = PLDAccountant(relation)
    return float(accountant.compose(mechanism.event(rounds)).get_epsilon(delta))


@pytest.mark.default_rows("mechanism2", "mechanism7")
@pytest.mark.parametrize(
    ("mechanism", "rounds", "delta"),
    [
        (poisson(0.8), 100, 1e-5),
        (poisson(0.8, adjacency="replace_one"), 100, 1e-5),
        (poisson(1.5, 0.3, adjacency="zero_out"), 20, 1e-6),
        (poisson(2.0, 0.05, slots=55), 30, 1e-6),
        (poisson(2.0, 0.05, slots=55, adjacency="replace_one"), 30, 1e-6),
        (fixed(2.0), 50, 1e-5),
        (full(20.0), 40, 1e-6),
        (full(20.0, adjacency="replace_one"), 40, 1e-6),
    ],
)
def test_equals_dp_accounting_by_hand(mechanism, rounds, delta):
    """Catches a wrong event, rate, number of rounds or factor 2; ours may not be below, nor 2e-4 above (rounding)."""
    expected = by_hand(mechanism, rounds, delta)
    accountant = "rdp" if mechanism.law == "without_replacement" else "pld"
    found = account(mechanism, rounds, delta, accountant=accountant).epsilon
    assert expected * (1 - 1e-6) <= found <= expected * (1 + 2e-4)


def test_analytic_gaussian_without_sampling():
    """Catches sqrt(2 log(1.25/delta))/epsilon and a linear composition: at q = 1 the exact formula holds."""
    for z, rounds, delta in ((1.0, 1, 1e-5), (20.0, 100, 1e-6), (5.0, 3, 1e-9)):
        exact = dp.get_epsilon_gaussian(z / math.sqrt(rounds), delta)
        assert exact <= account(full(z), rounds, delta).epsilon <= exact * 1.0001
        assert account(full(z), rounds, delta).accountant == "analytic Gaussian"
        pessimistic = account(full(z), rounds, delta, accountant="pld").epsilon
        assert exact <= pessimistic <= exact * (1 + 1e-3)
        twice = dp.get_epsilon_gaussian(z / 2 / math.sqrt(rounds), delta)
        assert account(full(z, adjacency="replace_one"), rounds, delta).epsilon == pytest.approx(twice, rel=1e-4)


@pytest.mark.parametrize(("z", "q"), [(1.0, 1.0), (0.7, 0.2), (3.0, 0.01)])
def test_one_round_is_the_hockey_stick_divergence(z, q):
    """Catches a wrong definition: delta is the larger integral of (p - e^epsilon q)+, here by quadrature."""
    x = np.linspace(-12 * z - 1, 12 * z + 2, 400_001)
    without, with_it = stats.norm.pdf(x, 0, z), q * stats.norm.pdf(x, 1, z) + (1 - q) * stats.norm.pdf(x, 0, z)
    for delta in (1e-3, 1e-5):
        epsilon = account(poisson(z, q), 1, delta).epsilon
        for first, second in ((without, with_it), (with_it, without)):
            sure = np.trapezoid(np.maximum(first - math.exp(epsilon) * second, 0), x)
            assert sure <= delta * (1 + 1e-6)
        most = max(
            np.trapezoid(np.maximum(first - math.exp(epsilon * 0.999) * second, 0), x)
            for first, second in ((without, with_it), (with_it, without))
        )
        assert most > delta


def test_never_below_the_analytic_gaussian():
    """Catches errors of float64 FFTs, through which dp-accounting itself reports less than the truth at 1e-10."""
    for z, rounds in ((100.0, 10_000), (20.0, 1000), (300.0, 100_000)):
        made = poisson(z, 0.9999999999, 10**6)  # sampled in name only, so that the rounds are really composed
        for delta in (1e-6, 1e-9, 1e-10, 1e-11):
            truth = dp.get_epsilon_gaussian(z / math.sqrt(rounds), delta)
            found = account(made, rounds, delta, accountant="pld").epsilon
            assert found >= truth * (1 - 1e-7)
            assert delta < 1e-9 or found <= truth * 1.001


def test_pld_is_never_above_rdp():
    """Catches an accountant that is no bound, or one at the wrong adjacency."""
    for z in (0.6, 4.0):
        for q in (0.001, 0.1):
            for rounds in (1, 300):
                made = poisson(z, q)
                loss, renyi = (account(made, rounds, 1e-6, accountant=x).epsilon for x in ("pld", "rdp"))
                assert loss <= renyi and account(made, rounds, 1e-6).epsilon == loss


def test_much_noise_is_monotone_in_delta():
    """Catches losses so small that their grid decides: 0.086 at delta 1e-5, 0.057 at 1e-10, and RDP below both."""
    made = poisson(100.0, 1e-3, size=10**6)
    found = [account(made, 10**6, delta).epsilon for delta in (1e-3, 1e-5, 1e-9, 1e-10, 1e-30)]
    assert found == sorted(found) and found[1] == account(made, 10**6, 1e-5, accountant="rdp").epsilon < 0.04
    assert found[1] > dp.get_epsilon_gaussian(100.0, 1e-5)  # what rounds of 1e-3 each come to by the central limit


def test_accountants_agree_on_replacing():
    """Catches a factor 2: of dp-accounting's two, only the PLD accountant doubles what a replaced unit moves."""
    made = full(10.0, adjacency="replace_one")
    loss = account(made, 10, 1e-6, accountant="pld").epsilon
    renyi = account(made, 10, 1e-6, accountant="rdp").epsilon
    assert loss <= renyi <= 1.1 * loss
    event = dp.SelfComposedDpEvent(dp.GaussianDpEvent(10.0), 10)
    forgets = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE).compose(event)
    assert forgets.get_epsilon(1e-6) < 0.7 * loss
    assert loss == pytest.approx(account(full(5.0), 10, 1e-6, accountant="pld").epsilon, rel=1e-4)


def test_poisson_accountants_refuse_fixed_size_cohorts():
    """Catches Poisson accounting of fixed-size cohorts, whose epsilon is more than ten times that of the Poisson
    sample."""
    with pytest.raises(ValueError, match="Poisson samples"):
        account(fixed(), 10, 1e-5, accountant="pld")
    with pytest.raises(ValueError, match="no Poisson sample"):
        fixed(adjacency="add_or_remove_one")
    with pytest.raises(ValueError, match="pld"):
        account(poisson(slots=40), 10, 1e-5, accountant="rdp")
    sizes = {"population_size": 10**6, "cohort_size": 1000}
    sampled = Mechanism(noise_multiplier=0.607, scheme="poisson", num_slots=10**6, **sizes)
    counted = Mechanism(noise_multiplier=0.607, scheme="uniform_without_replacement", num_slots=1000, **sizes)
    assert account(counted, 1000, 1e-6).epsilon > 10 * account(sampled, 1000, 1e-6).epsilon


def test_truncated_is_never_below_poisson():
    """Catches a truncation that is ignored: fewer slots spend more, and many slots spend what Poisson does."""
    plain = account(poisson(1.0, 0.05), 50, 1e-6, accountant="pld").epsilon
    found = [account(poisson(1.0, 0.05, slots=slots), 50, 1e-6).epsilon for slots in (999, 110, 80, 60, 50)]
    assert found[0] >= plain and found == sorted(found)
    assert found[0] == pytest.approx(plain, rel=1e-4) and found[-1] > 1.5 * plain


@settings(max_examples=10, deadline=None)
@given(
    z=st.floats(0.5, 20),
    q=st.floats(1e-3, 0.5),
    rounds=st.integers(1, 1000),
    log_delta=st.floats(-8, -3),
    more=st.floats(1.02, 3),
    slots=st.sampled_from([None, 600]),
)
def test_monotone_in_every_argument(z, q, rounds, log_delta, more, slots):
    """Catches an epsilon that less noise, a higher rate, more rounds or a smaller delta makes smaller."""
    delta = 10.0**log_delta
    base = account(poisson(z, q, slots=slots), rounds, delta).epsilon
    slack = 1e-7  # float64 of the transforms
    assert account(poisson(z * more, q, slots=slots), rounds, delta).epsilon <= base * (1 + slack)
    assert account(poisson(z, min(1.0, q * more), slots=slots), rounds, delta).epsilon >= base * (1 - slack)
    assert account(poisson(z, q, slots=slots), math.ceil(rounds * more), delta).epsilon >= base * (1 - slack)
    assert account(poisson(z, q, slots=slots), rounds, delta / more).epsilon >= base * (1 - slack)
    assert account(poisson(z, q, slots=slots, adjacency="replace_one"), rounds, delta).epsilon >= base * (1 - slack)


@pytest.mark.full
def test_fixed_size_is_monotone():
    """The same for cohorts of fixed size, on a grid."""
    base = account(fixed(2.0), 100, 1e-5).epsilon
    assert account(fixed(2.1), 100, 1e-5).epsilon < base < account(fixed(2.0), 110, 1e-5).epsilon
    assert account(fixed(2.0, 18), 100, 1e-5).epsilon < base < account(fixed(2.0), 100, 5e-6).epsilon


def test_epsilon_is_rounded_up():
    """Catches rounding to nearest, and digits that are not there."""
    assert round_up(1.00001) == 1.0001 and round_up(0.123451) == 0.12346 and round_up(12345.1) == 12346.0
    assert round_up(123456.7) == 123460.0 and round_up(1.9999) == 2.0
    found = account(full(3.3), 7, 1e-5).epsilon
    exact = dp.get_epsilon_gaussian(3.3 / math.sqrt(7), 1e-5)
    assert exact <= found <= exact * 1.0001 and found == float(f"{found:.5g}")


def test_segments_compose():
    """Catches rounds that are counted once for two mechanisms, and an order that matters."""
    made, other = poisson(1.0), poisson(2.0)
    whole = account(made, 30, 1e-5)
    assert compose([(made, 10), (made, 20)], 1e-5).epsilon == whole.epsilon
    mixed = compose([(made, 10), (other, 20)], 1e-5).epsilon
    assert account(other, 30, 1e-5).epsilon < mixed < whole.epsilon
    assert compose([(other, 20), (made, 10)], 1e-5).epsilon == mixed
    event = dp.ComposedDpEvent([made.event(10), other.event(20)])
    assert mixed == pytest.approx(PLDAccountant().compose(event).get_epsilon(1e-5), rel=2e-4)
    assert compose([(made, 0)], 1e-5).epsilon == 0
    with pytest.raises(ValueError, match="adjacency"):
        compose([(made, 1), (poisson(adjacency="replace_one"), 1)], 1e-5)
    sampled_and_not = compose([(full(1.0), 10**4), (made, 1)], 1e-5)  # too many losses for any grid
    assert sampled_and_not.epsilon >= account(full(1.0), 10**4, 1e-5).epsilon
    apart = compose([(poisson(slots=40, adjacency="replace_one"), 5), (fixed(2.0), 5)], 1e-5)
    assert apart.accountant == "PLD and RDP, each at half of delta"
    alone = account(fixed(2.0), 5, 5e-6).epsilon
    assert apart.epsilon >= alone


def test_no_noise_is_no_privacy():
    """Catches a finite epsilon without noise, and one for nothing at all."""
    assert account(poisson(0.0), 1, 1e-5).epsilon == math.inf
    assert account(poisson(1e-3), 1000, 1e-5).epsilon > 1e3
    little = poisson(0.03, 0.5, adjacency="replace_one")
    assert account(little, 10**7, 1e-5, accountant="pld").epsilon == math.inf  # less than it follows
    assert account(little, 10**7, 1e-5).epsilon == account(full(0.03, adjacency="replace_one"), 10**7, 1e-5).epsilon
    spent = account(poisson(0.0), 0, 1e-5)
    assert spent.epsilon == 0 and spent.accountant == "nothing released"
    assert account(poisson(0.0), 1, 1e-5).as_dict()["epsilon"] == "inf"


def test_bad_input():
    """Catches a delta that makes no sense, and rounds that are no number of rounds."""
    for rounds, delta in ((1, 0), (1, 1), (1, math.nan), (-1, 1e-5), (10**9, 1e-5)):
        with pytest.raises(ValueError, match="expected"):
            account(poisson(), rounds, delta)
    with pytest.raises(TypeError):
        account(poisson(), 1.5, 1e-5)
    with pytest.raises(ValueError, match="accountant"):
        account(poisson(), 1, 1e-5, accountant="gdp")


def test_the_statement_is_complete():
    """Catches an epsilon without adjacency, unit, sampler or accountant beside it."""
    spent = account(poisson(1.0, slots=45), 10, 1e-5)
    assert isinstance(spent, PrivacySpent)
    words = ("delta 1e-05", "10 rounds", "each client", "added or removed", "45 slots", "PLD", "multiplier 1")
    assert all(word in str(spent) for word in (*words, "secret seed"))
    assert any("secret seed" in sentence for sentence in spent.assumptions)
    assert any(
        "not below one over the number of clients" in sentence for sentence in account(poisson(), 1, 1e-2).assumptions
    )
    trivial = account(poisson(0.02, q=0.0005), 1, 6e-4)  # a client is in a round with a lower chance than delta
    assert trivial.epsilon == 0 and any("without any noise could meet it" in x for x in trivial.assumptions)
    assert not any("without any noise" in x for x in account(poisson(), 1, 1e-3).assumptions)
    local = account(full(5.0, place="local"), 3, 1e-5)
    assert local.adjacency == "replace_one" and any("amplifies nothing" in x for x in local.assumptions)


def test_a_uniform_rate_of_one_is_a_gaussian():
    """Catches a rate of 1 that divides by zero."""
    found = poisson_loss(1.0, 2.0, False, 1e-4).epsilon(1e-5)
    assert found == pytest.approx(dp.get_epsilon_gaussian(2.0, 1e-5), rel=1e-5)
    twice = poisson_loss(1.0, 2.0, True, 1e-4).epsilon(1e-5)
    assert twice == pytest.approx(dp.get_epsilon_gaussian(1.0, 1e-5), rel=1e-5)


def test_what_sampling_costs_where_slots_are_few():
    """Each adjacency against itself. Catches a bound of two clip norms where a contribution becomes zero and keeps its
    slot, and one of a single clip norm where one more client moves another one out."""
    for adjacency, factor in (("replace_one", 1), ("zero_out", 1), ("add_or_remove_one", 2)):
        everybody = account(full(3.0 / factor, 50, adjacency=adjacency), 20, 1e-4).epsilon
        for slots, q in ((40, 0.9), (49, 0.99), (49, 1.0)):
            assert account(poisson(3.0, q, 50, slots, adjacency=adjacency), 20, 1e-4).epsilon <= everybody


def test_truncated_zero_out_by_enumeration():
    """Three clients that are always drawn, two slots, one round: the exact mixture of Gaussians. Catches an epsilon
    below it where the bound for a contribution that becomes zero is one clip norm."""
    x, z, delta = np.linspace(-30, 30, 600_001), 1.0, 1e-3
    seen = 2 / 3  # the slots are a uniform choice of two of three
    density = lambda mean: np.exp(-((x - mean) ** 2) / (2 * z * z)) / (z * np.sqrt(2 * np.pi))  # noqa: E731
    found = account(poisson(z, 1.0, 3, 2, adjacency="zero_out"), 1, delta).epsilon
    there, without = seen * density(1.0) + (1 - seen) * density(0.0), density(0.0)
    for p, q in ((there, without), (without, there)):
        assert np.maximum(p - math.exp(found) * q, 0).sum() * (x[1] - x[0]) <= delta


def test_sampling_never_costs():
    """Catches 29.734 for 49 of 50 clients where all 50 are 14.887, and the same of a cohort cut to its slots."""
    sizes = {"z": 3.0, "size": 50, "adjacency": "replace_one"}
    everybody = account(full(**sizes), 20, 1e-4).epsilon
    assert everybody == 14.887
    for accountant, cohorts in (("best", (1, 49, 50)), ("rdp", (1, 10, 25, 40, 49, 50))):
        found = [account(fixed(m=m, **sizes), 20, 1e-4, accountant=accountant).epsilon for m in cohorts]
        assert found == sorted(found) and found[-1] == account(full(**sizes), 20, 1e-4, accountant=accountant).epsilon
    assert found[0] < everybody / 20  # and it still hides
    for slots, q in ((40, 0.9), (49, 0.99)):  # who comes in moves another out
        assert account(poisson(3.0, q, 50, slots), 20, 1e-4).epsilon <= everybody
    mixed = compose([(fixed(m=49, **sizes), 10), (poisson(3.0, 0.99, 50, 49, adjacency="replace_one"), 10)], 1e-4)
    assert mixed.epsilon <= everybody
    units = {"clip_units": 100.0, "cohort_size": 10, "dimension": 5, "l1_units": 220.0, "l2_units": 101.0}
    shares = [fixed(m=m, z=3.0, size=50, place="distributed", kind="skellam", details=units) for m in (10, 49, 50)]
    found = [account(mechanism, 20, 1e-4).epsilon for mechanism in shares]
    assert found == sorted(found)
