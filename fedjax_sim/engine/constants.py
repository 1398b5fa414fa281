"""Makes arguments of the large constants in a program.

A function that closes over arrays, such as a loss with frozen parameters, has them as constants of its program. XLA
would get them with the program: as text when it is lowered, while it compiles, and in the file of each program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import PartitionSpec

from fedjax_sim.engine.jaxpr import (
    CALLS,
    Program,
    as_traced,
    bind,
    evaluate,
    inner_programs,
    opened,
    programs,
    scan_arguments,
)
from fedjax_sim.types import Array, PyTree

__all__ = ["LARGE_BYTES", "constants_as_arguments", "jit"]

LARGE_BYTES = 1 << 16  # smaller constants stay where they are: XLA may know and use them


def jit(function: Callable) -> Callable:
    """Compiles a function as `jax.jit` does, but passes the large arrays that it closes over as arguments.

    Guarantees: the results are those of `jax.jit`, and the arrays are in no compiled program
    (tests/engine/test_constants.py::test_large_arrays_are_in_no_program).

    >>> import jax.numpy as jnp
    >>> float(jit(lambda x: x + 1)(2.0))
    3.0
    """
    jitted = jax.jit(function)
    compiled: dict[int, tuple] = {}

    def call(*args: PyTree) -> PyTree:
        traced = jitted.trace(*args)
        if id(traced.jaxpr) not in compiled:
            arrays, run = constants_as_arguments(traced.jaxpr)
            # The program is kept beside it: while it is alive, no other program can have its id.
            compiled[id(traced.jaxpr)] = arrays, jax.jit(run), traced.jaxpr
        arrays, run, _ = compiled[id(traced.jaxpr)]
        if not arrays:
            return jitted(*args)
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), run(arrays, jax.tree.leaves(args)))

    return call


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
    jaxpr, constants = opened(program)
    inner = [x for equation in jaxpr.eqns for _, each in inner_programs(equation) for x in _large(each)]
    return [x for x in constants if _is_large(x)] + inner


def _is_large(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer) and getattr(x, "nbytes", 0) >= LARGE_BYTES


class _Replay:
    """Evaluates programs with other values for some of their constants."""

    def __init__(self, values: dict[int, Array]):
        self.values = values  # by the constant's id

    def run(self, program: Program, inputs: Sequence[Array]) -> list[Array]:
        """Returns the outputs of a program."""
        _, constants = opened(program)
        values = [self.values.get(id(x), x) for x in constants]
        return evaluate(program, inputs, self.step, constants=values)

    def step(self, equation: core.JaxprEqn, operands: list[Array]) -> Sequence[Array]:
        """Returns the results of an equation. What holds no large constant stays as it is."""
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
        """Returns the results of a `shard_map`, whose program every device runs with the whole constants."""
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
