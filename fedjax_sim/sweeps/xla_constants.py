"""Finds the floats that change XLA's arithmetic if XLA knows them: they must stay literals of a program.

While it compiles, XLA evaluates expressions that depend only on known floats, with its own rounding. It removes
products with one and sums with zero, makes (x * 0.3) * 0.7 one product and (x + 0.3) + 0.7 one sum, and makes some
powers products. As an argument, such a float would give other last bits than as a literal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from fedjax_sim.engine.jaxpr import CALLS, Program, evaluate, inner_programs, jaxpr_and_constants, scan_arguments

# Primitives whose inner programs can be replayed with other floats.
OPENED = (*CALLS, "cond", "scan", "while")
# Primitives that change no value, only its place or its type.
MOVING = ("bitcast_convert_type", "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims",
          "optimization_barrier", "reshape", "rev", "squeeze", "transpose")  # fmt: skip
# Primitives that round as IEEE 754 prescribes, at compile time and at run time alike.
ROUNDED = ("add", "div", "max", "min", "mul", "neg", "sqrt", "sub")
POWERS = ("atan2", "pow")
# Primitives of which XLA joins two that follow each other, if both have a known operand.
JOINED = {"add": "+", "sub": "+", "mul": "*", "div": "*"}


class _Fact(NamedTuple):
    """A `_Fact` states what is known of a value while a program is walked."""

    made_of: frozenset[int] | None = None  # the floats that it depends on, if on nothing else
    worked_out: bool = False  # whether it is computed of them by arithmetic
    joined: tuple[str, frozenset[int]] | None = None  # its last product, ratio or sum, and the floats that took part


class _Walk:
    """Walks over a program's floats, in the order of `traced_hyperparameters`, and collects those that must stay.

    Args:
      floats: the values of the program's floats.
    """

    def __init__(self, floats: Sequence[np.ndarray]):
        self.floats = floats
        self.position = 0  # the number of floats met so far
        self.kept = set()  # the numbers of floats that must stay

    def value(self, x: Any) -> _Fact:
        """Returns the fact of a literal or a constant, and counts it if it is a float."""
        self.position += is_float(x)
        return _Fact(frozenset({self.position - 1} if is_float(x) else ()))

    def over(self, program: Program, argument_facts: Sequence[_Fact]) -> list[_Fact]:
        """Returns the facts of a program's results, from the facts of its first arguments."""
        jaxpr, constants = jaxpr_and_constants(program)
        constant_facts = [self.value(x) for x in constants]
        # Nothing is known of other arguments.
        unknown = [_Fact()] * (len(jaxpr.invars) - len(argument_facts))
        facts = [*argument_facts, *unknown][: len(jaxpr.invars)]
        return evaluate(program, facts, self.rule, constants=constant_facts, literal=lambda x: self.value(x.aval))

    def rule(self, eqn: JaxprEqn, operands: list[_Fact]) -> list[_Fact]:
        """Returns the facts of an equation's results.

        Args:
          eqn: an equation of the program.
          operands: their facts.
        """
        name = eqn.primitive.name
        results: list[_Fact] = []
        first = self.position
        # XLA puts a call's program, and a loop's of a single turn, in the place of the equation.
        is_inlined = name in CALLS or (name == "scan" and eqn.params["length"] == 1)
        for key, program in inner_programs(eqn):
            results = self.over(program, operands if is_inlined else _entering(name, key, eqn.params, operands))
        if name not in OPENED:
            self.kept |= set(range(first, self.position))
        if results and is_inlined:
            return results
        # After several turns nothing is known of a loop's results, and a print has none.
        if results or not eqn.outvars:
            return [_Fact()] * len(eqn.outvars)
        return [self.result(eqn, operands)] + [_Fact()] * (len(eqn.outvars) - 1)

    def result(self, eqn: Any, operands: list[_Fact]) -> _Fact:
        """Returns the fact of an equation's result, and notes the floats that must stay because of the equation.

        Args:
          eqn, operands: as for `rule`.
        """
        name = eqn.primitive.name
        size = getattr(eqn.outvars[0].aval, "size", 1)
        # XLA joins nothing across a broadcast.
        is_broadcast = [getattr(x.aval, "size", 1) != size for x in eqn.invars]
        operands = [
            x._replace(joined=None) if crosses_broadcast else x
            for x, crosses_broadcast in zip(operands, is_broadcast, strict=True)
        ]
        if name in MOVING:
            return operands[0]
        known = [x for x in operands if x.made_of is not None]
        floats = frozenset[int]().union(*(x.made_of for x in operands if x.made_of is not None))
        if len(known) == len(operands):
            # XLA evaluates the equation while it compiles: with the run's rounding only for one operation of ROUNDED.
            if name not in ROUNDED or any(x.worked_out for x in known):
                self.kept |= floats
            self.kept |= {i for i in floats if np.isin(self.floats[i], (0, 1, -1)).all()}
            return _Fact(floats, True)
        if name in POWERS:
            self.kept |= floats
        # XLA makes y / (a / x) into y * x / a.
        if name == "div" and operands[1].joined and operands[1].joined[0] == "/":
            joined_floats = operands[1].joined[1] | floats
            self.kept |= joined_floats if floats else set()
            return _Fact(joined=("*", joined_floats))
        if not floats or name not in JOINED:
            return _Fact()
        (value,) = known
        (unknown,) = [x for x in operands if x.made_of is None]
        # A known numerator gives a ratio; every other product with a known factor counts as a product.
        sort = "/" if name == "div" and value is operands[0] else JOINED[name]
        # XLA removes an operation with a neutral element, and makes a product with -1 a change of sign.
        if self.all_are(value, lambda x: np.isin(x, (0,) if sort == "+" else (1, -1))):
            self.kept |= floats
            return _Fact() if sort == "/" else unknown
        before = unknown.joined[1] if unknown.joined and unknown.joined[0] == sort else None
        # A product with a power of two is exact, so joining it changes no bit.
        if sort != "+" and self.all_are(value, lambda x: abs(np.frexp(x)[0]) == 0.5):
            return _Fact(joined=(sort, before) if before else None)
        if before is not None:
            self.kept |= before | floats
        return _Fact(joined=(sort, floats | (before or frozenset())))

    def all_are(self, value: _Fact, test: Any) -> bool:
        """Returns whether the test holds for every number of a value that is not computed of others."""
        if value.made_of is None or value.worked_out:
            return False
        return all(test(np.asarray(self.floats[i], np.float64)).all() for i in value.made_of)


def kept_floats(program: Program, floats: Sequence[np.ndarray]) -> list[int]:
    """Returns the numbers of those floats of a program that must stay in it.

    Args:
      program: in which the floats are literals and constants.
      floats: its floats, in the order of `traced_hyperparameters`.

    Guarantees: the other floats give the same bits as arguments as they give as literals, over the operations and
    values of tests/sweeps/test_xla_constants.py::test_what_is_lifted_keeps_its_bits.
    """
    walk = _Walk(floats)
    walk.over(program, ())
    return sorted(walk.kept)


def is_float(x: Any) -> bool:
    """Returns whether a value, or an abstract value, is of floats."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _entering(name: str, key: str, params: dict, operands: list[_Fact]) -> list[_Fact]:
    """Returns the facts of the arguments of an inner program that are the same in all turns.

    These arguments come first, and known constants among them stay known.
    """
    operands = [x._replace(joined=None) for x in operands]
    if name == "cond":
        return operands[1:]
    if name == "while":
        num_test = params["cond_nconsts"]
        return operands[:num_test] if key == "cond_jaxpr" else operands[num_test : num_test + params["body_nconsts"]]
    if name == "scan":
        return operands[: scan_arguments(params)[0]]
    return []
