"""Integer noise, for sums that only secure aggregation sees: messages, sums and accounting are exact.

An update is clipped to a norm C, divided by the granularity gamma, rounded at random to integers and given a share of
integer noise (`alias`); `modular_sum` adds the messages, and the server multiplies the sum by gamma. Rounding may
lengthen an update, so it is repeated until the norm is at most, in units of gamma and with c = C / gamma in d
dimensions,

    D(d) = min(c + sqrt(d), sqrt(c^2 + d/4 + sqrt(2 log(1/beta)) (c + sqrt(d)/2))),

which each try meets with probability 1 - beta at least; after 32 misses it is rounded towards zero, which lengthens
nothing. So D(d) always holds, and it is D(d), not c, that an accountant must set against the noise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import engine, prng, tree, validate
from fedjax_sim.transform.alias import TAIL, alias_table, draw_integers, tail_of
from fedjax_sim.transform.clip import check_clip_norm, clip, clip_metrics, clipped, length_over, slack
from fedjax_sim.transform.noise import check_cohort, check_multiplier
from fedjax_sim.types import Array, Mean, Noise, PyTree, UpdateTransform, Wire

__all__ = ["IntegerNoise", "discrete_gaussian_mechanism", "skellam_mechanism"]

TRIES = 32  # of the rounding
MAX_CELLS = 1 << 15
MAX_STD = 1024.0  # of the noise of one message, where the granularity is chosen here
MAX_UNITS = 2.0**20  # in a clip norm: float32 then still has a few bits for the fraction


class IntegerNoise(NamedTuple):
    """What an accountant must know of integer noise. Lengths are in grid units, each `granularity` long."""

    granularity: float  # gamma, length of one grid unit in the update's units
    cohort_size: int  # messages whose shares of the noise add up to the multiplier
    clip_units: float  # c = clip norm / gamma, before rounding
    message_std: float  # of one message's share: the discrete Gaussian's sigma, the square root of Skellam's variance
    beta: float  # of the conditional rounding
    table_error: float  # total variation between one drawn integer and its law, at most
    tail: int  # no drawn integer is larger

    @property
    def sum_std(self) -> float:
        """Of the noise in the sum of `cohort_size` messages, in grid units."""
        return self.message_std * math.sqrt(self.cohort_size)

    def rounded_norm(self, dimension: int) -> float:
        """D(d): no message of d numbers is longer, in grid units, before its noise."""
        c, root = self.clip_units, math.sqrt(dimension)
        likely = c * c + dimension / 4 + math.sqrt(2 * math.log(1 / self.beta)) * (c + root / 2)
        return min(c + root, math.sqrt(likely))

    def rounded_l1(self, dimension: int) -> float:
        """The most that a message's magnitudes add up to, in grid units: integers, so no more than their squares do."""
        norm = self.rounded_norm(dimension)
        return min(math.sqrt(dimension) * norm, norm * norm)

    def multiplier(self, dimension: int) -> float:
        """The sum's noise over what one message of d numbers moves it by: below the noise multiplier asked for."""
        return self.sum_std / self.rounded_norm(dimension)

    def sum_error(self, dimension: int, num_messages: int | None = None) -> float:
        """Total variation between the noise of a sum and its law, at most: what (1 + e^epsilon) times adds to delta."""
        return self.table_error * dimension * (self.cohort_size if num_messages is None else num_messages)


def discrete_gaussian_mechanism(
    clip_norm: float,
    noise_multiplier: float,
    cohort_size: int,
    *,
    granularity: float | None = None,
    bits: int = 32,
    beta: float = 0.6065,
) -> UpdateTransform:
    """Distributed discrete Gaussian: integer messages, each with a share of discrete Gaussian noise.

    The sum of m messages holds noise of std z C in the update's units; it is not exactly a discrete Gaussian, but as
    close to one as the reference's theorem 11 states. See `distributed_gaussian` for rounds with fewer messages.

    Args:
      clip_norm: C in [1e-9, 1e9].
      noise_multiplier: z > 0, relative to C; relative to the norm that a rounded update may have it is
        `noise.details.multiplier(d)`.
      cohort_size: m, the number of messages that the noise relies on.
      granularity: gamma > 0; by default the finest for which twice as many messages fit the modulus, a message's noise
        has a std of at most 1,024 units and C is at most 2^20 units.
      bits: of the modulus, and of each number on the wire.
      beta: in (0, 1); each try to round fails with at most this probability. The default is about e^(-1/2).

    Returns: a transform for `modular_sum(denominator, modulus_bits=bits)` whose `noise.details` is an `IntegerNoise`.

    Raises: ValueError for a noise that no table holds, or that is too small for its grid; for too few bits.

    Guarantees: rounded updates are no longer than D(d), which plain rounding would not ensure
    (tests/transform/test_discrete.py::test_rounding_cannot_lengthen); drawn integers follow the law
    (::test_draws_follow_their_law) and the table is within its stated error (::test_tables_are_exact); modular sums
    decode to the sum of the rounded updates and their noise, exactly (::test_modular_sums_decode_exactly).

    References: Kairouz, Liu and Steinke 2021, algorithm 1 and theorem 11; Canonne, Kamath and Steinke 2020.

    >>> made = discrete_gaussian_mechanism(1.0, 1.0, 100, granularity=0.01)
    >>> made.facts.noise.details.message_std, round(made.facts.noise.details.multiplier(1000), 3)
    (10.0, 0.982)
    """
    numbers = {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier, "cohort_size": cohort_size}
    return _mechanism("discrete_gaussian", **numbers, granularity=granularity, bits=bits, beta=beta)


def skellam_mechanism(
    clip_norm: float,
    noise_multiplier: float,
    cohort_size: int,
    *,
    granularity: float | None = None,
    bits: int = 32,
    beta: float = 0.6065,
) -> UpdateTransform:
    """Distributed Skellam: integer messages, each with a share of Skellam noise, the difference of two Poissons.

    Sums of Skellam variables are Skellam, so the sum of m messages holds it exactly, of std z C in the update's units;
    one draw from a table of that law takes the place of two Poisson draws. Arguments, result, errors and guarantees are
    those of `discrete_gaussian_mechanism`.

    Guarantees: tests/transform/test_discrete.py::test_rounding_cannot_lengthen, ::test_draws_follow_their_law,
    ::test_tables_are_exact, ::test_modular_sums_decode_exactly.

    References: Agarwal, Kairouz and Liu 2021, algorithm 1 and theorem 3.5; Skellam 1946.

    >>> skellam_mechanism(1.0, 1.0, 100, granularity=0.01).facts.noise.mechanism
    'skellam'
    """
    numbers = {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier, "cohort_size": cohort_size}
    return _mechanism("skellam", **numbers, granularity=granularity, bits=bits, beta=beta)


def _check(**given) -> None:
    for name, value in given.items():
        if isinstance(value, jax.core.Tracer):
            validate.fail(name, "a Python number", value, "The table of the noise is made on the host.", TypeError)
    check_clip_norm(given["clip_norm"])
    check_multiplier(given["noise_multiplier"], open_low=True)
    validate.integer("cohort_size", given["cohort_size"])
    validate.integer("bits", given["bits"], 2, 32)
    validate.in_range("beta", given["beta"], 0, 1, open_low=True, open_high=True)
    if given["granularity"] is not None:
        validate.positive("granularity", given["granularity"])


def _mechanism(
    law: str, *, clip_norm: float, noise_multiplier: float, cohort_size: int, granularity: float | None, bits: int, beta
) -> UpdateTransform:
    """Both mechanisms, which differ in the law of the noise only."""
    numbers = {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier, "cohort_size": cohort_size}
    _check(**numbers, granularity=granularity, bits=bits, beta=beta)
    if granularity is None:
        granularity = _finest(clip_norm, noise_multiplier, cohort_size, bits)
    units, std = clip_norm / granularity, noise_multiplier * clip_norm / granularity / math.sqrt(cohort_size)
    hint = f"A message's noise is {std:.3g} grid units and the clip norm {units:.3g}: choose another granularity."
    if not (std >= 0.5 and units <= MAX_UNITS and 2 * tail_of(law, std) + 1 <= MAX_CELLS):
        rule = "a grid with noise of 0.5 to about 1,600 units on a message and at most 2^20 units in the clip norm"
        validate.fail("granularity", rule, granularity, hint)
    tail = tail_of(law, std)
    details = IntegerNoise(granularity, cohort_size, units, std, beta, 2.0**-63, tail)
    most = math.floor(units) + 1 + tail
    base = clip(clip_norm)

    def on_client(key, update, state, memory):
        message, seen = clipped(key, update, clip_norm, narrow=False)
        message = jax.tree.map(lambda x: (x * (1 / granularity)).astype(jnp.float32), message)
        message, tries = _rounded(prng.stream(key, "rounding"), message, details)
        noise = draw_integers(prng.stream(key, "noise"), message, alias_table(law, std))
        return jax.tree.map(jnp.add, message, noise), memory, seen | {"rounding_tries": Mean(tries, jnp.float32(1))}

    def on_server(key, cohort, aggregate, state, measured, sensitivity):
        check_cohort(cohort, cohort_size)
        decoded = jax.tree.map(lambda x: x.astype(jnp.float32) * granularity, aggregate)
        return engine.rounded_here(decoded, key), state, clip_metrics(measured)

    def squared_error(update):
        dimension = tree.num_values(update)
        rounding = granularity * math.sqrt(dimension * min(1, 0.25 / (1 - beta)))
        return (jnp.sqrt(base.squared_error(update)) + rounding) ** 2 + dimension * (std * granularity) ** 2

    made = base._replace(
        on_client=on_client,
        on_server=on_server,
        wire=lambda update_spec, wire: Wire(tree.num_values(update_spec), bits * tree.num_values(update_spec)),
        squared_error=squared_error,
    )
    return made.stating(
        l2_bound=None,
        nonexpansive=False,
        exact_error=False,
        integer_range=(-most, most),
        noise=Noise(law, "distributed", noise_multiplier, clip_norm, "client", details=details),
    )


def _finest(clip_norm: float, noise_multiplier: float, cohort_size: int, bits: int) -> float:
    """The finest granularity for which twice the cohort fits the modulus, and the noise its table."""
    room = 2 ** (bits - 2) / cohort_size - 2 * TAIL / 3 - 3  # units that an update may have
    std = noise_multiplier / math.sqrt(cohort_size)  # of a message, in clip norms
    if not (room > 1 + math.sqrt(2 * TAIL) * std):
        hint = f"{cohort_size} messages and their noise need more bits, or a granularity of your own."
        validate.fail("bits", "a modulus that twice the cohort fits", bits, hint)
    return clip_norm * max((1 + math.sqrt(2 * TAIL) * std) / room, std / MAX_STD, 1 / MAX_UNITS)


def _rounded(key: Array, message: PyTree, noise: IntegerNoise) -> tuple[PyTree, Array]:
    """(int32 message no longer than D(d), tries): rounded at random until it is; towards zero after 32 misses."""
    leaves, structure = jax.tree.flatten(message)
    filled = [x for x in leaves if x.size]
    if not filled:
        return jax.tree.map(lambda x: x.astype(jnp.int32), message), jnp.float32(0)
    leaves = engine.rounded_here(leaves, key)
    limit, room = noise.rounded_norm(sum(x.size for x in leaves)), 1 - slack(filled, 4)

    def again(carry):
        tries = carry[0]
        own = jax.random.fold_in(key, tries)
        tried = [prng.stochastic_round(jax.random.fold_in(own, i), x) for i, x in enumerate(leaves)]
        return tries + 1, length_over(tried, limit)[0] <= room, tried

    def unfinished(carry):
        return (carry[0] < TRIES) & ~carry[1]

    start = jnp.zeros((), jnp.int32), jnp.asarray(False), leaves
    tries, done, tried = jax.lax.while_loop(unfinished, again, start)
    kept = [jnp.where(done, new, jnp.trunc(x)).astype(jnp.int32) for new, x in zip(tried, leaves, strict=True)]
    return structure.unflatten(kept), tries.astype(jnp.float32)
