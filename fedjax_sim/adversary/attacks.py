"""Published attacks on aggregation, for `corrupted`: what attackers send."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim import engine, validate
from fedjax_sim.adversary.byzantine import Alone, Omniscient, Together, seen
from fedjax_sim.engine.messages import columnwise, gaps, inner_products, one_message, squared_distances, with_message
from fedjax_sim.types import Array, PyTree

__all__ = [
    "adaptive",
    "alie",
    "fang",
    "forged_weight",
    "free_rider",
    "gaussian_noise",
    "inner_product",
    "large_value",
    "mimic",
    "min_max",
    "min_sum",
    "scaled",
    "sign_flip",
]


def _times(update: PyTree, factor: Array | float) -> PyTree:
    return jax.tree.map(lambda x: x * jnp.asarray(factor, x.dtype), update)


# ---- alone


def scaled(factor: float) -> Alone:
    """Its own update times a factor: model replacement, with a factor of (cohort's weight) / (own weight x server's
    rate) and training on data of the attacker's (Bagdasaryan et al. 2020, section 3.2).

    >>> import jax, jax.numpy as jnp
    >>> scaled(-10.0).send(jax.random.key(0), jnp.array([1.0, 2.0]), 3.0)[0].tolist()
    [-10.0, -20.0]
    """
    validate.in_range("factor", factor)
    return Alone(lambda key, update, weight: (_times(update, factor), weight))


def sign_flip() -> Alone:
    """Minus its own update."""
    return scaled(-1.0)


def free_rider() -> Alone:
    """Nothing: a zero update, with the weight of an honest one."""
    return scaled(0.0)


def large_value(value: float) -> Alone:
    """The same number at each coordinate.

    Args:
      value: up to 2^99 in magnitude; messages of 2^100 are lost.
    """
    validate.in_range("value", value)
    return Alone(lambda key, update, weight: (jax.tree.map(lambda x: jnp.full_like(x, value), update), weight))


def gaussian_noise(std: float) -> Alone:
    """Normal noise in place of an update, of its own in each round (Blanchard et al. 2017, section 5).

    Args:
      std: positive, of each coordinate.
    """
    validate.positive("std", std)

    def send(key, update, weight):
        leaves, structure = jax.tree.flatten(update)
        keys = jax.random.split(key, len(leaves))
        drawn = [jax.random.normal(k, x.shape, jnp.float32) * std for k, x in zip(keys, leaves, strict=True)]
        return structure.unflatten([y.astype(x.dtype) for x, y in zip(leaves, drawn, strict=True)]), weight

    return Alone(send)


def forged_weight(factor: float, attack: Alone | None = None) -> Alone:
    """A weight (number of examples) that is a lie; the update is its own, or another attack's.

    Args:
      factor: positive, of its honest weight.
    """
    validate.positive("factor", factor)
    if attack is not None:
        validate.part("attack", attack, Alone)

    def send(key, update, weight):
        update, weight = (update, weight) if attack is None else attack.send(key, update, weight)
        return update, weight * factor

    return Alone(send)


# ---- together: one message, from the honest ones' mean and standard deviation


def alie(z: float | None = None) -> Together:
    """A little is enough: mean - z std at each coordinate.

    Args:
      z: None = the largest that hides: with n messages, f of them attackers', and s = floor(n / 2 + 1) - f honest
        ones to be won over, Phi^-1((n - f - s) / (n - f)).

    Guarantees: the paper's z (tests/adversary/test_attacks.py::test_alie).

    References: Baruch, Baruch and Goldberg 2019, algorithm 3 and equation 1.
    """

    if z is not None:
        validate.in_range("z", z)

    def send(key, honest):
        n = honest.number + honest.attackers
        won = jnp.floor(n / 2 + 1) - honest.attackers
        share = engine.divide(honest.number - won, jnp.maximum(honest.number, 1))
        reach = jax.scipy.stats.norm.ppf(jnp.clip(share, 0.5, 1 - 2.0**-20)) if z is None else jnp.float32(z)
        return jax.tree.map(lambda m, s: m - reach.astype(m.dtype) * s, honest.mean, honest.std)

    return Together(send)


def inner_product(epsilon: float = 0.1) -> Together:
    """Inner product manipulation, "fall of empires": minus epsilon times the honest mean.

    Args:
      epsilon: positive; below 1 it hides among the honest messages, above it reverses the mean of few.

    References: Xie, Koyejo and Gupta 2020, section 4.
    """
    validate.positive("epsilon", epsilon)
    return Together(lambda key, honest: _times(honest.mean, -epsilon))


# ---- omniscient

DIRECTIONS = {
    "unit": lambda mean, std: _unit(mean),
    "sign": lambda mean, std: jax.tree.map(jnp.sign, mean),
    "std": lambda mean, std: std,
}


def _unit(point: PyTree) -> PyTree:
    length = jnp.sqrt(sum(engine.pairwise_sum((x * x).reshape(1, -1), (1,))[0] for x in jax.tree.leaves(point)))
    return jax.tree.map(lambda x: engine.divide(x, jnp.where(length > 0, length, 1).astype(x.dtype)), point)


def _hiding(direction: str, allowed: Callable, num_steps: int = 40) -> Omniscient:
    """mean - gamma p with the largest gamma that `allowed(distances, gaps, honest, number)` lets pass, by bisection.

    `distances(gamma)` are the squared ones of that message from each honest one.
    """
    validate.one_of("direction", direction, DIRECTIONS)

    def send(key, cohort, bad, aggregate):
        found, honest = seen(cohort, bad), cohort.arrived & ~bad
        way = DIRECTIONS[direction](found.mean, found.std)
        own = squared_distances(cohort.messages, found.mean)
        along = inner_products(cohort.messages, way) - _dot(found.mean, way)  # <u_i - mean, p>
        length = _dot(way, way)
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
        gamma, _ = jax.lax.fori_loop(0, num_steps, halve, (jnp.float32(0), high))
        message = jax.tree.map(lambda m, p: m - gamma.astype(m.dtype) * p, found.mean, way)
        return with_message(cohort.messages, bad, message)

    return Omniscient(send)


def _dot(a: PyTree, b: PyTree) -> Array:
    products = jax.tree.map(lambda x, y: (x * y).reshape(1, -1), a, b)
    return sum(engine.pairwise_sum(x, (1,))[0] for x in jax.tree.leaves(products))


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
        ends = [
            columnwise(cohort.messages, lambda x, here, end=end: jnp.where(here[:, None] > 0, x, end).min(0), honest)
            if end > 0
            else columnwise(
                cohort.messages, lambda x, here, end=end: jnp.where(here[:, None] > 0, x, end).max(0), honest
            )
            for end in (jnp.inf, -jnp.inf)
        ]
        mean, (low, high) = seen(cohort, bad).mean, ends
        leaves, structure = jax.tree.flatten(mean)
        keys = jax.random.split(key, len(leaves))

        def drawn(key, mean, low, high):
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
            length = jnp.sqrt(_dot(way, way))
            gamma = engine.divide(spread * scale, jnp.where(length > 0, length, 1))
            return jax.tree.map(lambda m, p: m - gamma.astype(m.dtype) * p, found.mean, way)

        def harm(way, scale):
            moved = aggregate(with_message(cohort.messages, bad, message(way, scale)))
            away = jax.tree.map(lambda x, m: x.astype(jnp.float32) - m.astype(jnp.float32), moved, found.mean)
            size = _dot(away, away)
            return jnp.where(jnp.isfinite(size), size, -1)  # a round that is skipped does no harm

        scales = jnp.float32(2) ** jnp.arange(-4, num_scales - 4)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *ways)
        pairs = jnp.arange(len(ways) * num_scales)
        way_of = lambda i: jax.tree.map(lambda x: x[i // num_scales], stacked)  # noqa: E731
        harms = jax.lax.map(lambda i: harm(way_of(i), scales[i % num_scales]), pairs)
        best = jnp.argmax(harms)
        return with_message(cohort.messages, bad, message(way_of(best), scales[best % num_scales]))

    return Omniscient(send)
