"""Published attacks on aggregation by attackers who see every honest message, and what the server makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.adversary.kinds import Honest, Omniscient, dot, honest_moments
from fedjax_sim.engine.all_messages.messages import (
    columnwise,
    gaps,
    inner_products,
    one_message,
    squared_distances,
    with_message,
)
from fedjax_sim.engine.arithmetic.exact_sum import power_of_two
from fedjax_sim.engine.arithmetic.rewriter import pairwise_sum
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import Integer, NonNegativeInt, Number

HALVINGS = 40  # steps of the bisection for the largest step that hides

# The directions p along which attackers move away from the honest mean, by name: (mean, std) -> p.
DIRECTIONS = {
    "unit": lambda mean, std: _unit(mean),
    "sign": lambda mean, std: jax.tree.map(jnp.sign, mean),
    "std": lambda mean, std: std,
}


def _unit(point: PyTree) -> PyTree:
    """A message scaled to norm 1; a zero message stays zero."""
    norm = jnp.sqrt(dot(point, point))
    return jax.tree.map(lambda x: x / jnp.where(norm > 0, norm, 1).astype(x.dtype), point)


def _hiding(direction: str, allowed: Callable) -> Omniscient:
    """Attackers send mean - gamma p with the largest gamma that `allowed` lets pass, found by bisection.

    Args:
      direction: the name of p in `DIRECTIONS`.
      allowed: (squared distances [m, m] of all pairs, honest [m] bool) -> (squared distances [m] of a message from all
        others -> [] bool, whether the message hides).
    """
    validate.one_of("direction", direction, DIRECTIONS)

    def send(key, cohort, bad, aggregate):
        honest = honest_moments(cohort, bad)
        is_honest = cohort.arrived & ~bad
        p = DIRECTIONS[direction](honest.mean, honest.std)
        # |u_i - (mean - gamma p)|^2 = |u_i - mean|^2 + 2 gamma <u_i - mean, p> + gamma^2 |p|^2, so messages are read
        # only once, and not in each step of the search.
        squares = squared_distances(cohort.messages, honest.mean)
        products = inner_products(cohort.messages, p) - dot(honest.mean, p)
        square_of_p = dot(p, p)
        hides = allowed(gaps(cohort.messages), is_honest)

        def halve(i, ends):
            low, high = ends
            gamma = (low + high) / 2
            is_hidden = hides(squares + 2 * gamma * products + gamma * gamma * square_of_p)
            return jnp.where(is_hidden, gamma, low), jnp.where(is_hidden, high, gamma)

        def double(state):
            gamma, _ = state
            return 2 * gamma, hides(squares + 4 * gamma * products + 4 * gamma * gamma * square_of_p)

        # gamma is doubled until the message does not hide, which brackets the largest gamma.
        high, _ = jax.lax.while_loop(
            lambda s: s[1] & (s[0] < 2.0**40), double, (jnp.float32(2.0**-40), jnp.array(True))
        )
        gamma, _ = jax.lax.fori_loop(0, HALVINGS, halve, (jnp.float32(0), high))
        message = jax.tree.map(lambda m, x: m - gamma.astype(m.dtype) * x, honest.mean, p)
        return with_message(cohort.messages, bad, message)

    return Omniscient(send)


def min_max(direction: str = "unit") -> Omniscient:
    """Attackers send the honest mean, moved as far as possible while its largest distance stays inconspicuous
    (min-max).

    The message mean - gamma p has the largest gamma with which its distance from every honest message is at most the
    largest distance between two honest messages.

    Args:
      direction: p: "unit" (the mean, scaled to norm 1), "sign" (the signs of the mean) or "std" (the standard
        deviations).

    Raises: ValueError for a direction that is none of these three.

    Guarantees: the largest step that keeps the bound (tests/adversary/test_attacks.py::test_min_max_and_min_sum).

    References: Shejwalkar and Houmansadr 2021, equation 8.
    """

    def allowed(distances_of_pairs, honest):
        limit = jnp.where(honest[:, None] & honest[None], distances_of_pairs, 0).max()
        return lambda distances: jnp.where(honest, distances, 0).max() <= limit

    return _hiding(direction, allowed)


def min_sum(direction: str = "unit") -> Omniscient:
    """Attackers send the honest mean, moved as far as possible while its sum of distances stays inconspicuous
    (min-sum).

    A message's sum is that of its squared distances from all honest messages. The message mean - gamma p has the
    largest gamma with which its sum is at most the largest sum of an honest message.

    Args:
      direction: p, as in `min_max`.

    Raises: ValueError for a direction that is none of these three.

    References: Shejwalkar and Houmansadr 2021, equation 9.
    """

    def allowed(distances_of_pairs, honest):
        # By halves, for a plain sum of the pairs of more than 4,096 messages would be left to the compiler.
        sums = pairwise_sum(jnp.where(honest[:, None] & honest[None], distances_of_pairs, 0), (1,))
        return lambda distances: jnp.where(honest, distances, 0).sum(0) <= sums.max()

    return _hiding(direction, allowed)


@validate.named_arguments
def mimic(client: NonNegativeInt = 0) -> Omniscient:
    """All attackers copy the message of one honest client.

    If clients differ in their data, the copies give this client's data too much influence.

    Args:
      client: the id of the copied client. If its message did not arrive, the honest message of the next larger id is
        copied, and after the last id the first honest message.

    References: Karimireddy, He and Jaggi 2022, section 3.2 (here the client is given, not searched for).
    """

    def send(key, cohort, bad, aggregate):
        is_honest = cohort.arrived & ~bad
        is_candidate = is_honest & (cohort.ids >= client)
        # Messages are in the order of ids, and `argmax` finds the first True.
        rank = jnp.argmax(jnp.where(is_candidate.any(), is_candidate, is_honest))
        return with_message(cohort.messages, bad, one_message(cohort.messages, rank))

    return Omniscient(send)


@validate.named_arguments
def fang(reach: Annotated[float, Number(1, open_low=True)] = 2.0) -> Omniscient:
    """Attackers send, at each coordinate, a number just outside of the honest range, opposite to the honest mean.

    If the mean is positive, the number is drawn between the least honest value and this value times `reach` (divided by
    `reach` if the value is positive). If the mean is not positive, it is the mirror image: drawn beyond the largest
    honest value. All attackers send the same draw, while the paper's attackers draw independently.

    Args:
      reach: b, above 1.

    Guarantees: outside of the range, and within b of its end (tests/adversary/test_attacks.py::test_fang).

    References: Fang, Cao, Jia and Gong 2020, section 3.3 (trimmed mean and median, full knowledge).
    """

    def send(key, cohort, bad, aggregate):
        honest = (cohort.arrived & ~bad).astype(jnp.float32)

        def extreme(reduce, empty):
            """The least or the largest honest value at each coordinate."""
            return columnwise(
                cohort.messages, lambda x, honest: reduce(jnp.where(honest[:, None] > 0, x, empty), 0), honest
            )

        mean = honest_moments(cohort, bad).mean
        low = extreme(jnp.min, jnp.inf)
        high = extreme(jnp.max, -jnp.inf)
        leaves, structure = jax.tree.flatten(mean)
        keys = jax.random.split(key, len(leaves))

        def draw(key, mean, low, high):
            low = low.astype(mean.dtype)
            high = high.astype(mean.dtype)
            factor = 1 + (reach - 1) * jax.random.uniform(key, mean.shape, mean.dtype)
            below = jnp.where(low > 0, low / factor, low * factor)
            above = jnp.where(high < 0, high / factor, high * factor)
            return jnp.where(mean > 0, below, above)

        ends = (structure.flatten_up_to(x) for x in (low, high))
        message = structure.unflatten([draw(*x) for x in zip(keys, leaves, *ends, strict=True)])
        return with_message(cohort.messages, bad, message)

    return Omniscient(send)


@validate.named_arguments
def adaptive(
    num_scales: Annotated[int, Integer(1, 64)] = 16, num_ascents: Annotated[int, Integer(0, 1024)] = 8
) -> Omniscient:
    """Attackers search for the message that moves this very aggregator furthest from the honest mean.

    The harm of a message is |aggregate - mean|^2. The search has two parts.

    1. Lines: the messages mean - gamma p are tried, where p is the direction of the mean, its signs, or the standard
       deviations. gamma is a power of two, from 2^-4 to 2^(n - 5), times the honest messages' root mean square
       deviation over |p|. Where honest messages are the same up to rounding, their norm takes the place of the
       deviation.
    2. Ascent, from the best of these messages. Order statistics and choices have no useful derivative, so each step is
       to the best of five messages. Three start at the mean and go in the direction in which the aggregate was moved,
       half, once and twice as far as the best message so far. (If a rule moves every coordinate by the same factor,
       this is the direction of the gradient.) Two are the best message plus and minus a random step, with a sign for
       each coordinate, in proportion to the standard deviations. If no message is better, the random steps become
       shorter.

    Args:
      num_scales: n, in [1, 64]; the rule is computed 3 n times.
      num_ascents: the steps of the ascent, in [0, 1024]; the rule is computed five times in each.

    Guarantees: the message is at least as harmful as every message that is tried along the lines
    (tests/adversary/test_attacks.py::test_adaptive), also where honest messages agree
    (::test_adaptive_where_honest_messages_agree), and the ascent finds more harmful messages (::test_ascent).

    References: Shejwalkar and Houmansadr 2021, section 4 (aggregation known); Fang et al. 2020, section 3.2 (lambda by
    halving); Spall 1992 (simultaneous perturbation).
    """

    def send(key, cohort, bad, aggregate):
        honest = honest_moments(cohort, bad)
        is_honest = cohort.arrived & ~bad
        squares = jnp.where(is_honest, squared_distances(cohort.messages, honest.mean), 0)
        deviation = jnp.sqrt(squares.sum(0) / jnp.maximum(honest.number, 1))
        norm = jnp.sqrt(dot(honest.mean, honest.mean)).astype(deviation.dtype)
        deviation = jnp.where(deviation > 2.0**-20 * norm, deviation, norm)

        def harm(message):
            """Returns (the harm of a message, how it moves the aggregate from the honest mean)."""
            attacked = aggregate(with_message(cohort.messages, bad, message))
            motion = jax.tree.map(lambda x, m: x.astype(m.dtype) - m, attacked, honest.mean)
            size = dot(motion, motion).astype(jnp.float32)
            return jnp.where(jnp.isfinite(size), size, -1), motion  # a round that is skipped does no harm

        best = _best_along_lines(harm, honest, deviation, num_scales)
        best = _ascend(harm, honest, key, best, num_ascents)
        return with_message(cohort.messages, bad, best[0])

    return Omniscient(send)


def _better(harm: Callable, state: tuple, message: PyTree) -> tuple:
    """The more harmful of a state (message, its harm, how the aggregate is moved) and another message."""
    size, motion = harm(message)
    return jax.tree.map(lambda new, old: jnp.where(size > state[1], new, old), (message, size, motion), state)


def _point_on_line(start: PyTree, direction: PyTree, distance: Array) -> PyTree:
    """The point at a distance from a start along a direction."""
    norm = jnp.sqrt(dot(direction, direction))
    gamma = distance / jnp.where(norm > 0, norm, 1)
    return jax.tree.map(lambda m, p: m + gamma.astype(m.dtype) * p.astype(m.dtype), start, direction)


def _best_along_lines(harm: Callable, honest: Honest, deviation: Array, num_scales: int) -> tuple:
    """Finds the most harmful message along fixed directions: (message, its harm, how the aggregate is moved)."""
    directions = jax.tree.map(lambda *x: jnp.stack(x), *(make(honest.mean, honest.std) for make in DIRECTIONS.values()))

    def try_point(i, state):
        direction = jax.tree.map(lambda x: x[i // num_scales], directions)
        scale = power_of_two(i % num_scales - 4, jnp.float32)
        return _better(harm, state, _point_on_line(honest.mean, direction, -deviation * scale))

    # The harm -2 is below that of every message, so the first one tried is taken.
    start = honest.mean, jnp.float32(-2), tree.zeros_like(honest.mean)
    return jax.lax.fori_loop(0, len(DIRECTIONS) * num_scales, try_point, start)


def _ascend(harm: Callable, honest: Honest, key: Array, best: tuple, num_ascents: int) -> tuple:
    """Runs the ascent of `adaptive`, from the best message along lines.

    With x the best message so far, mu the honest mean, p how x moves the aggregate and s the standard deviations with
    random signs, a step tries mu + c |x - mu| p / |p| for c = 1/2, 1, 2, and x +- r |x - mu| s / |s|. The reach r is
    1/2 at first, and 0.7 r after a step that found nothing better.

    Args:
      harm: (message) -> (its harm, [] float32; how the aggregate is moved, leaves [...]).
      honest: the moments of the honest messages, leaves [...].
      key: of the random steps.
      best: (message, its harm, how the aggregate is moved) to begin with.
      num_ascents: steps, at least 0.

    Returns: (message, its harm, how the aggregate is moved).
    """

    def ascend_once(i, state):
        best, reach = state
        message, harm_before, motion = best
        difference = jax.tree.map(jnp.subtract, message, honest.mean)
        length = jnp.sqrt(dot(difference, difference))
        leaves, structure = jax.tree.flatten(honest.std)
        keys = jax.random.split(jax.random.fold_in(key, i), len(leaves))
        steps = [jax.random.rademacher(k, x.shape, x.dtype) * x for k, x in zip(keys, leaves, strict=True)]
        random_step = structure.unflatten(steps)
        candidates = [_point_on_line(honest.mean, motion, c * length) for c in (0.5, 1.0, 2.0)]
        candidates += [_point_on_line(message, random_step, c * reach * length) for c in (1.0, -1.0)]
        # Stacked and tried in a loop, so that the rule is compiled once and not five times.
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *candidates)
        take = lambda k: jax.tree.map(lambda x: x[k], stacked)  # noqa: E731
        best = jax.lax.fori_loop(0, len(candidates), lambda k, state: _better(harm, state, take(k)), best)
        return best, jnp.where(best[1] > harm_before, reach, 0.7 * reach)

    return jax.lax.fori_loop(0, num_ascents, ascend_once, (best, jnp.float32(0.5)))[0]
