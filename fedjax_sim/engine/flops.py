"""How many floating-point operations a traced program takes, whatever runs it."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fedjax_sim.engine.jaxpr import Program, inner_programs, opened, scan_arguments

__all__ = ["flops"]

MOVES = frozenset(  # what only moves or reads numbers
    "broadcast_in_dim concatenate convert_element_type copy copy_p dynamic_slice dynamic_update_slice gather "
    "bitcast_convert_type expand_dims iota optimization_barrier pad pvary real reshape rev scatter select_n slice "
    "split squeeze stop_gradient transpose reduce_precision".split()
)
BARRIER = "_computed_once"  # of `engine.arithmetic.barrier`: a loop that never turns


def flops(program: Program, turns: int = 1) -> int:
    """Counts the operations on floats of a traced program.

    A matmul or a convolution takes two operations for each product that it adds up. Products with padding, or with the
    zeros between dilated numbers, are left out. A reduction takes one operation for each number that it reads. Any
    other equation takes one for each number that it computes, and nothing if it only moves numbers. Results that nobody
    reads cost nothing, inside of loops and branches too.

    Args:
      program: a traced program.
      turns: how often loops of unknown length turn. Inside of another loop they turn once. Loops of known length are
        counted in full; of branches, the most expensive one.

    Returns: the number of operations.

    Guarantees: products and loops as counted by hand, and XLA's own count of programs without loops to a tenth
    (tests/engine/test_flops.py).

    >>> import jax
    >>> flops(jax.make_jaxpr(lambda x, y: x @ y + 1)(jnp.ones((2, 3)), jnp.ones((3, 4))))
    56
    """
    jaxpr, _ = opened(program)
    return _live(jaxpr, [True] * len(jaxpr.outvars), turns)[0]


def _live(jaxpr: core.Jaxpr, read: list[bool], turns: int) -> tuple[int, list[bool]]:
    """Counts the operations of a program whose results are read in part.

    Args:
      jaxpr: the program.
      read: for each result, whether anything reads it.
      turns: as in `flops`.

    Returns: (the operations behind the results that are read, for each argument whether these operations need it).
    """
    needed = {x for x, wanted in zip(jaxpr.outvars, read, strict=True) if wanted and isinstance(x, core.Var)}
    total = 0
    for eqn in reversed(jaxpr.eqns):
        outputs = [x in needed or bool(eqn.effects) for x in eqn.outvars]
        if not any(outputs):
            continue
        count, inputs = _operations(eqn, outputs, turns)
        total += count
        needed.update(x for x, wanted in zip(eqn.invars, inputs, strict=True) if wanted and isinstance(x, core.Var))
    return total, [x in needed for x in jaxpr.invars]


def _operations(eqn: core.JaxprEqn, read: list[bool], turns: int) -> tuple[int, list[bool]]:
    """Counts the operations of one equation, as `_live` does for a program.

    Args:
      eqn: the equation.
      read: for each result of the equation, whether anything reads it.
      turns: as in `flops`.

    Returns: (the operations behind the results that are read, for each argument whether these operations need it).
    """
    name = eqn.primitive.name
    inner = [opened(program)[0] for _, program in inner_programs(eqn)]
    everything = [True] * len(eqn.invars)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * _size(eqn.outvars[0]) * math.prod(eqn.invars[0].aval.shape[i] for i in contracted), everything
    if name == "conv_general_dilated":
        return 2 * _products(eqn), everything
    if name == "scan":
        return _scanned(eqn, inner[0], read)
    if name == "while":
        return _repeated(eqn, read, turns)
    if name == "cond":
        counts, inputs = zip(*(_live(branch, read, turns) for branch in inner), strict=True)
        # The first argument chooses the branch. Another is needed if any branch needs it.
        return max(counts), [True, *map(any, zip(*inputs, strict=True))]
    if inner and not name.startswith(("reduce", "scatter", "cum")):
        (body, *more) = inner
        if more or (len(body.invars), len(body.outvars)) != (len(eqn.invars), len(eqn.outvars)):
            # It is not known which operands belong to which program, so all of them count as needed.
            return sum(flops(program, turns) for program in inner), everything
        count, inputs = _live(body, read, turns)
        # A barrier is a loop that never turns, so what stands inside of it costs nothing.
        return 0 if getattr(body.debug_info, "func_name", None) == BARRIER else count, inputs
    if name in MOVES:
        return 0, everything
    # A reduction takes one operation for each number that it reads, a scatter for each number of its updates, and any
    # other equation for each number that it computes.
    counted = eqn.invars if name.startswith(("reduce", "arg")) else eqn.invars[2:] if "scatter" in name else eqn.outvars
    return sum(_size(x) for x in counted if jnp.issubdtype(x.aval.dtype, jnp.inexact)), everything


def _products(eqn: core.JaxprEqn) -> int:
    """Counts the products of a convolution, without those with a zero of padding or of a dilation."""
    numbers, options = eqn.params["dimension_numbers"], eqn.params
    (image, kernel), out = (x.aval.shape for x in eqn.invars[:2]), eqn.outvars[0].aval.shape
    total = out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * kernel[numbers.rhs_spec[1]]
    ways = zip(
        options["window_strides"], options["padding"], options["lhs_dilation"], options["rhs_dilation"], strict=True
    )
    for i, (stride, (before, _), spread, hop) in enumerate(ways, 2):
        stride, before, spread, hop = map(int, (stride, before, spread, hop))  # of NumPy's narrow integers too
        gaps = before - np.arange(kernel[numbers.rhs_spec[i]]) * hop
        total *= _read(out[numbers.out_spec[i]], stride, gaps, spread, image[numbers.lhs_spec[i]])
    return total


def _read(places: int, stride: int, gaps: np.ndarray, spread: int, size: int) -> int:
    """Counts the pairs of a place p < `places` and a gap for which p * stride - gap is i * spread, 0 <= i < size."""
    shared = math.gcd(stride, spread)
    period = spread // shared  # of the places that meet a number
    inverse = pow(stride // shared, -1, period)
    first = np.maximum(-(-gaps // stride), 0)
    last = np.minimum((gaps + (size - 1) * spread) // stride, places - 1)
    first += (gaps // shared * inverse - first) % period
    return int(np.where(gaps % shared == 0, np.maximum((last - first) // period + 1, 0), 0).sum())


def _scanned(eqn: core.JaxprEqn, body: core.Jaxpr, read: list[bool]) -> tuple[int, list[bool]]:
    """`_operations` of a loop of known length."""
    first, carried = scan_arguments(eqn.params)

    def turn(carry):
        count, inputs = _live(body, carry + read[carried:], 1)
        return count, inputs, inputs[first : first + carried]

    count, inputs, carry = _settled(turn, read[:carried])
    return eqn.params["length"] * count, inputs[:first] + carry + inputs[first + carried :]


def _repeated(eqn: core.JaxprEqn, read: list[bool], turns: int) -> tuple[int, list[bool]]:
    """`_operations` of a loop of unknown length: whether it goes on is always read."""
    test, _ = opened(eqn.params["cond_jaxpr"])
    body, _ = opened(eqn.params["body_jaxpr"])
    own, first = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    asked, needs = _live(test, [True], 1)

    def turn(carry):
        count, inputs = _live(body, carry, 1)
        return count, inputs, inputs[first:]

    count, inputs, carry = _settled(turn, [a or b for a, b in zip(read, needs[own:], strict=True)])
    return turns * (asked + count), needs[:own] + inputs[:first] + carry


def _settled(turn: Callable, carry: list[bool]) -> tuple[int, list[bool], list[bool]]:
    """Finds which carried values of a loop are read, after the last turn or by the next turn.

    Args:
      turn: (carried values that are read after a turn) -> (its operations, its needed arguments, the carried values
        that it reads).
      carry: the carried values that are read after the last turn.

    Returns: (the operations of a turn, its needed arguments, the carried values that are read).
    """
    while True:
        count, inputs, before = turn(carry)
        more = [a or b for a, b in zip(carry, before, strict=True)]
        if more == carry:
            return count, inputs, carry
        carry = more


def _size(value: core.Var | core.Literal) -> int:
    return math.prod(value.aval.shape)
