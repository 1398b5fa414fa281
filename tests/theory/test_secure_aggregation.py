"""How often secure sums abort, against an enumeration of all ways to leave."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from fedjax_sim.aggregation.secure.masks import Stages, circle, is_aborted
from fedjax_sim.theory import abort_probability, expected_messages
from tests.refusals import refused

EACH = np.array([0.1, 0.15, 0.2, 0.25])


def enumerated(size, threshold, neighbours, least):
    """The probability of an abort, over all 4^m ways to leave, by the protocol's own rule."""
    graph = circle(jax.random.key(0), size, neighbours)
    cases = np.array(list(itertools.product(range(1, 5), repeat=size)))
    rule = jax.jit(jax.vmap(lambda x: is_aborted(graph, Stages(x > 1, x > 2, x > 3), threshold, least)))
    stays = np.cumprod(1 - EACH)
    chances = np.array([1 - stays[1], stays[1] - stays[2], stays[2] - stays[3], stays[3]])
    return (chances[cases - 1].prod(1) * np.asarray(rule(cases))).sum()


@pytest.mark.parametrize(("threshold", "least"), [(1, 1), (3, 3), (3, 5), (5, 5)])
def test_complete_graphs(threshold, least):
    """Catches a tail off by one, and steps that are counted twice."""
    found = abort_probability(5, threshold, EACH.tolist(), min_messages=least)
    assert found == pytest.approx(enumerated(5, threshold, None, least), abs=1e-6)


@pytest.mark.parametrize("threshold", [3, 4])
def test_circles_stay_below_the_bound(threshold):
    """Catches a bound that does not hold, or says nothing: it is less than m times the truth."""
    true, bound = enumerated(6, threshold, 4, 1), abort_probability(6, threshold, EACH.tolist(), neighbours=4,
                                                                     min_messages=1)  # fmt: skip
    assert true <= bound + 1e-6 and (bound == 1 or bound < 6 * true)


def test_ends():
    """Catches 0/0 where nobody uploads."""
    assert abort_probability(10, 5, 0.0) == 0 and abort_probability(10, 5, 1.0) == 1
    assert abort_probability(10, 5, [0, 0, 1.0, 0]) == 1 and expected_messages(10, [0.5, 0, 0, 1.0]) == 5
    with pytest.raises(ValueError, match="threshold: expected"):
        abort_probability(10, 5, 0.1, neighbours=4)
    with refused("threshold", value=2, rule="[3, 4]"):
        abort_probability(10, 2, 0.1, neighbours=4)
    with pytest.raises(ValueError, match="dropout: expected a probability"):
        abort_probability(10, 5, [0.1])
    with pytest.raises(ValueError, match=r"dropout\[0\]: expected"):
        expected_messages(10, -0.1)
