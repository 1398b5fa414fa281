"""From budgets to noise."""

from __future__ import annotations

import math

import pytest

from fedjax_sim.privacy import account, calibrate, compare, comparison_table, written_down

MILLION = {"population_size": 10**6, "cohort_size": 1000}


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(
    ("size", "cohort", "rounds", "epsilon", "delta", "known"),
    [
        (10**6, 1000, 1000, 2, 1e-6, 0.60701),
        (10**4, 100, 500, 4, 1e-5, 0.67629),
        (60_000, 256, 14_040, 3, 1e-5, 0.96799),
    ],
)
def test_known_multipliers(size, cohort, rounds, epsilon, delta, known):
    """Catches a loose or a wrong accountant: multipliers that dp-accounting's PLD gives."""
    sizes = {"population_size": size, "cohort_size": cohort}
    assert calibrate(epsilon, delta, rounds, **sizes).noise_multiplier == pytest.approx(known, abs=1e-4)


def test_analytic_gaussian_not_the_textbook_formula():
    """3.73 (Balle and Wang 2018) at epsilon 1 and delta 1e-5, where sqrt(2 log(1.25/delta))/epsilon says 4.84."""
    found = calibrate(1.0, 1e-5, 1, scheme="full", **MILLION).noise_multiplier
    assert found == pytest.approx(3.7306, abs=2e-4)
    assert math.sqrt(2 * math.log(1.25 / 1e-5)) == pytest.approx(4.84, abs=0.01)
    replaced = calibrate(1.0, 1e-5, 1, scheme="full", adjacency="replace_one", **MILLION).noise_multiplier
    assert replaced == pytest.approx(2 * found, rel=1e-4)


@pytest.mark.default_rows(2)
@pytest.mark.parametrize(
    ("epsilon", "delta", "rounds", "options"),
    [
        (0.5, 1e-6, 200, {"scheme": "poisson"}),
        (30.0, 1e-5, 100, {"scheme": "poisson"}),
        (1.0, 1e-6, 100, {"scheme": "truncated_poisson", "num_slots": 40}),
        (1.0, 1e-6, 10, {"scheme": "uniform"}),
        (2.0, 1e-7, 1000, {"place": "local"}),
        (0.01, 1e-9, 10, {"scheme": "full"}),
    ],
)
def test_never_overshoots_and_wastes_nothing(epsilon, delta, rounds, options):
    """Catches a multiplier that is rounded down, or a search that stops early."""
    found = calibrate(epsilon, delta, rounds, population_size=1000, cohort_size=20, **options)
    again = account(found.mechanism, rounds, delta)
    assert again == found.spent and again.epsilon <= epsilon
    z = found.noise_multiplier
    assert z == float(f"{z:.5g}") and found.mechanism.noise_multiplier == z
    less = z - 10.0 ** (math.floor(math.log10(z)) - 4)
    assert account(found.mechanism.with_multiplier(less), rounds, delta).epsilon > epsilon


@pytest.mark.full  # by default tests/privacy/test_accountant.py has the law of what is searched
def test_monotone():
    """Catches less noise for a tighter budget."""
    sizes = {"population_size": 1000, "cohort_size": 20}
    base = calibrate(1.0, 1e-5, 50, **sizes).noise_multiplier
    assert calibrate(0.9, 1e-5, 50, **sizes).noise_multiplier > base
    assert calibrate(1.0, 5e-6, 50, **sizes).noise_multiplier > base
    assert calibrate(1.0, 1e-5, 60, **sizes).noise_multiplier > base
    assert calibrate(1.0, 1e-5, 50, population_size=1000, cohort_size=25).noise_multiplier > base
    assert calibrate(1.0, 1e-5, 50, population_size=1100, cohort_size=20).noise_multiplier < base


def test_noise_cohort_size_is_stated():
    """Catches an epsilon that does not state that it holds for another cohort."""
    spent = calibrate(2.0, 1e-6, 10, noise_cohort_size=5000, **MILLION).spent
    assert any("5,000 clients only" in sentence and "NOT" in sentence for sentence in spent.assumptions)
    assert "5,000 of 1,000,000" in spent.sampler


def test_comparison():
    """Catches a wrong exponent of m, a missing 2 C, and local noise that sampling amplifies."""
    m, rounds, c = 100, 10, 0.5
    central, counted, shares, local = compare(1.0, 1e-6, rounds, population_size=10_000, cohort_size=m, clip_norm=c)
    assert central.mean_std == pytest.approx(central.noise_multiplier * c / m)
    assert counted.noise_multiplier == shares.noise_multiplier > 1.5 * central.noise_multiplier
    assert (counted.accountant, counted.adjacency) == ("RDP", "replace_one")
    assert shares.message_std * math.sqrt(m) / m == pytest.approx(shares.mean_std)
    assert local.message_std == pytest.approx(local.noise_multiplier * c)
    assert local.mean_std == pytest.approx(local.message_std / math.sqrt(m))
    whole = calibrate(1.0, 1e-6, rounds, population_size=m, cohort_size=m, scheme="full").noise_multiplier
    assert local.noise_multiplier == pytest.approx(2 * whole, rel=1e-4)
    same = (local.noise_multiplier * c / math.sqrt(m)) ** 2 / (local.noise_multiplier * c / m) ** 2
    assert same == pytest.approx(m)  # at equal multipliers
    assert all(row.epsilon <= 1.0 for row in (central, counted, shares, local))
    text = comparison_table([central, counted, shares, local])
    assert len(text.splitlines()) == 10 and "secure aggregation" in text


def test_bad_input():
    """Catches budgets and sizes that make no sense, before anything is searched."""
    for changes, message in (
        ({"epsilon": 0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"rounds": 0}, "rounds"),
        ({"cohort_size": 10**7}, "cohort_size"),
        ({"scheme": "weighted"}, "scheme"),
        ({"num_slots": 5}, "num_slots"),
    ):
        given = {"epsilon": 1.0, "delta": 1e-5, "rounds": 10, **MILLION} | changes
        with pytest.raises(ValueError, match=message):
            calibrate(**given)
    with pytest.raises(ValueError, match="too small"):
        calibrate(1e-8, 1e-9, 10**8, scheme="full", **MILLION)
    with pytest.raises(TypeError):
        written_down(population_size=1000, cohort_size=20, scheme="truncated_poisson")
