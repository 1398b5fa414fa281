"""Clipping: no message is longer than a norm, whatever the update holds and in whatever dtype it is sent.

    g' = g min(1, C / |g|)        |g| over all leaves: shorter updates stay as they are, nothing is scaled up to C

Norms are sums of squares in float32. Squares are added by pairs in a fixed order, so that the rounding error has a
bound and does not depend on the compiler. They are added in two scales, so that nothing overflows. The limit is below C
by the bound on the error (about 2e-6 C), so that the message, after all rounding, is no longer than C. Narrow leaves
(bfloat16, float16) of a clipped update are rounded towards zero.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.transform.chain import as_it_comes, check_floats, plain_wire, stateless
from fedjax_sim.types import Array, Mean, PyTree, UpdateTransform, Wire
from fedjax_sim.validate import PositiveShare

LOW, HIGH = 1e-9, 1e9  # the range of a clip norm
PER = ("vector", "leaf")
BLOCK = 64  # squares summed in one pass
SAFE_SCALE = 2.0**-80  # a scale that brings the squares of the largest floats into range
MAX_REPORTED_NORM = 1e30  # the largest norm that is reported


@validate.named_arguments
def clip(clip_norm: float, *, per: Literal["vector", "leaf"] = "vector") -> UpdateTransform:
    """Clips updates g to a norm C: the message is g min(1, C / |g|).

    Args:
      clip_norm: C in [1e-9, 1e9].
      per: "vector": the whole update is clipped by its norm. "leaf": each of the L leaves that hold numbers is clipped
        by its own norm to C / sqrt(L), so that the whole update is again no longer than C.

    Returns: a transform with `l2_bound` C and two metrics: `clipped_update_share`, the share of updates (or leaves)
    that are clipped, and `unclipped_norm`, the mean norm before the clip. Both are means of what clients measure,
    without noise, so they are not private.

    Raises: ValueError or TypeError for a clip norm out of range.

    Guarantees:
      - no output is longer than C in the dtype that is sent, zeros stay zeros, and nothing from 1e-38 to 1e38 overflows
        (tests/transform/test_clip.py::test_no_message_is_longer_than_the_bound)
      - shorter updates keep every bit, longer updates keep their direction (::test_hand_computed)
      - one client more or less moves a sum by at most C (::test_neighbouring_cohorts)
      - the bits are the same for any chunk size and number of devices (::test_devices_and_chunks)
      - `squared_error` is exact to 1e-5 C^2 (::test_declared_error)

    References: Abadi et al. 2016, algorithm 1; McMahan et al. 2018, section 2.3 (flat and per-layer clipping).

    >>> import jax, jax.numpy as jnp
    >>> message, _, measured = clip(1.0).on_client(jax.random.key(0), jnp.array([3.0, 4.0]), (), ())
    >>> [round(float(x), 4) for x in message], float(measured["unclipped_norm"].total)
    ([0.6, 0.8], 5.0)
    """
    check_clip_norm(clip_norm)

    def on_client(key, update, state, memory):
        message, measured = clipped(key, update, clip_norm, per=per)
        return message, memory, measured

    def on_server(key, cohort, aggregate, state, measured, sensitivity):  # noqa: PLR0917 - called by position
        return aggregate, state, clip_metrics(measured)

    return stateless(
        lambda key, update: update,  # replaced below
        wire=lambda spec, wire: scaled_wire(spec, wire, 1 if per == "vector" else _num_filled(spec)),
        l2_bound=clip_norm,
        nonexpansive=True,
        squared_error=lambda update: clip_error(update, clip_norm, per),
        exact_error=True,
    )._replace(on_client=on_client, on_server=on_server)


def clip_error(update: PyTree, clip_norm: float | Array, per: str = "vector") -> Array:
    """Returns |message - update|^2, [] float32, of a clip with these options."""
    groups, limit = _groups(update, clip_norm, per)
    excess = [jnp.maximum(_norm(*length_over(leaves, limit), limit) - limit, 0) for leaves in groups]
    return sum((x * x for x in excess), jnp.float32(0))


@validate.named_arguments
def personal_clip(factor: PositiveShare) -> UpdateTransform:
    """Clips every update to its own threshold C_i = factor |g_i|, which scales it by the factor. NEVER private.

    This transform is for studies only. A threshold that follows the data bounds nothing: the sensitivity is the factor
    times the longest update that any client could have, and the norms themselves leak. So the transform states no bound
    and no noise, and no epsilon may be reported for a run with it.

    Args:
      factor: in (0, 1].

    Guarantees: keeps the direction and the same share of every update, and states nothing that an accountant could use
    (tests/transform/test_clip.py::test_personal_thresholds_bound_nothing).

    >>> import jax, jax.numpy as jnp
    >>> personal_clip(0.5).on_client(jax.random.key(0), jnp.array([3.0, 4.0]), (), ())[0].tolist()
    [1.5, 2.0]
    """

    def shorter(key, update):
        check_floats(update)
        return jax.tree.map(lambda x: (x.astype(_wide(x)) * factor).astype(x.dtype), update)

    def squared_error(update):
        squares = (jnp.square(jnp.asarray(x).astype(_wide(x))).sum() for x in jax.tree.leaves(update))
        return sum(((1 - factor) ** 2 * square for square in squares), jnp.float32(0))

    return stateless(shorter, wire=as_it_comes, nonexpansive=True, squared_error=squared_error, exact_error=True)


def check_clip_norm(clip_norm: float, name: str = "clip_norm") -> None:
    """Checks that a clip norm is a number in [1e-9, 1e9].

    Raises: TypeError for a value that is no number; ValueError for a number out of this range.

    Guarantees: `clip` and `gaussian_mechanism` refuse 0, -1, NaN, infinity, 1e-12, 1e12, a boolean and a text as clip
    norm (tests/transform/test_clip.py::test_wrong_norms_are_refused).
    """
    validate.in_range(name, clip_norm, LOW, HIGH, hint="It is the norm of the longest update that may be sent.")


def clipped(
    key: Array, update: PyTree, clip_norm: float | Array, *, per: str = "vector", narrow: bool = True
) -> tuple[PyTree, dict[str, Mean]]:
    """Clips an update to a norm, which may be traced.

    Args:
      key: the client's; it is not read.
      update: leaves of floats.
      clip_norm: C; a number, or a traced [].
      per: "vector" or "leaf", as in `clip`.
      narrow: True: the message has the dtypes of the leaves. False: it has float32 at least, for further steps of the
        same transform.

    Returns: (message, measured), where `measured` has the means for `clip_metrics`.

    Guarantees:
      - no message is longer than the clip norm
        (tests/transform/test_clip.py::test_no_message_is_longer_than_the_bound)
      - the derivative is that of the clip (::test_derivative)
    """
    if not jax.tree.leaves(update):
        nothing = Mean(jnp.zeros(()), jnp.ones(()))
        return update, {"clipped_update_share": nothing, "unclipped_norm": nothing}
    check_floats(update)
    # A Python number is not traced, so that the limit is computed from it in double precision.
    traced_norm = clip_norm if isinstance(clip_norm, jax.Array) else None

    # The exact norm uses powers of two and branches, which are not smooth. So the derivative is taken of the same clip
    # in plain arithmetic.
    @jax.custom_jvp
    def exact_clip(update, traced_norm):
        return _clipped(update, clip_norm if traced_norm is None else traced_norm, per, narrow)

    @exact_clip.defjvp
    def _(primals, tangents):
        message, measured = exact_clip(*primals)

        def plain_clip(update, traced_norm):
            return _plainly_clipped(update, clip_norm if traced_norm is None else traced_norm, per, narrow)

        message_tangent = jax.jvp(plain_clip, primals, tangents)[1]
        return (message, measured), (message_tangent, jax.tree.map(jnp.zeros_like, measured))

    return exact_clip(update, traced_norm)


def _clipped(update: PyTree, clip_norm: float | Array, per: str, narrow: bool) -> tuple[PyTree, dict[str, Mean]]:
    """Computes the exact clip of `clipped`.

    A group of leaves g, the whole update or a leaf, becomes g min(1, C_g / |g|). C_g is C for the whole update, and
    C / sqrt(L) for each of L leaves that hold numbers.

    Args:
      update: leaves of floats, one at least.
      clip_norm: C, a number or [].
      per: "vector" or "leaf".
      narrow: True: the message has the dtypes of the leaves, rounded towards zero where it was clipped. False: it has
        float32 at least.

    Returns: (message, measured). `clipped_update_share` adds up the clipped groups, with the number of groups as its
    weight. `unclipped_norm` is |update| before the clip, at most 1e30; NaN for an update that is not finite.
    """
    structure = jax.tree.structure(update)
    groups, limit = _groups(update, clip_norm, per)
    message = []
    were_clipped = []
    norms = []
    is_finite = True
    for group in groups:
        near, far = length_over(group, limit)
        room = 1 - slack(group)  # the largest ratio norm / limit that needs no clip, given the norm's rounding error
        # Written with `~`, so that a NaN counts as longer and as out of range; the message then stays NaN.
        is_longer = ~(near <= room)
        is_out_of_range = ~(near < jnp.inf)
        shrink = room / jnp.where(is_longer, jnp.where(is_out_of_range, far, near), 1)
        # Two factors, since the product of the two could underflow where the norm is out of range.
        first_factor = jnp.where(is_out_of_range, SAFE_SCALE, 1.0)
        second_factor = jnp.where(is_longer, jnp.where(is_out_of_range, shrink * limit, shrink), 1.0)
        # The factors are float64 if any leaf is, hence the second `astype`.
        scaled = [(x.astype(_wide(x)) * first_factor * second_factor).astype(_wide(x)) for x in group]
        message += [_rounded(x, y, is_longer, narrow) for x, y in zip(group, scaled, strict=True)]
        were_clipped.append(is_longer.astype(jnp.float32))
        norms.append(_norm(near, far, limit))
        is_finite &= jnp.isfinite(far)  # the scale of `far` holds the squares of the largest floats
    norm = norms[0] if len(norms) == 1 else _norm(*length_over(norms, limit), limit)
    one = jnp.float32(1)
    measured = {
        "clipped_update_share": Mean(jnp.asarray(sum(were_clipped)), jnp.float32(len(were_clipped))),
        # Not a number for an update that is not finite. Integers that are made of the message show nothing of it.
        "unclipped_norm": Mean(jnp.where(is_finite, jnp.minimum(norm, MAX_REPORTED_NORM), jnp.nan), one),
    }
    return structure.unflatten(message), measured


def _plainly_clipped(update: PyTree, clip_norm: float | Array, per: str, narrow: bool) -> PyTree:
    """Returns the clipped update for derivatives, in plain arithmetic."""
    groups, limit = _groups(update, clip_norm, per)
    message = []
    for group in groups:
        square = sum(jnp.sum(_widened(x) ** 2) for x in group)
        norm = jnp.sqrt(jnp.where(square > 0, square, 1))  # the derivative of a square root at 0 is infinite
        factor = jnp.where((square > 0) & (norm > limit), limit / norm, 1)
        message += [(_widened(x) * factor).astype(x.dtype if narrow else _wide(x)) for x in group]
    return jax.tree.structure(update).unflatten(message)


def _widened(x: Array) -> Array:
    return x.astype(_wide(x))


def clip_metrics(measured: dict[str, Mean]) -> dict[str, Array]:
    """Converts what `clipped` measured to the metrics of a round; 0 if no message arrived.

    Guarantees: for the update (3, 4), clipped by leaf at 4.5, the unclipped norm is 5 and the clipped share 1/2
    (tests/transform/test_clip.py::test_hand_computed).
    """
    return {name: mean.total / jnp.maximum(mean.weight, 1) for name, mean in measured.items()}


def scaled_wire(update_spec: PyTree, wire: Wire, factors: int = 1) -> Wire:
    """Returns the wire after the numbers are scaled by common factors.

    Plain numbers cost the same. Numbers that an earlier member coded keep their code, and each factor is sent as a
    float32.

    Args:
      update_spec: shapes and dtypes of the update.
      wire: of the incoming update.
      factors: the number of factors.

    Guarantees: clipping plain floats costs no bits, and clipping coded numbers costs 32 bits for each factor
    (tests/transform/test_clip.py::test_wire_pays_for_the_factor).
    """
    if wire == plain_wire(update_spec):
        return wire
    coded_bits = None if wire.coded_bits is None else wire.coded_bits + 32 * factors
    return wire._replace(side_bits=wire.side_bits + 32 * factors, coded_bits=coded_bits)


def _groups(update: PyTree, clip_norm: float | Array, per: str) -> tuple[list[list[Array]], float | Array]:
    """Returns (groups of leaves that are clipped together, the norm that each group may have)."""
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(update)]
    if per == "vector":
        return [leaves], clip_norm
    return [[x] for x in leaves], clip_norm / math.sqrt(max(1, _num_filled(leaves)))


def _num_filled(update: PyTree) -> int:
    """The number of leaves that hold numbers."""
    return sum(math.prod(jnp.shape(x)) > 0 for x in jax.tree.leaves(update))


def _wide(x: Array):
    return tree.at_least_float32(x.dtype)


def _squares(x: Array, factor: float | Array) -> Array:
    """Computes the sum of (x factor)^2 by pairs, in an order that no compiler changes.

    The order matters, since every number of a clipped message depends on the bits of a norm.

    Args:
      x: floats of any shape, one number at least.
      factor: a number or [], so that squares neither overflow nor vanish.

    Returns: [], float32 at least.
    """
    x = x.reshape(-1).astype(_wide(x)) * factor
    x = x * x
    while x.size > 1:
        # Numbers are laid out in a power of two of rows, and the halves of the rows are added until one row is left.
        rows = min(BLOCK, 1 << (x.size - 1).bit_length())
        x = jnp.pad(x, (0, -x.size % rows)).reshape(rows, -1)
        while rows > 1:
            rows //= 2
            x = x[:rows] + x[rows:]
        x = x[0]
    return x[0]


def length_over(leaves: list[Array], limit: float | Array) -> tuple[Array, Array]:
    """Computes the norm of a group of leaves in two scales, both within a relative error of `slack`.

    Args:
      leaves: arrays of floats.
      limit: the norm that the group may have.

    Returns: (norm / limit, which is infinite past 2^63; norm times 2^-80, which is 0 for short updates).

    Guarantees: `clip` computes with these norms, and none of its messages is longer than the clip norm or than the
    update, for finite updates of scale 0 to 1e38 in float32, bfloat16 and float16
    (tests/transform/test_clip.py::test_no_message_is_longer_than_the_bound).
    """
    leaves = [x for x in leaves if x.size] or [jnp.zeros(1)]
    # Hidden from the compiler in both arithmetics: with a constant c, (x c)(x c) may become x x (c c), where c c
    # underflows to zero.
    scale = engine.rounded_here(jnp.float32(SAFE_SCALE), leaves)
    near, far = (reduce(jnp.add, [_squares(x, factor) for x in leaves]) for factor in (1 / limit, scale))
    return jnp.where(near < 2.0**126, jnp.sqrt(near), jnp.inf), jnp.sqrt(far)


def _norm(near: Array, far: Array, limit: float | Array) -> Array:
    """The norm, from the two scales of `length_over`."""
    return jnp.where(near < jnp.inf, near * limit, far / SAFE_SCALE)


def slack(leaves: list[Array], others: int = 16) -> float:
    """Bounds the relative error of a norm, from the rounding of its sum of squares and of further operations.

    Args:
      leaves: the arrays of the norm.
      others: the number of further operations that round.

    Guarantees: `clip` allows for this error, and none of its messages is longer than the clip norm or than the update,
    for finite updates of scale 0 to 1e38 in float32, bfloat16 and float16
    (tests/transform/test_clip.py::test_no_message_is_longer_than_the_bound).
    """
    levels = 1 + max(math.log2(max(x.size, 2)) for x in leaves)
    return (levels / 2 + len(leaves) / 2 + others) * 2.0**-24


def _rounded(x: Array, wide: Array, was_clipped: Array, narrow: bool) -> Array:
    """Returns the clipped numbers in the leaf's dtype, rounded towards zero if the leaf was clipped.

    Rounding to the nearest could lengthen the message past the clip norm.

    Args:
      x: the leaf before the clip, floats of any shape.
      wide: the leaf after the clip, float32 at least.
      was_clipped: [] bool; with narrow=True, False returns x itself.
      narrow: True: the result has the dtype of x. False: it is `wide`.
    """
    if not narrow or x.dtype == wide.dtype:
        return wide
    info = jnp.finfo(x.dtype)
    # Clearing the bits of the mantissa that the narrow dtype does not have rounds towards zero.
    bits = jax.lax.bitcast_convert_type(wide, jnp.uint32) & jnp.uint32((1 << 32) - (1 << (23 - info.nmant)))
    truncated = jax.lax.bitcast_convert_type(bits, jnp.float32)
    if info.minexp > -126:  # below the normal numbers of the narrow dtype, its steps no longer shrink
        step = 2.0 ** (info.minexp - info.nmant)
        truncated = jnp.where(jnp.abs(wide) < 2.0**info.minexp, jnp.trunc(wide / step) * step, truncated)
    return jnp.where(was_clipped, truncated.astype(x.dtype), x)
