"""Robust rules that choose messages by the distances between messages."""

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
from fedjax_sim.engine.arithmetic.rewriter import pairwise_sum
from fedjax_sim.types import Aggregator, Array, PyTree
from fedjax_sim.validate import NonNegativeInt, PositiveInt

MOST_SUBSETS = 200_000  # that `minimum_diameter` tries; the program holds all of them


@validate.named_arguments
def krum(num_byzantine: NonNegativeInt, num_chosen: PositiveInt = 1) -> Aggregator:
    """The aggregate is the message nearest to its neighbours, or the mean of the q such messages (multi-Krum).

    A message's score is the sum of its squared distances from its m - f - 2 nearest other messages, as in the paper.
    (ByzFL counts m - f messages, with the message itself.) The messages with the lowest scores are chosen; among equal
    scores the lower client id is chosen.

    Args:
      num_byzantine: f >= 0, the attackers in a cohort that the rule withstands; 2 f + 2 < m.
      num_chosen: q, in [1, m - f - 2]; 1 is Krum, more is multi-Krum.

    Returns: an Aggregator that holds all m messages, and m x m distances. Weights are ignored. A round is skipped if it
    has fewer than 2 f + 3 messages, and if a chosen score is infinite: distances of 1.8e19 and more count as infinite.

    Raises: ValueError, when the round is built, for a cohort that is too small for f or q.

    Guarantees:
      - equals NumPy's choice (tests/aggregation/robust/test_distance.py::test_krum_is_numpys)
      - a chosen message has a neighbourhood of honest messages, whatever f attackers send
        (::test_attackers_are_not_chosen)
      - messages that differ by less than a thousandth of their length are distinguished only as well as
        `engine.all_messages.messages.gaps` states

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
            update = one_message(cohort.messages, best)
            chosen = jnp.arange(scores.size) == best
        else:
            # The argsort of an argsort is each message's rank; stable sorts break ties by client id.
            chosen = jnp.argsort(jnp.argsort(scores, stable=True), stable=True) < num_chosen
            update = weighted_mean_of_messages(cohort.messages, chosen.astype(jnp.float32))
        scores_are_finite = jnp.isfinite(jnp.where(chosen, scores, 0)).all()
        return _chosen_or_skipped((cohort.number >= least) & scores_are_finite, update, chosen)

    return by_rule(rule, check, **_facts(num_byzantine))


def _facts(num_byzantine: int) -> dict:
    """The facts that all rules of this file state."""
    return {"weighted": False, "homogeneous": True, "chooses": True, "withstands": lambda number: num_byzantine}


def _chosen_or_skipped(is_sound: Array, update: PyTree, chosen: Array) -> tuple[PyTree, dict[str, Array]]:
    """Returns (update, whom the rule chose) in a sound round, else NaN, which skips the round, and nobody."""
    update = jax.tree.map(lambda x: jnp.where(is_sound, x, jnp.nan), update)
    return update, {"chosen": chosen & is_sound}


def _scores(distances: Array, arrived: Array, num_neighbours: Array) -> Array:
    """Computes Krum's scores: the sum of each message's smallest squared distances from other messages.

    The largest distance that counts is selected, and the distances below it are summed exactly. A sort of all distances
    takes four times as long. Exact sums have no order, so equal distances in another order give equal scores.

    Args:
      distances: [m, m] squared distances.
      arrived: [m] bool.
      num_neighbours: [] int32, how many of a message's nearest neighbours count.

    Returns: [m] scores; infinity for messages that did not arrive, and where a distance that counts is infinite.
    """
    m = arrived.size
    # Neighbours are the rows, so that order statistics run over rows; the matrix is symmetric.
    distances = jnp.where(arrived[:, None] & ~jnp.eye(m, dtype=bool), distances, jnp.inf)
    last = engine.order_statistic(distances, num_neighbours - 1)
    is_below = distances < last[None]
    num_ties = num_neighbours - is_below.sum(0, dtype=jnp.int32)  # neighbours that count at the distance `last`
    # Without ties the product is not taken: `last` may be infinite, and 0 * inf is NaN.
    ties = jnp.where(num_ties > 0, num_ties.astype(last.dtype) * last, 0)
    scores = exact_sums.summed(jnp.where(is_below, distances, 0)) + ties
    return jnp.where(arrived, scores, jnp.inf)


@validate.named_arguments
def bulyan(num_byzantine: NonNegativeInt) -> Aggregator:
    """The aggregate is a mean around the median of messages that repeated Krum chooses (Bulyan).

    Krum chooses m - 2 f messages, each among the messages that are not chosen yet. At each coordinate, the m - 4 f of
    the chosen values that are nearest to their median are averaged.

    Args:
      num_byzantine: f >= 0, the attackers in a cohort that the rule withstands; 4 f + 3 <= m.

    Returns: an Aggregator that holds all m messages, and m x m distances. Weights are ignored. A round is skipped if it
    has fewer than 4 f + 3 messages, and if the score of a chosen message is infinite, as for `krum`.

    Raises: ValueError for 4 f + 3 > m, when the round is built.

    Guarantees:
      - equals NumPy's (tests/aggregation/robust/test_distance.py::test_bulyan_is_numpys)
      - with up to f attackers, a coordinate is at most the width of the honest range outside of that range
        (::test_attackers_are_not_chosen): the values nearest to an honest median are averaged, and a value just outside
        of the range may be among them

    References: El Mhamdi, Guerraoui and Rouault 2018, section 4.
    """

    def rule(key, round, cohort):
        chosen, scores_are_finite = _repeated_krum(cohort, num_byzantine)
        num_averaged = cohort.number - 4 * num_byzantine
        update = columnwise(cohort.messages, partial(around_median, num_averaged), chosen)
        return _chosen_or_skipped((cohort.number >= 4 * num_byzantine + 3) & scores_are_finite, update, chosen)

    return by_rule(rule, more_than(num_byzantine, 4, 3), **_facts(num_byzantine))


def _repeated_krum(cohort: SideBySide, num_byzantine: int) -> tuple[Array, Array]:
    """Chooses n - 2 f of n messages by Krum, each among the messages that are not chosen yet.

    Each row of distances is sorted once. A message's score is then a sum over the start of its row, up to an end. The
    end moves down as neighbours are chosen, since one neighbour fewer counts after each choice.

    After t choices, message i has the score sum_j |u_i - u_j|^2 over its n - t - f - 2 nearest other messages that are
    not chosen yet.

    Args:
      cohort: n messages in m rows, in the order of client ids.
      num_byzantine: f >= 0; 4 f + 3 <= n, or the choice means nothing.

    Returns: ([m] bool, the chosen messages; [] bool, whether all their scores are finite).
    """
    m = cohort.messages.number
    f = num_byzantine
    are_others = cohort.arrived[None] & ~jnp.eye(m, dtype=bool)
    ids = jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32)[None], (m, m))
    # Row i holds message i's neighbours from the nearest on: their distances, and their indices.
    distances, neighbours = jax.lax.sort((jnp.where(are_others, gaps(cohort.messages), jnp.inf), ids), num_keys=1)
    places = jnp.arange(m, dtype=jnp.int32)
    # [m, m] whether the neighbour at a place of a row arrived, and is not chosen yet.
    is_available = are_others[places[:, None], neighbours]
    end = jnp.full(m, cohort.number - f - 3)  # [m] the place of the last neighbour that counts

    def choose(i, state):
        """Chooses the message with the least score, and takes it out of all rows.

        The state is (chosen [m] bool, is_available [m, m] bool, end [m] int32, scores_are_finite [] bool).
        """
        chosen, is_available, end, scores_are_finite = state
        is_counted = is_available & (places[None] <= end[:, None])
        # The sum is by halves, because the compiler chooses the order of a plain sum of more than 4,096 numbers.
        scores = pairwise_sum(jnp.where(is_counted, distances, 0), (1,))
        best = jnp.argmin(jnp.where(cohort.arrived & ~chosen, scores, jnp.inf)).astype(jnp.int32)
        scores_are_finite &= jnp.isfinite(scores[best])
        is_best = neighbours == best
        best_counted = (is_best & (places[None] <= end[:, None])).any(1)
        is_available &= ~is_best
        # One neighbour fewer counts. If the chosen message was among the counted neighbours, it is that neighbour;
        # otherwise the last counted neighbour stops counting.
        end = jnp.where(best_counted, end, end - 1)

        def is_at_chosen(end):
            """Tells for each row whether its end stands at a neighbour that is chosen, [m] bool; -1 is no place."""
            return ~is_available[places, jnp.maximum(end, 0)] & (end >= 0)

        # The end moves down past neighbours that are chosen, so that it stands at a neighbour that counts.
        end = jax.lax.while_loop(
            lambda end: is_at_chosen(end).any(), lambda end: jnp.where(is_at_chosen(end), end - 1, end), end
        )
        return chosen.at[best].set(True), is_available, end, scores_are_finite

    start = jnp.zeros(m, bool), is_available, end, jnp.array(True)
    chosen, *_, scores_are_finite = jax.lax.fori_loop(0, jnp.maximum(cohort.number - 2 * f, 0), choose, start)
    return chosen, scores_are_finite


@validate.named_arguments
def minimum_diameter(num_byzantine: NonNegativeInt) -> Aggregator:
    """The aggregate is the mean of the n - f of n messages with the smallest diameter.

    The diameter of a subset of messages is the largest distance between two of its members. All subsets are tried, so
    the rule is for small cohorts. Of subsets with the same diameter the first is taken, with members in the order of
    client ids.

    Args:
      num_byzantine: f >= 0, the attackers in a cohort that the rule withstands; 2 f < m.

    Returns: an Aggregator that holds all m messages and, in the program, all subsets. Weights are ignored. The rule
    leaves out f of the messages that arrived, however many arrived. A round is skipped if it has 2 f messages or fewer,
    and if all its diameters are infinite (1.8e19 or more).

    Raises: ValueError, when the round is built, for 2 f >= m and for more than 200,000 subsets.

    Guarantees: equals NumPy's choice among all subsets of the messages that arrived, in which f attackers count for
    nothing (tests/aggregation/robust/test_distance.py::test_minimum_diameter_is_numpys).

    References: El Mhamdi, Guerraoui and Rouault 2018 (the rule that they call Brute), section 2.
    """

    def check(num_slots):
        more_than(num_byzantine, 2)(num_slots)
        _subsets(num_slots, num_byzantine)

    def rule(key, round, cohort):
        m = cohort.messages.number
        subsets = jnp.asarray(_subsets(m, num_byzantine))
        # Subsets are of slots, and not all slots have a message. A subset that leaves out exactly f messages that
        # arrived holds all the slots without a message, whose distances from other slots count as 0.
        leaves_out_f = cohort.arrived[subsets].sum(1, dtype=jnp.int32) == cohort.number - num_byzantine
        distances = jnp.where(cohort.arrived[:, None] & cohort.arrived[None], gaps(cohort.messages), 0)
        diameter = lambda members: distances[members[:, None], members[None]].max()  # noqa: E731
        diameters = jnp.where(leaves_out_f, jax.lax.map(diameter, subsets, batch_size=4096), jnp.inf)
        best = jnp.argmin(diameters)
        chosen = jnp.zeros(m, bool).at[subsets[best]].set(True) & cohort.arrived
        update = weighted_mean_of_messages(cohort.messages, chosen.astype(jnp.float32))
        has_enough = cohort.number > 2 * num_byzantine
        return _chosen_or_skipped(has_enough & jnp.isfinite(diameters[best]), update, chosen)

    return by_rule(rule, check, **_facts(num_byzantine))


def _subsets(m: int, f: int) -> np.ndarray:
    """Lists the members of each subset of range(m), in lexicographic order, [num_subsets, m - f] int32."""
    if math.comb(m, f) > MOST_SUBSETS:
        hint = "Every subset of m - f messages is tried: take a smaller cohort, or another rule."
        validate.fail("num_byzantine", f"at most {MOST_SUBSETS:,} subsets of {m} messages", f, hint)
    return np.array(list(itertools.combinations(range(m), m - f)), np.int32)
