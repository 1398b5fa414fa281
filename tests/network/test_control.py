"""Training in the slack of a control loop: exact ceilings, sharp limits, and devices that follow them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import network
from fedjax_sim.network.control import ControlCycle
from fedjax_sim.types import Load

ANCHOR = ControlCycle.checked(50, sense=20, act=10, system=5, jitter=3)
NOTHING = jnp.float32(0)


def test_anchor():
    """W = 250 in windows of 12 of 50: 21 cycles, 1050; with a latency of 80 by 1200 and 1130, not by 1129."""
    assert (ANCHOR.window, ANCHOR.cycles(250), ANCHOR.compute_time(250)) == (12, 21, 1050)
    assert [ANCHOR.feasible(250, deadline, latency=80) for deadline in (1200, 1130, 1129)] == [True, True, False]
    assert network.smallest_deadline([ANCHOR] * 2, [250, 100], latency=80) == 1130
    assert ControlCycle.checked(10_000, act=5_000).cycles(35_000) == 7  # 0.035 s in windows of 0.005 s: floats say 8
    assert math.ceil(0.035 / 0.005) == 8


def test_ceilings_are_exact():
    """Every decimal work of milliseconds against fractions. Catches a ceiling of floats, wrong in one of eight."""
    wrong = 0
    for window in range(1, 60):
        cycle = ControlCycle.checked(window + 1, act=1)
        for work in range(0, 400):
            assert cycle.cycles(work) == (work + window - 1) // window
            wrong += math.ceil((work / 1000) / (window / 1000)) != cycle.cycles(work)
    assert wrong > 100


def test_limits_are_sharp():
    """Catches a limit that is one microsecond off, and one device that does not count."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        period = int(rng.integers(1, 80))
        cycles = [ControlCycle.checked(period, act=int(act)) for act in rng.integers(0, 100, 4)]
        work, latency = [int(x) for x in rng.integers(0, 300, 4)], int(rng.integers(0, 50))
        able = [(cycle, own) for cycle, own in zip(cycles, work, strict=True) if cycle.window]
        least = network.smallest_deadline(cycles, work, latency)
        assert (least is None) == (not able)
        if able:
            assert all(cycle.feasible(own, least, latency) for cycle, own in able)
            assert not all(cycle.feasible(own, least - 1, latency) for cycle, own in able)
        deadline = int(rng.integers(0, 1000))
        most = network.most_feasible_work(cycles, deadline, latency)
        if deadline >= latency:
            assert all(cycle.feasible(most, deadline, latency) for cycle, _ in able)
        assert not able or not all(cycle.feasible(most + 1, deadline, latency) for cycle, _ in able)


def test_devices_without_a_window():
    """Catches a division by zero, and a client who trains in time that there is not."""
    assert ControlCycle.checked(50, act=50).window == ControlCycle.checked(50, act=70).window == 0
    assert ControlCycle.checked(50, act=50).cycles(1) is None and not ANCHOR._replace(act=60).feasible(0, 10**9)
    made = network.control_cycle(6, period=[50, 50, 40], act=[38, 50, 60], flops_per_microsecond=[1])
    spent = jax.jit(made.spend)(None, jnp.arange(6), Load(jnp.float32(250), NOTHING, NOTHING))
    assert spent.compute.tolist() == [1050, 715_827_840, 715_827_840] * 2
    assert made.availability.at(jnp.arange(6), 5).tolist() == [True, False, False] * 2
    assert made.availability.rate(np.arange(3)).tolist() == [1.0, 0.0, 0.0]
    assert network.control_cycle(6, period=[50], flops_per_microsecond=[1]).availability is None


def test_devices_are_exact():
    """Against the integers of `ControlCycle`, compiled too. Catches a float's ceiling, a latency of seconds, a wrap."""
    made = network.control_cycle(
        40, period=[50, 70], sense=[0, 1], act=[38, 3], flops_per_microsecond=[7, 49], latency=80, bandwidth_up=1e5
    )
    cycles = [ControlCycle.checked(50, act=38), ControlCycle.checked(70, sense=1, act=3)]
    ids = jnp.arange(40)
    spend = jax.jit(made.spend)
    large = np.float32(np.random.default_rng(0).uniform(2**24, 2**29, (9, 40))).astype(int)  # as float32 holds them
    for base in (0, 1, 6, 7, 8, 49 * 3, 7 * 12, 7 * 12 * 5 + 1, 16_000_000, 7_777_777, *large):
        flops = base + np.arange(40) // 2 if np.ndim(base) == 0 else base
        spent = spend(None, ids, Load(jnp.asarray(flops, jnp.float32), NOTHING, jnp.float32(1000)))
        work = [-(-int(x) // (49 if i % 2 else 7)) for i, x in enumerate(flops)]
        assert spent.compute.tolist() == [cycles[i % 2].compute_time(w) for i, w in enumerate(work)]
        assert set(spent.down.tolist()) == {80} and set(spent.up.tolist()) == {10_080}
    for huge in (1e12, jnp.inf, jnp.nan):
        load = Load(jnp.full(40, huge, jnp.float32), NOTHING, jnp.float32(1000))
        assert (spend(None, ids, load).compute == 715_827_840).all()


@pytest.mark.parametrize("call, told", [
    (lambda: ControlCycle.checked(0), "period: expected an integer in .1,"),
    (lambda: ControlCycle.checked(50, act=0.5), "act: expected an integer .* Whole microseconds"),
    (lambda: ANCHOR.cycles(2.5), "work: expected an integer"),
    (lambda: network.control_cycle(4, period=[50, 60], act=[1, 2, 3], flops_per_microsecond=[1]), "period: expected o"),
    (lambda: network.control_cycle(4, period=[50], act=[50], flops_per_microsecond=[1]), "period: expected a window"),
    (lambda: network.control_cycle(4, period=[50], flops_per_microsecond=[0]), r"microsecond\[0\]: expected an int"),
    (lambda: network.control_cycle(4, period=[50], flops_per_microsecond=[1], latency=0.5), "latency: expected an int"),
])  # fmt: skip
def test_wrong_input(call, told):
    """Catches floats where only integers are exact."""
    with pytest.raises((ValueError, TypeError), match=told):
        call()
