"""Local differential privacy without a delta: Laplace noise, randomised response, and PrivUnit.

Each message is e-differentially private by itself: whatever the client holds, every message has a probability, or a
density, of at most e^e times that under any other data. No party is trusted. What arrives is decoded, so that the mean
of the messages estimates the mean of the clients' updates. The numerics are idealised, as in `transform.gaussian`.

The `Noise` of these mechanisms has the multiplier 1 / e, and says nothing of a standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, prng, tree
from fedjax_sim.transform.chain import check_floats, plain_wire, stateless
from fedjax_sim.transform.clip import check_clip_norm, clip_error, clipped
from fedjax_sim.types import Array, Noise, PyTree, UpdateTransform, Wire
from fedjax_sim.validate import Number

EPSILONS = Number(1e-6, 30)  # of one message
PRIVUNIT_EPSILONS = Number(1e-6, 18)  # beyond 18 the outer part's draws in float32 do not reach the half-space
BLOCK = 512  # numbers that are added up at once, so that a sum of n numbers errs by log n of them
MAX_MAGNITUDE = 2.0**64  # beyond it a sum of magnitudes might overflow


def local_laplace(clip_norm: float, epsilon: float) -> UpdateTransform:
    """Each client clips its update to an L1 norm C, and adds Laplace noise of scale 2 C / epsilon to each number.

    Two clipped updates are at most 2 C apart in L1, so that a message is epsilon-differentially private.

    Args:
      clip_norm: C in [1e-9, 1e9], of the sum of the absolute values of all numbers.
      epsilon: of one message, in [1e-6, 30].

    Returns: a transform whose `noise` has the mechanism "laplace" and the place "local".

    Raises: ValueError for options out of range; TypeError, when traced, for an update of integers.

    Guarantees: the noise has its stated distribution, and no clipped update has a larger L1 norm
    (tests/transform/test_local.py::test_laplace_noise_follows_its_law, ::test_no_clipped_update_is_longer).

    References: Dwork, McSherry, Nissim and Smith 2006, proposition 1.

    >>> local_laplace(2.0, 0.5).facts.noise.multiplier
    2.0
    """
    check_clip_norm(clip_norm)
    EPSILONS.check("epsilon", epsilon)
    scale = 2 * clip_norm / epsilon

    def change(key: Array, update: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(_clipped_l1(update, clip_norm))
        keys = prng.fold_in(key, jnp.arange(len(leaves)))
        noise = [jax.random.laplace(prng.fast(k), x.shape) for k, x in zip(keys, leaves, strict=True)]
        return structure.unflatten([x + scale * n for x, n in zip(leaves, noise, strict=True)])

    def squared_error(update: PyTree) -> Array | float:
        short = _clipped_l1(update, clip_norm)
        differences = jax.tree.map(lambda x, y: jnp.square(x - y.astype(x.dtype)).sum(), short, update)
        return sum(jax.tree.leaves(differences)) + tree.num_values(update) * 2 * scale**2

    return _local("laplace", change, epsilon, clip_norm, squared_error=squared_error)


def randomized_response(epsilon: float) -> UpdateTransform:
    """Each client sends the place of its symbol, or with a stated probability another one (k-ary randomised response).

    It is for messages that are a symbol: an array of zeros with a single 1, as `algorithms.histogram(rows="one")` and
    `algorithms.heavy_hitters` send them. A message of zeros is a symbol of its own, "nothing". Of d + 1 symbols, the
    true one is sent with probability p = e^epsilon / (e^epsilon + d), and every other one with q = 1 / (e^epsilon + d).
    The message counts as (1[place] - q) / (p - q) in each place, whose mean is the true symbol.

    Args:
      epsilon: of one message, in [1e-6, 30].

    A message that is no symbol, such as the sums of `algorithms.kmeans` or `algorithms.quantiles`, counts as one that
    is not finite: its client is dropped, and `dropped_clients` counts it.

    Returns: a transform whose `noise` has the mechanism "randomized_response" and the place "local". A message takes
      ceil(log2(d + 1)) bits.

    Raises: ValueError for an epsilon out of range; TypeError, when traced, for an update of integers.

    Guarantees: answers have the stated probabilities, whose ratio is e^epsilon, and counts are unbiased, with "nothing"
    too (tests/transform/test_local.py::test_answers_have_their_probabilities, ::test_counts_are_unbiased).

    References: Warner 1965; Kairouz, Bonawitz and Ramage 2016 (k-RR, section 3).

    >>> randomized_response(1.0).facts.noise.mechanism
    'randomized_response'
    """
    EPSILONS.check("epsilon", epsilon)

    def change(key: Array, update: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(update)
        flat = jnp.concatenate([x.reshape(-1).astype(jnp.float32) for x in leaves])
        num_places = flat.size
        is_symbol = (flat >= 0).all() & ((flat > 0).sum(dtype=jnp.int32) <= 1)
        symbol = jnp.where(flat.max() > 0, jnp.argmax(flat), num_places)
        # One of the others with probability 1 - p, or the true symbol.
        keeps = ~_chance(prng.stream(key, "keep"), num_places / (math.exp(epsilon) + num_places))
        other = (symbol + 1 + prng.below(prng.stream(key, "other"), num_places)) % (num_places + 1)
        answer = jnp.where(keeps, symbol, other)
        q = 1 / (math.exp(epsilon) + num_places)
        counts = ((jnp.arange(num_places) == answer).astype(jnp.float32) - q) / (math.expm1(epsilon) * q)
        ends = np.cumsum([x.size for x in leaves])[:-1]
        parts = jnp.split(jnp.where(is_symbol, counts, jnp.nan), ends)
        return structure.unflatten([part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)])

    def wire(update_spec: PyTree, sent: Wire) -> Wire:
        return Wire(1, max(1, tree.num_values(update_spec).bit_length()))

    return _local("randomized_response", change, epsilon, 1.0, wire=wire)


def privunit(clip_norm: float, epsilon: float) -> UpdateTransform:
    """Each client sends a random vector that is likely to point as its update does (PrivUnit, in its Gaussian form).

    An update x is clipped to norm C, and becomes the unit vector u = x / |x|, or -u, with probabilities whose mean is
    x / C. Then V is drawn from N(0, I), but with probability p from the half-space <V, u> >= gamma, and else from the
    rest. The message counts as C V / m, where m makes its mean x. For a given epsilon, p and gamma are those for which
    m is largest, so that messages are shortest.

    Args:
      clip_norm: C in [1e-9, 1e9].
      epsilon: of one message, in [1e-6, 18].

    Returns: a transform whose `noise` has the mechanism "privunit" and the place "local". Its messages are sent as
      floats.

    Raises: ValueError for options out of range; TypeError, when traced, for an update of integers.

    Guarantees: the mean of messages is the clipped update, and their error is as stated
    (tests/transform/test_local.py::test_privunit_is_unbiased); the half-space is drawn with probability p, and the
    densities in it and outside of it have the ratio e^epsilon (::test_privunit_draws_its_half_space); messages are
    shorter than those with Laplace noise (::test_privunit_is_shorter_than_laplace).

    References: Bhowmick, Duchi, Freudiger, Kapoor and Rogers 2018, algorithm 1 (on the sphere); Asi, Feldman and Talwar
    2022 (PrivUnitG, with optimal p and gamma).
    """
    check_clip_norm(clip_norm)
    PRIVUNIT_EPSILONS.check("epsilon", epsilon)
    half_space = privunit_parameters(float(epsilon))

    def change(key: Array, update: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(clipped(key, update, clip_norm, narrow=False)[0])
        flat = jnp.concatenate([x.reshape(-1) for x in leaves]) * (1 / clip_norm)
        # Relative to the largest number, squares neither vanish nor overflow: the direction has length 1.
        largest = jnp.abs(flat).max()
        relative = flat / jnp.where(largest > 0, largest, 1)
        relative_norm = jnp.sqrt(jnp.square(relative).sum())
        norm = relative_norm * largest
        # A vector of zeros takes the direction of the first axis, with a random sign.
        axis = (jnp.arange(flat.size) == 0).astype(flat.dtype)
        unit = jnp.where(largest > 0, relative / jnp.where(largest > 0, relative_norm, 1), axis)
        is_kept = jax.random.uniform(prng.stream(key, "sign")) < (1 + jnp.minimum(norm, 1)) / 2
        direction = _near(prng.stream(key, "direction"), jnp.where(is_kept, unit, -unit), half_space)
        scaled = direction * (clip_norm / half_space.mean)
        parts = jnp.split(scaled, np.cumsum([x.size for x in leaves])[:-1])
        return structure.unflatten([part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)])

    def squared_error(update: PyTree) -> Array:
        short = clipped(jax.random.key(0), update, clip_norm, narrow=False)[0]
        square = sum(jnp.square(x).sum() for x in jax.tree.leaves(short))
        length = tree.num_values(update) - 1 + half_space.mean_square
        return clip_error(update, clip_norm) + (clip_norm / half_space.mean) ** 2 * length - square

    return _local("privunit", change, epsilon, clip_norm, squared_error=squared_error)


class HalfSpace(NamedTuple):
    """The half-space of `privunit`, along a direction u in which V is standard normal outside of it and inside."""

    probability: float  # p, of drawing from the half-space
    measure: float  # P, the probability of the half-space under N(0, I)
    threshold: float  # gamma, the least inner product with u in the half-space
    mean: float  # m, the mean of <V, u>
    mean_square: float  # the mean of <V, u>^2


def privunit_parameters(epsilon: float) -> HalfSpace:
    """Chooses the half-space and its probability for which the mean inner product is largest.

    The densities inside and outside, over that of N(0, I), have the ratio p (1 - P) / ((1 - p) P) = e^epsilon. With
    the density f of N(0, 1), the mean of <V, u> is f(gamma) (p / P - (1 - p) / (1 - P)).

    Args:
      epsilon: > 0.

    >>> privunit_parameters(8.0).mean > privunit_parameters(2.0).mean > 0
    True
    """
    from scipy import special

    # Shares P from one half down to e^-epsilon / 100: smaller half-spaces are drawn too rarely.
    measures = np.exp(np.linspace(math.log(0.5), -epsilon - math.log(100), 4000))
    probabilities = 1 / (1 + (1 - measures) / measures * math.exp(-epsilon))
    thresholds = -special.ndtri(measures)
    densities = np.exp(-np.square(thresholds) / 2) / math.sqrt(2 * math.pi)
    contrasts = probabilities / measures - (1 - probabilities) / (1 - measures)
    means = densities * contrasts
    best = int(np.argmax(means))
    mean_square = 1 + thresholds[best] * means[best]
    chosen = (probabilities[best], measures[best], thresholds[best], means[best], mean_square)
    return HalfSpace(*(float(x) for x in chosen))


def _near(key: Array, unit: Array, half_space: HalfSpace) -> Array:
    """Draws V: standard normal, but in the half-space around `unit` with probability p."""
    is_inside = _chance(prng.stream(key, "half-space"), half_space.probability)
    uniform = jax.random.uniform(prng.stream(key, "quantile"), minval=2.0**-24)
    # Upper and lower tails are both drawn as lower ones, whose small probabilities float32 resolves.
    tail = uniform * jnp.where(is_inside, half_space.measure, 1 - half_space.measure)
    inner = jnp.where(is_inside, -1, 1) * jax.scipy.special.ndtri(tail)
    sideways = prng.normal(prng.stream(key, "sideways"), unit.shape)
    return sideways + (inner - (sideways * unit).sum()) * unit


def _chance(key: Array, probability: float) -> Array:
    """Draws a truth value that is True with a probability, to 2^-64: a float32 draw would never meet a rare one."""
    threshold = math.ceil(probability * 2**64)
    high, low = divmod(min(threshold, 2**64 - 1), 2**32)
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    return (first < jnp.uint32(high)) | ((first == jnp.uint32(high)) & (second < jnp.uint32(low)))


def _sum(x: Array) -> tuple[Array, int]:
    """Returns the sum of an array in float32, and how many roundings lie on the way of a number at most."""
    x = x.reshape(-1).astype(jnp.float32)
    roundings = 0
    while x.size > 1:
        x = jnp.pad(x, (0, -x.size % BLOCK)).reshape(-1, BLOCK).sum(1)
        roundings += BLOCK
    return x.sum(), roundings


def _clipped_l1(update: PyTree, clip_norm: float) -> PyTree:
    """Returns the update u min(1, C / |u|_1), whose L1 norm is at most C after all rounding.

    Args:
      update: u, leaves of floats, one at least.
      clip_norm: C in [1e-9, 1e9].

    Returns: leaves of float32 at least.
    """
    leaves = [x.astype(tree.at_least_float32(x.dtype)) for x in jax.tree.leaves(update)]
    largest = jnp.stack([jnp.abs(x).max(initial=0).astype(jnp.float32) for x in leaves]).max()
    # Huge numbers are made smaller by a power of two first, so that their sum does not overflow.
    shrink = jnp.where(largest > MAX_MAGNITUDE, 1 / MAX_MAGNITUDE, 1)
    near = [x * shrink.astype(x.dtype) for x in leaves]
    totals, roundings = zip(*(_sum(jnp.abs(x)) for x in near), strict=True)
    total = sum(totals)
    # The sums and the products are rounded: the limit lies below C by that error.
    limit = clip_norm * (1 - (max(roundings) + len(leaves) + 16) * 2.0**-24)
    is_long = total > limit * shrink
    factor = limit / jnp.where(is_long, total, 1)
    short = [jnp.where(is_long, y * factor.astype(y.dtype), x) for x, y in zip(leaves, near, strict=True)]
    return jax.tree.structure(update).unflatten(short)


def _local(
    kind: str,
    change: Callable,
    epsilon: float,
    clip_norm: float,
    *,
    wire: Callable = lambda update_spec, sent: plain_wire(update_spec),
    squared_error: Callable | None = None,
) -> UpdateTransform:
    """Makes a transform of a mechanism whose every message is epsilon-differentially private.

    Args:
      kind: the name of the mechanism, for accountants.
      change: (key, update) -> the message, as the server decodes it.
      epsilon: of one message, > 0.
      clip_norm: C of the stated `Noise`.
      wire: as in `UpdateTransform`; by default of plain numbers.
      squared_error: (update) -> [] expected squared error of the message; None = it is not known.
    """

    def on_client(key: Array, update: PyTree) -> PyTree:
        check_floats(update)
        is_finite = engine.all_finite(update)
        message = change(key, update)
        # A client whose update is not finite counts as absent: its message must not look like another one.
        return jax.tree.map(lambda x, like: jnp.where(is_finite, x, jnp.nan).astype(like.dtype), message, update)

    noise = Noise(kind, "local", 1 / epsilon, clip_norm, "client", details={"epsilon": float(epsilon)})
    return stateless(on_client, wire=wire, squared_error=squared_error, noise=noise)
