"""This module simulates a radio channel that clients share: it chooses the messages that fit into a round's budget."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import Array

MAX_BUDGET = 1_000_000_000  # the largest budget: twice (budget + 1) is below 2^31


def within_budget(ids: Array, cost: Array, wanted: Array, budget: int | Array, priority: Array | None = None) -> Array:
    """Chooses the clients that may send, one after the other, until the budget is spent.

    The first client whose message does not fit ends the choice: clients after it do not send either.

    Args:
      ids: [m] int32. Clients of equal priority go by id, whatever their slots.
      cost: [m] int32 >= 0 of each message, in the budget's unit: bytes, or ticks of airtime (`Spent.up`).
      wanted: [m] bool, the clients that want to send; the others cost nothing.
      budget: in [0, 10^9], or an int32 array [] of such a number. For a larger channel, take a larger unit.
      priority: [m] int32, lower first, such as times of arrival; None = in the order of ids.

    Returns: [m] bool.

    Guarantees: The sum is within the budget, and no client's turn was skipped. A larger budget keeps all clients that
    fit (tests/network/test_radio.py::test_against_a_loop). The choice is exact for any costs (::test_large_costs).

    References: Nishio and Yonetani 2019 (FedCS): clients that a cell's resource blocks hold.

    >>> ids = jnp.array([3, 1, 2])
    >>> within_budget(ids, jnp.array([10, 10, 10]), jnp.ones(3, bool), 25).tolist()
    [False, True, True]
    """
    if not isinstance(budget, jax.Array):
        validate.integer("budget", budget, 0, MAX_BUDGET)
    slots = jnp.arange(ids.shape[0], dtype=jnp.int32)
    order_keys = jnp.zeros_like(ids) if priority is None else priority
    *_, order = jax.lax.sort((~wanted, order_keys, ids, slots), num_keys=3)
    # Clients that do not want to send stand last, so their costs do not matter. Costs and sums are cut at budget + 1,
    # which is enough to know that a message does not fit, so that sums stay below 2^31.
    spent = jnp.minimum(cost[order], budget + 1)
    total = jax.lax.associative_scan(lambda left, right: jnp.minimum(left + right, budget + 1), spent)
    return jnp.zeros_like(wanted).at[order].set(total <= budget) & wanted
