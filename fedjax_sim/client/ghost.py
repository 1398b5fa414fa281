"""Ghost norms: the factors of an example's gradient with respect to a dense kernel, without forming that gradient.

A kernel W that an example uses once, in one product x W, has the gradient x (outer) delta, delta being the gradient
of the product. So |gradient| = |x| |delta|, and a weighted sum over examples is a single matmul of two batches of
vectors. Kernels are found in the traced program of the loss, so a model may be written in any way. A kernel that is
multiplied by several vectors (a recurrence, a convolution), used twice (tied weights, a penalty) or used inside a loop
is left out.

References: Goodfellow 2015; Li et al. 2022, section 4; Bu et al. 2022 (layers with and without, side by side).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from fedjax_sim.engine.jaxpr import Program, as_traced, bind, evaluate
from fedjax_sim.types import Array

__all__ = ["Product", "products"]


class Product(NamedTuple):
    """The one product in which a kernel is used."""

    axis: int  # the kernel's axis that is contracted with the vector; the other one is the product's
    tap: jax.ShapeDtypeStruct  # of a flat array that is added to the product: the gradient at this array is delta


class _Kernel:
    """A placeholder for a kernel's value while a program is run; it records how the kernel is used."""

    def __init__(self, value: Array, tap: Array | None = None):
        self.value, self.tap = value, tap
        self.uses: list[tuple[Product, Array] | None] = []  # None: any use other than a product with one vector


def products(function: Callable, leaves: Sequence[Array], *args: Any) -> tuple[dict[int, Product], Callable]:
    """The kernels among `leaves` that `function(leaves, *args)` uses in one product with one vector, and nowhere else.

    Args:
      function: of pytrees of arrays, to a pytree of arrays.
      leaves: parameters; kernels are those with two axes, of at most 32 bits.
      args: further arguments of the function.

    Returns: position -> `Product`, and `tapped(leaves, taps, *args)`: what the function returns with the arrays `taps`
    (position -> array) added to these products, and the vector of each product (position -> array).

    Guarantees: values and gradients are the function's own, for dense layers, models with other layers beside them, and
    kernels that are tied, penalised or met by several vectors (tests/client/test_ghost.py::test_sums_agree,
    ::test_what_is_no_dense_kernel).

    >>> import jax.numpy as jnp
    >>> found, tapped = products(lambda w, x: (x @ w[0]).sum() + w[1], [jnp.ones((3, 2)), jnp.ones(())], jnp.ones(3))
    >>> {i: (product.axis, product.tap.shape) for i, product in found.items()}
    {0: (0, (2,))}
    >>> out, vectors = tapped([jnp.ones((3, 2)), jnp.ones(())], {0: jnp.ones(2)}, jnp.ones(3))
    >>> float(out), vectors[0].tolist()
    (9.0, [1.0, 1.0, 1.0])
    """
    program, shape = jax.make_jaxpr(function, return_shape=True)(leaves, *args)
    found: dict[int, Product] = {}

    def look(leaves, *args):
        kernels = [_Kernel(x) for x in leaves]
        out = _run(program, [*kernels, *jax.tree.leaves(args)])
        for i, kernel in enumerate(kernels):
            if len(kernel.uses) == 1 and kernel.uses[0] is not None:
                found[i] = kernel.uses[0][0]
        return out

    jax.eval_shape(look, list(leaves), *args)

    def tapped(leaves, taps, *args):
        given = [_Kernel(x, taps[i]) if i in found else x for i, x in enumerate(leaves)]
        out = _run(program, [*given, *jax.tree.leaves(args)])
        return jax.tree.unflatten(jax.tree.structure(shape), out), {i: given[i].uses[0][1] for i in found}

    return found, tapped


def _run(program: Program, inputs: Sequence[Any]) -> list[Array]:
    """Runs the program equation by equation; calls that take a kernel are inlined."""

    def rule(equation: core.JaxprEqn, operands: list[Any]) -> list[Array]:
        takes_kernel = any(isinstance(x, _Kernel) for x in operands)
        with as_traced(equation):
            if equation.primitive.name in ("jit", "pjit") and takes_kernel:
                return _run(equation.params["jaxpr"], operands)
            return _step(equation, operands)

    return _plain(evaluate(program, inputs, rule))


def _step(equation: core.JaxprEqn, values: list[Any]) -> list[Array]:
    plain = [x.value if isinstance(x, _Kernel) else x for x in values]
    out = bind(equation, plain)
    if equation.primitive.name != "dot_general" or isinstance(values[0], _Kernel) == isinstance(values[1], _Kernel):
        _plain(values)
        return out
    side = int(isinstance(values[1], _Kernel))
    kernel, vector, product = values[side], plain[1 - side], out[0]
    contracted, batch = equation.params["dimension_numbers"]
    axes, narrow = contracted[side], jnp.issubdtype(product.dtype, jnp.floating) and product.dtype.itemsize <= 4
    if (
        any(batch)
        or kernel.value.ndim != 2
        or len(axes) != 1
        or vector.size != kernel.value.shape[axes[0]]
        or not narrow
    ):
        kernel.uses.append(None)
        return out
    tap = jax.ShapeDtypeStruct((product.size,), product.dtype)
    kernel.uses.append((Product(axes[0], tap), vector.reshape(-1)))
    return out if kernel.tap is None else [product + kernel.tap.reshape(product.shape)]


def _plain(values: Sequence[Any]) -> list[Array]:
    """The values; for kernels among them, a use other than a product with one vector is recorded."""
    for x in values:
        if isinstance(x, _Kernel):
            x.uses.append(None)
    return [x.value if isinstance(x, _Kernel) else x for x in values]
