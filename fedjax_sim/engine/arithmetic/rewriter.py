"""One rounding for all programs: operations that compilers round in more than one way, written so that there is one.

A round is compiled anew for each number of devices, and a compiler decides by the surrounding program whether A / c
becomes A (1 / c), whether a product is fused into the addition that follows, and in which order a sum is vectorised.
Each decision can change the last bit of the model. `reproducible` traces a function and rewrites such operations so
that nothing is left to decide. It works on the traced program, so it covers whatever was called there: a user's loss,
an optimiser of optax, any part of a round. `engine.arithmetic.barrier` has what it rounds products with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec

from fedjax_sim import tree
from fedjax_sim.engine.arithmetic.barrier import HiddenZero, computed_once, hidden_zero, rounding_here
from fedjax_sim.engine.arithmetic.exact_sum import without_derivative
from fedjax_sim.engine.arithmetic.mode import is_fast
from fedjax_sim.engine.jaxpr import Program, as_traced, bind, evaluate, inner_programs, opened, programs
from fedjax_sim.engine.platform import target
from fedjax_sim.types import Array, PyTree

__all__ = ["divide", "pairwise_sum", "reproducible"]

LARGEST_SUM = 1 << 24  # numbers; a longer sum by halves would hold addends in memory that the compiler never stores
UNROLLED = 16
ROUNDED = {
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "digamma", "erf", "erf_inv",
    "erfc", "exp", "exp2", "expm1", "integer_pow", "lgamma", "log", "log1p", "logistic", "mul", "pow", "rsqrt", "sin",
    "sinh", "sqrt", "square", "tan", "tanh",
}  # fmt: skip
MOVED = {
    "abs", "bitcast_convert_type", "broadcast_in_dim", "clamp", "concatenate", "copy", "dynamic_slice",
    "dynamic_update_slice", "gather", "max", "min", "neg", "pad", "reduce_max", "reduce_min", "reduce_precision",
    "reshape", "rev", "scatter", "select_n", "slice", "sort", "split", "squeeze", "top_k", "transpose",
}  # fmt: skip
COMBINERS = ("reduce", "scatter", "select_and_")  # their programs make one number of two: compilers know some of them


@jax.custom_jvp
def divide(a: Array, b: Array) -> Array:
    """a / b, correctly rounded on a CPU in every program: an IEEE division that no compiler turns into a product.

    The bits of both are exclusive-or'ed with a zero that XLA does not recognise, so that it knows neither operand. LLVM
    does recognise it, and drops it, so it costs nothing.

    Guarantees: NumPy's quotients, by constants and by scalars too; a quotient's derivative
    (tests/engine/arithmetic/test_rewriter.py).
    """
    return _divided(a, b)


@divide.defjvp
def _(primals, tangents):
    quotient = divide(*primals)
    return quotient, (tangents[0] - quotient * tangents[1]) / primals[1]


@functools.partial(jax.jit, inline=True)
def _divided(a: Array, b: Array) -> Array:
    a, b = jnp.broadcast_arrays(a, b)
    integer = _integer(a.dtype)
    if integer is None:
        return jax.lax.div(a, b)
    bits = [jax.lax.bitcast_convert_type(x, integer) for x in (a, b)]
    known = bits[0] | bits[1]
    if a.ndim:  # of two scalars that were broadcast XLA would see the quotient of scalars, and a reciprocal in it
        known |= jax.lax.broadcasted_iota(integer, a.shape, a.shape.index(max(a.shape)))
    zero = jnp.minimum(known & jnp.iinfo(integer).max, 0)
    return jax.lax.div(*(jax.lax.bitcast_convert_type(x ^ zero, a.dtype) for x in bits))


@functools.partial(jax.jit, static_argnames="axes", inline=True)
def pairwise_sum(x: Array, axes: tuple[int, ...]) -> Array:
    """The sum over axes, one axis after the other, in an order that no compiler changes: halves are added until one
    number is left.

    Guarantees: the halves are powers of two long, so that zeros behind the numbers change no bit but the sign of a zero
    (tests/engine/arithmetic/test_rewriter.py::test_sums_have_one_order).
    """
    narrow, x = x.dtype, x.astype(tree.at_least_float32(x.dtype))
    for axis in sorted(axes, reverse=True):
        if x.shape[axis] == 0:
            x = jnp.zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype)
        while (size := x.shape[axis]) > UNROLLED:
            half = 1 << (size - 1).bit_length() - 1
            low, high = (jax.lax.slice_in_dim(x, *ends, axis=axis) for ends in ((0, half), (half, size)))
            if size < 2 * half:
                pad = [(0, 2 * half - size if i == axis else 0) for i in range(x.ndim)]
                high = jnp.pad(high, pad)
            x = low + high
        parts = [jax.lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]
        while (size := len(parts)) > 1:
            half = 1 << (size - 1).bit_length() - 1
            parts = [a + parts[half + i] if half + i < size else a for i, a in enumerate(parts[:half])]
        x = parts[0]
    return x.astype(narrow)


def reproducible(function: Callable, source: PyTree = None) -> Callable:
    """The same function with the same rounding in every program: divisions are correctly rounded, products and
    elementary functions are rounded where they stand, sums over axes of up to 2^24 numbers have a fixed order
    (`pairwise_sum`), and floats of 16 bits are rounded to 16 bits after every operation.

    Args:
      function: of pytrees of arrays, to pytrees of arrays.
      source: arrays for the hidden zero that products are rounded with (`engine.arithmetic.barrier`); the arguments
        where it has none that are traced. Under `vmap`, what all clients share: a zero for each client would be worked
        out again at every coordinate.

    Products of matrices, convolutions, cumulative and longer sums, products over axes, functions that reduce or scatter
    with, and complex numbers are left to the compiler.

    On a CPU, values behind `jax.lax.optimization_barrier` are computed once, which XLA:CPU would not heed by itself. So
    are normal draws (`jax.random.normal`, `prng.normal`), whose last bits depend on what XLA fuses them with.

    Inside of `engine.fast_arithmetic()` only these barriers are kept, for speed; nothing else is rewritten.

    Raises: TypeError for a derivative through it in reproducible arithmetic, which would be 0.

    Guarantees: tests/engine/arithmetic/test_rewriter.py; no division of a round is left to the compiler
    (tests/laws/test_rounding.py); the law over all rows, on 1, 2, 3 and 8 devices, is tests/laws/test_devices.py
    (`-m full`).

    >>> import jax, jax.numpy as jnp
    >>> float(jax.jit(reproducible(lambda x: x / 49))(jnp.float32(49)))
    1.0
    """

    def call(*args: PyTree) -> PyTree:
        rewriter = _Rewriter(rounds=not is_fast())
        program, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        if is_fast() and not rewriter.needed(program):
            return function(*args)
        leaves = list(map(jnp.asarray, jax.tree.leaves(args)))
        if rewriter.rounds:
            leaves = [without_derivative(x) if _integer(x.dtype) else x for x in leaves]
        unknown = _unknown(jax.tree.leaves(source))
        zero = hidden_zero(unknown) if unknown else None
        return jax.tree.unflatten(jax.tree.structure(shape), rewriter.run(program, leaves, zero))

    return call


class _Rewriter:
    """Evaluates traced programs with their operations rewritten. A program inside of an equation (a loop's body, a
    called function) is rewritten once, however often it is met, and is handed the zero as one more argument."""

    def __init__(self, rounds: bool):
        self.rounds = rounds  # False: only barriers are given their effect
        self.inner = {}

    def run(self, program: core.ClosedJaxpr, args: Sequence[Array], zero: HiddenZero | None = None) -> list[Array]:
        if zero is None and self.needed(program):
            zero = hidden_zero(_unknown(args))
        rounding = functools.cache(lambda context: rounding_here(zero))  # each in its equation's context
        return evaluate(program, args, lambda equation, values: self.step(equation, values, rounding, zero))

    def step(
        self, equation: core.JaxprEqn, values: list[Array], rounding: Callable, zero: HiddenZero | None
    ) -> Sequence[Array]:
        name, params = equation.primitive.name, equation.params
        with as_traced(equation):
            if self.chooses(equation):
                known = self.known(equation, values)
                if known is not None:
                    return rounding(equation.ctx)([known]) if _is_short(known.dtype) else [known]
            if self.is_barrier(equation):
                return computed_once(bind(equation, values) if name == "erf_inv" else values, zero)
            if self.rounds and name in ("custom_jvp_call", "custom_vjp_call"):  # no derivative from here on
                return self.run(params["call_jaxpr"], values, zero)
            if any(map(self.needed, _called(equation))):
                if name == "shard_map":
                    return self.on_devices(params, values, zero)
                values, params = self.inside(name, values, params, zero)
            out = bind(equation.replace(params=params), values)
            return rounding(equation.ctx)(out) if self.chooses(equation) else out

    def known(self, equation: core.JaxprEqn, values: list[Array]) -> Array | None:
        """A quotient, or a sum that is not too long, without a choice; None of other operations."""
        name = equation.primitive.name
        if name == "reduce_sum" and values[0].size <= LARGEST_SUM:
            return pairwise_sum(values[0], equation.params["axes"])
        return _divided(*values) if name == "div" else None

    def chooses(self, equation: core.JaxprEqn) -> bool:
        """Whether a compiler may round what this computes in more than one way. With floats of 16 bits it computes in
        32, and may leave out the rounding between two operations."""
        if not self.rounds:
            return False
        name = equation.primitive.name
        arrays = [x.aval for x in equation.outvars if isinstance(x.aval, jax.core.ShapedArray)]  # no tokens, no refs
        dtypes = [x.dtype for x in arrays if _integer(x.dtype)]
        if any(map(_is_short, dtypes)):
            return name not in MOVED and not _called(equation)
        if name == "reduce_sum" and equation.invars[0].aval.size > LARGEST_SUM:
            return False
        return bool(dtypes) and (name in ROUNDED or name in ("div", "reduce_sum"))

    def is_barrier(self, equation: core.JaxprEqn) -> bool:
        """Whether XLA:CPU would compute a result anew for each reader, although it may not or should not.

        Normal draws are inverted by a polynomial of the uniform ones, which is rounded as XLA vectorises its readers.
        """
        return target() == "cpu" and equation.primitive.name in ("optimization_barrier", "erf_inv")

    def inside(self, name: str, values: list[Array], params: dict, zero: HiddenZero) -> tuple[list[Array], dict]:
        """Operands and parameters of an equation whose inner programs are rewritten, the zero before their own
        arguments; an equation of a kind that takes no further argument lets them make a zero of their own."""
        given, params = self.given_zero, dict(params)
        if name in ("jit", "pjit"):
            params |= {key: (first, *params[key]) for key, first in _of_an_argument().items()}
            return [zero.value, *values], params | {"jaxpr": given(params["jaxpr"])}
        if name == "scan" and "num_consts" in params:  # JAX 0.12 states its arguments otherwise
            params |= {"num_consts": params["num_consts"] + 1, "jaxpr": given(params["jaxpr"])}
            return [zero.value, *values], params
        if name == "while":
            first = params["cond_nconsts"]
            values = [zero.value, *values[:first], zero.value, *values[first:]]
            params |= {"cond_nconsts": first + 1, "body_nconsts": params["body_nconsts"] + 1}
            return values, params | {key: given(params[key]) for key in ("cond_jaxpr", "body_jaxpr")}
        if name == "cond":
            index, *values = values
            return [index, zero.value, *values], params | {"branches": tuple(map(given, params["branches"]))}
        return values, {key: self.alone(value) for key, value in params.items()}

    def on_devices(self, params: dict, values: list[Array], zero: HiddenZero) -> list[Array]:
        """A program that each device of a mesh runs, rewritten: its collectives need the mesh's axes when traced. The
        zero comes from outside, where it is the same on all devices: results may have to be."""
        program = core.ClosedJaxpr(params["jaxpr"], ())
        how = {"check_vma": params["check_vma"], "axis_names": params["newly_manual_axes"]}
        run = lambda zero, *args: self.run(program, args, HiddenZero(zero))  # noqa: E731
        made = jax.shard_map(
            run,
            mesh=params["mesh"],
            in_specs=(PartitionSpec(), *params["in_specs"]),
            out_specs=list(params["out_specs"]),
            **how,
        )
        return made(zero.value, *values)

    def given_zero(self, program: core.ClosedJaxpr) -> core.ClosedJaxpr:
        """A program rewritten, with the zero as its first argument."""
        if id(program) not in self.inner:
            zero = jax.ShapeDtypeStruct((), jnp.int32)
            made = jax.make_jaxpr(lambda zero, *args: self.run(program, args, HiddenZero(zero)))
            self.inner[id(program)] = made(zero, *program.in_avals), program  # which stays alive, and its id its own
        return self.inner[id(program)][0]

    def alone(self, value: Any) -> Any:
        """A parameter of an equation, with the programs in it rewritten; each makes its own zero."""
        if not any(map(self.needed, programs(value))):
            return value
        if isinstance(value, (tuple, list)):
            items = [self.alone(x) for x in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        closed = value if isinstance(value, core.ClosedJaxpr) else core.ClosedJaxpr(value, ())
        program = jax.make_jaxpr(lambda *args: self.run(closed, args))(*closed.in_avals)
        return program if isinstance(value, core.ClosedJaxpr) else program.jaxpr

    def needed(self, program: Program) -> bool:
        """Whether a program, or one that it calls, has an operation to rewrite."""
        equations = opened(program)[0].eqns
        inner = (x for equation in equations for x in _called(equation))
        rewritten = (self.chooses(x) or self.is_barrier(x) for x in equations)
        return any(rewritten) or any(map(self.needed, inner))


@functools.cache
def _of_an_argument() -> dict[str, Any]:
    """Those parameters of a call of a jitted function that have an entry for each argument, each with the entry of an
    argument about which nothing is asked."""
    call = jax.make_jaxpr(jax.jit(lambda x, y: x))(0.0, 0.0).eqns[0]
    return {k: v[0] for k, v in call.params.items() if isinstance(v, tuple) and len(v) == 2}


def _called(equation: core.JaxprEqn) -> list[Program]:
    """The programs that an equation runs."""
    if equation.primitive.name.startswith(COMBINERS):
        return []
    return [program for _, program in inner_programs(equation)]


def _unknown(args: Sequence[Array]) -> list[Array]:
    """Up to three of a program's arguments to read a hidden zero off, of which the compiler must know nothing: floats,
    since integers may be loop counters, and the largest, since a loop may start from small constants; else keys."""
    traced = [x for x in args if isinstance(x, jax.core.Tracer) and x.size]
    keys = [jax.random.key_data(x) for x in traced if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    known = sorted((x for x in traced if _has_bits(x.dtype)), key=lambda x: (_integer(x.dtype) is None, -x.size))
    return [x for x in known if _integer(x.dtype)][:3] or (keys + known)[:3]


def _has_bits(dtype: Any) -> bool:
    """Whether a zero can be read off numbers of this dtype, and hidden from the compiler."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits == 8 * dtype.itemsize
    whole = jnp.issubdtype(dtype, jnp.integer)
    return jnp.issubdtype(dtype, bool) or (whole and jnp.iinfo(dtype).bits == 8 * dtype.itemsize)


def _is_short(dtype: Any) -> bool:
    return _integer(dtype) is jnp.int16


def _integer(dtype: Any) -> Any:
    """The signed integers as wide as these floats; None for other dtypes."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    return {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}.get(dtype.itemsize)
