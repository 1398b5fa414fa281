"""Reads and evaluates traced programs (jaxprs).

`evaluate` is the only evaluator in the package. It runs a program equation by equation, and a rule says what happens to
an equation. One rule rewrites programs, another reads facts off them, another runs them with other numbers. The values
are whatever the rule returns: arrays, or facts about arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
from jax.core import ShapedArray
from jax.extend import core, source_info_util

from fedjax_sim.types import PyTree

Program = core.ClosedJaxpr | core.Jaxpr  # JAX 0.12 has one class for both

CALLS = (
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "checkpoint",
    "remat2",
)  # fmt: skip
"""Equations that run one inner program on their own operands, once."""


def jaxpr_and_constants(program: Program) -> tuple[core.Jaxpr, Sequence[Any]]:
    """Returns (the program as a plain jaxpr with its equations, the values of its constants)."""
    return cast(core.Jaxpr, getattr(program, "jaxpr", program)), getattr(program, "consts", ())


def aval_of(operand: core.Var | core.Literal) -> ShapedArray:
    """Returns shape and dtype of an operand that is an array; JAX's own type allows tokens and refs as well."""
    return cast(ShapedArray, operand.aval)


def inner_programs(equation: core.JaxprEqn) -> list[tuple[str, Program]]:
    """Returns (the parameter's name, program) for each program inside of an equation, in the order of the names.

    >>> import jax, jax.numpy as jnp
    >>> loop = jax.make_jaxpr(lambda x: jax.lax.while_loop(lambda x: x < 3, lambda x: x + 1, x))(0).jaxpr.eqns[0]
    >>> [name for name, _ in inner_programs(loop)]
    ['body_jaxpr', 'cond_jaxpr']
    """
    return [(name, program) for name, value in sorted(equation.params.items()) for program in programs(value)]


def programs(value: Any) -> Iterator[Program]:
    """Yields the programs in an equation's parameter: the value itself, or items of tuples and lists."""
    if isinstance(value, (core.ClosedJaxpr, core.Jaxpr)):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from programs(item)


def walk(program: Program) -> Iterator[core.JaxprEqn]:
    """Yields every equation of a program, and of the programs inside of it.

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x))(1.0)
    >>> {"sin", "cos", "gt"} <= {equation.primitive.name for equation in walk(program)}
    True
    """
    for equation in jaxpr_and_constants(program)[0].eqns:
        yield equation
        for _, inner in inner_programs(equation):
            yield from walk(inner)


def needed(program: Program) -> list[core.JaxprEqn]:
    """Returns the equations of a program that its results or its effects need, in their order.

    Args:
      program: whose equations are looked at; those of inner programs are not.

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(lambda x: (jnp.sin(x), jnp.cos(x))[0])(1.0)
    >>> [equation.primitive.name for equation in needed(program)]
    ['sin']
    """
    jaxpr, _ = jaxpr_and_constants(program)
    read = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    equations = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not read.isdisjoint(equation.outvars):
            equations.append(equation)
            read |= {atom for atom in equation.invars if not isinstance(atom, core.Literal)}
    return equations[::-1]


def scan_arguments(params: dict) -> tuple[int, int]:
    """Returns (the number of constants, the number of carried values) among the operands of a `scan`.

    The operands are first the constants, then the carried values, then the arrays whose rows are scanned.

    Args:
      params: the parameters of the scan's equation.

    >>> import jax, jax.numpy as jnp
    >>> step = lambda carry, x: (carry + 2 * x, x)
    >>> program = jax.make_jaxpr(lambda w, x: jax.lax.scan(lambda s, x: step(s, w * x), w, x))(1.0, jnp.ones(3))
    >>> next(scan_arguments(e.params) for e in program.eqns if e.primitive.name == "scan")
    (1, 1)
    """
    if "ft_in" in params:  # JAX from 0.12
        constants, carried, _ = params["ft_in"].unpack()
        return len(constants), len(carried)
    return params["num_consts"], params["num_carry"]


def evaluate(
    program: Program,
    inputs: Sequence[Any],
    rule: Callable[[core.JaxprEqn, list], Sequence[Any]],
    *,
    constants: Sequence[Any] | None = None,
    literal: Callable[[core.Literal], Any] = lambda literal: literal.val,
    equations: Sequence[core.JaxprEqn] | None = None,
) -> list[Any]:
    """Evaluates a program equation by equation, and returns a value for each of its outputs.

    Args:
      program: a traced program.
      inputs: a value for each argument of the program.
      rule: (equation, values of its operands) -> a value for each of its results. A rule that computes arrays does so
        inside of `as_traced`, so that source lines and scopes are kept.
      constants: a value for each constant of the program; None takes the program's own constants.
      literal: gives the value of a number that is written in an equation. It is called once for each such number, in
        the order in which equations and outputs read them.
      equations: those to evaluate, in their order; None evaluates all. `needed` gives the fewest.

    Guarantees:
      Every interpreter of the package is this function with a rule (tests/engine/test_jaxpr.py).

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(lambda x: 2 * x + 1)(1.0)
    >>> evaluate(program, [3.0], bind)[0].item()
    7.0
    >>> evaluate(program, [3], lambda equation, operands: [max(operands)], literal=lambda x: float(x.val))
    [3]
    """
    jaxpr, own_constants = jaxpr_and_constants(program)
    values = dict(zip(jaxpr.constvars, own_constants if constants is None else constants, strict=True))
    values |= zip(jaxpr.invars, inputs, strict=True)

    def read(atom: core.Var | core.Literal) -> Any:
        return literal(atom) if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns if equations is None else equations:
        operands = [read(atom) for atom in equation.invars]
        values |= zip(equation.outvars, rule(equation, operands), strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def bind(equation: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation for these operands, as a list. It is the rule that changes nothing."""
    primitive = equation.primitive
    # Some primitives, such as calls with a derivative of their own, take other parameters than their equation states.
    results = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
    return list(results) if primitive.multiple_results else [results]


def traced_once(function: Callable, *specs: PyTree) -> tuple[Callable, PyTree]:
    """Traces a function, so that its Python code runs no more, wherever it is called.

    `jax.jit` keeps a trace too, but makes another one where the trace's context is another, such as inside of
    `jax.shard_map`.

    Args:
      function: pytrees -> pytree.
      specs: arrays, or shapes with a dtype, of each argument.

    Returns: (a function of the same arguments, the shapes and dtypes of what it returns).

    >>> import jax.numpy as jnp
    >>> doubled, spec = traced_once(lambda x: {"twice": 2 * x}, jax.ShapeDtypeStruct((3,), jnp.float32))
    >>> doubled(jnp.arange(3.0))["twice"].tolist(), spec["twice"].shape
    ([0.0, 2.0, 4.0], (3,))
    """
    program, spec = jax.make_jaxpr(function, return_shape=True)(*specs)
    run = core.jaxpr_as_fun(program)
    structure = jax.tree.structure(spec)
    return lambda *arguments: jax.tree.unflatten(structure, run(*jax.tree.leaves(arguments))), spec


@contextlib.contextmanager
def as_traced(equation: core.JaxprEqn) -> Iterator[None]:
    """Restores the context in which an equation was traced.

    Operations that are traced inside the block get the equation's settings, its source line and its `jax.named_scope`s.
    These scopes stand inside of the scopes around the block. So profiles of a rewritten program point into the user's
    code.

    Args:
      equation: of a traced program.

    Guarantees:
      A scope of the user's loss stands in the compiled round (tests/laws/test_scopes.py).

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(jax.named_scope("layer")(jnp.sin))(1.0).jaxpr
    >>> def again(x):
    ...     with as_traced(program.eqns[0]):
    ...         return jnp.cos(x)
    >>> str(jax.make_jaxpr(again)(1.0).eqns[0].source_info.name_stack)
    'layer'
    """
    source = equation.source_info
    # The equation's own scopes are the inner ones.
    scopes = source_info_util.current_name_stack() + source.name_stack
    with equation.ctx.manager, source_info_util.user_context(source.traceback, name_stack=scopes):
        yield
