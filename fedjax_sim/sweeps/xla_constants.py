"""The floats that change XLA's arithmetic where it knows them: they must stay literals of a program.

XLA evaluates what depends only on known floats while it compiles, with its own rounding. It removes products with one
and sums with zero, makes (x * 0.3) * 0.7 one product and (x + 0.3) + 0.7 one sum, and some powers products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from fedjax_sim.engine.jaxpr import CALLS, Program, evaluate, inner_programs, opened, scan_arguments

__all__ = ["is_float", "kept_floats"]

OPENED = (*CALLS, "cond", "scan", "while")  # whose inner programs can be replayed with other floats
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
        self.floats, self.position, self.kept = floats, 0, set()

    def value(self, x: Any) -> _Fact:
        """The fact of a literal or a constant."""
        self.position += is_float(x)
        return _Fact(frozenset({self.position - 1} if is_float(x) else ()))

    def over(self, program: Program, inputs: Sequence[_Fact]) -> list[_Fact]:
        """Facts of what a program returns."""
        jaxpr, constants = opened(program)
        facts = [self.value(x) for x in constants]
        unknown = [_Fact()] * (len(jaxpr.invars) - len(inputs))
        inputs = [*inputs, *unknown][: len(jaxpr.invars)]
        return evaluate(program, inputs, self.rule, constants=facts, literal=lambda x: self.value(x.aval))

    def rule(self, eqn: JaxprEqn, operands: list[_Fact]) -> list[_Fact]:
        """Facts of an equation's results."""
        name, first = eqn.primitive.name, self.position
        through = name in CALLS or (name == "scan" and eqn.params["length"] == 1)  # XLA puts it in the loop's place
        results: list[_Fact] = []
        for key, program in inner_programs(eqn):
            results = self.over(program, operands if through else _entering(name, key, eqn.params, operands))
        if name not in OPENED:
            self.kept |= set(range(first, self.position))
        if results and through:
            return results
        if results or not eqn.outvars:  # a print has no results
            return [_Fact()] * len(eqn.outvars)
        return [self.result(eqn, operands)] + [_Fact()] * (len(eqn.outvars) - 1)

    def result(self, eqn: Any, operands: list[_Fact]) -> _Fact:
        """The fact of an equation's result."""
        name, size = eqn.primitive.name, getattr(eqn.outvars[0].aval, "size", 1)
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
        (value,), (other,) = known, [x for x in operands if x.made_of is None]
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


def kept_floats(program: Program, floats: Sequence[np.ndarray]) -> list[int]:
    """Which of a program's floats must stay in it, by their number.

    Guarantees: as arguments the others give the bits that they give as literals, over the operations and values of
    tests/sweeps/test_xla_constants.py::test_what_is_lifted_keeps_its_bits.
    """
    walk = _Walk(floats)
    walk.over(program, ())
    return sorted(walk.kept)


def is_float(x: Any) -> bool:
    """Whether a value, or aval, is of floats."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


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
