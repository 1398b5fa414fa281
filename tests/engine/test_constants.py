"""Large constants of programs become arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from fedjax_sim import engine
from fedjax_sim.engine import constants
from fedjax_sim.engine.jaxpr import jaxpr_and_constants, walk

LARGE = np.random.default_rng(0).normal(size=(2, 128, 128)).astype(np.float32) / 16
SMALL = np.arange(4.0, dtype=np.float32)
A, B = jnp.asarray(LARGE)


@jax.jit
def inner(x):
    return jnp.tanh(x @ A)


@jax.custom_vjp
def doubled(x):
    return 2 * inner(x)


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2 * g,))


def scanned(x):
    return jax.lax.scan(lambda carry, row: (inner(carry) + row, carry.sum()), x, jnp.stack([x, 2 * x]))


def counted(x):
    test = lambda carry: (carry[0] < 3) & ((carry[1] @ B).sum() < 1e9)  # noqa: E731
    return jax.lax.while_loop(test, lambda carry: (carry[0] + 1, inner(carry[1])), (0, x))[1]


def sharded(x):
    mesh = engine.device_mesh(2)
    split = PartitionSpec(mesh.axis_names[0])
    return jax.shard_map(lambda x: inner(x) @ B, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)(x)


PROGRAMS = {
    "call": inner,
    "scan": scanned,
    "while": counted,
    "cond": lambda x: jax.lax.cond(x.sum() > 0, inner, lambda x: x @ B, x),
    "derivative": jax.grad(lambda x: (inner(inner(x)) @ B).sum()),
    "own derivative": doubled,
    "vmap": jax.vmap(lambda x: inner(x[None])),
    "devices": sharded,
}


def held(program):
    """The large constants of a program, wherever they are."""
    inside = [inner for equation in walk(program) for inner in equation.params.values() if hasattr(inner, "consts")]
    return [x for each in (program, *inside) for x in jaxpr_and_constants(each)[1] if constants._is_large(x)]


@pytest.mark.default_rows(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_constants_are_found_wherever_they_are(name):
    """Catches a constant that stays in a loop, a branch, a call or a device's program, and results that change."""
    function = PROGRAMS[name]
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 128)), jnp.float32)
    program, spec = jax.make_jaxpr(function, return_shape=True)(x)
    assert held(program)
    arrays, run = constants.constants_as_arguments(program)
    assert 1 <= len(arrays) <= 2 and not held(jax.make_jaxpr(run)(arrays, [x]))
    results = jax.tree.unflatten(jax.tree.structure(spec), jax.jit(run)(arrays, [x]))
    jax.tree.map(np.testing.assert_array_equal, results, jax.jit(function)(x))
    changed = jax.tree.leaves(jax.jit(run)([2 * array for array in arrays], [x]))
    assert not np.array_equal(changed[0], jax.tree.leaves(results)[0])


def test_large_arrays_are_in_no_program():
    """Catches small constants that XLA would no longer know, and a second trace of the same shapes."""
    traces = []

    def function(x):
        traces.append(x.shape)
        return {"y": inner(x) * SMALL.sum()}

    call = engine.jit(function)
    x = jnp.ones((3, 128))
    np.testing.assert_array_equal(call(x)["y"], jax.jit(lambda x: inner(x) * SMALL.sum())(x))
    call(x + 1)
    assert traces == [(3, 128)]
    arrays, _ = constants.constants_as_arguments(jax.make_jaxpr(function)(x))
    assert len(arrays) == 1 and arrays[0] is A
    assert constants.constants_as_arguments(jax.make_jaxpr(lambda x: x + SMALL)(SMALL))[0] == []


@pytest.mark.parametrize("function", [lambda x: x + 1, inner], ids=["without constants", "with constants"])
def test_a_lowered_program_is_that_of_a_call(function):
    """Catches a call that compiles what was compiled before it."""
    compiled = []
    listener = lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    call = engine.jit(lambda x: function(x))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    x = jax.device_put(np.ones((3, 128), np.float32), place)
    call.lower(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)).compile()
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        y = call(x)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not compiled
    np.testing.assert_array_equal(y, jax.jit(function)(x))
