"""Rewrites traced programs, so that every program rounds an operation in the same way.

A round is compiled anew for each number of devices, and a compiler decides by the surrounding program how it computes.
It may turn A / c into A (1 / c), fuse a product into the addition that follows, or vectorise a sum in another order.
Each decision can change the last bit of the model.

`reproducible` traces a function and rewrites such operations, so that nothing is left to decide. It works on the traced
program and covers everything that was called there: a user's loss, an optimiser of optax, any part of a round. The
barriers that it places are those of `engine.arithmetic.barrier`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer
from jax.extend import core
from jax.sharding import PartitionSpec

from fedjax_sim import tree
from fedjax_sim.engine.arithmetic.barrier import (
    HiddenZero,
    computed_once,
    hidden_zero,
    is_computed_once,
    rounding_here,
)
from fedjax_sim.engine.arithmetic.exact_sum import without_derivative
from fedjax_sim.engine.arithmetic.mode import is_fast
from fedjax_sim.engine.jaxpr import (
    Program,
    as_traced,
    aval_of,
    bind,
    evaluate,
    inner_programs,
    jaxpr_and_constants,
    needed,
    programs,
    scan_arguments,
)
from fedjax_sim.engine.platform import target
from fedjax_sim.types import Array, PyTree

# Numbers. A longer sum by halves would hold addends in memory that the compiler never stores, such as the distances of
# all pairs of messages.
LARGEST_SUM = 1 << 24
UNROLLED = 16  # numbers that are added in straight-line code
EXACT = 1 << 16  # the least power of two in a program whose products are known to be exact
# Operations whose result a compiler may leave unrounded, fused into another operation.
ROUNDED = {
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "digamma", "erf", "erf_inv",
    "erfc", "exp", "exp2", "expm1", "integer_pow", "lgamma", "log", "log1p", "logistic", "mul", "pow", "rsqrt", "sin",
    "sinh", "sqrt", "square", "tan", "tanh",
}  # fmt: skip
# Operations that only move or choose numbers. Their results are as short as their operands.
MOVED = {
    "abs", "bitcast_convert_type", "broadcast_in_dim", "clamp", "concatenate", "copy", "dynamic_slice",
    "dynamic_update_slice", "gather", "max", "min", "neg", "pad", "reduce_max", "reduce_min", "reduce_precision",
    "reshape", "rev", "scatter", "select_n", "slice", "sort", "split", "squeeze", "top_k", "transpose",
}  # fmt: skip
# Operations whose inner program makes one number of two. Compilers know some of these programs, and would not know them
# after a rewrite.
COMBINERS = ("reduce", "scatter", "select_and_")


@jax.custom_jvp
def divide(a: Array, b: Array) -> Array:
    """Divides a by b in one way in every program: an IEEE division on a CPU, which no compiler turns into a product.

    The bits of both operands are exclusive-or'ed with a zero that XLA does not recognise, so that XLA knows neither
    operand. LLVM does recognise the zero and drops it, so that it costs nothing.

    Args:
      a, b: floats of one dtype, whose shapes broadcast.

    Guarantees:
      Quotients are NumPy's, by constants and by scalars too, and a quotient has its derivative
      (tests/engine/arithmetic/test_rewriter.py).

    >>> divide(jnp.float32(49), jnp.float32(49)).item()
    1.0
    """
    return _divided(a, b)


@divide.defjvp
def _(primals, tangents):
    quotient = divide(*primals)
    return quotient, (tangents[0] - quotient * tangents[1]) / primals[1]


@functools.partial(jax.jit, inline=True)
def _divided(a: Array, b: Array) -> Array:
    """Returns a / b as `divide` does, without a derivative: a division that XLA cannot turn into a product.

    It would, if it knew that the divisor is a constant, or the same number in all places. So both operands are made to
    look computed from each other. They are read as bits, and exclusive-or'ed with min(n, 0), where n is made of the
    bits of both without the sign bit. As n >= 0, this is 0 and changes no operand, which XLA does not see.

    Args:
      a, b: floats of one dtype, whose shapes broadcast. A dtype without an integer of its size is divided as it is.
    """
    a, b = jnp.broadcast_arrays(a, b)
    integer = _integer(a.dtype)
    if integer is None:
        return jax.lax.div(a, b)
    bits = [jax.lax.bitcast_convert_type(x, integer) for x in (a, b)]
    mixed_bits = bits[0] | bits[1]
    if a.ndim:
        # XLA would see the quotient of two broadcast scalars as a broadcast quotient of scalars, and would make a
        # reciprocal of that. Numbers that differ along an axis prevent it.
        mixed_bits |= jax.lax.broadcasted_iota(integer, a.shape, a.shape.index(max(a.shape)))
    # Without its sign bit the number is not negative, so the minimum is 0.
    zero = jnp.minimum(mixed_bits & jnp.iinfo(integer).max, 0)
    return jax.lax.div(*(jax.lax.bitcast_convert_type(x ^ zero, a.dtype) for x in bits))


@functools.partial(jax.jit, static_argnames="axes", inline=True)
def pairwise_sum(x: Array, axes: tuple[int, ...]) -> Array:
    """Returns the sum over axes in an order that no compiler changes.

    One axis is summed after the other. Along an axis the second half is added to the first, until one number is left.
    Floats of 16 bits are summed in float32.

    Args:
      x: the numbers.
      axes: non-negative axes of `x`, in any order.

    Guarantees:
      The halves are powers of two long, so that zeros behind the numbers change no bit but the sign of a zero
      (tests/engine/arithmetic/test_rewriter.py::test_sums_have_one_order).

    >>> pairwise_sum(jnp.ones((3, 5)), (0, 1)).item()
    15.0
    """
    narrow_dtype = x.dtype
    x = x.astype(tree.at_least_float32(x.dtype))
    for axis in sorted(axes, reverse=True):
        if x.shape[axis] == 0:
            x = jnp.zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype)
        # Long axes are halved as arrays.
        while (size := x.shape[axis]) > UNROLLED:
            half = 1 << (size - 1).bit_length() - 1  # the largest power of two below `size`
            low, high = (jax.lax.slice_in_dim(x, *ends, axis=axis) for ends in ((0, half), (half, size)))
            if size < 2 * half:
                pad = [(0, 2 * half - size if i == axis else 0) for i in range(x.ndim)]
                high = jnp.pad(high, pad)
            x = low + high
        # The last few numbers are added in the same order in straight-line code, without arrays in between.
        parts = jax.lax.split(x, (1,) * x.shape[axis], axis)
        while (size := len(parts)) > 1:
            half = 1 << (size - 1).bit_length() - 1
            parts = [a + parts[half + i] if half + i < size else a for i, a in enumerate(parts[:half])]
        x = parts[0].squeeze(axis)
    return x.astype(narrow_dtype)


def reproducible(function: Callable, source: PyTree = None) -> Callable:
    """Returns the function with its operations rewritten, so that they round in the same way in every program.

    Divisions are correctly rounded. Products and elementary functions are rounded where they stand. Sums over axes of
    up to 2^24 numbers have a fixed order (`pairwise_sum`). Floats of 16 bits are rounded to 16 bits after every
    operation. A compiler computes with them in 32 bits, and may leave out the rounding between two operations.

    The following are left to the compiler: matrix products, convolutions, cumulative and longer sums, products over
    axes, the functions with which a reduction or a scatter combines two numbers, and complex numbers.

    On a CPU, values behind `jax.lax.optimization_barrier` are computed once, because XLA:CPU would not heed the barrier
    by itself. So are normal draws (`jax.random.normal`, `prng.normal`), whose last bits depend on the operations that
    XLA fuses with them.

    Inside of `engine.fast_arithmetic()` only these barriers are kept, for speed. Nothing else is rewritten.

    Args:
      function: a function of pytrees of arrays, which returns a pytree of arrays.
      source: arrays for the hidden zero with which products are rounded (`engine.arithmetic.barrier`). If none of them
        is traced, the function's arguments are used. Under a `vmap`, give arrays that all clients share: a zero for
        each client would be computed again at every coordinate, which took a fifth of a small model's round.

    Raises:
      TypeError: for a derivative through the function in reproducible arithmetic, which would be 0. Derivatives that
        the function takes inside of itself are part of its program, and stay.

    Guarantees:
      Operations have one rounding (tests/engine/arithmetic/test_rewriter.py).
      No division of a round is left to the compiler (tests/laws/test_rounding.py).
      The law over all rows, on 1, 2, 3 and 8 devices, is tests/laws/test_devices.py (`-m full`).

    >>> import jax, jax.numpy as jnp
    >>> float(jax.jit(reproducible(lambda x: x / 49))(jnp.float32(49)))
    1.0
    """

    def call(*args: PyTree) -> PyTree:
        rewriter = _Rewriter(rounds=not is_fast())
        program, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        if is_fast() and not rewriter.needs_rewrite(program):
            return function(*args)
        leaves = list(map(jnp.asarray, jax.tree.leaves(args)))
        if rewriter.rounds:
            # The rewritten program works on bits, whose derivative is 0.
            leaves = [without_derivative(x) if _integer(x.dtype) else x for x in leaves]
        unknown_arrays = _unknown(jax.tree.leaves(source))
        zero = hidden_zero(unknown_arrays) if unknown_arrays else None
        return jax.tree.unflatten(jax.tree.structure(shape), rewriter.run(program, leaves, zero))

    return call


class _Rewriter:
    """Evaluates traced programs with their operations rewritten.

    An inner program (a loop's body, a called function) is rewritten once, however often it is met. It gets the hidden
    zero as one more argument, so that the whole round shares one zero.
    """

    def __init__(self, rounds: bool):
        self.rounds = rounds  # False: only barriers are given their effect
        self.rewritten = {}  # by the id of an inner program: the program rewritten, and the program itself

    def run(self, program: core.ClosedJaxpr, args: Sequence[Array], zero: HiddenZero | None = None) -> list[Array]:
        """Returns the results of a program, rewritten. If `zero` is None and needed, it is made from `args`."""
        if zero is None and self.needs_rewrite(program):
            zero = hidden_zero(_unknown(args))
        # A rounding makes its -0.0 in the context in which it is first used, so each context has a rounding of its own.
        rounding = functools.cache(lambda context: rounding_here(zero))

        def rule(equation, values):
            return self.step(equation, values, rounding, zero)

        # A key that a part does not use, for example, is not derived: the compiler has less to read.
        return evaluate(program, args, rule, equations=needed(program))

    def step(
        self, equation: core.JaxprEqn, values: list[Array], rounding: Callable, zero: HiddenZero | None
    ) -> Sequence[Array]:
        """Returns the results of an equation, rewritten.

        Args:
          equation: of the program that is evaluated.
          values: the operands.
          rounding: (the equation's context) -> `barrier.rounding_here` with the hidden zero.
          zero: the hidden zero; None only if nothing in the program needs it.
        """
        name = equation.primitive.name
        params = equation.params
        with as_traced(equation):
            if is_computed_once(equation):
                return bind(equation, values)  # the barriers in this loop have their effect already
            if self.has_choice(equation):
                result = self.fixed_result(equation, values)
                if result is not None:
                    # Its last operation has no choice in 32 bits. In 16 bits the rounding could still be left out.
                    return rounding(equation.ctx)([result]) if _is_short(result.dtype) else [result]
            if self.is_barrier(equation):
                # An optimisation barrier is replaced: its results are its operands, held back.
                return computed_once(bind(equation, values) if name == "erf_inv" else values, zero)
            if self.rounds and name in ("custom_jvp_call", "custom_vjp_call"):
                # The call is replaced by its program, for the result has no derivative anyway.
                return self.run(params["call_jaxpr"], values, zero)
            if any(map(self.needs_rewrite, _called(equation))):
                assert zero is not None, "a program that is rewritten has a hidden zero"
                if name == "shard_map":
                    return self.on_devices(params, values, zero)
                if name == "scan" and "num_consts" not in params:  # JAX from 0.12
                    return self.in_turns(params, values, zero)
                values, params = self.with_inner_rewritten(name, values, params, zero)
            out = bind(equation.replace(params=params), values)
            return rounding(equation.ctx)(out) if self.has_choice(equation) else out

    def fixed_result(self, equation: core.JaxprEqn, values: list[Array]) -> Array | None:
        """Returns a quotient, or a sum that is not too long, written without a choice; None for other operations."""
        name = equation.primitive.name
        if name == "reduce_sum" and values[0].size <= LARGEST_SUM:
            return pairwise_sum(values[0], equation.params["axes"])
        return _divided(*values) if name == "div" else None

    def has_choice(self, equation: core.JaxprEqn) -> bool:
        """Returns whether a compiler may round the results of an equation in more than one way.

        Args:
          equation: of the program that is rewritten.
        """
        if not self.rounds:
            return False
        name = equation.primitive.name
        arrays = [x.aval for x in equation.outvars if isinstance(x.aval, ShapedArray)]  # no tokens, no refs
        dtypes = [x.dtype for x in arrays if _integer(x.dtype)]
        if any(map(_is_short, dtypes)):
            # With floats of 16 bits a compiler computes in 32 bits, and may leave out the rounding between any two
            # operations. Operations that only move numbers cannot make them longer.
            return name not in MOVED and not _called(equation)
        if name == "reduce_sum" and aval_of(equation.invars[0]).size > LARGEST_SUM:
            return False
        if name == "mul" and any(map(_is_exact_factor, equation.invars)):
            return False
        return bool(dtypes) and (name in ROUNDED or name in ("div", "reduce_sum"))

    def is_barrier(self, equation: core.JaxprEqn) -> bool:
        """Returns whether XLA:CPU would compute a result anew for each reader, although it may not or should not.

        Normal draws are one such result. They are inverted by a polynomial of uniform draws, and XLA rounds the
        polynomial as it vectorises its reader: noise with one key was rounded otherwise on two devices than on one.
        """
        return target() == "cpu" and equation.primitive.name in ("optimization_barrier", "erf_inv")

    def with_inner_rewritten(
        self, name: str, values: list[Array], params: dict, zero: HiddenZero
    ) -> tuple[list[Array], dict]:
        """Returns the operands and parameters of an equation whose inner programs are rewritten.

        The zero is passed to the inner programs before their own arguments. Equations of a kind that takes no further
        argument let each inner program make a zero of its own.

        Args:
          name: of the equation's primitive, such as "scan".
          values: the operands.
          params: the equation's parameters, which hold the inner programs; they are copied.
          zero: the hidden zero of the program around the equation.
        """
        given = self.with_zero_argument
        params = dict(params)
        if name in ("jit", "pjit"):
            # Some parameters have an entry for each argument, and so get one for the zero.
            params |= {key: (first, *params[key]) for key, first in _of_an_argument().items()}
            return [zero.value, *values], params | {"jaxpr": given(params["jaxpr"])}
        if name == "scan":
            params |= {"num_consts": params["num_consts"] + 1, "jaxpr": given(params["jaxpr"])}
            return [zero.value, *values], params
        if name == "while":
            # The operands are the constants of the test, then the constants of the body, then the carry.
            num_test_constants = params["cond_nconsts"]
            values = [zero.value, *values[:num_test_constants], zero.value, *values[num_test_constants:]]
            params |= {"cond_nconsts": num_test_constants + 1, "body_nconsts": params["body_nconsts"] + 1}
            return values, params | {key: given(params[key]) for key in ("cond_jaxpr", "body_jaxpr")}
        if name == "cond":
            index, *values = values
            return [index, zero.value, *values], params | {"branches": tuple(map(given, params["branches"]))}
        return values, {key: self.with_own_zeros(value) for key, value in params.items()}

    def in_turns(self, params: dict, values: list[Array], zero: HiddenZero) -> list[Array]:
        """Returns the results of a `scan`, rewritten, where its parameters cannot be changed: it is traced again."""
        num_constants, num_carried = scan_arguments(params)
        constants, carried = values[:num_constants], values[num_constants:][:num_carried]
        program = core.jaxpr_as_fun(self.with_zero_argument(params["jaxpr"]))

        def turn(carried, rows):
            results = program(zero.value, *constants, *carried, *rows)
            return results[:num_carried], results[num_carried:]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carried, rows = jax.lax.scan(turn, carried, values[num_constants + num_carried :], **options)
        return [*carried, *rows]

    def on_devices(self, params: dict, values: list[Array], zero: HiddenZero) -> list[Array]:
        """Returns the results of a `shard_map`, whose program each device of a mesh runs, rewritten.

        The program is traced again inside of a `shard_map`, because its collectives need the mesh's axes when they are
        traced. The zero comes from outside, where it is the same on all devices: results may have to be the same.

        Args:
          params: of the `shard_map`.
          values: its operands.
          zero: the hidden zero of the program around it.
        """
        program = core.ClosedJaxpr(params["jaxpr"], ())
        options = {"check_vma": params["check_vma"], "axis_names": params["newly_manual_axes"]}
        run = lambda zero, *args: self.run(program, args, HiddenZero(zero))  # noqa: E731
        run_on_mesh = jax.shard_map(
            run,
            mesh=params["mesh"],
            in_specs=(PartitionSpec(), *params["in_specs"]),
            out_specs=list(params["out_specs"]),
            **options,
        )
        return run_on_mesh(zero.value, *values)

    def with_zero_argument(self, program: core.ClosedJaxpr) -> core.ClosedJaxpr:
        """Returns a program rewritten, with the zero as its first argument."""
        if id(program) not in self.rewritten:
            zero = jax.ShapeDtypeStruct((), jnp.int32)
            trace = jax.make_jaxpr(lambda zero, *args: self.run(program, args, HiddenZero(zero)))
            # The original is kept beside it: while it is alive, no other program can have its id.
            self.rewritten[id(program)] = trace(zero, *program.in_avals), program
        return self.rewritten[id(program)][0]

    def with_own_zeros(self, value: Any) -> Any:
        """Returns an equation's parameter with the programs in it rewritten; each program makes its own zero."""
        if not any(map(self.needs_rewrite, programs(value))):
            return value
        if isinstance(value, (tuple, list)):
            items = [self.with_own_zeros(x) for x in value]
            # A named tuple takes its fields one by one.
            return type(value)(items) if type(value) in (tuple, list) else type(value)(*items)
        closed = value if isinstance(value, core.ClosedJaxpr) else core.ClosedJaxpr(value, ())
        program = jax.make_jaxpr(lambda *args: self.run(closed, args))(*closed.in_avals)
        return program if isinstance(value, core.ClosedJaxpr) else program.jaxpr

    def needs_rewrite(self, program: Program) -> bool:
        """Returns whether a program, or a program that it calls, has an operation to rewrite."""
        equations = [x for x in jaxpr_and_constants(program)[0].eqns if not is_computed_once(x)]
        called_programs = (x for equation in equations for x in _called(equation))
        is_rewritten = (self.has_choice(x) or self.is_barrier(x) for x in equations)
        return any(is_rewritten) or any(map(self.needs_rewrite, called_programs))


@functools.cache
def _of_an_argument() -> dict[str, Any]:
    """Returns the parameters of a call of a jitted function that have an entry for each argument.

    They are read off a call with two arguments, and each comes with the entry of an argument about which nothing is
    asked.
    """
    call = jax.make_jaxpr(jax.jit(lambda x, y: x))(0.0, 0.0).eqns[0]
    return {k: v[0] for k, v in call.params.items() if isinstance(v, tuple) and len(v) == 2}


def _called(equation: core.JaxprEqn) -> list[Program]:
    """Returns the programs that an equation runs, other than those that combine two numbers."""
    if equation.primitive.name.startswith(COMBINERS):
        return []
    return [program for _, program in inner_programs(equation)]


def _unknown(args: Sequence[Array]) -> Sequence[Array]:
    """Returns up to three of a program's arguments to make a hidden zero from.

    The compiler must know nothing about them. Floats are taken before integers, since integers may be loop counters,
    and the largest arrays first, since a loop may start from small constants. Without floats, keys come first.
    """
    traced = [x for x in args if isinstance(x, Tracer) and x.size]
    keys = [jax.random.key_data(x) for x in traced if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    candidates = sorted((x for x in traced if _has_bits(x.dtype)), key=lambda x: (_integer(x.dtype) is None, -x.size))
    return [x for x in candidates if _integer(x.dtype)][:3] or (keys + candidates)[:3]


def _has_bits(dtype: Any) -> bool:
    """Returns whether numbers of this dtype fill their bytes, so that a hidden zero can be made from their bits."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits == 8 * dtype.itemsize
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return jnp.issubdtype(dtype, bool) or (is_integer and jnp.iinfo(dtype).bits == 8 * dtype.itemsize)


def _is_exact_factor(operand: Any) -> bool:
    """Returns whether an operand is a large power of two, written in the program: its products are exact.

    Smaller ones may be a hyper-parameter, such as a learning rate of 2. Were they not rounded, another rate would make
    another program, and points of a sweep would share none.
    """
    is_large = isinstance(operand, core.Literal) and abs(operand.val) >= EXACT
    return is_large and abs(math.frexp(operand.val)[0]) == 0.5


def _is_short(dtype: Any) -> bool:
    """Returns whether numbers of this dtype are floats of 16 bits."""
    return _integer(dtype) is jnp.int16


def _integer(dtype: Any) -> Any:
    """Returns the signed integers that are as wide as these floats; None for other dtypes."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    return {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}.get(dtype.itemsize)
