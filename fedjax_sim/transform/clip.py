"""Clipping: no message is longer than a norm, whatever the update holds and in whatever dtype it is sent.

    g' = g min(1, C / |g|)        |g| over all leaves: shorter updates stay as they are, nothing is scaled up to C

Norms are sums of squares in float32. They are added by pairs in a fixed order, so that their rounding error has a bound
and does not depend on the compiler, and in two scales, so that nothing overflows. The limit lies below C by that bound
(about 2e-6 C), so that the message, after all rounding, is no longer than C. Narrow leaves (bfloat16, float16) of a
clipped update are rounded towards zero.
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

__all__ = [
    "check_clip_norm",
    "clip",
    "clip_metrics",
    "clipped",
    "length_over",
    "personal_clip",
    "scaled_wire",
    "slack",
]

LOW, HIGH = 1e-9, 1e9  # of a clip norm
PER = ("vector", "leaf")
BLOCK = 64  # squares summed in one pass
FAR = 2.0**-80  # brings squares of the largest floats into range
MOST = 1e30  # of a norm that is reported


@validate.named_arguments
def clip(clip_norm: float, *, per: Literal["vector", "leaf"] = "vector") -> UpdateTransform:
    """Updates clipped to a norm C: g min(1, C / |g|).

    Args:
      clip_norm: C in [1e-9, 1e9].
      per: "vector": by the norm of the whole update. "leaf": each of the L leaves that hold numbers by its own norm, to
        C / sqrt(L), so that the whole update is again no longer than C.

    Returns: a transform with `l2_bound` C. Info: `clipped_update_share`, of updates (or leaves), and `unclipped_norm`,
    the mean norm before. Both are means of what clients measure, without noise: not private.

    Guarantees: no output is longer than C in the dtype that is sent, zeros stay zeros, and nothing from 1e-38 to 1e38
    overflows (tests/transform/test_clip.py::test_no_message_is_longer_than_the_bound); shorter updates keep every bit,
    longer ones their direction (::test_hand_computed); one client more or less moves a sum by at most C
    (::test_neighbouring_cohorts); the same bits for any chunk and devices (::test_devices_and_chunks); `squared_error`
    is exact to 1e-5 C^2 (::test_declared_error).

    References: Abadi et al. 2016, algorithm 1; McMahan et al. 2018, section 2.3 (flat and per-layer clipping).

    >>> import jax, jax.numpy as jnp
    >>> message, _, measured = clip(1.0).on_client(jax.random.key(0), jnp.array([3.0, 4.0]), (), ())
    >>> [round(float(x), 4) for x in message], float(measured["unclipped_norm"].total)
    ([0.6, 0.8], 5.0)
    """
    check_clip_norm(clip_norm)

    def on_client(key, update, state, memory):
        message, seen = clipped(key, update, clip_norm, per=per)
        return message, memory, seen

    def on_server(key, cohort, aggregate, state, measured, sensitivity):
        return aggregate, state, clip_metrics(measured)

    def squared_error(update):
        groups, limit = _groups(update, clip_norm, per)
        cut = [jnp.maximum(_norm(*length_over(leaves, limit), limit) - limit, 0) for leaves in groups]
        return sum((x * x for x in cut), jnp.float32(0))

    return stateless(
        lambda key, update: update,
        wire=lambda spec, wire: scaled_wire(spec, wire, 1 if per == "vector" else _filled(spec)),
        l2_bound=clip_norm,
        nonexpansive=True,
        squared_error=squared_error,
        exact_error=True,
    )._replace(on_client=on_client, on_server=on_server)


@validate.named_arguments
def personal_clip(factor: PositiveShare) -> UpdateTransform:
    """Every update clipped to its own threshold C_i = factor |g_i|, which scales it by the factor. NEVER private.

    It is there for studies. A threshold that follows the data bounds nothing: the sensitivity is factor times the
    longest update that any possible client could have, and the norms themselves leak. So it declares no bound and no
    noise, and no epsilon may be reported for what is built on it.

    Args:
      factor: in (0, 1].

    Guarantees: keeps every direction and the same share of every update, and declares nothing that an accountant could
    use (tests/transform/test_clip.py::test_personal_thresholds_bound_nothing).

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
    """Raises ValueError or TypeError unless a clip norm is a number in [1e-9, 1e9].

    Guarantees: tests/transform/test_clip.py::test_wrong_norms_are_refused.
    """
    validate.in_range(name, clip_norm, LOW, HIGH, hint="It is the norm of the longest update that may be sent.")


def clipped(
    key: Array, update: PyTree, clip_norm: float | Array, *, per: str = "vector", narrow: bool = True
) -> tuple[PyTree, dict[str, Mean]]:
    """(message, measured): an update clipped to a norm, which may be traced.

    Args:
      key: the client's; no randomness comes from it.
      narrow: return the leaves' dtypes; otherwise at least float32, for what the same transform does next.

    Guarantees: no message is longer than the clip norm
    (tests/transform/test_clip.py::test_no_message_is_longer_than_the_bound); the derivative is that of the clip
    (::test_derivative).
    """
    if not jax.tree.leaves(update):
        none = Mean(jnp.zeros(()), jnp.ones(()))
        return update, {"clipped_update_share": none, "unclipped_norm": none}
    check_floats(update)
    # a Python number is not traced: it is computed with in double precision
    traced = clip_norm if isinstance(clip_norm, jax.Array) else None

    @jax.custom_jvp
    def exactly(update, traced, zero):
        return _clipped(update, clip_norm if traced is None else traced, zero, per, narrow)

    @exactly.defjvp
    def _(primals, tangents):
        update, traced, zero = primals
        message, measured = exactly(update, traced, zero)

        def plain(update, traced):
            return _plainly(update, clip_norm if traced is None else traced, per, narrow)

        moved = jax.jvp(plain, (update, traced), tangents[:2])[1]
        return (message, measured), (moved, jax.tree.map(jnp.zeros_like, measured))

    return exactly(update, traced, engine.hidden_zero(key))


def _clipped(
    update: PyTree, clip_norm: float | Array, zero: engine.HiddenZero, per: str, narrow: bool
) -> tuple[PyTree, dict[str, Mean]]:
    update = engine.computed_once(update, zero)  # the norm and the scaled numbers are of the same bits
    structure = jax.tree.structure(update)
    groups, limit = _groups(update, clip_norm, per)
    message, over, lengths = [], [], []
    for group in groups:
        near, far = engine.computed_once(length_over(group, limit), zero)
        room = 1 - slack(group)
        longer, apart = ~(near <= room), ~(near < jnp.inf)  # NaN is both, and stays
        shrink = room / jnp.where(longer, jnp.where(apart, far, near), 1)
        first = jnp.where(apart, FAR, 1.0)
        second = jnp.where(longer, jnp.where(apart, shrink * limit, shrink), 1.0)
        # the factors are float64 where any leaf is, hence the second astype
        scaled = [(x.astype(_wide(x)) * first * second).astype(_wide(x)) for x in group]
        message += [_rounded(x, y, longer, narrow) for x, y in zip(group, scaled, strict=True)]
        over.append(longer.astype(jnp.float32))
        lengths.append(_norm(near, far, limit))
    norm = lengths[0] if len(lengths) == 1 else _norm(*length_over(lengths, limit), limit)
    one = jnp.float32(1)
    measured = {
        "clipped_update_share": Mean(sum(over), jnp.float32(len(over))),
        "unclipped_norm": Mean(jnp.minimum(norm, MOST), one),
    }
    return structure.unflatten(message), measured


def _plainly(update: PyTree, clip_norm: float | Array, per: str, narrow: bool) -> PyTree:
    """The clipped update for derivatives, in plain arithmetic: the two scales of the exact norm are not smooth."""
    groups, limit = _groups(update, clip_norm, per)
    message = []
    for group in groups:
        square = sum(jnp.sum(_wide_value(x) ** 2) for x in group)
        length = jnp.sqrt(jnp.where(square > 0, square, 1))
        factor = jnp.where((square > 0) & (length > limit), limit / length, 1)
        message += [(_wide_value(x) * factor).astype(x.dtype if narrow else _wide(x)) for x in group]
    return jax.tree.structure(update).unflatten(message)


def _wide_value(x: Array) -> Array:
    return x.astype(_wide(x))


def clip_metrics(measured: dict[str, Mean]) -> dict[str, Array]:
    """What `clipped` measured, as metrics of a round; 0 where nothing arrived.

    Guarantees: tests/transform/test_clip.py::test_hand_computed.
    """
    return {name: mean.total / jnp.maximum(mean.weight, 1) for name, mean in measured.items()}


def scaled_wire(update_spec: PyTree, wire: Wire, factors: int = 1) -> Wire:
    """What scaling by so many common factors costs: nothing for plain numbers, else a float32 each beside the code.

    Guarantees: tests/transform/test_clip.py::test_wire_pays_for_the_factor.
    """
    if wire == plain_wire(update_spec):
        return wire
    coded = None if wire.coded_bits is None else wire.coded_bits + 32 * factors
    return wire._replace(side_bits=wire.side_bits + 32 * factors, coded_bits=coded)


def _groups(update: PyTree, clip_norm: float | Array, per: str) -> tuple[list[list[Array]], float | Array]:
    """Leaves that are clipped together, and the norm that each group may have."""
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(update)]
    if per == "vector":
        return [leaves], clip_norm
    return [[x] for x in leaves], clip_norm / math.sqrt(max(1, _filled(leaves)))


def _filled(update: PyTree) -> int:
    """Leaves that hold numbers."""
    return sum(math.prod(jnp.shape(x)) > 0 for x in jax.tree.leaves(update))


def _wide(x: Array):
    return tree.at_least_float32(x.dtype)


def _squares(x: Array, factor: float | Array, zero: engine.HiddenZero) -> Array:
    """The sum of (x factor)^2 by pairs, in an order that no compiler changes: every number's bits depend on a norm."""
    x = x.reshape(-1).astype(_wide(x)) * factor
    x = engine.rounded_here(x * x, zero)
    while x.size > 1:
        rows = min(BLOCK, 1 << (x.size - 1).bit_length())
        x = jnp.pad(x, (0, -x.size % rows)).reshape(rows, -1)
        while rows > 1:
            rows //= 2
            x = x[:rows] + x[rows:]
        x = x[0]
    return x[0]


def length_over(leaves: list[Array], limit: float | Array) -> tuple[Array, Array]:
    """(norm / limit, infinite past 2^63; norm times 2^-80, which is 0 for short updates), both within `slack`.

    Guarantees: tests/transform/test_clip.py::test_no_message_is_longer_than_the_bound.
    """
    leaves = [x for x in leaves if x.size] or [jnp.zeros(1)]
    zero = engine.hidden_zero(leaves)
    scale = engine.rounded_here(jnp.float32(FAR), zero)  # or (x c)(x c) may become x x (c c), and c c zero
    near, far = (reduce(jnp.add, [_squares(x, factor, zero) for x in leaves]) for factor in (1 / limit, scale))
    return jnp.where(near < 2.0**126, jnp.sqrt(near), jnp.inf), jnp.sqrt(far)


def _norm(near: Array, far: Array, limit: float | Array) -> Array:
    return jnp.where(near < jnp.inf, near * limit, far / FAR)


def slack(leaves: list[Array], others: int = 16) -> float:
    """The largest relative error of a norm: rounding in its sum of squares, and in `others` further operations.

    Guarantees: tests/transform/test_clip.py::test_no_message_is_longer_than_the_bound.
    """
    levels = 1 + max(math.log2(max(x.size, 2)) for x in leaves)
    return (levels / 2 + len(leaves) / 2 + others) * 2.0**-24


def _rounded(x: Array, wide: Array, changed: Array, narrow: bool) -> Array:
    """The clipped numbers in the leaf's dtype, rounded towards zero where clipping changed them."""
    if not narrow or x.dtype == wide.dtype:
        return wide
    info = jnp.finfo(x.dtype)
    bits = jax.lax.bitcast_convert_type(wide, jnp.uint32) & jnp.uint32((1 << 32) - (1 << (23 - info.nmant)))
    cut = jax.lax.bitcast_convert_type(bits, jnp.float32)
    if info.minexp > -126:  # below its normal numbers the steps no longer shrink
        step = 2.0 ** (info.minexp - info.nmant)
        cut = jnp.where(jnp.abs(wide) < 2.0**info.minexp, jnp.trunc(wide / step) * step, cut)
    return jnp.where(changed, cut.astype(x.dtype), x)
