"""What robust rules state holds for every number of messages, in every nesting, wherever the messages are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import aggregation as a
from fedjax_sim.types import Round
from tests.aggregation.robust.problems import applied
from tests.laws import cases, problems as p

pytestmark = pytest.mark.optimised(False)  # these laws do not depend on the compiler

M, D = 11, 6
RULES = {name: row.withstands for name, row in cases.CASES["aggregation"].items() if row.withstands is not None} | {
    "multi-krum": lambda: a.krum(3, 3),
    "clipping, then a trimmed mean": lambda: a.adaptive_clipping(a.trimmed_mean(3), 3),
    "buckets, then a median": lambda: a.bucketing(a.median(), 2),
    "buckets, then krum": lambda: a.bucketing(a.krum(1), 2),
    "mixing, then a trimmed mean": lambda: a.nearest_neighbour_mixing(a.trimmed_mean(3), 3),
    "mixing, then clipping, then krum": lambda: a.nearest_neighbour_mixing(a.adaptive_clipping(a.krum(3), 3), 3),
    "bounds, then a median": lambda: a.norm_bounding(a.median(), 100.0),
}


def round_of(rule):
    """A round with the rule's first state."""
    state = () if rule.start is None else rule.start(jax.ShapeDtypeStruct((D,), jnp.float32))
    return Round(None, None, state)


@pytest.mark.parametrize("name", cases.rows(RULES, ["mixing, then a trimmed mean"]))
def test_far_messages_leave_a_result_near_the_honest(name):
    """As many attackers as the rule says, at every number of arrivals: the aggregate is near the honest messages, or
    the round is skipped.

    Catches a rule that discards fewer messages where some are missing, and one that says that it withstands as many.
    """
    rule, rng = RULES[name](), np.random.default_rng(0)
    assert rule.facts.withstands is not None
    released = 0
    for arrived in range(1, M + 1):
        most = int(rule.facts.withstands(arrived))
        for far in (1e6, -1e6, np.array([1e6, -1e6, 0, 0, 1e6, 0])):
            honest = 1 + rng.normal(size=(M, D)).astype(np.float32)
            x = honest.copy()
            bad = rng.permutation(arrived)[: min(most, arrived)]
            x[bad] = far
            found = applied(rule, x, np.arange(M) < arrived, round=round_of(rule))[0]
            if np.isnan(found).all() or len(bad) == arrived:
                continue
            released += 1
            good = np.delete(honest[:arrived], bad, axis=0)
            width = max(np.abs(good - good.mean(0)).max(), 1)
            assert np.abs(found - good.mean(0)).max() < 10 * width, (arrived, most)
    assert released >= 3


@pytest.mark.every_row
def test_every_robust_rule_has_a_row():
    """By its own fact. Catches a rule that states what it withstands, and that no law looks at."""
    for name, row in cases.CASES["aggregation"].items():
        if row().facts.withstands is not None:
            told = f"state `withstands`, its setting for {M} messages, in the row {name!r} of tests/laws/cases.py"
            assert row.withstands or row.not_attacked, told


SHIFTED = sorted(set(cases.named("aggregation", lambda row: row.about_origin is not None)) - cases.integer_sums())


@pytest.mark.parametrize("name", cases.rows(SHIFTED, ["krum", "norm_bounding"]))
def test_rules_move_with_a_common_shift(name):
    """Moved messages, moved result; a rule about an origin, as its row says, does not.

    Catches steps that begin at a fixed point, distances from one, and a row that says so for no reason.
    """
    row, rng = cases.CASES["aggregation"][name], np.random.default_rng(1)
    rule = row()
    x = rng.integers(-50, 50, (p.SLOTS, 3)).astype(np.float32)
    shift = rng.integers(-200, 200, 3).astype(np.float32)
    state = () if rule.start is None else rule.start(jax.ShapeDtypeStruct((3,), jnp.float32))
    round = Round(None, jnp.array(p.START), state)
    before, after = (applied(rule, y, np.ones(p.SLOTS), round=round)[0] for y in (x, x + shift))
    moved = np.allclose(after - before, shift, atol=0.05)
    assert moved != row.about_origin, f"state about_origin={not moved} in the row {name!r} of tests/laws/cases.py"
