"""Makes arguments of the large constants in a program.

A function that closes over arrays, such as a loss with frozen parameters, has them as constants of its program. XLA
would get them with the program: as text when it is lowered, while it compiles, and in the file of each program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.extend import core
from jax.sharding import PartitionSpec

from fedjax_sim.engine.jaxpr import (
    CALLS,
    Program,
    as_traced,
    bind,
    evaluate,
    inner_programs,
    jaxpr_and_constants,
    programs,
    scan_arguments,
)
from fedjax_sim.types import Array, PyTree

LARGE_BYTES = 1 << 16  # smaller constants stay where they are: XLA may know and use them


def jit(function: Callable) -> Jitted:
    """Compiles a function as `jax.jit` does, but passes the large arrays that it closes over as arguments.

    Guarantees: the results are those of `jax.jit`, and the arrays are in no compiled program
    (tests/engine/test_constants.py::test_large_arrays_are_in_no_program).

    >>> import jax.numpy as jnp
    >>> float(jit(lambda x: x + 1)(2.0))
    3.0
    """
    return Jitted(function)


class _Closed(NamedTuple):
    """A traced program, whose large constants are arguments."""

    arrays: list[Array]  # the large constants
    run: jax.stages.Wrapped  # (arrays, leaves of the arguments) -> leaves of the results
    structure: Any  # of the results
    program: Program  # while it is alive, no other program can have its id


class Jitted:
    """A function that is compiled as `jit` says."""

    def __init__(self, function: Callable):
        self._jitted = jax.jit(function)
        self._closed: dict[int, _Closed] = {}  # by the id of the traced program

    def __call__(self, *args: PyTree) -> PyTree:
        """Returns the function's result."""
        closed = self._closed_for(args)
        if not closed.arrays:
            return self._jitted(*args)
        return jax.tree.unflatten(closed.structure, closed.run(closed.arrays, jax.tree.leaves(args)))

    def lower(self, *args: PyTree) -> jax.stages.Lowered:
        """Lowers the program that a call with such arguments runs; once it is compiled, such a call compiles nothing.

        Args:
          args: of the function: arrays, or specs with the places that committed arrays have.

        Guarantees: a call after it compiles nothing
        (tests/engine/test_constants.py::test_a_lowered_program_is_that_of_a_call).
        """
        closed = self._closed_for(args)
        return closed.run.lower(closed.arrays, jax.tree.leaves(args)) if closed.arrays else self._jitted.lower(*args)

    def _closed_for(self, args: Sequence[PyTree]) -> _Closed:
        """Returns the program of a call with such arguments."""
        traced = self._jitted.trace(*args)
        program = traced.jaxpr
        if id(program) not in self._closed:
            arrays, run = constants_as_arguments(program)
            self._closed[id(program)] = _Closed(arrays, jax.jit(run), jax.tree.structure(traced.out_info), program)
        return self._closed[id(program)]


def constants_as_arguments(program: Program) -> tuple[list[Array], Callable]:
    """Returns the large constants of a program, and the program as a function of them.

    Args:
      program: a traced program. Derivatives must have been taken inside of it.

    Returns: (arrays, run) with `run(arrays, inputs) -> outputs`, lists of arrays. Without large constants `arrays` is
    empty.

    Guarantees: constants of loops, branches, inner calls and devices are found too
    (tests/engine/test_constants.py::test_constants_are_found_wherever_they_are).
    """
    arrays = {id(x): x for x in _large(program)}

    def run(values: Sequence[Array], inputs: Sequence[Array]) -> list[Array]:
        return _Replay(dict(zip(arrays, values, strict=True))).run(program, inputs)

    return list(arrays.values()), run


def _large(program: Program) -> list[Array]:
    """Returns the large constants of a program and of the programs inside of it."""
    jaxpr, constants = jaxpr_and_constants(program)
    inner = [x for equation in jaxpr.eqns for _, each in inner_programs(equation) for x in _large(each)]
    return [x for x in constants if _is_large(x)] + inner


def _is_large(x: Any) -> bool:
    return not isinstance(x, Tracer) and getattr(x, "nbytes", 0) >= LARGE_BYTES


class _Replay:
    """Evaluates programs with other values for some of their constants."""

    def __init__(self, values: dict[int, Array]):
        self.values = values  # by the constant's id

    def run(self, program: Program, inputs: Sequence[Array]) -> list[Array]:
        """Returns the outputs of a program."""
        _, constants = jaxpr_and_constants(program)
        values = [self.values.get(id(x), x) for x in constants]
        return evaluate(program, inputs, self.step, constants=values)

    def step(self, equation: core.JaxprEqn, operands: list[Array]) -> Sequence[Array]:
        """Returns the results of an equation. What holds no large constant stays as it is.

        Args:
          equation: of the program that is evaluated.
          operands: its inputs.
        """
        if not any(_large(inner) for _, inner in inner_programs(equation)):
            with as_traced(equation):
                return bind(equation, operands)
        name = equation.primitive.name
        params = equation.params
        with as_traced(equation):
            if name in CALLS:
                (inner,) = [inner for value in params.values() for inner in programs(value)]
                return self.run(inner, operands)
            if name == "scan":
                return self.scan(params, operands)
            if name == "while":
                return self.loop(params, operands)
            if name == "cond":
                index, *operands = operands
                branches = [lambda *args, branch=branch: self.run(branch, args) for branch in params["branches"]]
                return jax.lax.switch(index, branches, *operands)
            if name == "shard_map":
                return self.on_devices(params, operands)
            return bind(equation, operands)

    def scan(self, params: dict, operands: list[Array]) -> list[Array]:
        """Returns the results of a `scan`."""
        num_constants, num_carried = scan_arguments(params)
        constants, carry = operands[:num_constants], operands[num_constants : num_constants + num_carried]

        def body(carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
            out = self.run(params["jaxpr"], [*constants, *carry, *xs])
            return out[:num_carried], out[num_carried:]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, rows = jax.lax.scan(body, carry, operands[num_constants + num_carried :], **options)
        return [*carry, *rows]

    def loop(self, params: dict, operands: list[Array]) -> list[Array]:
        """Returns the results of a `while`."""
        num_test, num_body = params["cond_nconsts"], params["body_nconsts"]
        of_test, of_body = operands[:num_test], operands[num_test : num_test + num_body]
        return jax.lax.while_loop(
            lambda carry: self.run(params["cond_jaxpr"], [*of_test, *carry])[0],
            lambda carry: self.run(params["body_jaxpr"], [*of_body, *carry]),
            operands[num_test + num_body :],
        )

    def on_devices(self, params: dict, operands: list[Array]) -> list[Array]:
        """Returns the results of a `shard_map`, whose program every device runs with the whole constants.

        Args:
          params: of the `shard_map`.
          operands: its inputs.
        """
        ids, values = list(self.values), list(self.values.values())

        def run(values: list[Array], *args: Array) -> list[Array]:
            return _Replay(dict(zip(ids, values, strict=True))).run(core.ClosedJaxpr(params["jaxpr"], ()), args)

        on_mesh = jax.shard_map(
            run,
            mesh=params["mesh"],
            in_specs=(PartitionSpec(), *params["in_specs"]),
            out_specs=list(params["out_specs"]),
            check_vma=params["check_vma"],
            axis_names=params["newly_manual_axes"],
        )
        return on_mesh(values, *operands)
