"""Where clients follow one another their order counts; where they do not it changes no bit."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import algorithms
from tests.laws import cases, laws, problems as p

ROWS = {
    "all at once": (algorithms.splitfed, {}),
    "three copies": (algorithms.splitfed, {"server_copies": 3}),
    "one copy": (algorithms.splitfed, {"server_copies": 1}),
    "a copy each": (algorithms.splitfed, {"server_copies": p.SLOTS}),
    "relay": (algorithms.split_learning, {"rate": 0.1}),
}
IN_TURNS = {"three copies", "one copy", "relay"}  # fewer copies than clients, so some of these follow one another


def federation(name, num_slots=p.SLOTS):
    make, options = ROWS[name]
    return p.Federation(
        num_slots=num_slots, make=lambda sampler, **run: cases.split_recipe(make, sampler=sampler, **options)()
    )


@pytest.mark.full
@pytest.mark.parametrize("name", cases.rows(ROWS, ("three copies",)))
def test_order(name):
    """Catches keys by slot, float sums, and clients of a copy that do not follow one another."""
    made = federation(name)
    if name not in IN_TURNS:
        return laws.order_is_irrelevant(made)
    one, other = (made.run(who)[0].server for who in (p.COHORT, p.COHORT[::-1]))
    assert p.digest(one) != p.digest(other)


@pytest.mark.full
@pytest.mark.parametrize("name", cases.rows(ROWS, ("three copies",)))
def test_padding(name):
    """Uninvited slots anywhere, and a smaller cohort. Catches an empty slot that takes a turn, or moves the others to
    another copy."""
    made, few = federation(name), p.COHORT[:8]
    place = np.array([8, 0, 1, 2, 3, 9, 4, 5, 6, 7])
    spread = p.cohort(np.r_[few, 9, 9], invited=np.arange(10) < 8)
    spread = spread._replace(**{x: getattr(spread, x)[jnp.array(place)] for x in ("ids", "invited", "reported")})
    behind = made.run(few)
    for other in (made.run(spread), None if name == "a copy each" else federation(name, 8).run(few)):
        if other is not None:
            laws.check_equal_bits(p.outcome(*behind), p.outcome(*other), "padding")
