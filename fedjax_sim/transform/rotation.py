"""Rotation before a compressor: the numbers of an update become similar in size, so that few levels suffice.

The rotation is random signs followed by a Hadamard matrix. It is applied to the whole update as one vector, padded to a
power of two. Every client draws its own signs, from a seed that the server has too. The simulation rotates each message
back at the client, before messages are added; a real server would do this when a message arrives.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim import prng, tree, validate
from fedjax_sim.transform.chain import Whole, check_floats, plain_wire
from fedjax_sim.transform.grid import SMALLEST, RotatableError, leaves_of
from fedjax_sim.transform.sign import signs
from fedjax_sim.types import Array, PyTree, UpdateTransform, Wire

SEED_BITS = 64


def hadamard(x: Array) -> Array:
    """Computes the normalised Walsh-Hadamard transform of a vector, which keeps the norm and is its own inverse.

    Args:
      x: [D] float32, where D is a power of two.

    Returns: [D] float32.

    Guarantees: equals the product with Sylvester's matrix / sqrt(D), and twice is the identity
    (tests/transform/test_rotation.py::test_hadamard_equals_sylvesters_matrix).

    References: Fino and Algazi 1976.

    >>> import jax.numpy as jnp
    >>> hadamard(jnp.array([1.0, 0.0, 0.0, 1.0])).tolist()
    [1.0, 0.0, 0.0, 1.0]
    """
    size = x.size
    block_size = 1  # the transform is done within blocks of this size
    # Two stages at once (four parts) take two thirds of the time; four stages at once take longer.
    while block_size < size:
        num_parts = min(4, size // block_size)
        parts = x.reshape(-1, num_parts, block_size)
        x = jnp.stack(_butterfly([parts[:, i] for i in range(num_parts)]), axis=1)
        block_size *= num_parts
    return x.reshape(size) * (1 / math.sqrt(size))


def _butterfly(parts: list[Array]) -> list[Array]:
    """The unnormalised transform over a list of arrays, whose length is a power of two."""
    if len(parts) == 1:
        return parts
    half = len(parts) // 2
    pairs = list(zip(_butterfly(parts[:half]), _butterfly(parts[half:]), strict=True))
    return [x + y for x, y in pairs] + [x - y for x, y in pairs]


def rotated(transform: UpdateTransform) -> UpdateTransform:
    """Rotates the update at random, applies a transform to the rotated vector, and rotates the result back.

    Args:
      transform: a compressor; it sees one float32 vector of D numbers, where D is the least power of two that holds the
        update.

    Returns: a transform; its wire adds a seed of 64 bits.

    Raises:
      TypeError: for an argument that is no transform.
      ValueError: for a transform that sends integers, since clients rotate by signs of their own and sums of rotated
        integers mean nothing; for a transform that adds noise; and, when the update's shape is known, for a transform
        with a memory, since every round has another rotation. `error_feedback(rotated(...))` has its memory outside.

    Guarantees:
      - with `identity` the message is the update up to rounding
        (tests/transform/test_rotation.py::test_rotation_back_gives_the_update)
      - the message is unbiased if the transform is (::test_rotated_compressors_stay_unbiased)
      - the stated error bounds the real error (::test_declared_bounds_hold_for_hard_updates), and falls from d to ln d
        for updates with few large numbers (::test_rotation_serves_spiky_updates)
      - D numbers and a seed of 64 bits are sent (::test_wire_bits)

    References: Suresh, Yu, Kumar and McMahan 2017, section 3; Ailon and Chazelle 2009.
    """
    validate.part("transform", transform, UpdateTransform)
    if transform.facts.integer_range is not None:
        hint = "Clients rotate by signs of their own, so their integers do not add up: integers=False, or no rotation."
        validate.fail("transform", "one that sends floats", "one that sends integers", hint)
    if transform.facts.noise is not None:
        hint = "Noise gains nothing from a rotation: chain(rotated(...), mechanism)."
        validate.fail("transform", "one without noise", "one with noise", hint)

    def vector_spec(update_spec: PyTree) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((_padded(tree.num_values(update_spec)),), jnp.float32)

    def init_client(update_spec):
        memory = transform.init_client(vector_spec(update_spec))
        if jax.tree.leaves(memory) or transform.facts.mirrored:
            hint = "It would add up coordinates of different rotations: error_feedback(rotated(...))."
            validate.fail("transform", "one without a memory", "one that remembers messages", hint)
        return memory

    def on_client(key, update, state, memory):
        check_floats(update)
        vector, unflatten = _flat(update)
        # A random highest bit for each number; exclusive-or with it flips the sign of a float32.
        flips = (prng.dither(prng.fold_in(key, 0), vector.shape) >> 31) << 31
        turned = hadamard(_flipped(vector, flips))
        message, memory, measured = transform.on_client(prng.fold_in(key, 1), turned, state, memory)
        back = _flipped(hadamard(message), flips)
        return unflatten(back), memory, measured

    def on_server(key, cohort, aggregate, state, measured, sensitivity):  # noqa: PLR0917 - called by position
        _, state, metrics = transform.on_server(key, cohort, _flat(aggregate)[0], state, measured, sensitivity)
        return aggregate, state, metrics

    def wire(update_spec: PyTree, wire_in: Wire) -> Wire:
        spec = vector_spec(update_spec)
        sent = transform.wire(spec, plain_wire(spec))
        coded_bits = None if sent.coded_bits is None else sent.coded_bits + SEED_BITS
        return Whole(sent.values, sent.payload_bits, sent.side_bits + SEED_BITS, coded_bits)

    error = transform.squared_error
    error_bound = error.after_rotation if isinstance(error, RotatableError) else None

    def squared_error(update: PyTree) -> Array:
        assert error_bound is not None, "only then it is stated"
        leaves, xp = leaves_of(update)
        squared_norm = sum((xp.square(x).sum() for x in leaves), xp.zeros(()))
        return error_bound(squared_norm, _padded(tree.num_values(leaves)))

    return transform._replace(
        init=lambda update_spec: transform.init(vector_spec(update_spec)),
        init_client=init_client,
        on_client=on_client,
        on_server=on_server,
        wire=wire,
        squared_error=None if error_bound is None else squared_error,
    ).stating(exact_error=False)


@validate.named_arguments
def drive(*, debiased: bool = True) -> UpdateTransform:
    """Sends one bit for each number: the signs of the rotated update z = R x, times one scale (DRIVE).

    Under uniform rotations the debiased message would be unbiased. Hadamard rotations are not uniform. They leave a
    bias that is small for many numbers of similar size, and large for few or sparse numbers. So no form is stated to be
    unbiased.

    Args:
      debiased: True: the scale |z|_2^2 / |z|_1, with which the message's projection on x is x itself. False: the scale
        |z|_1 / D, which has the least error.

    Guarantees:
      - the debiased form has <message, x> = |x|^2 (tests/transform/test_rotation.py::test_drive_keeps_the_projection)
      - the least error is below |x|^2 / 2, a contraction, and about (1 - 2 / pi) |x|^2 for many numbers; the debiased
        form has (pi / 2 - 1) |x|^2 (::test_drive_has_the_papers_errors)
      - D bits, a scale and a seed are sent (::test_wire_bits)
      - the message is nearly unbiased for many numbers (::test_drive_is_nearly_unbiased)

    References: Vargaftik, Ben Basat, Portnoy, Mendelson, Ben-Itzhak and Mitzenmacher 2021 (DRIVE), algorithm 1.
    """
    # `signs` takes a bound on the expected error over random signs R. A coordinate of z is then a sum of numbers with
    # random signs. By Khinchine's inequality E |z|_1 is at least sqrt(D / 2) |x|, so the least error, |x|^2 - |z|_1^2 /
    # D, is at most |x|^2 / 2 in expectation.
    if not debiased:
        return rotated(signs(_least_error_scale, lambda square, size: square / 2))
    # The debiased error is D |z|_2^4 / |z|_1^2 - |x|^2, at most D max z_i^2 - |x|^2. By Hoeffding's inequality the
    # expectation of D max z_i^2 is at most (2 log(2 D) + 2) |x|^2.
    error_bound = lambda square, size: square * (2 * math.log(2 * size) + 1)  # noqa: E731
    return rotated(signs(_debiased_scale, error_bound))


def _least_error_scale(xp, size, peak, mean, square):
    """Computes |z|_1 / D."""
    return peak * mean


def _debiased_scale(xp, size, peak, mean, square):
    """Computes |z|_2^2 / |z|_1."""
    return peak * square / xp.maximum(mean, SMALLEST)


def _padded(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def _flipped(x: Array, flips: Array) -> Array:
    """float32 numbers with flipped signs where the highest bit of `flips` is set."""
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.uint32) ^ flips, jnp.float32)


def _flat(update: PyTree) -> tuple[Array, Callable]:
    """Returns an update as one vector, and the function that splits such a vector into leaves.

    Args:
      update: leaves of floats, d numbers in all.

    Returns: (vector, unflatten). The vector is [D] float32, padded with zeros to the least power of two D >= d.
    `unflatten` takes a [D], and returns the structure and shapes of the update. Its leaves are float32 at least, since
    bfloat16 would round once more.
    """
    leaves, structure = jax.tree.flatten(update)
    sizes = [x.size for x in leaves]
    vector = jnp.concatenate([x.reshape(-1).astype(jnp.float32) for x in leaves] or [jnp.zeros(0)])
    vector = jnp.pad(vector, (0, _padded(sum(sizes)) - sum(sizes)))

    def unflatten(vector: Array) -> PyTree:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        parts = [vector[end - n : end] for end, n in zip(ends, sizes, strict=True)]
        wide = [y.astype(tree.at_least_float32(x.dtype)) for x, y in zip(leaves, parts, strict=True)]
        return structure.unflatten([y.reshape(x.shape) for x, y in zip(leaves, wide, strict=True)])

    return vector, unflatten
