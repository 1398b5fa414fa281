"""Programs that differ in floats only, as one program that takes those floats as arguments.

A hyper-parameter enters a program in many ways: rounded, squared, subtracted from one in Python's doubles, tested,
turned into a bound. So every value is traced by itself, and the traces are compared. Where they agree up to the floats
written in them, those floats become arguments, and one compiled program serves all values. Floats without whose value
XLA would round differently stay in the program (`folding`). The parts need no change for this: their checks see real
numbers, and a value that changes a shape makes another program by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from fedjax_sim import tree
from fedjax_sim.engine.jaxpr import CALLS, Program, as_traced, bind, evaluate, opened, scan_arguments
from fedjax_sim.sweeps.xla_constants import is_float, kept_floats
from fedjax_sim.types import PyTree

__all__ = ["Trace", "lifted", "replay", "traced_program"]

RULES = ("custom_jvp_call", "custom_vjp_call")  # they hold functions that only a derivative would call


class Trace(NamedTuple):
    """A traced function."""

    kind: Hashable  # equal for two traces that differ only in floats that may be lifted
    floats: list[np.ndarray]  # those written in it, in their order
    jaxpr: ClosedJaxpr
    out: Any  # the structure of what it returns

    def uses(self, name: str) -> bool:
        """Whether it contains a primitive of that name."""
        return f"'{name}'" in str(self.kind)


def traced_program(function: Callable, *args: PyTree) -> tuple[Trace, PyTree]:
    """(A function's trace at these arguments, which may be specs; the specs of what it returns)."""
    jaxpr, out = jax.make_jaxpr(function, return_shape=True)(*args)
    floats: list[np.ndarray] = []
    structure = jax.tree.structure(out)
    kind = (_kind(jaxpr, floats), structure, tuple(map(_aval, jaxpr.in_avals)))
    known = [(i, floats[i].tobytes()) for i in kept_floats(jaxpr, floats)]
    return Trace((*kind, *known), floats, jaxpr, structure), out


def lifted(traces: Sequence[Trace]) -> list[np.ndarray | None]:
    """Floats of traces of one kind, stacked [n, ...] where they differ; None where all agree, bit for bit."""
    columns = zip(*(one.floats for one in traces), strict=True)
    return [None if len({x.tobytes() for x in column}) == 1 else np.stack(column) for column in columns]


def replay(traced: Trace, floats: Sequence[jax.Array | None], *args: PyTree) -> PyTree:
    """Calls a traced function with other floats in place of its own (None: its own)."""
    flat = _replay(traced.jaxpr, list(floats), jax.tree.leaves(args))
    return jax.tree.unflatten(traced.out, flat)


def _aval(aval: Any) -> Hashable:
    return getattr(aval, "shape", ()), str(getattr(aval, "dtype", aval)), bool(getattr(aval, "weak_type", False))


def _kind(program: Program, floats: list[np.ndarray]) -> Hashable:
    """A jaxpr up to its floats, which are appended to `floats`: constants first, then equation by equation."""
    jaxpr, consts = opened(program)
    numbers: dict[Any, int] = {}

    def atom(x):
        if not isinstance(x, Literal):
            return numbers.setdefault(x, len(numbers))
        if is_float(x.aval):
            floats.append(np.asarray(x.val, x.aval.dtype))
            return "float", _aval(x.aval)
        return "literal", _aval(x.aval), np.asarray(x.val).tobytes()

    def const(variable, value):
        if is_float(value):
            floats.append(np.asarray(value))
            return "float", _aval(variable.aval)
        if jnp.issubdtype(getattr(value, "dtype", np.int32), jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        return _aval(variable.aval), hashlib.sha256(np.ascontiguousarray(value).tobytes()).digest()

    held = tuple(map(const, jaxpr.constvars, consts))
    for variable in (*jaxpr.constvars, *jaxpr.invars):
        atom(variable)
    equations = []
    for eqn in jaxpr.eqns:
        own = tuple(map(atom, eqn.invars))
        given = sorted(eqn.params.items())
        if eqn.primitive.name in RULES:
            given = [(name, value) for name, value in given if isinstance(value, Program)]
        params = tuple((name, _param(value, floats)) for name, value in given)
        equations.append((eqn.primitive.name, own, params, tuple((atom(v), _aval(v.aval)) for v in eqn.outvars)))
    return held, tuple(equations), tuple(map(atom, jaxpr.outvars))


def _param(value: Any, floats: list[np.ndarray]) -> Hashable:
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
    """How many floats `_kind` finds in a parameter."""
    if isinstance(value, (tuple, list)):
        return sum(map(_count, value))
    if not isinstance(value, Program):
        return 0
    jaxpr, consts = opened(value)
    count = sum(map(is_float, consts)) + _literals(jaxpr.outvars)
    return count + sum(_literals(eqn.invars) + sum(map(_count, eqn.params.values())) for eqn in jaxpr.eqns)


def _literals(atoms: Sequence[Any]) -> int:
    return sum(isinstance(x, Literal) and is_float(x.aval) for x in atoms)


def _replay(program: Program, floats: Sequence[Any], inputs: Sequence[Any]) -> list:
    """A program's results, with the floats that are given in place of its own, in the order of `_kind`."""
    position = 0

    def next_floats(count: int) -> Sequence[Any]:
        nonlocal position
        position += count
        return floats[position - count : position]

    def own_unless_given(own: Any) -> Any:
        (other,) = next_floats(1) if is_float(own) else [None]
        return own if other is None else other

    def literal(x: Literal) -> Any:
        (other,) = next_floats(1) if is_float(x.aval) else [None]
        return x.val if other is None else other

    def rule(eqn: JaxprEqn, operands: list) -> Sequence:
        inner = {name: next_floats(_count(value)) for name, value in sorted(eqn.params.items())}
        is_unchanged = all(x is None for others in inner.values() for x in others)
        with as_traced(eqn):
            return bind(eqn, operands) if is_unchanged else _again(eqn, inner, operands)

    constants = [own_unless_given(x) for x in opened(program)[1]]
    return evaluate(program, inputs, rule, constants=constants, literal=literal)


def _again(eqn: Any, floats: dict[str, list], operands: list) -> Sequence:
    """The results of an equation whose inner programs get other floats."""

    def inner(program: Program, own: list) -> Callable:
        return lambda *args: _replay(program, own, args)

    name, params = eqn.primitive.name, eqn.params
    if name in CALLS:
        (body,) = (key for key in ("jaxpr", "call_jaxpr") if key in params)
        return inner(params[body], floats[body])(*operands)
    if name == "while":
        split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        test, turn = (inner(params[key], floats[key]) for key in ("cond_jaxpr", "body_jaxpr"))
        of_test, of_turn, start = operands[: split[0]], operands[split[0] : split[1]], operands[split[1] :]
        vmapped = bool(opened(params["cond_jaxpr"])[0].outvars[0].aval.shape)
        return _loop(partial(test, *of_test), partial(turn, *of_turn), start, vmapped)
    if name == "scan":
        count, size = scan_arguments(params)
        shared, start, rows = operands[:count], operands[count : count + size], operands[count + size :]
        turn = inner(params["jaxpr"], floats["jaxpr"])

        def step(carry, row):
            out = turn(*shared, *carry, *row)
            return out[:size], out[size:]

        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, rows = jax.lax.scan(step, start, rows, **options)
        return [*carry, *rows]
    if name == "cond":
        branches, own = [], floats["branches"]
        for branch in params["branches"]:
            size = _count(branch)
            branches.append(inner(branch, own[:size]))
            own = own[size:]
        return jax.lax.switch(operands[0], branches, *operands[1:])
    raise NotImplementedError(f"a float inside {name!r} cannot be lifted")


def _loop(test: Callable, turn: Callable, start: list, vmapped: bool) -> list:
    """A loop. If vmapped, as JAX lowers it, it runs while any lane does; a lane that has ended keeps its values."""

    def goes_on(values):
        (going,) = test(*values)
        return going.any() if vmapped else going

    def step(values):
        new = turn(*values)
        return tree.where(test(*values)[0], new, values) if vmapped else new

    return jax.lax.while_loop(goes_on, step, start)
