"""Gaussian noise for client-level differential privacy: a clip at the client, and noise in one of three places.

    place          who is trusted                          std of the noise       in the mean of m updates
    central        the server: noise once, on the sum      z C on the sum         z C / m
    distributed    secure aggregation: shares add up       z C / sqrt(m) each     z C / m
    local          nobody                                  z C on each update     z C / sqrt(m)

C is the clip norm, and z the noise multiplier. Adding or removing a client moves the sum by at most C. Replacing a
client moves the sum, or a single message, by up to 2 C. The numerics are idealised: float32 noise from JAX's generator
simulates a mechanism, and does not protect a deployment (Mironov 2012).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.core import Tracer

from fedjax_sim import prng, tree, validate
from fedjax_sim.transform.chain import plain_wire
from fedjax_sim.transform.clip import HIGH, LOW, check_clip_norm, clip, clip_error, clip_metrics, clipped, scaled_wire
from fedjax_sim.transform.noise import check_cohort, check_mean, check_multiplier, check_sensitivity
from fedjax_sim.types import Array, Noise, PyTree, TransformFacts, UpdateTransform, Wire
from fedjax_sim.validate import Positive, PositiveInt, Share

WARNING = "The noise is that of a cohort of noise_cohort_size clients: an epsilon holds at that size only."


def gaussian_mechanism(
    clip_norm: float, noise_multiplier: float, *, noise_cohort_size: int | None = None
) -> UpdateTransform:
    """Clips updates to a norm C, and adds N(0, (z C)^2) once to their sum (central differential privacy).

    The standard deviation of the noise on the aggregate is z C times the aggregator's sensitivity, such as z C / m
    under `fixed_mean(m)`. The noise is drawn after the sum over chunks and devices, also in a round without messages,
    since whether there is noise must not depend on data. The server sees messages without noise, and is trusted.

    Args:
      clip_norm: C in [1e-9, 1e9].
      noise_multiplier: z >= 0; 0 gives no privacy.
      noise_cohort_size: M, to simulate the noise of a large cohort with a small cohort: the noise on the mean has
        standard deviation z C / M. WARNING: every epsilon then holds for cohorts of M clients only, and not for the
        simulated run. It needs a mean over the cohort, `fixed_mean(m)` with m <= M. `noise.details` has M and the
        warning. None = the cohort's own size.

    Returns: a transform whose `noise` has place "central"; its metrics are those of `clip`.

    Raises: ValueError for options out of range and, when traced, for an aggregate without a bounded sensitivity.

    Guarantees:
      - the standard deviation of the noise is within 1 % of the stated one for every chunk size, number of devices and
        dtype, and its draws are independent over coordinates and rounds
        (tests/transform/test_gaussian.py::test_central_noise_level, ::test_noise_is_independent)
      - the bits are the same on one device and on two (::test_devices_and_chunks)
      - one client moves the aggregate by at most C times the sensitivity
        (tests/transform/test_clip.py::test_neighbouring_cohorts)
      - the variance in the mean falls as 1/m^2 (tests/transform/test_gaussian.py::test_central_against_local)

    References: McMahan et al. 2018 (DP-FedAvg), algorithm 1; Abadi et al. 2016.

    >>> gaussian_mechanism(1.0, 0.5).facts.noise.place
    'central'
    """
    base = clip(clip_norm)
    check_multiplier(noise_multiplier)
    details = None
    if noise_cohort_size is not None:
        validate.integer("noise_cohort_size", noise_cohort_size)
        details = {"noise_cohort_size": noise_cohort_size, "warning": WARNING}

    def on_server(key, cohort, aggregate, state, measured, sensitivity):  # noqa: PLR0917 - called by position
        check_sensitivity(sensitivity)
        if noise_cohort_size is not None:
            check_mean(sensitivity)
            hint = "It simulates a larger cohort, not a smaller one."
            validate.integer("noise_cohort_size", noise_cohort_size, math.ceil(1 / sensitivity * (1 - 1e-6)), hint=hint)
            sensitivity = 1 / noise_cohort_size
        noisy = _with_noise(key, aggregate, noise_multiplier * clip_norm * sensitivity)
        return noisy, state, clip_metrics(measured)

    noise = Noise("gaussian", "central", noise_multiplier, clip_norm, "client", details=details)
    return base._replace(on_server=on_server).stating(releases_when_empty=True, noise=noise)


@validate.named_arguments
def adaptive_clip(
    noise_multiplier: float,
    *,
    initial_clip_norm: float,
    quantile_noise: float,
    target_quantile: Share = 0.5,
    learning_rate: Positive = 0.2,
) -> UpdateTransform:
    """Adds central noise to clipped updates, with a clip norm that follows a private quantile of the updates' norms.

    Each message has one more bit: b_i = 1 if |g_i| <= C. With m = 1 / sensitivity, the server computes

        b = 1/2 + (sum_i (b_i - 1/2) + N(0, quantile_noise^2)) / m,   C <- C exp(-learning_rate (b - target_quantile))

    The sum of the clipped updates gets noise of standard deviation z_update C, where
    z_update^-2 = z^-2 - (2 quantile_noise)^-2. Both releases together are as private as one Gaussian mechanism of
    multiplier z < z_update. C is the server's state, within [1e-9, 1e9].

    Args:
      noise_multiplier: z in (0, 2 quantile_noise), of both releases together.
      initial_clip_norm: C of the first round; a low C rises by a factor of up to exp(learning_rate) in a round.
      quantile_noise: the standard deviation of the noise on the count; the paper takes m / 20.
      target_quantile: the share of updates that should not be clipped, in [0, 1].
      learning_rate: positive, of log C.

    Returns: a transform for a mean over the cohort, `fixed_mean(m)`. Its `noise` has the multiplier z. Its `clip_norm`
    is that of the first round only, since the noise follows C. Its `details` have `adaptive`, `update_multiplier` and
    `quantile_noise`. Metrics: `clip_norm` of the round, and the metrics of `clip`, which are not private.

    Raises: ValueError for a count whose noise alone spends the privacy budget and, when traced, for an aggregate that
      is not a mean.

    Guarantees:
      - C converges to the quantile (tests/transform/test_gaussian.py::test_clip_norm_finds_the_quantile)
      - both noises have the stated level (::test_adaptive_noise_level)

    References: Andrew, Thakkar, McMahan and Ramaswamy 2021, algorithm 1 and theorem 1.

    >>> noise = adaptive_clip(1.0, initial_clip_norm=0.1, quantile_noise=5.0).facts.noise
    >>> round(noise.details["update_multiplier"], 4)
    1.005
    """
    check_multiplier(noise_multiplier, open_low=True)
    check_clip_norm(initial_clip_norm, "initial_clip_norm")
    hint = "At or below half the noise multiplier, the noise on the count alone spends the budget."
    lowest = 0 if isinstance(noise_multiplier, Tracer) else noise_multiplier / 2
    validate.in_range("quantile_noise", quantile_noise, lowest, open_low=True, hint=hint)
    update_multiplier = noise_multiplier * (1 - (noise_multiplier / quantile_noise / 2) ** 2) ** -0.5

    def on_client(key, update, state, memory):
        clip_norm = state
        message, measured = clipped(key, update, clip_norm)
        return message, memory, measured

    def on_server(key, cohort, aggregate, state, measured, sensitivity):  # noqa: PLR0917 - called by position
        check_sensitivity(sensitivity)
        check_mean(sensitivity)
        num_clipped, num_messages = measured["clipped_update_share"]
        noise = quantile_noise * prng.normal(prng.stream(key, "quantile"))
        # The noisy share b of updates that are not clipped: sum_i (b_i - 1/2) = (messages - clipped) - messages / 2.
        share = 0.5 + (num_messages / 2 - num_clipped + noise) * sensitivity
        factor = jnp.exp(-learning_rate * (share - target_quantile))
        next_clip_norm = jnp.clip(state * factor, LOW, HIGH)
        # This round's updates were clipped to the old C, so their noise follows the old C.
        noisy = _with_noise(prng.stream(key, "update"), aggregate, update_multiplier * sensitivity * state)
        metrics = clip_metrics(measured) | {"clip_norm": state}
        return noisy, next_clip_norm, metrics

    details = {"adaptive": True, "update_multiplier": update_multiplier, "quantile_noise": quantile_noise}
    noise = Noise("gaussian", "central", noise_multiplier, initial_clip_norm, "client", details=details)
    return UpdateTransform(
        init=lambda update_spec: jnp.asarray(initial_clip_norm, jnp.float32),
        init_client=lambda update_spec: (),
        on_client=on_client,
        on_server=on_server,
        wire=_with_a_bit,
        facts=TransformFacts(nonexpansive=True, releases_when_empty=True, noise=noise, mirrored=False),
    )


def local_gaussian(clip_norm: float, noise_multiplier: float) -> UpdateTransform:
    """Each client clips its update to a norm C and adds its own N(0, (z C)^2) before it sends (local privacy).

    No party needs to be trusted. Each message is a release of its own, so a larger cohort hides a client no better, and
    sampling does not amplify privacy against an observer of the messages. Replacing a client's data moves its message
    by up to 2 C, so an accountant uses the multiplier z / 2 (`noise.details` has the sensitivity 2 C). In the mean of m
    messages the variance is (z C)^2 / m, which is m times that of central noise at the same z.

    Args:
      clip_norm: C in [1e-9, 1e9].
      noise_multiplier: z >= 0, in clip norms; 0 gives no privacy.

    Returns: a transform whose `noise` has place "local"; its metrics are those of `clip`.

    Raises: ValueError for options out of range.

    Guarantees:
      - every message that reaches the aggregator holds noise of standard deviation z C, and `squared_error` is exact
        (tests/transform/test_gaussian.py::test_messages_bear_their_noise)
      - the clients' noise is independent: the variance in the mean falls as 1/m (::test_central_against_local)

    References: Kasiviswanathan et al. 2011; Duchi, Jordan and Wainwright 2018.

    >>> local_gaussian(2.0, 0.5).facts.noise.details
    {'sensitivity': 4.0}
    """
    check_clip_norm(clip_norm)
    check_multiplier(noise_multiplier)
    noise = Noise("gaussian", "local", noise_multiplier, clip_norm, "client", details={"sensitivity": 2 * clip_norm})
    return _noise_on_each_message(clip_norm, noise_multiplier * clip_norm, noise)


@validate.named_arguments
def distributed_gaussian(clip_norm: float, noise_multiplier: float, cohort_size: PositiveInt) -> UpdateTransform:
    """Each client clips its update to a norm C and adds a share N(0, (z C)^2 / m) of the noise (distributed privacy).

    The sum of m messages holds N(0, (z C)^2), as with central noise. This needs secure aggregation, so that nobody sees
    less than the sum. If only r < m messages arrive, the sum holds less noise: z sqrt(r / m) in place of z. So let m be
    the least number of messages that is relied on, not the number of invited clients, and let the aggregate's divisor
    be the expected number. A round with fewer messages must not be released, or must be accounted for at its own level.

    Args:
      clip_norm: C in [1e-9, 1e9].
      noise_multiplier: z >= 0, of the noise in the sum of `cohort_size` messages.
      cohort_size: m, the number of messages that the noise relies on; `noise.details` has it.

    Returns: a transform whose `noise` has place "distributed"; its metrics are those of `clip`.

    Raises: ValueError for options out of range and, when traced, for a `cohort_size` above the sampler's slots.

    Guarantees: the sum of m messages has the noise of the central mechanism, and with fewer messages less noise
    (tests/transform/test_gaussian.py::test_shares_add_up).

    References: Dwork et al. 2006 (Our data, ourselves); Kairouz, Liu and Steinke 2021, section 1.

    >>> distributed_gaussian(1.0, 0.5, 100).facts.noise.details
    {'cohort_size': 100}
    """
    check_clip_norm(clip_norm)
    check_multiplier(noise_multiplier)
    noise = Noise(
        "gaussian", "distributed", noise_multiplier, clip_norm, "client", details={"cohort_size": cohort_size}
    )
    shares = _noise_on_each_message(clip_norm, noise_multiplier * clip_norm / math.sqrt(cohort_size), noise)

    def on_server(key, cohort, aggregate, state, measured, sensitivity):  # noqa: PLR0917 - called by position
        check_cohort(cohort, cohort_size)
        return shares.on_server(key, cohort, aggregate, state, measured, sensitivity)

    return shares._replace(on_server=on_server)


def _noise_on_each_message(clip_norm: float, std: float, noise: Noise) -> UpdateTransform:
    """A clip, followed by Gaussian noise of this standard deviation on each message."""
    base = clip(clip_norm)

    def on_client(key, update, state, memory):
        message, measured = clipped(key, update, clip_norm, narrow=False)
        message = _with_noise(key, message, std)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), message, update), memory, measured

    def squared_error(update):
        return clip_error(update, clip_norm) + tree.num_values(update) * std**2

    noisy = base._replace(on_client=on_client, wire=_as_numbers, squared_error=squared_error)
    return noisy.stating(l2_bound=None, nonexpansive=False, noise=noise)


def _with_noise(key: Array, update: PyTree, std: float | Array) -> PyTree:
    """Adds N(0, std^2) to each number, in float32 at least; leaf i draws from fold_in(key, i)."""
    leaves, structure = jax.tree.flatten(update)
    keys = prng.fold_in(key, jnp.arange(len(leaves)))
    noise = [std * prng.normal(leaf_key, x.shape) for leaf_key, x in zip(keys, leaves, strict=True)]
    return structure.unflatten(
        [x.astype(tree.at_least_float32(x.dtype)) + n for x, n in zip(leaves, noise, strict=True)]
    )


def _as_numbers(update_spec: PyTree, wire: Wire) -> Wire:
    """Returns the wire of numbers at their dtype's width.

    After a member that coded the numbers, they have at least 32 bits, since they are decoded to float32 before the
    noise.
    """
    plain = plain_wire(update_spec)
    if wire == plain:
        return plain
    wide = [8 * x.size * tree.at_least_float32(x.dtype).itemsize for x in jax.tree.leaves(update_spec)]
    return plain._replace(payload_bits=sum(wide))


def _with_a_bit(update_spec: PyTree, wire):
    """The wire of a clipped update, and one bit that tells whether it was clipped."""
    wire = scaled_wire(update_spec, wire)
    coded_bits = None if wire.coded_bits is None else wire.coded_bits + 1
    return wire._replace(side_bits=wire.side_bits + 1, coded_bits=coded_bits)
