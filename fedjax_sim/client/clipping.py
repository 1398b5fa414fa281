"""Sums the clipped per-example gradients of a batch, without forming the gradients of dense kernels."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.client.ghost import products
from fedjax_sim.client.local_sgd import loss_and_metrics
from fedjax_sim.prng import fold_in
from fedjax_sim.types import Array, ClientData, Mean, PyTree

SLACK = 1e-5  # relative margin below the clip norm: covers the rounding of a norm and of the vector scaled by it
BLOCK = 32  # number of squares that are summed at once
GRADIENTS = ("auto", "ghost", "vmap")


def clipped_sum(
    loss_fn: Callable,
    params: PyTree,
    batch: ClientData,
    key: Array,
    *,
    clip_norm: float,
    microbatch_size: int | None = None,
    gradients: str = "auto",
) -> tuple[PyTree, dict[str, Mean]]:
    """Computes the sum of the examples' clipped gradients, in float32 at least, and the metrics of these examples.

    Args:
      loss_fn, clip_norm, microbatch_size, gradients: as in `private_sgd`.
      params: the model at which gradients are taken.
      batch: examples [b, ...] and their mask; rows where the mask is False contribute zero.
      key: of the step; example i draws from fold_in(key, i).

    Returns: (a pytree shaped like `params`, metrics summed over the examples as `Mean`, with `clipped_share`).

    Raises: ValueError for "ghost" where a parameter of two axes or more is no dense kernel; TypeError for parameters
    that are no floating-point numbers.

    Guarantees: adding or removing a record moves the sum by at most C, up to rounding
    (tests/client/test_private.py::test_neighbouring_records); the sum is the same with and without ghost norms, up to
    rounding (tests/client/test_ghost.py::test_sums_agree).
    """
    validate.floating_parameters(params)
    rows = batch.mask.shape[0]
    size = rows if microbatch_size is None else min(microbatch_size, rows)
    leaves, structure = jax.tree.flatten(params)

    def loss(leaves, example, is_real, slot, key):
        batch_of_one = jax.tree.map(lambda x: x[None], example)
        example_key = fold_in(key, slot)
        return loss_and_metrics(loss_fn, structure.unflatten(leaves), batch_of_one, is_real[None], example_key)

    # `kernels` maps positions among the leaves to dense kernels, whose gradients are never formed.
    kernels = {}
    tapped = lambda leaves, taps, *args: (loss(leaves, *args), {})  # noqa: E731
    if gradients != "vmap":
        example = jax.tree.map(lambda x: x[0], (batch.examples, batch.mask))
        kernels, tapped = products(loss, leaves, *example, jnp.int32(0), key)
    if gradients == "ghost":
        _check_all_are_kernels(params, kernels)
    other_leaves = {i: x for i, x in enumerate(leaves) if i not in kernels}
    taps = {i: jnp.zeros(kernel.tap.shape, kernel.tap.dtype) for i, kernel in kernels.items()}

    def clip_example(example, is_real, slot):
        def value(other_leaves, taps):
            all_leaves = [other_leaves.get(i, x) for i, x in enumerate(leaves)]
            arguments = (example, is_real, slot, key)
            (loss, means), vectors = tapped(all_leaves, taps, *arguments)
            return loss, (means, vectors)

        (gradient, deltas), (means, vectors) = jax.grad(value, argnums=(0, 1), has_aux=True)(other_leaves, taps)
        factors = {i: (vectors[i], deltas[i]) for i in kernels}
        # Rounded here in both arithmetics: compilers reorder the powers of two that a constant vector is multiplied
        # with, and the norm would then be of other numbers.
        parts = engine.rounded_here(jax.tree.map(_single, (gradient, factors)), params)
        clipped, is_shortened, is_finite = _clip(parts, clip_norm)
        weight = is_real.astype(jnp.float32)
        means = means | {"clipped_share": Mean(jnp.where(is_shortened, weight, 0), weight)}
        means = tree.where(is_finite & engine.all_finite(means), means, tree.zeros_like(means))
        return jax.tree.map(lambda x: jnp.where(is_real & is_finite, x, 0), clipped), means

    def sum_of_microbatch(examples, mask, slots):
        (gradient, factors), means = jax.vmap(clip_example)(examples, mask, slots)
        sums = {i: x.sum(0) for i, x in gradient.items()}
        for i, pair in factors.items():
            # The sum of outer products is one matmul, at full precision: the clip must hold for what it adds.
            pair = pair if kernels[i].axis == 0 else pair[::-1]
            sums[i] = jnp.einsum("bi,bo->io", *pair, precision=jax.lax.Precision.HIGHEST)
        return structure.unflatten([sums[i] for i in range(len(leaves))]), jax.tree.map(lambda x: x.sum(0), means)

    slots = jnp.arange(rows, dtype=jnp.int32)
    if size == rows:
        return sum_of_microbatch(batch.examples, batch.mask, slots)
    padding = -rows % size

    def split(x):
        return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, size, *x.shape[1:])

    microbatches = jax.tree.map(split, (batch.examples, batch.mask, slots))
    first_microbatch = jax.tree.map(lambda x: x[0], microbatches)
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sum_of_microbatch, *first_microbatch))

    def add_microbatch(sums, microbatch):
        return jax.tree.map(jnp.add, sums, sum_of_microbatch(*microbatch)), None

    return jax.lax.scan(add_microbatch, start, microbatches)[0]


def _clip(parts: tuple[dict, dict], clip_norm: float) -> tuple[tuple[dict, dict], Array, Array]:
    """Scales an example's gradient g to g min(1, C / |g|), where outer products in it stay as pairs of vectors.

    Args:
      parts: leaves of g by position, and pairs of vectors, whose outer products are further leaves of g. A pair may
        hold any floats: one vector near 1e-38, the other near 1e38.
      clip_norm: C.

    Returns: (the parts, scaled; [] bool, whether that shortened g; [] bool, whether all of g is finite).
    """
    gradient, factors = parts
    peaks = [jnp.abs(x).max(initial=0) for x in gradient.values()]
    peaks += [jnp.abs(a).max(initial=0) * jnp.abs(b).max(initial=0) for a, b in factors.values()]
    peak = jnp.stack(peaks).max()
    # The norm is computed in a unit, a power of two, in which squares neither overflow nor vanish. Multiplying by a
    # power of two rounds nothing.
    shift = jnp.where(peak > 2.0**40, -80, jnp.where(peak < 2.0**-40, 40, 0)).astype(jnp.int32)
    unit = _power_of_two(shift)
    # Each vector is normalised by a power of two of its own, so that any two of them can be multiplied.
    normalised = {i: (*_normalised(a), *_normalised(b)) for i, (a, b) in factors.items()}
    squares = [_sum_of_squares(x * unit) for x in gradient.values()]
    for a, a_power, b, b_power in normalised.values():
        # |a (outer) b| = |a| |b|
        norms = jnp.sqrt(_sum_of_squares(a)) * jnp.sqrt(_sum_of_squares(b))
        squares.append((norms * _power_of_two(a_power + b_power + shift)) ** 2)
    norm = jnp.sqrt(sum(squares))  # in units of 1 / unit
    limit = clip_norm * (1 - SLACK)
    is_shortened = norm > limit * unit
    factor = limit / jnp.where(is_shortened, norm, 1)
    gradient = {i: jnp.where(is_shortened, x * unit * factor, x) for i, x in gradient.items()}
    for i, (a, a_power, b, b_power) in normalised.items():
        shortened_scale = _power_of_two(a_power + b_power + shift) * factor
        scale = jnp.where(is_shortened, shortened_scale, _power_of_two(a_power + b_power))
        factors = factors | {i: (a, b * scale)}
    return (gradient, factors), is_shortened, jnp.isfinite(norm) & jnp.isfinite(peak)


def _normalised(x: Array) -> tuple[Array, Array]:
    """Returns (y, power) with x = y 2^power exactly and the largest |y| in [2, 4). The power is read from x's bits."""
    bits = jax.lax.bitcast_convert_type(jnp.abs(x).max(initial=0), jnp.int32)
    # Bits 23 to 30 of a float32 are its exponent, with a bias of 127. A vector of zeros keeps power 0, because 0 times
    # 2^127, squared, may be folded to NaN.
    power = jnp.where(bits == 0, 0, jnp.clip(bits >> 23, 1, 254) - 128)
    return x * _power_of_two(-power), power


def _power_of_two(power: Array) -> Array:
    """Computes 2^power, exactly; 0 below the smallest float32.

    It is a product of two floats whose exponents are half of the power each, which reaches powers below -126.
    """
    half = power >> 1
    a_bits, b_bits = (jnp.clip(x + 127, 0, 254) << 23 for x in (half, power - half))
    return jax.lax.bitcast_convert_type(a_bits, jnp.float32) * jax.lax.bitcast_convert_type(b_bits, jnp.float32)


def _sum_of_squares(x: Array) -> Array:
    """The sum of squares, at most 32 addends at a time, so that `SLACK` covers the rounding in any order."""
    x = x.reshape(-1) ** 2
    while x.size > BLOCK:
        # The maximum with 0 changes no value, but keeps compilers from merging the nested sums into a long one.
        x = jnp.maximum(jnp.pad(x, (0, -x.size % BLOCK)).reshape(-1, BLOCK).sum(1), 0)
    return x.sum()


def _single(x: Array) -> Array:
    """The array as float32, the format from whose bits `_normalised` reads exponents."""
    return x.astype(jnp.float32)


def _check_all_are_kernels(params: PyTree, kernels: dict) -> None:
    """Raises ValueError for parameters of two axes or more that are not dense kernels."""
    numbered_leaves = enumerate(jax.tree_util.tree_leaves_with_path(params))
    others = [jax.tree_util.keystr(path) for i, (path, x) in numbered_leaves if i not in kernels and x.ndim > 1]
    if others or not kernels:
        hint = "An example must use each kernel once, in one product of at most 32 bits; 'auto' handles the others."
        validate.fail("gradients", "dense kernels alone for 'ghost'", others or "none", hint)
