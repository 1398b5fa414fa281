"""Makes programs that differ only in floats into one program, which takes those floats as arguments.

A hyper-parameter enters a program in many ways: rounded, squared, subtracted from one in Python's doubles, tested,
turned into a bound. Therefore every value is traced by itself, and the traces are compared. If they agree up to the
floats written in them, those floats become arguments, and one compiled program serves all values. Floats with which XLA
would round differently when it does not know them stay in the program (`sweeps.xla_constants`). Algorithms need no
change for this: their checks see real numbers, and a value that changes a shape makes another program by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from fedjax_sim import tree
from fedjax_sim.engine.jaxpr import CALLS, Program, as_traced, bind, evaluate, jaxpr_and_constants, scan_arguments
from fedjax_sim.sweeps.xla_constants import is_float, kept_floats
from fedjax_sim.types import PyTree

# Primitives that also hold functions which only a derivative or a `vmap` would call: these do not count.
CUSTOM_CALLS = ("custom_jvp_call", "custom_vjp_call", "custom_vmap_call")


class Trace(NamedTuple):
    """A traced function, with the floats that are written in it."""

    kind: Hashable  # equal for two traces that differ only in floats that may be lifted
    floats: list[np.ndarray]  # in the order in which `_kind` meets them
    jaxpr: ClosedJaxpr
    out: Any  # the tree structure of its results

    def uses(self, name: str) -> bool:
        """Returns whether the program contains a primitive of that name."""
        return f"'{name}'" in str(self.kind)


def traced_program(function: Callable, *args: PyTree) -> tuple[Trace, PyTree]:
    """Returns (a function's trace at these arguments, the specs of its results); arguments may be specs."""
    jaxpr, out = jax.make_jaxpr(function, return_shape=True)(*args)
    floats: list[np.ndarray] = []
    structure = jax.tree.structure(out)
    kind = (_kind(jaxpr, floats), structure, tuple(map(_aval, jaxpr.in_avals)))
    # Floats that must stay in the program are a part of its kind.
    must_stay = [(i, floats[i].tobytes()) for i in kept_floats(jaxpr, floats)]
    return Trace((*kind, *must_stay), floats, jaxpr, structure), out


def lifted(traces: Sequence[Trace]) -> list[np.ndarray | None]:
    """Returns the floats of traces of one kind, stacked [n, ...]; None for a float that is equal in all, bit for bit.

    >>> halved, tripled = (traced_program(lambda x, a=a: x * a, jnp.ones(2))[0] for a in (0.3, 3.0))
    >>> halved.kind == tripled.kind, lifted([halved, tripled])[0].tolist(), lifted([halved, halved])
    (True, [0.30000001192092896, 3.0], [None])
    """
    columns = zip(*(trace.floats for trace in traces), strict=True)
    return [None if len({x.tobytes() for x in column}) == 1 else np.stack(column) for column in columns]


def replay(traced: Trace, floats: Sequence[jax.Array | None], *args: PyTree) -> PyTree:
    """Calls a traced function with other floats in place of its own; None keeps a float of its own."""
    flat = _replay(traced.jaxpr, list(floats), jax.tree.leaves(args))
    return jax.tree.unflatten(traced.out, flat)


def _aval(aval: Any) -> Hashable:
    """Returns shape, dtype and weak type of an abstract value."""
    return getattr(aval, "shape", ()), str(getattr(aval, "dtype", aval)), bool(getattr(aval, "weak_type", False))


def _kind(program: Program, floats: list[np.ndarray]) -> Hashable:
    """Returns a jaxpr up to its floats, which are appended to `floats`: constants first, then equation by equation.

    Two programs of the same kind have the same operations in the same order. Variables count by their number.

    Args:
      program: a traced function, or a function inside of one.
      floats: a list to which the floats are appended, arrays of any shape and floating type.

    Returns: (constants, equations, results), equal for two programs that differ in floats alone.
    """
    jaxpr, consts = jaxpr_and_constants(program)
    numbers: dict[Any, int] = {}

    def atom(x):
        """Describes an operand: a variable by its number, a literal by its value unless it is a float."""
        if not isinstance(x, Literal):
            return numbers.setdefault(x, len(numbers))
        if isinstance(x.aval, ShapedArray) and is_float(x.aval):
            floats.append(np.asarray(x.val, x.aval.dtype))
            return "float", _aval(x.aval)
        return "literal", _aval(x.aval), np.asarray(x.val).tobytes()

    def const(variable, value):
        """Describes a constant: by its type if it is of floats, else by its content too."""
        if is_float(value):
            floats.append(np.asarray(value))
            return "float", _aval(variable.aval)
        if jnp.issubdtype(getattr(value, "dtype", np.int32), jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        return _aval(variable.aval), hashlib.sha256(np.ascontiguousarray(value).tobytes()).digest()

    constants = tuple(map(const, jaxpr.constvars, consts))
    # Arguments get the first numbers, so that equal programs have equal numbers.
    for variable in (*jaxpr.constvars, *jaxpr.invars):
        atom(variable)
    equations = []
    for eqn in jaxpr.eqns:
        operands = tuple(map(atom, eqn.invars))
        items = sorted(eqn.params.items())
        if eqn.primitive.name in CUSTOM_CALLS:
            items = [(name, value) for name, value in items if isinstance(value, Program)]
        params = tuple((name, _param(value, floats)) for name, value in items)
        results = tuple((atom(variable), _aval(variable.aval)) for variable in eqn.outvars)
        equations.append((eqn.primitive.name, operands, params, results))
    return constants, tuple(equations), tuple(map(atom, jaxpr.outvars))


def _param(value: Any, floats: list[np.ndarray]) -> Hashable:
    """Returns an equation's parameter as a hashable value; programs in it up to their floats."""
    if isinstance(value, Program):
        return _kind(value, floats)
    if isinstance(value, (tuple, list)):
        return tuple(_param(x, floats) for x in value)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def _count(value: Any) -> int:
    """Returns how many floats `_kind` finds in a parameter."""
    if isinstance(value, (tuple, list)):
        return sum(map(_count, value))
    if not isinstance(value, Program):
        return 0
    jaxpr, consts = jaxpr_and_constants(value)
    count = sum(map(is_float, consts)) + _literals(jaxpr.outvars)
    return count + sum(_literals(eqn.invars) + sum(map(_count, eqn.params.values())) for eqn in jaxpr.eqns)


def _literals(atoms: Sequence[Any]) -> int:
    """Returns the number of literals that are floats."""
    return sum(isinstance(x, Literal) and is_float(x.aval) for x in atoms)


def _replay(program: Program, floats: Sequence[Any], args: Sequence[Any]) -> list:
    """Returns a program's results, with other floats in place of its own.

    Args:
      program: as it was traced.
      floats: a value for each of its floats, in the order of `_kind`; None keeps the program's own.
      args: the program's arguments.
    """
    # The floats are read in the order in which `_kind` has met them.
    position = 0

    def next_floats(count: int) -> Sequence[Any]:
        nonlocal position
        position += count
        return floats[position - count : position]

    def next_unless_none(own_value: Any, is_a_float: bool) -> Any:
        (other,) = next_floats(1) if is_a_float else [None]
        return own_value if other is None else other

    def rule(eqn: JaxprEqn, operands: list) -> Sequence:
        # The order of `_kind`: operands first, then parameters by their names.
        inner = {name: next_floats(_count(value)) for name, value in sorted(eqn.params.items())}
        unchanged = all(x is None for inner_floats in inner.values() for x in inner_floats)
        with as_traced(eqn):
            # An equation whose floats all stay is bound as it is, with its rules of differentiation.
            return bind(eqn, operands) if unchanged else _again(eqn, inner, operands)

    constants = [next_unless_none(x, is_float(x)) for x in jaxpr_and_constants(program)[1]]
    literal = lambda x: next_unless_none(x.val, is_float(x.aval))  # noqa: E731
    return evaluate(program, args, rule, constants=constants, literal=literal)


def _again(eqn: Any, floats: Mapping[str, Sequence[Any]], operands: list) -> Sequence:
    """Returns the results of an equation whose inner programs get other floats.

    Args:
      eqn: a call, a loop or a branch.
      floats: by the equation's parameter, a value for each float in the program or programs that it holds; None keeps
        its own. The order is that in which `_kind` reads a program: its constants, then each equation's literals and
        inner programs, then literals among its results. Every value has the shape of the float that it replaces.
      operands: the values of the equation's operands, in the order of `eqn.invars`.

    Returns: the values of `eqn.outvars`.

    Raises: NotImplementedError for an equation that is neither a call nor a loop nor a branch.
    """

    def inner(program: Program, floats_of_program: Sequence[Any]) -> Callable:
        """Returns a function that runs an inner program with other floats."""
        return lambda *args: _replay(program, floats_of_program, args)

    name = eqn.primitive.name
    params = eqn.params
    if name in CALLS:
        (body,) = (key for key in ("jaxpr", "call_jaxpr", "call") if key in params)
        return inner(params[body], floats[body])(*operands)
    if name == "while":
        # The operands are the constants of the test, the constants of the body, and the first carry.
        split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        test, turn = (inner(params[key], floats[key]) for key in ("cond_jaxpr", "body_jaxpr"))
        of_test = operands[: split[0]]
        of_turn = operands[split[0] : split[1]]
        start = operands[split[1] :]
        # The condition of a loop that was vmapped has a value for each lane.
        condition = jaxpr_and_constants(params["cond_jaxpr"])[0].outvars[0].aval
        vmapped = isinstance(condition, ShapedArray) and bool(condition.shape)
        return _loop(partial(test, *of_test), partial(turn, *of_turn), start, vmapped)
    if name == "scan":
        num_shared, num_carried = scan_arguments(params)
        shared = operands[:num_shared]
        start = operands[num_shared : num_shared + num_carried]
        rows = operands[num_shared + num_carried :]
        turn = inner(params["jaxpr"], floats["jaxpr"])

        def step(carry, row):
            out = turn(*shared, *carry, *row)
            return out[:num_carried], out[num_carried:]

        # The other parameters describe the operands, and `scan` finds them again.
        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, rows = jax.lax.scan(step, start, rows, **options)
        return [*carry, *rows]
    if name == "cond":
        branches = []
        # `branches` is one parameter, so the floats of all branches stand one behind the other.
        remaining = floats["branches"]
        for branch in params["branches"]:
            size = _count(branch)
            branches.append(inner(branch, remaining[:size]))
            remaining = remaining[size:]
        return jax.lax.switch(operands[0], branches, *operands[1:])
    raise NotImplementedError(f"a float inside {name!r} cannot be lifted")


def _loop(test: Callable, turn: Callable, start: list, vmapped: bool) -> list:
    """Runs a loop.

    Args:
      test, turn: the condition, and the body.
      start: the first values.
      vmapped: whether the condition has a value for each lane. As JAX lowers such a loop, it runs while any lane goes
        on, and a lane that has ended keeps its values.
    """

    def goes_on(values):
        (is_going,) = test(*values)
        return is_going.any() if vmapped else is_going

    def step(values):
        new = turn(*values)
        return tree.where(test(*values)[0], new, values) if vmapped else new

    return jax.lax.while_loop(goes_on, step, start)
