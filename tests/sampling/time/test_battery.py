"""Batteries that last for a part of a round, against the energy of each client in NumPy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_sim import network, sampling
from tests.sampling.time.problems import DOWN, STEP, UP, WATTS, N, tables, told

KEY = jax.random.key(2)
TICKS = np.stack([DOWN, 5 * STEP, UP])
JOULES = TICKS * np.array(WATTS)[:, None]


def drawn(sampler, key=KEY):
    return jax.device_get(jax.jit(lambda key: sampler.sample(key, told(sampler)))(key))


def clocked():
    return sampling.with_clock(sampling.full(N), tables())


def free():
    """A clock over devices that spend time alone."""
    devices = network.heterogeneous(N, speed=2.5, bandwidth_down=1e3, bandwidth_up=1.0)
    return sampling.with_clock(sampling.full(N), devices)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("joules", [1.0, float(np.quantile(JOULES.sum(0), 0.2)), float(np.median(JOULES.sum(0))), 1e9])
def test_who_runs_out(joules):
    """Catches a client that works on without energy, one that stops with enough, and a moment in another part."""
    cohort, state = drawn(sampling.with_battery(clocked(), joules))
    before = np.cumsum(JOULES, 0) - JOULES
    at = np.floor(np.clip((joules - before) / JOULES, 0, 1) * TICKS).sum(0)
    enough = JOULES.sum(0) <= joules
    np.testing.assert_array_equal(cohort.reported, enough)
    assert np.abs(cohort.timing.spent.total - np.where(enough, TICKS.sum(0), at)).max() <= 1  # float32 shares of ticks
    assert (cohort.timing.spent.joules <= joules * (1 + 1e-6)).all() and cohort.metrics["exhausted"] == (~enough).sum()
    np.testing.assert_array_equal(cohort.timing.sent, joules - before[2] >= JOULES[2] / UP)  # a tick of its message
    assert state.clock.seconds * 1000 + state.clock.ticks == cohort.timing.spent.total.max()


def test_batteries_belong_to_clients():
    """Batteries by a distribution, in two rounds and behind a deadline. Catches a new draw in each round, one for all,
    and shorter work that is priced as the whole."""
    low, high = JOULES.sum(0).min() / 2, JOULES.sum(0).max() * 2
    some = sampling.with_battery(clocked(), network.tiers([0.5, 0.5], [low, high]), seed=3)
    first, again = (drawn(some, jax.random.key(key))[0].reported for key in (0, 1))
    assert 0 < first.sum() < N and (first == again).all()
    short = sampling.with_deadline(clocked(), DOWN.max() / 1000 + (STEP + UP).max() / 1000, late="partial")
    cohort, _ = drawn(sampling.with_battery(short, float(np.median(JOULES.sum(0)))))
    spent = DOWN + 10 * STEP * cohort.work + 100 * UP
    np.testing.assert_array_equal(cohort.reported, spent <= np.median(JOULES.sum(0)))
    assert cohort.reported.sum() > (JOULES.sum(0) <= np.median(JOULES.sum(0))).sum()


def test_messages_that_cost_no_energy():
    """Two seconds of work at a watt, with a joule. Catches a message that an empty battery sends, since it is free."""
    devices = network.heterogeneous(N, speed=2.5, bandwidth_down=1e3, bandwidth_up=1.0, compute_watts=1.0)
    empty = sampling.with_battery(sampling.with_clock(sampling.full(N), devices), 1.0)
    cohort, _ = drawn(empty)
    assert not cohort.reported.any() and not cohort.timing.sent.any() and (cohort.timing.spent.up == 0).all()
    np.testing.assert_allclose(cohort.timing.spent.compute, 1000, atol=1)
    np.testing.assert_allclose(cohort.timing.spent.joules, 1.0, rtol=1e-3)


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: sampling.with_battery(sampling.full(N), 1.0), "sampler: expected one with a clock, for with_battery"),
        (lambda: sampling.with_battery(free(), 1.0), "sampler: expected a clock of devices that state their energy"),
        (lambda: sampling.with_battery(clocked(), 0.0), "joules: expected a distribution above 0"),
        (lambda: sampling.with_battery(sampling.with_battery(clocked(), 1.0), 2.0), "expected one without batteries"),
        (
            lambda: sampling.with_deadline(sampling.with_battery(clocked(), 1.0), 1.0, late="partial"),
            "sampler: expected one without batteries, for partial work, .* around with_deadline",
        ),
        (
            lambda: sampling.with_battery(sampling.with_over_selection(clocked(), 3), 1.0),
            "sampler: expected one without a limit of reports",
        ),
    ],
)
def test_wrong_input(make, told):
    """Catches an order of wrappers that has no meaning."""
    with pytest.raises(ValueError, match=told):
        make()
