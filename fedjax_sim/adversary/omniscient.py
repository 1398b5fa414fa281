"""Published attacks on aggregation by who sees every honest message, and what the server makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
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
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import Integer, NonNegativeInt, Number

__all__ = ["adaptive", "fang", "mimic", "min_max", "min_sum"]

HALVINGS = 40  # of the interval that holds the largest step

DIRECTIONS = {
    "unit": lambda mean, std: _unit(mean),
    "sign": lambda mean, std: jax.tree.map(jnp.sign, mean),
    "std": lambda mean, std: std,
}


def _unit(point: PyTree) -> PyTree:
    length = jnp.sqrt(dot(point, point))
    return jax.tree.map(lambda x: engine.divide(x, jnp.where(length > 0, length, 1).astype(x.dtype)), point)


def _hiding(direction: str, allowed: Callable) -> Omniscient:
    """mean - gamma p with the largest gamma that `allowed` lets pass, by bisection.

    Args:
      allowed: (gaps [m, m], honest [m]) -> (squared distances [m] of a message from all others -> bool).
    """
    validate.one_of("direction", direction, DIRECTIONS)

    def send(key, cohort, bad, aggregate):
        found, honest = honest_moments(cohort, bad), cohort.arrived & ~bad
        way = DIRECTIONS[direction](found.mean, found.std)
        own = squared_distances(cohort.messages, found.mean)
        along = inner_products(cohort.messages, way) - dot(found.mean, way)  # <u_i - mean, p>
        length = dot(way, way)
        fits = allowed(gaps(cohort.messages), honest)

        def halve(i, ends):
            low, high = ends
            gamma = (low + high) / 2
            good = fits(own + 2 * gamma * along + gamma * gamma * length)
            return jnp.where(good, gamma, low), jnp.where(good, high, gamma)

        def double(state):
            gamma, _ = state
            return 2 * gamma, fits(own + 4 * gamma * along + 4 * gamma * gamma * length)

        high, _ = jax.lax.while_loop(
            lambda s: s[1] & (s[0] < 2.0**40), double, (jnp.float32(2.0**-40), jnp.array(True))
        )
        gamma, _ = jax.lax.fori_loop(0, HALVINGS, halve, (jnp.float32(0), high))
        message = jax.tree.map(lambda m, p: m - gamma.astype(m.dtype) * p, found.mean, way)
        return with_message(cohort.messages, bad, message)

    return Omniscient(send)


def min_max(direction: str = "unit") -> Omniscient:
    """The honest mean, moved as far as it is no further from any honest message than two of these are apart.

    Args:
      direction: of the motion, minus: "unit" (the mean's), "sign" (its signs), "std" (the standard deviations).

    Guarantees: the largest step that keeps the bound (tests/adversary/test_attacks.py::test_min_max_and_min_sum).

    References: Shejwalkar and Houmansadr 2021, equation 8.
    """

    def allowed(apart, honest):
        most = jnp.where(honest[:, None] & honest[None], apart, 0).max()
        return lambda distances: jnp.where(honest, distances, 0).max() <= most

    return _hiding(direction, allowed)


def min_sum(direction: str = "unit") -> Omniscient:
    """As `min_max`, with the sum of squared distances from all honest messages, which no honest one's may exceed.

    References: Shejwalkar and Houmansadr 2021, equation 9.
    """

    def allowed(apart, honest):
        sums = engine.pairwise_sum(jnp.where(honest[:, None] & honest[None], apart, 0), (1,))
        return lambda distances: engine.pairwise_sum(jnp.where(honest, distances, 0), (0,)) <= sums.max()

    return _hiding(direction, allowed)


@validate.named_arguments
def mimic(client: NonNegativeInt = 0) -> Omniscient:
    """The message of one honest client, again and again: among unlike clients it outvotes the others' data.

    Args:
      client: the id of the one that is copied; where its message did not arrive, the honest one of the next id, and the
        first of all behind the last.

    References: Karimireddy, He and Jaggi 2022, section 3.2 (here the client is given, not searched for).
    """

    def send(key, cohort, bad, aggregate):
        honest = cohort.arrived & ~bad
        later = honest & (cohort.ids >= client)
        rank = jnp.argmax(jnp.where(later.any(), later, honest))
        return with_message(cohort.messages, bad, one_message(cohort.messages, rank))

    return Omniscient(send)


@validate.named_arguments
def fang(reach: Annotated[float, Number(1, open_low=True)] = 2.0) -> Omniscient:
    """Just outside of the honest range, at each coordinate on the side away from where the honest mean goes.

    Where the mean is positive, a number between the least honest value and that value times `reach` (divided by it if
    it is positive); else the mirror image. All attackers send the same draw, where the paper's draw each their own.

    Args:
      reach: b above 1.

    Guarantees: outside of the range, and within b of its end (tests/adversary/test_attacks.py::test_fang).

    References: Fang, Cao, Jia and Gong 2020, section 3.3 (trimmed mean and median, full knowledge).
    """

    def send(key, cohort, bad, aggregate):
        honest = (cohort.arrived & ~bad).astype(jnp.float32)

        def end(of, empty):
            return columnwise(cohort.messages, lambda x, here: of(jnp.where(here[:, None] > 0, x, empty), 0), honest)

        mean, low, high = honest_moments(cohort, bad).mean, end(jnp.min, jnp.inf), end(jnp.max, -jnp.inf)
        leaves, structure = jax.tree.flatten(mean)
        keys = jax.random.split(key, len(leaves))

        def drawn(key, mean, low, high):
            low, high = low.astype(mean.dtype), high.astype(mean.dtype)
            factor = 1 + (reach - 1) * jax.random.uniform(key, mean.shape, mean.dtype)
            below = jnp.where(low > 0, engine.divide(low, factor), low * factor)
            above = jnp.where(high < 0, engine.divide(high, factor), high * factor)
            return jnp.where(mean > 0, below, above)

        rest = (structure.flatten_up_to(x) for x in (low, high))
        message = structure.unflatten([drawn(*x) for x in zip(keys, leaves, *rest, strict=True)])
        return with_message(cohort.messages, bad, message)

    return Omniscient(send)


@validate.named_arguments
def adaptive(
    num_scales: Annotated[int, Integer(1, 64)] = 16, num_ascents: Annotated[int, Integer(0, 1024)] = 8
) -> Omniscient:
    """The message that moves this very aggregator far from the honest mean: a search along lines, then an ascent.

    First mean - gamma p is tried, for p the mean's direction, its signs and the standard deviations, and gamma in
    powers of two from 2^-4 to 2^(n - 5) times the honest messages' root mean square deviation over |p|. From the best
    of them the harm |aggregate - mean|^2 is ascended. Order statistics and choices have no derivative that helps, so
    each step takes the best of five messages: from the mean the way that the aggregate was moved (the gradient, where a
    rule moves every coordinate by the same factor), half, once and twice as far as the best so far; and that one plus
    and minus a random step, one sign for each coordinate, in proportion to the standard deviations. Where none is
    better the random steps become shorter.

    Args:
      num_scales: n, in [1, 64]; the rule is computed 3 n times.
      num_ascents: steps of the ascent, in [0, 1024]; the rule is computed five times in each.

    Guarantees: never less harmful than what it tries (tests/adversary/test_attacks.py::test_adaptive), and the ascent
    finds worse ones (::test_ascent).

    References: Shejwalkar and Houmansadr 2021, section 4 (aggregation known); Fang et al. 2020, section 3.2 (lambda by
    halving); Spall 1992 (simultaneous perturbation).
    """

    def send(key, cohort, bad, aggregate):
        found, honest = honest_moments(cohort, bad), cohort.arrived & ~bad
        own = jnp.where(honest, squared_distances(cohort.messages, found.mean), 0)
        spread = jnp.sqrt(engine.divide(engine.pairwise_sum(own, (0,)), jnp.maximum(found.number, 1)))

        def harm(message):
            moved = aggregate(with_message(cohort.messages, bad, message))
            away = jax.tree.map(lambda x, m: x.astype(m.dtype) - m, moved, found.mean)
            size = dot(away, away).astype(jnp.float32)
            return jnp.where(jnp.isfinite(size), size, -1), away  # a round that is skipped does no harm

        best = _along_lines(harm, found, spread, num_scales)
        best = _ascended(harm, found, key, best, num_ascents)
        return with_message(cohort.messages, bad, best[0])

    return Omniscient(send)


def _better(harm: Callable, state: tuple, message: PyTree) -> tuple:
    """The more harmful one of (message, its harm, how the aggregate was moved) and another message."""
    size, away = harm(message)
    return jax.tree.map(lambda new, old: jnp.where(size > state[1], new, old), (message, size, away), state)


def _line(start: PyTree, way: PyTree, length: Array) -> PyTree:
    """`length` from a point along a direction."""
    own = jnp.sqrt(dot(way, way))
    gamma = engine.divide(length, jnp.where(own > 0, own, 1))
    return jax.tree.map(lambda m, p: m + gamma.astype(m.dtype) * p.astype(m.dtype), start, way)


def _along_lines(harm: Callable, found: Honest, spread: Array, num_scales: int) -> tuple:
    """The most harmful of the messages along fixed directions, with its harm and how it moves the aggregate."""
    ways = jax.tree.map(lambda *x: jnp.stack(x), *(make(found.mean, found.std) for make in DIRECTIONS.values()))

    def one(i, state):
        way = jax.tree.map(lambda x: x[i // num_scales], ways)
        scale = power_of_two(i % num_scales - 4, jnp.float32)
        return _better(harm, state, _line(found.mean, way, -spread * scale))

    start = found.mean, jnp.float32(-2), tree.zeros_like(found.mean)
    return jax.lax.fori_loop(0, len(DIRECTIONS) * num_scales, one, start)


def _ascended(harm: Callable, found: Honest, key: Array, best: tuple, num_ascents: int) -> tuple:
    """A more harmful message, as `adaptive` says."""

    def ascent(i, state):
        best, reach = state
        away = jax.tree.map(jnp.subtract, best[0], found.mean)
        length = jnp.sqrt(dot(away, away))
        leaves, structure = jax.tree.flatten(found.std)
        keys = jax.random.split(jax.random.fold_in(key, i), len(leaves))
        signs = [jax.random.rademacher(k, x.shape, x.dtype) * x for k, x in zip(keys, leaves, strict=True)]
        signs = structure.unflatten(signs)
        tried = [_line(found.mean, best[2], c * length) for c in (0.5, 1.0, 2.0)]
        tried += [_line(best[0], signs, c * reach * length) for c in (1.0, -1.0)]
        stacked, last = jax.tree.map(lambda *x: jnp.stack(x), *tried), best[1]
        take = lambda k: jax.tree.map(lambda x: x[k], stacked)  # noqa: E731
        best = jax.lax.fori_loop(0, len(tried), lambda k, state: _better(harm, state, take(k)), best)
        return best, jnp.where(best[1] > last, reach, 0.7 * reach)

    return jax.lax.fori_loop(0, num_ascents, ascent, (best, jnp.float32(0.5)))[0]
