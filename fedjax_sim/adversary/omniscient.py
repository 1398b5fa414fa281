"""Published attacks on aggregation by who sees every honest message, and what the server makes of them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim import engine, validate
from fedjax_sim.adversary.kinds import Omniscient, dot, seen
from fedjax_sim.engine.messages import columnwise, gaps, inner_products, one_message, squared_distances, with_message
from fedjax_sim.types import PyTree

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
        found, honest = seen(cohort, bad), cohort.arrived & ~bad
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


def mimic(client: int = 0) -> Omniscient:
    """The message of one honest client, again and again: among unlike clients it outvotes the others' data.

    Args:
      client: the id of the one that is copied; where its message did not arrive, the honest one of the next id, and the
        first of all behind the last.

    References: Karimireddy, He and Jaggi 2022, section 3.2 (here the client is given, not searched for).
    """
    validate.integer("client", client, 0)

    def send(key, cohort, bad, aggregate):
        honest = cohort.arrived & ~bad
        later = honest & (cohort.ids >= client)
        rank = jnp.argmax(jnp.where(later.any(), later, honest))
        return with_message(cohort.messages, bad, one_message(cohort.messages, rank))

    return Omniscient(send)


def fang(reach: float = 2.0) -> Omniscient:
    """Just outside of the honest range, at each coordinate on the side away from where the honest mean goes.

    Where the mean is positive, a number between the least honest value and that value times `reach` (divided by it if
    it is positive); else the mirror image. All attackers send the same draw, where the paper's draw each their own.

    Args:
      reach: b above 1.

    Guarantees: outside of the range, and within b of its end (tests/adversary/test_attacks.py::test_fang).

    References: Fang, Cao, Jia and Gong 2020, section 3.3 (trimmed mean and median, full knowledge).
    """
    validate.in_range("reach", reach, 1, open_low=True)

    def send(key, cohort, bad, aggregate):
        honest = (cohort.arrived & ~bad).astype(jnp.float32)

        def end(of, empty):
            return columnwise(cohort.messages, lambda x, here: of(jnp.where(here[:, None] > 0, x, empty), 0), honest)

        mean, low, high = seen(cohort, bad).mean, end(jnp.min, jnp.inf), end(jnp.max, -jnp.inf)
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


def adaptive(num_scales: int = 16) -> Omniscient:
    """Of many messages, the one that moves this very aggregator furthest from the honest mean, tried one by one.

    Tried are mean - gamma p for p the mean's direction, its signs and the standard deviations, and gamma in powers of
    two from 2^-4 to 2^(n - 5) times the honest messages' root mean square deviation over |p|. Order statistics and
    choices have no useful derivative, so nothing ascends a gradient.

    Args:
      num_scales: n; the rule is computed 3 n times.

    Guarantees: never less harmful than what it tries (tests/adversary/test_attacks.py::test_adaptive).

    References: Shejwalkar and Houmansadr 2021, section 4 (aggregation known); Fang et al. 2020, section 3.2 (lambda by
    halving).
    """
    validate.integer("num_scales", num_scales, 1, 64)

    def send(key, cohort, bad, aggregate):
        found, honest = seen(cohort, bad), cohort.arrived & ~bad
        own = jnp.where(honest, squared_distances(cohort.messages, found.mean), 0)
        spread = jnp.sqrt(engine.divide(engine.pairwise_sum(own, (0,)), jnp.maximum(found.number, 1)))
        ways = [make(found.mean, found.std) for make in DIRECTIONS.values()]

        def message(way, scale):
            length = jnp.sqrt(dot(way, way))
            gamma = engine.divide(spread * scale, jnp.where(length > 0, length, 1))
            return jax.tree.map(lambda m, p: m - gamma.astype(m.dtype) * p, found.mean, way)

        def harm(way, scale):
            moved = aggregate(with_message(cohort.messages, bad, message(way, scale)))
            away = jax.tree.map(lambda x, m: x.astype(jnp.float32) - m.astype(jnp.float32), moved, found.mean)
            size = dot(away, away)
            return jnp.where(jnp.isfinite(size), size, -1)  # a round that is skipped does no harm

        scales = jnp.float32(2) ** jnp.arange(-4, num_scales - 4)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *ways)
        pairs = jnp.arange(len(ways) * num_scales)
        way_of = lambda i: jax.tree.map(lambda x: x[i // num_scales], stacked)  # noqa: E731
        harms = jax.lax.map(lambda i: harm(way_of(i), scales[i % num_scales]), pairs)
        best = jnp.argmax(harms)
        return with_message(cohort.messages, bad, message(way_of(best), scales[best % num_scales]))

    return Omniscient(send)
