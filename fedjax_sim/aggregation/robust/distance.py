"""Robust rules that choose messages by their distances from each other."""

from __future__ import annotations

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, validate
from fedjax_sim.aggregation.robust.coordinate import around_median, more_than
from fedjax_sim.engine.all_messages.all_messages import SideBySide, by_rule
from fedjax_sim.engine.all_messages.messages import columnwise, gaps, one_message, weighted_mean_of_messages
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.types import Aggregator, Array, PyTree
from fedjax_sim.validate import NonNegativeInt, PositiveInt

__all__ = ["bulyan", "krum", "minimum_diameter"]

MOST_SUBSETS = 200_000


@validate.named_arguments
def krum(num_byzantine: NonNegativeInt, num_chosen: PositiveInt = 1) -> Aggregator:
    """The message with the nearest neighbours, or the mean of the `num_chosen` such (multi-Krum).

    A message's score is the sum of its squared distances from its m - f - 2 nearest other messages, as in the paper
    (ByzFL counts m - f with the message itself); the lowest scores are chosen, equal ones by client id.

    Args:
      num_byzantine: f, the attackers in a cohort that it withstands; 2 f + 2 < m.
      num_chosen: q, in [1, m - f - 2].

    Returns: an Aggregator that holds all m messages, and m x m distances. Weights are not looked at. A round with fewer
    than 2 f + 3 messages is skipped, and one whose scores are infinite: distances of 1.8e19 and more count as infinite.

    Raises: ValueError, when the round is built, for a cohort that is too small for f or q.

    Guarantees: NumPy's choice (tests/aggregation/robust/test_distance.py::test_krum_is_numpys); a chosen message has a
    neighbourhood of honest ones, whatever f attackers send (::test_attackers_are_not_chosen). Messages that differ by
    less than a thousandth of their length are told apart no better than `engine.all_messages.messages.gaps` says.

    References: Blanchard, El Mhamdi, Guerraoui and Stainer 2017, sections 3 and 4.

    >>> krum(2).facts.weighted
    False
    """
    least = max(2 * num_byzantine + 3, num_byzantine + 2 + num_chosen)

    def check(num_slots):
        more_than(num_byzantine, 2, 3)(num_slots)
        validate.integer("num_chosen", num_chosen, 1, num_slots - num_byzantine - 2, hint="At most m - f - 2.")

    def rule(key, round, cohort):
        scores = _scores(gaps(cohort.messages), cohort.arrived, cohort.number - num_byzantine - 2)
        if num_chosen == 1:
            best = jnp.argmin(scores)
            update, chosen = one_message(cohort.messages, best), jnp.arange(scores.size) == best
        else:
            chosen = jnp.argsort(jnp.argsort(scores, stable=True), stable=True) < num_chosen
            update = weighted_mean_of_messages(cohort.messages, chosen.astype(jnp.float32))
        known = jnp.isfinite(jnp.where(chosen, scores, 0)).all()
        return _made((cohort.number >= least) & known, update, chosen)

    return by_rule(rule, check, **_facts(num_byzantine))


def _facts(num_byzantine: int) -> dict:
    return {"weighted": False, "homogeneous": True, "chooses": True, "withstands": lambda number: num_byzantine}


def _made(sound: Array, update: PyTree, chosen: Array) -> tuple[PyTree, dict[str, Array]]:
    """What a rule returns: the update and whom it chose, or NaN (a skipped round) and nobody."""
    return jax.tree.map(lambda x: jnp.where(sound, x, jnp.nan), update), {"chosen": chosen & sound}


def _scores(apart: Array, there: Array, nearest: Array) -> Array:
    """[m] the sum of the `nearest` smallest of each row of distances [m, m] to others that are `there` [m]; infinity
    for those that are not, and where a distance is infinite.

    The last of them is selected, and those below it are summed exactly: a sort of all takes four times as long, and
    equal distances in another order give equal scores all the same.
    """
    m = there.size
    apart = jnp.where(there[:, None] & ~jnp.eye(m, dtype=bool), apart, jnp.inf)  # symmetric: [others, m]
    last = engine.order_statistic(apart, nearest - 1)
    below = apart < last[None]
    rest = nearest - below.sum(0, dtype=jnp.int32)
    scores = exact_sums.summed(jnp.where(below, apart, 0)) + jnp.where(rest > 0, rest.astype(last.dtype) * last, 0)
    return jnp.where(there, scores, jnp.inf)


@validate.named_arguments
def bulyan(num_byzantine: NonNegativeInt) -> Aggregator:
    """Krum again and again, then the mean around the median of what it chose.

    m - 2 f messages are chosen one after the other by Krum among those that are left, and of them the m - 4 f values
    nearest to the median are averaged at each coordinate.

    Args:
      num_byzantine: f, the attackers in a cohort that it withstands; 4 f + 3 <= m.

    Returns: an Aggregator that holds all m messages, and m x m distances. Weights are not looked at. A round with fewer
    than 4 f + 3 messages is skipped, and one in which a score is infinite, as for `krum`.

    Raises: ValueError for 4 f + 3 > m, when the round is built.

    Guarantees: NumPy's (tests/aggregation/robust/test_distance.py::test_bulyan_is_numpys); up to f attackers, no
    further outside of the honest range at a coordinate than its width (::test_attackers_are_not_chosen): it averages
    values nearest to an honest median, and a value just outside of the range may be among them.

    References: El Mhamdi, Guerraoui and Rouault 2018, section 4.
    """

    def rule(key, round, cohort):
        chosen, known = _one_by_one(cohort, num_byzantine)
        kept = cohort.number - 4 * num_byzantine
        update = columnwise(cohort.messages, partial(around_median, kept), chosen)
        return _made((cohort.number >= 4 * num_byzantine + 3) & known, update, chosen)

    return by_rule(rule, more_than(num_byzantine, 4, 3), **_facts(num_byzantine))


def _one_by_one(cohort: SideBySide, num_byzantine: int) -> tuple[Array, Array]:
    """([m] bool: n - 2 f messages by Krum among those that are left, each time; whether all their scores are finite).

    Rows of distances are sorted once. Of a message's neighbours that are left, the nearest end at a place that moves
    down as neighbours are chosen, for one neighbour fewer counts each time.
    """
    m, f = cohort.messages.number, num_byzantine
    others = cohort.arrived[None] & ~jnp.eye(m, dtype=bool)
    ids = jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32)[None], (m, m))
    apart, who = jax.lax.sort((jnp.where(others, gaps(cohort.messages), jnp.inf), ids), num_keys=1)
    places = jnp.arange(m, dtype=jnp.int32)
    left = others[places[:, None], who]  # [m, m] whether the neighbour at a place is there, and not chosen yet
    end = jnp.full(m, cohort.number - f - 3)  # the place of the last neighbour that counts

    def choose(i, state):
        chosen, left, end, known = state
        counted = left & (places[None] <= end[:, None])
        scores = engine.pairwise_sum(jnp.where(counted, apart, 0), (1,))
        best = jnp.argmin(jnp.where(cohort.arrived & ~chosen, scores, jnp.inf)).astype(jnp.int32)
        known &= jnp.isfinite(scores[best])
        gone = who == best
        inside = (gone & (places[None] <= end[:, None])).any(1)
        left &= ~gone
        # One neighbour fewer counts: without one inside the last one stops counting, else it was the one.
        end = jnp.where(inside, end, end - 1)
        still = lambda end: (~left[places, jnp.maximum(end, 0)] & (end >= 0)).any()  # noqa: E731
        down = lambda end: jnp.where(~left[places, jnp.maximum(end, 0)] & (end >= 0), end - 1, end)  # noqa: E731
        end = jax.lax.while_loop(still, down, end)
        return chosen.at[best].set(True), left, end, known

    start = jnp.zeros(m, bool), left, end, jnp.array(True)
    chosen, *_, known = jax.lax.fori_loop(0, jnp.maximum(cohort.number - 2 * f, 0), choose, start)
    return chosen, known


@validate.named_arguments
def minimum_diameter(num_byzantine: NonNegativeInt) -> Aggregator:
    """Of n messages the mean of the n - f whose largest distance from each other is the smallest.

    All subsets are tried, so it is for small cohorts. Of subsets with the same diameter the first is taken, members by
    client id.

    Args:
      num_byzantine: f, the attackers in a cohort that it withstands; 2 f < m.

    Returns: an Aggregator that holds all m messages and, in the program, all subsets. Weights are not looked at. It
    leaves out f of the messages that arrived, however many did. A round with 2 f messages or fewer is skipped, and one
    whose diameters are all infinite (1.8e19 or more).

    Raises: ValueError, when the round is built, for 2 f >= m and for more than 200,000 subsets.

    Guarantees: NumPy's choice among all subsets of the messages that arrived, in which f attackers count for nothing
    (tests/aggregation/robust/test_distance.py::test_minimum_diameter_is_numpys).

    References: El Mhamdi, Guerraoui and Rouault 2018 (the rule that they call Brute), section 2.
    """

    def check(num_slots):
        more_than(num_byzantine, 2)(num_slots)
        _subsets(num_slots, num_byzantine)

    def rule(key, round, cohort):
        m = cohort.messages.number
        subsets = jnp.asarray(_subsets(m, num_byzantine))
        # A subset of the slots that leaves out f messages that arrived holds all the missing ones, at no distance.
        leaves_out_f = cohort.arrived[subsets].sum(1, dtype=jnp.int32) == cohort.number - num_byzantine
        apart = jnp.where(cohort.arrived[:, None] & cohort.arrived[None], gaps(cohort.messages), 0)
        diameter = lambda members: apart[members[:, None], members[None]].max()  # noqa: E731
        diameters = jnp.where(leaves_out_f, jax.lax.map(diameter, subsets, batch_size=4096), jnp.inf)
        best = jnp.argmin(diameters)
        chosen = jnp.zeros(m, bool).at[subsets[best]].set(True) & cohort.arrived
        update = weighted_mean_of_messages(cohort.messages, chosen.astype(jnp.float32))
        enough = cohort.number > 2 * num_byzantine
        return _made(enough & jnp.isfinite(diameters[best]), update, chosen)

    return by_rule(rule, check, **_facts(num_byzantine))


def _subsets(m: int, f: int) -> np.ndarray:
    """[subsets, m - f] int32: the ranks in each subset, in order."""
    if math.comb(m, f) > MOST_SUBSETS:
        hint = "Every subset of m - f messages is tried: take a smaller cohort, or another rule."
        validate.fail("num_byzantine", f"at most {MOST_SUBSETS:,} subsets of {m} messages", f, hint)
    return np.array(list(itertools.combinations(range(m), m - f)), np.int32)
