"""Ghost norms: `products` finds the dense kernels whose per-example gradients need not be formed.

An example that uses a kernel W once, in one product x W, gives it the gradient x (outer) delta, where delta is the
gradient at the product. So |gradient| = |x| |delta|, and a weighted sum over examples is a single matmul of two batches
of vectors. Kernels are found in the traced program of the loss, so a model may be written in any way. A kernel is left
out if it is multiplied by several vectors (a recurrence, a convolution), used twice (tied weights, a penalty) or used
inside a loop.

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


class Product(NamedTuple):
    """The one product in which a kernel is used."""

    axis: int  # the kernel's axis that is contracted with the vector; the other axis is the product's
    tap: jax.ShapeDtypeStruct  # a flat array of this shape is added to the product: the gradient at that array is delta


class _Kernel:
    """A placeholder for a kernel's value while a program is run; it records how the kernel is used."""

    def __init__(self, value: Array, tap: Array | None = None):
        self.value = value
        self.tap = tap
        self.uses: list[tuple[Product, Array] | None] = []  # None: any use other than a product with one vector

    @property
    def only_use(self) -> tuple[Product, Array] | None:
        """Its one product with one vector; None where it has another use, or several."""
        return self.uses[0] if len(self.uses) == 1 else None


def products(function: Callable, leaves: Sequence[Array], *args: Any) -> tuple[dict[int, Product], Callable]:
    """Finds the kernels that `function(leaves, *args)` uses in one product with one vector, and nowhere else.

    Args:
      function: of pytrees of arrays, to a pytree of arrays.
      leaves: parameters; kernels are the leaves with two axes, of at most 32 bits.
      args: further arguments of the function.

    Returns: ({position among the leaves: `Product`}, tapped), where `tapped(leaves, taps, *args)` is the function with
    the arrays `taps` ({position: array}) added to these products. It returns (the function's result, {position: the
    vector of the product}).

    Guarantees: values and gradients are the function's own, for dense layers, models with other layers beside them, and
    kernels that are tied, penalised or met by several vectors (tests/client/test_ghost.py::test_sums_agree,
    ::test_what_is_no_dense_kernel).

    >>> import jax.numpy as jnp
    >>> kernels, tapped = products(lambda w, x: (x @ w[0]).sum() + w[1], [jnp.ones((3, 2)), jnp.ones(())], jnp.ones(3))
    >>> {i: (product.axis, product.tap.shape) for i, product in kernels.items()}
    {0: (0, (2,))}
    >>> out, vectors = tapped([jnp.ones((3, 2)), jnp.ones(())], {0: jnp.ones(2)}, jnp.ones(3))
    >>> float(out), vectors[0].tolist()
    (9.0, [1.0, 1.0, 1.0])
    """
    program, result_shape = jax.make_jaxpr(function, return_shape=True)(leaves, *args)
    kernel_products: dict[int, Product] = {}

    def find_kernels(leaves, *args):
        # Every leaf is tried as a kernel: a placeholder records how the program uses it.
        kernels = [_Kernel(x) for x in leaves]
        results = _run(program, [*kernels, *jax.tree.leaves(args)])
        for i, kernel in enumerate(kernels):
            if (use := kernel.only_use) is not None:
                kernel_products[i] = use[0]
        return results

    jax.eval_shape(find_kernels, list(leaves), *args)  # nothing is computed

    def tapped(leaves, taps, *args):
        kernels = {i: _Kernel(leaves[i], taps[i]) for i in kernel_products}
        tapped_leaves = [kernels.get(i, x) for i, x in enumerate(leaves)]
        results = _run(program, [*tapped_leaves, *jax.tree.leaves(args)])
        vectors = {i: use[1] for i, kernel in kernels.items() if (use := kernel.only_use) is not None}
        return jax.tree.unflatten(jax.tree.structure(result_shape), results), vectors

    return kernel_products, tapped


def _run(program: Program, inputs: Sequence[Any]) -> list[Array]:
    """Runs the program equation by equation; calls that take a kernel are inlined."""

    def rule(equation: core.JaxprEqn, operands: list[Any]) -> list[Array]:
        takes_kernel = any(isinstance(x, _Kernel) for x in operands)
        with as_traced(equation):
            if equation.primitive.name in ("jit", "pjit") and takes_kernel:
                return _run(equation.params["jaxpr"], operands)
            return _run_equation(equation, operands)

    return _other_use(evaluate(program, inputs, rule))


def _run_equation(equation: core.JaxprEqn, values: list[Any]) -> list[Array]:
    """Runs one equation, and records how it uses the kernels among its operands.

    Of a product of a kernel W [i, o] and a vector x, x W or W x, it records the `Product` and x, [i] or [o]. A kernel's
    tap, if it has one, is added to the product. Any other use is recorded as None.

    Args:
      equation: of a traced program.
      values: its operands, arrays or `_Kernel`; an equation that takes no kernel is run as it is.

    Returns: the equation's results, arrays.
    """
    operands = [x.value if isinstance(x, _Kernel) else x for x in values]
    results = bind(equation, operands)
    # A dense product has a kernel on exactly one of its two sides.
    is_product = equation.primitive.name == "dot_general"
    if not is_product or isinstance(values[0], _Kernel) == isinstance(values[1], _Kernel):
        _other_use(values)
        return results
    side = int(isinstance(values[1], _Kernel))
    kernel = values[side]
    vector = operands[1 - side]
    product = results[0]
    contracted, batch = equation.params["dimension_numbers"]
    axes = contracted[side]
    is_narrow = jnp.issubdtype(product.dtype, jnp.floating) and product.dtype.itemsize <= 4
    # The other operand is one vector if it has no more numbers than the contracted axis.
    if (
        any(batch)
        or kernel.value.ndim != 2
        or len(axes) != 1
        or vector.size != kernel.value.shape[axes[0]]
        or not is_narrow
    ):
        kernel.uses.append(None)
        return results
    tap = jax.ShapeDtypeStruct((product.size,), product.dtype)
    kernel.uses.append((Product(axes[0], tap), vector.reshape(-1)))
    return results if kernel.tap is None else [product + kernel.tap.reshape(product.shape)]


def _other_use(values: Sequence[Any]) -> list[Array]:
    """The values as arrays. A kernel among them is recorded as used otherwise than in a product with one vector."""
    for x in values:
        if isinstance(x, _Kernel):
            x.uses.append(None)
    return [x.value if isinstance(x, _Kernel) else x for x in values]
