"""The sum of a batch's clipped per-example gradients, without forming the gradients of dense kernels."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.client.ghost import products
from fedjax_sim.client.local_sgd import loss_and_metrics
from fedjax_sim.types import Array, ClientData, Mean, PyTree

__all__ = ["clipped_sum"]

SLACK = 1e-5  # relative margin below the clip norm for the rounding of a norm and of what is scaled by it
BLOCK = 32  # squares summed at once
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
    """The sum of the examples' clipped gradients, in float32 at least, and the metrics of these examples.

    Args:
      batch: examples [b, ...] and their mask; rows where it is False contribute zero.
      key: of the step; example i draws from fold_in(key, i).
      Others as in `private_sgd`.

    Returns: (a pytree shaped like `params`, metrics summed over the examples as `Mean`, with `clipped_share`).

    Raises: ValueError for "ghost" where a parameter of two axes or more is no dense kernel; TypeError for parameters
    that are no floating-point numbers.

    Guarantees: as for `private_sgd` (tests/client/test_private.py::test_neighbouring_records); the same sum with and
    without ghost norms, up to rounding (tests/client/test_ghost.py::test_sums_agree).
    """
    validate.floating_parameters(params)
    rows = batch.mask.shape[0]
    size = rows if microbatch_size is None else min(microbatch_size, rows)
    leaves, structure = jax.tree.flatten(params)

    def loss(leaves, example, here, slot, key):
        single = jax.tree.map(lambda x: x[None], example)
        own_key = jax.random.fold_in(key, slot)
        return loss_and_metrics(loss_fn, structure.unflatten(leaves), single, here[None], own_key)

    kernels, tapped = {}, lambda leaves, taps, *args: (loss(leaves, *args), {})
    if gradients != "vmap":
        example = jax.tree.map(lambda x: x[0], (batch.examples, batch.mask))
        kernels, tapped = products(loss, leaves, *example, jnp.int32(0), key)
    if gradients == "ghost":
        _only_kernels(params, kernels)
    held = {i: x for i, x in enumerate(leaves) if i not in kernels}
    taps = {i: jnp.zeros(kernel.tap.shape, kernel.tap.dtype) for i, kernel in kernels.items()}
    zero = engine.hidden_zero(params)  # compilers reorder the powers of two that a constant vector is multiplied with

    def one(example, here, slot):
        def value(held, taps):
            given = [held.get(i, x) for i, x in enumerate(leaves)]
            (loss, means), vectors = tapped(given, taps, example, here, slot, key)
            return loss, (means, vectors)

        (gradient, outputs), (means, vectors) = jax.grad(value, argnums=(0, 1), has_aux=True)(held, taps)
        outers = {i: (vectors[i], outputs[i]) for i in kernels}
        parts = engine.rounded_here(jax.tree.map(_single, (gradient, outers)), zero)
        clipped, longer, sound = _clipped(parts, clip_norm)
        weight = here.astype(jnp.float32)
        means = means | {"clipped_share": Mean(jnp.where(longer, weight, 0), weight)}
        means = tree.where(sound & tree.all_finite(means), means, tree.zeros_like(means))
        return jax.tree.map(lambda x: jnp.where(here & sound, x, 0), clipped), means

    def some(examples, mask, slots):
        (gradient, outers), means = jax.vmap(one)(examples, mask, slots)
        sums = {i: x.sum(0) for i, x in gradient.items()}
        for i, pair in outers.items():
            pair = pair if kernels[i].axis == 0 else pair[::-1]
            sums[i] = jnp.einsum("bi,bo->io", *pair, precision=jax.lax.Precision.HIGHEST)  # no rounding after the clip
        return structure.unflatten([sums[i] for i in range(len(leaves))]), jax.tree.map(lambda x: x.sum(0), means)

    slots = jnp.arange(rows, dtype=jnp.int32)
    if size == rows:
        return some(batch.examples, batch.mask, slots)
    padding = -rows % size

    def parts(x):
        return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, size, *x.shape[1:])

    parted = jax.tree.map(parts, (batch.examples, batch.mask, slots))
    start = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(some, *jax.tree.map(lambda x: x[0], parted))
    )
    return jax.lax.scan(lambda sums, part: (jax.tree.map(jnp.add, sums, some(*part)), None), start, parted)[0]


def _clipped(parts: tuple[dict, dict], clip_norm: float) -> tuple[tuple[dict, dict], Array, Array]:
    """(g min(1, C / |g|), whether that shortened it, whether all of g is finite).

    The norm is computed in a unit, a power of two, in which squares neither overflow nor vanish.

    Args:
      parts: leaves of g, and pairs of vectors whose outer products are further leaves of it. A pair may hold any
        floats: one vector near 1e-38, the other near 1e38.
    """
    gradient, outers = parts
    peaks = [jnp.abs(x).max(initial=0) for x in gradient.values()]
    peaks += [jnp.abs(a).max(initial=0) * jnp.abs(b).max(initial=0) for a, b in outers.values()]
    peak = jnp.stack(peaks).max()
    shift = jnp.where(peak > 2.0**40, -80, jnp.where(peak < 2.0**-40, 40, 0)).astype(jnp.int32)
    unit = _power(shift)
    scaled = {i: (*_scaled(a), *_scaled(b)) for i, (a, b) in outers.items()}
    squares = [_squares(x * unit) for x in gradient.values()]
    for a, power, b, other in scaled.values():
        squares.append((jnp.sqrt(_squares(a)) * jnp.sqrt(_squares(b)) * _power(power + other + shift)) ** 2)
    length = jnp.sqrt(sum(squares))
    limit = clip_norm * (1 - SLACK)
    longer = length > limit * unit
    factor = limit / jnp.where(longer, length, 1)
    gradient = {i: jnp.where(longer, x * unit * factor, x) for i, x in gradient.items()}
    for i, (a, power, b, other) in scaled.items():
        scale = jnp.where(longer, _power(power + other + shift) * factor, _power(power + other))
        outers = outers | {i: (a, b * scale)}
    return (gradient, outers), longer, jnp.isfinite(length) & jnp.isfinite(peak)


def _scaled(x: Array) -> tuple[Array, Array]:
    """(y, power) with x = y 2^power, exactly, and the largest |y| in [2, 4): the exponent is read from the bits."""
    bits = jax.lax.bitcast_convert_type(jnp.abs(x).max(initial=0), jnp.int32)
    power = jnp.where(bits == 0, 0, jnp.clip(bits >> 23, 1, 254) - 128)  # 0 * 2^127, squared, may be folded to NaN
    return x * _power(-power), power


def _power(power: Array) -> Array:
    """2^power, exactly; 0 below the smallest float32."""
    half = power >> 1
    a, b = (jnp.clip(x + 127, 0, 254) << 23 for x in (half, power - half))
    return jax.lax.bitcast_convert_type(a, jnp.float32) * jax.lax.bitcast_convert_type(b, jnp.float32)


def _squares(x: Array) -> Array:
    """The sum of squares, at most 32 addends at a time, so that `SLACK` covers the rounding in any order."""
    x = x.reshape(-1) ** 2
    while x.size > BLOCK:  # the maximum changes no value, but keeps compilers from merging the sums into one
        x = jnp.maximum(jnp.pad(x, (0, -x.size % BLOCK)).reshape(-1, BLOCK).sum(1), 0)
    return x.sum()


def _single(x: Array) -> Array:
    """As float32, whose exponents are read from the bits."""
    return x.astype(jnp.float32)


def _only_kernels(params: PyTree, kernels: dict) -> None:
    """Refuses parameters of two axes or more that are not dense kernels."""
    named = enumerate(jax.tree_util.tree_leaves_with_path(params))
    others = [jax.tree_util.keystr(path) for i, (path, x) in named if i not in kernels and x.ndim > 1]
    if others or not kernels:
        hint = "An example must use each kernel once, in one product of at most 32 bits; 'auto' handles the others."
        validate.fail("gradients", "dense kernels alone for 'ghost'", others or "none", hint)
