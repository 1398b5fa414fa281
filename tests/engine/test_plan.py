"""The plan: from shapes alone, so that a run repeats its bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fedjax_sim.engine import Plan, compiling_for, plan_for, shared_out, working_bytes
from fedjax_sim.engine.plan import CPU_GROUPS


def plan_of(size: int) -> Plan:
    return plan_for({"w": jax.ShapeDtypeStruct((size,), jnp.float32)})


def test_plans_are_whole_and_shrink_with_the_model():
    """Catches a chunk that is no multiple of the lanes, no lane at all for a huge model, a whole cohort at once."""
    plans = [plan_of(size) for size in (1, 10_000, 100_000, 10_000_000)]
    assert all(plan.lanes >= 1 and plan.chunk % plan.lanes == 0 for plan in plans)
    assert [plan.lanes for plan in plans] == sorted((plan.lanes for plan in plans), reverse=True)
    assert plans[-1] == Plan(1, 1)
    assert plan_of(100) == plan_of(100)


@pytest.mark.parametrize("num_slots", [1, 7, 20, 64, 65, 100, 128, 1000])
def test_lanes_fit_the_cohort(num_slots):
    """Catches padding that costs as much as clients: 100 slots in groups of 64 are 128."""
    spec = {"w": jax.ShapeDtypeStruct((10,), jnp.float32)}
    alone, fitted = plan_for(spec).lanes, plan_for(spec, num_slots=num_slots).lanes
    groups = -(-num_slots // min(alone, -(-num_slots // CPU_GROUPS)))
    assert fitted <= alone and -(-num_slots // fitted) == groups  # not one group more
    assert fitted * groups - num_slots < groups


@pytest.mark.parametrize("num_slots", [4, 20, 50, 100])
def test_small_cohorts_are_shared_out(num_slots):
    """Catches a cohort that is one group, all of it on one device. Accelerators need thousands of clients in one."""
    spec = {"w": jax.ShapeDtypeStruct((10,), jnp.float32)}
    groups = -(-num_slots // plan_for(spec, num_slots=num_slots).lanes)
    assert all(-(-groups // devices) * devices == groups for devices in (1, 2, 4))
    with compiling_for("cuda"):
        assert plan_for(spec, num_slots=num_slots).lanes == num_slots


@pytest.mark.parametrize("num_devices", range(2, 9))
@pytest.mark.parametrize("num_slots", [1, 7, 100, 4096, 100_000])
def test_accelerators_are_all_busy(num_slots, num_devices):
    """Catches a cohort in one group, all of it on one of several accelerators, and lanes beyond the plan's room."""
    spec = {"w": jax.ShapeDtypeStruct((10,), jnp.float32)}
    with compiling_for("cuda"):
        fitted = plan_for(spec, num_slots=num_slots)
        lanes, chunk = shared_out(fitted, num_slots, num_devices)
        assert shared_out(fitted, num_slots, 1) == fitted
    assert lanes == chunk <= fitted.lanes
    groups_of_a_device = -(-num_slots // (num_devices * lanes))
    assert groups_of_a_device >= 2 or num_slots <= num_devices
    # No device has more than its share, but for less than one client in each of its groups.
    assert groups_of_a_device * lanes - num_slots / num_devices < groups_of_a_device
    assert shared_out(fitted, num_slots, num_devices) == fitted  # on a CPU


def test_working_bytes():
    """Of loops inside of programs, too. Catches values that are counted after their last use, or not at all."""

    def chain(x):  # two arrays at once, however long it is
        for _ in range(5):
            x = jnp.sin(x)
        return x.sum()

    def both(x):  # y is needed to the end
        y = x * 2
        return (chain(x) + y).sum()

    def looped(x):
        return jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(jnp.cos(x)), x).sum()

    x = jnp.ones(1000)
    found = [working_bytes(jax.make_jaxpr(f)(x)) for f in (chain, both, looped)]
    assert 8000 <= found[0] < 8100 and 12000 <= found[1] < 12200 and 8000 <= found[2] <= 12100
    less = plan_for(x, working_bytes=1 << 20).lanes
    assert less < plan_for(x, working_bytes=1 << 16).lanes


def test_user_numbers():
    """Catches a chunk of half a lane, and wrong input."""
    assert Plan.checked(4) == Plan(4, 4)
    assert Plan.checked(4, 6) == Plan(4, 8)
    for lanes, chunk, error in ((0, 1, ValueError), (True, 1, TypeError), (2, -1, ValueError), (1.5, 1, TypeError)):
        with pytest.raises(error, match="expected an integer in"):
            Plan.checked(lanes, chunk)
