"""Traced programs: what those that evaluate one equation by equation share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jax.extend import core, source_info_util

__all__ = ["as_traced"]


@contextlib.contextmanager
def as_traced(equation: core.JaxprEqn) -> Iterator[None]:
    """The context in which an equation was traced: what is computed here has its settings, its source line and its
    `jax.named_scope`s, inside of those around it.

    Guarantees: a scope of the user's loss stands in the compiled round (tests/laws/test_scopes.py).

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(jax.named_scope("layer")(jnp.sin))(1.0).jaxpr
    >>> def again(x):
    ...     with as_traced(program.eqns[0]):
    ...         return jnp.cos(x)
    >>> str(jax.make_jaxpr(again)(1.0).eqns[0].source_info.name_stack)
    'layer'
    """
    source = equation.source_info
    scopes = source_info_util.current_name_stack() + source.name_stack
    with equation.ctx.manager, source_info_util.user_context(source.traceback, name_stack=scopes):
        yield
