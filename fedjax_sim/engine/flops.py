"""Counts the floating-point operations of a traced program, whatever hardware runs it."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fedjax_sim.engine.jaxpr import Program, aval_of, inner_programs, jaxpr_and_constants, scan_arguments

MOVES = frozenset(  # operations that only move or read numbers
    "broadcast_in_dim concatenate convert_element_type copy copy_p dynamic_slice dynamic_update_slice gather "
    "bitcast_convert_type expand_dims iota optimization_barrier pad pvary real reshape rev scatter select_n slice "
    "split squeeze stop_gradient transpose reduce_precision".split()
)
BARRIER = "_computed_once"  # a function of `engine.arithmetic.barrier` that is free: a loop that never turns


def flops(program: Program, turns: int = 1) -> int:
    """Returns the number of operations on floats that a program takes.

    A product that a matrix product or a convolution adds up counts as two operations. Products with padding, or with
    the zeros between dilated numbers, count as none. A reduction counts one operation for each number that it reads.
    Any other equation counts one for each number that it computes, and none if it only moves numbers.

    Loops of known length are counted in full. Of several branches the most expensive one is counted.

    Args:
      program: a traced program. Results that nothing reads cost nothing, in loops and branches neither.
      turns: how often loops of unknown length turn. Such a loop inside of another loop turns once.

    Guarantees:
      Products and loops are counted as by hand, and programs without loops as XLA counts them, to a tenth
      (tests/engine/test_flops.py).

    >>> import jax
    >>> flops(jax.make_jaxpr(lambda x, y: x @ y + 1)(jnp.ones((2, 3)), jnp.ones((3, 4))))  # 2 * 2 * 3 * 4 + 8
    56
    """
    jaxpr, _ = jaxpr_and_constants(program)
    return _live(jaxpr, [True] * len(jaxpr.outvars), turns)[0]


def _live(jaxpr: core.Jaxpr, read: list[bool], turns: int) -> tuple[int, list[bool]]:
    """Returns (the operations behind the results that are read, for each argument whether these results need it).

    Args:
      jaxpr: a program.
      read: for each result of the program, whether it is read.
      turns: as in `flops`.
    """
    needed = {x for x, is_read in zip(jaxpr.outvars, read, strict=True) if is_read and isinstance(x, core.Var)}
    total = 0
    # From the last equation to the first: an equation's readers stand behind it.
    for eqn in reversed(jaxpr.eqns):
        # An equation with effects runs in any case.
        outputs_read = [x in needed or bool(eqn.effects) for x in eqn.outvars]
        if not any(outputs_read):
            continue
        count, inputs_needed = _operations(eqn, outputs_read, turns)
        total += count
        needed.update(
            x for x, wanted in zip(eqn.invars, inputs_needed, strict=True) if wanted and isinstance(x, core.Var)
        )
    return total, [x in needed for x in jaxpr.invars]


def _operations(eqn: core.JaxprEqn, read: list[bool], turns: int) -> tuple[int, list[bool]]:
    """Returns (the operations of an equation, for each of its arguments whether it is needed).

    Args:
      eqn: an equation.
      read: for each result of the equation, whether it is read.
      turns: as in `flops`.
    """
    name = eqn.primitive.name
    inner = [jaxpr_and_constants(program)[0] for _, program in inner_programs(eqn)]
    all_arguments = [True] * len(eqn.invars)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * _size(eqn.outvars[0]) * math.prod(aval_of(eqn.invars[0]).shape[i] for i in contracted), all_arguments
    if name == "conv_general_dilated":
        return 2 * _products(eqn), all_arguments
    if name == "scan":
        return _scanned(eqn, inner[0], read)
    if name == "while":
        return _repeated(eqn, read, turns)
    if name == "cond":
        # The first argument chooses the branch. Another argument is needed if any branch needs it.
        counts, inputs_needed = zip(*(_live(branch, read, turns) for branch in inner), strict=True)
        return max(counts), [True, *map(any, zip(*inputs_needed, strict=True))]
    # The programs inside of reductions, scatters and cumulative operations combine two numbers. Such an operation is
    # counted by its numbers below.
    if inner and not name.startswith(("reduce", "scatter", "cum")):
        (body, *others) = inner
        # Only an equation that calls one program with its own arguments and results tells which of them are read.
        if others or (len(body.invars), len(body.outvars)) != (len(eqn.invars), len(eqn.outvars)):
            return sum(flops(program, turns) for program in inner), all_arguments
        count, inputs_needed = _live(body, read, turns)
        return 0 if getattr(body.debug_info, "func_name", None) == BARRIER else count, inputs_needed
    if name in MOVES:
        return 0, all_arguments
    # A reduction takes an operation for each number that it reads, and a scatter one for each number that it adds.
    counted = eqn.invars if name.startswith(("reduce", "arg")) else eqn.invars[2:] if "scatter" in name else eqn.outvars
    return sum(_size(x) for x in counted if jnp.issubdtype(aval_of(x).dtype, jnp.inexact)), all_arguments


def _products(eqn: core.JaxprEqn) -> int:
    """Returns the number of products of a convolution, without products with a zero of padding or of a dilation.

    That is (batch size) x (output features) x (input features that an output reads) x the product over the spatial axes
    of their numbers of products (`_read`).

    Args:
      eqn: of `jax.lax.conv_general_dilated`: its arguments are the image and the kernel.
    """
    axes = eqn.params["dimension_numbers"]
    options = eqn.params
    (image, kernel) = (aval_of(x).shape for x in eqn.invars[:2])
    out = aval_of(eqn.outvars[0]).shape
    # Batch size, output features, and input features that an output reads.
    total = out[axes.out_spec[0]] * out[axes.out_spec[1]] * kernel[axes.rhs_spec[1]]
    spatial_options = zip(
        options["window_strides"], options["padding"], options["lhs_dilation"], options["rhs_dilation"], strict=True
    )
    # Spatial axes are independent, so their numbers of products are multiplied.
    for i, (stride, (padding, _), image_dilation, kernel_dilation) in enumerate(spatial_options, 2):
        # NumPy's narrow integers, which users may give, could overflow below.
        stride, padding, image_dilation, kernel_dilation = map(int, (stride, padding, image_dilation, kernel_dilation))
        gaps = padding - np.arange(kernel[axes.rhs_spec[i]]) * kernel_dilation
        total *= _read(out[axes.out_spec[i]], stride, gaps, image_dilation, image[axes.lhs_spec[i]])
    return total


def _read(places: int, stride: int, gaps: np.ndarray, spread: int, size: int) -> int:
    """Returns the number of products along one spatial axis of a convolution.

    A place p in [0, `places`) and a gap make a product if p * stride - gap = i * spread for an i in [0, `size`). Else
    the kernel meets padding, or a zero between dilated numbers.

    Args:
      places: length of the output.
      stride: of the window.
      gaps: [kernel length], how far before the image each number of the kernel stands at place 0.
      spread: distance of the image's numbers, its dilation.
      size: length of the image, without dilation.
    """
    # For one gap, the places that meet a number form an arithmetic progression: p * stride = gap modulo `spread`.
    divisor = math.gcd(stride, spread)
    period = spread // divisor
    inverse = pow(stride // divisor, -1, period)
    # The first and the last place inside of the image.
    first = np.maximum(-(-gaps // stride), 0)
    last = np.minimum((gaps + (size - 1) * spread) // stride, places - 1)
    # The first place that is in the progression too.
    first += (gaps // divisor * inverse - first) % period
    return int(np.where(gaps % divisor == 0, np.maximum((last - first) // period + 1, 0), 0).sum())


def _scanned(eqn: core.JaxprEqn, body: core.Jaxpr, read: list[bool]) -> tuple[int, list[bool]]:
    """Returns `_operations` of a loop of known length."""
    num_constants, num_carried = scan_arguments(eqn.params)

    def turn(carry):
        count, inputs_needed = _live(body, carry + read[num_carried:], 1)
        return count, inputs_needed, inputs_needed[num_constants : num_constants + num_carried]

    count, inputs_needed, carry = _settled(turn, read[:num_carried])
    needed = inputs_needed[:num_constants] + carry + inputs_needed[num_constants + num_carried :]
    return eqn.params["length"] * count, needed


def _repeated(eqn: core.JaxprEqn, read: list[bool], turns: int) -> tuple[int, list[bool]]:
    """Returns `_operations` of a loop of unknown length: `turns` times the operations of its test and of its body.

    Args:
      eqn: of `jax.lax.while_loop`, whose arguments are the test's constants, the body's constants and the carry.
      read: for each carried value, whether it is read after the loop.
      turns: how often the loop is taken to turn, 0 or more; loops inside of it turn once a turn.

    Returns: (operations, for each argument of the equation whether it is needed).
    """
    test, _ = jaxpr_and_constants(eqn.params["cond_jaxpr"])
    body, _ = jaxpr_and_constants(eqn.params["body_jaxpr"])
    num_test_constants = eqn.params["cond_nconsts"]
    num_body_constants = eqn.params["body_nconsts"]
    # The test is always read, so the carried values that it needs are read in every turn.
    test_count, test_needs = _live(test, [True], 1)

    def turn(carry):
        count, inputs_needed = _live(body, carry, 1)
        return count, inputs_needed, inputs_needed[num_body_constants:]

    carry_read = [a or b for a, b in zip(read, test_needs[num_test_constants:], strict=True)]
    count, inputs_needed, carry = _settled(turn, carry_read)
    return turns * (test_count + count), test_needs[:num_test_constants] + inputs_needed[:num_body_constants] + carry


def _settled(turn: Callable, carry: list[bool]) -> tuple[int, list[bool], list[bool]]:
    """Returns (the operations of a turn, the arguments that it needs, the carried values that are read).

    A carried value is read if the loop's result is read, or if the next turn needs it. So values are added until a turn
    needs no more.

    Args:
      turn: (which carried values are read after the turn) -> (operations, needed arguments, needed carried values).
      carry: which carried values are read after the last turn.
    """
    while True:
        count, inputs_needed, carry_needed = turn(carry)
        carry_read = [a or b for a, b in zip(carry, carry_needed, strict=True)]
        if carry_read == carry:
            return count, inputs_needed, carry
        carry = carry_read


def _size(value: core.Var | core.Literal) -> int:
    """Returns the number of elements of an array."""
    return math.prod(aval_of(value).shape)
