"""When clients are there: shares of time, hours of the day, and both of two conditions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import network

IDS = jnp.arange(400)
DAY = 86_400
CONDITIONS = {
    "always": network.always(),
    "bernoulli": network.bernoulli(0.3, slot_seconds=1800),
    "bernoulli of clients": network.bernoulli(network.uniform(0.1, 0.9), slot_seconds=1800),
    "charging_and_wifi": network.charging_and_wifi(0.375, network.tiers([0.5, 0.5], [0.4, 0.9]), slot_seconds=1800),
    "daily_window": network.daily_window(1 / 3),
    "diurnal": network.diurnal(0.4, 0.3, slot_seconds=1800),
}


def there(condition, seconds, ids=IDS):
    """[times, clients] bool."""
    found = jax.jit(lambda seconds: jax.lax.map(lambda s: condition.at(ids, s), seconds))(jnp.asarray(seconds))
    assert found.dtype == bool and found.shape == (len(seconds), len(ids))
    return np.asarray(found)


@pytest.mark.default_rows("bernoulli of clients", "charging_and_wifi", "daily_window", "diurnal")
@pytest.mark.parametrize("name", CONDITIONS)
def test_rates_are_the_long_run_shares(name):
    """60 days of 400 clients: each client's share within 5.5 standard errors of its rate, and theirs together.

    Errors are at most those of independent half hours. A right rate fails once in 10^5 seeds; one 0.02 off, always.
    """
    condition, days = CONDITIONS[name], 60
    shares, rates = there(condition, np.arange(0, days * DAY, 1800)).mean(0), condition.rate(np.asarray(IDS))
    assert rates.dtype == np.float64 and rates.shape == (400,)
    errors = np.sqrt(rates * (1 - rates) / (48 * days)) + 1 / (48 * days)
    assert (abs(shares - rates) <= 5.5 * errors).all()
    together = 4.5 * np.sqrt((errors**2).sum()) / 400
    assert abs((shares - rates).mean()) <= together < 0.02


def test_slots_are_independent():
    """Catches one draw for all slots or all clients: correlations below 5 sigma."""
    condition = network.bernoulli(0.5, slot_seconds=60)
    grid = there(condition, np.arange(0, 500 * 60, 60))
    centred = grid - 0.5
    for product in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(product.mean()) * 4 * np.sqrt(product.size) < 5
    times = jnp.arange(400, dtype=jnp.int32) * 60  # a time for each client
    np.testing.assert_array_equal(condition.at(IDS, times), grid[np.arange(400), np.arange(400)])


def test_a_slot_is_one_draw():
    """Minute by minute: what a client is changes at one minute of its slots at most. Catches a probability, or a draw,
    that changes within a slot, and a beginning that differs from slot to slot."""
    for name in ("bernoulli", "diurnal"):
        grid = there(CONDITIONS[name], np.arange(0, 2 * DAY, 60))
        changes = (grid[1:] != grid[:-1]).reshape(-1, 400)
        minutes = (np.arange(len(changes)) + 1) % 30
        when = [np.unique(minutes[changes[:, i]]) for i in range(400)]
        assert max(map(len, when)) == 1 and min(map(len, when)) >= 0
        counts = np.bincount(np.concatenate(when), minlength=30)  # of clients, by the minute at which slots begin
        assert stats.chisquare(counts).pvalue > 1e-5


@pytest.mark.default_rows("late")
@pytest.mark.parametrize("start", [0, 2**31 - 4 * 3600], ids=["early", "late"])
def test_slots_begin_at_all_moments(start):
    """Of 4,000 clients about as many change in each minute. Catches slots that end for everybody at once, and times
    that wrap around."""
    ids = jnp.arange(4000)
    markov = network.markov(7200.0, 7200.0, slot_seconds=3600)
    for condition in (network.bernoulli(0.5), network.diurnal(0.4, 0.2), markov):
        grid = there(condition, start + 60 * np.arange(4 * 60), ids)
        counts = (grid[1:] != grid[:-1]).sum(1)
        assert counts.max() < counts.mean() + 6 * np.sqrt(counts.mean()) and counts.mean() > 10
        shares = grid.mean(1)
        assert abs(shares - shares.mean()).max() < 0.15


def test_windows_are_contiguous():
    """One window a day of the same length for everybody, at as many hours as there are zones.

    Catches zones that drift from day to day, and windows that the end of the day cuts short.
    """
    grid = there(network.daily_window(0.25, num_zones=8), np.arange(0, 3 * DAY, 3600))
    np.testing.assert_array_equal(grid[:24], grid[24:48])
    assert (grid[:24].sum(0) == 6).all()
    begins = grid[24:48] & ~grid[23:47]
    assert (begins.sum(0) == 1).all()
    counts = begins.sum(1)
    assert (counts > 0).sum() == 8 and set(np.flatnonzero(counts) % 3) == {0}
    assert stats.chisquare(counts[counts > 0]).pvalue > 1e-4  # zones are equally likely


def test_the_day_is_a_sine():
    """One time zone: hourly means follow mean + amplitude sin, over the hour in which slots began, 5 standard errors.

    Catches another phase, and the probability of another moment than the slot's beginning.
    """
    grid = there(network.diurnal(0.4, 0.3, num_zones=1), np.arange(0, 50 * DAY, 3600)).reshape(50, 24, 400)
    ago = (np.arange(60) + 0.5) / 60  # hours since slots began
    expected = 0.4 + 0.3 * np.sin(2 * np.pi * (np.arange(24)[:, None] - ago) / 24).mean(1)
    assert (abs(grid.mean((0, 2)) - expected) < 5 * np.sqrt(0.25 / (50 * 400))).all()


def test_both_conditions():
    """Catches one condition that is lost, and a share that nobody knows, stated as a product."""
    a, b = network.bernoulli(0.5), network.daily_window(0.5)
    times = np.arange(0, DAY, 3600)
    both = network.both(a, b)
    np.testing.assert_array_equal(there(both, times), there(a, times) & there(b, times))
    assert both.rate is None
    same = network.both(a, network.bernoulli(0.5))
    np.testing.assert_array_equal(there(same, times), there(a, times))
    other = there(network.both(a, network.bernoulli(0.5, seed=1)), np.arange(0, 30 * DAY, 3600)).mean()
    assert abs(other - 0.25) < 5 * np.sqrt(0.25 / (400 * 720))


def test_the_last_second():
    """Catches times that wrap around at the end of 68 years."""
    for name, condition in CONDITIONS.items():
        assert condition.at(IDS, jnp.int32(2**31 - 1)).shape == (400,), name


def test_the_largest_amplitude():
    """Numbers as they are written. Catches 0.1 refused beside 0.9, for 1 - 0.9 is below it in floats."""
    for tenths in range(1, 10):
        made = network.diurnal(tenths / 10, min(tenths, 10 - tenths) / 10)
        assert made.rate(np.arange(1)) == tenths / 10


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: network.bernoulli(0.0), r"rate: expected probabilities in \(0, 1\], got 0.0"),
        (lambda: network.bernoulli(1.5), r"rate: expected probabilities in \(0, 1\], got 1.5"),
        (lambda: network.bernoulli(network.uniform(0.5, 1.5)), "rate: expected probabilities"),
        (lambda: network.daily_window(float("nan")), "share: expected a number in"),
        (lambda: network.daily_window(0.5, num_zones=7), "num_zones: expected a divisor"),
        (lambda: network.diurnal(0.2, 0.3), "amplitude: expected a number in"),
        (lambda: network.diurnal(0.9, 0.1001), r"amplitude: expected a number in \[0, 0.1\]"),
        (lambda: network.diurnal(0.2, 0.1, slot_seconds=7000), "slot_seconds: expected a divisor"),
        (lambda: network.both(network.always, network.always()), "first: expected an Availability"),
    ],
)
def test_wrong_input(call, told):
    """Catches clients who are never there, and shares that are not those stated."""
    with pytest.raises((ValueError, TypeError), match=told):
        call()
