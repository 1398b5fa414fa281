"""Floats that a sweep makes arguments give the bits that they give as literals; the others stay literals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_sim.sweeps import traced_hyperparameters

pytestmark = pytest.mark.optimised

VALUES = (0.3, 7.0, 0.9, 2.0, 1.0, 0.0)
OPERATIONS = {
    "two products": lambda x, y, a: (x * a) * 0.7,
    "product, ratio": lambda x, y, a: (x / a) / 0.7,
    "across programs": lambda x, y, a: jax.jit(lambda x: x * a)(x)[None].T * 0.7,
    "one turn": lambda x, y, a: lax.fori_loop(0, 1, lambda i, c: c * a, x) * 0.7,
    "in turns": lambda x, y, a: lax.fori_loop(0, 5, lambda i, c: c * a * 0.7, x),
    "two ratios": lambda x, y, a: 0.7 / (a / x),
    "ratio of a ratio": lambda x, y, a: x / (a / y) * 0.7,
    "two sums": lambda x, y, a: (a - x) + 0.7,
    "neutral product": lambda x, y, a: a * x + 0.7 * y,
    "neutral behind": lambda x, y, a: (x + 0.7) * a + 0.3,
    "neutral sum": lambda x, y, a: x / (a + jnp.sqrt(y)),
    "power": lambda x, y, a: lax.pow(x, jnp.full_like(x, a)),
    "exponential": lambda x, y, a: lax.exp(jnp.full_like(x, a)) * y,
    "error function": lambda x, y, a: x * lax.erf(jnp.full((), a, x.dtype)),
    "worked out": lambda x, y, a: x * (jnp.full((), a, x.dtype) * 0.7 + 0.3),
    "worked out, product": lambda x, y, a: x * (1 - jnp.full((), a, x.dtype)) * 0.7,
    "clipped": lambda x, y, a: x * jnp.minimum(1.0, a / jnp.sqrt(jnp.sum(x * x))),
    "step": lambda x, y, a: x - a * y,
}
SHARED = ("clipped", "step")  # one program for all but 0 and 1


@pytest.mark.default_rows(
    "two products", "ratio of a ratio", "in turns", "two sums", "neutral sum", "power", "worked out", *SHARED
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_lifted_keeps_its_bits(name):
    """Catches what XLA rounds otherwise where it knows an operand, and what is needlessly kept apart."""
    function = OPERATIONS[name]
    x, y = (jnp.asarray(row, jnp.float32) for row in np.random.default_rng(0).lognormal(size=(2, 501)))
    kinds: dict = {}
    for a in VALUES:
        traced, _ = traced_hyperparameters.traced_program(lambda x, y, a=a: function(x, y, a), x, y)
        kinds.setdefault(traced.kind, []).append((a, traced))
    for members in kinds.values():
        first, floats = members[0][1], traced_hyperparameters.lifted([traced for _, traced in members])
        again = jax.jit(lambda own, x, y, first=first: traced_hyperparameters.replay(first, own, x, y))
        for i, (a, _) in enumerate(members):
            found = again([None if column is None else column[i] for column in floats], x, y)
            np.testing.assert_array_equal(found, jax.jit(lambda x, y, a=a: function(x, y, a))(x, y))
    if name in SHARED:
        assert max(map(len, kinds.values())) >= 4
