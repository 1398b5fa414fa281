"""Calls of Python from inside of a compiled program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.engine.client_memory.host_calls import on_host

SPECS = [jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)]


def twice(calls):
    """A function that fills out with twice a row, and with a number plus how often it was called."""

    def function(out, row, number):
        calls.append(int(number))
        out[0][...] = 2 * row
        out[1][...] = number + len(calls)

    return function


def test_it_is_called_once_for_each_turn():
    """Catches a call that is dropped, cached, or made again; results that are another turn's."""
    calls = []

    @jax.jit
    def run(row):
        def turn(i, carry):
            row, last = carry
            row, number = on_host(twice(calls), SPECS, row, 10 * i)
            return row, last + number

        return jax.lax.fori_loop(0, 4, turn, (row, jnp.int32(0)))

    row, total = jax.device_get(run(jnp.array([1.0, -2.0, 0.5])))
    assert calls == [0, 10, 20, 30] and total == sum(calls) + 1 + 2 + 3 + 4
    np.testing.assert_array_equal(row, [16, -32, 8])


def test_results_that_nobody_reads():
    """Catches a call that the compiler removes: what it does beside its results would not happen."""
    calls = []
    jax.block_until_ready(jax.jit(lambda x: (on_host(twice(calls), SPECS, x, jnp.int32(5)), x)[1])(jnp.zeros(3)))
    jax.effects_barrier()
    assert calls == [5]


def test_large_arguments():
    """A megabyte, which JAX's own callbacks copy first. Catches values that are cut or out of order."""
    x = np.arange(1 << 18, dtype=np.float32)
    found = []
    (total,) = jax.jit(lambda x: on_host(lambda out, x: (found.append(x.copy()), out[0].fill(x[-1])), SPECS[:1], x))(x)
    assert (np.asarray(total) == x[-1]).all()  # waits for the call
    np.testing.assert_array_equal(found[0], x)


def test_it_may_be_vmapped_in_turn():
    """Once a row; refused without saying so. Catches a batch that reaches a function made for one row."""
    calls, rows = [], jnp.arange(6.0).reshape(2, 3)
    call = lambda row, i: on_host(twice(calls), SPECS, row, i, vmap_method="sequential")  # noqa: E731
    doubled, _ = jax.jit(jax.vmap(call))(rows, jnp.arange(2, dtype=jnp.int32))
    np.testing.assert_array_equal(doubled, 2 * np.asarray(rows))
    assert sorted(calls) == [0, 1]
    with pytest.raises(NotImplementedError):
        jax.vmap(lambda row: on_host(twice(calls), SPECS, row, jnp.int32(0)))(rows)
