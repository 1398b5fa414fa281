"""The evaluator of traced programs: its outputs are the program's, whatever is inside of it."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.engine.jaxpr import as_traced, bind, evaluate, inner_programs, jaxpr_and_constants, scan_arguments, walk


def everything(x):
    """Each kind of equation that holds programs, a constant, and literals."""
    weights = jnp.asarray(np.arange(3.0, dtype=np.float32))
    total, rows = jax.lax.scan(lambda carry, row: (carry + 2 * row, row * weights.sum()), x.sum(), x)
    doubled = jax.lax.while_loop(lambda carry: carry < 100, lambda carry: 2 * carry, jnp.abs(total) + 1)
    chosen = jax.lax.cond(total > 0, jnp.sin, jax.nn.relu, doubled)
    return jax.jit(lambda a, b: a * b + 1)(chosen, rows), jax.lax.top_k(x, 2)


def test_a_program_is_evaluated_as_it_runs():
    """Catches a literal, a constant, a result or an operand at the wrong place."""
    x = np.linspace(-1, 2, 3, dtype=np.float32)
    program = jax.make_jaxpr(everything)(x)
    again = evaluate(program, [jnp.asarray(x)], bind)
    for value, expected in zip(again, jax.tree.leaves(everything(x)), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_constants_and_literals_may_be_others():
    """Catches a constant that is read from the program although another one is given, and a literal read twice."""
    program = jax.make_jaxpr(lambda x: x * jnp.asarray(np.float32([1, 2])) + np.float32(3))(jnp.zeros(2))
    literals = iter(np.float32([5]))
    constants = [10 * np.asarray(x) for x in jaxpr_and_constants(program)[1]]
    (value,) = evaluate(program, [jnp.ones(2)], bind, constants=constants, literal=lambda _: next(literals))
    assert constants and list(literals) == []
    np.testing.assert_array_equal(value, [15, 25])


def test_facts_pass_through_as_arrays_do():
    """The rule decides what a value is: here, which arguments it depends on."""
    program = jax.make_jaxpr(lambda a, b, c: (a + b, c * 2, jnp.sin(b)))(1.0, 2.0, 3.0)

    def depends(equation, operands):
        return [frozenset().union(*operands)] * len(equation.outvars)

    found = evaluate(program, [frozenset("a"), frozenset("b"), frozenset("c")], depends, literal=lambda _: frozenset())
    assert list(map("".join, map(sorted, found))) == ["ab", "c", "b"]


def test_walk_reaches_every_program():
    """Catches a branch, a loop's test or a call that is passed over."""
    names = [equation.primitive.name for equation in walk(jax.make_jaxpr(everything)(jnp.ones(3)))]
    assert {"scan", "while", "cond", "lt", "sin", "max", "top_k"} <= set(names)
    loop = next(e for e in walk(jax.make_jaxpr(everything)(jnp.ones(3))) if e.primitive.name == "scan")
    assert scan_arguments(loop.params) == (1, 1) and [name for name, _ in inner_programs(loop)] == ["jaxpr"]


def test_an_equation_keeps_its_line_and_scopes():
    """Catches a rewritten program whose profile names the rewriter."""

    def named(x):
        with jax.named_scope("own"):
            return jnp.sin(x)

    program = jax.make_jaxpr(named)(1.0)

    def within(equation, operands):
        with as_traced(equation):
            return bind(equation, operands)

    again = jax.make_jaxpr(lambda x: evaluate(program, [x], within))(1.0)
    old, new = program.jaxpr.eqns[0].source_info, again.jaxpr.eqns[0].source_info
    assert str(new.name_stack) == str(old.name_stack) == "own" and new.traceback is old.traceback
