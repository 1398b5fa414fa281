"""The floats that change XLA's arithmetic where it knows them: they must stay literals of a program.

XLA evaluates what depends only on known floats while it compiles, with its own rounding. It removes products with one
and sums with zero, makes (x * 0.3) * 0.7 one product and (x + 0.3) + 0.7 one sum, and some powers products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fedjax_sim.engine.plan import scan_arguments

__all__ = ["INLINED", "is_float", "kept_floats", "opened_jaxpr"]

INLINED = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2")
OPENED = (*INLINED, "cond", "scan", "while")  # whose inner programs can be replayed with other floats
MOVING = ("bitcast_convert_type", "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims",
          "optimization_barrier", "reshape", "rev", "squeeze", "transpose")  # fmt: skip
ROUNDED = ("add", "div", "max", "min", "mul", "neg", "sqrt", "sub")  # as IEEE 754 prescribes, wherever they run
POWERS = ("atan2", "pow")
JOINED = {"add": "+", "sub": "+", "mul": "*", "div": "*"}


class _Fact(NamedTuple):
    """What is known of a value."""

    made_of: frozenset[int] | None = None  # the floats that it depends on, if on nothing else
    worked_out: bool = False  # computed of them by arithmetic
    joined: tuple[str, frozenset[int]] | None = None  # its last product, ratio or sum, and the floats that took part


class _Walk:
    """A walk over a program's floats, in the order of `lifting`."""

    def __init__(self, floats: Sequence[np.ndarray]):
        self.floats = floats
        self.position = 0
        self.kept = set()

    def value(self, x: Any) -> _Fact:
        """The fact of a literal or a constant."""
        self.position += is_float(x)
        return _Fact(frozenset({self.position - 1} if is_float(x) else ()))

    def over(self, jaxpr: Jaxpr, consts: Sequence[Any], given: Sequence[_Fact]) -> list[_Fact]:
        """Facts of what a program returns."""
        facts = dict(zip(jaxpr.constvars, map(self.value, consts), strict=True))
        facts |= zip(jaxpr.invars, given, strict=False)  # of others nothing is known

        def fact(x):
            return self.value(x.aval) if isinstance(x, Literal) else facts.get(x, _Fact())

        for eqn in jaxpr.eqns:
            operands = [fact(x) for x in eqn.invars]
            results = self.inside(eqn, operands)
            if eqn.outvars:  # a print has none
                facts |= zip(eqn.outvars, results or [self.result(eqn, operands)], strict=False)
        return [fact(x) for x in jaxpr.outvars]

    def inside(self, eqn: Any, operands: list[_Fact]) -> list[_Fact]:
        """Facts of what the programs in an equation return."""
        name = eqn.primitive.name
        params = eqn.params
        results = []
        first = self.position
        through = name in INLINED or (name == "scan" and params["length"] == 1)  # XLA puts it in the loop's place
        for key, value in sorted(params.items()):
            for program in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(program, (ClosedJaxpr, Jaxpr)):
                    entering = operands if through else _entering(name, key, params, operands)
                    results = self.over(*opened_jaxpr(program), entering)
        if name not in OPENED:
            self.kept |= set(range(first, self.position))
        return results if through else [_Fact()] * len(results)

    def result(self, eqn: Any, operands: list[_Fact]) -> _Fact:
        """The fact of an equation's result."""
        name = eqn.primitive.name
        size = getattr(eqn.outvars[0].aval, "size", 1)
        grown = [getattr(x.aval, "size", 1) != size for x in eqn.invars]  # XLA joins nothing across a broadcast
        operands = [x._replace(joined=None) if far else x for x, far in zip(operands, grown, strict=True)]
        if name in MOVING:
            return operands[0]
        known = [x for x in operands if x.made_of is not None]
        floats = frozenset().union(*(x.made_of for x in known))
        if len(known) == len(operands):
            if name not in ROUNDED or any(x.worked_out for x in known):
                self.kept |= floats
            self.kept |= {i for i in floats if np.isin(self.floats[i], (0, 1, -1)).all()}
            return _Fact(floats, True)
        if name in POWERS:
            self.kept |= floats
        if name == "div" and operands[1].joined and operands[1].joined[0] == "/":  # y / (a / x) is made y * x / a
            both = operands[1].joined[1] | floats
            self.kept |= both if floats else set()
            return _Fact(joined=("*", both))
        if not floats or name not in JOINED:
            return _Fact()
        (value,) = known
        (other,) = [x for x in operands if x.made_of is None]
        sort = "/" if name == "div" and value is operands[0] else JOINED[name]
        if self.all_are(value, lambda x: np.isin(x, (0,) if sort == "+" else (1, -1))):
            self.kept |= floats
            return _Fact() if sort == "/" else other
        before = other.joined[1] if other.joined and other.joined[0] == sort else None
        if sort != "+" and self.all_are(value, lambda x: abs(np.frexp(x)[0]) == 0.5):  # powers of two: exact
            return _Fact(joined=before and (sort, before))
        if before is not None:
            self.kept |= before | floats
        return _Fact(joined=(sort, floats | (before or frozenset())))

    def all_are(self, value: _Fact, test: Any) -> bool:
        return not value.worked_out and all(test(np.asarray(self.floats[i], np.float64)).all() for i in value.made_of)


def kept_floats(jaxpr: Jaxpr, consts: Sequence[Any], floats: Sequence[np.ndarray]) -> list[int]:
    """Which of a program's floats must stay in it, by their number.

    Guarantees: as arguments the others give the bits that they give as literals, over the operations and values of
    tests/sweeps/test_xla_constants.py::test_what_is_lifted_keeps_its_bits.
    """
    walk = _Walk(floats)
    walk.over(jaxpr, consts, ())
    return sorted(walk.kept)


def is_float(x: Any) -> bool:
    """Whether a value, or aval, is of floats."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def opened_jaxpr(value: ClosedJaxpr | Jaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """(a jaxpr, its constants): two classes in JAX 0.10, one in 0.12."""
    return getattr(value, "jaxpr", value), getattr(value, "consts", ())


def _entering(name: str, key: str, params: dict, operands: list[_Fact]) -> list[_Fact]:
    """Facts of what enters a program in an equation and stays the same in all its turns: known constants stay known."""
    operands = [x._replace(joined=None) for x in operands]
    if name == "cond":
        return operands[1:]
    if name == "while":
        tests = params["cond_nconsts"]
        return operands[:tests] if key == "cond_jaxpr" else operands[tests : tests + params["body_nconsts"]]
    if name == "scan":
        return operands[: scan_arguments(params)[0]]
    return []
