"""Integer noise for distributed differential privacy, where messages, sums and accounting are exact.

It is for sums that only secure aggregation reveals. An update is clipped to a norm C, divided by the granularity gamma,
rounded at random to integers, and given a share of integer noise (`alias`). `modular_sum` adds the messages, and the
server multiplies the sum by gamma.

Rounding may lengthen an update. So it is repeated until the norm is at most D(d), in units of gamma, with c = C / gamma
in d dimensions:

    D(d) = min(c + sqrt(d), sqrt(c^2 + d/4 + sqrt(2 log(1/beta)) (c + sqrt(d)/2))).

Each try meets this bound with probability at least 1 - beta. After 32 misses the update is rounded towards zero, which
never lengthens it. So D(d) always holds, and an accountant must compare the noise with D(d), not with c.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from fedjax_sim import prng, tree, validate
from fedjax_sim.transform.alias import TAIL, alias_table, draw_integers, tail_of
from fedjax_sim.transform.clip import check_clip_norm, clip, clip_error, clip_metrics, clipped, length_over, slack
from fedjax_sim.transform.noise import check_cohort, check_multiplier
from fedjax_sim.types import Array, Mean, Noise, PyTree, UpdateTransform, Wire

TRIES = 32  # random roundings, before an update is rounded towards zero
MAX_CELLS = 1 << 15  # of a table for the noise
MAX_STD = 1024.0  # of the noise of a message, in grid units, if the granularity is chosen here
MAX_UNITS = 2.0**20  # grid units in a clip norm: float32 then still has a few bits for the fraction


class IntegerNoise(NamedTuple):
    """An `IntegerNoise` states what an accountant must know of integer noise.

    Lengths are in grid units, each `granularity` long.
    """

    granularity: float  # gamma, the length of a grid unit in the update's units
    cohort_size: int  # the number of messages whose shares of the noise add up to the multiplier
    clip_units: float  # c = clip norm / gamma, before rounding
    message_std: float  # of a message's share: the discrete Gaussian's sigma, or the square root of Skellam's variance
    beta: float  # each try of the rounding fails with at most this probability
    table_error: float  # at most, the total variation between a drawn integer and its distribution
    tail: int  # no drawn integer is larger in magnitude

    @property
    def sum_std(self) -> float:
        """The standard deviation of the noise in the sum of `cohort_size` messages, in grid units."""
        return self.message_std * math.sqrt(self.cohort_size)

    def rounded_norm(self, dimension: int) -> float:
        """Returns D(d): before its noise, no message of d numbers is longer, in grid units."""
        c = self.clip_units
        root = math.sqrt(dimension)
        likely_square = c * c + dimension / 4 + math.sqrt(2 * math.log(1 / self.beta)) * (c + root / 2)
        return min(c + root, math.sqrt(likely_square))

    def rounded_l1(self, dimension: int) -> float:
        """Bounds the L1 norm of a message of d numbers before its noise, in grid units."""
        norm = self.rounded_norm(dimension)
        # By Cauchy and Schwarz; and the magnitude of an integer is at most its square.
        return min(math.sqrt(dimension) * norm, norm * norm)

    def multiplier(self, dimension: int) -> float:
        """Returns the sum's noise over D(d), by which a message moves the sum; below the given noise multiplier."""
        return self.sum_std / self.rounded_norm(dimension)

    def sum_error(self, dimension: int, num_messages: int | None = None) -> float:
        """Bounds the total variation between the noise of a sum and its distribution.

        An accountant adds (1 + e^epsilon) times this bound to delta.

        Args:
          dimension: d, the numbers of a message.
          num_messages: in the sum; None = `cohort_size`.
        """
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
    """Sends integer messages, each with a share of discrete Gaussian noise (distributed discrete Gaussian).

    The sum of m messages holds noise of standard deviation z C in the update's units. This noise is not exactly a
    discrete Gaussian, but as close to it as theorem 11 of the reference states. For rounds with fewer messages, see
    `distributed_gaussian`.

    Args:
      clip_norm: C in [1e-9, 1e9].
      noise_multiplier: z > 0, relative to C. Relative to the norm that a rounded update may have, the multiplier is
        `noise.details.multiplier(d)`.
      cohort_size: m, the number of messages that the noise relies on.
      granularity: gamma > 0. None: the finest for which twice as many messages fit the modulus, the noise of a message
        has a standard deviation of at most 1,024 grid units, and C is at most 2^20 grid units.
      bits: in [2, 32], of the modulus, and of each number that is sent.
      beta: in (0, 1); each try of the rounding fails with at most this probability. The default is about e^(-1/2).

    Returns: a transform for `modular_sum(denominator, modulus_bits=bits)`; its `noise.details` is an `IntegerNoise`.

    Raises: ValueError for a noise that no table holds, or that is too small for its grid, and for too few bits.

    Guarantees:
      - rounded updates are no longer than D(d), which plain rounding would not ensure
        (tests/transform/test_discrete.py::test_rounding_cannot_lengthen)
      - drawn integers follow the distribution (::test_draws_follow_their_law), and the table is within its stated error
        (::test_tables_are_exact)
      - modular sums decode to the sum of the rounded updates and their noise, exactly
        (::test_modular_sums_decode_exactly)

    References: Kairouz, Liu and Steinke 2021, algorithm 1 and theorem 11; Canonne, Kamath and Steinke 2020.

    >>> details = discrete_gaussian_mechanism(1.0, 1.0, 100, granularity=0.01).facts.noise.details
    >>> details.message_std, round(details.multiplier(1000), 3)
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
    """Sends integer messages, each with a share of Skellam noise (distributed Skellam mechanism).

    A Skellam variable is the difference of two Poisson variables; it is drawn from a table. Sums of Skellam variables
    are Skellam. So the noise in the sum of m messages is exactly Skellam, with a standard deviation of z C in the
    update's units.

    Args:
      clip_norm: C in [1e-9, 1e9].
      noise_multiplier: z > 0, relative to C.
      cohort_size: m, the number of messages that the noise relies on.
      granularity: gamma > 0, or None, as in `discrete_gaussian_mechanism`.
      bits: in [2, 32], of the modulus, and of each number that is sent.
      beta: in (0, 1); each try of the rounding fails with at most this probability.

    Returns: a transform as that of `discrete_gaussian_mechanism`.

    Raises: ValueError as `discrete_gaussian_mechanism`.

    Guarantees: drawn integers follow the distribution (tests/transform/test_discrete.py::test_draws_follow_their_law),
    the table is within its stated error (::test_tables_are_exact), and modular sums decode to the sum of the rounded
    updates and their noise, exactly (::test_modular_sums_decode_exactly). Rounding is that of
    `discrete_gaussian_mechanism`, and no rounded update is longer than D(d) (::test_rounding_cannot_lengthen).

    References: Agarwal, Kairouz and Liu 2021, algorithm 1 and theorem 3.5; Skellam 1946.

    >>> skellam_mechanism(1.0, 1.0, 100, granularity=0.01).facts.noise.mechanism
    'skellam'
    """
    numbers = {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier, "cohort_size": cohort_size}
    return _mechanism("skellam", **numbers, granularity=granularity, bits=bits, beta=beta)


def _check(**options) -> None:
    """Checks the options of both mechanisms."""
    for name, value in options.items():
        if isinstance(value, Tracer):
            validate.fail(name, "a Python number", value, "The table of the noise is made on the host.", TypeError)
    check_clip_norm(options["clip_norm"])
    check_multiplier(options["noise_multiplier"], open_low=True)
    validate.integer("cohort_size", options["cohort_size"])
    validate.integer("bits", options["bits"], 2, 32)
    validate.in_range("beta", options["beta"], 0, 1, open_low=True, open_high=True)
    if options["granularity"] is not None:
        validate.positive("granularity", options["granularity"])


def _mechanism(
    law: str, *, clip_norm: float, noise_multiplier: float, cohort_size: int, granularity: float | None, bits: int, beta
) -> UpdateTransform:
    """Makes either mechanism; the two differ only in the distribution of the noise.

    A message is R(g min(1, C / |g|) / gamma) + X, where R rounds at random to integers of norm at most D(d). X is noise
    of standard deviation z C / (gamma sqrt(m)), in grid units.

    Args:
      law: "discrete_gaussian" or "skellam", of X.
      clip_norm: C in [1e-9, 1e9].
      noise_multiplier: z > 0.
      cohort_size: m, the number of messages that the noise relies on.
      granularity: gamma > 0, in the update's units; None = `_finest`.
      bits: in [2, 32], of the modulus.
      beta: in (0, 1); each try of the rounding fails with at most this probability.

    Raises: ValueError for options out of range, and for a noise that no table holds; TypeError for a traced option.
    """
    numbers = {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier, "cohort_size": cohort_size}
    _check(**numbers, granularity=granularity, bits=bits, beta=beta)
    if granularity is None:
        granularity = _finest(clip_norm, noise_multiplier, cohort_size, bits)
    units = clip_norm / granularity
    std = noise_multiplier * clip_norm / granularity / math.sqrt(cohort_size)  # of a message's noise, in grid units
    hint = f"A message's noise is {std:.3g} grid units and the clip norm {units:.3g}: choose another granularity."
    if not (std >= 0.5 and units <= MAX_UNITS and 2 * tail_of(law, std) + 1 <= MAX_CELLS):
        rule = "a grid with noise of 0.5 to about 1,600 units on a message and at most 2^20 units in the clip norm"
        validate.fail("granularity", rule, granularity, hint)
    tail = tail_of(law, std)
    details = IntegerNoise(
        granularity=granularity,
        cohort_size=cohort_size,
        clip_units=units,
        message_std=std,
        beta=beta,
        table_error=2.0**-63,
        tail=tail,
    )
    largest_integer = math.floor(units) + 1 + tail
    base = clip(clip_norm)

    def on_client(key, update, state, memory):
        message, measured = clipped(key, update, clip_norm, narrow=False)
        message = jax.tree.map(lambda x: (x * (1 / granularity)).astype(jnp.float32), message)
        message, tries = _rounded(prng.stream(key, "rounding"), message, details)
        noise = draw_integers(prng.stream(key, "noise"), message, alias_table(law, std))
        measured = measured | {"rounding_tries": Mean(tries, jnp.float32(1))}
        return jax.tree.map(jnp.add, message, noise), memory, measured

    def on_server(key, cohort, aggregate, state, measured, sensitivity):  # noqa: PLR0917 - called by position
        check_cohort(cohort, cohort_size)
        decoded = jax.tree.map(lambda x: x.astype(jnp.float32) * granularity, aggregate)
        return decoded, state, clip_metrics(measured)

    def squared_error(update):
        dimension = tree.num_values(update)
        # Rounding adds at most 1/4 to the variance of a number; conditioning on a try that succeeds divides by 1 -
        # beta.
        rounding_error = granularity * math.sqrt(dimension * min(1, 0.25 / (1 - beta)))
        return (jnp.sqrt(clip_error(update, clip_norm)) + rounding_error) ** 2 + dimension * (std * granularity) ** 2

    mechanism = base._replace(
        on_client=on_client,
        on_server=on_server,
        wire=lambda update_spec, wire: Wire(tree.num_values(update_spec), bits * tree.num_values(update_spec)),
        squared_error=squared_error,
    )
    return mechanism.stating(
        l2_bound=None,
        nonexpansive=False,
        exact_error=False,
        integer_range=(-largest_integer, largest_integer),
        noise=Noise(law, "distributed", noise_multiplier, clip_norm, "client", details=details),
    )


def _finest(clip_norm: float, noise_multiplier: float, cohort_size: int, bits: int) -> float:
    """The finest granularity for which twice the cohort fits the modulus, and the noise fits its table."""
    room = 2 ** (bits - 2) / cohort_size - 2 * TAIL / 3 - 3  # the grid units that an update and its noise may have
    std = noise_multiplier / math.sqrt(cohort_size)  # of a message's noise, in clip norms
    if not (room > 1 + math.sqrt(2 * TAIL) * std):
        hint = f"{cohort_size} messages and their noise need more bits, or a granularity of your own."
        validate.fail("bits", "a modulus that twice the cohort fits", bits, hint)
    return clip_norm * max((1 + math.sqrt(2 * TAIL) * std) / room, std / MAX_STD, 1 / MAX_UNITS)


def _rounded(key: Array, message: PyTree, noise: IntegerNoise) -> tuple[PyTree, Array]:
    """Rounds a message to int32 at random until it is no longer than D(d), or towards zero after 32 misses.

    Args:
      key: of the client's rounding; each try and each leaf has a key of its own.
      message: leaves of float32 in grid units, d numbers in all, no longer than c.
      noise: states D.

    Returns: (message, leaves int32; number of tries, [] float32 in [1, 32], or 0 for a message without numbers).
    """
    leaves, structure = jax.tree.flatten(message)
    filled = [x for x in leaves if x.size]
    if not filled:
        return jax.tree.map(lambda x: x.astype(jnp.int32), message), jnp.float32(0)
    limit = noise.rounded_norm(sum(x.size for x in leaves))
    room = 1 - slack(filled, 4)  # the computed norm may be too small by its rounding error

    def try_to_round(carry):
        tries = carry[0]
        keys = prng.fold_in(prng.fold_in(key, tries), jnp.arange(len(leaves)))
        rounded = [prng.stochastic_round(leaf_key, x) for leaf_key, x in zip(keys, leaves, strict=True)]
        return tries + 1, length_over(rounded, limit)[0] <= room, rounded

    def goes_on(carry):
        return (carry[0] < TRIES) & ~carry[1]

    start = jnp.zeros((), jnp.int32), jnp.asarray(False), leaves
    tries, is_short_enough, rounded = jax.lax.while_loop(goes_on, try_to_round, start)
    integers = [
        jnp.where(is_short_enough, new, jnp.trunc(x)).astype(jnp.int32) for new, x in zip(rounded, leaves, strict=True)
    ]
    return structure.unflatten(integers), tries.astype(jnp.float32)
