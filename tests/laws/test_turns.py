"""Where clients follow one another their order counts; where they do not it changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import algorithms
from tests.laws import cases, laws, problems as p


class Turns(NamedTuple):
    """An algorithm of many clients and of fewer copies of a server, or of as many."""

    make: Callable
    options: dict
    in_turns: bool  # fewer copies than clients, so some of these follow one another
    of_any_cohort: bool = True  # its options do not hold the number of clients


ROWS = {
    "all at once": Turns(algorithms.splitfed, {}, in_turns=False),
    "three copies": Turns(algorithms.splitfed, {"server_copies": 3}, in_turns=True),
    "one copy": Turns(algorithms.splitfed, {"server_copies": 1}, in_turns=True),
    "a copy each": Turns(algorithms.splitfed, {"server_copies": p.SLOTS}, in_turns=False, of_any_cohort=False),
    "relay": Turns(algorithms.split_learning, {"rate": 0.1}, in_turns=True),
}


def federation(row, num_slots=p.SLOTS):
    return p.Federation(
        num_slots=num_slots,
        make=lambda sampler, **run: cases.split_recipe(row.make, sampler=sampler, **row.options)(),
    )


@pytest.mark.full
@pytest.mark.parametrize("name", cases.rows(ROWS, ("three copies",)))
def test_order(name):
    """Catches keys by slot, float sums, and clients of a copy that do not follow one another."""
    made = federation(ROWS[name])
    if not ROWS[name].in_turns:
        return laws.order_is_irrelevant(made)
    one, other = (made.run(who)[0].server for who in (p.COHORT, p.COHORT[::-1]))
    assert p.digest(one) != p.digest(other)


@pytest.mark.full
@pytest.mark.parametrize("name", cases.rows(ROWS, ("three copies",)))
def test_padding(name):
    """Uninvited slots anywhere, and a smaller cohort. Catches an empty slot that takes a turn, or moves the others to
    another copy."""
    row, few = ROWS[name], p.COHORT[:8]
    made = federation(row)
    place = np.array([8, 0, 1, 2, 3, 9, 4, 5, 6, 7])
    spread = p.cohort(np.r_[few, 9, 9], invited=np.arange(10) < 8)
    spread = spread._replace(**{x: getattr(spread, x)[jnp.array(place)] for x in ("ids", "invited", "reported")})
    behind = made.run(few)
    others = [made.run(spread)]
    if row.of_any_cohort:
        others.append(federation(row, 8).run(few))
    for other in others:
        laws.check_equal_bits(p.outcome(*behind), p.outcome(*other), "padding")
