"""The plan: from shapes alone, so that a run repeats its bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fedjax_sim.engine import Plan, plan_for


def plan_of(size: int) -> Plan:
    return plan_for({"w": jax.ShapeDtypeStruct((size,), jnp.float32)})


def test_plans_are_whole_and_shrink_with_the_model():
    """Catches a chunk that is no multiple of the lanes, no lane at all for a huge model, a whole cohort at once."""
    plans = [plan_of(size) for size in (1, 10_000, 100_000, 10_000_000)]
    assert all(plan.lanes >= 1 and plan.chunk % plan.lanes == 0 for plan in plans)
    assert [plan.lanes for plan in plans] == sorted((plan.lanes for plan in plans), reverse=True)
    assert plans[-1] == Plan(1, 1)
    assert plan_of(100) == plan_of(100)


def test_user_numbers():
    """Catches a chunk of half a lane, and wrong input."""
    assert Plan.checked(4) == Plan(4, 4)
    assert Plan.checked(4, 6) == Plan(4, 8)
    for lanes, chunk, error in ((0, 1, ValueError), (True, 1, TypeError), (2, -1, ValueError), (1.5, 1, TypeError)):
        with pytest.raises(error, match="expected an integer in"):
            Plan.checked(lanes, chunk)
