"""Clipping: no letter is longer than a norm, whatever arrives and in whatever dtype it is sent.

    g' = g min(1, C / |g|)        |g| over all leaves: shorter letters stay as they are, nothing is scaled up to C

Norms are sums of squares in float32, by pairs in a fixed order so that their rounding has a bound and depends on no
compiler, in two scales so that nothing overflows, and the limit lies below C by that bound (about 2e-6 C): the letter
that is sent, rounded, is no longer than C. Narrow leaves (bfloat16, float16) of a clipped letter are rounded towards
zero.
"""

from __future__ import annotations

import math
from functools import reduce

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.transform.chain import as_it_comes, check_floats, plain_wire, stateless
from fedjax_sim.types import Array, Mean, PyTree, UpdateTransform, Wire

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


def clip(clip_norm: float, *, per: str = "vector") -> UpdateTransform:
    """Letters no longer than a norm C: g min(1, C / |g|).

    Args:
      clip_norm: C in [1e-9, 1e9].
      per: "vector": by the norm of the whole letter. "leaf": each of the L leaves that hold numbers by its own norm, to
        C / sqrt(L), so that the whole letter is again no longer than C.

    Returns: a transform with `l2_bound` C. Info: `clipped_letters`, the share of letters (or leaves) that were cut, and
    `letter_norm`, the mean norm before. Both are the clients' own numbers, reported and never used: not private.

    Guarantees: no output is longer than C in the dtype that is sent, zeros stay zeros, and nothing from 1e-38 to 1e38
    overflows (tests/transform/test_clip.py::test_no_letter_is_longer_than_the_bound); shorter letters do not change by
    a bit, longer ones keep their direction (::test_hand_computed); one client more or less moves a sum by at most C
    (::test_neighbouring_cohorts); the same bits for any chunk and devices (::test_devices_and_chunks); `squared_error`
    is exact to 1e-5 C^2 (::test_declared_error).

    References: Abadi et al. 2016, algorithm 1; McMahan et al. 2018, section 2.3 (flat and per-layer clipping).

    >>> import jax, jax.numpy as jnp
    >>> letter, _, measured = clip(1.0).on_client(jax.random.key(0), jnp.array([3.0, 4.0]), (), ())
    >>> [round(float(x), 4) for x in letter], float(measured["letter_norm"].total)
    ([0.6, 0.8], 5.0)
    """
    check_clip_norm(clip_norm)
    validate.one_of("per", per, PER)

    def on_client(key, update, state, memory):
        letter, seen = clipped(key, update, clip_norm, per=per)
        return letter, memory, seen

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


def personal_clip(factor: float) -> UpdateTransform:
    """Every letter clipped to its own threshold C_i = factor |g_i|: scaled by the factor. A study only, NEVER private.

    A threshold that follows the data bounds nothing: the sensitivity is factor times the longest letter that any
    possible client could send, and the lengths themselves leak. So it declares no bound and no noise, and no epsilon
    may be reported for what is built on it.

    Args:
      factor: in (0, 1].

    Guarantees: keeps every direction and the same share of every letter, and declares nothing that an accountant could
    use (tests/transform/test_clip.py::test_personal_thresholds_bound_nothing).

    >>> import jax, jax.numpy as jnp
    >>> personal_clip(0.5).on_client(jax.random.key(0), jnp.array([3.0, 4.0]), (), ())[0].tolist()
    [1.5, 2.0]
    """
    validate.in_range("factor", factor, 0, 1, open_low=True)

    def shorter(key, update):
        check_floats(update)
        return jax.tree.map(lambda x: (x.astype(_wide(x)) * factor).astype(x.dtype), update)

    def squared_error(update):
        squares = (jnp.square(jnp.asarray(x).astype(_wide(x))).sum() for x in jax.tree.leaves(update))
        return sum(((1 - factor) ** 2 * square for square in squares), jnp.float32(0))

    return stateless(shorter, wire=as_it_comes, nonexpansive=True, squared_error=squared_error, exact_error=True)


def check_clip_norm(clip_norm: float, name: str = "clip_norm") -> None:
    """Raises unless a clip norm is a number in [1e-9, 1e9]."""
    validate.in_range(name, clip_norm, LOW, HIGH, hint="It is the longest letter that may be sent.")


def clipped(
    key: Array, update: PyTree, clip_norm: float | Array, *, per: str = "vector", narrow: bool = True
) -> tuple[PyTree, dict[str, Mean]]:
    """(letter, measured): an update clipped to a norm, which may be traced.

    Args:
      key: the client's; no randomness comes from it.
      narrow: give back the leaves' dtypes; else at least float32, for what follows in the same part.
    """
    if not jax.tree.leaves(update):
        none = Mean(jnp.zeros(()), jnp.ones(()))
        return update, {"clipped_letters": none, "letter_norm": none}
    check_floats(update)
    traced = clip_norm if isinstance(clip_norm, jax.Array) else None  # a number stays one, with a double's arithmetic

    @jax.custom_jvp
    def exactly(update, traced, zero):
        return _clipped(update, clip_norm if traced is None else traced, zero, per, narrow)

    @exactly.defjvp
    def _(primals, tangents):
        update, traced, zero = primals
        letter, measured = exactly(update, traced, zero)

        def plain(update, traced):
            return _plainly(update, clip_norm if traced is None else traced, per, narrow)

        moved = jax.jvp(plain, (update, traced), tangents[:2])[1]
        return (letter, measured), (moved, jax.tree.map(jnp.zeros_like, measured))

    return exactly(update, traced, tree.hidden_zero(jax.random.key_data(key)))


def _clipped(
    update: PyTree, clip_norm: float | Array, zero: Array, per: str, narrow: bool
) -> tuple[PyTree, dict[str, Mean]]:
    update = tree.settled(update, zero)  # the norm is that of the letter, and neither is computed again for the other
    structure = jax.tree.structure(update)
    groups, limit = _groups(update, clip_norm, per)
    letter, over, lengths = [], [], []
    for group in groups:
        near, far = tree.settled(length_over(group, limit), zero)
        room = 1 - slack(group)
        longer, apart = ~(near <= room), ~(near < jnp.inf)  # NaN is both, and stays
        shrink = room / jnp.where(longer, jnp.where(apart, far, near), 1)
        first = jnp.where(apart, FAR, 1.0)
        second = jnp.where(longer, jnp.where(apart, shrink * limit, shrink), 1.0)
        scaled = [(x.astype(_wide(x)) * first * second).astype(_wide(x)) for x in group]  # beside a double, all are one
        letter += [_rounded(x, y, longer, narrow) for x, y in zip(group, scaled, strict=True)]
        over.append(longer.astype(jnp.float32))
        lengths.append(_norm(near, far, limit))
    norm = lengths[0] if len(lengths) == 1 else _norm(*length_over(lengths, limit), limit)
    one = jnp.float32(1)
    measured = {
        "clipped_letters": Mean(sum(over), jnp.float32(len(over))),
        "letter_norm": Mean(jnp.minimum(norm, MOST), one),
    }
    return structure.unflatten(letter), measured


def _plainly(update: PyTree, clip_norm: float | Array, per: str, narrow: bool) -> PyTree:
    """The letter as derivatives see it: what keeps a norm exact at every scale is not smooth."""
    groups, limit = _groups(update, clip_norm, per)
    letter = []
    for group in groups:
        square = sum(jnp.sum(_wide_value(x) ** 2) for x in group)
        length = jnp.sqrt(jnp.where(square > 0, square, 1))
        factor = jnp.where((square > 0) & (length > limit), limit / length, 1)
        letter += [(_wide_value(x) * factor).astype(x.dtype if narrow else _wide(x)) for x in group]
    return jax.tree.structure(update).unflatten(letter)


def _wide_value(x: Array) -> Array:
    return x.astype(_wide(x))


def clip_metrics(measured: dict[str, Mean]) -> dict[str, Array]:
    """What `clipped` measured, as metrics of a round; 0 where nothing arrived."""
    return {name: mean.total / jnp.maximum(mean.weight, 1) for name, mean in measured.items()}


def scaled_wire(update_spec: PyTree, wire: Wire, factors: int = 1) -> Wire:
    """What scaling by so many common factors costs: nothing for plain numbers, else a float32 each beside the code."""
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
    return jnp.promote_types(x.dtype, jnp.float32)


def _squares(x: Array, factor: float | Array, zero: Array) -> Array:
    """The sum of (x factor)^2 by pairs, in an order that depends on no compiler: a norm decides every number's bits."""
    x = x.reshape(-1).astype(_wide(x)) * factor
    x = tree.pinned(x * x, zero)
    while x.size > 1:
        rows = min(BLOCK, 1 << (x.size - 1).bit_length())
        x = jnp.pad(x, (0, -x.size % rows)).reshape(rows, -1)
        while rows > 1:
            rows //= 2
            x = x[:rows] + x[rows:]
        x = x[0]
    return x[0]


def length_over(leaves: list[Array], limit: float | Array) -> tuple[Array, Array]:
    """(norm / limit, infinite past 2^63; norm times 2^-80, 0 for short letters), both within `slack`."""
    leaves = [x for x in leaves if x.size] or [jnp.zeros(1)]
    zero = tree.hidden_zero(leaves)
    scale = tree.pinned(jnp.float32(FAR), zero)  # or (x c)(x c) may become x x (c c), and c c zero
    near, far = (reduce(jnp.add, [_squares(x, factor, zero) for x in leaves]) for factor in (1 / limit, scale))
    return jnp.where(near < 2.0**126, jnp.sqrt(near), jnp.inf), jnp.sqrt(far)


def _norm(near: Array, far: Array, limit: float | Array) -> Array:
    return jnp.where(near < jnp.inf, near * limit, far / FAR)


def slack(leaves: list[Array], others: int = 16) -> float:
    """At most this share of a norm is lost or won by rounding: of sums of squares, and of a few other operations."""
    levels = 1 + max(math.log2(max(x.size, 2)) for x in leaves)
    return (levels / 2 + len(leaves) / 2 + others) * 2.0**-24


def _rounded(x: Array, wide: Array, changed: Array, narrow: bool) -> Array:
    """The letter's numbers in the leaf's dtype: towards zero where they changed."""
    if not narrow or x.dtype == wide.dtype:
        return wide
    info = jnp.finfo(x.dtype)
    bits = jax.lax.bitcast_convert_type(wide, jnp.uint32) & jnp.uint32((1 << 32) - (1 << (23 - info.nmant)))
    cut = jax.lax.bitcast_convert_type(bits, jnp.float32)
    if info.minexp > -126:  # below its normal numbers the steps no longer shrink
        step = 2.0 ** (info.minexp - info.nmant)
        cut = jnp.where(jnp.abs(wide) < 2.0**info.minexp, jnp.trunc(wide / step) * step, cut)
    return jnp.where(changed, cut.astype(x.dtype), x)
