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
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fedjax_sim import tree
from fedjax_sim.engine.jaxpr import as_traced
from fedjax_sim.engine.plan import scan_arguments
from fedjax_sim.sweeps.xla_constants import INLINED, is_float, kept_floats, opened_jaxpr
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
    kind = (_kind(*opened_jaxpr(jaxpr), floats), structure, tuple(map(_aval, jaxpr.in_avals)))
    known = [(i, floats[i].tobytes()) for i in kept_floats(*opened_jaxpr(jaxpr), floats)]
    return Trace((*kind, *known), floats, jaxpr, structure), out


def lifted(traces: Sequence[Trace]) -> list[np.ndarray | None]:
    """Floats of traces of one kind, stacked [n, ...] where they differ; None where all agree, bit for bit."""
    columns = zip(*(one.floats for one in traces), strict=True)
    return [None if len({x.tobytes() for x in column}) == 1 else np.stack(column) for column in columns]


def replay(traced: Trace, floats: Sequence[jax.Array | None], *args: PyTree) -> PyTree:
    """Calls a traced function with other floats in place of its own (None: its own)."""
    flat = _replay(*opened_jaxpr(traced.jaxpr), list(floats), jax.tree.leaves(args))
    return jax.tree.unflatten(traced.out, flat)


def _aval(aval: Any) -> Hashable:
    return getattr(aval, "shape", ()), str(getattr(aval, "dtype", aval)), bool(getattr(aval, "weak_type", False))


def _kind(jaxpr: Jaxpr, consts: Sequence[Any], floats: list[np.ndarray]) -> Hashable:
    """A jaxpr up to its floats, which are appended to `floats`: constants first, then equation by equation."""
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
            given = [(name, value) for name, value in given if isinstance(value, (ClosedJaxpr, Jaxpr))]
        params = tuple((name, _param(value, floats)) for name, value in given)
        equations.append((eqn.primitive.name, own, params, tuple((atom(v), _aval(v.aval)) for v in eqn.outvars)))
    return held, tuple(equations), tuple(map(atom, jaxpr.outvars))


def _param(value: Any, floats: list[np.ndarray]) -> Hashable:
    if isinstance(value, (ClosedJaxpr, Jaxpr)):
        return _kind(*opened_jaxpr(value), floats)
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
    if not isinstance(value, (ClosedJaxpr, Jaxpr)):
        return 0
    jaxpr, consts = opened_jaxpr(value)
    count = sum(map(is_float, consts)) + _literals(jaxpr.outvars)
    return count + sum(_literals(eqn.invars) + sum(map(_count, eqn.params.values())) for eqn in jaxpr.eqns)


def _literals(atoms: Sequence[Any]) -> int:
    return sum(isinstance(x, Literal) and is_float(x.aval) for x in atoms)


def _replay(jaxpr: Jaxpr, consts: Sequence[Any], floats: list, args: Sequence[Any]) -> list:
    """A jaxpr's results, with the floats that are given in place of its own."""
    position = 0

    def next_floats(count: int) -> list:
        nonlocal position
        position += count
        return floats[position - count : position]

    def read(x):
        if not isinstance(x, Literal):
            return values[x]
        if is_float(x.aval):
            (given,) = next_floats(1)
            return x.val if given is None else given
        return x.val

    given = [next_floats(1)[0] if is_float(x) else None for x in consts]
    held = [x if own is None else own for x, own in zip(consts, given, strict=True)]
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*held, *args), strict=True))
    for eqn in jaxpr.eqns:
        operands = [read(x) for x in eqn.invars]
        inner = {name: next_floats(_count(value)) for name, value in sorted(eqn.params.items())}
        unchanged = all(x is None for own in inner.values() for x in own)
        with as_traced(eqn):
            results = _bound(eqn, operands) if unchanged else _again(eqn, inner, operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _bound(eqn: Any, operands: list) -> Sequence:
    """The results of an equation, unchanged."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def _again(eqn: Any, floats: dict[str, list], operands: list) -> Sequence:
    """The results of an equation whose inner programs get other floats."""

    def inner(program: ClosedJaxpr | Jaxpr, own: list) -> Callable:
        return lambda *args: _replay(*opened_jaxpr(program), own, args)

    name = eqn.primitive.name
    params = eqn.params
    if name in INLINED:
        (body,) = (key for key in ("jaxpr", "call_jaxpr") if key in params)
        return inner(params[body], floats[body])(*operands)
    if name == "while":
        split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        test, turn = (inner(params[key], floats[key]) for key in ("cond_jaxpr", "body_jaxpr"))
        of_test = operands[: split[0]]
        of_turn = operands[split[0] : split[1]]
        start = operands[split[1] :]
        vmapped = bool(opened_jaxpr(params["cond_jaxpr"])[0].outvars[0].aval.shape)
        return _loop(partial(test, *of_test), partial(turn, *of_turn), start, vmapped)
    if name == "scan":
        count, size = scan_arguments(params)
        shared = operands[:count]
        start = operands[count : count + size]
        rows = operands[count + size :]
        turn = inner(params["jaxpr"], floats["jaxpr"])

        def step(carry, row):
            out = turn(*shared, *carry, *row)
            return out[:size], out[size:]

        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, rows = jax.lax.scan(step, start, rows, **options)
        return [*carry, *rows]
    if name == "cond":
        branches = []
        own = floats["branches"]
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
