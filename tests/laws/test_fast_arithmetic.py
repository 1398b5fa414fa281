"""Fast arithmetic changes rounding and nothing else, in every row; JAX does not mix programs of both arithmetics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine
from fedjax_sim.engine.jaxpr import walk
from tests.laws import cases, device_rows, problems as p, test_platforms

KEY = jax.random.key(3)
ROWS = [(kind, name) for kind in ("algorithms", "transform", "aggregation") for name in test_platforms.rows(kind)]
DEFAULT = ("fedasync", "quantize", "by_part")


def after_two_rounds(made, data):
    """Model and infos."""
    state = made.init(KEY, jnp.array(p.START), data)
    step, infos = jax.jit(made.step), []
    for i in range(2):
        state, info = step(jax.random.fold_in(KEY, i), state, data)
        infos.append(info)
    return jax.device_get((made.params(state), infos))


@pytest.mark.full
@pytest.mark.default_rows(*DEFAULT)
@pytest.mark.parametrize("kind, name", ROWS)
def test_fast_arithmetic_changes_no_more_than_rounding(kind, name):
    """Catches a sum, a barrier or a weight that is left out, and a draw that follows the arithmetic."""
    made, data = test_platforms.algorithm(kind, name), p.ragged()
    expected = after_two_rounds(made, data)
    with engine.fast_arithmetic():
        found = after_two_rounds(made, data)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        if jnp.issubdtype(np.asarray(x).dtype, jnp.integer):
            np.testing.assert_array_equal(x, y)
        else:
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def carries_of_exact_sums(made, data) -> int:
    """How often a round shifts integers with their sign, as exact sums do to move carries."""
    state = jax.eval_shape(lambda: made.init(KEY, jnp.array(p.START), data))
    program = jax.make_jaxpr(made.step)(KEY, state, data)
    return sum(equation.primitive.name == "shift_right_arithmetic" for equation in walk(program))


def test_programs_of_both_arithmetics_are_not_mixed():
    """Catches functions inside of a round that JAX has traced in one arithmetic and takes for the other."""
    made, data = cases.CASES["algorithms"]["fedavg"](), p.ragged()
    reproducible = carries_of_exact_sums(made, data)
    with engine.fast_arithmetic():
        fast = carries_of_exact_sums(made, data)
    assert carries_of_exact_sums(made, data) == reproducible > 4 * fast


@pytest.mark.full
def test_two_devices():
    """Catches float sums that are not added over devices."""

    def model(num_devices):
        cases.RUN.update(mesh=engine.device_mesh(num_devices) if num_devices > 1 else None)
        made = device_rows.star()
        return after_two_rounds(made, p.ragged())

    before = dict(cases.RUN)
    try:
        with engine.fast_arithmetic():
            one, two = model(1), model(2)
    finally:
        cases.RUN.clear()
        cases.RUN.update(before)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), one[0], two[0])
